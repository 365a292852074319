"""Preference files: pairs of a better and a worse answer, answers marked good or bad, and prompts alone.

Each record is read as conversations are (``text/instructions.py``), once for each of its answers. A pair's prompt is
what its two conversations share, so that all shapes go one way: ``prompt`` or ``instruction`` with ``chosen`` and
``rejected``, turns in ``messages`` or ``conversations`` beside them, or two whole conversations.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minigpt.text.chat import Message
from minigpt.text.conversations import ChatCounts, ChatOptions, load_rows, mended, parsed_records
from minigpt.text.instructions import LISTS, PROMPTS, BadRecord, parse_record, role_named
from minigpt.text.records import kind_of, quoted

__all__ = [
    "Labelled",
    "Pair",
    "PreferenceCounts",
    "Prompt",
    "load_labelled",
    "load_pairs",
    "load_prompts",
    "read_labelled",
    "read_pairs",
    "read_prompts",
]

_SIDES = ("chosen", "rejected")
_ANY_ANSWER = "…"  # stands for the answer of a prompt without one, while it is parsed
_MEND = "mend such rows, or go on without them with --skip-bad"
_Messages = tuple[Message, ...]


@dataclass(frozen=True)
class Pair:
    """A prompt and two answers to it, and the file and line they stand in.

    An answer is all messages from the first of the assistant that the prompt does not hold.
    """

    where: str
    prompt: _Messages
    chosen: _Messages
    rejected: _Messages

    @property
    def question(self) -> str:
        """The first message of the user."""
        return _question(self.prompt)


@dataclass(frozen=True)
class Labelled:
    """A prompt, one answer to it, and whether it is a good one; the answer begins after the user's last message."""

    where: str
    prompt: _Messages
    answer: _Messages
    good: bool

    @property
    def question(self) -> str:
        """The first message of the user."""
        return _question(self.prompt)


@dataclass(frozen=True)
class Prompt:
    """Messages that a model is to answer, and all fields of their record, for rewards that need more of it."""

    where: str
    messages: _Messages
    row: dict[str, Any]

    @property
    def question(self) -> str:
        """The first message of the user."""
        return _question(self.messages)


@dataclass
class PreferenceCounts(ChatCounts):
    """What reading found; `same` pairs have one answer for both and were left out, since they teach nothing."""

    same: int = 0

    def notes(self) -> list[str]:
        """Say in a few words each what was left out or mended; nothing where nothing was."""
        same = f"{self.same:,} pair{'s' if self.same != 1 else ''} of equal answers left out"
        return [*([same] if self.same else []), *super().notes()]


@dataclass(frozen=True)
class _Row:
    """A parsed record: the name of its shape, its prompt, its one or two answers, and what else it says."""

    shape: str
    prompt: _Messages
    answers: tuple[_Messages, ...]
    good: bool
    record: Mapping[str, Any]


def read_pairs(path: Path, options: ChatOptions, counts: PreferenceCounts) -> Iterator[Pair]:
    """Yield the pairs of a file; exact duplicates are dropped and pairs of equal answers left out, both counted.

    Errors: DataError with file and line for a row that holds none, such as one with an empty answer, unless such rows
    are skipped.
    """
    for where, row in parsed_records(path, options, counts, _parse_pair):
        prompt, chosen, rejected = (mended(part, counts) for part in (row.prompt, *row.answers))
        if _equal(chosen, rejected):
            counts.same += 1
        elif counts.is_new((*prompt, *chosen, *rejected), str(len(prompt)), str(len(chosen))):
            _count(counts, prompt, chosen, rejected)
            yield Pair(where, prompt, chosen, rejected)


