"""Every command of the README, word for word but for its budget, in a folder that holds what it names."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from minigpt.cli.app import JOURNEY

ROOT = Path(__file__).parent.parent
TEXT = "Once upon a time there was a cat. It sat down by the door and waited for the rain to end.\n" * 40
SKIPPED = ("scripts/", "pip install")  # run by the checks themselves


def commands() -> list[str]:
    """The commands of the README in order, comments taken off, training cut to two steps of the smallest model."""
    lines = re.findall(r"^```sh\n(.*?)^```", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    found = [line.split("  #")[0].strip() for block in lines for line in block.splitlines()]
    return [_short(line) for line in found if line and not line.startswith(SKIPPED)]


def _short(command: str) -> str:
    if re.search(r"minigpt (finetune|align|reward) ", command):
        return f"{command} --steps 2 --device cpu"
    if "minigpt train" not in command or "--resume" in command:
        return command
    command = re.sub(r" --minutes [\d.]+", "", command)
    return f"{command} --steps 2 --preset nano --context 128 --device cpu"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("readme")
    (folder / "books").mkdir()
    for name in ("alice.txt", "books/one.txt", "held-out.txt"):
        (folder / name).write_text(f"{name}\n{TEXT}", encoding="utf-8")
    (folder / "notes.jsonl").write_text(json.dumps({"text": TEXT}) + "\n", encoding="utf-8")
    (folder / "prompts.jsonl").write_text('{"id": 7, "prompt": "Once"}\n', encoding="utf-8")
    rows = [{"instruction": f"Say {n}.", "input": "", "output": str(n), "kind": "say"} for n in range(20)]
    for name in ("chats.jsonl", "tasks.jsonl"):
        (folder / name).write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    pairs = [{"prompt": f"Say {n}.", "chosen": str(n), "rejected": "No."} for n in range(20)]
    (folder / "pairs.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in pairs), encoding="utf-8")
    (folder / "lambada.jsonl").write_text('{"context": "Once upon a", "continuation": "time"}\n', encoding="utf-8")
    return folder


def test_the_readme_shows_every_command() -> None:
    text = "\n".join(commands())
    for name in JOURNEY:
        assert f"minigpt {name}" in text


@pytest.mark.slow
def test_its_commands_run_one_after_the_other(folder: Path) -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    for command in commands():
        done = subprocess.run(
            ["sh", "-c", command],
            cwd=folder,
            env={**os.environ, "PATH": path},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, f"{command}\n{done.stderr.decode()}"
    assert json.loads((folder / "answers.jsonl").read_text(encoding="utf-8"))["id"] == 7
    assert (folder / "attention.svg").is_file()
