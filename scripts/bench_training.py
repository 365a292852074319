"""Training: the program's own step against a plain one and against others' classes, at the same shapes."""

from __future__ import annotations

from typing import Any

import torch
from bench_environments import python_of
from bench_peers import Contestant, Table, compare

from minigpt.training.probe import fast_dtype

SIZES: dict[str, dict[str, int]] = {  # the shapes that nanoGPT trains on characters, on a GPU and on a CPU
    "10.65M": {
        "layers": 6, "hidden": 384, "heads": 6, "kv_heads": 6, "wide": 1024, "context": 256, "vocab": 65, "batch": 16,
    },
    "0.8M": {
        "layers": 4, "hidden": 128, "heads": 4, "kv_heads": 4, "wide": 352, "context": 64, "vocab": 65, "batch": 12,
    },
}  # fmt: skip
SECONDS = {"10.65M": 4.0, "0.8M": 2.0}  # of one measurement
CLASSES = {"qwen3": "Qwen3ForCausalLM", "gpt2": "GPT2LMHeadModel"}


def contestants(threads: int, against: set[str]) -> list[Contestant]:
    shared = {"threads": threads, "sizes": SIZES}
    rows = [Contestant("plain fp32 eager", "plain_training", shared)]
    for architecture in CLASSES:
        setup = shared | {"architecture": architecture, "optimizer": "muon"}
        rows.append(Contestant(f"minigpt {architecture}", "minigpt_training", setup, ours=True))
        setup = shared | {"architecture": architecture, "optimizer": "adamw"}  # as the others have it
        rows.append(Contestant(f"minigpt {architecture} AdamW", "minigpt_training", setup, ours=True))
    if "transformers" in against:
        rows += [theirs(threads, architecture, dtype) for architecture in CLASSES for dtype in ("bfloat16", "float32")]
    if "litgpt" in against:
        rows.append(Contestant("litgpt GPT float32", "litgpt_training", shared, python=python_of("litgpt")))
    return rows


def theirs(threads: int, architecture: str, dtype: str) -> Contestant:
    """One of `transformers`' classes; where a step in bfloat16 would take a minute, one row of it shows as much."""
    name, sizes = f"transformers {CLASSES[architecture]} {dtype}", SIZES
    if dtype == "bfloat16" and fast_dtype(torch.device("cpu")) == "float32":
        name, sizes = f"{name}, 1 row", {size: shape | {"batch": 1} for size, shape in SIZES.items()}
    setup = {"threads": threads, "sizes": sizes, "architecture": architecture, "dtype": dtype}
    return Contestant(name, "transformers_training", setup)


def bench(threads: int, against: set[str], rounds: int) -> list[dict[str, Any]]:
    """One table a size, over the same processes."""
    tables = [
        Table(f"training, {size}", "tokens/s", {"measure": size, "seconds": seconds})
        for size, seconds in SECONDS.items()
    ]
    return compare(contestants(threads, against), tables, rounds)
