"""The tokens of each training step."""

from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from gpt.corpus.batches import Batches, Ramp


class Ring:
    """A token stream in memory that wraps around."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def take(self, start: int, length: int) -> np.ndarray:
        return np.arange(start, start + length) % self.length


def test_every_epoch_has_a_different_order() -> None:
    """The orders differ by more than a rotation."""
    batches = Batches(Ring(8 * 50), 8, 50, 1)
    orders = [batches.starts(epoch) // 8 for epoch in range(3)]
    steps = {tuple(((order - np.roll(order, 1)) % 50).tolist()) for order in orders}
    assert len(steps) == 3


@settings(deadline=None)
@given(length=st.integers(8, 1000), rows=st.integers(1, 9), seed=st.integers(0, 99))
def test_an_epoch_sees_every_token_once(length: int, rows: int, seed: int) -> None:
    ids = Ring(length)
    batches = Batches(ids, 8, rows, seed)
    inputs: list[np.ndarray] = []
    for step in range(-(-batches.windows // rows)):
        x, y = batches.global_batch(step)
        assert x.shape == y.shape == (rows, 8)
        assert np.array_equal(y, (x + 1) % length)  # The stream wraps around.
        inputs += list(x)
    tokens = np.concatenate(inputs[: batches.windows])
    assert len(set(tokens.tolist())) == len(tokens) == batches.windows * 8
    assert length - len(tokens) < 8


def test_batches_depend_only_on_seed_and_step() -> None:
    ids = Ring(10_000)
    batches, same_seed, other_seed = Batches(ids, 16, 4, 1), Batches(ids, 16, 4, 1), Batches(ids, 16, 4, 2)
    for step in range(5):
        batches.global_batch(step)
    assert np.array_equal(batches.global_batch(1000)[0], same_seed.global_batch(1000)[0])
    assert not np.array_equal(batches.global_batch(1000)[0], other_seed.global_batch(1000)[0])
    epoch = batches.windows // 4
    first = {int(x) for step in range(epoch) for x in batches.global_batch(step)[0][:, 0]}
    second = {int(x) for step in range(epoch, 2 * epoch) for x in batches.global_batch(step)[0][:, 0]}
    # The next epoch has other window starts.
    assert {x % 16 for x in first if x < 9000} != {x % 16 for x in second if x < 9000}


@settings(deadline=None)
@given(length=st.integers(16, 300), rows_per_rank=st.integers(1, 5), ranks=st.integers(1, 6), step=st.integers(0, 500))
def test_ranks_partition_the_batch(length: int, rows_per_rank: int, ranks: int, step: int) -> None:
    batches = Batches(Ring(length), 4, rows_per_rank * ranks, 3)
    x, y = batches.global_batch(step)
    parts = [batches.global_batch(step, rank, ranks) for rank in range(ranks)]
    assert np.array_equal(np.concatenate([part[0] for part in parts]), x)
    assert np.array_equal(np.concatenate([part[1] for part in parts]), y)


def test_trillions_of_tokens_cost_no_memory() -> None:
    batches = Batches(Ring(10**13), 8, 1000, 0)  # The window count exceeds 32 bits.
    x, _ = batches.global_batch(10**9)  # This step is many epochs later.
    assert x.shape == (1000, 8)
    assert len(set(x[:, 0].tolist())) == 1000


@given(
    rows=st.integers(1, 300), first=st.integers(1, 300), over=st.integers(1, 5000), unit=st.integers(1, 40),
    n=st.integers(1, 20_000),
)  # fmt: skip
def test_batch_ramp_is_linear(rows: int, first: int, over: int, unit: int, n: int) -> None:
    first = min(first, rows)
    ramp = Ramp(rows, first, over, unit)
    starts = [ramp.count_rows_before(step) for step in range(200)]
    sizes = [b - a for a, b in pairwise(starts)]
    assert starts[0] == 0
    for start, size in zip(starts, sizes, strict=False):
        exact_size = min(rows, first + (rows - first) * start / over)
        assert 1 <= size <= rows
        assert exact_size - unit < size <= max(exact_size, 1)
        assert size % unit == 0 or size < unit or start >= over
    assert sizes == sorted(sizes)
    assert ramp.count_rows_before(ramp.steps(n)) >= n > ramp.count_rows_before(ramp.steps(n) - 1)


def test_batch_ramp_skips_no_token() -> None:
    batches = Batches(Ring(8 * 97), 8, 10, 5, Ramp(10, 1, 60, 2))
    rows = [batches.global_batch(step)[0] for step in range(97)]
    assert len({int(x) for x in np.concatenate(rows)[:97, 0]}) == 97
    assert (rows[0].shape, rows[-1].shape) == ((1, 8), (10, 8))


def test_very_long_batch_ramp_is_fast() -> None:
    ramp = Ramp(800, 50, 10**15, 25)
    assert [ramp.count_rows_before(step + 1) - ramp.count_rows_before(step) for step in (0, 10**12, 10**13)] == [
        50,
        75,
        800,
    ]
    assert ramp.count_rows_before(ramp.steps(10**18)) >= 10**18 > ramp.count_rows_before(ramp.steps(10**18) - 1)
