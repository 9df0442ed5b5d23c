"""`gpt serve` under load, with faulty clients, and after engine errors."""

import contextlib
import json
import queue
import random
import shutil
import signal
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch
from conftest import Gpt, more, one_line_of_what_and_what_next, spawn
from models import loud, save
from serving import Served, events, load, received, request, served

from gpt import api
from gpt.api import LanguageModel
from gpt.config.model import GPTConfig
from gpt.config.sample import SampleConfig
from gpt.config.serve import ServeConfig
from gpt.decoding import constraint
from gpt.decoding.constraint import ConstraintCache
from gpt.decoding.context import Context
from gpt.decoding.engine import Engine, Request
from gpt.runs import folder
from gpt.serve import answers, app, choices, in_flight, protocol, server
from gpt.serve.choices import Prompt
from gpt.serve.metrics import ServerMetrics
from gpt.serve.worker import Ticket, Worker
from gpt.system.errors import UserError
from gpt.system.files import Stamps
from gpt.tokenizers.tokenizer import bytes_tokenizer

# No test waits for its last token.
LONG_REQUEST = {"prompt": "the cat", "max_tokens": 10_000_000, "ignore_eos": True}


@pytest.fixture(scope="module")
def model(run_folder: Path) -> LanguageModel:
    return load(run_folder)


@pytest.fixture(scope="module")
def single_slot(model: LanguageModel) -> Iterator[Served]:
    """A server with one slot and a queue of one request."""
    with served(model, rows=1, queue=1, access_log=True) as api:
        yield api


def wait_until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "it does not come"
        time.sleep(0.002)


def wait_for_bytes(sock: socket.socket, expected: bytes) -> None:
    data = b""
    sock.settimeout(60)
    while expected not in data:
        part = sock.recv(2**16)
        assert part, data[-500:]
        data += part


def wait_until_running(server: Served) -> None:
    wait_until(lambda: server.service.worker.engine.running)


@pytest.mark.parametrize("body", [{"stream": True}, {}, {"n": 5}])
def test_disconnect_cancels_and_frees_the_slot(single_slot: Served, body: dict[str, Any]) -> None:
    sock = single_slot.connect()
    sock.sendall(request({**LONG_REQUEST, **body}))
    wait_until_running(single_slot)
    if body.get("stream"):
        wait_for_bytes(sock, b"data: ")
    sock.close()
    assert single_slot.ask(prompt="the cat", max_tokens=2)["usage"]["completion_tokens"] <= 2
    single_slot.idle()
    wait_until(lambda: any(" status=499 " in line for line in single_slot.notes[-2:]))
    (line,) = [line for line in single_slot.notes[-2:] if " status=499 " in line]
    assert int(line.partition(" completion_tokens=")[2].split()[0]) < LONG_REQUEST["max_tokens"]
    assert b"gpt_requests_cancelled_total" in single_slot.client.get("/metrics").content


def test_disconnect_removes_a_queued_request(single_slot: Served) -> None:
    first, second = single_slot.connect(), single_slot.connect()
    first.sendall(request({**LONG_REQUEST, "stream": True}))
    wait_until_running(single_slot)
    second.sendall(request(LONG_REQUEST))
    wait_until(lambda: len(single_slot.service.pending) == 2)
    second.close()
    wait_until(lambda: len(single_slot.service.pending) == 1)
    assert not single_slot.service.worker.engine.failure
    first.close()
    single_slot.idle()


def test_full_queue_sends_retry_after(single_slot: Served) -> None:
    with single_slot.connect() as running, single_slot.connect() as waiting:
        running.sendall(request({**LONG_REQUEST, "stream": True}))
        wait_until_running(single_slot)
        waiting.sendall(request(LONG_REQUEST))
        wait_until(lambda: len(single_slot.service.pending) == 2)
        answer = single_slot.post("/v1/completions", prompt="a")
        assert answer.status_code == 429
        assert int(answer.headers["retry-after"]) >= 1
        assert answer.json()["error"]["code"] == "queue_full"
        assert single_slot.client.get("/health").status_code == 200  # The health check is not queued.
    single_slot.idle()
    single_slot.ask(prompt="a", max_tokens=1)


def test_idle_stream_gets_keep_alive_comments(single_slot: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "KEEPALIVE_SECONDS", 0.05)
    with single_slot.connect() as running, single_slot.connect() as waiting:
        running.sendall(request({**LONG_REQUEST, "stream": True}))
        wait_until_running(single_slot)
        waiting.sendall(request({"prompt": "a", "max_tokens": 1, "stream": True}))
        wait_for_bytes(waiting, b"\r\n: keep-alive\n\n\r\n")  # The comment is a separate HTTP chunk.
        running.close()
        wait_for_bytes(waiting, b"data: [DONE]\n\n")
    single_slot.idle()


def test_idle_model_frees_its_memory_until_the_next_request(model: LanguageModel) -> None:
    failures, contexts = list[OSError](), list[Any]()

    def make_context() -> Context:
        if failures:
            raise failures.pop()
        context = Context(model.model, model.compute, 2, vocab_size=model.tokenizer.vocab_size)
        contexts.append(weakref.ref(context))
        return context

    with served(model, 2, idle_seconds=0.2, load=make_context) as api:
        body = {"prompt": "the cat", "seed": 1, "max_tokens": 8}
        first = api.ask(**body)["choices"]
        wait_until(lambda: api.service.worker.engine is None)
        assert "gpt_cache_positions 0.0" in api.client.get("/metrics").text
        assert api.client.get("/v1/models/tiny").json()["layers"] == model.model.config.n_layer
        failures.append(OSError("it is gone"))
        assert "could not be loaded again: " in api.refuse(**body, n=3, status=500)["message"]
        assert api.ask(**body)["choices"] == first
        wait_until(lambda: contexts[-1]() is None)
        with ThreadPoolExecutor(4) as pool:  # Some of them come while it is loaded, some while it is not.
            answers = [*pool.map(lambda at: time.sleep(at % 4 / 10) or api.ask(**body), range(24))]
        assert all(answer["choices"] == first for answer in answers)


