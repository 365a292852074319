"""A model's shape in the metadata of a GGUF file, in both directions.

Rotary positions that are scaled as in Llama 3.1 have no name there: the file holds the divisor of every frequency
(`rope_freqs.weight`), from which the scaling is recovered and then compared with every one of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from minigpt.checkpoint.gguf_file import GGUFFile
from minigpt.config import ArchitectureName, ModelConfig, RopeScaling
from minigpt.errors import ConfigError, ModelFolderError
from minigpt.model.positions import scaled

# How llama.cpp calls an architecture; a Mistral without a window is a Llama to it.
GGUF_NAMES: dict[str, ArchitectureName] = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gpt2": "gpt2"}
ROPE_FACTORS = "rope_freqs.weight"
# What would change the model and has no counterpart here, with the value that means nothing.
_UNSUPPORTED = {
    "expert_count": 0,
    "attention.causal": True,
    "attention.sliding_window": 0,
    "attention.scale": 0.0,
    "logit_scale": 0.0,
    "residual_scale": 0.0,
    "embedding_scale": 0.0,
}
_FACTOR_TOLERANCE = 1e-5  # of float32 factors that were computed in another order


def config_to_gguf(config: ModelConfig) -> tuple[str, dict[str, Any]]:
    """Return llama.cpp's name of the architecture, and keys and values that describe the shape.

    Whole numbers are meant as uint32, others as float32. Errors: ConfigError for what llama.cpp has no words for.
    """
    name = _gguf_name(config)
    values: dict[str, Any] = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "vocab_size": config.vocab_size,
    }
    if config.traits.norm == "layer":
        values["attention.layer_norm_epsilon"] = float(config.norm_eps)
    else:
        values["attention.layer_norm_rms_epsilon"] = float(config.norm_eps)
    if config.traits.positions == "rotary":
        values |= {
            "rope.dimension_count": config.head_dim,
            "rope.freq_base": float(config.rope_theta),
            "attention.key_length": config.head_dim,
            "attention.value_length": config.head_dim,
        }
    if config.rope_scaling is not None and config.rope_scaling.kind == "linear":
        values |= {"rope.scaling.type": "linear", "rope.scaling.factor": float(config.rope_scaling.factor)}
    return name, {f"{name}.{key}": value for key, value in values.items()}


def _gguf_name(config: ModelConfig) -> str:
    name = "llama" if config.architecture == "mistral" else config.architecture
    if name not in GGUF_NAMES:
        raise ConfigError(f"architecture {name} has no counterpart in llama.cpp; GGUF cannot hold it")
    if config.window < config.max_position_embeddings:
        raise ConfigError(
            f"a sliding window of {config.window:,} tokens in a context of {config.max_position_embeddings:,} cannot "
            f"be written: llama.cpp knows none for {name}"
        )
    if name == "qwen2" and config.head_dim * config.num_attention_heads != config.hidden_size:
        raise ConfigError(
            f"{config.num_attention_heads} heads x {config.head_dim} is not hidden_size {config.hidden_size}; "
            "llama.cpp takes that for granted in qwen2"
        )
    if config.rope_scaling is not None and config.rope_scaling.kind == "llama3" and name != "llama":
        raise ConfigError(f"rope scaling llama3 cannot be written for {name}: llama.cpp knows it for llama alone")
    return name


def rope_factors(config: ModelConfig) -> Tensor | None:
    """Return the divisors (D/2) of the frequencies under `llama3` scaling, float32; None without it."""
    if config.rope_scaling is None or config.rope_scaling.kind != "llama3":
        return None
    frequencies = _frequencies(config.head_dim, config.rope_theta)
    return frequencies / scaled(frequencies, config.rope_scaling)


def _frequencies(head_dim: int, theta: float) -> Tensor:
    return 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)


def config_from_gguf(file: GGUFFile) -> ModelConfig:
    """Read the shape of the model; what cannot be computed here is a ModelFolderError that names it."""
    name = file.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in GGUF_NAMES:
        raise ModelFolderError(
            f"{file.path}: architecture {name!r} is not supported (supported: {', '.join(GGUF_NAMES)})"
        )
    values = _Values(file, name)
    values.refuse_unsupported()
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelFolderError(f"{file.path} has no matrix 'token_embd.weight'")
    rotary = name != "gpt2"
    heads, hidden = values.whole("attention.head_count"), values.whole("embedding_length")
    head_dim = values.whole("attention.key_length", max(1, hidden // max(1, heads)))
    for key in ("attention.value_length", "rope.dimension_count"):
        if values.whole(key, head_dim) != head_dim:
            raise ModelFolderError(f"{file.path}: {name}.{key} differs from the head width {head_dim}")
    theta = values.real("rope.freq_base", 10_000.0) if rotary else 10_000.0
    try:
        return ModelConfig(
            architecture=GGUF_NAMES[name],
            vocab_size=embedding.shape[0],
            hidden_size=hidden,
            num_hidden_layers=values.whole("block_count"),
            num_attention_heads=heads,
            num_key_value_heads=values.whole("attention.head_count_kv", heads),
            head_dim=head_dim,
            intermediate_size=values.whole("feed_forward_length"),
            max_position_embeddings=values.whole("context_length"),
            rope_theta=theta,
            rope_scaling=_scaling(file, values, head_dim, theta) if rotary else None,
            norm_eps=values.real("attention.layer_norm_rms_epsilon" if rotary else "attention.layer_norm_epsilon"),
            tie_word_embeddings="output.weight" not in file.tensors,
        )
    except ConfigError as error:
        raise ModelFolderError(f"{file.path}: {error}") from error


def rounded(value: Any) -> Any:
    """Return the shortest number that a float32 from a file may have been: 9.999999747e-06 was written as 1e-05."""
    return float(str(np.float32(value))) if isinstance(value, float) else value


class _Values:
    """The metadata of one architecture, with types that are checked."""

    def __init__(self, file: GGUFFile, name: str) -> None:
        self.path, self.name = file.path, name
        self.metadata: Mapping[str, Any] = file.metadata

    def get(self, key: str) -> Any:
        return self.metadata.get(f"{self.name}.{key}")

    def wrong(self, key: str, value: Any, wanted: str) -> ModelFolderError:
        shown = "missing" if value is None else f"{str(value)[:40]!r}"
        return ModelFolderError(f"{self.path}: {self.name}.{key} is {shown}; {wanted} is needed")

    def whole(self, key: str, default: int | None = None) -> int:
        value = self.get(key)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool):
            raise self.wrong(key, value, "a whole number")
        return value

    def real(self, key: str, default: float | None = None) -> float:
        value = self.get(key)
        value = default if value is None else value
        if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
            raise self.wrong(key, value, "a number")
        return float(rounded(value))

    def refuse_unsupported(self) -> None:
        for key, neutral in _UNSUPPORTED.items():
            value = self.get(key)
            if value is not None and value != neutral:
                raise ModelFolderError(f"{self.path}: {self.name}.{key} is {str(value)[:40]}; that is not supported")


def _scaling(file: GGUFFile, values: _Values, head_dim: int, theta: float) -> RopeScaling | None:
    """Find how rotary positions are scaled."""
    factor = values.real("rope.scaling.factor", values.real("rope.scale_linear", 1.0))
    kind = values.get("rope.scaling.type")
    if kind not in (None, "none", "linear"):
        raise ModelFolderError(f"{file.path}: rope scaling {kind!r} is not supported (supported: linear, llama3)")
    # llama.cpp takes a factor without a kind for a linear one, and 0 for none.
    linear = None if kind == "none" or factor in (0.0, 1.0) else RopeScaling(kind="linear", factor=factor)
    if ROPE_FACTORS not in file.tensors:
        return linear
    if linear is not None or file.tensors[ROPE_FACTORS].shape != (head_dim // 2,):
        raise ModelFolderError(f"{file.path}: {ROPE_FACTORS} does not go with its head width or its other rope scaling")
    factors, frequencies = file.read(ROPE_FACTORS, torch.float32), _frequencies(head_dim, theta)
    if bool((factors == 1.0).all()):
        return None
    for scaling in _llama3_candidates(factors.double(), frequencies.double()):
        wanted = frequencies / scaled(frequencies, scaling)
        if bool(((wanted / factors - 1.0).abs() < _FACTOR_TOLERANCE).all()):
            return scaling
    raise ModelFolderError(f"{file.path}: {ROPE_FACTORS} is not the scaling of Llama 3.1; others are not supported")


def _llama3_candidates(factors: Tensor, frequencies: Tensor) -> Iterator[RopeScaling]:
    """Yield scalings that may have made these factors: that of Meta's models, and one that is worked out.

    Between fast and slow, (1/f - 1/F) / (1 - 1/F) is a straight line over the frequency: 1 where a frequency is kept,
    0 where it is divided by F. The line fixes three settings but for a common multiple; it is chosen so that the
    original context is that of Meta's models. Where few frequencies lie between, every line through them that leaves
    the others alone is the same scaling.
    """
    factor = float(factors.max())
    if not 1.0 < factor < math.inf:
        return
    meta = RopeScaling(kind="llama3", factor=factor)
    yield meta
    share = (1.0 / factors - 1.0 / factor) / (1.0 - 1.0 / factor)
    kept, slow = share > 1.0 - _FACTOR_TOLERANCE, share < _FACTOR_TOLERANCE
    between = ~kept & ~slow
    x, y = frequencies[between], share[between]
    ends = [(float(frequencies[kept].min()), 1.0)] if bool(kept.any()) else []
    ends += [(float(frequencies[slow].max()), 0.0)] if bool(slow.any()) else []
    if len(x) >= 2:
        slope, offset = (float(number) for number in np.polyfit(x.numpy(), y.numpy(), 1))
    elif len(x) == 1 and ends:
        slope = max((end - float(y[0])) / (place - float(x[0])) for place, end in ends)
        offset = float(y[0]) - slope * float(x[0])
    elif len(ends) == 2:
        (fast, _), (last, _) = ends
        slope = 1.0 / (fast - last)
        offset = -slope * last
    else:
        return
    width = meta.original_max_position_embeddings / (2 * math.pi * slope) if slope > 0.0 else math.inf
    low, high = -offset * width, (1.0 - offset) * width
    if 0.0 < low < high < math.inf:
        yield replace(meta, low_freq_factor=low, high_freq_factor=high)
