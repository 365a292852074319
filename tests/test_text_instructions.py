"""Records of every known shape into messages, and what is said of those that have none."""

from __future__ import annotations

import json
from typing import Any

import pytest

from minigpt.errors import DataError
from minigpt.text.chat import Message
from minigpt.text.instructions import BadRecord, Parsed, parse_messages, parse_record

Turns = list[tuple[str, str]]
Q, A = ("user", "2 + 2?"), ("assistant", "4")


def parsed(record: dict[str, Any], **mapping: str) -> Parsed:
    return parse_record(record, mapping)


def turns(record: dict[str, Any], **mapping: str) -> Turns:
    (messages,) = parsed(record, **mapping).conversations
    return [(message.role, message.content) for message in messages]


def bad(record: dict[str, Any], usual: str | None = None, **mapping: str) -> tuple[str, str]:
    with pytest.raises(BadRecord) as raised:
        parse_record(record, mapping, usual)
    assert "\n" not in str(raised.value)
    return raised.value.reason, str(raised.value)


def messages(*pairs: tuple[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content} for role, content in pairs]}


CHATML_STYLE = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]
SHAREGPT = [{"from": "human", "value": "2 + 2?"}, {"from": "gpt", "value": "4"}]


@pytest.mark.parametrize(
    ("record", "shape"),
    [
        ({"messages": CHATML_STYLE, "id": 7}, "messages"),
        ({"messages": SHAREGPT}, "messages"),
        ({"conversations": SHAREGPT, "system": ""}, "conversations"),
        ({"conversations": CHATML_STYLE, "tools": "[]"}, "conversations"),
        ({"instruction": "2 + 2?", "input": "", "output": "4"}, "instruction/input/output"),
        ({"instruction": "2 + 2?", "input": None, "output": "4"}, "instruction/output"),
        ({"instruction": "2 + 2?", "output": "4", "chosen": "five", "rejected": "six"}, "instruction/output"),
        ({"instruction": "2 + 2?", "context": " ", "response": "4", "category": "x"}, "instruction/context/response"),
        ({"instruction": "2 + 2?", "instances": [{"input": "", "output": "4"}]}, "instruction/instances"),
        ({"prompt": "2 + 2?", "completion": "4"}, "prompt/completion"),
        ({"prompt": "2 + 2?", "response": "4"}, "prompt/response"),
        ({"prompt": "2 + 2?", "chosen": "4", "rejected": "5"}, "prompt/chosen"),
        ({"prompt": CHATML_STYLE[:1], "completion": CHATML_STYLE[1:]}, "prompt/completion"),
        ({"prompt": CHATML_STYLE[:1], "chosen": SHAREGPT[1]}, "prompt/chosen"),
        ({"question": "2 + 2?", "answer": "4"}, "question/answer"),
        ({"input": "2 + 2?", "output": "4"}, "input/output"),
        ({"conversations": SHAREGPT[:1], "chosen": SHAREGPT[1], "rejected": SHAREGPT[0]}, "conversations"),
        ({"messages": CHATML_STYLE, "prompt": "another", "completion": "one", "chosen": CHATML_STYLE}, "messages"),
    ],
)
def test_every_shape_gives_the_same_turns(record: dict[str, Any], shape: str) -> None:
    found = parsed(record)
    assert (found.shape, found.liked, found.unanswered) == (shape, True, 0)
    assert turns(record) == [Q, A]


def test_an_instruction_and_its_input_are_one_message() -> None:
    record = {"instruction": "Add.", "input": "2, 2", "output": "4"}
    assert turns(record) == [("user", "Add.\n\n2, 2"), A]
    assert turns({**record, "instruction": " "}) == [("user", "2, 2"), A]
    assert turns({"question": "Who?", "context": "A story.", "answer": "She."})[0] == ("user", "Who?\n\nA story.")


def test_each_instance_is_a_conversation() -> None:
    instances = [{"input": "2, 2", "output": "4"}, {"input": "", "output": "nothing"}, {"output": "0"}]
    found = parsed({"instruction": "Add.", "instances": instances, "is_classification": False})
    assert [[message.content for message in one] for one in found.conversations] == [
        ["Add.\n\n2, 2", "4"],
        ["Add.", "nothing"],
        ["Add.", "0"],
    ]


def test_system_and_history_come_first() -> None:
    record = {"system": "Be brief.", "history": [["Hi", "Hello"]], "instruction": "2 + 2?", "input": "", "output": "4"}
    assert turns(record) == [("system", "Be brief."), ("user", "Hi"), ("assistant", "Hello"), Q, A]
    assert turns({"system": "Be brief.", "conversations": SHAREGPT}) == [("system", "Be brief."), Q, A]
    assert turns(messages(("system", " "), Q, A)) == [Q, A], "an empty system message is none"


