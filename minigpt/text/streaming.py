"""Ids in, text out as it comes: no half characters, and no space that only the tokenizer put there."""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from typing import Protocol


class TokenBytes(Protocol):
    """What is needed of a tokenizer to turn its ids into text."""

    @property
    def strips_leading_space(self) -> bool: ...

    def token_bytes(self, id: int) -> bytes: ...


class StreamDecoder:
    """Ids in, text out: what is pushed, joined, equals the full decode, and half a character is held back.

    With ``continuing`` the ids go on from a text before them, and a space at their start is kept.
    """

    def __init__(self, tokenizer: TokenBytes, *, continuing: bool = False) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._strip_space = tokenizer.strips_leading_space and not continuing

    def push(self, id: int) -> str:
        """Return the text that is complete with this id; it may be empty."""
        return self._emit(self._decoder.decode(self._tokenizer.token_bytes(id)))

    def push_all(self, ids: Iterable[int]) -> str:
        """Return the text that is complete with these ids."""
        return self._emit(self._decoder.decode(b"".join(self._tokenizer.token_bytes(id) for id in ids)))

    def flush(self) -> str:
        """Return what was held back, as U+FFFD, and begin anew."""
        text = self._emit(self._decoder.decode(b"", final=True))
        self._decoder.reset()
        return text

    def _emit(self, text: str) -> str:
        if text and self._strip_space:
            self._strip_space = False
            return text.removeprefix(" ")
        return text
