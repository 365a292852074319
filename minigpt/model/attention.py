"""Attention of all tokens at once on a CPU, from what the projections give to what the last one takes: `attention.c`.

Shapes: B batch, T tokens, H heads, K key/value heads, D head width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from minigpt.model.attention_calls import arguments, call, library, sizes_of
from minigpt.model.attention_tiles import InTiles
from minigpt.model.fused import LANES, fits

Rotary = tuple[Tensor, Tensor]
GIVEN = ("query", "key", "value", "query_gain", "key_gain", "cosines", "sines", "first")
LEARNED = GIVEN[:5]  # what there are gradients of


def fits_heads(x: Tensor, head_dim: int, rotary: bool) -> bool:
    """Whether there is code for attention of heads so wide, in a model whose weights are like `x`."""
    multiple = 2 * LANES if rotary else LANES
    return head_dim % multiple == 0 and x.dtype == torch.float32 and fits(x, 1) and library() is not None


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    head_dim: int,
    query_norm: Any = None,
    key_norm: Any = None,
    rotary: Rotary | None = None,
    first: Tensor | None = None,
) -> Tensor:
    """Causal attention from what the projections give, (B, T, H D) and twice (B, T, K D), to (B, T, H D).

    Queries and keys go through their RMSNorm, if there is one, then are turned by `rotary`, cosines and sines (T, D/2)
    or (B, 1, T, D/2). A token sees itself and those before it from `first` (B, T; int32) on. Projections and result are
    float32 or bfloat16. The scores of a few queries at a time are held, and made again for the gradient (Dao et al.
    2022, "FlashAttention").
    """
    gains, eps = (None, None), 0.0
    if query_norm is not None:
        gains, eps = (query_norm.weight, key_norm.weight), query_norm.eps
    cosines, sines = rotary or (None, None)
    sizes = sizes_of(query, key, head_dim, cosines, eps)
    given = (query.contiguous(), key.contiguous(), value.contiguous(), *gains, cosines, sines, first)
    way = InTiles if query.dtype == torch.bfloat16 else _AsOne
    out: Tensor = way.apply(sizes, *given)  # type: ignore[no-untyped-call]
    return out


class _AsOne(torch.autograd.Function):
    """All of it in C: for float32, in which a processor's products have no instructions of their own."""

    @staticmethod
    def forward(ctx: Any, sizes: dict[str, Any], *given: Tensor | None) -> Tensor:
        query = given[0]
        assert query is not None
        out, logsum = torch.empty_like(query), query.new_empty(sizes["B"], sizes["H"], sizes["T"])
        call().attention_forward(arguments(sizes, **dict(zip(GIVEN, given, strict=True)), out=out, logsum=logsum))
        ctx.sizes = sizes
        ctx.save_for_backward(*given, out, logsum)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        *given, out, logsum = ctx.saved_tensors
        tensors = dict(zip(GIVEN, given, strict=True)) | {"out": out, "logsum": logsum, "dout": grads[0].contiguous()}
        found = {
            f"d{name}": None if x is None else torch.empty_like(x) for name, x in zip(LEARNED, given, strict=False)
        }
        call().attention_backward(arguments(ctx.sizes, **tensors, **found))
        return (None, *found.values(), None, None, None)
