"""Which texts run, in which slots, and how many ids each gets in a step."""

from collections import deque

from gpt.decoding.context import Context, Slot
from gpt.decoding.logits import Token
from gpt.decoding.sequence import TextState

REUSED_FROM = 16  # ids that a prompt shares with a slot from which they are not computed again


class Scheduler:
    """Continuous batching with chunked prefill. Requests wait until slots are free, first come, first served.

    Each step gives every text that decodes its next id, and prompts ``chunk`` ids together: half of them to the
    shortest rest, so that a short prompt never waits for long ones, and what is left to the one that came first, so
    that a long prompt never waits for short ones. A prompt whose beginning is being read for another one waits for it.
    """

    def __init__(self, context: Context, chunk: int) -> None:
        self.context, self.chunk = context, chunk
        self.waiting: deque[TextState] = deque()
        self.running: list[TextState] = []  # those that have ended stay until the next step
        self.free: list[Slot] = [*context.slots]  # the least recently used is the first

    def cancel(self, numbers: set[int]) -> None:
        """Ends texts without another update."""
        for text in (*self.waiting, *self.running):
            if text.number in numbers:
                text.end()
        self.waiting = deque(text for text in self.waiting if not text.done)

    def release(self) -> None:
        """Frees the slots of texts that have ended. What is in them stays, for prompts that begin so."""
        for text in self.running:
            if text.done:
                for slot in text.slots:
                    unread = text.error is None and len(slot.text) <= len(text.request.ids)
                    del slot.text[slot.computed :]
                    if unread:  # any token drawn since would have shown that there is no NaN
                        self.context.check(slot)
                self.free += text.slots
        self.running = [text for text in self.running if not text.done]

    def plan(self) -> list[TextState]:
        """Starts waiting texts for which there are slots, and returns those that take part in the next step."""
        self._admit()
        reading, guessed = [], 0
        for text in self.running:
            room = self.context.room(text.live[0])
            if room == 0:
                for slot in text.live:
                    self.context.slide(slot)
            text.count = 1
            if text.left > 1:
                text.count = 0
                reading.append(text)
            elif text.request.config.speculate:
                text.guesses = text.guess(min(room, 1 + self.chunk - guessed))
                guessed += len(text.guesses)
                text.count += len(text.guesses)
        used = 0
        in_order = sorted(reading, key=lambda text: text.number)
        for some, most in ((sorted(in_order, key=lambda text: text.left), self.chunk // 2), (in_order, self.chunk)):
            for text in some:
                if used < most:
                    more = min(text.left - text.count, max(1, (most - used) // len(text.live)))
                    text.count += more
                    used += more * len(text.live)
        return [text for text in self.running if text.count]

    def _admit(self) -> None:
        """Starts waiting texts. One that waits for another's prompt keeps its place, and the slots it needs."""
        left = len(self.free)
        for text in [*self.waiting]:
            left -= text.request.width
            if left < 0:
                return
            if self._start(text):
                self.waiting.remove(text)
                self.running.append(text)

    def _start(self, text: TextState) -> bool:
        """Gives a text its slots, the first of which gets what another has of its prompt; unless it is better to
        wait."""
        if (other := text.behind) is not None and other.count and other.left >= REUSED_FROM and not other.done:
            return False
        ids, context, width = [*text.request.ids], self.context, text.request.width
        echoes = text.request.config.echo_logprobs  # then logits are computed from its start
        source, same = self.free[0], 0
        for slot in () if echoes else context.slots:
            if (more := context.shared(slot, ids)) > same:
                source, same = slot, more
            if same + REUSED_FROM >= len(ids):  # nothing to gain, neither from another slot nor by waiting
                break
        else:
            for other in () if echoes else self.running:
                progresses = other.count and not other.done
                if progresses and context.shared(other.live[0], ids, soon=True) >= same + REUSED_FROM:
                    text.behind = other
                    return False
        if same < REUSED_FROM:
            source, same = self.free[0], 0
        first = source if source in self.free else self.free[0]
        self.free.remove(first)
        text.slots = [first, *(self.free.pop(0) for _ in range(width - 1))]
        text.live, text.cached = [first], same
        context.begin(first, ids, source, same)
        if echoes:
            text.prompt = [Token(ids[first.start], None)]
        text.count = 1  # those that came with it may wait for it
        return True
