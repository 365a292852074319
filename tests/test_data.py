"""The bundled corpus, instructions and preference pairs: what the generator writes, and what a reader may expect."""

from __future__ import annotations

import gzip
import json
import os
import re
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from minigpt.evaluation.rules import RULES
from minigpt.text.bundled import bundled_held_preferences, bundled_preferences
from minigpt.text.conversations import ChatOptions
from minigpt.text.preferences import PreferenceCounts, load_pairs, load_prompts

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "data"
FILES = ("tales.en.txt", "tales.zh.txt")
INSTRUCTIONS = ("instructions.train.jsonl", "instructions.test.jsonl")
PREFERENCES = ("preferences.train.jsonl", "preferences.test.jsonl")
TASKS = ("copy", "reverse", "count", "sum", "rewrite", "story")
SEPARATOR = "<|endoftext|>"
WORD = re.compile(r"[A-Za-z']+")
HANZI = re.compile(r"[\u4e00-\u9fff]")


@cache
def corpus(name: str) -> str:
    return (DATA / name).read_bytes().decode("utf-8")


def stories(name: str) -> list[str]:
    parts = corpus(name).split(f"\n{SEPARATOR}\n")
    assert parts.pop() == ""
    return parts


def sentences(name: str) -> list[str]:
    parts = re.split(r"[.!?。！？]+", corpus(name).replace(SEPARATOR, "."))
    return [bare for part in parts if (bare := part.strip(' \n"“”‘’'))]


def test_generator_writes_the_committed_bytes_whatever_the_hash_seed(tmp_path: Path) -> None:
    script = str(ROOT / "scripts" / "make_data.py")
    runs = [
        subprocess.Popen([sys.executable, script, "--out", tmp_path / seed], env={**os.environ, "PYTHONHASHSEED": seed})
        for seed in ("1", "2")
    ]
    assert [run.wait() for run in runs] == [0, 0]
    for name in (*FILES, *INSTRUCTIONS, *PREFERENCES):
        first, second = ((tmp_path / seed / name).read_bytes() for seed in ("1", "2"))
        assert first == second == (DATA / name).read_bytes(), f"{name}: run python scripts/make_data.py"


@pytest.mark.parametrize(("name", "least", "most"), [("tales.en.txt", 1.2e6, 1.5e6), ("tales.zh.txt", 0.7e6, 0.9e6)])
def test_size_and_compression(name: str, least: float, most: float) -> None:
    data = (DATA / name).read_bytes()
    assert least <= len(data) <= most
    assert len(data) <= 5 * len(gzip.compress(data, 9))


@pytest.mark.parametrize("name", FILES)
def test_stories_are_separate_different_and_short(name: str) -> None:
    text, found = corpus(name), stories(name)
    assert "\r" not in text
    assert text.count(SEPARATOR) == len(found) == len(set(found))
    unit, least, most = (WORD, 60, 250) if ".en." in name else (HANZI, 90, 400)
    for story in found:
        assert least <= len(unit.findall(story)) <= most, story
        assert 1 <= len(story.split("\n\n")) <= 5, story


def test_no_sentence_is_worn_out() -> None:
    counts = Counter(sentence for name in FILES for sentence in sentences(name))
    assert counts.most_common(1)[0][1] <= 20


def test_vocabulary_is_rich() -> None:
    english = Counter(word.lower() for word in re.findall(r"[A-Za-z]+", corpus("tales.en.txt")))
    assert len(english) >= 2000
    assert len(set(HANZI.findall(corpus("tales.zh.txt")))) >= 1000
    common = sum(count for _, count in english.most_common(200))
    assert common >= 0.6 * english.total(), "a small model needs a core of common words"


@pytest.mark.parametrize("language", ["en", "zh"])
def test_there_are_many_plots(language: str) -> None:
    files = (ROOT / "scripts" / "tales" / language).glob("*.txt")
    names = [line for file in files for line in file.read_text(encoding="utf-8").split("\n") if line.startswith("== ")]
    assert len(names) == len(set(names)) >= 20


ENGLISH_FAULTS = {
    "grammar mark left over": r"[\[\]{}|\\*_]",
    "a before a vowel": r"\b[Aa] (?!one\b|once\b)[aeio]",
    "an before a consonant": r"\b[Aa]n [^aeiouh\W]",
    "odd space or punctuation": r"  | [,.!?;:]|[,;:]{2}|[!?][.,]|(?<!\.)\.\.(?!\.)",
    "small letter after a full stop": r"\w[.!?] [a-z]",
    "word said twice": r"\b(\w+) \1\b",
}


@pytest.mark.parametrize("fault", ENGLISH_FAULTS)
def test_english_is_typeset_well(fault: str) -> None:
    text = corpus("tales.en.txt").replace(SEPARATOR, "")
    found = re.search(ENGLISH_FAULTS[fault], text)
    assert found is None, text[max(found.start() - 40, 0) : found.end() + 40]


def test_english_is_ascii_with_paired_quotes() -> None:
    assert corpus("tales.en.txt").isascii()
    assert [story for story in stories("tales.en.txt") if story.count('"') % 2] == []


