"""Documents out of a stream of text, and pieces that can be tokenised apart."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, pre_tokenizers

from minigpt.text.pieces import END_OF_TEXT, PIECE_CHARS, REACH_CHARS, cut, document_pieces
from minigpt.text.tokenizer import PATTERN

# Everything the pre-tokenisation looks at: kinds of space (also those on which libraries differ), line ends, letters,
# digits, punctuation, contractions, combining marks.
ALPHABET = [*"aB1!'’s \n\n\t  \r\u3000\x1c\x85\u2028\xa0é\u0301中²_😀"]
GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def words(text: str, pattern: str = PATTERN) -> list[str]:
    splitter = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    return [word for word, _ in splitter.pre_tokenize_str(text)]


def chunks_of(text: str, size: int) -> Iterator[str]:
    yield from (text[start : start + size] for start in range(0, len(text), size))


def documents(chunks: list[str], separator: str | None = None) -> list[str]:
    result: list[str] = []
    open_document = False
    for piece in document_pieces(chunks, "w", separator):
        assert piece.where == "w"
        assert piece.starts_document is not open_document
        result = [*result, piece.text] if piece.starts_document else [*result[:-1], result[-1] + piece.text]
        open_document = not piece.ends_document
    assert not open_document
    return result


@settings(max_examples=400)
@given(st.text(st.sampled_from(ALPHABET), max_size=60), st.integers(1, 8), st.integers(1, 70))
def test_cutting_never_changes_the_words(text: str, piece_chars: int, chunk: int) -> None:
    pieces = list(cut(chunks_of(text, chunk), piece_chars, reach_chars=10_000))
    assert "".join(pieces) == text
    assert all(pieces), "an empty piece"
    assert [word for piece in pieces for word in words(piece)] == words(text)
    assert pieces == list(cut([text], piece_chars, reach_chars=10_000)), "the cuts depend on how the text came in"


@settings(max_examples=100)
@given(st.text(st.sampled_from(["a", "b", "1", "!", "中", " ", "\n"]), max_size=60), st.integers(1, 8))
def test_a_lone_line_end_is_a_border_for_gpt2_too(text: str, piece_chars: int) -> None:
    text = re.sub(r"\s*\n\s*", "\n", text)
    pieces = list(cut([text], piece_chars, reach_chars=10_000))
    assert [word for piece in pieces for word in words(piece, GPT2_PATTERN)] == words(text, GPT2_PATTERN)


@settings(max_examples=100)
@given(st.text(st.sampled_from(["a", "中", " ", "\n", "!"]), max_size=80), st.integers(1, 6), st.integers(1, 9))
def test_pieces_end_within_reach(text: str, piece_chars: int, chunk: int) -> None:
    pieces = list(cut(chunks_of(text, chunk), piece_chars, reach_chars=10))
    assert "".join(pieces) == text
    assert all(len(piece) <= 10 for piece in pieces)
    assert pieces == list(cut([text], piece_chars, reach_chars=10))


def test_where_pieces_end() -> None:
    assert list(cut(["one\ntwo three"], 6)) == ["one\n", "two", " three"]
    assert list(cut(["one two three"], 9)) == ["one two", " three"]
    assert list(cut(["one\n\n\ntwo"], 7)) == ["one\n\n\n", "two"]
    assert list(cut(["中中\n\u3000\u3000中中"], 5)) == ["中中\n", "\u3000\u3000中中"]
    assert list(cut(["abcdefgh ij"], 4)) == ["abcdefgh", " ij"], "it grows to the next safe place"


@pytest.mark.parametrize("line", ["Alice was beginning to get very tired.\n", "一二三四五六七八九十。\n\n", "word "])
def test_large_texts_come_in_pieces_of_the_usual_size(line: str) -> None:
    text = line * (400_000 // len(line))
    pieces = list(cut(chunks_of(text, 100_000)))
    assert "".join(pieces) == text
    assert all(PIECE_CHARS - 100 < len(piece) <= PIECE_CHARS for piece in pieces[:-1])


def test_a_text_without_a_place_to_cut_stays_bounded() -> None:
    pieces = list(cut(["x" * 500_000] * 5))
    assert [len(piece) for piece in pieces] == [REACH_CHARS, REACH_CHARS, 2_500_000 - 2 * REACH_CHARS]


def test_pieces_come_before_the_text_ends() -> None:
    """Memory stays flat: what is held is no more than a piece and a look ahead."""
    read = given = 0

    def endless() -> Iterator[str]:
        nonlocal read
        while True:
            chunk = "a line of text\n" * 5000
            read += len(chunk)
            yield chunk

    for piece in document_pieces(endless(), "w"):
        given += len(piece.text)
        assert read - given < 4 * PIECE_CHARS
        if given > 3_000_000:
            break


def test_end_of_text_separates_and_takes_one_line_end_on_each_side() -> None:
    assert documents(["one\n<|endoftext|>\ntwo<|endoftext|>three\n"]) == ["one", "two", "three\n"]
    assert documents(["one\n\n<|endoftext|>\n\ntwo"]) == ["one\n", "\ntwo"]
    assert documents(["<|endoftext|>\n<|endoftext|>one<|endoftext|>\n"]) == ["one"]
    assert documents([]) == documents([""]) == documents([END_OF_TEXT]) == []


def test_a_separator_of_ones_own() -> None:
    assert documents(["one\n\ntwo\n\n\n\nthree\n"], "\n\n") == ["one", "two", "three\n"]
    assert documents(["one---two<|endoftext|>three"], "---") == ["one", "two", "three"]
    assert documents(["a.b|c"], ".") == ["a", "b|c"], "it is text, no pattern"


@settings(max_examples=200)
@given(
    st.lists(st.sampled_from([END_OF_TEXT, "\n", "<|end", "oftext|>", "<", "a", "b", "##", "#"]), max_size=12),
    st.sampled_from([None, "##", "\n\n"]),
    st.integers(1, 40),
)
def test_separators_across_chunks(parts: list[str], separator: str | None, chunk: int) -> None:
    text = "".join(parts)
    pattern = r"\n?<\|endoftext\|>\n?" + (f"|{separator}" if separator else "")
    expected = [document for document in re.split(pattern, text) if document]
    assert documents(list(chunks_of(text, chunk)), separator) == expected
