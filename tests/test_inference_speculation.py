"""Speculation: what is guessed, and that the text is the same with and without it, greedy or drawn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_inference_engine import chain_model, ids_of, model_for
from variants import CONTEXT, VARIANTS

from minigpt.config import ModelConfig, SamplingConfig
from minigpt.inference.engine import Completion, collect, stream, stream_from
from minigpt.inference.speculation import LONGEST_MATCH, MOST_GUESSES, Lookup
from minigpt.model.cache import KVCache
from minigpt.model.transformer import GPT
from minigpt.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(["the cat sat on the mat; the cat ate the rat"] * 3, 270)


def run(
    model: GPT, tokenizer: Tokenizer, prompts: Sequence[Sequence[int]], sampling: SamplingConfig, *, speculate: bool
) -> list[Completion]:
    seeds = list(range(len(prompts)))
    return collect(stream(model, tokenizer, prompts, sampling, seeds, speculate=speculate), len(prompts))


def guessed(rows: Sequence[Completion]) -> int:
    return sum(event.guessed for row in rows for event in row.tokens)


def naive_guess(tokens: Sequence[int], limit: int) -> list[int]:
    """Look back for the longest match of the last tokens, the nearest first."""
    for length in range(LONGEST_MATCH, 1, -1):
        for start in range(len(tokens) - length - 1, -1, -1):
            if list(tokens[start : start + length]) == list(tokens[len(tokens) - length :]):
                return list(tokens[start + length :][:limit])
    return []


@given(st.lists(st.integers(0, 3), max_size=40), st.integers(0, MOST_GUESSES))
def test_a_guess_is_what_followed_the_same_tokens_last(tokens: list[int], limit: int) -> None:
    assert Lookup(tokens).guess(limit) == naive_guess(tokens, limit)


def test_guesses_grow_while_they_are_right() -> None:
    lookup = Lookup([*range(20), *range(3)])
    assert lookup.guess(100) == list(range(3, 3 + MOST_GUESSES))
    lookup.learn(MOST_GUESSES, 0)
    assert lookup.guess(100) == [3]
    lookup.learn(1, 1)
    assert lookup.guess(100) == [3, 4]
    lookup.learn(0, 0)  # nothing was guessed, nothing is learned
    assert lookup.guess(100) == [3, 4]


@pytest.mark.parametrize("temperature", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS)
def test_the_text_is_the_same_and_past_the_context_too(
    config: ModelConfig, temperature: float, tokenizer: Tokenizer
) -> None:
    model = model_for(tokenizer, config)
    prompts = [tokenizer.encode(text) for text in ("the the the ", "cat at", "x")]
    sampling = SamplingConfig(temperature=temperature, top_k=3, repetition_penalty=0.8, max_new_tokens=3 * CONTEXT)
    plain = run(model, tokenizer, prompts, sampling, speculate=False)
    found = run(model, tokenizer, prompts, sampling, speculate=True)
    for one, other in zip(plain, found, strict=True):
        assert (ids_of(one), one.text, one.finish_reason) == (ids_of(other), other.text, other.finish_reason)
    if temperature == 0.0 and config.architecture != "gpt2":
        assert guessed(found) > 0
    assert guessed(plain) == 0


def test_a_row_is_the_same_alone_and_in_a_batch(tokenizer: Tokenizer) -> None:
    model = model_for(tokenizer)
    prompts = [tokenizer.encode(text) for text in ("the the the ", "cat at cat at", "x")]
    sampling = SamplingConfig(temperature=0.5, top_k=4, repetition_penalty=0.7, max_new_tokens=40)
    together = run(model, tokenizer, prompts, sampling, speculate=True)
    assert guessed(together) > 5
    for index, prompt in enumerate(prompts):
        alone = collect(stream(model, tokenizer, [prompt], sampling, [index], speculate=True), 1)[0]
        assert ids_of(alone) == ids_of(together[index])


def test_text_that_repeats_itself_takes_few_passes(tokenizer: Tokenizer) -> None:
    circle = tokenizer.encode("(wxyz!")
    model = chain_model(tokenizer, [*circle, circle[0]], context=64)
    passes = []
    model.lm_head.register_forward_hook(lambda module, inputs, logits: passes.append(logits.shape[1]))
    sampling = SamplingConfig(temperature=0.0, max_new_tokens=40)
    row = run(model, tokenizer, [circle + circle[:2]], sampling, speculate=True)[0]
    assert ids_of(row) == (circle * 9)[2:42]
    assert guessed([row]) == 40 - len(passes)
    assert len(passes) == 1 + 6  # one token from the prompt, then seven a pass: a guess ends where the text does


def test_an_end_and_a_stop_string_among_guesses_end_the_row(tokenizer: Tokenizer) -> None:
    a, b, c, d = tokenizer.encode("wxyz")
    prompt = [a, b, c, d, a]
    model = chain_model(tokenizer, [a, b, c, d, a])
    row = run(model, tokenizer, [prompt], SamplingConfig(temperature=0.0, stop=("yz",)), speculate=True)[0]
    assert (row.text, row.finish_reason) == ("x", "stop")
    ended = chain_model(tokenizer, [a, b, tokenizer.end_of_text_id])
    found = run(ended, tokenizer, [prompt], SamplingConfig(temperature=0.0), speculate=True)[0]
    assert (found.text, found.finish_reason) == ("x", "end")


def test_the_repetition_penalty_sees_tokens_as_they_are_drawn(tokenizer: Tokenizer) -> None:
    model = model_for(tokenizer)
    prompt = tokenizer.encode("the cat sat on the cat sat on")
    sampling = SamplingConfig(temperature=0.0, repetition_penalty=0.5, max_new_tokens=30)
    plain, found = (run(model, tokenizer, [prompt], sampling, speculate=on)[0] for on in (False, True))
    assert ids_of(plain) == ids_of(found)
    assert guessed([found]) > 5


def test_logprobs_are_the_same(tokenizer: Tokenizer) -> None:
    model = model_for(tokenizer)
    sampling = SamplingConfig(temperature=0.0, repetition_penalty=0.5, max_new_tokens=20, logprobs=2)
    prompt = tokenizer.encode("the the the")
    plain, found = (run(model, tokenizer, [prompt], sampling, speculate=on)[0] for on in (False, True))
    for one, other in zip(plain.tokens, found.tokens, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
        assert [id for id, _ in one.top] == [id for id, _ in other.top]


@pytest.mark.parametrize("taken", range(1, 13))
@torch.no_grad()
def test_wherever_a_stream_is_left_the_cache_holds_what_was_drawn(taken: int, tokenizer: Tokenizer) -> None:
    model = model_for(tokenizer, replace(VARIANTS["qwen3"], max_position_embeddings=64))
    prompt = tokenizer.encode("the the the")
    cache = KVCache(model.config, 1, 64)
    sampling = SamplingConfig(temperature=0.8, top_k=2, repetition_penalty=0.6, max_new_tokens=30)
    events = stream_from(model, tokenizer, cache, prompt, sampling, 5, speculate=True)
    ids = [next(events).token_id for _ in range(taken)]
    events.close()  # type: ignore[attr-defined]
    text = prompt + ids
    assert len(text) - 1 <= cache.lengths[0] <= len(text)
    cache.truncate(len(text) - 1)
    expected = model(torch.tensor([text]))[:, -1:]
    torch.testing.assert_close(model(torch.tensor([text[-1:]]), cache), expected, rtol=2e-5, atol=2e-5)
