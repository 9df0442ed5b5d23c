"""Keys and values of the positions seen so far, so that a step computes its own positions alone."""

import functools
import math
import mmap
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gpt.config import GPTConfig
from gpt.device import upload
from gpt.model.params import SLACK, cache_columns

BLOCK = 128  # columns that a GPU's attention for one query reads together
Where = slice | Tensor  # positions that all rows share, or (B, T) of them


@dataclass
class _Span:
    """The columns of a step in layers of one window: those that take the new positions, and those that these see."""

    columns: slice | tuple[Tensor, Tensor]  # that take the new ones: of all rows, or rows (B, 1) and columns (B, T)
    seen: slice  # columns that are looked at
    mask: Tensor | None  # True where a new position sees a column, (…, T, seen); None: all, or a causal square
    kept: Tensor | None = None  # of more positions than there are columns: which stay, (B, columns)
    fresh: bool = False  # then: whether there were none before

    def append(self, stored: Tensor, new: Tensor) -> Tensor:
        """Stores new keys or values, (B, K, T, D), and returns those that the new positions look at."""
        if self.kept is not None:
            joined = new.to(stored.dtype) if self.fresh else torch.cat([stored, new.to(stored.dtype)], dim=2)
            index = self.kept[:, None, :, None].expand(-1, stored.size(1), -1, stored.size(3))
            stored.copy_(joined.gather(2, index))
            return joined
        if isinstance(self.columns, slice):
            stored.narrow(2, self.columns.start, new.size(2)).copy_(new)
        else:
            rows, columns = self.columns
            stored[rows, :, columns] = new.transpose(1, 2).to(stored.dtype)  # (B, T, K, D)
        return stored.narrow(2, self.seen.start, self.seen.stop - self.seen.start)


def _zeros(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    """Returns a tensor of zeros: what a mask hides is still multiplied by a weight of 0. On a CPU, but for Windows, it
    takes memory only as it is written to, in small pages: a long context costs what is used of it."""
    if device.type != "cpu" or sys.platform == "win32":
        return torch.zeros(shape, device=device, dtype=dtype)
    size = math.prod(shape) * dtype.itemsize
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANON)  # zeros that the system provides
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


