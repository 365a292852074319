"""Bytes on a disk into text: decompression, encodings, and the one policy for bytes that are no text.

The policy holds on every route (text file, JSON line, ``\\ud83d`` escape, parquet, standard input): what cannot be
UTF-8 is replaced by U+FFFD, one for each bad byte, and counted in ``ReadCounts.bad_bytes``. A UTF-8 byte order mark is
dropped, UTF-16 is read when it has one, and a file with NUL bytes near its start is refused as binary.
"""

from __future__ import annotations

import codecs
import gzip
import os
import re
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from minigpt.errors import DataError

BLOCK_BYTES = 1 << 20
SNIFF_BYTES = 1 << 16
# A tiny zstandard block can unfold to 128 KiB; small bites keep the worst case near 100 MB instead of gigabytes.
ZSTD_BITE_BYTES = 1 << 12

_SURROGATE = re.compile("[\ud800-\udfff]")
_BINARY_STARTS = {
    b"%PDF-": "a PDF",
    b"PK\x03\x04": "a zip archive",
    b"\x1f\x8b": "gzip: name it .gz",
    b"\x28\xb5\x2f\xfd": "zstandard: name it .zst",
}


@dataclass
class ReadCounts:
    """What reading had to mend; handed in by the caller and counted up while pieces are read."""

    bad_bytes: int = 0


def replace_surrogates(text: str, counts: ReadCounts | None = None) -> str:
    """Put U+FFFD for every lone surrogate, which no UTF-8 can hold, and count them."""
    if text.isascii() or not _SURROGATE.search(text):
        return text
    mended, replaced = _SURROGATE.subn("\ufffd", text)
    if counts is not None:
        counts.bad_bytes += replaced
    return mended


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn the system's and the decompressors' errors while ``path`` is read into one line for people."""
    try:
        yield
    except (EOFError, zlib.error) as error:
        raise DataError(f"{path}: damaged or cut short ({error}); fetch the file again") from error
    except gzip.BadGzipFile as error:
        raise DataError(f"{path}: not gzip in spite of its name ({error}); rename it or fetch it again") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}; check its permissions") from error


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn the system's errors while ``path`` is written (a full disk, a read-only folder) into one line for people."""
    try:
        yield
    except OSError as error:
        raise DataError(
            f"cannot write {path}: {error.strerror or error}; free some space or choose another place"
        ) from error


