"""Stop strings in a stream: never shown, whatever the pieces, and nothing else is lost."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minigpt.inference.stopping import StopText


def pushed(stops: tuple[str, ...], pieces: list[str]) -> tuple[list[str], StopText]:
    stop = StopText(stops)
    return [stop.push(piece) for piece in pieces], stop


def test_without_stop_strings_nothing_is_held_back() -> None:
    shown, stop = pushed((), ["a", "", "bc"])
    assert shown == ["a", "", "bc"]
    assert not stop.found
    assert stop.flush() == ""


@pytest.mark.parametrize(
    ("stops", "pieces", "shown"),
    [
        (("END",), ["oneENDtwo"], ["one"]),
        (("END",), ["one E", "N", "D two"], ["one ", "", ""]),
        (("END",), ["E", "N", "E", "N", "D"], ["", "", "EN", "", ""]),
        (("END",), ["EEND"], ["E"]),
        (("aab",), ["a", "a", "a", "b"], ["", "", "a", ""]),
        (("\n\n",), ["a\n", "b\n", "\n"], ["a", "\nb", ""]),
        (("xyz", "yq"), ["ax", "y", "q"], ["a", "", "x"]),
        (("b", "abc"), ["a", "b"], ["", "a"]),
        (("b", "a"), ["cab"], ["c"]),
        (("😀",), ["x", "😀y"], ["x", ""]),
    ],
)
def test_a_stop_string_ends_the_text_before_it(stops: tuple[str, ...], pieces: list[str], shown: list[str]) -> None:
    found, stop = pushed(stops, pieces)
    assert found == shown
    assert stop.found
    assert stop.flush() == ""
    assert stop.push("more") == ""


def test_text_that_did_not_become_a_stop_string_comes_out_at_the_end() -> None:
    found, stop = pushed(("END",), ["the EN"])
    assert found == ["the "]
    assert not stop.found
    assert stop.flush() == "EN"
    assert stop.flush() == ""


texts = st.text(alphabet="ab", max_size=5)


@settings(max_examples=200, derandomize=True, deadline=None)
@given(st.lists(texts, max_size=8), st.lists(texts.filter(bool), max_size=3))
def test_for_any_pieces(pieces: list[str], stops: list[str]) -> None:
    stop, shown, text = StopText(tuple(stops)), "", ""
    for piece in pieces:
        shown += stop.push(piece)
        text += piece
        assert text.startswith(shown)
        ended = any(word in text for word in stops)
        assert stop.found == ended
        if ended:
            assert shown == text[: min(place for word in stops if (place := text.find(word)) >= 0)]
            return
        held = text[len(shown) :]
        assert not held or any(word.startswith(held) for word in stops)  # no more is held back than must be
    assert shown + stop.flush() == text
