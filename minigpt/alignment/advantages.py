"""From rewards to what a policy is trained on: advantages, the clipped surrogate, distances to a reference.

Pure functions. Shapes: G prompts, N answers a prompt, B rows, T targets; a mask (B, T) is True where a target belongs
to an answer.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from minigpt.errors import ConfigError

Normalisation = Literal["token", "sequence", "constant"]


def group_advantages(rewards: Tensor, *, standardise: bool) -> Tensor:
    """Return by how much each reward (G, N) is above the mean of its group, in units of the group's spread if asked.

    Standardised as in GRPO (Shao et al. 2024, section 4.1.2), with the deviation of a sample (N - 1): [1, 0, 0, 1]
    gives ±0.866. Centred only as in Dr. GRPO (Liu et al. 2025), which a prompt's difficulty does not bias: ±0.5. Equal
    rewards give exact zeros. Errors: ConfigError for groups of one, which nothing can be compared in.
    """
    if rewards.shape[1] < 2:
        raise ConfigError(f"group_size is {rewards.shape[1]}; answers are compared within a group, give at least 2")
    centred = rewards - rewards.mean(1, keepdim=True)
    if standardise:
        centred = centred / rewards.std(1, keepdim=True)
    equal = rewards.amax(1, keepdim=True) == rewards.amin(1, keepdim=True)  # whatever rounding makes of their mean
    return torch.where(equal, 0.0, centred)


def gae(rewards: Tensor, values: Tensor, mask: Tensor, *, discount: float, decay: float) -> Tensor:
    """Return advantages (B, T) by generalised advantage estimation (Schulman et al. 2015, eq. 16); 0 off the mask.

    `rewards` and `values` (B, T) are those at each target, the value being that before its token; after the last one
    of a row there is nothing more to come.
    """
    advantages = torch.zeros_like(rewards)
    later = rewards.new_zeros(rewards.shape[0])
    following = torch.zeros_like(later)
    for t in range(rewards.shape[1] - 1, -1, -1):
        here = rewards[:, t] + discount * following - values[:, t] + discount * decay * later
        advantages[:, t] = later = torch.where(mask[:, t], here, 0.0)
        following = torch.where(mask[:, t], values[:, t], 0.0)
    return advantages


def whitened(values: Tensor, mask: Tensor) -> Tensor:
    """Bring the values under the mask to mean 0 and deviation 1; all the same gives zeros, and so does one alone."""
    inside = values[mask]
    if len(inside) < 2 or inside.amax() == inside.amin():
        return torch.zeros_like(values)
    return torch.where(mask, (values - inside.mean()) / inside.std(), 0.0)


def clipped_surrogate(
    log_probs: Tensor, old: Tensor, advantages: Tensor, low: float, high: float
) -> tuple[Tensor, Tensor]:
    """Return the loss of each token under PPO's clipped ratio (Schulman et al. 2017, eq. 7), and where it is clipped.

    The ratio of new to old probability counts up to 1 + `high` where that is good, and down to 1 - `low` where it is
    bad; PPO has both the same, DAPO (Yu et al. 2025, section 3.1) a larger `high`.
    """
    ratio = (log_probs - old).exp()
    loss = -torch.minimum(ratio * advantages, ratio.clamp(1.0 - low, 1.0 + high) * advantages)
    clipped = ((advantages > 0) & (ratio > 1.0 + high)) | ((advantages < 0) & (ratio < 1.0 - low))
    return loss, clipped


def kl_k3(log_probs: Tensor, reference: Tensor) -> Tensor:
    """Estimate KL(policy, reference) from each sampled token: r - 1 - ln r of r = reference / policy; never negative.

    Schulman's third estimator (2020, "Approximating KL Divergence"), as GRPO has it (eq. 4).
    """
    gap = reference - log_probs
    return gap.exp() - gap - 1.0


def token_weights(mask: Tensor, how: Normalisation) -> Tensor:
    """How much each token (B, T) counts in a sum over the step, which `divisor` then divides.

    `token`: every token of the step the same (DAPO, Yu et al. 2025, eq. 8). `sequence`: every answer the same, so the
    tokens of long ones less (GRPO, Shao et al. 2024, eq. 3). `constant`: every token the same, whatever the lengths of
    this step's answers (Dr. GRPO, Liu et al. 2025).
    """
    weights = mask.float()
    return weights / weights.sum(1, keepdim=True).clamp(min=1.0) if how == "sequence" else weights


def divisor(answers: float, tokens: float, how: Normalisation, max_new_tokens: int) -> float:
    """What the weighted sum over a step is divided by: all tokens, all answers, or all tokens they could have had.

    `tokens` is the mean of the step's answers.
    """
    return answers * {"token": tokens, "sequence": 1.0, "constant": float(max_new_tokens)}[how]
