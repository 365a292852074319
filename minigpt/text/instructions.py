"""One record of an instruction file into the messages of its conversations, whatever its shape.

The fields decide the shape: ``messages`` or ``conversations`` (a list of turns), ``instruction`` with ``instances``, or
a prompt beside an answer. Tools that a record describes are told to the model in the system message; a call is an
assistant turn that holds its JSON, and what the tool gave back is a turn of the role tool.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from minigpt.errors import DataError
from minigpt.text.chat import Message
from minigpt.text.decoding import replace_surrogates
from minigpt.text.records import kind_of, quoted

# Looked for in this order; a record with fields of several shapes is read as the first of them.
LISTS = ("messages", "conversations")
PROMPTS = ("instruction", "prompt", "question", "input")
ANSWERS = ("output", "completion", "response", "answer", "chosen")
BESIDE = ("input", "context")  # what a prompt works on
_OTHERS = ("instances", "system", "history", "tools", "label", "rejected", "role", "content")
FIELDS = tuple(dict.fromkeys((*LISTS, *PROMPTS, *BESIDE, *ANSWERS, *_OTHERS)))

_PARTNERS = {"instruction": "output", "prompt": "response", "question": "answer", "input": "output"}
_ROLES = {
    "system": ("system", "developer"),
    "user": ("user", "human", "prompter"),
    "assistant": ("assistant", "gpt", "chatgpt", "bot", "model", "function_call", "tool_call"),
    "tool": ("tool", "observation", "function", "function_response", "tool_response", "ipython"),
}
_ROLE_OF = {name: role for role, names in _ROLES.items() for name in names}
_MAY_FOLLOW: dict[str | None, tuple[str, ...]] = {
    None: ("system", "user"),
    "system": ("user",),
    "user": ("assistant",),
    "assistant": ("user", "tool"),
    "tool": ("assistant", "tool"),
}
_TOOLS_INTRODUCTION = "You can call these functions. To call one, answer with its name and arguments as JSON."
_WITHOUT = "go on without them with --skip-bad"


class BadRecord(Exception):
    """What is wrong with a record and what to do; ``reason`` says it in few words, for counting."""

    def __init__(self, reason: str, fault: str, advice: str = "") -> None:
        super().__init__(f"{fault}; {advice}" if advice else fault)
        self.reason, self.fault = reason, fault


@dataclass(frozen=True)
class Parsed:
    """The conversations of a record, its shape, and how many of them ended with a question that nobody answers.

    ``liked`` is false where the record is marked as an answer that nobody should learn from.
    """

    shape: str
    conversations: tuple[tuple[Message, ...], ...]
    unanswered: int
    liked: bool


def parse_record(raw: Mapping[str, Any], mapping: Mapping[str, str], usual: str | None = None) -> Parsed:
    """Turn a record into conversations; ``mapping`` holds names of our fields and those that stand for them in a file.

    ``usual`` is the shape of the records before it; it tells which field is missing. Errors: BadRecord.
    """
    record = _Record(raw, mapping)
    shape = _shape(record)
    if shape is None:
        raise _shapeless(record, usual)
    first, last = shape.split("/")[0], shape.split("/")[-1]
    if first in LISTS:
        found = [_listed(record, first)]
    elif last == "instances":
        found = [_pair(one, first, "output") for one in _instances(record)]
    else:
        found = [_pair(record, first, last)]
    system = _system(record)
    checked = [_answered(_with_tools(_ordered(system + turns, len(system)), record)) for turns in found]
    return Parsed(
        shape=shape,
        conversations=tuple(tuple(turns) for turns in checked),
        unanswered=sum(turns[-1].role != "assistant" for turns in found),
        liked=record.fields.get("label") is not False,
    )


def parse_messages(value: object, where: str) -> list[Message]:
    """Read a conversation that goes on, from parsed JSON: a list of turns, or an object that holds one.

    Roles come in any order, and texts may be empty. What is no conversation is a DataError that names ``where``.
    """
    raw = value if isinstance(value, dict) else {"messages": value}
    record = _Record(raw, {})
    field = record.first(LISTS)
    if field is None and raw is value:
        raise DataError(f'{where}: no field "messages" (found: {quoted(list(raw))}); give a conversation')
    if field is None or not isinstance(raw[field], list) or not raw[field]:
        raise DataError(f'{where}: not a conversation; give [{{"role": "user", "content": "…"}}, …]')
    try:
        return [Message(message.role, replace_surrogates(message.content)) for message in record.messages(field)]
    except BadRecord as bad:
        raise DataError(f"{where}: {bad.fault}") from None


def joined(instruction: str, given: str) -> str:
    """Put an instruction and what it works on into one user message, a blank line between them."""
    return "\n\n".join(text for text in (instruction, given) if text.strip())


def role_named(name: Any) -> str | None:
    """Return our name for a role that files call by this one."""
    return _ROLE_OF.get(name.strip().lower()) if isinstance(name, str) else None


class _Record:
    """A record under our names for its fields; what is null is as good as not there."""

    def __init__(self, raw: Mapping[str, Any], mapping: Mapping[str, str]) -> None:
        self.raw, self.mapping = raw, mapping
        renamed = {field: raw[name] for field, name in mapping.items() if name in raw}
        self.fields = {name: value for name, value in {**raw, **renamed}.items() if value is not None}

    def called(self, field: str) -> str:
        """Name a field as it stands in the file."""
        name = self.mapping.get(field, field)
        return f'field "{name if name in self.raw else field}"'

    def first(self, names: Sequence[str]) -> str | None:
        """Return the first field that is there; those that a person named come before the others."""
        there = [name for name in names if name in self.fields]
        return min(there, key=lambda name: name not in self.mapping, default=None)

    def beside(self, prompt: str) -> str | None:
        """Return the field that holds what a prompt works on."""
        return self.first([name for name in BESIDE if name != prompt])

    def text(self, field: str) -> str:
        """Return a field that must hold text."""
        value = self.fields[field]
        if not isinstance(value, str):
            raise _bad("no text", f"{self.called(field)} holds {kind_of(value)}, not text")
        return value

    def turns(self, field: str) -> list[Message]:
        """Return the messages of a field, where none but a system message, which is left out, may be empty."""
        messages = self.messages(field)
        for number, message in enumerate(messages, start=1):
            if not message.content.strip() and message.role in ("user", "assistant"):
                raise _empty(message.role, f"message {number} ({message.role})")
        return [message for message in messages if message.content.strip() or message.role != "system"]

    def messages(self, field: str) -> list[Message]:
        """Return the messages of a field that must hold a list of them, or one."""
        value = self.fields[field]
        if not isinstance(value, dict | list):
            raise _bad("no text", f"{self.called(field)} holds {kind_of(value)}, not a list of messages")
        items = [value] if isinstance(value, dict) else value
        return [self.message(item, number) for number, item in enumerate(items, start=1)]

    def message(self, item: Any, number: int) -> Message:
        """Read one turn: role and content, or from and value."""
        if not isinstance(item, dict):
            raise _bad("no text", f"message {number} is {kind_of(item)}, not an object with role and content")
        name = next((item[key] for key in (self.mapping.get("role"), "role", "from") if key in item), None)
        role = role_named(name)
        if role is None:
            found = f"the role {str(name)[:40]!r}" if name is not None else f"no role (found: {quoted(list(item))})"
            raise _bad("unknown role", f"message {number} has {found}; known are {', '.join(_ROLES)}")
        keys = (self.mapping.get("content"), "content", "value")
        content = next((item[key] for key in keys if item.get(key) is not None), None)
        calls = _calls(item, number) if role == "assistant" else []
        return Message(role, "\n".join([*([_content(content, number)] if content or not calls else []), *calls]))


def _bad(reason: str, text: str) -> BadRecord:
    return BadRecord(reason, text, f"mend such rows, or {_WITHOUT}")


def _empty(role: str, what: str) -> BadRecord:
    return _bad("empty answer" if role == "assistant" else "empty prompt", f"{what} is empty")


def _are_objects(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, dict) for item in value)


def _shape(record: _Record) -> str | None:
    """Name the shape by the fields it is read from."""
    turns, prompt, answer = record.first(LISTS), record.first(PROMPTS), record.first(ANSWERS)
    named = prompt in record.mapping or answer in record.mapping
    if turns is not None and (turns in record.mapping or not named):
        return turns
    if prompt is not None and "instances" in record.fields:
        return f"{prompt}/instances"
    if prompt is None or answer is None:
        return None
    return "/".join(name for name in (prompt, record.beside(prompt), answer) if name is not None)


def _shapeless(record: _Record, usual: str | None) -> BadRecord:
    """Say which field is missing, and how to name the one that may be meant."""
    prompt, answer = record.first(PROMPTS), record.first(ANSWERS)
    if usual is not None:
        wanted = usual.split("/")[0 if prompt is None else -1]
    else:
        wanted = _PARTNERS[prompt] if prompt is not None else "prompt" if answer is not None else "messages"
    written = record.mapping.get(wanted, wanted)
    rivals = (written, *(name for group in (LISTS, PROMPTS, ANSWERS) if wanted in group for name in group))
    if null := next((name for name in rivals if name in record.raw), None):
        return _bad("missing field", f'field "{null}" holds null')
    known = {*FIELDS, *record.mapping.values()}
    others = {name: value for name, value in record.raw.items() if name not in known}
    turns = [name for name, value in others.items() if _are_objects(value)]
    texts = [name for name, value in others.items() if isinstance(value, str)]
    meant = turns if wanted in LISTS else texts
    if meant:
        advice = f"name it with --map {wanted}={meant[0]}"
    elif wanted in LISTS and len(texts) > 1:
        advice = f"name what holds the conversation with --map prompt={texts[0]} --map response={texts[1]}"
    elif usual is None:
        advice = f"name it with --map {wanted}=NAME"
    else:
        advice = f"mend such rows, or {_WITHOUT}"
    return BadRecord("missing field", f'no field "{written}" (found: {quoted(list(record.raw))}); {advice}')


def _listed(record: _Record, field: str) -> list[Message]:
    """Read a list of turns; where it ends with a question, a chosen answer beside it belongs to it."""
    messages = record.turns(field)
    if "chosen" in record.fields and (not messages or messages[-1].role != "assistant"):
        messages += _side(record, "chosen", "assistant")
    return messages


def _pair(record: _Record, prompt: str, answer: str) -> list[Message]:
    """Read earlier turns, a prompt with what it works on, and the answer."""
    messages = _history(record) + _side(record, prompt, "user")
    if not messages or not messages[-1].content.strip():
        raise _empty("user", record.called(prompt))
    return messages + _side(record, answer, "assistant")


def _side(record: _Record, field: str, role: str) -> list[Message]:
    """Read one side of an exchange: a text, or messages."""
    if not isinstance(record.fields[field], str):
        return record.turns(field)
    text = record.text(field)
    if role == "assistant" and not text.strip():
        raise _empty(role, record.called(field))
    beside = record.beside(field) if role == "user" else None
    return [Message(role, text if beside is None else joined(text, record.text(beside)))]


def _history(record: _Record) -> list[Message]:
    pairs = record.fields.get("history") or []
    if not isinstance(pairs, list):
        raise _bad("no text", f"{record.called('history')} holds {kind_of(pairs)}, not a list of exchanges")
    messages = []
    for pair in pairs:
        if not (isinstance(pair, list) and len(pair) == 2 and all(isinstance(text, str) for text in pair)):
            raise _bad("no text", f"{record.called('history')} holds {kind_of(pair)} that is no pair of texts")
        for role, text in zip(("user", "assistant"), pair, strict=True):
            if not text.strip():
                raise _empty(role, f"a text of the {role} in {record.called('history')}")
        messages += [Message("user", pair[0]), Message("assistant", pair[1])]
    return messages


def _instances(record: _Record) -> list[_Record]:
    """Give each instance of a task the task's instruction."""
    instances = record.fields["instances"]
    if not _are_objects(instances):
        raise _bad("no text", f"{record.called('instances')} holds no list of objects with input and output")
    for number, one in enumerate(instances, start=1):
        if one.get("output") is None:
            raise _bad("missing field", f'instance {number} has no field "output" (found: {quoted(list(one))})')
    return [_Record({**record.fields, **one}, {}) for one in instances]


