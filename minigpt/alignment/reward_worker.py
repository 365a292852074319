"""The process that a reward function runs in: rows come in as JSON lines, its numbers go out a line each.

The function gets the rows of a step as a list of dictionaries and returns as many numbers.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import traceback
from pathlib import Path
from typing import IO, Any


def main(file: str, function: str) -> None:
    """Judge until the input ends; what goes wrong is the last line on stderr."""
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as out:
        os.dup2(2, 1)  # what the function prints is none of its answers
        sys.stdin.reconfigure(encoding="utf-8")  # type: ignore[union-attr]
        try:
            serve(_load(file, function), out)
        except Exception as error:
            places = [
                frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename) == Path(file)
            ]
            where = f" (line {places[-1].lineno} of {Path(file).name})" if places else ""
            print(f"{type(error).__name__}: {error}".replace("\n", " ") + where, file=sys.stderr)
            sys.exit(1)


def serve(function: Any, out: IO[str]) -> None:
    """Give the function the rows of one step after the other."""
    rows: list[dict[str, Any]] = []
    for line in sys.stdin:
        row = json.loads(line)
        left = row.pop("left")
        rows.append(row)
        if left == 0:
            values = [float(value) for value in function(rows)]
            if len(values) != len(rows):
                raise ValueError(f"it gave {len(values)} numbers for {len(rows)} answers")
            out.write("".join(f"{value}\n" for value in values))
            out.flush()
            rows = []


def _load(file: str, function: str) -> Any:
    sys.path.insert(0, str(Path(file).resolve().parent))
    spec = importlib.util.spec_from_file_location("reward", file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is no Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, function)


if __name__ == "__main__":
    main(*sys.argv[1:])
