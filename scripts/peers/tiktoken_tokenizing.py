"""tiktoken with the merges and the pattern of a byte-level tokenizer.json.

It knows ranks of tokens and no pairs, so a token that HF's merges make from one pair alone can come from another here.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
import tiktoken
from protocol import Measure, digest, serve


def byte_of() -> dict[str, int]:
    """GPT-2's alphabet: which character of a token stands for which byte."""
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(256 + place): byte for place, byte in enumerate(hidden)}


def pattern(source: dict) -> str:
    steps = source["pre_tokenizer"].get("pretokenizers", [source["pre_tokenizer"]])
    return next(step["pattern"]["Regex"] for step in steps if step["type"] == "Split")


def load(threads: int, tokenizer: str, pieces: str) -> dict[str, Measure]:
    source = json.loads((Path(tokenizer) / "tokenizer.json").read_text(encoding="utf-8"))
    special, bytes_of = {one["content"] for one in source["added_tokens"]}, byte_of()
    vocabulary = {token: id for token, id in source["model"]["vocab"].items() if token not in special}
    ranks = {bytes(bytes_of[character] for character in token): id for token, id in vocabulary.items()}
    encoding = tiktoken.Encoding("bench", pat_str=pattern(source), mergeable_ranks=ranks, special_tokens={})
    texts: list[str] = json.loads(Path(pieces).read_text(encoding="utf-8"))
    megabytes = sum(len(text.encode()) for text in texts) / 1e6

    def encode() -> list[list[int]]:
        return encoding.encode_ordinary_batch(texts, num_threads=threads)

    def tokenize() -> float:
        started = time.perf_counter()
        encode()
        return megabytes / (time.perf_counter() - started)

    return {
        "tokenize": tokenize,
        "ids": lambda: digest(np.concatenate([np.array(ids, dtype=np.uint32) for ids in encode()])),
    }


if __name__ == "__main__":
    serve(load)
