"""`minigpt score`: answers as JSON lines in, the same with what a reward model gives for them out."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from minigpt.cli import console, models, stdin
from minigpt.cli.data import MapOption
from minigpt.cli.texts import typed
from minigpt.errors import DataError, MinigptError

if TYPE_CHECKING:
    from minigpt.text.chat import Message

Row = tuple[dict[str, Any], "tuple[Message, ...]"]


def score(
    model: models.ModelOption = None,
    renamed: MapOption = None,
    batch_size: Annotated[int, typer.Option(help="Answers at a time.", min=1)] = 16,
    device: models.DeviceOption = None,
) -> None:
    """Print what a reward model gives for answers.

    JSON lines in and out, with a field "reward" more.

    \b
      minigpt score -m runs/judge < answers.jsonl
      minigpt generate --chat --jsonl -m runs/mine < prompts.jsonl | minigpt score -m runs/judge

    A line is a conversation that ends with an answer, in any of the shapes that finetune reads, or what generate
    --jsonl has written. Only differences between rewards mean anything.
    """
    folder = models.resolve(model)
    from minigpt.text.conversations import parse_mapping

    mapping = parse_mapping([typed(pair) for pair in renamed or []])
    from minigpt.alignment.reward_model import load_reward_model

    judge = load_reward_model(folder, models.pick_device(device))
    waiting: list[Row] = []
    failure: MinigptError | None = None
    try:
        for row in _rows(mapping):
            waiting.append(row)
            if len(waiting) == batch_size:
                _print(waiting, judge.score([messages for _, messages in waiting]))
                waiting = []
    except MinigptError as error:  # those before it come first
        failure = error
    if waiting:
        _print(waiting, judge.score([messages for _, messages in waiting]))
    if failure is not None:
        raise failure


def _print(rows: list[Row], rewards: list[float]) -> None:
    for (record, _), reward in zip(rows, rewards, strict=True):
        console.write(json.dumps(record | {"reward": reward}, ensure_ascii=False) + "\n")


def _rows(mapping: dict[str, str]) -> Iterator[Row]:
    from minigpt.text.decoding import ReadCounts, decode_utf8

    with stdin.piped("answers") as stream:
        for count, raw in enumerate(iter(stream.readline, b""), start=1):
            text = decode_utf8(raw, ReadCounts()).strip()
            if text:
                yield _row(text, mapping, f"{stdin.NAME}:{count}")


def _row(text: str, mapping: dict[str, str], where: str) -> Row:
    """Read one line; what is wrong with it is a DataError with its number."""
    from minigpt.text.instructions import BadRecord, parse_record
    from minigpt.text.records import kind_of

    try:
        record = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: no valid JSON ({error})") from error
    if not isinstance(record, dict):
        raise DataError(f'{where}: {kind_of(record)} where an object is expected, such as {{"prompt", "response"}}')
    names = dict(mapping)
    if isinstance(record.get("text"), str) and isinstance(record.get("prompt"), str):  # as generate writes it
        names = {"response": "text"} | names
    read = record
    if isinstance(record.get("text"), str) and isinstance(record.get("messages"), list):
        read = record | {"messages": [*record["messages"], {"role": "assistant", "content": record["text"]}]}
    try:
        parsed = parse_record({name: value for name, value in read.items() if name != "label"}, names)
    except BadRecord as bad:
        raise DataError(f"{where}: {bad}") from None
    if parsed.unanswered or len(parsed.conversations) != 1:
        raise DataError(f"{where}: it does not end with one answer; give a conversation that does")
    return record, parsed.conversations[0]
