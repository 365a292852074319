"""What a transformer does between its products, on a CPU: each piece forward and backward in one call of `fused.c`.

PyTorch takes several passes through memory for each of them, and at small sizes the calls alone take longer than the
products. Where there is no C compiler, and in other types than float32, PyTorch does the work.

Shapes: B batch, T tokens, H heads, K key/value heads, D head width, V vocabulary.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minigpt.compiler import compiled

SOURCE = Path(__file__).with_name("fused.c")
LANES = 8  # of which widths must be multiples; heads that are turned, of twice that


class _Attention(ctypes.Structure):
    """`struct attention` of `fused.c`."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("query", "key", "value", "query_gain", "key_gain", "cosines", "sines")),
        *((name, ctypes.c_void_p) for name in ("first", "out", "logsum", "dout", "dquery", "dkey", "dvalue")),
        *((name, ctypes.c_void_p) for name in ("dquery_gain", "dkey_gain")),
        *((name, ctypes.c_long) for name in ("B", "T", "H", "K", "D", "angles")),
        *((name, ctypes.c_float) for name in ("eps", "scale")),
    ]


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL | None:
    """What `fused.c` was compiled to, or None where that cannot be."""
    found = compiled(SOURCE)
    if found is None:
        return None
    pointer, count, number = ctypes.c_void_p, ctypes.c_long, ctypes.c_float
    found.rms_norm_forward.argtypes = [pointer] * 4 + [count] * 2 + [number]
    found.rms_norm_backward.argtypes = [pointer] * 6 + [count] * 2
    found.gated_forward.argtypes = [pointer] * 3 + [count]
    found.gated_backward.argtypes = [pointer] * 5 + [count]
    found.softmax_slope.argtypes = [pointer] * 3 + [count] * 3
    found.attention_forward.argtypes = found.attention_backward.argtypes = [ctypes.POINTER(_Attention)]
    for name in ("rms_norm", "gated", "attention"):
        getattr(found, f"{name}_forward").restype = getattr(found, f"{name}_backward").restype = None
    return found


def fits(x: Tensor, multiple: int = LANES) -> bool:
    """Whether there is code for what lies in `x`, whose last dimension must be a multiple of so many."""
    return (
        not torch.compiler.is_compiling()
        and x.device.type == "cpu"
        and x.dtype == torch.float32
        and x.shape[-1] % multiple == 0
        and x.numel() > 0
        and library() is not None
    )


def fits_heads(x: Tensor, head_dim: int, rotary: bool) -> bool:
    """Whether there is code for attention of heads so wide, in a model whose weights are like `x`."""
    narrow = torch.is_autocast_enabled(x.device.type)
    return not narrow and head_dim % (2 * LANES if rotary else LANES) == 0 and fits(x)


