"""What all commands share that begin with a model and train it: their options, and what those come to."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from minigpt.cli.models import RUNS, resolve
from minigpt.cli.settings import Sections, move_settings, read_settings
from minigpt.cli.texts import typed
from minigpt.config import LORA_TARGETS, DTypeName, LoraConfig, OptimizerName, check_choice, from_mapping
from minigpt.errors import UsageError

if TYPE_CHECKING:
    from minigpt.training.chat_data import ChatRequest

ALSO_OPTIONS = {
    ("train", "total_steps"): "steps",
    ("train", "seed"): "seed",
    ("train", "compute_dtype"): "dtype",
    ("train", "context"): "context",
}
TRAIN_OPTIONS = {"batch_size": "batch_size", "lr": "learning_rate", "optimizer": "optimizer"}
OPTIONS = ("minutes", "steps", "epochs", "tokens", "seed", "context", "dtype", "dropout")

OutOption = Annotated[
    Path | None, typer.Option("-o", "--out", help="Model folder to write. [default: runs/<data>]", show_default=False)
]
EpochsOption = Annotated[
    float | None,
    typer.Option(help="Pass this often over the data. [default: 1 to 3, by its size]", show_default=False),
]
MinutesOption = Annotated[float | None, typer.Option(help="Train this long.", show_default=False)]
StepsOption = Annotated[int | None, typer.Option(help="Train this many steps.", show_default=False)]
TokensOption = Annotated[int | None, typer.Option(help="Train on this many tokens.", show_default=False)]
ResumeOption = Annotated[bool, typer.Option("--resume", help="Continue the run in the output folder, exactly.")]
OverwriteOption = Annotated[bool, typer.Option("--overwrite", help="Replace the model in the output folder.")]
SeedOption = Annotated[
    int | None, typer.Option(help="Seed of order, adapters, noise and dropout. [default: 0]", show_default=False)
]
LoraOption = Annotated[
    bool, typer.Option("--lora", help="Leave the model as it is and train an adapter of a few matrices.")
]
LoraRankOption = Annotated[
    int | None, typer.Option(help="Rank of the adapter, and --lora. [default: 16]", show_default=False)
]
LoraAlphaOption = Annotated[
    float | None,
    typer.Option(help="The update counts alpha / rank times. [default: twice the rank]", show_default=False),
]
LoraTargetsOption = Annotated[
    str | None,
    typer.Option(help=f"Matrices, by commas: {', '.join(LORA_TARGETS)}. [default: all there are]", show_default=False),
]
LoraDropoutOption = Annotated[
    float | None, typer.Option(help="Dropout on what an adapter reads. [default: 0]", show_default=False)
]
OptimizerOption = Annotated[
    OptimizerName | None, typer.Option(help="[default: the model's own, else adamw]", show_default=False)
]
DropoutOption = Annotated[float | None, typer.Option(help="Dropout. [default: 0]", show_default=False)]
ComputeOption = Annotated[
    DTypeName | None,
    typer.Option(
        "--dtype", help="Type to compute in; weights stay float32. [default: the fastest]", show_default=False
    ),
]
ConfigOption = Annotated[
    Path | None, typer.Option("--config", help="TOML file with sections [train] and [lora].", show_default=False)
]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", help="train.KEY=VALUE or lora.KEY=VALUE.", show_default=False)
]


@dataclass(frozen=True, kw_only=True)
class Bundled:
    """The data that stands in where none is named: how it is called, its files, and the folder of a run on it."""

    named: str
    files: Callable[[], list[Path]]
    stem: str


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What was typed: the data (None to resume), what a request is made of, and `said`, all by the names of records."""

    data: ChatRequest | None
    base: str | None
    request: dict[str, Any]
    said: dict[str, Any]
    out: Path
    device: str | None
    dtype: DTypeName | None


