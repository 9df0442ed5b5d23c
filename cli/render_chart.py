"""Curves in a terminal: braille dots, or letters where these cannot be shown or told apart.

Own code: plotext's two versions in use, 5 and 6, have no function in common.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from rich.console import Console
from rich.text import Text

COLOURS = ("blue", "red", "green", "magenta", "yellow", "cyan")
MARKS = "*o+x#@%&"
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # of a braille character: four rows of two


@dataclass(frozen=True)
class Series:
    """A named curve of points (x, y), by rising x."""

    name: str
    points: Sequence[tuple[float, float]]


def chart(title: str, x_name: str, series: Sequence[Series], console: Console, height: int = 12) -> Text:
    """The curves in one frame as wide as the console, up to 100 columns. What is not finite is left out."""
    curves = [Series(one.name, [point for point in one.points if all(map(math.isfinite, point))]) for one in series]
    all_points = [point for one in curves for point in one.points]
    if not all_points:
        return Text(f"{title}: nothing was recorded", "dim")
    xs, ys = [x for x, _ in all_points], [y for _, y in all_points]
    left, right, low, high = min(xs), max(xs), min(ys), max(ys)
    if low == high:
        low, high = low - (abs(low) or 1) / 2, high + (abs(high) or 1) / 2
    width = min(100, console.width) - 12
    fine = console.color_system is not None and (console.encoding or "").startswith("utf")
    across, down = (2, 4) if fine else (1, 1)
    grid: dict[tuple[int, int], tuple[int, int]] = {}  # row, column → dots, and the last curve that came by
    for number, one in enumerate(curves):
        for x, y in _dense(one.points, (right - left) / max(1, width * across)):
            column = round((x - left) / ((right - left) or 1) * (width * across - 1))
            row = round((high - y) / (high - low) * (height * down - 1))
            cell = (row // down, column // across)
            dots = grid.get(cell, (0, 0))[0] | (_DOTS[row % 4][column % 2] if fine else 0)
            grid[cell] = (dots, number)
    text = Text.assemble((title, "bold"), "  ")
    for number, one in enumerate(curves if any(one.name for one in curves) else []):
        mark = "" if fine else f"{MARKS[number % len(MARKS)]} "
        text.append(f"{mark}{one.name}  ", COLOURS[number % len(COLOURS)])
    for row in range(height):
        value = high - (high - low) * row / (height - 1)
        label = f"{value:10.4g} " if row in (0, height // 2, height - 1) else " " * 11
        text.append("\n" + label, "dim")
        for column in range(width):
            if (row, column) not in grid:
                text.append(" ")
                continue
            dots, number = grid[row, column]
            mark = chr(0x2800 + dots) if fine else MARKS[number % len(MARKS)]
            text.append(mark, COLOURS[number % len(COLOURS)])
    ends = f"{left:,.4g}".ljust(width - 12) + f"{right:,.4g}".rjust(12)
    text.append(f"\n{'':11}{ends} {x_name}", "dim")
    return text


def _dense(points: Sequence[tuple[float, float]], step: float) -> list[tuple[float, float]]:
    """Points with others on the lines between them, so that curves have no holes."""
    found = list(points[:1])
    for (x0, y0), (x1, y1) in pairwise(points):
        between = min(400, math.ceil((x1 - x0) / step)) if step > 0 else 1
        found += [(x0 + (x1 - x0) * i / between, y0 + (y1 - y0) * i / between) for i in range(1, between + 1)]
    return found
