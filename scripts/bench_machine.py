"""How fast this machine trains, reads, writes and tokenizes with a model of a preset's size: the program's own rows."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from bench_page import machine
from bench_peers import say

from minigpt.config import ModelConfig, SamplingConfig, preset_config
from minigpt.inference.engine import prefill, stream
from minigpt.model.cache import KVCache
from minigpt.model.transformer import GPT
from minigpt.text.bundled import bundled_corpus
from minigpt.text.tokenizer import Tokenizer
from minigpt.training.probe import fast_dtype, training_speed

PROMPTS = (8, 512)  # tokens: what is saved by the cache grows with the prefix
NEW_TOKENS = 256
CONTEXT = max(PROMPTS) + NEW_TOKENS
VOCABULARY = 2048
TEXT_BYTES = 1_000_000

Row = tuple[str, Callable[[], float]]  # a name, and what measures it once


def timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def generate(model: GPT, tokenizer: Tokenizer, prompts: list[list[int]]) -> None:
    """The engine: greedy, with the cache; an end token is as good as another here."""
    sampling = SamplingConfig(max_new_tokens=NEW_TOKENS, temperature=0.0)
    for _ in stream(model, tokenizer, prompts, sampling, list(range(len(prompts)))):
        pass


@torch.inference_mode()
def recompute(model: GPT, prompt: list[int]) -> None:
    """The same text without a cache: the whole prefix again for every token; logits for its last position only."""
    tokens = torch.tensor([prompt], device=model.lm_head.weight.device)
    for _ in range(NEW_TOKENS):
        hidden = model.model(tokens)[:, -1:]
        tokens = torch.cat((tokens, model.lm_head(hidden).argmax(-1)), dim=1)


@torch.inference_mode()
def read_prompt(model: GPT, prompt: list[int]) -> None:
    weight = model.lm_head.weight
    prefill(model, KVCache(model.config, 1, len(prompt), device=weight.device, dtype=weight.dtype), [prompt])


def endless(tokenizer: Tokenizer) -> Tokenizer:
    """The same tokenizer without end tokens, so that every text has its full length."""
    tokenizer.end_ids = ()
    return tokenizer


def rows(config: ModelConfig, tokenizer: Tokenizer, text: str, device: torch.device) -> list[Row]:
    model = GPT(config)
    model.initialize(torch.Generator().manual_seed(0))
    model.to(device).eval()
    text_ids = [10 + i % 200 for i in range(CONTEXT)]
    short, long = (text_ids[:length] for length in PROMPTS)
    micro = max(1, 2048 // config.max_position_embeddings)
    pieces = [text[start : start + 50_000] for start in range(0, len(text), 50_000)]
    megabytes = len(text.encode()) / 1e6
    dtype = fast_dtype(device)
    return [
        ("train tokens/s", lambda: training_speed(config, micro, device, dtype, seconds=2.0)),
        (
            f"decode tokens/s after {PROMPTS[0]}",
            lambda: NEW_TOKENS / timed(lambda: generate(model, tokenizer, [short])),
        ),
        (f"recompute tokens/s after {PROMPTS[0]}", lambda: NEW_TOKENS / timed(lambda: recompute(model, short))),
        (f"decode tokens/s after {PROMPTS[1]}", lambda: NEW_TOKENS / timed(lambda: generate(model, tokenizer, [long]))),
        (f"recompute tokens/s after {PROMPTS[1]}", lambda: NEW_TOKENS / timed(lambda: recompute(model, long))),
        (
            "decode tokens/s, 16 rows",
            lambda: 16 * NEW_TOKENS / timed(lambda: generate(model, tokenizer, [short] * 16)),
        ),
        ("prefill tokens/s", lambda: len(long) / timed(lambda: read_prompt(model, long))),
        ("tokenize MB/s", lambda: megabytes / timed(lambda: tokenizer.encode_batch(pieces))),
    ]


def ratio(measured: dict[str, list[float]], ours: str, theirs: str) -> float:
    """How many times faster one row is than another: the median over the rounds."""
    return round(statistics.median(a / b for a, b in zip(measured[ours], measured[theirs], strict=True)), 2)


def bundled_text() -> str:
    return "".join(path.read_text(encoding="utf-8")[:TEXT_BYTES] for path in bundled_corpus())


def make_tokenizer() -> Tokenizer:
    return endless(Tokenizer.train([bundled_text()], VOCABULARY))


def bench(preset: str, device: str, rounds: int) -> dict[str, Any]:
    """Medians of interleaved rounds, and what the cache and a batch save."""
    tokenizer = make_tokenizer()
    config = preset_config(preset, vocab_size=tokenizer.vocab_size, context=CONTEXT)
    measured: dict[str, list[float]] = {}
    table = rows(config, tokenizer, bundled_text(), torch.device(device))
    for turn in range(rounds):
        for name, measure in table:
            measured.setdefault(name, []).append(value := measure())
            say(f"round {turn + 1}/{rounds}  {name:<28}{value:>12,.1f}")
    cached = {
        f"after {length} tokens": ratio(
            measured, f"decode tokens/s after {length}", f"recompute tokens/s after {length}"
        )
        for length in PROMPTS
    }
    return {
        "model": asdict(config),
        "device": device,
        "machine": machine(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "rounds": rounds,
        "new tokens": NEW_TOKENS,
        "medians": {name: round(statistics.median(values), 2) for name, values in measured.items()},
        "cached over recomputed": cached,
        "16 rows at once over one by one": ratio(
            measured, "decode tokens/s, 16 rows", f"decode tokens/s after {PROMPTS[0]}"
        ),
    }
