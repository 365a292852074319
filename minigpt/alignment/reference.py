"""The model that a run began with, as it was: what the policy is kept near to, and compared with."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from minigpt.model.lora import adapters
from minigpt.model.transformer import GPT

Reference = Callable[[], AbstractContextManager[GPT]]


def frozen(model: GPT) -> Reference:
    """Keep a copy of a model, which nothing trains, in evaluation mode."""
    kept = copy.deepcopy(model).requires_grad_(False).eval()

    @contextmanager
    def opened() -> Iterator[GPT]:
        yield kept

    return opened


def without_adapter(model: GPT) -> Reference:
    """Open a model with its adapters switched off, in evaluation mode: that is its base, in no memory of its own."""

    @contextmanager
    def opened() -> Iterator[GPT]:
        layers = list(adapters(model).values())
        scalings, training = [layer.scaling for layer in layers], model.training
        model.eval()
        for layer in layers:
            layer.scaling = 0.0
        try:
            yield model
        finally:
            for layer, scaling in zip(layers, scalings, strict=True):
                layer.scaling = scaling
            model.train(training)

    return opened
