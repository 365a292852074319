"""A run's folder: one run at a time, metrics that can be rewound, and nothing lost."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from minigpt.errors import DataError, ModelFolderError, TrainingError
from minigpt.training.run_folder import RunFolder


def test_a_folder_is_for_one_run_at_a_time(tmp_path: Path) -> None:
    one, other = RunFolder(tmp_path / "run"), RunFolder(tmp_path / "run")
    one.lock()
    with pytest.raises(TrainingError) as raised:
        other.lock()
    assert str(raised.value) == f"{tmp_path / 'run'} is in use by another run; wait for it, or write elsewhere with -o"
    one.unlock()
    other.lock()
    other.unlock()


def test_a_folder_that_was_made_for_nothing_goes(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    for name, written, stays in (("new", False, False), ("new", True, True), ("there", False, True)):
        folder = RunFolder(tmp_path / name)
        folder.lock()
        if written:
            folder.append_metrics({"step": 1})
        folder.unlock()
        assert folder.path.exists() == stays
        folder.lock()
        folder.unlock()


def test_a_place_that_cannot_be_a_folder_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(TrainingError, match=f"^cannot write {path}: .*; write elsewhere with -o$"):
            RunFolder(path).lock()


def test_metrics_are_rewound_and_a_cut_line_goes(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert folder.read_metrics() == []
    rows = [{"step": step, "loss": step / 3} for step in (1, 2, 3)] + [{"step": 3, "bits_per_byte": 0.1 + 0.2}]
    for row in rows:
        folder.append_metrics(row)
    whole = folder.metrics_path.read_bytes()
    folder.append_metrics({"step": 4, "loss": 1.0})
    with folder.metrics_path.open("a", encoding="utf-8") as file:
        file.write('{"step": 5, "lo')
    assert [row["step"] for row in folder.read_metrics()] == [1, 2, 3, 3, 4]
    folder.rewind_metrics(3)
    assert folder.metrics_path.read_bytes() == whole
    folder.append_metrics({"step": 4, "loss": 2.0})
    assert folder.read_metrics() == [*rows, {"step": 4, "loss": 2.0}]
    folder.rewind_metrics(0)
    assert folder.metrics_path.read_bytes() == b""


def test_a_full_disk_under_the_metrics_names_the_last_state(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "gone")
    with pytest.raises(TrainingError, match=r"^cannot write .*metrics.jsonl: .*; the last good state is in .*last$"):
        folder.append_metrics({"step": 1})


def test_state_comes_back_as_it_was(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert folder.load_state() is None
    folder.save_state({"a": torch.arange(3), "b": torch.tensor(0.5)}, {"step": 4, "text": "é"})
    loaded = folder.load_state()
    assert loaded is not None
    tensors, record = loaded
    assert torch.equal(tensors["a"], torch.arange(3))
    assert tensors["b"].item() == 0.5
    assert record == {"step": 4, "text": "é"}


def test_a_damaged_state_is_one_line(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.save_state({"a": torch.arange(300)}, {})
    data = folder.state_path.read_bytes()
    folder.state_path.write_bytes(data[:-9])
    with pytest.raises(ModelFolderError, match=r"state.safetensors is cut short"):
        folder.load_state()
    from safetensors.torch import save_file

    save_file({"a": torch.arange(3)}, folder.state_path)
    with pytest.raises(TrainingError, match=r"holds no state of a run; start again with --overwrite$"):
        folder.load_state()


def test_a_new_run_clears_what_an_old_one_left_and_nothing_else(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert folder.taken() is None
    (tmp_path / "last").mkdir()
    for name in (
        "last/state.safetensors",
        "model.safetensors",
        "metrics.jsonl",
        "loss.svg",
        "minigpt.json",
        "notes.md",
    ):
        (tmp_path / name).write_text("old")
    folder.text_path.write_text("old text")
    folder.incoming_path.write_text("new text")
    assert folder.taken() == "last"
    folder.clear(keep_text=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["minigpt.json", "notes.md", "stdin.txt"]
    assert folder.text_path.read_text() == "new text"
    (tmp_path / "minigpt.json").unlink()
    assert folder.taken() is None, "piped text alone is what a killed run left"
    folder.clear(keep_text=True)
    assert folder.text_path.exists(), "a run that begins again reads it again"
    folder.clear(keep_text=False)
    assert not folder.text_path.exists()


def test_a_model_in_several_files_is_seen_and_leaves_as_a_whole(tmp_path: Path) -> None:
    """An adapter's run writes no weights of a model, so nobody after it would take the shards away."""
    folder = RunFolder(tmp_path)
    for name in ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"):
        (tmp_path / name).touch()
    assert folder.taken() == "model-00001-of-00002.safetensors"
    with pytest.raises(DataError, match="would write over this text"):
        folder.check_sources([tmp_path / "model-00002-of-00002.safetensors"])
    for name in ("model.safetensors.index.json", "chat_template.jinja", "model-1.txt", "mine.safetensors"):
        (tmp_path / name).touch()
    folder.clear(keep_text=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.safetensors", "model-1.txt"]


def test_what_a_killed_run_left_half_read_is_not_taken_for_text(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    part = tmp_path / ".stdin.txt.part"
    part.write_text("half")
    folder.incoming_path.write_text("whole")
    folder.lock(keep_incoming=True)
    folder.unlock()
    assert not part.exists()
    assert folder.incoming_path.read_text() == "whole"
    folder.lock()
    folder.unlock()
    assert not folder.incoming_path.exists()


def test_text_that_a_run_would_write_over_is_refused(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    (tmp_path / "run" / "last").mkdir(parents=True)
    (tmp_path / "run" / "mine").mkdir()
    (tmp_path / "link.txt").symlink_to(tmp_path / "run" / "stdin.txt")
    for name in ("stdin.txt", "metrics.jsonl", "last/notes.txt", "mine/stdin.txt", "notes.txt"):
        (tmp_path / "run" / name).write_text("text")
    for source in (tmp_path / "run" / "stdin.txt", tmp_path / "link.txt", tmp_path / "run" / "last" / "notes.txt"):
        with pytest.raises(DataError, match=f"^{source}: a run in .*run would write over this text; write elsewhere"):
            folder.check_sources([source])
    folder.check_sources([tmp_path / "run" / "notes.txt", tmp_path / "run" / "mine" / "stdin.txt", tmp_path / "x.txt"])


def test_metrics_stay_plain_json_lines(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.append_metrics({"step": 1, "loss": 0.25})
    assert folder.metrics_path.read_bytes() == b'{"step": 1, "loss": 0.25}\n'
    assert json.loads(folder.metrics_path.read_text(encoding="utf-8")) == {"step": 1, "loss": 0.25}