def test_idle_model_is_unloaded_once(model: LanguageModel) -> None:
    context = Context(model.model, model.compute, 1, vocab_size=model.tokenizer.vocab_size)
    worker, waits = Worker(context, model.tokenizer.ends, ServerMetrics()), list[float | None]()

    def get(block: bool, timeout: float | None) -> None:
        waits.append(timeout)
        if timeout is not None and len(waits) < 3:
            raise queue.Empty

    worker.idle_seconds, worker._inbox = 60, SimpleNamespace(get=get)
    assert not worker._process_inbox()
    assert (worker.engine, waits) == (None, [60, None])


def test_late_cancellation_reaches_no_request_of_the_model_loaded_since(model: LanguageModel) -> None:
    make_context = lambda: Context(model.model, model.compute, 1, vocab_size=model.tokenizer.vocab_size)
    worker, tickets = Worker(make_context(), (), ServerMetrics()), [Ticket(Request([1]), print) for _ in range(2)]
    worker.load = make_context
    for ticket in tickets:
        worker._add([ticket])
        worker._unload()
    assert [ticket.number for ticket in tickets] == [0, 1]


def test_no_other_model_is_loaded_in_the_place_of_an_idle_one(
    model: LanguageModel, gpt: Gpt, monkeypatch: pytest.MonkeyPatch
) -> None:
    other, runs, loaded = replace(model, tokenizer=bytes_tokenizer()), [Path("runs/b"), Path("runs/a")], list[str]()
    models = [other, model, model]
    monkeypatch.setattr(folder, "newest_run", runs.pop)
    monkeypatch.setattr(api, "load", lambda path, **options: loaded.append(path) or models.pop())

    def serve(loads: Any, config: ServeConfig, *callbacks: Any) -> None:
        service = server.make_service(loads[0], config, ServerMetrics(), lambda text: None, 1)
        assert len(service.worker.load().slots) == 2
        with pytest.raises(UserError, match="another model"):
            service.worker.load()

    monkeypatch.setattr(server, "serve", serve)
    assert gpt("serve", "--max-batch", "2").code == 0
    assert loaded == ["runs/a"] * 3


