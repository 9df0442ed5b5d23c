"""The tokens of each training step."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from gpt.corpus.batches import Batches


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


@settings(max_examples=50)
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


@settings(max_examples=50)
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
