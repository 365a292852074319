"""Choose what was not said about reinforcement: answers a step, rate, steps, from the model and what a step takes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from minigpt.alignment.policy import PolicyConfig, known
from minigpt.alignment.rewards import RewardSpec, parse_reward
from minigpt.config import ModelConfig, OptimizerName, TrainConfig, from_mapping
from minigpt.errors import ConfigError
from minigpt.model.size import parameters, training_bytes
from minigpt.training.plan import Machine, Plan, budget_text, micro_batch
from minigpt.training.tuning_plan import TuningRequest, tuning_rate

STEPS = 200  # where no budget is given
ANSWERS = 128  # a step
# Of the rate of tuning: the signal of a step is weak, and every step changes what is drawn next. By AdamW, whatever
# made the weights: each of Muon's steps has the same size, however little it was that the answers told.
RATE_SHARE, LORA_RATE_SHARE = 0.05, 0.1
OPTIMIZER: OptimizerName = "adamw"
EVALUATIONS = 10
SMALLER = "a smaller --batch-size or --max-new-tokens"
MAX_TIMEOUT = 86_400.0


@dataclass(frozen=True, kw_only=True)
class PolicyRequest(TuningRequest):
    """What a person asked for; None is left to the plan.

    `policy` are settings of `PolicyConfig`, `rewards` what answers are worth by, `judges` what tells wins at the end
    besides; `timeout` is how many seconds a command among them may take for an answer.
    """

    policy: dict[str, Any]
    rewards: tuple[str, ...]
    judges: tuple[str, ...] = ()
    timeout: float = 60.0
    train: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        config = self.config()
        if not self.rewards:
            raise ConfigError("no reward; say with --reward what an answer is worth, such as --reward rule:correct")
        for text in (*self.rewards, *self.judges):
            parse_reward(text)
        if not 0 < self.timeout <= MAX_TIMEOUT:
            raise ConfigError(f"reward_timeout is {self.timeout}; it must be from above 0 to {MAX_TIMEOUT:g} seconds")
        asked = self.train.get("batch_size")
        if asked is not None and asked % config.group_size:
            raise ConfigError(f"batch_size {asked} is no multiple of group_size {config.group_size}")

    def config(self) -> PolicyConfig:
        """How answers are drawn and learned from."""
        return known(self.policy)

    def specs(self) -> list[RewardSpec]:
        """The rewards, read."""
        return [parse_reward(text) for text in self.rewards]


def answers_a_step(request: PolicyRequest, prompts: int) -> int:
    """How many answers a step has: those asked for, or the usual number, in whole groups of different prompts."""
    group = request.config().group_size
    return int(request.train.get("batch_size") or group * max(1, min(ANSWERS // group, prompts)))


def make_policy_plan(
    request: PolicyRequest,
    *,
    model: ModelConfig,
    adapter: int | None,
    prompts: int,
    length: int,
    machine: Machine,
    measure: Callable[[], float],
    named: str,
) -> Plan:
    """Choose batch, rate and number of steps.

    `length` are the tokens of a prompt and its answer at most, `measure()` the seconds that drawing and judging the
    answers of a step takes, asked for only where the budget is a time.
    """
    config, batch_size = request.config(), answers_a_step(request, prompts)
    optimizer = request.train.get("optimizer", OPTIMIZER)
    rate = RATE_SHARE if request.lora is None else LORA_RATE_SHARE

    def need(rows: int) -> int:
        writer = 4 * parameters(model)  # at most, for the copy that answers are drawn with
        kind, device = machine.compute_dtype, machine.device_type
        return writer + training_bytes(model, rows, length, kind, optimizer, device=device, adapter=adapter)

    micro = request.train.get("micro_batch_size") or micro_batch(batch_size, machine, need, SMALLER)
    steps, seconds = _steps(request, config, batch_size, prompts, length, measure)
    values: dict[str, Any] = {
        "total_steps": steps,
        "batch_size": batch_size,
        "micro_batch_size": int(micro),
        "context": length,
        "seed": request.seed,
        "optimizer": optimizer,
        "learning_rate": round(rate * tuning_rate(model, lora=request.lora is not None), 7),
        "warmup_steps": max(1, min(10, steps // 20)),
        "weight_decay": 0.0,
        "eval_every": max(1, math.ceil(steps / EVALUATIONS)),
        "compute_dtype": machine.compute_dtype,
    }
    train = from_mapping(TrainConfig, {**values, **request.train}, "train")
    return Plan(
        model=model,
        train=train,
        seconds=seconds,
        validation_tokens=0,
        why={"model": named, "plan": _text(request, config, train, machine)},
    )


def _steps(
    request: PolicyRequest, config: PolicyConfig, batch_size: int, prompts: int, length: int,
    measure: Callable[[], float],
) -> tuple[int, float | None]:  # fmt: skip
    """How many steps the budget comes to, and its seconds where it is one of time."""
    if request.minutes is not None:
        seconds = 60 * request.minutes
        return max(1, int(seconds / measure())), seconds
    if request.tokens is not None:
        return max(1, round(request.tokens / (batch_size * length))), None
    if request.epochs is not None:
        return max(1, round(request.epochs * prompts * config.group_size / batch_size * config.updates)), None
    return request.steps or STEPS, None


def _text(request: PolicyRequest, config: PolicyConfig, train: TrainConfig, machine: Machine) -> str:
    """Say the plan."""
    count = f"{train.total_steps:,} step{'s' if train.total_steps != 1 else ''}"
    given = [name for name in ("minutes", "epochs", "tokens") if getattr(request, name) is not None]
    if given:
        count = f"{budget_text(request, machine)} = {'about ' if request.minutes is not None else ''}{count}"
    answers = f"{train.batch_size} answers"
    if config.group_size > 1:
        answers += f" to {train.batch_size // config.group_size} prompts"
    text = f"{count} of {answers}, {config.method}, {train.optimizer} at {train.learning_rate:g}, KL {config.kl:g}"
    if config.updates > 1:
        text += f", {config.updates} steps on the same answers"
    return text if given or request.steps is not None else f"{text}; change it with --steps or --minutes"
