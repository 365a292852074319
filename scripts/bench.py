"""How fast this machine trains, reads, writes and tokenizes: medians of interleaved rounds, as JSON on stdout.

    python scripts/bench.py                    # a table on stderr, JSON on stdout
    python scripts/bench.py --rounds 5 --preset small
    python scripts/bench.py --device cuda      # the whole check of a GPU: right, fast, how much memory

Absolute figures mean nothing on a shared machine; compare ratios within one run.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict

import bench_gpu
import torch

from minigpt.config import PRESETS, ModelConfig, SamplingConfig, preset_config
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


def ratio(measured: dict[str, list[float]], length: int) -> float:
    """How many times faster the cache is: the median over the rounds."""
    pairs = zip(
        measured[f"decode tokens/s after {length}"], measured[f"recompute tokens/s after {length}"], strict=True
    )
    return round(statistics.median(cached / plain for cached, plain in pairs), 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--preset", choices=list(PRESETS), default="mini")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    text = "".join(path.read_text(encoding="utf-8")[:TEXT_BYTES] for path in bundled_corpus())
    tokenizer = endless(Tokenizer.train([text], VOCABULARY))
    if options.device.startswith("cuda"):
        print(json.dumps(bench_gpu.check(tokenizer, torch.device(options.device)), indent=2))
        return
    config = preset_config(options.preset, vocab_size=tokenizer.vocab_size, context=CONTEXT)
    measured: dict[str, list[float]] = {}
    table = rows(config, tokenizer, text, torch.device(options.device))
    for turn in range(options.rounds):
        for name, measure in table:
            value = measure()
            measured.setdefault(name, []).append(value)
            print(f"round {turn + 1}/{options.rounds}  {name:<28}{value:>12,.1f}", file=sys.stderr, flush=True)
    medians = {name: round(statistics.median(values), 2) for name, values in measured.items()}
    ratios = {length: ratio(measured, length) for length in PROMPTS}
    result = {
        "model": asdict(config),
        "device": options.device,
        "machine": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "rounds": options.rounds,
        "new tokens": NEW_TOKENS,
        "medians": medians,
        "cached over recomputed": {f"after {length} tokens": value for length, value in ratios.items()},
    }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
