"""How the answers to held-out prompts changed: what they are worth, and how often the new one is worth more."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from minigpt.alignment.advantages import kl_k3
from minigpt.alignment.policy import PolicyConfig
from minigpt.alignment.reference import Reference
from minigpt.alignment.rollouts import Ask, Drawn, Judge, draw, judged, log_probs_of, padded
from minigpt.config import SamplingConfig
from minigpt.evaluation.shares import Share
from minigpt.inference.sampling import row_seed
from minigpt.model.loss import IGNORED
from minigpt.model.transformer import GPT
from minigpt.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Standing:
    """Where a model stands on held-out prompts: mean reward, wins over the start, distance from it, answers' length.

    A distance (nats a token) above `max_kl` makes it worth nothing, so that such a model is not kept.
    """

    reward: float
    wins: Share
    kl: float
    answer_tokens: float
    ended: float
    max_kl: float | None = None

    @property
    def value(self) -> float:
        """The lower, the better."""
        return math.inf if self.max_kl is not None and self.kl > self.max_kl else -self.reward

    @property
    def text(self) -> str:
        """The standing for people."""
        return f"reward {self.reward:.3f}, {self.wins.value:.0%} won against the start, KL {self.kl:.3f}"

    def row(self) -> dict[str, float]:
        """The standing for metrics and records."""
        return {
            "held_out_reward": self.reward,
            "win_rate": self.wins.value,
            "held_out_kl": self.kl,
            "held_out_answer_tokens": self.answer_tokens,
            "held_out_ended": self.ended,
        }


class HeldOut:
    """Prompts that are never trained on; a model's likeliest answers to them stand beside those of the start model."""

    def __init__(
        self,
        reference: Reference,
        tokenizer: Tokenizer,
        asks: Sequence[Ask],
        judge: Judge,
        config: PolicyConfig,
        seed: int,
    ) -> None:
        self.reference, self.tokenizer, self.asks, self.judge = reference, tokenizer, list(asks), judge
        self.config, self.seed = config, seed

    def some(self, count: int) -> HeldOut:
        """The same with at most `count` of the prompts, evenly spaced."""
        every = [self.asks[i * len(self.asks) // count] for i in range(count)] if count < len(self.asks) else self.asks
        return HeldOut(self.reference, self.tokenizer, every, self.judge, self.config, self.seed)

    @cached_property
    def before(self) -> list[Drawn]:
        """What the start model answers."""
        with self.reference() as start:
            return self.answers(start)

    @cached_property
    def worth_before(self) -> list[float]:
        """What that is worth."""
        return judged(self.judge, self.asks, self.before)

    def answers(self, model: GPT, temperature: float = 0.0) -> list[Drawn]:
        """Answer all prompts with the most likely tokens, or with draws that are the same each time."""
        sampling = SamplingConfig(max_new_tokens=self.config.max_new_tokens, temperature=temperature)
        seeds = [row_seed(self.seed, row) for row in range(len(self.asks))]
        return draw(model, self.tokenizer, [ask.ids for ask in self.asks], sampling, seeds)

    def __call__(self, model: GPT) -> Standing:
        """Say where a model stands."""
        after = self.answers(model)
        worth = judged(self.judge, self.asks, after)
        return Standing(
            reward=sum(worth) / len(worth),
            wins=wins(worth, self.worth_before),
            kl=self._distance(model),
            answer_tokens=sum(len(one.ids) for one in after) / len(after),
            ended=sum(one.ended for one in after) / len(after),
            max_kl=self.config.max_kl,
        )

    @torch.no_grad()
    def _distance(self, model: GPT) -> float:
        """Estimate the distance from the start model, on answers drawn as in training."""
        drawn = self.answers(model, self.config.temperature)
        tokens, targets = padded([ask.ids for ask in self.asks], [one.ids for one in drawn])
        here = log_probs_of(model, tokens, targets, self.config.temperature)
        with self.reference() as start:
            there = log_probs_of(start, tokens, targets, self.config.temperature)
        return float(kl_k3(here, there)[targets != IGNORED].mean())


def wins(after: Sequence[float], before: Sequence[float]) -> Share:
    """The share of answers that are worth more than those before; one that is worth the same counts half."""
    points = [0.5 * ((new > old) + (new >= old)) for new, old in zip(after, before, strict=True)]
    return Share(sum(points) / len(points), len(points))
