"""Files that are whole or not there; hostile and cut tensor files and JSON."""

from __future__ import annotations

import errno
import json
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import Tensor

from minigpt.checkpoint.files import (
    json_writer,
    read_json,
    read_tensors,
    stored_tensors,
    tensor_writer,
    write_atomically,
    write_json,
    write_tensors,
    write_text,
    write_together,
)
from minigpt.errors import ModelFolderError, TrainingError


def one_line(error: Exception) -> str:
    text = str(error)
    assert "\n" not in text
    assert not text.endswith(".")
    return text


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def full_disk(path: Path) -> None:
    path.write_bytes(b"half of")
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.skipif(os.name != "posix", reason="permissions of POSIX")
def test_what_is_written_may_be_read_by_all_whom_the_umask_lets(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_tensors(tmp_path / "a.safetensors", {"x": torch.zeros(2)}, {})
        write_json(tmp_path / "a.json", {})
    finally:
        os.umask(before)
    assert {oct(path.stat().st_mode & 0o777) for path in tmp_path.iterdir()} == {"0o640"}


def test_a_full_disk_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text("old")
    with pytest.raises(TrainingError) as caught:
        write_atomically(path, full_disk)
    assert one_line(caught.value) == f"cannot write {path}: No space left on device; what was there before is kept"
    assert path.read_text() == "old"
    assert names(tmp_path) == ["a.json"]


def test_safetensors_own_error_is_a_full_disk_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.safetensors"
    write_tensors(path, {"a": torch.ones(2)}, {})

    def broken(tensors: dict[str, Tensor], filename: Path, metadata: dict[str, str]) -> None:
        filename.write_bytes(b"half")
        raise safetensors.SafetensorError("I/O error: No space left on device\n(os error 28)")

    monkeypatch.setattr(safetensors.torch, "save_file", broken)
    with pytest.raises(TrainingError) as caught:
        write_tensors(path, {"a": torch.zeros(2)}, {})
    assert "No space left" in one_line(caught.value)
    assert read_tensors(path)[0]["a"].tolist() == [1, 1]
    assert names(tmp_path) == ["a.safetensors"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_device_that_is_really_full(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_text("old")

    def write(temporary: Path) -> None:
        with open("/dev/full", "wb") as file:
            file.write(b"x")

    with pytest.raises(TrainingError, match="No space left on device"):
        write_atomically(path, write)
    assert path.read_text() == "old"


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, ValueError])
def test_other_ends_leave_nothing_behind_either(error: type[BaseException], tmp_path: Path) -> None:
    def write(path: Path) -> None:
        path.write_bytes(b"half of")
        raise error

    (tmp_path / "a").write_text("old")
    with pytest.raises(error):
        write_atomically(tmp_path / "a", write)
    assert (tmp_path / "a").read_text() == "old"
    assert names(tmp_path) == ["a"]


def test_a_kill_in_the_middle_leaves_the_old_file(tmp_path: Path) -> None:
    """What a killed process leaves is a temporary file, which the next save takes away."""
    path = tmp_path / "a"
    path.write_text("old")
    script = (
        "import os, signal, sys; from pathlib import Path; from minigpt.checkpoint.files import write_atomically\n"
        "def write(temporary): temporary.write_bytes(b'half'); os.kill(os.getpid(), signal.SIGKILL)\n"
        "write_atomically(Path(sys.argv[1]), write)"
    )
    killed = subprocess.run([sys.executable, "-c", script, str(path)], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert path.read_text() == "old"
    assert len(names(tmp_path)) == 2
    write_text(path, "new")
    assert path.read_text() == "new"
    assert names(tmp_path) == ["a"]


def test_the_data_is_on_the_disk_before_the_rename_and_the_folder_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    folder = tmp_path / "folder"  # it is made too
    fsync, replace = os.fsync, os.replace

    def log_fsync(descriptor: int) -> None:
        status = os.fstat(descriptor)
        events.extend(f"fsync {p.name}" for p in (folder, *folder.iterdir()) if os.path.samestat(p.stat(), status))
        fsync(descriptor)

    def log_replace(source: Path, target: Path) -> None:
        assert source.parent == target.parent, "a rename to another disk is a copy"
        assert source.read_text() == "text"
        events.append(f"rename {source.name} {target.name}")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", log_fsync)
    monkeypatch.setattr(os, "replace", log_replace)
    write_text(folder / "a", "text")
    assert events == ["fsync .a.partial", "rename .a.partial a", "fsync folder"]


def test_a_path_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(TrainingError, match="cannot write ") as caught:
        write_text(tmp_path / "file" / "a", "text")
    one_line(caught.value)
    (tmp_path / "folder").mkdir()
    with pytest.raises(TrainingError, match="cannot write "):
        write_text(tmp_path / "folder", "text")
    assert names(tmp_path) == ["file", "folder"]


def test_json_comes_back_as_it_was(tmp_path: Path) -> None:
    value = {"text": "é中😀\u2028\n", "file": "caf\udce9.txt", "number": 0.1, "none": None, "list": [1, "\udcff"]}
    write_json(tmp_path / "a.json", value)
    assert read_json(tmp_path / "a.json") == value
    data = (tmp_path / "a.json").read_bytes()
    assert "é中😀".encode() in data
    assert b"\r" not in data
    assert data.endswith(b"}\n")


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "no valid JSON"),
        (b'{"a": 1', "no valid JSON"),
        (b'{"a": \xff}', "not UTF-8"),
        (b"[" * 100_000, "no valid JSON"),
        (b'{"a": ' + b"9" * 10_000 + b"}", "no valid JSON"),
        (b"[1, 2]", "holds no JSON object"),
        (b'"text"', "holds no JSON object"),
        (b"null", "holds no JSON object"),
    ],
    ids=["empty", "cut", "bytes", "deep", "digits", "array", "string", "null"],
)
def test_bad_json(data: bytes, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(data)
    with pytest.raises(ModelFolderError, match=reason) as caught:
        read_json(path)
    assert one_line(caught.value).startswith(str(path))


@pytest.mark.parametrize("read", [read_json, read_tensors])
def test_a_file_that_cannot_be_read(read: Callable[[Path], object], tmp_path: Path) -> None:
    with pytest.raises(ModelFolderError, match="no such file") as caught:
        read(tmp_path / "none")
    assert str(tmp_path / "none") in one_line(caught.value)
    with pytest.raises(ModelFolderError, match="directory"):
        read(tmp_path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool])