class KVCache:
    """Room for ``room`` positions of ``rows`` sequences in every layer, allocated once; row r has filled
    ``lengths[r]`` of them.

    Each layer has a tensor of its own for keys and one for values, (rows, K, columns, D). In one tensor for all layers,
    a compiled step would write a layer by copying all of them: a write through a view of a layer is, to the compiler, a
    new version of the whole tensor.

    Position p lies in column p modulo the columns, in the place of one that is no longer seen. A layer with a window
    has columns for that and for `params.SLACK` positions, which a step may append and take back. Others have ``room``
    columns; rotary positions are relative, so that they may run on past them, one at a time. ``kv_heads``: this rank's,
    where ranks share the heads.
    """

    def __init__(
        self,
        config: GPTConfig,
        rows: int,
        device: torch.device,
        dtype: torch.dtype,
        room: int | None = None,
        kv_heads: int | None = None,
    ) -> None:
        self.room = config.block_size if room is None else room
        self.windows = tuple(min(window or self.room, self.room) for window in config.windows)
        self.columns = {min(w or self.room, self.room): cache_columns(w, self.room) for w in config.windows}
        shapes = [(rows, kv_heads or config.kv_heads, self.columns[w], config.head_size) for w in self.windows]
        self.keys = [_zeros(shape, device, dtype) for shape in shapes]
        self.values = [_zeros(shape, device, dtype) for shape in shapes]
        blocks = -(-max(self.columns.values()) // BLOCK)
        self.blocks = torch.arange(blocks, dtype=torch.int32, device=device)  # their numbers, for `filled_blocks`
        self.lengths = np.zeros(rows, np.int64)
        self.where: Where = slice(0, 0)  # the positions that are being computed
        self.reach = 0  # one more than the last of them
        self._spans: dict[int, _Span] = {}  # by window

    @property
    def nbytes(self) -> int:
        """Bytes of all keys and values."""
        return sum(each.nbytes for each in (*self.keys, *self.values))

    def rows(self, start: int, stop: int) -> "KVCache":
        """Rows ``start`` to ``stop`` as a cache of their own, over the same memory."""
        if (start, stop) == (0, len(self.lengths)):
            return self
        part = object.__new__(KVCache)
        part.room, part.windows, part.columns = self.room, self.windows, self.columns
        part.reach, part.where, part._spans = 0, slice(0, 0), {}
        part.keys = [keys[start:stop] for keys in self.keys]
        part.values = [values[start:stop] for values in self.values]
        part.lengths = self.lengths[start:stop]
        return part

    def place(self, T: int, counts: Sequence[int] | None = None) -> Where:
        """Chooses the columns of each row's next T positions, and returns these positions: a slice if the rows agree,
        else (B, T) of them. ``counts`` says how many of a row's T are its own; the others are padding."""
        lengths = self.lengths.tolist()
        start = lengths[0]
        self.reach = max(lengths) + T
        if lengths.count(start) == len(lengths):
            self.where = slice(start, start + T)
        else:
            self.where = upload(self.lengths[:, None] + np.arange(T), self.keys[0].device)
        ends = self.lengths + (T if counts is None else np.asarray(counts, np.int64))
        self._spans = {window: self._span(window, T, ends) for window in self.columns}
        return self.where

    def _span(self, window: int, T: int, ends: npt.NDArray[np.int64]) -> _Span:
        """Places T positions in layers of a window; ``ends`` are the rows' lengths without padding."""
        columns, device = self.columns[window], self.keys[0].device
        if isinstance(self.where, slice) and self.reach <= columns:
            start, end = self.where.start, self.where.stop
            if T == 1:
                return _Span(self.where, slice(max(0, end - window), end), None)
            if start == 0 and window >= T:
                return _Span(self.where, slice(0, end), None)
            seen = torch.arange(end, device=device)[None]
            return _Span(self.where, slice(0, end), _sees(seen[:, start:], seen, window)[0, 0])
        if window == self.room and T > 1 and self.reach > self.room:
            raise ValueError(f"{self.reach} positions at once; there is room for {self.room}")
        new = self.where  # (B, T)
        if isinstance(new, slice):
            new = torch.arange(new.start, new.stop, device=device).expand(len(self.lengths), -1)
        if columns - window >= T - 1 or self.reach <= columns:
            seen = torch.arange(min(self.reach, columns), device=device)
            if window == columns:  # a column that is not seen yet lies after the position
                mask = (seen <= new[..., None])[:, None]
            else:
                mask = _sees(new, _newest(new[:, -1:], columns)[:, : len(seen)], window)
            rows = torch.arange(len(new), device=device)[:, None]
            return _Span((rows, new % columns), slice(0, len(seen)), mask)
        # More positions than there are columns to spare: they see what was there and each other, and the last stay.
        kept = _newest(upload(ends - 1, device)[:, None], columns)  # (B, columns)
        if (self.lengths == 0).all():
            mask = _sees(new[:1], new[:1], window)[0, 0]
            return _Span(slice(0, 0), slice(0, 0), mask, kept.clamp(min=0), fresh=True)
        held = _newest(new[:, :1] - 1, columns)
        index = torch.where(kept >= new[:, :1], kept - new[:, :1] + columns, torch.arange(columns, device=device))
        return _Span(slice(0, 0), slice(0, 0), _sees(new, torch.cat([held, new], dim=1), window), index)

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Stores a layer's new keys and values, (B, K, T, D), in their places, and returns those that the new positions
        look at."""
        span = self._spans[self.windows[layer]]
        return span.append(self.keys[layer], k), span.append(self.values[layer], v)

    def mask(self, layer: int) -> Tensor | None:
        """True where a new position may see another, (…, T, seen); None where a causal mask of a square, or no mask at
        all, is the same."""
        return self._spans[self.windows[layer]].mask

    def single(self, layer: int) -> tuple[int, int, int] | None:
        """Returns the column that takes a single position of a single text, after `place`, the first column that it
        sees and the one after the last. None where columns are not in the order of positions."""
        span = self._spans[self.windows[layer]]
        if not isinstance(span.columns, slice) or span.mask is not None or span.kept is not None:
            return None
        return span.columns.start, span.seen.start, span.seen.stop

    def advance(self, T: int) -> None:
        """Counts T more positions of each row as filled, once every layer has stored them."""
        self.lengths += T

    def can_rewind(self, row: int, count: int) -> bool:
        """Whether a row's last ``count`` positions can be taken back: whether layers with a window still have what the
        positions before them see."""
        whole = all(columns >= min(self.room, int(self.lengths[row])) for columns in self.columns.values())
        return whole or count <= SLACK

    def copy(self, source: int, target: int, start: int = 0) -> None:
        """Makes row ``target`` equal to row ``source``, which it is already before position ``start``."""
        end = int(self.lengths[source])
        for each in (*self.keys, *self.values):
            overwritten = max(end, int(self.lengths[target])) + (SLACK if each.size(2) < self.room else 0)
            columns = slice(start, end) if overwritten <= each.size(2) else slice(None)
            each[target, :, columns] = each[source, :, columns]
        self.lengths[target] = end

    def swap(self, a: int, b: int) -> None:
        """Exchanges two rows."""
        filled = int(max(self.lengths[a], self.lengths[b]))  # no position of them lies in a later column
        for each in (*self.keys, *self.values):
            kept = each[a, :, :filled].clone()
            each[a, :, :filled] = each[b, :, :filled]
            each[b, :, :filled] = kept
        self.lengths[[a, b]] = self.lengths[[b, a]]


class Slots:
    """The columns of a cache for the next position of every row, in steps whose shapes never change. ``positions``,
    (rows), lie on the device. All columns are looked at; in code compiled for a GPU those blocks that have been filled.
    """

    def __init__(self, cache: KVCache, positions: Tensor) -> None:
        self.cache = cache
        self.rows = torch.arange(len(positions), device=positions.device)
        self.columns = {window: positions % columns for window, columns in cache.columns.items()}
        wide = cache.keys[0].size(3) >= 16  # the kernel that skips blocks has no narrower heads
        in_blocks = wide and positions.device.type == "cuda" and torch.compiler.is_compiling()
        seen = functools.partial(filled_blocks, cache.blocks) if in_blocks else sees_columns
        self.masks = {window: seen(positions, window, columns) for window, columns in cache.columns.items()}

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Stores a layer's new keys and values, (rows, K, 1, D), and returns all of the layer's."""
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        columns = self.columns[self.cache.windows[layer]]
        keys[self.rows, :, columns] = k[:, :, 0].to(keys.dtype)
        values[self.rows, :, columns] = v[:, :, 0].to(values.dtype)
        return keys, values

    def mask(self, layer: int) -> Any:
        """True where a row's new position sees a column, (rows, 1, 1, columns); or the blocks where it sees some."""
        return self.masks[self.cache.windows[layer]]


Cache = KVCache | Slots  # what blocks append to and look at


def sees_columns(positions: Tensor, window: int, columns: int) -> Tensor:
    """True where the newest position of each row, (B), sees a column, (B, 1, 1, columns)."""
    new = positions[:, None]
    return _sees(new, _newest(new, columns), window)


def filled_blocks(blocks: Tensor, positions: Tensor, window: int, columns: int) -> Any:
    """The blocks of columns that the newest position of each row, (B), has filled, as `flex_attention` wants them: it
    reads no others. ``blocks``: the numbers of at least as many blocks as there are, int32."""
    from torch.nn.attention.flex_attention import BlockMask

    def sees(row: Tensor, head: Tensor, query: Tensor, column: Tensor) -> Tensor:
        held = positions[row] - (positions[row] - column) % columns
        return (held > positions[row] - window) & (held >= 0)

    def sees_all(row: Tensor, head: Tensor, query: Tensor, column: Tensor) -> Tensor:
        return column <= positions[row]

    count = -(-columns // BLOCK)
    filled = (positions // BLOCK + 1).clamp(max=count).int()[:, None, None]
    return BlockMask.from_kv_blocks(
        filled,
        blocks[:count].expand(len(positions), 1, 1, -1),
        BLOCK_SIZE=BLOCK,
        mask_mod=sees if columns > window else sees_all,
        seq_lengths=(1, columns),
        compute_q_blocks=False,
    )


def _newest(last: Tensor, columns: int) -> Tensor:
    """The position that lies in each column, (B, columns), once all up to ``last``, (B, 1), are stored: the newest one
    that is congruent to the column; below 0 where there is none."""
    return last - (last - torch.arange(columns, device=last.device)) % columns


def _sees(new: Tensor, held: Tensor, window: int) -> Tensor:
    """True where a new position, (B, T), sees another, (B, S), which may be before the first: (B, 1, T, S)."""
    new, held = new[:, :, None], held[:, None, :]
    return ((held <= new) & (held > new - window) & (held >= 0))[:, None]
