"""Training batches as a pure function of seed and step, so a resume can start at any step.

The token stream is a ring: the end-of-text of the first document follows the last document. Each epoch starts at a
different offset, cuts the ring into windows of T inputs and shuffles them. Each epoch omits fewer than T ids, in a
different place of the ring.
"""

import hashlib
from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter

import numpy as np
import numpy.typing as npt

from gpt.config.settings import Positive
from gpt.corpus.shards import TokenStream

Int64s = npt.NDArray[np.int64]
MAX_BATCH_SIZES = 2**24  # Maximum number of batch sizes in a ramp.


@dataclass(frozen=True)
class Ramp:
    """Batch sizes that grow linearly from ``first`` to ``rows`` over the first ``over`` rows (Brown et al. 2020,
    appendix B). Sizes below ``unit`` are multiples of ``by``; other sizes are multiples of ``unit``. ``by`` divides
    ``first``, ``rows`` and ``unit``."""

    rows: Positive
    first: Positive
    over: int
    unit: Positive
    by: Positive = 1

    @property
    def sizes(self) -> int:
        """An upper bound on the number of batch sizes."""
        return self.unit // self.by + self.rows // self.unit + 1

    @cached_property
    def _stages(self) -> list[tuple[int, int, int]]:
        """The ramp's stages, as (first step, rows before that step, batch size). Even a long ramp has few stages."""
        stages, step, first_row = [], 0, 0
        while first_row < self.over:
            exact = self.first + (self.rows - self.first) * first_row // self.over
            multiple = self.by if exact < self.unit else self.unit
            size = exact - exact % multiple
            stages.append((step, first_row, size))
            # The linear ramp reaches the next size after this many rows.
            next_row = -(-(size + multiple - self.first) * self.over // max(1, self.rows - self.first))
            count = -(-(min(self.over, next_row) - first_row) // size)
            step, first_row = step + count, first_row + count * size
        return [*stages, (step, first_row, self.rows)]

    def count_rows_before(self, step: int) -> int:
        """Returns the number of rows in all steps before ``step`` (counted from 0)."""
        first_step, first_row, size = self._stages[bisect_right(self._stages, step, key=itemgetter(0)) - 1]
        return first_row + (step - first_step) * size

    def steps(self, rows: int) -> int:
        """Returns the smallest number of steps with at least ``rows`` rows."""
        first_step, first_row, size = self._stages[bisect_right(self._stages, rows, key=itemgetter(1)) - 1]
        return first_step - (first_row - rows) // size


@dataclass(frozen=True)
class Batches:
    """Batches of ``rows`` windows of ``block_size`` (T) ids. Batches are smaller during a ``ramp``."""

    ids: TokenStream
    block_size: int
    rows: int
    seed: int
    ramp: Ramp | None = None

    def __post_init__(self) -> None:
        assert len(self.ids) >= self.block_size, "the context shrinks to the text before this"

    @property
    def windows(self) -> int:
        """The number of windows in an epoch."""
        return len(self.ids) // self.block_size

    @property
    def length(self) -> int:
        """The length of the longest sequence."""
        return self.block_size

    def global_batch(self, step: int, rank: int = 0, ranks: int = 1) -> tuple[Int64s, Int64s]:
        """Returns this rank's inputs and targets, int64 (rows / ranks, T). Targets are the inputs shifted by one id.
        Steps count from 0. Together, the ranks get the rows that a single process would get."""
        return self.windows_at(self.starts(step, rank, ranks))

    def windows_at(self, starts: Int64s) -> tuple[Int64s, Int64s]:
        """Returns the inputs and targets of the windows at these ring offsets."""
        windows = np.stack([self.ids.take(start, self.block_size + 1) for start in starts.tolist()])
        return windows[:, :-1], windows[:, 1:]

    def starts(self, step: int, rank: int = 0, ranks: int = 1) -> Int64s:
        """Returns the ring offsets of this rank's windows."""
        first_row = self.ramp.count_rows_before(step) if self.ramp else step * self.rows
        rows = self.ramp.count_rows_before(step + 1) - first_row if self.ramp else self.rows
        assert rows % ranks == 0, "rows are divided evenly before this"
        rank_rows = rows // ranks
        positions = np.arange(first_row + rank * rank_rows, first_row + (rank + 1) * rank_rows, dtype=np.int64)
        windows = shuffle_indices(positions, self.windows, self.seed)
        shifts = [_hash(self.seed, epoch) % len(self.ids) for epoch in (positions // self.windows).tolist()]
        return (windows * self.block_size + np.array(shifts, np.int64)) % len(self.ids)


def shuffle_indices(positions: Int64s, n: int, seed: int) -> Int64s:
    """Returns the shuffled indices (0 … n - 1) at ``positions``, which are numbered across epochs. Each epoch is a
    permutation of all indices."""
    epochs = positions // n
    indices = np.empty_like(positions)
    for epoch in np.unique(epochs).tolist():
        indices[epochs == epoch] = permute(positions[epochs == epoch] % n, n, _hash(seed, epoch))
    return indices


def permute(x: Int64s, n: int, key: int) -> Int64s:
    """Maps ``x`` with the permutation of 0 … n - 1 that ``key`` selects. The permutation is never stored.

    Cycle-walks a Feistel network over the next power of four until the output is below n (Black & Rogaway 2002).
    """
    half_bits = max(1, ((n - 1).bit_length() + 1) // 2)
    mask = np.uint64((1 << half_bits) - 1)
    images = x.astype(np.uint64)
    pending = np.ones(len(x), bool)
    while pending.any():
        left, right = images[pending] >> np.uint64(half_bits), images[pending] & mask
        for round_number in range(6):
            left, right = right, left ^ (_mix(right, _hash(key, round_number)) & mask)
        images[pending] = (left << np.uint64(half_bits)) | right
        pending &= images >= n
    return images.astype(np.int64)


def _mix(x: npt.NDArray[np.uint64], key: int) -> npt.NDArray[np.uint64]:
    """Returns the splitmix64 finalizer of x + key (Steele et al. 2014); overflow wraps."""
    x = x + np.uint64(key)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _hash(*values: int) -> int:
    """Returns a 63-bit hash of ``values``."""
    digest = hashlib.sha256(repr(values).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
