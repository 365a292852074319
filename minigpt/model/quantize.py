"""Weights in 8 or 4 bits: whole numbers and scales. What they are multiplied with is rounded too, to 12 bits or more.

A token alone waits for the weights to come from memory, so a product of one row takes as long as there are bytes.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minigpt.config import QuantizeName
from minigpt.model.native import Matrix, Product, library, matrix, product

GROUP = 32  # weights that share a scale, in 4 bits
FEW_ROWS = 48  # up to so many, PyTorch multiplies with the numbers themselves; for more they become floats once


class QuantizedLinear(nn.Module):
    """A linear layer with weights (out, in) of fewer bits, for evaluation alone. Its bias stays as it is.

    int8: a scale for each output, w = scale * number (Dettmers et al. 2022, section 2). int4: a scale and a zero for
    each group of 32 along the inputs, w = scale * number + zero, with numbers 0 … 15; inputs must be a multiple of 32.
    """

    numbers: Tensor  # (out, in) int8, or (out, in / 2) uint8 with two numbers each, the first one below
    bias: Tensor | None
    scales: Tensor  # (out,) float32, or (out, in / 32, 2) bfloat16: scale and zero

    def __init__(self, weight: Tensor, bias: Tensor | None, kind: QuantizeName) -> None:
        super().__init__()
        self.kind, self.in_features = kind, weight.shape[1]
        numbers, scales = (_to_int8 if kind == "int8" else _to_int4)(weight.detach().float())
        self.register_buffer("numbers", numbers)
        self.register_buffer("scales", scales)
        self.register_buffer("bias", None if bias is None else bias.detach())
        self._dtype = weight.dtype
        native = matrix(kind, numbers, scales)
        self._most_rows = FEW_ROWS if native is None else None
        self._product = _of_torch(kind, numbers, scales) if native is None else product(native)

    @property
    def weight(self) -> Tensor:
        """The weights (out, in) as floats, as near as the bits allow."""
        return self._floats(self.numbers, self.scales)

    def rows(self, places: Tensor) -> Tensor:
        """Some rows (…, in) of the weights (out, in) as floats."""
        return self._floats(self.numbers[places], self.scales[places])

    def native(self) -> Matrix | None:
        """What `native.c` has to know of the layer, if it can do its work."""
        return matrix(self.kind, self.numbers, self.scales, self.bias)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.numel() // self.in_features
        if self._product is None or (self._most_rows is not None and rows > self._most_rows):
            return F.linear(x, self.weight, self.bias)
        out = self._product(x.reshape(rows, self.in_features).float()).to(x.dtype).view(*x.shape[:-1], -1)
        return out if self.bias is None else out + self.bias

    def _floats(self, numbers: Tensor, scales: Tensor) -> Tensor:
        if self.kind == "int8":
            return (numbers * scales.unsqueeze(-1)).to(self._dtype)
        scale, zero = scales.float().unsqueeze(-1).unbind(-2)  # (…, in / 32, 1)
        whole = _halves(numbers)
        grouped = whole.view(*whole.shape[:-1], -1, GROUP)
        return (grouped * scale + zero).flatten(-2).to(self._dtype)


class QuantizedEmbedding(nn.Module):
    """The table of a model whose embedding is its output matrix: rows of that, in its bits."""

    def __init__(self, head: QuantizedLinear) -> None:
        super().__init__()
        self.head = head

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head.rows(tokens)


def quantized(weight: Tensor, bias: Tensor | None, kind: QuantizeName) -> QuantizedLinear:
    """Quantise a matrix; to 8 bits in place of 4 where its inputs are no multiple of a group."""
    return QuantizedLinear(weight, bias, kind if weight.shape[1] % GROUP == 0 else "int8")


def _to_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    scales = weight.abs().amax(-1).clamp_min_(1e-30) / 127
    return (weight / scales.unsqueeze(-1)).round_().to(torch.int8), scales


def _to_int4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Let 0 … 15 span each group from its least to its greatest weight, on scale and zero as they are kept."""
    groups = weight.reshape(weight.shape[0], -1, GROUP)  # (out, in / 32, 32)
    least, greatest = groups.aminmax(dim=-1, keepdim=True)
    zero = least.bfloat16()
    scale = ((greatest - zero.float()) / 15).clamp_min(1e-30).bfloat16()
    numbers = (groups - zero.float()).div_(scale.float()).round_().clamp_(0, 15).to(torch.uint8)
    low, high = numbers.view(weight.shape[0], -1, 2).unbind(-1)
    return low | high << 4, torch.cat((scale, zero), dim=-1)


def _halves(numbers: Tensor) -> Tensor:
    """The numbers (…, n) of bytes (…, n / 2) that hold two each."""
    return torch.stack((numbers & 15, numbers >> 4), dim=-1).flatten(-2)


def _of_torch(kind: QuantizeName, numbers: Tensor, scales: Tensor) -> Product | None:
    """PyTorch's own product, for a CPU without a C compiler; it rounds what is multiplied to bfloat16."""
    outs = numbers.shape[0]
    if library() is not None or numbers.device.type != "cpu" or outs % GROUP:
        return None
    if kind == "int8":
        narrow = scales.bfloat16()
        return lambda x: torch.ops.aten._weight_int8pack_mm(x.bfloat16(), numbers, narrow).float()
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(_halves(numbers).int(), 1)
    scale, zero = scales.float().unbind(-1)
    # There w = scale * (number - 8) + zero.
    both = torch.stack((scale, zero + 8 * scale), dim=-1).transpose(0, 1).contiguous().bfloat16()
    return lambda x: torch.ops.aten._weight_int4pack_mm_for_cpu(x.bfloat16(), packed, GROUP, both).float()
