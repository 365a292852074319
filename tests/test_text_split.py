"""Duplicates, short documents, and what is held out."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minigpt.errors import ConfigError, DataError
from minigpt.text import split
from minigpt.text.sources import SourceOptions
from minigpt.text.split import Scan, scan, share_parts, training_sample

Write = Callable[..., Path]

NUMBERED = [f"This is document number {n}.\nIt has the word {n * 37} in it.\n" for n in range(20)]


@pytest.fixture
def jsonl(tmp_path: Path) -> Write:
    def write(texts: list[str], name: str = "x.jsonl") -> Path:
        path = tmp_path / name
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
        return path

    return write


@pytest.fixture
def text_file(tmp_path: Path) -> Write:
    def write(text: str, name: str = "x.txt") -> Path:
        path = tmp_path / name
        path.write_text(text, encoding="utf-8", newline="")
        return path

    return write


def shares(result: Scan) -> dict[str, list[str]]:
    """The documents of each share; every one must begin and end as it should."""
    found: dict[str, list[str]] = {"train": [], "val": []}
    is_open = {"train": False, "val": False}
    for part in share_parts(result):
        if part.text:
            assert part.starts is not is_open[part.share]
            if part.starts:
                found[part.share].append("")
            found[part.share][-1] += part.text
        is_open[part.share] = bool(part.text)
    assert not any(is_open.values())
    return found


def test_whole_documents_are_held_out(jsonl: Write) -> None:
    """Fault 9: 20 numbered documents, 10 %."""
    result = scan([jsonl(NUMBERED)], SourceOptions())
    found = shares(result)
    assert (result.documents, result.split, len(found["val"])) == (20, "documents", 2)
    assert sorted(found["train"] + found["val"]) == sorted(NUMBERED)
    assert found["train"] == [text for text in NUMBERED if text in found["train"]], "the order stays"
    assert result.bytes == sum(len(text.encode()) for text in NUMBERED)
    assert result.train_bytes == sum(len(text.encode()) for text in found["train"])


def test_the_same_split_on_a_rerun_and_in_any_order(jsonl: Write) -> None:
    """Fault 9."""
    first = scan([jsonl(NUMBERED)], SourceOptions())
    again = scan([jsonl(NUMBERED)], SourceOptions())
    backwards = scan([jsonl(NUMBERED[::-1], "backwards.jsonl")], SourceOptions())
    assert shares(first) == shares(again)
    assert first.digest == again.digest
    assert sorted(shares(first)["val"]) == sorted(shares(backwards)["val"])
    assert backwards.digest != first.digest, "another order is another corpus"


def test_one_document_gives_its_end(text_file: Write) -> None:
    """Fault 9, for one file: cut at the first line start from 90 % on."""
    lines = [f"line {n} of the only document\n" for n in range(100)]
    text = "".join(lines)
    result = scan([text_file(text)], SourceOptions())
    found = shares(result)
    assert result.split == "ends"
    border = len(text) - int(len(text) * 0.1)
    expected = next(place for place in range(border, len(text)) if text[place - 1] == "\n")
    assert (found["train"], found["val"]) == ([text[:expected]], [text[expected:]])
    assert not {*found["train"][0].splitlines()} & {*found["val"][0].splitlines()}


def test_few_documents_give_an_end_each(jsonl: Write) -> None:
    found = shares(scan([jsonl(NUMBERED[:9])], SourceOptions(), val_fraction=0.5))
    assert [train + val for train, val in zip(found["train"], found["val"], strict=True)] == NUMBERED[:9]
    assert found["val"] == [text[text.index("It has") :] for text in NUMBERED[:9]]


def test_one_large_document_among_small_ones_gives_ends(jsonl: Write) -> None:
    texts = [*NUMBERED[:12], "a long line\n" * 5000]
    result = scan([jsonl(texts)], SourceOptions())
    assert result.split == "ends"
    held_out = sum(map(len, shares(result)["val"]))
    assert held_out == pytest.approx(0.1 * result.bytes, rel=0.05)


def test_a_line_start_far_away_is_not_waited_for(text_file: Write) -> None:
    text = "é" * 1000 + "\n" + "x"
    found = shares(scan([text_file(text)], SourceOptions()))
    border = len(text.encode()) - int(len(text.encode()) * 0.1)
    assert found["train"] == [text.encode()[: border + border % 2].decode()]
    assert found["train"][0] + found["val"][0] == text


def test_the_border_exactly_at_a_line_start(text_file: Write) -> None:
    found = shares(scan([text_file("123456789\n" * 10)], SourceOptions()))
    assert found == {"train": ["123456789\n" * 9], "val": ["123456789\n"]}


@settings(max_examples=200, deadline=None)
@given(
    st.text(st.sampled_from(list("ab\né中😀")), min_size=1, max_size=60),
    st.floats(0, 0.999),
    st.lists(st.integers(1, 59), max_size=4),
)
def test_ends_are_disjoint_and_complete_however_pieces_lie(text: str, fraction: float, cuts: list[int]) -> None:
    length = len(text.encode())
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[start:end] for start, end in pairwise(places)]
    parts = list(split._split_end(iter(pieces), length, fraction))
    assert "".join(part for part, _ in parts) == text
    names = [share for _, share in parts]
    assert names == sorted(names), "train comes first"
    assert names[0] == "train"
    assert all(part for part, _ in parts)
    held_out = sum(len(part.encode()) for part, share in parts if share == "val")
    assert held_out <= int(length * fraction)
    assert held_out > int(length * fraction) // 2 - 4
    train = "".join(part for part, share in split._split_end(iter([text]), length, fraction) if share == "train")
    assert train == "".join(part for part, share in parts if share == "train")


def test_a_long_document_is_split_across_pieces(text_file: Write) -> None:
    text = "".join(f"line {n} of many\n" for n in range(30_000))
    found = shares(scan([text_file(text)], SourceOptions(), val_fraction=0.25))
    assert found["train"][0] + found["val"][0] == text
    assert found["val"][0].startswith("line ")
    assert len(found["val"][0]) == pytest.approx(len(text) / 4, rel=0.001)


def test_nothing_is_held_out_on_request(jsonl: Write) -> None:
    for texts in (NUMBERED, NUMBERED[:1]):
        result = scan([jsonl(texts)], SourceOptions(), val_fraction=0)
        assert (result.split, shares(result)) == ("none", {"train": texts, "val": []})


def test_a_large_fraction_leaves_something_to_train_on(jsonl: Write) -> None:
    for count in (1, 10, 20):
        found = shares(scan([jsonl(NUMBERED[:count])], SourceOptions(), val_fraction=0.9))
        assert found["train"]
        assert found["val"]


@pytest.mark.parametrize("fraction", [-0.1, 1, 1.5, float("nan")])
def test_fractions_that_cannot_be(jsonl: Write, fraction: float) -> None:
    with pytest.raises(ConfigError, match=r"^val_fraction: .* is outside 0 to 1; "):
        scan([jsonl(NUMBERED)], SourceOptions(), val_fraction=fraction)


def test_duplicates_and_short_documents(jsonl: Write) -> None:
    long = [f"a document that is long enough, number {n}" for n in range(4)]
    texts = [long[0], "short", long[1], long[0], "short", "   \n ", long[2], long[2] + " ", long[3], long[0]]
    result = scan([jsonl(texts)], SourceOptions(min_chars=10), val_fraction=0)
    assert (result.documents, result.duplicates, result.too_short) == (5, 2, 3)
    assert shares(result)["train"] == [long[0], long[1], long[2], long[2] + " ", long[3]]
    assert scan([jsonl(texts)], SourceOptions(), val_fraction=0).too_short == 1, "white space alone is no document"


def test_copies_cannot_lie_on_both_sides(jsonl: Write) -> None:
    """Fault 9: duplicates are dropped before the split."""
    found = shares(scan([jsonl(NUMBERED * 3)], SourceOptions()))
    assert sorted(found["train"] + found["val"]) == sorted(NUMBERED)


def test_first_of_each_against_a_plain_loop() -> None:
    rng = np.random.default_rng(1)
    hashes = rng.integers(0, 4, (200, 2)).astype(np.uint64)
    candidates = rng.random(200) < 0.7
    seen: set[tuple[int, int]] = set()
    expected = []
    for row, candidate in zip(hashes.tolist(), candidates, strict=True):
        expected.append(bool(candidate) and tuple(row) not in seen)
        if candidate:
            seen.add(tuple(row))
    assert split._first_of_each(hashes, candidates).tolist() == expected


def test_bad_bytes_are_counted_once(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_bytes(b"caf\xe9 caf\xe9\n" * 5)
    assert scan([tmp_path / "x.txt"], SourceOptions()).bad_bytes == 10


@pytest.mark.parametrize("content", [b"", b" \n\t\n", b"<|endoftext|>\n"])
def test_no_text_at_all(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.txt").write_bytes(content)
    with pytest.raises(DataError, match=r"x\.txt: no text in it; give files that hold text$"):
        scan([tmp_path / "x.txt"], SourceOptions())


def test_nothing_is_long_enough(jsonl: Write) -> None:
    with pytest.raises(DataError, match=r"x\.jsonl: no document has 1,000 characters; choose a smaller"):
        scan([jsonl(NUMBERED)], SourceOptions(min_chars=1000))
    with pytest.raises(DataError, match=r"^no sources: no text"):
        scan([], SourceOptions())


def test_faults_are_found_in_the_scan(tmp_path: Path) -> None:
    """Fault 11: before anything is trained."""
    (tmp_path / "x.jsonl").write_text('{"text": "good"}\n\n{"body": "no"}\n', encoding="utf-8")
    with pytest.raises(DataError, match=r'x\.jsonl:3: no field "text" \(found: "body"\)'):
        scan([tmp_path / "x.jsonl"], SourceOptions())


@pytest.mark.parametrize("change", ["another text", "a document more", "a document less", "a dropped one"])
def test_files_that_change_in_between(jsonl: Write, change: str) -> None:
    result = scan([jsonl(NUMBERED)], SourceOptions())
    texts = {
        "another text": [*NUMBERED[:-1], NUMBERED[-1].replace("9", "8")],
        "a document more": [*NUMBERED, "new"],
        "a document less": NUMBERED[:-1],
        "a dropped one": ["", *NUMBERED[1:]],
    }[change]
    jsonl(texts)
    with pytest.raises(DataError, match=r"x\.jsonl: changed while being read; "):
        list(share_parts(result))


def test_progress_counts_bytes(jsonl: Write) -> None:
    seen: list[int] = []
    result = scan([jsonl(NUMBERED)], SourceOptions(), progress=seen.append)
    assert seen == sorted(seen)
    assert seen[-1] == result.bytes


def test_a_sample_is_everything_where_it_fits(jsonl: Write) -> None:
    result = scan([jsonl(NUMBERED)], SourceOptions())
    assert list(training_sample(result, 10**9)) == shares(result)["train"]


def test_a_sample_is_even_and_never_held_out(text_file: Write) -> None:
    lines = [f"{n:06d} a line of the only document\n" for n in range(20_000)]
    result = scan([text_file("".join(lines))], SourceOptions())
    for wanted in (20_000, 100_000, 300_000):
        pieces = list(training_sample(result, wanted))
        assert sum(map(len, pieces)) == pytest.approx(wanted, rel=0.15)
        numbers = [int(line[:6]) for piece in pieces for line in piece.splitlines() if line[:6].isdigit()]
        assert max(numbers) < 18_000, "held out"
        assert np.histogram(numbers, bins=4, range=(0, 18_000))[0] == pytest.approx(len(numbers) / 4, rel=0.2)


def test_a_sample_of_almost_nothing_is_something(jsonl: Write) -> None:
    assert list(training_sample(scan([jsonl(NUMBERED)], SourceOptions()), 1))