def read_labelled(path: Path, options: ChatOptions, counts: PreferenceCounts) -> Iterator[Labelled]:
    """Yield the answers of a file that are marked good or bad: ``label`` is true or false, or 1 or 0.

    A pair without a label is two of them, its chosen answer a good one. Errors: DataError with file and line for a row
    that holds none, unless such rows are skipped.
    """
    for where, row in parsed_records(path, options, counts, _parse_labelled):
        prompt, answers = mended(row.prompt, counts), [mended(answer, counts) for answer in row.answers]
        if len(answers) == 2 and _equal(*answers):
            counts.same += 1
            continue
        for answer, good in zip(answers, (row.good, not row.good), strict=False):
            if counts.is_new((*prompt, *answer), str(good)):
                _count(counts, prompt, answer)
                yield Labelled(where, prompt, answer, good)


def read_prompts(path: Path, options: ChatOptions, counts: PreferenceCounts) -> Iterator[Prompt]:
    """Yield the prompts of a file; an answer that stands at the end of one is left off, and stays in the row.

    Errors: DataError with file and line for a row that holds none, unless such rows are skipped.
    """
    for where, row in parsed_records(path, options, counts, _parse_prompt):
        messages = mended(row.prompt, counts)
        if counts.is_new(messages, json.dumps(row.record, sort_keys=True, default=str)):
            _count(counts, messages)
            yield Prompt(where, messages, dict(row.record))


def load_pairs(
    sources: Sequence[str | Path], options: ChatOptions, counts: PreferenceCounts | None = None
) -> list[Pair]:
    """Read the pairs of all files that sources name; a DataError too when there is none."""
    counts = counts if counts is not None else PreferenceCounts()
    advice = "give records with a prompt, chosen and rejected"
    return load_rows(sources, counts, lambda file: read_pairs(file, options, counts), "pair", advice)


def load_labelled(
    sources: Sequence[str | Path], options: ChatOptions, counts: PreferenceCounts | None = None
) -> list[Labelled]:
    """Read the labelled answers of all files that sources name; a DataError too when there is none."""
    counts = counts if counts is not None else PreferenceCounts()
    advice = "give records with a prompt, an answer and a label"
    return load_rows(sources, counts, lambda file: read_labelled(file, options, counts), "labelled answer", advice)


def load_prompts(
    sources: Sequence[str | Path], options: ChatOptions, counts: PreferenceCounts | None = None
) -> list[Prompt]:
    """Read the prompts of all files that sources name; a DataError too when there is none."""
    counts = counts if counts is not None else PreferenceCounts()
    advice = "give records with messages or a prompt"
    return load_rows(sources, counts, lambda file: read_prompts(file, options, counts), "prompt", advice)


def _equal(one: _Messages, other: _Messages) -> bool:
    plain = [[(message.role, message.content.strip()) for message in messages] for messages in (one, other)]
    return plain[0] == plain[1]


def _question(messages: _Messages) -> str:
    return next(message.content for message in messages if message.role == "user")


def _count(counts: ChatCounts, *parts: _Messages) -> None:
    counts.conversations += 1
    counts.turns += sum(map(len, parts))


def _parse_pair(raw: Mapping[str, Any], mapping: Mapping[str, str], _usual: str | None) -> _Row:
    names = [_present(raw, mapping, side, "a pair") for side in _SIDES]
    shapes, sides = zip(*(_conversation(raw, mapping, name) for name in names), strict=True)
    chosen, rejected = sides
    shared = 0
    while shared < min(map(len, sides)) and chosen[shared] == rejected[shared]:
        shared += 1
    if shared == len(chosen) == len(rejected):  # equal answers: told from an empty one by read_pairs
        shared = len(chosen) - 1
    while shared and (shared == min(map(len, sides)) or chosen[shared].role != "assistant" or
                      rejected[shared].role != "assistant"):  # fmt: skip
        shared -= 1
    if not shared:
        raise BadRecord("no common prompt", f'"{names[0]}" and "{names[1]}" begin with different questions; {_MEND}')
    return _Row("/".join([*shapes[0], *_SIDES]), chosen[:shared], (chosen[shared:], rejected[shared:]), True, raw)


