"""Requests → tokens: each step computes the next tokens of all running requests. Handles ids, not text."""

import functools
import itertools
import threading
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor

from gpt.config.device import upload
from gpt.config.sample import SampleConfig
from gpt.decoding import sampler
from gpt.decoding.beam import Search
from gpt.decoding.context import Context, Slot, capacity, select
from gpt.decoding.logits import Filters, Token
from gpt.decoding.sampler import Draw
from gpt.decoding.scheduler import Scheduler
from gpt.decoding.sequence import Deliver, Request, RequestState, Update
from gpt.system.errors import Interrupted, UserError, as_user_error

__all__ = ["Engine", "Request", "Update", "generate"]
CHUNK = 2048  # Maximum prompt ids per step, to limit activation memory.
MIN_SLOTS = 4  # Slots that keep earlier sequences even if only one is generated at a time.


class Engine:
    """Generates tokens for many requests together. Callers add and cancel requests between steps.

    Any id in ``ends`` ends a sequence. A step prefills at most ``chunk`` prompt ids (`Scheduler`). Requests get
    ``numbers``, by default 0, 1, 2 … A request's tokens don't depend on other requests, except for rounding
    (docs/generate.md). An error in one request, like NaN logits, ends only that request. If
    `step` raises an error, all requests end with it.

    Several threads can add requests and call `step`, which delivers the updates of all requests. To add requests right
    after `reserve`, hold the ``lock``.
    """

    def __init__(
        self, context: Context, ends: Collection[int], chunk: int = CHUNK, numbers: Iterator[int] | None = None
    ) -> None:
        self.context, self.ends = context, ends
        self.lock = threading.RLock()
        self.failure: UserError | None = None  # A permanent failure, like a lost GPU.
        self.scheduler = Scheduler(context, chunk)
        self.runs_ahead = context.compute.device.type == "cuda"  # Whether to launch steps before reading tokens.
        self._numbers = numbers or itertools.count()
        self._cancelled: deque[int] = deque()
        self._filters: WeakValueDictionary[Any, Filters] = WeakValueDictionary()  # Filters by key, shared by requests.
        self._draws: list[Draw] = []  # Unread draws of the last step.
        self._last: Request | None = None  # Other samples of its prompt need no check.
        self._last_filters: Filters

    @property
    def busy(self) -> bool:
        """Whether any request is waiting or running."""
        return bool(self.scheduler.waiting or self.running)

    @property
    def running(self) -> int:
        """The number of running requests."""
        return sum(not state.done for state in self.scheduler.running)

    def reserve(self, rows: int, positions: int) -> None:
        """Makes room for ``rows`` sequences of ``positions`` tokens. Slots keep as much of their contents as fits in
        `CACHE_SHARE` of memory. Runs steps until all requests have ended if their slots must change. Raises `UserError`
        if the KV cache does not fit in memory."""
        with self.lock:
            context, scheduler = self.context, self.scheduler
            old_rows, old_positions = len(context.slots), context.cache.max_positions
            if rows <= old_rows and positions <= old_positions:
                return
            fitting_rows = functools.partial(capacity, context.model, context.compute)
            positions = context.round_up(positions)
            if rows <= fitting_rows(max(positions, old_positions)):
                positions = max(positions, old_positions)
            rows = max(rows, min(max(old_rows, MIN_SLOTS), fitting_rows(positions)))
            while self.busy and (rows < old_rows or positions < old_positions):
                self.step()
            kept = context.slots
            if not self.busy:
                self._read_draws()
                scheduler.release()
                kept = [slot for slot in scheduler.free if 0 < slot.written <= positions][-rows:]  # The newest.
            context.resize(rows, positions, kept)
            scheduler.free = [*context.slots[len(kept) :], *(slot for slot in scheduler.free if slot in kept)]

    def add(self, request: Request, deliver: Deliver | None = None) -> int:
        """Queues a request and returns its number. Each of its updates is passed to ``deliver``. Raises `UserError` if
        the model or context cannot serve it."""
        with self.lock:
            if self.failure is not None:
                raise self.failure
            config, last = request.config, self._last
            if last is None or not (request.ids is last.ids and request.bias is last.bias and config is last.config):
                self._check(request)
                filters = Filters(config, self.ends, request.bias)
                self._last_filters = self._filters.setdefault(filters.key, filters)
                self._last = request
            search = Search(config, self.ends, request.stops, request.constraint) if config.beam else None
            start = max(0, len(request.ids) - self.context.size)  # A long prompt is truncated from the left.
            number = next(self._numbers)
            self.scheduler.add(RequestState(number, request, self._last_filters, search, request.ids, start, deliver))
            return number

    def _check(self, request: Request) -> None:
        context, beam = self.context, request.config.beam
        vocab_size, positions, slots = context.vocab_size, context.cache.max_positions, len(context.slots)
        if beam > slots:
            raise UserError(f"beam is {beam}, but only {slots:,} sequences fit at once", "use fewer beams")
        max_length = min(len(request.ids) + request.config.max_tokens, self.context.size)
        if max_length > positions:
            raise UserError(
                f"a request may take {max_length:,} tokens, but the KV cache holds {positions:,}",
                "shorten the prompt, or lower --max-tokens",
            )
        ids = [*request.ids, *(id for id, _ in request.bias)]
        if not request.ids or not 0 <= min(ids) <= max(ids) < vocab_size:
            raise UserError(
                f"a request needs one or more ids from 0 to {vocab_size - 1:,}", "use the model's tokenizer"
            )

    def cancel(self, *numbers: int) -> None:
        """Ends requests before the next step, without another update. Ignores finished requests. A generator can call
        this while a step runs, when it is garbage-collected."""
        self._cancelled.extend(numbers)

    def run(self) -> Iterator[Update]:
        """Runs steps until all requests have ended, and yields their updates."""
        while self.busy:
            yield from self.step()

    def step(self) -> list[Update]:
        """Starts waiting requests if slots are free, and prefills prompts. Computes the next token of every prefilled
        request. Returns an update for each running request.

        On a GPU, tokens are read after the next step is launched, so that the GPU doesn't wait for the host. If the
        host needs the tokens sooner (see `can_run_ahead`), it reads them immediately. Slots with unread tokens aren't
        reused.
        """
        with self.lock:
            try:
                return self._compute_step()
            except BaseException as error:
                self.abort(error)
                raise

    def abort(self, error: BaseException) -> None:
        """Ends all requests with an error. Clears their slots, which can contain NaN, or after an interruption keeps
        what had been computed. Sets ``failure`` if that fails, because the device is lost."""
        with self.lock:
            states, self._draws = self.scheduler.states, []
            slots = self.scheduler.reset()
            for state in states:
                if not state.done:
                    state.end(error=as_user_error(error))
                    state.update()
            clear = self.context.check if isinstance(error, KeyboardInterrupt | Interrupted) else self.context.clear
            try:
                for slot in slots:
                    clear(slot)
            except Exception:
                self.failure = as_user_error(error)

    @torch.inference_mode()
    def _compute_step(self) -> list[Update]:
        if self._cancelled:
            self.scheduler.cancel({self._cancelled.popleft() for _ in range(len(self._cancelled))})
        active_states = [state for state in self.scheduler.running if not state.done]
        if len(active_states) < len(self.scheduler.running) or self.scheduler.find_victim() is not None:
            self._read_draws()
        updates = [state.update() for state in active_states if state.done or state.tokens]
        self.scheduler.release()
        states = self.scheduler.plan()
        unread_draws, self._draws = self._draws, []
        if states:
            self._compute(states, unread_draws)
        for draw in unread_draws:
            sampler.take(draw, self.context, self.ends)
        if not self._can_run_ahead():
            self._read_draws()
        return [*updates, *(state.update() for state in self.scheduler.running)]

    def _can_run_ahead(self) -> bool:
        """Whether the next step can be launched before this step's tokens are read."""
        return self.runs_ahead and all(
            state.can_run_ahead and self.context.count_free_positions(state.live_slots[0])
            for draw in self._draws
            for state in draw.states
        )

    def _read_draws(self) -> None:
        draws, self._draws = self._draws, []
        for draw in draws:
            sampler.take(draw, self.context, self.ends)

    def _compute(self, states: list[RequestState], unread_draws: Sequence[Draw]) -> None:
        """Computes new positions in one pass, those of unread ids first. Chooses tokens for requests that finished
        prefill."""
        context = self.context
        sort_key = lambda item: (item[0].uncomputed > 0, item[0].count, item[1].row)
        work = sorted(((state, slot) for state in states for slot in state.live_slots), key=sort_key)
        known_ids = [id for state, slot in work for id in state.next_ids(slot)]
        id_tensors = [_sort_ids(unread_draws)] if unread_draws else []
        id_tensors += [upload(known_ids, context.compute.device)] if known_ids else []
        x = context.forward(
            [(slot, state.count) for state, slot in work],
            torch.cat(id_tensors) if len(id_tensors) > 1 else id_tensors[0],
        )
        slot_ends = dict(
            zip((slot for _, slot in work), itertools.accumulate(state.count for state, _ in work), strict=True)
        )
        for state, slot in work:
            if state.prompt:
                sampler.echo(state, x[slot_ends[slot] - state.count : slot_ends[slot]], context)
        self._choose(dict.fromkeys(state for state, _ in work), slot_ends, x)

    def _choose(self, states: Iterable[RequestState], slot_ends: Mapping[Slot, int], x: Tensor) -> None:
        """Chooses tokens for requests that finished prefill, from the residual stream (N, C). The last row of a slot is
        ``slot_ends[slot] - 1``."""
        ready = [state for state in states if state.uncomputed <= 0 and not state.done]
        for state in ready:
            if state.request.config.max_tokens == 0:
                state.end("length")
        searches = [state for state in ready if state.search and not state.done]
        # Sorting by this number makes requests with the same filters adjacent.
        first_number = {state.filters: state.number for state in reversed(ready)}
        sampled = sorted(
            (state for state in ready if not (state.search or state.done)),
            key=lambda state: first_number[state.filters],
        )
        rows = [slot_ends[slot] - 1 for state in [*sampled, *searches] for slot in state.live_slots]
        if not rows:
            return
        logits = self.context.logits(select(x, rows))
        slot_logits = torch.split(logits, [len(sampled), *(len(state.live_slots) for state in searches)])
        if sampled:
            self._draws.append(sampler.draw(slot_logits[0], sampled))
        for state, state_logits in zip(searches, slot_logits[1:], strict=True):
            sampler.extend(state, state_logits, self.context)


def _sort_ids(draws: Sequence[Draw]) -> Tensor:
    """Returns drawn ids (n) in slot order."""
    rows = [state.live_slots[0].row for draw in draws for state in draw.states]
    ids = torch.cat([draw.ids for draw in draws]) if len(draws) > 1 else draws[0].ids
    return (ids if rows == sorted(rows) else ids[upload(np.argsort(rows), ids.device)])[:, 0]


def generate(
    context: Context, prompt: Sequence[int], config: SampleConfig, ends: Collection[int], seed: int = 0, index: int = 0
) -> Iterator[Token]:
    """Yields up to ``max_tokens`` tokens. An id in ``ends`` is the last. Raises `NotANumber` for NaN logits."""
    engine = Engine(context, ends)
    engine.add(Request(prompt, config, seed, index))
    for update in engine.run():
        if update.error is not None:
            raise update.error
        yield from update.tokens
