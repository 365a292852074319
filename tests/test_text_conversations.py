"""Instruction files: read line by line, bad rows named or skipped, duplicates dropped, split without leaks."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minigpt.errors import ConfigError, DataError, UsageError
from minigpt.text.chat import Message
from minigpt.text.conversations import (
    ChatCounts,
    ChatOptions,
    Conversation,
    load_conversations,
    parse_mapping,
    split_conversations,
)

GOOD = '{"prompt": "2 + 2?", "completion": "4"}\n'


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8", newline="")
    return path


def rows(*records: Any) -> str:
    return "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)


def pair(prompt: str, answer: str = "yes") -> dict[str, str]:
    return {"prompt": prompt, "completion": answer}


def load(*paths: Path, skip_bad: bool = False, **mapping: str) -> tuple[list[Conversation], ChatCounts]:
    counts = ChatCounts()
    return load_conversations(paths, ChatOptions(mapping=mapping, skip_bad=skip_bad), counts), counts


def error(path: Path, **options: Any) -> str:
    with pytest.raises(DataError) as raised:
        load(path, **options)
    assert "\n" not in str(raised.value)
    return str(raised.value).replace(f"{path.parent}/", "")


# The number of conversations and of turns in every file of real data, counted by hand with json and Counter; exact
# duplicates are left out, and of the last file the half that is marked as bad.
REAL = {
    "instruct/alpaca_zh_demo.json": (992, 1_984, "instruction/input/output"),
    "instruct/dolly_hhrlhf_train_small.jsonl": (1_000, 2_000, "prompt/response"),
    "instruct/dummy_conversation.json": (500, 2_000, "conversations"),
    "instruct/glaive_toolcall_en_demo.json": (265, 1_862, "conversations"),
    "instruct/gsm8k_test.jsonl": (1_319, 2_638, "question/answer"),
    "instruct/gsm8k_train.jsonl": (7_473, 14_946, "question/answer"),
    "instruct/instruction-data.json": (1_100, 2_200, "instruction/input/output"),
    "instruct/seed_tasks.jsonl": (175, 350, "instruction/instances"),
    "instruct/user_oriented_instructions.jsonl": (252, 504, "instruction/instances"),
    "instruct/zh_seed_tasks.json": (175, 350, "instruction/instances"),
    "preference/dpo_zh_demo.json": (289, 640, "conversations"),
    "preference/instruction-data-with-preference.json": (1_100, 2_200, "instruction/input/output"),
    "preference/kto_en_demo.json": (150, 492, "messages"),
}


@pytest.mark.parametrize("name", REAL)
def test_real_files_go_through(shared: Path, name: str) -> None:
    path = shared / "data" / name
    conversations, counts = load(path)
    number, turns, shape = REAL[name]
    assert (len(conversations), counts.conversations, counts.turns) == (number, number, turns)
    assert list(counts.shapes[str(path)]) == [shape]
    assert counts.skipped.total() == counts.bad_bytes == counts.unanswered == 0
    assert counts.shapes[str(path)].total() == number + counts.duplicates + counts.disliked
    assert all(one.messages[-1].role == "assistant" and one.file == str(path) for one in conversations)


def test_no_real_file_is_left_out(shared: Path) -> None:
    files = {str(path.relative_to(shared / "data")) for kind in ("instruct", "preference")
             for path in (shared / "data" / kind).iterdir()}  # fmt: skip
    assert files == set(REAL)


def test_lines_arrays_and_parquet_are_the_same_whatever_the_name(tmp_path: Path) -> None:
    records = [{"messages": [{"role": "user", "content": f"Q{n}"}, {"role": "assistant", "content": "猫"}]}
               for n in range(3)]  # fmt: skip
    files = [
        write(tmp_path / "lines.json", rows(*records)),
        write(tmp_path / "array.jsonl", json.dumps(records, indent=1)),
        write(tmp_path / "array.txt", json.dumps(records)),
        tmp_path / "table.parquet",
    ]
    pq.write_table(pa.Table.from_pylist(records), files[-1])
    expected = [(Message("user", f"Q{n}"), Message("assistant", "猫")) for n in range(3)]
    for file in files:
        conversations, counts = load(file)
        assert [one.messages for one in conversations] == expected
        assert counts.shapes == {str(file): Counter(messages=3)}
    assert [one.where for one in load(files[0])[0]] == [f"{files[0]}:{line}" for line in (1, 2, 3)]
    assert [one.where for one in load(files[3])[0]] == [f"{files[3]}:{row}" for row in (1, 2, 3)]


def test_columns_of_parquet_that_are_null_are_not_there(tmp_path: Path) -> None:
    table = [{"instruction": "a", "input": None, "output": "b"}, {"instruction": "c", "input": "d", "output": "e"}]
    pq.write_table(pa.Table.from_pylist(table), tmp_path / "x.parquet")
    assert [one.messages[0].content for one in load(tmp_path / "x.parquet")[0]] == ["a", "c\n\nd"]
    pq.write_table(pa.table({"prompt": ["a"], "completion": pa.array([None], pa.string())}), tmp_path / "x.parquet")
    assert error(tmp_path / "x.parquet").startswith('x.parquet:1: field "completion" holds null; mend such rows, or ')


def test_parquet_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    write(tmp_path / "x.parquet", "no parquet")
    assert error(tmp_path / "x.parquet").startswith("x.parquet: not parquet or damaged (")
    bad = pa.Array.from_buffers(pa.string(), 1, pa.array([b"\xff"], pa.binary()).buffers())
    pq.write_table(pa.table({"prompt": bad, "completion": ["x"]}), tmp_path / "y.parquet")
    assert error(tmp_path / "y.parquet").startswith("y.parquet: text that is no UTF-8 behind row 0")


def test_lines_end_at_a_line_feed_only(tmp_path: Path) -> None:
    strange = "a\u2028b\u0085c\x0bd"
    path = write(tmp_path / "x.jsonl", GOOD + "\n" + rows(pair(strange)).replace("\x0b", "\\u000b") + GOOD[:-1])
    conversations, counts = load(path)
    assert [(one.where[-2:], one.question) for one in conversations] == [(":1", "2 + 2?"), (":3", strange)]
    assert counts.duplicates == 1


def test_bad_rows_are_named_by_file_and_line(tmp_path: Path) -> None:
    """Fault 11: a good row, a blank line, then each kind of bad row."""
    path = tmp_path / "chats.jsonl"
    for bad, message in (
        ('{"conversation": [{}], "id": 1}', 'no field "prompt" (found: "conversation", "id"); mend such rows, or go'),
        ('{"prompt": "x", "answer_text": "y"}', 'no field "completion" (found: "prompt", "answer_text"); name it with'),
        ('{"prompt": "x", "completion": ""}', 'field "completion" is empty; mend such rows, or go on without'),
        ('{"prompt": "x", "completion": 4}', 'field "completion" holds a number, not '),
        ('{"prompt": "x", "comple', "broken JSON (Unterminated string"),
        ("[1]", "a list where an object is expected"),
    ):
        write(path, GOOD + "\n" + bad + "\n")
        assert error(path).startswith(f"chats.jsonl:3: {message}")
    write(path, '{"conversation": [{}], "id": "x"}\n')
    assert error(path) == (
        'chats.jsonl:1: no field "messages" (found: "conversation", "id"); name it with --map messages=conversation'
    )


def test_bad_rows_are_skipped_and_counted(tmp_path: Path) -> None:
    bad = ['{"prompt": "x"}', '{"prompt": "x", "completion": ""}', '{"prompt": "x", "completion": " "}', "{broken", "7"]
    path = write(tmp_path / "chats.jsonl", "\n".join([bad[0], GOOD, *bad[1:], ""]))
    conversations, counts = load(path, skip_bad=True)
    assert len(conversations) == counts.conversations == 1
    assert counts.skipped == {"missing field": 1, "empty answer": 2, "broken JSON": 1, "no object": 1}
    assert counts.first_skipped is not None
    assert counts.first_skipped.startswith(f'{path}:1: no field "response" (found: "prompt"); ')
    assert counts.notes() == [
        "5 bad rows skipped (2 empty answer, 1 missing field, 1 broken JSON, 1 no object)",
    ]
    assert "no conversation is left; the first bad row: " in error(write(path, bad[0]), skip_bad=True)


def test_items_of_an_array_are_skipped_but_broken_json_ends_it(tmp_path: Path) -> None:
    path = write(tmp_path / "x.json", f'[{GOOD},\n7,\n{{"prompt": "x"}},\n{{"prompt": "y", "completion": "z"}}]')
    conversations, counts = load(path, skip_bad=True)
    assert [one.where[-2:] for one in conversations] == [":1", ":5"]
    assert counts.skipped == {"no object": 1, "missing field": 1}
    assert "broken JSON" in error(write(path, f"[{GOOD}, {{broken]"), skip_bad=True)


def test_nothing_to_read_is_said(tmp_path: Path) -> None:
    assert error(write(tmp_path / "x.jsonl", "\n")).startswith("x.jsonl: no conversation in it; give records with ")
    assert error(tmp_path / "y.jsonl").startswith("y.jsonl: no such file (there is x.jsonl)")
    (tmp_path / "folder").mkdir()
    write(tmp_path / "folder" / "README.md", "about")
    assert error(tmp_path / "folder").startswith("folder: no records in this folder; looked for .jsonl, ")


def test_a_folder_gives_its_records_and_leaves_its_texts(tmp_path: Path) -> None:
    write(tmp_path / "README.md", "about")
    for name in ("b.jsonl", "a.json"):
        write(tmp_path / name, rows(pair(name)))
    assert [one.question for one in load(tmp_path)[0]] == ["a.json", "b.jsonl"]


def test_files_of_several_shapes_and_their_tags(tmp_path: Path) -> None:
    one = write(tmp_path / "1.jsonl", GOOD + rows({"question": "Who?", "answer": "I"}))
    other = write(tmp_path / "2.jsonl", rows({"q": "a", "a": "b"}))
    conversations, counts = load(one, other, prompt="q", response="a")
    assert [conversation.file for conversation in conversations] == [str(one)] * 2 + [str(other)]
    assert counts.shapes == {
        str(one): Counter({"prompt/completion": 1, "question/answer": 1}),
        str(other): Counter({"prompt/response": 1}),
    }


def test_exact_duplicates_are_dropped_across_files_and_shapes(tmp_path: Path) -> None:
    one = write(tmp_path / "1.jsonl", rows(pair("a", "b"), pair("a", "c"), pair("a", "b"), pair(" a", "b\n")))
    other = write(tmp_path / "2.jsonl", rows({"question": "a", "answer": "b"}, {"instruction": "b", "output": "a"}))
    conversations, counts = load(one, other)
    assert [tuple(message.content for message in one.messages) for one in conversations] == [
        ("a", "b"),
        ("a", "c"),
        ("b", "a"),
    ]
    assert counts.duplicates == 3
    assert counts.notes() == ["3 exact duplicates dropped"]


def test_what_is_no_utf8_is_replaced_and_counted(tmp_path: Path) -> None:
    """Fault 4: half a surrogate pair, and a byte that is no UTF-8."""
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"prompt": "a\\ud83d", "completion": "b\xff"}\n{"prompt": "\\ud83d\\ude00", "completion": "c"}')
    conversations, counts = load(path)
    assert [one.question for one in conversations] == ["a\ufffd", "😀"]
    assert conversations[0].messages[1].content == "b\ufffd"
    assert counts.bad_bytes == 2
    assert counts.notes() == ["2 bytes no UTF-8, replaced by U+FFFD"]


def test_what_is_left_out_is_said(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    records = [
        {"messages": chat, "label": False},
        {"messages": [*chat, {"role": "user", "content": "c"}], "label": True},
    ]
    conversations, counts = load(write(tmp_path / "x.jsonl", rows(*records)))
    assert [len(one.messages) for one in conversations] == [2]
    assert counts.notes() == [
        "1 record marked as a bad answer left out",
        "a question without an answer left off at the end of 1",
    ]


def test_the_map_option() -> None:
    assert parse_mapping(["messages=chat", "prompt=a=b"]) == {"messages": "chat", "prompt": "a=b"}
    for text in ("messages", "=x", "messages="):
        with pytest.raises(UsageError, match=f"^--map {text}: give the field, an equals sign and its name"):
            parse_mapping([text])
    with pytest.raises(ConfigError, match=r"^--map chat=x: no field 'chat' is read; choose from messages, "):
        ChatOptions(mapping={"chat": "x"})


def asked(*questions: str) -> list[Conversation]:
    return [
        Conversation(f"x:{n}", (Message("user", question), Message("assistant", f"answer {n}")))
        for n, question in enumerate(questions)
    ]


def test_a_share_is_held_out_the_same_in_any_order() -> None:
    conversations = asked(*(f"question {n}" for n in range(200)))
    split = split_conversations(conversations, 0.1)
    assert (len(split.train), len(split.held_out), split.leaks) == (180, 20, 0)
    assert sorted(split.train + split.held_out, key=lambda one: int(one.where[2:])) == conversations
    shuffled = random.Random(1).sample(conversations, 200)
    again = split_conversations(shuffled, 0.1)
    assert {one.where for one in again.held_out} == {one.where for one in split.held_out}
    more = split_conversations(conversations, 0.2)
    assert {one.where for one in split.held_out} < {one.where for one in more.held_out}, "by hash, not by chance"


def test_nothing_is_held_out_of_few_or_when_not_asked() -> None:
    assert split_conversations(asked("a", "b", "c"), 0.3).held_out == []
    assert split_conversations(asked(*map(str, range(100))), 0.0).held_out == []
    for share in (-0.1, 1.0, float("nan")):
        with pytest.raises(ConfigError, match="is outside 0 to 1"):
            split_conversations([], share)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=80), st.sampled_from([0.1, 0.25, 0.5]))
def test_no_question_of_the_held_out_part_stands_in_training(numbers: list[int], share: float) -> None:
    """Case and spacing make no other question."""
    spellings = ("What is {}?", "what  is {}?", " WHAT is\n{}?")
    conversations = asked(*(spellings[place % 3].format(number) for place, number in enumerate(numbers)))
    split = split_conversations(conversations, share)

    def questions(part: list[Conversation]) -> set[str]:
        return {" ".join(one.question.lower().split()) for one in part}

    assert questions(split.train) & questions(split.held_out) == set()
    assert len(split.train) + len(split.held_out) == len(conversations)
    assert len(split.held_out) <= round(share * len(conversations))
    assert split.train


def test_leaks_go_with_training_and_are_counted() -> None:
    conversations = asked(*(f"question {n}" for n in range(90)), *("the same" for _ in range(10)))
    split = split_conversations(conversations, 0.9)
    assert [one.question for one in split.train] == ["the same"] * 10
    assert split.leaks == 10
    assert split_conversations(conversations[:90], 0.9).leaks == 0


def test_questions_that_are_all_asked_twice_are_held_out_in_pairs() -> None:
    conversations = asked(*(f"question {n // 2}" for n in range(100)))
    split = split_conversations(conversations, 0.1)
    assert len(split.held_out) == 10
    assert set(Counter(one.question for one in split.held_out).values()) == {2}
    assert split.leaks == 90
