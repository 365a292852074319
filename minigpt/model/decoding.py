"""A model laid out for generation: the same function with fewer and faster products, and no way back to training.

A token alone is bound by memory and by the number of calls. So query, key and value are one product, and so are gate
and up; matrices may be quantised; and what `native.c` can do, from one product to the whole decoder, it does.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minigpt.config import QuantizeName
from minigpt.model.lora import merged_weight
from minigpt.model.native import Matrix, library, matrix, product
from minigpt.model.native_decoder import forward_pass
from minigpt.model.quantize import QuantizedEmbedding, quantized
from minigpt.model.transformer import GPT, MLP, Attention

Maker = Callable[[Tensor, Tensor | None], nn.Module]


class NativeLinear(nn.Linear):
    """A linear layer in float32 on a CPU that is fast for few rows, and the same bit for bit for each of any number."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
        self.weight = nn.Parameter(weight.detach(), requires_grad=False)
        if bias is not None:
            self.bias = nn.Parameter(bias.detach(), requires_grad=False)
        native = self.native()
        self._product = None if native is None else product(native)
        if library() is None and weight.device.type == "cpu" and weight.dtype == torch.float32:
            self.weight.data = _in_reading_order(self.weight.data)

    def native(self) -> Matrix | None:
        """What `native.c` has to know of the layer, if it can do its work."""
        return matrix("float32", self.weight, bias=self.bias)

    def forward(self, x: Tensor) -> Tensor:
        if self._product is None:
            return F.linear(x, self.weight, self.bias)
        return self._product(x.reshape(-1, self.in_features)).view(*x.shape[:-1], -1)


class FusedAttention(Attention):
    """Attention whose query, key and value come out of one product."""

    def __init__(self, plain: Attention, make: Maker) -> None:
        nn.Module.__init__(self)
        self.layer, self.heads, self.kv_heads = plain.layer, plain.heads, plain.kv_heads
        self.head_dim, self.dropout = plain.head_dim, plain.dropout
        self.qkv_proj = make(*_joined(plain.q_proj, plain.k_proj, plain.v_proj))
        self.o_proj = make(*_joined(plain.o_proj))  # type: ignore[assignment]
        self.q_norm, self.k_norm = plain.q_norm, plain.k_norm

    def projections(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return all queries (B, T, H D), keys and values (B, T, K D) of `x` (B, T, C)."""
        widths = (self.heads * self.head_dim, self.kv_heads * self.head_dim, self.kv_heads * self.head_dim)
        query, key, value = self.qkv_proj(x).split(widths, dim=-1)
        return query, key, value


class FusedMLP(MLP):
    """The MLP with gate and up in one product."""

    def __init__(self, plain: MLP, make: Maker) -> None:
        nn.Module.__init__(self)
        self.kind = plain.kind
        joined = (plain.up_proj,) if plain.gate_proj is None else (plain.gate_proj, plain.up_proj)
        self.wide_proj = make(*_joined(*joined))
        self.down_proj = make(*_joined(plain.down_proj))  # type: ignore[assignment]

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
    _lay_out(model, model.model.layers, quantize)


@torch.no_grad()
def laid_out(model: GPT) -> GPT:
    """Return a copy of a model that is being trained, laid out for generation; adapters are merged into it.

    What needs no other layout is shared with the model, so the copy is good until its weights change.
    """
    with torch.device("meta"):
        copy = GPT(model.config)
    weights = model.state_dict()
    copy.load_state_dict({name: weights[name] for name in copy.state_dict()}, assign=True)
    _lay_out(copy.requires_grad_(False), model.model.layers, None)
    return copy.eval()


def _lay_out(model: GPT, blocks: nn.ModuleList, quantize: QuantizeName | None) -> None:
    """Make the blocks of a model out of others, of its own shape or its own."""

    def make(weight: Tensor, bias: Tensor | None) -> nn.Module:
        return NativeLinear(weight, bias) if quantize is None else quantized(weight, bias, quantize)

    for block, plain in zip(model.model.layers, blocks, strict=True):
        block.self_attn = FusedAttention(plain.self_attn, make)  # type: ignore[arg-type]
        block.mlp = FusedMLP(plain.mlp, make)  # type: ignore[arg-type]
    tied = model.config.tie_word_embeddings
    if quantize is None:
        model.lm_head = NativeLinear(model.lm_head.weight, None)
        if tied:
            model.model.embed_tokens.weight = model.lm_head.weight
    else:
        model.lm_head = head = quantized(model.lm_head.weight, None, "int8")  # type: ignore[assignment]
        if tied:
            model.model.embed_tokens = QuantizedEmbedding(head)  # type: ignore[assignment]
    model.model.native = forward_pass(model.model)


def _joined(*layers: nn.Linear) -> tuple[Tensor, Tensor | None]:
    """The matrices (out, in) of layers as one, and their biases; of a layer alone they are its own."""
    bias = layers[0].bias
    if len(layers) == 1:
        return merged_weight(layers[0]), bias
    joined = torch.cat([merged_weight(layer) for layer in layers])
    return joined, None if bias is None else torch.cat([layer.bias for layer in layers])


def _in_reading_order(weight: Tensor) -> Tensor:
    """Put a matrix (out, in) that widens into memory column after column.

    PyTorch then adds scaled columns up, which is up to twice as fast for one row as as many dot products.
    """
    return weight.t().contiguous().t() if weight.shape[0] >= weight.shape[1] else weight
