"""Scoring: every token once, with enough before it, whatever the batching; equal to a naive loop over tokens."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import reference
import torch
from numpy.typing import NDArray
from variants import CONTEXT, VARIANTS, VOCAB, make_model

from minigpt.config import ModelConfig
from minigpt.inference import scoring
from minigpt.inference.scoring import score, windows


class Text:
    """Token ids that remember which were read."""

    def __init__(self, length: int) -> None:
        self.ids = np.random.default_rng(0).integers(0, VOCAB, length)
        self.ids.flags.writeable = False  # as memory-mapped ones may be
        self.most = 0

    def read(self, start: int, stop: int) -> NDArray[np.int64]:
        assert 0 <= start < stop <= len(self.ids)
        self.most = max(self.most, stop - start)
        return self.ids[start:stop]


@pytest.mark.parametrize("context", [1, 2, 3, 7, 8, 16])
@pytest.mark.parametrize("length", [*range(12), 15, 16, 17, 18, 31, 32, 33, 34, 100])
def test_each_target_counts_once_and_has_half_a_context_before_it(length: int, context: int) -> None:
    found = list(windows(length, context))
    counted = [target for _, end, first in found for target in range(first, end + 1)]
    assert counted == list(range(1, length))
    for start, end, first in found:
        assert 0 <= start < first <= end <= length - 1
        assert end - start <= context
        assert first - start >= min(first, (context + 1) // 2)  # what lies before the first target that counts
    for (start, *_), (following, *_) in pairwise(found):
        assert following > start


@pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize("length", [2, CONTEXT + 1, 33])
def test_scores_equal_a_naive_loop(config: ModelConfig, length: int) -> None:
    model, text = make_model(config), Text(length)
    weights = reference.weights_of(model)
    expected = np.zeros(length - 1)
    for start, end, first in windows(length, CONTEXT):
        logits = reference.logits(weights, config, text.ids[start:end].tolist())
        for target in range(first, end + 1):
            shares = reference.softmax(logits[target - 1 - start].tolist())
            expected[target - 1] = -np.log(shares[text.ids[target]])
    found = score(model, text.read, length)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
    assert text.most <= CONTEXT + 1


@pytest.mark.parametrize("batch_tokens", [1, CONTEXT, 3 * CONTEXT + 1, 10_000])
def test_scores_do_not_depend_on_the_batching(batch_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, text = make_model(VARIANTS["qwen3"]), Text(137)
    expected = score(model, text.read, 137)
    monkeypatch.setattr(scoring, "BATCH_TOKENS", batch_tokens)
    np.testing.assert_allclose(score(model, text.read, 137), expected, rtol=1e-5, atol=1e-5)
    assert (expected > 0).all()


@pytest.mark.parametrize("length", [0, 1])
def test_nothing_to_score(length: int) -> None:
    assert score(make_model(VARIANTS["qwen3"]), Text(length).read, length).shape == (0,)


@pytest.mark.parametrize("training", [True, False])
def test_dropout_is_off_and_training_mode_comes_back(training: bool) -> None:
    text = Text(40)
    expected = score(make_model(VARIANTS["qwen3"]), text.read, 40)
    model = make_model(replace(VARIANTS["qwen3"], dropout=0.5)).train(training)
    np.testing.assert_array_equal(score(model, text.read, 40), expected)
    assert model.training is training
    assert torch.is_grad_enabled()


def test_training_mode_comes_back_after_an_error() -> None:
    def broken(start: int, stop: int) -> NDArray[np.int64]:
        raise OSError("gone")

    model = make_model(VARIANTS["qwen3"]).train()
    with pytest.raises(OSError, match="gone"):
        score(model, broken, 40)
    assert model.training


def test_windows_of_a_model_that_reaches_far_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    model, text = make_model(VARIANTS["qwen3"]), Text(40)
    whole = score(model, text.read, 40)
    monkeypatch.setattr(scoring, "LONGEST_WINDOW", 8)
    text.most = 0
    found = score(model, text.read, 40)
    assert text.most == 8 + 1
    assert np.allclose(found[:4], whole[:4], rtol=0, atol=1e-5)
    assert not np.allclose(found, whole, rtol=0, atol=1e-3)
