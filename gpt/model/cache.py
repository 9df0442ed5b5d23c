"""Keys and values of the positions seen so far, so that a step computes its own positions alone."""

import functools
import math
import mmap
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpt.config import GPTConfig
from gpt.device import upload
from gpt.model import kernels
from gpt.model.params import SLACK, cache_columns

BLOCK = 128  # columns that a GPU's attention for one query reads together
Where = slice | Tensor  # positions that all rows share, or (B, T) of them


@dataclass
class _Span:
    """The columns of some rows of a step in layers of one window: those that take the new positions, and those that
    these attend to."""

    rows: slice | None  # None: every row of the cache
    columns: slice | tuple[Tensor, Tensor]  # that take the new ones: of all rows, or rows (B, 1) and columns (B, T)
    seen: slice  # columns that are looked at
    mask: Tensor | None  # True where a new position sees a column, (…, T, seen); None: all, or a causal square
    kept: Tensor | None = None  # of more positions than there are columns: which stay, (B, columns)
    fresh: bool = False  # then: whether there were none before

    def append(self, stored: Tensor, new: Tensor) -> Tensor:
        """Stores new keys or values, (B, K, T, D), and returns those that the new positions look at."""
        if self.rows is not None:
            stored = stored[self.rows]
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
    """Keys and values of ``rows`` sequences with room for ``room`` positions each, in every layer, allocated once.

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
        self.rows = rows
        self.room = config.block_size if room is None else room
        self.windows = tuple(min(window or self.room, self.room) for window in config.windows)
        self.columns = {min(w or self.room, self.room): cache_columns(w, self.room) for w in config.windows}
        shapes = [(rows, kv_heads or config.kv_heads, self.columns[w], config.head_size) for w in self.windows]
        self.keys = [_zeros(shape, device, dtype) for shape in shapes]
        self.values = [_zeros(shape, device, dtype) for shape in shapes]
        blocks = -(-max(self.columns.values()) // BLOCK)
        self.blocks = torch.arange(blocks, dtype=torch.int32, device=device)  # their numbers, for `filled_blocks`

    @property
    def nbytes(self) -> int:
        """Bytes of all keys and values."""
        return sum(each.nbytes for each in (*self.keys, *self.values))

    def can_rewind(self, length: int, count: int) -> bool:
        """Whether the last ``count`` of a row's ``length`` positions can be taken back: whether layers with a window
        still have what the positions before them see."""
        whole = all(columns >= min(self.room, length) for columns in self.columns.values())
        return whole or count <= SLACK

    def copy(self, source: int, target: int, start: int, stop: int, written: int) -> None:
        """Copies positions ``start`` to ``stop`` of row ``source`` to row ``target``. ``written``: how many positions
        either row has ever been given; where those have outgrown a layer's columns, all columns are copied."""
        for each in (*self.keys, *self.values):
            columns = slice(start, stop) if written <= each.size(2) else slice(None)
            each[target, :, columns] = each[source, :, columns]

    def clear(self, row: int, written: int) -> None:
        """Sets a row's keys and values to 0; ``written``: how many positions it was given."""
        for each in (*self.keys, *self.values):
            each[row, :, :written] = 0

    def is_finite(self, row: int, written: int) -> bool:
        """Whether a row's keys and values are finite numbers."""
        return all(bool(each[row, :, :written].isfinite().all()) for each in (*self.keys, *self.values))


