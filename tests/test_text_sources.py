"""Names into files, and files into documents."""

from __future__ import annotations

import gzip
import io
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard

from minigpt.errors import ConfigError, DataError
from minigpt.text.decoding import ReadCounts, spool
from minigpt.text.sources import SourceOptions, find_files, read_pieces

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Write files into an empty folder, which is the working directory."""
    monkeypatch.chdir(tmp_path)

    def write_one(name: str, content: str | bytes = "text") -> Path:
        path = Path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    return write_one


def documents(*files: Path, counts: ReadCounts | None = None, **options: object) -> list[str]:
    result: list[str] = []
    for piece in read_pieces(files, SourceOptions(**options), counts=counts):  # type: ignore[arg-type]
        result = [*result, piece.text] if piece.starts_document else [*result[:-1], result[-1] + piece.text]
    return result


def test_files_folders_and_patterns(write: Write) -> None:
    for name in (
        "b/2.md",
        "b/1.txt",
        "b/c/3.jsonl.gz",
        "a.txt",
        "b/.hidden.txt",
        "b/.git/x.txt",
        "b/pic.png",
        "b/README",
    ):
        write(name)
    assert find_files(["a.txt"]) == [Path("a.txt")]
    in_folder = [Path("b/1.txt"), Path("b/2.md"), Path("b/c/3.jsonl.gz")]
    assert find_files(["b"]) == in_folder
    assert find_files(["b/*.*"]) == [Path("b/1.txt"), Path("b/2.md"), Path("b/pic.png")]
    assert find_files(["**/*.gz"]) == [Path("b/c/3.jsonl.gz")]
    assert find_files(["b/README"]) == [Path("b/README")], "a file that is named is taken whatever its suffix"
    assert find_files(["b/2.md", "b", "./b/1.txt", "b/../a.txt"]) == [
        Path("b/2.md"),
        *in_folder[:1],
        in_folder[2],
        Path("b/../a.txt"),
    ]


def test_a_name_with_brackets_is_a_file_first(write: Write) -> None:
    write("a[1].txt")
    assert find_files(["a[1].txt"]) == [Path("a[1].txt")]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("alice.tx", "alice.tx: no such file (there is alice.txt)"),
        ("books/alise.txt", "books/alise.txt: no such file (there is books/alice.txt)"),
        ("zzz", "zzz: no such file; check the name and the folder"),
        ("bokks/alice.txt", "bokks/alice.txt: no such file (there is no folder bokks)"),
        ("empty", "empty: no text files in this folder; looked for .txt, .md, .jsonl, .parquet and others"),
        ("*.md", "*.md: no file matches this pattern; check the folder and the suffix"),
        ("", "source: an empty name; give a file or a folder"),
    ],
)
def test_missing_sources(write: Write, source: str, message: str) -> None:
    write("alice.txt")
    write("books/alice.txt")
    write("empty/pic.png")
    with pytest.raises(DataError) as raised:
        find_files([source])
    assert str(raised.value) == message.replace("/", os.sep)


def test_a_named_pipe_is_refused(write: Write) -> None:
    if not hasattr(os, "mkfifo"):
        pytest.skip("this system has no named pipes")
    os.mkfifo("pipe")
    with pytest.raises(DataError, match=r"^pipe: not a file that can be read twice; pipe it to standard input"):
        find_files(["pipe"])


def test_a_text_file_is_one_document(write: Write) -> None:
    path = write("a.txt", "\ufeffone\r\ntwo\rthree\n\n\nfour")
    pieces = list(read_pieces([path], SourceOptions()))
    assert [(piece.text, piece.where, piece.starts_document, piece.ends_document) for piece in pieces] == [
        ("one\ntwo\nthree\n\n\nfour", "a.txt", True, True)
    ]


def test_separators_in_text_files(write: Write) -> None:
    path = write("a.txt", "one\r\n\r\ntwo<|endoftext|>\r\nthree")
    assert documents(path) == ["one\n\ntwo", "three"]
    assert documents(path, separator=r"\n\n") == documents(path, separator="\n\n") == ["one", "two", "three"]
    assert documents(path, separator=r"\r\n\r\n") == ["one", "two", "three"]


def test_end_of_text_separates_in_every_format(write: Write) -> None:
    """Fault 6: the separator is never text to learn from; a separator of one's own is for text files."""
    path = write("a.jsonl", json.dumps({"text": "one\n\n<|endoftext|>two"}) + "\n" + json.dumps({"text": "three"}))
    pieces = list(read_pieces([path], SourceOptions(separator="\n\n")))
    assert [(piece.text, piece.where) for piece in pieces] == [
        ("one\n", "a.jsonl:1"),
        ("two", "a.jsonl:1"),
        ("three", "a.jsonl:2"),
    ]


def test_files_end_documents(write: Write) -> None:
    files = [write("a.txt", "one"), write("empty.txt", ""), write("b.txt", "two")]
    assert documents(*files) == ["one", "two"]


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz", "a.txt.zst", "a.jsonl", "a.jsonl.gz", "a.json", "a.parquet"])
def test_the_same_document_from_every_format(write: Write, name: str) -> None:
    text = "Alice — 中文 😀\n\nwent on.\n" * 20_000  # several pieces
    data = text.encode()
    if ".json" in name:
        data = json.dumps([{"body": text}] if name == "a.json" else {"body": text}).encode()
    if name.endswith(".gz"):
        data = gzip.compress(data)
    if name.endswith(".zst"):
        data = zstandard.ZstdCompressor().compress(data)
    path = write(name, data)
    if name == "a.parquet":
        import pyarrow as pa
        import pyarrow.parquet as pq

        pq.write_table(pa.table({"body": [text]}), path)
    pieces = list(read_pieces([path], SourceOptions(field="body")))
    assert "".join(piece.text for piece in pieces) == text
    assert [piece.starts_document for piece in pieces] == [True] + [False] * (len(pieces) - 1)
    assert [piece.ends_document for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    plain = list(read_pieces([write("plain.txt", text)], SourceOptions()))
    assert [piece.text for piece in pieces] == [piece.text for piece in plain], "cut at the same places"


def test_one_policy_for_bad_bytes(write: Write) -> None:
    """Fault 4: text file, JSON line, escape and spool all replace and count."""
    counts = ReadCounts()
    assert documents(write("a.txt", b"hello \xff\xfe"), counts=counts) == ["hello \ufffd\ufffd"]
    assert documents(write("a.jsonl", rb'{"text": "\ud83d"}'), counts=counts) == ["\ufffd"]
    spool(io.BytesIO(b"caf\xe9"), Path("stdin.txt"))
    assert documents(Path("stdin.txt"), counts=counts) == ["caf\ufffd"]
    assert counts.bad_bytes == 4


def test_binary_files(write: Write) -> None:
    with pytest.raises(DataError, match=r"^pic\.png: looks binary \(NUL byte at offset 4\); give UTF-8 text"):
        documents(write("pic.png", b"\x89PNG\0\0"))


def test_options_are_checked() -> None:
    for options, match in (
        ({"field": ""}, "field"),
        ({"separator": ""}, "separator"),
        ({"min_chars": -1}, "min_chars: -1"),
    ):
        with pytest.raises(ConfigError, match=match):
            SourceOptions(**options)


def test_real_data(shared: Path) -> None:
    files = find_files([shared / "data" / "pretrain"])
    assert len(files) == 14
    counts = ReadCounts()
    documents_found = sum(piece.starts_document for piece in read_pieces(files, SourceOptions(), counts=counts))
    assert (documents_found, counts.bad_bytes) == (313, 0)
