"""Rules: what each one counts, what it passes over, and rows that do not say what it needs."""

from __future__ import annotations

from typing import Any

import pytest

from minigpt.errors import DataError
from minigpt.evaluation.rules import RULES


def score(rule: str, text: str, **row: Any) -> float:
    return RULES[rule](text, row)


@pytest.mark.parametrize(
    ("answer", "right", "expected"),
    [
        ("49", "49", 1), ("48", "49", 0), ("", "49", 0), ("49. Thank you!", "49", 1), ("49。谢谢你！", "49", 1),
        (" It  was\nTom ", "It was Tom.", 1), ("It was Tom. Have a nice day!", "It was Tom.", 1),
        ("是小红。不客气！", "是小红。", 1), ("是小红", "是小红。", 1),
        ("小红在家里吗？祝你开心！", "小红在家里吗？", 1),
        ("Thank you! 49", "49", 0), ("49. Thank you! Thank you!", "49", 0), ("49 thank you!", "49", 0),
        ("49 49", "49", 0), ("tom", "Tom", 0),
    ],
)  # fmt: skip
def test_the_right_answer_counts_whatever_its_spaces_and_kind_words(answer: str, right: str, expected: int) -> None:
    assert score("correct", answer, output=right) == expected
    assert score("correct", answer, output="no", answer=right) == expected, "an answer comes before a demonstration"


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("abcd", 1), ("abcd.", 1), ("", 0), ("wxyz", 0),
        ("abxy", 0.25),  # ab of both: 2 * 2 / 8
        ("abcde", 4 / 9), ("bcd", 3 / 7),
    ],
)  # fmt: skip
def test_what_is_nearly_right_is_worth_up_to_a_half(answer: str, expected: float) -> None:
    assert score("close", answer, output="abcd") == pytest.approx(expected)


@pytest.mark.parametrize(
    ("answer", "words", "expected"),
    [
        ("a b c", 3, 1), ("a b", 3, 2 / 3), ("a b c d", 3, 2 / 3), ("", 3, 0), ("a b c d e f g", 3, 0),
        ("a b. Thank you!", 2, 1), ("苹果 桃子。谢谢你！", 2, 1), ("苹果", 2, 0.5), ("", 0, 1),
    ],
)  # fmt: skip
def test_words_are_counted(answer: str, words: int, expected: float) -> None:
    assert score("length", answer, words=words) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("49. Thank you!", 1), ("49。谢谢你！", 1), ("a b. You are WELCOME", 1), ("是小红。祝你开心！", 1),
        ("49", 0), ("Thank you!", 0), ("谢谢你！", 0), ("Thank you! 49", 0), ("", 0), ("49. Nice.", 0),
        ("49. Thank you?", 0),
    ],
)  # fmt: skip
def test_an_answer_is_polite_when_it_says_something_and_ends_kindly(answer: str, expected: int) -> None:
    assert score("polite", answer) == expected


@pytest.mark.parametrize(
    ("answer", "english"), [("red", 1), ("红色", 0), ("ab 红色", 0.5), ("a红色色", 0.25), ("42", None), ("", None)]
)
def test_letters_of_the_language_asked_for(answer: str, english: float | None) -> None:
    assert score("language", answer, language="en") == (0 if english is None else english)
    assert score("language", answer, language="zh") == (0 if english is None else 1 - english)


def test_a_row_may_ask_for_several_things() -> None:
    row: dict[str, Any] = {"answer": "red", "language": "en", "rules": ["correct", "language", "polite"]}
    for answer, expected in (
        ("red. Thank you!", 1),
        ("red", 2 / 3),
        ("blue", 1 / 3),
        ("红色", 0),
        ("红色。谢谢你！", 1 / 3),
    ):
        assert score("asked", answer, **row) == pytest.approx(expected)
    assert score("asked", "4", output="4") == 1
    assert score("asked", "5", output="4", rules=None) == 0


@pytest.mark.parametrize(
    ("rule", "row", "message"),
    [
        ("correct", {"prompt": "x"}, 'no field "answer" or "output" in the row of the prompt (found: "prompt"); '),
        ("correct", {"answer": 4}, 'field "answer" holds a number, which the rule cannot use'),
        ("length", {"words": "3"}, 'field "words" holds a string, which the rule cannot use'),
        ("language", {"language": "fr"}, "field \"language\" holds 'fr'; the rule knows"),
        ("language", {}, 'no field "language" in the row of the prompt (found: none)'),
        (
            "asked",
            {"rules": ["kind"]},
            "field \"rules\" holds ['kind']; name some of correct, language, length, polite",
        ),
        ("asked", {"rules": "polite"}, "field \"rules\" holds 'polite'; name some of "),
        ("asked", {"rules": ["asked"]}, "field \"rules\" holds ['asked']; name some of "),
    ],
)
def test_rows_that_do_not_say_what_a_rule_needs(rule: str, row: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError) as raised:
        score(rule, "x", **row)
    assert str(raised.value).startswith(message)
    assert "\n" not in str(raised.value)


def test_long_answers_are_judged_at_once() -> None:
    long = "la " * 20_000
    assert score("polite", long) == 0
    assert score("polite", f"{long}. Thank you!") == 1
    assert score("correct", "thanks " * 20_000 + "?", output="x") == 0