def test_other_names_for_roles() -> None:
    names = [("developer", "s"), ("Human", "u"), ("model", "a"), ("prompter", "u"), ("bot", "a")]
    assert [role for role, _ in turns(messages(*names))] == ["system", "user", "assistant", "user", "assistant"]


def test_content_in_parts_is_joined() -> None:
    parts = [{"type": "text", "text": "2 + "}, {"type": "text", "text": "2?"}]
    assert turns(messages(("user", parts), A)) == [Q, A]
    image = [{"type": "image_url", "image_url": "x.png"}]
    assert bad(messages(("user", image), A))[1].startswith("message 1 has a list as content, where text is due; ")


def test_a_call_is_an_answer_and_its_result_a_turn_of_the_tool() -> None:
    call, result = '{"name": "add", "arguments": {"a": 2, "b": 2}}', '{"sum": 4}'
    expected = [Q, ("assistant", call), ("tool", result), A]
    rows = [("human", Q[1]), ("function_call", call), ("observation", result), ("gpt", "4")]
    assert turns({"conversations": [{"from": role, "value": value} for role, value in rows]}) == expected
    beside = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2, "b": 2}'}}
    for content in ({"content": None}, {"content": ""}, {}):
        items = [CHATML_STYLE[0], {"role": "assistant", "tool_calls": [beside], **content}]
        items += [{"role": "tool", "tool_call_id": "c1", "content": result}, {**CHATML_STYLE[1], "tool_calls": None}]
        assert turns({"messages": items}) == expected
    both = [CHATML_STYLE[0], {"role": "assistant", "content": "I add.", "tool_calls": [beside, {"function": {}}]}]
    assert turns({"messages": both})[1][1].split("\n") == ["I add.", call, '{"name": null, "arguments": null}']


@pytest.mark.parametrize("tools", ['[{"name": "加"}]', [{"name": "加"}]])
def test_tools_are_told_in_the_system_message(tools: Any) -> None:
    ((role, told), *rest) = turns({"conversations": SHAREGPT, "tools": tools})
    assert role == "system"
    assert told.endswith('JSON.\n[{"name": "加"}]')
    assert rest == [Q, A]
    with_system = turns({"messages": [{"role": "system", "content": "Be brief.\n"}, *CHATML_STYLE], "tools": tools})
    assert with_system == [("system", "Be brief.\n\n" + told), Q, A]


@pytest.mark.parametrize("tools", ["", " [] ", [], {}, None])
def test_no_tools_are_none(tools: Any) -> None:
    assert turns({"conversations": SHAREGPT, "tools": tools}) == [Q, A]


def test_what_follows_the_last_answer_is_left_off() -> None:
    found = parsed(messages(Q, A, ("user", "And 3 + 3?")))
    assert found.unanswered == 1
    assert turns(messages(Q, A, ("user", "And 3 + 3?"))) == [Q, A]
    assert turns(messages(Q, A, ("tool", "4"))) == [Q, A]


@pytest.mark.parametrize(("label", "liked"), [(True, True), (False, False), (0, True), (None, True), ("no", True)])
def test_a_false_label_marks_a_bad_answer(label: Any, liked: bool) -> None:
    assert parsed({"messages": CHATML_STYLE, "label": label}).liked is liked


def test_fields_of_other_names_are_named() -> None:
    assert turns({"conversation": CHATML_STYLE}, messages="conversation") == [Q, A]
    assert turns({"q": "2 + 2?", "a": "4"}, prompt="q", response="a") == [Q, A]
    assert turns({"chat": [{"who": "human", "text": "2 + 2?"}, {"who": "gpt", "text": "4"}]}, messages="chat",
                 role="who", content="text") == [Q, A]  # fmt: skip
    record = {"messages": [], "prompt": "other", "instruction": "other", "output": "other", "q": "2 + 2?", "a": "4"}
    assert turns(record, prompt="q", response="a") == [Q, A], "what a person names comes before what is found"
    assert turns({"messages": CHATML_STYLE}, messages="chat") == [Q, A], "a file that has our name needs no other"
    assert turns({"messages": CHATML_STYLE, "q": "x", "a": "y"}, messages="messages") == [Q, A]


