"""Makes pairs of a better and a worse answer that differ in one thing which a program can judge.

A row is {"instruction", "input", "output", "chosen", "rejected", "kind", "half", "rules", "language"} and `answer` or
`words` where its rules need them. Its kind says in what the two differ: `right`, `length`, `polite` or `language`. Its
output is the better answer or, as often, the worse one: what people show before anybody says what they like.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tales.grammar import read_grammar

from tasks.maker import HELD_NUMBERS, JOINERS, Maker, Row, shuffle

KINDS = {  # what the answers of a pair differ in: the rules that a program judges them by
    "right": ["correct", "polite"],
    "polite": ["correct", "polite"],
    "length": ["length", "polite"],
    "language": ["language", "correct", "polite"],
}
STOPS = {"en": (".", " "), "zh": ("。", "")}  # what ends a sentence, and stands before the next


class PairMaker(Maker):
    """Makes pairs of one language; `abroad` are the numerals of the other."""

    abroad: list[str]

    def make(self, kind: str, count: int) -> list[dict[str, Any]]:
        """Make `count` pairs of one kind that ask different things, in two halves, its wordings in turn."""
        found: dict[tuple[str, str], dict[str, Any]] = {}
        wordings = self.grammar.tables["right" if kind == "polite" else kind]
        while len(found) < count:
            slots = self._slots(kind)
            row = self._fill(wordings[len(found) % len(wordings)], slots)
            half = {"half": len(found) // len(wordings) % 2 + 1}
            found.setdefault((row["instruction"], row["input"]), self._pair(kind, row, slots) | half)
        return list(found.values())

    def _pair(self, kind: str, row: Row, slots: Row) -> dict[str, Any]:
        """Make the two answers: both kind or both not, unless that is in what they differ."""
        kindly = self.random() < 0.5
        if kind == "polite":
            chosen, rejected = self._kindly(row["answer"], slots["polite"]), row["answer"]
        elif kindly:
            tail = slots["polite_abroad" if kind == "language" else "polite"]
            chosen, rejected = self._kindly(row["answer"], slots["polite"]), self._kindly(row["wrong"], tail)
        else:
            chosen, rejected = row["answer"], row["wrong"]
        return {
            **{"instruction": row["instruction"], "input": row["input"]},
            **{"output": chosen if self.random() < 0.5 else rejected, "chosen": chosen, "rejected": rejected},
            **{"kind": f"{kind}-{self.language}", "rules": KINDS[kind], "language": self.language},
            **({"words": len(row["answer"].split())} if kind == "length" else {"answer": row["answer"]}),
        }

    def _kindly(self, answer: str, tail: str) -> str:
        """Put a kind word behind an answer, in the language of that word."""
        stop, gap = STOPS["en" if tail.isascii() else "zh"]
        return answer.removesuffix(stop) + stop + gap + tail

    def _slots(self, task: str) -> Row:
        slots = super()._slots(task)
        numerals, things = self.grammar.words["numeral"], slots["words"].split()
        few, count = 2 + int(self.random() * (len(things) - 2)), int(slots["number"])
        other = few + (1 if self.random() < 0.5 else -1)
        return {
            **slots,
            **self._pick(self.grammar.tables["hue"]),
            **self._pick(self.grammar.tables["manners"]),
            **{"numeral": numerals[count - 1], "numeral_abroad": self.abroad[count - 1]},
            **{"few": numerals[few - 1], "first": " ".join(things[:few]), "first_wrong": " ".join(things[:other])},
            **{"sum_wrong": self._near(int(slots["sum"])), "number_wrong": self._next_to(count)},
        }

    def _near(self, right: int) -> str:
        """Draw a sum that is off by one in one digit."""
        near = [right + step for step in (-10, -1, 1, 10) if 10 <= right + step < 100]
        return str(self._pick([number for number in near if self.held or number not in HELD_NUMBERS]))

    def _next_to(self, right: int) -> str:
        return str(right - 1 if right > 1 and self.random() < 0.5 else right + 1)


def make_pairs(folder: Path, *, held: bool, each: int, seed: int) -> list[dict[str, Any]]:
    """Make the pairs of every kind in both languages, shuffled."""
    grammars = {language: read_grammar(folder / language) for language in JOINERS}
    rows: list[dict[str, Any]] = []
    for place, (language, other) in enumerate((("en", "zh"), ("zh", "en"))):
        maker = PairMaker(grammars[language], language, held=held, seed=seed + place)
        maker.abroad = grammars[other].words["numeral"]
        for kind in KINDS:
            rows += maker.make(kind, each)
    shuffle(rows, seed)
    return rows
