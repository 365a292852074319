"""The program on a pseudo-terminal: what a person types, and what they see."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

PATIENCE = 60.0  # seconds; a machine may be busy


class Terminal:
    """One end of a pseudo-terminal; the program sits at the other."""

    def __init__(self, fd: int, child: subprocess.Popen[bytes]) -> None:
        self.fd, self.child, self.seen, self._read = fd, child, "", 0

    def wait_for(self, text: str) -> str:
        """Read until a text has come, after all that was waited for before; return what came up to its end."""
        until = time.monotonic() + PATIENCE
        while text not in self.seen[self._read :]:
            ready = select.select([self.fd], [], [], max(0.0, until - time.monotonic()))[0]
            assert ready, f"{text!r} did not come; seen: {self.seen!r}"
            try:
                data = os.read(self.fd, 65536)
            except OSError:  # the other end is closed
                data = b""
            assert data, f"{text!r} did not come before the end; seen: {self.seen!r}"
            self.seen += data.decode("utf-8", "replace").replace("\r\n", "\n")
        end = self.seen.index(text, self._read) + len(text)
        came, self._read = self.seen[self._read : end], end
        return came

    def type(self, text: str) -> None:
        """Type a text and press return."""
        self.press(f"{text}\r")

    def press(self, keys: str) -> None:
        """Press keys without return."""
        data = keys.encode()
        while data:
            data = data[os.write(self.fd, data[:512]) :]

    def leave(self) -> int:
        """Wait for the end of the program; return its status."""
        while self.child.poll() is None:
            if select.select([self.fd], [], [], 0.05)[0]:
                try:
                    self.seen += os.read(self.fd, 65536).decode("utf-8", "replace").replace("\r\n", "\n")
                except OSError:
                    break
        return self.child.wait(timeout=PATIENCE)


@contextmanager
def on_terminal(*arguments: object, stdout: int | None = None) -> Iterator[Terminal]:
    """Start `minigpt` on a terminal that has Ctrl-C; `stdout` puts answers elsewhere."""
    master, slave = pty.openpty()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TERM": "dumb"}
    child = subprocess.Popen(
        [sys.executable, "-m", "minigpt", *map(str, arguments)],
        stdin=slave, stdout=slave if stdout is None else stdout, stderr=slave, env=environment,
        preexec_fn=lambda: _take_terminal(slave),
    )  # fmt: skip
    os.close(slave)
    try:
        yield Terminal(master, child)
    finally:
        child.kill()
        child.wait()
        os.close(master)


def _take_terminal(slave: int) -> None:
    """Make the terminal the child's own, so that Ctrl-C on it reaches the child."""
    import fcntl
    import termios

    os.setsid()
    fcntl.ioctl(slave, termios.TIOCSCTTY, 0)