def test_a_missing_field_is_said_with_what_was_found() -> None:
    assert bad({"conversation": CHATML_STYLE, "id": 1}) == (
        "missing field",
        'no field "messages" (found: "conversation", "id"); name it with --map messages=conversation',
    )
    assert bad({"q": "2 + 2?", "a": "4"})[1] == (
        'no field "messages" (found: "q", "a"); name what holds the conversation with --map prompt=q --map response=a'
    )
    assert bad({"id": 1})[1] == 'no field "messages" (found: "id"); name it with --map messages=NAME'
    assert bad({})[1].startswith('no field "messages" (found: none); ')
    assert bad({"prompt": "2 + 2?", "a": "4"})[1].endswith("name it with --map response=a")
    assert bad({"instruction": "2 + 2?", "input": "", "a": "4"})[1].startswith('no field "output" (found: ')
    assert bad({"q": "2 + 2?", "answer": "4"})[1].endswith("name it with --map prompt=q")
    assert bad({"q": "2 + 2?"}, prompt="q")[1] == 'no field "response" (found: "q"); name it with --map response=NAME'
    assert bad({"x": 1}, messages="chat")[1].startswith('no field "chat" (found: "x"); ')


def test_a_field_that_other_rows_had_is_the_one_that_is_missing() -> None:
    mend = "mend such rows, or go on without them with --skip-bad"
    assert bad({"id": 3}, "messages")[1] == f'no field "messages" (found: "id"); {mend}'
    assert bad({"prompt": "2 + 2?"}, "prompt/completion")[1].startswith('no field "completion" (found: "prompt"); mend')
    assert bad({"answer": "4"}, "question/context/answer")[1].startswith('no field "question" (found: "answer"); mend')
    assert bad({"id": 3}, "instruction/instances")[1].startswith('no field "instruction" (found: ')
    assert bad({"instruction": "x"}, "instruction/instances")[1].startswith('no field "instances" (found: ')
    assert bad({"prompt": "2 + 2?"}, "conversations")[1].startswith('no field "conversations" (found: ')
    assert bad({"prompt": "x", "completion": None}, "prompt/completion")[1] == f'field "completion" holds null; {mend}'


