"""Choose what was not said: model size, batch, rate and steps from corpus, device and budget, each with its reason."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from minigpt.config import (
    PRESETS,
    ArchitectureName,
    DTypeName,
    ModelConfig,
    PresetName,
    TrainConfig,
    from_mapping,
    preset_config,
)
from minigpt.errors import ConfigError
from minigpt.model.size import flops_per_token, parameters, training_bytes
from minigpt.text.tokenizer import MAX_VOCAB_SIZE, MIN_VOCAB_SIZE
from minigpt.training.batches import check_length

MIN_STEP_TOKENS = 1_024
MAX_STEP_TOKENS = 524_288
STEPS_WANTED = 1_500  # a batch is made no larger than leaves about this many steps
EVALUATIONS = 16
EVALUATION_SHARE = 0.06  # of the budget, for all evaluations
FREE_MEMORY_SHARE = 0.7
COMPILE_STEPS, COMPILE_SECONDS = 300, 120.0  # a GPU's run must be this long to earn back what compiling takes
SHORT_FROM = 128  # from this context on, a CPU reads windows in two at first
SHORT_SHARE = 2 / 3  # of the steps
LEARNING_RATE = 6e-3  # at the width below; wider models take smaller steps
LEARNING_RATE_WIDTH = 128
MIN_VOCABULARY, MAX_VOCABULARY = 512, 65_536
CPU_MINUTES, GPU_MINUTES = 3.0, 10.0  # the budget when none is given
CPU_TOKENS_A_MINUTE, GPU_TOKENS_A_MINUTE = 6e5, 6e7  # a guess that only bounds the vocabulary
MAX_BUDGET = 1e15  # minutes, steps, epochs or tokens; above it is a slip of the hand
MAX_SEED = 2**63 - 1


@dataclass(frozen=True, kw_only=True)
class Budget:
    """How long to train: one of these at most, and a seed; None is left to the plan."""

    minutes: float | None = None
    steps: int | None = None
    epochs: float | None = None
    tokens: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "tokens"):
            check_count(name, getattr(self, name))
        budgets = {name: getattr(self, name) for name in ("minutes", "steps", "epochs", "tokens")}
        given = [name for name, value in budgets.items() if value is not None]
        if len(given) > 1:
            raise ConfigError(f"--{given[0]} and --{given[1]} are both given; a run has one budget")
        for name in given:
            if not 0 < budgets[name] < MAX_BUDGET:
                raise ConfigError(f"{name} is {budgets[name]}; it must be a number above 0 and below {MAX_BUDGET:g}")
        if not (isinstance(self.seed, int) and 0 <= self.seed <= MAX_SEED):
            raise ConfigError(f"seed is {self.seed!r}; it must be from 0 to {MAX_SEED}")


def check_count(name: str, value: int | None) -> None:
    """Refuse what is no whole number of at least 1, where something was said at all."""
    if value is not None and not (isinstance(value, int) and value >= 1):
        raise ConfigError(f"{name} is {value!r}; it must be a whole number of at least 1")


@dataclass(frozen=True, kw_only=True)
class Request(Budget):
    """What a person asked for; None is left to the plan. Exactly one budget counts; `minutes` when none is given."""

    preset: PresetName | None = None
    architecture: ArchitectureName = "qwen3"
    context: int | None = None
    vocab_size: int | None = None
    model: dict[str, Any] = field(default_factory=dict)
    train: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("context", self.context)
        check_count("vocab_size", self.vocab_size)
        check_train(self.train)
        _check_settings(self)


def check_train(settings: dict[str, Any]) -> None:
    """Refuse settings of training that are wrong whatever the plan."""
    blank: dict[str, Any] = {
        "total_steps": 1,
        "batch_size": sys.maxsize,
        "micro_batch_size": 1,
        "context": 2,
        "seed": 0,
    }
    blank |= {"learning_rate": 0.0, "warmup_steps": 0}
    from_mapping(TrainConfig, {**blank, **settings}, "train")


def _check_settings(request: Request) -> None:
    """Refuse what is wrong whatever the plan, before any text is read."""
    if request.vocab_size is not None and not MIN_VOCAB_SIZE <= request.vocab_size <= MAX_VOCAB_SIZE:
        raise ConfigError(
            f"vocab_size is {request.vocab_size:,}; it must be from {MIN_VOCAB_SIZE} (all bytes and the control "
            f"tokens) to {MAX_VOCAB_SIZE:,}"
        )
    _shapes(request, request.vocab_size or MIN_VOCABULARY)


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What the plan needs to know of the device: its speed in FLOP/s on a small model, and its free memory in bytes.

    `shards` is the number of processes that a model is cut over.
    """

    flops: float
    free_memory: int
    compute_dtype: DTypeName
    default_minutes: float
    device_type: str = "cpu"
    shards: int = 1


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything a run needs, and why."""

    model: ModelConfig
    train: TrainConfig
    seconds: float | None
    validation_tokens: int
    why: dict[str, str]


def vocabulary_size(request: Request, train_bytes: int, device_type: str) -> int:
    """Choose a vocabulary, a power of two: about the square root of the corpus in bytes.

    A short run cannot learn that many tokens of a large corpus: four times the square root of the tokens it will see is
    the most. What it will see is only guessed here, since no model is chosen yet.
    """
    seen: float
    if request.tokens is not None:
        seen = request.tokens
    elif request.steps is not None:
        seen = request.steps * MIN_STEP_TOKENS
    elif request.epochs is not None:
        seen = request.epochs * train_bytes / 4
    else:
        cpu = device_type == "cpu"
        minutes = request.minutes or (CPU_MINUTES if cpu else GPU_MINUTES)
        seen = minutes * (CPU_TOKENS_A_MINUTE if cpu else GPU_TOKENS_A_MINUTE)
    wanted = 2 ** math.ceil(math.log2(max(1.0, math.sqrt(train_bytes))))
    most = 2 ** math.floor(math.log2(max(1.0, 4 * math.sqrt(seen))))
    return int(max(MIN_VOCABULARY, min(MAX_VOCABULARY, wanted, most)))


def choose_model(request: Request, vocab_size: int, train_tokens: int, machine: Machine) -> tuple[ModelConfig, str]:
    """Take the preset asked for, or the largest that the budget and the corpus can fill."""
    shapes = _shapes(request, vocab_size)
    if request.preset is not None:
        return shapes[request.preset], f"preset {request.preset}, as asked"
    fitting = [name for name, config in shapes.items() if _fits(config, request, train_tokens, machine)]
    chosen = fitting[-1] if fitting else next(iter(shapes))
    why = f"preset {chosen}: chosen for {_short(train_tokens)} tokens and {budget_text(request, machine)}"
    return shapes[chosen], why


def _shapes(request: Request, vocab_size: int) -> dict[str, ModelConfig]:
    """Spell out the preset asked for, or every preset that the settings asked for fit."""
    shapes: dict[str, ModelConfig] = {}
    problem: ConfigError | None = None
    for name in PRESETS if request.preset is None else [request.preset]:
        base = preset_config(name, vocab_size=vocab_size, architecture=request.architecture, context=request.context)
        try:
            shapes[name] = from_mapping(ModelConfig, {**vars(base), **request.model}, "model")
        except ConfigError as error:
            problem = error
    if problem is not None and not shapes:
        raise problem
    return shapes


def _fits(config: ModelConfig, request: Request, train_tokens: int, machine: Machine) -> bool:
    """Tell whether a model is worth its size: enough tokens in the budget, and enough text not to learn by heart."""
    size = parameters(config)
    seen = _budget_tokens(request, config, train_tokens, machine)
    wanted = size * min(20.0, max(1.5, math.sqrt(size / 1e6)))
    memory = _need(config, config.max_position_embeddings, machine)(1)
    return seen >= wanted and size <= 25 * train_tokens and memory < FREE_MEMORY_SHARE * machine.free_memory


def _budget_tokens(request: Request, config: ModelConfig, train_tokens: int, machine: Machine) -> float:
    """How many tokens the budget lets a model see."""
    if request.tokens is not None:
        return request.tokens
    if request.epochs is not None:
        return request.epochs * train_tokens
    if request.steps is not None:
        return (
            request.steps
            * (request.train.get("batch_size") or MIN_STEP_TOKENS / config.max_position_embeddings)
            * (config.max_position_embeddings)
        )
    seconds = 60 * (request.minutes or machine.default_minutes)
    return seconds * machine.flops / flops_per_token(config, config.max_position_embeddings, training=True)


def make_plan(
    request: Request,
    *,
    model: ModelConfig,
    model_why: str,
    train_tokens: int,
    machine: Machine,
    measure: Callable[[ModelConfig, int, int], float],
) -> Plan:
    """Choose batch, rate and number of steps; `measure(model, rows, context)` gives the training speed in tokens/s."""
    context = int(request.train.get("context", model.max_position_embeddings))
    check_window(context, model, train_tokens)
    seen = _budget_tokens(request, model, train_tokens, machine)
    batch_size = int(request.train.get("batch_size") or _batch_size(seen, context, train_tokens))
    micro = int(
        request.train.get("micro_batch_size") or micro_batch(batch_size, machine, _need(model, context, machine))
    )
    steps, seconds = _steps(request, machine, seen, batch_size * context, lambda: measure(model, micro, context))
    values: dict[str, Any] = {
        "total_steps": steps,
        "batch_size": batch_size,
        "micro_batch_size": micro,
        "context": context,
        "seed": request.seed,
        "learning_rate": learning_rate(model),
        "warmup_steps": max(1, min(200, steps // 30)),
        "eval_every": max(1, math.ceil(steps / EVALUATIONS)),
        "compute_dtype": machine.compute_dtype,
        "compile": long_enough_to_compile(machine, steps, seconds),
        "short_steps": _short_steps(model, machine, context, steps),
    }
    config = from_mapping(TrainConfig, {**values, **request.train}, "train")
    forward_share = 3.0 * EVALUATION_SHARE / EVALUATIONS / 2  # a forward pass is a third; windows overlap by half
    tokens = int(max(8 * context, forward_share * steps * batch_size * context))
    why = {"model": model_why, "plan": _plan_text(request, machine, config, train_tokens)}
    return Plan(model=model, train=config, seconds=seconds, validation_tokens=tokens, why=why)


def _steps(
    request: Request, machine: Machine, seen: float, step_tokens: int, speed: Callable[[], float]
) -> tuple[int, float | None]:
    """How many steps the budget comes to, and its seconds where it is one of time; only then is the speed asked for."""
    if request.steps is not None:
        return request.steps, None
    if request.tokens is not None or request.epochs is not None:
        return max(1, round(seen / step_tokens)), None
    seconds = 60 * (request.minutes or machine.default_minutes)
    return max(1, int(seconds * speed() / step_tokens / (1 + EVALUATION_SHARE))), seconds


def _short_steps(model: ModelConfig, machine: Machine, context: int, steps: int) -> int:
    """How many steps read windows as two texts: on a CPU, where positions are learned for every length alike."""
    fits = machine.device_type == "cpu" and model.traits.positions == "rotary" and context % 2 == 0
    return round(SHORT_SHARE * steps) if fits and context >= SHORT_FROM else 0


def learning_rate(model: ModelConfig) -> float:
    """The peak rate of pretraining."""
    return round(LEARNING_RATE * math.sqrt(LEARNING_RATE_WIDTH / model.hidden_size), 6)


def long_enough_to_compile(machine: Machine, steps: int, seconds: float | None) -> bool:
    """Tell whether a run of so many steps, or seconds where they are its budget, earns back what compiling takes."""
    if machine.device_type != "cuda":  # `model/fused.c` is as fast, and takes no time to compile
        return False
    return steps >= COMPILE_STEPS if seconds is None else seconds >= COMPILE_SECONDS


def check_window(context: int, model: ModelConfig, train_tokens: int) -> None:
    """Refuse windows longer than the model's context, or than the text."""
    if context > model.max_position_embeddings:
        raise ConfigError(
            f"train.context is {context:,}, more than the model's context of {model.max_position_embeddings:,}; "
            "give a larger --context"
        )
    check_length(train_tokens, context)


