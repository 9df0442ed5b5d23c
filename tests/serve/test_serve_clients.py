"""`gpt serve` with the `openai` client."""

import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
from serving import Served, load, served

from gpt.api import LanguageModel

openai = pytest.importorskip("openai", reason="openai, of the extra interop, is not installed")
pytestmark = pytest.mark.slow

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
CHAT = [{"role": "user", "content": "the cat"}]


@pytest.fixture(scope="module")
def model(run_folder: Path) -> LanguageModel:
    loaded_model = load(run_folder)
    return replace(
        loaded_model, tokenizer=replace(loaded_model.tokenizer, files={"chat_template.jinja": TEMPLATE.encode()})
    )


@pytest.fixture(scope="module")
def server(model: LanguageModel) -> Iterator[Served]:
    with served(model, api_key="sesame") as api:
        yield api


@pytest.fixture
def client(server: Served) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="sesame", max_retries=0) as api:
        yield api


def test_completions_and_streams_equal_the_library(client: Any, model: LanguageModel) -> None:
    expected = model.generate("the cat", seed=3, num=2, temperature=1.0, max_tokens=12)
    body = {"model": "tiny", "prompt": "the cat", "seed": 3, "n": 2, "max_tokens": 12, "logprobs": 2}
    answer = client.completions.create(**body)
    assert [choice.text for choice in answer.choices] == expected
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    texts = ["", ""]
    *chunks, last = client.completions.create(**body, stream=True, stream_options={"include_usage": True})
    for chunk in chunks:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == expected
    assert last.usage == answer.usage
    logprobs = answer.choices[0].logprobs
    for token, logprob, top in zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True):
        assert top[token] == logprob
    extended = client.completions.create(**body, extra_body={"top_k": 1})
    assert len({choice.text for choice in extended.choices}) == 1


def test_chats_and_streams_agree(client: Any) -> None:
    body = {"model": "tiny", "messages": CHAT, "seed": 1, "max_completion_tokens": 8}
    answer = client.chat.completions.create(**body, logprobs=True, top_logprobs=3)
    message = answer.choices[0].message
    assert message.role == "assistant"
    assert len(answer._request_id) == 32
    logprobs = answer.choices[0].logprobs.content
    assert all(len(token.top_logprobs) == 3 for token in logprobs)
    chunks = list(client.chat.completions.create(**body, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == message.content
    assert chunks[-1].choices[0].finish_reason == answer.choices[0].finish_reason


def test_structured_output_works(client: Any) -> None:
    from pydantic import BaseModel

    class Answer(BaseModel):
        a: Literal[1, "b"]

    answer = client.chat.completions.parse(model="tiny", messages=CHAT, response_format=Answer)
    assert isinstance(answer.choices[0].message.parsed, Answer)
    answer = client.completions.create(model="tiny", prompt="the", extra_body={"choices": ["a", "b"]})
    assert answer.choices[0].text in ("a", "b")


def test_responses_and_streams_agree(client: Any) -> None:
    from pydantic import BaseModel

    class Answer(BaseModel):
        a: Literal[1, "b"]

    body = {"model": "tiny", "input": "the cat", "extra_body": {"seed": 1}}
    response = client.responses.create(**body, max_output_tokens=8)
    assert (response.status, response.usage.output_tokens) == ("incomplete", 8)
    events = list(client.responses.create(**body, max_output_tokens=8, stream=True))
    assert "".join(getattr(event, "delta", "") for event in events) == response.output_text
    assert events[-1].response.output_text == response.output_text
    parsed = client.responses.parse(**body, text_format=Answer).output_parsed
    assert isinstance(parsed, Answer)
    with client.responses.stream(**body, text_format=Answer) as stream:
        assert stream.get_final_response().output_parsed == parsed
    with pytest.raises(openai.BadRequestError) as error:
        client.responses.create(**body, previous_response_id=response.id)
    assert error.value.param == "previous_response_id"


def test_errors_raise_openai_exceptions(client: Any, server: Served) -> None:
    create = client.completions.create
    with pytest.raises(openai.BadRequestError) as error:
        create(model="tiny", prompt="a", temperature=-1)
    assert error.value.param == "temperature"
    with pytest.raises(openai.NotFoundError) as error:
        create(model="gpt-4", prompt="a")
    assert error.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError, match="there is no route POST /v1/embeddings"):
        client.embeddings.create(model="tiny", input="a")
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").completions.create(model="tiny", prompt="a")
    server.server.stopping = True
    try:
        with pytest.raises(openai.InternalServerError):
            create(model="tiny", prompt="a")
    finally:
        server.server.stopping = False
    server.server.in_flight.count += 100
    try:
        with pytest.raises(openai.RateLimitError):
            create(model="tiny", prompt="a")
    finally:
        server.server.in_flight.count -= 100


def test_extra_slashes_in_paths_are_ignored(server: Served) -> None:
    for path in ("/v1/models/", "//v1/models", "/v1//models", "/v1/health/", "/v1/models/tiny/"):
        answer = server.client.get(path, follow_redirects=False)
        assert answer.status_code == 200, path
    key = {"Authorization": "Bearer sesame"}
    for path in ("/v1/chat/completions/", "//v1/chat/completions", "/chat//completions"):
        answer = server.client.post(path, json={"messages": CHAT, "max_tokens": 1}, headers=key)
        assert answer.status_code == 200, path


def test_unsupported_features_are_named(client: Any, server: Served) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:,"}}
    with pytest.raises(openai.BadRequestError, match=r"part of type .*image_url"):
        messages: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "a"}, image]}]
        client.chat.completions.create(model="tiny", messages=messages)
    json_headers = {"Authorization": "Bearer sesame", "Content-Type": "application/json"}
    answer = server.client.post(
        "/v1/completions", content=b"\x1f\x8b", headers={**json_headers, "Content-Encoding": "gzip"}
    )
    assert answer.status_code == 415 and "gzip" in answer.json()["error"]["message"]
    answer = server.client.get("/v1/models", headers={"Origin": "null"})
    assert answer.status_code == 403 and "--cors null" not in answer.text and "over HTTP" in answer.text


def test_health_check_needs_no_host_header(server: Served) -> None:
    """HAProxy checks health with HTTP/1.0 and no Host header, unlike a browser."""
    with socket.create_connection(("127.0.0.1", server.port)) as sock:
        sock.sendall(b"GET /health HTTP/1.0\r\n\r\n")
        assert b" 200 " in sock.recv(100)
    with socket.create_connection(("127.0.0.1", server.port)) as sock:
        sock.sendall(b"GET /health HTTP/1.1\r\nHost: \r\n\r\n")
        assert b" 403 " in sock.recv(100)


def test_stream_errors_raise_exceptions(client: Any, server: Served) -> None:
    stream = client.completions.create(
        model="tiny", prompt="a", stream=True, max_tokens=10**7, extra_body={"ignore_eos": True}
    )
    next(stream)
    server.service.worker._loop.call_soon_threadsafe(server.server.abort)
    with pytest.raises(openai.APIError, match="stopping"):
        list(stream)
