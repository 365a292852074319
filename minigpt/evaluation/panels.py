"""Several figures of a run as one picture: a small chart each, one below the other, over the same steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from xml.sax.saxutils import escape

from minigpt.evaluation.curves import STYLE, Point, series, thinned, ticks

_WIDTH, _LEFT, _RIGHT = 800.0, 72.0, 776.0
_TITLE, _PLOT, _GAP = 24.0, 96.0, 20.0  # heights: of a chart's name, of its plot, of what is between two
_FOOT = 34.0
_MOST_POINTS = 300

Lines = Mapping[str, str]  # what a chart shows: names of figures, and the class of the line that draws each


def panels_svg(rows: Iterable[Mapping[str, Any]], panels: Sequence[tuple[str, Lines]]) -> str:
    """Draw rows of metrics.jsonl: for each panel its title and its figures, by step; one SVG that needs nothing else.

    A panel is a title and lines: the name of a figure, and how it is drawn (`faint` or `line`). One without any value
    is left out.
    """
    rows = list(rows)
    found = [(title, _drawn(rows, lines)) for title, lines in panels]
    found = [(title, lines) for title, lines in found if lines]
    last = max([step for _, lines in found for _, points in lines for step, _ in points], default=1.0)
    height = len(found) * (_TITLE + _PLOT + _GAP) + _FOOT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH:.0f} {height:.0f}" width="{_WIDTH:.0f}" '
        f'height="{height:.0f}" font-family="sans-serif" font-size="12">{STYLE}',
        f'<rect class="paper" fill="#ffffff" width="{_WIDTH:.0f}" height="{height:.0f}"/>',
    ]
    for place, (title, lines) in enumerate(found):
        parts.append(_panel(title, lines, last, place * (_TITLE + _PLOT + _GAP)))
    parts += [_steps(last, height - _FOOT), "</svg>\n"]
    return "\n".join(parts)


def _drawn(rows: Sequence[Mapping[str, Any]], lines: Lines) -> list[tuple[str, list[Point]]]:
    """The class and the points of each line that has any."""
    each = [(look, thinned(series(rows, name), _MOST_POINTS)) for name, look in lines.items()]
    return [(look, points) for look, points in each if points]


def _panel(title: str, lines: Sequence[tuple[str, list[Point]]], last: float, top: float) -> str:
    values = [value for _, points in lines for _, value in points]
    low, high = min(values), max(values)
    room = 0.08 * (high - low) or max(abs(high) * 0.05, 0.05)
    low, high = low - room, high + room
    begin = top + _TITLE
    parts = [f'<text class="ink" fill="#1f2328" x="{_LEFT}" y="{top + 17:.0f}">{escape(title)}</text>']
    for mark in ticks(low, high, 3):
        y = begin + (high - mark) / (high - low) * _PLOT
        parts.append(f'<path class="rule" stroke="#d1d9e0" stroke-width="0.5" d="M{_LEFT} {y:.1f}H{_RIGHT}"/>')
        parts.append(
            f'<text class="weak" fill="#59636e" text-anchor="end" x="{_LEFT - 8}" y="{y + 4:.1f}">{mark:g}</text>'
        )
    for look, points in lines:
        colour, width = ("#afb8c1", 1.2) if look == "faint" else ("#0969da", 2)
        places = [
            (_LEFT + step / last * (_RIGHT - _LEFT), begin + (high - value) / (high - low) * _PLOT)
            for step, value in points
        ]
        path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in places) + "h0"
        parts.append(
            f'<path class="{look}" fill="none" stroke="{colour}" stroke-width="{width}" stroke-linecap="round" '
            f'd="{path}"/>'
        )
    return "".join(parts)


def _steps(last: float, top: float) -> str:
    marks = "".join(
        f'<text class="ink" fill="#1f2328" text-anchor="middle" x="{_LEFT + step / last * (_RIGHT - _LEFT):.1f}" '
        f'y="{top + 12:.0f}">{step:,.0f}</text>'
        for step in ticks(0.0, last, 8)
        if step == round(step)
    )
    middle = (_LEFT + _RIGHT) / 2
    return f'{marks}<text class="weak" fill="#59636e" text-anchor="middle" x="{middle}" y="{top + 28:.0f}">step</text>'
