"""Decides which requests run, in which slots, and how many ids each gets per step."""

from collections import Counter, deque
from itertools import chain, islice

from gpt.decoding.context import Context, Slot
from gpt.decoding.logits import Token
from gpt.decoding.sequence import RequestState

MIN_SHARED_PREFIX = 16  # Minimum length of a prefix cache hit, in ids.


class Scheduler:
    """Continuous batching with chunked prefill.

    Slots go round groups of requests: the waiting group with the fewest slots gets the next one. If another group has
    at least two more, one of its requests is paused, and prefilled again later. Groups with equally many slots take
    turns. Within a group, the order is first come, first served.

    Each step computes the next token of every decoding request, and up to ``chunk`` prompt ids. Half of the ``chunk``
    ids go to the prompts with the fewest ids left, so that short prompts never wait for long prompts. The rest go to
    the oldest prompts, so that long prompts never starve. A prompt waits while another request prefills the same
    prefix.
    """

    def __init__(self, context: Context, chunk: int) -> None:
        self.context, self.chunk = context, chunk
        self.waiting: dict[object, deque[RequestState]] = {}  # Requests by group, without empty groups.
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

    def _count_slots(self) -> Counter[object]:
        """Returns the number of slots of each group."""
        return Counter(state.request.group for state in self.running for _ in state.slots)

    def find_victim(self) -> RequestState | None:
        """Returns the request to pause for a waiting group, or None if no running group has two slots more."""
        counts = self._count_slots()
        fewest = min((counts[group] for group in self.waiting), default=len(self.context.slots))
        victims = [state for state in self.running if counts[state.request.group] > fewest + 1 and not state.search]
        # The request with the fewest computed positions loses the least.
        sort_key = lambda state: (-counts[state.request.group], state.live_slots[0].length)
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
        prefilling, guess_count = [], 0
        for state in self.running:
            free_positions = self.context.count_free_positions(state.live_slots[0])
            if free_positions == 0:
                for slot in state.live_slots:
                    self.context.slide(slot)
            state.count = 1
            if state.uncomputed > 1:
                state.count = 0
                prefilling.append(state)
            elif state.request.config.speculate:
                state.guesses = state.guess(min(free_positions, 1 + self.chunk - guess_count))
                guess_count += len(state.guesses)
                state.count += len(state.guesses)
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
        candidates = [
            (counts[group] + place, state)
            for group, queue in self.waiting.items()
            for place, state in enumerate(islice(queue, free_slots))
        ]
        for _, state in sorted(candidates, key=lambda candidate: candidate[0]):
            free_slots -= state.request.width
            if free_slots < 0:
                break
            if self._start(state):
                self.running.append(state)
                queue = self.waiting.pop(state.request.group)
                queue.remove(state)
                if queue:
                    self.waiting[state.request.group] = queue  # Equal groups take turns.

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
            state.cached = prefix_length
        context.begin(first_slot, ids, source, prefix_length, state.start)
        state.constraint = state.constraint or (state.request.constraint and state.request.constraint.copy())
        if echoes:
            state.prompt = [Token(ids[first_slot.start], None)]
        state.count = 1  # Lets requests that start later in this step wait for this prefill.
        return True
