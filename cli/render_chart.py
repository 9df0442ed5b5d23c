"""Draws curves in a terminal with braille dots, or with letters if it lacks Unicode or colours.

plotext is no alternative: its two versions in use, 5 and 6, have no function in common.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from rich.console import Console
from rich.text import Text

from . import ticks
from .ticks import Axis

COLOURS = ("blue", "red", "green", "magenta", "yellow", "cyan")
MARKS = "*o+x#@%&"
PALE = "."
GUTTER = 10  # Width of the labels on the left, in columns.
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # Bits of a braille character: four rows of two.
Point = tuple[float, float]


@dataclass(frozen=True)
class Series:
    """A named curve of points (x, y), sorted by x. A non-finite y is a gap. Pale curves are drawn below the others."""

    name: str
    points: Sequence[Point]
    colour: int = 0
    pale: bool = False

    @property
    def style(self) -> str:
        """The curve's rich style."""
        return COLOURS[self.colour % len(COLOURS)] + (" dim" if self.pale else "")

    @property
    def mark(self) -> str:
        """The letter that draws the curve without colours."""
        return PALE if self.pale else MARKS[self.colour % len(MARKS)]


def chart(
    title: str, x_name: str, series: Sequence[Series], console: Console, height: int = 13, logarithmic: bool = False
) -> Text:
    """Draws curves in one frame as wide as the console, up to 100 columns.

    With ``logarithmic``, the y axis is logarithmic if the values span decades.
    """
    points = [point for one in series for point in one.points if all(map(math.isfinite, point))]
    if not points:
        return Text(f"{title}: nothing was recorded", "dim")
    (left, right), (low, high) = ((min(values), max(values)) for values in zip(*points, strict=True))
    width = max(8, min(100, console.width) - GUTTER - 2)
    fine = console.color_system is not None and (console.encoding or "").startswith("utf")
    across = ticks.axis(left, right, max(5, min(8, width // 10)), extend=False)
    up = (ticks.log_axis if logarithmic and ticks.spans_decades(low, high) else ticks.axis)(
        low, high, (height + 1) // 2
    )
    cells = _cells(series, across, up, width, height, fine)
    text = Text.assemble((title, "bold"), "  ")
    for one in series:
        if one.name:
            text.append(f"{one.name}  " if fine else f"{one.mark} {one.name}  ", one.style)
    frame = "│┤└─┴" if fine else "|+`-+"
    labels = {round((height - 1) * (1 - up.share(y))): label for y, label in zip(up.ticks, up.labels, strict=True)}
    for row in range(height):
        side = frame[1] if row in labels else frame[0]
        text.append(f"\n{labels.get(row, ''):>{GUTTER}}{side}", "dim")
        for column in range(width):
            text.append(*cells.get((row, column), (" ", "")))
    return text.append(_foot(across, width, x_name, frame), "dim")


def _foot(across: Axis, width: int, x_name: str, frame: str) -> str:
    """Returns the x axis: a line with ticks, and labels below it."""
    line, labels = [frame[3]] * width, [" "] * width
    free = 0
    for x, label in zip(across.ticks, across.labels, strict=True):
        at = round(across.share(x) * (width - 1))
        line[at] = frame[4]
        start = max(0, min(width - len(label), at - len(label) // 2))
        if start >= free:
            labels[start : start + len(label)] = label
            free = start + len(label) + 1
    names = f"{x_name:>{GUTTER}} " + "".join(labels).rstrip()
    return f"\n{'':{GUTTER}}{frame[2]}{''.join(line)}\n{names}"


def _cells(
    series: Sequence[Series], across: Axis, up: Axis, width: int, height: int, fine: bool
) -> dict[tuple[int, int], tuple[str, str]]:
    """Returns (row, column) → (character, style). Draws pale curves first; later curves cover earlier curves."""
    wide, high = (2, 4) if fine else (1, 1)  # Dots per character, across and down.
    dots: dict[tuple[int, int], tuple[int, Series]] = {}
    for one in sorted(series, key=lambda one: not one.pale):
        shares = [(across.share(x), up.share(y) if math.isfinite(y) else math.nan) for x, y in one.points]
        for x, y in _dense(shares, 1 / (width * wide)):
            column, row = round(x * (width * wide - 1)), round((1 - y) * (height * high - 1))
            cell = (row // high, column // wide)
            before, other = dots.get(cell, (0, one))
            kept = before if other.pale == one.pale else 0  # A pale curve must not thicken the others.
            dots[cell] = (kept | _DOTS[row % 4][column % 2], one)
    return {cell: (chr(0x2800 + bits) if fine else one.mark, one.style) for cell, (bits, one) in dots.items()}


def _dense(points: Sequence[Point], step: float) -> list[Point]:
    """Returns the finite points, with points ``step`` apart interpolated between neighbours."""
    found = [point for point in points if all(map(math.isfinite, point))]
    for (x0, y0), (x1, y1) in pairwise(points):
        if math.isfinite(y0) and math.isfinite(y1):
            between = min(400, math.ceil((x1 - x0) / step))
            found += [(x0 + (x1 - x0) * i / between, y0 + (y1 - y0) * i / between) for i in range(1, between)]
    return found