def read_asked(
    typed_in: Mapping[str, Any],
    bundled: Bundled,
    *,
    read: Mapping[str, Any] | None = None,
    options: Mapping[str, Any] | None = None,
) -> Asked:
    """Put together what was typed, by the names of the options; None was not said.

    `read` are more settings of the data, `options` more of the request, both None where they were not said.
    """
    if typed_in["resume"] and typed_in["overwrite"]:
        raise UsageError("--resume continues a run and --overwrite replaces it; choose one")
    settings = read_settings(typed_in["config"], typed_in["set_"] or [], ("train", "lora"))
    for name, key in TRAIN_OPTIONS.items():
        if typed_in[name] is not None:
            settings["train"][key] = typed_in[name]
    adapter = _lora(settings, typed_in)
    chosen = {name: typed_in.get(name) for name in OPTIONS} | dict(options or {})
    chosen = move_settings(chosen, settings, ALSO_OPTIONS)
    compute = chosen.pop("dtype", None)
    if compute is not None:
        check_choice("compute_dtype", compute, get_args(DTypeName))
    of_data = _of_data(typed_in) | {name: value for name, value in (read or {}).items() if value is not None}
    resuming = typed_in["model"] is None and typed_in["resume"]
    base = None if resuming else os.path.abspath(resolve(typed_in["model"]))
    said = of_data | chosen | settings["train"] | _said_of_adapter(adapter)
    said |= {} if compute is None else {"compute_dtype": compute}
    said |= {} if base is None else {"base": base}
    data, named = _data(typed_in, of_data, bundled)
    request = {"base": base, "lora": None if adapter is None else _adapter(adapter), "train": settings["train"]}
    return Asked(
        data=data,
        base=base,
        request=request | chosen,
        said=said,
        out=typed_in["out"] or RUNS / _stem(named, bundled),
        device=typed_in["device"],
        dtype=compute,
    )


def _data(typed_in: Mapping[str, Any], of_data: Mapping[str, Any], bundled: Bundled) -> tuple[ChatRequest | None, str]:
    """The data, and how it is named; to resume, none is needed."""
    from minigpt.training.chat_data import ChatRequest

    sources = typed_in["data"] or []
    if not sources and typed_in["resume"]:
        return None, bundled.named
    if "-" in sources:
        raise UsageError("- (standard input) is not read here, since a run may read its data again; name a file")
    named, paths = bundled.named, tuple(os.path.abspath(source) for source in sources)
    if sources:
        named = sources[0] if len(sources) == 1 else f"{sources[0]} and {len(sources) - 1} more"
    else:
        paths = tuple(str(path) for path in bundled.files())
    return ChatRequest(sources=paths, named=named, **of_data), named


def _of_data(typed_in: Mapping[str, Any]) -> dict[str, Any]:
    """What was said of how the data is read."""
    from minigpt.text.conversations import parse_mapping

    found = {name: typed_in[name] for name in ("template", "val_fraction") if typed_in[name] is not None}
    found |= {"skip_bad": True} if typed_in["skip_bad"] else {}
    renamed = typed_in["renamed"]
    return found | ({"mapping": parse_mapping([typed(pair) for pair in renamed])} if renamed else {})


def _lora(settings: Sections, typed_in: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the settings of an adapter, or None where every weight is to be trained."""
    values = settings["lora"]
    for name in ("rank", "alpha", "dropout"):
        if typed_in[f"lora_{name}"] is not None:
            values[name] = typed_in[f"lora_{name}"]
    if typed_in["lora_targets"] is not None:
        values["targets"] = tuple(target.strip() for target in typed_in["lora_targets"].split(","))
    elif isinstance(values.get("targets"), list):
        values["targets"] = tuple(values["targets"])
    return values if typed_in["lora"] or values else None


def _adapter(values: dict[str, Any]) -> LoraConfig:
    """Spell an adapter out; where only its rank was given, alpha is twice that."""
    derived = {"alpha": 2.0 * values["rank"]} if isinstance(values.get("rank"), int) else {}
    return from_mapping(LoraConfig, derived | values, "lora")


def _said_of_adapter(values: dict[str, Any] | None) -> dict[str, Any]:
    """What was asked of an adapter, under names that nothing else has."""
    return {} if values is None else {"lora": True} | {f"lora_{name}": value for name, value in values.items()}


def _stem(named: str, bundled: Bundled) -> str:
    """Name the output folder after the first source."""
    if named == bundled.named:
        return bundled.stem
    first = Path(re.sub(r" and \d+ more$", "", named))
    name = first.resolve().name.split(".")[0]
    return re.sub(r"[*?\[\]]+", "", name) or bundled.stem.removeprefix("bundled-")
