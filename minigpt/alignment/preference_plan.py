"""Choose what was not said about learning preferences: rows a step, rate, steps, from the data and the model."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from minigpt.alignment.preference import PreferenceConfig
from minigpt.config import ModelConfig, TrainConfig, from_mapping
from minigpt.model.size import training_bytes
from minigpt.training.plan import Machine, Plan, budget_text, micro_batch
from minigpt.training.tuning_plan import TuningRequest, tuning_optimizer, tuning_rate

EPOCHS = ((2_000, 3.0), (20_000, 2.0))  # up to so many rows, so many passes; above, one
REWARD_EPOCHS = 1.0  # a reward model learns its pairs by heart in a second pass
ROWS, STEPS_AN_EPOCH = (4, 32), 50  # a step: at least, at most; so few that an epoch has about so many steps
CPU_PASS_TOKENS = 1_024  # a micro-batch on a CPU: more are no faster, and rows of one length meet in it
RATE_SHARE, LORA_RATE_SHARE = 0.05, 0.2  # of the rate of tuning: a preference is a nudge, and a model forgets soon
REWARD_RATE_SHARE = 0.5
EVALUATIONS, EVALUATION_SHARE, PATIENCE = 10, 0.15, 3
FORWARD_SHARE = 0.25  # of a step's work, for the reference
SMALLER = "a smaller --context or --batch-size"


@dataclass(frozen=True, kw_only=True)
class PreferenceRequest(TuningRequest):
    """What a person asked for; None is left to the plan. `preference` are settings of `PreferenceConfig`."""

    preference: dict[str, Any]
    train: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.config()

    def config(self) -> PreferenceConfig:
        """How preferences are learned."""
        return PreferenceConfig(**self.preference)


@dataclass(frozen=True, kw_only=True)
class PairRows:
    """What the plan needs to know of the data: rows, their mean and their greatest positions, if any is held out.

    The positions are those of both sides together.
    """

    count: int
    mean: int
    longest: int
    held_out: bool


def make_preference_plan(
    request: PreferenceRequest,
    *,
    model: ModelConfig,
    base_record: Mapping[str, Any],
    adapter: int | None,
    rows: PairRows,
    machine: Machine,
    measure: Callable[[], float],
) -> Plan:
    """Choose batch, rate and number of steps; `measure()` gives the training speed in tokens/s."""
    config, optimizer = request.config(), tuning_optimizer(request, base_record)
    batch_size = int(request.train.get("batch_size") or _batch_size(rows.count))
    steps = request.steps or max(1, round(_rows_seen(request, config, rows, measure) / batch_size))
    need = partial(_need, model, machine, optimizer, adapter, rows.longest)
    micro = int(
        request.train.get("micro_batch_size") or micro_batch(_pass(batch_size, rows, machine), machine, need, SMALLER)
    )
    values: dict[str, Any] = {"total_steps": steps, "batch_size": batch_size, "micro_batch_size": micro}
    values |= {"context": rows.mean, "seed": request.seed, "optimizer": optimizer}
    values |= {
        "learning_rate": preference_rate(config, model, lora=request.lora is not None),
        "warmup_steps": max(1, min(100, steps // 10)),
        "weight_decay": 0.0,
        "eval_every": max(1, math.ceil(steps / EVALUATIONS)),
        "patience": PATIENCE if rows.held_out else 0,
        "compute_dtype": machine.compute_dtype,
    }
    train = from_mapping(TrainConfig, {**values, **request.train}, "train")
    scored = max(64 * rows.mean, 3.0 * EVALUATION_SHARE / EVALUATIONS * steps * batch_size * rows.mean)
    why = {"model": _model_text(request, adapter), "plan": _plan_text(request, machine, train, config, rows)}
    seconds = None if request.minutes is None else 60 * request.minutes
    return Plan(model=model, train=train, seconds=seconds, validation_tokens=int(scored), why=why)


def preference_rate(config: PreferenceConfig, model: ModelConfig, *, lora: bool) -> float:
    """The peak rate: a share of that of tuning."""
    share = REWARD_RATE_SHARE if config.method == "reward" else LORA_RATE_SHARE if lora else RATE_SHARE
    return float(f"{share * tuning_rate(model, lora=lora):.2g}")


def _batch_size(rows: int) -> int:
    least, most = ROWS
    return max(1, min(rows, most, max(least, rows // STEPS_AN_EPOCH)))


def _pass(batch_size: int, rows: PairRows, machine: Machine) -> int:
    """Rows that are read at once."""
    return min(batch_size, max(1, CPU_PASS_TOKENS // rows.mean)) if machine.device_type == "cpu" else batch_size


def _epochs(config: PreferenceConfig, rows: int) -> float:
    return REWARD_EPOCHS if config.method == "reward" else next((n for most, n in EPOCHS if rows <= most), 1.0)


def _rows_seen(
    request: PreferenceRequest, config: PreferenceConfig, rows: PairRows, measure: Callable[[], float]
) -> float:
    """How many rows the budget lets a model see."""
    if request.tokens is not None:
        return request.tokens / rows.mean
    if request.minutes is not None:
        seconds = 60 * request.minutes / (1 + EVALUATION_SHARE)
        seen = seconds * measure() / rows.mean
        if not config.needs_reference:
            return seen
        return max(seen * (1 - FORWARD_SHARE), seen - FORWARD_SHARE * rows.count)  # the reference reads each row once
    return rows.count * (request.epochs or _epochs(config, rows.count))


def _need(model: ModelConfig, machine: Machine, optimizer: Any, adapter: int | None, length: int, rows: int) -> int:
    """The bytes that a step takes with so many rows at a time, each two sides."""
    kind = machine.device_type
    return training_bytes(
        model, 2 * rows, math.ceil(length / 2), machine.compute_dtype, optimizer, device=kind, adapter=adapter
    )


def _model_text(request: PreferenceRequest, adapter: int | None) -> str:
    name = Path(request.base).name
    head = " and a scalar head" if request.config().method == "reward" else ""
    if adapter is None or request.lora is None:
        return f"all of {name}{head} is trained"
    return f"{name} stays; an adapter of rank {request.lora.rank} with {adapter:,} parameters{head} is trained"


def _plan_text(
    request: PreferenceRequest, machine: Machine, train: TrainConfig, config: PreferenceConfig, rows: PairRows
) -> str:
    """Say the plan."""
    passes = f"{train.total_steps * train.batch_size / rows.count:.2g}"
    steps = f"{train.total_steps:,} step{'s' if train.total_steps != 1 else ''}"
    given = [name for name in ("minutes", "epochs", "tokens") if getattr(request, name) is not None]
    if given:
        steps = f"{budget_text(request, machine)} = {'about ' if request.minutes is not None else ''}{steps}"
    what = "pairs" if config.method != "kto" else "answers"
    text = f"{steps} of {train.batch_size} {what} = {passes} {'pass' if passes == '1' else 'passes'}"
    if config.method != "reward":
        text += f", {config.method} with beta {config.strength:g}"
    text += f", {train.optimizer} at {train.learning_rate:g}"
    if train.patience:
        text += f"; ends early after {train.patience} evaluations without a better held-out score"
    return text if given or request.steps is not None else f"{text}; change it with --epochs or --minutes"
