"""`minigpt eval --task`: its tables, its JSON, and what does not go together."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from commands import CPU, error_of, minigpt
from parrot import make_parrot_folder
from test_evaluation_tasks import ARC, BLIMP, LAMBADA
from tiny_folder import make_folder

from minigpt.checkpoint.folder import load
from minigpt.evaluation.tasks import run_task

SAYS = "Alice by"
LONG = "coordinate_structure_constraint_complex_left_branch"  # the longest name in BLiMP
INSTRUCTIONS = [
    {"instruction": "Say it.", "input": "now\x1b", "output": SAYS, "kind": "good"},
    {"instruction": "Say no.", "input": "", "output": "no\nno", "kind": "bad"},
    {"instruction": "Say it.", "input": "", "output": f"{SAYS} ", "kind": "bad"},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def parrot(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_parrot_folder(tmp_path_factory.mktemp("parrot"), SAYS)


def write(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_an_archive_as_a_table_of_eighty_columns_and_as_json(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "BLiMP.zip"
    with zipfile.ZipFile(path, "w") as archive:
        for name in ("wh_island", LONG):
            archive.writestr(f"data/{name}.jsonl", "".join(json.dumps(row) + "\n" for row in BLIMP))
    lines = minigpt("eval", "--task", "blimp", path, "-m", folder, *CPU).out.splitlines()
    assert [line.split()[0] for line in lines[1:]] == [LONG, "wh_island", "mean"]
    assert {len(line) for line in lines} == {max(map(len, lines))} != {0}
    assert max(map(len, lines)) <= 80
    (found,) = minigpt("eval", "--task", "blimp", path, "-m", folder, *CPU, "--json").objects
    loaded = load(folder)
    first, _ = run_task(loaded.model, loaded.tokenizer, "blimp", path)
    assert first.right_per_byte is not None
    assert found["files"][0] == {
        "name": LONG, "rows": 3, "accuracy": first.right.value, "interval": list(first.right.interval),
        "accuracy_per_byte": first.right_per_byte.value, "interval_per_byte": list(first.right_per_byte.interval),
        "chance": 0.5,
    }  # fmt: skip
    assert (found["task"], found["rows"], found["file"], found["model"]) == ("blimp", 6, str(path), str(folder))
    assert lines[1].split()[1:] == [
        f"{100 * first.right.value:.1f}",
        "–".join(f"{100 * end:.1f}" for end in first.right.interval),
        f"{100 * first.right_per_byte.value:.1f}",
    ]


@pytest.mark.parametrize(
    ("task", "rows", "title"),
    [
        ("arc", ARC, "rows  right  95 % range  per byte  95 % range  chance"),
        ("piqa", ARC, "rows  right  95 % range  per byte  95 % range  chance"),
        ("lambada", LAMBADA, "rows  right  95 % range  perplexity"),
    ],
)
def test_one_file_is_one_line(folder: Path, tmp_path: Path, task: str, rows: list[dict[str, Any]], title: str) -> None:
    path = write(tmp_path / "rows.jsonl", rows)
    first, line = minigpt("eval", "--task", task, path, "-m", folder, *CPU).out.splitlines()
    assert " ".join(first.split()) == " ".join(title.split())
    assert line.split()[:2] == ["rows", str(len(rows))]
    limited = minigpt("eval", "--task", task, path, "-m", folder, *CPU, "--limit", 1).out.splitlines()
    assert limited[1].split()[:2] == ["rows", "1"]
    (found,) = minigpt("eval", "--task", task, path, "-m", folder, *CPU, "--json").objects
    assert found["rows"] == len(rows)
    assert found["interval"][0] <= found["accuracy"] <= found["interval"][1]
    assert ("perplexity" in found) is (task == "lambada")


def test_rows_that_were_cut_are_said(folder: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", ARC)
    result = minigpt("eval", "--task", "arc", path, "-m", folder, *CPU)
    assert "warning: 3 of 3 rows are longer than the context of 16 tokens; the end of each is kept" in result.err


def test_instructions_as_a_table_with_examples_and_as_json(parrot: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "tasks.jsonl", INSTRUCTIONS)
    out = minigpt("eval", "--task", "instructions", path, "-m", parrot, *CPU, "--show", 2).out
    assert "\x1b" not in out, "what a model or a file says is no command to the terminal"
    table, *examples = out.split("\n\n")
    assert [line.split()[:3] for line in table.splitlines()[1:]] == [
        ["bad", "2", "50.0"], ["good", "1", "100.0"], ["all", "3", "66.7"],
    ]  # fmt: skip
    assert table.splitlines()[3].split()[-2:] == ["100.0", "66.7"], "all ended; one answer to all gets two of three"
    assert [example.splitlines()[0] for example in examples] == ["good: right", "bad: wrong"]
    assert examples[1].splitlines()[1:] == [
        "  asked      Say no.", f"  answered   {SAYS}", "  expected   no↵no",
    ]  # fmt: skip
    (found,) = minigpt("eval", "--task", "instructions", path, "-m", parrot, *CPU, "--json", "--show", 9).objects
    assert found["accuracy"] == pytest.approx(2 / 3)
    assert found["constant"] == pytest.approx(2 / 3)
    assert found["constant_answer"] == SAYS
    assert [kind["kind"] for kind in found["kinds"]] == ["bad", "good"]
    assert [example["right"] for example in found["examples"]] == [True, False, True]
    (found,) = minigpt("eval", "--task", "instructions", path, "-m", parrot, *CPU, "--json", "--limit", 1).objects
    assert (found["rows"], found["ended"]) == (1, 1.0)
    assert "examples" not in found


def test_what_does_not_go_together_is_a_usage_error(folder: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", ARC)
    model = ("-m", folder)
    for arguments, said in (
        ((path, "--limit", 3), "--limit and --show are for --task"),
        ((path, "--show", 3), "--limit and --show are for --task"),
        (("--task", "arc", path, "--limit-tokens", 3), "with --task there is --limit"),
        (("--task", "arc", path, "--field", "body"), "with --task there is --limit"),
        (("--task", "arc", path, "--separator", "x"), "with --task there is --limit"),
        (("--task", "arc", path, "--show", 3), "--show is for --task instructions"),
        (("--task", "arc"), "--task arc takes one file"),
        (("--task", "arc", "-"), "--task arc takes one file"),
        (("--task", "arc", path, path), "--task arc takes one file"),
        (("--task", "arcs", path), "'arcs'"),
        (("--task", "arc", path, "--limit", 0), "'--limit'"),
    ):
        assert said in error_of(minigpt("eval", *arguments, *model), 2)


def test_what_is_wrong_with_rows_is_said(folder: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", [*BLIMP, {"sentence_good": "a"}])
    assert "rows.jsonl:4: no field" in error_of(minigpt("eval", "--task", "blimp", path, "-m", folder, *CPU))
    assert "no such file" in error_of(minigpt("eval", "--task", "blimp", tmp_path / "x.zip", "-m", folder, *CPU))
    assert "rows.jsonl:1: no field" in error_of(minigpt("eval", "--task", "instructions", path, "-m", folder, *CPU))
