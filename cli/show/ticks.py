"""Axes with round ticks, for numbers in float32's range. A test compares them with ``pages/chart.js``."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

FLAT = 1e-8  # Ranges narrower than this share of their largest number are widened.
TINY = 1e-300  # Ranges narrower than this are widened, so that no tick step is subnormal.
TOLERANCE = 1e-6  # Tolerance for rounding errors, in steps.
UNITS = {6: "M", 9: "B", 12: "T"}


@dataclass(frozen=True)
class Axis:
    """A range of numbers with ticks at round numbers and a label for each tick."""

    low: float
    high: float
    ticks: Sequence[float]
    labels: Sequence[str]
    log: bool = False

    def share(self, value: float) -> float:
        """Returns a value's position on the axis: 0 at the low end, 1 at the high end."""
        low, high, position = (math.log10(x) if self.log else x for x in (self.low, self.high, value))
        return (position - low) / (high - low)


def axis(low: float, high: float, max_ticks: int, extend: bool = True) -> Axis:
    """Returns a linear axis with up to ``max_ticks`` ticks: multiples of 1, 2 or 5 times a power of ten.

    With ``extend``, the axis ends at ticks. Otherwise it runs from ``low`` to ``high``, or from 0 if ``low`` is close
    to 0.
    """
    low, high = _widen(0.0 if not extend and 0 < low <= high / 10 else low, high)
    finest = math.floor(math.log10((high - low) / max_ticks)) - 1
    first, last, step, k = _find_step(low, high, max_ticks, extend, finest)
    multiples = [n * step for n in range(first, last + 1)]
    ticks = [_scale(n, k) for n in multiples]
    if extend:
        low, high = min([low, *ticks]), max([high, *ticks])
    return Axis(low, high, ticks, _labels(multiples, k))


def log_axis(low: float, high: float, max_ticks: int) -> Axis:
    """Returns a logarithmic axis of positive numbers with ticks at every decade, or every 2nd, 5th, 10th, …"""
    first, last, step, k = _find_step(math.log10(low), math.log10(high), max_ticks, True, 0)
    decades = [n * step * 10**k for n in range(first, max(last, first + 1) + 1)]
    decades = [n for n in decades if _scale(1, n) > 0]
    ticks = [_scale(1, n) for n in decades]
    is_short = all(-4 < n < 6 for n in decades)
    labels = [(f"{10**n:,}" if n >= 0 else f"{_scale(1, n):.{-n}f}") if is_short else f"1e{n}" for n in decades]
    return Axis(min([low, *ticks]), max([high, *ticks]), ticks, labels, log=True)


def spans_decades(low: float, high: float) -> bool:
    """Whether positive numbers span more than three decades, so that a linear axis would show only the largest."""
    return low > 0 and high / 1000 > low


def _widen(low: float, high: float) -> tuple[float, float]:
    largest = max(abs(low), abs(high))
    half = largest / 2 if largest > TINY else 0.5
    return (low, high) if high - low > max(FLAT * largest, TINY) else (low - half, high + half)


def _find_step(low: float, high: float, max_ticks: int, extend: bool, k: int) -> tuple[int, int, int, int]:
    """Finds the finest step of 1, 2 or 5 × 10^n, n ≥ ``k``, that gives at most ``max_ticks`` ticks.

    Returns the first and last tick as multiples of the step, the step's factor (1, 2 or 5) and its exponent n.
    """
    for power in count(k):
        for step in (1, 2, 5):
            size = _scale(step, power)
            first, last = math.floor(low / size + TOLERANCE), math.ceil(high / size - TOLERANCE)
            if not extend:
                first, last = math.ceil(low / size - TOLERANCE), math.floor(high / size + TOLERANCE)
            if last - first < max_ticks:
                return first, last, step, power
    raise AssertionError("some step is coarse enough")


def _scale(multiple: int, power: int) -> float:
    """Returns ``multiple`` × 10^``power``, rounded once."""
    return float(f"{multiple}e{power}")


def _labels(multiples: Sequence[int], k: int) -> list[str]:
    """Returns labels of ``multiples`` × 10^``k`` with a common number of decimals and unit."""
    top_power = len(str(max(map(abs, multiples)))) - 1 + k  # Power of ten of the largest number.
    unit, suffix = 0, ""
    if top_power < -3 or top_power >= 15:
        unit, suffix = top_power, f"e{top_power}"
    elif top_power >= 6 and top_power // 3 * 3 - k <= 3:
        unit, suffix = top_power // 3 * 3, UNITS[top_power // 3 * 3]
    decimals = max(0, unit - k)
    return ["0" if suffix and not n else f"{_scale(n, k - unit):,.{decimals}f}{suffix}" for n in multiples]
