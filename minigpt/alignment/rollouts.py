"""What a policy answers, and what there is to learn from it: a pure function of seed, step and weights.

A set of answers serves `updates` steps, so what was made of it is part of the run's state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from minigpt.alignment.advantages import gae, group_advantages, kl_k3, whitened
from minigpt.alignment.policy import PolicyConfig, Rollouts, answer_log_probs, last_places
from minigpt.alignment.reference import Reference
from minigpt.alignment.rewards import RewardRow
from minigpt.alignment.value_head import value_of
from minigpt.config import DTypeName, SamplingConfig
from minigpt.inference.engine import collect, stream
from minigpt.inference.sampling import row_seed
from minigpt.model.decoding import laid_out
from minigpt.model.loss import IGNORED
from minigpt.model.transformer import GPT
from minigpt.text.preferences import Prompt
from minigpt.text.tokenizer import Tokenizer

MOST_TOKENS = 32_768  # of prompts and answers that are drawn at once
READ_TOKENS = 8_192  # of a forward pass over them

Judge = Callable[[Sequence[RewardRow]], Sequence[float]]


@dataclass(frozen=True)
class Ask:
    """A prompt and its ids."""

    prompt: Prompt
    ids: list[int]


@dataclass(frozen=True)
class Drawn:
    """An answer as the model wrote it, its end token among the ids where it ended by itself."""

    ids: list[int]
    text: str
    finish_reason: str

    @property
    def ended(self) -> bool:
        """Whether the model ended it."""
        return self.finish_reason == "end"


def draw(
    model: GPT, tokenizer: Tokenizer, prompts: Sequence[Sequence[int]], sampling: SamplingConfig, seeds: Sequence[int]
) -> list[Drawn]:
    """Answer all prompts, as many at once as memory should hold; in float32, also under autocast.

    An answer depends on its prompt and seed alone, whatever else is drawn beside it.
    """
    with torch.autocast(model.lm_head.weight.device.type, enabled=False):
        return _draw(laid_out(model), tokenizer, prompts, sampling, seeds)


def _draw(
    writer: GPT, tokenizer: Tokenizer, prompts: Sequence[Sequence[int]], sampling: SamplingConfig, seeds: Sequence[int]
) -> list[Drawn]:
    rows = max(1, MOST_TOKENS // (max(map(len, prompts)) + sampling.max_new_tokens))
    answers = []
    for start in range(0, len(prompts), rows):
        part = slice(start, start + rows)
        events = stream(writer, tokenizer, prompts[part], sampling, seeds[part])
        answers += collect(events, len(prompts[part]))
    return [Drawn([event.token_id for event in one.tokens], one.text, one.finish_reason) for one in answers]


def padded(prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Return tokens (B, T) of prompts with their answers, padded on the right, and targets: -100 but for answers."""
    length = max(len(prompt) + len(answer) for prompt, answer in zip(prompts, answers, strict=True)) - 1
    tokens = torch.zeros(len(prompts), length, dtype=torch.long)
    targets = torch.full((len(prompts), length), IGNORED)
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        ids = torch.tensor([*prompt, *answer])
        tokens[row, : len(ids) - 1] = ids[:-1]
        targets[row, len(prompt) - 1 : len(ids) - 1] = ids[len(prompt) :]
    return tokens, targets


def judged(judge: Judge, asks: Sequence[Ask], drawn: Sequence[Drawn]) -> list[float]:
    """Return what each answer is worth."""
    pairs = zip(asks, drawn, strict=True)
    return list(
        judge([RewardRow(ask.prompt.messages, one.text, one.finish_reason, ask.prompt.row) for ask, one in pairs])
    )


def log_probs_of(model: GPT, tokens: Tensor, targets: Tensor, temperature: float) -> Tensor:
    """Return the log-probabilities (B, T) of the targets at a temperature, on the CPU; 0 where there is none."""
    found = torch.zeros(targets.shape)
    for part, width in _parts(targets):
        wanted = targets[part, :width].to(model.lm_head.weight.device)
        hidden = _hidden(model, tokens[part, :width])
        found[part, :width] = answer_log_probs(model, hidden, wanted, temperature).cpu()
    return found


def values_of(model: GPT, tokens: Tensor, targets: Tensor) -> Tensor:
    """Return the value (B, T) before each target, on the CPU; 0 where there is none."""
    found = torch.zeros(targets.shape)
    for part, width in _parts(targets):
        found[part, :width] = value_of(model, _hidden(model, tokens[part, :width])).cpu()
    return torch.where(targets != IGNORED, found, 0.0)


def _hidden(model: GPT, tokens: Tensor) -> Tensor:
    hidden: Tensor = model.model(tokens.to(model.lm_head.weight.device))
    return hidden


