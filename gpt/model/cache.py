"""Keys and values of the positions seen so far, so that a step computes its own positions alone."""

import numpy as np
import torch
from torch import Tensor

from gpt.config import GPTConfig

Where = slice | Tensor  # positions that all rows share, or (B, T) of them


class KVCache:
    """Room for ``room`` positions of ``rows`` sequences in every layer, allocated once; row r has filled
    ``lengths[r]`` of them, and its position p lies in column p.

    Each layer has a tensor of its own for keys and one for values, (rows, H, room, D). In one tensor for all layers, a
    compiled step would write a layer by copying all of them: a write through a view of a layer is, to the compiler, a
    new version of the whole tensor.

    Rotary positions are relative, so that they may run on past the room: position p then lies in column p modulo the
    room, in the place of the one that is no longer seen. ``kv_heads``: this rank's, where ranks share the heads.
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
        shape = (rows, kv_heads or config.kv_heads, self.room, config.head_size)
        # Zeros, not whatever was there: what a mask hides is still multiplied by a weight of 0.
        self.keys = [torch.zeros(shape, device=device, dtype=dtype) for _ in range(config.n_layer)]
        self.values = [torch.zeros(shape, device=device, dtype=dtype) for _ in range(config.n_layer)]
        self.lengths = np.zeros(rows, np.int64)
        self.fixed = False  # whether steps of one position look at all columns: the same shapes every time
        self.where: Where = slice(0, 0)  # the positions that are being computed
        self.reach = 0  # one more than the last of them
        self._end = 0  # columns that are looked at
        self._columns: tuple[Tensor, Tensor] | None = None  # where not a slice: the rows (B, 1) and columns (B, T)
        self._mask: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all keys and values."""
        return sum(each.nbytes for each in (*self.keys, *self.values))

    def rows(self, start: int, stop: int) -> "KVCache":
        """Rows ``start`` to ``stop`` as a cache of their own, over the same memory."""
        part = object.__new__(KVCache)
        part.room, part.reach, part.where, part._columns, part._mask = self.room, 0, slice(0, 0), None, None
        part.fixed, part._end = False, 0
        part.keys = [keys[start:stop] for keys in self.keys]
        part.values = [values[start:stop] for values in self.values]
        part.lengths = self.lengths[start:stop]
        return part

    def place(self, T: int) -> Where:
        """Chooses the columns of each row's next T positions, and returns these positions: a slice if the rows agree,
        else (B, T) of them."""
        start = int(self.lengths[0])
        self.reach = int(self.lengths.max()) + T
        self._end = self.room if self.fixed and T == 1 else min(self.reach, self.room)
        if self.reach <= self._end and not (self.fixed and T == 1) and (self.lengths == start).all():
            self.where, self._columns = slice(start, start + T), None
            self._mask = None
            if T > 1 and start > 0:
                seen = torch.arange(start + T, device=self.keys[0].device)
                self._mask = seen <= seen[start:, None]  # (T, start + T)
            return self.where
        if T > 1 and self.reach > self.room:
            raise ValueError(f"{self.reach} positions at once; there is room for {self.room}")
        device = self.keys[0].device
        positions = torch.from_numpy(self.lengths)[:, None] + torch.arange(T)  # (B, T)
        self.where = positions = positions.to(device)
        self._columns = torch.arange(len(self.lengths), device=device)[:, None], positions % self.room
        seen = torch.arange(self._end, device=device)
        self._mask = (seen <= positions[..., None])[:, None]  # (B, 1, T, seen)
        return self.where

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Stores a layer's new keys and values, (B, H, T, C/H), in their places, and returns all of them so far."""
        keys, values = self.keys[layer], self.values[layer]
        if self._columns is None:
            keys[:, :, self.where] = k
            values[:, :, self.where] = v
        else:
            rows, columns = self._columns
            keys[rows, :, columns] = k.transpose(1, 2).to(keys.dtype)  # (B, T, H, D)
            values[rows, :, columns] = v.transpose(1, 2).to(values.dtype)
        return keys[:, :, : self._end], values[:, :, : self._end]

    def mask(self) -> Tensor | None:
        """True where a new position may see another, (…, T, seen); None where a causal mask of a square, or no mask at
        all, is the same."""
        return self._mask

    def advance(self, T: int) -> None:
        """Counts T more positions of each row as filled, once every layer has stored them."""
        self.lengths += T

    def copy(self, source: int, target: int, start: int = 0) -> None:
        """Makes row ``target`` equal to row ``source``, which it is already before position ``start``."""
        end = int(self.lengths[source])
        columns = slice(0, self.room) if end > self.room else slice(start, end)
        for each in (*self.keys, *self.values):
            each[target, :, columns] = each[source, :, columns]
        self.lengths[target] = end
