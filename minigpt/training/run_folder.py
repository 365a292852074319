"""A run on disk: the model people use at the top, what resuming needs in `last/`, metrics line by line."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import filelock
from torch import Tensor

from minigpt.checkpoint import files
from minigpt.checkpoint.base import is_part, parts_in
from minigpt.checkpoint.card import remove_card
from minigpt.errors import DataError, TrainingError
from minigpt.text.decoding import part_path

TEXT = "stdin.txt"
OURS = (TEXT, ".stdin.txt", ".stdin.txt.part", ".lock")  # beside the parts of a model
# A new run writes its record before it removes anything, and a tokenizer over the one that was there.
WRITTEN_OVER = ("minigpt.json", "tokenizer.json", "tokenizer_config.json")


class RunFolder:
    """Read and write one run's state; every file is either whole or the one before it.

    Text that comes through stdin waits in `incoming_path` and is kept in `text_path` once the folder is the run's.
    Of several processes of a run one `writes`; in the others what a run saves goes nowhere.
    """

    def __init__(self, path: Path, *, writes: bool = True) -> None:
        self.path, self.writes = path, writes
        self.incoming_path, self.text_path = path / ".stdin.txt", path / TEXT
        self.state_path = path / "last" / "state.safetensors"
        self.metrics_path = path / "metrics.jsonl"
        self._lock = filelock.FileLock(path / ".lock")
        self._made = False  # the folder is this object's

    def lock(self, *, keep_incoming: bool = False) -> None:
        """Keep other runs out until this process ends, and drop text that a killed run left, unless it is to be used.

        A folder in use is a TrainingError.
        """
        try:
            self._made = not self.path.exists()
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock.acquire(timeout=0)
            part_path(self.incoming_path).unlink(missing_ok=True)
            if not keep_incoming:
                self.incoming_path.unlink(missing_ok=True)
        except filelock.Timeout as error:
            raise TrainingError(
                f"{self.path} is in use by another run; wait for it, or write elsewhere with -o"
            ) from error
        except OSError as error:
            raise TrainingError(f"cannot write {self.path}: {error.strerror}; write elsewhere with -o") from error

    def unlock(self) -> None:
        """Let other runs in; a folder that was made for nothing goes."""
        lock = Path(self._lock.lock_file)
        with contextlib.suppress(OSError):  # Windows keeps an open file
            if self._made and [*self.path.iterdir()] == [lock]:
                lock.unlink()  # still held: who has found it finds it taken
                self.path.rmdir()
        self._lock.release()

    def taken(self) -> str | None:
        """Name something in the folder that a new run would replace, or None.

        Piped text alone does not count: a run that was killed as it began leaves it.
        """
        return next(iter(parts_in(self.path)), None)

    def holds_text(self) -> bool:
        """Tell whether piped text is here, whole."""
        return self.incoming_path.exists() or self.text_path.exists()

    def half_read(self) -> bool:
        """Tell whether a run was killed while its text came through the pipe, and there is none whole."""
        return part_path(self.incoming_path).exists() and not self.holds_text()

    def check_sources(self, sources: Sequence[Path]) -> None:
        """Refuse to train on what a new run here removes or writes over: a DataError."""
        here = self.path.resolve()
        for source in sources:
            file = source.resolve()
            name = file.relative_to(here).parts[0] if file != here and file.is_relative_to(here) else ""
            if name in OURS or is_part(name):
                raise DataError(f"{source}: a run in {self.path} would write over this text; write elsewhere with -o")

    def clear(self, *, keep_text: bool) -> None:
        """Remove what an earlier run or model left but its record, so that nothing of it mixes with a new one.

        Incoming text is kept.
        """
        if self.incoming_path.exists():
            os.replace(self.incoming_path, self.text_path)
        remove_card(self.path)
        for path in (self.path / name for name in parts_in(self.path) if name not in WRITTEN_OVER):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink()
        if not keep_text:
            self.text_path.unlink(missing_ok=True)

    def save_state(self, tensors: dict[str, Tensor], record: dict[str, Any]) -> None:
        """Write all that resuming needs as one file, in one atomic step."""
        if not self.writes:
            return
        files.write_tensors(self.state_path, tensors, {"record": json.dumps(record)})

    def load_state(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """Read the saved state, or None when the run never got to its first save."""
        if not self.state_path.exists():
            return None
        tensors, metadata = files.read_tensors(self.state_path)
        try:
            record = json.loads(metadata["record"])
        except (KeyError, ValueError) as error:
            raise TrainingError(f"{self.state_path} holds no state of a run; start again with --overwrite") from error
        return tensors, record

    def append_metrics(self, row: dict[str, Any]) -> None:
        """Add one line to metrics.jsonl."""
        if not self.writes:
            return
        try:
            with open(self.metrics_path, "a", encoding="utf-8", newline="\n") as file:
                file.write(json.dumps(row) + "\n")
        except OSError as error:
            raise TrainingError(
                f"cannot write {self.metrics_path}: {error.strerror}; "
                f"the last good state is in {self.state_path.parent}"
            ) from error

    def flush_metrics(self) -> None:
        """Bring metrics.jsonl to the disk, so that no state is there before the rows that lead to it."""
        if self.writes and self.metrics_path.exists():
            with open(self.metrics_path, "rb+") as file:
                os.fsync(file.fileno())

    def read_metrics(self) -> list[dict[str, Any]]:
        """Return the rows of metrics.jsonl; a last line cut short by a kill is left out."""
        if not self.metrics_path.exists():
            return []
        rows = []
        for line in self.metrics_path.read_text(encoding="utf-8").split("\n"):
            with contextlib.suppress(ValueError):
                rows.append(json.loads(line))
        return rows

    def rewind_metrics(self, step: int) -> None:
        """Drop the rows after `step`: a resumed run writes them again."""
        if not self.writes:
            return
        rows = [row for row in self.read_metrics() if row.get("step", 0) <= step]
        files.write_text(self.metrics_path, "".join(json.dumps(row) + "\n" for row in rows))
