"""Ctrl-C and SIGTERM: the first asks a run to save and end, a second one ends it at once."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Stopped(BaseException):
    """Ctrl-C or SIGTERM, where nothing is in the middle of a training step."""

    def __init__(self, number: int) -> None:
        self.exit_status = 128 + number


class StopRequest:
    """Whether a signal came, and which."""

    def __init__(self) -> None:
        self.signal: int | None = None

    def __call__(self) -> bool:
        return self.signal is not None

    @property
    def exit_status(self) -> int:
        """The status a shell expects of a program that a signal ended: 130 or 143."""
        assert self.signal is not None
        return 128 + self.signal

    def _take(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None:
            os._exit(128 + number)
        self.signal = number


def raise_on_signals() -> None:
    """Let Ctrl-C and SIGTERM unwind the program, so that what is half-written is cleaned up."""

    def take(number: int, frame: FrameType | None) -> None:
        raise Stopped(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, take)


@contextmanager
def stop_request() -> Iterator[StopRequest]:
    """Collect Ctrl-C and SIGTERM instead of being interrupted."""
    request = StopRequest()
    before = {number: signal.signal(number, request._take) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
