"""Decoding one model folder: a single text, many at once, and reading a prompt, in every width that a peer has."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from bench_environments import CACHE, python_of
from bench_peers import Contestant, Table, compare, say

from minigpt.training.probe import fast_dtype

ROWS, PROMPT, NEW = 32, 8, 128
NEW_IN_ROWS = 32
LONG_PROMPT = 512
WIDTHS = ("int8", "int4")
LLAMA_CPP = ("f32", "bf16", "q8_0", "q4_0")
LITGPT = {(576, 30): "SmolLM2-135M", (960, 32): "SmolLM2-360M", (2048, 24): "SmolLM2-1.7B"}  # by width and layers


def dtypes() -> tuple[str, ...]:
    """What torch computes in here: not in bfloat16 on a processor without instructions for it, which takes minutes."""
    return ("float32", "bfloat16") if fast_dtype(torch.device("cpu")) == "bfloat16" else ("float32",)


def gguf(folder: Path, kind: str) -> Path:
    """Export the model for llama.cpp, once: kept under .cache/."""
    place = CACHE / "bench-gguf" / f"{folder.resolve().name}-{kind}.gguf"
    if not place.exists() or place.stat().st_mtime < (folder / "config.json").stat().st_mtime:
        place.parent.mkdir(parents=True, exist_ok=True)
        command = ["export", "-m", folder, "--to", "gguf", "--type", kind, "-o", place, "--overwrite"]
        subprocess.run([sys.executable, "-m", "minigpt", *command], check=True, stdout=sys.stderr)
    return place


def contestants(folder: Path, threads: int, against: set[str]) -> list[Contestant]:
    shared = {"threads": threads, "folder": str(folder)}
    rows = [
        Contestant(f"minigpt {kind}", "minigpt_decoding", shared | {"kind": kind}, ours=True)
        for kind in (*dtypes(), *WIDTHS)
    ]
    if "transformers" in against:
        for kind in dtypes():
            rows.append(Contestant(f"transformers {kind}", "transformers_decoding", shared | {"kind": kind}))
    if "llama.cpp" in against:
        python = python_of("llama.cpp")
        for kind in LLAMA_CPP:
            setup = {"threads": threads, "file": str(gguf(folder, kind))}
            rows.append(Contestant(f"llama.cpp {kind}", "llama_cpp_decoding", setup, python=python))
    if "litgpt" in against:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        name = LITGPT.get((config["hidden_size"], config["num_hidden_layers"]))
        if name is None:
            say(f"decoding: litgpt is left out: it has no config for {folder}")
        else:
            setup = shared | {"kind": "float32", "name": name}
            rows.append(Contestant("litgpt float32", "litgpt_decoding", setup, python=python_of("litgpt")))
    return rows


def bench(folder: Path, threads: int, against: set[str], rounds: int) -> list[dict[str, Any]]:
    """Three tables over the same processes; prompts are the same ids for all, texts are greedy and of full length."""
    ids = [1000 + 37 * i % 5000 for i in range(LONG_PROMPT)]
    short = {"measure": "decode", "prompt": ids[:PROMPT]}
    tables = [
        Table("one text", "tokens/s", short | {"rows": 1, "new": NEW}),
        Table(f"{ROWS} texts", "tokens/s", short | {"rows": ROWS, "new": NEW_IN_ROWS}),
        Table(f"prompt of {LONG_PROMPT}", "tokens/s", {"measure": "prefill", "prompt": ids}),
    ]
    return compare(contestants(folder, threads, against), tables, rounds)
