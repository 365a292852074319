"""A training step of `transformers`' own classes: from a config, with AdamW (fused), as its documentation trains them.

`bfloat16` is autocast over float32 weights, as `TrainingArguments(bf16=True)` has it.
"""

from __future__ import annotations

import torch
import transformers
from protocol import Measure, rate, serve
from torch import nn


def make_model(architecture: str, shape: dict[str, int]) -> nn.Module:
    layers, hidden, heads = shape["layers"], shape["hidden"], shape["heads"]
    vocab, context = shape["vocab"], shape["context"]
    if architecture == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=vocab, n_positions=context, n_embd=hidden, n_layer=layers, n_head=heads,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
        )  # fmt: skip
        return transformers.GPT2LMHeadModel(config)
    config = transformers.Qwen3Config(
        vocab_size=vocab, max_position_embeddings=context, hidden_size=hidden, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=shape["kv_heads"], head_dim=hidden // heads,
        intermediate_size=shape["wide"], tie_word_embeddings=True, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return transformers.Qwen3ForCausalLM(config)


def trainer(architecture: str, dtype: str, shape: dict[str, int]) -> Measure:
    torch.manual_seed(0)
    model = make_model(architecture, shape).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    def step() -> int:
        rows = torch.randint(shape["vocab"], (shape["batch"], shape["context"]))
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16"):
            loss = model(input_ids=rows, labels=rows, use_cache=False).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss.item()
        return rows.numel()

    step()
    return lambda seconds: rate(step, seconds)


def load(threads: int, architecture: str, dtype: str, sizes: dict[str, dict[str, int]]) -> dict[str, Measure]:
    torch.set_num_threads(threads)
    return {name: trainer(architecture, dtype, shape) for name, shape in sizes.items()}


if __name__ == "__main__":
    serve(load)
