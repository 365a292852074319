"""Killed with -9 in the middle of GRPO and resumed, a run ends bit for bit as the one that nothing disturbed."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
from test_slow_kill import finish, outcome
from tiny_chat import PAIRS
from tiny_rollouts import tiny_model

KILLS = 6


def start(folder: Path, *more: str) -> subprocess.Popen[bytes]:
    """Begin a run of some ten seconds: three steps on the same answers, evaluations and saves all along."""
    place = folder.parent.parent
    options = ["--method", "grpo", "--reward", "regex:a", "--steps", "90", "--updates", "3", "--batch-size", "8"]
    options += ["--group-size", "4", "--max-new-tokens", "8", "--kl", "0.05", "--lr", "0.003", "--seed", "2"]
    options += ["--set", "train.eval_every=7", "--set", "train.micro_batch_size=3", "--device", "cpu"]
    command = [sys.executable, "-m", "minigpt", "align", str(place / "ask.jsonl"), "-m", str(place / "base")]
    return subprocess.Popen(
        [*command, "-o", str(folder), *options, *more],
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float]:
    """The undisturbed run, and how long after its start it saved for the last time."""
    place = tmp_path_factory.mktemp("kills")
    tiny_model(place / "base")
    rows = [{"prompt": question, "output": answer} for question, answer in PAIRS]
    (place / "ask.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    folder = place / "whole" / "run"
    began = time.time()
    finish(start(folder))
    return folder, (folder / "last" / "state.safetensors").stat().st_mtime - began


@pytest.mark.slow
@pytest.mark.parametrize("number", range(KILLS))
def test_killed_in_the_middle_of_grpo_and_resumed(whole: tuple[Path, float], number: int) -> None:
    expected_folder, seconds = whole
    folder = expected_folder.parent.parent / f"killed-{number}" / "run"
    child = start(folder)
    time.sleep((number + random.Random(number).random()) / KILLS * seconds)
    child.kill()
    child.communicate()
    finish(start(folder, *(["--resume"] if folder.exists() else [])))
    found, expected = outcome(folder), outcome(expected_folder)
    assert found.keys() == expected.keys()
    for name in expected:
        assert found[name] == expected[name], name
