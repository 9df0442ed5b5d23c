"""What the next ids are predicted from: rows of ids, and the cache of their keys and values."""

import contextlib
from collections.abc import Sequence

import torch
from torch import Tensor

from gpt.decoding.weights import Step
from gpt.device import Compute
from gpt.errors import UserError
from gpt.model.cache import KVCache
from gpt.model.decoder import GPT
from gpt.model.params import cache_bytes


class Context:
    """Rows of ids, each by itself, with one cache that holds as much of their ends as the model can see.

    Where positions are absolute, a full context cannot move by one: it drops all but its last half and is computed
    anew, once every block_size / 2 tokens, which costs about as much as reading a prompt of that length. Rotary
    positions are relative: the window moves on by one and nothing is computed anew.
    """

    def __init__(
        self, model: GPT, compute: Compute, rows: int = 1, room: int | None = None, step: Step | None = None
    ) -> None:
        self.model = model
        self.compute = compute
        self.size = model.config.block_size
        room = min(self.size, room or self.size)
        _check_room(model, compute, rows, room)
        self.cache = KVCache(model.config, rows, compute.device, compute.dtype, room, model.kv_heads)
        self.compiled = step  # computes steps of one position; None: as written
        if step is not None:
            self.cache.fixed = True
            for each in (*self.cache.keys, *self.cache.values):
                torch._dynamo.mark_static_address(each)
        narrow = model.wte.weight.dtype == compute.dtype  # then there is nothing to cast at each product
        self._autocast = contextlib.nullcontext if narrow else compute.autocast
        self.ids: list[list[int]] = [[] for _ in range(rows)]  # all of them, also what is no longer seen
        self.dropped = [0] * rows  # how many of a row's first ids are no longer seen

    @property
    def rows(self) -> int:
        """How many rows there is room for."""
        return len(self.ids)

    @torch.inference_mode()
    def fill(self, first: int, prompts: Sequence[Sequence[int]]) -> Tensor:
        """Begins rows ``first``, ``first + 1`` … with prompts of one id at least, of which as much as can be seen is
        kept. Returns the residual stream (n, T, C) of what is kept, padded at its end."""
        for row, prompt in enumerate(prompts, first):
            self.ids[row] = list(prompt)
            self.dropped[row] = max(0, len(prompt) - self.size)
        kept = [ids[drop:] for ids, drop in zip(self.ids[first:], self.dropped[first:], strict=True)][: len(prompts)]
        T = max(map(len, kept))
        # What stands in the padding comes after a row's last id, so that the row doesn't see it.
        padded = [ids + [0] * (T - len(ids)) for ids in kept]
        part = self.cache.rows(first, first + len(prompts))
        part.lengths[:] = 0
        x = self._trunk(torch.tensor(padded, device=self.compute.device), part)
        part.lengths[:] = [len(ids) for ids in kept]
        return x

    @torch.inference_mode()
    def step(self, ids: Sequence[Sequence[int]]) -> Tensor:
        """Takes in T more ids of each of the first n rows, (n, T), and returns the residual stream (n, T, C)."""
        for row, new in enumerate(ids):
            if self.cache.lengths[row] + len(new) > self.size:
                self._slide(row, len(new))
            self.ids[row] += new
        if self.compiled is not None and len(ids[0]) == 1:
            return self._fixed(ids)
        return self._trunk(torch.tensor(ids, device=self.compute.device), self.cache.rows(0, len(ids)))

    @torch.inference_mode()
    def logits(self, x: Tensor) -> Tensor:
        """The residual stream (…, C) → logits (…, V) in float32."""
        with self._autocast():
            return self.model.unembed(x).float()

    def room(self, row: int) -> int:
        """How many more ids the row takes before anything is dropped."""
        return max(0, self.cache.room - int(self.cache.lengths[row]))

    def rewind(self, row: int, count: int) -> None:
        """Takes back the row's last ``count`` ids."""
        if count:
            del self.ids[row][-count:]
            self.cache.lengths[row] -= count

    @torch.inference_mode()
    def copy(self, source: int, target: int) -> None:
        """Makes row ``target`` equal to row ``source``. What both begin with is not copied."""
        same = 0
        if self.dropped[source] == self.dropped[target]:
            same = max(0, _common(self.ids[source], self.ids[target]) - self.dropped[source])
        self.cache.copy(source, target, same)
        self.ids[target] = list(self.ids[source])
        self.dropped[target] = self.dropped[source]

    def forget(self, row: int) -> None:
        """Empties a row."""
        self.ids[row], self.dropped[row] = [], 0

    @torch.inference_mode()
    def clear(self, row: int) -> None:
        """Empties a row and sets its keys and values to 0: a NaN among them would outlast the row's ids, since what a
        mask hides is multiplied by a weight of 0."""
        self.forget(row)
        for each in (*self.cache.keys, *self.cache.values):
            each[row] = 0

    def _slide(self, row: int, new: int) -> None:
        if self.model.config.positions == "rotary":
            self.dropped[row] = len(self.ids[row]) + new - self.size
            return
        kept = max(0, max(1, self.size // 2) - new)
        self.dropped[row] = len(self.ids[row]) - kept
        part = self.cache.rows(row, row + 1)
        part.lengths[:] = 0
        if kept:
            self._trunk(torch.tensor([self.ids[row][-kept:]], device=self.compute.device), part)

    def _fixed(self, ids: Sequence[Sequence[int]]) -> Tensor:
        """A step of all rows, of which those after the first n are idle, so that shapes are the same every time."""
        assert self.compiled is not None
        n = len(ids)
        self.cache.lengths[n:] = 0
        every = torch.tensor([*ids, *[[0]] * (self.rows - n)], device=self.compute.device)
        with self._autocast():
            x = self.compiled(*self.model.embed(every, self.cache), self.cache)
        self.cache.lengths[:n] += 1
        return x[:n]

    def _trunk(self, ids: Tensor, cache: KVCache) -> Tensor:
        with self._autocast():
            return self.model.trunk(ids, cache)


def _check_room(model: GPT, compute: Compute, rows: int, room: int) -> None:
    """Raises `UserError` where the device cannot hold so many rows."""
    needed = cache_bytes(model.config, rows * room, compute.dtype.itemsize)
    if needed > compute.memory():
        raise UserError(
            f"keys and values of {rows:,} texts of {room:,} tokens take {needed / 1e9:,.1f} GB, and there are "
            f"{compute.memory() / 1e9:,.1f} GB",
            "take a smaller --batch, or fewer beams or tokens",
        )


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """How many ids both begin with."""
    return next((at for at, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