class Placement:
    """Where the tokens of a step lie in a cache, and what they attend to.

    Each of ``parts`` is (first row, lengths, T): adjacent rows that have so many positions and get T more. The ids of
    one part are (B, T); those of several are packed, (1, N), and only attention goes by part.
    """

    def __init__(self, cache: KVCache, parts: Sequence[tuple[int, Sequence[int], int]]) -> None:
        self.cache = cache
        self.reach = max(max(lengths) + T for _, lengths, T in parts)  # one more than the last position
        equal = [lengths.count(lengths[0]) == len(lengths) for _, lengths, _ in parts]
        self.shape = (len(parts[0][1]), parts[0][2])
        if len(parts) == 1 and equal[0]:
            self.where: Where = slice(parts[0][1][0], self.reach)
        else:
            every = [np.add.outer(np.asarray(lengths), np.arange(T)).ravel() for _, lengths, T in parts]
            self.shape = self.shape if len(parts) == 1 else (1, sum(map(len, every)))
            self.where = upload(np.concatenate(every).reshape(self.shape), cache.keys[0].device)
        self._parts: list[tuple[int, tuple[int, int], dict[int, _Span]]] = []  # first token, (B, T), spans by window
        at = 0
        for (first, lengths, T), same in zip(parts, equal, strict=True):
            n = len(lengths)
            new: Where = slice(lengths[0], lengths[0] + T)
            if not same and isinstance(self.where, Tensor):
                new = self.where.view(-1)[at : at + n * T].view(n, T)
            rows = None if n == cache.rows else slice(first, first + n)
            spans = {window: self._span(window, rows, lengths, T, new) for window in cache.columns}
            self._parts.append((at, (n, T), spans))
            at += n * T

    def _span(self, window: int, rows: slice | None, lengths: Sequence[int], T: int, new: Where) -> _Span:
        """Places T positions ``new`` of rows in layers of a window."""
        columns, device, room = self.cache.columns[window], self.cache.keys[0].device, self.cache.room
        reach = max(lengths) + T
        if isinstance(new, slice) and reach <= columns:
            start, end = new.start, new.stop
            if T == 1:
                return _Span(rows, new, slice(max(0, end - window), end), None)
            if start == 0 and window >= T:
                return _Span(rows, new, slice(0, end), None)
            seen = torch.arange(end, device=device)[None]
            return _Span(rows, new, slice(0, end), _sees(seen[:, start:], seen, window)[0, 0])
        if window == room and T > 1 and reach > room:
            raise ValueError(f"{reach} tokens do not fit in a cache of {room}")
        if isinstance(new, slice):
            new = torch.arange(new.start, new.stop, device=device).expand(len(lengths), -1)
        if columns - window >= T - 1 or reach <= columns:
            seen = torch.arange(min(reach, columns), device=device)
            if window == columns:  # a column that is not seen yet lies after the position
                mask = (seen <= new[..., None])[:, None]
            else:
                mask = _sees(new, _newest(new[:, -1:], columns)[:, : len(seen)], window)
            index = torch.arange(len(new), device=device)[:, None]
            return _Span(rows, (index, new % columns), slice(0, len(seen)), mask)
        # More positions than there are columns to spare: they see what was there and each other, and the last stay.
        kept = _newest(new[:, -1:], columns)  # (B, columns)
        if not any(lengths):
            mask = _sees(new[:1], new[:1], window)[0, 0]
            return _Span(rows, slice(0, 0), slice(0, 0), mask, kept.clamp(min=0), fresh=True)
        held = _newest(new[:, :1] - 1, columns)
        index = torch.where(kept >= new[:, :1], kept - new[:, :1] + columns, torch.arange(columns, device=device))
        mask = _sees(new, torch.cat([held, new], dim=1), window)
        return _Span(rows, slice(0, 0), slice(0, 0), mask, index)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, narrow: torch.dtype | None = None) -> Tensor:
        """Stores a layer's new keys and values, and returns `kernels.attend` of the new positions, (B, H, T, D).
        ``narrow``: the dtype in which many positions attend, where it is another."""
        if len(self._parts) == 1:
            return self._attend(self._parts[0][2], layer, q, k, v, narrow)
        tokens, found = [each.transpose(1, 2)[0] for each in (q, k, v)], []  # (N, H, D)
        for at, shape, spans in self._parts:
            n = shape[0] * shape[1]
            q, k, v = (each[at : at + n].view(*shape, *each.shape[1:]).transpose(1, 2) for each in tokens)
            found.append(self._attend(spans, layer, q, k, v, narrow).transpose(1, 2).flatten(0, 1))
        return torch.cat(found)[None].transpose(1, 2)

    def _attend(
        self, spans: dict[int, _Span], layer: int, q: Tensor, k: Tensor, v: Tensor, narrow: torch.dtype | None
    ) -> Tensor:
        span = spans[self.cache.windows[layer]]
        k, v = span.append(self.cache.keys[layer], k), span.append(self.cache.values[layer], v)
        if narrow is not None and span.mask is None and q.size(2) >= kernels.PLAIN_QUERIES:
            return kernels.attend(q.to(narrow), k.to(narrow), v.to(narrow), None).to(q.dtype)
        return kernels.attend(q, k, v, span.mask)

    def single(self, layer: int) -> tuple[Tensor, Tensor, tuple[int, int, int]] | None:
        """Of a single position of a single text: its row's keys and values, (K, columns, D), and the column that takes
        it, the first column that it sees and the one after the last. None where columns are not in the order of
        positions."""
        span = self._parts[0][2][self.cache.windows[layer]]
        if not isinstance(span.columns, slice) or span.mask is not None or span.kept is not None:
            return None
        row = 0 if span.rows is None else span.rows.start
        place = (span.columns.start, span.seen.start, span.seen.stop)
        return self.cache.keys[layer][row], self.cache.values[layer][row], place


class EveryRow:
    """The place of the next position of every row of a cache, in steps whose shapes never change. ``positions``,
    (rows), lie on the device. All columns are looked at; in code compiled for a GPU those blocks that have been filled.
    """

    def __init__(self, cache: KVCache, positions: Tensor) -> None:
        self.cache = cache
        self.rows = torch.arange(len(positions), device=positions.device)
        self.columns = {window: positions % columns for window, columns in cache.columns.items()}
        wide = cache.keys[0].size(3) >= 16  # the kernel that skips blocks has no narrower heads
        in_blocks = wide and positions.device.type == "cuda" and torch.compiler.is_compiling()
        seen = functools.partial(filled_blocks, cache.blocks) if in_blocks else sees_columns
        # True where a row's new position sees a column, (rows, 1, 1, columns); or the blocks where it sees some.
        self.masks: dict[int, Any] = {w: seen(positions, w, columns) for w, columns in cache.columns.items()}

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, narrow: torch.dtype | None = None) -> Tensor:
        """Stores a layer's new keys and values, (rows, K, 1, D), and returns `kernels.attend` of the new positions."""
        keys, values, window = self.cache.keys[layer], self.cache.values[layer], self.cache.windows[layer]
        keys[self.rows, :, self.columns[window]] = k[:, :, 0].to(keys.dtype)
        values[self.rows, :, self.columns[window]] = v[:, :, 0].to(values.dtype)
        return kernels.attend(q, keys, values, self.masks[window])


Places = Placement | EveryRow  # where blocks put keys and values


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
