"""Contexts: a KV cache with a slot per sequence, and the steps that compute new positions."""

import contextlib
from collections.abc import Callable, Sequence
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

MIN_POSITIONS = 256  # Minimum number of positions of a slot, unless the context is shorter.
CACHE_SHARE = 0.25  # Maximum share of the device's memory for keys and values.


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
        has_compute_dtype = model.ln_f.weight.dtype == compute.dtype  # If true, autocast is unnecessary.
        self._autocast = contextlib.nullcontext if has_compute_dtype else compute.autocast
        self.note = note
        self.slots: list[Slot]
        self.cache: KVCache
        self.resize(rows, min(self.size, positions or self.size))

    def round_up(self, positions: int) -> int:
        """Returns the positions that slots should get for sequences of so many, so that few sizes exist."""
        doublings = (max(0, positions - 1) // MIN_POSITIONS).bit_length()
        return min(MIN_POSITIONS << doublings, self.size)

    def resize(self, rows: int, positions: int, kept: Sequence[Slot] = ()) -> None:
        """Replaces the KV cache by one with ``rows`` slots of ``positions`` positions. The first slots are those
        ``kept``, with their contents. Raises `UserError` if the cache does not fit in memory."""
        model, device = self.model, self.compute.device
        _check_memory(model, self.compute, rows, positions)
        dtype, tile = (torch.float32, TILE) if is_packed(model) else (self.compute.dtype, 1)
        cache = KVCache(model.config, rows, device, dtype, positions, tile)
        with torch.inference_mode():
            for row, slot in enumerate(kept):
                cache.copy(slot.row, row, 0, slot.written, slot.written, self.cache)
        for row, slot in enumerate(kept):
            slot.row = row
        self.cache, self.slots = cache, [*kept, *(Slot(row) for row in range(len(kept), rows))]
        # If None, torch computes the steps.
        self._decoder = Decoder(model, cache, self.compute.step_threads) if is_packed(model) else None
        # On a GPU, steps of one id per slot run as CUDA graphs.
        self._token_step = TokenStep(model, cache, self.note) if device.type == "cuda" else None

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
        prefix_length = min(count_common(slot.token_ids, prompt), len(prompt) - 1, length)
        written = max(slot.written, length)
        return prefix_length if self.cache.can_rewind(written, written - prefix_length) else 0

    @torch.inference_mode()
    def begin(self, slot: Slot, prompt: list[int], source: Slot, prefix_length: int, start: int) -> None:
        """Starts a prompt in a slot, at id number ``start``. Reuses the first ``prefix_length`` positions of
        ``source``."""
        if source is not slot:
            slot.forget()  # An interrupted copy must not be taken for the slot's earlier sequence.
            self.cache.copy(source.row, slot.row, 0, prefix_length, source.written)
        slot.written = source.written if prefix_length else 0
        slot.length, slot.start, slot.token_ids = prefix_length, start, prompt  # An interruption can come in between.

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
                count_common(source.token_ids, target.token_ids) - source.start, source.length, target.length
            )
        written = max(source.written, target.written)
        target.forget()
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


def count_common(a: Sequence[object], b: Sequence[object]) -> int:
    """Returns the length of the common prefix of two lists, or of two strings."""
    limit, start = min(len(a), len(b)), 0
    while start < limit and a[start : start + 64] == b[start : start + 64]:
        start += 64
    return next((n for n in range(start, min(start + 64, limit)) if a[n] != b[n]), min(start + 64, limit))