def test_disconnected_requests_are_never_computed(model: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenized_texts, release = list[str](), threading.Event()

    def read_prompt(tokenizer: Any, prompt: Any) -> Prompt:
        tokenized_texts.append(prompt[:5])
        release.wait(100)
        return choices.read_prompt(tokenizer, prompt)

    monkeypatch.setattr(app, "read_prompt", read_prompt)
    monkeypatch.setattr(type(model.tokenizer), "estimate_min_tokens", lambda tokenizer, text: 0)
    with served(model, queue=20) as api:
        for prompt in ("large" * 20_000, "small"):
            clients = [api.connect() for _ in range(6)]
            for client in clients:
                client.sendall(request({"prompt": prompt}))
            wait_until(lambda: api.server.in_flight.count == 6)
            for client in clients:
                client.close()
            wait_until(lambda: api.server.in_flight.count == api.server.in_flight.bytes == 0)
        release.set()
        assert api.ask(prompt="next", max_tokens=1)
        assert tokenized_texts.count("large") <= in_flight.THREADS["large text"]
        assert tokenized_texts.count("small") <= in_flight.THREADS["text"]
        assert "gpt_requests_cancelled_total 12.0" in api.client.get("/metrics").text


@pytest.mark.parametrize("chat", [False, True])
def test_oversized_prompt_is_never_tokenized(model: LanguageModel, monkeypatch: pytest.MonkeyPatch, chat: bool) -> None:
    tokenizer = replace(model.tokenizer, files={"chat_template.jinja": b"{{ messages[0]['content'] }}"})
    max_bytes = max(len(tokenizer.decode_bytes([id])) for id in tokenizer.known)
    with served(replace(model, tokenizer=tokenizer)) as api:
        monkeypatch.setattr(type(tokenizer), "encode", lambda *args, **kwargs: pytest.fail("it was tokenized"))
        text = "x" * (32 * max_bytes + 1)
        body = {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}
        error = api.refuse("/v1/chat/completions" if chat else "/v1/completions", **body)
        assert (error["code"], error["param"]) == ("context_length_exceeded", "messages" if chat else "prompt")
        assert "at least 33 tokens, but the context has 32" in error["message"]


def test_slow_templates_and_large_texts_block_no_other_request(
    model: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    release, waiting = threading.Event(), list[str]()

    def render(tokenizer: Any, messages: Any, **form: Any) -> str:
        waiting.append(threading.current_thread().name)
        release.wait(100)
        return "the cat"

    monkeypatch.setattr(app.tool_calls.chat, "render", render)
    templated = replace(model, tokenizer=replace(model.tokenizer, files={"chat_template.jinja": b"x"}))
    with served(templated, queue=20) as api, contextlib.ExitStack() as connections:
        for content in ("hello", "hello" * 20_000):
            for _ in range(3):
                client = connections.enter_context(api.connect())
                client.sendall(request({"messages": [{"role": "user", "content": content}]}, "/v1/chat/completions"))
        wait_until(lambda: len(waiting) == 1)
        assert waiting[0].startswith("gpt-chat")
        assert api.ask(prompt="a", max_tokens=1)
        assert api.ask(prompt="a", max_tokens=1, user="x" * 100_000)
        release.set()
        wait_until(lambda: api.server.in_flight.count == 0)


def test_unfinished_requests_count_toward_the_limit(single_slot: Served) -> None:
    with single_slot.connect() as first, single_slot.connect() as second:
        for client in (first, second):
            client.sendall(request(LONG_REQUEST)[:-5])
        wait_until(lambda: single_slot.server.in_flight.count == 2)
        assert single_slot.refuse(prompt="a", status=429)["code"] == "queue_full"
        assert single_slot.client.get("/health").status_code == 200
    wait_until(lambda: single_slot.server.in_flight.count == 0)
    assert single_slot.ask(prompt="a", max_tokens=1)


@pytest.mark.slow
def test_stalled_reader_is_dropped_and_blocks_no_other_request(
    model: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    listen = server.listen

    def listen_with_small_buffers(config: ServeConfig) -> socket.socket:
        listener = listen(config)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        return listener

    monkeypatch.setattr(server, "listen", listen_with_small_buffers)
    monkeypatch.setattr(server, "STALLED_SECONDS", 0.5)
    with served(model, rows=2) as api, api.connect() as stalled:
        body = {**LONG_REQUEST, "stream": True, "logprobs": 20, "n": 2}
        stalled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        stalled.sendall(request(body))
        wait_until_running(api)
        api.ask(prompt="a", max_tokens=3)
        api.idle()
        assert "gpt_requests_cancelled_total 1.0" in api.client.get("/metrics").text


def test_incomplete_requests_time_out(model: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "BODY_SECONDS", 0.2)
    monkeypatch.setattr(server, "IDLE_SECONDS", 0.2)
    complete = request({"prompt": "a"})
    with served(model) as api:
        assert api.raw(complete[:-3]).startswith(b"HTTP/1.1 408 ")
        for part in (complete[:20], b"", b"G"):
            assert api.raw(part) == b""  # The server closes the connection.
        with api.connect() as sock:  # A second request times out, too.
            sock.sendall(complete + b"POST /v1/comp")
            assert received(sock).count(b"HTTP/1.1 200") == 1


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"[]", b"null", b'{"prompt": "a\n"}', b'{"prompt": "\xff"}', b'{"prompt": NaN}', b"[" * 100_000,
        b'{"a":' * 50_000, b'{"prompt": "a", "seed": 1' + b"0" * 5000 + b"}", b'{"prompt": "a", "user": [1e999]}',
    ],
    ids=lambda body: repr(body[:16]),
)  # fmt: skip
def test_malformed_body_is_an_error(single_slot: Served, body: bytes) -> None:
    answer = single_slot.client.post("/v1/completions", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert len(answer.content) < 600


def test_other_content_types_are_refused(single_slot: Served) -> None:
    """Browsers send these types across origins without a preflight."""
    for kind in ("", "text/plain", "application/jsonx"):
        answer = single_slot.client.post("/v1/completions", content=b'{"prompt": "a"}', headers={"Content-Type": kind})
        assert answer.status_code == 415


def test_chunked_bodies_work_and_oversized_bodies_are_refused(single_slot: Served) -> None:
    body = json.dumps({"prompt": "a", "max_tokens": 1, "x": "y" * 3_000_000}).encode()
    headers = {"Content-Type": "application/json"}

    def chunks(body: bytes) -> Iterator[bytes]:
        for at in range(0, len(body), 50_000):
            yield body[at : at + 50_000]

    assert single_slot.client.post("/v1/completions", content=chunks(body), headers=headers).status_code == 200
    assert (
        single_slot.client.post("/v1/completions", content=body + b" " * 1_500_000, headers=headers).status_code == 413
    )
    assert single_slot.client.post("/v1/completions", content=chunks(body * 2), headers=headers).status_code == 413
    assert single_slot.ask(prompt="a", max_tokens=1)


def test_concurrent_large_bodies_are_limited(model: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_flight, "MAX_BODIES", 500_000)
    large = HEAD + b"Content-Length: 400000\r\n\r\n" + b" " * 390_000
    with served(model) as api, api.connect() as first, api.connect() as second:
        first.sendall(large)
        wait_until(lambda: api.server.in_flight.bytes >= 390_000)
        second.sendall(large)
        wait_for_bytes(second, b"HTTP/1.1 429 ")
        api.ask(prompt="a", max_tokens=1)  # Small bodies are still accepted.


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00", b"\x00" * 50_000, b"GET / HTTP/9.9\r\n\r\n", b"BREW / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", b"GET /\xff HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"X: y\r\n" * 20_000, b"GET /" + b"a" * 100_000,
        HEAD + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n", HEAD + b"Content-Length: 99999999999999999999\r\n\r\n{}",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n3\r\n{}\n\r\n0\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n",
    ],
    ids=lambda data: repr(data[:40]),
)  # fmt: skip
def test_server_survives_garbage(single_slot: Served, data: bytes) -> None:
    with single_slot.connect() as sock:
        sock.settimeout(0.5)
        with contextlib.suppress(ConnectionError):
            sock.sendall(data)
        answer = received(sock)
    assert answer == b"" or answer.startswith(b"HTTP/1.1 ")
    assert b" 500 " not in answer.split(b"\r\n")[0]
    assert single_slot.ask(prompt="a", max_tokens=1)["object"] == "text_completion"


