"""Contexts: rows of ids from which next ids are predicted, with the cache of their keys and values."""

import contextlib
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from gpt.decoding.logits import Filters, as_int64
from gpt.decoding.token_step import Step, compiled
from gpt.decoding.weights import weight_bytes
from gpt.device import Compute, upload
from gpt.errors import UserError
from gpt.model.cache import KVCache
from gpt.model.decoder import GPT, ROPE_TABLE
from gpt.model.params import cache_bytes
from gpt.model.quantize import QuantizedEmbedding

CACHE_SHARE = 0.25  # of the device's memory that keys and values may take
KEPT = 4  # contexts of which nobody makes use


class Context:
    """Rows of ids, independent of each other, with one cache for as much of their ends as the model can see.

    With absolute positions a full row cannot move on by one: it drops all but its last half, whose keys and values are
    computed again, once every block_size / 2 tokens, at about the cost of a prompt of that length. With rotary
    positions, which are relative, the window moves on by one and nothing is computed again.
    """

    def __init__(
        self,
        model: GPT,
        compute: Compute,
        rows: int = 1,
        room: int | None = None,
        step: Step | None = None,
        vocab_size: int | None = None,
    ) -> None:
        self.model = model
        # The tokenizer's, where the model's is filled up with ids that have no token.
        self.vocab_size = min(vocab_size or model.config.vocab_size, model.config.vocab_size)
        self.compute = compute
        self.size = model.config.block_size
        room = min(self.size, room or self.size)
        _check_room(model, compute, rows, room)
        self.cache = KVCache(model.config, rows, compute.device, compute.dtype, room, model.kv_heads)
        self.compiled = step  # computes steps of one position, all rows at once; None: the model does
        if step is not None:
            model.reach(max(ROPE_TABLE, 2 * self.size))  # a table that grows is compiled for again
            self.last = torch.zeros(rows, 1, dtype=torch.int64, device=compute.device)  # each row's newest id
            self._numbers = torch.zeros(2, rows, dtype=torch.int64, device=compute.device)
            fixed = [*self.cache.keys, *self.cache.values, self.cache.blocks, self.last, self._numbers]
            table = model.get_submodule("wte")
            if isinstance(table, QuantizedEmbedding):  # parameters have fixed addresses by themselves
                fixed += [table.weight.levels, table.weight.scales]
            for each in fixed:
                torch._dynamo.mark_static_address(each)
        narrow = model.ln_f.weight.dtype == compute.dtype  # then there is nothing to cast at each product
        self._autocast = contextlib.nullcontext if narrow else compute.autocast
        self.ids: list[list[int]] = [[] for _ in range(rows)]  # all ids of a row, also those no longer seen
        self.dropped = [0] * rows  # how many of a row's first ids are no longer seen

    @property
    def rows(self) -> int:
        """The number of rows."""
        return len(self.ids)

    @torch.inference_mode()
    def fill(self, first: int, prompts: Sequence[Sequence[int]]) -> Tensor:
        """Fills rows ``first``, ``first + 1`` … with prompts of one id at least, of which the last block_size ids are
        kept. Returns the residual stream (n, T, C) of the kept ids, padded at the end."""
        for row, prompt in enumerate(prompts, first):
            self.ids[row] = list(prompt)
            self.dropped[row] = max(0, len(prompt) - self.size)
        kept = [ids[drop:] for ids, drop in zip(self.ids[first:], self.dropped[first:], strict=True)][: len(prompts)]
        T = max(map(len, kept))
        # Padding comes after a row's last id, so the row does not see it.
        padded = [ids + [0] * (T - len(ids)) for ids in kept]
        part = self.cache.rows(first, first + len(prompts))
        part.lengths[:] = 0
        x = self._trunk(upload(padded, self.compute.device), part, [len(ids) for ids in kept])
        part.lengths[:] = [len(ids) for ids in kept]
        return x

    @torch.inference_mode()
    def begin(self, row: int, prompt: Sequence[int], source: int | None = None, same: int = 0) -> None:
        """Makes a row ready to `read` a prompt, of which the last block_size ids are kept: it is empty, or begins with
        the first ``same`` ids of row ``source``, which are the prompt's too (`reusable`)."""
        if source is None:
            self.dropped[row] = max(0, len(prompt) - self.size)
        elif source != row:
            self.cache.copy(source, row)
            self.dropped[row] = 0
        self.ids[row] = list(prompt[: self.dropped[row] + same])
        self.cache.lengths[row] = same

    @torch.inference_mode()
    def read(self, row: int, ids: Sequence[int]) -> Tensor:
        """Appends ids to one row that has room for them. Returns their residual stream (T, C)."""
        self.ids[row] += ids
        return self._trunk(upload([ids], self.compute.device), self.cache.rows(row, row + 1))[0]

    def reusable(self, prompt: Sequence[int]) -> tuple[int | None, int]:
        """Returns the row whose keys and values serve the longest beginning of a prompt, and the length of that. The
        prompt's last id is never part of it, since what follows it has to be computed."""
        best: tuple[int | None, int] = (None, 0)
        if len(prompt) > self.size:
            return best
        for row, ids in enumerate(self.ids):
            same = 0 if self.dropped[row] else min(_common(ids, prompt), len(prompt) - 1)
            if same > best[1] and self.cache.can_rewind(row, int(self.cache.lengths[row]) - same):
                best = row, same
        return best

    @torch.inference_mode()
    def step(self, ids: Sequence[Sequence[int]] | Tensor) -> Tensor:
        """Appends T ids to each of the first n rows, (n, T). Returns their residual stream (n, T, C)."""
        ids = self._append(ids)
        return self._trunk(ids, self.cache.rows(0, len(ids)))

    def _append(self, ids: Sequence[Sequence[int]] | Tensor) -> Tensor:
        """Appends ids to rows and returns them on the device.

        Those in a tensor, which lies there, may be unknown to the host as yet: rows must have room for them, and
        whoever reads them appends them to the rows' `ids`."""
        if isinstance(ids, Tensor):
            return ids
        for row, new in enumerate(ids):
            if self.cache.lengths[row] + len(new) > self.size:
                self._slide(row, len(new))
            self.ids[row] += new
        return upload(ids, self.compute.device)

    @torch.inference_mode()
    def next_tokens(
        self,
        ids: Sequence[Sequence[int]] | Tensor,
        filters: Filters | None = None,
        keys: Sequence[int] = (),
        top: int = 0,
    ) -> list[Tensor]:
        """Appends an id to each of the first n rows, (n, 1), in a compiled step. With filters the next ids are in
        `last`, and their `scores` are returned, else logits (n, V).

        All rows are computed, of which those after the first n are idle, so that shapes are always the same."""
        assert self.compiled is not None
        ids, n, lengths = self._append(ids), len(ids), self.cache.lengths
        for row in range(n, self.rows):  # An idle row gets an id after its last, where it has room for one.
            if lengths[row] >= self.cache.room:
                self.forget(row)
                lengths[row] = 0
        if ids is not self.last:
            self.last[:n] = ids
        numbers = np.zeros((2, self.rows), np.int64)
        numbers[0] = lengths
        numbers[1, : len(keys)] = as_int64(keys)[:, 0]
        self._numbers.copy_(upload(numbers, self.compute.device))
        self.model.reach(int(lengths.max()) + 1)
        with self._autocast():
            found = self.compiled(self.cache, self.last, self._numbers, self.vocab_size, filters, top)
        lengths[:n] += 1
        return [each[:n] for each in found]

    @torch.inference_mode()
    def logits(self, x: Tensor) -> Tensor:
        """Computes logits (…, V) in float32 from the residual stream (…, C), for ids that have a token."""
        with self._autocast():
            return self.model.unembed(x)[..., : self.vocab_size].float()

    def room(self, row: int) -> int:
        """Returns how many more ids fit into the row before any is dropped."""
        return max(0, self.cache.room - int(self.cache.lengths[row]))

    def rewind(self, row: int, count: int) -> None:
        """Removes the row's last ``count`` ids."""
        if count:
            del self.ids[row][-count:]
            self.cache.lengths[row] -= count

    @torch.inference_mode()
    def copy(self, source: int, target: int) -> None:
        """Makes row ``target`` equal to row ``source``. Columns of ids that both begin with are not copied."""
        same = 0
        if self.dropped[source] == self.dropped[target]:
            same = max(0, _common(self.ids[source], self.ids[target]) - self.dropped[source])
        self.cache.copy(source, target, same)
        self.ids[target] = list(self.ids[source])
        self.dropped[target] = self.dropped[source]

    @torch.inference_mode()
    def swap(self, a: int, b: int) -> None:
        """Exchanges two rows."""
        if a != b:
            self.cache.swap(a, b)
            self.ids[a], self.ids[b] = self.ids[b], self.ids[a]
            self.dropped[a], self.dropped[b] = self.dropped[b], self.dropped[a]

    def forget(self, row: int) -> None:
        """Forgets a row's ids, which are no longer `reusable`; its length and cache stay until the next fill."""
        self.ids[row], self.dropped[row] = [], 0

    @torch.inference_mode()
    def clear(self, row: int) -> None:
        """Empties a row and sets its keys and values to 0. A NaN among them would reach the row's next ids: attention
        multiplies masked values by a weight of 0."""
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
            self._trunk(upload([self.ids[row][-kept:]], self.compute.device), part)

    def _trunk(self, ids: Tensor, cache: KVCache, counts: Sequence[int] | None = None) -> Tensor:
        with self._autocast():
            return self.model.trunk(ids, cache, counts)


