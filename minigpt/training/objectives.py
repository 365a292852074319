"""What a run minimises: a sum over targets, divided once by the whole step's weight."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from minigpt.model.loss import IGNORED, loss_sum
from minigpt.model.transformer import GPT
from minigpt.training.batches import Batch


class Objective(Protocol):
    """The loss of a step is `loss_sum` over its micro-batches, divided by their `weight` in all."""

    def weight(self, batch: Batch) -> float: ...

    def loss_sum(self, model: GPT, batch: Batch) -> Tensor: ...


class NextToken:
    """Predict each token from those before it: cross-entropy in nats, summed over valid targets."""

    def weight(self, batch: Batch) -> float:
        """Count the targets that carry loss."""
        return float((batch.targets != IGNORED).sum())

    def loss_sum(self, model: GPT, batch: Batch) -> Tensor:
        """Sum their losses."""
        hidden = model.model(batch.tokens, documents=batch.documents)
        return loss_sum(hidden, model.lm_head.weight, batch.targets)
