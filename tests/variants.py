"""Every architecture option, as models of two layers, 32 wide, whose weights are far from their first values."""

from __future__ import annotations

from dataclasses import replace

import torch

from minigpt.config import ModelConfig, RopeScaling
from minigpt.model.transformer import GPT

VOCAB, CONTEXT = 61, 16

_ROTARY = ModelConfig(
    architecture="qwen3",
    vocab_size=VOCAB,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    intermediate_size=48,
    max_position_embeddings=CONTEXT,
    rope_theta=500.0,
)
_LAYER_NORM = replace(_ROTARY, norm_eps=1e-5, rope_theta=10_000.0)  # the default: it has no place in these configs

VARIANTS: dict[str, ModelConfig] = {
    "qwen3": _ROTARY,
    "qwen3-untied": replace(_ROTARY, tie_word_embeddings=False),
    "qwen3-ungrouped": replace(_ROTARY, num_key_value_heads=4),
    "qwen3-one-kv-head": replace(_ROTARY, num_key_value_heads=1),
    "qwen3-wide-heads": replace(_ROTARY, head_dim=12),
    "qwen3-heads-of-16": replace(_ROTARY, head_dim=16),  # for which a CPU has attention of its own
    "llama": replace(_ROTARY, architecture="llama"),
    "llama-untied-ungrouped": replace(
        _ROTARY, architecture="llama", num_key_value_heads=4, tie_word_embeddings=False, norm_eps=1e-5
    ),
    # Its four frequencies turn 1.27, 0.27, 0.06 and 0.01 times in 8 tokens: kept, between, and two slowed down.
    "llama-long-rope": replace(
        _ROTARY,
        architecture="llama",
        rope_scaling=RopeScaling(
            kind="llama3", factor=4.0, low_freq_factor=0.1, high_freq_factor=1.0, original_max_position_embeddings=8
        ),
    ),
    "qwen2": replace(_ROTARY, architecture="qwen2"),
    "mistral": replace(_ROTARY, architecture="mistral", sliding_window=6),
    "mistral-heads-of-16": replace(_ROTARY, architecture="mistral", sliding_window=6, head_dim=16),
    "gpt2": replace(_LAYER_NORM, architecture="gpt2", num_key_value_heads=4),
    "gpt2-untied": replace(_LAYER_NORM, architecture="gpt2", num_key_value_heads=4, tie_word_embeddings=False),
    "transformer-2017": replace(_LAYER_NORM, architecture="transformer-2017", num_key_value_heads=4),
    "transformer-2017-grouped-untied": replace(_LAYER_NORM, architecture="transformer-2017", tie_word_embeddings=False),
}
ENDLESS = {name: config for name, config in VARIANTS.items() if config.architecture != "gpt2"}


def make_model(config: ModelConfig, seed: int = 0) -> GPT:
    """A model in evaluation mode with large random weights, biases and gains, so that no part is without effect."""
    generator = torch.Generator().manual_seed(seed)
    model = GPT(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.normal_(0.0, 0.25 if weight.dim() == 2 else 0.2, generator=generator)
            if weight.dim() == 1 and name.endswith("weight"):
                weight.add_(1.0)
    return model


def random_tokens(rows: int, length: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(0, VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))
