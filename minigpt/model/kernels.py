"""The two hot pieces of a training step, as plain functions or compiled ones.

One compiled block serves every layer, so that compiling costs the same whatever the depth. Generation, whose shapes
change with every token, never meets the compiled form.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from minigpt.model.loss import Slope, softmax_slope


def run_block(block: nn.Module, x: Tensor, plan: Any, rotary: Any) -> Tensor:
    """Apply one block to hidden states (B, T, C) without a cache."""
    out: Tensor = block(x, plan, rotary, None)
    return out


@dataclass(frozen=True)
class Kernels:
    """How a training step runs a block, and how it turns logits into loss and gradient."""

    block: Callable[[nn.Module, Tensor, Any, Any], Tensor] = run_block
    slope: Slope = softmax_slope
    flex: bool = False  # packed documents through FlexAttention, which skips what no query may see


def compiled_kernels() -> Kernels:
    """Return the same pieces through `torch.compile`; they are compiled when first called, and may fail only then."""
    return Kernels(torch.compile(run_block, dynamic=False), torch.compile(softmax_slope, dynamic=False), flex=True)


def document_blocks(documents: Tensor, window: int) -> Any:
    """Return FlexAttention's mask for packed documents (B, T): causal, one window back, within a document.

    Dong et al. 2024, "Flex Attention". Tiles in which no query may look at any key are never computed.
    """
    from torch.nn.attention.flex_attention import create_block_mask

    def visible(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        near = (query >= key) & (query - key < window)
        return near & (documents[row, query] == documents[row, key])

    B, T = documents.shape
    return create_block_mask(visible, B, None, T, T, device=documents.device)


def block_attention(query: Tensor, key: Tensor, value: Tensor, blocks: Any) -> Tensor:
    """Scaled dot-product attention (B, H, T, D) over (B, K, T, D) under a mask of `document_blocks`."""
    from torch.nn.attention.flex_attention import flex_attention

    out: Any = flex_attention(query, key, value, block_mask=blocks, enable_gqa=query.shape[1] != key.shape[1])
    return out  # type: ignore[no-any-return]
