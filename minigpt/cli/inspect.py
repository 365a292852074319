"""`minigpt inspect`: what every head of every layer looks at in a text."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from minigpt.cli import console, models
from minigpt.cli.texts import given_text, label, visible
from minigpt.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

SHADES = " ░▒▓█"
LABEL_WIDTH = 12


@dataclass(frozen=True)
class Head:
    """One head in numbers: how far back it looks, in how many directions, and what at most.

    `mean_distance` is in tokens; `entropy_bits` is 0 for one token alone and log2(n) for n alike; `favourite` is the
    place of the token that gets the largest `share` of all that the text's tokens draw.
    """

    layer: int
    head: int
    mean_distance: float
    entropy_bits: float
    favourite: int
    share: float


def inspect(
    text: Annotated[
        str | None, typer.Argument(metavar="TEXT", help="Text; joined to piped text, if any.", show_default=False)
    ] = None,
    model: models.ModelOption = None,
    layer: Annotated[
        int | None, typer.Option(help="Layer to show, counted from 0. [default: the last]", show_default=False)
    ] = None,
    head: Annotated[
        int | None, typer.Option(help="Head to show, counted from 0. [default: 0]", show_default=False)
    ] = None,
    svg: Annotated[
        Path | None, typer.Option(help="Draw all heads into this file.", dir_okay=False, show_default=False)
    ] = None,
    as_json: models.JsonOption = False,
    device: models.DeviceOption = None,
) -> None:
    """Show the attention weights of a text.

    \b
      minigpt inspect "The Queen said to Alice" -m runs/alice
      minigpt inspect "The Queen said to Alice" --layer 0 --head 2
      minigpt inspect "The Queen said to Alice" --svg attention.svg

    With --json, the weights of all heads, or of those that --layer and --head choose; a row of weights is a token that
    looks, a column one that it looks at.
    """
    whole = given_text(text, "minigpt inspect")
    folder, device_ = models.resolve(model), models.pick_device(device)
    from minigpt.checkpoint.folder import load
    from minigpt.evaluation.attention import attention_svg, attention_weights

    loaded = load(folder, device=device_, dtype=models.pick_dtype(None, device_))
    config = loaded.model.config
    layers = _chosen("--layer", layer, config.num_hidden_layers)
    heads = _chosen("--head", head, config.num_attention_heads)
    ids = loaded.tokenizer.encode_prompt(whole or "")
    names = [label(loaded.tokenizer, id) for id in ids]
    weights = attention_weights(loaded.model, ids)
    if svg is not None:
        from minigpt.checkpoint.files import write_text

        write_text(svg, attention_svg(names, weights))
        console.note(f"wrote {svg}")
    if as_json:
        tokens = [{"id": id, "text": name} for id, name in zip(ids, names, strict=True)]
        found = [_entry(weights, place, number) for place in layers for number in heads]
        console.write(json.dumps({"tokens": tokens, "heads": found}, ensure_ascii=False) + "\n")
        return
    console.write(_summary(names, weights) + "\n")
    console.write(_table(names, weights, layers[-1], heads[0]))


def _chosen(option: str, number: int | None, count: int) -> list[int]:
    """The layers or heads that are meant: the one that was named, or all."""
    if number is not None and not 0 <= number < count:
        raise ConfigError(f"{option} {number}: the model has {count}; choose 0 to {count - 1}")
    return list(range(count)) if number is None else [number]


def measure(weights: Tensor, layer: int, head: int) -> Head:
    """Put one head's weights, of all (L, H, T, T), into numbers."""
    import torch

    each = weights[layer, head].double()  # (T, T)
    places = torch.arange(len(each), dtype=torch.float64)
    distance = float((each * (places.unsqueeze(-1) - places)).sum(-1).mean())
    entropy = float(torch.special.entr(each).sum(-1).mean()) / math.log(2)
    share, favourite = each.mean(0).max(0)
    return Head(layer, head, distance, entropy, int(favourite), float(share))


def _entry(weights: Tensor, layer: int, head: int) -> dict[str, object]:
    rows = [[round(weight, 6) for weight in row] for row in weights[layer, head].tolist()]
    return asdict(measure(weights, layer, head)) | {"weights": rows}


def _summary(names: list[str], weights: Tensor) -> str:
    lines = ["layer  head  mean distance  entropy  looks most at"]
    for layer in range(weights.shape[0]):
        for head in range(weights.shape[1]):
            found = measure(weights, layer, head)
            lines.append(
                f"{layer:5}  {head:4}  {found.mean_distance:13.2f}  {found.entropy_bits:7.2f}  "
                f"{visible(names[found.favourite])!r}, token {found.favourite}: {found.share:.0%}"
            )
    return "\n".join(lines) + "\n"


def _table(names: list[str], weights: Tensor, layer: int, head: int) -> str:
    """One head as a table of shaded blocks; the shade grows with the weight's square root."""
    lines = [f"layer {layer} head {head}: each row looks at the columns, which are the same tokens"]
    for place, row in enumerate(weights[layer, head].tolist()):
        shades = [SHADES[round(math.sqrt(weight) * (len(SHADES) - 1))] for weight in row[: place + 1]]
        name = visible(names[place])[:LABEL_WIDTH]
        lines.append(f"{place:4} {name:>{LABEL_WIDTH}} {''.join(2 * shade for shade in shades)}".rstrip())
    return "\n".join(lines) + "\n"