def rms_norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    """Bring vectors (…, width) to root mean square 1, times a gain (width,) (Zhang & Sennrich 2019)."""
    out: Tensor = _RMSNorm.apply(x, gain, eps)  # type: ignore[no-untyped-call]
    return out


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up, all of one shape (Shazeer 2020, "GLU Variants Improve Transformer")."""
    out: Tensor = _Gated.apply(gate, up)  # type: ignore[no-untyped-call]
    return out


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    head_dim: int,
    query_norm: Any = None,
    key_norm: Any = None,
    rotary: tuple[Tensor, Tensor] | None = None,
    first: Tensor | None = None,
) -> Tensor:
    """Causal attention from what the projections give, (B, T, H D) and twice (B, T, K D), to (B, T, H D).

    Queries and keys go through their RMSNorm, if there is one, then are turned by `rotary`, cosines and sines (T, D/2)
    or (B, 1, T, D/2). A token sees itself and those before it from `first` (B, T; int32) on. The scores of a
    few queries at a time are held, and made again for the gradient (Dao et al. 2022, "FlashAttention").
    """
    gains, eps = (None, None), 0.0
    if query_norm is not None:
        gains, eps = (query_norm.weight, key_norm.weight), query_norm.eps
    out: Tensor = _FusedAttention.apply(query, key, value, *gains, eps, rotary, first, head_dim)  # type: ignore[no-untyped-call]
    return out


def softmax_slope(logits: Tensor, targets: Tensor, ignored: int) -> tuple[Tensor, Tensor]:
    """As `loss.softmax_slope`, for float32 on a CPU; the logits (n, V) themselves become the gradient.

    A target that is not in the vocabulary, nor `ignored`, is an IndexError.
    """
    losses = torch.empty(len(targets))
    if _call().softmax_slope(_at(logits), _at(targets), _at(losses), *logits.shape, ignored) < 0:
        raise IndexError("a target that is not in the vocabulary")
    return losses.sum(), logits


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor, eps: float) -> Tensor:
        x, gain = x.contiguous(), gain.detach()
        out, scales = torch.empty_like(x), x.new_empty(x.shape[:-1])
        _call().rms_norm_forward(_at(x), _at(gain), _at(out), _at(scales), scales.numel(), x.shape[-1], eps)
        ctx.save_for_backward(x, gain, scales)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        x, gain, scales = ctx.saved_tensors
        slope, dx, dgain = grads[0].contiguous(), torch.empty_like(x), torch.empty_like(gain)
        places = map(_at, (x, gain, scales, slope, dx, dgain))
        _call().rms_norm_backward(*places, scales.numel(), x.shape[-1])
        return dx, dgain, None


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        out = torch.empty_like(gate)
        _call().gated_forward(_at(gate), _at(up), _at(out), gate.numel())
        ctx.save_for_backward(gate, up)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        slope, dgate, dup = grads[0].contiguous(), torch.empty_like(gate), torch.empty_like(up)
        _call().gated_backward(*map(_at, (gate, up, slope, dgate, dup)), gate.numel())
        return dgate, dup


class _FusedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        query_gain: Tensor | None,
        key_gain: Tensor | None,
        eps: float,
        rotary: tuple[Tensor, Tensor] | None,
        first: Tensor | None,
        head_dim: int,
    ) -> Tensor:
        query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
        B, T, _ = query.shape
        H, K = query.shape[-1] // head_dim, key.shape[-1] // head_dim
        cosines, sines = rotary or (None, None)
        out, logsum = torch.empty_like(query), query.new_empty(B, H, T)
        ctx.sizes = {"B": B, "T": T, "H": H, "K": K, "D": head_dim, "eps": eps, "scale": head_dim**-0.5}
        ctx.sizes["angles"] = cosines.shape[-2] * cosines.shape[-1] if cosines is not None and cosines.dim() == 4 else 0
        ctx.save_for_backward(query, key, value, query_gain, key_gain, cosines, sines, first, out, logsum)
        _call().attention_forward(_arguments(ctx.sizes, _GIVEN, ctx.to_save))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        given, slope = ctx.saved_tensors, grads[0].contiguous()
        found = tuple(None if tensor is None else torch.empty_like(tensor) for tensor in given[:5])
        _call().attention_backward(_arguments(ctx.sizes, _ALL, (*given, slope, *found)))
        return (*found, None, None, None, None)


_GIVEN = ("query", "key", "value", "query_gain", "key_gain", "cosines", "sines", "first", "out", "logsum")
_ALL = (*_GIVEN, "dout", "dquery", "dkey", "dvalue", "dquery_gain", "dkey_gain")


def _arguments(sizes: dict[str, Any], names: tuple[str, ...], tensors: tuple[Tensor | None, ...]) -> Any:
    """What `fused.c` is told of attention, for as long as the tensors live; one that is not there is a null pointer."""
    places = {name: _at(tensor) for name, tensor in zip(names, tensors, strict=True) if tensor is not None}
    return _Attention(**sizes, **places)


def _call() -> ctypes.CDLL:
    found = library()
    assert found is not None
    return found


def _at(tensor: Tensor) -> int:
    assert tensor.is_contiguous()
    return tensor.data_ptr()