def _batch_size(tokens: float, context: int, train_tokens: int) -> int:
    """Rows a step: a power of two of tokens that leaves enough steps, and no more than the corpus holds."""
    wanted = int(2 ** math.floor(math.log2(max(1.0, tokens / STEPS_WANTED))))
    step_tokens = min(MAX_STEP_TOKENS, max(MIN_STEP_TOKENS, wanted))
    return max(1, min(step_tokens // context, (train_tokens - 1) // context))


def _need(model: ModelConfig, context: int, machine: Machine) -> Callable[[int], int]:
    """The bytes that training takes with so many rows at a time."""

    def need(rows: int) -> int:
        return training_bytes(
            model, rows, context, machine.compute_dtype, device=machine.device_type, shards=machine.shards
        )

    return need


def micro_batch(
    batch_size: int, machine: Machine, need: Callable[[int], int], smaller: str = "a smaller --preset or --context"
) -> int:
    """Halve the rows until one pass fits into the share of free memory that a run may take.

    A single row that does not is refused on a CPU, with the advice to choose `smaller`; a GPU has the last word itself.
    """
    rows, limit = batch_size, FREE_MEMORY_SHARE * machine.free_memory
    while rows > 1 and need(rows) > limit:
        rows = math.ceil(rows / 2)
    if need(rows) > limit and machine.device_type == "cpu":
        raise ConfigError(
            f"training this model takes about {need(rows) / 1e9:.1f} GB, and a run may take {limit / 1e9:.1f} GB here "
            f"({FREE_MEMORY_SHARE:.0%} of what is free); choose {smaller}"
        )
    return rows


def _plan_text(request: Request, machine: Machine, config: TrainConfig, train_tokens: int) -> str:
    """Say the plan: the budget, what it comes to, and how to give more when none was given."""
    step_tokens = config.batch_size * config.context
    passes = config.total_steps * step_tokens / train_tokens
    steps = f"{config.total_steps:,} step{'s' if config.total_steps != 1 else ''}"
    if request.steps is None:
        about = "about " if request.tokens is None and request.epochs is None else ""
        steps = f"{budget_text(request, machine)} = {about}{steps}"
    text = f"{steps} of {step_tokens:,} tokens = {passes:.2g} {'pass' if f'{passes:.2g}' == '1' else 'passes'}"
    if passes > 4:
        text += "; the corpus is small: the best model on held-out text is kept"
    if all(getattr(request, name) is None for name in ("minutes", "steps", "epochs", "tokens")):
        text += "; give more with --minutes"
    return text


def budget_text(request: Budget, machine: Machine) -> str:
    """Say a budget in words: the one given, or the minutes that are the default."""
    for name in ("steps", "epochs", "tokens"):
        if (value := getattr(request, name)) is not None:
            number = f"{value:,}".removesuffix(".0")
            return f"{number} {name if value != 1 else name[:-1]}"
    minutes = request.minutes or machine.default_minutes
    return f"{minutes:g} minute{'' if minutes == 1 else 's'}"


def _short(number: float) -> str:
    return f"{number / 1e6:.3g}M" if number >= 1e6 else f"{number / 1e3:.3g}k" if number >= 1e4 else f"{number:,.0f}"
