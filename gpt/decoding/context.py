"""Contexts: slots for texts in one cache of keys and values, and the steps that compute their next ids."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from gpt.decoding.logits import Filters, as_int64
from gpt.decoding.token_step import Step, compiled
from gpt.decoding.weights import resident_bytes
from gpt.device import Compute, upload
from gpt.errors import UserError
from gpt.model.cache import KVCache, Placement
from gpt.model.decoder import GPT, ROPE_TABLE
from gpt.model.params import SLACK, cache_bytes
from gpt.model.quantize import QuantizedEmbedding

CACHE_SHARE = 0.25  # of the device's memory that keys and values may take
KEPT = 4  # contexts of which nobody makes use


@dataclass(eq=False)
class Slot:
    """A row of the cache, and the text whose keys and values it has; it keeps both when the text has ended, for
    prompts that begin the same."""

    at: int  # the row
    text: list[int] = field(default_factory=list)  # every id that is known
    start: int = 0  # the place in the text of the id at position 0
    length: int = 0  # positions that are computed
    written: int = 0  # positions that the row was given, also those taken back since

    @property
    def computed(self) -> int:
        """The number of the text's ids that are computed or no longer seen."""
        return self.start + self.length

    def forget(self) -> None:
        """Empties the slot."""
        self.text, self.start, self.length, self.written = [], 0, 0, 0


