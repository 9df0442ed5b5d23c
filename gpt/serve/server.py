"""Runs the server: sockets, signals, and an orderly end."""

import asyncio
import contextlib
import signal
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from gpt.decoding.context import CACHE_SHARE, Context
from gpt.decoding.weights import weight_bytes
from gpt.decoding.write import ROWS
from gpt.device import Compute
from gpt.errors import Interrupted, UserError
from gpt.model.decoder import GPT
from gpt.model.params import cache_bytes
from gpt.serve.answers import Service
from gpt.serve.app import Server
from gpt.serve.metrics import ServerMetrics
from gpt.serve.worker import Worker
from gpt.serve_config import ServeConfig
from gpt.text.tokenizer import Tokenizer

IDLE_SECONDS = 30  # that a connection may take to send a request's head, and be idle after one


class _Connection(H11Protocol):
    """A connection that is closed when no whole request head comes in time."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._deadline = self.loop.call_later(IDLE_SECONDS, self._late)

    def _late(self) -> None:
        if not hasattr(self.cycle, "response_complete"):  # no request has come: it is None then
            self.transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        self._deadline.cancel()
        super().connection_lost(error)


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


def rows_for(model: GPT, compute: Compute, config: ServeConfig) -> int:
    """Texts at once: as many as were asked for, or as the device has memory for."""
    row = cache_bytes(model.config, model.config.block_size, compute.dtype.itemsize)
    left = max(0, compute.memory() - weight_bytes(model, compute))
    fitting = int(min(CACHE_SHARE * compute.memory(), left) / row)
    return config.max_batch or max(1, min(ROWS[compute.device.type], fitting))


def listen(config: ServeConfig) -> socket.socket:
    """Opens the socket. Raises `UserError` for an address or a port that cannot be had."""
    try:
        family, _, _, _, address = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family, backlog=2048)
    except OSError as error:
        raise UserError(
            f"cannot listen at {config.host}, port {config.port}: {error.strerror or error}",
            "another program may have the port: take another --port, or 0 for a free one",
        ) from None


def serve(
    model: GPT,
    tokenizer: Tokenizer,
    compute: Compute,
    name: str,
    config: ServeConfig,
    ready: Callable[[str], None] = lambda address: None,
    note: Callable[[str], None] = lambda text: None,
) -> None:
    """Serves a model that was loaded for sampling, until a signal comes; ``ready`` is told the address once requests
    are answered. Raises `UserError` where the address or the memory cannot be had, `Interrupted` at the end."""
    sock = listen(config)
    with contextlib.closing(sock):
        rows, metrics = rows_for(model, compute, config), ServerMetrics()
        worker = Worker(lambda: Context(model, compute, rows, vocab_size=tokenizer.vocab_size), tokenizer.ends, metrics)
        service = Service(
            name, tokenizer, model.config.vocab_size, model.config.block_size, worker, config, metrics, int(time.time())
        )
        host = f"[{config.host}]" if ":" in config.host else config.host
        address = f"http://{host}:{sock.getsockname()[1]}"
        signum = asyncio.run(_serve(Server(service), sock, lambda: ready(address), note))
    raise Interrupted(signum, "the server has stopped")


async def _serve(server: Server, sock: socket.socket, ready: Callable[[], None], note: Callable[[str], None]) -> int:
    service = server.service
    settings = uvicorn.Config(
        server.app, http=_Connection, ws="none", lifespan="off", log_config=None, access_log=False,
        server_header=False, timeout_keep_alive=IDLE_SECONDS, backlog=2048, timeout_graceful_shutdown=2,
    )  # fmt: skip
    http = _Uvicorn(settings, ready)
    loop = asyncio.get_running_loop()
    came: list[int] = []

    def on_signal(signum: int, *_: object) -> None:
        came.append(signum)
        loop.call_soon_threadsafe(_end, server, http, came, note)

    before = {each: signal.signal(each, on_signal) for each in (signal.SIGINT, signal.SIGTERM)}
    service.worker.start(loop)
    try:
        await http.serve(sockets=[sock])
    finally:
        service.worker.stop()
        for signum, handler in before.items():
            signal.signal(signum, handler)
    return came[0] if came else signal.SIGTERM


def _end(server: Server, http: uvicorn.Server, came: list[int], note: Callable[[str], None]) -> None:
    """Answers a signal: the first lets running requests go on for a while, the second does not."""
    if len(came) > 1:
        server.give_up()
        http.should_exit = http.force_exit = True
        return
    server.stop()
    grace = server.service.config.grace
    if server.service.pending:
        note(f"{len(server.service.pending)} requests have {grace:g} s to end; Ctrl-C again ends them at once")
    asyncio.get_running_loop().create_task(_finish(server, http, grace))


async def _finish(server: Server, http: uvicorn.Server, grace: float) -> None:
    end = time.monotonic() + grace
    while server.service.pending and time.monotonic() < end:
        await asyncio.sleep(0.02)
    server.give_up()
    while server.service.pending and time.monotonic() < end + 1:
        await asyncio.sleep(0.02)
    http.should_exit = True
