"""Requests in flight: each counts from its first byte to the end of its answer, and ends when its client leaves."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gpt.serve.metrics import ServerMetrics
from gpt.serve.protocol import ApiError

LARGEST_BODY = 4 * 2**20
SMALL_BODY = 2**16  # accepted however much memory other bodies take
MOST_BODIES = 64 * LARGEST_BODY  # bytes of the bodies of all requests in flight
THREADS = {"text": 2, "large text": 1, "chat": 1, "constraint": 1}  # that parse, tokenize, render, compile


class InFlight:
    """ASGI middleware that counts POST requests and the bytes of their bodies, and cancels one whose client leaves,
    whatever it is waiting for: a body, a thread, or tokens.

    Its threads come in lanes, so that nobody waits for others' large bodies or slow chat templates.
    """

    def __init__(self, app: ASGIApp, metrics: ServerMetrics) -> None:
        self.app, self.metrics = app, metrics
        self.count = 0
        self.bytes = 0
        self.lanes = {name: ThreadPoolExecutor(count, f"gpt-{name}") for name, count in THREADS.items()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request."""
        if scope["type"] != "http" or scope["method"] != "POST":
            await self.app(scope, receive, send)
            return
        flight = _Flight(self, receive, send)
        self.count += 1
        try:
            await self.app(scope, flight.receive, flight.send)
        except asyncio.CancelledError:
            if not flight.left:
                raise
            flight.task.uncancel()
            self.metrics.cancelled.inc()
        finally:
            flight.stop_watching()
            self.count -= 1
            self.bytes -= flight.size


class _Flight:
    """A request: reads its body, counting, and watches its client from then on."""

    def __init__(self, every: InFlight, receive: Receive, send: Send) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.every, self.task = every, task
        self.size = 0  # bytes of its body
        self.left = False  # whether its client has left
        self._receive, self._send = receive, send
        self._watch: asyncio.Task[None] | None = None

    async def receive(self) -> Message:
        """Returns the next part of the body. Raises `ApiError` for a body that is too large."""
        message = await self._receive()
        self.size += len(message.get("body", b""))
        self.every.bytes += len(message.get("body", b""))
        if self.size > LARGEST_BODY:
            raise ApiError(413, f"the body has more than {LARGEST_BODY:,} bytes")
        if self.size > SMALL_BODY and self.every.bytes > MOST_BODIES:
            raise come_later("too many large requests are in flight")
        if message["type"] == "http.request" and not message.get("more_body"):
            self._watch = asyncio.create_task(self._cancel_when_it_leaves())
        return message

    async def send(self, message: Message) -> None:
        """Sends a part of the answer."""
        if message["type"] == "http.response.body" and not message.get("more_body"):
            self.stop_watching()  # after the last part, the server reports a disconnect in any case
        await self._send(message)

    async def _cancel_when_it_leaves(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.left = True
        self.task.cancel()

    def stop_watching(self) -> None:
        """Leaves the client alone: its answer is complete."""
        if self._watch is not None:
            self._watch.cancel()


def come_later(why: str) -> ApiError:
    """Returns the error of a server that is busy."""
    return ApiError(429, f"{why}; try again shortly", code="queue_full")
