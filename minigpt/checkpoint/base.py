"""What a model folder consists of, and which folder says what: an adapter has its base model's config, often more.

Opens without torch and tokenizers: shell completion looks for models too.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minigpt.errors import ModelFolderError
from minigpt.text.tokenizer_json import read_json

if TYPE_CHECKING:
    from minigpt.text.tokenizer import Tokenizer

WEIGHTS = "model.safetensors"
INDEX = f"{WEIGHTS}.index.json"
SHARD = re.compile(r"model-\d+-of-\d+\.safetensors")
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
REWARD_HEAD = "reward_head.safetensors"  # beside the weights of a reward model
# What makes up a model folder and its run, besides shards. What decides how all else is read comes first: in this
# order an older model is removed, and something that is in the way is named.
PARTS = (
    ADAPTER_CONFIG, ADAPTER_WEIGHTS, "config.json", "generation_config.json", "last", "loss.svg", "metrics.jsonl",
    "minigpt.json", "report.md", "report.svg", REWARD_HEAD, WEIGHTS, INDEX, "tokenizer.json", "tokenizer_config.json",
    "chat_template.jinja",
)  # fmt: skip


def is_part(name: str) -> bool:
    """Tell whether a file or folder of this name belongs to the model in whose folder it lies."""
    return name in PARTS or SHARD.fullmatch(name) is not None


def parts_in(folder: Path) -> list[str]:
    """Return the names of a model's parts that a folder holds, shards last; none where it is no folder."""
    found = [path.name for path in folder.iterdir() if is_part(path.name)] if folder.is_dir() else []
    return sorted(found, key=lambda name: (PARTS.index(name) if name in PARTS else len(PARTS), name))


def weights_path(folder: Path) -> Path | None:
    """Return the file that stands for the weights in a folder, an index where they are sharded; None without any."""
    names = (ADAPTER_WEIGHTS,) if holds_adapter(folder) else (WEIGHTS, INDEX)
    return next((folder / name for name in names if (folder / name).is_file()), None)


def holds_model(folder: Path) -> bool:
    """Tell whether a folder holds a model that can generate, or an adapter of one."""
    return holds_adapter(folder) or (weights_path(folder) is not None and (folder / "config.json").is_file())


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
    from minigpt.text.tokenizer import Tokenizer

    own = (folder / "tokenizer.json").is_file() or not holds_adapter(folder)
    return Tokenizer.load(folder if own else base_folder(folder))


def section(record: Mapping[str, Any], *path: str) -> Mapping[str, Any]:
    """Return a part of a record, the contents of minigpt.json; empty where it is missing or something else."""
    part: Any = record
    for name in path:
        part = part.get(name) if isinstance(part, Mapping) else None
    return part if isinstance(part, Mapping) else {}
