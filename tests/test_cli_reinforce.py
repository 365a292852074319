"""`minigpt align --method grpo` and `ppo`: from files to a report, a failing reward in one line, bad combinations."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commands import minigpt
from tiny_chat import PAIRS
from tiny_rollouts import tiny_model


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("base") / "model")


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "ask.jsonl"
    path.write_text("".join(json.dumps({"prompt": q, "output": a}) + "\n" for q, a in PAIRS), encoding="utf-8")
    return path


SMALL = ("--batch-size", "8", "--group-size", "4", "--max-new-tokens", "6", "--steps", "3", "--lr", "0.01")


def test_from_prompts_to_a_report(base: Path, prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    said = ("--reward", "regex:a", "--reward=-0.1*regex:.....", "--judge", "rule:correct", "--kl", "0.05")
    result = minigpt("align", prompts, "-m", base, "-o", out, "--method", "grpo", *said, *SMALL)
    assert result.status == 0, result.err
    assert result.out == ""
    text = (out / "report.md").read_text(encoding="utf-8")
    for part in (
        "| method | grpo |",
        "rule:correct",
        "## Before and after",
        "Two cats" if "Two cats" in text else "Say",
    ):
        assert part in text
    assert (out / "report.svg").read_text(encoding="utf-8").startswith("<svg")
    assert "wins" in result.err
    assert "report.md" in result.err
    record = json.loads((out / "minigpt.json").read_text(encoding="utf-8"))
    assert [win["judge"] for win in record["result"]["wins"]] == ["the reward", "rule:correct"]
    again = minigpt("align", prompts, "-m", base, "-o", out, "--method", "grpo", *said, *SMALL)
    assert again.status == 1
    assert "--overwrite" in again.err


def test_ppo_and_an_adapter(base: Path, prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    small = ("--batch-size", "8", "--max-new-tokens", "6", "--steps", "2")
    result = minigpt(
        "align", prompts, "-m", base, "-o", out, "--method", "ppo", "--reward", "regex:a", "--lora-rank", "2", *small
    )
    assert result.status == 0, result.err
    assert (out / "adapter_model.safetensors").is_file()
    assert "| method | ppo |" in (out / "report.md").read_text(encoding="utf-8")


def test_a_reward_that_fails_is_one_line_and_the_run_goes_on_when_it_is_mended(
    base: Path, prompts: Path, tmp_path: Path
) -> None:
    judge, out = tmp_path / "judge.py", tmp_path / "run"
    body = "def score(rows):\n    return [1.0 if 'a' in row['answer'] else {} for row in rows]\n"
    judge.write_text(body.format("float('nan')"), encoding="utf-8")
    result = minigpt("align", prompts, "-m", base, "-o", out, "--method", "grpo", "--reward", f"{judge}:score", *SMALL)
    assert result.status == 1
    (line,) = [line for line in result.err.splitlines() if "error" in line]
    assert f"reward {judge}:score: it gave nan for answer" in line
    judge.write_text(body.format("0.0"), encoding="utf-8")
    mended = minigpt("align", "-o", out, "--resume")
    assert mended.status == 0, mended.err
    assert (out / "report.md").is_file()


@pytest.mark.parametrize(
    ("said", "problem"),
    [
        (("--method", "grpo"), "no reward; say with --reward"),
        (("--method", "dpo", "--reward", "regex:a"), "--reward is for the model's own answers"),
        (("--kl", "0.1"), "--kl is for the model's own answers"),
        (("--method", "grpo", "--reward", "regex:a", "--beta", "0.1"), "--beta is for preferences"),
        (("--method", "grpo", "--reward", "regex:a", "--group-size", "1"), "group_size is 1"),
        (("--method", "grpo", "--reward", "nice"), "of no kind that is known"),
        (("--method", "ppo", "--reward", "model:nowhere", "--max-new-tokens", "6"), "nowhere"),
    ],
)
def test_what_does_not_go_together(
    base: Path, prompts: Path, tmp_path: Path, said: tuple[str, ...], problem: str
) -> None:
    result = minigpt("align", prompts, "-m", base, "-o", tmp_path / "run", *said)
    assert result.status in (1, 2)
    assert problem in result.err
    assert not (tmp_path / "run" / "minigpt.json").exists()
