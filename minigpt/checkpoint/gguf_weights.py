"""The names and the order of weights in GGUF files, against ours.

llama.cpp turns the pairs (x[2i], x[2i + 1]) of a Llama's queries and keys, we turn (x[i], x[i + D/2]); the rows of both
matrices are stored in the order of the first. For all other architectures the orders agree. GPT-2 has query, key
and value in one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from minigpt.checkpoint.gguf_config import ROPE_FACTORS
from minigpt.checkpoint.gguf_file import GGUFFile
from minigpt.config import ModelConfig
from minigpt.errors import ModelFolderError
from minigpt.model.transformer import GPT

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.embed_positions": "position_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_OURS = re.compile(r"(?:model\.layers\.(\d+)\.)?(.+)\.(weight|bias)")


@dataclass(frozen=True)
class Place:
    """One tensor of a GGUF file: our weights in it, from the top, and the heads whose rows are in another order."""

    ours: tuple[str, ...]
    shape: tuple[int, ...]
    rows: tuple[int, ...]  # of each of our weights
    interleaved_heads: int | None = None


def interleave(weight: Tensor, heads: int) -> Tensor:
    """Bring rows (H*D, …) in which i and i + D/2 of a head make a pair into the order in which 2i and 2i + 1 do."""
    return weight.view(heads, 2, -1, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)


def halve(weight: Tensor, heads: int) -> Tensor:
    """Undo `interleave`."""
    return weight.view(heads, -1, 2, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)


def places(config: ModelConfig) -> dict[str, Place]:
    """Return every tensor that a GGUF file of this model has, in the order of the model.

    Errors: RuntimeError or TypeError for a shape that PyTorch cannot count.
    """
    with torch.device("meta"):
        weights = GPT(config).state_dict()
    if config.tie_word_embeddings:
        del weights["lm_head.weight"]
    turned = {}
    if config.architecture in ("llama", "mistral"):
        turned = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    found: dict[str, Place] = {}
    for ours, weight in weights.items():
        name, (rows, *rest) = _gguf_name(ours), weight.shape
        if config.architecture == "gpt2":
            name = re.sub(r"attn_[qkv]\.", "attn_qkv.", name)
        above = found.get(name, Place((), (0,), ()))
        shape = (above.shape[0] + rows, *rest)
        found[name] = Place((*above.ours, ours), shape, (*above.rows, rows), turned.get(name.split(".")[-2]))
    return found


def _gguf_name(ours: str) -> str:
    match = _OURS.fullmatch(ours)
    assert match is not None, ours
    layer, part, kind = match.groups()
    return f"{'' if layer is None else f'blk.{layer}.'}{_NAMES[part]}.{kind}"


def check_places(file: GGUFFile, config: ModelConfig) -> dict[str, Place]:
    """Return the tensors of a file; a missing, misshapen or superfluous one is a ModelFolderError that names it."""
    misfit = ModelFolderError(f"{file.path} does not hold a model of the size that its metadata tells")
    if 4 * config.num_hidden_layers > len(file.tensors):  # before a shape of a million layers is spelled out
        raise misfit
    try:
        expected = places(config)
    except (RuntimeError, TypeError) as error:  # more bytes, or a larger number, than PyTorch can count
        raise misfit from error
    missing = sorted(expected.keys() - file.tensors.keys())
    extra = sorted(file.tensors.keys() - expected.keys() - {ROPE_FACTORS})
    if missing or extra:
        what = f"has no tensor {missing[0]!r}" if missing else f"has a tensor {extra[0]!r} with no place"
        raise ModelFolderError(f"{file.path} {what} in a model of architecture {config.architecture}")
    for name, place in expected.items():
        found = file.tensors[name].shape
        if found != place.shape:
            raise ModelFolderError(
                f"{file.path}: {name} is {list(found)}, but the metadata asks for {list(place.shape)}"
            )
    return expected


def read_weights(file: GGUFFile, expected: dict[str, Place], dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Yield our weights one by one, dequantised, as `dtype`; a tied output embedding is not among them."""
    for name, place in expected.items():
        stored = file.read(name, dtype)
        if place.interleaved_heads is not None:
            stored = halve(stored, place.interleaved_heads)
        parts = (stored,) if len(place.ours) == 1 else [part.clone() for part in torch.split(stored, list(place.rows))]
        yield from zip(place.ours, parts, strict=True)


def stored_weight(place: Place, weight: Callable[[str], Tensor]) -> Tensor:
    """Put our weights together as one tensor of a GGUF file."""
    parts = [weight(ours) for ours in place.ours]
    whole = torch.cat(parts) if len(parts) > 1 else parts[0]
    return whole if place.interleaved_heads is None else interleave(whole, place.interleaved_heads)
