"""What a person types, with line editing and history where there is a terminal, or a script line by line."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

MARK, MORE = "> ", ". "
QUOTES = '"""'


class Keyboard:
    """Reads messages: one a line; a line that ends with a backslash goes on, and so does all between triple quotes."""

    def __init__(self) -> None:
        self.interactive = sys.stdin is not None and sys.stdin.isatty()
        if self.interactive:
            _enable_editing()

    def message(self) -> str:
        """Return the next message; EOFError at the end of input, Stopped on Ctrl-C."""
        line = self._line(MARK)
        if line.lstrip().startswith(QUOTES):
            return self._quoted(line.lstrip().removeprefix(QUOTES))
        lines = [line]
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1][:-1]
            try:
                lines.append(self._line(MORE))
            except EOFError:
                break
        return "\n".join(lines)

    def _quoted(self, line: str) -> str:
        """Read on to the closing quotes, or to the end of input."""
        lines = [line]
        while not lines[-1].rstrip().endswith(QUOTES):
            try:
                lines.append(self._line(MORE))
            except EOFError:
                return "\n".join(lines)
        lines[-1] = lines[-1].rstrip().removesuffix(QUOTES)
        return "\n".join(lines)

    def _line(self, mark: str) -> str:
        if self.interactive:
            with _prompting_on_stderr() as visible:
                return input(mark if visible else "")
        line = sys.stdin.readline() if sys.stdin is not None else ""
        if not line:
            raise EOFError
        return line.removesuffix("\n")


def _enable_editing() -> None:
    """Let input() edit lines and keep a history, where Python was built with it."""
    try:
        import readline
    except ImportError:
        return
    readline.set_auto_history(True)


@contextmanager
def _prompting_on_stderr() -> Iterator[bool]:
    """Let input() put its mark and what is typed on stderr, so that stdout has answers only; False: nobody sees it.

    The line editor writes to the first of the process's file descriptors for output, and only to a terminal.
    """
    try:
        out, visible = sys.stdout.fileno(), sys.stderr.isatty()
    except (AttributeError, OSError, ValueError):
        yield False
        return
    if not visible:
        yield sys.stdout.isatty()
        return
    sys.stdout.flush()
    kept = os.dup(out)
    os.dup2(sys.stderr.fileno(), out)
    try:
        yield True
    finally:
        os.dup2(kept, out)
        os.close(kept)
