"""A step of litgpt's model class, in the shape of its Qwen3 models, with AdamW (fused) and its own loss in chunks."""

from __future__ import annotations

import torch
from litgpt import GPT, Config
from litgpt.utils import chunked_cross_entropy
from protocol import Measure, rate, serve
from torch import nn


def trainer(
    layers: int, hidden: int, heads: int, kv_heads: int, wide: int, context: int, vocab: int, batch: int
) -> Measure:
    torch.manual_seed(0)
    config = Config(
        block_size=context, vocab_size=vocab, padded_vocab_size=vocab, n_layer=layers, n_head=heads, n_embd=hidden,
        n_query_groups=kv_heads, head_size=hidden // heads, intermediate_size=wide, rotary_percentage=1.0,
        parallel_residual=False, bias=False, norm_class_name="RMSNorm", mlp_class_name="LLaMAMLP", norm_qk=True,
    )  # fmt: skip
    model = GPT(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    def step() -> int:
        rows = torch.randint(vocab, (batch, context + 1))
        loss = chunked_cross_entropy(model(rows[:, :-1].contiguous()), rows[:, 1:].contiguous())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss.item()
        return batch * context

    step()
    return lambda seconds: rate(step, seconds)


def load(threads: int, sizes: dict[str, dict[str, int]]) -> dict[str, Measure]:
    torch.set_num_threads(threads)
    return {name: trainer(**shape) for name, shape in sizes.items()}


if __name__ == "__main__":
    serve(load)
