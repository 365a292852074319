"""Runs on a model's own answers from files: what is read, kept, refused, resumed, and what the report says."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from test_training_finetune import Facts
from tiny_chat import PAIRS
from tiny_rollouts import tiny_model
from tiny_run import assert_same, run, steps_of

from minigpt.alignment import online
from minigpt.alignment.held_out import Standing, wins
from minigpt.alignment.online import PolicyRun
from minigpt.alignment.policy import PolicyConfig
from minigpt.alignment.policy_plan import PolicyRequest
from minigpt.alignment.report import outcome, report, result
from minigpt.checkpoint.base import holds_adapter
from minigpt.checkpoint.folder import load
from minigpt.config import LoraConfig
from minigpt.errors import ConfigError, DataError, MinigptError, TrainingError
from minigpt.evaluation.shares import Share
from minigpt.training import runs
from minigpt.training.chat_data import ChatRequest
from minigpt.training.run_folder import RunFolder
from minigpt.training.trainer import Evaluated, StepDone

CPU = torch.device("cpu")
SETTINGS = {"group_size": 4, "max_new_tokens": 6, "kl": 0.05}
REWARD = "regex:a"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("base") / "model")


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "ask.jsonl"
    rows = [{"instruction": question, "output": answer, "n": n} for n, (question, answer) in enumerate(PAIRS)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def ask(base: Path, **more: Any) -> PolicyRequest:
    policy = SETTINGS | more.pop("policy", {"method": "grpo"})
    train = {"batch_size": 8, "learning_rate": 0.01} | more.pop("train", {})
    return PolicyRequest(
        base=str(base), policy=policy, train=train, **{"steps": 4, "rewards": (REWARD,), "seed": 3, **more}
    )


def prepare(folder: Path, base: Path, prompts: Path, data: dict[str, Any] | None = None, **more: Any) -> PolicyRun:
    chat = ChatRequest(sources=(str(prompts),), named=prompts.name, **(data or {"val_fraction": 0.25}))
    return online.prepare(chat, ask(base, **more), RunFolder(folder), CPU, "float32", Facts())


def resume(folder: Path) -> PolicyRun:
    place = RunFolder(folder)
    record = online.recorded(place)
    assert record is not None
    state = runs.saved_state(place, record)
    assert state is not None
    return online.resume(place, record, state, CPU, Facts())


def test_a_run_leaves_a_model_that_opens_and_figures_of_every_step(base: Path, prompts: Path, tmp_path: Path) -> None:
    made = prepare(tmp_path, base, prompts)
    events = run(made.trainer)
    assert len(steps_of(events, StepDone)) == 4
    assert isinstance(steps_of(events, Evaluated)[0].score, Standing)
    assert load(tmp_path).model.config == load(base).model.config
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    names = {"reward", "reward_spread", "kl", "entropy", "answer_tokens", "ended", "clip_fraction", "equal_groups"}
    assert all(names <= row.keys() for row in rows if "loss" in row)
    assert all({"held_out_reward", "win_rate", "held_out_kl"} <= row.keys() for row in rows if "loss" not in row)
    record = online.recorded(RunFolder(tmp_path))
    assert record is not None
    assert (record["prompts"]["prompts"], record["prompts"]["held_out"]) == (24, 6)


@pytest.mark.parametrize("policy", [{"method": "grpo", "updates": 3}, {"method": "ppo", "group_size": 1}])
@pytest.mark.parametrize("lora", [None, LoraConfig(rank=2)])
def test_a_run_of_files_resumed_equals_the_uninterrupted_one(
    base: Path, prompts: Path, tmp_path: Path, policy: dict[str, Any], lora: LoraConfig | None
) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run(prepare(whole, base, prompts, policy=policy, lora=lora).trainer)
    run(prepare(parts, base, prompts, policy=policy, lora=lora).trainer, stop_at=2)
    torch.manual_seed(99)
    run(resume(parts).trainer)
    if lora is None:
        assert_same(whole, parts)
    else:
        assert holds_adapter(whole)
        for name in ("adapter_model.safetensors",):
            assert (whole / name).read_bytes() == (parts / name).read_bytes()
    weights = [load(folder).model.state_dict() for folder in (whole, base)]
    assert weights[0].keys() == weights[1].keys(), "a value head is nobody's business"


def test_a_run_is_not_resumed_with_other_prompts_or_settings(base: Path, prompts: Path, tmp_path: Path) -> None:
    mine = tmp_path / "ask.jsonl"
    mine.write_bytes(prompts.read_bytes())
    folder = tmp_path / "run"
    run(prepare(folder, base, mine).trainer, stop_at=1)
    record = online.recorded(RunFolder(folder))
    assert record is not None
    online.check_same(record, RunFolder(folder), None, {"group_size": 4, "kl": 0.05, "learning_rate": 0.01})
    for said, problem in (({"group_size": 8}, "group_size 4, not 8"), ({"kl": 0.1}, "kl 0.05, not 0.1")):
        with pytest.raises(ConfigError, match=problem):
            online.check_same(record, RunFolder(folder), None, said)
    mine.write_text(mine.read_text(encoding="utf-8").replace("Two owls", "Two cats"), encoding="utf-8")
    with pytest.raises(DataError, match=r"ask\.jsonl has changed since this run began"):
        resume(folder)


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        ({"rewards": ()}, "no reward; say with --reward"),
        ({"rewards": ("nice",)}, "of no kind that is known"),
        ({"judges": ("rule:",)}, "of no kind that is known"),
        ({"timeout": 0.0}, "reward_timeout is 0.0"),
        ({"train": {"batch_size": 10}}, "batch_size 10 is no multiple of group_size 4"),
        ({"policy": {"method": "grpo", "group_size": 1}}, "group_size is 1"),
        ({"policy": {"method": "dpo"}}, "method 'dpo' is unknown"),
        ({"policy": {"method": "grpo", "normalisation": "none"}}, "normalisation 'none' is unknown"),
        ({"policy": {"method": "grpo", "temperature": 0.0}}, "temperature is 0.0"),
        ({"policy": {"method": "grpo", "kl": math.nan}}, "kl is nan"),
    ],
)
def test_what_cannot_be_asked_for(base: Path, more: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        ask(base, **more)


def test_prompts_that_leave_no_room_are_left_out_or_refused(base: Path, prompts: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no prompt leaves room for 60 tokens of an answer in a context of 64"):
        prepare(tmp_path, base, prompts, policy={"method": "grpo", "max_new_tokens": 60})
    assert not (tmp_path / "minigpt.json").exists()


def test_a_reward_that_fails_ends_the_run_and_it_goes_on_when_mended(base: Path, prompts: Path, tmp_path: Path) -> None:
    judge, folder = tmp_path / "judge.py", tmp_path / "run"
    broken = (
        "calls = []\n"
        "def score(rows):\n"
        "    calls.append(0)\n"
        "    return [float('nan') if len(calls) > 5 else 1.0 * ('a' in row['answer']) for row in rows]\n"
    )
    judge.write_text(broken, encoding="utf-8")
    reward = f"{judge}:score"
    made = prepare(folder, base, prompts, rewards=(reward,), steps=8)
    with pytest.raises(TrainingError, match=r"judge.py:score: it gave nan for answer 1 of [68]; ") as error:
        run(made.trainer)
    assert "\n" not in str(error.value)
    made.close()
    step = made.trainer.progress.step
    assert 0 < step < 8
    saved = (RunFolder(folder).load_state() or ({}, {}))[1]["progress"]["step"]
    assert saved in (step, step - 1), "a reward that fails over held-out prompts ends the step before it is saved"
    judge.write_text(broken.replace("> 5", "> 500"), encoding="utf-8")
    again = resume(folder)
    assert again.trainer.progress.step == saved
    run(again.trainer)
    again.close()
    assert again.trainer.progress.step == 8


def test_a_model_too_far_from_the_start_is_not_kept(base: Path, prompts: Path, tmp_path: Path) -> None:
    policy = {"method": "grpo", "max_kl": 1e-6, "kl": 0.0}
    run(prepare(tmp_path, base, prompts, policy=policy, train={"learning_rate": 0.05}).trainer)
    kept, start = load(tmp_path).model.state_dict(), load(base).model.state_dict()
    assert all(torch.equal(kept[name], start[name]) for name in kept)
    standing = Standing(reward=0.9, wins=Share(0.7, 10), kl=0.2, answer_tokens=3.0, ended=1.0, max_kl=0.1)
    assert standing.value == math.inf


def test_minutes_become_steps_by_what_drawing_takes(base: Path, prompts: Path, tmp_path: Path) -> None:
    made = prepare(tmp_path, base, prompts, steps=None, minutes=0.5)
    assert made.plan.seconds == 30
    assert 10 < made.plan.train.total_steps < 100_000


# What is compared


def test_wins_count_equal_worth_half() -> None:
    found = wins([1.0, 0.0, 0.5, 0.5], [0.0, 1.0, 0.5, 0.0])
    assert (found.value, found.count) == (0.625, 4)


def test_the_outcome_compares_with_the_start_by_every_judge(base: Path, prompts: Path, tmp_path: Path) -> None:
    made = prepare(tmp_path, base, prompts, judges=("regex:.",), train={"learning_rate": 0.05}, steps=6)
    run(made.trainer)
    model = made.trainer.model
    found = outcome(model, made.held_out, made.judges)
    made.close()
    assert found.prompts == 6
    assert [win.judge for win in found.wins] == ["the reward", "regex:."]
    with made.held_out.reference() as start:
        before = [one.text for one in made.held_out.answers(start)]
    after = [one.text for one in made.held_out.answers(model)]
    worth = [[float("a" in text) for text in texts] for texts in (before, after)]
    assert found.wins[0].share.value == wins(worth[1], worth[0]).value
    assert (found.wins[0].before, found.wins[0].after) == (sum(worth[0]) / 6, sum(worth[1]) / 6)
    assert [one.before for one in found.examples] == before
    assert [one.after for one in found.examples] == after
    assert result(found)["wins"][0]["won"] == found.wins[0].share.value


def test_the_report_shows_answers_side_by_side_and_nothing_in_them_is_markdown(
    base: Path, prompts: Path, tmp_path: Path
) -> None:
    made = prepare(tmp_path, base, prompts)
    found = outcome(made.trainer.model, made.held_out, [])
    made.close()
    object.__setattr__(found.examples[0], "after", "# a | b\n<b>*x*</b>")
    text = report("What changed", {"method": "grpo"}, found, ["answers grow"])
    assert "| \\# a \\| b \\<b\\>\\*x\\*\\</b\\> |" in text
    assert "| the reward |" in text
    assert "50.0%" in text, "nothing was trained: every answer is worth the same"
    assert "- answers grow" in text
    assert "(report.svg)" in text


def test_errors_are_of_the_kind_that_people_read() -> None:
    for bad in ({"method": "grpo", "updates": 0}, {"method": "ppo", "clip": 2.0}, {"method": "ppo", "max_kl": -1.0}):
        with pytest.raises(MinigptError):
            PolicyConfig(**bad)
