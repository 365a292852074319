"""Small charts one below the other: every figure is drawn where it belongs, and what is not there is left out."""

from __future__ import annotations

import math
import re
from xml.etree import ElementTree

from minigpt.evaluation.panels import panels_svg

ROWS = [{"step": step, "a": step * 0.1, "b": None if step == 2 else 1.0} for step in range(1, 5)]


def paths(picture: str) -> list[tuple[str, list[tuple[float, float]]]]:
    found = []
    for element in ElementTree.fromstring(picture).iter("{http://www.w3.org/2000/svg}path"):
        look = element.get("class", "")
        if look != "rule":
            places = re.findall(r"([\d.]+) ([\d.]+)", element.get("d", ""))
            found.append((look, [(float(x), float(y)) for x, y in places]))
    return found


def test_every_line_has_its_points_and_panels_stand_below_each_other() -> None:
    picture = panels_svg(ROWS, [("A < B", {"a": "line", "b": "faint"}), ("b alone", {"b": "line"})])
    (first, a), (second, b), (third, alone) = paths(picture)
    assert (first, second, third) == ("line", "faint", "line")
    assert (len(a), len(b), len(alone)) == (4, 3, 3)
    assert [x for x, _ in a] == sorted(x for x, _ in a)
    assert [y for _, y in a] == sorted((y for _, y in a), reverse=True), "a rises"
    assert max(y for _, y in a) < min(y for _, y in alone)
    assert len({y for _, y in alone}) == 1
    texts = [text.text for text in ElementTree.fromstring(picture).iter("{http://www.w3.org/2000/svg}text")]
    assert "A < B" in texts


def test_a_figure_without_a_value_takes_no_room() -> None:
    both = panels_svg(ROWS, [("a", {"a": "line"}), ("gone", {"gone": "line"})])
    assert both == panels_svg(ROWS, [("a", {"a": "line"})])
    assert "gone" not in both


def test_nothing_at_all_is_an_empty_picture() -> None:
    for rows in ([], [{"step": 1, "a": math.nan}]):
        assert paths(panels_svg(rows, [("a", {"a": "line"})])) == []
