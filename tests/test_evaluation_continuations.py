"""Likelihoods of continuations: equal to a naive loop, and the border between context and continuation in its place."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import reference
from tokenizers import Tokenizer as Backend
from variants import CONTEXT, VARIANTS, VOCAB, make_model

from minigpt.config import ModelConfig
from minigpt.evaluation.continuations import Continuation, cut_windows, encode, likelihoods
from minigpt.inference import scoring
from minigpt.model.transformer import GPT
from minigpt.text.tokenizer import Tokenizer

LENGTHS = ((2, 1), (9, 3), (CONTEXT + 1, CONTEXT), (CONTEXT + 1, 1), (40, 38), (40, 40 - CONTEXT), (40, 5), (70, 33))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """One that joins a and b, but neither a and c nor a space and what follows it."""
    return Tokenizer.train(["ab ab ab ab"], 261)


def continuation(length: int, first: int, seed: int = 0) -> Continuation:
    return Continuation(tuple(np.random.default_rng(seed + length).integers(0, VOCAB, length).tolist()), first)


def naive(model: GPT, item: Continuation) -> tuple[float, bool]:
    """Token by token, each from as many tokens before it as its window has."""
    weights, context = reference.weights_of(model), model.config.max_position_embeddings
    total, greedy = 0.0, True
    for start, end, first in cut_windows(item, context):
        logits = reference.logits(weights, model.config, item.ids[start:end])
        for target in range(first, end + 1):
            after = logits[target - 1 - start]
            total += math.log(reference.softmax(after.tolist())[item.ids[target]])
            greedy &= int(after.argmax()) == item.ids[target]
    return total, greedy


@pytest.mark.parametrize(("length", "first"), LENGTHS)
def test_each_token_that_counts_does_so_once_with_the_end_of_the_context_before_it(length: int, first: int) -> None:
    item = continuation(length, first)
    found = list(cut_windows(item, CONTEXT))
    assert [target for _, end, new in found for target in range(new, end + 1)] == list(range(first, length))
    for start, end, new in found:
        assert 0 <= start < new <= end
        assert end - start <= CONTEXT
        assert new - start >= min(new, CONTEXT // 2) or length - first <= CONTEXT
    if length - first <= CONTEXT:
        assert found == [(max(0, length - 1 - CONTEXT), length - 1, first)], "one window, with all that fits before it"


@pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS)
def test_likelihoods_equal_a_naive_loop(config: ModelConfig) -> None:
    model = make_model(config)
    items = [continuation(length, first) for length, first in ((2, 1), (9, 3), (CONTEXT + 1, 4), (25, 6))]
    found = likelihoods(model, items)
    for item, one in zip(items, found, strict=True):
        logprob, greedy = naive(model, item)
        assert one.logprob == pytest.approx(logprob, rel=1e-4, abs=1e-4)
        assert one.greedy is greedy


def test_greedy_is_what_the_model_would_have_said() -> None:
    model = make_model(VARIANTS["qwen3"])
    weights, ids = reference.weights_of(model), [5, 9, 2]
    while len(ids) < 8:
        ids.append(int(reference.logits(weights, model.config, ids)[-1].argmax()))
    said = Continuation(tuple(ids), 3)
    wrong = Continuation((*ids[:5], (ids[5] + 1) % VOCAB, *ids[6:]), 3)
    alone = Continuation(wrong.ids[:5], 3)
    assert [one.greedy for one in likelihoods(model, [said, wrong, alone])] == [True, False, True]


@pytest.mark.parametrize("batch_tokens", [1, 40, 10_000])
def test_the_batch_makes_no_difference(batch_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(VARIANTS["qwen3"])
    items = [continuation(length, first, seed) for seed in range(3) for length, first in LENGTHS]
    expected = [likelihoods(model, [item])[0] for item in items]
    monkeypatch.setattr(scoring, "BATCH_TOKENS", batch_tokens)
    shares: list[float] = []
    found = likelihoods(model, items, shares.append)
    assert [one.logprob for one in found] == pytest.approx([one.logprob for one in expected], rel=1e-5)
    assert [one.greedy for one in found] == [one.greedy for one in expected]
    assert shares == sorted(shares)
    assert shares[-1] == 1.0


def test_dropout_is_off_and_training_mode_comes_back() -> None:
    items = [continuation(9, 3)]
    expected = likelihoods(make_model(VARIANTS["qwen3"]), items)
    model = make_model(replace(VARIANTS["qwen3"], dropout=0.5)).train()
    assert likelihoods(model, items) == expected
    assert model.training


def test_what_counts_begins_after_the_ids_of_the_context(tokenizer: Tokenizer) -> None:
    ((item,),) = encode(tokenizer, [("ab", [" cab"])])
    assert list(item.ids) == tokenizer.encode("ab cab")
    assert item.ids[item.first :] == tuple(tokenizer.encode(" cab"))


def test_a_token_over_the_border_counts_for_every_choice(tokenizer: Tokenizer) -> None:
    assert len(tokenizer.encode("ab")) == 1
    assert len(tokenizer.encode("ac")) == 2
    ((joined, apart),) = encode(tokenizer, [("cca", ["b", "c"])])
    assert (joined.first, apart.first) == (2, 2), "the a of the context counts in both, since it is joined in one"
    assert tokenizer.decode(joined.ids[joined.first :]) == "ab"
    assert tokenizer.decode(apart.ids[apart.first :]) == "ac"
    ((apart,),) = encode(tokenizer, [("cca", ["c"])])
    assert apart.first == 3, "here nothing is joined"


def test_without_a_context_the_token_between_documents_stands_before(tokenizer: Tokenizer) -> None:
    for context, choice in (("", "cab"), ("a", "b")):
        ((item,),) = encode(tokenizer, [(context, [choice])])
        assert item == Continuation((tokenizer.end_of_text_id, *tokenizer.encode(context + choice)), 1)


def test_a_begin_token_stands_before_every_context(tokenizer: Tokenizer) -> None:
    backend = Backend.from_str(tokenizer._backend.to_str())
    begins = Tokenizer(backend, {"bos_token": "<|im_start|>", "add_bos_token": True})
    for context in ("", "ab"):
        ((item,),) = encode(begins, [(context, [" c"])])
        assert item.ids == (begins.bos_id, *begins.encode(f"{context} c"))
        assert item.first == 1 + len(begins.encode(context))
