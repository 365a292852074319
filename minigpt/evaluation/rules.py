"""Rules that a program can judge an answer by, each by its name: as rewards, and to say which of two answers wins.

A rule takes the answer and the row that its prompt stands in, and gives a score from 0 to 1. The row says what was
asked for: `answer` or `output` is the right answer, `words` how many words, `language` "en" or "zh", and `rules` which
of these rules count, for a row that asks for several things.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping
from typing import Any

from minigpt.errors import DataError
from minigpt.text.records import kind_of, quoted

Rule = Callable[[str, Mapping[str, Any]], float]

_KIND_WORDS = re.compile("thank you|thanks|welcome|nice day|glad to|谢谢|不客气|祝你|很高兴", re.IGNORECASE)
_SENTENCE_ENDS = ".!?。！？\n"
_HAN = re.compile(r"[\u4e00-\u9fff]")
_LATIN = re.compile(r"[A-Za-z]")


def correct(answer: str, row: Mapping[str, Any]) -> float:
    """Score 1 for the right answer: how it is spaced, a full stop and a kind end do not count."""
    right: str = _asked(row, ("answer", "output"), str)
    return float(_plain(answer) in (_plain(right), _plain(right + ".")))


def close(answer: str, row: Mapping[str, Any]) -> float:
    """Score 1 for the right answer, and for another half of how alike the two are (Ratcliff & Obershelp): a reward that
    tells nearly right from far off, where few answers are right at all.
    """
    if correct(answer, row):
        return 1.0
    right = _asked(row, ("answer", "output"), str)
    return difflib.SequenceMatcher(None, _plain(right), _plain(answer), autojunk=False).ratio() / 2


def length(answer: str, row: Mapping[str, Any]) -> float:
    """Score 1 for as many words as were asked for, less the further off, 0 for none; a kind end does not count."""
    wanted: int = _asked(row, ("words",), int)
    count = len(_plain(answer).split())
    return max(0.0, 1 - abs(count - wanted) / max(wanted, 1))


def polite(answer: str, row: Mapping[str, Any]) -> float:
    """Score 1 for an answer that says something and ends with a kind word."""
    content, end = _parted(answer)
    return float(bool(content) and bool(end))


def language(answer: str, row: Mapping[str, Any]) -> float:
    """Score the share of letters that belong to the language asked for."""
    wanted: str = _asked(row, ("language",), str)
    if wanted not in ("en", "zh"):
        raise DataError(f'field "language" holds {wanted[:20]!r}; the rule knows "en" and "zh"')
    han, latin = len(_HAN.findall(answer)), len(_LATIN.findall(answer))
    return (han if wanted == "zh" else latin) / max(han + latin, 1)


def asked(answer: str, row: Mapping[str, Any]) -> float:
    """Score the mean of the rules that the row names in `rules`; a row that names none asks for the right answer."""
    names = row.get("rules") or ["correct"]
    if not isinstance(names, list) or not all(name in _SINGLE for name in names):
        raise DataError(f'field "rules" holds {names!r}; name some of {", ".join(sorted(_SINGLE))} in a list')
    return sum(_SINGLE[name](answer, row) for name in names) / len(names)


_SINGLE: dict[str, Rule] = {"correct": correct, "language": language, "length": length, "polite": polite}
RULES: dict[str, Rule] = {**_SINGLE, "asked": asked, "close": close}


def _parted(answer: str) -> tuple[str, str]:
    """Part an answer into what it says and its last sentence, where that is a kind word and no question."""
    bare = answer.strip()
    start = max(bare.rfind(mark, 0, -1) for mark in _SENTENCE_ENDS) + 1
    end = bare[start:]
    return (bare[:start], end) if _KIND_WORDS.search(end) and end[-1] not in "?？" else (bare, "")


def _plain(answer: str) -> str:
    """Leave off a kind end and a full stop, and make every gap one blank."""
    content, _ = _parted(answer)
    return " ".join(content.split()).removesuffix(".").removesuffix("。")


def _asked(row: Mapping[str, Any], fields: tuple[str, ...], kind: type) -> Any:
    """Return the first of the fields that the row has; a DataError where none is there or it holds something else."""
    name = next((field for field in fields if row.get(field) is not None), None)
    if name is None:
        wanted = " or ".join(f'"{field}"' for field in fields)
        raise DataError(f"no field {wanted} in the row of the prompt (found: {quoted(list(row))}); the rule needs it")
    if not isinstance(row[name], kind):
        raise DataError(f'field "{name}" holds {kind_of(row[name])}, which the rule cannot use')
    return row[name]
