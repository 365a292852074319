"""Packing: every conversation once, rows nearly full, and targets, documents and padding where they belong."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minigpt.model.loss import IGNORED
from minigpt.text.fitting import Encoded
from minigpt.training.packing import MAX_ROW, NO_TARGET, PackedRows, pack, row_length


def encoded(ids: list[int], trained: list[int]) -> Encoded:
    return Encoded(np.array(ids, np.int32), np.array([place in trained for place in range(len(ids))]))


@settings(deadline=None, max_examples=200)
@given(st.integers(1, 60).flatmap(lambda T: st.tuples(st.just(T), st.lists(st.integers(1, T), max_size=80))))
def test_every_item_stands_in_one_row_and_none_is_too_long(case: tuple[int, list[int]]) -> None:
    row_length, lengths = case
    rows = pack(lengths, row_length)
    assert sorted(place for row in rows for place in row) == list(range(len(lengths)))
    assert all(0 < sum(lengths[place] for place in row) <= row_length for row in rows)
    assert pack(lengths, row_length) == rows
    sums = sorted(sum(lengths[place] for place in row) for row in rows)
    assert len(sums) < 2 or sums[0] + sums[1] > row_length, "no two rows could be one"


def naive_best_fit(lengths: list[int], row_length: int) -> list[int]:
    """The sums of the rows, by looking at every row for every item."""
    sums: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [place for place, total in enumerate(sums) if total + length <= row_length]
        if fitting:
            sums[max(fitting, key=lambda place: sums[place])] += length
        else:
            sums.append(length)
    return sorted(sums)


@settings(deadline=None, max_examples=100)
@given(st.lists(st.integers(1, 40), max_size=60))
def test_the_fullest_row_with_room_is_taken(lengths: list[int]) -> None:
    assert sorted(sum(lengths[place] for place in row) for row in pack(lengths, 40)) == naive_best_fit(lengths, 40)


@pytest.mark.parametrize(("row_length", "median"), [(256, 60), (512, 90), (1024, 180), (2048, 300)])
def test_rows_are_nearly_full_at_realistic_lengths(row_length: int, median: int) -> None:
    """Lengths of instruction data are about log-normal; what is longer than a row is cut to one."""
    lengths = np.random.default_rng(0).lognormal(np.log(median), 0.8, 2_000).astype(int).clip(8, row_length).tolist()
    rows = pack(lengths, row_length)
    assert sum(lengths) / (len(rows) * row_length) > 0.98


def test_a_row_has_room_for_the_longest_and_for_a_few_of_the_mean() -> None:
    assert row_length([10, 20, 200], 1024) == 320  # 4 x 76.7
    assert row_length([10, 10, 10, 200], 1024) == 256
    assert row_length([1], 1024) == 64
    assert row_length([500], 96) == 96
    assert row_length([9_000], 100_000) == MAX_ROW


def test_targets_are_shifted_and_never_of_another_document() -> None:
    """Faults 21 and 23: the end token of an answer is learned though the pad has the same id."""
    END = 9
    rows = PackedRows(
        [encoded([1, 2, 3, END], [2, 3]), encoded([4, 5, END], [2]), encoded([6, 7, 8, 1, 2, END], [1, 2, 5])],
        row_length=6,
        pad_id=END,
    )
    assert rows.rows == [[2], [0, 1]]
    tokens, targets, documents = rows.arrays(rows.rows)
    X = NO_TARGET
    assert tokens.tolist() == [[6, 7, 8, 1, 2, END], [1, 2, 3, 4, 5, END]]
    assert targets.tolist() == [[7, 8, X, X, END, X], [X, 3, END, X, END, X]]
    assert documents.tolist() == [[0, 0, 0, 0, 0, 1], [0, 0, 0, 1, 1, 2]]
    assert (len(rows), rows.positions, rows.targets) == (2, 10, 6)
    assert NO_TARGET == IGNORED


def test_shuffled_rows_hold_the_same_in_other_company() -> None:
    generator = np.random.default_rng(3)
    lengths = generator.integers(2, 12, 60).tolist()
    conversations = [encoded(list(range(length + 1)), [length]) for length in lengths]
    rows = PackedRows(conversations, row_length=24, pad_id=0)
    orders = [rows.shuffled(np.random.default_rng(seed)) for seed in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2]
    for order in orders:
        assert sorted(place for row in order for place in row) == list(range(60))
        assert all(sum(lengths[place] for place in row) <= 24 for row in order)
    company = [{frozenset(row) for row in order} for order in orders]
    assert company[0] != company[2]
    assert orders[0] != rows.rows
