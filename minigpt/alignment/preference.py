"""What a run on preferences minimises, what it says of each step, and how held-out rows are scored."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from minigpt.alignment.losses import (
    bradley_terry_loss,
    dpo_loss,
    ipo_loss,
    kto_loss,
    kto_reference_point,
    simpo_loss,
)
from minigpt.alignment.pairs import PairBatch
from minigpt.alignment.reward_model import rewards_at_the_end
from minigpt.config import check_choice
from minigpt.errors import ConfigError
from minigpt.model.loss import token_log_probs
from minigpt.model.transformer import GPT

PreferenceMethod = Literal["dpo", "ipo", "simpo", "kto", "reward"]
BETA: dict[str, float] = {"dpo": 0.1, "ipo": 0.1, "simpo": 2.0, "kto": 0.1, "reward": 1.0}


@dataclass(frozen=True, kw_only=True)
class PreferenceConfig:
    """How preferences are learned; a number that a method does not know is refused.

    `beta` None is the method's usual one. `margin` is SimPO's γ, by default beta / 2. The two weights are KTO's, for
    good and for bad answers.
    """

    method: PreferenceMethod
    beta: float | None = None
    label_smoothing: float = 0.0
    margin: float | None = None
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0

    def __post_init__(self) -> None:
        check_choice("method", self.method, get_args(PreferenceMethod))
        known = {"dpo": {"label_smoothing"}, "simpo": {"label_smoothing", "margin"}}
        known["kto"] = {"desirable_weight", "undesirable_weight"}
        usual: dict[str, float | None] = {"label_smoothing": 0.0, "margin": None}
        usual |= {"desirable_weight": 1.0, "undesirable_weight": 1.0}
        for name, value in usual.items():
            if getattr(self, name) != value and name not in known.get(self.method, set()):
                methods = " and ".join(method for method, names in known.items() if name in names)
                raise ConfigError(
                    f"{name} is {getattr(self, name)}, which {self.method} knows nothing of; it is {methods}'s"
                )
        ranges = {
            "beta": 1e3,
            "label_smoothing": 0.5,
            "margin": 1e3,
            "desirable_weight": 1e3,
            "undesirable_weight": 1e3,
        }
        for name, most in ranges.items():
            value = getattr(self, name)
            least = 1e-6 if name == "beta" else 0.0
            if value is not None and not least <= value < most:
                raise ConfigError(f"{name} is {value!r}; it must be from {least:g} to below {most:g}")

    @property
    def strength(self) -> float:
        """The beta that counts."""
        return BETA[self.method] if self.beta is None else self.beta

    @property
    def needs_reference(self) -> bool:
        """Whether answers are compared with how likely they were before."""
        return self.method in ("dpo", "ipo", "kto")


class Answers(NamedTuple):
    """What a model says of rows: log-probabilities of whole answers (B, 2), or rewards; the rest as in PairBatch."""

    scores: Tensor
    lengths: Tensor
    reference: Tensor
    good: Tensor


def answer_log_probs(model: GPT, tokens: Tensor, targets: Tensor) -> Tensor:
    """Return the summed log-probability of the targets of each side (B, 2) of tokens (B, 2, T); float32."""
    hidden = model.model(tokens.flatten(0, 1))
    sums = token_log_probs(hidden, model.lm_head.weight, targets.flatten(0, 1)).sum(-1)
    return sums.view(-1, 2)


def answers_of(model: GPT, batch: PairBatch, config: PreferenceConfig) -> Answers:
    """Score both sides of each row; the second side of KTO's has no gradient."""
    if config.method == "reward":
        scores = rewards_at_the_end(model, batch.tokens, batch.targets)
    elif config.method == "kto":
        first = model.model(batch.tokens[:, 0])
        own = token_log_probs(first, model.lm_head.weight, batch.targets[:, 0]).sum(-1)
        scores = torch.stack((own, torch.zeros_like(own)), dim=1)
    else:
        scores = answer_log_probs(model, batch.tokens, batch.targets)
    return Answers(scores, batch.lengths, batch.reference, batch.good)


def losses_of(config: PreferenceConfig, answers: Answers, kl: Tensor | None = None) -> Tensor:
    """Return the loss of each row (B,); `kl` is KTO's reference point."""
    (chosen, rejected), beta = answers.scores.unbind(1), config.strength
    before = answers.reference.unbind(1)
    if config.method == "reward":
        return bradley_terry_loss(chosen, rejected)
    if config.method == "simpo":
        margin = beta / 2 if config.margin is None else config.margin
        return simpo_loss(
            chosen, rejected, *answers.lengths.unbind(1), beta=beta, margin=margin,
            label_smoothing=config.label_smoothing,
        )  # fmt: skip
    if config.method == "ipo":
        return ipo_loss(chosen, rejected, *before, beta=beta)
    if config.method == "dpo":
        return dpo_loss(chosen, rejected, *before, beta=beta, label_smoothing=config.label_smoothing)
    assert kl is not None
    return kto_loss(
        chosen, before[0], answers.good, kl, beta=beta,
        desirable_weight=config.desirable_weight, undesirable_weight=config.undesirable_weight,
    )  # fmt: skip


Sums = dict[str, tuple[Tensor, Tensor]]  # by name: a sum, and over how many


