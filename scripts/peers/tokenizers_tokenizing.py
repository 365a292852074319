"""`tokenizers`' own batch encoding of pieces that are in memory already; `arrays` also brings the ids out of it."""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
from protocol import Measure, digest, serve
from tokenizers import Tokenizer


def load(threads: int, tokenizer: str, pieces: str, method: str, arrays: bool) -> dict[str, Measure]:
    backend = Tokenizer.from_file(str(Path(tokenizer) / "tokenizer.json"))
    backend.encode_special_tokens = True
    texts: list[str] = json.loads(Path(pieces).read_text(encoding="utf-8"))
    megabytes = sum(len(text.encode()) for text in texts) / 1e6

    def encode() -> list[np.ndarray]:
        encoded = getattr(backend, method)(texts, add_special_tokens=False)
        return [np.array(one.ids, dtype=np.uint32) for one in encoded] if arrays else encoded

    def tokenize() -> float:
        started = time.perf_counter()
        encode()
        return megabytes / (time.perf_counter() - started)

    return {"tokenize": tokenize, "ids": lambda: digest(np.concatenate(encode())) if arrays else ""}


if __name__ == "__main__":
    serve(load)
