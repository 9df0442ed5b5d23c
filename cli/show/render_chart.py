"""Draws curves in a terminal: with braille dots, or with ASCII characters if the terminal lacks Unicode or colours.

plotext would not work: versions 5 and 6 are both in use, and share no function.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count, pairwise

from rich.console import Console
from rich.text import Text

COLOURS = ("blue", "red", "green", "magenta", "yellow", "cyan")
MARKS = "*o+x#@%&"
PALE_MARK = "."
GUTTER = 10  # Width of the labels on the left, in columns.
MAX_STEPS = 5  # Steps between the ticks of the y axis.
FLAT = 1e-8  # Narrower ranges, as a share of their largest number, are widened.
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # Bits of braille dots: four rows of two.
Point = tuple[float, float]


@dataclass(frozen=True)
class Series:
    """A named curve of points (x, y), sorted by x. A non-finite y is a gap. Other curves cover pale curves."""

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
        """The character that draws the curve on a terminal without braille dots."""
        return PALE_MARK if self.pale else MARKS[self.colour % len(MARKS)]


def chart(
    title: str, x_name: str, series: Sequence[Series], console: Console, height: int = 13, logarithmic: bool = False
) -> Text:
    """Draws curves in a frame as wide as the console, up to 100 columns.

    With ``logarithmic``, the y axis is logarithmic if the values span more than three decades.
    """
    points = [point for curve in series for point in curve.points if all(map(math.isfinite, point))]
    if not points:
        return Text(f"{title}: no data", "dim")
    (left, right), (low, high) = ((min(values), max(values)) for values in zip(*points, strict=True))
    width = max(8, min(100, console.width) - GUTTER - 2)
    use_braille = console.color_system is not None and (console.encoding or "").startswith("utf")
    is_log = logarithmic and 0 < low < high / 1000
    most = min(MAX_STEPS, (height - 1) // 2)
    ticks = _round_ticks(math.log10(low), math.log10(high), most, 0) if is_log else _round_ticks(low, high, most)
    bottom, top = ticks[0], ticks[-1]

    def place(x: float, y: float) -> Point:
        """Returns a point's position in the frame, from 0 to 1."""
        y = math.log10(y) if is_log else y
        return (x - left) / (right - left or 1), (y - bottom) / (top - bottom)

    cells = _draw_cells(series, place, width, height, use_braille)
    text = Text.assemble((title, "bold"), "  ")
    for curve in series:
        if curve.name:
            text.append(f"{curve.name}  " if use_braille else f"{curve.mark} {curve.name}  ", curve.style)
    side, tick, corner, line = "│┤└─" if use_braille else "|+`-"
    labels = {round((top - y) / (top - bottom) * (height - 1)): _format(10**y if is_log else y) for y in ticks}
    for row in range(height):
        text.append(f"\n{labels.get(row, ''):>{GUTTER}}{tick if row in labels else side}", "dim")
        for column in range(width):
            text.append(*cells.get((row, column), (" ", "")))
    first, last = _format(left), _format(right)
    ends = f"\n{x_name:>{GUTTER}} {first}{last:>{width - len(first)}}"
    return text.append(f"\n{'':{GUTTER}}{corner}{line * width}{ends}", "dim")


def _round_ticks(low: float, high: float, most: int, finest: int | None = None) -> list[float]:
    """Returns multiples of 1, 2 or 5 times a power of ten, at least 10^``finest``, that enclose a range in at most
    ``most`` steps."""
    largest = max(abs(low), abs(high)) or 1.0
    span = high - low if high - low > FLAT * largest else largest
    powers = count(math.floor(math.log10(span / most)) if finest is None else finest)
    steps = (unit * 10.0**power for power in powers for unit in (1, 2, 5))
    step = next(step for step in steps if math.ceil(high / step) - math.floor(low / step) <= most)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [n * step for n in range(first, max(last, first + 1) + 1)]


def _format(value: float) -> str:
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e7 else f"{value:.4g}"


def _draw_cells(
    series: Sequence[Series], place: Callable[[float, float], Point], width: int, height: int, use_braille: bool
) -> dict[tuple[int, int], tuple[str, str]]:
    """Returns (character, style) by (row, column). Draws pale curves first; later curves cover earlier ones."""
    dots_across, dots_down = (2, 4) if use_braille else (1, 1)  # Dots per character, across and down.
    dots: dict[tuple[int, int], tuple[int, Series]] = {}
    for curve in sorted(series, key=lambda curve: not curve.pale):
        for x, y in _interpolate([place(*point) for point in curve.points], 1 / (width * dots_across)):
            column, row = round(x * (width * dots_across - 1)), round((1 - y) * (height * dots_down - 1))
            cell = (row // dots_down, column // dots_across)
            previous_bits, previous_curve = dots.get(cell, (0, curve))
            # A pale curve must not thicken the others.
            kept_bits = previous_bits if previous_curve.pale == curve.pale else 0
            dots[cell] = (kept_bits | _DOTS[row % 4][column % 2], curve)
    return {
        cell: (chr(0x2800 + bits) if use_braille else curve.mark, curve.style) for cell, (bits, curve) in dots.items()
    }


def _interpolate(points: Sequence[Point], step: float) -> list[Point]:
    """Returns the finite points, and interpolated points about ``step`` apart."""
    dense = [point for point in points if all(map(math.isfinite, point))]
    for (x0, y0), (x1, y1) in pairwise(points):
        if math.isfinite(y0) and math.isfinite(y1):
            intervals = min(400, math.ceil((x1 - x0) / step))
            dense += [(x0 + (x1 - x0) * i / intervals, y0 + (y1 - y0) * i / intervals) for i in range(1, intervals)]
    return dense
