"""Several processes: the same numbers as one, one writer, one decision, and what happens when one of them is gone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import TINY, error_of, minigpt
from tiny_run import make_trainer, metrics, resumed, run, state, steps_of
from two_ranks import CASES, OPTIONS
from two_ranks import STEPS as SIX

from minigpt.checkpoint.folder import load, load_weights
from minigpt.training.distributed import ALONE, cut_like, joined, whole_tensor
from minigpt.training.run_folder import RunFolder
from minigpt.training.trainer import Evaluated, StepDone

WORDS = "the cat sat on a mat and saw one red bird in every old tree by night while rain fell"
TEXT = "".join(f"{WORDS[n % 40 :]} {n}, {WORDS[: n * 7 % 50]}.\n" for n in range(120))
HERE = Path(__file__).parent
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parent)}


def outcome(*command: object, **more: Any) -> tuple[int, str]:
    """Exit status and stderr of a command that starts several processes."""
    done = subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, encoding="utf-8", check=False, timeout=300,
        stdin=subprocess.DEVNULL, env=ENVIRONMENT, **more,
    )  # fmt: skip
    assert done.stdout == "", "nothing is a result"
    return done.returncode, done.stderr


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """What two processes said of all that they did together."""
    folder = tmp_path_factory.mktemp("two")
    status, said = outcome(*TORCHRUN, "--nproc-per-node=2", HERE / "two_ranks.py", folder)
    assert status == 0, said
    return folder, [json.loads((folder / f"rank{rank}.json").read_text(encoding="utf-8")) for rank in (0, 1)]


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_lose_as_much_as_one_process(
    two: tuple[Path, list[dict[str, Any]]], tmp_path: Path, name: str
) -> None:
    case = CASES[name]
    events = run(make_trainer(tmp_path, case.config, case.model))
    close = 1e-5 if case.config.compute_dtype == "float32" else 2e-3
    for told in two[1]:
        found = told["cases"][name]
        assert found["losses"] == pytest.approx([event.loss for event in steps_of(events, StepDone)], rel=close)
        assert found["scores"] == pytest.approx([event.score.value for event in steps_of(events, Evaluated)], rel=close)
        assert found["warnings"] == []


@pytest.mark.parametrize("name", CASES)
def test_the_files_of_several_ranks_are_those_of_one(
    two: tuple[Path, list[dict[str, Any]]], tmp_path: Path, name: str
) -> None:
    case, folder = CASES[name], two[0] / name
    run(make_trainer(tmp_path, case.config, case.model))
    found, expected = state(folder), state(tmp_path)
    assert found[0].keys() == expected[0].keys()
    assert {name: tensor.shape for name, tensor in found[0].items()} == {n: t.shape for n, t in expected[0].items()}
    assert found[1]["environment"].pop("ranks") == 2
    assert expected[1]["environment"].pop("ranks") == 1
    assert [row["step"] for row in metrics(folder)] == [row["step"] for row in metrics(tmp_path)], "written once"
    best = load_weights(folder, case.model).state_dict()
    close = 1e-4 if case.config.compute_dtype == "float32" else 0.05
    for weight, other in load_weights(tmp_path, case.model).state_dict().items():
        assert (best[weight] - other).abs().max() < close, weight


@pytest.mark.parametrize("shard", [False, True])
def test_a_run_of_two_ranks_is_continued_by_one(
    two: tuple[Path, list[dict[str, Any]]], tmp_path: Path, shard: bool
) -> None:
    folder, told = two
    name = f"begun by two, {shard}"
    assert [one["handed"][name]["step"] for one in told] == [4, 4], "a signal to one of them stops both"
    rest = steps_of(run(resumed(folder / name, SIX, moved=True)), StepDone)
    whole = steps_of(run(make_trainer(tmp_path, SIX)), StepDone)
    assert [event.step for event in rest] == [5, 6]
    assert [event.loss for event in rest] == pytest.approx([event.loss for event in whole[4:]], rel=1e-5)
    assert [row["step"] for row in metrics(folder / name)] == [row["step"] for row in metrics(tmp_path)]


@pytest.mark.parametrize("shard", [False, True])
def test_a_run_of_one_process_is_continued_by_two(
    two: tuple[Path, list[dict[str, Any]]], tmp_path: Path, shard: bool
) -> None:
    whole = steps_of(run(make_trainer(tmp_path, SIX)), StepDone)
    for told in two[1]:
        losses = told["handed"][f"begun by one, {shard}"]["losses"]
        assert losses == pytest.approx([event.loss for event in whole[4:]], rel=1e-5)


def test_memory_short_on_one_rank_makes_all_take_less(two: tuple[Path, list[dict[str, Any]]], tmp_path: Path) -> None:
    first, second = (told["troubles"]["memory"] for told in two[1])
    assert first == second
    assert first["warnings"] == [
        "out of memory at a micro-batch of 2; went on with 1 (same effective batch)",
    ]
    whole = steps_of(run(make_trainer(tmp_path, SIX)), StepDone)
    assert first["losses"] == pytest.approx([event.loss for event in whole], rel=1e-5)


def test_a_compiler_missing_on_one_rank_is_left_out_by_all(two: tuple[Path, list[dict[str, Any]]]) -> None:
    first, second = (told["troubles"]["compiler"] for told in two[1])
    assert first["warnings"] == ["torch.compile failed (on another rank); went on without it"]
    assert second["warnings"] == ["torch.compile failed (no C compiler); went on without it"]
    assert first["losses"] == second["losses"]
    assert first["losses"] == pytest.approx(two[1][0]["cases"]["replicas"]["losses"], rel=1e-5)


def test_each_rank_has_a_random_stream_of_its_own(two: tuple[Path, list[dict[str, Any]]]) -> None:
    first, second = (told["dropout"] for told in two[1])
    assert first["own"]["losses"] == first["own"]["again"] == second["own"]["others"]
    assert second["own"]["losses"] == second["own"]["again"] != first["own"]["losses"]


def test_with_dropout_several_ranks_resume_exactly(two: tuple[Path, list[dict[str, Any]]]) -> None:
    for told in two[1]:
        assert told["dropout"]["whole"]["losses"][2:] == told["dropout"]["parts"]["losses"]
    one, other = (state(two[0] / f"dropout {name}")[0] for name in ("whole", "parts"))
    weights = [name for name in one if not name.startswith("random.")]
    assert all(torch.equal(one[name], other[name]) for name in weights)


def test_a_single_process_is_wrapped_in_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with joined(None, shard=False) as ranks:
        assert ranks is ALONE
    trainer = make_trainer(tmp_path)
    assert trainer.compute(lambda model, number: (model is trainer.model, number), 3) == (True, 3)
    parts = list(ALONE.passes(trainer.batches.at(0), 3))
    assert [(len(part.tokens), times) for part, times in parts] == [(3, 1.0), (1, 1.0)]
    tensor = torch.ones(2)
    assert ALONE.mean(tensor) is whole_tensor(tensor) is cut_like(tensor, tensor) is tensor
    assert ALONE.agree(True, False) == (True, False)


# The command line


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "cats.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


def losses(folder: Path) -> list[float]:
    return [row["loss"] for row in RunFolder(folder).read_metrics() if "loss" in row]


def test_one_process_of_a_command_talks_and_writes(source: Path, tmp_path: Path) -> None:
    folder = tmp_path / "two"
    launch = (*TORCHRUN, "--nproc-per-node=2", "-m", "minigpt", "train", source)
    status, said = outcome(*launch, *OPTIONS, "--shard", "-o", folder)
    assert status == 0, said
    facts = ("corpus  ", "tokenizer  ", "processes  2, the model shared out", "step 6/6  loss", "done  ", "next  ")
    assert [f"\n{said}".count(f"\n{fact}") for fact in facts] == [1] * len(facts), said
    assert minigpt("train", source, *OPTIONS, "-o", tmp_path / "one").status == 0
    assert losses(folder) == pytest.approx(losses(tmp_path / "one"), rel=1e-5)
    load(folder)
    rows = [row for row in RunFolder(folder).read_metrics() if "loss" in row]
    assert all(0 <= row["waited"] <= 1 for row in rows)


@pytest.mark.slow
def test_gpus_is_the_short_form(source: Path, tmp_path: Path) -> None:
    command = (sys.executable, "-m", "minigpt", "train", source, *OPTIONS)
    status, said = outcome(*command, "--gpus", "2", "-o", tmp_path / "two")
    assert status == 0, said
    assert "warning" not in said.lower()
    assert "\nprocesses  2, a copy of the model on each\n" in said
    assert minigpt("train", source, *OPTIONS, "-o", tmp_path / "one").status == 0
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)


def ranks_environment(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    for name, value in {"WORLD_SIZE": 2, "RANK": rank, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))


@pytest.mark.parametrize("command", [("generate", "Hello"), ("eval",), ("info",), ("tokenizer", "show", "a")])
def test_other_commands_run_in_one_process(monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]) -> None:
    ranks_environment(monkeypatch, 0)
    message = error_of(minigpt(*command), 2)
    assert message == f"rank 0: {command[0]} runs in one process; start it without torchrun"
    ranks_environment(monkeypatch, 1)
    result = minigpt(*command)
    assert (result.status, result.err) == (2, ""), "said once a machine"


def test_mistakes_with_several_processes_are_one_line(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = ("train", source, *OPTIONS, "-o", tmp_path / "run")
    assert error_of(minigpt(*train, "--shard"), 2).startswith("--shard shares a model out over several processes; ")
    assert error_of(minigpt(*train, "--shard", "--gpus", "1"), 2).startswith("--shard shares a model out over")
    assert "greater than or equal to 1" in error_of(minigpt(*train, "--gpus", "0"), 2)
    there = torch.cuda.device_count()
    message = error_of(minigpt("train", source, "--gpus", there + 2, "-o", tmp_path / "run"))
    assert message.startswith(f"--gpus {there + 2}: this machine has ")
    assert error_of(minigpt("train", source, "--gpus", "2", "--device", "cuda:1")).startswith("--device cuda:1 is one")
    ranks_environment(monkeypatch, 0)
    assert error_of(minigpt(*train, "--gpus", "2"), 2).endswith("that torchrun has started already; leave it out")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_an_error_of_the_first_rank_is_said_once_and_ends_all(source: Path, tmp_path: Path) -> None:
    command = (sys.executable, "-m", "minigpt", "train", *OPTIONS, "--gpus", "2")
    status, said = outcome(*command, "nothing.txt", "-o", tmp_path / "run", cwd=tmp_path)
    assert status == 1
    assert said.startswith("error: rank 0: ")
    assert len(said.splitlines()) == 1
    status, said = outcome(*command, source, "--lr", "9.9", "--set", "train.max_grad_norm=inf", "--set",
                           "train.schedule=linear", "--optimizer", "adamw", "-o", tmp_path / "run")  # fmt: skip
    if status:  # the loss became NaN on all of them
        assert [line for line in said.splitlines() if line.startswith("error: ")] == [said.splitlines()[-1]]


def started(folder: Path, source: Path, *options: object) -> subprocess.Popen[str]:
    """Begin a run of two ranks that torchrun starts again, if one is lost; some ten seconds."""
    command = (*TORCHRUN, "--nproc-per-node=2", "--max-restarts=2", *options, "-m", "minigpt", "train", source)
    command += (*TINY, "--steps", "300", "--set", "train.eval_every=20", "--set", "model.dropout=0.1", "-o", folder)
    words = [str(word) for word in command]
    return subprocess.Popen(words, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT)


def workers(parent: int) -> list[int]:
    """The processes that torchrun has started, in the order of their ranks."""
    found = Path(f"/proc/{parent}/task/{parent}/children").read_text(encoding="utf-8").split()
    ranks = {}
    for child in map(int, found):
        words = dict(
            pair.split("=", 1) for pair in Path(f"/proc/{child}/environ").read_text().split("\0") if "=" in pair
        )
        if "RANK" in words:
            ranks[int(words["RANK"])] = child
    return [ranks[rank] for rank in sorted(ranks)]


def wait_for_step(folder: Path, step: int, seconds: float = 120.0) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        rows = RunFolder(folder).read_metrics() if folder.is_dir() else []
        if rows and rows[-1].get("step", 0) >= step:
            return
        time.sleep(0.02)
    pytest.fail(f"step {step} was not reached")


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="finds processes in /proc")
@pytest.mark.parametrize("killed", [0, 1])
def test_a_killed_rank_is_started_again_and_the_run_ends_the_same(source: Path, tmp_path: Path, killed: int) -> None:
    whole = started(tmp_path / "whole", source)
    said = whole.communicate(timeout=240)[1]
    assert whole.returncode == 0, said
    child = started(tmp_path / "parts", source)
    wait_for_step(tmp_path / "parts", 70)
    os.kill(workers(child.pid)[killed], signal.SIGKILL)
    said = child.communicate(timeout=240)[1]
    assert child.returncode == 0, said
    assert "\nresume     step " in said
    assert "Traceback (most recent call last):\n  File" not in said.split("\nresume     step ")[0]
    one, other = (state(tmp_path / name)[0] for name in ("whole", "parts"))
    assert all(torch.equal(one[name], other[name]) for name in one if not name.startswith("random."))
    assert losses(tmp_path / "whole") == losses(tmp_path / "parts")


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="finds processes in /proc")
def test_a_signal_stops_all_ranks_after_the_same_step_and_one_goes_on(source: Path, tmp_path: Path) -> None:
    child = started(tmp_path / "run", source, "--shutdown-timeout=60")
    wait_for_step(tmp_path / "run", 50)
    child.send_signal(signal.SIGTERM)
    said = child.communicate(timeout=120)[1]
    assert child.returncode != 0
    assert "\nstopped at step " in said
    step = state(tmp_path / "run")[1]["progress"]["step"]
    assert f"stopped at step {step};" in said
    assert len(losses(tmp_path / "run")) == step
    result = minigpt("train", "-o", tmp_path / "run", "--resume", "--device", "cpu")
    assert result.status == 0, result.err
    assert "warning: ranks was 2 when this run was saved and is 1 now; it will not be bit-equal" in result.err
    assert len(losses(tmp_path / "run")) == 300
