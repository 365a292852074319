"""The corpus that comes with the program: short tales in English and Chinese, written for it."""

from __future__ import annotations

from pathlib import Path

from minigpt.errors import DataError


def bundled_corpus() -> list[Path]:
    """Return the files of the bundled corpus: inside the installed package, or beside it in a clone."""
    package = Path(__file__).resolve().parent.parent
    for folder in (package / "data", package.parent / "data"):
        if files := sorted(folder.glob("tales.*.txt")):
            return files
    raise DataError("the bundled corpus is missing from this installation; install again, or name a file to train on")
