"""The engine: cached = recomputed, alone = in a batch, how rows end, what text comes out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import islice, pairwise
from typing import Any

import pytest
import torch
from variants import CONTEXT, ENDLESS, VARIANTS, make_model

from minigpt.config import ModelConfig, SamplingConfig
from minigpt.inference.engine import PREFILL_CHUNK, Completion, collect, fit_prompt, prefill, stream
from minigpt.inference.sampling import row_seed
from minigpt.model.cache import KVCache
from minigpt.model.transformer import GPT
from minigpt.text.tokenizer import Tokenizer

GREEDY = SamplingConfig(temperature=0.0, max_new_tokens=8)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(["the cat sat on the mat; the cat ate the rat"] * 3, 270)


def model_for(tokenizer: Tokenizer, config: ModelConfig = VARIANTS["qwen3"], seed: int = 0) -> GPT:
    """A random model that never ends a text by itself: the end tokens are the least likely ones."""
    model = make_model(replace(config, vocab_size=tokenizer.vocab_size, tie_word_embeddings=False), seed)
    silence(model, tokenizer.end_ids)
    return model


def silence(model: GPT, ids: Iterable[int]) -> None:
    """Make tokens all but impossible, whatever the hidden state."""
    places = torch.tensor(list(ids))
    model.lm_head.register_forward_hook(lambda module, inputs, logits: logits.index_fill(-1, places, -100.0))


@torch.no_grad()
def chain_model(tokenizer: Tokenizer, *chains: Sequence[int], context: int = CONTEXT) -> GPT:
    """A model that, greedily, follows each token by the next one of its chain."""
    V = tokenizer.vocab_size
    sizes = {"vocab_size": V, "hidden_size": V, "max_position_embeddings": context}
    model = GPT(replace(VARIANTS["llama-untied-ungrouped"], **sizes)).eval()  # type: ignore[arg-type]
    for name, weight in model.named_parameters():
        weight.fill_(1.0 if name.endswith("norm.weight") else 0.0)
    model.model.embed_tokens.weight.copy_(torch.eye(V))
    for chain in chains:
        assert len(set(chain[:-1])) == len(chain) - 1, "a token can have one successor only"
        for token, following in pairwise(chain):
            model.lm_head.weight[following, token] = 3.0
    return model


def run(
    model: GPT,
    tokenizer: Tokenizer,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingConfig,
    seeds: Sequence[int] | None = None,
) -> list[Completion]:
    seeds = list(range(len(prompts))) if seeds is None else seeds
    return collect(stream(model, tokenizer, prompts, sampling, seeds), len(prompts))


def ids_of(completion: Completion) -> list[int]:
    return [event.token_id for event in completion.tokens]


@torch.no_grad()
def greedy_by_recomputation(model: GPT, prompt: Sequence[int], new: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(new):
        tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS)
def test_greedy_with_the_cache_equals_recomputing_everything(config: ModelConfig, tokenizer: Tokenizer) -> None:
    model, prompt = model_for(tokenizer, config), tokenizer.encode("the cat")
    found = run(model, tokenizer, [prompt], GREEDY)[0]
    assert ids_of(found) == greedy_by_recomputation(model, prompt, 8)


@pytest.mark.parametrize("config", ENDLESS.values(), ids=ENDLESS)
def test_past_the_context_each_step_equals_the_full_sequence(config: ModelConfig, tokenizer: Tokenizer) -> None:
    model = model_for(tokenizer, config)
    prompts = [tokenizer.encode("the cat sat"), tokenizer.encode("a")]
    sampling = SamplingConfig(temperature=1.0, max_new_tokens=3 * CONTEXT, logprobs=0)
    for prompt, row in zip(prompts, run(model, tokenizer, prompts, sampling), strict=True):
        assert (len(row.tokens), row.finish_reason) == (3 * CONTEXT, "length")
        assert len(set(ids_of(row))) > CONTEXT // 2
        with torch.no_grad():
            logs = model(torch.tensor([prompt + ids_of(row)]))[0].log_softmax(-1)
        for place, event in enumerate(row.tokens, start=len(prompt) - 1):
            assert event.logprob == pytest.approx(logs[place, event.token_id].item(), abs=1e-4)


@pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize("new", [6, 30])
def test_alone_equals_in_a_batch_equals_the_seed_of_the_row(
    config: ModelConfig, new: int, tokenizer: Tokenizer
) -> None:
    model = model_for(tokenizer, config)
    prompts = [tokenizer.encode(text) for text in ("th", "the cat sat on the", "rat", "the cat sat on the")]
    sampling = SamplingConfig(temperature=1.0, top_k=40, repetition_penalty=1.2, max_new_tokens=new)
    seeds = [row_seed(99, row) for row in range(4)]
    together = run(model, tokenizer, prompts, sampling, seeds)
    assert ids_of(together[1]) != ids_of(together[3])  # the same prompt, another seed
    for prompt, seed, expected in zip(prompts, seeds, together, strict=True):
        alone = run(model, tokenizer, [prompt], sampling, [row_seed(seed, 0)])[0]
        assert (ids_of(alone), alone.text, alone.finish_reason) == (
            ids_of(expected),
            expected.text,
            expected.finish_reason,
        )


def test_events_come_row_by_row_as_tokens_are_made(tokenizer: Tokenizer) -> None:
    model = model_for(tokenizer)
    prompts = [tokenizer.encode("the"), tokenizer.encode("a cat")]
    events = list(stream(model, tokenizer, prompts, replace(GREEDY, max_new_tokens=3), [0, 1]))
    assert [event.index for event in events] == [0, 1] * 3
    assert [event.finish_reason for event in events] == [None] * 4 + ["length"] * 2


def test_a_seed_repeats_and_another_differs(tokenizer: Tokenizer) -> None:
    model, prompt = model_for(tokenizer), tokenizer.encode("the cat")
    sampling = SamplingConfig(temperature=1.5, max_new_tokens=10)
    first, again, other = (run(model, tokenizer, [prompt], sampling, [seed])[0] for seed in (5, 5, 6))
    assert ids_of(first) == ids_of(again)
    assert ids_of(first) != ids_of(other)


def test_each_row_ends_by_itself(tokenizer: Tokenizer) -> None:
    end, (a, b, c, d), loop = tokenizer.end_of_text_id, tokenizer.encode("wxyz"), tokenizer.encode("!")
    (other_end,) = (id for id in tokenizer.end_ids if id != end)
    model = chain_model(tokenizer, [a, b, end, a], [c, d, other_end, c], [loop[0], loop[0]])
    rows = run(model, tokenizer, [[a], loop, [d]], replace(GREEDY, max_new_tokens=5))
    assert [ids_of(row) for row in rows] == [[b, end], loop * 5, [other_end]]
    assert [row.finish_reason for row in rows] == ["end", "length", "end"]
    assert [row.text for row in rows] == ["x", "!!!!!", ""]


@pytest.mark.parametrize("new", [1, 2, 7, 40])
def test_exactly_max_new_tokens(new: int, tokenizer: Tokenizer) -> None:
    prompts = [tokenizer.encode("the"), tokenizer.encode("the cat sat")]
    for row in run(model_for(tokenizer), tokenizer, prompts, replace(GREEDY, max_new_tokens=new)):
        assert len(row.tokens) == new
        assert row.finish_reason == "length"
        assert all(event.finish_reason is None for event in row.tokens[:-1])


def test_a_stop_string_over_token_borders_is_never_shown(tokenizer: Tokenizer) -> None:
    chain = tokenizer.encode("(wxENDyz)")
    assert len(chain) == 9  # one token a letter
    model = chain_model(tokenizer, chain)
    pieces = list(stream(model, tokenizer, [chain[:1]], replace(GREEDY, stop=("END", "?"), max_new_tokens=30), [0]))
    assert "".join(event.text for event in pieces) == "wx"
    assert [event.token_id for event in pieces] == chain[1:6]
    assert pieces[-1].finish_reason == "stop"


def test_stop_strings_end_rows_by_themselves(tokenizer: Tokenizer) -> None:
    first, second = tokenizer.encode("(wx.y"), tokenizer.encode("[123456")
    model = chain_model(tokenizer, first, second)
    rows = run(model, tokenizer, [first[:1], second[:1]], replace(GREEDY, stop=("x.",), max_new_tokens=5))
    assert [(row.text, row.finish_reason) for row in rows] == [("w", "stop"), ("12345", "length")]


@pytest.mark.parametrize("ending", ["length", "end"])
def test_text_held_back_for_a_stop_string_comes_out_when_the_row_ends(ending: str, tokenizer: Tokenizer) -> None:
    chain = tokenizer.encode("(wEN")
    model = chain_model(tokenizer, [*chain, tokenizer.end_of_text_id])
    sampling = replace(GREEDY, stop=("END",), max_new_tokens=3 if ending == "length" else 9)
    row = run(model, tokenizer, [chain[:1]], sampling)[0]
    assert (row.text, row.finish_reason) == ("wEN", ending)


def test_a_stop_string_at_the_last_token_is_a_stop(tokenizer: Tokenizer) -> None:
    chain = tokenizer.encode("(wEN")
    row = run(chain_model(tokenizer, chain), tokenizer, [chain[:1]], replace(GREEDY, stop=("EN",), max_new_tokens=3))[0]
    assert (row.text, row.finish_reason) == ("w", "stop")


@pytest.mark.parametrize("text", ["x😀y", "e\u0301x", "é中文!"])
def test_characters_over_token_borders_come_out_whole(text: str, tokenizer: Tokenizer) -> None:
    chain = tokenizer.encode("(" + text)
    assert len(chain) > len(text) + 1  # some characters are several tokens
    model = chain_model(tokenizer, chain)
    events = list(stream(model, tokenizer, [chain[:1]], replace(GREEDY, max_new_tokens=len(chain) - 1), [0]))
    assert "".join(event.text for event in events) == text
    assert all(event.text in text for event in events)


def test_half_a_character_at_the_end_is_marked(tokenizer: Tokenizer) -> None:
    chain = tokenizer.encode("(w😀")
    model = chain_model(tokenizer, chain)
    row = run(model, tokenizer, [chain[:1]], replace(GREEDY, max_new_tokens=3))[0]
    assert (row.text, row.finish_reason) == ("w\ufffd", "length")
    model = chain_model(tokenizer, [*chain[:4], tokenizer.end_of_text_id])
    row = run(model, tokenizer, [chain[:1]], replace(GREEDY, max_new_tokens=9))[0]
    assert (row.text, row.finish_reason) == ("w\ufffd", "end")


def test_streamed_pieces_joined_equal_the_decoded_ids(tokenizer: Tokenizer) -> None:
    model, prompt = model_for(tokenizer), tokenizer.encode("the cat")
    sampling = SamplingConfig(temperature=3.0, max_new_tokens=120)  # nearly random bytes
    row = run(model, tokenizer, [prompt], sampling)[0]
    assert "\ufffd" in row.text
    assert row.text == tokenizer.decode(ids_of(row), continuing=True)


@pytest.mark.parametrize("config", ENDLESS.values(), ids=ENDLESS)
def test_of_a_prompt_longer_than_the_context_the_end_is_read(config: ModelConfig, tokenizer: Tokenizer) -> None:
    model = model_for(tokenizer, config)
    long = tokenizer.encode("a quick brown fox jumps over a lazy dog and away")
    assert len(long) > 2 * CONTEXT
    rows = run(model, tokenizer, [long, long[-CONTEXT:], long[:3]], GREEDY)
    assert ids_of(rows[0]) == ids_of(rows[1]) == greedy_by_recomputation(model, long[-CONTEXT:], 8)
    assert ids_of(rows[2]) == greedy_by_recomputation(model, long[:3], 8)


@pytest.mark.parametrize(
    ("lengths", "new", "expected"),
    [
        ([4, 2], 1, 5),  # no longer than it has to be
        ([6, 2], 1000, 6),  # one window
        ([7, 2], 1000, 6 + 7 - 1),  # and the prompt goes around in one piece
        ([1500, 2], 1000, 6 + PREFILL_CHUNK - 1),
    ],
)
def test_a_sliding_window_takes_memory_for_one_window(
    lengths: list[int], new: int, expected: int, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[KVCache] = []

    class Noting(KVCache):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            made.append(self)

    monkeypatch.setattr("minigpt.inference.engine.KVCache", Noting)
    model = model_for(tokenizer, replace(VARIANTS["mistral"], max_position_embeddings=2000))
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(0, 200, (length,), generator=generator).tolist() for length in lengths]
    events = list(islice(stream(model, tokenizer, prompts, replace(GREEDY, max_new_tokens=new), [0, 0]), 20))
    assert [cache.capacity for cache in made] == [expected]
    for row, prompt in enumerate(prompts):
        found = [event.token_id for event in events if event.index == row]
        assert found == greedy_by_recomputation(model, prompt, len(found))


@pytest.mark.parametrize("name", ["gpt2", "gpt2-untied"])
def test_learned_positions_end_with_the_context(name: str, tokenizer: Tokenizer) -> None:
    model = model_for(tokenizer, VARIANTS[name])
    prompts = [tokenizer.encode("the cat sat on wxyz"), tokenizer.encode("wx")]
    rows = run(model, tokenizer, prompts, replace(GREEDY, max_new_tokens=100))
    for prompt, row in zip(prompts, rows, strict=True):
        # The last position of the context still gives a token, which itself has none.
        assert len(prompt) + len(row.tokens) == CONTEXT + 1
        assert row.finish_reason == "context"
        assert ids_of(row) == greedy_by_recomputation(model, prompt, len(row.tokens))


def test_length_comes_before_context(tokenizer: Tokenizer) -> None:
    model, prompt = model_for(tokenizer, VARIANTS["gpt2"]), tokenizer.encode("wxyz")
    exactly = CONTEXT + 1 - len(prompt)
    for new, reason in ((exactly, "length"), (exactly + 1, "context"), (exactly - 1, "length")):
        row = run(model, tokenizer, [prompt], replace(GREEDY, max_new_tokens=new))[0]
        assert (len(row.tokens), row.finish_reason) == (min(new, exactly), reason)


@pytest.mark.parametrize(
    ("name", "length", "new", "expected"),
    [
        ("qwen3", CONTEXT, 1000, CONTEXT),
        ("qwen3", CONTEXT + 1, 1, CONTEXT),
        ("transformer-2017", 3 * CONTEXT, 1000, CONTEXT),
        ("gpt2", CONTEXT - 1, 1000, CONTEXT - 1),  # what fits is read whole
        ("gpt2", CONTEXT, 1000, CONTEXT),
        ("gpt2", CONTEXT + 1, 1000, CONTEXT // 2),  # else half is kept free for the answer
        ("gpt2", CONTEXT + 1, 3, CONTEXT - 3),
    ],
)
def test_how_much_of_a_prompt_is_read(name: str, length: int, new: int, expected: int) -> None:
    prompt = list(range(length))
    assert fit_prompt(prompt, VARIANTS[name], new) == prompt[-expected:]


@pytest.mark.parametrize("chunk", [1, 4, 7, 9, 512])
@torch.no_grad()
def test_prefill_in_chunks_gives_the_logits_after_each_prompt(chunk: int, tokenizer: Tokenizer) -> None:
    model = model_for(tokenizer)
    prompts = [tokenizer.encode(text) for text in ("w", "wxyz123", "zyxwvu12345")]
    cache = KVCache(model.config, 3, CONTEXT)
    found = prefill(model, cache, prompts, chunk)
    assert cache.lengths == [len(prompt) for prompt in prompts]
    for row, prompt in enumerate(prompts):
        torch.testing.assert_close(found[row], model(torch.tensor([prompt]))[0, -1], rtol=2e-5, atol=2e-5)


def test_logprobs_are_those_of_the_model(tokenizer: Tokenizer) -> None:
    model, prompt = model_for(tokenizer), tokenizer.encode("the cat")
    sampling = SamplingConfig(temperature=0.7, top_k=3, repetition_penalty=1.9, max_new_tokens=6, logprobs=4)
    row = run(model, tokenizer, [prompt], sampling)[0]
    with torch.no_grad():
        logs = model(torch.tensor([prompt + ids_of(row)]))[0].double().log_softmax(-1)
    for place, event in enumerate(row.tokens):
        here = logs[len(prompt) - 1 + place]
        assert event.logprob == pytest.approx(here[event.token_id].item(), abs=1e-4)
        best = here.topk(4)
        assert [token for token, _ in event.top] == best.indices.tolist()
        assert [value for _, value in event.top] == pytest.approx(best.values.tolist(), abs=1e-4)


def test_logprobs_only_when_asked_for(tokenizer: Tokenizer) -> None:
    model, prompt = model_for(tokenizer), tokenizer.encode("the")
    plain = run(model, tokenizer, [prompt], GREEDY)[0].tokens[0]
    assert (plain.logprob, plain.top) == (None, ())
    chosen = run(model, tokenizer, [prompt], replace(GREEDY, logprobs=0))[0].tokens[0]
    assert chosen.logprob is not None
    assert chosen.top == ()
    many = run(model, tokenizer, [prompt], replace(GREEDY, logprobs=10_000))[0].tokens[0]
    assert len(many.top) == tokenizer.vocab_size


def test_the_repetition_penalty_ignores_padding(tokenizer: Tokenizer) -> None:
    # Right padding is token 0; were it counted as seen, the short row would shun token 0.
    a, b = tokenizer.encode("wx")
    model = chain_model(tokenizer, [a, 0])
    model.lm_head.weight.data[b, a] = 2.9
    sampling = replace(GREEDY, max_new_tokens=1, repetition_penalty=1.5)
    rows = run(model, tokenizer, [[a], [b, b, b, b]], sampling)
    assert ids_of(rows[0]) == [0]


def test_the_repetition_penalty_counts_prompt_and_new_tokens(tokenizer: Tokenizer) -> None:
    a, b, c = tokenizer.encode("wxy")
    model = chain_model(tokenizer)
    weight = model.lm_head.weight.data
    weight[a, :], weight[b, :], weight[c, :] = 3.0, 2.5, 2.2
    sampling = replace(GREEDY, max_new_tokens=3, repetition_penalty=2.0)
    assert ids_of(run(model, tokenizer, [[a]], sampling)[0]) == [b, c, a]
    assert ids_of(run(model, tokenizer, [[a]], replace(sampling, repetition_penalty=1.0))[0]) == [a, a, a]


def test_a_vocabulary_larger_than_the_tokenizer_gives_empty_text(tokenizer: Tokenizer) -> None:
    config = replace(VARIANTS["qwen3"], vocab_size=tokenizer.vocab_size + 20, tie_word_embeddings=False)
    model = make_model(config)
    silence(model, range(tokenizer.vocab_size))
    row = run(model, tokenizer, [tokenizer.encode("the")], GREEDY)[0]
    assert min(ids_of(row)) >= tokenizer.vocab_size
    assert (row.text, row.finish_reason) == ("", "length")


def test_a_stream_left_early_leaves_gradients_on(tokenizer: Tokenizer) -> None:
    events = stream(model_for(tokenizer), tokenizer, [tokenizer.encode("the")], GREEDY, [0])
    next(events)
    assert torch.is_grad_enabled()
    assert not torch.is_inference_mode_enabled()
    events.close()  # type: ignore[attr-defined]
    assert torch.is_grad_enabled()


def test_a_model_in_training_mode_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(AssertionError, match="dropout"):
        next(stream(model_for(tokenizer).train(), tokenizer, [tokenizer.encode("the")], GREEDY, [0]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_types_generate_too(dtype: torch.dtype, tokenizer: Tokenizer) -> None:
    model = model_for(tokenizer).to(dtype)
    sampling = SamplingConfig(max_new_tokens=2 * CONTEXT, logprobs=1)
    rows = run(model, tokenizer, [tokenizer.encode("the"), tokenizer.encode("the cat")], sampling)
    assert [len(row.tokens) for row in rows] == [2 * CONTEXT] * 2