def _parse_labelled(raw: Mapping[str, Any], mapping: Mapping[str, str], usual: str | None) -> _Row:
    there = [raw.get(mapping.get(field, field)) is not None for field in (*_SIDES, "label")]
    if there == [True, True, False]:
        return _parse_pair(raw, mapping, usual)
    name = _present(raw, mapping, "label", "a labelled answer")
    if raw[name] not in (True, False):
        raise BadRecord("no label", f'field "{name}" holds {kind_of(raw[name])}, not true or false; {_MEND}')
    parsed = parse_record(raw, mapping, usual and usual.removesuffix("/label"))
    if parsed.unanswered:
        raise BadRecord("no answer", f"a question stands at the end, where the answer that is marked is due; {_MEND}")
    messages = parsed.conversations[0]
    end = _after_user(messages)
    return _Row(f"{parsed.shape}/label", messages[:end], (messages[end:],), bool(raw[name]), raw)


def _parse_prompt(raw: Mapping[str, Any], mapping: Mapping[str, str], _usual: str | None) -> _Row:
    shape, messages = _conversation({**raw, _ANY_ANSWER: _ANY_ANSWER}, mapping, _ANY_ANSWER)
    given = messages[:-1] if messages[-1].content == _ANY_ANSWER else messages
    end = len(given) if given[-1].role == "tool" else _after_user(given)
    return _Row("/".join(shape), given[:end], (), True, raw)


def _after_user(messages: _Messages) -> int:
    """Return the place after the last message of the user."""
    return max(place for place, message in enumerate(messages, start=1) if message.role == "user")


def _present(raw: Mapping[str, Any], mapping: Mapping[str, str], field: str, what: str) -> str:
    """Return the name under which a field stands in a record."""
    name = mapping.get(field, field)
    if raw.get(name) is not None:
        return name
    advice = f"{what} needs it; name it with --map {field}=NAME, or {_MEND}"
    found = f'field "{name}" holds null' if name in raw else f'no field "{name}" (found: {quoted(list(raw))})'
    raise BadRecord("missing field", f"{found}; {advice}")


def _conversation(raw: Mapping[str, Any], mapping: Mapping[str, str], answer: str) -> tuple[list[str], _Messages]:
    """Read a record as the conversation that ends with the field `answer`: the fields of its prompt, and its messages.

    A field that holds a whole conversation, from the system or the user on, brings its own prompt.
    """
    if _role(raw[answer], 0, mapping) in ("system", "user"):
        sides = {*_SIDES, *(mapping.get(side, side) for side in _SIDES), "messages"}
        whole = {name: value for name, value in raw.items() if name not in sides} | {"messages": raw[answer]}
        names = {ours: name for ours, name in mapping.items() if ours not in (*_SIDES, *LISTS)}
        return [], parse_record(whole, names).conversations[0]
    texts, lists = (
        [name for name in names if raw.get(mapping.get(name, name)) is not None] for names in (PROMPTS, LISTS)
    )
    if not texts and not lists:
        found = quoted([name for name in raw if name != _ANY_ANSWER])
        advice = f"name it with --map prompt=NAME, or {_MEND}"
        raise BadRecord("missing field", f'no field "prompt" (found: {found}); {advice}')
    names = {name: mapping.get(name, name) for name in ([] if texts else lists)}
    for name in names.values():
        if answer != _ANY_ANSWER and _role(raw[name], -1, mapping) == "assistant":
            raise BadRecord("two answers", f'field "{name}" ends with an answer, beside "{answer}"; {_MEND}')
    without = {name: value for name, value in raw.items() if name != "instances"}
    parsed = parse_record(without, {**mapping, **names, "chosen": answer})
    fields = parsed.shape.split("/")
    return fields if fields[0] in LISTS else fields[:-1], parsed.conversations[0]


def _role(value: Any, place: int, mapping: Mapping[str, str]) -> str | None:
    """Return our name for the role of one of a field's messages, where it holds a list of them."""
    message = value[place] if isinstance(value, list) and value else None
    if not isinstance(message, dict):
        return None
    return next((role_named(message[key]) for key in (mapping.get("role"), "role", "from") if key in message), None)
