"""Runs the server: sockets, signals and graceful shutdown."""

import asyncio
import contextlib
import functools
import gc
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from gpt.config.device import Compute
from gpt.config.serve import ServeConfig
from gpt.decoding.context import CACHE_SHARE, Context, capacity
from gpt.decoding.library import Note
from gpt.decoding.write import MAX_BATCH
from gpt.insight.passages import TrainingText
from gpt.insight.report import find_training_tokens
from gpt.model.decoder import GPT
from gpt.runs import folder
from gpt.runs.sampling_defaults import read_defaults
from gpt.serve.answers import Service
from gpt.serve.app import Server
from gpt.serve.metrics import ServerMetrics
from gpt.serve.worker import Worker
from gpt.system import waiting
from gpt.system.errors import Interrupted, UserError
from gpt.system.files import Stamps
from gpt.system.interrupt import StopSignal
from gpt.system.words import counted
from gpt.tokenizers.tokenizer import Tokenizer

IDLE_SECONDS = 30  # Timeout for a request's headers, and between requests.
STALLED_SECONDS = 60  # Timeout for a client that doesn't read its response.
MAX_CONNECTIONS = 16_384
CPU_CACHE_SHARE = 0.5  # Share of memory for keys and values on a CPU, whose KV cache takes memory only as it fills.
SPARE_FILES = 100  # File descriptors reserved for everything except connections.


class _Connection(H11Protocol):
    """A connection with timeouts for request headers and for reading the response."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._last_cycle: object = None  # The request at the last call of `_watch`.
        self._stall_timer: asyncio.TimerHandle | None = None
        self._idle_timer = self.loop.call_later(IDLE_SECONDS, self._watch)
        if len(self.connections) > compute_max_connections():  # Close the longest-idle connection.
            idle = [
                connection for connection in self.connections if isinstance(connection, _Connection) and connection.idle
            ]
            min(idle, key=lambda connection: connection._idle_timer.when()).transport.abort()

    @property
    def idle(self) -> bool:
        """Whether the connection has no request in flight."""
        return self.cycle is None or self.cycle.response_complete

    def _watch(self) -> None:
        if self.idle and self.cycle is self._last_cycle:
            self.transport.abort()
        self._last_cycle = self.cycle
        self._idle_timer = self.loop.call_later(IDLE_SECONDS, self._watch)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stall_timer = self.loop.call_later(STALLED_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stall_timer is not None:
            self._stall_timer.cancel()

    def connection_lost(self, error: Exception | None) -> None:
        self._idle_timer.cancel()
        self.resume_writing()
        super().connection_lost(error)


@functools.cache
def compute_max_connections() -> int:
    """Returns the maximum number of connections."""
    with contextlib.suppress(ImportError):  # Windows has no `resource`.
        import resource

        open_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return min(MAX_CONNECTIONS, max(1, open_files - SPARE_FILES))
    return MAX_CONNECTIONS


class _Uvicorn(uvicorn.Server):
    """Uvicorn's server. It leaves signals to `serve` and calls ``ready`` when it accepts requests."""

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


def make_context(
    model: GPT, compute: Compute, config: ServeConfig, vocab_size: int, note: Note, models: int = 1
) -> Context:
    """Creates a context for ``max_batch`` sequences. By default, the device and its memory, which so many ``models``
    share, determine the number. Raises `UserError` if memory is too small."""
    size, device = min(model.config.block_size, config.context or model.config.block_size), compute.device.type
    share = (CPU_CACHE_SHARE if device == "cpu" else CACHE_SHARE) / models
    rows = config.max_batch or max(1, min(MAX_BATCH[device], capacity(model, compute, size, share)))
    try:
        return Context(model, compute, rows, vocab_size=vocab_size, size=size, note=note)
    except UserError as error:
        raise UserError(error.message, "use a smaller --max-batch or --context") from None


def listen(config: ServeConfig) -> socket.socket:
    """Opens the socket. Raises `UserError` if the address or port is unavailable."""
    try:
        family, _, _, _, address = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family, backlog=2048)
    except OSError as error:
        raise UserError(
            f"cannot listen at {config.host}, port {config.port}: {os.strerror(error.errno) if error.errno else error}",
            "another program may be using the port: use another --port, or 0 for a free one",
        ) from None


@dataclass(frozen=True)
class ServedModel:
    """A model that was loaded for sampling, and its name for clients. Sampling defaults and training text are read for
    ``path``."""

    name: str
    model: GPT
    tokenizer: Tokenizer
    compute: Compute
    path: Path | None = None