@torch.no_grad()
def figures_of(config: PreferenceConfig, answers: Answers, kl: Tensor | None = None) -> Sums:
    """Return what is worth saying of rows beyond their loss, as sums over them.

    accuracy: the share of pairs whose chosen answer has the higher reward (a tie is half), or of answers on their side
    of KTO's reference point. margin: by how much the reward is higher. chosen_change, rejected_change: how many nats
    likelier the answers are than under the reference. drift: by how many nats a token all of them became less likely.
    """
    first, n = answers.scores[:, 0], torch.ones_like(answers.scores[:, 0])
    if config.method in ("reward", "simpo"):
        per_token = 1.0 if config.method == "reward" else config.strength / answers.lengths
        rewards = answers.scores * per_token
        sums = {"accuracy": (_above(rewards[:, 0] - rewards[:, 1]), n), "margin": (rewards[:, 0] - rewards[:, 1], n)}
        names = ("chosen_reward", "rejected_reward") if config.method == "reward" else ("chosen", "rejected")
        values = answers.scores if config.method == "reward" else answers.scores / answers.lengths
        sums |= {name: (values[:, side], n) for side, name in enumerate(names)}
    elif config.method == "kto":
        assert kl is not None
        change, good = first - answers.reference[:, 0], answers.good.float()
        side = torch.where(answers.good, change - kl, kl - change)
        sums = {"accuracy": (_above(side), n), "chosen_change": (change * good, good)}
        sums |= {"rejected_change": (change * (1 - good), 1 - good), "kl": (kl * n, n)}
        sums |= {"drift": (-change / answers.lengths[:, 0], n)}
    else:
        changes = answers.scores - answers.reference
        gap = changes[:, 0] - changes[:, 1]
        sums = {"accuracy": (_above(gap), n), "margin": (config.strength * gap, n)}
        sums |= {"chosen_change": (changes[:, 0], n), "rejected_change": (changes[:, 1], n)}
        sums |= {"drift": (-changes.sum(1) / answers.lengths.sum(1), n)}
    return {name: (value.sum(), count.sum()) for name, (value, count) in sums.items()}


def _above(gap: Tensor) -> Tensor:
    return (gap > 0).float() + 0.5 * (gap == 0).float()


def means_of(sums: Sums) -> dict[str, Tensor]:
    """Divide sums by their counts; of nothing it is 0."""
    return {name: value / count.clamp(min=1.0) for name, (value, count) in sums.items()}


class PreferenceLoss:
    """The loss of a method, each row counting the same; KTO's reference point is that of the whole step."""

    def __init__(self, config: PreferenceConfig) -> None:
        self.config = config
        self._whole: PairBatch | None = None
        self._kl: Tensor | None = None
        self._sums: Sums = {}

    def weight(self, batch: PairBatch) -> float:
        """Begin a step, and count its rows."""
        self._whole, self._kl, self._sums = batch, None, {}
        return float(len(batch.tokens))

    def loss_sum(self, model: GPT, batch: PairBatch) -> Tensor:
        """Sum the losses of a micro-batch."""
        if self.config.method == "kto" and self._kl is None:
            assert self._whole is not None
            self._kl = reference_point(model, self._whole.split(len(batch.tokens)))
        answers = answers_of(model, batch, self.config)
        for name, (value, count) in figures_of(self.config, answers, self._kl).items():
            before, counted = self._sums.get(name, (torch.zeros_like(value), torch.zeros_like(count)))
            self._sums[name] = (before + value, counted + count)
        return losses_of(self.config, answers, self._kl).sum()

    def figures(self) -> dict[str, Tensor]:
        """Say how well the rows of the step are told apart, and how far the model has moved."""
        return means_of(self._sums)


@torch.no_grad()
def reference_point(model: GPT, batches: Iterable[PairBatch]) -> Tensor:
    """KTO's reference point of a model, from the second sides of rows."""
    device = model.lm_head.weight.device
    now, before = [], []
    for batch in batches:
        moved = batch.to(device)
        hidden = model.model(moved.tokens[:, 1])
        now.append(token_log_probs(hidden, model.lm_head.weight, moved.targets[:, 1]).sum(-1))
        before.append(moved.reference[:, 1])
    return kto_reference_point(torch.cat(now), torch.cat(before))


@dataclass(frozen=True)
class PairScore:
    """How held-out rows are told apart: their mean loss, and figures as for a step."""

    loss: float
    figures: dict[str, float]
    pairs: bool  # whether the rows are pairs, or answers by themselves

    @property
    def value(self) -> float:
        """The loss: the lower, the better."""
        return self.loss

    @property
    def text(self) -> str:
        """The score for people."""
        return f"{'pair accuracy' if self.pairs else 'accuracy'} {self.figures['accuracy']:.1%}"

    def row(self) -> dict[str, float]:
        """The score for metrics and records."""
        return {"held_out_loss": self.loss, **{f"held_out_{name}": value for name, value in self.figures.items()}}


@torch.no_grad()
def score_pairs(model: GPT, batches: Sequence[PairBatch], config: PreferenceConfig) -> PairScore:
    """Score rows; training mode comes back as it was."""
    with evaluating(model):
        kl = reference_point(model, batches) if config.method == "kto" else None
        total, count = 0.0, 0
        found: list[Sums] = []
        for batch in batches:
            answers = answers_of(model, batch.to(model.lm_head.weight.device), config)
            total += float(losses_of(config, answers, kl).double().sum())
            found.append(figures_of(config, answers, kl))
            count += len(batch.tokens)
    means = {}
    for name in found[0]:
        value, counted = (sum(float(part[name][place]) for part in found) for place in (0, 1))
        means[name] = value / max(1.0, counted)
    return PairScore(total / count, means, config.method != "kto")


@contextlib.contextmanager
def evaluating(model: GPT) -> Iterator[None]:
    """Put a model into evaluation mode, and back."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)
