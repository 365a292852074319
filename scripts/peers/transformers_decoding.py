"""`generate` and a forward pass of `transformers` on the same folder."""

from __future__ import annotations

import time

import torch
import transformers
from protocol import Measure, serve


def load(threads: int, folder: str, kind: str) -> dict[str, Measure]:
    torch.set_num_threads(threads)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, kind)).eval()
    model.generation_config.eos_token_id = None  # every text has its full length
    model.generation_config.pad_token_id = 0

    @torch.inference_mode()
    def decode(prompt: list[int], rows: int, new: int) -> float:
        tokens = torch.tensor([prompt] * rows)
        started = time.perf_counter()
        out = model.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=new, do_sample=False)
        assert out.shape == (rows, len(prompt) + new)
        return rows * new / (time.perf_counter() - started)

    @torch.inference_mode()
    def read(prompt: list[int]) -> float:
        started = time.perf_counter()
        model(torch.tensor([prompt]), use_cache=True, logits_to_keep=1)
        return len(prompt) / (time.perf_counter() - started)

    decode([10] * 8, 1, 4)
    return {"decode": decode, "prefill": read}


if __name__ == "__main__":
    serve(load)