def _content(content: Any, number: int) -> str:
    """Read a text, or a list of parts that are all text."""
    if isinstance(content, str):
        return content
    if _are_objects(content) and all(isinstance(part.get("text"), str) for part in content):
        return "".join(part["text"] for part in content)
    found = "no content" if content is None else f"{kind_of(content)} as content"
    raise _bad("no text", f"message {number} has {found}, where text is due")


def _calls(item: Mapping[str, Any], number: int) -> list[str]:
    """Return the calls of tools beside an assistant's content, each as one line of JSON."""
    calls = item.get("tool_calls") or []
    if calls and not _are_objects(calls):
        raise _bad("no text", f"message {number} has {kind_of(calls)} as tool_calls, where a list of objects is due")
    lines = []
    for call in calls:
        function = call["function"] if isinstance(call.get("function"), dict) else call
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            with suppress(ValueError, RecursionError):  # a text that is no JSON stays one
                arguments = json.loads(arguments)
        lines.append(json.dumps({"name": function.get("name"), "arguments": arguments}, ensure_ascii=False))
    return lines


def _system(record: _Record) -> list[Message]:
    text = record.text("system") if "system" in record.fields else ""
    return [Message("system", text)] if text.strip() else []


def _with_tools(messages: list[Message], record: _Record) -> list[Message]:
    """Tell the model of the tools it may call, at the end of the system message."""
    tools = record.fields.get("tools")
    if isinstance(tools, list | dict):
        tools = json.dumps(tools, ensure_ascii=False) if tools else ""
    if tools is not None and not isinstance(tools, str):
        raise _bad("no text", f"{record.called('tools')} holds {kind_of(tools)}, not text or a list")
    if not tools or tools.strip() in ("", "[]", "{}", "null"):
        return messages
    told = f"{_TOOLS_INTRODUCTION}\n{tools.strip()}"
    if messages[0].role == "system":
        return [Message("system", f"{messages[0].content.strip()}\n\n{told}"), *messages[1:]]
    return [Message("system", told), *messages]


def _ordered(messages: list[Message], before: int) -> list[Message]:
    """Check the order of roles; the first `before` messages do not stand in the file's list."""
    previous: str | None = None
    for number, message in enumerate(messages, start=1 - before):
        due = _MAY_FOLLOW[previous]
        if message.role not in due:
            place = f"after {previous}" if previous is not None else "at the start"
            text = f"message {number} has the role {message.role} {place}, where {' or '.join(due)} is due"
            raise _bad("roles out of order", text)
        previous = message.role
    return messages


def _answered(messages: list[Message]) -> list[Message]:
    """Leave out what comes after the last answer."""
    last = max((place for place, message in enumerate(messages) if message.role == "assistant"), default=None)
    if last is None:
        raise _bad("no answer", f"no answer of an assistant among {len(messages)} messages")
    return messages[: last + 1]