def _parts(targets: Tensor) -> Iterator[tuple[Tensor, int]]:
    """Share rows out over forward passes: rows of like length, and the width of the longest."""
    lengths = last_places(targets != IGNORED) + 1
    for part in torch.split(lengths.argsort(stable=True), max(1, READ_TOKENS // targets.shape[1])):
        yield part, int(lengths[part].max())


class RolloutBatches:
    """Batches that the model makes itself; never ahead of time, since they depend on its weights.

    A step has `batch_size` answers, a group for each of its prompts; an epoch visits every prompt once, in an order of
    its own. `reference` opens the start model. Errors: TrainingError where the judge fails.
    """

    def __init__(
        self,
        model: GPT,
        reference: Reference,
        tokenizer: Tokenizer,
        asks: Sequence[Ask],
        judge: Judge,
        config: PolicyConfig,
        *,
        batch_size: int,
        seed: int,
        dtype: DTypeName,
    ) -> None:
        assert batch_size % config.group_size == 0, "whole groups"
        self.model, self.reference, self.tokenizer, self.asks, self.judge = model, reference, tokenizer, asks, judge
        self.config, self.batch_size, self.seed, self.dtype = config, batch_size, seed, dtype
        self._made: tuple[int, Rollouts] | None = None

    def at(self, step: int) -> Rollouts:
        """Return the rollouts of one step (counted from 0), drawn with the weights as they are where they are due."""
        number = step // self.config.updates
        if self._made is None or self._made[0] != number:
            self._made = number, self.make(number)
        return self._made[1]

    def tensors(self) -> dict[str, Tensor]:
        """What the steps still to come on the same answers need."""
        if self._made is None or self.config.updates == 1:
            return {}
        number, made = self._made
        told = {f"figures.{name}": value for name, value in made.figures.items()}
        return {"number": torch.tensor(number), **made.tensors(), **told}

    def restore(self, tensors: dict[str, Tensor], step: int) -> None:
        """Take up what was saved after `step` steps; a ValueError where answers are missing that steps need."""
        self._made = None
        if "number" in tensors:
            # Copies: what was read may be a map of the file that the next save replaces.
            kept = {name: value.clone() for name, value in tensors.items() if name != "number"}
            told = {name.removeprefix("figures."): kept.pop(name) for name in list(kept) if name.startswith("figures.")}
            self._made = int(tensors["number"]), Rollouts(**kept, figures=told)
        elif step % self.config.updates:
            raise ValueError("no answers in the middle of the steps on them")

    def make(self, number: int) -> Rollouts:
        """Draw the answers of a number, have them judged, and work out what there is to learn from them."""
        asks = [ask for ask in self._chosen(number) for _ in range(self.config.group_size)]
        seed = row_seed(self.seed, number)
        sampling = SamplingConfig(max_new_tokens=self.config.max_new_tokens, temperature=self.config.temperature)
        seeds = [row_seed(seed, row) for row in range(len(asks))]
        drawn = draw(self.model, self.tokenizer, [ask.ids for ask in asks], sampling, seeds)
        rewards = torch.tensor(judged(self.judge, asks, drawn), dtype=torch.float32)
        tokens, targets = padded([ask.ids for ask in asks], [one.ids for one in drawn])
        with torch.no_grad(), self._precision():
            old = log_probs_of(self.model, tokens, targets, self.config.temperature)
            values = values_of(self.model, tokens, targets) if self.config.method == "ppo" else torch.zeros_like(old)
            with self.reference() as start:
                reference = log_probs_of(start, tokens, targets, self.config.temperature)
        advantages, returns = self._worth(rewards, targets != IGNORED, old, reference, values)
        told = figures(rewards.view(-1, self.config.group_size), drawn, old, kl_k3(old, reference))
        made = Rollouts(tokens, targets, old, reference, advantages, returns, told)
        return made if self.config.method == "ppo" or self.config.kl else teaching(made)

    def _chosen(self, number: int) -> list[Ask]:
        """The prompts of one set of answers."""
        count = self.batch_size // self.config.group_size
        chosen = []
        for place in range(number * count, (number + 1) * count):
            epoch, index = divmod(place, len(self.asks))
            generator = np.random.Generator(np.random.Philox(key=[self.seed, epoch]))
            chosen.append(self.asks[generator.permutation(len(self.asks))[index]])
        return chosen

    def _precision(self) -> AbstractContextManager[object]:
        """Compute as the training step does, so that its first ratios are 1."""
        device = self.model.lm_head.weight.device.type
        return torch.autocast(device, dtype=getattr(torch, self.dtype), enabled=self.dtype != "float32")

    def _worth(
        self, rewards: Tensor, mask: Tensor, old: Tensor, reference: Tensor, values: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return advantages and returns (B, T).

        GRPO gives every token what its answer is above its group. PPO gives each token its distance to the reference,
        and the last one the reward besides (Ouyang et al. 2022, eq. 2; Stiennon et al. 2020).
        """
        config = self.config
        if config.method == "grpo":
            each = group_advantages(rewards.view(-1, config.group_size), standardise=config.standardise).view(-1, 1)
            return torch.where(mask, each, 0.0), torch.zeros_like(old)
        given = torch.where(mask, -config.kl * (old - reference), 0.0)
        given[torch.arange(len(mask)), last_places(mask)] += rewards
        advantages = gae(given, values, mask, discount=config.discount, decay=config.decay)
        return whitened(advantages, mask) if config.standardise else advantages, advantages + values


def teaching(made: Rollouts) -> Rollouts:
    """Leave out the rows that have no advantage, so no gradient either; all stay where none has any."""
    rows = (made.advantages != 0).any(1)
    if not rows.any():
        return made
    return made.each(lambda tensor: tensor[rows])


def figures(rewards: Tensor, drawn: Sequence[Drawn], old: Tensor, distance: Tensor) -> dict[str, Tensor]:
    """What answers were like, as scalars: rewards (G, N) and their spread, surprise, distance, length, ends.

    `entropy` is what the sampled tokens say of it, and `kl` of the distance to the start model, both in nats a token;
    `equal_groups` is the share of groups in which all answers are worth the same, so that nothing is learned from them.
    """
    lengths = torch.tensor([float(len(one.ids)) for one in drawn])
    equal = rewards.amax(1) == rewards.amin(1)
    return {
        "answers": torch.tensor(float(len(drawn))),
        "reward": rewards.mean(),
        "reward_spread": rewards.std(correction=0),
        "equal_groups": equal.float().mean() if rewards.shape[1] > 1 else (rewards == rewards[0]).all().float(),
        "kl": distance.sum() / lengths.sum(),
        "entropy": -old.sum() / lengths.sum(),
        "answer_tokens": lengths.mean(),
        "ended": torch.tensor([float(one.ended) for one in drawn]).mean(),
    }
