"""A story grammar: word lists, rules, tables and plots read from plain text files.

    # comment
    ~ color: red, blue, green        word list; earlier words are drawn more often, never twice in one story;
    ~ color: white, black            a second line of a name goes on with its list
    : greeting                       rule; the `| ` lines below are its wordings
    | Hello, {h}!
    @ hero: kid ; he ; h             table; one row is drawn per story and binds all columns (`*` leaves one open)
    - girl ; she ; {girl_name}
    == lost x2                       plot (drawn twice as often), up to the next `==`
    with season: winter, autumn      only rows with these values may be drawn
    @ thing ; place                  table of this plot alone
    - kite ; the hill
    {h} lost the {thing}.            a line of the story ...
    | The {thing} was gone.          ... with another wording
    ? It was [very|so] sad.          a line that is left out half of the time

A blank line inside a plot starts a new paragraph. `{name}` is a slot, `{Name}` the same with a capital, `[a|b]` a
choice, and `\\n` a line break inside a paragraph. A row is only drawn if it agrees with columns that are bound already.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

Row = dict[str, str]


@dataclass
class Line:
    """One place in a story: its wordings, and whether it may be left out."""

    wordings: list[str]
    optional: bool = False


@dataclass
class Plot:
    """A story skeleton: the tables it draws from, the values it insists on, and its paragraphs."""

    name: str
    weight: int = 1
    tables: list[list[Row]] = field(default_factory=list)
    pins: dict[str, list[str]] = field(default_factory=dict)
    paragraphs: list[list[Line]] = field(default_factory=lambda: [[]])


@dataclass
class Grammar:
    """Everything one language needs to tell stories."""

    words: dict[str, list[str]] = field(default_factory=dict)
    rules: dict[str, list[str]] = field(default_factory=dict)
    tables: dict[str, list[Row]] = field(default_factory=dict)
    plots: list[Plot] = field(default_factory=list)

    def tables_of(self, slot: str, plot: Plot) -> list[list[Row]]:
        """Return the tables that have the column `slot`, the plot's own first."""
        return [table for table in [*plot.tables, *self.tables.values()] if slot in table[0]]


def read_grammar(folder: Path) -> Grammar:
    """Read all grammar files of one language, in the order of their names."""
    grammar = Grammar()
    for path in sorted(folder.glob("*.txt"), key=lambda path: path.name):
        _Reader(grammar, path.name).read(path.read_text(encoding="utf-8").split("\n"))
    return grammar


class _Reader:
    """Reads one grammar file line by line into a Grammar."""

    def __init__(self, grammar: Grammar, source: str) -> None:
        self.grammar = grammar
        self.source = source
        self.plot: Plot | None = None
        self.columns: list[str] = []
        self.rows: list[Row] = []
        self.wordings: list[str] = []

    def read(self, lines: Iterable[str]) -> None:
        for number, raw in enumerate(lines, 1):
            line = raw.strip()
            try:
                self._line(line)
            except (ValueError, AssertionError) as error:
                raise ValueError(f"{self.source}:{number}: {error}: {line}") from error

    def _line(self, line: str) -> None:
        mark, _, rest = line.partition(" ")
        if mark == "#":
            return
        if mark == "~":
            name, _, words = rest.partition(": ")
            self.grammar.words.setdefault(name, []).extend(word.strip() for word in words.split(","))
        elif mark == ":":
            self.wordings = self.grammar.rules[rest] = []
        elif mark == "|":
            self.wordings.append(rest)
        elif mark == "@":
            self._table(rest)
        elif mark == "-":
            cells = [cell.strip() for cell in rest.split(" ; ")]
            self.rows.append(dict(zip(self.columns, cells, strict=True)))
        elif mark == "==":
            name, _, weight = rest.partition(" x")
            self.plot = Plot(name, int(weight or 1))
            self.grammar.plots.append(self.plot)
        elif self.plot is not None:
            self._story_line(self.plot, line)
        elif line:
            raise ValueError("a line outside of any plot")

    def _table(self, header: str) -> None:
        name, _, columns = header.rpartition(": ")
        self.columns = columns.split(" ; ")
        self.rows = []
        if name:
            self.grammar.tables[name] = self.rows
        else:
            assert self.plot is not None, "a table without a name outside of any plot"
            self.plot.tables.append(self.rows)

    def _story_line(self, plot: Plot, line: str) -> None:
        if line.startswith("with "):
            slot, _, values = line.removeprefix("with ").partition(": ")
            plot.pins[slot] = values.split(", ")
        elif line:
            self.wordings = [line.removeprefix("? ")]
            plot.paragraphs[-1].append(Line(self.wordings, line.startswith("? ")))
        elif plot.paragraphs[-1]:
            plot.paragraphs.append([])


# A template is text, slots and choices in turn; a choice is its own source, as a key, and its options.
Token = str | tuple[str, tuple[str, ...] | None]
SLOT = re.compile(r"\{(\w+)\}")


@cache
def tokens(template: str) -> tuple[Token, ...]:
    """Split a template: plain text as a string, `{slot}` as (slot, None), `[a|b]` as (its text, its options)."""
    out: list[Token] = []
    at = 0
    while at < len(template):
        if template[at] == "[":
            options, end = _choice(template, at)
            out.append((template[at:end], options))
            at = end
        elif match := SLOT.match(template, at):
            out.append((match[1], None))
            at = match.end()
        else:
            end = min((place for mark in "[{" if (place := template.find(mark, at)) >= 0), default=len(template))
            out.append(template[at:end])
            at = end
    return tuple(out)


def _choice(text: str, start: int) -> tuple[tuple[str, ...], int]:
    """Return the options of the choice that opens at `start` and the index behind its closing bracket."""
    parts, depth = [""], 0
    for index in range(start, len(text)):
        char = text[index]
        depth += (char == "[") - (char == "]")
        if depth == 0:
            return tuple(parts), index + 1
        if char == "|" and depth == 1:
            parts.append("")
        elif index > start:
            parts[-1] += char
    raise ValueError(f"no closing bracket in: {text}")