def part_path(path: Path) -> Path:
    """Where a file is written until it is complete."""
    return path.with_name(path.name + ".part")


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Open a file that appears as ``path`` when it is complete and on the disk; until then the old one is there.

    Errors: DataError when it cannot be written.
    """
    part = part_path(path)
    try:
        with writing(path):
            with open(part, "wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(part, path)
    finally:
        with suppress(OSError):  # renamed, or never there
            part.unlink()


def read_blocks(path: Path) -> Iterator[bytes]:
    """Yield the bytes of ``path`` in blocks, decompressed where its name ends in ``.gz`` or ``.zst``.

    Errors: DataError for a file that cannot be opened, is damaged, or needs a package that is not there.
    """
    suffix = path.suffix.lower()
    with reading(path), open(path, "rb") as raw:
        if suffix == ".zst":
            yield from _zstd_blocks(raw, path)
        elif suffix == ".gz":
            with gzip.open(raw, "rb") as unzipped:
                yield from _blocks(unzipped)
        else:
            yield from _blocks(raw)


def _blocks(stream: BinaryIO | gzip.GzipFile) -> Iterator[bytes]:
    while block := stream.read(BLOCK_BYTES):
        yield block


def _zstd_blocks(raw: BinaryIO, path: Path) -> Iterator[bytes]:
    try:
        import zstandard
    except ImportError:
        raise DataError(f"{path}: reading .zst needs the zstandard package: pip install zstandard") from None
    # --long archives need a window above zstandard's default of 128 MiB.
    context = zstandard.ZstdDecompressor(max_window_size=1 << 31)
    frame = None  # one decompressor a frame: only so does a file that is cut short show
    while bite := raw.read(ZSTD_BITE_BYTES):
        while bite:
            frame = frame or context.decompressobj()
            try:
                text = frame.decompress(bite)
            except zstandard.ZstdError as error:
                raise DataError(f"{path}: not zstandard or damaged ({error}); fetch the file again") from error
            if text:
                yield text
            bite = frame.unused_data if frame.eof else b""
            frame = None if frame.eof else frame
    if frame is not None:
        raise DataError(f"{path}: the compressed data is cut short; fetch the file again")


def decode_blocks(blocks: Iterable[bytes], path: Path, counts: ReadCounts) -> Iterator[str]:
    """Yield the text of a stream of bytes: UTF-8, or UTF-16 where it begins with a byte order mark.

    Errors: DataError for a stream that looks binary.
    """
    blocks = iter(blocks)
    head = b""
    for block in blocks:
        head += block
        if len(head) >= SNIFF_BYTES:
            break
    encoding = _sniff(head, path)
    if encoding == "utf-8":
        head = head.removeprefix(codecs.BOM_UTF8)
        yield from _decode_utf8(_chain(head, blocks), counts)
    else:
        yield from _decode_utf16(_chain(head[2:], blocks), encoding, counts)


def _chain(head: bytes, blocks: Iterator[bytes]) -> Iterator[bytes]:
    yield head
    yield from blocks


def _sniff(head: bytes, path: Path) -> str:
    for start, kind in _BINARY_STARTS.items():
        if head.startswith(start):
            raise DataError(f"{path}: looks binary (it begins like {kind}); give UTF-8 text, .jsonl or .parquet")
    for mark, name in ((codecs.BOM_UTF16_LE, "utf-16-le"), (codecs.BOM_UTF16_BE, "utf-16-be")):
        # UTF-32's mark begins like UTF-16's and goes on with two NULs; it falls through and counts as binary.
        if head.startswith(mark) and head[2:4] != b"\0\0":
            return name
    nul = head.find(b"\0", 0, SNIFF_BYTES)
    if nul >= 0:
        raise DataError(f"{path}: looks binary (NUL byte at offset {nul}); give UTF-8 text, .jsonl or .parquet")
    return "utf-8"


def _decode_utf8(blocks: Iterable[bytes], counts: ReadCounts) -> Iterator[str]:
    tail = b""
    for block in blocks:
        tail += block
        text, used = _decode_part(tail, counts, final=False)
        tail = tail[used:]
        if text:
            yield text
    if tail:
        yield _decode_part(tail, counts, final=True)[0]


def _decode_part(data: bytes, counts: ReadCounts, *, final: bool) -> tuple[str, int]:
    try:
        return codecs.utf_8_decode(data, "strict", final)
    except UnicodeDecodeError:
        # "surrogateescape" leaves one lone surrogate for each bad byte, so that they can be counted.
        text, used = codecs.utf_8_decode(data, "surrogateescape", final)
        return replace_surrogates(text, counts), used


def decode_utf8(data: bytes, counts: ReadCounts) -> str:
    """Return the text of ``data`` under the policy for bad bytes."""
    return _decode_part(data, counts, final=True)[0]


def _decode_utf16(blocks: Iterable[bytes], encoding: str, counts: ReadCounts) -> Iterator[str]:
    decode = codecs.utf_16_le_decode if encoding == "utf-16-le" else codecs.utf_16_be_decode
    tail = b""
    for block in blocks:
        tail += block
        text, used = decode(tail, "surrogatepass", False)
        tail = tail[used:]
        if text:
            yield replace_surrogates(text, counts)
    if tail:  # half a code unit or half a surrogate pair at the end
        counts.bad_bytes += len(tail)
        yield "\ufffd" * len(tail)


def normalise_newlines(chunks: Iterable[str]) -> Iterator[str]:
    r"""Yield the same text with ``\r\n`` and a lone ``\r`` as ``\n``, also across chunk borders."""
    held = ""
    for chunk in chunks:
        text = held + chunk
        held = "\r" if text.endswith("\r") else ""
        if held:
            text = text[:-1]
        if "\r" in text:
            text = text.replace("\r\n", "\n").replace("\r", "\n")
        if text:
            yield text
    if held:
        yield "\n"


def spool(stream: BinaryIO, path: Path) -> int:
    """Copy a binary stream such as standard input to ``path`` and return the number of bytes.

    The file appears under its name only when it is complete, so an interrupted copy is never taken for a corpus.
    Errors: DataError when nothing came through, or when the file cannot be written.
    """
    size = 0
    with replacing(path) as target:
        while block := stream.read(BLOCK_BYTES):
            target.write(block)
            size += len(block)
        if not size:
            raise DataError("stdin: no text came through the pipe; check the command before it, or name files instead")
    return size
