"""Which folder says what about a model: an adapter has the config of its base model, and often its tokenizer."""

from __future__ import annotations

import contextlib
from pathlib import Path

from minigpt.errors import ModelFolderError
from minigpt.text.tokenizer import Tokenizer
from minigpt.text.tokenizer_json import read_json

ADAPTER_CONFIG = "adapter_config.json"


def holds_adapter(folder: Path) -> bool:
    """Tell whether a folder is an adapter rather than a whole model."""
    return (folder / ADAPTER_CONFIG).is_file()


def base_folder(folder: Path) -> Path:
    """Return the folder of the model that an adapter belongs to; one that is not there is a ModelFolderError.

    Looked for where adapter_config.json says, then beside the adapter, so that the two can be moved together.
    """
    path = folder / ADAPTER_CONFIG
    named = read_json(path).get("base_model_name_or_path")
    if not isinstance(named, str) or not named or "\0" in named:
        raise ModelFolderError(f"{path} names no base model; write its folder into base_model_name_or_path")
    found = "is not here"
    with contextlib.suppress(OSError):  # a name too long to be one
        for base in (Path(named), folder.parent / Path(named).name):
            if holds_adapter(base):
                found = "is an adapter itself"
            elif (base / "config.json").is_file():
                return base
    raise ModelFolderError(
        f"{path}: its base model {named} {found}; put the model there, or write its folder into base_model_name_or_path"
    )


def config_path(folder: Path) -> Path:
    """Return where the shape of a model is told, or of the one that an adapter belongs to."""
    return (base_folder(folder) if holds_adapter(folder) else folder) / "config.json"


def read_tokenizer(folder: Path) -> Tokenizer:
    """Read the tokenizer of a model: an adapter's own, or its base model's where it has none."""
    own = (folder / "tokenizer.json").is_file() or not holds_adapter(folder)
    return Tokenizer.load(folder if own else base_folder(folder))
