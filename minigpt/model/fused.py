"""What a transformer does between its products, on a CPU: each piece forward and backward in one call of `fused.c`.

PyTorch takes several passes through memory for each of them, and at small sizes the calls alone take longer than the
products. Where there is no C compiler, PyTorch does the work. Under autocast to bfloat16, what goes into products is in
that type as soon as a piece writes it, so that nothing is copied for them; the stream between blocks stays float32.

V is the size of the vocabulary.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from minigpt.compiler import compiled

SOURCE = Path(__file__).with_name("fused.c")
LANES = 8  # of which widths must be multiples
TYPES = (torch.float32, torch.bfloat16)


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL | None:
    """What `fused.c` was compiled to, or None where that cannot be."""
    found = compiled(SOURCE)
    if found is None:
        return None
    pointer, count, number, flag = ctypes.c_void_p, ctypes.c_long, ctypes.c_float, ctypes.c_int
    arguments = {
        "norm_forward": [pointer] * 6 + [count] * 2 + [number, flag],
        "norm_backward": [pointer] * 8 + [count] * 2 + [flag],
        "gated_forward": [pointer] * 3 + [count, flag],
        "gated_backward": [pointer] * 5 + [count, flag],
        "gelu_forward": [pointer] * 2 + [count, flag],
        "gelu_backward": [pointer] * 3 + [count, flag],
    }
    for name, kinds in arguments.items():
        function = getattr(found, name)
        function.argtypes, function.restype = kinds, None
    found.softmax_slope.argtypes = [pointer] * 3 + [count] * 3 + [flag]
    return found


def fits(x: Tensor, multiple: int = LANES) -> bool:
    """Whether there is code for what lies in `x`, whose last dimension must be a multiple of so many."""
    return (
        not torch.compiler.is_compiling()
        and x.device.type == "cpu"
        and x.dtype in TYPES
        and product_type() in TYPES
        and x.shape[-1] % multiple == 0
        and x.numel() > 0
        and library() is not None
    )


def product_type() -> torch.dtype:
    """The type that products of float32 are computed in on a CPU: another one under autocast."""
    return torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else torch.float32


def norm(x: Tensor, gain: Tensor, bias: Tensor | None, eps: float, kind: torch.dtype = torch.float32) -> Tensor:
    """RMSNorm, or with a bias LayerNorm, of float32 vectors (…, width); the result is float32 or bfloat16.

    Root mean square 1 (Zhang & Sennrich 2019), or mean 0 and deviation 1 (Ba et al. 2016), then times `gain` (width,).
    """
    out: Tensor = _Norm.apply(x, gain, bias, eps, kind)  # type: ignore[no-untyped-call]
    return out


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up, all of one shape and type (Shazeer 2020, "GLU Variants Improve Transformer")."""
    assert gate.dtype == up.dtype, "C reads both as one type"
    out: Tensor = _Gated.apply(gate, up)  # type: ignore[no-untyped-call]
    return out


def gelu(x: Tensor) -> Tensor:
    """GELU by its tanh, elementwise (Hendrycks & Gimpel 2016)."""
    out: Tensor = _GELU.apply(x)  # type: ignore[no-untyped-call]
    return out


def softmax_slope(logits: Tensor, targets: Tensor, ignored: int) -> tuple[Tensor, Tensor]:
    """As `loss.softmax_slope`, on a CPU; the logits (n, V) themselves become the gradient.

    A target that is not in the vocabulary, nor `ignored`, is an IndexError.
    """
    losses = torch.empty(len(targets), dtype=torch.float32)
    if _call().softmax_slope(at(logits), at(targets), at(losses), *logits.shape, ignored, _narrow(logits)) < 0:
        raise IndexError("a target that is not in the vocabulary")
    return losses.sum(), logits


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor, bias: Tensor | None, eps: float, kind: torch.dtype) -> Tensor:
        x, gain = x.contiguous(), gain.detach()
        out, scales = torch.empty_like(x, dtype=kind), x.new_empty(x.shape[:-1])
        means = None if bias is None else torch.empty_like(scales)
        places = map(at, (x, gain, bias, out, means, scales))
        _call().norm_forward(*places, scales.numel(), x.shape[-1], eps, _narrow(out))
        ctx.save_for_backward(x, gain, means, scales)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None, None]:
        x, gain, means, scales = ctx.saved_tensors
        slope, dx, dgain = grads[0].contiguous(), torch.empty_like(x), torch.empty_like(gain)
        dbias = None if means is None else torch.empty_like(gain)
        places = map(at, (x, gain, means, scales, slope, dx, dgain, dbias))
        _call().norm_backward(*places, scales.numel(), x.shape[-1], _narrow(slope))
        return dx, dgain, dbias, None, None


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        out = torch.empty_like(gate)
        _call().gated_forward(at(gate), at(up), at(out), gate.numel(), _narrow(gate))
        ctx.save_for_backward(gate, up)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        slope, dgate, dup = grads[0].contiguous(), torch.empty_like(gate), torch.empty_like(up)
        _call().gated_backward(*map(at, (gate, up, slope, dgate, dup)), gate.numel(), _narrow(gate))
        return dgate, dup


class _GELU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.contiguous()
        out = torch.empty_like(x)
        _call().gelu_forward(at(x), at(out), x.numel(), _narrow(x))
        ctx.save_for_backward(x)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        slope, dx = grads[0].contiguous(), torch.empty_like(x)
        _call().gelu_backward(at(x), at(slope), at(dx), x.numel(), _narrow(x))
        return dx


def _call() -> ctypes.CDLL:
    found = library()
    assert found is not None
    return found


def _narrow(x: Tensor) -> bool:
    return x.dtype == torch.bfloat16


def at(tensor: Tensor | None) -> int | None:
    """Where the numbers of a tensor lie, for C; nowhere if there is none. It has to live as long."""
    assert tensor is None or tensor.is_contiguous()
    return None if tensor is None else tensor.data_ptr()
