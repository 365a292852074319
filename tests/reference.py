"""Naive float64 loops over heads and tokens: what the model, the loss and the sampler must agree with.

Nothing here shares code with the package; formulas are written out from the papers.
"""

from __future__ import annotations

import cmath
import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from minigpt.config import ModelConfig
from minigpt.model.transformer import GPT

Array = NDArray[np.float64]
LLAMAS = ("qwen3", "llama", "qwen2", "mistral")


def weights_of(model: GPT) -> dict[str, Array]:
    return {name: weight.detach().double().numpy() for name, weight in model.state_dict().items()}


def logits(weights: Mapping[str, Array], config: ModelConfig, tokens: Sequence[int]) -> Array:
    """(T, V) for one row; a token sees itself and what lies less than one context, or window, before it."""
    x = [embed(weights, config, token, position) for position, token in enumerate(tokens)]
    for layer in range(config.num_hidden_layers):
        x = block(weights, config, f"model.layers.{layer}", x)
    if config.architecture != "transformer-2017":
        x = [norm(weights, config, "model.norm", vector) for vector in x]
    return np.array([weights["lm_head.weight"] @ vector for vector in x])


def embed(weights: Mapping[str, Array], config: ModelConfig, token: int, position: int) -> Array:
    x: Array = weights["model.embed_tokens.weight"][token].copy()
    if config.architecture == "gpt2":
        x += weights["model.embed_positions.weight"][position]
    if config.architecture == "transformer-2017":
        x *= math.sqrt(config.hidden_size)
        for place in range(config.hidden_size):
            angle = position / 10_000 ** ((place - place % 2) / config.hidden_size)
            x[place] += math.cos(angle) if place % 2 else math.sin(angle)
    return x


def block(weights: Mapping[str, Array], config: ModelConfig, prefix: str, x: list[Array]) -> list[Array]:
    first, second = f"{prefix}.input_layernorm", f"{prefix}.post_attention_layernorm"
    if config.architecture == "transformer-2017":
        attended = attention(weights, config, f"{prefix}.self_attn", x)
        x = [norm(weights, config, first, a + b) for a, b in zip(x, attended, strict=True)]
        return [norm(weights, config, second, v + mlp(weights, config, f"{prefix}.mlp", v)) for v in x]
    normed = [norm(weights, config, first, vector) for vector in x]
    attended = attention(weights, config, f"{prefix}.self_attn", normed)
    x = [a + b for a, b in zip(x, attended, strict=True)]
    return [v + mlp(weights, config, f"{prefix}.mlp", norm(weights, config, second, v)) for v in x]


