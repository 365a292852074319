"""Run the command line inside the test's own process: what a shell would see, without the seconds to import torch."""

from __future__ import annotations

import io
import json
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any
from unittest.mock import patch

from minigpt.cli import app

CPU = ("--device", "cpu", "--dtype", "float32")
# A model of two layers, 32 wide, that trains in a moment.
TINY = (
    *CPU, "--preset", "nano", "--context", "16", "--vocab-size", "300", "--batch-size", "4", "--seed", "7",
    "--set", "model.hidden_size=32", "--set", "model.num_hidden_layers=2", "--set", "model.head_dim=8",
    "--set", "model.intermediate_size=48",
)  # fmt: skip


@dataclass(frozen=True)
class Result:
    """Exit status, and what went to stdout and stderr."""

    status: int
    out: str
    err: str

    @property
    def objects(self) -> list[dict[str, Any]]:
        """Stdout as JSON lines."""
        return [json.loads(line) for line in self.out.split("\n") if line]


def minigpt(*arguments: object, stdin: bytes | None = None) -> Result:
    """Run `minigpt` with arguments; `stdin` is what is piped in, None is /dev/null."""
    out, err = io.BytesIO(), io.BytesIO()
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    with TemporaryFile() if stdin is not None else open(os.devnull, "rb") as source:
        if stdin is not None:
            source.write(stdin)
            source.seek(0)
        streams = {
            "stdin": io.TextIOWrapper(source, encoding="ascii"),
            "stdout": io.TextIOWrapper(out, encoding="ascii"),
            "stderr": io.TextIOWrapper(err, encoding="ascii", line_buffering=True),
        }
        try:
            with patch.multiple(sys, **streams):
                status = app.run([str(argument) for argument in arguments])
                streams["stdout"].flush()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            streams["stdin"].detach()
    return Result(status, out.getvalue().decode("utf-8"), err.getvalue().decode("utf-8"))


def error_of(result: Result, status: int = 1) -> str:
    """Return the message of a command that failed as it should: one line on stderr, at its end, and no traceback."""
    assert result.status == status, (result.status, result.err)
    lines = [line for line in result.err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, result.err
    assert "Traceback" not in result.err
    assert result.err.splitlines()[-1] == lines[0], result.err
    return lines[0].removeprefix("error: ")


def contents(folder: Path) -> dict[str, bytes]:
    """Every file under a folder and its bytes."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
