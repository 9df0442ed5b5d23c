"""Training batches as a pure function of seed and step, so a resume can start at any step.

The token stream is a ring: the end-of-text of the first document follows the last document. Each epoch starts at a
different offset, cuts the ring into windows of T inputs and shuffles them. Each epoch omits fewer than T ids, in a
different place of the ring.
"""

import hashlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gpt.corpus.shards import TokenStream

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Batches:
    """Batches of ``rows`` windows of ``block_size`` (T) ids."""

    ids: TokenStream
    block_size: int
    rows: int
    seed: int

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
        assert self.rows % ranks == 0, "rows are divided evenly before this"
        rank_rows = self.rows // ranks
        positions = np.arange(rank_rows, dtype=np.int64) + step * self.rows + rank * rank_rows
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
