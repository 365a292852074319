"""A reward from another program: a JSON object a line goes in, a number a line comes out, as long as a run lasts."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import threading
from collections import deque
from collections.abc import Sequence
from typing import IO, Any, Protocol

from minigpt.errors import TrainingError

MOST_CHARS = 1 << 16  # of a line; a program that never ends one would fill the memory
MOST_WAITING = 1 << 16  # lines that nobody asked for
SETTLE_SECONDS = 0.05  # in which a line too many shows
SHOWN_CHARS = 80  # of what is no number


class Plain(Protocol):
    """What can be written as a JSON object."""

    def plain(self) -> dict[str, Any]: ...


class Command:
    """A program that judges answers; started at the first, and kept running.

    Each row is one line: what `plain` gives, and `left`, the number of rows that follow it in this step, for programs
    that judge many at once. The answer is a line with a number. A text goes through the shell; a list does not.
    Errors: TrainingError where it ends, is `timeout` seconds without an answer, or prints something else.
    """

    def __init__(self, command: str | list[str], timeout: float) -> None:
        self._command, self._timeout = command, timeout
        self._process: subprocess.Popen[str] | None = None
        self._answers: queue.Queue[str | None] = queue.Queue(MOST_WAITING)  # None where there is no more
        self._complaints: deque[str] = deque(maxlen=1)
        self._threads: list[threading.Thread] = []

    def __call__(self, rows: Sequence[Plain]) -> list[float]:
        """Return the number for each row; a program that failed is ended."""
        try:
            return self._judge(rows)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the program and all that it started."""
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(OSError):  # it has ended already
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for thread in self._threads:
            thread.join(1.0)
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream is not None:
                with contextlib.suppress(OSError):  # what was not written yet
                    stream.close()

    def _judge(self, rows: Sequence[Plain]) -> list[float]:
        process = self._process or self._start()
        assert process.stdin is not None
        lines = [
            json.dumps(row.plain() | {"left": left}, ensure_ascii=False) + "\n"
            for row, left in zip(rows, range(len(rows) - 1, -1, -1), strict=True)
        ]
        self._thread(_send, process.stdin, lines)
        values = [self._number(process) for _ in rows]
        with contextlib.suppress(queue.Empty):
            extra = self._answers.get(timeout=SETTLE_SECONDS)
            if extra is not None:
                raise TrainingError("it printed more lines than there were answers")
        return values

    def _start(self) -> subprocess.Popen[str]:
        self._answers, self._threads = queue.Queue(MOST_WAITING), []
        self._complaints.clear()
        pipe = subprocess.PIPE
        self._process = process = subprocess.Popen(
            self._command,
            shell=isinstance(self._command, str),
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,  # Ctrl-C asks us to save and end, not the program to stop at once
        )
        self._thread(_read, process.stdout, self._answers)
        self._thread(_listen, process.stderr, self._complaints)
        return process

    def _thread(self, work: Any, *arguments: Any) -> None:
        thread = threading.Thread(target=work, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _number(self, process: subprocess.Popen[str]) -> float:
        try:
            line = self._answers.get(timeout=self._timeout)
        except queue.Empty:
            raise TrainingError(
                f"no answer in {self._timeout:g} seconds; it has to answer each line at once and go on running"
            ) from None
        if line is None:
            raise TrainingError(self._ended(process))
        try:
            return float(line)
        except ValueError:
            raise TrainingError(f"it printed {line.strip()[:SHOWN_CHARS]!r} where a number belongs") from None

    def _ended(self, process: subprocess.Popen[str]) -> str:
        """Say how it ended, in its own last words."""
        try:
            status = process.wait(self._timeout)
        except subprocess.TimeoutExpired:
            return "it closed its output"
        self._threads[1].join(1.0)
        said = f": {self._complaints[0]}" if self._complaints else ""
        return (f"it ended with status {status}" if status >= 0 else f"it was ended by signal {-status}") + said


def _send(stream: IO[str], lines: Sequence[str]) -> None:
    with contextlib.suppress(OSError, ValueError):  # it ended, which reading will tell
        stream.writelines(lines)
        stream.flush()


def _read(stream: IO[str], answers: queue.Queue[str | None]) -> None:
    with contextlib.suppress(OSError, ValueError):
        while line := stream.readline(MOST_CHARS):
            answers.put(line)
    answers.put(None)


def _listen(stream: IO[str], complaints: deque[str]) -> None:
    with contextlib.suppress(OSError, ValueError):
        while line := stream.readline(MOST_CHARS):
            if line.strip():
                complaints.append(line.strip())
