"""The program's own engine on a model folder: whole calls, from prompt ids to text."""

from __future__ import annotations

import time
from pathlib import Path

import torch
from protocol import Measure, serve

from minigpt.checkpoint.folder import load as load_folder
from minigpt.config import SamplingConfig
from minigpt.inference.engine import prefill, stream
from minigpt.model.cache import KVCache
from minigpt.model.decoding import prepare
from minigpt.model.transformer import GPT


def open_model(folder: str, kind: str) -> tuple[GPT, object]:
    """Load in a floating-point type, or in float32 with the matrices in int8 or int4."""
    quantized = kind in ("int8", "int4")
    loaded = load_folder(Path(folder), dtype=torch.float32 if quantized else getattr(torch, kind))
    prepare(loaded.model.eval(), kind if quantized else None)
    loaded.tokenizer.end_ids = ()  # every text has its full length
    return loaded.model, loaded.tokenizer


def load(threads: int, folder: str, kind: str) -> dict[str, Measure]:
    torch.set_num_threads(threads)
    model, tokenizer = open_model(folder, kind)

    def decode(prompt: list[int], rows: int, new: int) -> float:
        sampling, started = SamplingConfig(max_new_tokens=new, temperature=0.0), time.perf_counter()
        made = sum(1 for _ in stream(model, tokenizer, [prompt] * rows, sampling, list(range(rows))))
        assert made == rows * new
        return made / (time.perf_counter() - started)

    @torch.inference_mode()
    def read(prompt: list[int]) -> float:
        started = time.perf_counter()
        cache = KVCache(model.config, 1, len(prompt), dtype=torch.bfloat16 if kind == "bfloat16" else torch.float32)
        prefill(model, cache, [prompt])
        return len(prompt) / (time.perf_counter() - started)

    decode([10] * 8, 1, 4)
    return {"decode": decode, "prefill": read}


if __name__ == "__main__":
    serve(load)
