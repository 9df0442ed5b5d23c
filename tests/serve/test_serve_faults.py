"""`gpt serve` under load, beside clients that leave, stall or lie, and when the engine fails."""

import contextlib
import json
import random
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from conftest import Gpt, more, one_line_of_what_and_what_next, spawn
from serving import Served, events, load, received, request, served

from gpt.api import LanguageModel
from gpt.decoding.engine import Engine
from gpt.errors import UserError
from gpt.sample_config import SampleConfig
from gpt.serve import answers, app, flight, server, texts
from gpt.serve.metrics import ServerMetrics
from gpt.serve.texts import Prompt
from gpt.serve_config import ServeConfig

LONG = {"prompt": "the cat", "max_tokens": 4000, "ignore_eos": True}  # runs for seconds


@pytest.fixture(scope="module")
def model(run_folder: Path) -> LanguageModel:
    return load(run_folder)


@pytest.fixture(scope="module")
def one(model: LanguageModel) -> Iterator[Served]:
    """A server that generates one text at a time, and lets one request wait."""
    with served(model, rows=1, queue=1, access_log=True) as found:
        yield found


def until(holds: Callable[[], object], seconds: float = 10) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it does not come"
        time.sleep(0.002)


def until_sent(sock: socket.socket, what: bytes) -> None:
    """Reads what a server sends until it has sent ``what``."""
    data = b""
    sock.settimeout(10)
    while what not in data:
        part = sock.recv(2**16)
        assert part, data[-500:]
        data += part


def begun(server: Served) -> None:
    """Waits until something is generated."""
    until(lambda: server.service.worker.engine.running)


@pytest.mark.parametrize("body", [{"stream": True}, {}, {"n": 5}, {"prompt": "cat " * 2000}])
def test_a_client_that_leaves_is_cancelled_and_its_slot_is_free(one: Served, body: dict[str, Any]) -> None:
    sock = one.connect()
    sock.sendall(request({**LONG, **body}))
    begun(one)
    if body.get("stream"):
        assert b"data: " in sock.recv(2**16) + sock.recv(2**16)
    left = time.monotonic()
    sock.close()
    assert one.ask(prompt="the cat", max_tokens=2)["usage"]["completion_tokens"] <= 2
    assert time.monotonic() - left < 1.5
    one.idle(1)
    until(lambda: any(" status=499 " in line for line in one.notes[-2:]))
    assert b"gpt_requests_cancelled_total" in one.client.get("/metrics").content


def test_a_client_that_leaves_while_it_waits_is_forgotten(one: Served) -> None:
    first, second = one.connect(), one.connect()
    first.sendall(request({**LONG, "stream": True}))
    begun(one)
    second.sendall(request(LONG))
    until(lambda: len(one.service.pending) == 2)
    second.close()
    until(lambda: len(one.service.pending) == 1)
    assert not one.service.worker.failure
    first.close()
    one.idle()


def test_a_full_queue_says_when_to_come_again(one: Served) -> None:
    with one.connect() as running, one.connect() as waiting:
        running.sendall(request({**LONG, "stream": True}))
        begun(one)
        waiting.sendall(request(LONG))
        until(lambda: len(one.service.pending) == 2)
        answer = one.post("/v1/completions", prompt="a")
        assert answer.status_code == 429
        assert int(answer.headers["retry-after"]) >= 1
        assert answer.json()["error"]["code"] == "queue_full"
        assert one.client.get("/health").status_code == 200  # it is never too busy to say so
    one.idle()
    one.ask(prompt="a", max_tokens=1)


def test_a_quiet_stream_gets_comments(one: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "QUIET_SECONDS", 0.05)
    with one.connect() as running, one.connect() as waiting:
        running.sendall(request({**LONG, "stream": True}))
        begun(one)
        waiting.sendall(request({"prompt": "a", "max_tokens": 1, "stream": True}))
        until_sent(waiting, b"\r\n: keep-alive\n\n\r\n")  # chunks of their own
        running.close()
        until_sent(waiting, b"data: [DONE]\n\n")
    one.idle()


