"""Axis ticks are round and have consistent labels."""

from itertools import pairwise

import pytest
from gpt_cli.show import ticks
from hypothesis import example, given
from hypothesis import strategies as st

finite = st.floats(-1e38, 1e38)


@pytest.mark.parametrize(
    ("low", "high", "max_ticks", "extend", "labels"),
    [
        (2.308, 6.942, 8, True, ["2", "3", "4", "5", "6", "7"]),
        (1.5e-5, 0.008, 6, True, ["0.000", "0.002", "0.004", "0.006", "0.008"]),
        (1e-5, 1.2e-4, 8, True, ["0", "0.2e-4", "0.4e-4", "0.6e-4", "0.8e-4", "1.0e-4", "1.2e-4"]),
        (0, 409_600, 6, False, ["0", "100,000", "200,000", "300,000", "400,000"]),
        (0, 2.5e6, 6, False, ["0", "0.5M", "1.0M", "1.5M", "2.0M", "2.5M"]),
        (-0.71, 1, 6, True, ["-1.0", "-0.5", "0.0", "0.5", "1.0"]),
        (2, 2, 6, True, ["1.0", "1.5", "2.0", "2.5", "3.0"]),
        (1e30, 3e30, 6, True, ["1.0e30", "1.5e30", "2.0e30", "2.5e30", "3.0e30"]),
        (5e-324, 1e-310, 6, True, ["-0.5", "0.0", "0.5"]),
    ],
)  # fmt: skip
def test_tick_labels_are_round(low: float, high: float, max_ticks: int, extend: bool, labels: list[str]) -> None:
    assert ticks.axis(low, high, max_ticks, extend).labels == labels


@given(finite, finite, st.integers(4, 8), st.booleans())
@example(1.0000001, 1.0000001, 4, True)
def test_ticks_are_evenly_spaced_and_cover_the_range(a: float, b: float, max_ticks: int, extend: bool) -> None:
    low, high = sorted((a, b))
    axis = ticks.axis(low, high, max_ticks, extend)
    assert 1 <= len(axis.ticks) <= max_ticks
    assert len(axis.labels) == len(axis.ticks) == len(set(axis.labels))
    assert axis.low <= low
    assert axis.high >= high
    assert -1e-6 <= axis.share(low) <= axis.share(high) <= 1 + 1e-6
    shares = [axis.share(tick) for tick in axis.ticks]
    assert all(-1e-6 <= share <= 1 + 1e-6 for share in shares)
    steps = [after - before for before, after in pairwise(shares)]
    assert steps == pytest.approx([steps[0]] * len(steps), abs=1e-6) if steps else True
    decimals = {len(label.partition("e")[0].rstrip("MBT").partition(".")[2]) for label in axis.labels if label != "0"}
    assert len(decimals) <= 1
    if extend:
        assert len(axis.ticks) >= 3 or max_ticks == 4
        ends = (min(low, axis.ticks[0]), max(high, axis.ticks[-1]))  # The axis has a tolerance for rounding errors.
        assert (axis.low, axis.high) == pytest.approx(ends, abs=abs(axis.ticks[-1] / 2 - axis.ticks[0] / 2) * 1e-5)


def test_logarithmic_axis_has_powers_of_ten() -> None:
    assert ticks.log_axis(0.002, 50, 8).labels == ["0.001", "0.01", "0.1", "1", "10", "100"]
    assert ticks.log_axis(2, 3e7, 5).labels == ["1e0", "1e2", "1e4", "1e6", "1e8"]
    assert ticks.log_axis(2, 3, 5).labels == ["1", "10"]
    assert ticks.log_axis(1, 100, 5).share(10) == pytest.approx(0.5)
    assert ticks.spans_decades(1, 1001)
    assert not ticks.spans_decades(1, 1000)
    assert not ticks.spans_decades(0, 1000)