def make_service(
    load: Callable[[], ServedModel], config: ServeConfig, metrics: ServerMetrics, note: Note, models: int
) -> Service:
    """Makes the service of one of so many ``models``. Raises `UserError` if memory is too small."""
    served = load()
    name, tokenizer, path = served.name, served.tokenizer, served.path
    context = make_context(served.model, served.compute, config, tokenizer.vocab_size, note, models)
    same_rows = replace(config, max_batch=len(context.slots))

    def reload() -> Context:
        note(f"{name} was unloaded after {config.idle_unload:g} idle minutes: loading it again")
        served = load()
        if (served.tokenizer.fingerprint, served.model.config) != (tokenizer.fingerprint, worker.model_config):
            raise UserError("its files now hold another model")
        return make_context(served.model, served.compute, same_rows, tokenizer.vocab_size, note)

    worker = Worker(context, tokenizer.ends, metrics)
    worker.idle_seconds, worker.load = 60 * config.idle_unload or None, reload
    defaults = _defaults(path, note) if path and config.defaults == "model" else {}
    training = TrainingText(find_training_tokens(path, tokenizer)) if path and config.with_text else None
    stamps = Stamps(folder.weight_files(folder.home(path)) if path else ())
    created = int(time.time())
    return Service(name, tokenizer, context.size, worker, config, metrics, created, defaults, training, stamps)


def serve(
    models: Sequence[Callable[[], ServedModel]],
    config: ServeConfig,
    ready: Callable[[str], None] = lambda where: None,
    note: Callable[[str], None] = lambda text: None,
) -> None:
    """Serves models, which it loads, until a signal arrives. Calls ``ready`` with their names and the address once it
    accepts requests. Raises `UserError` if the address is unavailable or memory is too small, and `Interrupted` at the
    end."""
    metrics = ServerMetrics()
    services = [make_service(load, config, metrics, note, len(models)) for load in models]
    gc.collect()
    gc.freeze()  # Later garbage collections, which stop all threads, skip existing objects.
    with contextlib.closing(listen(config)) as listener:
        waiting.end_threads()  # The worker thread creates its own OpenMP threads.
        host = f"[{config.host}]" if ":" in config.host else config.host
        address = f"http://{host}:{listener.getsockname()[1]}"
        where = f"{', '.join(service.name for service in services)} at {address}"
        signum = asyncio.run(_serve(Server(services, note), listener, lambda: ready(where), note))
    raise Interrupted(signum, "the server has stopped")


def _defaults(checkpoint: Path, note: Callable[[str], None]) -> dict[str, Any]:
    """Reads and prints the sampling defaults of a model."""
    try:
        defaults = read_defaults(checkpoint, note)
    except UserError as error:
        raise UserError(error.message, "fix the file, or ignore it with --defaults openai") from None
    if defaults.settings:
        note(f"{defaults.describe(defaults.settings)}; --defaults openai turns them off")
    return defaults.settings


def http_server(server: Server, ready: Callable[[], None]) -> uvicorn.Server:
    """Returns the HTTP server, which calls ``ready`` once it accepts requests."""
    config = uvicorn.Config(
        server.app, http=_Connection, ws="none", lifespan="off", log_config=None, log_level="critical",
        access_log=False, server_header=False, timeout_keep_alive=IDLE_SECONDS, backlog=2048,
        timeout_graceful_shutdown=2,
    )  # fmt: skip
    return _Uvicorn(config, ready)


async def _serve(
    server: Server, listener: socket.socket, ready: Callable[[], None], note: Callable[[str], None]
) -> int:
    workers, loop = [service.worker for service in server.services.values()], asyncio.get_running_loop()
    http = http_server(server, ready)
    tasks: list[asyncio.Task[None]] = []

    def finish() -> None:
        tasks.append(asyncio.create_task(_finish(server, http, note)))

    def end_at_once() -> None:
        server.abort()
        http.should_exit = http.force_exit = True

    with StopSignal(
        on_first=lambda signum: loop.call_soon_threadsafe(finish),
        on_second=lambda signum: loop.call_soon_threadsafe(end_at_once),
    ) as stop:
        for worker in workers:
            worker.start(loop)
        try:
            await http.serve(sockets=[listener])
        finally:
            for worker in workers:
                worker.stop()
    return stop.signum or signal.SIGTERM


async def _finish(server: Server, http: uvicorn.Server, note: Callable[[str], None]) -> None:
    """Stops the server when its requests have ended. Requests that exceed the grace period end with an error."""
    in_flight, grace = server.in_flight, server.config.grace
    server.stopping = True
    if in_flight.count:
        note(f"{counted(in_flight.count, 'request')} may run for {grace:g} s more; press Ctrl-C again to stop at once")
    deadline = time.monotonic() + grace
    while in_flight.count and time.monotonic() < deadline:
        await asyncio.sleep(0.02)
    server.abort()
    while in_flight.count and time.monotonic() < deadline + 1:
        await asyncio.sleep(0.02)
    http.should_exit = True
