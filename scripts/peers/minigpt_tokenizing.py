"""The program's own way from a text file to token shards on disk: read, tokenise on all cores, write."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import numpy as np
from protocol import Measure, digest, serve

from minigpt.text.corpus import build
from minigpt.text.sources import SourceOptions
from minigpt.text.split import scan
from minigpt.text.tokenizer import Tokenizer


def load(threads: int, tokenizer: str, file: str) -> dict[str, Measure]:
    opened, size = Tokenizer.load(Path(tokenizer)), Path(file).stat().st_size
    found = scan([file], SourceOptions(), val_fraction=0.0)

    def tokenize() -> float:
        with tempfile.TemporaryDirectory() as folder:
            started = time.perf_counter()
            build(found, opened, Path(folder))
            return size / 1e6 / (time.perf_counter() - started)

    def ids() -> str:
        with tempfile.TemporaryDirectory() as folder:
            tokens = build(found, opened, Path(folder)).train
            read = tokens.read(0, len(tokens))
            return digest(read[read != opened.end_of_text_id].astype(np.uint32))

    return {"tokenize": tokenize, "ids": ids}


if __name__ == "__main__":
    serve(load)
