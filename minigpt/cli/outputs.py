"""Where a command writes a model: beside its place first, and into it when all is well."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from minigpt.errors import ConfigError, TrainingError

# What makes up a model folder; another model in its place must not meet any of it.
PARTS = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja",
    "minigpt.json", "metrics.jsonl", "loss.svg", "last", "adapter_config.json", "adapter_model.safetensors",
    "model.safetensors", "model.safetensors.index.json",
)  # fmt: skip
SHARDS = "model-*-of-*.safetensors"


def check_free(place: Path, *, overwrite: bool) -> None:
    """Refuse a file that exists, or a folder that holds a part of a model, unless it is to be replaced: ConfigError."""
    if overwrite:
        return
    held = next((name for name in PARTS if (place / name).exists()), None) if place.is_dir() else None
    if held or (place.exists() and not place.is_dir()):
        what = f"{place} holds {held} already" if held else f"{place} exists already"
        raise ConfigError(f"{what}; write elsewhere with -o, or replace it with --overwrite")


@contextmanager
def staged_folder(place: Path) -> Iterator[Path]:
    """Give a folder to write a model to; its files take their place, and an older model leaves it, when the block ends.

    After an error, `place` is what it was before. Other files in it stay, a README.md that a person wrote among them.
    Errors: TrainingError when it cannot be written.
    """
    from minigpt.checkpoint.card import CARD, is_ours, remove_card

    stage = _beside(place)
    try:
        shutil.rmtree(stage, ignore_errors=True)  # a killed run may have left it
        stage.mkdir(parents=True)
        yield stage
        place.mkdir(parents=True, exist_ok=True)
        if not is_ours(place / CARD):
            (stage / CARD).unlink(missing_ok=True)
        remove_card(place)
        for old in (*(place / name for name in PARTS), *place.glob(SHARDS)):
            if old.is_dir() and not old.is_symlink():
                shutil.rmtree(old)
            else:
                old.unlink(missing_ok=True)
        for file in sorted(stage.iterdir(), key=lambda file: file.name == "config.json"):  # what makes it a model last
            os.replace(file, place / file.name)
    except OSError as error:
        raise TrainingError(f"cannot write {place}: {error.strerror}; write elsewhere with -o") from error
    finally:
        shutil.rmtree(stage, ignore_errors=True)


@contextmanager
def staged_file(place: Path) -> Iterator[Path]:
    """Give a path to write to; what is there takes its place when the block ends, and goes away after an error."""
    stage = _beside(place)
    try:
        yield stage
        os.replace(stage, place)
    except OSError as error:
        raise TrainingError(f"cannot write {place}: {error.strerror}; write elsewhere with -o") from error
    finally:
        stage.unlink(missing_ok=True)


def _beside(place: Path) -> Path:
    whole = Path(os.path.abspath(place))
    return whole.with_name(f".{whole.name}.partial")