class ContextPool:
    """The contexts of one model. Idle ones are kept for later calls with the same rows and room: the `KEPT` most
    recently used, as far as they fit into `CACHE_SHARE` of the device's memory beside a new one.

    A CUDA graph reads and writes at fixed addresses, so a context's graphs are good as long as it lives. All contexts
    share one compiled step, which compiles each shape once. torch bounds the number of shapes (``recompile_limit``) and
    of graphs (``cudagraph_unexpected_rerecord_limit``); past it steps are computed as written.
    """

    def __init__(
        self,
        model: GPT,
        compute: Compute,
        note: Callable[[str], None] = lambda text: None,
        vocab_size: int | None = None,
    ) -> None:
        self.model, self.compute, self.note, self.vocab_size = model, compute, note, vocab_size
        self.idle: list[Context] = []  # the most recently used is the last
        self._step: tuple[Step | None] | None = None  # the compiled step, if it has been asked for

    @contextlib.contextmanager
    def lease(self, rows: int, room: int, compile: bool = False) -> Iterator[Context]:
        """Lends an empty context of ``rows`` rows with ``room`` positions each. It comes back at the end, but not after
        an error, since it may hold NaN or stand in the middle of a step. Raises `UserError` where it does not fit into
        the device's memory."""
        step = self._compiled() if compile else None
        context = self._take(rows, room, step)
        context = context or Context(self.model, self.compute, rows, room, step, self.vocab_size)
        try:
            yield context
        except GeneratorExit:  # nobody wants the rest
            self._put(context)
            raise
        self._put(context)

    def _take(self, rows: int, room: int, step: Step | None) -> Context | None:
        """Returns the idle context of this shape. Where there is none, frees memory for a new one."""
        for at, context in enumerate(self.idle):
            if (context.rows, context.cache.room, context.compiled) == (rows, room, step):
                return self.idle.pop(at)
        self._shrink(beside=rows * cache_bytes(self.model.config, room, self.compute.dtype.itemsize))
        return None

    def _put(self, context: Context) -> None:
        for row in range(context.rows):
            context.forget(row)
        self.idle.append(context)
        self._shrink()

    def _shrink(self, beside: int = 0) -> None:
        """Frees the least recently used contexts until the others are few enough and fit beside so many bytes."""
        most = CACHE_SHARE * self.compute.memory() - beside
        while self.idle and (len(self.idle) > KEPT or sum(each.cache.nbytes for each in self.idle) > most):
            self.idle.pop(0)

    def _compiled(self) -> Step | None:
        if self._step is None:
            self._step = (compiled(self.model, self.compute, self.note),)
        return self._step[0]


def _check_room(model: GPT, compute: Compute, rows: int, room: int) -> None:
    """Raises `UserError` where keys and values do not fit into the device's memory beside the weights."""
    needed = rows * cache_bytes(model.config, room, compute.dtype.itemsize)
    left = max(0, compute.memory() - weight_bytes(model, compute))
    if needed > left:
        raise UserError(
            f"keys and values of {rows:,} texts of {room:,} tokens take {needed / 1e9:,.1f} GB, and beside the weights "
            f"there are {left / 1e9:,.1f} GB",
            "take a smaller --batch, or fewer beams or tokens",
        )


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """Returns the length of the common beginning."""
    return next((at for at, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