def test_foreign_hosts_and_origins_are_refused(model: LanguageModel) -> None:
    with served(model, cors=("https://example.org",)) as api:
        own_host = f"127.0.0.1:{api.port}"
        body = {"json": {"prompt": "a", "max_tokens": 1}}

        def status(host: str = own_host, **headers: str) -> int:
            return api.client.post("/v1/completions", headers={"Host": host, **headers}, **body).status_code

        for host in (own_host, "localhost", f"localhost:{api.port}", "LOCALHOST", "[::1]:80", "127.0.0.1"):
            assert status(host) == 200
        for host in (f"evil.example:{api.port}", "127.0.0.1.evil.example", "localhost.evil", "", "0.0.0.0"):
            assert status(host) == 403
        assert status(Origin=f"http://{own_host}") == 200
        for origin in ("https://evil.example", "null", "http://127.0.0.1:1", "https://example.org.evil", "é"):
            answer = api.client.post("/v1/completions", headers={"Origin": origin.encode()}, **body)
            assert answer.status_code == 403
            assert "access-control-allow-origin" not in answer.headers
            assert api.client.get("/health", headers={"Origin": origin.encode()}).status_code == 403
        refusal = api.client.post("/v1/completions", headers={"Origin": "https://example.org"}, json={})
        assert (refusal.status_code, refusal.headers["access-control-allow-origin"]) == (400, "https://example.org")


ORIGINS = ("https://example.org", "http://127.0.0.1:5173", "app://obsidian.md", "chrome-extension://abcdefghijklmnop")
STAINLESS = "authorization,content-type,x-stainless-arch,x-stainless-lang,x-stainless-os,x-stainless-retry-count"


def test_preflight_allows_the_requested_headers(model: LanguageModel) -> None:
    with served(model, cors=ORIGINS) as api:
        preflight = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": STAINLESS}
        for origin in ORIGINS:
            before = api.client.options("/v1/completions", headers={"Origin": origin, **preflight})
            assert before.status_code == 200
            assert before.headers["access-control-allow-origin"] == origin
            assert before.headers["access-control-allow-headers"] == STAINLESS
            assert "access-control-allow-private-network" not in before.headers
            body = {"json": {"prompt": "a", "max_tokens": 1}}
            after = api.client.post("/v1/completions", headers={"Origin": origin, "X-Stainless-OS": "Linux"}, **body)
            assert (after.status_code, after.headers["access-control-allow-origin"]) == (200, origin)
        private = {"Origin": ORIGINS[0], "Access-Control-Request-Private-Network": "true", **preflight}
        answer = api.client.options("/v1/completions", headers=private)
        assert answer.headers["access-control-allow-private-network"] == "true"
        for origin in ("app://obsidian", "tauri://evil", "chrome-extension://x", "null", "https://example.org:444"):
            answer = api.client.options("/v1/completions", headers={**private, "Origin": origin})
            assert answer.status_code == 403
            assert not [name for name in answer.headers if name.startswith("access-control")]
            assert "gpt serve --cors" in answer.json()["error"]["message"]


def test_allow_host_option_allows_only_named_hosts(model: LanguageModel) -> None:
    body = {"json": {"prompt": "a", "max_tokens": 1}}
    with served(model, allow_host=("host.docker.internal", "Box.lan", "[fe80::1]")) as api:
        for host in ("HOST.docker.internal:8000", "box.lan", "[fe80::1]:80", "localhost"):
            headers = {"Host": host, "Origin": f"http://{host}"}
            assert api.client.post("/v1/completions", headers={"Host": host}, **body).status_code == 200
            assert api.client.post("/v1/completions", headers=headers, **body).status_code == 200
        for host in ("docker.internal", "host.docker.internal.evil", "a.box.lan", "fe80::1", ""):
            answer = api.client.post("/v1/completions", headers={"Host": host}, **body)
            assert answer.status_code == 403
            assert "gpt serve --allow-host" in answer.json()["error"]["message"]


def test_api_key_is_required(model: LanguageModel) -> None:
    with served(model, api_key="sesame-1") as api:
        body = {"json": {"prompt": "a", "max_tokens": 1}}
        valid_headers = {"Authorization": "Bearer sesame-1"}
        assert api.client.post("/v1/completions", headers=valid_headers, **body).status_code == 200
        invalid_headers = (
            "Bearer",
            "Bearer sesame-11",
            "Bearer sesame",
            "Basic sesame-1",
            b"Bearer \xff\xfe",
            "Bearer " + "a" * 5000,
        )
        for headers in ({}, *({"Authorization": key} for key in invalid_headers)):
            answer = api.client.post("/v1/completions", headers=headers, **body)
            assert answer.status_code == 401
            assert answer.json()["error"]["code"] == "invalid_api_key"
            assert answer.headers["www-authenticate"] == "Bearer"
            assert "sesame-1" not in answer.text
        for route in ("/metrics", "/tokenizer_info", "/v1/metrics"):
            assert api.client.get(route).status_code == 401
            assert api.client.get(route, headers=valid_headers).status_code == 200
        for route in ("/health", "/v1/health", "/v1/models", "/models/tiny", "/"):
            assert api.client.get(route).status_code == 200
        for route in ("/tokenize", "/detokenize", "/inspect", "/trace", "/v1/chat/completions"):
            assert api.post(route).status_code == 401


def test_nan_ends_only_its_request(model: LanguageModel) -> None:
    damaged_model = load(model.path)
    with torch.no_grad():
        damaged_model.model.wpe.weight[25] = torch.nan
    with served(damaged_model) as api, ThreadPoolExecutor(4) as pool:
        bodies = [{"prompt": [1] * 26 if number % 2 else [1, 2], "logit_bias": {"7": -100}} for number in range(8)]
        answers = list(pool.map(lambda body: api.post("/v1/completions", **body), bodies))
        assert [answer.status_code for answer in answers] == [200, 500] * 4
        assert "NaN or infinite" in answers[1].json()["error"]["message"]
        stream = api.post("/v1/completions", prompt=[1] * 26, stream=True).text
        assert "NaN or infinite" in stream
        assert "[DONE]" not in stream
        assert "finish_reason" not in stream


