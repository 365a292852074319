"""What `minigpt generate` is to answer: a prompt or a conversation, from an argument, a file or stdin."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from minigpt.cli import stdin
from minigpt.cli.texts import typed
from minigpt.errors import DataError, MinigptError, UsageError
from minigpt.text.decoding import ReadCounts, decode_utf8, replace_surrogates
from minigpt.text.records import kind_of, quoted

if TYPE_CHECKING:
    from minigpt.text.chat import Message

STDIN = "-"


@dataclass(frozen=True)
class Ask:
    """One prompt to continue or conversation to answer, with the id it came with and the seeds of its samples.

    The seeds are worked out as they are read, once: there may be more of them than memory holds.
    """

    prompt: str
    seeds: Iterator[int]
    messages: tuple[Message, ...] = ()  # of a chat
    record: dict[str, Any] = field(default_factory=dict)  # what of it comes out again as JSON


@dataclass(frozen=True)
class Source:
    """Where prompts come from. `messages` names the file of a conversation; `chat` makes each prompt a question."""

    prompt: str | None = None
    lines: bool = False
    jsonl: bool = False
    messages: str | None = None
    chat: bool = False
    system: str | None = None

    def check(self) -> None:
        """Raise a UsageError where these do not go together, or where there is nothing to read."""
        if self.lines and self.jsonl:
            raise UsageError("--lines and --jsonl are two ways to read stdin; choose one")
        if self.messages is not None and (self.prompt is not None or self.lines or self.jsonl):
            raise UsageError("--messages is a whole conversation; leave out the prompt, --lines and --jsonl")
        if self.prompt is not None and (self.lines or self.jsonl):
            raise UsageError("a prompt as argument does not go with --lines or --jsonl; pipe the prompts")
        if self.system is not None and not self.chat:
            raise UsageError("--system is for a chat; add --chat")
        given = self.prompt is not None or self.messages not in (None, STDIN) or self.lines or self.jsonl
        if not given and not stdin.is_piped():
            raise UsageError('no prompt; give one ("" for none) or pipe text: echo "Once" | minigpt generate')

    def asks(self, seed: int, samples: int) -> Iterator[Ask]:
        """Yield the prompts with their seeds: the first text of all has the run's own seed."""
        from minigpt.inference.sampling import row_seed

        for number, (text, messages, record) in enumerate(self._rows()):
            seeds = map(partial(row_seed, seed), range(number * samples, (number + 1) * samples))
            yield Ask(text, seeds, messages, record)

    def _rows(self) -> Iterator[tuple[str, tuple[Message, ...], dict[str, Any]]]:
        if self.messages is not None:
            if self.messages == STDIN:
                yield self._conversation(_parse(stdin.read_text("a conversation"), stdin.NAME), stdin.NAME)
            else:
                yield self._conversation(read_json(self.messages), self.messages)
        elif self.lines or self.jsonl:
            with stdin.piped("prompts") as stream:
                for count, raw in enumerate(iter(stream.readline, b""), start=1):
                    text = decode_utf8(raw, ReadCounts()).removesuffix("\n").removesuffix("\r")
                    if self.lines:
                        yield self._question(text)
                    elif text.strip():
                        yield self._json_row(text, f"{stdin.NAME}:{count}")
        else:
            piped = stdin.read_text("a prompt") if stdin.is_piped() else ""
            if self.prompt is None and not piped:
                raise DataError('stdin: no text came through the pipe; check what feeds it, or give "" for no prompt')
            texts = (piped.removesuffix("\n"), typed(self.prompt) or "")
            yield self._question("\n".join(text for text in texts if text))

    def _question(self, text: str) -> tuple[str, tuple[Message, ...], dict[str, Any]]:
        """Take a text as a prompt, and in a chat as what the user says first."""
        if not self.chat:
            return text, (), {"prompt": text}
        from minigpt.text.chat import Message

        return text, self._with_system((Message("user", text),)), {"prompt": text}

    def _conversation(self, value: object, where: str) -> tuple[str, tuple[Message, ...], dict[str, Any]]:
        from minigpt.text.instructions import parse_messages

        messages = self._with_system(tuple(parse_messages(value, where)))
        if messages[-1].role in ("assistant", "system"):
            raise DataError(f"{where}: the last message is of the {messages[-1].role}; end with one to answer")
        plain = [{"role": message.role, "content": message.content} for message in messages]
        return "", messages, {"messages": plain}

    def _with_system(self, messages: tuple[Message, ...]) -> tuple[Message, ...]:
        """Put --system before a conversation that has no system message of its own."""
        if self.system is None or messages[0].role == "system":
            return messages
        from minigpt.text.chat import Message

        return Message("system", typed(self.system)), *messages

    def _json_row(self, line: str, where: str) -> tuple[str, tuple[Message, ...], dict[str, Any]]:
        """Read one JSON line; what is wrong with it is a DataError with its number."""
        record = _parse(line, where)
        if self.chat and isinstance(record, dict) and "messages" in record:
            text, messages, kept = self._conversation(record, where)
        elif isinstance(record, dict) and isinstance(record.get("prompt"), str):
            text, messages, kept = self._question(replace_surrogates(record["prompt"]))
        else:
            raise DataError(f"{where}: {_fault(record)}")
        return text, messages, ({"id": record["id"]} if "id" in record else {}) | kept


def _fault(record: object) -> str:
    """Say what is wrong with a JSON line that holds no prompt."""
    if not isinstance(record, dict):
        return f'{kind_of(record)} where an object is expected; write it as {{"prompt": "..."}}'
    if "prompt" in record:
        return f'field "prompt" holds {kind_of(record["prompt"])}, not text'
    return f'no field "prompt" (found: {quoted(list(record))}); conversations in "messages" need --chat'


def read_json(name: str) -> object:
    """Return what a JSON file holds; one that cannot be read is a DataError."""
    try:
        with open(name, "rb") as file:
            text = decode_utf8(file.read(), ReadCounts())
    except OSError as error:
        raise DataError(f"{name}: {error.strerror or 'cannot be read'}") from error
    return _parse(text, name)


def _parse(text: str, where: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: no valid JSON ({error})") from error


def batches(asks: Iterator[Ask], size: int) -> Iterator[list[tuple[Ask, int]]]:
    """Group prompts and seeds; where one cannot be read, those before it come first, then the error."""
    batch: list[tuple[Ask, int]] = []
    failure: MinigptError | None = None
    try:
        for row in ((ask, seed) for ask in asks for seed in ask.seeds):
            batch.append(row)
            if len(batch) == size:
                yield batch
                batch = []
    except MinigptError as error:
        failure = error
    if batch:
        yield batch
    if failure is not None:
        raise failure
