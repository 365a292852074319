"""Configs and weight names of `transformers`, in both directions: qwen3, llama, qwen2, mistral, gpt2.

Inside, every architecture uses the names of Llama; only gpt2 is stored under other names, with its matrices
transposed and query, key and value in one. `transformer-2017` has no counterpart there and keeps our own names.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from minigpt.config import ModelConfig, RopeScaling
from minigpt.errors import ConfigError, ModelFolderError

CLASSES = {
    "qwen3": "Qwen3ForCausalLM",
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "mistral": "MistralForCausalLM",
    "gpt2": "GPT2LMHeadModel",
}
LLAMA_KINDS = ("qwen3", "llama", "qwen2", "mistral", "transformer-2017")
GPT2_NAMES = {
    "model.embed_tokens": "transformer.wte",
    "model.embed_positions": "transformer.wpe",
    "model.norm": "transformer.ln_f",
    "input_layernorm": "ln_1",
    "post_attention_layernorm": "ln_2",
    "self_attn.o_proj": "attn.c_proj",
    "mlp.up_proj": "mlp.c_fc",
    "mlp.down_proj": "mlp.c_proj",
}
GPT2_FUSED = ("q_proj", "k_proj", "v_proj")  # in this order in one matrix
_FUSED_PART = re.compile(rf"self_attn\.({'|'.join(GPT2_FUSED)})")
# Settings that change what a model computes, with the values under which it computes what ours does.
PLAIN: dict[str, tuple[Any, ...]] = {
    "use_sliding_window": (None, False),  # would differ from layer to layer
    "mlp_bias": (None, False),
    "partial_rotary_factor": (None, 1.0),
    "is_causal": (None, True),
    "is_encoder_decoder": (None, False),
    "add_cross_attention": (None, False),
    "scale_attn_by_inverse_layer_idx": (None, False),
    "scale_attn_weights": (None, True),
    "per_layer_config": (None, {}),
}
ROPE_SETTINGS = {
    "rope_type", "type", "rope_theta", "partial_rotary_factor",
    "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings",
}  # fmt: skip
MISTRAL_WINDOW = 4096  # of a config that names none; null is none


def config_to_hf(config: ModelConfig, *, end_of_text_id: int, bos_id: int | None, pad_id: int | None) -> dict[str, Any]:
    """Spell a config as the `config.json` of `transformers`, for weights in float32."""
    shared = {
        "architectures": [CLASSES.get(config.architecture, "MinigptForCausalLM")],
        "model_type": config.architecture,
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": config.tie_word_embeddings,
        "dtype": "float32",
        "use_cache": True,
        "bos_token_id": end_of_text_id if bos_id is None else bos_id,
        "eos_token_id": end_of_text_id,
        "pad_token_id": pad_id,
    }
    return shared | (_gpt2_fields(config) if config.architecture == "gpt2" else _llama_fields(config))


def _gpt2_fields(config: ModelConfig) -> dict[str, Any]:
    return {
        "n_positions": config.max_position_embeddings,
        "n_embd": config.hidden_size,
        "n_layer": config.num_hidden_layers,
        "n_head": config.num_attention_heads,
        "n_inner": config.intermediate_size,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": config.norm_eps,
        "resid_pdrop": config.dropout,
        "embd_pdrop": config.dropout,
        "attn_pdrop": config.dropout,
    }


def _llama_fields(config: ModelConfig) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate_size,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.norm_eps,
        "attention_dropout": config.dropout,
    }
    if config.traits.positions != "rotary":
        return fields | {"hidden_act": config.traits.mlp}
    fields |= {"hidden_act": "silu"} | _rope_fields(config)
    if config.architecture in ("qwen3", "llama"):
        fields["attention_bias"] = False  # qwen2 always has biases, mistral never, and neither has a setting for it
    if config.architecture == "mistral":
        fields["sliding_window"] = config.sliding_window
    return fields


def _rope_fields(config: ModelConfig) -> dict[str, Any]:
    """Theta and scaling twice: as `transformers` 4 reads them, and as `transformers` 5 does."""
    scaling = config.rope_scaling
    if scaling is None:
        rope: dict[str, Any] = {"rope_type": "default"}
    elif scaling.kind == "linear":
        rope = {"rope_type": "linear", "factor": scaling.factor}
    else:
        rope = {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_position_embeddings,
        }
    older = {"rope_theta": config.rope_theta, "rope_scaling": None if scaling is None else rope}
    return older | {"rope_parameters": rope | {"rope_theta": config.rope_theta}}


def config_from_hf(raw: Mapping[str, Any], where: str) -> ModelConfig:
    """Read a `config.json`; whatever this model cannot compute is a ModelFolderError that names it.

    A file that names Python code for its own classes (`auto_map`) is read as the standard model of its `model_type`;
    the code is never looked at.
    """
    kind = raw.get("model_type")
    if kind != "gpt2" and kind not in LLAMA_KINDS:
        supported = ", ".join((*CLASSES, "transformer-2017"))
        raise ModelFolderError(f"{where}: model_type {kind!r} is not supported (supported: {supported})")
    try:
        _check_settings(raw, where)
        return _gpt2_config(raw, where) if kind == "gpt2" else _llama_config(raw, kind, where)
    except KeyError as error:
        raise ModelFolderError(f"{where}: no {error.args[0]!r}; the model's shape is incomplete") from error
    except ConfigError as error:
        raise ModelFolderError(f"{where}: {error}") from error
    except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise ModelFolderError(f"{where}: a setting is of the wrong kind ({error}); copy the file again") from error


def _check_settings(raw: Mapping[str, Any], where: str) -> None:
    """Refuse weights that are not stored plainly, and settings under which the model would compute something else."""
    for name in ("quantization_config", "compression_config"):
        if raw.get(name):
            method = raw[name].get("quant_method", "an unnamed method")
            raise ModelFolderError(
                f"{where}: the weights are quantised ({method}), which is not supported; take the model in float32, "
                "float16 or bfloat16, or its GGUF file through minigpt import"
            )
    for name, plain in PLAIN.items():
        if raw.get(name) not in plain:
            raise ModelFolderError(f"{where}: {name} is {str(raw[name])[:40]}; that is not supported")


def _llama_config(raw: Mapping[str, Any], kind: Any, where: str) -> ModelConfig:
    activation = raw.get("hidden_act", "silu")
    if activation not in (("relu",) if kind == "transformer-2017" else ("silu", "swish")):  # two names of one function
        raise ModelFolderError(f"{where}: hidden_act {activation!r} is not supported for {kind}")
    if raw.get("attention_bias") and kind != "qwen2":
        raise ModelFolderError(f"{where}: attention_bias is set; that is not supported for {kind}")
    window = raw.get("sliding_window", MISTRAL_WINDOW) if kind == "mistral" else None
    for layer in raw.get("layer_types") or ():
        if layer != ("full_attention" if window is None else "sliding_attention"):
            raise ModelFolderError(f"{where}: layer_types has {layer!r}; that is not supported here for {kind}")
    heads, hidden = raw["num_attention_heads"], raw["hidden_size"]
    theta, scaling = _rope(raw, where)
    return ModelConfig(
        architecture=kind,
        vocab_size=raw["vocab_size"],
        hidden_size=hidden,
        num_hidden_layers=raw["num_hidden_layers"],
        num_attention_heads=heads,
        num_key_value_heads=raw.get("num_key_value_heads") or heads,
        head_dim=raw.get("head_dim") or hidden // heads,
        intermediate_size=raw["intermediate_size"],
        max_position_embeddings=raw["max_position_embeddings"],
        rope_theta=theta,
        rope_scaling=scaling,
        sliding_window=window,
        norm_eps=raw.get("rms_norm_eps", 1e-6),
        tie_word_embeddings=raw.get("tie_word_embeddings", False),
        dropout=raw.get("attention_dropout", 0.0),
    )


def _rope(raw: Mapping[str, Any], where: str) -> tuple[float, RopeScaling | None]:
    """Find theta and scaling where either generation of `transformers` keeps them; other kinds of rope are refused."""
    rope = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    kinds = {rope[name] for name in ("rope_type", "type") if rope.get(name) is not None} or {"default"}
    for kind in sorted(kinds - {"default", "linear", "llama3"}):
        raise ModelFolderError(f"{where}: rope type {kind!r} is not supported (supported: default, linear, llama3)")
    if len(kinds) > 1:
        raise ModelFolderError(f"{where}: rope type is both {' and '.join(sorted(kinds))}; leave one of them")
    for name, value in rope.items():
        if value is not None and (name not in ROPE_SETTINGS or (name == "partial_rotary_factor" and value != 1.0)):
            raise ModelFolderError(f"{where}: rope setting {name} is {str(value)[:40]}; that is not supported")
    theta = float(rope.get("rope_theta", raw.get("rope_theta", 10_000.0)))
    (kind,) = kinds
    if kind == "default":
        return theta, None
    if kind == "linear":
        return theta, RopeScaling(kind="linear", factor=rope["factor"])
    # Some files have the length of the first training outside of the rope settings.
    first = rope.get("original_max_position_embeddings") or raw["original_max_position_embeddings"]
    other = raw.get("original_max_position_embeddings", first)
    if other not in (None, first):
        raise ModelFolderError(f"{where}: original_max_position_embeddings is both {first} and {other}; leave one")
    return theta, RopeScaling(
        kind="llama3",
        factor=rope["factor"],
        low_freq_factor=rope["low_freq_factor"],
        high_freq_factor=rope["high_freq_factor"],
        original_max_position_embeddings=first,
    )


def _gpt2_config(raw: Mapping[str, Any], where: str) -> ModelConfig:
    activation = raw.get("activation_function", "gelu_new")
    if activation not in ("gelu_new", "gelu_pytorch_tanh"):
        raise ModelFolderError(f"{where}: activation_function {activation!r} is not supported for gpt2")
    heads, hidden = raw["n_head"], raw["n_embd"]
    return ModelConfig(
        architecture="gpt2",
        vocab_size=raw["vocab_size"],
        hidden_size=hidden,
        num_hidden_layers=raw["n_layer"],
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=hidden // heads,
        intermediate_size=raw.get("n_inner") or 4 * hidden,
        max_position_embeddings=raw["n_positions"],
        norm_eps=raw.get("layer_norm_epsilon", 1e-5),
        tie_word_embeddings=raw.get("tie_word_embeddings", True),
        dropout=raw.get("resid_pdrop", 0.0),
    )


def layout(names: Iterable[str], config: ModelConfig) -> dict[str, tuple[str, ...]]:
    """Map the name of each weight in the files of `transformers` to ours: one, or three where GPT-2 has q, k, v in one.

    A tied output embedding is not stored.
    """
    stored: dict[str, tuple[str, ...]] = {}
    for name in names:
        if config.tie_word_embeddings and name == "lm_head.weight":
            continue
        if config.architecture == "gpt2" and (part := _FUSED_PART.search(name)):
            parts = tuple(name.replace(part[0], f"self_attn.{other}") for other in GPT2_FUSED)
            stored[stored_name(name, config)] = parts
        else:
            stored[stored_name(name, config)] = (name,)
    return stored


def stored_name(name: str, config: ModelConfig) -> str:
    """Return what `transformers` calls a weight or a module of ours; in GPT-2 query, key and value are one of them."""
    if config.architecture != "gpt2":
        return name
    name = _FUSED_PART.sub("attn.c_attn", name)
    for ours, theirs in GPT2_NAMES.items():
        name = name.replace(ours, theirs)
    return name.replace("model.layers.", "transformer.h.")


def to_stored(parts: Sequence[Tensor], names: Sequence[str], config: ModelConfig) -> Tensor:
    """Turn weights of ours, one or the three that `layout` puts together, into the one that is stored."""
    whole = parts[0] if len(parts) == 1 else torch.cat(tuple(parts))
    return whole.t().contiguous() if _transposed(whole.dim(), names[0], config) else whole


def stored_shape(shapes: Sequence[Sequence[int]], names: Sequence[str], config: ModelConfig) -> tuple[int, ...]:
    """Return the shape of what `to_stored` makes of weights with these shapes."""
    whole = (sum(shape[0] for shape in shapes), *shapes[0][1:])
    return whole[::-1] if _transposed(len(whole), names[0], config) else whole


def from_stored(weight: Tensor, names: Sequence[str], config: ModelConfig) -> list[Tensor]:
    """Return views of a stored weight in the form of ours, the reverse of `to_stored`."""
    whole = weight.t() if _transposed(weight.dim(), names[0], config) else weight
    return list(whole.chunk(len(names)))


def same_form(dimensions: int, names: Sequence[str], config: ModelConfig) -> bool:
    """Tell whether a weight of one or two dimensions is stored as ours is."""
    return len(names) == 1 and not _transposed(dimensions, names[0], config)


def known_name(name: str, config: ModelConfig) -> str | None:
    """Return the full name of a stored weight, or None for a constant that older files carry along.

    The first files of GPT-2 lack the prefix `transformer.`, and hold its masks; those of Llama hold rotary frequencies.
    """
    if config.architecture != "gpt2":
        return None if name.endswith("rotary_emb.inv_freq") else name
    if re.search(r"(^|\.)h\.\d+\.attn\.(masked_)?bias$", name):
        return None
    return name if name.startswith(("transformer.", "lm_head.")) else f"transformer.{name}"


def _transposed(dimensions: int, name: str, config: ModelConfig) -> bool:
    """GPT-2's blocks multiply from the left: their matrices are (in, out)."""
    return config.architecture == "gpt2" and dimensions == 2 and "layers." in name
