"""A model laid out for generation: the same function with fewer and faster products, and no way back to training.

A token alone is bound by memory and by the number of calls. So query, key and value are one product, and so are gate
and up; products of few rows and norms are those of `native.c` where they can be had; matrices may be quantised.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minigpt.config import QuantizeName
from minigpt.model.native import product, rms_norm
from minigpt.model.positions import rotate
from minigpt.model.quantize import QuantizedEmbedding, quantized
from minigpt.model.transformer import GPT, MLP, Attention, Norm, Rotary

FEW_ROWS = 8  # up to so many, the product of `native.c` is the faster one in float32

Maker = Callable[[Tensor, Tensor | None], nn.Module]


class FewRowsLinear(nn.Linear):
    """A linear layer in float32 on a CPU that is fast for few rows, and the same bit for bit for each of them."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
        self.weight = nn.Parameter(weight.detach(), requires_grad=False)
        if bias is not None:
            self.bias = nn.Parameter(bias.detach(), requires_grad=False)
        fits = weight.device.type == "cpu" and weight.dtype == torch.float32
        self._product = product("float32", self.weight) if fits else None
        if self._product is None and fits:
            self.weight.data = _in_reading_order(self.weight.data)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.numel() // self.in_features
        if self._product is None or rows > FEW_ROWS:
            return F.linear(x, self.weight, self.bias)
        out = self._product(x.reshape(rows, self.in_features)).view(*x.shape[:-1], -1)
        return out if self.bias is None else out + self.bias


class FewCallsNorm(Norm):
    """RMSNorm in one call."""

    def __init__(self, plain: Norm) -> None:
        nn.Module.__init__(self)
        self.weight, self.bias, self.layer, self.eps = plain.weight, plain.bias, plain.layer, plain.eps
        self._run = None if plain.layer else rms_norm(plain.weight, plain.eps)

    def forward(self, x: Tensor) -> Tensor:
        few = x.numel() <= FEW_ROWS * FEW_ROWS * self.weight.shape[0]  # more than that PyTorch does on all threads
        return super().forward(x) if self._run is None or not few else self._run(x)


class FusedAttention(Attention):
    """Attention whose query, key and value come out of one product."""

    def __init__(self, plain: Attention, make: Maker) -> None:
        nn.Module.__init__(self)
        self.layer, self.heads, self.kv_heads = plain.layer, plain.heads, plain.kv_heads
        self.head_dim, self.dropout = plain.head_dim, plain.dropout
        self.qkv_proj = make(*_joined(plain.q_proj, plain.k_proj, plain.v_proj))
        self.o_proj = make(plain.o_proj.weight, plain.o_proj.bias)  # type: ignore[assignment]
        self.q_norm, self.k_norm = plain.q_norm, plain.k_norm

    def projections(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return all queries (B, T, H D), keys and values (B, T, K D) of `x` (B, T, C)."""
        widths = (self.heads * self.head_dim, self.kv_heads * self.head_dim, self.kv_heads * self.head_dim)
        query, key, value = self.qkv_proj(x).split(widths, dim=-1)
        return query, key, value

    def project(self, x: Tensor, rotary: Rotary | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return query (B, H, T, D), key and value (B, K, T, D) of `x` (B, T, C), normed and turned by position."""
        sizes = (self.heads, self.kv_heads, self.kv_heads)
        joined = self.qkv_proj(x).unflatten(-1, (sum(sizes), self.head_dim)).transpose(1, 2)  # (B, H + 2K, T, D)
        if self.q_norm is not None and self.k_norm is not None:
            query, key, value = joined.split(sizes, dim=1)
            query, key = self.q_norm(query), self.k_norm(key)
            return (query, key, value) if rotary is None else (rotate(query, *rotary), rotate(key, *rotary), value)
        both, value = joined.split((self.heads + self.kv_heads, self.kv_heads), dim=1)
        both = both if rotary is None else rotate(both, *rotary)
        query, key = both.split(sizes[:2], dim=1)
        return query, key, value


class FusedMLP(MLP):
    """The MLP with gate and up in one product."""

    def __init__(self, plain: MLP, make: Maker) -> None:
        nn.Module.__init__(self)
        self.kind = plain.kind
        joined = (plain.up_proj,) if plain.gate_proj is None else (plain.gate_proj, plain.up_proj)
        self.wide_proj = make(*_joined(*joined))
        self.down_proj = make(plain.down_proj.weight, plain.down_proj.bias)  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        wide: Tensor = self.wide_proj(x)  # (B, T, width), or twice that
        if self.kind == "swiglu":
            gate, up = wide.chunk(2, dim=-1)
            wide = F.silu(gate) * up
        else:
            wide = F.gelu(wide, approximate="tanh") if self.kind == "gelu" else F.relu(wide)
        narrow: Tensor = self.down_proj(wide)  # (B, T, C)
        return narrow


@torch.no_grad()
def prepare(model: GPT, quantize: QuantizeName | None = None) -> None:
    """Lay a model out for generation, in place; `quantize` keeps its matrices in 8 or 4 bits, and the output in 8.

    The output matrix decides between tokens whose logits lie close, and a tied one is the embedding too: in 4 bits it
    costs more than all the blocks together.
    """

    def make(weight: Tensor, bias: Tensor | None) -> nn.Module:
        return FewRowsLinear(weight, bias) if quantize is None else quantized(weight, bias, quantize)

    for block in model.model.layers:
        block.self_attn = FusedAttention(block.self_attn, make)  # type: ignore[arg-type]
        block.mlp = FusedMLP(block.mlp, make)  # type: ignore[arg-type]
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if type(child) is Norm:
                setattr(parent, name, FewCallsNorm(child))
    tied = model.config.tie_word_embeddings
    if quantize is None:
        model.lm_head = FewRowsLinear(model.lm_head.weight, None)
        if tied:
            model.model.embed_tokens.weight = model.lm_head.weight
        return
    head = quantized(model.lm_head.weight, None, "int8")
    model.lm_head = head  # type: ignore[assignment]
    if tied:
        model.model.embed_tokens = QuantizedEmbedding(head)  # type: ignore[assignment]


def _joined(*layers: nn.Linear) -> tuple[Tensor, Tensor | None]:
    biases = tuple(layer.bias for layer in layers if layer.bias is not None)
    return torch.cat(tuple(layer.weight for layer in layers)), torch.cat(biases) if biases else None


def _in_reading_order(weight: Tensor) -> Tensor:
    """Put a matrix (out, in) that widens into memory column after column.

    PyTorch then adds scaled columns up, which is up to twice as fast for one row as as many dot products.
    """
    return weight.t().contiguous().t() if weight.shape[0] >= weight.shape[1] else weight
