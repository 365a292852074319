"""A decoder's whole forward pass in one call of `native.c`: a token alone has no time for a thousand calls."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Protocol, cast

import torch
from torch import Tensor, nn

from minigpt.model.cache import KVCache
from minigpt.model.native import Matrix, described, library
from minigpt.model.positions import rotary_frequencies
from minigpt.model.quantize import QuantizedEmbedding
from minigpt.model.transformer import Block, Decoder, Norm

Pass = Callable[[Tensor, KVCache], Tensor]
_LANES = 8  # numbers that `native.c` works on side by side
_pointer, _count = ctypes.c_void_p, ctypes.c_long


class Fast(Protocol):
    """A linear layer of a model that is laid out for generation."""

    def native(self) -> Matrix | None:
        """What `native.c` has to know of the layer, if it can do its work."""


class _Layer(ctypes.Structure):
    _fields_ = [
        *((name, Matrix) for name in ("qkv", "o", "wide", "down")),
        *((name, _pointer) for name in ("attention_norm", "mlp_norm", "q_norm", "k_norm")),
    ]


class _Model(ctypes.Structure):
    kept: Tensor  # the frequencies: the modules have all else
    _fields_ = [
        *((name, _count) for name in ("layers", "hidden", "heads", "kv_heads", "head_dim", "width")),
        ("eps", ctypes.c_float),
        *((name, _pointer) for name in ("frequencies", "norm")),
        ("table", Matrix),
        ("layer", ctypes.POINTER(_Layer)),
    ]


class _Pass(ctypes.Structure):
    _fields_ = [
        *((name, _pointer) for name in ("tokens", "held", "keys", "values", "out", "room")),
        *((name, _count) for name in ("rows", "length", "slots", "window")),
    ]


def forward_pass(decoder: Decoder) -> Pass | None:
    """Return the function that takes tokens (B, T) and their cache to hidden states (B, T, C), or None.

    The decoder must be laid out for generation, in float32 on the CPU, with RMSNorm, rotary positions and SwiGLU, and
    its widths multiples of what `native.c` reads at a time. The function writes to the cache, but does not count.
    """
    found, config, traits = library(), decoder.config, decoder.config.traits
    llama = (traits.positions, traits.norm, traits.mlp, traits.norm_first) == ("rotary", "rms", "swiglu", True)
    if found is None or not llama or config.head_dim % _LANES or config.intermediate_size % _LANES:
        return None
    norm, table, layers = _norm(decoder.norm), _table(decoder.embed_tokens), [*map(_layer, decoder.layers)]
    if norm is None or table is None or None in layers:
        return None
    frequencies = rotary_frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
    model = _Model(
        config.num_hidden_layers,
        config.hidden_size,
        config.num_attention_heads,
        config.num_key_value_heads,
        config.head_dim,
        config.intermediate_size,
        config.norm_eps,
        frequencies.data_ptr(),
        norm,
        table,
        (_Layer * len(layers))(*cast(list[_Layer], layers)),
    )
    model.kept = frequencies
    call, reference = found.decoder, ctypes.byref(model)

    def run(tokens: Tensor, cache: KVCache) -> Tensor:
        rows, length = tokens.shape
        assert length <= cache.widest, "chunk overruns the ring"
        assert cache.keys.dtype == torch.float32, "the cache has the type of the model"
        out = torch.empty(rows, length, config.hidden_size)
        tensors = (tokens.contiguous(), torch.tensor(cache.lengths), cache.keys, cache.values, out)
        given = _Pass(*(tensor.data_ptr() for tensor in tensors), None, rows, length, cache.capacity, cache.window)
        room = torch.empty(call(reference, ctypes.byref(given)), dtype=torch.uint8)
        given.room = room.data_ptr()
        if call(reference, ctypes.byref(given)) < 0:
            raise IndexError("a token that is not in the vocabulary")
        return out

    return run


def _layer(block: nn.Module) -> _Layer | None:
    assert isinstance(block, Block)
    attention, mlp = block.self_attn, block.mlp
    parts = (attention.qkv_proj, attention.o_proj, mlp.wide_proj, mlp.down_proj)
    products = [cast(Fast, part).native() for part in parts]
    norms = (block.input_layernorm, block.post_attention_layernorm, attention.q_norm, attention.k_norm)
    gains = [None if norm is None else _norm(norm) for norm in norms]
    missing = any(norm is not None and gain is None for norm, gain in zip(norms, gains, strict=True))
    return None if missing or None in products else _Layer(*products, *gains)


def _norm(norm: nn.Module | None) -> int | None:
    """Where the gain of an RMSNorm lies, or None where it is not in float32 on the CPU."""
    gain = cast(Norm, norm).weight
    return gain.data_ptr() if gain.dtype == torch.float32 and gain.device.type == "cpu" else None


def _table(embedding: nn.Module) -> Matrix | None:
    """The embedding as a matrix; nothing is multiplied with it, so any number of rows will do."""
    if isinstance(embedding, QuantizedEmbedding):
        head = embedding.head
        return described("int8", head.numbers, head.scales)
    weight = cast(nn.Embedding, embedding).weight
    return described("float32", weight) if weight.dtype == torch.float32 else None
