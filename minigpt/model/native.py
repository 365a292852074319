"""What `native.c` computes: products of lines with a matrix, float32 or quantised, and a whole decoder.

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
KINDS = ("float32", "int8", "int4")
_INPUTS = {"float32": 16, "int8": 16, "int4": 32}  # of what the inputs must be a multiple
_OUTPUTS = 4  # and the outputs

Kind = Literal["float32", "int8", "int4"]
Product = Callable[[Tensor], Tensor]


class Matrix(ctypes.Structure):
    """A matrix as `native.c` knows it; whoever makes one keeps the tensors."""

    _fields_ = [
        ("numbers", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("outs", ctypes.c_long),
        ("ins", ctypes.c_long),
        ("kind", ctypes.c_long),
    ]


def matrix(kind: Kind, numbers: Tensor, scales: Tensor | None = None, bias: Tensor | None = None) -> Matrix | None:
    """Describe a matrix on the CPU, or None where `native.c` has no product with it.

    `numbers` are (out, in) float32 or int8, or (out, in / 2) of two halves each, the lower one first. `scales` are
    (out,) float32 for int8, (out, in / 32, 2) bfloat16 scale and zero for int4; `bias` is (out,) float32.
    """
    found = described(kind, numbers, scales, bias)
    fits = numbers.device.type == "cpu" and (bias is None or bias.dtype == torch.float32)
    fits = fits and (kind != "float32" or numbers.dtype == torch.float32)
    return found if fits and library() and not (found.outs % _OUTPUTS or found.ins % _INPUTS[kind]) else None


def described(kind: Kind, numbers: Tensor, scales: Tensor | None = None, bias: Tensor | None = None) -> Matrix:
    """Describe a matrix of any shape."""
    tensors = (numbers, scales, bias)
    assert all(tensor is None or tensor.is_contiguous() for tensor in tensors)
    places = (None if tensor is None else tensor.data_ptr() for tensor in tensors)
    outs, ins = numbers.shape[0], numbers.shape[1] * (2 if kind == "int4" else 1)
    return Matrix(*places, outs, ins, KINDS.index(kind))


def product(of: Matrix) -> Product:
    """Return the function that takes x (lines, in) float32 to the product (lines, out) with a matrix, bias and all.

    With whole numbers x is rounded too, to 12 bits or more of what is greatest in a line.
    """
    found = library()
    assert found is not None
    call, reference, outs = found.product_alone, ctypes.byref(of), of.outs

    def run(x: Tensor) -> Tensor:
        assert x.dtype == torch.float32, "C reads nothing else"
        x = x.contiguous()
        out = torch.empty(x.shape[0], outs)
        call(reference, x.data_ptr(), out.data_ptr(), x.shape[0])
        return out

    return run


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL | None:
    """What `native.c` was compiled to, or None where that cannot be."""
    found = compiled(SOURCE)
    if found is None:
        return None
    pointer, count = ctypes.c_void_p, ctypes.c_long
    found.product_alone.argtypes, found.product_alone.restype = [pointer] * 3 + [count], None
    found.decoder.argtypes, found.decoder.restype = [pointer] * 2, count
    return found
