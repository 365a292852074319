"""How a command draws tokens: the options, and their defaults from the model's makers and from us."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from minigpt.config import SamplingConfig

SEED_BITS = 31  # of a seed that nobody gave

TemperatureOption = Annotated[
    float | None,
    typer.Option(
        "-t",
        "--temperature",
        help="0 always takes the likeliest token. [default: the model's, else 0.8]",
        show_default=False,
    ),
]
TopKOption = Annotated[
    int | None, typer.Option(help="Draw from the K likeliest. [default: the model's, else all]", show_default=False)
]
TopPOption = Annotated[
    float | None,
    typer.Option(
        help="Draw from the likeliest that hold this share. [default: the model's, else all]", show_default=False
    ),
]
MinPOption = Annotated[
    float | None, typer.Option(help="Leave out what is less likely than this times the best.", show_default=False)
]
PenaltyOption = Annotated[
    float | None,
    typer.Option(
        "--repetition-penalty", help="Above 1: repeat less. [default: the model's, else 1]", show_default=False
    ),
]
SeedOption = Annotated[
    int | None, typer.Option(help="Repeat a text. [default: another each time]", min=0, show_default=False)
]


class Sampling:
    """What was asked for on the command line; checked at once, before anything is loaded."""

    def __init__(self, **asked: Any) -> None:
        self._asked = {name: value for name, value in asked.items() if value is not None}
        SamplingConfig(**self._asked)

    def settle(self, model_defaults: Mapping[str, Any]) -> SamplingConfig:
        """Return the settings: those asked for, else those of the model's makers, else ours."""
        return SamplingConfig(**{**model_defaults, **self._asked})


def pick_seed(asked: int | None) -> int:
    """Return the seed asked for, or one that nobody has seen yet."""
    return secrets.randbits(SEED_BITS) if asked is None else asked
