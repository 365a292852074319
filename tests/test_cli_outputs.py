"""A model that is written beside its place and moved there: what is left at every step that can fail."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import contents
from tiny_folder import make_folder

from minigpt.checkpoint.folder import load, save_weights
from minigpt.cli.outputs import check_free, staged_folder
from minigpt.errors import ConfigError, TrainingError


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An older model in one file, and a newer one of another kind in several."""
    folder = tmp_path_factory.mktemp("models")
    make_folder(folder / "older", "qwen3", {"which": "older"})
    newer = make_folder(folder / "newer", "llama", {"which": "newer"})
    save_weights(newer, load(newer).model, max_shard_bytes=20_000)
    return folder


@pytest.fixture
def place(made: Path, tmp_path: Path) -> Path:
    shutil.copytree(made / "older", tmp_path / "place")
    for name in ("metrics.jsonl", "notes.txt", "model-00009-of-00009.safetensors"):
        (tmp_path / "place" / name).write_text("x", encoding="utf-8")
    return tmp_path / "place"


@torch.no_grad()
def logits(folder: Path) -> torch.Tensor:
    return load(folder).model(torch.arange(16)[None])


def write(made: Path, place: Path) -> None:
    with staged_folder(place) as stage:
        shutil.copytree(made / "newer", stage, dirs_exist_ok=True)


def fail_at(monkeypatch: pytest.MonkeyPatch, name: str, call: int) -> list[tuple[Any, ...]]:
    """Let a function of `os` fail at its nth call; return the arguments of all calls."""
    real, calls = getattr(os, name), []

    def failing(*arguments: Any, **options: Any) -> Any:
        calls.append(arguments)
        if len(calls) == call:
            raise OSError(28, "No space left on device")
        return real(*arguments, **options)

    monkeypatch.setattr(os, name, failing)
    return calls


def test_a_newer_model_takes_the_place_of_the_older_one(made: Path, place: Path) -> None:
    write(made, place)
    assert contents(place) == contents(made / "newer") | {"notes.txt": b"x"}
    assert [path.name for path in place.parent.iterdir()] == ["place"]


@pytest.mark.parametrize("call", range(1, 9))
def test_no_model_is_lost_when_a_file_cannot_be_moved(
    made: Path, place: Path, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    before = contents(place)
    calls = fail_at(monkeypatch, "replace", call)
    with pytest.raises(TrainingError) as raised:
        write(made, place)
    monkeypatch.undo()
    assert len(calls) == call
    stage = place.parent / ".place.waiting"
    assert [path.name for path in sorted(place.parent.iterdir())] == [stage.name, "place"]
    assert str(raised.value) == (
        f"cannot write {place}: No space left on device; move what is left in {stage} there, or write elsewhere with -o"
    )
    new, now = contents(made / "newer"), contents(place)
    moved = new.keys() - contents(stage).keys()
    assert len(moved) == call - 1
    assert now == before | {name: new[name] for name in moved}, "nothing of the older model has been removed"
    for file in stage.iterdir():
        os.replace(file, place / file.name)
    assert new.items() <= contents(place).items()
    (place / "model.safetensors").unlink()
    assert torch.equal(logits(place), logits(made / "newer"))


def test_trying_again_loses_nothing_that_was_kept(made: Path, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second time fails before it has a model, the third succeeds."""
    fail_at(monkeypatch, "replace", 3)
    with pytest.raises(TrainingError, match="move what is left in"):
        write(made, place)
    monkeypatch.undo()
    kept = contents(place.parent)
    assert contents(made / "newer").keys() - contents(place).keys() <= contents(place.parent / ".place.waiting").keys()
    for failure in (KeyboardInterrupt, OSError(28, "No space left on device")):
        with pytest.raises((KeyboardInterrupt, TrainingError)), staged_folder(place):
            raise failure
        assert contents(place.parent) == kept
    write(made, place)
    assert contents(place) == contents(made / "newer") | {"notes.txt": b"x"}
    assert [path.name for path in place.parent.iterdir()] == ["place"]


def test_what_fails_before_the_first_file_is_moved_changes_nothing(
    made: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = contents(place.parent)
    with pytest.raises(TrainingError, match=r"write elsewhere with -o$"), staged_folder(place):
        raise OSError(28, "No space left on device")
    with pytest.raises(KeyboardInterrupt), staged_folder(place):
        raise KeyboardInterrupt
    assert contents(place.parent) == before
    assert [path.name for path in place.parent.iterdir()] == ["place"]
    file = place.parent / "file"
    file.touch()
    with pytest.raises(TrainingError, match=r"cannot write .*file: File exists"):
        write(made, file)
    assert sorted(path.name for path in place.parent.iterdir()) == ["file", "place"]


def test_an_older_model_that_cannot_be_removed_is_named(
    made: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_at(monkeypatch, "unlink", 1)
    with pytest.raises(TrainingError, match=r"^cannot remove the older model from .*place: No space left on device; "):
        write(made, place)
    assert contents(made / "newer").items() <= contents(place).items()
    assert [path.name for path in place.parent.iterdir()] == ["place"]


def test_shards_alone_are_a_model_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    check_free(tmp_path, overwrite=False)
    (tmp_path / "model-00001-of-00002.safetensors").touch()
    with pytest.raises(ConfigError, match=r"holds model-00001-of-00002\.safetensors already"):
        check_free(tmp_path, overwrite=False)
    check_free(tmp_path, overwrite=True)
