"""A test server in a thread, on a free port, with a small model."""

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from gpt import api
from gpt.api import LanguageModel
from gpt.config.serve import ServeConfig
from gpt.decoding.context import Context
from gpt.insight.passages import TrainingText
from gpt.insight.report import find_training_tokens
from gpt.serve import server as servers
from gpt.serve.answers import Service
from gpt.serve.app import Server
from gpt.serve.metrics import ServerMetrics
from gpt.serve.worker import Worker


def load(path: Path) -> LanguageModel:
    return api.load(path, dtype="float32", for_decoding=True)


class Served:
    def __init__(self, server: Server, sock: socket.socket, stop: Callable[[], None], notes: list[str]) -> None:
        self.server, self.stop = server, stop
        self.service = next(iter(server.services.values()))
        self.notes = notes
        self.port = sock.getsockname()[1]
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=60)

    def post(self, route: str, **body: Any) -> httpx.Response:
        return self.client.post(route, content=json.dumps(body), headers={"Content-Type": "application/json"})

    def ask(self, route: str = "/v1/completions", **body: Any) -> Any:
        """Returns the response to a request that must succeed."""
        answer = self.post(route, **body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def stream(self, route: str = "/v1/completions", **body: Any) -> list[Any]:
        answer = self.post(route, **{"stream": True, **body})
        assert answer.status_code == 200, answer.text
        assert answer.headers["content-type"].startswith("text/event-stream")
        return events(answer.text)

    def refuse(self, route: str = "/v1/completions", status: int = 400, **body: Any) -> Any:
        """Returns the error of a request that must fail."""
        answer = self.post(route, **body)
        assert answer.status_code == status, answer.text
        error = answer.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert "--" not in error["message"]  # Messages for clients must not name command-line options.
        return error

    def raw(self, data: bytes) -> bytes:
        """Sends raw bytes. Returns what the server sends until it closes the connection."""
        with self.connect() as sock:
            sock.sendall(data)
            return received(sock)

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=60)

    def idle(self) -> None:
        end = time.monotonic() + 60
        while self.service.pending or self.service.worker.busy:
            assert time.monotonic() < end, "something is generated still"
            time.sleep(0.005)


def received(sock: socket.socket) -> bytes:
    data = b""
    try:
        while part := sock.recv(2**16):
            data += part
    except (TimeoutError, ConnectionError):
        pass
    return data


def events(text: str) -> list[Any]:
    *lines, end = [line.removeprefix("data: ") for line in text.split("\n\n") if line and line != ": keep-alive"]
    assert end == "[DONE]"
    return [json.loads(line) for line in lines]


def request(body: Any, route: str = "/v1/completions", *headers: str) -> bytes:
    data = json.dumps(body).encode()
    head = [f"POST {route} HTTP/1.1", "Host: localhost", "Content-Type: application/json", *headers]
    return "\r\n".join([*head, f"Content-Length: {len(data)}", "", ""]).encode() + data


@contextmanager
def served(
    model: LanguageModel,
    rows: int = 4,
    chunk: int = 16,
    sampling: Mapping[str, Any] | None = None,
    other: LanguageModel | None = None,
    name: str = "tiny",
    idle_seconds: float | None = None,
    load: Callable[[], Context] | None = None,
    **settings: Any,
) -> Iterator[Served]:
    """Serves a model, with the given ``sampling`` defaults, and possibly an ``other``, until the end of the block."""
    config, metrics, notes = ServeConfig(port=0, **settings), ServerMetrics(), list[str]()

    def make_service(name: str, model: LanguageModel) -> Service:
        context = Context(model.model, model.compute, rows, vocab_size=model.tokenizer.vocab_size)
        worker = Worker(context, model.tokenizer.ends, metrics)
        worker.idle_seconds, worker.load = idle_seconds, load or (lambda: context)
        worker.engine.scheduler.chunk = chunk  # Small, so that prompts take several steps.
        size = min(config.context or context.size, context.size)
        training = TrainingText(find_training_tokens(model.path, model.tokenizer)) if config.with_text else None
        return Service(name, model.tokenizer, size, worker, config, metrics, 1, sampling or {}, training)

    services = [make_service(name, model), *([make_service("other", other)] if other else [])]
    server, sock, ready = Server(services, notes.append), servers.listen(config), threading.Event()
    http = servers.http_server(server, ready.set)

    async def run() -> None:
        for service in services:
            service.worker.start(asyncio.get_running_loop())
        await http.serve(sockets=[sock])

    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    assert ready.wait(60)

    def stop() -> None:
        http.should_exit = http.force_exit = True

    test_server = Served(server, sock, stop, notes)
    try:
        yield test_server
    finally:
        test_server.client.close()
        stop()
        thread.join(60)
        for service in services:
            service.worker.stop()
        sock.close()
