"""Bits per byte: a loss that does not depend on the tokenizer, so that models can be compared."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from minigpt.errors import DataError
from minigpt.inference.scoring import score
from minigpt.model.transformer import GPT


@dataclass(frozen=True)
class Score:
    """The summed loss of a text in nats, over its tokens and the bytes they stand for."""

    nats: float
    tokens: int
    bytes: int

    @property
    def loss(self) -> float:
        """Nats a token."""
        return self.nats / self.tokens

    @property
    def perplexity(self) -> float:
        """e to the loss."""
        return math.exp(min(self.loss, 700.0))

    @property
    def bits_per_byte(self) -> float:
        """Bits a byte of UTF-8 text."""
        return self.nats / math.log(2) / self.bytes

    @property
    def value(self) -> float:
        """Bits per byte: the lower, the better."""
        return self.bits_per_byte

    @property
    def text(self) -> str:
        """The score for people."""
        return f"{self.bits_per_byte:.3f} bits/byte"

    def row(self) -> dict[str, float]:
        """The score for metrics and records."""
        return {"held_out_loss": self.loss, "bits_per_byte": self.bits_per_byte}


def spans(length: int, limit: int | None, span: int) -> list[tuple[int, int]]:
    """Choose evenly spaced spans of `length` tokens that hold about `limit` in all; everything when it fits."""
    if limit is None or length <= max(limit, 2 * span):
        return [(0, length)]
    count = max(2, limit // span)
    return [(start, start + span) for start in (round(i * (length - span) / (count - 1)) for i in range(count))]


def _shifted(read: Callable[[int, int], NDArray[np.int64]], base: int, start: int, stop: int) -> NDArray[np.int64]:
    return read(base + start, base + stop)


def score_tokens(
    model: GPT,
    read: Callable[[int, int], NDArray[np.int64]],
    length: int,
    byte_lengths: NDArray[np.int64],
    *,
    limit: int | None = None,
) -> Score:
    """Score `length` tokens given by `read(start, stop)`, or evenly spaced spans of about `limit` of them.

    The first token of a span is its context only. Each other token counts once, with the bytes it stands for.
    Too few tokens to score any, or none that stands for text, is a DataError.
    """
    if length < 2:
        raise DataError(f"the text to score has {length} tokens; at least 2 are needed, give more")
    nats, tokens, count = 0.0, 0, 0
    for start, stop in spans(length, limit, 4 * model.config.max_position_embeddings):
        losses = score(model, partial(_shifted, read, start), stop - start)
        nats += float(losses.astype(np.float64).sum())
        tokens += len(losses)
        count += int(byte_lengths[read(start + 1, stop)].sum())
    if not count:
        raise DataError("the text to score has no bytes, only control tokens; give text")
    return Score(nats, tokens, count)