@pytest.mark.parametrize("where", ["add", "cancel", "measured", "delivered"])
def test_error_outside_a_step_fails_health_and_all_requests(
    model: LanguageModel, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("a fault of the worker")

    with served(model, rows=2) as api, api.connect() as running:
        running.sendall(request({**LONG_REQUEST, "stream": True}))
        wait_until_running(api)
        target = {
            "add": (Engine, "add"), "cancel": (Engine, "cancel"), "measured": (api.service.metrics.generated_tokens, "inc"),
            "delivered": (type(api.service.worker), "_send"),
        }  # fmt: skip
        if where == "delivered":
            original_send = type(api.service.worker)._send

            def fail_once(worker: Any) -> None:
                monkeypatch.setattr(type(worker), "_send", original_send)
                fail()

            monkeypatch.setattr(*target[where], fail_once)
        else:
            monkeypatch.setattr(*target[where], fail)
        if where in ("add", "cancel"):
            with api.connect() as other:
                other.sendall(request({**LONG_REQUEST, "stream": True}))
                if where == "add":
                    wait_for_bytes(other, b"a fault of the worker")
                else:
                    wait_until(lambda: api.service.worker.engine.running == 2)
        wait_until(lambda: api.client.get("/health").status_code == 500)
        wait_for_bytes(running, b"a fault of the worker")
        assert api.post("/v1/completions", prompt="a").status_code == 500
        wait_until(lambda: "gpt_texts_running 0.0" in api.client.get("/metrics").text)


def test_gauges_return_to_zero(model: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def assert_idle_after(status: int) -> None:
        line = f'gpt_requests_total{{route="/completions",status="{status}"}} 1.0'
        wait_until(lambda: {"gpt_texts_running 0.0", line} <= {*api.client.get("/metrics").text.splitlines()})

    (text,) = model.generate("the cat", greedy=True, max_tokens=5)
    with served(model) as api:
        api.ask(prompt="the cat", max_tokens=50, temperature=0, stop=text[1:3])
        assert_idle_after(200)
        with api.connect() as sock:
            sock.sendall(request({**LONG_REQUEST, "stream": True}))
            wait_until_running(api)
        assert_idle_after(499)
        with api.connect() as sock:
            sock.sendall(request({**LONG_REQUEST, "stream": True}))
            wait_until_running(api)
            monkeypatch.setattr(Engine, "step", lambda engine: 1 / 0)
            wait_for_bytes(sock, b"ZeroDivisionError")
        assert_idle_after(500)


@pytest.mark.parametrize(
    "error, message",
    [(RuntimeError("DefaultCPUAllocator: can't allocate memory"), "out of memory"), (ZeroDivisionError("x"), "internal error in gpt")],
    ids=["memory", "fault"],
)  # fmt: skip
def test_error_in_a_step_ends_all_requests_but_not_the_server(
    model: LanguageModel, monkeypatch: pytest.MonkeyPatch, error: Exception, message: str
) -> None:
    expected = model.generate("the cat", seed=0, temperature=1.0, max_tokens=16)
    step = Engine.step

    def failing_step(engine: Engine) -> Any:
        updates = step(engine)
        if engine.running >= 2:
            raise error
        return updates

    with served(model) as api, ThreadPoolExecutor(2) as pool:
        monkeypatch.setattr(Engine, "step", failing_step)
        texts = list(pool.map(lambda stream: api.post("/v1/completions", **LONG_REQUEST, stream=stream), [True, False]))
        assert texts[0].status_code == 200
        assert message in texts[0].text
        assert "[DONE]" not in texts[0].text
        assert texts[1].status_code == 500
        assert message in texts[1].json()["error"]["message"]
        assert [api.ask(prompt="the cat", seed=0)["choices"][0]["text"]] == expected


class Panic(BaseException):
    """Like a Rust panic (`pyo3_runtime.PanicException`), not an Exception."""


def raise_panic(*args: object, **options: object) -> Any:
    raise Panic("at the disco")


@pytest.mark.parametrize("owner, name", [
    (Engine, "step"), (Engine, "add"), (ConstraintCache, "find"), (protocol, "_read_generation"), (app, "read_prompt"),
    (answers, "completion_logprobs"),
])  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_panic_is_answered_and_printed(
    model: LanguageModel, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, stream: bool
) -> None:
    body: dict[str, Any] = {"prompt": "a", "max_tokens": 3, "regex": "[a-z]+", "logprobs": 1, "stream": stream}
    with served(model, access_log=True) as api:
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, raise_panic)
            answer = api.post("/v1/completions", **body)
        assert answer.status_code in (200 if stream else 500, 500)
        event = answer.text.removeprefix("data: ")
        assert json.loads(event)["error"]["message"].startswith("internal error in gpt: Panic: at the disco")
        wait_until(lambda: any(" status=500 " in note for note in api.notes))
        assert any(note.startswith("/completions: internal error in gpt: Panic") for note in api.notes)
        assert 'gpt_requests_total{route="/completions",status="500"} 1.0' in api.client.get("/metrics").text
        if name == "add":  # The engine's state is unknown.
            assert api.client.get("/health").status_code == 500
            assert api.refuse(prompt="a", status=500)
        else:
            assert api.client.get("/health").status_code == 200
            assert api.ask(**{**body, "stream": False})


def test_changed_model_file_is_detected(model: LanguageModel, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"old")
    with served(model) as api:
        object.__setattr__(api.service, "stamps", Stamps([file]))
        assert api.ask(prompt="a", max_tokens=1)
        other = tmp_path / "new"
        other.write_bytes(b"newer")
        other.rename(file)  # The mapped file still exists without a name.
        assert api.ask(prompt="a", max_tokens=1)
        object.__setattr__(api.service, "stamps", Stamps([file]))
        file.write_bytes(b"")
        error = api.refuse(prompt="a", status=500)
        assert error["message"].startswith("the model's file model.gguf was changed while it was in use (start the ")
        assert api.client.get("/health").status_code == 500


def test_small_request_is_answered_before_a_large_one(model: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "MAX_PENDING_TEXTS", 512)
    large = {"prompt": [f"the {at}" for at in range(8)], "n": 16, "max_tokens": 100, "ignore_eos": True}
    with served(model, rows=2) as api, contextlib.ExitStack() as connections:
        for _ in range(6):
            connections.enter_context(api.connect()).sendall(request(large))
        wait_until(lambda: len(api.service.pending) == 4 and api.server.in_flight.count == 4)
        assert api.refuse(**large, status=429)["code"] == "queue_full"  # The limit of texts is for large requests.
        for _ in range(5):
            api.ask(prompt="a", max_tokens=5)
        assert len(api.service.pending) == 4
        connections.close()
        api.idle()


def test_small_constraint_does_not_wait_for_large_ones(model: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    release, check = threading.Event(), constraint._check

    def slow_check(name: str, grammar: str) -> None:
        release.wait(100)
        check(name, grammar)

    monkeypatch.setattr(constraint, "_check", slow_check)
    with served(model, queue=60) as api, contextlib.ExitStack() as connections:
        connections.callback(release.set)
        for number in range(50):
            schema = {"enum": [f"{number}-{at}" for at in range(5000)]}
            connections.enter_context(api.connect()).sendall(request({"prompt": "a", "json_schema": schema}))
        wait_until(lambda: api.server.in_flight.count == 50)
        assert api.ask(prompt="a", max_tokens=9, json_schema={"type": "integer"}, temperature=0)
        assert not api.service.pending


@pytest.mark.parametrize("name", ["Host", "Origin", "Authorization", "Content-Type"])
def test_repeated_headers_are_refused(single_slot: Served, name: str) -> None:
    value = {"Host": "localhost", "Content-Type": "application/json"}.get(name, f"http://127.0.0.1:{single_slot.port}")
    extra = [f"{name}: {value}"] * (1 if name in ("Host", "Content-Type") else 2)
    answer = single_slot.raw(request({"prompt": "a"}, "/v1/completions", "Connection: close", *extra))
    assert answer.startswith(b"HTTP/1.1 400 ")


@pytest.mark.parametrize("depth", [100, 480, 900, *range(960, 1000, 3)])
def test_deep_schema_is_an_error_of_the_client(single_slot: Served, depth: int) -> None:
    body = b'{"prompt": "a", "json_schema": ' + b'{"items":' * depth + b"{}" + b"}" * depth + b"}"
    answer = single_slot.client.post("/v1/completions", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == (200 if depth == 100 else 400), answer.text


def test_large_bodies_and_answers_are_handled_outside_of_the_event_loop(
    model: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    dumps, read_ids, threads = json.dumps, app._read_ids, list[str]()

    def record_ids(*args: Any) -> list[int]:
        threads.append(threading.current_thread().name)
        return read_ids(*args)

    def record(values: Any, **options: Any) -> str:
        text = dumps(values, **options)
        if len(text) > 10_000:
            threads.append(threading.current_thread().name)
        return text

    with served(model) as api:
        monkeypatch.setattr(json, "dumps", record)
        monkeypatch.setattr(app, "_read_ids", record_ids)
        monkeypatch.setattr(answers, "MAX_TOKENS_IN_LOOP", 20)
        text = "the cat " * 20_000
        ids = api.client.post("/tokenize", json={"prompt": text}).json()["tokens"]
        assert api.client.post("/detokenize", json={"tokens": ids}).json()["prompt"].endswith(text)
        assert api.client.post("/inspect", json={"ids": ids[:200]}).status_code == 200
        api.stream(prompt=ids[:30], echo=True, logprobs=20, max_tokens=1)
    assert len(threads) >= 6
    assert all(name.startswith(("gpt-", "asyncio_")) for name in threads)


def draw_request(rng: random.Random, number: int) -> dict[str, Any]:
    words = ["the", "cat", "sat", "on", "mat", "while", "raining", "dogs", "chased", "Zürich;", "naïve"]
    choices: list[dict[str, Any]] = [
        {}, {"temperature": 0}, {"temperature": 1.5, "top_k": 20}, {"top_p": 0.8}, {"min_p": 0.05, "ignore_eos": True},
        {"repetition_penalty": 1.3, "no_repeat_ngram": 3}, {"min_tokens": 6}, {"stop": ["a", "the c"]}, {"stop": "ing"},
        {"presence_penalty": 0.7, "frequency_penalty": 0.3},
    ]  # fmt: skip
    prompt = " ".join(rng.choices(words, k=rng.choice([1, 3, 8])))
    return {"prompt": prompt, "max_tokens": rng.randint(1, 24), "seed": number, "n": rng.choice([1, 1, 3]),
            "stream": rng.random() < 0.5, **rng.choice(choices)}  # fmt: skip


def read_texts(answer: httpx.Response, body: dict[str, Any]) -> list[str]:
    """Returns the texts of a plain or streamed response."""
    if not body["stream"]:
        return [choice["text"] for choice in answer.json()["choices"]]
    texts = [""] * body["n"]
    for chunk in events(answer.text):
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    return texts


def expected_texts(model: LanguageModel, body: dict[str, Any]) -> list[str]:
    settings = {key: value for key, value in body.items() if key not in ("prompt", "seed", "n", "stream", "ignore_eos")}
    config = SampleConfig(**{"temperature": 1.0, **settings}, ignore_eot=body.get("ignore_eos", False))
    pieces = model.write_all([body["prompt"]], config, body["seed"], body["n"])
    return [piece.sample.text for piece in pieces if piece.sample is not None]


@pytest.mark.parametrize("count, clients", [(32, 8), more(400, 64)])
def test_concurrent_mixed_requests_equal_gpt_sample(model: LanguageModel, count: int, clients: int) -> None:
    rng = random.Random(count)
    bodies = [draw_request(rng, number) for number in range(count)]
    leaving = {number for number in range(count) if rng.random() < 0.2}

    def ask(number: int) -> list[str] | None:
        if number in leaving:
            with api.connect() as sock:
                sock.sendall(request({**bodies[number], "max_tokens": 500, "ignore_eos": True}))
                if number % 2:
                    sock.recv(100)
            return None
        answer = api.post("/v1/completions", **bodies[number])
        assert answer.status_code == 200, answer.text
        return read_texts(answer, bodies[number])

    with served(model, rows=8, queue=100) as api, ThreadPoolExecutor(clients) as pool:
        responses = list(pool.map(ask, range(count)))
        api.idle()
    mismatches = [
        n for n, texts in enumerate(responses) if texts is not None and texts != expected_texts(model, bodies[n])
    ]
    assert len(mismatches) <= count // 100, mismatches  # Rounding can decide near-ties differently.


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="its select takes 512 sockets")
def test_server_survives_thousands_of_connections(model: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    import resource

    file_limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    count = min(1_500, (file_limit - 200) // 2)  # Both ends of each connection are in this process.
    monkeypatch.setattr(server, "compute_max_connections", lambda: count - 100)
    with served(model) as api:
        socks = [api.connect() for _ in range(count)]
        assert api.ask(prompt="a", max_tokens=1)
        for sock in socks:
            sock.close()
        assert api.ask(prompt="a", max_tokens=1)


# The command


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"host": "0.0.0.0"}, "others can reach 0.0.0.0"), ({"api_key": "é"}, "the key"), ({"api_key": ""}, "the key"),
        ({"cors": ("*",)}, "not an origin"), ({"cors": ("https://a.b/c",)}, "not an origin"), ({"cors": ("null",)}, "not an origin"),
        ({"allow_host": ("a:80",)}, "not a host name"), ({"allow_host": ("*.a",)}, "not a host name"),
        ({"port": 70_000}, "port"), ({"max_batch": -1}, "max-batch"), ({"limit_tokens": -1}, "limit-tokens"),
        ({"grace": -1.0}, "grace"), ({"queue": -1}, "queue"),
    ],
)  # fmt: skip
def test_invalid_settings_are_errors(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        ServeConfig(**settings)
    assert ServeConfig(host="0.0.0.0", api_key="secret").host == "0.0.0.0"


def test_startup_errors_come_before_listening(gpt: Gpt, run_folder: Path) -> None:
    one_line_of_what_and_what_next(gpt("serve", "-m", run_folder, "--host", "0.0.0.0"), "there is no key")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
        one_line_of_what_and_what_next(gpt("serve", "-m", run_folder, "--port", port), f"port {port}")
    error = gpt("serve", "-m", run_folder, "--host", "no.such.host.invalid", "--api-key", "k")
    assert error.code == 2
    assert "cannot listen at no.such.host.invalid" in error.err
    assert "GPT_SERVE_API_KEY" in error.err


def test_sampling_defaults_are_printed_at_startup(
    model: LanguageModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.6, "top_k": 20.0, "eos_token_id": 1}')

    def stop(config: ServeConfig) -> None:
        raise UserError("before it listens")

    monkeypatch.setattr(server, "listen", stop)
    served = server.ServedModel("tiny", model.model, model.tokenizer, model.compute, tmp_path)
    for defaults in ("model", "openai"):
        notes = list[str]()
        config = ServeConfig(port=0, max_batch=1, defaults=defaults)
        with pytest.raises(UserError, match="before it listens"):
            server.serve([lambda: served], config, note=notes.append)
        expected = (
            "sampling defaults from generation_config.json: temperature 0.6, top-k 20; --defaults openai turns them off"
        )
        assert notes == [expected] * (defaults == "model")
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(UserError, match=r"generation_config\.json") as error:
        server.serve([lambda: served], ServeConfig(port=0, max_batch=1))
    assert "--defaults openai" in error.value.hint


def test_kv_cache_larger_than_memory_is_an_error(model: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(model.compute), "memory", lambda compute: 300_000)
    monkeypatch.setattr(server, "listen", lambda config: pytest.fail("it listens"))
    with pytest.raises(UserError, match="the KV cache of") as error:
        served = server.ServedModel("tiny", model.model, model.tokenizer, model.compute)
        server.serve([lambda: served], ServeConfig(port=0, max_batch=1000))
    assert "--max-batch" in error.value.hint


class Process:
    """A `gpt serve` subprocess."""

    def __init__(self, run: Path, *words: str, **kwargs: Any) -> None:
        self.process = spawn("serve", "-m", run, "--port", "0", *words, **kwargs)
        assert self.process.stderr is not None
        self.line = next(line for line in self.process.stderr if "serving" in line).strip()
        self.client = httpx.Client(base_url=self.line.split()[-1], timeout=60)

    def stream(self) -> Iterator[str]:
        body = {**LONG_REQUEST, "stream": True, "n": 8}
        with self.client.stream("POST", "/v1/completions", json=body) as answer:
            yield from answer.iter_lines()

    def wait_for_line(self, part: str) -> None:
        assert self.process.stderr is not None
        assert any(part in line for line in self.process.stderr)

    def end(self) -> tuple[int, str]:
        _, err = self.process.communicate(timeout=100)
        return self.process.returncode, err


@pytest.fixture
def serve(run_folder: Path) -> Iterator[Callable[..., Process]]:
    """Starts `gpt serve` and stops it after the test."""
    if sys.platform == "win32":
        pytest.skip("Windows has no signals for one process")
    with contextlib.ExitStack() as stack:

        def start(*words: str, **kwargs: Any) -> Process:
            process = Process(run_folder, *words, **kwargs)
            for end in (process.process.communicate, process.process.kill, process.client.close):
                stack.callback(end)
            return process

        yield start


@pytest.mark.slow
def test_a_server_of_two_models_answers_as_each_alone_until_a_second_ctrl_c(
    serve: Callable[..., Process], run_folder: Path, workdir: Path
) -> None:
    import gpt

    other = save(Path("other"), loud(GPTConfig(257, 16, 1, 2, 16)), bytes_tokenizer())
    process = serve("-m", other, "--max-batch", "2", "--grace", "1000")
    announcement = process.line.partition(" at http")[0]
    assert announcement.startswith("serving ") and "/" not in announcement  # No local path is printed.
    (first, second), client = process.line.removeprefix("serving ").partition(" at ")[0].split(", "), process.client
    assert [(each["id"], each["context_length"]) for each in client.get("/v1/models").json()["data"]] == [
        (first, 32), (second, 16),
    ]  # fmt: skip

    def ask(at: int) -> str:
        body = {"prompt": "the", "seed": at, "max_tokens": 12, "temperature": 0.8, "model": (first, second)[at % 2]}
        answer = client.post("/v1/completions", json=body).json()
        assert answer["model"] == body["model"]
        return str(answer["choices"][0]["text"])

    with ThreadPoolExecutor(8) as pool:
        texts = list(pool.map(ask, range(12)))
    for path, share in ((run_folder, texts[::2]), (other, texts[1::2])):
        seeds = range(path == other, 12, 2)
        alone = [load(path).generate("the", seed=seed, max_tokens=12, temperature=0.8)[0] for seed in seeds]
        assert share == alone
    assert client.post("/v1/completions", json={"prompt": "the", "max_tokens": 1}).json()["model"] == first
    for route, body in (("completions", {"prompt": "a"}), ("inspect", {"ids": [1]}), ("tokenize", {"prompt": "a"})):
        error = client.post(f"/v1/{route}", json={**body, "model": "gpt-4"})
        assert error.status_code == 404
        assert (
            error.json()["error"]["message"] == f'there is no model "gpt-4"; this server has "{first}" and "{second}"'
        )
    for name, path in ((first, run_folder), (second, other)):
        ids = client.post("/tokenize", json={"prompt": "the text", "model": name}).json()["tokens"]
        assert ids == gpt.load(path).tokenizer.encode("the text").tolist()
    assert client.get("/metrics").text.count("gpt_texts_running 0.0") == 1
    shutil.rmtree(other)  # The first still answers when the second's files are gone.
    assert client.get(f"/v1/models/{second}").status_code == 200
    lines = process.stream()
    next(lines)
    process.process.send_signal(signal.SIGINT)
    process.wait_for_line("1 request may run for 1000 s more")
    for signum in (signal.SIGHUP, signal.SIGTERM, signal.SIGHUP):  # They are one request.
        process.process.send_signal(signum)
        assert client.get("/health").status_code == 503
    time.sleep(0.5)  # Programs repeat a signal sooner than a person.
    process.process.send_signal(signal.SIGINT)
    status, err = process.end()
    assert status == 130
    assert "Traceback" not in err


@pytest.mark.parametrize("words", [("-m", "{run}"), ("-m", "other", "--name", "book")])
def test_models_of_one_name_are_refused_before_loading(
    gpt: Gpt, run_folder: Path, words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api, "load", lambda *args, **options: pytest.fail("it was loaded"))
    result = gpt("serve", "-m", run_folder, *(word.format(run=run_folder) for word in words))
    one_line_of_what_and_what_next(result, "two models are called ")


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGTERM, more(signal.SIGINT), more(signal.SIGHUP)])
def test_signal_starts_the_grace_period_unless_ignored_from_the_start(
    serve: Callable[..., Process], monkeypatch: pytest.MonkeyPatch, signum: int
) -> None:
    ignored = {signal.SIGINT, signal.SIGHUP} - {signum}

    def ignore() -> None:
        for each in ignored:
            signal.signal(each, signal.SIG_IGN)

    monkeypatch.setenv("GPT_SERVE_API_KEY", "sesame")
    process = serve("--name", "book", "--grace", "5", preexec_fn=ignore)
    assert process.line.startswith("serving book at http://127.0.0.1:")
    for each in ignored:
        process.process.send_signal(each)
    body = {"prompt": "a", "model": "book", "max_tokens": 1}
    assert process.client.post("/v1/completions", json=body).status_code == 401
    process.client.headers["Authorization"] = "Bearer sesame"
    assert process.client.post("/v1/completions", json=body).status_code == 200
    lines = process.stream()
    next(lines)
    process.process.send_signal(signum)
    process.wait_for_line("1 request may run for 5 s more")
    with httpx.Client(base_url=process.client.base_url, headers=process.client.headers) as other:
        response = other.post("/v1/completions", json={"prompt": "a"})
        assert response.status_code == other.get("/health").status_code == 503
        assert response.json()["error"]["code"] == "stopping"
    later_lines = [line for line in lines if line]
    assert "the server is stopping" in later_lines[-1]
    assert not any('"finish_reason": "' in line or "[DONE]" in line for line in later_lines)
    status, err = process.end()
    assert status == 128 + signum
    assert "Traceback" not in err and "sesame" not in err