def attention(weights: Mapping[str, Array], config: ModelConfig, prefix: str, x: list[Array]) -> list[Array]:
    heads, width = config.num_attention_heads, config.head_dim
    shared = heads // config.num_key_value_heads
    band = min(size for size in (config.sliding_window, config.max_position_embeddings) if size is not None)
    outputs = []
    for position in range(len(x)):
        out = np.zeros(heads * width)
        for head in range(heads):
            query = head_vector(weights, config, prefix, "q", x[position], head, position)
            scores, values = [], []
            for other in range(max(0, position - band + 1), position + 1):
                key = head_vector(weights, config, prefix, "k", x[other], head // shared, other)
                values.append(head_vector(weights, config, prefix, "v", x[other], head // shared, other))
                scores.append(float(query @ key) / math.sqrt(width))
            for share, value in zip(softmax(scores), values, strict=True):
                out[head * width : (head + 1) * width] += share * value
        outputs.append(linear(weights, f"{prefix}.o_proj", out))
    return outputs


def head_vector(
    weights: Mapping[str, Array], config: ModelConfig, prefix: str, part: str, x: Array, head: int, position: int
) -> Array:
    width = config.head_dim
    vector = linear(weights, f"{prefix}.{part}_proj", x)[head * width : (head + 1) * width]
    if part == "v":
        return vector
    if config.architecture == "qwen3":
        vector = norm(weights, config, f"{prefix}.{part}_norm", vector)
    if config.architecture in LLAMAS:
        turned = vector.copy()
        for pair in range(width // 2):
            angle = position * scaled(config, config.rope_theta ** (-2 * pair / width))
            number = complex(vector[pair], vector[pair + width // 2]) * cmath.exp(1j * angle)
            turned[pair], turned[pair + width // 2] = number.real, number.imag
        vector = turned
    return vector


def scaled(config: ModelConfig, frequency: float) -> float:
    """Llama 3.1: whole turns in the context of the training say whether a frequency is kept, slowed down or between."""
    scaling = config.rope_scaling
    if scaling is None:
        return frequency
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    turns = scaling.original_max_position_embeddings / (2 * math.pi / frequency)
    if scaling.kind == "linear" or turns < low:
        return frequency / scaling.factor
    if turns > high:
        return frequency
    share = (turns - low) / (high - low)
    return share * frequency + (1 - share) * frequency / scaling.factor


def mlp(weights: Mapping[str, Array], config: ModelConfig, prefix: str, x: Array) -> Array:
    wide = linear(weights, f"{prefix}.up_proj", x)
    if config.architecture in LLAMAS:
        gate = linear(weights, f"{prefix}.gate_proj", x)
        wide = wide * np.array([g / (1 + math.exp(-g)) for g in gate])
    elif config.architecture == "gpt2":
        wide = np.array([v / 2 * (1 + math.tanh(math.sqrt(2 / math.pi) * (v + 0.044715 * v**3))) for v in wide])
    else:
        wide = np.array([max(0.0, v) for v in wide])
    return linear(weights, f"{prefix}.down_proj", wide)


def norm(weights: Mapping[str, Array], config: ModelConfig, prefix: str, x: Array) -> Array:
    gain = weights[f"{prefix}.weight"]
    if config.architecture in LLAMAS:
        return gain * x / math.sqrt(sum(v * v for v in x) / len(x) + config.norm_eps)
    mean = sum(x) / len(x)
    variance = sum((v - mean) ** 2 for v in x) / len(x)
    return gain * (x - mean) / math.sqrt(variance + config.norm_eps) + weights[f"{prefix}.bias"]


def linear(weights: Mapping[str, Array], prefix: str, x: Array) -> Array:
    return np.asarray(weights[f"{prefix}.weight"] @ x + weights.get(f"{prefix}.bias", 0.0))


def softmax(scores: Sequence[float]) -> list[float]:
    powers = [math.exp(score - max(scores)) for score in scores]
    return [power / math.fsum(powers) for power in powers]


def cross_entropy(hidden: Tensor, weight: Tensor, targets: Sequence[int]) -> list[float]:
    """The loss of each row of `hidden` (N, C) in nats, 0 where the target is -100."""
    losses = []
    for row, target in zip(hidden.double().numpy(), targets, strict=True):
        scores = [float(row @ column) for column in weight.double().numpy()]
        top = max(scores)
        total = top + math.log(math.fsum(math.exp(score - top) for score in scores))
        losses.append(0.0 if target == -100 else total - scores[target])
    return losses


def distribution(
    scores: Sequence[float],
    *,
    temperature: float,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
) -> list[float]:
    """What the next token is drawn from: temperature, then top-k (with all that tie), top-p, min-p."""
    probs = dict(enumerate(softmax([score / temperature for score in scores])))
    if top_k is not None:
        least = sorted(scores, reverse=True)[:top_k][-1]
        probs = renormed({token: p for token, p in probs.items() if scores[token] >= least})
    if top_p is not None:
        kept: dict[int, float] = {}
        for token in sorted(probs, key=lambda token: (-scores[token], token)):
            if math.fsum(kept.values()) >= top_p:
                break
            kept[token] = probs[token]
        probs = renormed(kept)
    if min_p is not None:
        probs = renormed({token: p for token, p in probs.items() if p >= min_p * max(probs.values())})
    return [probs.get(token, 0.0) for token in range(len(scores))]


def renormed(probs: dict[int, float]) -> dict[int, float]:
    total = math.fsum(probs.values())
    return {token: p / total for token, p in probs.items()}
