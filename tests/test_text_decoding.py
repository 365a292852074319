"""Compressed files, encodings, and the one policy for bytes that are no text."""

from __future__ import annotations

import builtins
import codecs
import errno
import gzip
import io
import os
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from minigpt.errors import DataError
from minigpt.text.decoding import (
    ReadCounts,
    decode_blocks,
    decode_utf8,
    normalise_newlines,
    read_blocks,
    replace_surrogates,
    spool,
)

HERE = Path("here.txt")


def decoded(*blocks: bytes) -> tuple[str, int]:
    counts = ReadCounts()
    return "".join(decode_blocks(blocks, HERE, counts)), counts.bad_bytes


def blocks_of(data: bytes, cuts: list[int]) -> Iterator[bytes]:
    places = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    yield from (data[start:end] for start, end in pairwise(places))


@given(st.binary().filter(lambda data: b"\0" not in data), st.lists(st.integers(0, 99), max_size=5))
def test_utf8_is_the_same_however_it_is_cut(data: bytes, cuts: list[int]) -> None:
    data = b"x" + data  # no byte order mark, no magic number
    # An independent count: one U+FFFD for every byte that the decoder cannot use.
    expected = data.decode("utf-8", "surrogateescape")
    bad = sum("\udc80" <= character <= "\udcff" for character in expected)
    expected = "".join("\ufffd" if "\udc80" <= character <= "\udcff" else character for character in expected)
    assert decoded(*blocks_of(data, cuts)) == (expected, bad)


def test_bad_bytes_are_replaced_and_counted() -> None:
    assert decoded(b"hello \xff\xfe") == ("hello \ufffd\ufffd", 2)
    assert decoded(b"caf", b"\xe9") == ("caf\ufffd", 1)
    assert decoded(b"x\xf0\x9f", b"\x98") == ("x\ufffd\ufffd\ufffd", 3), "a character that is cut off at the end"
    assert decode_utf8(b"\xed\xa0\xbd", ReadCounts()) == "\ufffd\ufffd\ufffd", "an encoded surrogate is no UTF-8"


def test_a_replacement_character_of_the_author_is_not_counted() -> None:
    assert decoded("a\ufffdb".encode()) == ("a\ufffdb", 0)


def test_lone_surrogates_are_replaced_and_counted() -> None:
    counts = ReadCounts()
    assert replace_surrogates("a\ud83db\udc00", counts) == "a\ufffdb\ufffd"
    assert counts.bad_bytes == 2
    assert replace_surrogates("a\U0001f600é", counts) == "a\U0001f600é"
    assert counts.bad_bytes == 2


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16-le", "utf-16-be"])
def test_byte_order_marks(encoding: str) -> None:
    text = "é😀\nx"
    mark = {"utf-16-le": codecs.BOM_UTF16_LE, "utf-16-be": codecs.BOM_UTF16_BE}.get(encoding, b"")
    data = mark + text.encode(encoding)
    assert decoded(data) == (text, 0)
    assert decoded(*(data[place : place + 1] for place in range(len(data)))) == (text, 0)


def test_damaged_utf16() -> None:
    assert decoded(codecs.BOM_UTF16_LE + "a\ud83db".encode("utf-16-le", "surrogatepass")) == ("a\ufffdb", 1)
    text, bad = decoded(codecs.BOM_UTF16_LE + "ab".encode("utf-16-le") + b"c")
    assert (text, bad) == ("ab\ufffd", 1)


def test_only_the_first_byte_order_mark_is_dropped() -> None:
    assert decoded(codecs.BOM_UTF8 + b"a" + codecs.BOM_UTF8) == ("a\ufeff", 0)


@pytest.mark.parametrize(
    "data",
    [b"ab\0c", "ab".encode("utf-16-le"), "ab".encode("utf-32"), b"%PDF-1.7 text", b"PK\x03\x04zip", b"\x1f\x8bx"],
)
def test_binary_is_refused(data: bytes) -> None:
    with pytest.raises(DataError, match=r"^here\.txt: looks binary \(.*\); give UTF-8 text"):
        decoded(data)


def test_nothing_is_no_text() -> None:
    assert decoded() == ("", 0)


@given(st.text("a\r\n\u2028", max_size=12), st.lists(st.integers(0, 99), max_size=5))
def test_newlines_are_normalised_across_chunks(text: str, cuts: list[int]) -> None:
    chunks = [block.decode() for block in blocks_of(text.encode("ascii", "ignore"), cuts)]
    expected = io.TextIOWrapper(io.BytesIO(text.encode("ascii", "ignore")), encoding="ascii", newline=None).read()
    assert "".join(normalise_newlines(chunks)) == expected
    assert "".join(normalise_newlines([text])).count("\u2028") == text.count("\u2028")


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_compressed_files(tmp_path: Path, suffix: str) -> None:
    data = bytes(range(256)) * 4000
    path = tmp_path / f"x.txt{suffix}"
    pack = gzip.compress if suffix == ".gz" else zstandard.ZstdCompressor().compress
    path.write_bytes(pack(data) + pack(b"") + pack(b"second member"))
    assert b"".join(read_blocks(path)) == data + b"second member"


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
@pytest.mark.parametrize("damage", ["cut", "no header", "inside"])
def test_damaged_compressed_files(tmp_path: Path, suffix: str, damage: str) -> None:
    path = tmp_path / f"x.txt{suffix}"
    packed = gzip.compress(b"hello " * 99) if suffix == ".gz" else zstandard.ZstdCompressor().compress(b"hello " * 99)
    path.write_bytes({"cut": packed[:-5], "no header": b"plain text", "inside": packed[:12] + b"\xff" * 30}[damage])
    with pytest.raises(DataError, match=r"x\.txt\.(gz|zst): .*(damaged|cut short|not gzip).*fetch"):
        b"".join(read_blocks(path))


def test_missing_zstandard_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.txt.zst"
    path.write_bytes(b"")
    real_import = builtins.__import__

    def without_zstandard(name: str, *rest: object) -> object:
        if name == "zstandard":
            raise ImportError(name)
        return real_import(name, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(builtins, "__import__", without_zstandard)
    with pytest.raises(DataError, match=r"reading \.zst needs the zstandard package: pip install zstandard$"):
        list(read_blocks(path))


def test_a_file_that_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"x\.txt: cannot be read: No such file"):
        list(read_blocks(tmp_path / "x.txt"))


def test_spool_copies_and_counts(tmp_path: Path) -> None:
    data = b"hello \xff\r\n" * 200_000
    assert spool(io.BytesIO(data), tmp_path / "stdin.txt") == len(data)
    assert [path.name for path in tmp_path.iterdir()] == ["stdin.txt"]
    assert (tmp_path / "stdin.txt").read_bytes() == data


def test_spool_of_nothing_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"^stdin: no text came through the pipe; "):
        spool(io.BytesIO(b""), tmp_path / "stdin.txt")
    assert not list(tmp_path.iterdir())


def test_an_interrupted_spool_keeps_the_old_file(tmp_path: Path) -> None:
    class Interrupted(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            raise KeyboardInterrupt

    path = tmp_path / "stdin.txt"
    path.write_bytes(b"old")
    with pytest.raises(KeyboardInterrupt):
        spool(Interrupted(), path)
    assert [(file.name, file.read_bytes()) for file in tmp_path.iterdir()] == [("stdin.txt", b"old")]


def test_spool_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_space(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(DataError, match=r"^cannot write .*: No space left on device; free some space"):
        spool(io.BytesIO(b"x" * 100), tmp_path / "stdin.txt")
    assert not list(tmp_path.iterdir())
