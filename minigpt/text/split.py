"""One pass over the sources that drops duplicates and short documents and decides what is held out.

Whole documents are held out where there are enough of them, chosen by the hash of their content, so the choice is the
same again on a rerun and does not depend on the order of files. Otherwise the end of every document is held out. The
decision falls before any window is cut: no text is on both sides.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

import numpy as np
from numpy.typing import NDArray

from minigpt.errors import ConfigError, DataError
from minigpt.text.decoding import ReadCounts
from minigpt.text.pieces import PIECE_CHARS, Piece, cut
from minigpt.text.sources import SourceOptions, read_pieces

Share = Literal["train", "val"]

# With fewer documents than this, one more or less held out changes too much.
MIN_DOCUMENTS_TO_HOLD_OUT = 10
# Whole documents are held out when their bytes come to the wanted share within this factor.
HELD_OUT_TOLERANCE = 1.5
# How far a held-out end may be moved to begin on a line: half its length, and at most this many bytes.
_LINE_SEARCH_BYTES = 1 << 20
_HASH_BYTES = 16
# A sample is made of at least this many pieces, so that it comes from everywhere, but not of scraps.
_SAMPLE_PIECES = 64
_SAMPLE_MIN_CHARS = 1 << 10


@dataclass(frozen=True, kw_only=True, eq=False)
class Scan:
    """What one pass found: counts, sizes and the split, but no text.

    ``documents`` were kept, with ``bytes`` of text in UTF-8; ``digest`` stands for their content in order. N documents
    were read: ``kept`` (N,) and ``held_out`` (N,) are flags, ``lengths`` (N,) bytes, ``hashes`` (N, 2) of the content.
    """

    files: tuple[str, ...]
    options: SourceOptions
    val_fraction: float
    documents: int
    duplicates: int
    too_short: int
    bad_bytes: int
    bytes: int
    digest: str
    kept: NDArray[np.bool_]
    held_out: NDArray[np.bool_]
    lengths: NDArray[np.int64]
    hashes: NDArray[np.uint64]

    @property
    def split(self) -> Literal["none", "documents", "ends"]:
        """What is held out: nothing, whole documents, or the end of every document."""
        if self.val_fraction == 0:
            return "none"
        return "documents" if self.held_out.any() else "ends"

    @property
    def train_bytes(self) -> int:
        """Bytes of text to train on; where ends are held out, before these are moved to a line start."""
        if self.split == "ends":
            return self.bytes - int(self.bytes * self.val_fraction)
        return int(self.lengths[self.kept & ~self.held_out].sum())


@dataclass(frozen=True)
class Part:
    """Some text of a document's train or val share; a part without text ends what the document gives to that share."""

    text: str
    share: Share
    starts: bool


class _Table:
    """Lengths and content hashes of the documents read so far."""

    def __init__(self) -> None:
        self.bytes = array("q")
        self.characters = array("q")
        self.visible = bytearray()
        self.hashes = bytearray()

    def add(self, document: _Document) -> None:
        self.bytes.append(document.bytes)
        self.characters.append(document.characters)
        self.visible.append(document.visible)
        self.hashes += document.hash.digest()


class _Document:
    """Length and content hash of one document, piece by piece."""

    def __init__(self) -> None:
        self.bytes = 0
        self.characters = 0
        self.visible = False
        self.hash = hashlib.blake2b(digest_size=_HASH_BYTES)

    def add(self, text: str) -> None:
        data = text.encode("utf-8")
        self.bytes += len(data)
        self.characters += len(text)
        self.visible = self.visible or not text.isspace()
        self.hash.update(data)


