"""Instruction files into conversations: read, checked, without exact duplicates, and split without leaks."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from minigpt.errors import ConfigError, DataError, UsageError
from minigpt.text.chat import Message
from minigpt.text.decoding import ReadCounts, replace_surrogates
from minigpt.text.instructions import FIELDS, BadRecord, Parsed, parse_record
from minigpt.text.records import BrokenJSON, json_records, parquet_records
from minigpt.text.sources import find_files, kind_of_file

# With fewer conversations than this, one more or less held out changes too much.
MIN_CONVERSATIONS_TO_HOLD_OUT = 10
_HASH_BYTES = 16


class Shaped(Protocol):
    """What a record was parsed to."""

    @property
    def shape(self) -> str:
        """The fields that it was read from."""
        ...


class Asked(Protocol):
    """What begins with a question."""

    @property
    def question(self) -> str:
        """The first message of the user."""
        ...


T = TypeVar("T")
P = TypeVar("P", bound=Shaped)
A = TypeVar("A", bound=Asked)
Parse = Callable[[Mapping[str, Any], Mapping[str, str], str | None], P]


@dataclass(frozen=True)
class Conversation:
    """Messages of one conversation, the last one an assistant's, and the file and line they stand in."""

    where: str
    messages: tuple[Message, ...]
    file: str = ""

    @property
    def question(self) -> str:
        """The first message of the user, which tells whether two conversations ask the same."""
        return next(message.content for message in self.messages if message.role == "user")


@dataclass(frozen=True, kw_only=True)
class ChatOptions:
    """How conversations are read: our fields by the names that stand for them in the files, and whether bad rows end
    the reading or are left out.

    Errors: ConfigError for a field that is not ours.
    """

    mapping: Mapping[str, str] = field(default_factory=dict)
    skip_bad: bool = False

    def __post_init__(self) -> None:
        for ours, theirs in self.mapping.items():
            if ours not in FIELDS:
                raise ConfigError(f"--map {ours}={theirs}: no field {ours!r} is read; choose from {', '.join(FIELDS)}")


@dataclass
class ChatCounts(ReadCounts):
    """What reading found, over all files; handed in by the caller and counted up.

    ``shapes`` counts the records of each shape by file, ``skipped`` the bad rows by reason; ``first_skipped`` is the
    message of the first. ``unanswered`` conversations ended with a question, which was left out; ``disliked`` records
    are marked as bad answers (``label`` false) and left out.
    """

    conversations: int = 0
    turns: int = 0
    duplicates: int = 0
    disliked: int = 0
    unanswered: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    first_skipped: str | None = None
    shapes: dict[str, Counter[str]] = field(default_factory=dict)
    seen: set[bytes] = field(default_factory=set, repr=False)

    def skip(self, reason: str, message: str) -> None:
        """Count a bad row."""
        self.skipped[reason] += 1
        self.first_skipped = self.first_skipped or message

    def is_new(self, messages: Iterable[Message], *others: str) -> bool:
        """Tell whether these messages, with whatever else makes a row what it is, come for the first time; count it."""
        content = json.dumps([*((message.role, message.content.strip()) for message in messages), *others])
        digest = hashlib.blake2b(content.encode("utf-8"), digest_size=_HASH_BYTES).digest()
        self.duplicates += digest in self.seen
        new = digest not in self.seen
        self.seen.add(digest)
        return new

    def notes(self) -> list[str]:
        """Say in a few words each what was left out or mended; nothing where nothing was."""
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in self.skipped.most_common())
        notes = [
            (self.duplicates, f"{_many(self.duplicates, 'exact duplicate')} dropped"),
            (self.disliked, f"{_many(self.disliked, 'record')} marked as a bad answer left out"),
            (self.unanswered, f"a question without an answer left off at the end of {self.unanswered:,}"),
            (self.skipped.total(), f"{_many(self.skipped.total(), 'bad row')} skipped ({reasons})"),
            (self.bad_bytes, f"{_many(self.bad_bytes, 'byte')} no UTF-8, replaced by U+FFFD"),
        ]
        return [note for count, note in notes if count]


def _many(count: int, what: str) -> str:
    return f"{count:,} {what}{'s' if count != 1 else ''}"


def parse_mapping(texts: Sequence[str]) -> dict[str, str]:
    """Read `--map field=name` options; one that is no such pair is a UsageError."""
    mapping = {}
    for text in texts:
        ours, equals, theirs = text.partition("=")
        if not (ours and equals and theirs):
            raise UsageError(f"--map {text}: give the field, an equals sign and its name in the file: messages=chat")
        mapping[ours] = theirs
    return mapping


def read_conversations(path: Path, options: ChatOptions, counts: ChatCounts) -> Iterator[Conversation]:
    """Yield the conversations of a file: JSON lines, a JSON array, or parquet rows; one that came before is dropped.

    Errors: DataError with file and line for a row that holds none, unless such rows are skipped; broken JSON in an
    array ends the file in any case.
    """
    for where, parsed in parsed_records(path, options, counts, parse_record):
        yield from _kept(parsed, where, path, counts)


