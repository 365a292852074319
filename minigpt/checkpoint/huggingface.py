"""Configs and weight names of `transformers`, in both directions: qwen3, llama, gpt2.

Inside, every architecture uses the names of Llama; only gpt2 is stored under other names, with its matrices
transposed and query, key and value in one. `transformer-2017` has no counterpart there and keeps our own names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from minigpt.config import ModelConfig
from minigpt.errors import ConfigError, ModelFolderError

CLASSES = {"qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM", "gpt2": "GPT2LMHeadModel"}
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


def config_to_hf(config: ModelConfig, *, end_of_text_id: int, bos_id: int | None, pad_id: int | None) -> dict[str, Any]:
    """Spell a config as the `config.json` of `transformers`."""
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
    fields = {
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
    return fields | {
        "hidden_act": "silu",
        "attention_bias": False,
        "rope_theta": config.rope_theta,  # read by transformers 4
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},  # read by transformers 5
    }


def config_from_hf(raw: Mapping[str, Any], where: str) -> ModelConfig:
    """Read a `config.json`; whatever this model cannot compute is a ModelFolderError that names it."""
    kind = raw.get("model_type")
    try:
        if kind == "gpt2":
            return _gpt2_config(raw, where)
        if kind in ("llama", "qwen3", "transformer-2017"):
            return _llama_config(raw, kind, where)
    except KeyError as error:
        raise ModelFolderError(f"{where}: no {error.args[0]!r}; the model's shape is incomplete") from error
    except ConfigError as error:
        raise ModelFolderError(f"{where}: {error}") from error
    except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise ModelFolderError(f"{where}: a setting is of the wrong kind ({error}); copy the file again") from error
    raise ModelFolderError(
        f"{where}: model_type {kind!r} is not supported (supported: qwen3, llama, gpt2, transformer-2017)"
    )


def _llama_config(raw: Mapping[str, Any], kind: Any, where: str) -> ModelConfig:
    activation = raw.get("hidden_act", "silu")
    if activation != ("relu" if kind == "transformer-2017" else "silu"):
        raise ModelFolderError(f"{where}: hidden_act {activation!r} is not supported for {kind}")
    for name in ("attention_bias", "mlp_bias", "use_sliding_window"):
        if raw.get(name):
            raise ModelFolderError(f"{where}: {name} is set; that is not supported")
    heads, hidden = raw["num_attention_heads"], raw["hidden_size"]
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
        rope_theta=_rope_theta(raw, where),
        norm_eps=raw.get("rms_norm_eps", 1e-6),
        tie_word_embeddings=raw.get("tie_word_embeddings", False),
        dropout=raw.get("attention_dropout", 0.0),
    )


def _rope_theta(raw: Mapping[str, Any], where: str) -> float:
    """Find theta where either generation of `transformers` keeps it; other kinds of rope are refused."""
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise ModelFolderError(f"{where}: rope type {kind!r} is not supported (supported: default)")
    return float(rope.get("rope_theta", raw.get("rope_theta", 10_000.0)))


def _gpt2_config(raw: Mapping[str, Any], where: str) -> ModelConfig:
    activation = raw.get("activation_function", "gelu_new")
    if activation not in ("gelu_new", "gelu_pytorch_tanh"):
        raise ModelFolderError(f"{where}: activation_function {activation!r} is not supported for gpt2")
    if raw.get("scale_attn_by_inverse_layer_idx") or not raw.get("scale_attn_weights", True):
        raise ModelFolderError(f"{where}: this way of scaling attention is not supported for gpt2")
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


def weights_to_hf(weights: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Rename our weights to those of `transformers`; a tied output embedding is left out."""
    weights = {k: v for k, v in weights.items() if not (config.tie_word_embeddings and k == "lm_head.weight")}
    if config.architecture != "gpt2":
        return weights
    renamed: dict[str, Tensor] = {}
    for name, weight in weights.items():
        if re.search(r"self_attn\.[kv]_proj", name):
            continue
        if "self_attn.q_proj" in name:
            parts = [weights[name.replace("q_proj", part)] for part in ("q_proj", "k_proj", "v_proj")]
            renamed[_gpt2_name(name.replace("self_attn.q_proj", "attn.c_attn"))] = torch.cat(parts).t().contiguous()
            continue
        transposed = weight.dim() == 2 and "layers" in name
        renamed[_gpt2_name(name)] = weight.t().contiguous() if transposed else weight
    return renamed


def without_buffers(weights: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Leave out the constants that older files carry, and give GPT-2's names the prefix that the first ones lack."""
    if config.architecture != "gpt2":
        return {name: weight for name, weight in weights.items() if not name.endswith("rotary_emb.inv_freq")}
    return {
        name if name.startswith(("transformer.", "lm_head.")) else f"transformer.{name}": weight
        for name, weight in weights.items()
        if not re.search(r"\.attn\.(masked_)?bias$", name)
    }


def weights_from_hf(weights: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Rename the weights of `transformers` to ours, the reverse of `weights_to_hf`."""
    if config.architecture != "gpt2":
        return dict(weights)
    renamed: dict[str, Tensor] = {}
    for name, weight in weights.items():
        ours = _our_name(name)
        value = weight.t().contiguous() if weight.dim() == 2 and ".layers." in ours else weight
        if "attn.c_attn" not in ours:
            renamed[ours] = value
            continue
        for part, piece in zip(("q_proj", "k_proj", "v_proj"), value.chunk(3), strict=True):
            renamed[ours.replace("attn.c_attn", f"self_attn.{part}")] = piece.contiguous()
    return renamed


def _gpt2_name(name: str) -> str:
    for ours, theirs in GPT2_NAMES.items():
        name = name.replace(ours, theirs)
    return name.replace("model.layers.", "transformer.h.")


def _our_name(name: str) -> str:
    name = name.replace("transformer.h.", "model.layers.")
    for ours, theirs in GPT2_NAMES.items():
        name = name.replace(f"{theirs}.", f"{ours}.")
    return name