@pytest.mark.parametrize(
    ("record", "reason", "text"),
    [
        ({"instruction": 7, "output": "x"}, "no text", 'field "instruction" holds a number, not a list of messages'),
        ({"prompt": "x", "completion": 7}, "no text", 'field "completion" holds a number, not '),
        ({"prompt": "x", "context": 7, "completion": "x"}, "no text", 'field "context" holds a number, not text'),
        ({"prompt": "x", "completion": "x", "system": []}, "no text", 'field "system" holds a list, not text'),
        ({"prompt": "x", "completion": "x", "tools": 7}, "no text", 'field "tools" holds a number, not text or a list'),
        ({"messages": "x"}, "no text", 'field "messages" holds a string, not a list of messages'),
        ({"messages": ["x"]}, "no text", "message 1 is a string, not an object with role and content"),
        ({"messages": [{"role": "user"}]}, "no text", "message 1 has no content, where text is due"),
        ({"messages": [{"content": "x"}]}, "unknown role", 'message 1 has no role (found: "content"); known are '),
        (messages(Q, ("assistant", 4)), "no text", "message 2 has a number as content, where text is due"),
        (messages(Q, ("assistant", None)), "no text", "message 2 has no content, where text is due"),
        (messages(("moderator", "x")), "unknown role", "message 1 has the role 'moderator'; known are system, user, "),
        (messages((7, "x")), "unknown role", "message 1 has the role '7'; known are "),
        (messages(Q, ("assistant", " \n")), "empty answer", "message 2 (assistant) is empty"),
        (messages(("user", ""), A), "empty prompt", "message 1 (user) is empty"),
        ({"prompt": "x", "completion": "\n"}, "empty answer", 'field "completion" is empty'),
        ({"instruction": "", "input": " ", "output": "x"}, "empty prompt", 'field "instruction" is empty'),
        ({"prompt": [], "completion": "x"}, "empty prompt", 'field "prompt" is empty'),
        (messages(), "no answer", "no answer of an assistant among 0 messages"),
        (messages(Q), "no answer", "no answer of an assistant among 1 messages"),
        (messages(("system", "x"), Q), "no answer", "no answer of an assistant among 2 messages"),
        (messages(Q, Q, A), "roles out of order",
         "message 2 has the role user after user, where assistant is due"),
        (messages(A, Q), "roles out of order",
         "message 1 has the role assistant at the start, where system or user is due"),
        (messages(Q, A, A), "roles out of order",
         "message 3 has the role assistant after assistant, where user or tool is due"),
        (messages(Q, ("system", "x"), A), "roles out of order", "message 2 has the role system after user, where "),
        (messages(("tool", "x"), A), "roles out of order", "message 1 has the role tool at the start, where "),
        ({**messages(("system", "x"), Q, A), "system": "y"}, "roles out of order",
         "message 1 has the role system after system, where user is due"),
        ({"instruction": "x", "instances": "y"}, "no text", 'field "instances" holds no list of objects with '),
        ({"instruction": "x", "instances": [{"input": "y"}]}, "missing field",
         'instance 1 has no field "output" (found: "input")'),
        ({"instruction": "x", "instances": [{"output": ""}]}, "empty answer", 'field "output" is empty'),
        ({"prompt": "x", "response": "y", "history": [["a"]]}, "no text", 'field "history" holds a list that is no '),
        ({"prompt": "x", "response": "y", "history": [["a", " "]]}, "empty answer", "a text of the assistant in "),
        ({"prompt": "x", "response": "y", "history": 7}, "no text", 'field "history" holds a number, not a list of '),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(record: dict[str, Any], reason: str, text: str) -> None:
    found, message = bad(record)
    assert found == reason
    assert message.startswith(text)
    assert message.endswith("; mend such rows, or go on without them with --skip-bad")
    assert len(message) < 400


def test_names_in_the_file_are_the_ones_in_errors() -> None:
    assert bad({"q": 7, "a": "x"}, prompt="q", response="a")[1].startswith('field "q" holds a number, ')
    assert bad({"q": "x", "a": " "}, prompt="q", response="a")[1].startswith('field "a" is empty; ')
    assert bad({"chat": 7}, messages="chat")[1].startswith('field "chat" holds a number, ')


def test_strange_calls_do_not_crash() -> None:
    for calls in ("x", 7, [7], [{"function": 7}], [{"function": {"arguments": "{broken"}}]):
        record = {"messages": [CHATML_STYLE[0], {"role": "assistant", "content": "x", "tool_calls": calls}]}
        try:
            text = turns(record)[1][1]
        except BadRecord as error:
            assert str(error).startswith("message 2 has ")  # noqa: PT017
        else:
            json.loads(text.split("\n")[1])


# ---- a conversation that goes on


def test_messages_from_json() -> None:
    turns = [{"role": role, "content": f"{role}s \ud83d"} for role in ("system", "user", "assistant", "tool")]
    expected = [Message(turn["role"], turn["content"].replace("\ud83d", "\ufffd")) for turn in turns]
    assert parse_messages(turns, "x") == expected
    assert parse_messages({"messages": turns, "id": 1}, "x") == expected
    assert parse_messages(turns[::-1], "x") == expected[::-1]
    assert parse_messages([{"role": "user", "content": ""}], "x") == [Message("user", "")]


def test_messages_are_read_as_those_of_data_for_tuning() -> None:
    turns = [
        {"from": "human", "value": "What time is it?"},
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "now", "arguments": "{}"}}]},
        {"role": "ipython", "content": "noon"},
        {"role": "model", "content": [{"type": "text", "text": "No"}, {"type": "text", "text": "on."}]},
    ]
    (expected,) = parse_record({"conversations": turns}, {}).conversations
    assert parse_messages(turns, "x") == parse_messages({"conversations": turns}, "x") == list(expected)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ([], "not a conversation; give"),
        ("hello", "not a conversation; give"),
        (None, "not a conversation; give"),
        ({"messages": {}}, "not a conversation; give"),
        ({"messages": []}, "not a conversation; give"),
        ({"messages": None}, 'no field "messages" .found: "messages"'),
        ({"prompt": "x"}, 'no field "messages" .found: "prompt"'),
        ({}, "found: none"),
        ([{"role": "user", "content": "x"}, {"role": "poet", "content": "x"}], "message 2 has the role 'poet'; known"),
        ([{"content": "x"}], 'message 1 has no role .found: "content".; known are system, user, assistant, tool$'),
        ([{"role": "user"}], "message 1 has no content, where text is due$"),
        ([{"role": "user", "content": 7}], "message 1 has a number as content, where text is due$"),
        ([7], "message 1 is a number, not an object with role and content$"),
    ],
)
def test_messages_that_are_none(value: object, reason: str) -> None:
    with pytest.raises(DataError, match=reason) as caught:
        parse_messages(value, "talk.json")
    assert str(caught.value).startswith("talk.json: ")
    assert "--skip-bad" not in str(caught.value)
