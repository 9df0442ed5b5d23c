"""Counts requests in flight, from the first byte to the end of the response, and cancels them on disconnect."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gpt.serve.metrics import ServerMetrics
from gpt.serve.protocol import ApiError

MAX_BODY = 4 * 2**20
SMALL_BODY = 2**16  # Smaller bodies are exempt from `MAX_BODIES`.
MAX_BODIES = 64 * MAX_BODY  # Maximum bytes of all bodies in flight.
THREADS = {"text": 2, "large text": 1, "chat": 1, "constraint": 1, "large constraint": 1}  # Threads per lane.


class InFlight:
    """ASGI middleware that counts POST requests and body bytes, and cancels requests of disconnected clients.

    Separate lanes of threads prevent large bodies, slow chat templates and large constraints from delaying other
    requests.
    """

    def __init__(self, app: ASGIApp, metrics: ServerMetrics) -> None:
        self.app, self.metrics = app, metrics
        self.count = 0
        self.bytes = 0
        self.lanes = {name: ThreadPoolExecutor(count, f"gpt-{name}") for name, count in THREADS.items()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request."""
        if scope["method"] != "POST":
            await self.app(scope, receive, send)
            return
        flight = _Flight(self, receive, send)
        self.count += 1
        try:
            await self.app(scope, flight.receive, flight.send)
        except asyncio.CancelledError:
            if not flight.disconnected:
                raise
            flight.task.uncancel()
            self.metrics.cancelled.inc()
        finally:
            flight.stop_watching()
            self.count -= 1
            self.bytes -= flight.size


class _Flight:
    """A request in flight: counts the bytes of its body, then watches for a disconnect."""

    def __init__(self, in_flight: InFlight, receive: Receive, send: Send) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.in_flight, self.task = in_flight, task
        self.size = 0  # Bytes of the body.
        self.disconnected = False
        self._receive, self._send = receive, send
        self._watch: asyncio.Task[None] | None = None

    async def receive(self) -> Message:
        """Returns the next part of the body. Raises `ApiError` if the body is too large."""
        message = await self._receive()
        self.size += len(message.get("body", b""))
        self.in_flight.bytes += len(message.get("body", b""))
        if self.size > MAX_BODY:
            raise ApiError(413, f"the body has more than {MAX_BODY:,} bytes")
        if self.size > SMALL_BODY and self.in_flight.bytes > MAX_BODIES:
            raise busy_error("too many large requests are in flight")
        if message["type"] == "http.disconnect":
            self.disconnected = True
            raise asyncio.CancelledError
        if not message.get("more_body"):
            self._watch = asyncio.create_task(self._cancel_on_disconnect())
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.body" and not message.get("more_body"):
            self.stop_watching()  # Uvicorn reports a disconnect after every response.
        await self._send(message)

    async def _cancel_on_disconnect(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.disconnected = True
        self.task.cancel()

    def stop_watching(self) -> None:
        if self._watch is not None:
            self._watch.cancel()


def busy_error(reason: str) -> ApiError:
    """Returns the error for a busy server."""
    return ApiError(429, f"{reason}; try again shortly", code="queue_full")
