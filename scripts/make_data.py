"""Write what is bundled: short English and Chinese stories, instructions and preference pairs that a program can check.

The same bytes on every machine.

Usage: python scripts/make_data.py [--out DIR]
"""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tales.grammar import read_grammar
from tales.teller import Teller
from tasks.maker import TASKS, make_rows
from tasks.pairs import make_pairs

HERE = Path(__file__).resolve().parent
SEPARATOR = "<|endoftext|>"
MOST_REPEATS = 20
SENTENCE_END = re.compile(r"[.!?。！？]+")


@dataclass(frozen=True)
class Corpus:
    """One output file: its grammar, size, and how lines of its language are joined, polished and measured."""

    file: str
    grammar: str
    seed: int
    size: int
    joiner: str
    polish: Callable[[str], str]
    unit: re.Pattern[str]
    least: int
    most: int


def polish_english(line: str) -> str:
    """Put the right article before each word and a capital at the start of the line."""
    line = re.sub(r"\b([Aa])n? (\w+)", lambda match: _article(match[1], match[2]) + " " + match[2], line)
    return re.sub(r'^"?[a-z]', lambda match: match[0].upper(), line)


def _article(article: str, word: str) -> str:
    word = word.lower()
    vowel = word[0] in "aeiou" and not word.startswith(("uni", "use", "usu", "one", "once", "eu"))
    return article + "n" if vowel or word.startswith(("hour", "honest", "honor", "heir")) else article


def polish_chinese(line: str) -> str:
    """Leave a Chinese line as it is: it needs no articles and no capitals."""
    return line


CORPORA = (
    Corpus("tales.en.txt", "en", 20, 1_350_000, " ", polish_english, re.compile(r"[A-Za-z']+"), 60, 250),
    Corpus("tales.zh.txt", "zh", 21, 800_000, "", polish_chinese, re.compile(r"[\u4e00-\u9fff]"), 90, 400),
)

# Rows of each task in each language: many of what has to be learned, few of what comes by itself.
TRAINING_ROWS = {"copy": 2_400, "reverse": 1_800, "count": 500, "sum": 1_200, "rewrite": 1_300, "story": 1_800}
INSTRUCTIONS = {  # file: whether its words, names and numbers are those held out, rows of each task and language, seed
    "instructions.train.jsonl": (False, TRAINING_ROWS, 30),
    "instructions.test.jsonl": (True, dict.fromkeys(TASKS, 60), 40),
}

PREFERENCES = {  # file: whether its words are held out, pairs of each kind and language, seed
    "preferences.train.jsonl": (False, 300, 50),
    "preferences.test.jsonl": (True, 30, 60),
}


def sentences(story: str) -> list[str]:
    """Return the sentences of a story without their quotation marks and end marks."""
    parts = SENTENCE_END.split(story.replace(SEPARATOR, ""))
    return [bare for part in parts if (bare := part.strip(' \n"“”‘’'))]


def write_corpus(corpus: Corpus) -> str:
    """Return the whole text of one corpus: new stories until it is large enough.

    A story is thrown away when it stands already, is too short or too long, or would repeat a sentence too often.
    """
    teller = Teller(read_grammar(HERE / "tales" / corpus.grammar), corpus.seed, corpus.joiner, corpus.polish)
    stories: dict[str, None] = {}
    seen: Counter[str] = Counter()
    size = 0
    while size < corpus.size:
        story = teller.story()
        found = sentences(story)
        fits = corpus.least <= len(corpus.unit.findall(story)) <= corpus.most
        worn = any(seen[sentence] + found.count(sentence) > MOST_REPEATS for sentence in found)
        if story in stories or worn or not fits:
            continue
        stories[story] = None
        seen.update(found)
        size += len(story.encode()) + len(SEPARATOR) + 2
    return "".join(f"{story}\n{SEPARATOR}\n" for story in stories)


def write_instructions(held: bool, each: dict[str, int], seed: int) -> str:
    """Return the rows of an instruction file, one JSON object a line."""
    return json_lines(make_rows(HERE / "tasks", held=held, each=each, seed=seed))


def json_lines(rows: Iterable[Mapping[str, Any]]) -> str:
    """Return rows as JSON, one object a line."""
    return "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows)


def main() -> None:
    """Write every file into the chosen folder."""
    parser = argparse.ArgumentParser(description="Write the bundled corpus, instructions and preference pairs.")
    parser.add_argument("--out", type=Path, default=HERE.parent / "data", help="folder to write to (default: data/)")
    out: Path = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    for corpus in CORPORA:
        (out / corpus.file).write_bytes(write_corpus(corpus).encode("utf-8"))
    for file, (held, each, seed) in INSTRUCTIONS.items():
        (out / file).write_bytes(write_instructions(held, each, seed).encode("utf-8"))
    for file, (held, count, seed) in PREFERENCES.items():
        pairs = make_pairs(HERE / "tasks", held=held, each=count, seed=seed)
        (out / file).write_bytes(json_lines(pairs).encode("utf-8"))


if __name__ == "__main__":
    main()
