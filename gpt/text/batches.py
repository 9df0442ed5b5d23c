"""The batch of a step: a pure function of seed and step, so that any step's batch can be made at once.

The stream of ids is a ring: after the last document comes the first one's end-of-text. An epoch cuts the ring into
windows of T inputs, taken in an order that a keyed permutation gives; each epoch starts cutting at another place, so
that borders fall elsewhere. What is left over, less than a window, differs from epoch to epoch too.
"""

import hashlib
from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from typing import Protocol

import numpy as np
import numpy.typing as npt

from gpt.settings import Positive

Int64s = npt.NDArray[np.int64]
MOST_SIZES = 2**24  # different sizes of growing batches


class Ring(Protocol):
    """A ring of ids, as a `gpt.text.shards.TokenStream` is: the first follows the last."""

    def __len__(self) -> int: ...

    def take(self, start: int, length: int) -> Int64s:
        """Returns ``length`` ids from ``start`` on."""
        ...


@dataclass(frozen=True)
class Ramp:
    """Batches that grow along a line, from ``first`` rows to ``rows`` by the time that ``over`` of them are read
    (Brown et al. 2020, appendix B), in multiples of ``unit`` as soon as there is one, and of ``by``, which divides
    ``first``, ``rows`` and ``unit``, always."""

    rows: Positive
    first: Positive
    over: int
    unit: Positive
    by: Positive = 1

    @property
    def sizes(self) -> int:
        """The largest number of different batch sizes."""
        return self.unit // self.by + self.rows // self.unit + 1

    @cached_property
    def _stages(self) -> list[tuple[int, int, int]]:
        """The starts of batch sizes: the step, the rows of all steps before it, and the rows of each step after it.
        However many tokens a batch grows over, it does so in few sizes."""
        stages, step, start = [], 0, 0
        while start < self.over:
            exact = self.first + (self.rows - self.first) * start // self.over
            by = self.by if exact < self.unit else self.unit
            size = exact - exact % by
            stages.append((step, start, size))
            # After so many rows the line reaches the next size.
            grown = -(-(size + by - self.first) * self.over // max(1, self.rows - self.first))
            count = -(-(min(self.over, grown) - start) // size)
            step, start = step + count, start + count * size
        return [*stages, (step, start, self.rows)]

    def before(self, step: int) -> int:
        """Returns the rows of all steps before ``step``, which is counted from 0."""
        first, start, size = self._stages[bisect_right(self._stages, step, key=itemgetter(0)) - 1]
        return start + (step - first) * size

    def steps(self, rows: int) -> int:
        """Returns the fewest steps that take ``rows`` rows."""
        first, start, size = self._stages[bisect_right(self._stages, rows, key=itemgetter(1)) - 1]
        return first - (start - rows) // size


@dataclass(frozen=True)
class Batches:
    """Batches of ``rows`` windows of ``block_size`` ids (T) from a stream of at least T ids; with a ``ramp`` fewer at
    first."""

    ids: Ring
    block_size: int
    rows: int
    seed: int
    ramp: Ramp | None = None

    def __post_init__(self) -> None:
        assert len(self.ids) >= self.block_size, "the context shrinks to the text before this"

    @property
    def windows(self) -> int:
        """The number of windows of an epoch."""
        return len(self.ids) // self.block_size

    def global_batch(self, step: int, rank: int = 0, ranks: int = 1) -> tuple[Int64s, Int64s]:
        """Returns inputs x and targets y of a step, int64 (rows / ranks, T): y is x one id later. Steps count from 0.

        Of many processes, each takes its rows: disjoint, and together the rows of one.
        """
        first = self.ramp.before(step) if self.ramp else step * self.rows
        rows = self.ramp.before(step + 1) - first if self.ramp else self.rows
        assert rows % ranks == 0, "rows are divided evenly before this"
        share = rows // ranks
        starts = self._starts(np.arange(first + rank * share, first + (rank + 1) * share, dtype=np.int64))
        windows = np.stack([self.ids.take(start, self.block_size + 1) for start in starts.tolist()])
        return windows[:, :-1], windows[:, 1:]

    def _starts(self, positions: Int64s) -> Int64s:
        """Returns where the windows at ``positions``, counted from the first step, begin in the ring."""
        epochs = positions // self.windows
        starts = np.empty_like(positions)
        for epoch in np.unique(epochs).tolist():
            key = _hash(self.seed, epoch)
            window = permute(positions[epochs == epoch] % self.windows, self.windows, key)
            starts[epochs == epoch] = (window * self.block_size + key % len(self.ids)) % len(self.ids)
        return starts


def shuffled(positions: Int64s, n: int, seed: int) -> Int64s:
    """Returns which of ``n`` things are at ``positions``, counted from the first step. Each epoch is a permutation of
    all of them."""
    epochs = positions // n
    chosen = np.empty_like(positions)
    for epoch in np.unique(epochs).tolist():
        chosen[epochs == epoch] = permute(positions[epochs == epoch] % n, n, _hash(seed, epoch))
    return chosen


def permute(x: Int64s, n: int, key: int) -> Int64s:
    """Returns the images of ``x`` under a permutation of 0 … n - 1 that ``key`` chooses, without storing it.

    A Feistel network over the next power of four, walked until it lands below n (Black & Rogaway 2002).
    """
    half = max(1, ((n - 1).bit_length() + 1) // 2)
    mask = np.uint64((1 << half) - 1)
    out = x.astype(np.uint64)
    todo = np.ones(len(x), bool)
    while todo.any():
        left, right = out[todo] >> np.uint64(half), out[todo] & mask
        for turn in range(6):
            left, right = right, left ^ (_mix(right, _hash(key, turn)) & mask)
        out[todo] = (left << np.uint64(half)) | right
        todo &= out >= n
    return out.astype(np.int64)


def _mix(x: npt.NDArray[np.uint64], key: int) -> npt.NDArray[np.uint64]:
    """Returns the 64-bit finalizer (splitmix64, Steele et al. 2014) of x + key; overflow wraps."""
    x = x + np.uint64(key)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _hash(*values: int) -> int:
    """Returns a hash of ``values``, 63 bits."""
    digest = hashlib.sha256(repr(values).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
