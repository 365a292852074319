"""Makes the rows of the instruction set: wordings from text files, slots drawn from lists.

A row is {"instruction", "input", "output", "kind"}; its kind is the task and the language, such as "copy-en".
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import TypeVar

from tales.grammar import Grammar, read_grammar

T = TypeVar("T")
Row = dict[str, str]

TASKS = ("copy", "reverse", "count", "sum", "rewrite", "story")
SLOT = re.compile(r"\{(\w+)\}")
# How many things a row is about: long copies teach soonest.
LENGTHS = {"copy": (1, 8), "reverse": (2, 4), "count": (1, 5)}
LENGTHS |= {"right": (1, 5), "polite": (1, 5), "length": (3, 5), "language": (1, 5)}
# What stands between words, and between the things of a list.
JOINERS = {"en": (" ", "\n", ", "), "zh": (" ", " ", "、")}
HELD_NUMBERS = (12, 15, 21, 23, 26, 31, 34, 40, 42, 45, 50, 53, 57, 61, 64, 70, 72)


class Maker:
    """Makes rows of one language, for training or, `held`, from held-out words, names and numbers for the test.

    Only `Random.random` is used, which every Python version computes alike.
    """

    def __init__(self, grammar: Grammar, language: str, *, held: bool, seed: int) -> None:
        self.grammar, self.language, self.held = grammar, language, held
        self.random = Random(seed).random
        self.pairs = pairs(held)
        self.kept = {item for name, items in grammar.words.items() if name.startswith("held_") for item in items}

    def rows(self, task: str, count: int) -> list[Row]:
        """Make `count` different rows of one task, its wordings in turn."""
        found: dict[tuple[str, str], Row] = {}
        wordings = self.grammar.tables[task]
        while len(found) < count:
            row = self._fill(wordings[len(found) % len(wordings)], self._slots(task))
            found.setdefault((row["instruction"], row["input"]), row | {"kind": f"{task}-{self.language}"})
        return list(found.values())

    def _slots(self, task: str) -> Row:
        """Draw a value for every slot that a wording may have."""
        x, y = self._pick(self.pairs)
        a, b = self._names(2)
        place, place2 = self._several(self.grammar.words["place"], 2)
        things = self._things(task)
        space, line, comma = JOINERS[self.language]
        return {
            **self._pick(self.grammar.tables["tale"]),
            **self._pick(self.grammar.tables["act"]),
            **{"a": a, "b": b, "he": self._pick(["he", "she"]), "place": place, "place2": place2},
            **{name: self._pick(self.grammar.words.get(name, [""])) for name in ("when", "color", "title", "more")},
            **{"thing": self._pick(self._list("thing")), "x": str(x), "y": str(y), "sum": str(x + y)},
            **{"words": space.join(things), "lines": line.join(things), "turned": line.join(reversed(things))},
            **{"list": comma.join(things), "number": str(len(things))},
        }

    def _how_many(self, task: str) -> int:
        least, most = LENGTHS.get(task, (1, 1))
        return least + int(self.random() * (most - least + 1))

    def _fill(self, wording: Row, slots: Row) -> Row:
        row = {}
        for column, text in wording.items():
            while "{" in text:
                text = SLOT.sub(lambda slot: slots[slot[1]], text)
            row[column] = "" if text == "*" else text
        return row

    def _things(self, task: str) -> list[str]:
        """Draw words or, half of the time, names."""
        count = self._how_many(task)
        return self._names(count) if self.random() < 0.5 else self._several(self._list("word"), count)

    def _names(self, count: int) -> list[str]:
        """Draw names; those for training are mostly made up, since a small model learns a list of names by heart."""
        names: list[str] = []
        while len(names) < count:
            if self.held or self.random() < 0.25:
                name = self._pick(self._list("name"))
            else:
                name = self._pick(self.grammar.words["name_start"]) + self._pick(self.grammar.words["name_end"])
            if name not in names and (self.held or name not in self.kept):
                names.append(name)
        return names

    def _list(self, name: str) -> list[str]:
        return self.grammar.words[f"held_{name}" if self.held else name]

    def _pick(self, items: Sequence[T]) -> T:
        return items[int(self.random() * len(items))]

    def _several(self, items: Sequence[str], count: int) -> list[str]:
        drawn: list[str] = []
        while len(drawn) < count:
            item = self._pick(items)
            if item not in drawn:
                drawn.append(item)
        return drawn


def pairs(held: bool) -> list[tuple[int, int]]:
    """The pairs to add up without a carry, each of two digits; in training neither they nor their sum is held out."""
    numbers = HELD_NUMBERS if held else [number for number in range(10, 90) if number not in HELD_NUMBERS]
    return [
        (x, y)
        for x in numbers
        for y in numbers
        if x + y < 100 and x % 10 + y % 10 < 10 and (held or x + y not in HELD_NUMBERS)
    ]


def make_rows(folder: Path, *, held: bool, each: dict[str, int], seed: int) -> list[Row]:
    """Make the rows of every task in both languages, shuffled."""
    rows: list[Row] = []
    for place, language in enumerate(JOINERS):
        maker = Maker(read_grammar(folder / language), language, held=held, seed=seed + place)
        for task, count in each.items():
            rows += maker.rows(task, count)
    shuffle(rows, seed)
    return rows


def shuffle(rows: list[T], seed: int) -> None:
    """Put rows in an order that is the same in every Python version (Fisher and Yates)."""
    random = Random(seed).random
    for last in range(len(rows) - 1, 0, -1):
        other = int(random() * (last + 1))
        rows[last], rows[other] = rows[other], rows[last]