class Context:
    """Slots, independent of each other, in one cache; each sees as much of the end of its text as the model can.

    With absolute positions a full slot cannot move on by one: it drops all but its last half, whose keys and values are
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
        size: int | None = None,
    ) -> None:
        self.model = model
        # The tokenizer's, where the model's is filled up with ids that have no token.
        self.vocab_size = min(vocab_size or model.config.vocab_size, model.config.vocab_size)
        self.compute = compute
        self.size = min(model.config.block_size, size or model.config.block_size)  # tokens that a text sees
        room = min(self.size, room or self.size)
        _check_room(model, compute, rows, room)
        self.cache = KVCache(model.config, rows, compute.device, compute.dtype, room, model.kv_heads)
        self.slots = [Slot(at) for at in range(rows)]
        self.compiled = step  # computes steps of one position, all slots at once; None: the model does
        if step is not None:
            model.reach(max(ROPE_TABLE, 2 * self.size))  # a table that grows is compiled for again
            self.last = torch.zeros(rows, 1, dtype=torch.int64, device=compute.device)  # each slot's newest id
            self._numbers = torch.zeros(2, rows, dtype=torch.int64, device=compute.device)
            fixed = [*self.cache.keys, *self.cache.values, self.cache.blocks, self.last, self._numbers]
            table = model.get_submodule("wte")
            if isinstance(table, QuantizedEmbedding):  # parameters have fixed addresses by themselves
                fixed += [table.weight.levels, table.weight.scales]
            for each in fixed:
                torch._dynamo.mark_static_address(each)
        narrow = model.ln_f.weight.dtype == compute.dtype  # then there is nothing to cast at each product
        self._autocast = contextlib.nullcontext if narrow else compute.autocast

    # Computing

    @torch.inference_mode()
    def forward(self, work: Sequence[tuple[Slot, int]], ids: Tensor) -> Tensor:
        """Computes the next positions of some slots in one pass; ``work`` says how many of each. ``ids``, (N), are
        theirs, one slot after the other, on the device. Returns the residual stream (N, C).

        Adjacent slots attend together when they get equally many ids: few, or from the same position on.
        """
        parts: list[tuple[int, list[int], int]] = []
        for slot, count in work:
            if parts:
                first, lengths, T = parts[-1]
                if slot.at == first + len(lengths) and count == T and (T <= SLACK or lengths[0] == slot.length):
                    lengths.append(slot.length)
                    continue
            parts.append((slot.at, [slot.length], count))
        places = Placement(self.cache, parts)
        for slot, count in work:  # before the pass, which may fail halfway
            slot.written = max(slot.written, slot.length + count)
        with self._autocast():
            x = self.model.trunk(ids.view(places.shape), places)
        for slot, count in work:
            slot.length += count
        return x.flatten(0, 1)

    @torch.inference_mode()
    def next_tokens(
        self, slots: Sequence[Slot], filters: Filters | None = None, keys: Sequence[int] = (), top: int = 0
    ) -> list[Tensor]:
        """Computes the next position of some slots, whose ids are in `last`, in a compiled step. With filters the next
        ids are then in `last`, and their `scores` are returned, else logits (n, V).

        All slots are computed, so that shapes are always the same: the others write to the column after their last."""
        assert self.compiled is not None
        at = [slot.at for slot in slots]
        for slot in self.slots:
            if slot.length >= self.cache.room and slot.at not in at:  # which has no such column
                slot.forget()
            slot.written = max(slot.written, slot.length + 1)
        numbers = np.zeros((2, self.cache.rows), np.int64)
        numbers[0] = [slot.length for slot in self.slots]
        numbers[1, at[: len(keys)]] = as_int64(keys)[:, 0]
        self._numbers.copy_(upload(numbers, self.compute.device))
        self.model.reach(int(numbers[0].max()) + 1)
        with self._autocast():
            found = self.compiled(self.cache, self.last, self._numbers, self.vocab_size, filters, top)
        for slot in slots:
            slot.length += 1
        return [select(each, at) for each in found]

    @torch.inference_mode()
    def logits(self, x: Tensor) -> Tensor:
        """Computes logits (…, V) in float32 from the residual stream (…, C), for ids that have a token."""
        with self._autocast():
            return self.model.unembed(x)[..., : self.vocab_size].float()

    # Slots

    def room(self, slot: Slot) -> int:
        """Returns how many more positions fit into a slot before any is dropped."""
        return max(0, self.cache.room - slot.length)

    def shared(self, slot: Slot, prompt: Sequence[int], soon: bool = False) -> int:
        """Returns how many of a prompt's first ids are computed in a slot; ``soon``: once its text is. The prompt's
        last id is never among them, since what follows it has to be computed."""
        length = len(slot.text) if soon else slot.length
        if slot.start or slot.length > self.cache.room or len(prompt) > self.size:
            return 0
        same = min(_common(slot.text, prompt), len(prompt) - 1, length)
        written = max(slot.written, length)
        return same if self.cache.can_rewind(written, written - same) else 0

    @torch.inference_mode()
    def begin(self, slot: Slot, prompt: list[int], source: Slot, same: int) -> None:
        """Gives a slot a prompt to compute; only its last block_size ids are kept. Its first ``same`` ids are
        `shared` with slot ``source``, which may be the same one."""
        if source is not slot:
            self.cache.copy(source.at, slot.at, 0, same, source.written)
        slot.written = source.written if same else 0
        slot.text, slot.start, slot.length = prompt, max(0, len(prompt) - self.size), same

    def slide(self, slot: Slot) -> None:
        """Lets a full slot take another id: with absolute positions, its last half is to be computed again."""
        if self.model.config.positions != "rotary":
            slot.start, slot.length, slot.written = len(slot.text) - max(1, self.size // 2), 0, 0

    @torch.inference_mode()
    def copy(self, source: Slot, target: Slot) -> None:
        """Makes a slot equal to another. Columns of ids that both begin with are not copied."""
        same = 0
        if source.start == target.start:
            same = min(_common(source.text, target.text) - source.start, source.length, target.length)
        written = max(source.written, target.written)
        self.cache.copy(source.at, target.at, max(0, same), source.length, written)
        target.text, target.start, target.length = [*source.text], source.start, source.length
        target.written = written

    @torch.inference_mode()
    def clear(self, slot: Slot) -> None:
        """Empties a slot and sets its keys and values to 0. A NaN among them would reach its next text: attention
        multiplies masked values by a weight of 0."""
        self.cache.clear(slot.at, slot.written)
        slot.forget()

    @torch.inference_mode()
    def check(self, slot: Slot) -> None:
        """Clears a slot that contains NaN or infinity, after a text that ended before its first token."""
        if not self.cache.is_finite(slot.at, slot.written):
            self.clear(slot)


def select(tensor: Tensor, at: list[int]) -> Tensor:
    """Returns rows of a tensor, without a copy where they are the first ones."""
    return tensor[: len(at)] if at == [*range(len(at))] else tensor[upload(at, tensor.device)]


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
            if (context.cache.rows, context.cache.room, context.compiled) == (rows, room, step):
                return self.idle.pop(at)
        self._shrink(beside=rows * cache_bytes(self.model.config, room, self.compute.dtype.itemsize))
        return None

    def _put(self, context: Context) -> None:
        for slot in context.slots:
            slot.forget()
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


def capacity(model: GPT, compute: Compute, room: int) -> int:
    """Returns how many texts of ``room`` tokens the device has memory for: beside the weights, and in `CACHE_SHARE` of
    it."""
    most = min(CACHE_SHARE * compute.memory(), _beside_weights(model, compute))
    return int(most / cache_bytes(model.config, room, compute.dtype.itemsize))


def _beside_weights(model: GPT, compute: Compute) -> int:
    return max(0, compute.memory() - resident_bytes(model, compute))


def _check_room(model: GPT, compute: Compute, rows: int, room: int) -> None:
    """Raises `UserError` where keys and values do not fit into the device's memory beside the weights."""
    needed = rows * cache_bytes(model.config, room, compute.dtype.itemsize)
    left = _beside_weights(model, compute)
    if needed > left:
        raise UserError(
            f"the KV cache of {rows:,} sequences of {room:,} tokens takes {needed / 1e9:,.1f} GB, but the weights "
            f"leave {left / 1e9:,.1f} GB",
            "use a smaller --batch, or fewer beams or tokens",
        )


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """Returns the length of the common beginning."""
    most, at = min(len(a), len(b)), 0
    while at < most and a[at : at + 64] == b[at : at + 64]:
        at += 64
    return next((n for n in range(at, min(at + 64, most)) if a[n] != b[n]), min(at + 64, most))
