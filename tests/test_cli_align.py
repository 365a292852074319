"""`minigpt align`, `reward`, `score` and eval of a reward model: what is said, refused and printed."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from commands import CPU, Result, error_of, minigpt
from tiny_chat import make_base
from tiny_pairs import PAIRS, write_marked, write_pairs

from minigpt.alignment.reward_model import load_reward_model
from minigpt.text.chat import Message
from minigpt.training.run_folder import RunFolder

SETTINGS = (*CPU, "--seed", "7", "--batch-size", "4", "--val-fraction", "0.25", "--set", "train.eval_every=3")
STEPS = ("--steps", "6")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_base(tmp_path_factory.mktemp("base") / "tiny")


@pytest.fixture(scope="module")
def judge(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("judge")
    pairs = write_pairs(place / "pairs.jsonl")
    train = ("--set", "train.learning_rate=0.01", "--steps", "40", "--set", "train.warmup_steps=2")
    result = minigpt("reward", pairs, "-m", base, "-o", place / "judge", *SETTINGS, *train)
    assert result.status == 0, result.err
    return place / "judge"


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MINIGPT_MODEL", raising=False)
    monkeypatch.setattr("minigpt.training.finetune.ANSWER_TOKENS", 3)
    write_pairs(Path("pairs.jsonl"))


def align(base: Path, *arguments: object, data: str = "pairs.jsonl") -> Result:
    return minigpt("align", data, "-m", base, *SETTINGS, *STEPS, *arguments)


def record_of(folder: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((Path(folder) / "minigpt.json").read_text(encoding="utf-8"))
    return found


def test_a_run_says_what_it_does_and_leaves_a_model_to_talk_to(base: Path) -> None:
    result = align(base)
    assert result.status == 0, result.err
    assert result.out == ""
    for text in (
        "prompt/chosen/rejected, 24 pairs, 6 held out",
        "log-probabilities of 24 rows",
        "dpo with beta 0.1",
        "pair accuracy",
        "runs/pairs: pair accuracy",
        "health",
        "question",
        "minigpt chat -m runs/pairs",
    ):
        assert text in result.err, text
    rows = RunFolder(Path("runs/pairs")).read_metrics()
    first = next(row for row in rows if "loss" in row)
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert {"accuracy", "margin", "chosen_change", "rejected_change", "drift"} <= set(first)
    assert [row["step"] for row in rows if "held_out_accuracy" in row] == [0, 3, 6]
    record = record_of("runs/pairs")
    assert record["made_by"] == "align"
    assert record["request"]["preference"] == {"method": "dpo"}
    assert 0 <= record["result"]["held_out_accuracy"] <= 1
    assert "aligned with preferences" in Path("runs/pairs/README.md").read_text(encoding="utf-8")
    assert "held-out loss" in Path("runs/pairs/loss.svg").read_text(encoding="utf-8")


def test_it_is_resumed_and_refuses_other_settings(base: Path) -> None:
    assert align(base, "--beta", "0.2").status == 0
    result = minigpt("align", "-o", "runs/pairs", "--resume")
    assert result.status == 0, result.err
    assert "step 6 of 6" in result.err
    error = error_of(minigpt("align", "-o", "runs/pairs", "--resume", "--beta", "0.3"))
    assert "this run was begun with beta 0.2, not 0.3" in error
    error = error_of(minigpt("align", "-o", "runs/pairs", "--resume", "--method", "ipo"))
    assert "this run was begun with method dpo, not ipo" in error
    assert "holds a model already" in error_of(align(base))


def test_answers_with_a_label_are_for_kto(base: Path) -> None:
    write_marked(Path("marked.jsonl"))
    result = align(base, "--method", "kto", data="marked.jsonl")
    assert result.status == 0, result.err
    assert "48 marked answers" in result.err
    assert "24 of them good" in result.err
    assert "kl" in next(row for row in RunFolder(Path("runs/marked")).read_metrics() if "loss" in row)
    assert "chosen" in error_of(align(base, "-o", "other", data="marked.jsonl"))


def test_to_kto_a_pair_is_a_good_and_a_bad_answer(base: Path) -> None:
    result = align(base, "--method", "kto")
    assert result.status == 0, result.err
    assert "48 marked answers" in result.err
    assert "24 of them good" in result.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--margin", "1"), "margin is 1.0, which dpo knows nothing of"),
        (("--beta", "-1"), "beta is -1.0; it must be from"),
        (("--resume",), "holds no run of align to continue"),
        (("--context", "400"), "context is 400, more than the model's 64"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_is_written(
    base: Path, arguments: tuple[str, ...], message: str
) -> None:
    if arguments == ("--resume",):
        error = error_of(minigpt("align", "-o", "none", "--resume"))
    else:
        error = error_of(align(base, *arguments))
    assert message in error
    assert not Path("runs/pairs/minigpt.json").exists()


def test_an_empty_answer_is_named_by_file_and_line(base: Path) -> None:
    write_pairs(Path("pairs.jsonl"), [*PAIRS[:2], ("Say cat", "cat!", " ")])
    assert 'pairs.jsonl:3: field "rejected" is empty' in error_of(align(base))


def test_a_reward_model_is_evaluated_by_pairs(judge: Path) -> None:
    result = minigpt("eval", "pairs.jsonl", "-m", judge, "--json", *CPU[:2])
    assert result.status == 0, result.err
    (found,) = result.objects
    assert found["pairs"] == 24
    assert found["pair_accuracy"] >= 0.75
    assert found["low"] < found["pair_accuracy"] <= found["high"]
    told = minigpt("eval", "pairs.jsonl", "-m", judge)
    assert "pair accuracy" in told.out
    assert f"{found['pair_accuracy']:.1%}" in told.out
    error = error_of(minigpt("eval", "-", "-m", judge), status=2)
    assert "is a reward model, which judges pairs" in error


def test_answers_are_scored_line_by_line(judge: Path) -> None:
    rows = [
        {"prompt": "Say cat", "response": "cat!", "id": 7},
        {"messages": [{"role": "user", "content": "Say cat"}, {"role": "assistant", "content": "cat cat?"}]},
        {"prompt": "Say cat", "text": "cat!", "seed": 1},
        {"messages": [{"role": "user", "content": "Say cat"}], "text": "cat!"},
    ]
    stdin = "".join(json.dumps(row) + "\n" for row in rows).encode("utf-8")
    result = minigpt("score", "-m", judge, "--device", "cpu", "--batch-size", "3", stdin=stdin)
    assert result.status == 0, result.err
    found = result.objects
    assert [{name: value for name, value in row.items() if name != "reward"} for row in found] == rows
    rewards = [row["reward"] for row in found]
    assert rewards[0] == pytest.approx(rewards[2], rel=1e-4)
    assert rewards[0] == pytest.approx(rewards[3], rel=1e-4)
    assert rewards[0] > rewards[1]
    (again,) = load_reward_model(judge).score([(Message("user", "Say cat"), Message("assistant", "cat!"))])
    assert rewards[0] == pytest.approx(again, rel=1e-4)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "stdin:2: no valid JSON"),
        ("[1]", "stdin:2: a list where an object is expected"),
        ('{"prompt": "Say cat"}', "stdin:2: "),
        ('{"messages": [{"role": "user", "content": "Say cat"}]}', "stdin:2: "),
    ],
)
def test_a_bad_line_is_named_and_what_came_before_it_is_scored(judge: Path, line: str, message: str) -> None:
    stdin = (json.dumps({"prompt": "Say cat", "response": "cat!"}) + "\n" + line + "\n").encode("utf-8")
    result = minigpt("score", "-m", judge, stdin=stdin)
    assert message in error_of(result)
    assert len(result.objects) == 1


def test_score_and_eval_want_a_reward_model(base: Path) -> None:
    assert "is no reward model" in error_of(minigpt("score", "-m", base, stdin=b"{}\n"))
