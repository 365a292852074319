"""Choose what was not said about a tuning run: epochs, batch, rate and optimizer, from the data and the model."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from minigpt.config import LoraConfig, ModelConfig, OptimizerName, TrainConfig, from_mapping
from minigpt.errors import ConfigError
from minigpt.model.size import parameters, training_bytes
from minigpt.training.plan import (
    Budget,
    Machine,
    Plan,
    budget_text,
    check_count,
    check_train,
    learning_rate,
    long_enough_to_compile,
    micro_batch,
)

EPOCHS = ((2_000, 3.0), (20_000, 2.0))  # up to so many conversations, so many passes; above, one
STEPS_WANTED = 2_500
MIN_STEP_TOKENS, MAX_STEP_TOKENS = 512, 16_384
MIN_GPU_STEP_TOKENS = 4_096  # fewer leave a GPU idle
# Fewer evaluations than pretraining has, of more text each: a few hundred answers tell little apart.
EVALUATIONS, EVALUATION_SHARE = 10, 0.15
PATIENCE = 3
# Up to so many parameters tuning takes steps as large as pretraining; above, they shrink with this power of the size:
# a model that knows little has much to learn, one that knows much has much to lose.
SMALL_MODEL, RATE_POWER = 5e6, 0.6
LORA_RATES, LORA_WIDTH = (2e-4, 1e-3), 576  # of wide models, and of those no wider than this
SMALLER = "a smaller --context or --batch-size"
MAX_NEFTUNE_ALPHA = 100.0


@dataclass(frozen=True, kw_only=True)
class TuningRequest(Budget):
    """What a person asked for; None is left to the plan. `base` is the folder of the model that is tuned.

    Dropout and noise on embeddings are off unless asked for; `lora` None trains every weight.
    """

    base: str
    context: int | None = None
    lora: LoraConfig | None = None
    dropout: float = 0.0
    neftune_alpha: float = 0.0
    train: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("context", self.context)
        check_train(self.train)
        if not 0 <= self.neftune_alpha <= MAX_NEFTUNE_ALPHA:
            raise ConfigError(f"neftune_alpha is {self.neftune_alpha}; it must be from 0, for none, to 100")
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"dropout is {self.dropout}; it must be from 0, for none, to below 1")
        for name in ("context", "total_steps"):
            if name in self.train:
                raise ConfigError(f"train.{name} is set; give --{'steps' if name == 'total_steps' else name} instead")
        if "short_steps" in self.train:
            raise ConfigError("train.short_steps is set; conversations are never read in halves, leave it out")


@dataclass(frozen=True, kw_only=True)
class Rows:
    """What the plan needs to know of the data: rows an epoch, their length, conversations, if any is held out."""

    an_epoch: int
    length: int
    conversations: int
    held_out: bool


def make_tuning_plan(
    request: TuningRequest,
    *,
    model: ModelConfig,
    base_record: Mapping[str, Any],
    adapter: int | None,
    rows: Rows,
    machine: Machine,
    measure: Callable[[int], float],
) -> Plan:
    """Choose batch, rate and number of steps.

    `adapter` is the number of parameters of an adapter, None where all weights are trained; `measure(rows)` gives the
    training speed in tokens/s with so many rows at a time.
    """
    budget: Budget = request
    if all(getattr(request, name) is None for name in ("minutes", "steps", "epochs", "tokens")):
        budget = replace(request, epochs=_epochs(rows.conversations))
    batch_size, steps = _batch_and_steps(budget, request.train.get("batch_size"), rows, machine, measure)
    seconds = None if budget.minutes is None else 60 * budget.minutes
    optimizer = tuning_optimizer(request, base_record)
    need = partial(_need, model, rows.length, machine, optimizer, adapter)
    micro = int(request.train.get("micro_batch_size") or micro_batch(batch_size, machine, need, SMALLER))
    values: dict[str, Any] = {"total_steps": steps, "batch_size": batch_size, "micro_batch_size": micro}
    values |= {"context": rows.length, "seed": request.seed, "optimizer": optimizer}
    values |= {
        "learning_rate": tuning_rate(model, lora=request.lora is not None),
        "warmup_steps": max(1, min(100, steps // 20)),
        "weight_decay": 0.0,  # a short walk from weights that are good already
        "eval_every": max(1, math.ceil(steps / EVALUATIONS)),
        "patience": PATIENCE if rows.held_out else 0,
        "compute_dtype": machine.compute_dtype,
        # On a CPU the number of learned tokens changes with every step, and compiled code is for one number.
        "compile": long_enough_to_compile(machine, steps, seconds),
    }
    config = from_mapping(TrainConfig, {**values, **request.train}, "train")
    tokens = int(max(8 * rows.length, 3.0 * EVALUATION_SHARE / EVALUATIONS * steps * batch_size * rows.length))
    why = {"model": _model_text(request, adapter), "plan": _plan_text(request, budget, machine, config, rows)}
    return Plan(model=model, train=config, seconds=seconds, validation_tokens=tokens, why=why)


def tuning_rate(model: ModelConfig, *, lora: bool) -> float:
    """The peak rate for a model: lower the larger it is. Adapters of large models take larger steps than matrices."""
    if lora:
        wide, narrow = LORA_RATES
        return round(max(wide, narrow * min(1.0, math.sqrt(LORA_WIDTH / model.hidden_size))), 6)
    share: float = min(1.0, (SMALL_MODEL / parameters(model)) ** RATE_POWER)
    return round(learning_rate(model) * share, 6)


def tuning_optimizer(request: TuningRequest, base_record: Mapping[str, Any]) -> OptimizerName:
    """Go on with what the model was trained with here; others come from AdamW, and so do adapters' narrow matrices.

    Tuning gains most from the optimizer that made the weights (Liu et al. 2025, section 3.5).
    """
    if "optimizer" in request.train:
        name: OptimizerName = request.train["optimizer"]
        return name
    plan = base_record.get("plan")
    train = plan.get("train") if isinstance(plan, dict) else None
    made_by = train.get("optimizer") if isinstance(train, dict) else None
    return "muon" if made_by == "muon" and request.lora is None else "adamw"


def _epochs(conversations: int) -> float:
    return next((epochs for most, epochs in EPOCHS if conversations <= most), 1.0)


def _batch_and_steps(
    budget: Budget, asked: int | None, rows: Rows, machine: Machine, measure: Callable[[int], float]
) -> tuple[int, int]:
    """Rows a step, those asked for or so many that enough steps are left, and the steps that the budget comes to."""
    least = MIN_GPU_STEP_TOKENS if machine.device_type == "cuda" else MIN_STEP_TOKENS
    seen = _tokens_seen(budget, rows, lambda: measure(max(1, least // rows.length)))
    step_tokens = max(least, min(MAX_STEP_TOKENS, seen / STEPS_WANTED))
    batch_size = int(asked or max(1, min(step_tokens // rows.length, rows.an_epoch)))
    return batch_size, budget.steps or max(1, round(seen / (batch_size * rows.length)))


def _tokens_seen(budget: Budget, rows: Rows, speed: Callable[[], float]) -> float:
    """How many tokens the budget lets a model see, padding included; for a number of steps what is usual."""
    if budget.tokens is not None:
        return budget.tokens
    if budget.minutes is not None:
        return 60 * budget.minutes * speed() / (1 + EVALUATION_SHARE)
    return rows.an_epoch * rows.length * (budget.epochs or _epochs(rows.conversations))


def _need(
    model: ModelConfig, length: int, machine: Machine, optimizer: OptimizerName, adapter: int | None, rows: int
) -> int:
    """The bytes that a step takes with so many rows at a time."""
    kind = machine.device_type
    return training_bytes(
        model, rows, length, machine.compute_dtype, optimizer, device=kind, adapter=adapter, packed=True
    )


def _model_text(request: TuningRequest, adapter: int | None) -> str:
    name = Path(request.base).name
    if adapter is None or request.lora is None:
        return f"all of {name} is trained"
    return f"{name} stays; an adapter of rank {request.lora.rank} with {adapter:,} parameters is trained"


def _plan_text(request: TuningRequest, budget: Budget, machine: Machine, config: TrainConfig, rows: Rows) -> str:
    """Say the plan: the budget and what it comes to, when it ends early, and how to change what was not asked for."""
    passes = config.total_steps * config.batch_size / rows.an_epoch
    steps = f"{config.total_steps:,} step{'s' if config.total_steps != 1 else ''}"
    if budget.steps is None:
        steps = f"{budget_text(budget, machine)} = {'about ' if budget.minutes is not None else ''}{steps}"
    text = f"{steps} of {config.batch_size} row{'s' if config.batch_size != 1 else ''}"
    if budget.epochs is None:
        text += f" = {passes:.2g} {'pass' if f'{passes:.2g}' == '1' else 'passes'}"
    text += f", {config.optimizer} at {config.learning_rate:g}"
    if config.patience:
        text += f"; ends early after {config.patience} evaluations without a better held-out score"
    return text if budget is request else f"{text}; change it with --epochs or --minutes"
