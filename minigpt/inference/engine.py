"""The one engine: prompts go in, a stream of token events comes out; everything else folds over it."""

from __future__ import annotations

import random
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from minigpt.config import ModelConfig, SamplingConfig
from minigpt.inference.sampling import next_tokens, random_streams
from minigpt.inference.speculation import MOST_GUESSES, Lookup
from minigpt.inference.stopping import StopText
from minigpt.model.cache import KVCache
from minigpt.model.transformer import GPT
from minigpt.text.streaming import StreamDecoder
from minigpt.text.tokenizer import Tokenizer

PREFILL_CHUNK = 512  # prompt tokens a row per forward pass


@dataclass(frozen=True)
class TokenEvent:
    """One new token of one row, with the text it completes; the last event of a row says why it ended.

    `finish_reason`: `stop` (a stop string), `end` (the model ended), `length`, or `context` (no position is left).
    `logprob` and `top` are the model's own log-probabilities, before temperature and filters. `guessed` tells a token
    that speculation had guessed, and that so came without a forward pass of its own.
    """

    index: int
    token_id: int
    text: str
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    finish_reason: str | None = None
    guessed: bool = False


@dataclass
class Completion:
    """Everything one row produced."""

    text: str = ""
    finish_reason: str = ""
    tokens: list[TokenEvent] = field(default_factory=list)


@dataclass
class Row:
    """What the engine keeps of one running text."""

    index: int
    position: int  # tokens in the cache once the pending one is fed
    stream: random.Random
    decoder: StreamDecoder
    stop: StopText
    lookup: Lookup | None = None  # with speculation
    produced: int = 0


