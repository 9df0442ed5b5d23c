"""The thread that owns the engine and runs the requests of the event loop."""

import asyncio
import functools
import gc
import itertools
import queue
import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

from gpt.config.device import trim_memory
from gpt.decoding.context import Context
from gpt.decoding.engine import Engine, Request, Update
from gpt.serve.metrics import ServerMetrics
from gpt.system.errors import UserError, WorkError, as_user_error

CHUNKS = {"cpu": 128, "mps": 128, "cuda": 2048}  # Maximum prompt ids per step, by device: a fraction of a second.
INBOX_SECONDS = 0.05  # Running texts wait at most for this, and for one request, while new requests are added.
T = TypeVar("T")


@dataclass(eq=False)
class Ticket:
    """A submitted request. ``deliver`` receives its updates in the event loop."""

    request: Request
    deliver: Callable[[Update], None]
    number: int = -1  # The request's number in the engine.


class Worker:
    """Runs an engine in a separate thread. The event loop can call `add` and `cancel` at any time."""

    def __init__(self, context: Context, ends: Collection[int], metrics: ServerMetrics) -> None:
        self.ends, self.metrics, self.model_config = ends, metrics, context.model.config
        self.idle_seconds: float | None = None  # An engine that is idle for so long is deleted, to free its memory.
        self.load: Callable[[], Context]  # Loads the model for the next request.
        self._numbers = itertools.count()  # Shared by all engines: a request can be cancelled after its engine is gone.
        self.engine: Engine | None = self._make_engine(context)
        self.rows = len(context.slots)  # Maximum number of texts generated at the same time.
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._outbox: list[tuple[Ticket, Update]] = []
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

    @property
    def busy(self) -> bool:
        """Whether any request is waiting or running."""
        return self.engine is not None and self.engine.busy

    def add(self, tickets: Sequence[Ticket]) -> None:
        """Submits requests."""
        self._inbox.put(lambda: self._add(tickets))

    def cancel(self, tickets: Sequence[Ticket]) -> None:
        """Cancels requests and frees their slots in the next step. Updates in flight are still delivered."""

        def cancel() -> None:
            if self.engine is not None:
                self.engine.cancel(*(ticket.number for ticket in tickets))

        self._inbox.put(cancel)

    async def run(self, work: Callable[[Context], T]) -> T:
        """Runs ``work`` in the thread, between two steps, unless the caller is cancelled before it starts."""
        future = Future[T]()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(work(self._load().context))
            except BaseException as error:
                future.set_exception(as_user_error(error))

        self._inbox.put(run)
        return await asyncio.wrap_future(future)

    def _load(self) -> Engine:
        """Returns the engine. Loads the model again if the engine was deleted."""
        if self.engine is None:
            self.engine = self._make_engine(self.load())
        return self.engine

    def _make_engine(self, context: Context) -> Engine:
        return Engine(context, self.ends, CHUNKS[context.compute.device.type], self._numbers)

    def _unload(self) -> None:
        self.engine = None
        gc.unfreeze()  # The engine refers to itself, and the server has frozen it.
        gc.collect()
        gc.freeze()
        trim_memory()

    def _add(self, tickets: Sequence[Ticket]) -> None:
        try:
            engine = self._load()
        except BaseException as error:
            reason = WorkError(f"the model could not be loaded again: {as_user_error(error).message}")
            self._collect(tickets[0], Update(-1, error=reason))
            return
        for ticket in tickets:
            deliver = functools.partial(self._collect, ticket)
            try:
                ticket.number = engine.add(ticket.request, deliver)
            except BaseException as error:
                if not isinstance(error, UserError):
                    self._fail(error)
                deliver(Update(-1, error=as_user_error(error)))

    def _collect(self, ticket: Ticket, update: Update) -> None:
        if update.tokens or update.prompt or update.reason or update.error:
            self._outbox.append((ticket, update))

    def _run(self) -> None:
        while True:
            try:
                if not self._process_inbox():
                    return
                self._step()
            except BaseException as error:  # An error outside `_step` leaves an unknown state.
                self._fail(error)
                self._send()

    def _step(self) -> None:
        updates, engine = list[Update](), self._load()
        try:
            with self.metrics.step_seconds.time():
                updates = engine.step()
        except BaseException as error:
            engine.abort(error)
        self.metrics.generated_tokens.inc(sum(len(update.tokens) for update in updates))
        self._send()

    def _process_inbox(self) -> bool:
        """Runs actions in the inbox, until the next step is due. If the engine is idle, waits for an action. Returns
        False after `stop`."""
        end = time.monotonic() + INBOX_SECONDS
        while not self.busy or time.monotonic() < end:
            try:
                action = self._inbox.get(block=not self.busy, timeout=self.idle_seconds if self.engine else None)
            except queue.Empty:
                if self.busy:
                    return True
                self._unload()
                continue
            if action is None:
                return False
            action()
            self._send()
        return True

    def _fail(self, error: BaseException) -> None:
        """Ends every request with an error, and refuses later ones."""
        if self.engine is not None:
            self.engine.failure = as_user_error(error)
            self.engine.abort(error)

    def _send(self) -> None:
        updates, self._outbox = self._outbox, []
        if updates:
            try:
                self._loop.call_soon_threadsafe(_deliver, updates)
            except RuntimeError:  # The event loop has ended.
                self._inbox.put(None)


def _deliver(updates: list[tuple[Ticket, Update]]) -> None:
    for ticket, update in updates:
        ticket.deliver(update)