def scan(
    files: Sequence[str | Path],
    options: SourceOptions,
    *,
    val_fraction: float = 0.1,
    progress: Callable[[int], None] | None = None,
) -> Scan:
    """Read everything once, drop duplicates and short documents, and choose what is held out.

    ``progress`` is called with the bytes of text read so far. Errors: ConfigError for a fraction outside [0, 1);
    DataError for anything that cannot be read, and when no text is left.
    """
    if not 0 <= val_fraction < 1:
        raise ConfigError(f"val_fraction: {val_fraction} is outside 0 to 1; give a share such as 0.1, or 0 for none")
    counts = ReadCounts()
    table = _read_table(read_pieces([Path(file) for file in files], options, counts=counts), progress)
    lengths = np.array(table.bytes, dtype=np.int64)
    hashes = np.frombuffer(bytes(table.hashes), dtype="<u8").reshape(-1, 2).astype(np.uint64)
    characters, visible = np.array(table.characters, dtype=np.int64), np.array(table.visible, dtype=bool)
    long_enough = (characters >= options.min_chars) & visible
    kept = long_enough & _first_of_each(hashes, long_enough)
    names = tuple(str(file) for file in files)
    if not kept.any():
        raise DataError(_nothing_left(names, options, len(lengths)))
    return Scan(
        files=names,
        options=options,
        val_fraction=val_fraction,
        documents=int(kept.sum()),
        duplicates=int((long_enough & ~kept).sum()),
        too_short=int((~long_enough).sum()),
        bad_bytes=counts.bad_bytes,
        bytes=int(lengths[kept].sum()),
        digest=hashlib.sha256(hashes[kept].astype("<u8").tobytes()).hexdigest(),
        kept=kept,
        held_out=_hold_out(kept, lengths, hashes, val_fraction),
        lengths=lengths,
        hashes=hashes,
    )


def _read_table(pieces: Iterator[Piece], progress: Callable[[int], None] | None) -> _Table:
    table, document, done = _Table(), _Document(), 0
    for piece in pieces:
        if piece.starts_document:
            document = _Document()
        before = document.bytes
        document.add(piece.text)
        done += document.bytes - before
        if piece.ends_document:
            table.add(document)
        if progress is not None:
            progress(done)
    return table


