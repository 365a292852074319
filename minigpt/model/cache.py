"""The key/value cache: what makes one more token cost one token's work, not the whole prefix again.

A row is a ring of S slots; the token at position p lives in slot p mod S. A query at position q sees the keys at
positions (q - window, q], so a text may go on past the context for ever in the same memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from minigpt.config import ModelConfig


@dataclass(frozen=True)
class AttentionPlan:
    """Which keys each query may see in one forward pass: worked out once, used by every layer."""

    positions: Tensor  # (T,) or (B, T): the position of each query token
    mask: Tensor | None = None  # broadcastable to (B, H, T, S), True where a query may look
    is_causal: bool = False  # the plain triangle, left to the attention kernel
    slots: Tensor | None = None  # (B, T): where keys go; None: they follow those that are there
    keys: int = 0  # how many slots the queries look at
    blocks: Any = None  # in place of `mask`: what FlexAttention skips
    fused: bool = False  # norms, rotary positions and attention in one piece, from `first` (B, T) on or the beginning
    first: Tensor | None = None


class KVCache:
    """Preallocated keys and values (L, B, K, S, D) and the number of tokens seen by each row.

    Only the model's forward pass writes to it. A chunk of T tokens that wraps around the ring needs
    S >= window + T - 1, so that no key is overwritten which a query of the same chunk still sees.
    """

    def __init__(
        self,
        config: ModelConfig,
        batch_size: int,
        capacity: int,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        shape = (config.num_hidden_layers, batch_size, config.num_key_value_heads, capacity, config.head_dim)
        self.keys = torch.zeros(shape, device=device, dtype=dtype)
        self.values = torch.zeros(shape, device=device, dtype=dtype)
        self.window = config.window
        self.lengths = [0] * batch_size

    @property
    def capacity(self) -> int:
        """The number of slots S of each row."""
        return self.keys.shape[3]

    @property
    def widest(self) -> int:
        """How many tokens a row the next forward pass may read at most."""
        return max(self.capacity - max(self.lengths), self.capacity - self.window + 1)

    def keep(self, rows: list[int]) -> None:
        """Drop all rows but these, in this order."""
        index = torch.tensor(rows, device=self.keys.device)
        self.keys, self.values = self.keys.index_select(1, index), self.values.index_select(1, index)
        self.lengths = [self.lengths[row] for row in rows]

    def grow(self, capacity: int) -> None:
        """Make room for more tokens a row; only before a row has gone around its ring."""
        assert max(self.lengths) <= self.capacity <= capacity
        more = (0, 0, 0, capacity - self.capacity)
        self.keys, self.values = F.pad(self.keys, more), F.pad(self.values, more)

    def truncate(self, length: int) -> None:
        """Forget all but the first tokens of every row; only before a row has gone around its ring."""
        assert max(self.lengths) <= self.capacity, "the first tokens are overwritten"
        self.lengths = [min(length, held) for held in self.lengths]

    def plan(self, new_tokens: int) -> AttentionPlan:
        """Work out positions, slots and mask for `new_tokens` more tokens in every row."""
        device = self.keys.device
        start, longest = self.lengths[0], max(self.lengths)
        end = longest + new_tokens
        assert end <= self.capacity or new_tokens <= self.capacity - self.window + 1, "chunk overruns the ring"
        if all(length == start for length in self.lengths) and end <= min(self.capacity, self.window):
            positions = torch.arange(start, end, device=device)
            if new_tokens == 1 or start == 0:
                return AttentionPlan(positions, is_causal=new_tokens > 1, keys=end)
            mask = torch.arange(end, device=device) <= positions.unsqueeze(-1)  # (T, S)
            return AttentionPlan(positions, mask=mask, keys=end)
        lengths = torch.tensor(self.lengths, device=device).unsqueeze(-1)  # (B, 1)
        positions = lengths + torch.arange(new_tokens, device=device)  # (B, T)
        used = min(end, self.capacity)
        last = lengths + new_tokens - 1  # (B, 1): the newest position in each row
        slot = torch.arange(used, device=device)
        held = last - (last - slot) % self.capacity  # (B, S): the newest position that can live in each slot
        held, query = held.unsqueeze(1), positions.unsqueeze(-1)  # (B, 1, S), (B, T, 1)
        mask = (held >= 0) & (held <= query) & (held > query - self.window)
        return AttentionPlan(positions, mask=mask.unsqueeze(1), slots=positions % self.capacity, keys=used)

    def write(self, layer: int, key: Tensor, value: Tensor, plan: AttentionPlan) -> tuple[Tensor, Tensor]:
        """Store the new keys and values (B, K, T, D) of a layer; return all that the queries look at (B, K, S, D)."""
        keys, values = self.keys[layer], self.values[layer]
        if plan.slots is None:
            start = plan.keys - key.shape[2]
            keys[:, :, start : plan.keys] = key
            values[:, :, start : plan.keys] = value
        else:
            rows = torch.arange(key.shape[0], device=key.device).unsqueeze(-1)  # (B, 1)
            keys[rows, :, plan.slots] = key.transpose(1, 2)
            values[rows, :, plan.slots] = value.transpose(1, 2)
        return keys[:, :, : plan.keys], values[:, :, : plan.keys]

    def advance(self, new_lengths: list[int]) -> None:
        """Count the tokens of each row that were real; what padding left behind is overwritten before it is seen."""
        self.lengths = [length + new for length, new in zip(self.lengths, new_lengths, strict=True)]
