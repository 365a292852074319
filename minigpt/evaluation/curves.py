"""A run's losses as a picture: an SVG for a browser, a few lines of dots for a terminal."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

Point = tuple[float, float]

# Colours for a page that is dark; attributes of the elements give those for a light one.
STYLE = (
    "<style>@media (prefers-color-scheme: dark){.paper{fill:#0d1117}.ink{fill:#e6edf3}.rule{stroke:#3d444d}"
    ".faint{stroke:#6e7681}.weak{fill:#9198a1}.line{stroke:#4493f8}.dot,.heat{fill:#4493f8}.best{stroke:#3fb950}"
    ".good{fill:#3fb950}}</style>"
)
_WIDTH, _HEIGHT = 800.0, 420.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 64.0, 736.0, 52.0, 368.0
_MOST_POINTS = 400
_BRAILLE = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # by row and column of a cell's eight dots


def loss_svg(rows: Iterable[Mapping[str, Any]]) -> str:
    """Draw the rows of metrics.jsonl: training loss in grey, held-out bits per byte in colour on an axis of its own, or
    the held-out loss where there are none.

    The training loss is the mean of neighbouring steps where there are many. The first steps, which fall from far
    above, may leave the picture at its top. The result is one SVG that needs nothing else.
    """
    rows = list(rows)
    loss, (held_out, unit, name) = thinned(series(rows, "loss"), _MOST_POINTS), _scored(rows)
    last = max([step for step, _ in [*loss, *held_out]], default=1.0)
    end = max(last, 1.0)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH:.0f} {_HEIGHT:.0f}" width="{_WIDTH:.0f}" '
        f'height="{_HEIGHT:.0f}" font-family="sans-serif" font-size="12">{STYLE}',
        f'<rect class="paper" fill="#ffffff" width="{_WIDTH:.0f}" height="{_HEIGHT:.0f}"/>',
        # A little wider than the axes, so that points at the ends stay round.
        f'<clipPath id="plot"><rect x="{_LEFT - 8}" y="{_TOP}" width="{_RIGHT - _LEFT + 16}" '
        f'height="{_BOTTOM - _TOP}"/></clipPath>',
        _step_axis(end),
    ]
    if loss:
        low, high, marks = _range(loss, last)
        parts.append(_value_axis(marks, low, high, _LEFT - 8, "end", grid=True))
        parts.append(f'<text class="weak" fill="#59636e" x="{_LEFT - 44:.0f}" y="30">training loss{unit}</text>')
        path = _path(_placed(loss, end, low, high))
        parts.append(
            f'<path class="faint" clip-path="url(#plot)" fill="none" stroke="#afb8c1" stroke-width="1.2" '
            f'stroke-linecap="round" d="{path}"/>'
        )
    if held_out:
        low, high, marks = _range(held_out, last)
        parts.append(_value_axis(marks, low, high, _RIGHT + 8, "start", grid=not loss))
        parts.append(f'<text class="dot" fill="#0969da" text-anchor="end" x="{_RIGHT + 44:.0f}" y="30">{name}</text>')
        parts.append(_held_out(held_out, _placed(held_out, end, low, high)))
    return "\n".join([*parts, "</svg>\n"])


def terminal_curve(rows: Iterable[Mapping[str, Any]], width: int = 60, height: int = 10) -> str:
    """Plot the held-out score (the training loss where there are fewer than two) in `width` x `height` characters.

    Dots of Braille. Returns lines that end in a newline; an empty string where nothing was measured.
    """
    rows = list(rows)
    points, unit, name = _scored(rows)
    name = name.replace("text, ", "")
    if len(points) < 2 and (losses := series(rows, "loss")):
        points, name = losses, f"training loss{unit}"
    if not points:
        return ""
    last = max(step for step, _ in points)
    low, high, _ = _range(points, last)
    best_step, best = min(points, key=lambda point: (point[1], point[0]))
    labels = [f"{high:.2f}", f"{low:.2f}"]
    margin = max(map(len, labels))
    columns, lines = max(1, width - margin - 1), max(2, height - 2)
    plot = _braille(points, columns, lines, low, high)
    sides = [labels[0], *[""] * (lines - 2), labels[1]]
    plot = [f"{side:>{margin}} {line}".rstrip() for side, line in zip(sides, plot, strict=True)]
    first = f"{points[0][0]:.0f}"
    steps = f"{first}{f'step {last:.0f}':>{max(1, columns - len(first))}}"
    title = f"{name}, best {best:.3f} at step {best_step:.0f}"
    return "\n".join([f"{'':{margin}} {title}", *plot, f"{'':{margin}} {steps}"]) + "\n"


def series(rows: Iterable[Mapping[str, Any]], name: str) -> list[Point]:
    """Return (step, value) of the rows that have a finite value, by step; of two at one step the later row counts."""
    found = {float(row["step"]): float(row[name]) for row in rows if row.get(name) is not None}
    return sorted((step, value) for step, value in found.items() if math.isfinite(value))


def _scored(rows: Sequence[Mapping[str, Any]]) -> tuple[list[Point], str, str]:
    """What was scored on held-out data: its points, the unit of the training loss beside it, and its name."""
    bits, losses = series(rows, "bits_per_byte"), series(rows, "held_out_loss")
    if losses and not bits:
        return losses, "", "held-out loss"
    return bits, ", nats per token", "held-out text, bits per byte"


def thinned(points: Sequence[Point], most: int) -> list[Point]:
    """Return at most `most` points, each the mean of neighbours; no neighbour is lost or counted twice."""
    if len(points) <= most:
        return list(points)
    bounds = [round(i * len(points) / most) for i in range(most + 1)]
    groups = [points[start:stop] for start, stop in pairwise(bounds)]
    return [(sum(x for x, _ in group) / len(group), sum(y for _, y in group) / len(group)) for group in groups]


def ticks(low: float, high: float, most: int) -> list[float]:
    """Return at most `most` + 1 round numbers (1, 2 or 5 times a power of ten apart) from `low` to `high`."""
    span = high - low
    if span <= 0 or not math.isfinite(span):
        return [low]
    power = 10.0 ** math.floor(math.log10(span / most))
    step = next(factor * power for factor in (1, 2, 5, 10, 20) if factor * power * most >= span * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


def _range(points: Sequence[Point], last: float) -> tuple[float, float, list[float]]:
    """Choose the ends and ticks of an axis: all values after the first fiftieth of the run, with a little room."""
    settled = [value for step, value in points if step > last / 50] or [value for _, value in points]
    low, high = min(settled), max(settled)
    room = 0.06 * (high - low) or max(abs(high) * 0.01, 0.01)
    return low - room, high + room, ticks(low - room, high + room, 8)


def _placed(points: Sequence[Point], end: float, low: float, high: float) -> list[Point]:
    """Turn steps and values into places on the picture."""
    return [
        (_LEFT + step / end * (_RIGHT - _LEFT), _BOTTOM - (value - low) / (high - low) * (_BOTTOM - _TOP))
        for step, value in points
    ]


def _path(points: Sequence[Point]) -> str:
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points) + "h0"  # a single point shows as a dot


def _step_axis(end: float) -> str:
    steps = [step for step in ticks(0.0, end, 8) if step == round(step)]
    marks = "".join(
        f'<text class="ink" fill="#1f2328" text-anchor="middle" x="{_LEFT + step / end * (_RIGHT - _LEFT):.1f}" '
        f'y="{_BOTTOM + 18:.0f}">{step:,.0f}</text>'
        for step in steps
    )
    line = f'<path class="rule" fill="none" stroke="#d1d9e0" d="M{_LEFT} {_BOTTOM}H{_RIGHT}"/>'
    middle = (_LEFT + _RIGHT) / 2
    name = f'<text class="ink" fill="#1f2328" text-anchor="middle" x="{middle}" y="{_HEIGHT - 14}">step</text>'
    return f"{line}{marks}{name}"


def _value_axis(marks: Sequence[float], low: float, high: float, x: float, anchor: str, *, grid: bool) -> str:
    parts = []
    gap = marks[1] - marks[0] if len(marks) > 1 else 1.0
    digits = max(0, -math.floor(math.log10(gap) + 1e-9))
    for mark in marks:
        y = _BOTTOM - (mark - low) / (high - low) * (_BOTTOM - _TOP)
        if grid:
            parts.append(f'<path class="rule" stroke="#d1d9e0" stroke-width="0.5" d="M{_LEFT} {y:.1f}H{_RIGHT}"/>')
        colour = 'class="weak" fill="#59636e"' if anchor == "end" else 'class="dot" fill="#0969da"'
        parts.append(f'<text {colour} text-anchor="{anchor}" x="{x:.0f}" y="{y + 4:.1f}">{mark:,.{digits}f}</text>')
    return "".join(parts)


def _held_out(points: Sequence[Point], placed: Sequence[Point]) -> str:
    """The held-out line, its points, a ring around the best one, and its value above the plot, where no line is."""
    best = min(range(len(points)), key=lambda i: (points[i][1], i))
    x, y = placed[best]
    dots = "".join(f'<circle class="dot" fill="#0969da" cx="{x:.1f}" cy="{y:.1f}" r="2.5"/>' for x, y in placed)
    return (
        '<g clip-path="url(#plot)"><path class="line" fill="none" stroke="#0969da" stroke-width="2" '
        f'd="{_path(placed)}"/>{dots}</g>'
        f'<circle class="best" fill="none" stroke="#1a7f37" stroke-width="2" cx="{x:.1f}" cy="{y:.1f}" r="6"/>'
        f'<text class="good" fill="#1a7f37" text-anchor="middle" x="{(_LEFT + _RIGHT) / 2}" y="30">'
        f"best: {points[best][1]:.3f} at step {points[best][0]:.0f}</text>"
    )


def _raster(points: Sequence[Point], columns: int, lines: int, low: float, high: float) -> set[tuple[int, int]]:
    """The dots (column, line) of a line through the points, from the top; what is off the axis is left out."""
    first, last = points[0][0], points[-1][0]
    x = [(step - first) / ((last - first) or 1.0) * (columns - 1) for step, _ in points]
    y = [(high - value) / (high - low) * (lines - 1) for _, value in points]
    dots = {(round(x[0]), round(y[0]))}
    for i in range(1, len(points)):
        count = max(1, math.ceil(max(abs(x[i] - x[i - 1]), abs(y[i] - y[i - 1]))))
        for part in range(1, count + 1):
            share = part / count
            dots.add((round(x[i - 1] + share * (x[i] - x[i - 1])), round(y[i - 1] + share * (y[i] - y[i - 1]))))
    return {(column, line) for column, line in dots if 0 <= line < lines}


def _braille(points: Sequence[Point], columns: int, lines: int, low: float, high: float) -> list[str]:
    cells = [[0] * columns for _ in range(lines)]
    for column, line in _raster(points, 2 * columns, 4 * lines, low, high):
        cells[line // 4][column // 2] |= _BRAILLE[line % 4][column % 2]
    return ["".join(chr(0x2800 + cell) if cell else " " for cell in row) for row in cells]
