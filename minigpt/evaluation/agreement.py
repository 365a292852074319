"""Whether two models say the same: the logits of both on one text, position by position."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from minigpt.model.transformer import GPT


@dataclass(frozen=True)
class Agreement:
    """How far logits lie apart, beside how far they spread.

    `error`, 0 for equal models and about 1.4 for unlike ones, is the root mean square of the differences over the
    standard deviation of the first model's logits; `same_best` is the share of positions at which both take the same
    token for the likeliest.
    """

    positions: int
    largest: float
    spread: float
    error: float
    same_best: float


@torch.no_grad()
def logits_of(model: GPT, ids: list[int]) -> Tensor:
    """Return the logits (T, V) after every token of a text, float32 on the CPU."""
    device = model.lm_head.weight.device
    logits: Tensor = model(torch.tensor([ids], device=device))[0]
    return logits.float().cpu()


def compare(expected: Tensor, found: Tensor) -> Agreement:
    """Compare logits (T, V) of two models; a value that is no number makes the differences infinite."""
    difference = torch.nan_to_num(found - expected, nan=torch.inf)
    spread = float(expected.std())
    return Agreement(
        positions=len(expected),
        largest=float(difference.abs().max()),
        spread=spread,
        error=float(difference.square().mean().sqrt()) / max(spread, torch.finfo(torch.float32).tiny),
        same_best=float((expected.argmax(-1) == found.argmax(-1)).float().mean()),
    )
