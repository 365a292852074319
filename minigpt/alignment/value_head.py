"""The value of a state: a scalar on top of the policy's own hidden states, which PPO compares rewards with.

It begins at zero, so that the first advantages are those of the rewards alone, and it is dropped when the model is
saved: the folder holds a language model like any other.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from minigpt.model.transformer import GPT

NAME = "value_head"


def add_value_head(model: GPT) -> None:
    """Put a head on a model, trained with it; there is a place for it under no other name."""
    head = nn.Linear(model.config.hidden_size, 1, device=model.lm_head.weight.device)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    model.add_module(NAME, head)


def value_of(model: GPT, hidden: Tensor) -> Tensor:
    """Return the value (…) of hidden states (…, C), in float32."""
    head = model.get_submodule(NAME)
    with torch.autocast(hidden.device.type, enabled=False):
        value: Tensor = head(hidden.float()).squeeze(-1)
    return value


def without_head(save: Callable[[Path, GPT], None]) -> Callable[[Path, GPT], None]:
    """Return what saves a model as `save` does, its value head left out."""

    def saved(folder: Path, model: GPT) -> None:
        head = model.get_submodule(NAME)
        model.__delattr__(NAME)
        try:
            save(folder, model)
        finally:
            model.add_module(NAME, head)

    return saved
