"""Contexts: a KV cache with a slot per sequence, and the steps that compute new positions."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gpt.config.device import Compute, upload
from gpt.decoding.native import TILE, Decoder, is_packed
from gpt.decoding.token_step import TokenStep
from gpt.decoding.weights import resident_bytes
from gpt.model.cache import KVCache, Placement
from gpt.model.decoder import GPT
from gpt.model.params import WINDOW_SLACK, cache_bytes
from gpt.system.errors import UserError

CACHE_SHARE = 0.25  # Maximum share of the device's memory for keys and values.
MAX_IDLE_CONTEXTS = 4  # Maximum number of idle contexts.


@dataclass(eq=False)
class Slot:
    """A row of the KV cache and its sequence. A freed slot keeps its contents for prefix reuse."""

    row: int  # Row of the cache.
    token_ids: list[int] = field(default_factory=list)  # All known ids.
    start: int = 0  # Index in ``token_ids`` of the id at position 0.
    length: int = 0  # Number of computed positions.
    written: int = 0  # Number of written positions, including rewound positions.

    @property
    def computed(self) -> int:
        """The number of ids that are computed or dropped from the window."""
        return self.start + self.length

    def forget(self) -> None:
        """Empties the slot."""
        self.token_ids, self.start, self.length, self.written = [], 0, 0, 0


class Context:
    """Independent slots in one KV cache. Each slot attends to at most a context length of ids, the last ones of its
    sequence.

    With absolute positions, a full slot drops its first half and recomputes the second. Every block_size / 2 tokens,
    this costs a prefill of the same length. With RoPE, the window slides by one token at no cost.
    """

    def __init__(
        self,
        model: GPT,
        compute: Compute,
        rows: int = 1,
        positions: int | None = None,
        vocab_size: int | None = None,
        size: int | None = None,
        note: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.model = model
        # The model's vocabulary can be padded with ids that have no token.
        self.vocab_size = min(vocab_size or model.config.vocab_size, model.config.vocab_size)
        self.compute = compute
        self.size = min(model.config.block_size, size or model.config.block_size)  # Context length in tokens.
        positions = min(self.size, positions or self.size)
        _check_memory(model, compute, rows, positions)
        dtype, tile = (torch.float32, TILE) if is_packed(model) else (compute.dtype, 1)
        self.cache = KVCache(model.config, rows, compute.device, dtype, positions, tile)
        # If None, torch computes the steps.
        self._decoder = Decoder(model, self.cache, compute.step_threads) if is_packed(model) else None
        self.slots = [Slot(at) for at in range(rows)]
        # On a GPU, steps of one id per slot run as CUDA graphs.
        self._token_step = TokenStep(model, self.cache, note) if compute.device.type == "cuda" else None
        has_compute_dtype = model.ln_f.weight.dtype == compute.dtype  # If true, autocast is unnecessary.
        self._autocast = contextlib.nullcontext if has_compute_dtype else compute.autocast

    @torch.inference_mode()
    def forward(self, work: Sequence[tuple[Slot, int]], ids: Tensor) -> Tensor:
        """Computes the next positions of some slots in one pass. Returns the residual stream (N, C).

        ``work`` has slots and the number of new positions of each. ``ids`` (N), on the device, are the new ids of all
        slots, concatenated. Adjacent slots with the same number of new ids share an attention call. Above
        `WINDOW_SLACK` new ids, they must also have the same length.
        """
        for slot, count in work:  # Record written columns first: the pass can fail halfway.
            slot.written = max(slot.written, slot.length + count)
        if self._decoder is not None:
            x = self._decoder.forward([(slot.row, slot.length, count) for slot, count in work], ids)
        elif self._token_step is not None and self._token_step.works and all(count == 1 for _, count in work):
            with self._autocast():
                x = self._token_step([slot.row for slot, _ in work], ids, [slot.length for slot, _ in work])
        else:
            places = self._place(work)
            with self._autocast():
                x = self.model.trunk(ids.view(places.shape), places).flatten(0, 1)
        for slot, count in work:
            slot.length += count
        return x

    def _place(self, work: Sequence[tuple[Slot, int]]) -> Placement:
        parts: list[tuple[int, list[int], int]] = []
        for slot, count in work:
            if parts:
                first, lengths, T = parts[-1]
                if slot.row == first + len(lengths) and count == T and (T <= WINDOW_SLACK or lengths[0] == slot.length):
                    lengths.append(slot.length)
                    continue
            parts.append((slot.row, [slot.length], count))
        return Placement(self.cache, parts)

    @torch.inference_mode()
    def logits(self, x: Tensor) -> Tensor:
        """Computes logits (…, V) in float32 from the residual stream (…, C). Leaves out ids without a token."""
        if self._decoder is not None:
            return self._decoder.unembed(x)[:, : self.vocab_size]
        with self._autocast():
            return self.model.unembed(x)[..., : self.vocab_size].float()

    def count_free_positions(self, slot: Slot) -> int:
        """Returns how many more positions fit in a slot before it slides."""
        return max(0, self.cache.max_positions - slot.length)

    def count_shared(self, slot: Slot, prompt: Sequence[int], soon: bool = False) -> int:
        """Returns the length of the prompt's prefix that a slot has computed. With ``soon``, includes ids that the slot
        will compute. Excludes the prompt's last id, because its logits are needed."""
        length = len(slot.token_ids) if soon else slot.length
        if slot.start or slot.length > self.cache.max_positions or len(prompt) > self.size:
            return 0
        prefix_length = min(_common_prefix(slot.token_ids, prompt), len(prompt) - 1, length)
        written = max(slot.written, length)
        return prefix_length if self.cache.can_rewind(written, written - prefix_length) else 0

    @torch.inference_mode()
    def begin(self, slot: Slot, prompt: list[int], source: Slot, prefix_length: int, start: int) -> None:
        """Starts a prompt in a slot, at id number ``start``. Reuses the first ``prefix_length`` positions of
        ``source``."""
        if source is not slot:
            self.cache.copy(source.row, slot.row, 0, prefix_length, source.written)
        slot.written = source.written if prefix_length else 0
        slot.token_ids, slot.start, slot.length = prompt, start, prefix_length

    def slide(self, slot: Slot) -> None:
        """Makes room in a full slot. With absolute positions, drops the first half; the second must be recomputed."""
        if self.model.config.positions != "rotary":
            slot.start, slot.length, slot.written = len(slot.token_ids) - max(1, self.size // 2), 0, 0

    @torch.inference_mode()
    def copy(self, source: Slot, target: Slot) -> None:
        """Copies ``source`` to ``target``. Skips the prefix that both slots have in common."""
        prefix_length = 0
        if source.start == target.start:
            prefix_length = min(
                _common_prefix(source.token_ids, target.token_ids) - source.start, source.length, target.length
            )
        written = max(source.written, target.written)
        self.cache.copy(source.row, target.row, max(0, prefix_length), source.length, written)
        target.token_ids, target.start, target.length = [*source.token_ids], source.start, source.length
        target.written = written

    @torch.inference_mode()
    def clear(self, slot: Slot) -> None:
        """Empties a slot and zeroes its keys and values. A NaN would reach the slot's next sequence, because attention
        multiplies masked values by 0, and 0 · NaN is NaN."""
        self.cache.clear(slot.row, slot.written)
        slot.forget()

    @torch.inference_mode()
    def check(self, slot: Slot) -> None:
        """Clears a slot if it contains NaN or infinity."""
        if not self.cache.is_finite(slot.row, slot.written):
            self.clear(slot)


def select(tensor: Tensor, rows: list[int]) -> Tensor:
    """Returns rows of a tensor, as a view if they are the first rows."""
    return tensor[: len(rows)] if rows == [*range(len(rows))] else tensor[upload(rows, tensor.device)]


class ContextPool:
    """The contexts of one model. Keeps up to `MAX_IDLE_CONTEXTS` idle contexts for reuse, within `CACHE_SHARE` of
    memory.

    CUDA graphs use fixed addresses, so they are valid only while their context exists.
    """

    def __init__(
        self,
        model: GPT,
        compute: Compute,
        note: Callable[[str], None] = lambda text: None,
        vocab_size: int | None = None,
    ) -> None:
        self.model, self.compute, self.note, self.vocab_size = model, compute, note, vocab_size
        self.idle: list[Context] = []  # Most recently used last.

    @contextlib.contextmanager
    def lease(self, rows: int, positions: int) -> Iterator[Context]:
        """Lends an empty context with ``rows`` rows of ``positions`` positions. Drops it after an error, because it can
        contain NaN or an unfinished step. Raises `UserError` if the KV cache does not fit in memory."""
        context = self._pop(rows, positions)
        context = context or Context(self.model, self.compute, rows, positions, self.vocab_size, note=self.note)
        try:
            yield context
        except GeneratorExit:  # The caller stopped reading early.
            self._put(context)
            raise
        self._put(context)

    def _pop(self, rows: int, positions: int) -> Context | None:
        """Returns an idle context of this shape. If there is none, frees memory for a new context and returns None."""
        for index, context in enumerate(self.idle):
            if (context.cache.rows, context.cache.max_positions) == (rows, positions):
                return self.idle.pop(index)
        self._shrink(reserved=rows * _sequence_bytes(self.model, self.compute, positions))
        return None

    def _put(self, context: Context) -> None:
        for slot in context.slots:
            slot.forget()
        self.idle.append(context)
        self._shrink()

    def _shrink(self, reserved: int = 0) -> None:
        """Frees the least recently used contexts until the others fit within the limits, next to ``reserved`` bytes."""
        budget = CACHE_SHARE * self.compute.memory() - reserved
        while self.idle and (
            len(self.idle) > MAX_IDLE_CONTEXTS or sum(context.cache.nbytes for context in self.idle) > budget
        ):
            self.idle.pop(0)


def capacity(model: GPT, compute: Compute, positions: int, share: float = CACHE_SHARE) -> int:
    """Returns how many sequences of ``positions`` tokens fit in a ``share`` of memory, next to the weights."""
    budget = min(share * compute.memory(), _memory_after_weights(model, compute))
    return int(budget / _sequence_bytes(model, compute, positions))


def _sequence_bytes(model: GPT, compute: Compute, positions: int) -> int:
    """Returns the bytes of a sequence in the KV cache, which has float32 keys and values if steps run in C."""
    return cache_bytes(model.config, positions, 4 if is_packed(model) else compute.dtype.itemsize)


def _memory_after_weights(model: GPT, compute: Compute) -> int:
    return max(0, compute.memory() - resident_bytes(model, compute))


def _check_memory(model: GPT, compute: Compute, rows: int, positions: int) -> None:
    """Raises `UserError` if the KV cache does not fit in memory next to the weights."""
    needed = rows * _sequence_bytes(model, compute, positions)
    available = _memory_after_weights(model, compute)
    if needed > available:
        raise UserError(
            f"the KV cache of {rows:,} sequences of {positions:,} tokens takes {needed / 1e9:,.1f} GB, but the "
            f"weights leave {available / 1e9:,.1f} GB",
            "use a smaller --batch, or fewer beams or tokens",
        )


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Returns the length of the common prefix."""
    limit, start = min(len(a), len(b)), 0
    while start < limit and a[start : start + 64] == b[start : start + 64]:
        start += 64
    return next((n for n in range(start, min(start + 64, limit)) if a[n] != b[n]), min(start + 64, limit))
