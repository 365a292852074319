"""How fast this machine trains, reads, writes and tokenizes, alone or beside what a person would use instead.

    python scripts/bench.py                            # rows about this machine: a table on stderr, JSON on stdout
    python scripts/bench.py --device cuda --json       # the whole check of a GPU: right, fast, how much memory
    python scripts/bench.py --against transformers,llama.cpp,litgpt,tiktoken --model SmolLM2-135M > page.md
    python scripts/bench.py --only training            # the program beside a plain float32 trainer

Absolute figures mean nothing on a shared machine; compare ratios within one run.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path
from typing import Any

import bench_decoding
import bench_environments
import bench_gpu
import bench_machine
import bench_page
import bench_tokenizing
import bench_training
import psutil
import torch
from bench_peers import say

from minigpt.config import PRESETS

PEERS = ("transformers", "llama.cpp", "litgpt", "tiktoken")
SUBJECTS = ("training", "decoding", "tokenizing")


def names(choices: tuple[str, ...], text: str) -> list[str]:
    """Read a list with commas."""
    chosen = [name.strip() for name in text.split(",")]
    if wrong := [name for name in chosen if name not in choices]:
        raise argparse.ArgumentTypeError(f"{wrong[0]!r} is unknown (choose from {', '.join(choices)})")
    return chosen


def options(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0],
        epilog="Environments of peers and what is made for them lie in .cache/.",
    )
    parser.add_argument("--against", type=lambda text: names(PEERS, text), default=[], help="peers, with commas")
    parser.add_argument("--only", type=lambda text: names(SUBJECTS, text), help="subjects, with commas; default all")
    parser.add_argument("--model", type=Path, help="folder for decoding; HuggingFaceTB/SmolLM2-135M is what others use")
    parser.add_argument("--text", type=Path, nargs="+", default=[], help="files to tokenize; default the bundled ones")
    parser.add_argument("--vocab-size", type=int, default=8192, help="of the tokenizer learned from them")
    parser.add_argument("--threads", type=int, default=psutil.cpu_count(logical=False) or 1, help="of every contestant")
    parser.add_argument("--rounds", type=int, help="default 5 against others, else 3")
    parser.add_argument("--preset", choices=list(PRESETS), default="mini", help="of the rows about this machine")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", action="store_true", help="JSON, where a comparison would be a page of Markdown")
    return parser.parse_args(arguments)


def comparison(chosen: argparse.Namespace) -> dict[str, Any]:
    """All tables that were asked for, and what they were measured on and with."""
    rounds, against, subjects = chosen.rounds or 5, set(chosen.against), chosen.only or SUBJECTS
    tables: list[dict[str, Any]] = []
    if "training" in subjects:
        tables += bench_training.bench(chosen.threads, against, rounds)
    if "decoding" in subjects and chosen.model is not None:
        tables += bench_decoding.bench(chosen.model.resolve(), chosen.threads, against, rounds)
    elif "decoding" in subjects:
        say("decoding is left out: give a model folder with --model")
    if "tokenizing" in subjects:
        tables += bench_tokenizing.bench(chosen.text, chosen.vocab_size, chosen.threads, against, rounds)
    return {
        "command": shlex.join(["scripts/bench.py", *sys.argv[1:]]),
        "machine": bench_page.machine(),
        "threads": chosen.threads,
        "rounds": rounds,
        "versions": bench_environments.versions(chosen.against),
        "tables": tables,
    }


def main() -> None:
    chosen = options()
    if chosen.against or chosen.only:
        result = comparison(chosen)
        print(
            json.dumps(result, indent=2, ensure_ascii=False) if chosen.json else bench_page.page(result),
            end="\n" * chosen.json,
        )
    elif chosen.device.startswith("cuda"):
        found = bench_gpu.check(bench_machine.make_tokenizer(), torch.device(chosen.device))
        print(json.dumps(found, indent=2))
    else:
        print(json.dumps(bench_machine.bench(chosen.preset, chosen.device, chosen.rounds or 3), indent=2))


if __name__ == "__main__":
    main()
