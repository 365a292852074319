"""The texts that come with the program, all written for it: short tales in English and Chinese, instructions, and
preference pairs.
"""

from __future__ import annotations

from pathlib import Path

from minigpt.errors import DataError


def bundled_corpus() -> list[Path]:
    """Return the files of the bundled corpus: inside the installed package, or beside it in a clone."""
    return _bundled("tales.*.txt", "corpus")


def bundled_instructions() -> list[Path]:
    """Return the file of bundled instructions to train on."""
    return _bundled("instructions.train.jsonl", "instruction set")


def bundled_questions() -> list[Path]:
    """Return the file of bundled instructions to ask a tuned model; training never sees their words and numbers."""
    return _bundled("instructions.test.jsonl", "instruction set")


def bundled_preferences() -> list[Path]:
    """Return the file of bundled preference pairs to train on."""
    return _bundled("preferences.train.jsonl", "preference set")


def bundled_held_preferences() -> list[Path]:
    """Return the file of bundled preference pairs to judge by; training never sees their words and numbers."""
    return _bundled("preferences.test.jsonl", "preference set")


def _bundled(pattern: str, what: str) -> list[Path]:
    package = Path(__file__).resolve().parent.parent
    for folder in (package / "data", package.parent / "data"):
        if files := sorted(folder.glob(pattern)):
            return files
    raise DataError(f"the bundled {what} is missing from this installation; install again, or name files of your own")