def test_chinese_is_typeset_well() -> None:
    text = corpus("tales.zh.txt").replace(SEPARATOR, "")
    assert not re.search(r"[!-~ ]", text), "ASCII or a space in Chinese text"
    assert not re.search(r"[，。！？：、；]{2}", text)
    for story in stories("tales.zh.txt"):
        assert story.count("“") == story.count("”"), story
        assert not re.search(r"“[^”]*“", story), story


@cache
def rows(part: str) -> list[dict[str, str]]:
    text = (DATA / f"instructions.{part}.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def rows_of(part: str, task: str, language: str) -> list[dict[str, str]]:
    return [row for row in rows(part) if row["kind"] == f"{task}-{language}"]


def said(row: dict[str, str]) -> str:
    return f"{row['instruction']}\n{row['input']}\n{row['output']}"


def listed(name: str, language: str) -> set[str]:
    """The words of a list in scripts/tasks."""
    text = (ROOT / "scripts" / "tasks" / language / "0_lists.txt").read_text(encoding="utf-8")
    lines = re.findall(rf"^~ {name}: (.+)$", text, re.MULTILINE)
    assert lines
    return {word for line in lines for word in line.split(", ")}


def held_out(language: str) -> set[str]:
    return set().union(*(listed(f"held_{name}", language) for name in ("word", "thing", "name")))


def found(words: set[str], text: str, language: str) -> set[str]:
    """Those of the words that stand in a text: as whole words in English, anywhere in Chinese."""
    return words & set(WORD.findall(text)) if language == "en" else {word for word in words if word in text}


def test_every_kind_of_task_is_there_in_both_languages() -> None:
    kinds = {f"{task}-{language}" for task in TASKS for language in ("en", "zh")}
    assert Counter(row["kind"] for row in rows("test")) == dict.fromkeys(kinds, 60)
    train = Counter(row["kind"] for row in rows("train"))
    assert train.keys() == kinds
    assert min(train.values()) >= 500
    assert all(train[f"{task}-en"] == train[f"{task}-zh"] for task in TASKS)


@pytest.mark.parametrize("part", ["train", "test"])
def test_instruction_rows_are_complete(part: str) -> None:
    for row in rows(part):
        assert list(row) == ["instruction", "input", "output", "kind"]
        assert row["instruction"].strip()
        assert row["output"].strip()
        assert not re.search(r"[{}*\[\]|]", said(row)), row


def test_instructions_are_short() -> None:
    assert sum((DATA / name).stat().st_size for name in INSTRUCTIONS) <= 3e6
    assert max(len(said(row)) for part in ("train", "test") for row in rows(part)) <= 200


def test_no_instruction_comes_twice_or_in_both_parts() -> None:
    train, test = ([(row["instruction"], row["input"]) for row in rows(part)] for part in ("train", "test"))
    assert len(set(train)) == len(train)
    assert len(set(test)) == len(test)
    assert not set(train) & set(test)


@pytest.mark.parametrize("language", ["en", "zh"])
def test_held_out_words_and_names_occur_neither_in_training_rows_nor_in_the_tales(language: str) -> None:
    words = held_out(language)
    training = "\n".join(said(row) for row in rows("train") if row["kind"].endswith(language))
    assert found(words, training, language) == set()
    assert found(words, corpus(f"tales.{language}.txt"), language) == set()


@pytest.mark.parametrize("language", ["en", "zh"])
def test_test_rows_ask_for_held_out_words_and_names_alone(language: str) -> None:
    held = listed("held_word", language) | listed("held_name", language)
    for task in ("copy", "reverse", "count"):
        asked = {word for row in rows_of("test", task, language) for word in re.split(r"[\s,、]+", row["input"])}
        assert asked <= held, task
    names, seen = listed("held_name", language), listed("name", language)
    for task in ("rewrite", "story"):
        for row in rows_of("test", task, language):
            assert found(names, said(row), language), row
            if language == "en":  # a Chinese name may stand inside of other words
                assert not found(seen, said(row), language), row


def test_numbers_of_test_sums_occur_nowhere_in_training() -> None:
    operands = {
        number
        for language in ("en", "zh")
        for row in rows_of("test", "sum", language)
        for number in re.findall(r"\d+", row["input"])
    }
    assert len(operands) >= 15
    assert not operands & {number for row in rows("train") for number in re.findall(r"\d+", said(row))}
    assert not any(re.search(r"\d", corpus(name)) for name in FILES)


@pytest.mark.parametrize("part", ["train", "test"])
@pytest.mark.parametrize("language", ["en", "zh"])
def test_answers_are_right(part: str, language: str) -> None:
    for row in rows_of(part, "copy", language):
        assert row["output"] == row["input"]
    for row in rows_of(part, "reverse", language):
        assert row["output"].split() == row["input"].split()[::-1]
    for row in rows_of(part, "count", language):
        assert row["output"] == str(len(re.split(r", |、", row["input"])))
    for row in rows_of(part, "sum", language):
        x, y = row["input"].split(" + ")
        assert row["output"] == str(int(x) + int(y))
    for row in rows_of(part, "rewrite", language):
        assert row["output"] != row["input"]
    for row in rows_of(part, "story", language):
        answer = row["output"].removeprefix("It was ").removeprefix("是").rstrip(".。")
        assert answer in row["instruction"] + row["input"], row


@cache
def pairs(part: str) -> list[dict[str, Any]]:
    text = (DATA / f"preferences.{part}.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def pair_text(row: dict[str, Any]) -> str:
    return "\n".join(row[field] for field in ("instruction", "input", "output", "chosen", "rejected"))


def score(answer: str, row: dict[str, Any]) -> float:
    return RULES["asked"](answer, row)


@pytest.mark.parametrize(("part", "each"), [("train", 300), ("test", 30)])
def test_every_kind_of_pair_is_there_as_often_in_both_languages_and_halves(part: str, each: int) -> None:
    kinds = {f"{kind}-{language}" for kind in ("right", "polite", "length", "language") for language in ("en", "zh")}
    assert Counter(row["kind"] for row in pairs(part)) == dict.fromkeys(kinds, each)
    halves = Counter((row["kind"], row["half"]) for row in pairs(part))
    assert all(abs(halves[kind, 1] - halves[kind, 2]) <= 12 for kind in kinds), halves
    assert all(row["kind"].endswith(row["language"]) for row in pairs(part))
    first = Counter(row["output"] == row["chosen"] for row in pairs(part))
    assert abs(first[True] - first[False]) < 0.15 * len(pairs(part)), "demonstrations are as often worse as better"


@pytest.mark.parametrize("part", ["train", "test"])
def test_the_rules_put_the_better_answer_of_every_pair_first(part: str) -> None:
    for row in pairs(part):
        better, worse = score(row["chosen"], row), score(row["rejected"], row)
        assert better > worse, row
        assert row["output"] in (row["chosen"], row["rejected"])
        kind = row["kind"].split("-")[0]
        assert row["rules"][-1] == "polite"
        polite = [RULES["polite"](row[side], row) for side in ("chosen", "rejected")]
        assert polite == [1, 0] if kind == "polite" else polite[0] == polite[1], "they differ in one thing"
        wanted = {"right": "correct", "polite": "polite"}.get(kind, kind)
        assert RULES[wanted](row["chosen"], row) == 1, row
        assert all(RULES[rule](row["chosen"], row) == 1 for rule in row["rules"] if rule != "polite"), row
        if kind == "polite":
            assert row["chosen"].startswith(row["rejected"].rstrip(".。")), row


def test_pairs_are_small_and_whole() -> None:
    assert sum((DATA / name).stat().st_size for name in PREFERENCES) <= 1e6
    for row in (*pairs("train"), *pairs("test")):
        assert all(row[field].strip() for field in ("instruction", "input", "chosen", "rejected"))
        assert not re.search(r"[{}*\[\]|]|  |。。|\.\.", pair_text(row)), row
        assert len(pair_text(row)) <= 400


def test_no_pair_asks_the_same_twice_or_in_both_parts_or_halves() -> None:
    asked = [(row["instruction"], row["input"], row["kind"]) for part in ("train", "test") for row in pairs(part)]
    assert len(set(asked)) == len(asked)
    halves = [{(row["instruction"], row["input"], row["kind"]) for row in pairs("train") if row["half"] == n}
              for n in (1, 2)]  # fmt: skip
    assert not halves[0] & halves[1]


@pytest.mark.parametrize("language", ["en", "zh"])
def test_held_out_words_and_numbers_of_pairs_occur_in_no_training_row(language: str) -> None:
    training = "\n".join(
        [pair_text(row) for row in pairs("train") if row["language"] == language]
        + [said(row) for row in rows("train") if row["kind"].endswith(language)]
    )
    assert found(held_out(language), training, language) == set()
    test = [row for row in pairs("test") if row["language"] == language]
    named = listed("name", language)
    if language == "en":
        assert found(named, "\n".join(map(pair_text, test)), language) == set()
    operands = {number for row in test for number in re.findall(r"\d\d", row["input"])}
    assert operands
    assert not operands & set(re.findall(r"\d+", training))


def test_pairs_are_read_as_they_are_meant() -> None:
    counts = PreferenceCounts()
    found = load_pairs([DATA / name for name in PREFERENCES], ChatOptions(), counts)
    assert [(pair.chosen[0].content, pair.rejected[0].content) for pair in found] == [
        (row["chosen"], row["rejected"]) for part in ("train", "test") for row in pairs(part)
    ]
    assert counts.notes() == []
    assert {shape for shapes in counts.shapes.values() for shape in shapes} == {"instruction/input/chosen/rejected"}
    prompts = load_prompts([DATA / "preferences.test.jsonl"], ChatOptions())
    assert all(score(prompt.row["chosen"], prompt.row) >= 0.5 for prompt in prompts)
    assert [bundled_preferences(), bundled_held_preferences()] == [[DATA / name] for name in PREFERENCES]
