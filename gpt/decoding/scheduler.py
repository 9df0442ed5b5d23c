"""Decides which requests run, in which slots, and how many ids each gets per step."""

import time
from collections import Counter, deque
from collections.abc import Iterator
from itertools import accumulate, chain, islice
from operator import eq

from gpt.decoding.context import Context, Slot
from gpt.decoding.logits import Token
from gpt.decoding.sequence import Group, RequestState

MIN_SHARED_PREFIX = 16  # Minimum length of a prefix cache hit, in ids.


class Scheduler:
    """Continuous batching with chunked prefill.

    Slots go round groups of requests: the waiting group with the fewest slots gets the next one. If another group has
    at least two more, one of its requests is paused, and prefilled again later. Groups with equally many slots take
    turns. The slots of a group go round its subgroups in the same way, and within the innermost group, the order is
    first come, first served.

    Each step computes the next token of every decoding request, and up to ``chunk`` prompt ids. Half of the ``chunk``
    ids go to the prompts with the fewest ids left, so that short prompts never wait for long prompts. The rest go to
    the oldest prompts, so that long prompts never starve. A prompt waits while another request prefills the same
    prefix.
    """

    def __init__(self, context: Context, chunk: int) -> None:
        self.context, self.chunk = context, chunk
        self.waiting: dict[Group, deque[RequestState]] = {}  # Requests by group, without empty groups.
        self.running: list[RequestState] = []  # Finished requests stay until the next step.
        self.free: list[Slot] = [*context.slots]  # Least recently used first.

    @property
    def states(self) -> list[RequestState]:
        """All waiting and running requests."""
        return [*chain(*self.waiting.values()), *self.running]

    def add(self, state: RequestState) -> None:
        """Queues a request."""
        self.waiting.setdefault(state.request.group, deque()).append(state)

    def cancel(self, numbers: set[int]) -> None:
        """Ends requests without another update."""
        for state in self.states:
            if state.number in numbers:
                state.end()
        queues = {group: deque(state for state in queue if not state.done) for group, queue in self.waiting.items()}
        self.waiting = {group: queue for group, queue in queues.items() if queue}

    def release(self) -> None:
        """Frees the slots of finished requests, but keeps their contents for prefix reuse."""
        for state in self.running:
            if state.done:
                self._free(state)
        self.running = [state for state in self.running if not state.done]

    def _free(self, state: RequestState) -> None:
        for slot in state.slots:
            is_unchecked = state.error is None and len(slot.token_ids) <= len(state.request.ids)
            del slot.token_ids[slot.computed :]
            if is_unchecked:  # Drawing a token would have detected NaN.
                self.context.check(slot)
        self.free += state.slots

    def reset(self) -> list[Slot]:
        """Drops all requests, whatever was being changed when a step failed. Frees and returns the slots in use."""
        self.waiting, self.running = {}, []
        slots = [slot for slot in self.context.slots if slot not in self.free]
        self.free += slots
        return slots

    def _count_slots(self) -> Counter[Group]:
        """Returns the number of slots of each group and of the groups that it is part of."""
        return Counter(
            group for state in self.running for _ in state.slots for group in _find_groups(state.request.group)
        )

    def find_victim(self) -> RequestState | None:
        """Returns the request to pause for a waiting group, or None if no running group has two slots more."""
        counts, fewest = self._count_slots(), dict[Group, int]()  # The fewest slots of a waiting group, by its parent.
        for group in chain.from_iterable(map(_find_groups, self.waiting)):
            fewest[group[:-1]] = min(counts[group], fewest.get(group[:-1], counts[group]))
        victims = [
            state
            for state in self.running
            if not state.search
            and any(
                counts[group] > fewest.get(group[:-1], counts[group]) + 1 for group in _find_groups(state.request.group)
            )
        ]
        # The request with the fewest computed positions loses the least.
        sort_key = lambda state: (
            *(-counts[group] for group in _find_groups(state.request.group)), state.live_slots[0].length
        )  # fmt: skip
        return min(victims, key=sort_key, default=None)

    def _pause(self, state: RequestState) -> None:
        """Frees the slot of a request, which waits for another one."""
        [slot] = state.live_slots
        state.ids, state.start, state.count = [*slot.token_ids], slot.start, 0
        self._free(state)
        self.running.remove(state)
        self.waiting.setdefault(state.request.group, deque()).appendleft(state)

    def plan(self) -> list[RequestState]:
        """Starts waiting requests and returns the requests that take part in the next step."""
        self._admit()
        while not self.free and (victim := self.find_victim()) is not None:
            self._pause(victim)
            self._admit()
        prefilling = []
        for state in self.running:
            if self.context.count_free_positions(state.live_slots[0]) == 0:
                for slot in state.live_slots:
                    self.context.slide(slot)
            state.count = 1
            if state.uncomputed > 1:
                state.count = 0
                prefilling.append(state)
        total = 0
        by_arrival = sorted(prefilling, key=lambda state: state.number)
        for queue, budget in (
            (sorted(by_arrival, key=lambda state: state.uncomputed), self.chunk // 2),
            (by_arrival, self.chunk),
        ):
            for state in queue:
                # A resumed text longer than the context slides by one id per step, as it did before its pause.
                limit = max(1, self.context.count_free_positions(state.live_slots[0])) - state.count
                if total < budget and limit:
                    id_count = max(1, (budget - total) // len(state.live_slots))
                    id_count = min(state.uncomputed - state.count, id_count, limit)
                    state.count += id_count
                    total += id_count * len(state.live_slots)
        return [state for state in self.running if state.count]

    def _admit(self) -> None:
        """Starts waiting requests. A request that waits for a shared prefix reserves its slots."""
        counts, free_slots = self._count_slots(), len(self.free)
        candidates = {group: deque(islice(queue, free_slots)) for group, queue in self.waiting.items() if free_slots}
        while candidates:
            started = min(candidates, key=lambda group: [counts[each] for each in _find_groups(group)])
            state = candidates[started].popleft()
            if not candidates[started]:
                del candidates[started]
            free_slots -= state.request.width
            if free_slots < 0:
                break
            counts.update([*_find_groups(started)] * state.request.width)
            if self._start(state):
                self.running.append(state)
                self.waiting[started].remove(state)
                # Equal groups take turns: this one, and before it those of the same client, move to the end.
                order = sorted(self.waiting, key=lambda group: sum(map(eq, group, started)))
                self.waiting = {group: self.waiting[group] for group in order if self.waiting[group]}

    def _start(self, state: RequestState) -> bool:
        """Assigns slots and reuses a cached prefix. Returns False if the request must wait for another request's
        prefill."""
        if (
            (other := state.prefix_leader) is not None
            and other.count
            and other.uncomputed >= MIN_SHARED_PREFIX
            and not other.done
        ):
            return False
        ids, context, width = [*state.ids], self.context, state.request.width
        # Echoing needs logits of the whole prompt. A request that was paused later has echoed it.
        echoes = state.request.config.echo_logprobs and len(ids) == len(state.request.ids)
        source, prefix_length = self.free[0], 0
        for slot in () if echoes else context.slots:
            if (length := context.count_shared(slot, ids)) > prefix_length:
                source, prefix_length = slot, length
            if prefix_length + MIN_SHARED_PREFIX >= len(ids):  # No other prefix could be much longer.
                break
        else:
            for other in () if echoes else self.running:
                is_prefilling = other.count and not other.done and other.ids is other.request.ids
                if (
                    is_prefilling
                    and context.count_shared(other.live_slots[0], ids, soon=True) >= prefix_length + MIN_SHARED_PREFIX
                ):
                    state.prefix_leader = other
                    return False
        if prefix_length < MIN_SHARED_PREFIX:
            source, prefix_length = self.free[0], 0
        # A slot with a longer sequence keeps it, unless the slot is due for reuse.
        takes_over = source in self.free and 2 * prefix_length >= source.length
        first_slot = source if takes_over else self.free[0]
        self.free.remove(first_slot)
        state.slots = [first_slot, *(self.free.pop(0) for _ in range(width - 1))]
        state.live_slots = [first_slot]
        if state.ids is state.request.ids:  # A resumed request finds its own positions.
            state.cached, state.started = prefix_length, time.monotonic()
        context.begin(first_slot, ids, source, prefix_length, state.start)
        state.constraint = state.constraint or (state.request.constraint and state.request.constraint.copy())
        if echoes:
            state.prompt = [Token(ids[first_slot.start], None)]
        state.count = 1  # Lets requests that start later in this step wait for this prefill.
        return True


def _find_groups(group: Group) -> Iterator[Group]:
    """Yields the outermost group that ``group`` is part of, its next subgroup, and so on up to ``group``."""
    return accumulate((key,) for key in group)
