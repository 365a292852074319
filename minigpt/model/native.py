"""What `native.c` computes: products of a few rows with a matrix, float32 or quantised, and RMSNorm.

Where it cannot be compiled, PyTorch does the work.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from minigpt.compiler import compiled

SOURCE = Path(__file__).with_name("native.c")
_INPUTS = {"float32": 32, "int8": 32, "int4": 64}  # of what the inputs must be a multiple
_OUTPUTS, _WIDTH = 4, 16  # and the outputs, and the width of a norm

Kind = Literal["float32", "int8", "int4"]
Product = Callable[[Tensor], Tensor]
Norm = Callable[[Tensor], Tensor]


def product(kind: Kind, numbers: Tensor, scales: Tensor | None = None) -> Product | None:
    """Return the function that takes x (rows, in) float32 to the product (rows, out) with a matrix on the CPU.

    `numbers` are (out, in) float32 or int8, or (out, in / 2) of two halves each, the lower one first. `scales` are
    (out,) float32 for int8, (out, in / 32, 2) bfloat16 scale and zero for int4. None where it cannot be had.
    """
    outs, ins = numbers.shape[0], numbers.shape[1] * (2 if kind == "int4" else 1)
    found = library()
    if found is None or numbers.device.type != "cpu" or outs % _OUTPUTS or ins % _INPUTS[kind]:
        return None
    assert all(tensor.is_contiguous() for tensor in (numbers, scales) if tensor is not None)
    call = getattr(found, f"product_{kind}")
    matrix, factors = numbers.data_ptr(), 0 if scales is None else scales.data_ptr()

    def run(x: Tensor) -> Tensor:
        x = x.contiguous()
        out = torch.empty(x.shape[0], outs)
        call(x.data_ptr(), matrix, factors, out.data_ptr(), x.shape[0], ins, outs)
        return out

    return run


def rms_norm(gain: Tensor, eps: float) -> Norm | None:
    """Return the function that takes x (…, width) float32 to its RMSNorm with a gain (width,) on the CPU, or None."""
    found, width = library(), gain.shape[0]
    if found is None or gain.device.type != "cpu" or gain.dtype != torch.float32 or width % _WIDTH:
        return None
    call, place = found.rms_norm, gain.data_ptr()

    def run(x: Tensor) -> Tensor:
        x = x.contiguous()
        out = torch.empty_like(x)
        call(x.data_ptr(), place, out.data_ptr(), x.numel() // width, width, eps)
        return out

    return run


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL | None:
    """What `native.c` was compiled to, or None where that cannot be."""
    found = compiled(SOURCE)
    if found is None:
        return None
    pointer, count = ctypes.c_void_p, ctypes.c_long
    for kind in _INPUTS:
        function = getattr(found, f"product_{kind}")
        function.argtypes, function.restype = [pointer] * 4 + [count] * 3, None
    found.rms_norm.argtypes, found.rms_norm.restype = [pointer] * 3 + [count] * 2 + [ctypes.c_float], None
    return found
