"""Ctrl-C and SIGTERM: the first asks a run to save and end, a second one ends it at once."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SHOW_CURSOR = b"\x1b[?25h"
INTERRUPTED = 128 + signal.SIGINT  # the exit status after Ctrl-C
FORWARDED_SECONDS = 1.0  # Ctrl-C reaches a process from the terminal, and once more from the torchrun it is of


class Stopped(BaseException):
    """Ctrl-C or SIGTERM, where nothing is in the middle of a training step.

    No KeyboardInterrupt: Typer would take that for itself and lose which signal it was.
    """

    def __init__(self, number: int) -> None:
        self.exit_status = 128 + number


class StopRequest:
    """Whether a signal came, and which."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self._since = 0.0

    def __call__(self) -> bool:
        return self.signal is not None

    @property
    def exit_status(self) -> int:
        """The status a shell expects of a program that a signal ended: 130 or 143, as also where another process of the
        run took it.
        """
        return 128 + (self.signal or signal.SIGTERM)

    def _take(self, number: int, frame: FrameType | None) -> None:
        if self.signal is None:
            self.signal, self._since = number, time.monotonic()
        elif "TORCHELASTIC_RUN_ID" not in os.environ or time.monotonic() - self._since > FORWARDED_SECONDS:
            _show_cursor()
            os._exit(128 + number)


def _show_cursor() -> None:
    """Give a terminal its cursor back, which a progress line hides and nobody else will restore."""
    with contextlib.suppress(AttributeError, OSError, ValueError):  # stderr is closed
        if sys.stderr.isatty():
            os.write(sys.stderr.fileno(), SHOW_CURSOR)


def _heeded() -> list[signal.Signals]:
    """The signals that nobody, such as nohup, has told us to ignore."""
    return [number for number in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(number) is not signal.SIG_IGN]


def raise_on_signals() -> None:
    """Let Ctrl-C and SIGTERM unwind the program, so that what is half-written is cleaned up."""

    def take(number: int, frame: FrameType | None) -> None:
        raise Stopped(number)

    for number in _heeded():
        signal.signal(number, take)


@contextmanager
def stop_request() -> Iterator[StopRequest]:
    """Collect Ctrl-C and SIGTERM instead of being interrupted."""
    request = StopRequest()
    before = {number: signal.signal(number, request._take) for number in _heeded()}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
