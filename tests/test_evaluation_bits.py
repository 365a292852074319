"""Bits per byte by hand, and spans that cover a text evenly."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from numpy.typing import NDArray
from variants import CONTEXT, VARIANTS, VOCAB, make_model

from minigpt.errors import DataError
from minigpt.evaluation.bits import Score, score_tokens, spans
from minigpt.inference.scoring import score

IDS = np.random.default_rng(1).integers(0, VOCAB, 2000)
SIZES = np.arange(VOCAB) % 5  # some tokens stand for no bytes
SPAN = 4 * CONTEXT


def read(start: int, stop: int) -> NDArray[np.int64]:
    assert 0 <= start <= stop <= len(IDS)
    return IDS[start:stop]


def test_arithmetic() -> None:
    # 8 tokens of one bit each, for 4 bytes.
    found = Score(nats=8 * math.log(2), tokens=8, bytes=4)
    assert found.loss == pytest.approx(math.log(2))
    assert found.perplexity == pytest.approx(2.0)
    assert found.bits_per_byte == pytest.approx(2.0)


def test_a_hopeless_model_has_a_finite_perplexity() -> None:
    assert math.isfinite(Score(nats=1e6, tokens=1, bytes=1).perplexity)


def test_a_whole_text() -> None:
    model = make_model(VARIANTS["qwen3"])
    found = score_tokens(model, read, 300, SIZES)
    losses = score(model, read, 300)
    assert found.nats == pytest.approx(float(losses.sum(dtype=np.float64)), rel=1e-6)
    assert found.tokens == 299  # the first token is only read
    assert found.bytes == sum(int(SIZES[id]) for id in IDS[1:300])


def test_spans_of_a_long_text_are_scored_each_by_itself() -> None:
    model = make_model(VARIANTS["qwen3"])
    found = score_tokens(model, read, 2000, SIZES, limit=300)
    places = spans(2000, 300, SPAN)
    assert len(places) == 4
    losses = []
    for start, stop in places:
        alone = IDS[start:stop]
        losses.append(score(model, lambda first, last, ids=alone: ids[first:last], len(alone)))  # type: ignore[misc]
    assert found.nats == pytest.approx(sum(float(part.sum(dtype=np.float64)) for part in losses), rel=1e-6)
    assert found.tokens == sum(stop - start - 1 for start, stop in places)
    assert found.bytes == sum(int(SIZES[IDS[start + 1 : stop]].sum()) for start, stop in places)


@pytest.mark.parametrize("length", [0, 1, 5, 64, 128, 129, 200, 257, 1000, 99_999])
@pytest.mark.parametrize("limit", [None, 1, 64, 100, 128, 200, 1000])
def test_spans(length: int, limit: int | None) -> None:
    found = spans(length, limit, SPAN)
    if limit is None or length <= max(limit, 2 * SPAN):
        assert found == [(0, length)]
        return
    assert found[0][0] == 0
    assert found[-1][1] == length
    assert all(stop - start == SPAN for start, stop in found)
    assert all(first[1] <= second[0] for first, second in pairwise(found)), "a token would count twice"
    gaps = {second[0] - first[0] for first, second in pairwise(found)}
    assert max(gaps) - min(gaps) <= 1
    assert sum(stop - start for start, stop in found) <= max(limit, 2 * SPAN)


@pytest.mark.parametrize("length", [0, 1])
def test_too_little_text_is_an_error_for_people(length: int) -> None:
    with pytest.raises(DataError, match=f"{length} tokens; at least 2"):
        score_tokens(make_model(VARIANTS["qwen3"]), read, length, SIZES)


def test_a_text_without_bytes_is_an_error_for_people() -> None:
    with pytest.raises(DataError, match="no bytes"):
        score_tokens(make_model(VARIANTS["qwen3"]), read, 9, np.zeros(VOCAB, np.int64))