def _first_of_each(hashes: NDArray[np.uint64], candidates: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Flag the first document of each content among the candidates."""
    places = np.flatnonzero(candidates)
    order = places[np.lexsort((hashes[places, 1], hashes[places, 0]))]  # stable: of equals the first stays first
    fresh = np.ones(len(order), dtype=bool)
    fresh[1:] = (hashes[order[1:]] != hashes[order[:-1]]).any(axis=1)
    flags = np.zeros(len(hashes), dtype=bool)
    flags[order[fresh]] = True
    return flags


def _hold_out(
    kept: NDArray[np.bool_], lengths: NDArray[np.int64], hashes: NDArray[np.uint64], fraction: float
) -> NDArray[np.bool_]:
    """Flag the whole documents to hold out, smallest hash first; none where they cannot come near the wanted share."""
    chosen = np.zeros(len(kept), dtype=bool)
    places = np.flatnonzero(kept)
    if len(places) < MIN_DOCUMENTS_TO_HOLD_OUT or fraction == 0:
        return chosen
    wanted = fraction * int(lengths[places].sum())
    total = 0
    for place in places[np.lexsort((hashes[places, 1], hashes[places, 0]))]:
        if total >= wanted:
            break
        if total + lengths[place] <= wanted * HELD_OUT_TOLERANCE:
            chosen[place] = True
            total += int(lengths[place])
    if total * HELD_OUT_TOLERANCE < wanted or chosen.sum() == len(places):
        chosen[:] = False
    return chosen


def _nothing_left(names: Sequence[str], options: SourceOptions, documents: int) -> str:
    where = _sources(names)
    if documents and options.min_chars > 1:
        return f"{where}: no document has {options.min_chars:,} characters; choose a smaller least length"
    return f"{where}: no text in it; give files that hold text"


def _sources(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "") if names else "no sources"


def share_parts(scan: Scan) -> Iterator[Part]:
    """Read the sources again and yield the text of kept documents in order, each part with the share it belongs to.

    Errors: DataError when the files are no longer what was scanned.
    """
    number = -1
    pieces = read_pieces([Path(file) for file in scan.files], scan.options)
    for number, document in enumerate(_documents(pieces)):
        if number >= len(scan.kept):
            break
        texts = _checked(document, scan, number)
        if not scan.kept[number]:
            deque(texts, maxlen=0)
        elif scan.split == "ends":
            yield from _marked(_split_end(texts, int(scan.lengths[number]), scan.val_fraction))
        else:
            share: Share = "val" if scan.held_out[number] else "train"
            yield from _marked((text, share) for text in texts)
    if number + 1 != len(scan.kept):
        raise _changed(scan.files)


def _documents(pieces: Iterator[Piece]) -> Iterator[Iterator[Piece]]:
    """Group pieces into one iterator a document, which is to be used up before the next one is asked for."""

    def document(piece: Piece) -> Iterator[Piece]:
        yield piece
        while not piece.ends_document:
            piece = next(pieces)
            yield piece

    for first in pieces:
        yield document(first)


def _checked(pieces: Iterator[Piece], scan: Scan, number: int) -> Iterator[str]:
    document = _Document()
    for piece in pieces:
        document.add(piece.text)
        yield piece.text
    found = np.frombuffer(document.hash.digest(), dtype="<u8")
    if (found != scan.hashes[number]).any():
        raise _changed(scan.files)


def _changed(files: Sequence[str]) -> DataError:
    return DataError(f"{_sources(files)}: changed while being read; start again when nothing writes to it")


def _marked(texts: Iterator[tuple[str, Share]]) -> Iterator[Part]:
    current: Share | None = None
    for text, share in texts:
        if current is not None and share != current:
            yield Part("", current, False)
        yield Part(text, share, share != current)
        current = share
    if current is not None:
        yield Part("", current, False)


def _end_start(length: int, fraction: float) -> int:
    """Return the byte at which a document's held-out end begins; at least its first byte stays in training."""
    return length - int(length * fraction)


def _split_end(texts: Iterator[str], length: int, fraction: float) -> Iterator[tuple[str, Share]]:
    """Yield the text of one document, its end as "val": from a line start where there is one near."""
    start = _end_start(length, fraction)
    search_end = start + min((length - start) // 2, _LINE_SEARCH_BYTES)
    position = 0  # in bytes, where the next text or what is held begins
    held = b""
    for text in texts:
        data = text.encode("utf-8")
        if not held and position + len(data) < start:
            yield text, "train"
            position += len(data)
            continue
        held += data
        if position + len(held) >= search_end:
            break
    border = _line_or_character(held, start - position, search_end - position)
    for part, share in ((held[:border], "train"), (held[border:], "val")):
        if part:
            yield part.decode("utf-8"), cast(Share, share)
    for text in texts:
        yield text, "val"


def _line_or_character(data: bytes, start: int, search_end: int) -> int:
    """Return the first line start in [start, search_end], else the first character at or after ``start``."""
    newline = data.find(b"\n", max(0, start - 1), search_end)
    if newline >= 0:
        return newline + 1
    while start < len(data) and data[start] & 0xC0 == 0x80:
        start += 1
    return start


def training_sample(scan: Scan, max_bytes: int) -> Iterator[str]:
    """Yield about ``max_bytes`` of text, spread evenly over the training share; all of it where it fits.

    Nothing that is held out is in it. Errors: DataError when the files are no longer what was scanned.
    """
    texts = (part.text for part in share_parts(scan) if part.share == "train" and part.text)
    rate = max_bytes / max(1, scan.train_bytes)
    if rate >= 1:
        yield from texts
        return
    chars = min(PIECE_CHARS, max(_SAMPLE_MIN_CHARS, max_bytes // _SAMPLE_PIECES))
    seen = taken = 0
    for whole in texts:
        for text in cut([whole], chars):
            size = len(text.encode("utf-8"))
            # Taken when the middle of what is taken would not run ahead of the middle of what was seen.
            if taken + size / 2 <= (seen + size / 2) * rate or not taken:
                taken += size
                yield text
            seen += size
