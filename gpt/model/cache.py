"""The KV cache: keys and values of earlier positions."""

import math
import mmap
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gpt.config.device import upload
from gpt.config.model import GPTConfig
from gpt.model import kernels
from gpt.model.params import WINDOW_SLACK, cache_columns

Positions = slice | Tensor  # positions shared by all rows, or (B, T) positions


@dataclass
class _Span:
    """The columns that a part of a step writes and attends to, in all layers with the same window."""

    rows: slice | None  # all rows if None
    new_columns: slice | tuple[Tensor, Tensor]  # columns to write, or rows (B, 1) and columns (B, T)
    visible_columns: slice
    mask: Tensor | None  # True where visible, (…, T, columns). None for one token or causal attention
    gather_index: Tensor | None = None  # source of each column, (B, columns), if visible columns are overwritten
    was_empty: bool = False

    def append(self, stored: Tensor, new: Tensor) -> Tensor:
        """Stores new keys or values, (B, K, T, D), and returns the visible keys or values."""
        if self.rows is not None:
            stored = stored[self.rows]
        if self.gather_index is not None:
            joined = new.to(stored.dtype) if self.was_empty else torch.cat([stored, new.to(stored.dtype)], dim=2)
            index = self.gather_index[:, None, :, None].expand(-1, stored.size(1), -1, stored.size(3))
            stored.copy_(joined.gather(2, index))
            return joined
        if isinstance(self.new_columns, slice):
            stored.narrow(2, self.new_columns.start, new.size(2)).copy_(new)
        else:
            rows, columns = self.new_columns
            stored[rows, :, columns] = new.transpose(1, 2).to(stored.dtype)  # (B, T, K, D)
        return stored.narrow(2, self.visible_columns.start, self.visible_columns.stop - self.visible_columns.start)


def _make_zeros(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    """Allocates zeros, because masked values enter attention with weight 0, and 0 · NaN is NaN. On CPUs, except on
    Windows, the system allocates pages on first write, so unused context costs no memory."""
    if device.type != "cpu" or sys.platform == "win32":
        return torch.zeros(shape, device=device, dtype=dtype)
    size = math.prod(shape) * dtype.itemsize
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANON)  # New memory is zero.
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


