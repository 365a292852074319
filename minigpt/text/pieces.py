"""A stream of text into documents, and documents into pieces that can be tokenised one by one.

A document may be larger than memory, so it travels as pieces of about 64k characters. A piece ends only where the
tokenizer's pre-tokenisation has a border whatever stands around it: the ids of the pieces, joined, are the ids of the
whole text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

# Standing in a corpus, this text ends a document; it is never learned as text.
END_OF_TEXT = "<|endoftext|>"
PIECE_CHARS = 1 << 16
REACH_CHARS = 1 << 20

# After a line end between two visible characters: a border in every pattern in use, GPT-2's too.
LINE_BORDER = re.compile(r"(?<=\S\n)(?=\S)")
# Places to cut, best first. Each is tried in the whole window before the next one.
_CUTS = (
    LINE_BORDER,
    # after a blank line
    re.compile(r"(?<=\n)(?=\S)"),
    # before a single space that begins a word
    re.compile(r"(?<=\S)(?= [^\W\d_])"),
    # after a line end before an indented line (ideographic spaces in Chinese books, code)
    re.compile(r"(?<=\n)(?=[^\S\r\n]+\S)"),
)
_NEAR_CHARS = 1 << 11
_LOOKAHEAD_CHARS = 1 << 8


@dataclass(frozen=True)
class Piece:
    """A part of a document: its text, where it came from ("alice.txt", "c4.jsonl:17"), and which ends it holds."""

    text: str
    where: str
    starts_document: bool
    ends_document: bool


def document_pieces(chunks: Iterable[str], where: str, separator: str | None = None) -> Iterator[Piece]:
    """Yield the pieces of the documents in a stream of text.

    ``<|endoftext|>`` ends a document and takes one line end on each side with it; ``separator``, where given, ends one
    too. Documents without a single character are left out.
    """
    held: str | None = None  # the piece before, until it is known whether its document goes on
    starts = True
    for document in _runs(_separate(chunks, separator)):
        for text in cut(document):
            if held is not None:
                yield Piece(held, where, starts, False)
                starts = False
            held = text
        if held is not None:
            yield Piece(held, where, starts, True)
        held, starts = None, True


def _runs(parts: Iterator[str | None]) -> Iterator[Iterator[str]]:
    """Group a stream in which None stands between documents into one iterator a document."""
    more = True

    def document() -> Iterator[str]:
        nonlocal more
        for part in parts:
            if part is None:
                return
            yield part
        more = False

    while more:
        yield document()


def _separate(chunks: Iterable[str], separator: str | None) -> Iterator[str | None]:
    """Yield the text between separators, and None for each separator; one may lie across chunks."""
    marks = [END_OF_TEXT, *([separator] if separator else [])]
    pattern = re.compile("|".join([rf"\n?{re.escape(END_OF_TEXT)}\n?", *map(re.escape, marks[1:])]))
    longest = max(len(END_OF_TEXT) + 2, *map(len, marks))
    buffer = ""
    for chunk in chunks:
        buffer += chunk
        safe = len(buffer) - longest + 1  # a separator that begins before here lies in the buffer whole
        if safe <= 0:
            continue
        used = 0
        if any(mark in buffer for mark in marks):
            for match in pattern.finditer(buffer):
                if match.start() >= safe:
                    break
                yield buffer[used : match.start()]
                yield None
                used = match.end()
        if used < safe:
            yield buffer[used:safe]
            used = safe
        buffer = buffer[used:]
    for index, part in enumerate(pattern.split(buffer)):
        if index:
            yield None
        yield part


def cut(chunks: Iterable[str], piece_chars: int = PIECE_CHARS, reach_chars: int = REACH_CHARS) -> Iterator[str]:
    """Yield one document's text in pieces that can be tokenised apart.

    Pieces have at most ``piece_chars`` characters where the text has a safe place; where it has none, the piece grows
    to the first one, and after ``reach_chars`` it ends anywhere.
    """
    buffer = ""
    for chunk in chunks:
        buffer += chunk
        ends = list(_cut_points(buffer, piece_chars, reach_chars, more_follows=True))
        for start, end in pairwise([0, *ends]):
            yield buffer[start:end]
        buffer = buffer[ends[-1] :] if ends else buffer
    ends = list(_cut_points(buffer, piece_chars, reach_chars, more_follows=False))
    for start, end in pairwise([0, *ends, len(buffer)]):
        if start < end:
            yield buffer[start:end]


def _cut_points(buffer: str, piece_chars: int, reach_chars: int, *, more_follows: bool) -> Iterator[int]:
    """Yield the ends of the pieces that are certain; they depend on the text alone, not on how it came in."""
    start = 0
    while len(buffer) - start > piece_chars + (_LOOKAHEAD_CHARS if more_follows else 0):
        end = _cut_behind(buffer, start, start + piece_chars)
        if end is None:
            if more_follows and len(buffer) < start + reach_chars:
                return
            end = _cut_ahead(buffer, start + piece_chars, min(start + reach_chars, len(buffer)))
        yield end
        start = end


def _cut_behind(buffer: str, start: int, limit: int) -> int | None:
    """Return the last safe place in a window, of the best kind there is; most often it lies near the window's end."""
    near = max(start + 1, limit - _NEAR_CHARS)
    for pattern in _CUTS:
        end = _last(pattern, buffer, near, limit) or _last(pattern, buffer, start + 1, near)
        if end is not None:
            return end
    return None


def _cut_ahead(buffer: str, limit: int, reach: int) -> int:
    """Return the first safe place between two positions, or the second one where there is none."""
    for pattern in _CUTS:
        if (match := pattern.search(buffer, limit, reach)) is not None:
            return match.start()
    return reach


def _last(pattern: re.Pattern[str], buffer: str, first: int, last: int) -> int | None:
    found = None
    for match in pattern.finditer(buffer, first, min(len(buffer), last + _LOOKAHEAD_CHARS)):
        if match.start() > last:
            break
        found = match.start()
    return found
