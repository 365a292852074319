"""Where a command writes a model: beside its place first, and into it when all is well."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from minigpt.checkpoint.base import parts_in
from minigpt.errors import ConfigError, TrainingError


def check_free(place: Path, *, overwrite: bool) -> None:
    """Refuse a file that exists, or a folder that holds a part of a model, unless it is to be replaced: ConfigError."""
    if overwrite:
        return
    held = next(iter(parts_in(place)), None)
    if held or (place.exists() and not place.is_dir()):
        what = f"{place} holds {held} already" if held else f"{place} exists already"
        raise ConfigError(f"{what}; write elsewhere with -o, or replace it with --overwrite")


@contextmanager
def staged_folder(place: Path) -> Iterator[Path]:
    """Give a folder to write a model to; its files take their place, and an older model leaves it, when the block ends.

    After an error inside the block `place` is what it was before. When a file cannot be moved, those that wait stay
    where they are, and the error names their folder; they are removed when another model is whole beside them. Other
    files in `place` stay, a README.md that a person wrote among them. Errors: TrainingError when it cannot be written.
    """
    stage = _beside(place, "partial")
    try:
        shutil.rmtree(stage, ignore_errors=True)  # a killed run may have left it
        stage.mkdir(parents=True)
        yield stage
        place.mkdir(parents=True, exist_ok=True)
    except BaseException as error:
        shutil.rmtree(stage, ignore_errors=True)
        if isinstance(error, OSError):
            raise TrainingError(f"cannot write {place}: {error.strerror}; write elsewhere with -o") from error
        raise
    _take_place(stage, place)


def _take_place(stage: Path, place: Path) -> None:
    """Move files into a folder, then remove those parts of an older model that none of them was written over.

    In this order there is a whole model at any moment: the older one, or the new one in both folders together. While
    its files are on their way their folder has another name, under which no later attempt writes.
    """
    from minigpt.checkpoint.card import CARD, is_ours, remove_card

    waiting = _beside(place, "waiting")
    try:
        if not is_ours(place / CARD):
            (stage / CARD).unlink(missing_ok=True)
        if waiting.exists():  # the rest of one that failed, no longer needed
            shutil.rmtree(waiting)
        stage = stage.rename(waiting)
        files = sorted(stage.iterdir(), key=lambda file: (file.name == "config.json", file.name))
        for file in files:  # what makes it a model last
            os.replace(file, place / file.name)
        stage.rmdir()
    except OSError as error:
        raise TrainingError(
            f"cannot write {place}: {error.strerror}; move what is left in {stage} there, or write elsewhere with -o"
        ) from error
    written = {file.name for file in files}
    try:
        if CARD not in written:
            remove_card(place)
        for old in (place / name for name in parts_in(place) if name not in written):
            if old.is_dir() and not old.is_symlink():
                shutil.rmtree(old)
            else:
                old.unlink()
    except OSError as error:
        raise TrainingError(f"cannot remove the older model from {place}: {error.strerror}; remove it there") from error


@contextmanager
def staged_file(place: Path) -> Iterator[Path]:
    """Give a path to write to; what is there takes its place when the block ends, and goes away after an error."""
    stage = _beside(place, "partial")
    try:
        yield stage
        os.replace(stage, place)
    except OSError as error:
        raise TrainingError(f"cannot write {place}: {error.strerror}; write elsewhere with -o") from error
    finally:
        stage.unlink(missing_ok=True)


def _beside(place: Path, what: str) -> Path:
    whole = Path(os.path.abspath(place))
    return whole.with_name(f".{whole.name}.{what}")
