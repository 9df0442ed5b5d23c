"""The ids of many shards as one sequence, of which only what is asked for is read."""

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import overload

import numpy as np
import numpy.typing as npt

from gpt.text.shards import Shard

Int64s = npt.NDArray[np.int64]
RELEASE_EVERY = 2**26  # bytes that may have come into memory before they are let go …
RELEASE_MAPS = 256  # … and files that may be open


class Stream:
    """Ids one after the other, documents and all. A document is its end-of-text and its ids."""

    def __init__(self, shards: Sequence[Shard]) -> None:
        self.shards = [shard for shard in shards if len(shard)]
        self._starts = np.cumsum([0, *(len(shard) for shard in self.shards)])
        self._touched = 0  # bytes
        self._mapped: set[int] = set()

    def __len__(self) -> int:
        return int(self._starts[-1])

    def take(self, start: int, length: int) -> Int64s:
        """``length`` ids from ``start`` on; after the last id comes the first."""
        out = np.empty(length, np.int64)
        filled = 0
        while filled < length:
            at = (start + filled) % len(self)
            number = int(np.searchsorted(self._starts, at, "right")) - 1
            inside = at - int(self._starts[number])
            self._mapped.add(number)
            part = self.shards[number].take(inside, inside + length - filled)
            out[filled : filled + len(part)] = part
            filled += len(part)
        self._count(length)
        return out

    def _count(self, length: int) -> None:
        """Keeps resident memory flat: what was read long ago leaves this process (a read brings 64 KiB at least)."""
        self._touched += max(2**16, 4 * length)
        if self._touched > RELEASE_EVERY or len(self._mapped) > RELEASE_MAPS:
            self.release()

    def release(self) -> None:
        """Closes all files; they open again when they are asked for."""
        for number in self._mapped:
            self.shards[number].release()
        self._touched = 0
        self._mapped.clear()

    @cached_property
    def offsets(self) -> Int64s:
        """Where documents begin, and where the last one ends."""
        parts = []
        for shard, start in zip(self.shards, self._starts, strict=False):
            parts.append(shard.offsets().astype(np.int64) + start)
            shard.release()
        return np.concatenate([*parts, self._starts[-1:]])

    @property
    def documents(self) -> "Documents":
        """The documents' ids, each without its end-of-text."""
        return Documents(self)


class Document:
    """The ids of a document that are read when a slice of them is asked for."""

    def __init__(self, stream: Stream, start: int, stop: int) -> None:
        self.stream, self.start, self.stop = stream, start, stop

    def __len__(self) -> int:
        return self.stop - self.start

    def __getitem__(self, part: slice) -> Int64s:
        start, stop, step = part.indices(len(self))
        return self.stream.take(self.start + start, max(0, stop - start))[::step]


class Documents(Sequence[Document]):
    """The documents of a stream."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream

    @property
    def lengths(self) -> Int64s:
        """How many ids each has."""
        lengths: Int64s = np.diff(self.stream.offsets) - 1
        return lengths

    def __len__(self) -> int:
        return len(self.stream.offsets) - 1

    @overload
    def __getitem__(self, number: int) -> Document: ...
    @overload
    def __getitem__(self, number: slice) -> list[Document]: ...
    def __getitem__(self, number: int | slice) -> Document | list[Document]:
        if isinstance(number, slice):
            return [self[i] for i in range(*number.indices(len(self)))]
        if not -len(self) <= number < len(self):
            raise IndexError(number)
        number %= len(self)
        return Document(self.stream, int(self.stream.offsets[number]) + 1, int(self.stream.offsets[number + 1]))

    def __iter__(self) -> Iterator[Document]:
        return (self[number] for number in range(len(self)))
