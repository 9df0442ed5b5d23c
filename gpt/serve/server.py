"""Runs the server: sockets, signals, and an orderly end."""

import asyncio
import contextlib
import functools
import gc
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from gpt import waiting
from gpt.decoding import native
from gpt.decoding.context import Context, capacity
from gpt.decoding.engine import generate
from gpt.decoding.write import ROWS
from gpt.device import Compute
from gpt.errors import Interrupted, UserError
from gpt.files import read_json
from gpt.interrupt import heeded
from gpt.model.decoder import GPT
from gpt.runs import folder
from gpt.sample_config import SampleConfig
from gpt.serve.answers import Service
from gpt.serve.app import Server
from gpt.serve.metrics import ServerMetrics
from gpt.serve.protocol import sampling_defaults
from gpt.serve.worker import Worker
from gpt.serve_config import ServeConfig
from gpt.text.tokenizer import Tokenizer
from gpt.words import counted

IDLE_SECONDS = 30  # that a connection may take for a request's head, or be idle between two
STALLED_SECONDS = 60  # that a client may take to read what lies in its connection
MOST_CONNECTIONS = 16_384
SPARE_FILES = 100  # open files that are left for others than connections


class _Connection(H11Protocol):
    """A connection that is closed when no request's head comes in time, or nobody reads the answer."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._seen: object = None  # the request of `_watch` before
        self._stalled: asyncio.TimerHandle | None = None
        self._timer = self.loop.call_later(IDLE_SECONDS, self._watch)
        if len(self.connections) > most_connections():
            idle = [each for each in self.connections if isinstance(each, _Connection) and each.idle]
            min(idle, key=lambda each: each._timer.when()).transport.abort()

    @property
    def idle(self) -> bool:
        """Whether no request is being answered."""
        return self.cycle is None or self.cycle.response_complete

    def _watch(self) -> None:
        if self.idle and self.cycle is self._seen:
            self.transport.abort()
        self._seen = self.cycle
        self._timer = self.loop.call_later(IDLE_SECONDS, self._watch)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stalled = self.loop.call_later(STALLED_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stalled is not None:
            self._stalled.cancel()

    def connection_lost(self, error: Exception | None) -> None:
        self._timer.cancel()
        self.resume_writing()
        super().connection_lost(error)


@functools.cache
def most_connections() -> int:
    """Returns how many connections there may be; past them the longest idle one is closed."""
    with contextlib.suppress(ImportError):  # Windows
        import resource

        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return min(MOST_CONNECTIONS, max(1, files - SPARE_FILES))
    return MOST_CONNECTIONS


class _Uvicorn(uvicorn.Server):
    """Uvicorn's server, whose signals `serve` handles, and which tells when requests are answered."""

    def __init__(self, config: uvicorn.Config, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self.ready = ready

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self.ready()


def make_context(model: GPT, compute: Compute, config: ServeConfig, vocab_size: int | None = None) -> Context:
    """Makes slots for as many texts at once as were asked for, or as the device has memory for. A prompt and what
    follows have ``limit_tokens`` each, or the context. Raises `UserError` where they do not fit into the memory."""
    size = min(model.config.block_size, config.context or model.config.block_size)
    room = min(size, 2 * config.limit_tokens)
    rows = config.max_batch or max(1, min(ROWS[compute.device.type], capacity(model, compute, room)))
    try:
        return Context(model, compute, rows, room, vocab_size=vocab_size, size=size)
    except UserError as error:
        raise UserError(error.message, "use a smaller --max-batch or --context") from None


def listen(config: ServeConfig) -> socket.socket:
    """Opens the socket. Raises `UserError` for an address or a port that cannot be had."""
    try:
        family, _, _, _, address = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family, backlog=2048)
    except OSError as error:
        raise UserError(
            f"cannot listen at {config.host}, port {config.port}: {os.strerror(error.errno) if error.errno else error}",
            "another program may be using the port: use another --port, or 0 for a free one",
        ) from None


