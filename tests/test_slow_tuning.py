"""Instruction tuning at its real size: SmolLM2 with an adapter, and what scripts/demo promises."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from commands import CPU, minigpt

from minigpt.text.conversations import ChatOptions, load_conversations, split_conversations
from minigpt.training.run_folder import RunFolder

pytestmark = pytest.mark.slow


def test_a_few_steps_of_an_adapter_teach_smollm2(smollm2: Path, shared: Path, tmp_path: Path) -> None:
    data, share, folder = shared / "data" / "instruct" / "instruction-data.json", 0.01, tmp_path / "tuned"
    held_out = split_conversations(load_conversations([data], ChatOptions()), share).held_out
    options = ("--lora", "--steps", 4, "--batch-size", 1, "--context", 192, "--val-fraction", share, "--seed", 1)
    result = minigpt("finetune", data, "-m", smollm2, "-o", folder, *options, *CPU)
    assert result.status == 0, result.err
    scores = [row["bits_per_byte"] for row in RunFolder(folder).read_metrics() if "bits_per_byte" in row]
    assert scores[-1] < scores[0], scores
    asked = "".join(json.dumps({"prompt": one.question}) + "\n" for one in held_out[:4])
    answers = minigpt(
        "generate", "--chat", "--jsonl", "--json", "-m", folder, "-t", 0, "-n", 60, *CPU, stdin=asked.encode()
    ).objects
    assert len(answers) == 4
    assert [answer["finish_reason"] for answer in answers].count("end") >= 3
    assert all(answer["text"].strip() for answer in answers)


def test_the_demo_keeps_its_promise(tmp_path: Path) -> None:
    """The demo's own commands with their real minutes, about nine in all; other work on the machine takes from them."""
    demo = (Path(__file__).parents[1] / "scripts" / "demo").read_text(encoding="utf-8")
    commands = [shlex.split(line)[2:] for line in demo.splitlines() if line.startswith("run minigpt ")]
    training = [command for command in commands if command[0] in ("train", "finetune")]
    assert [command[command.index("--minutes") + 1] for command in training] == ["3", "5"]
    scoring = ["eval", "--task", "instructions", "-m", "runs/demo-chat", "--json"]
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    for command in (*training, scoring):
        result = subprocess.run(
            [sys.executable, "-m", "minigpt", *command],
            cwd=tmp_path, env=environment, stdin=subprocess.DEVNULL, capture_output=True, check=False,
        )  # fmt: skip
        assert result.returncode == 0, result.stderr.decode()
    found = json.loads(result.stdout)
    assert found["accuracy"] >= 0.6, found
    assert {kind["kind"]: kind["accuracy"] for kind in found["kinds"] if kind["accuracy"] < 0.3} == {}
