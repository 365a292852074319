"""litgpt's own model and generation on weights that its own converter made from the same folder."""

from __future__ import annotations

import shutil
import tempfile
import time
from pathlib import Path

import torch
from litgpt import GPT, Config
from litgpt.generate.base import generate
from litgpt.scripts.convert_hf_checkpoint import convert_hf_checkpoint
from protocol import Measure, serve


def convert(folder: Path, place: Path, name: str) -> GPT:
    """Convert a copy, since the result is written beside the weights."""
    for part in (*folder.glob("*.json"), *folder.glob("*.safetensors")):
        shutil.copy(part, place)
    convert_hf_checkpoint(place, model_name=name)
    model = GPT(Config.from_name(name))
    model.load_state_dict(torch.load(place / "lit_model.pth", mmap=True, weights_only=True))
    return model


def load(threads: int, folder: str, kind: str, name: str) -> dict[str, Measure]:
    torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory() as place:
        model = convert(Path(folder), Path(place), name).to(getattr(torch, kind)).eval()

    def make_room(tokens: int) -> None:
        model.clear_kv_cache()
        model.max_seq_length = tokens
        model.set_kv_cache(batch_size=1)

    @torch.inference_mode()
    def decode(prompt: list[int], rows: int, new: int) -> float:
        assert rows == 1, "litgpt writes one text at a time"
        started = time.perf_counter()
        make_room(len(prompt) + new)
        out = generate(model, torch.tensor(prompt), len(prompt) + new, temperature=0.0, top_k=1, eos_id=None)
        assert len(out) == len(prompt) + new
        return new / (time.perf_counter() - started)

    @torch.inference_mode()
    def read(prompt: list[int]) -> float:
        started = time.perf_counter()
        make_room(len(prompt))
        model(torch.tensor([prompt]), torch.arange(len(prompt)), input_pos_maxp1=len(prompt))
        return len(prompt) / (time.perf_counter() - started)

    decode([10] * 8, 1, 4)
    return {"decode": decode, "prefill": read}


if __name__ == "__main__":
    serve(load)
