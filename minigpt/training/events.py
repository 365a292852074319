"""What a run tells while it trains, and where it stands."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol


class Validation(Protocol):
    """What held-out data says of a model: the lower `value` the better; `text` for people, `row` for metrics."""

    @property
    def value(self) -> float: ...

    @property
    def text(self) -> str: ...

    def row(self) -> dict[str, float]: ...


@dataclass(frozen=True)
class StepDone:
    """One optimizer step; the loss is what the objective's weight makes it: per token, in nats, for text.

    `figures` is what else the objective says of the step.
    """

    step: int
    total_steps: int
    loss: float
    learning_rate: float
    grad_norm: float
    tokens_per_second: float
    elapsed: float
    waited: float = 0.0  # the share of the step's time in which it waited for its batch
    figures: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Evaluated:
    """Held-out data was scored after a step."""

    step: int
    score: Validation


@dataclass(frozen=True)
class Warned:
    """Something a person should know, in one line."""

    message: str


Event = StepDone | Evaluated | Warned


@dataclass
class Progress:
    """Where a run stands: everything about it that is no tensor."""

    step: int = 0
    total_steps: int = 0
    micro_batch_size: int = 0
    elapsed: float = 0.0
    best_step: int | None = None
    best_value: float | None = None  # of its validation
    worse: int = 0  # evaluations since the best one
