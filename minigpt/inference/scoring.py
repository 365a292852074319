"""How likely a text is: each token scored once, with at least half a context before it where the text has that."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
from numpy.typing import NDArray

from minigpt.model.loss import IGNORED, token_losses
from minigpt.model.transformer import GPT

BATCH_TOKENS = 8192  # tokens a forward pass
LONGEST_WINDOW = 4096  # for models that reach further, attention would cost more than the score is worth

Window = tuple[int, int, int]  # first input token, last target, first target that counts


def windows(length: int, context: int) -> Iterator[Window]:
    """Cut `length` tokens into windows of one context that overlap by half; each target 1 … length-1 counts once."""
    stride = max(1, context // 2)
    start, done = 0, 1
    while done < length:
        end = min(start + context, length - 1)
        yield start, end, done
        done, start = end + 1, start + stride


@torch.no_grad()
def score(model: GPT, read: Callable[[int, int], NDArray[np.int64]], length: int) -> NDArray[np.float32]:
    """Return the loss in nats of tokens 1 … length-1, each given those before it.

    `read(start, stop)` gives token ids. Training mode comes back as it was.
    """
    losses = np.zeros(max(length - 1, 0), dtype=np.float32)
    training, device = model.training, next(model.parameters()).device
    context = min(model.config.max_position_embeddings, LONGEST_WINDOW)
    model.eval()
    try:
        rows = max(1, BATCH_TOKENS // context)
        batch: list[Window] = []
        for window in windows(length, context):
            batch.append(window)
            if len(batch) == rows:
                _score_batch(model, read, batch, losses, device)
                batch = []
        if batch:
            _score_batch(model, read, batch, losses, device)
    finally:
        model.train(training)
    return losses


def _score_batch(
    model: GPT,
    read: Callable[[int, int], NDArray[np.int64]],
    batch: list[Window],
    losses: NDArray[np.float32],
    device: torch.device,
) -> None:
    width = max(end - start for start, end, _ in batch)
    tokens = torch.zeros(len(batch), width, dtype=torch.long)
    targets = torch.full((len(batch), width), IGNORED)
    for row, (start, end, first) in enumerate(batch):
        ids = torch.tensor(read(start, end + 1), dtype=torch.long)
        tokens[row, : end - start] = ids[:-1]
        targets[row, first - start - 1 : end - start] = ids[first - start :]
    hidden = model.model(tokens.to(device))
    found = token_losses(hidden, model.lm_head.weight, targets.to(device)).cpu().numpy()
    for row, (start, end, first) in enumerate(batch):
        losses[first - 1 : end] = found[row, first - start - 1 : end - start]
