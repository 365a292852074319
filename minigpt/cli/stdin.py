"""Standard input: whether anything was piped in, and a word when nothing comes."""

from __future__ import annotations

import os
import stat
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO

from minigpt.cli import console
from minigpt.errors import DataError
from minigpt.text.decoding import ReadCounts, decode_utf8

NAME = "stdin"  # in messages and records, where others have the name of a file
PATIENCE_SECONDS = 2.0


def is_piped() -> bool:
    """Tell whether a pipe, socket or file stands at stdin; not so for a terminal, /dev/null or a closed one."""
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (AttributeError, OSError, ValueError):
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or stat.S_ISREG(mode)


class _Watched:
    """A stream that says so when its first bytes are long in coming."""

    def __init__(self, stream: BinaryIO, timer: threading.Timer) -> None:
        self._stream, self._timer = stream, timer

    def read(self, size: int = -1) -> bytes:
        data = self._stream.read(size)
        self._timer.cancel()
        return data

    def readline(self) -> bytes:
        line = self._stream.readline()
        self._timer.cancel()
        return line


@contextmanager
def piped(what: str = "text") -> Iterator[BinaryIO]:
    """Open stdin as bytes; after two seconds without any, say on stderr what is waited for."""
    if sys.stdin is None:
        raise DataError(f"no {what}: standard input is closed; pipe something into it")
    timer = threading.Timer(
        PATIENCE_SECONDS, console.note, [f"waiting for {what} on standard input (Ctrl-D ends it, Ctrl-C leaves)"]
    )
    timer.daemon = True
    timer.start()
    try:
        yield _Watched(sys.stdin.buffer, timer)  # type: ignore[misc]
    finally:
        timer.cancel()


def read_text(what: str = "text") -> str:
    """Read all of stdin; bytes that are no UTF-8 become U+FFFD, as on every route."""
    with piped(what) as stream:
        return decode_utf8(stream.read(), ReadCounts())
