"""What a policy is trained to do with its own answers: more of those that were worth more than expected."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from minigpt.alignment.advantages import Normalisation, clipped_surrogate, divisor, kl_k3, token_weights
from minigpt.alignment.value_head import value_of
from minigpt.config import check_choice
from minigpt.errors import ConfigError
from minigpt.model.loss import IGNORED, token_log_probs
from minigpt.model.transformer import GPT

Method = Literal["grpo", "ppo"]
GROUP_SIZE = 8  # of GRPO
PPO: dict[str, Any] = {"group_size": 1, "kl": 0.05}  # a value is what one answer is compared with; a reward model errs


@dataclass(frozen=True, kw_only=True)
class PolicyConfig:
    """How answers are drawn and learned from.

    Answers are drawn at `temperature` with nothing filtered, so that what is trained is what was drawn from. `updates`
    steps are taken on each set of answers. `kl` is the weight of the distance to the start model: in the loss for GRPO,
    in the reward of each token for PPO. `standardise` and `normalisation` are those of `advantages`; `discount`,
    `decay` and `value_weight` are PPO's alone. A model whose distance (nats a token) is above `max_kl` is not kept.
    """

    method: Method
    group_size: int = GROUP_SIZE
    updates: int = 1
    max_new_tokens: int = 64
    temperature: float = 1.0
    kl: float = 0.0
    clip: float = 0.2
    clip_high: float | None = None  # None: as `clip`
    standardise: bool = True
    normalisation: Normalisation = "token"
    discount: float = 1.0
    decay: float = 0.95
    value_weight: float = 0.1
    max_kl: float | None = None

    def __post_init__(self) -> None:
        check_choice("method", self.method, get_args(Method))
        check_choice("normalisation", self.normalisation, get_args(Normalisation))
        least = {"group_size": 2 if self.method == "grpo" else 1, "updates": 1, "max_new_tokens": 1}
        for name, low in least.items():
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < low:
                raise ConfigError(f"{name} is {value!r}; it must be a whole number of at least {low}")
        for name, (over, most) in _RANGES.items():
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and over <= value <= most):
                raise ConfigError(f"{name} is {value!r}; it must be from {over:g} to {most:g}")


_RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0.01, 100.0), "kl": (0.0, 100.0), "clip": (0.0, 1.0), "clip_high": (0.0, 100.0),
    "discount": (0.0, 1.0), "decay": (0.0, 1.0), "value_weight": (0.0, 100.0), "max_kl": (0.0, math.inf),
}  # fmt: skip


@dataclass(frozen=True)
class Rollouts:
    """Answers of a policy to learn from; all (B, T): a row is a prompt and an answer, padded on the right.

    Targets are shifted, and -100 outside the answer. `old` and `reference` are the log-probabilities of the targets
    under the policy that drew them and under the start model, `returns` what a value head is to predict (0 without
    one). `figures` are scalars about all answers that were drawn, also those from which nothing can be learned and
    which are not among the rows: `answers` is how many there were.
    """

    tokens: Tensor
    targets: Tensor
    old: Tensor
    reference: Tensor
    advantages: Tensor
    returns: Tensor
    figures: dict[str, Tensor]

    def split(self, rows: int) -> Iterator[Rollouts]:
        """Cut into micro-batches of at most `rows` rows of like length, each no wider than it must be."""
        lengths = last_places(self.targets != IGNORED) + 1
        for part in torch.split(lengths.argsort(stable=True), rows):
            yield self.each(partial(_cut, rows=part, width=int(lengths[part].max())))

    def to(self, device: torch.device) -> Rollouts:
        """Move to a device."""
        return self.each(lambda tensor: tensor.to(device))

    def each(self, change: Callable[[Tensor], Tensor]) -> Rollouts:
        """The same with every tensor changed."""
        return Rollouts(
            tokens=change(self.tokens),
            targets=change(self.targets),
            old=change(self.old),
            reference=change(self.reference),
            advantages=change(self.advantages),
            returns=change(self.returns),
            figures=self.figures,
        )

    def tensors(self) -> dict[str, Tensor]:
        """All of them by name but the figures."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != "figures"}


def _cut(tensor: Tensor, rows: Tensor, width: int) -> Tensor:
    return tensor[rows, :width]


class PolicyLoss:
    """The clipped surrogate of PPO, with GRPO's distance to the reference or PPO's error of the value head.

    GRPO: each token's loss has `kl` times its distance added (Shao et al. 2024, eq. 3). PPO: `value_weight` times half
    the squared error of the value, without clipping it, which only does harm (Andrychowicz et al. 2021, section 3.2).
    """

    def __init__(self, config: PolicyConfig) -> None:
        self.config = config
        self._sums: dict[str, Tensor] = {}
        self._told: dict[str, Tensor] = {}

    def weight(self, batch: Rollouts) -> float:
        """Begin a step, and say what its sum is divided by."""
        self._sums, self._told = {}, batch.figures
        answers, tokens = (float(batch.figures[name]) for name in ("answers", "answer_tokens"))
        return divisor(answers, tokens, self.config.normalisation, self.config.max_new_tokens)

    def loss_sum(self, model: GPT, batch: Rollouts) -> Tensor:
        """Sum the loss of a micro-batch, by how much each token counts."""
        config, mask = self.config, batch.targets != IGNORED
        hidden = model.model(batch.tokens)
        log_probs = answer_log_probs(model, hidden, batch.targets, config.temperature)
        high = config.clip if config.clip_high is None else config.clip_high
        losses, clipped = clipped_surrogate(log_probs, batch.old, batch.advantages, config.clip, high)
        self._count(mask, clip_fraction=clipped.float())
        if config.method == "grpo":
            losses = losses + config.kl * kl_k3(log_probs, batch.reference)
        else:
            error = (value_of(model, hidden) - batch.returns).square()
            self._count(mask, value_error=error)
            losses = losses + config.value_weight * 0.5 * error
        return (losses * token_weights(mask, config.normalisation)).sum()

    def figures(self) -> dict[str, Tensor]:
        """Say what the answers were like, and how far this step was from them."""
        tokens = float(self._told["answers"] * self._told["answer_tokens"])
        return {**self._told, **{name: total / tokens for name, total in self._sums.items()}}

    def _count(self, mask: Tensor, **figures: Tensor) -> None:
        for name, values in figures.items():
            total = (values.detach() * mask).sum()
            self._sums[name] = self._sums[name] + total if name in self._sums else total


def last_places(mask: Tensor) -> Tensor:
    """The place (B,) of the last True of each row (B, T)."""
    places = torch.arange(mask.shape[1], device=mask.device).expand_as(mask)
    return torch.where(mask, places, -1).amax(1)


def answer_log_probs(model: GPT, hidden: Tensor, targets: Tensor, temperature: float) -> Tensor:
    """Return the log-probability of each target at a temperature, float32; 0 where there is none."""
    return token_log_probs(hidden / temperature, model.lm_head.weight, targets)


def known(values: dict[str, Any]) -> PolicyConfig:
    """Make the settings of what was said; PPO has one answer a prompt and keeps near the reference unless told else."""
    return PolicyConfig(**(PPO if values.get("method") == "ppo" else {}) | values)
