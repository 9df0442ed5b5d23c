"""The thread that owns the engine and runs the requests of the event loop."""

import asyncio
import queue
import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

from gpt.decoding.context import Context
from gpt.decoding.engine import Engine, Request, Update
from gpt.serve.metrics import ServerMetrics
from gpt.system.errors import UserError, WorkError, is_out_of_memory

CHUNKS = {"cpu": 128, "mps": 128, "cuda": 2048}  # Maximum prompt ids per step, by device: a fraction of a second.
T = TypeVar("T")


@dataclass(eq=False)
class Ticket:
    """A submitted request. ``deliver`` receives its updates in the event loop."""

    request: Request
    deliver: Callable[[Update], None]
    number: int = -1  # The request's number in the engine.


class Worker:
    """Runs an engine in a separate thread. The event loop can call `add` and `cancel` at any time."""

    def __init__(self, context: Context, ends: Collection[int], metrics: ServerMetrics, chunk: int = 0) -> None:
        self.ends, self.metrics, self.chunk = ends, metrics, chunk or CHUNKS[context.compute.device.type]
        self.engine = Engine(context, ends, self.chunk)
        self.rows = len(context.slots)  # Maximum number of texts generated at the same time.
        self.failure: UserError | None = None  # A permanent failure, like a lost GPU.
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._tickets: dict[int, Ticket] = {}  # Tickets by their request's number in the engine.
        self._loop: asyncio.AbstractEventLoop
        self._thread = threading.Thread(target=self._run, name="gpt-serve", daemon=True)

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Starts the thread. Updates are delivered in ``loop``."""
        self._loop = loop
        self._thread.start()

    def stop(self, seconds: float = 5) -> None:
        """Ends the thread after its current step. Waits at most ``seconds``."""
        self._inbox.put(None)
        self._thread.join(seconds)

    def add(self, tickets: Sequence[Ticket]) -> None:
        """Submits requests."""
        self._inbox.put(lambda: self._add(tickets))

    def cancel(self, tickets: Sequence[Ticket]) -> None:
        """Cancels requests and frees their slots in the next step. Updates in flight are still delivered."""
        self._inbox.put(lambda: self._cancel(tickets))

    async def run(self, work: Callable[[Context], T]) -> T:
        """Runs ``work`` in the thread, between two steps, unless the caller is cancelled before it starts."""
        future = Future[T]()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(work(self.engine.context))
            except BaseException as error:
                future.set_exception(_as_user_error(error))

        self._inbox.put(run)
        return await asyncio.wrap_future(future)

    def _add(self, tickets: Sequence[Ticket]) -> None:
        for ticket in tickets:
            try:
                if self.failure is not None:
                    raise self.failure
                ticket.number = self.engine.add(ticket.request)
                self._tickets[ticket.number] = ticket
            except BaseException as error:
                user_error = _as_user_error(error)
                self._send([(ticket, Update(-1, error=user_error))])
                if user_error is not error:
                    self.failure = user_error
        if self.failure is not None:
            self._fail(self.failure)

    def _cancel(self, tickets: Sequence[Ticket]) -> None:
        numbers = [ticket.number for ticket in tickets if self._tickets.get(ticket.number) is ticket]
        self.engine.cancel(*numbers)
        for number in numbers:
            del self._tickets[number]

    def _run(self) -> None:
        while True:
            try:
                if not self._process_inbox():
                    return
                self._step()
            except BaseException as error:  # An error outside `_step` leaves an unknown state.
                self.failure = _as_user_error(error)
                self._fail(self.failure)

    def _step(self) -> None:
        try:
            with self.metrics.step_seconds.time():
                updates = self.engine.step()
        except BaseException as error:
            self._fail(_as_user_error(error))
            return
        self.metrics.generated_tokens.inc(sum(len(update.tokens) for update in updates))
        deliveries = []
        for update in updates:
            ticket = self._tickets[update.number]
            if update.tokens or update.prompt or update.reason or update.error:
                deliveries.append((ticket, update))
            if update.reason or update.error:
                del self._tickets[update.number]
        self._send(deliveries)

    def _process_inbox(self) -> bool:
        """Runs the actions in the inbox. If the engine is idle, waits for an action. Returns False after `stop`."""
        while True:
            try:
                action = self._inbox.get(block=not self.engine.busy)
            except queue.Empty:
                return True
            if action is None:
                return False
            action()

    def _fail(self, error: UserError) -> None:
        """Ends every request with an error, and clears the context, which can contain an unfinished step."""
        self._send([(ticket, Update(number, error=error)) for number, ticket in self._tickets.items()])
        self._tickets = {}
        context = self.engine.context
        self.engine = Engine(context, self.ends, self.chunk)
        try:
            for slot in context.slots:
                context.clear(slot)
        except BaseException:
            self.failure = error

    def _send(self, updates: list[tuple[Ticket, Update]]) -> None:
        if updates:
            try:
                self._loop.call_soon_threadsafe(_deliver, updates)
            except RuntimeError:  # The event loop has ended.
                self._inbox.put(None)


def _deliver(updates: list[tuple[Ticket, Update]]) -> None:
    for ticket, update in updates:
        ticket.deliver(update)


def _as_user_error(error: BaseException) -> UserError:  # A Rust panic is not an Exception.
    if isinstance(error, UserError):
        return error
    if is_out_of_memory(error):
        return WorkError("out of memory", "request fewer tokens at once")
    return WorkError(f"internal error in gpt: {type(error).__name__}: {error}", "please report it")
