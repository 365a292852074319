"""Tokenising one file: the program's whole way to shards on disk against the encoders of others on text in memory."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench_environments import CACHE, python_of
from bench_peers import Contestant, Table, compare

from minigpt.text.bundled import bundled_corpus
from minigpt.text.decoding import ReadCounts
from minigpt.text.sources import SourceOptions, read_pieces
from minigpt.text.tokenizer import Tokenizer

SAMPLE = 4_000_000  # characters that the tokenizer is trained on
FOLDER = CACHE / "bench-text"


def prepare(files: Sequence[Path], vocabulary: int) -> None:
    """Make what all read: one file of the texts, its pieces as JSON, and a tokenizer learned from them."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    texts = [file.read_text(encoding="utf-8") for file in files or bundled_corpus()]
    (FOLDER / "text.txt").write_text("\n".join(texts), encoding="utf-8")
    pieces = read_pieces([FOLDER / "text.txt"], SourceOptions(), counts=ReadCounts())
    (FOLDER / "pieces.json").write_text(json.dumps([piece.text for piece in pieces]), encoding="utf-8")
    Tokenizer.train([text[: SAMPLE // len(texts)] for text in texts], vocabulary).save(FOLDER / "tokenizer")


def contestants(threads: int, against: set[str]) -> list[Contestant]:
    ours = {"threads": threads, "tokenizer": str(FOLDER / "tokenizer"), "file": str(FOLDER / "text.txt")}
    shared = {"threads": threads, "tokenizer": ours["tokenizer"], "pieces": str(FOLDER / "pieces.json")}
    rows = [Contestant("minigpt, file to shards", "minigpt_tokenizing", ours, ours=True)]
    for name, method, arrays in (
        ("tokenizers encode_batch_fast", "encode_batch_fast", False),
        ("tokenizers encode_batch_fast, to arrays", "encode_batch_fast", True),
        ("tokenizers encode_batch", "encode_batch", False),
    ):
        rows.append(Contestant(name, "tokenizers_tokenizing", shared | {"method": method, "arrays": arrays}))
    if "tiktoken" in against:
        rows.append(Contestant("tiktoken", "tiktoken_tokenizing", shared, python=python_of("tiktoken")))
    return rows


def bench(files: Sequence[Path], vocabulary: int, threads: int, against: set[str], rounds: int) -> list[dict[str, Any]]:
    """One table of MB/s; the ids of all are compared afterwards, and the memory of each process is said."""
    prepare(files, vocabulary)
    size = (FOLDER / "text.txt").stat().st_size / 1e6
    table = Table(f"tokenizing {size:.1f} MB", "MB/s", {"measure": "tokenize"})
    return compare(contestants(threads, against), [table], rounds, fact="ids")
