"""Prompt lookup: text often repeats itself, so what followed its last few tokens before is a guess at what follows.

A guess costs little to check: one forward pass reads several tokens almost as fast as one. Each place is drawn as it
would have been without guesses, with its own number of the row's stream, so the text is the same; a guess that is drawn
saves a pass (Saxena 2023, "Prompt Lookup Decoding"; speculative decoding by Leviathan et al. 2023).
"""

from __future__ import annotations

from collections.abc import Sequence

MOST_GUESSES = 7  # in one pass
LONGEST_MATCH = 3  # tokens that have to be the same for a guess; two where three never were


class Lookup:
    """The tokens of one text so far, and where each of its short runs was last followed by something."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}  # a run of tokens -> the place behind the last one
        self._newest: dict[tuple[int, ...], int] = {}  # runs that end the text; nothing follows them yet
        self._most = MOST_GUESSES
        for token in tokens:
            self.push(token)

    def push(self, token: int) -> None:
        """Add a token to the text."""
        self._after |= self._newest
        self._tokens.append(token)
        end = len(self._tokens)
        lengths = range(2, min(LONGEST_MATCH, end) + 1)
        self._newest = {tuple(self._tokens[end - length :]): end for length in lengths}

    def guess(self, limit: int) -> list[int]:
        """Return what may follow: at most `limit` tokens, none where the end of the text was never there before."""
        for run in reversed(self._newest):
            if run in self._after:
                start = self._after[run]
                return self._tokens[start : start + max(0, min(limit, self._most))]
        return []

    def learn(self, guessed: int, right: int) -> None:
        """Guess more after guesses that were right to the end, and fewer after others."""
        if guessed:
            self._most = min(MOST_GUESSES, 2 * self._most) if right == guessed else right + 1
