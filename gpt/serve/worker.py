"""The thread that computes: it owns the engine, and serves the requests that the event loop hands to it."""

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

from gpt.decoding.context import Context
from gpt.decoding.engine import Engine, Request, Update
from gpt.errors import UserError, WorkError, is_out_of_memory
from gpt.serve.metrics import ServerMetrics

CHUNK = 128  # ids of prompts that a step reads at most


@dataclass(eq=False)
class Ticket:
    """A text that was asked for. ``deliver`` gets its updates, in the event loop."""

    request: Request
    deliver: Callable[[Update], None]
    started: float = 0.0  # when it was handed in, by `time.monotonic`


class Worker:
    """Runs an engine in a thread of its own. `add` and `cancel` may be called from the event loop at any time."""

    def __init__(
        self, make: Callable[[], Context], ends: Collection[int], metrics: ServerMetrics, chunk: int = CHUNK
    ) -> None:
        self.make, self.ends, self.metrics, self.chunk = make, ends, metrics, chunk
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._tickets: dict[int, Ticket] = {}  # by the engine's number
        self._loop: asyncio.AbstractEventLoop
        self._thread = threading.Thread(target=self._run, name="gpt-serve", daemon=True)
        self.engine = Engine(make(), ends, chunk, reuse=True)
        self.rows = self.engine.context.rows

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Starts the thread. Updates are delivered in ``loop``."""
        self._loop = loop
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread after the step that it computes."""
        self._inbox.put(None)

    def add(self, ticket: Ticket) -> None:
        """Hands in a text to generate."""
        ticket.started = time.monotonic()
        self._inbox.put(lambda: self._add(ticket))

    def cancel(self, ticket: Ticket) -> None:
        """Gives a text up. Its row is free in the next step; updates that are under way still come."""
        self._inbox.put(lambda: self._cancel(ticket))

    def _add(self, ticket: Ticket) -> None:
        try:
            self._tickets[self.engine.add(ticket.request)] = ticket
        except UserError as error:
            self._send([(ticket, Update(-1, error=error))])

    def _cancel(self, ticket: Ticket) -> None:
        number = next((number for number, each in self._tickets.items() if each is ticket), None)
        if number is not None:
            del self._tickets[number]
            self.engine.cancel(number)

    def _run(self) -> None:
        while self._take():
            began = time.monotonic()
            try:
                updates = self.engine.step()
            except Exception as error:
                self._fail(error)
                continue
            self.metrics.stepped(self.engine, time.monotonic() - began, sum(len(each.tokens) for each in updates))
            told = [(self._tickets[each.number], each) for each in updates if each.number in self._tickets]
            for each in updates:
                if each.reason is not None or each.error is not None:
                    self._tickets.pop(each.number, None)
            self._send(
                [(ticket, each) for ticket, each in told if each.tokens or each.prompt or each.reason or each.error]
            )

    def _take(self) -> bool:
        """Does what the inbox asks for; waits for it where there is nothing to compute. Returns False at the end."""
        while True:
            try:
                action = self._inbox.get(block=not self.engine.busy)
            except queue.Empty:
                return True
            if action is None:
                return False
            action()

    def _fail(self, error: Exception) -> None:
        """Ends every request with an error, and begins anew with an empty context."""
        said: UserError = WorkError(f"a fault in gpt itself: {type(error).__name__}: {error}", "please report it")
        if isinstance(error, UserError):
            said = error
        elif is_out_of_memory(error):
            said = WorkError("out of memory", "ask for fewer tokens at once, or serve with a smaller --max-batch")
        self._send([(ticket, Update(number, error=said)) for number, ticket in self._tickets.items()])
        self._tickets = {}
        del self.engine  # its memory is needed for the next one
        self.engine = Engine(self.make(), self.ends, self.chunk, reuse=True)

    def _send(self, updates: list[tuple[Ticket, Update]]) -> None:
        if updates:
            try:
                self._loop.call_soon_threadsafe(_deliver, updates)
            except RuntimeError:  # the loop has ended
                self.stop()


def _deliver(updates: list[tuple[Ticket, Update]]) -> None:
    for ticket, update in updates:
        ticket.deliver(update)
