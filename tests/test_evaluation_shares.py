"""Shares and their intervals against values worked out by hand and published ones."""

from __future__ import annotations

import pytest

from minigpt.evaluation.shares import Share, mean


@pytest.mark.parametrize(
    ("right", "count", "low", "high"),
    [
        # Newcombe 1998, table I, method 3 (the score interval without continuity correction).
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0000, 0.1611),
        (1, 29, 0.0061, 0.1718),
        # By hand: z^2 / (n + z^2) = 3.8415 / 13.8415 below one.
        (10, 10, 0.7225, 1.0),
    ],
)
def test_the_interval_is_that_of_wilson(right: int, count: int, low: float, high: float) -> None:
    assert Share(right / count, count).interval == pytest.approx((low, high), abs=5e-5)


def test_a_mean_weighs_each_share_alike_and_stands_on_all_answers() -> None:
    assert mean([Share(0.5, 100), Share(0.9, 100)]) == Share(pytest.approx(0.7), pytest.approx(200))
    # (p1 + p2) / 2 of 10 and 90 answers varies as much as a share of 4 / (1/10 + 1/90) = 36 answers.
    assert mean([Share(0.2, 10), Share(0.4, 90)]) == Share(pytest.approx(0.3), pytest.approx(36))
    assert mean([Share(0.25, 8)]) == Share(0.25, 8)