def test_tensors_come_back_bit_by_bit(dtype: torch.dtype, tmp_path: Path) -> None:
    tensors = {
        "matrix": torch.randn(3, 5, generator=torch.Generator().manual_seed(0)).to(dtype),
        "turned": torch.arange(6).view(2, 3).t().to(dtype),
        "scalar": torch.tensor(1).to(dtype),
        "empty": torch.zeros(0, 4).to(dtype),
    }
    write_tensors(tmp_path / "a", tensors, {"record": '{"é": 1}'})
    found, metadata = read_tensors(tmp_path / "a")
    assert metadata == {"record": '{"é": 1}'}
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == dtype
        assert torch.equal(found[name], tensor)


def test_what_was_read_outlives_the_file(tmp_path: Path) -> None:
    write_tensors(tmp_path / "a", {"a": torch.ones(1000)}, {})
    found = read_tensors(tmp_path / "a")[0]["a"]
    found += 1  # and may be written to
    write_tensors(tmp_path / "a", {"a": torch.zeros(1000)}, {})
    assert found.unique().tolist() == [2.0]
    assert read_tensors(tmp_path / "a")[0]["a"].unique().tolist() == [0.0]


def header(entries: object) -> bytes:
    text = json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text


def good() -> bytes:
    return header({"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}) + bytes(16)


HOSTILE = {
    "empty": b"",
    "seven bytes": b"\x02" * 7,
    "length 2^64-1": b"\xff" * 8 + b"{}",
    "length 2^63": (1 << 63).to_bytes(8, "little") + b"{}",
    "longer than the file": (100).to_bytes(8, "little") + b"{}",
    "cut header": good()[:20],
    "cut data": good()[:-1],
    "no data": good()[:-16],
    "more data": good() + b"x",
    "no JSON": (4).to_bytes(8, "little") + b"{abc",
    "no UTF-8": (4).to_bytes(8, "little") + b'"\xff\xff"',
    "array": header([1]),
    "null": header(None),
    "number as entry": header({"a": 1}),
    "no offsets": header({"a": {"dtype": "F32", "shape": [4]}}) + bytes(16),
    "text as offsets": header({"a": {"dtype": "F32", "shape": [4], "data_offsets": ["x", "y"]}}) + bytes(16),
    "one offset": header({"a": {"dtype": "F32", "shape": [4], "data_offsets": [0]}}) + bytes(16),
    "negative offsets": header({"a": {"dtype": "F32", "shape": [4], "data_offsets": [-16, 0]}}) + bytes(16),
    "offsets that do not fit the shape": header({"a": {"dtype": "F32", "shape": [9], "data_offsets": [0, 16]}})
    + bytes(16),
    "overflowing shape": header({"a": {"dtype": "F32", "shape": [1 << 62, 64], "data_offsets": [0, 16]}}) + bytes(16),
    "unknown type\nof two lines": header({"a": {"dtype": "F\n33", "shape": [4], "data_offsets": [0, 16]}}) + bytes(16),
    "overlap": header(
        {
            "a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]},
            "b": {"dtype": "F32", "shape": [4], "data_offsets": [8, 24]},
        }
    )
    + bytes(24),
    "metadata that is no text": header({"__metadata__": {"a": 1}}),
    "deep": (200_000).to_bytes(8, "little") + b"[" * 200_000,
    "pickle": pickle.dumps({"a": 1}),
    "zip": b"PK\x03\x04" + bytes(100),
}


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE)
def test_hostile_and_cut_tensor_files(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(data)
    with pytest.raises(ModelFolderError) as caught:
        read_tensors(path)
    assert one_line(caught.value).startswith(str(path))
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("name", sorted(HOSTILE.keys() - {"unknown type\nof two lines", "metadata that is no text"}))
def test_hostile_and_cut_headers_are_refused_before_data_is_read(name: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(HOSTILE[name])
    with pytest.raises(ModelFolderError) as caught:
        stored_tensors(path)
    assert one_line(caught.value).startswith(str(path))
    assert len(str(caught.value)) < 300


def test_the_unharmed_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(good())
    assert read_tensors(tmp_path / "a")[0]["a"].tolist() == [0.0] * 4


def test_a_cut_file_says_by_how_much(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    write_tensors(path, {"a": torch.zeros(1000, 1000)}, {})
    whole = path.stat().st_size
    os.truncate(path, 1_000_000)
    with pytest.raises(ModelFolderError) as caught:
        read_tensors(path)
    assert str(caught.value) == f"{path} is cut short (header says {whole:,} bytes, file has 1,000,000)"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_tensors_are_read_one_by_one_from_what_the_header_says(dtype: torch.dtype, tmp_path: Path) -> None:
    tensors = {
        "b": torch.randn(3, 5, generator=torch.Generator().manual_seed(0)).to(dtype),
        "a": torch.arange(6).view(2, 3).t().to(dtype),
        "scalar": torch.tensor(1).to(dtype),
        "empty": torch.zeros(0, 4).to(dtype),
    }
    write_tensors(tmp_path / "a", tensors, {})
    found = stored_tensors(tmp_path / "a")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].shape == tuple(tensor.shape)
        assert torch.equal(found[name].read(dtype), tensor)


def test_a_file_that_is_cut_between_header_and_data(tmp_path: Path) -> None:
    write_tensors(tmp_path / "a", {"a": torch.zeros(1000)}, {})
    tensor = stored_tensors(tmp_path / "a")["a"]
    os.truncate(tmp_path / "a", 2000)
    with pytest.raises(ModelFolderError, match="was cut short while it was read") as caught:
        tensor.read(torch.float32)
    one_line(caught.value)
    (tmp_path / "a").unlink()
    with pytest.raises(ModelFolderError, match="No such file"):
        tensor.read(torch.float32)


def test_several_files_are_renamed_in_their_order_once_all_are_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda descriptor: (events.append("fsync"), fsync(descriptor)))
    monkeypatch.setattr(os, "replace", lambda old, new: (events.append(new.name), replace(old, new)))
    tensors = tensor_writer(lambda: {"a": torch.ones(2)}, {})
    write_together({tmp_path / "b": tensors, tmp_path / "a": tensors, tmp_path / "index": json_writer({"x": 1})})
    assert events == ["fsync"] * 3 + ["b", "a", "index", "fsync"]
    assert names(tmp_path) == ["a", "b", "index"]
    assert read_json(tmp_path / "index") == {"x": 1}
    assert read_tensors(tmp_path / "a")[0]["a"].tolist() == [1, 1]


def test_of_several_files_none_is_replaced_when_one_cannot_be_written(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).write_text("old")
    with pytest.raises(TrainingError, match="b: No space left on device; what was there before is kept"):
        write_together({tmp_path / "a": json_writer({}), tmp_path / "b": full_disk, tmp_path / "c": json_writer({})})
    assert [path.read_text() for path in sorted(tmp_path.iterdir())] == ["old", "old"]
