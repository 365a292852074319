"""The bundled corpus: what the generator writes, and what a reader may expect of it."""

from __future__ import annotations

import gzip
import os
import re
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "data"
FILES = ("tales.en.txt", "tales.zh.txt")
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
    for name in FILES:
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
