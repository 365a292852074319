"""Tells stories from a grammar, with decks instead of dice so that wordings come round evenly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import TypeVar

from .grammar import Grammar, Line, Row, tokens

T = TypeVar("T")
ANY = "*"


class Teller:
    """Draws plots, rows and wordings; only `Random.random` is used, which every Python version computes alike."""

    def __init__(self, grammar: Grammar, seed: int, joiner: str, polish: Callable[[str], str]) -> None:
        self.grammar = grammar
        self.joiner = joiner
        self.polish = polish
        self.random = Random(seed).random
        self.decks: dict[object, list[int]] = {}
        self.plot = grammar.plots[0]
        self.state: Row = {}
        self.drawn: list[int] = []
        self.used: list[str] = []

    def story(self) -> str:
        """Return one story as paragraphs separated by blank lines."""
        plots = [plot for plot in self.grammar.plots for _ in range(plot.weight)]
        self.plot = self._draw("plots", plots)
        self.state, self.drawn, self.used = {}, [], []
        paragraphs = [self._paragraph(lines) for lines in self.plot.paragraphs if lines]
        return "\n\n".join(paragraph for paragraph in paragraphs if paragraph)

    def _paragraph(self, lines: list[Line]) -> str:
        told = [line for line in lines if not line.optional or self.random() < 0.5]
        texts = [self.polish(self._expand(self._draw(tuple(line.wordings), line.wordings))) for line in told]
        return self.joiner.join(texts).replace("\\n" + self.joiner, "\n").replace("\\n", "\n")

    def _draw(self, key: object, items: Sequence[T]) -> T:
        """Deal the next item of a shuffled deck, so that all items come before one comes again."""
        deck = self.decks.setdefault(key, [])
        if not deck:
            deck.extend(range(len(items)))
            for last in range(len(deck) - 1, 0, -1):
                other = int(self.random() * (last + 1))
                deck[last], deck[other] = deck[other], deck[last]
        return items[deck.pop()]

    def _expand(self, template: str) -> str:
        out = ""
        for token in tokens(template):
            if isinstance(token, str):
                out += token
            elif token[1] is None:
                out += self._slot(token[0])
            else:
                out += self._expand(self._draw(token[0], token[1]))
        return out

    def _slot(self, slot: str) -> str:
        if slot in self.state:
            return self.state[slot]
        for table in self.grammar.tables_of(slot, self.plot):
            if id(table) not in self.drawn:
                self._bind(table)
            if slot in self.state:
                return self.state[slot]
        if slot in self.grammar.words:
            return self._word(self.grammar.words[slot])
        if wordings := self.grammar.rules.get(slot):
            return self._expand(self._draw(slot, wordings))
        if slot[0].isupper():
            value = self._slot(slot[0].lower() + slot[1:])
            return value[:1].upper() + value[1:]
        raise ValueError(f"plot {self.plot.name}: unknown slot {slot}")

    def _bind(self, table: list[Row]) -> None:
        """Draw a row that agrees with the plot's pins and with what is already told, and keep its columns."""
        known = self.plot.pins | {column: [value] for column, value in self.state.items()}
        wanted = {column: known[column] for column in table[0] if column in known}
        rows = table
        if wanted:
            rows = [row for row in table if all(row[column] in (ANY, *wanted[column]) for column in wanted)]
        row = self._draw((id(table), str(wanted)), rows)
        self.drawn.append(id(table))
        for column, cell in row.items():
            if cell != ANY and column not in self.state:
                self.state[column] = self._expand(cell)

    def _word(self, words: list[str]) -> str:
        """Draw a word that this story has not used yet; earlier words of the list are more common."""
        while True:
            dice = self.random()
            word = words[int(len(words) * dice * (1 + dice) / 2)]  # no power: its last bit differs between C libraries
            if word not in self.used or all(other in self.used for other in words):
                self.used.append(word)
                return word
