"""Attention in bfloat16 on a CPU: products of PyTorch, for which processors have instructions, and C between them.

The products are made for a few heads and queries at a time, so that scores stay near the processor and never stand
whole in memory. Scores and weights are rounded to bfloat16.

Shapes: B batch, T tokens, H heads, K key/value heads, D head width. A unit is one head of keys of one row of the batch
with its G = H / K heads of queries: queries are laid out as (B K, T G, D), keys and values as (B K, T, D).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from minigpt.model.attention_calls import Sizes, Tile, arguments, call
from minigpt.model.fused import at

SCORES = 1 << 19  # that are held at a time, where one head's do not take more
QUERIES = (16, 256)  # tokens whose queries are worked on together, at least and at most


class InTiles(torch.autograd.Function):
    """What `attention.attention` says, for projections in bfloat16."""

    @staticmethod
    def forward(ctx: Any, sizes: Sizes, *given: Tensor | None) -> Tensor:
        ctx.sizes, heads = sizes, _Heads(sizes, given)
        q, k, v = heads.queries_keys_values()
        out, logsum = torch.empty_like(q), torch.empty(q.shape[:2], dtype=torch.float32)
        for units in _units(sizes):
            for tile, rows, keys in _tiles(sizes, units):
                scores = torch.bmm(q[units, rows], k[units, keys].transpose(1, 2))
                call().weights_forward(heads.place, tile, at(scores), at(logsum))
                out[units, rows] = torch.bmm(scores, v[units, keys])
        ctx.save_for_backward(*given, logsum)
        return heads.by_token(out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        *given, logsum = ctx.saved_tensors
        heads = _Heads(ctx.sizes, given)
        q, k, v = heads.queries_keys_values()
        dout, dq, dk, dv = heads.by_head(grads[0]), torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        for units in _units(ctx.sizes):
            dk_sum, dv_sum = (torch.zeros(x[units].shape, dtype=torch.float32) for x in (k, v))
            for tile, rows, keys in _tiles(ctx.sizes, units):
                scores = torch.bmm(q[units, rows], k[units, keys].transpose(1, 2))
                slopes = torch.bmm(dout[units, rows], v[units, keys].transpose(1, 2))
                call().weights_backward(heads.place, tile, at(scores), at(slopes), at(logsum))
                dq[units, rows] = torch.bmm(slopes, k[units, keys])
                dk_sum[:, keys] += torch.bmm(slopes.transpose(1, 2), q[units, rows])
                dv_sum[:, keys] += torch.bmm(scores.transpose(1, 2), dout[units, rows])
            dk[units], dv[units] = dk_sum, dv_sum
        return (None, *heads.gradients(dq, dk, dv), None, None, None)


def _queries(sizes: Sizes) -> int:
    """How many tokens' queries are worked on together."""
    least, most = QUERIES
    return int(min(sizes["T"], max(least, min(most, SCORES // (sizes["H"] // sizes["K"] * sizes["T"])))))


def _units(sizes: Sizes) -> Iterator[slice]:
    """The units that are worked on together."""
    count, scores = sizes["B"] * sizes["K"], _queries(sizes) * (sizes["H"] // sizes["K"]) * sizes["T"]
    together = max(1, SCORES // scores)
    return (slice(start, min(start + together, count)) for start in range(0, count, together))


def _tiles(sizes: Sizes, units: slice) -> Iterator[tuple[Tile, slice, slice]]:
    """Cut the scores of some units: which rows of their queries, and which keys these may see at most."""
    T, group, step = sizes["T"], sizes["H"] // sizes["K"], _queries(sizes)
    for start in range(0, T, step):
        stop = min(start + step, T)
        tile = Tile(units.start, units.stop - units.start, start, stop - start, stop)
        yield tile, slice(start * group, stop * group), slice(stop)


class _Heads:
    """Queries, keys and values on their way from the projections into batched products, and their gradients back."""

    def __init__(self, sizes: Sizes, given: Any) -> None:
        self.sizes = sizes
        self.query, self.key, self.value, self.query_gain, self.key_gain, cosines, sines, first = given
        self.place = arguments(sizes, cosines=cosines, sines=sines, first=first)

    def queries_keys_values(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries and keys, normed and turned, and values; queries are scaled too."""
        query = self._turned(self.query, self.query_gain, self.sizes["scale"])
        return query, self._turned(self.key, self.key_gain, 1.0), self.by_head(self.value)

    def gradients(self, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor | None, ...]:
        """Return what the gradients of `queries_keys_values` say of the projections, and of their gains."""
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
