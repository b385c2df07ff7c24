"""Line charts as SVG, in the colours of the page's light or dark theme.

Lines also differ in marker and dashes, for readers who cannot tell the colours apart. A number that cannot be drawn
(NaN, infinite, or not positive on a logarithmic axis) becomes a cross on the upper edge; -inf, on the lower edge.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, NamedTuple

from ..judge.comparisons import Arrivals

WIDTH, HEIGHT = 440, 270
LEFT, RIGHT, TOP, BOTTOM = 62, 12, 12, 46
LEGEND_ROW = 17
NAMES, NAME_ROW = 122, 14
"""Width of the names beside a chart, and height of a name."""
MOST_BARS = 12
"""Maximum number of terms whose bars are drawn."""
COLOURS = 7
"""The number of colours of the page: ``--c0`` to ``--c6``."""
DASHES = ("", "6 3", "2 3", "9 3 2 3", "12 4", "4 2 1 2", "1 4")

Function = Callable[[float], float]


def number(value: Any, digits: int = 6) -> float | str:
    """Round a number to significant digits. Infinities and NaN become texts, because JSON lacks them."""
    x = float(value)
    return float(f"{x:.{digits}g}") if math.isfinite(x) else str(x)


@dataclass(frozen=True)
class Line:
    """One line of a chart.

    Attributes:
        name: its name in the legend.
        points: (x, y), in the order of x.
        faint: whether it is drawn thin, in grey and without markers.
    """

    name: str
    points: Sequence[tuple[float, float]]
    faint: bool = False


class Rule(NamedTuple):
    """A horizontal line of a chart.

    Attributes:
        y: its value.
        name: its name, written beside the chart.
        spread: half the height of a band around it.
    """

    y: float
    name: str = ""
    spread: float = 0.0


@dataclass(frozen=True)
class Chart:
    """A line chart.

    Attributes:
        title: what it shows, in one sentence; also the text for screen readers.
        x: name of the x axis.
        y: name of the y axis.
        lines: the lines.
        log_x: whether the x axis is logarithmic.
        log_y: whether the y axis is logarithmic.
        lowest: on a logarithmic y axis, smaller values are drawn at this value.
        rules: horizontal lines. If they have names, the other lines are named beside the chart too, without a legend.
        ticks: the ticks of the x axis; None to choose them.
    """

    title: str
    x: str
    y: str
    lines: Sequence[Line]
    log_x: bool = False
    log_y: bool = False
    lowest: float = 0.0
    rules: Sequence[Rule] = ()
    ticks: Sequence[float] | None = None

    def data(self) -> dict[str, Any]:
        """The chart as JSON data."""
        lines = [
            {"name": line.name, "points": [[number(x), number(y)] for x, y in line.points], "faint": line.faint}
            for line in self.lines
        ]
        return {**vars(self), "lines": lines, "rules": list(self.rules)}

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Chart:
        """Return a chart from the result of ``Chart.data``."""
        lines = [
            Line(one["name"], [(float(x), float(y)) for x, y in one["points"]], one["faint"]) for one in data["lines"]
        ]
        return cls(**{**data, "lines": lines, "rules": [Rule(*rule) for rule in data["rules"]]})

    def svg(self) -> str:
        """The chart as an SVG element."""
        ys = [y for line in self.lines for _, y in line.points if math.isfinite(y)]
        ys += [end for rule in self.rules for end in (rule.y - rule.spread, rule.y + rule.spread)]
        ys = [max(y, self.lowest) for y in ys] if self.log_y else ys
        if self.log_y:
            ys = [y for y in ys if y > 0]
        named = any(rule.name for rule in self.rules)
        right = WIDTH - (NAMES if named else RIGHT)
        xs = [x for line in self.lines for x, _ in line.points]
        across = _axis(xs or [0.0], LEFT, right, log=self.log_x)
        upward = _axis(ys, HEIGHT - BOTTOM, TOP, log=self.log_y, margin=0.06)
        height = HEIGHT + LEGEND_ROW * len(self.lines) * (not named)
        parts = list[str]()
        for tick in across.ticks if self.ticks is None else self.ticks:
            x = across.place(tick)
            parts.append(f'<path class="grid" d="M{x:.1f} {TOP}V{HEIGHT - BOTTOM}"/>')
            parts.append(f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 15}" class="middle">{_short(tick)}</text>')
        for tick in upward.ticks:
            y = upward.place(tick)
            parts.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{right}"/>')
            parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" class="end">{_short(tick)}</text>')
        for rule in self.rules:
            if rule.spread:
                ends = [upward.place(rule.y + side * rule.spread) for side in (1, -1)]
                parts.append(f'<path class="band" d="M{LEFT} {ends[0]:.1f}H{right}V{ends[1]:.1f}H{LEFT}z"/>')
            parts.append(f'<path class="rule" d="M{LEFT} {upward.place(rule.y):.1f}H{right}"/>')
        middle = (LEFT + right) / 2
        parts.append(f'<text x="{middle:.0f}" y="{HEIGHT - 12}" class="middle">{escape(self.x)}</text>')
        turned = f'transform="rotate(-90 13 {(TOP + HEIGHT - BOTTOM) / 2:.0f})"'
        parts.append(
            f'<text x="13" y="{(TOP + HEIGHT - BOTTOM) / 2:.0f}" {turned} class="middle">{escape(self.y)}</text>'
        )
        colour = 0
        for k, line in enumerate(self.lines):
            style = "faint" if line.faint else f"c{colour % COLOURS}"
            dash = "" if line.faint else DASHES[colour % len(DASHES)]
            marker = None if line.faint else colour
            colour += not line.faint
            parts += self._line(line, style, dash, marker, across, upward)
            if named:
                continue
            y = HEIGHT + LEGEND_ROW * k + 6
            parts.append(f'<path class="line {style}" {_dashed(dash)}d="M{LEFT} {y - 4}H{LEFT + 34}"/>')
            if marker is not None:
                parts.append(_marker(marker, LEFT + 17, y - 4, style))
            parts.append(f'<text x="{LEFT + 42}" y="{y}">{escape(line.name)}</text>')
        return _svg(height, self.title, [*parts, *(self._names(upward, right) if named else ())])

    def _names(self, upward: _Axis, left: float) -> list[str]:
        """The names of rules and of lines, each at the height of its rule or of its last point, without overlaps."""
        names = [(upward.place(rule.y), rule.name, "") for rule in self.rules]
        for line in self.lines:
            last = line.points[-1][1]
            edge = HEIGHT - BOTTOM if last == -math.inf else TOP
            names.append((upward.place(last) if math.isfinite(last) else edge, line.name, ' class="strong"'))
        parts, y = list[str](), -math.inf
        for k, (place, name, style) in enumerate(sorted(names), 1):
            y = max(y + NAME_ROW, min(place, HEIGHT - BOTTOM - NAME_ROW * (len(names) - k)))
            parts.append(f'<path class="grid" d="M{left} {place:.1f}L{left + 10} {y:.1f}"/>')
            parts.append(f'<text x="{left + 13}" y="{y + 4:.1f}"{style}>{escape(name)}</text>')
        return parts

    def _line(self, line: Line, style: str, dash: str, marker: int | None, across: _Axis, upward: _Axis) -> list[str]:
        parts, path, down = list[str](), list[str](), False
        for x, y in line.points:
            value = max(y, self.lowest) if self.log_y and not math.isnan(y) else y
            if not math.isfinite(value) or (self.log_y and value <= 0):
                down = False
                parts.append(_cross(across.place(x), HEIGHT - BOTTOM if value == -math.inf else TOP, style))
                continue
            place = f"{across.place(x):.1f} {upward.place(value):.1f}"
            path.append(f"{'L' if down else 'M'}{place}")
            down = True
            if marker is not None and (len(line.points) <= 40 or x == line.points[-1][0]):
                parts.append(_marker(marker, across.place(x), upward.place(value), style))
        return [f'<path class="line {style}" {_dashed(dash)}d="{"".join(path)}"/>', *parts]


@dataclass(frozen=True)
class _Axis:
    """A function from values to places, and the ticks."""

    place: Function
    ticks: Sequence[float]


def _axis(values: Sequence[float], start: float, end: float, *, log: bool, margin: float = 0.02) -> _Axis:
    """The axis of these values. ``margin`` is the empty part at each end, as a fraction of the span of the values."""
    change: Function = math.log10 if log else float
    low, high = min(map(change, values)), max(map(change, values))
    if low == high:
        low, high = low - 0.5, high + 0.5
    span = high - low
    low, high = low - margin * span, high + margin * span

    def place(value: float) -> float:
        return start + (change(value) - low) / (high - low) * (end - start)

    if log and span >= 2:
        every = max(1, math.ceil(span / 6))
        ticks = [10.0**k for k in range(math.ceil(low), math.floor(high) + 1) if k % every == 0]
    elif log:
        ticks = [m * 10.0**k for k in range(math.floor(low), math.ceil(high) + 1) for m in (1, 2, 5)]
        ticks = [tick for tick in ticks if low <= math.log10(tick) <= high]
    else:
        step = next(m * 10.0**k for k in range(-12, 13) for m in (1, 2, 5) if span / (m * 10.0**k) <= 6)
        ticks = [k * step for k in range(math.ceil(low / step), math.floor(high / step) + 1)]
    return _Axis(place, ticks)


def _short(value: float) -> str:
    """A number as the label of a tick."""
    power = round(math.log10(abs(value))) if value else 0
    if value and abs(value - 10.0**power) < 1e-9 * 10.0**power and not -4 < power < 5:
        return f'10<tspan dy="-5" font-size="9">{power}</tspan>'
    return f"{value:g}"


def _svg(height: int, title: str, parts: Iterable[str]) -> str:
    size = f'viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(title, quote=True)}"'
    return f'<svg {size} class="chart" xmlns="http://www.w3.org/2000/svg">{"".join(parts)}</svg>'


def _dashed(dash: str) -> str:
    return f'stroke-dasharray="{dash}" ' if dash else ""


def _cross(x: float, y: float, style: str) -> str:
    return f'<path class="cross {style}" d="M{x - 4:.1f} {y - 4}l8 8m0 -8l-8 8"/>'


def _marker(kind: int, x: float, y: float, style: str) -> str:
    """A circle, square, triangle or diamond, filled or hollow."""
    shapes = (
        "m-3.5 0a3.5 3.5 0 1 0 7 0a3.5 3.5 0 1 0 -7 0",
        "m-3 -3h6v6h-6z",
        "m0 -4l4 7h-8z",
        "m0 -4.5l4 4.5l-4 4.5l-4 -4.5z",
    )
    hollow = " hollow" * (kind // len(shapes) % 2)
    return f'<path class="mark {style}{hollow}" d="M{x:.1f} {y:.1f}{shapes[kind % len(shapes)]}"/>'


def bars(table: Mapping[str, Any]) -> str:
    """Two bars for each of the first rows of a table of ``differences.py``: the numbers in the last columns.

    The expected number is filled and the found one outlined. One that is not finite, or missing, has no bar.
    """
    rows = [(row, row["expected"][-1], row["found"][-1]) for row in table["rows"][:MOST_BARS]]
    finite = [x for _, *pair in rows for x in pair if isinstance(x, float)]
    place, parts = _axis([0.0, *finite], 132, WIDTH - 80, log=False, margin=0).place, list[str]()
    for k, (row, expected, found) in enumerate(rows):
        parts.append(f'<text x="126" y="{30 * k + 17}" class="end">{"▶ " * row["first"]}{escape(row["name"])}</text>')
        for top, value, style in ((30 * k + 3, expected, "c0"), (30 * k + 15, found, "c1 hollow")):
            end = place(value if isinstance(value, float) else 0.0)
            parts.append(f'<path class="mark {style}" d="M{place(0):.1f} {top}H{end:.1f}v10H{place(0):.1f}z"/>')
            parts.append(f'<text x="{max(place(0), end) + 4:.1f}" y="{top + 9}">{value}</text>')
    title = f"{table['title']}: {table['columns'][-1]}, filled as expected, outlined {table['found']}"
    return _svg(30 * len(rows), title, parts)


def arrivals(found: Arrivals, title: str) -> str:
    """A square for each gradient that the loss of a rank sends to the rows of a rank; dashed and empty if it is 0.

    Its area is the share of the needed gradient; it is outlined if negative. Sums and cosines other than 1 are bold.
    """
    ranks = range(len(found.cosines))
    left, top = 116, 36
    size = min(64, (WIDTH - left) // len(ranks))
    parts = [f'<text x="{left}" y="12">reaches the rows of</text>']

    def row(name: str, name_y: float, words: Sequence[str], y: float, bold: Callable[[str], bool]) -> None:
        parts.append(f'<text x="{left - 8}" y="{name_y}" class="end">{name}</text>')
        for k, word in enumerate(words):
            style = "middle" + " strong" * bold(word)
            parts.append(f'<text x="{left + size * (k + 0.5)}" y="{y}" class="{style}">{word}</text>')

    row("", top, [f"rank {rank}" for rank in ranks], top - 6, lambda _: False)
    for rank, shares in enumerate(found.shares):
        middle = top + (size + 16) * rank + size / 2
        for k, share in enumerate(shares):
            side = 0.9 * size * math.sqrt(1.0 if share is None else min(1.0, abs(share)))
            x, style = left + size * (k + 0.5) - side / 2, "mark c0" + " hollow" * ((share or 0) < 0)
            square = f'd="M{x:.1f} {middle - side / 2:.1f}h{side:.1f}v{side:.1f}h-{side:.1f}z"'
            parts.append(f'<path class="{"missing" if share is None else style}" {square}/>')
        words = ["none" if share is None else f"{share:.2f}" for share in shares]
        row(f"loss of rank {rank}", middle + 4, words, middle + size / 2 + 10, lambda word: word == "none")
    below = top + (size + 16) * len(ranks)
    sums = [sum(share or 0.0 for share in column) for column in zip(*found.shares, strict=True)]
    parts.append(f'<path class="rule" d="M{left} {below}H{left + size * len(ranks)}"/>')
    for name, numbers in (("sum", sums), ("cosine", found.cosines)):
        below += 18
        row(f"{name}, needed: 1", below, [f"{x:.2f}" for x in numbers], below, lambda word: word != "1.00")
    return _svg(below + 8, title, parts)


def range_bar(low: float, middle: float, high: float) -> str:
    """A line that marks three numbers from 0 to 1 on a logarithmic scale that begins at 0.001."""
    places = [150 * max(0.0, 1 + math.log10(max(value, 1e-300)) / 3) + 4 for value in (low, middle, high)]
    first, second, third = places
    return (
        '<svg viewBox="0 0 158 14" width="158" height="14" class="chart" aria-hidden="true">'
        '<path class="grid" d="M4 7H154M4 3V11M54 4V10M104 4V10M154 1V13"/>'
        f'<path class="line c0" d="M{first:.1f} 7H{third:.1f}"/>'
        f'<path class="mark c0 hollow" d="M{first:.1f} 7m-3 0a3 3 0 1 0 6 0a3 3 0 1 0 -6 0"/>'
        f'<path class="line c0" d="M{second:.1f} 3V11"/>'
        f'<path class="mark c0" d="M{third:.1f} 7m0 -4l4 4l-4 4l-4 -4z"/></svg>'
    )