class KVCache:
    """Keys and values of ``rows`` sequences of up to ``max_positions`` positions.

    Each layer has its own key and value tensors, (rows, K, columns, D).

    Position p is in column p modulo the number of columns. A windowed layer has columns for its window plus
    `params.WINDOW_SLACK` positions that can be appended and rewound. Other layers have ``max_positions`` columns. With
    RoPE, positions can exceed ``max_positions`` in steps of one token.

    With ``tile``, for `gpt.decoding.native`, numbers of columns are multiples of it, keys have the shape (rows, K,
    columns / tile, D, tile), and D of the values is rounded up to a multiple.
    """

    def __init__(
        self,
        config: GPTConfig,
        rows: int,
        device: torch.device,
        dtype: torch.dtype,
        max_positions: int | None = None,
        tile: int = 1,
    ) -> None:
        self.rows, self.tile = rows, tile
        self.max_positions = config.block_size if max_positions is None else max_positions
        self.windows = tuple(min(window or self.max_positions, self.max_positions) for window in config.windows)
        self.columns = {
            min(w or self.max_positions, self.max_positions): _round_up(cache_columns(w, self.max_positions), tile)
            for w in config.windows
        }
        K, D = config.kv_heads, config.head_size
        self.keys, self.values = list[Tensor](), list[Tensor]()
        for columns in (self.columns[window] for window in self.windows):
            key_shape = (rows, K, columns, D) if tile == 1 else (rows, K, columns // tile, D, tile)
            self.keys.append(_make_zeros(key_shape, device, dtype))
            self.values.append(_make_zeros((rows, K, columns, _round_up(D, tile)), device, dtype))

    @property
    def nbytes(self) -> int:
        """Bytes of all keys and values."""
        return sum(tensor.nbytes for tensor in (*self.keys, *self.values))

    def can_rewind(self, length: int, count: int) -> bool:
        """Whether a row of ``length`` positions can drop the last ``count`` and still have a full window."""
        has_all_positions = all(columns >= min(self.max_positions, length) for columns in self.columns.values())
        return has_all_positions or count <= WINDOW_SLACK

    def copy(
        self, source: int, target: int, start: int, stop: int, written: int, origin: "KVCache | None" = None
    ) -> None:
        """Copies positions ``start`` to ``stop`` to another row, by default of the same cache. A layer has wrapped
        around if more positions were ``written`` to either row than the layer has columns. In that case, copies all its
        columns."""
        for (tensor, tile), (stored, _) in zip(self._tensors(), (origin or self)._tensors(), strict=True):
            has_wrapped = written > stored.size(2) * tile
            columns = slice(None) if has_wrapped else slice(start // tile, -(-stop // tile))
            tensor[target, :, columns] = stored[source, :, columns]

    def clear(self, row: int, written: int) -> None:
        """Zeroes the ``written`` positions of a row."""
        for tensor, tile in self._tensors():
            tensor[row, :, : -(-written // tile)] = 0

    def is_finite(self, row: int, written: int) -> bool:
        """Whether a row's keys and values are finite."""
        return all(bool(tensor[row, :, : -(-written // tile)].isfinite().all()) for tensor, tile in self._tensors())

    def _tensors(self) -> list[tuple[Tensor, int]]:
        """Returns all keys and values, and how many columns an index of axis 2 has."""
        return [*((keys, self.tile) for keys in self.keys), *((values, 1) for values in self.values)]


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


class Placement:
    """Positions of a step's tokens in a KV cache, and the columns that they attend to.

    A part (first row, lengths, T) appends T tokens to each of len(lengths) adjacent rows. ``lengths`` has the number of
    positions that each row already has. If there is only one part, ids have shape (B, T). Several parts are packed into
    one sequence, (1, N), and only attention separates them.
    """

    def __init__(self, cache: KVCache, parts: Sequence[tuple[int, Sequence[int], int]]) -> None:
        self.cache = cache
        self.end = max(max(lengths) + T for _, lengths, T in parts)  # one past the last position
        same_length = [lengths.count(lengths[0]) == len(lengths) for _, lengths, _ in parts]
        self.shape = (len(parts[0][1]), parts[0][2])
        if len(parts) == 1 and same_length[0]:
            self.positions: Positions = slice(parts[0][1][0], self.end)
        else:
            positions = [np.add.outer(np.asarray(lengths), np.arange(T)).ravel() for _, lengths, T in parts]
            self.shape = self.shape if len(parts) == 1 else (1, sum(map(len, positions)))
            self.positions = upload(np.concatenate(positions).reshape(self.shape), cache.keys[0].device)
        self._parts: list[tuple[int, tuple[int, int], dict[int, _Span]]] = []  # offset, (B, T), spans by window
        offset = 0
        for (first, lengths, T), is_uniform in zip(parts, same_length, strict=True):
            n = len(lengths)
            new: Positions = slice(lengths[0], lengths[0] + T)
            if not is_uniform and isinstance(self.positions, Tensor):
                new = self.positions.view(-1)[offset : offset + n * T].view(n, T)
            rows = None if n == cache.rows else slice(first, first + n)
            spans = {window: self._make_span(window, rows, lengths, T, new) for window in cache.columns}
            self._parts.append((offset, (n, T), spans))
            offset += n * T

    def _make_span(self, window: int, rows: slice | None, lengths: Sequence[int], T: int, new: Positions) -> _Span:
        """Makes the span of T ``new`` positions in layers with ``window``."""
        columns, device, max_positions = self.cache.columns[window], self.cache.keys[0].device, self.cache.max_positions
        max_length = max(lengths) + T
        if isinstance(new, slice) and max_length <= columns:
            start, end = new.start, new.stop
            if T == 1:
                return _Span(rows, new, slice(max(0, end - window), end), None)
            if start == 0 and window >= T:
                return _Span(rows, new, slice(0, end), None)
            column_indices = torch.arange(end, device=device)[None]
            return _Span(
                rows, new, slice(0, end), _visibility_mask(column_indices[:, start:], column_indices, window)[0, 0]
            )
        if window == max_positions and T > 1 and max_length > max_positions:
            raise ValueError(f"{max_length} tokens do not fit in a cache of {max_positions}")
        if isinstance(new, slice):
            new = torch.arange(new.start, new.stop, device=device).expand(len(lengths), -1)
        if columns - window >= T - 1 or max_length <= columns:
            column_indices = torch.arange(min(max_length, columns), device=device)
            if window == columns:  # Columns past the position are not filled yet.
                mask = (column_indices <= new[..., None])[:, None]
            else:
                mask = _visibility_mask(new, _stored_positions(new[:, -1:], columns)[:, : len(column_indices)], window)
            index = torch.arange(len(new), device=device)[:, None]
            return _Span(rows, (index, new % columns), slice(0, len(column_indices)), mask)
        # The step overwrites visible columns, so it attends to old and new positions before it stores the newest
        # positions.
        positions_after = _stored_positions(new[:, -1:], columns)  # (B, columns)
        if not any(lengths):
            mask = _visibility_mask(new[:1], new[:1], window)[0, 0]
            return _Span(rows, slice(0, 0), slice(0, 0), mask, positions_after.clamp(min=0), was_empty=True)
        positions_before = _stored_positions(new[:, :1] - 1, columns)
        index = torch.where(
            positions_after >= new[:, :1], positions_after - new[:, :1] + columns, torch.arange(columns, device=device)
        )
        mask = _visibility_mask(new, torch.cat([positions_before, new], dim=1), window)
        return _Span(rows, slice(0, 0), slice(0, 0), mask, index)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Stores a layer's new keys and values and computes attention, (B, H, T, D)."""
        if len(self._parts) == 1:
            return self._attend(self._parts[0][2], layer, q, k, v)
        tokens, outputs = [tensor.transpose(1, 2)[0] for tensor in (q, k, v)], []  # (N, H, D)
        for offset, shape, spans in self._parts:
            n = shape[0] * shape[1]
            q, k, v = (tensor[offset : offset + n].view(*shape, *tensor.shape[1:]).transpose(1, 2) for tensor in tokens)
            outputs.append(self._attend(spans, layer, q, k, v).transpose(1, 2).flatten(0, 1))
        return torch.cat(outputs)[None].transpose(1, 2)

    def _attend(self, spans: dict[int, _Span], layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        span = spans[self.cache.windows[layer]]
        k, v = span.append(self.cache.keys[layer], k), span.append(self.cache.values[layer], v)
        return kernels.attend(q, k, v, span.mask)


class OneEach:
    """A step of fixed shape that appends one token to each of some rows. ``rows`` and ``positions``, (n), are on the
    device. Attention reads the first ``columns`` columns of each layer. Unless ``is_gathered``, the rows are the first
    n, whose keys and values need no copy."""

    def __init__(self, cache: KVCache, rows: Tensor, positions: Tensor, columns: int, is_gathered: bool) -> None:
        self.cache, self.rows = cache, rows
        self.visible_rows = rows if is_gathered else slice(len(rows))
        self.new_columns = {window: positions % size for window, size in cache.columns.items()}
        # A mask per window, (n, 1, 1, columns).
        self.masks = {w: make_column_mask(positions, w, size, columns) for w, size in cache.columns.items()}

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Stores a layer's new keys and values, (n, K, 1, D), and computes attention."""
        window = self.cache.windows[layer]
        stored_pair = (self.cache.keys[layer], self.cache.values[layer])
        for stored, new in zip(stored_pair, (k, v), strict=True):
            stored[self.rows, :, self.new_columns[window]] = new[:, :, 0].to(stored.dtype)
        mask = self.masks[window]
        keys, values = (stored[:, :, : mask.size(-1)][self.visible_rows] for stored in stored_pair)
        return kernels.attend(q, keys, values, mask)


# Where a step's keys and values go. Without a cache, the numbers of the documents that positions attend to, (B, T).
Places = Placement | OneEach | Tensor


def make_column_mask(positions: Tensor, window: int, size: int, columns: int) -> Tensor:
    """Returns the mask of the columns visible to the newest position of each row, in a layer of ``size`` columns:
    (n) → (n, 1, 1, columns), or (n, 1, 1, size) if that is less."""
    new = positions[:, None]
    return _visibility_mask(new, _stored_positions(new, size, min(size, columns)), window)


def _stored_positions(last: Tensor, size: int, columns: int | None = None) -> Tensor:
    """Returns the position that each of ``size`` columns holds, (B, size), or that of the first ``columns``. For empty
    columns, the number is negative. ``last``, (B, 1), has the newest position of each row."""
    return last - (last - torch.arange(columns or size, device=last.device)) % size


def _visibility_mask(new: Tensor, stored: Tensor, window: int) -> Tensor:
    """Returns the mask (B, 1, T, S) of ``stored`` positions (B, S) that ``new`` positions (B, T) attend to. Negative
    positions are empty columns."""
    new, stored = new[:, :, None], stored[:, None, :]
    return ((stored <= new) & (stored > new - window) & (stored >= 0))[:, None]
