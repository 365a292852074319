"""Where a token stands: rotary, learned or sinusoidal positions.

Attention alone sees a set of tokens, not a sequence. Learned and sinusoidal positions add a vector to each
embedding; rotary positions turn queries and keys by an angle that grows with the position, so that their
product depends on the distance between them.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from minigpt.config import RopeScaling


def rotary_angles(
    positions: Tensor, head_dim: int, theta: float, scaling: RopeScaling | None = None
) -> tuple[Tensor, Tensor]:
    """Return cos and sin, each (…, T, D/2) float32, for `positions` (…, T) (Su et al. 2021, "RoFormer")."""
    frequencies = rotary_frequencies(head_dim, theta, scaling, positions.device)
    angles = positions.float().unsqueeze(-1) * frequencies  # (…, T, D/2)
    return angles.cos(), angles.sin()


def rotary_frequencies(
    head_dim: int, theta: float, scaling: RopeScaling | None, device: torch.device | None = None
) -> Tensor:
    """Return by how many radians each pair turns from one position to the next, (D/2) float32."""
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
    frequencies = 1.0 / theta**exponent
    return frequencies if scaling is None else scaled(frequencies, scaling)


def scaled(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Slow rotary frequencies down so that they reach further: all of them, or for `llama3` the slow ones alone."""
    slow = frequencies / scaling.factor
    if scaling.kind == "linear":
        return slow
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)  # in the context of the training
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return kept * frequencies + (1.0 - kept) * slow


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pairs (x[i], x[i + D/2]) of `x` (…, T, D) by their angles: the half-split order of Llama."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def sinusoidal(positions: Tensor, hidden_size: int) -> Tensor:
    """Return the vectors (…, T, C) of Vaswani et al. 2017, section 3.5: sines at even, cosines at odd places."""
    exponent = torch.arange(0, hidden_size, 2, dtype=torch.float32, device=positions.device) / hidden_size
    angles = positions.float().unsqueeze(-1) * torch.exp(-math.log(10_000.0) * exponent)  # (…, T, C/2)
    return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(-2)  # (…, T, C)
