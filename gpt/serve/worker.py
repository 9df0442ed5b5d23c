"""The thread that computes: it owns the engine, and serves the requests that the event loop hands to it."""

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import Callable, Collection, Sequence
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
    number: int = -1  # the engine's, as long as it generates the text


class Worker:
    """Runs an engine in a thread of its own. `add` and `cancel` may be called from the event loop at any time."""

    def __init__(self, context: Context, ends: Collection[int], metrics: ServerMetrics, chunk: int = CHUNK) -> None:
        self.ends, self.metrics, self.chunk = ends, metrics, chunk
        self.engine = Engine(context, ends, chunk)
        self.failure: UserError | None = None  # of the device, after which nothing can be computed
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._tickets: dict[int, Ticket] = {}  # by the engine's number
        self._loop: asyncio.AbstractEventLoop
        self._thread = threading.Thread(target=self._run, name="gpt-serve", daemon=True)

    @property
    def rows(self) -> int:
        """The number of texts that are generated at once."""
        return len(self.engine.context.slots)

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Starts the thread. Updates are delivered in ``loop``."""
        self._loop = loop
        self._thread.start()

    def stop(self, seconds: float = 5) -> None:
        """Ends the thread after the step that it computes, for which it waits no longer than so many seconds."""
        self._inbox.put(None)
        self._thread.join(seconds)

    def add(self, tickets: Sequence[Ticket]) -> None:
        """Hands in texts to generate."""
        self._inbox.put(lambda: self._add(tickets))

    def cancel(self, tickets: Sequence[Ticket]) -> None:
        """Gives texts up. Their slots are free in the next step; updates that are under way still come."""
        self._inbox.put(lambda: self._cancel(tickets))

    def _add(self, tickets: Sequence[Ticket]) -> None:
        for ticket in tickets:
            try:
                if self.failure is not None:
                    raise self.failure
                ticket.number = self.engine.add(ticket.request)
                self._tickets[ticket.number] = ticket
            except Exception as error:
                told = _as_user_error(error)
                self._send([(ticket, Update(-1, error=told))])
                if told is not error:
                    self.failure = told
        if self.failure is not None:
            self._fail(self.failure)

    def _cancel(self, tickets: Sequence[Ticket]) -> None:
        numbers = [each.number for each in tickets if self._tickets.get(each.number) is each]
        self.engine.cancel(*numbers)
        for number in numbers:
            del self._tickets[number]
        self.metrics.measure(self.engine)

    def _run(self) -> None:
        while True:
            try:
                if not self._take():
                    return
                self._step()
            except Exception as error:  # outside the engine's step: nothing is known of what it left behind
                self.failure = _as_user_error(error)
                self._fail(self.failure)

    def _step(self) -> None:
        began = time.monotonic()
        try:
            updates = self.engine.step()
        except Exception as error:
            self._fail(_as_user_error(error))
            return
        self.metrics.stepped(self.engine, time.monotonic() - began, sum(len(each.tokens) for each in updates))
        told = []
        for each in updates:
            ticket = self._tickets[each.number]
            if each.tokens or each.prompt or each.reason or each.error:
                told.append((ticket, each))
            if each.reason or each.error:
                del self._tickets[each.number]
        self._send(told)

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

    def _fail(self, error: UserError) -> None:
        """Ends every request with an error. The context, which may stand in the middle of a step, is emptied."""
        self._send([(ticket, Update(number, error=error)) for number, ticket in self._tickets.items()])
        self._tickets = {}
        context = self.engine.context
        self.engine = Engine(context, self.ends, self.chunk)
        try:
            for slot in context.slots:
                context.clear(slot)
        except Exception:
            self.failure = error
        with contextlib.suppress(Exception):  # which may be what failed
            self.metrics.measure(self.engine)

    def _send(self, updates: list[tuple[Ticket, Update]]) -> None:
        if updates:
            try:
                self._loop.call_soon_threadsafe(_deliver, updates)
            except RuntimeError:  # the loop has ended
                self._inbox.put(None)


def _deliver(updates: list[tuple[Ticket, Update]]) -> None:
    for ticket, update in updates:
        ticket.deliver(update)


def _as_user_error(error: Exception) -> UserError:
    if isinstance(error, UserError):
        return error
    if is_out_of_memory(error):
        return WorkError("out of memory", "request fewer tokens at once")
    return WorkError(f"internal error in gpt: {type(error).__name__}: {error}", "please report it")