def test_what_clients_left_behind_is_never_computed(model: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go = list[str](), threading.Event()

    def read_prompt(tokenizer: Any, prompt: Any) -> Prompt:
        begun.append(prompt[:5])
        go.wait(20)
        return texts.read_prompt(tokenizer, prompt)

    monkeypatch.setattr(app, "read_prompt", read_prompt)
    with served(model, queue=20, limit_tokens=100_000) as found:
        for prompt in ("large" * 20_000, "small"):
            clients = [found.connect() for _ in range(6)]
            for client in clients:
                client.sendall(request({"prompt": prompt}))
            until(lambda: found.server.in_flight.count == 6)
            for client in clients:
                client.close()
            until(lambda: found.server.in_flight.count == found.server.in_flight.bytes == 0)
        go.set()
        assert found.ask(prompt="next", max_tokens=1)
        assert begun.count("large") <= flight.THREADS["large text"]
        assert begun.count("small") <= flight.THREADS["text"]
        assert "gpt_requests_cancelled_total 12.0" in found.client.get("/metrics").text


@pytest.mark.parametrize("chat", [False, True])
def test_a_prompt_that_cannot_fit_is_never_tokenized(
    model: LanguageModel, monkeypatch: pytest.MonkeyPatch, chat: bool
) -> None:
    tokenizer = replace(model.tokenizer, files={"chat_template.jinja": b"{{ messages[0]['content'] }}"})
    longest = max(len(tokenizer.decode_bytes([id])) for id in tokenizer.known)
    with served(replace(model, tokenizer=tokenizer), limit_tokens=50) as found:
        monkeypatch.setattr(type(tokenizer), "encode", lambda *args, **kwargs: pytest.fail("it was tokenized"))
        text = "x" * (50 * longest + 1)
        body = {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}
        error = found.refuse("/v1/chat/completions" if chat else "/v1/completions", **body)
        assert error["code"] == "context_length_exceeded"
        assert "prompt has at least 51 tokens; the limit is 50" in error["message"]


def test_a_slow_template_holds_up_no_completion_and_large_texts_no_small_ones(
    model: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, waiting = threading.Event(), list[str]()

    def render(tokenizer: Any, messages: Any, **form: Any) -> str:
        waiting.append(threading.current_thread().name)
        go.wait(20)
        return "the cat"

    monkeypatch.setattr(app.chat, "render", render)
    templated = replace(model, tokenizer=replace(model.tokenizer, files={"chat_template.jinja": b"x"}))
    with served(templated, queue=20) as found, contextlib.ExitStack() as held:
        for content in ("hello", "hello" * 20_000):
            for _ in range(3):
                client = held.enter_context(found.connect())
                client.sendall(request({"messages": [{"role": "user", "content": content}]}, "/v1/chat/completions"))
        until(lambda: len(waiting) == 1)
        assert waiting[0].startswith("gpt-chat")
        assert found.ask(prompt="a", max_tokens=1)
        assert found.ask(prompt="a", max_tokens=1, user="x" * 100_000)
        go.set()
        until(lambda: found.server.in_flight.count == 0)


def test_requests_count_from_their_first_byte(one: Served) -> None:
    """Also those whose bodies are still to come."""
    with one.connect() as first, one.connect() as second:
        for client in (first, second):
            client.sendall(request(LONG)[:-5])
        until(lambda: one.server.in_flight.count == 2)
        assert one.refuse(prompt="a", status=429)["code"] == "queue_full"
        assert one.client.get("/health").status_code == 200
    until(lambda: one.server.in_flight.count == 0)
    assert one.ask(prompt="a", max_tokens=1)


@pytest.mark.slow
def test_who_does_not_read_is_dropped_and_holds_up_nobody(
    model: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "STALLED_SECONDS", 0.5)
    with served(model, rows=2) as found, found.connect() as stalled:
        body = {**LONG, "stream": True, "logprobs": 20, "n": 2}
        stalled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        stalled.sendall(request(body))
        begun(found)
        found.ask(prompt="a", max_tokens=3)
        found.idle(60)
        assert "gpt_requests_cancelled_total 1.0" in found.client.get("/metrics").text


def test_a_half_sent_body_or_head_ends(model: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "BODY_SECONDS", 0.2)
    monkeypatch.setattr(server, "IDLE_SECONDS", 0.2)
    whole = request({"prompt": "a"})
    with served(model) as found:
        assert found.raw(whole[:-3]).startswith(b"HTTP/1.1 408 ")
        for part in (whole[:20], b"", b"G"):
            assert found.raw(part) == b""  # the connection is closed
        with found.connect() as sock:  # after a first request too
            sock.sendall(whole + b"POST /v1/comp")
            assert received(sock).count(b"HTTP/1.1 200") == 1


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"[]", b"null", b'{"prompt": "a\n"}', b'{"prompt": "\xff"}', b'{"prompt": NaN}', b"[" * 100_000,
        b'{"a":' * 50_000, b'{"prompt": "a", "seed": 1' + b"0" * 5000 + b"}", b'{"prompt": "a", "temperature": 1e999}',
    ],
    ids=lambda body: repr(body[:16]),
)  # fmt: skip
def test_a_body_that_is_no_request_is_refused(one: Served, body: bytes) -> None:
    answer = one.client.post("/v1/completions", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert len(answer.content) < 600


def test_a_body_of_another_type_is_refused(one: Served) -> None:
    """What a form or a script of another page may send without being asked first."""
    for kind in ("", "text/plain", "application/jsonx"):
        answer = one.client.post("/v1/completions", content=b'{"prompt": "a"}', headers={"Content-Type": kind})
        assert answer.status_code == 415


def test_bodies_that_are_too_large_or_come_in_chunks(one: Served) -> None:
    body = json.dumps({"prompt": "a", "max_tokens": 1, "x": "y" * 3_000_000}).encode()
    kind = {"Content-Type": "application/json"}

    def chunks(body: bytes) -> Iterator[bytes]:
        for at in range(0, len(body), 50_000):
            yield body[at : at + 50_000]

    assert one.client.post("/v1/completions", content=chunks(body), headers=kind).status_code == 200
    assert one.client.post("/v1/completions", content=body + b" " * 1_500_000, headers=kind).status_code == 413
    assert one.client.post("/v1/completions", content=chunks(body * 2), headers=kind).status_code == 413
    assert one.ask(prompt="a", max_tokens=1)


def test_large_bodies_at_once_have_a_bound(model: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flight, "MOST_BODIES", 500_000)
    large = HEAD + b"Content-Length: 400000\r\n\r\n" + b" " * 390_000
    with served(model) as found, found.connect() as first:
        first.sendall(large)
        until(lambda: found.server.in_flight.bytes >= 390_000)
        assert found.raw(large).startswith(b"HTTP/1.1 429 ")
        found.ask(prompt="a", max_tokens=1)  # a small one is taken


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
def test_garbage_gets_one_answer_or_none_and_the_next_request_is_answered(one: Served, data: bytes) -> None:
    with one.connect() as sock:
        sock.settimeout(0.5)
        with contextlib.suppress(ConnectionError):
            sock.sendall(data)
        answer = received(sock)
    assert answer == b"" or answer.startswith(b"HTTP/1.1 ")
    assert b" 500 " not in answer.split(b"\r\n")[0]
    assert one.ask(prompt="a", max_tokens=1)["object"] == "text_completion"


def test_foreign_hosts_and_origins_are_refused(model: LanguageModel) -> None:
    with served(model, cors=("https://example.org",)) as found:
        own = f"127.0.0.1:{found.port}"
        body = {"json": {"prompt": "a", "max_tokens": 1}}

        def status(host: str = own, **headers: str) -> int:
            return found.client.post("/v1/completions", headers={"Host": host, **headers}, **body).status_code

        for host in (own, "localhost", f"localhost:{found.port}", "LOCALHOST", "[::1]:80", "127.0.0.1"):
            assert status(host) == 200
        for host in (f"evil.example:{found.port}", "127.0.0.1.evil.example", "localhost.evil", "", "0.0.0.0"):
            assert status(host) == 403
        assert status(Origin=f"http://{own}") == 200
        for origin in ("https://evil.example", "null", "http://127.0.0.1:1", "https://example.org.evil", "é"):
            answer = found.client.post("/v1/completions", headers={"Origin": origin.encode()}, **body)
            assert answer.status_code == 403
            assert "access-control-allow-origin" not in answer.headers
            assert found.client.get("/health", headers={"Origin": origin.encode()}).status_code == 403
        wrong = found.client.post("/v1/completions", headers={"Origin": "https://example.org"}, json={})
        assert (wrong.status_code, wrong.headers["access-control-allow-origin"]) == (400, "https://example.org")


ORIGINS = ("https://example.org", "http://127.0.0.1:5173", "app://obsidian.md", "chrome-extension://abcdefghijklmnop")
STAINLESS = "authorization,content-type,x-stainless-arch,x-stainless-lang,x-stainless-os,x-stainless-retry-count"


def test_a_preflight_allows_the_headers_that_a_client_has(model: LanguageModel) -> None:
    with served(model, cors=ORIGINS) as found:
        asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": STAINLESS}
        for origin in ORIGINS:
            before = found.client.options("/v1/completions", headers={"Origin": origin, **asked})
            assert before.status_code == 204
            assert before.headers["access-control-allow-origin"] == origin
            assert before.headers["access-control-allow-headers"] == STAINLESS
            assert "access-control-allow-private-network" not in before.headers
            body = {"json": {"prompt": "a", "max_tokens": 1}}
            after = found.client.post("/v1/completions", headers={"Origin": origin, "X-Stainless-OS": "Linux"}, **body)
            assert (after.status_code, after.headers["access-control-allow-origin"]) == (200, origin)
        private = {"Origin": ORIGINS[0], "Access-Control-Request-Private-Network": "true", **asked}
        answer = found.client.options("/v1/completions", headers=private)
        assert answer.headers["access-control-allow-private-network"] == "true"
        for origin in ("app://obsidian", "tauri://evil", "chrome-extension://x", "null", "https://example.org:444"):
            answer = found.client.options("/v1/completions", headers={**private, "Origin": origin})
            assert answer.status_code == 403
            assert not [name for name in answer.headers if name.startswith("access-control")]
            assert "gpt serve --cors" in answer.json()["error"]["message"]


def test_other_names_of_the_server_are_allowed_by_an_option(model: LanguageModel) -> None:
    body = {"json": {"prompt": "a", "max_tokens": 1}}
    with served(model, allow_host=("host.docker.internal", "Box.lan", "[fe80::1]")) as found:
        for host in ("HOST.docker.internal:8000", "box.lan", "[fe80::1]:80", "localhost"):
            own = {"Host": host, "Origin": f"http://{host}"}
            assert found.client.post("/v1/completions", headers={"Host": host}, **body).status_code == 200
            assert found.client.post("/v1/completions", headers=own, **body).status_code == 200
        for host in ("docker.internal", "host.docker.internal.evil", "a.box.lan", "fe80::1", ""):
            answer = found.client.post("/v1/completions", headers={"Host": host}, **body)
            assert answer.status_code == 403
            assert "gpt serve --allow-host" in answer.json()["error"]["message"]


def test_a_key_is_asked_for(model: LanguageModel) -> None:
    with served(model, api_key="sesame-1") as found:
        body = {"json": {"prompt": "a", "max_tokens": 1}}
        right = {"Authorization": "Bearer sesame-1"}
        assert found.client.post("/v1/completions", headers=right, **body).status_code == 200
        wrong = (
            "Bearer",
            "Bearer sesame-11",
            "Bearer sesame",
            "Basic sesame-1",
            b"Bearer \xff\xfe",
            "Bearer " + "a" * 5000,
        )
        for headers in ({}, *({"Authorization": each} for each in wrong)):
            answer = found.client.post("/v1/completions", headers=headers, **body)
            assert answer.status_code == 401
            assert answer.json()["error"]["code"] == "invalid_api_key"
            assert answer.headers["www-authenticate"] == "Bearer"
            assert "sesame-1" not in answer.text
        for route in ("/metrics", "/tokenizer_info", "/v1/metrics"):
            assert found.client.get(route).status_code == 401
            assert found.client.get(route, headers=right).status_code == 200
        for route in ("/health", "/v1/health", "/v1/models", "/models/tiny", "/"):
            assert found.client.get(route).status_code == 200
        for route in ("/tokenize", "/detokenize", "/v1/chat/completions"):
            assert found.post(route).status_code == 401


def test_not_a_number_ends_its_request_alone(model: LanguageModel) -> None:
    broken = load(model.path)
    with torch.no_grad():
        broken.model.wte.weight[7] = torch.nan  # in prompts; the unembedding is laid out apart
    with served(broken) as found, ThreadPoolExecutor(4) as pool:
        bodies = [{"prompt": [7, 1] if number % 2 else [1, 2], "logit_bias": {"7": -100}} for number in range(8)]
        answers = list(pool.map(lambda body: found.post("/v1/completions", **body), bodies))
        assert [answer.status_code for answer in answers] == [200, 500] * 4
        assert "NaN or infinite" in answers[1].json()["error"]["message"]
        stream = found.post("/v1/completions", prompt=[7], stream=True).text
        assert "NaN or infinite" in stream
        assert "[DONE]" not in stream
        assert "finish_reason" not in stream


@pytest.mark.parametrize("where", ["add", "cancel", "measured", "delivered"])
def test_an_error_outside_a_step_ends_health_and_every_request(
    model: LanguageModel, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("a fault of the worker")

    with served(model, rows=2) as found, found.connect() as running:
        running.sendall(request({**LONG, "stream": True}))
        begun(found)
        target = {
            "add": (Engine, "add"), "cancel": (Engine, "cancel"), "measured": (ServerMetrics, "stepped"),
            "delivered": (type(found.service.worker), "_send"),
        }  # fmt: skip
        if where == "delivered":
            sent = type(found.service.worker)._send

            def once(worker: Any, updates: Any) -> None:
                monkeypatch.setattr(type(worker), "_send", sent)
                fail()

            monkeypatch.setattr(*target[where], once)
        else:
            monkeypatch.setattr(*target[where], fail)
        if where in ("add", "cancel"):
            with found.connect() as other:
                other.sendall(request({**LONG, "stream": True}))
                if where == "add":
                    until_sent(other, b"a fault of the worker")
                else:
                    until(lambda: found.service.worker.engine.running == 2)
        began = time.monotonic()
        until(lambda: found.client.get("/health").status_code == 500)
        until_sent(running, b"a fault of the worker")
        assert found.post("/v1/completions", prompt="a").status_code == 500
        assert time.monotonic() - began < 5
        assert "gpt_texts_running 0.0" in found.client.get("/metrics").text


def test_gauges_return_to_zero_however_the_last_text_ends(
    model: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ended(status: int) -> None:
        line = f'gpt_requests_total{{route="/completions",status="{status}"}} 1.0'
        until(lambda: {"gpt_texts_running 0.0", line} <= {*found.client.get("/metrics").text.splitlines()})

    (text,) = model.generate("the cat", greedy=True, max_tokens=5)
    with served(model) as found:
        found.ask(prompt="the cat", max_tokens=50, temperature=0, stop=text[1:3])
        ended(200)
        with found.connect() as sock:
            sock.sendall(request({**LONG, "stream": True}))
            begun(found)
        ended(499)
        with found.connect() as sock:
            sock.sendall(request({**LONG, "stream": True}))
            begun(found)
            monkeypatch.setattr(Engine, "step", lambda engine: 1 / 0)
            until_sent(sock, b"ZeroDivisionError")
        ended(500)


@pytest.mark.parametrize(
    "error, says",
    [(RuntimeError("DefaultCPUAllocator: can't allocate memory"), "out of memory"), (ZeroDivisionError("x"), "internal error in gpt")],
    ids=["memory", "fault"],
)  # fmt: skip
def test_an_error_of_a_step_is_told_to_all_and_the_next_request_works(
    model: LanguageModel, monkeypatch: pytest.MonkeyPatch, error: Exception, says: str
) -> None:
    expected = model.generate("the cat", seed=0, temperature=1.0, max_tokens=16)
    step = Engine.step

    def fails(engine: Engine) -> Any:
        updates = step(engine)
        if engine.running >= 2:
            raise error
        return updates

    with served(model) as found, ThreadPoolExecutor(2) as pool:
        monkeypatch.setattr(Engine, "step", fails)
        texts = list(pool.map(lambda stream: found.post("/v1/completions", **LONG, stream=stream), [True, False]))
        assert texts[0].status_code == 200
        assert says in texts[0].text
        assert "[DONE]" not in texts[0].text
        assert texts[1].status_code == 500
        assert says in texts[1].json()["error"]["message"]
        assert [found.ask(prompt="the cat", seed=0)["choices"][0]["text"]] == expected


def mixed(rng: random.Random, number: int) -> dict[str, Any]:
    """A request of any kind."""
    words = ["the", "cat", "sat", "on", "mat", "while", "raining", "dogs", "chased", "Zürich;", "naïve"]
    choices: list[dict[str, Any]] = [
        {}, {"temperature": 0}, {"temperature": 1.5, "top_k": 20}, {"top_p": 0.8}, {"min_p": 0.05, "ignore_eos": True},
        {"repetition_penalty": 1.3, "no_repeat_ngram": 3}, {"min_tokens": 6}, {"stop": ["a", "the c"]}, {"stop": "ing"},
        {"presence_penalty": 0.7, "frequency_penalty": 0.3},
    ]  # fmt: skip
    prompt = " ".join(rng.choices(words, k=rng.choice([1, 3, 8, 30])))
    return {"prompt": prompt, "max_tokens": rng.randint(1, 24), "seed": number, "n": rng.choice([1, 1, 3]),
            "stream": rng.random() < 0.5, **rng.choice(choices)}  # fmt: skip


def texts_of(answer: httpx.Response, body: dict[str, Any]) -> list[str]:
    """The texts of an answer, a stream or not."""
    if not body["stream"]:
        return [choice["text"] for choice in answer.json()["choices"]]
    found = [""] * body["n"]
    for chunk in events(answer.text):
        found[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    return found


def expected_texts(model: LanguageModel, body: dict[str, Any]) -> list[str]:
    """The texts of `gpt sample`."""
    settings = {key: value for key, value in body.items() if key not in ("prompt", "seed", "n", "stream", "ignore_eos")}
    config = SampleConfig(**{"temperature": 1.0, **settings}, ignore_eot=body.get("ignore_eos", False))
    pieces = model.write_all([body["prompt"]], config, body["seed"], body["n"])
    return [piece.sample.text for piece in pieces if piece.sample is not None]


@pytest.mark.parametrize("count, clients", [(32, 8), more(400, 64)])
def test_mixed_requests_at_once_equal_gpt_sample(model: LanguageModel, count: int, clients: int) -> None:
    """Some clients leave in the middle."""
    rng = random.Random(count)
    bodies = [mixed(rng, number) for number in range(count)]
    leaving = {number for number in range(count) if rng.random() < 0.2}

    def ask(number: int) -> list[str] | None:
        if number in leaving:
            with found.connect() as sock:
                sock.sendall(request({**bodies[number], "max_tokens": 500, "ignore_eos": True}))
                if number % 2:
                    sock.recv(100)
            return None
        answer = found.post("/v1/completions", **bodies[number])
        assert answer.status_code == 200, answer.text
        return texts_of(answer, bodies[number])

    with served(model, rows=8, queue=100) as found, ThreadPoolExecutor(clients) as pool:
        told = list(pool.map(ask, range(count)))
        found.idle()
    differ = [n for n, texts in enumerate(told) if texts is not None and texts != expected_texts(model, bodies[n])]
    assert len(differ) <= count // 100, differ  # near-ties


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="its select takes 512 sockets")
def test_ten_thousand_connections(model: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    import resource

    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    count = min(10_000, (files - 200) // 2)  # both ends are in this process
    monkeypatch.setattr(server, "most_connections", lambda: count - 100)
    with served(model) as found:
        socks = [found.connect() for _ in range(count)]
        assert found.ask(prompt="a", max_tokens=1)
        for sock in socks:
            sock.close()
        assert found.ask(prompt="a", max_tokens=1)


# The command


@pytest.mark.parametrize(
    "settings, says",
    [
        ({"host": "0.0.0.0"}, "others can reach 0.0.0.0"), ({"api_key": "é"}, "the key"), ({"api_key": ""}, "the key"),
        ({"cors": ("*",)}, "not an origin"), ({"cors": ("https://a.b/c",)}, "not an origin"), ({"cors": ("null",)}, "not an origin"),
        ({"allow_host": ("a:80",)}, "not a host name"), ({"allow_host": ("*.a",)}, "not a host name"),
        ({"port": 70_000}, "port"), ({"max_batch": -1}, "max-batch"), ({"limit_tokens": 0}, "limit-tokens"),
        ({"grace": -1.0}, "grace"), ({"queue": -1}, "queue"),
    ],
)  # fmt: skip
def test_settings_without_a_meaning(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        ServeConfig(**settings)
    assert ServeConfig(host="0.0.0.0", api_key="secret").host == "0.0.0.0"


def test_what_cannot_be_served_is_told_before_it_listens(gpt: Gpt, run_folder: Path) -> None:
    one_line_of_what_and_what_next(gpt("serve", "-m", run_folder, "--host", "0.0.0.0"), "there is no key")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        one_line_of_what_and_what_next(gpt("serve", "-m", run_folder, "--port", port), f"port {port}")
    key = gpt("serve", "-m", run_folder, "--host", "no.such.host.invalid", "--api-key", "k")
    assert key.code == 2
    assert "cannot listen at no.such.host.invalid" in key.err
    assert "GPT_SERVE_API_KEY" in key.err


def test_sampling_defaults_are_printed_at_the_start(
    model: LanguageModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.6, "top_k": 20.0, "eos_token_id": 1}')

    def stop(config: ServeConfig) -> None:
        raise UserError("before it listens")

    monkeypatch.setattr(server, "listen", stop)
    for defaults in ("model", "openai"):
        told = list[str]()
        config = ServeConfig(port=0, max_batch=1, defaults=defaults)
        with pytest.raises(UserError, match="before it listens"):
            server.serve(model.model, model.tokenizer, model.compute, "tiny", config, note=told.append, path=tmp_path)
        said = (
            "sampling defaults from generation_config.json: temperature 0.6, top_k 20; --defaults openai turns them off"
        )
        assert told == [said] * (defaults == "model")
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(UserError, match=r"generation_config\.json") as caught:
        server.serve(
            model.model, model.tokenizer, model.compute, "tiny", ServeConfig(port=0, max_batch=1), path=tmp_path
        )
    assert "--defaults openai" in caught.value.hint


def test_a_model_that_does_not_fit_is_told(model: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(model.compute), "memory", lambda compute: 300_000)
    monkeypatch.setattr(server, "listen", lambda config: pytest.fail("it listens"))
    with pytest.raises(UserError, match="the KV cache of") as caught:
        server.serve(model.model, model.tokenizer, model.compute, "tiny", ServeConfig(port=0, max_batch=1000))
    assert "--max-batch" in caught.value.hint


class Process:
    """`gpt serve` in a process of its own."""

    def __init__(self, run: Path, *words: str, **kwargs: Any) -> None:
        self.process = spawn("serve", "-m", run, "--port", "0", "--compile", "off", *words, **kwargs)
        assert self.process.stderr is not None
        self.line = next(line for line in self.process.stderr if "serving" in line).strip()
        self.client = httpx.Client(base_url=self.line.split()[-1], timeout=30)

    def stream(self) -> Iterator[str]:
        body = {"prompt": "a", "max_tokens": 4000, "ignore_eos": True, "stream": True, "n": 8}
        with self.client.stream("POST", "/v1/completions", json=body) as answer:
            yield from answer.iter_lines()

    def end(self) -> tuple[int, str]:
        _, err = self.process.communicate(timeout=30)
        return self.process.returncode, err


@pytest.fixture
def serve(run_folder: Path) -> Iterator[Callable[..., Process]]:
    """Starts `gpt serve`, which ends with the test."""
    if sys.platform == "win32":
        pytest.skip("Windows has no signals for one process")
    with contextlib.ExitStack() as stack:

        def start(*words: str, **kwargs: Any) -> Process:
            found = Process(run_folder, *words, **kwargs)
            for end in (found.process.communicate, found.process.kill, found.client.close):
                stack.callback(end)
            return found

        yield start


@pytest.mark.slow
def test_compiled_steps_write_the_same_text(serve: Callable[..., Process], run_folder: Path) -> None:
    process = serve("--compile", "on", "--dtype", "float32")
    body = {"prompt": "the cat", "temperature": 0, "max_tokens": 20}
    text = process.client.post("/v1/completions", json=body).json()["choices"][0]["text"]
    assert [text] == load(run_folder).generate("the cat", greedy=True, max_tokens=20)


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGTERM, more(signal.SIGINT), more(signal.SIGHUP)])
def test_a_signal_lets_running_requests_go_on_for_a_while(serve: Callable[..., Process], signum: int) -> None:
    process = serve("--grace", "1")
    said = process.line.partition(" at http")[0]
    assert said.startswith("serving ") and "/" not in said  # no path of this machine
    lines = process.stream()
    next(lines)
    process.process.send_signal(signum)
    time.sleep(0.3)
    with httpx.Client(base_url=process.client.base_url) as other:
        refused = other.post("/v1/completions", json={"prompt": "a"})
        assert refused.status_code == other.get("/health").status_code == 503
        assert refused.json()["error"]["code"] == "stopping"
    rest = [line for line in lines if line]
    assert "the server is stopping" in rest[-1]
    assert not any('"finish_reason": "' in line or "[DONE]" in line for line in rest)
    status, err = process.end()
    assert status == 128 + signum
    assert "1 request may run for 1 s more" in err
    assert "Traceback" not in err


@pytest.mark.slow
def test_a_second_signal_ends_at_once_and_an_idle_server_at_the_first(serve: Callable[..., Process]) -> None:
    process = serve()
    lines = process.stream()
    next(lines)
    process.process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    began = time.monotonic()
    process.process.send_signal(signal.SIGINT)
    status, err = process.end()
    assert time.monotonic() - began < 8
    assert status == 130
    assert "Traceback" not in err


@pytest.mark.slow
def test_signals_that_were_ignored_at_the_start_stay_ignored_and_the_key_comes_from_the_environment(
    serve: Callable[..., Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    def ignore() -> None:
        for signum in (signal.SIGINT, signal.SIGHUP):
            signal.signal(signum, signal.SIG_IGN)

    monkeypatch.setenv("GPT_SERVE_API_KEY", "sesame")
    found = serve("--name", "book", preexec_fn=ignore)
    assert found.line.startswith("serving book at http://127.0.0.1:")
    for signum in (signal.SIGINT, signal.SIGHUP):
        found.process.send_signal(signum)
    time.sleep(0.3)
    body = {"prompt": "a", "model": "book", "max_tokens": 1}
    assert found.client.post("/v1/completions", json=body).status_code == 401
    found.client.headers["Authorization"] = "Bearer sesame"
    assert found.client.post("/v1/completions", json=body).status_code == 200
    found.process.send_signal(signal.SIGTERM)
    status, err = found.end()
    assert status == 143
    assert "sesame" not in err
