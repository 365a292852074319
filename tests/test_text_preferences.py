"""Preference files: pairs, labelled answers and prompts of every shape, and bad rows named by file and line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from minigpt.errors import ConfigError, DataError
from minigpt.text.chat import Message
from minigpt.text.conversations import ChatOptions, split_conversations
from minigpt.text.preferences import (
    Labelled,
    Pair,
    PreferenceCounts,
    Prompt,
    load_labelled,
    load_pairs,
    load_prompts,
)

LOADERS = {"pairs": load_pairs, "labelled": load_labelled, "prompts": load_prompts}


def user(text: str) -> Message:
    return Message("user", text)


def said(text: str) -> Message:
    return Message("assistant", text)


def turn(role: str, text: str) -> dict[str, str]:
    return {"role": role, "content": text}


def write(path: Path, *records: Any) -> Path:
    lines = [record if isinstance(record, str) else json.dumps(record, ensure_ascii=False) for record in records]
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def load(kind: str, path: Path, skip_bad: bool = False, **mapping: str) -> tuple[list[Any], PreferenceCounts]:
    counts = PreferenceCounts()
    return LOADERS[kind]([path], ChatOptions(mapping=mapping, skip_bad=skip_bad), counts), counts


def error(kind: str, path: Path, **options: Any) -> str:
    with pytest.raises(DataError) as raised:
        load(kind, path, **options)
    assert "\n" not in str(raised.value)
    return str(raised.value).replace(f"{path.parent}/", "")


# The same pair in every shape, and how the shape is called.
PAIRS: list[tuple[dict[str, Any], str]] = [
    ({"prompt": "Who?", "chosen": "I.", "rejected": "You."}, "prompt/chosen/rejected"),
    ({"prompt": [turn("user", "Who?")], "chosen": [turn("assistant", "I.")], "rejected": [turn("assistant", "You.")]},
     "prompt/chosen/rejected"),
    ({"instruction": "Who?", "input": "", "output": "She.", "chosen": "I.", "rejected": "You."},
     "instruction/input/chosen/rejected"),
    ({"question": "Who?", "rejected": "You.", "chosen": "I.", "messages": [turn("user", "no")], "label": False},
     "question/chosen/rejected"),
    ({"conversations": [{"from": "human", "value": "Who?"}], "chosen": {"from": "gpt", "value": "I."},
      "rejected": {"from": "gpt", "value": "You."}}, "conversations/chosen/rejected"),
    ({"messages": [turn("user", "Who?")], "chosen": "I.", "rejected": "You."}, "messages/chosen/rejected"),
    ({"prompt": "Who?", "chosen": [turn("user", "Who?"), turn("assistant", "I.")],
      "rejected": [turn("user", "Who?"), turn("assistant", "You.")], "messages": [turn("user", "no")]},
     "chosen/rejected"),
]  # fmt: skip


@pytest.mark.parametrize(("record", "shape"), PAIRS)
def test_pairs_of_every_shape(tmp_path: Path, record: dict[str, Any], shape: str) -> None:
    path = write(tmp_path / "x.jsonl", record)
    pairs, counts = load("pairs", path)
    assert pairs == [Pair(f"{path}:1", (user("Who?"),), (said("I."),), (said("You."),))]
    assert counts.shapes == {str(path): {shape: 1}}
    assert (counts.conversations, counts.turns, counts.notes()) == (1, 3, [])


def test_system_earlier_turns_input_and_tools_are_the_prompts(tmp_path: Path) -> None:
    records = [
        {"system": "Be kind.", "history": [["a", "b"]], "instruction": "Add.", "input": "2 + 2", "tools": "[1]",
         "chosen": "4", "rejected": "5"},
        {"messages": [turn("system", "s"), turn("user", "a"), turn("assistant", "b"), turn("user", "c")],
         "chosen": [turn("assistant", "d"), turn("tool", "e"), turn("assistant", "f")],
         "rejected": [turn("assistant", "g")]},
        {"chosen": [turn("user", "a"), turn("assistant", "b"), turn("tool", "c"), turn("assistant", "d")],
         "rejected": [turn("user", "a"), turn("assistant", "b"), turn("tool", "c"), turn("assistant", "e")]},
    ]  # fmt: skip
    first, second, third = load("pairs", write(tmp_path / "x.jsonl", *records))[0]
    assert [message.role for message in first.prompt] == ["system", "user", "assistant", "user"]
    assert first.prompt[0].content.startswith("Be kind.\n\nYou can call these functions.")
    assert (first.prompt[-1].content, first.question) == ("Add.\n\n2 + 2", "a")
    assert [message.content for message in second.chosen] == ["d", "e", "f"]
    assert [message.content for message in second.prompt] == ["s", "a", "b", "c"]
    assert third.prompt[-1] == Message("tool", "c"), "what both answers share is no part of them"
    assert (third.chosen, third.rejected) == ((said("d"),), (said("e"),))


def test_an_answer_that_goes_on_where_the_other_ends_keeps_its_beginning(tmp_path: Path) -> None:
    short = [turn("user", "a"), turn("assistant", "b")]
    record = {"chosen": [*short, turn("user", "c"), turn("assistant", "d")], "rejected": short}
    ((pair,), _) = load("pairs", write(tmp_path / "x.jsonl", record))
    assert (pair.prompt, len(pair.chosen), pair.rejected) == ((user("a"),), 3, (said("b"),))


def test_labelled_answers_of_every_shape(tmp_path: Path) -> None:
    records = [
        {"prompt": "Who?", "completion": "I.", "label": True},
        {"prompt": "Who?", "completion": "I.", "label": False},
        {"messages": [turn("user", "a"), turn("assistant", "b"), turn("user", "c"), turn("assistant", "d"),
                      turn("tool", "e"), turn("assistant", "f")], "label": 0},
        {"instruction": "Who?", "input": "", "output": "You.", "label": 1},
    ]  # fmt: skip
    path = write(tmp_path / "x.jsonl", *records)
    rows, counts = load("labelled", path)
    assert rows[:2] == [Labelled(f"{path}:{n}", (user("Who?"),), (said("I."),), n == 1) for n in (1, 2)]
    assert [message.content for message in rows[2].answer] == ["d", "e", "f"]
    assert [(row.good, row.question) for row in rows[2:]] == [(False, "a"), (True, "Who?")]
    assert counts.shapes[str(path)] == {"prompt/completion/label": 2, "messages/label": 1, "instruction/input/output/label": 1}  # fmt: skip # noqa: E501
    assert counts.duplicates == counts.disliked == 0


def test_a_pair_without_a_label_is_two_labelled_answers(tmp_path: Path) -> None:
    pair = {"prompt": "Who?", "chosen": "I.", "rejected": "You."}
    path = write(tmp_path / "x.jsonl", pair, {"prompt": "a", "chosen": "b", "rejected": "b "}, pair | {"label": 0})
    rows, counts = load("labelled", path)
    assert [(row.where[-2:], row.answer, row.good) for row in rows] == [
        (":1", (said("I."),), True), (":1", (said("You."),), False), (":3", (said("I."),), False)
    ]  # fmt: skip
    assert (counts.same, counts.duplicates) == (1, 0)


def test_prompts_lose_their_answers_and_keep_their_rows(tmp_path: Path) -> None:
    records = [
        {"instruction": "Add.", "input": "2 + 2", "output": "4", "kind": "sum-en"},
        {"prompt": "Who?"},
        {"messages": [turn("user", "a"), turn("assistant", "b"), turn("user", "c")]},
        {"messages": [turn("user", "a"), turn("assistant", "b"), turn("user", "d"), turn("assistant", "e")]},
        {"messages": [turn("user", "a"), turn("assistant", "b"), turn("tool", "c")], "goal": 7},
        {"conversations": [{"from": "human", "value": "x"}], "chosen": "y", "rejected": "z"},
        {"prompt": [turn("system", "s"), turn("user", "u")], "answer": "v"},
    ]
    path = write(tmp_path / "x.jsonl", *records)
    prompts, _ = load("prompts", path)
    contents = [[message.content for message in prompt.messages] for prompt in prompts]
    assert contents == [["Add.\n\n2 + 2"], ["Who?"], ["a", "b", "c"], ["a", "b", "d"], ["a", "b", "c"], ["x"],
                        ["s", "u"]]  # fmt: skip
    assert [prompt.row for prompt in prompts] == records
    assert prompts[0] == Prompt(f"{path}:1", (user("Add.\n\n2 + 2"),), records[0])
    assert {prompt.messages[-1].role for prompt in prompts} == {"user", "tool"}


def test_prompts_that_are_asked_twice_differ_by_their_rows(tmp_path: Path) -> None:
    path = write(
        tmp_path / "x.jsonl", {"prompt": "a", "goal": 1}, {"prompt": "a", "goal": 2}, {"goal": 1, "prompt": "a"}
    )
    prompts, counts = load("prompts", path)
    assert ([prompt.row["goal"] for prompt in prompts], counts.duplicates) == ([1, 2], 1)


def test_equal_answers_are_left_out_and_duplicates_dropped(tmp_path: Path) -> None:
    a, b = {"prompt": "x", "chosen": "1", "rejected": "2"}, {"prompt": "x", "chosen": "2", "rejected": "1"}
    path = write(tmp_path / "x.jsonl", a, b, a, {"prompt": "x", "chosen": "1", "rejected": " 1\n"})
    pairs, counts = load("pairs", path)
    assert [(pair.chosen[0].content, pair.rejected[0].content) for pair in pairs] == [("1", "2"), ("2", "1")]
    assert counts.notes() == ["1 pair of equal answers left out", "1 exact duplicate dropped"]
    same = write(tmp_path / "same.jsonl", {"prompt": "x", "chosen": "1", "rejected": "1"})
    assert error("pairs", same).startswith("same.jsonl: no pair in it; give records with a prompt, chosen and rejected")


GOOD = {
    "pairs": {"prompt": "a", "chosen": "b", "rejected": "c"},
    "labelled": {"prompt": "a", "completion": "b", "label": True},
    "prompts": {"prompt": "a"},
}
CHAT = [turn("user", "a"), turn("assistant", "b")]
BAD: list[tuple[str, Any, str]] = [
    ("pairs", {"prompt": "x", "chosen": "y"}, 'no field "rejected" (found: "prompt", "chosen"); a pair needs it; name'),
    ("pairs", {"prompt": "x", "chosen": None, "rejected": "y"}, 'field "chosen" holds null; a pair needs it; name it'),
    ("pairs", {"chosen": "x", "rejected": "y", "id": 1}, 'no field "prompt" (found: "chosen", "rejected", "id"); name'),
    ("pairs", {"prompt": "x", "chosen": "y", "rejected": ""}, 'field "rejected" is empty; mend such rows, or go on'),
    ("pairs", {"prompt": "x", "chosen": " \n", "rejected": "y"}, 'field "chosen" is empty; mend such rows, or go on'),
    ("pairs", {"prompt": "x", "chosen": "y", "rejected": [turn("assistant", "")]}, "message 1 (assistant) is empty; "),
    ("pairs", {"prompt": "", "chosen": "y", "rejected": "z"}, 'field "prompt" is empty; '),
    ("pairs", {"prompt": "x", "chosen": 4, "rejected": "z"}, 'field "chosen" holds a number, not '),
    ("pairs", {"messages": CHAT, "chosen": "y", "rejected": "z"}, 'field "messages" ends with an answer, beside "ch'),
    ("pairs", {"chosen": CHAT, "rejected": [turn("user", "c"), turn("assistant", "d")]},
     '"chosen" and "rejected" begin with different questions; '),
    ("pairs", {"chosen": CHAT, "rejected": [turn("user", "c")]}, "no answer of an assistant among 1 messages; "),
    ("labelled", {"prompt": "x", "completion": "y"}, 'no field "label" (found: "prompt", "completion"); a labelled '),
    ("labelled", {"prompt": "x", "completion": "y", "label": "good"}, 'field "label" holds a string, not true or fal'),
    ("labelled", {"prompt": "x", "completion": "", "label": True}, 'field "completion" is empty; '),
    ("labelled", {"messages": [*CHAT, turn("user", "c")], "label": True}, "a question stands at the end, where the a"),
    ("prompts", {"text": "x"}, 'no field "prompt" (found: "text"); name it with --map prompt=NAME'),
    ("prompts", {"messages": [turn("assistant", "x")]}, "message 1 has the role assistant at the start"),
    ("prompts", {"messages": [turn("system", "x")]}, "message 2 has the role assistant after system, where user is"),
    ("prompts", {"messages": []}, "message 1 has the role assistant at the start"),
    ("prompts", {"prompt": " "}, 'field "prompt" is empty; '),
    ("prompts", "{broken", "broken JSON ("),
    ("prompts", "[1]", "a list where an object is expected"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "bad", "message"), BAD)
def test_bad_rows_are_named_by_file_and_line_or_skipped(tmp_path: Path, kind: str, bad: Any, message: str) -> None:
    path = write(tmp_path / "x.jsonl", GOOD[kind], "", bad)
    assert error(kind, path).startswith(f"x.jsonl:3: {message}")
    rows, counts = load(kind, path, skip_bad=True)
    assert (len(rows), counts.skipped.total()) == (1, 1)
    assert str(counts.first_skipped).startswith(f"{path}:3: {message}")


def test_fields_of_other_names(tmp_path: Path) -> None:
    pair = write(tmp_path / "1.jsonl", {"q": "Who?", "good": "I.", "bad": "You.", "output": "no"})
    assert load("pairs", pair, prompt="q", chosen="good", rejected="bad")[0] == [
        Pair(f"{pair}:1", (user("Who?"),), (said("I."),), (said("You."),))
    ]
    turns = write(tmp_path / "2.jsonl", {"chat": [{"who": "human", "text": "a"}], "good": [{"who": "bot", "text": "b"}],
                                         "bad": "c"})  # fmt: skip
    names = {"messages": "chat", "role": "who", "content": "text", "chosen": "good", "rejected": "bad"}
    assert load("pairs", turns, **names)[0][0].chosen == (said("b"),)
    tagged = write(tmp_path / "3.jsonl", {"messages": CHAT, "kto_tag": False})
    assert load("labelled", tagged, label="kto_tag")[0][0].good is False
    with pytest.raises(ConfigError, match="no field 'worse' is read"):
        ChatOptions(mapping={"worse": "bad"})


def test_rows_of_parquet(tmp_path: Path) -> None:
    chat = [turn("user", "a"), turn("assistant", "b")]
    pq.write_table(pa.Table.from_pylist([{"chosen": chat, "rejected": [chat[0], turn("assistant", "c")], "label": True,
                                          "messages": chat}]), tmp_path / "x.parquet")  # fmt: skip
    assert load("pairs", tmp_path / "x.parquet")[0][0].rejected == (said("c"),)
    assert load("labelled", tmp_path / "x.parquet")[0][0].good is True
    assert load("prompts", tmp_path / "x.parquet")[0][0].messages == (user("a"),)


def test_what_is_no_utf8_is_replaced_and_counted(tmp_path: Path) -> None:
    path = write(tmp_path / "x.jsonl", '{"prompt": "a\\ud83d", "chosen": "b", "rejected": "c\\udc00"}')
    pairs, counts = load("pairs", path)
    assert (pairs[0].question, pairs[0].rejected[0].content, counts.bad_bytes) == ("a\ufffd", "c\ufffd", 2)


def test_pairs_are_split_by_their_questions() -> None:
    pairs = [Pair(f"x:{n}", (user(f"q{n % 90}"),), (said(f"a{n}"),), (said("b"),)) for n in range(100)]
    split = split_conversations(pairs, 0.1)
    assert len(split.held_out) == 10
    assert not {pair.question for pair in split.held_out} & {pair.question for pair in split.train}


def test_real_pairs_go_through(shared: Path) -> None:
    folder = shared / "data" / "preference"
    pairs, counts = load("pairs", folder / "instruction-data-with-preference.json")
    assert (len(pairs), counts.same, counts.duplicates) == (1_094, 6, 0)
    assert list(counts.shapes.values()) == [{"instruction/input/chosen/rejected": 1_100}]
    pairs, counts = load("pairs", folder / "dpo_zh_demo.json")
    assert (len(pairs), counts.same, counts.duplicates) == (289, 0, 11)
    assert list(counts.shapes.values()) == [{"conversations/chosen/rejected": 300}]
    assert {len(pair.chosen) for pair in pairs} == {len(pair.rejected) for pair in pairs} == {1}


def test_real_labelled_answers_go_through(shared: Path) -> None:
    rows, counts = load("labelled", shared / "data" / "preference" / "kto_en_demo.json")
    assert (len(rows), sum(row.good for row in rows), counts.turns) == (300, 150, 974)
    assert list(counts.shapes.values()) == [{"messages/label": 300}]
    assert {row.prompt[-1].role for row in rows} == {"user"}
    assert {len(row.answer) for row in rows} == {1}


def test_real_prompts_go_through(shared: Path) -> None:
    prompts, _ = load("prompts", shared / "data" / "instruct" / "gsm8k_test.jsonl")
    assert len(prompts) == 1_319
    assert all("####" in prompt.row["answer"] for prompt in prompts)
