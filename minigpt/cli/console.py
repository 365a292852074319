"""What a person sees. Results go to stdout as they are; all else goes to stderr, plain when it is no terminal."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.live import Live
from rich.text import Text

LABEL_WIDTH = 11
PLAIN_SECONDS = 5.0  # between two progress lines where stderr is no terminal


def processes() -> int:
    """How many processes run this command, as torchrun says it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank() -> int:
    """Which of them this is; only the first, 0, has anything to tell."""
    return int(os.environ.get("RANK", "0"))


def _stderr() -> Console:
    return Console(file=sys.stderr, highlight=False, markup=False, emoji=False)


def write(text: str) -> None:
    """Put a result on stdout at once, exactly as it is."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        error.filename = "standard output"
        raise


def note(text: str, *, command: str = "") -> None:
    """Put one line on stderr; a terminal breaks it between words, but not in a command to paste at its end."""
    for line in [text + command] if command else _wrapped(text, 0):
        _print(line)


def error(message: str) -> None:
    """Put an error on stderr: one line, whatever the message holds; of several processes it says which."""
    where = f"rank {rank()}: " if processes() > 1 else ""
    for line in _wrapped(f"error: {where}{' '.join(message.split())}", 0):
        print(line, file=sys.stderr, flush=True)


def warning(message: str) -> None:
    """Put a warning on stderr."""
    note(f"warning: {' '.join(message.split())}")


def fact(label: str, text: str, *, wrapped: bool = True) -> None:
    """Put a labelled fact on stderr; a terminal wraps it under itself, unless it is a command; a file gets one line."""
    bold, plain = ("\033[1m", "\033[0m") if sys.stderr.isatty() and not os.environ.get("NO_COLOR") else ("", "")
    for i, line in enumerate(_wrapped(text, LABEL_WIDTH) if wrapped else [text]):
        _print(f"{bold}{label if i == 0 else '':<{LABEL_WIDTH}}{plain}{line}")


def _print(line: str) -> None:
    if rank() == 0:
        print(line, file=sys.stderr, flush=True)


def _wrapped(text: str, indent: int) -> list[str]:
    """Cut text into lines as wide as the terminal, less an indent; one line where there is no terminal."""
    if not sys.stderr.isatty():
        return [text]
    console = _stderr()
    return [line.plain.rstrip() for line in Text(text).wrap(console, max(20, console.width - indent - 1))] or [""]


def duration(seconds: float) -> str:
    """Write 85 seconds as 1:25, and 3,700 as 1:01:40."""
    whole = max(0, round(seconds))
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def amount(number: float) -> str:
    """Write 9,123 as 9.1k and 5,200,000 as 5.2M."""
    for limit, unit in ((1e9, "B"), (1e6, "M"), (1e4, "k")):
        if number >= limit:
            return f"{number / (1e3 if unit == 'k' else limit):.3g}{unit}"
    return f"{number:,.0f}"


class Progress:
    """One line that is kept up to date on a terminal, and printed every few seconds elsewhere."""

    def __init__(self, live: Live | None) -> None:
        self._live = live
        self._printed = time.monotonic()

    def show(self, line: str, share: float, *, force: bool = False) -> None:
        """Show a line, with a bar for the share that is done where there is room for it."""
        if self._live is not None:
            width = self._live.console.width - len(line) - 3
            done = int(max(0.0, min(1.0, share)) * width)
            bar = f"  {'━' * done}{'┈' * (width - done)}" if width >= 8 else ""
            self._live.update(Text(line + bar, no_wrap=True, overflow="crop"))
        elif force or time.monotonic() - self._printed >= PLAIN_SECONDS:
            self._printed = time.monotonic()
            note(line)


@contextmanager
def progress() -> Iterator[Progress]:
    """Keep a progress line at the bottom of stderr while other lines scroll above it."""
    if not sys.stderr.isatty() or os.environ.get("TERM") == "dumb" or rank() > 0:
        yield Progress(None)
        return
    with Live(console=_stderr(), refresh_per_second=8, transient=True, redirect_stdout=False) as live:
        yield Progress(live)
