"""Attention in bfloat16 on a CPU: products of PyTorch, for which processors have instructions, and C between them.

The products are made for a few heads and queries at a time, so that scores stay in the cache and never stand whole in
memory. Scores and weights are rounded to bfloat16.

Shapes: B batch, T tokens, H heads, K key/value heads, D head width. A unit is one head of keys of one row of the batch
with its G = H / K heads of queries: queries are laid out as (B K, T G, D), keys and values as (B K, T, D).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from minigpt.model.attention_calls import Sizes, Tile, arguments, call
from minigpt.model.fused import at

SCORES = 1 << 19  # that are held at a time
QUERIES = 256  # tokens whose queries are worked on together; no product has keys behind the last of them


class InTiles(torch.autograd.Function):
    """What `attention.attention` says, for projections in bfloat16."""

    @staticmethod
    def forward(ctx: Any, sizes: Sizes, *given: Tensor | None) -> Tensor:
        ctx.sizes, heads = sizes, _Heads(sizes, given)
        q, k, v = heads.laid_out()
        out, logsum = torch.empty_like(q), torch.empty(q.shape[:2])
        for tile, units, rows, keys in _tiles(sizes):
            scores = torch.bmm(q[units, rows], k[units, keys].transpose(1, 2))
            call().weights_forward(heads.place, tile, at(scores), at(logsum))
            out[units, rows] = torch.bmm(scores, v[units, keys])
        ctx.save_for_backward(*given, logsum)
        return heads.by_token(out)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        *given, logsum = ctx.saved_tensors
        heads = _Heads(ctx.sizes, given)
        q, k, v = heads.laid_out()
        dout, dq, dk, dv = heads.by_head(grads[0]), torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for tile, units, rows, keys in _tiles(ctx.sizes):
            scores = torch.bmm(q[units, rows], k[units, keys].transpose(1, 2))
            slopes = torch.bmm(dout[units, rows], v[units, keys].transpose(1, 2))
            call().weights_backward(heads.place, tile, at(scores), at(slopes), at(logsum))
            dq[units, rows] = torch.bmm(slopes, k[units, keys])
            dk[units, keys].baddbmm_(slopes.transpose(1, 2), q[units, rows])
            dv[units, keys].baddbmm_(scores.transpose(1, 2), dout[units, rows])
        return (None, *heads.gradients(dq, dk, dv), None, None, None)


def _tiles(sizes: Sizes) -> Iterator[tuple[Tile, slice, slice, slice]]:
    """Cut the scores: which units, which rows of their queries, and which keys these may see at most."""
    T, group, units = sizes["T"], sizes["H"] // sizes["K"], sizes["B"] * sizes["K"]
    for start in range(0, T, QUERIES):
        stop = min(start + QUERIES, T)
        several = max(1, SCORES // ((stop - start) * group * stop))
        for unit in range(0, units, several):
            last = min(unit + several, units)
            tile = Tile(unit, last - unit, start, stop - start, stop)
            yield tile, slice(unit, last), slice(start * group, stop * group), slice(stop)


class _Heads:
    """Queries, keys and values on their way from the projections into batched products, and their gradients back."""

    def __init__(self, sizes: Sizes, given: Any) -> None:
        self.sizes = sizes
        self.query, self.key, self.value, self.query_gain, self.key_gain, cosines, sines, first = given
        self.place = arguments(sizes, cosines=cosines, sines=sines, first=first)

    def laid_out(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries and keys, normed and turned, and values; queries are scaled too."""
        query = self._turned(self.query, self.query_gain, self.sizes["scale"])
        return query, self._turned(self.key, self.key_gain, 1.0), self.by_head(self.value)

    def gradients(self, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor | None, ...]:
        """Return what the gradients of `laid_out` say of the projections, and of the gains of queries and keys."""
        dquery, dquery_gain = self._turned_gradient(self.query, self.query_gain, self.sizes["scale"], dq)
        dkey, dkey_gain = self._turned_gradient(self.key, self.key_gain, 1.0, dk)
        return dquery, dkey, self.by_token(dv), dquery_gain, dkey_gain

    def by_head(self, x: Tensor) -> Tensor:
        """Lay (B, T, heads D) out as (B K, T heads / K, D)."""
        B, T, K, D = (self.sizes[name] for name in "BTKD")
        return x.view(B, T, K, -1).transpose(1, 2).reshape(B * K, -1, D)

    def by_token(self, x: Tensor) -> Tensor:
        """Take `by_head` back."""
        B, T, K = (self.sizes[name] for name in "BTK")
        return x.view(B, K, T, -1).transpose(1, 2).reshape(B, T, -1)

    def _turned(self, x: Tensor, gain: Tensor | None, factor: float) -> Tensor:
        B, K, D = (self.sizes[name] for name in "BKD")
        to = x.new_empty(B * K, x.numel() // (B * K * D), D)
        call().heads_forward(self.place, at(x), x.shape[-1] // D, at(gain), factor, at(to))
        return to

    def _turned_gradient(
        self, x: Tensor, gain: Tensor | None, factor: float, slope: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        dx, dgain = torch.empty_like(x), None if gain is None else torch.empty_like(gain)
        heads, places = x.shape[-1] // self.sizes["D"], map(at, (slope, dx, dgain))
        call().heads_backward(self.place, at(x), heads, at(gain), factor, *places)
        return dx, dgain
