"""Which model folder and which device a command means."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from minigpt.checkpoint.base import REWARD_HEAD, holds_model, weights_path
from minigpt.cli import console
from minigpt.config import DTypeName, QuantizeName
from minigpt.errors import ConfigError, ModelFolderError, UsageError

if TYPE_CHECKING:
    import torch

    from minigpt.checkpoint.folder import LoadedModel
    from minigpt.text.chat import ChatTemplate

RUNS = Path("runs")


def complete_model(incomplete: str) -> list[str]:
    """Offer the model folders under runs/ to shell completion."""
    return [str(path) for path in _runs() if str(path).startswith(incomplete)]


ModelOption = Annotated[
    Path | None,
    typer.Option(
        "-m",
        "--model",
        help="Model folder. [default: $MINIGPT_MODEL, then the newest run under runs/]",
        autocompletion=complete_model,
        show_default=False,
    ),
]
ModelArgument = Annotated[
    Path | None,
    typer.Argument(
        metavar="MODEL",
        help="Model folder. [default: as for generate]",
        autocompletion=complete_model,
        show_default=False,
    ),
]
DeviceOption = Annotated[
    str | None, typer.Option("--device", help="cpu, cuda, cuda:1 or mps. [default: the fastest]", show_default=False)
]
DTypeOption = Annotated[
    DTypeName | None,
    typer.Option(
        "--dtype",
        help="float32, bfloat16 or float16; the last two are faster on a GPU, and there a rare tie may fall "
        "differently in a batch. [default: float32 on a CPU, the stored type elsewhere]",
        show_default=False,
    ),
]
QuantizeOption = Annotated[
    QuantizeName | None,
    typer.Option(
        "--quantize",
        help="Keep the weights in 8 or 4 bits while it runs: faster on a CPU and smaller, a little less exact (eval "
        "says how much).",
        show_default=False,
    ),
]
SpeculateOption = Annotated[
    bool,
    typer.Option(
        "--speculate", help="Guess tokens from what stands before, check several at once: the same text, often sooner."
    ),
]
TemplateOption = Annotated[
    str | None,
    typer.Option(
        "--template",
        help="chatml: write conversations in ChatML. [default: the template that came with the model]",
        show_default=False,
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]


def _runs() -> list[Path]:
    """Folders under runs/ that can generate, the newest first."""
    found = [weights_path(folder) for folder in RUNS.glob("[!.]*") if holds_model(folder)]
    weights = [path for path in found if path is not None]  # a tuning run that has just begun has no adapter's yet
    return [path.parent for path in sorted(weights, key=lambda path: path.stat().st_mtime, reverse=True)]


def named_once(argument: Path | None, option: Path | None) -> Path | None:
    """Return the model that was named as an argument or with -m; naming it both ways is a UsageError."""
    if argument is not None and option is not None:
        raise UsageError(f"a model as argument ({argument}) and one with -m ({option}); give one of them")
    return option if argument is None else argument


def resolve(model: Path | None) -> Path:
    """Return the model folder: the one named, $MINIGPT_MODEL, or the newest run; none is a ModelFolderError."""
    if model is not None:
        return model
    if named := os.environ.get("MINIGPT_MODEL"):
        return Path(named)
    runs = _runs()
    if not runs:
        raise ModelFolderError("no model under runs/; train one with minigpt train FILE, or name one with -m FOLDER")
    return runs[0]


def is_judge(model: Path | None) -> bool:
    """Tell whether the model that is meant is a reward model."""
    return (resolve(model) / REWARD_HEAD).is_file()


def pick_device(name: str | None) -> torch.device:
    """Return the device asked for, or the fastest there is; one that is not there is a ConfigError."""
    import torch

    if name is None:
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"--device {name}: no such kind of device (choose cpu, cuda or mps)") from error
    there = {
        "cpu": True,
        "cuda": torch.cuda.is_available() and (device.index or 0) < torch.cuda.device_count(),
        "mps": torch.backends.mps.is_available(),
    }
    if not there.get(device.type, False):
        raise ConfigError(f"--device {name}: this machine or this build of torch has none; use --device cpu")
    return device


def pick_dtype(name: DTypeName | None, device: torch.device) -> torch.dtype | None:
    """Return the type to compute in: float32 on a CPU unless told otherwise, else the stored one (None)."""
    import torch

    if name is None:
        return torch.float32 if device.type == "cpu" else None
    dtype: Any = getattr(torch, name)
    return dtype  # type: ignore[no-any-return]


def pick_template(loaded: LoadedModel, override: str | None) -> ChatTemplate:
    """Return the template for conversations with a model; say so where the model was never tuned for any."""
    from minigpt.text.chat import chat_template

    template = chat_template(loaded.tokenizer, override)
    if loaded.record.get("made_by") == "train" or loaded.tokenizer.chat_template is None:
        console.note("note: this model was not tuned for chat; it continues the conversation as it would any text")
    return template