def parsed_records(path: Path, options: ChatOptions, counts: ChatCounts, parse: Parse[P]) -> Iterator[tuple[str, P]]:
    """Yield where and what `parse` makes of each record, given it, our names and the shape of those before it.

    Errors: as for `read_conversations`.
    """
    shapes = counts.shapes.setdefault(str(path), Counter())
    for where, record in _records(path, options, counts):
        try:
            parsed = parse(record, options.mapping, next(iter(shapes), None))
        except BadRecord as bad:
            if not options.skip_bad:
                raise DataError(f"{where}: {bad}") from None
            counts.skip(bad.reason, f"{where}: {bad}")
            continue
        shapes[parsed.shape] += 1
        yield where, parsed


def _records(path: Path, options: ChatOptions, counts: ChatCounts) -> Iterator[tuple[str, dict[str, Any]]]:
    if kind_of_file(path) == "parquet":
        return parquet_records(path)
    skip: Callable[[DataError], None] | None = None
    if options.skip_bad:

        def skip(error: DataError) -> None:
            counts.skip("broken JSON" if isinstance(error, BrokenJSON) else "no object", str(error))

    return json_records(path, counts, skip)


def _kept(parsed: Parsed, where: str, path: Path, counts: ChatCounts) -> Iterator[Conversation]:
    if not parsed.liked:
        counts.disliked += 1
        return
    counts.unanswered += parsed.unanswered
    for turns in parsed.conversations:
        messages = mended(turns, counts)
        if counts.is_new(messages):
            counts.conversations += 1
            counts.turns += len(messages)
            yield Conversation(where, messages, str(path))


def mended(turns: Iterable[Message], counts: ReadCounts) -> tuple[Message, ...]:
    """Return messages without lone surrogates, which are counted."""
    return tuple(Message(turn.role, replace_surrogates(turn.content, counts)) for turn in turns)


def load_conversations(
    sources: Sequence[str | Path], options: ChatOptions, counts: ChatCounts | None = None
) -> list[Conversation]:
    """Read all files that sources name (files, folders, globs), in order.

    Errors: DataError as for reading one, and when no conversation is left.
    """
    counts = counts if counts is not None else ChatCounts()
    advice = "give records with messages, or with a prompt and an answer"
    return load_rows(sources, counts, lambda file: read_conversations(file, options, counts), "conversation", advice)


def load_rows(
    sources: Sequence[str | Path], counts: ChatCounts, read: Callable[[Path], Iterator[T]], what: str, advice: str
) -> list[T]:
    """Read all files that sources name with `read`, in order; where nothing is left, `what` and `advice` say so.

    Errors: DataError as `read` raises it, and when nothing is left.
    """
    files = find_files(sources, kinds=("json", "parquet"))
    rows = [found for file in files for found in read(file)]
    if not rows:
        names = ", ".join(str(file) for file in files[:3]) + (f" and {len(files) - 3} more" if len(files) > 3 else "")
        if counts.first_skipped is not None:
            raise DataError(f"{names}: no {what} is left; the first bad row: {counts.first_skipped}")
        raise DataError(f"{names}: no {what} in it; {advice}")
    return rows


@dataclass(frozen=True)
class Split(Generic[A]):
    """Conversations, or other rows that begin with a question, to train on and to hold out.

    ``leaks`` of them could have been held out but for others that ask the same; they stay in training.
    """

    train: list[A]
    held_out: list[A]
    leaks: int


def split_conversations(conversations: Sequence[A], share: float) -> Split[A]:
    """Hold out about a share of the conversations, chosen by the hash of their first question.

    No first question of the held-out part stands in training, in whatever case and spacing. The choice is the same on a
    rerun, in any order of the files. Where a question is asked more than once, its conversations go with training;
    only where too few others are there, all that ask the same are held out together. Errors: ConfigError for a share
    outside [0, 1).
    """
    if not 0 <= share < 1:
        raise ConfigError(f"val_fraction: {share} is outside 0 to 1; give a share such as 0.1, or 0 for none")
    groups: dict[bytes, list[int]] = {}
    for place, conversation in enumerate(conversations):
        groups.setdefault(_question_hash(conversation), []).append(place)
    wanted = round(share * len(conversations)) if len(conversations) >= MIN_CONVERSATIONS_TO_HOLD_OUT else 0
    held: set[int] = set()
    leaking: list[list[int]] = []
    for _, places in sorted(groups.items()):
        if len(held) >= wanted:
            break
        if len(places) == 1:
            held.update(places)
        else:
            leaking.append(places)
    for places in list(leaking):
        if len(held) + len(places) <= wanted:
            held.update(places)
            leaking.remove(places)
    return Split(
        train=[conversation for place, conversation in enumerate(conversations) if place not in held],
        held_out=[conversation for place, conversation in enumerate(conversations) if place in held],
        leaks=sum(map(len, leaking)),
    )


def _question_hash(conversation: Asked) -> bytes:
    text = " ".join(conversation.question.split()).casefold()
    return hashlib.blake2b(text.encode("utf-8"), digest_size=_HASH_BYTES).digest()
