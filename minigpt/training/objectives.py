"""What a run minimises: a sum over targets, divided once by the whole step's weight."""

from __future__ import annotations

from typing import Protocol, TypeVar

import torch
from torch import Tensor, nn

from minigpt.model.loss import IGNORED, loss_sum
from minigpt.model.transformer import GPT
from minigpt.training.batches import Batch, StepBatch

ReadBatch = TypeVar("ReadBatch", bound=StepBatch, contravariant=True)


class Objective(Protocol[ReadBatch]):
    """The loss of a step is `loss_sum` over its micro-batches, divided by their `weight` in all.

    `weight` begins a step, also one that is begun again; `figures` says what is worth saying of the step beyond its
    loss: scalars on the model's device, by name.
    """

    def weight(self, batch: ReadBatch) -> float: ...

    def loss_sum(self, model: GPT, batch: ReadBatch) -> Tensor: ...

    def figures(self) -> dict[str, Tensor]: ...


class NextToken:
    """Predict each token from those before it: cross-entropy in nats, summed over valid targets."""

    def weight(self, batch: Batch) -> float:
        """Count the targets that carry loss."""
        return float((batch.targets != IGNORED).sum())

    def loss_sum(self, model: GPT, batch: Batch) -> Tensor:
        """Sum their losses."""
        hidden = model.model(batch.texts, documents=batch.documents)
        return loss_sum(hidden, model.lm_head.weight, batch.targets, model.model.kernels.slope)

    def figures(self) -> dict[str, Tensor]:
        """Nothing: the loss says it all."""
        return {}


class NoisyNextToken(NextToken):
    """Predict the next token from embeddings with uniform noise on them (NEFTune, Jain et al. 2023, algorithm 1).

    The noise of a document of L tokens is alpha / sqrt(L C) times a number in [-1, 1) for each of the C elements.
    """

    def __init__(self, alpha: float) -> None:
        self.alpha = alpha

    def loss_sum(self, model: GPT, batch: Batch) -> Tensor:
        """Sum the losses under noise that is drawn from the run's own random stream."""

        def noisy(module: nn.Module, arguments: object, x: Tensor) -> Tensor:
            size = self.alpha / (document_lengths(batch) * x.shape[-1]).sqrt()  # (B, T)
            return x + torch.empty_like(x).uniform_(-1.0, 1.0) * size.unsqueeze(-1)

        hook = model.model.embed_tokens.register_forward_hook(noisy)
        try:
            return super().loss_sum(model, batch)
        finally:
            hook.remove()


def document_lengths(batch: Batch) -> Tensor:
    """For each token (B, T) how many tokens its document has in its row; float32."""
    if batch.documents is None:
        return torch.full(batch.texts.shape, float(batch.texts.shape[1]), device=batch.tokens.device)
    counts = torch.zeros(batch.tokens.shape[0], int(batch.documents.max()) + 1, device=batch.tokens.device)
    counts.scatter_add_(1, batch.documents, torch.ones_like(batch.documents, dtype=counts.dtype))
    return counts.gather(1, batch.documents)
