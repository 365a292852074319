"""Losses on preferences, as pure functions of log-probabilities.

Shapes: P pairs or answers. A log-probability is that of a whole answer, the sum over its tokens, in nats. `beta` says
how much a nat of difference counts. Every loss is given for each pair (P,), so that a step can be cut anywhere.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def dpo_loss(
    chosen: Tensor,
    rejected: Tensor,
    reference_chosen: Tensor,
    reference_rejected: Tensor,
    *,
    beta: float,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Return -ln σ(β h) of each pair, h being by how much the policy prefers the chosen answer more than the reference.

    Direct preference optimization (Rafailov et al. 2023, eq. 7). With label smoothing ε a pair is taken to be the
    wrong way round that often: -(1 - ε) ln σ(β h) - ε ln σ(-β h) (Mitchell 2023, "A note on DPO with noisy
    preferences", eq. 3).
    """
    gap = (chosen - reference_chosen) - (rejected - reference_rejected)
    return _smoothed(beta * gap, label_smoothing)


def ipo_loss(
    chosen: Tensor, rejected: Tensor, reference_chosen: Tensor, reference_rejected: Tensor, *, beta: float
) -> Tensor:
    """Return (h - 1 / (2β))² of each pair: the preference is to have a size, not to grow without end.

    Identity preference optimization (Azar et al. 2023, eq. 17, whose τ is our β). As there, h is that of whole
    answers; `trl` takes the mean over tokens.
    """
    gap = (chosen - reference_chosen) - (rejected - reference_rejected)
    return (gap - 1 / (2 * beta)).square()


def simpo_loss(
    chosen: Tensor,
    rejected: Tensor,
    chosen_lengths: Tensor,
    rejected_lengths: Tensor,
    *,
    beta: float,
    margin: float,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Return -ln σ(β (c - r) - γ) of each pair, c and r being log-probabilities a token, γ the `margin`.

    SimPO (Meng et al. 2024, eq. 6): no reference, and no reward for length.
    """
    gap = chosen / chosen_lengths - rejected / rejected_lengths
    return _smoothed(beta * gap - margin, label_smoothing)


def kto_loss(
    log_probs: Tensor,
    reference: Tensor,
    good: Tensor,
    kl: Tensor,
    *,
    beta: float,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Tensor:
    """Return λ (1 - v) of each answer, v being how far it is on the right side of the reference point `kl`.

    Kahneman-Tversky optimization (Ethayarajh et al. 2024, eq. 8): v = σ(β (r - kl)) for a good answer and σ(β (kl - r))
    for a bad one, r being by how many nats the policy makes it likelier than the reference does. `good` (P,) is bool.
    """
    gap = log_probs - reference - kl
    value = torch.sigmoid(beta * torch.where(good, gap, -gap))
    return torch.where(good, desirable_weight, undesirable_weight) * (1 - value)


def kto_reference_point(log_probs: Tensor, reference: Tensor) -> Tensor:
    """Estimate KL(policy, reference), without gradient, from answers that belong to other prompts; never negative.

    Ethayarajh et al. 2024, section 4.1: the mean over the batch of by how much the policy makes them likelier.
    """
    return (log_probs - reference).mean().clamp(min=0.0).detach()


def bradley_terry_loss(chosen: Tensor, rejected: Tensor) -> Tensor:
    """Return -ln σ(c - r) of the rewards of each pair (Bradley & Terry 1952; Ouyang et al. 2022, eq. 1)."""
    return -F.logsigmoid(chosen - rejected)


def _smoothed(logits: Tensor, label_smoothing: float) -> Tensor:
    """Cross-entropy of pairs that are right with probability 1 - ε; `logsigmoid` is exact far from 0, too."""
    loss = -(1 - label_smoothing) * F.logsigmoid(logits)
    return loss - label_smoothing * F.logsigmoid(-logits) if label_smoothing else loss
