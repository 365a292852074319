"""Watch a run for the usual collapses, and say them in words: each once, with what helps."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

WINDOW = 10  # steps that are looked at together
LONGER, ENDED = 2.0, 0.5  # answers so many times as long as at first, of which fewer than this share end
FLAT, SURE = 0.2, 0.3  # entropy below this share of what it was, and below so many nats a token
EQUAL = 0.8  # groups without any difference


class Watch:
    """What the first steps were like, and the last; `see` takes the figures of a step."""

    def __init__(self, max_kl: float | None = None) -> None:
        self.max_kl = max_kl
        self._first: list[Mapping[str, float]] = []
        self._last: deque[Mapping[str, float]] = deque(maxlen=WINDOW)
        self.said: dict[str, str] = {}

    def see(self, row: Mapping[str, float]) -> list[str]:
        """Take the figures of a step; return what is to be said now."""
        if len(self._first) < WINDOW:
            self._first.append(row)
        self._last.append(row)
        if len(self._last) < WINDOW:
            return []
        found = {name: text for name, text in self._problems().items() if text and name not in self.said}
        self.said |= found
        return list(found.values())

    def text(self) -> str:
        """Say in a line how the last steps were."""
        if not self._last:
            return ""
        return (
            f"reward {self._now('reward'):.3f} ± {self._now('reward_spread'):.2f}, KL {self._now('kl'):.3f}, entropy "
            f"{self._now('entropy'):.2f}, {self._now('answer_tokens'):.0f} tokens, {self._now('ended'):.0%} end"
        )

    def _problems(self) -> dict[str, str]:
        """Every collapse by name: a line where it is happening, else nothing."""
        return {"length": self._length(), "entropy": self._entropy(), "equal": self._equal(), "kl": self._kl()}

    def _length(self) -> str:
        before, now, ended = self._then("answer_tokens"), self._now("answer_tokens"), self._now("ended")
        if now < LONGER * before or ended >= ENDED:
            return ""
        return (
            f"answers grow: {before:.0f} tokens at first, {now:.0f} now, and only {ended:.0%} end by themselves; "
            "the reward may like length: reward an end, or raise --kl"
        )

    def _entropy(self) -> str:
        before, now = self._then("entropy"), self._now("entropy")
        if now >= min(FLAT * before, SURE):
            return ""
        return (
            f"entropy fell from {before:.2f} to {now:.2f} nats a token: the model says nearly the same each time and "
            "finds nothing new; raise --kl or --temperature, or lower --lr"
        )

    def _equal(self) -> str:
        now = self._now("equal_groups")
        if now <= EQUAL:
            return ""
        level = self._now("reward")
        return (
            f"in {now:.0%} of the groups all answers are worth the same ({level:.2f} on the average), and nothing is "
            "learned from them; ask for what the model can do now and then, or give a finer reward or larger groups"
        )

    def _kl(self) -> str:
        now = self._now("kl")
        if self.max_kl is None or now <= self.max_kl:
            return ""
        return (
            f"the model is {now:.3f} nats a token away from where it began, above --max-kl {self.max_kl:g}; "
            "it is not kept as long as it is: raise --kl or lower --lr"
        )

    def _then(self, name: str) -> float:
        return _mean(self._first, name)

    def _now(self, name: str) -> float:
        return _mean(self._last, name)


def _mean(rows: list[Mapping[str, float]] | deque[Mapping[str, float]], name: str) -> float:
    return sum(row[name] for row in rows) / len(rows)