def serve(
    model: GPT,
    tokenizer: Tokenizer,
    compute: Compute,
    name: str,
    config: ServeConfig,
    ready: Callable[[str], None] = lambda address: None,
    note: Callable[[str], None] = lambda text: None,
    path: Path | None = None,
) -> None:
    """Serves a model that was loaded for sampling, until a signal comes; ``ready`` is told the address once requests
    are answered. The checkpoint at ``path`` may have sampling defaults. Raises `UserError` where the address or the
    memory cannot be had, `Interrupted` at the end."""
    context = make_context(model, compute, config, tokenizer.vocab_size)
    metrics = ServerMetrics()
    worker = Worker(context, tokenizer.ends, metrics)
    defaults = _defaults(path, note) if path and config.defaults == "model" else {}
    service = Service(name, tokenizer, context.size, worker, config, metrics, int(time.time()), defaults)
    gc.collect()
    gc.freeze()  # what lives as long as the server needs no look at each collection, which stops all threads
    with contextlib.closing(listen(config)) as sock:
        if native.is_used(model):  # compiled now, and not while the first client waits
            _ = [*generate(context, [0], SampleConfig(max_tokens=2), ())]
            context.slots[0].forget()
        waiting.end_threads()  # the worker has its own
        host = f"[{config.host}]" if ":" in config.host else config.host
        address = f"http://{host}:{sock.getsockname()[1]}"
        signum = asyncio.run(_serve(Server(service, note), sock, lambda: ready(address), note))
    raise Interrupted(signum, "the server has stopped")


def _defaults(checkpoint: Path, note: Callable[[str], None]) -> dict[str, Any]:
    """Reads the sampling defaults of a model, and prints them."""
    path = folder.home(checkpoint) / "generation_config.json"
    try:
        found = sampling_defaults(read_json(path), note) if path.is_file() else {}
    except UserError as error:
        raise UserError(error.message, "fix the file, or ignore it with --defaults openai") from None
    if found:
        shown = ", ".join(f"{name} {value:.15g}" for name, value in found.items())
        note(f"sampling defaults from generation_config.json: {shown}; --defaults openai turns them off")
    return found


def http_server(server: Server, ready: Callable[[], None]) -> uvicorn.Server:
    """Returns the server of HTTP, which calls ``ready`` once requests are answered."""
    settings = uvicorn.Config(
        server.app, http=_Connection, ws="none", lifespan="off", log_config=None, log_level="critical",
        access_log=False, server_header=False, timeout_keep_alive=IDLE_SECONDS, backlog=2048,
        timeout_graceful_shutdown=2,
    )  # fmt: skip
    return _Uvicorn(settings, ready)


async def _serve(server: Server, sock: socket.socket, ready: Callable[[], None], note: Callable[[str], None]) -> int:
    worker, loop = server.service.worker, asyncio.get_running_loop()
    http = http_server(server, ready)
    came: list[int] = []
    ending: list[asyncio.Task[None]] = []

    def end() -> None:
        """Answers a signal: the first lets running requests go on for a while, the second does not."""
        if len(came) > 1:
            server.give_up()
            http.should_exit = http.force_exit = True
            return
        ending.append(asyncio.create_task(_finish(server, http, note)))

    def on_signal(signum: int, *_: object) -> None:
        came.append(signum)
        loop.call_soon_threadsafe(end)

    before = {each: signal.signal(each, on_signal) for each in heeded()}
    worker.start(loop)
    try:
        await http.serve(sockets=[sock])
    finally:
        worker.stop()
        for signum, handler in before.items():
            signal.signal(signum, handler)
    return came[0] if came else signal.SIGTERM


async def _finish(server: Server, http: uvicorn.Server, note: Callable[[str], None]) -> None:
    """Stops the server once its requests have ended, which get an error when their time is over."""
    in_flight, grace = server.in_flight, server.service.config.grace
    server.stop()
    if in_flight.count:
        note(f"{counted(in_flight.count, 'request')} may run for {grace:g} s more; press Ctrl-C again to stop at once")
    end = time.monotonic() + grace
    while in_flight.count and time.monotonic() < end:
        await asyncio.sleep(0.02)
    server.give_up()
    while in_flight.count and time.monotonic() < end + 1:
        await asyncio.sleep(0.02)
    http.should_exit = True
