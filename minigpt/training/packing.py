"""Conversations side by side in rows of one length, so that little is padding; each is read as if it stood alone.

A position's target is the next id of its own conversation, where that is learned. Padding is known by its place, not
by its id: the id that ends an answer may be the same one.
"""

from __future__ import annotations

import math
import sys
from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from minigpt.errors import ConfigError
from minigpt.text.chat import ChatTemplate
from minigpt.text.conversations import Conversation
from minigpt.text.fitting import Encoded, FitCounts, encode_conversations, fit, nothing_left
from minigpt.text.tokenizer import Tokenizer

MAX_ROW = 2_048  # positions, when nobody asks for more: attention is masked between documents, but paid for
ROW_MULTIPLE = 64
ROW_OF_MEANS = 4  # conversations of mean length that a row has room for: packing then leaves little empty
NO_TARGET = -100  # what model.loss ignores; told here too, since that module needs torch


def pack(lengths: Sequence[int], row_length: int) -> list[list[int]]:
    """Put the places 0 … n-1 of items into as few rows as best-fit decreasing finds; each place stands in one row.

    The longest items are placed first, each into the fullest row that has room; of equals the first comes first.
    """
    assert all(0 < length <= row_length for length in lengths)
    rows: list[list[int]] = []
    by_room: dict[int, list[int]] = {}  # rows with this much room left
    rooms: list[int] = []  # the keys of by_room, sorted
    for place in sorted(range(len(lengths)), key=lambda place: -lengths[place]):
        at = bisect_left(rooms, lengths[place])
        if at < len(rooms):
            room = rooms[at]
            row = by_room[room].pop()
            if not by_room[room]:
                del by_room[room], rooms[at]
        else:
            room, row = row_length, len(rows)
            rows.append([])
        rows[row].append(place)
        left = room - lengths[place]
        if left not in by_room:
            insort(rooms, left)
        by_room.setdefault(left, []).append(row)
    return rows


def row_length(lengths: Sequence[int], context: int) -> int:
    """Choose a row length for conversations of these many positions: the longest fits, and a few of mean length.

    No row is longer than the model's context, or than MAX_ROW.
    """
    wanted = max(max(lengths), ROW_OF_MEANS * sum(lengths) / len(lengths))
    return min(context, MAX_ROW, ROW_MULTIPLE * math.ceil(wanted / ROW_MULTIPLE))


class Arrays(NamedTuple):
    """Rows of T positions: tokens (R, T), targets (R, T; -100 carries no loss), and documents (R, T).

    Documents are numbered from 0 in each row; padding has the number after the last.
    """

    tokens: NDArray[np.int64]
    targets: NDArray[np.int64]
    documents: NDArray[np.int64]


class PackedRows:
    """Conversations packed into rows of ``row_length`` positions; none may be longer.

    ``pad_id`` fills what is left of a row; any id will do. ``len`` is the number of rows.
    """

    def __init__(self, conversations: Sequence[Encoded], row_length: int, *, pad_id: int) -> None:
        self.conversations, self.row_length, self.pad_id = conversations, row_length, pad_id
        self._lengths = np.array([len(one) for one in conversations], dtype=np.int64)
        self._by_length = np.argsort(self._lengths, kind="stable")
        self.rows = pack(self._lengths.tolist(), row_length)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def positions(self) -> int:
        """Count the positions of all rows that are no padding."""
        return int(self._lengths.sum())

    @property
    def targets(self) -> int:
        """Count the positions that carry loss."""
        return sum(int(one.trained[1:].sum()) for one in self.conversations)

    def shuffled(self, generator: np.random.Generator) -> list[list[int]]:
        """Return the rows in another order, with conversations of one length changing places: each stands in one row.

        Best-fit decreasing looks at lengths only, so the rows need not be packed anew.
        """
        among_equals = np.lexsort((generator.random(len(self._lengths)), self._lengths))
        other = np.empty_like(among_equals)
        other[self._by_length] = among_equals
        return [[int(other[place]) for place in self.rows[row]] for row in generator.permutation(len(self.rows))]

    def arrays(self, rows: Sequence[Sequence[int]]) -> Arrays:
        """Write out rows, each given by the places of its conversations."""
        shape = (len(rows), self.row_length)
        tokens = np.full(shape, self.pad_id, dtype=np.int64)
        targets = np.full(shape, NO_TARGET, dtype=np.int64)
        documents = np.empty(shape, dtype=np.int64)
        for number, row in enumerate(rows):
            start = 0
            for document, place in enumerate(row):
                one = self.conversations[place]
                part = slice(start, start + len(one))
                tokens[number, part] = one.ids[:-1]
                targets[number, part] = np.where(one.trained[1:], one.ids[1:], NO_TARGET)
                documents[number, part] = document
                start = part.stop
            documents[number, start:] = len(row)
        return Arrays(tokens, targets, documents)


def pad_id(tokenizer: Tokenizer) -> int:
    """The id that fills a row; padding is known by its place, so any id will do."""
    return tokenizer.end_of_text_id if tokenizer.pad_id is None else tokenizer.pad_id


class Fitter:
    """Conversations encoded once, and the length of a row: the one asked for, or what suits them.

    ``lengths`` are those of the whole conversations, in ids; ``counts`` says how many were cut to fit, or dropped.
    Errors: ConfigError for rows longer than ``most`` tokens.
    """

    def __init__(
        self, conversations: Sequence[Conversation], template: ChatTemplate, context: int | None, most: int
    ) -> None:
        if context is not None and context > most:
            raise ConfigError(f"context is {context:,}, more than the model's {most:,}; give a smaller --context")
        encoded = encode_conversations(conversations, template, sys.maxsize - 1, FitCounts())  # whole: none is left out
        self.template, self.counts = template, FitCounts()
        self.length = context or row_length([len(one) for one in encoded], most)
        self.lengths = [len(one.ids) for one in encoded]
        self._whole = dict(zip(map(id, conversations), encoded, strict=True))

    def one(self, conversation: Conversation, counts: FitCounts | None = None) -> Encoded | None:
        """Fit a conversation into a row; None where it has no answer left."""
        whole = self._whole[id(conversation)]
        if len(whole) <= self.length:
            return whole
        return fit(conversation.messages, self.template, self.length, FitCounts() if counts is None else counts)

    def cut(self, conversations: Sequence[Conversation]) -> list[Encoded]:
        """Fit conversations into rows, and count; those without an answer left are dropped."""
        found = (self.one(conversation, self.counts) for conversation in conversations)
        return [one for one in found if one is not None]

    def packed(self, groups: Mapping[float, Sequence[Conversation]]) -> dict[float, PackedRows]:
        """Pack each group of conversations; a DataError when nothing is left of all of them."""
        kept = {weight: each for weight, group in groups.items() if (each := self.cut(group))}
        if not kept:
            raise nothing_left(self.length, self.counts)
        pad = pad_id(self.template.tokenizer)
        return {weight: PackedRows(each, self.length, pad_id=pad) for weight, each in kept.items()}
