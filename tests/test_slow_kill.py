"""Killed with -9 anywhere and resumed, a run ends bit for bit as the one that nothing disturbed."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from commands import TINY

from minigpt.training.run_folder import RunFolder

KILLS = 20
STEPS = 500
TIMINGS = ("tokens_per_second", "elapsed", "waited")


@dataclass(frozen=True)
class Whole:
    """The undisturbed run, and how long after its start it saved for the last time."""

    folder: Path
    seconds: float


def start(folder: Path, *more: str) -> subprocess.Popen[bytes]:
    """Begin a run of some ten seconds: evaluations and saves all along, dropout, two micro-batches a step."""
    options = ("--steps", str(STEPS), "--set", "train.eval_every=30", "--set", "train.micro_batch_size=3")
    command = [sys.executable, "-m", "minigpt", "train", str(folder.parent.parent / "text.txt"), "-o", str(folder)]
    command += [*TINY, *options, "--set", "model.dropout=0.1", *more]
    return subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def finish(child: subprocess.Popen[bytes]) -> None:
    _, errors = child.communicate()
    assert child.returncode == 0, errors.decode()


def outcome(folder: Path) -> dict[str, Any]:
    """Everything that has to be equal."""
    run = RunFolder(folder)
    state = run.load_state()
    assert state is not None
    tensors, record = state
    record["progress"].pop("elapsed")
    rows = [{key: value for key, value in row.items() if key not in TIMINGS} for row in run.read_metrics()]
    result: dict[str, Any] = {name: tensor.numpy().tobytes() for name, tensor in tensors.items()}
    return result | {"record": record, "metrics": rows, "best": (folder / "model.safetensors").read_bytes()}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    place = tmp_path_factory.mktemp("kills")
    words = [f"{first}{rest}" for first in "bcdfgh" for rest in ("at", "ill", "red")]
    draw = random.Random(1)
    lines = [" ".join(draw.choice(words) for _ in range(8)) + ".\n" for _ in range(300)]
    (place / "text.txt").write_text("".join(lines), encoding="utf-8")
    folder = place / "whole" / "run"
    began = time.time()
    finish(start(folder))
    return Whole(folder, (folder / "last" / "state.safetensors").stat().st_mtime - began)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(KILLS))
def test_killed_and_resumed_equals_uninterrupted(whole: Whole, number: int) -> None:
    share = (number + random.Random(number).random()) / KILLS  # one in each twentieth of the time
    folder = whole.folder.parent.parent / f"killed-{number}" / "run"
    child = start(folder)
    time.sleep(share * whole.seconds)
    child.kill()
    child.communicate()
    finish(start(folder, *(["--resume"] if folder.exists() else [])))
    found, expected = outcome(folder), outcome(whole.folder)
    assert found.keys() == expected.keys()
    for name in expected:
        assert found[name] == expected[name], name
    assert not list(folder.rglob("*.partial"))
