"""Loss curves: what is drawn where, worked out by hand."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minigpt.evaluation.curves import loss_svg, series, terminal_curve, thinned, ticks

SPACE = "{http://www.w3.org/2000/svg}"


def run_rows(steps: int = 1000) -> list[dict[str, Any]]:
    """A run that is best at step 600."""
    rows: list[dict[str, Any]] = []
    for step in range(1, steps + 1):
        rows.append({"step": step, "loss": 2.0 + 8.0 * math.exp(-step / 20), "learning_rate": 0.1})
        if step % 100 == 0:
            rows.append({"step": step, "held_out_loss": 2.5, "bits_per_byte": 2.0 + abs(step - 600) / 1000})
    return rows


def texts(picture: str) -> list[str]:
    return [element.text or "" for element in ElementTree.fromstring(picture).iter(f"{SPACE}text")]


def circles(picture: str) -> list[tuple[float, float, str]]:
    found = ElementTree.fromstring(picture).iter(f"{SPACE}circle")
    return [(float(c.attrib["cx"]), float(c.attrib["cy"]), c.attrib["class"]) for c in found]


def test_the_best_point_is_ringed_and_named() -> None:
    picture = loss_svg(run_rows())
    assert "best: 2.000 at step 600" in texts(picture)
    points = circles(picture)
    rings = [(x, y) for x, y, kind in points if kind == "best"]
    dots = [(x, y) for x, y, kind in points if kind == "dot"]
    assert len(dots) == 10
    assert rings == [max(dots, key=lambda dot: dot[1])]  # the lowest on the page
    assert rings[0][0] == pytest.approx(64 + 0.6 * (736 - 64), abs=0.1)


def test_axes_have_round_numbers_and_names() -> None:
    found = texts(loss_svg(run_rows()))
    assert {"step", "training loss, nats per token", "held-out text, bits per byte"} <= set(found)
    assert {"0", "200", "400", "600", "800", "1,000"} <= set(found)
    assert {"2.0", "2.1", "2.2", "2.3", "2.4", "2.5"} <= set(found)


def test_many_steps_are_drawn_as_few() -> None:
    picture = loss_svg(run_rows(30_000))
    assert len(picture) < 60_000
    path = next(p for p in ElementTree.fromstring(picture).iter(f"{SPACE}path") if p.get("class") == "faint")
    assert path.attrib["d"].count("L") == 399


def test_the_first_steps_do_not_flatten_the_rest() -> None:
    picture = loss_svg(run_rows())
    path = next(p for p in ElementTree.fromstring(picture).iter(f"{SPACE}path") if p.get("class") == "faint")
    heights = [float(point.split()[1]) for point in path.attrib["d"][1:-2].split("L")]
    assert heights[0] < 52  # above the plot, where it is cut off
    assert sum(52 <= height <= 368 for height in heights) >= 0.97 * len(heights)


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [{"step": 1, "loss": 3.0}],
        [{"step": 1, "bits_per_byte": 2.5}],
        [{"step": 5, "loss": 3.0}, {"step": 5, "bits_per_byte": 2.5}],
        [{"step": step, "loss": 3.0} for step in range(1, 5)],
        [{"step": 1, "loss": math.nan}, {"step": 2, "loss": math.inf}, {"step": 3, "loss": 2.0}],
        [{"step": 0, "bits_per_byte": 1e-9}, {"step": 1, "bits_per_byte": 1e9}],
    ],
)
def test_few_or_strange_rows_still_make_a_picture(rows: list[dict[str, Any]]) -> None:
    picture = loss_svg(rows)
    ElementTree.fromstring(picture)
    assert "nan" not in picture
    assert "inf" not in picture
    for lines in (terminal_curve(rows), terminal_curve(rows, 5, 1)):
        assert bool(lines) == any("bits_per_byte" in row or math.isfinite(row["loss"]) for row in rows)


def test_a_series_is_in_order_and_of_two_rows_for_a_step_the_later_counts() -> None:
    rows = [{"step": 2, "loss": 5.0}, {"step": 1, "loss": 4.0}, {"step": 2, "loss": 3.0}, {"step": 3, "loss": None}]
    assert series(rows, "loss") == [(1.0, 4.0), (2.0, 3.0)]


@given(st.lists(st.floats(-100, 100), min_size=1, max_size=300), st.integers(1, 50))
def test_thinning_keeps_every_value_once(values: list[float], most: int) -> None:
    points = [(float(step), value) for step, value in enumerate(values)]
    found = thinned(points, most)
    assert len(found) == min(most, len(points))
    assert [x for x, _ in found] == sorted(x for x, _ in found)
    low, high = min(values), max(values)
    assert all(low - 1e-9 <= y <= high + 1e-9 for _, y in found)


def test_thinning_takes_means() -> None:
    assert thinned([(1, 2.0), (2, 4.0), (3, 6.0), (4, 10.0)], 2) == [(1.5, 3.0), (3.5, 8.0)]


@given(st.floats(-1e6, 1e6), st.floats(1e-4, 1e6), st.integers(2, 12))
def test_ticks_are_few_evenly_spaced_and_inside(low: float, span: float, most: int) -> None:
    found = ticks(low, low + span, most)
    assert len(found) <= most + 1
    assert all(low - 1e-6 * span <= tick <= low + span * (1 + 1e-6) for tick in found)
    gaps = [b - a for a, b in pairwise(found)]
    assert all(gap == pytest.approx(gaps[0], rel=1e-3) for gap in gaps)


def test_ticks_by_hand() -> None:
    assert ticks(0, 1000, 8) == [0, 200, 400, 600, 800, 1000]
    assert ticks(1.9, 2.6, 8) == pytest.approx([1.9, 2.0, 2.1, 2.2, 2.3, 2.4, 2.5, 2.6])
    assert ticks(3, 3, 5) == [3]


def test_a_terminal_gets_the_held_out_curve_in_braille() -> None:
    lines = terminal_curve(run_rows(), 60, 10).split("\n")
    assert lines.pop() == ""
    assert len(lines) == 10
    assert all(len(line) <= 60 for line in lines)
    assert "held-out bits per byte, best 2.000 at step 600" in lines[0]
    assert lines[-1].split() == ["100", "step", "1000"]
    assert all(0x2800 < ord(c) < 0x2900 for line in lines[1:-1] for c in line if not c.isascii())
    lowest = lines[-2]
    assert 0.4 < (lowest.index(next(c for c in lowest if not c.isascii())) - 5) / 55 < 0.6  # step 600 of 100 … 1000


def test_without_held_out_text_a_terminal_gets_the_training_loss() -> None:
    assert "training loss" in terminal_curve([row for row in run_rows() if "loss" in row])
