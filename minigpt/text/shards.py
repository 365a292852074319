"""Rows of ids into files of limited size, and the journal by which a killed run goes on where it was."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from minigpt.text.decoding import replacing

_JOURNAL_NAME = "journal.json"


class ShardWriter:
    """Ids of one share into files of at most ``shard_tokens`` ids; ``bytes`` is the caller's count of their text."""

    def __init__(self, folder: Path, share: str, dtype: np.dtype[Any], shard_tokens: int) -> None:
        self._folder, self._share, self._dtype, self._shard_tokens = folder, share, dtype, shard_tokens
        self._file: BinaryIO | None = None
        self.tokens = 0
        self.bytes = 0

    @property
    def shards(self) -> int:
        """The number of files so far."""
        return -(-self.tokens // self._shard_tokens)

    def write(self, ids: NDArray[np.integer[Any]]) -> None:
        """Append ids, (T,), in as many files as they need."""
        position = 0
        while position < len(ids):
            if self._file is None:
                self._file = self._path(self.shards).open("wb")
            room = self._shard_tokens - self.tokens % self._shard_tokens
            part = ids[position : position + room]
            self._file.write(part.astype(self._dtype).tobytes())
            position += len(part)
            self.tokens += len(part)
            if len(part) == room:
                self.finish_file()

    def go_on(self, tokens: int, bytes: int) -> None:
        """Take up what an earlier run wrote and drop all behind so many ids; a ValueError where they are not there."""
        self.close()
        self.tokens, self.bytes = tokens, bytes
        stale = self.shards
        while self._path(stale).exists():
            self._path(stale).unlink()
            stale += 1
        for shard in range(self.shards):
            size = min(self._shard_tokens, tokens - shard * self._shard_tokens) * self._dtype.itemsize
            if not self._path(shard).exists() or self._path(shard).stat().st_size < size:
                raise ValueError(f"{self._path(shard)} is shorter than {size} bytes")
        if rest := tokens % self._shard_tokens:
            self._file = self._path(self.shards - 1).open("r+b")
            self._file.truncate(rest * self._dtype.itemsize)
            self._file.seek(0, os.SEEK_END)

    def sync(self) -> None:
        """Bring what was written to the disk."""
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())

    def finish_file(self) -> None:
        """Bring the open file to the disk, and end it."""
        self.sync()
        self.close()

    def close(self) -> None:
        """Let go of the open file, finished or not."""
        if self._file is not None:
            file, self._file = self._file, None
            with suppress(OSError):  # what is left in the buffer of a full disk
                file.close()

    def _path(self, shard: int) -> Path:
        return self._folder / f"{self._share}-{shard:05d}.bin"


def has_journal(folder: Path) -> bool:
    """Tell whether a run that was ended left something in a folder to go on from."""
    return (folder / _JOURNAL_NAME).exists()


def write_journal(folder: Path, parts: int, writers: Mapping[str, ShardWriter], shard_tokens: int) -> None:
    """Bring all that was written to the disk and record that so many parts of the text are done."""
    for writer in writers.values():
        writer.sync()
    shares = {share: [writer.tokens, writer.bytes] for share, writer in writers.items()}
    with replacing(folder / _JOURNAL_NAME) as file:
        file.write(json.dumps({"shard_tokens": shard_tokens, "parts": parts, "shares": shares}).encode("utf-8"))


def take_up(folder: Path, writers: Mapping[str, ShardWriter], shard_tokens: int) -> int:
    """Set writers to where a journal has them and return the parts of the text that are done: 0 without a journal."""
    try:
        journal = json.loads((folder / _JOURNAL_NAME).read_bytes())
        if journal["shard_tokens"] != shard_tokens:
            raise ValueError("other shards")
        for share, writer in writers.items():
            writer.go_on(*journal["shares"][share])
        return int(journal["parts"])
    except (OSError, ValueError, KeyError, TypeError):  # none, or a damaged one
        start_again(folder, writers)
        return 0


def start_again(folder: Path, writers: Mapping[str, ShardWriter]) -> None:
    """Drop what an earlier run wrote."""
    (folder / _JOURNAL_NAME).unlink(missing_ok=True)
    for writer in writers.values():
        writer.go_on(0, 0)


def forget_journal(folder: Path) -> None:
    """Remove the journal of a folder that is complete."""
    (folder / _JOURNAL_NAME).unlink(missing_ok=True)
