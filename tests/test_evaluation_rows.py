"""Rows of a task from files, folders and archives, and what is said of those that cannot be read."""

from __future__ import annotations

import gzip
import json
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from minigpt.errors import DataError
from minigpt.evaluation.rows import RowFile, checked_text, row_files, text_of

ROWS = '{"a": "one"}\n\n{"a": "two"}\n{"a": "thr\u2028ee"}\n'
EXPECTED = 'a row is {"a": …}'


def read(file: RowFile, limit: int | None = None) -> list[str]:
    return file.read(lambda record: text_of(record, "a"), EXPECTED, limit)


def pack(path: Path, members: Mapping[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return path


def test_a_file_a_folder_and_an_archive(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.b.jsonl", "notes.txt", ".hidden.jsonl"):
        (tmp_path / name).write_text(ROWS, encoding="utf-8")
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(ROWS.encode()))
    (file,) = row_files(tmp_path / "b.jsonl")
    assert (file.name, read(file)) == ("b", ["one", "two", "thr\u2028ee"])
    assert read(file, 2) == ["one", "two"]
    files = row_files(tmp_path)
    assert [file.name for file in files] == ["a.b", "b", "c"]
    assert read(files[2]) == ["one", "two", "thr\u2028ee"]
    members = {"data/z.jsonl": b'{"a": "last"}', "data/y.jsonl": ROWS.encode(), "data/.DS_Store": b"\0"}
    junk = {"__MACOSX/data/._y.jsonl": b"\0\1", "data/._z.jsonl": b"\0\1", "read.me": b"hello"}
    found = row_files(pack(tmp_path / "all.zip", members | junk))
    assert {file.name: read(file) for file in found} == {"y": ["one", "two", "thr\u2028ee"], "z": ["last"]}


def test_what_is_wrong_with_a_row_is_said_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    for line, said in (
        ('{"b": "x", "c": 1}', 'no field "a" (found: "b", "c")'),
        ('{"a": ["x"]}', 'field "a" holds a list, not text'),
        ('{"a": null}', 'field "a" holds null, not text'),
        ('{"a": " \\n"}', 'field "a" is empty'),
    ):
        file.write_text(f'{{"a": "one"}}\n\n{line}\n', encoding="utf-8")
        with pytest.raises(DataError) as caught:
            read(RowFile(file))
        assert str(caught.value) == f"{file}:3: {said}; {EXPECTED}"
        assert read(RowFile(file), 1) == ["one"], "rows behind the limit are not looked at"
    file.write_text('{"a": "one"}\n{"a": ', encoding="utf-8")
    with pytest.raises(DataError, match=r"a\.jsonl:2: broken JSON"):
        read(RowFile(file))
    file.write_text("\n \n", encoding="utf-8")
    with pytest.raises(DataError, match=r"a\.jsonl: no rows in it; a row is"):
        read(RowFile(file))


def test_a_row_in_an_archive_is_named_too(tmp_path: Path) -> None:
    (file,) = row_files(pack(tmp_path / "all.zip", {"data/a.jsonl": b'{"a": "one"}\n{"a": 2}\n'}))
    with pytest.raises(DataError) as caught:
        read(file)
    assert str(caught.value) == f'{tmp_path}/all.zip/data/a.jsonl:2: field "a" holds a number, not text; {EXPECTED}'


def test_lone_surrogates_become_a_sign(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"a": "x\\ud83d"}', encoding="utf-8")
    assert read(RowFile(tmp_path / "a.jsonl")) == ["x\ufffd"]
    assert checked_text("x\ud83d", "it") == "x\ufffd"


def damaged(path: Path, kind: str) -> Path:
    """An archive of one member with a fault."""
    data = pack(path, {"a.jsonl": json.dumps({"a": "one " * 500}).encode()}).read_bytes()
    if kind == "text":
        data = b'{"a": "one"}\n'
    elif kind == "cut":
        data = data[: len(data) // 2]
    elif kind == "bad data":
        data = data[:45] + bytes(byte ^ 0xFF for byte in data[45:50]) + data[50:]
    elif kind == "password":  # bit 0 of the flags, in the member's own header and in the list at the end
        for header, place in ((b"PK\3\4", 6), (b"PK\1\2", 8)):
            at = data.index(header) + place
            data = data[:at] + bytes([data[at] | 1]) + data[at + 1 :]
    elif kind == "method":
        for header, place in ((b"PK\3\4", 8), (b"PK\1\2", 10)):
            at = data.index(header) + place
            data = data[:at] + b"\x63" + data[at + 1 :]
    path.write_bytes(data)
    return path


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("text", "no zip archive, or damaged"),
        ("cut", "no zip archive, or damaged"),
        ("bad data", "damaged"),
        ("password", "cannot be unzipped"),
        ("method", "cannot be unzipped"),
    ],
)
def test_an_archive_that_cannot_be_read_gets_one_line(tmp_path: Path, kind: str, said: str) -> None:
    path = damaged(tmp_path / "all.zip", kind)
    with pytest.raises(DataError) as caught:
        [read(file) for file in row_files(path)]
    assert str(caught.value).startswith(f"{path}: ")
    assert said in str(caught.value)


def test_nothing_to_read(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"all\.zip: no \.jsonl file in this archive"):
        row_files(pack(tmp_path / "all.zip", {"a.txt": b"x"}))
    with pytest.raises(DataError, match="no records in this folder"):
        row_files(tmp_path)
    with pytest.raises(DataError, match=r"nothing\.zip: no such file"):
        row_files(tmp_path / "nothing.zip")