def fit_prompt(prompt: Sequence[int], config: ModelConfig, max_new_tokens: int) -> list[int]:
    """Keep the end of a prompt that is longer than the context.

    Learned positions end with the context, so half of it at most is then kept free for the answer.
    """
    context = config.max_position_embeddings
    if len(prompt) <= context:
        return list(prompt)
    room = min(max_new_tokens, context // 2) if config.traits.positions == "learned" else 0
    return list(prompt[-(context - room) :])


@torch.inference_mode()
def stream(
    model: GPT,
    tokenizer: Tokenizer,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingConfig,
    seeds: Sequence[int],
    *,
    speculate: bool = False,
) -> Iterator[TokenEvent]:
    """Continue every prompt (token ids, at least one each) at once, yielding events as tokens are made.

    Row i draws from its own stream, seeded with `seeds[i]`, and ends by itself. The model must be in evaluation mode.
    `speculate` guesses tokens and checks them together: the same text, sooner where it repeats itself.
    """
    assert not model.training, "dropout would make the text depend on more than its seed"
    assert len(prompts) == len(seeds), "one seed for every prompt"
    assert all(prompts), "at least one token in every prompt"
    prompts = [fit_prompt(prompt, model.config, sampling.max_new_tokens) for prompt in prompts]
    rows = [
        _row(index, prompt, source, tokenizer, sampling, speculate)
        for index, (prompt, source) in enumerate(zip(prompts, random_streams(list(seeds)), strict=True))
    ]
    cache = _allocate(model, prompts, sampling, MOST_GUESSES if speculate else 0)
    yield from _run(model, tokenizer, cache, prompts, prompts, sampling, rows)


@torch.inference_mode()
def stream_from(
    model: GPT,
    tokenizer: Tokenizer,
    cache: KVCache,
    prompt: Sequence[int],
    sampling: SamplingConfig,
    seed: int,
    *,
    speculate: bool = False,
) -> Iterator[TokenEvent]:
    """Continue one prompt whose beginning, one token less than all of it at most, is in the cache already.

    The cache must have room for prompt and answer, unless the ring is as long as one window; the last token of an
    answer need not be in it. The same prompt, settings and seed give the text of `stream`.
    """
    assert not model.training, "dropout would make the text depend on more than its seed"
    new = prompt[cache.lengths[0] :]
    assert new, "nothing to read; the logits of what is in the cache are gone"
    row = _row(0, prompt, random_streams([seed])[0], tokenizer, sampling, speculate)
    yield from _run(model, tokenizer, cache, [prompt], [new], sampling, [row])


def _run(
    model: GPT,
    tokenizer: Tokenizer,
    cache: KVCache,
    prompts: Sequence[Sequence[int]],
    new: Sequence[Sequence[int]],
    sampling: SamplingConfig,
    rows: list[Row],
) -> Iterator[TokenEvent]:
    """Read what is `new` of the prompts, then draw token after token until every row has ended."""
    seen = _seen(prompts, model) if sampling.repetition_penalty != 1.0 else None
    logits = prefill(model, cache, new).unsqueeze(1)  # (B, T, V): T is 1, and more where tokens were guessed
    guesses: list[list[int]] = [[] for _ in rows]
    while True:
        kept, newest = yield from _draw(logits, guesses, seen, cache, rows, model.config, tokenizer, sampling)
        if not kept:
            return
        if len(kept) < len(rows):
            cache.keep(kept)
            rows = [rows[i] for i in kept]
            seen = None if seen is None else seen[kept]
        guesses = [_guess(row, cache, model.config, sampling) for row in rows]
        wide = max(map(len, guesses))
        fed = [[token, *guess, *[0] * (wide - len(guess))] for token, guess in zip(newest, guesses, strict=True)]
        # Guesses count as padding until they turn out to be right.
        logits = model(torch.tensor(fed, device=cache.keys.device), cache, [1] * len(rows))


def _draw(
    logits: Tensor,
    guesses: list[list[int]],
    seen: Tensor | None,
    cache: KVCache,
    rows: list[Row],
    config: ModelConfig,
    tokenizer: Tokenizer,
    sampling: SamplingConfig,
) -> Generator[TokenEvent, None, tuple[list[int], list[int]]]:
    """Draw a token for each row, and the next ones as long as what was drawn is what was guessed.

    Returns the rows that go on and the newest token of each. Whenever an event is out, the cache counts those tokens
    alone that were drawn.
    """
    kept: dict[int, int] = {}
    going = list(range(len(rows)))
    for place in range(logits.shape[1]):
        here = logits[:, place] if len(going) == len(rows) else logits[going, place]
        held = None if seen is None else seen[going]
        tokens = next_tokens(here, held, sampling, [rows[i].stream for i in going])
        logprobs = _logprobs(here, tokens, sampling.logprobs)
        if seen is not None:
            seen[going, tokens] = True
        drawn = dict(zip(going, tokens.tolist(), strict=True))
        right = [i for i, token in drawn.items() if guesses[i][place : place + 1] == [token]]
        cache.advance([int(i in right) for i in range(len(rows))])
        for (i, token), scored in zip(drawn.items(), logprobs, strict=True):
            kept.pop(i, None)
            event = _event(rows[i], token, scored, config, tokenizer, sampling, guessed=i in right)
            yield event
            if event.finish_reason is None:
                kept[i] = token
        going = [i for i in right if i in kept]
        for i in kept.keys() & drawn.keys() - set(going):
            _learn(rows[i], len(guesses[i]), place)
        if not going:
            break
    return sorted(kept), [kept[i] for i in sorted(kept)]


def prefill(model: GPT, cache: KVCache, prompts: Sequence[Sequence[int]], chunk: int = PREFILL_CHUNK) -> Tensor:
    """Read the prompts into the cache, at most `chunk` tokens a pass; return the logits (B, V) after each."""
    longest = max(map(len, prompts))
    padded = torch.tensor([[*prompt, *[0] * (longest - len(prompt))] for prompt in prompts], device=cache.keys.device)
    last: Tensor | None = None
    for start in range(0, longest, chunk):
        tokens = padded[:, start : start + chunk]  # (B, T)
        real = [min(max(len(prompt) - start, 0), tokens.shape[1]) for prompt in prompts]
        hidden = model.model(tokens, cache, real)
        ends = torch.tensor([max(count - 1, 0) for count in real], device=tokens.device)
        here = hidden[torch.arange(len(prompts), device=tokens.device), ends]  # (B, C)
        if last is None:
            last = here
        else:
            last = torch.where(torch.tensor(real, device=tokens.device).unsqueeze(-1) > 0, here, last)
    assert last is not None
    logits: Tensor = model.lm_head(last)
    return logits


def collect(events: Iterable[TokenEvent], rows: int) -> list[Completion]:
    """Fold a stream into one completion a row."""
    completions = [Completion() for _ in range(rows)]
    for event in events:
        done = completions[event.index]
        done.text += event.text
        done.tokens.append(event)
        done.finish_reason = event.finish_reason or ""
    return completions


def _allocate(model: GPT, prompts: Sequence[Sequence[int]], sampling: SamplingConfig, guesses: int) -> KVCache:
    """Make a cache as long as the texts can get, or a ring of one window where they outgrow it.

    A prompt longer than a sliding window goes around the ring in chunks, for which there must be room besides. No
    prompt is longer than the context, so a ring that long meets single tokens alone, and the guesses that follow them.
    """
    config, longest = model.config, max(map(len, prompts))
    chunk = min(longest, PREFILL_CHUNK) if longest > config.window else 1
    ring = max(min(config.window + chunk - 1, config.max_position_embeddings), config.window + guesses)
    capacity = min(longest + sampling.max_new_tokens, ring)
    weight = next(model.parameters())
    return KVCache(model.config, len(prompts), capacity, device=weight.device, dtype=weight.dtype)


def _row(
    index: int,
    prompt: Sequence[int],
    stream: random.Random,
    tokenizer: Tokenizer,
    sampling: SamplingConfig,
    speculate: bool,
) -> Row:
    lookup = Lookup(prompt) if speculate else None
    return Row(index, len(prompt), stream, _decoder(tokenizer, prompt), StopText(sampling.stop), lookup)


def _guess(row: Row, cache: KVCache, config: ModelConfig, sampling: SamplingConfig) -> list[int]:
    """Guess what follows in one row: no more than may be written, stand in the cache, and have positions."""
    if row.lookup is None:
        return []
    limit = min(sampling.max_new_tokens - row.produced, cache.widest) - 1
    if config.traits.positions == "learned":
        limit = min(limit, config.max_position_embeddings - 1 - max(cache.lengths))  # padding needs positions too
    return row.lookup.guess(limit)


def _learn(row: Row, guessed: int, right: int) -> None:
    if row.lookup is not None:
        row.lookup.learn(guessed, right)


def _decoder(tokenizer: Tokenizer, prompt: Sequence[int]) -> StreamDecoder:
    """Make a decoder that keeps the space before the first word, unless nothing but control tokens comes before it."""
    return StreamDecoder(tokenizer, continuing=any(tokenizer.token_bytes(id) for id in prompt))


def _seen(prompts: Sequence[Sequence[int]], model: GPT) -> Tensor:
    """Mark the tokens (B, V) of each prompt; padding is never among them."""
    device = next(model.parameters()).device
    seen = torch.zeros(len(prompts), model.config.vocab_size, dtype=torch.bool, device=device)
    for row, prompt in enumerate(prompts):
        seen[row, list(prompt)] = True
    return seen


def _event(
    row: Row,
    token: int,
    logprob: tuple[float | None, tuple[tuple[int, float], ...]],
    config: ModelConfig,
    tokenizer: Tokenizer,
    sampling: SamplingConfig,
    *,
    guessed: bool,
) -> TokenEvent:
    """Move one row on by one token."""
    row.produced += 1
    if row.lookup is not None:
        row.lookup.push(token)
    reason, text = None, ""
    if token in tokenizer.end_ids:
        reason = "end"
    else:
        text = row.stop.push(row.decoder.push(token))
        if row.produced == sampling.max_new_tokens:
            reason = "length"
        elif config.traits.positions == "learned" and row.position >= config.max_position_embeddings:
            reason = "context"
    if reason is not None:  # half a character, and what might have become a stop string, is text after all
        text += row.stop.push(row.decoder.flush()) + row.stop.flush()
    if row.stop.found:
        reason = "stop"
    row.position += 1
    return TokenEvent(row.index, token, text, *logprob, reason, guessed)


def _logprobs(
    logits: Tensor, tokens: Tensor, top: int | None
) -> list[tuple[float | None, tuple[tuple[int, float], ...]]]:
    """Per row: the chosen token's log-probability and the `top` best with theirs; nothing when not asked for."""
    if top is None:
        return [(None, ())] * len(tokens)
    logs = logits.float().log_softmax(-1)
    chosen = logs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1).tolist()
    values, ids = logs.topk(min(top, logs.shape[-1]), dim=-1)
    best = [tuple(zip(i, v, strict=True)) for i, v in zip(ids.tolist(), values.tolist(), strict=True)]
    return list(zip(chosen, best, strict=True))
