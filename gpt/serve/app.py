"""The routes of the server: OpenAI's API, a tokenizer, health, metrics, and a page."""

import asyncio
import hmac
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from importlib.resources import files
from typing import Any

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from gpt.errors import UserError
from gpt.serve.answers import ChatForm, CompletionForm, Form, Service, Work
from gpt.serve.guard import Guard, error_response
from gpt.serve.protocol import ApiError, Generation, read_chat, read_completion, read_json
from gpt.text import chat

LARGEST_BODY = 4 * 2**20
BODY_SECONDS = 30.0
MOST_TEXTS = 1024  # of a request: prompts times choices
_OPEN = ("/health", "/", "/v1/models", "/models")  # need no key


class Server:
    """The ASGI application, with the requests that it is answering."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.stopping = False
        routes = [
            Route(f"{prefix}{path}", partial(self._answer, path, handler), methods=[method])
            for method, path, handler in (
                ("POST", "/completions", self._completions),
                ("POST", "/chat/completions", self._chat),
                ("GET", "/models", self._models),
                ("GET", "/models/{id:path}", self._model),
                ("POST", "/tokenize", self._tokenize),
                ("POST", "/detokenize", self._detokenize),
                ("GET", "/tokenizer_info", self._tokenizer_info),
                ("GET", "/health", self._health),
                ("GET", "/metrics", self._metrics),
            )
            for prefix in ("/v1", "")
        ]
        routes.append(Route("/", partial(self._answer, "/", self._page), methods=["GET"]))
        self.app: ASGIApp = Guard(
            Starlette(routes=routes, exception_handlers={404: _not_found, 405: _not_allowed}), service.config
        )

    def stop(self) -> None:
        """Takes no further requests."""
        self.stopping = True

    def give_up(self) -> None:
        """Ends the requests that are being answered with an error."""
        for each in self.service.pending:
            each.failed = ApiError(503, "the server is stopping", code="stopping")
            each.wake()

    async def _answer(
        self, route: str, handler: Callable[[Request], Awaitable[Response]], request: Request
    ) -> Response:
        began, status = time.monotonic(), 500
        try:
            self._check_key(request)
            response = await handler(request)
        except ApiError as error:
            response = error_response(error)
        except UserError as error:
            hint = f" ({error.hint})" if error.hint else ""
            response = error_response(ApiError(400 if error.exit_code == 2 else 500, error.message + hint))
        except ClientDisconnect:
            self.service.metrics.cancelled.inc()
            response = Response(status_code=499)
        status = response.status_code
        self.service.metrics.requests.labels(route, str(status)).inc()
        self.service.metrics.seconds.observe(time.monotonic() - began)
        return response

    def _check_key(self, request: Request) -> None:
        key = self.service.config.api_key
        path = request.url.path.rstrip("/") or "/"
        if key is None or path in _OPEN or path.startswith(("/v1/models/", "/models/")):
            return
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(
            given.strip().encode("utf-8", "replace"), key.encode()
        ):
            raise ApiError(
                401, "the key is missing or wrong: send it as Authorization: Bearer KEY", code="invalid_api_key"
            )

    async def _json(self, request: Request) -> dict[str, Any]:
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise ApiError(415, "the body must be JSON: send Content-Type: application/json")
        body = bytearray()
        try:
            async with asyncio.timeout(BODY_SECONDS):
                async for part in request.stream():
                    body += part
                    if len(body) > LARGEST_BODY:
                        raise ApiError(413, f"the body has more than {LARGEST_BODY:,} bytes")
        except TimeoutError:
            raise ApiError(408, f"the body did not come within {BODY_SECONDS:g} s") from None
        return read_json(bytes(body))

    # Small routes

    async def _models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._model_object()]})

    async def _model(self, request: Request) -> Response:
        if request.path_params["id"] != self.service.name:
            raise self._no_model(request.path_params["id"])
        return JSONResponse(self._model_object())

    def _model_object(self) -> dict[str, Any]:
        return {
            "id": self.service.name, "object": "model", "created": self.service.created, "owned_by": "gpt",
            "context_length": self.service.block_size,
        }  # fmt: skip

    def _no_model(self, name: str) -> ApiError:
        return ApiError(
            404, f'there is no model "{name:.80}"; this server has "{self.service.name}"', "model", "model_not_found"
        )

    async def _health(self, request: Request) -> Response:
        if self.stopping:
            raise ApiError(503, "the server is stopping", code="stopping")
        return JSONResponse({"status": "ok"})

    async def _metrics(self, request: Request) -> Response:
        self.service.metrics.waiting.set(sum(not each.begun for each in self.service.pending))
        return Response(self.service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _tokenize(self, request: Request) -> Response:
        values = await self._json(request)
        text = values.get("prompt", values.get("content", values.get("text")))
        if not isinstance(text, str):
            raise ApiError(400, "prompt must be a text", "prompt")
        specials = values.get("add_special_tokens", True)
        tokenizer = self.service.tokenizer
        ids = tokenizer.encode(text, specials=bool(tokenizer.files)).tolist()
        if specials and tokenizer.bos is not None:
            ids = [tokenizer.bos, *ids]
        return JSONResponse({"tokens": ids, "count": len(ids), "max_model_len": self.service.block_size})

    async def _detokenize(self, request: Request) -> Response:
        ids = (await self._json(request)).get("tokens")
        if not isinstance(ids, list) or not all(type(id) is int and 0 <= id < self.service.vocab_size for id in ids):
            raise ApiError(400, f"tokens must be a list of ids below {self.service.vocab_size:,}", "tokens")
        text = self.service.tokenizer.decode(ids)
        return JSONResponse({"prompt": text, "text": text})

    async def _tokenizer_info(self, request: Request) -> Response:
        tokenizer = self.service.tokenizer
        words = {id: word for word, id in tokenizer.all_specials.items()}
        return JSONResponse({
            "tokenizer_class": "gpt", "name": tokenizer.name, "vocab_size": tokenizer.vocab_size,
            "eos_token": tokenizer.eot_token, "eos_token_id": tokenizer.eot,
            "bos_token": None if tokenizer.bos is None else words.get(tokenizer.bos), "bos_token_id": tokenizer.bos,
            "pad_token": None, "chat_template": tokenizer.chat_template,
        })  # fmt: skip

    async def _page(self, request: Request) -> Response:
        return HTMLResponse(page(), headers={"Content-Security-Policy": _POLICY, "Referrer-Policy": "no-referrer"})

    # Texts

    async def _completions(self, request: Request) -> Response:
        values = await self._json(request)
        asked = read_completion(values, self.service.config.limit_tokens)
        self._check_model(values)
        prompts = [self._ids(prompt) for prompt in asked.prompts]
        return await self._generate(request, prompts, asked.generation, CompletionForm(self.service))

    async def _chat(self, request: Request) -> Response:
        values = await self._json(request)
        config = self.service.config
        asked = read_chat(values, config.limit_tokens, config.limit_tokens)
        self._check_model(values)
        tokenizer = self.service.tokenizer
        text = await asyncio.to_thread(chat.render, tokenizer, asked.messages)
        ids = tokenizer.encode(text, specials=True).tolist()
        if "max_tokens" not in values and "max_completion_tokens" not in values:
            most = max(1, min(config.limit_tokens, self.service.block_size - len(ids)))
            generation = replace(asked.generation, config=replace(asked.generation.config, max_tokens=most))
            asked = replace(asked, generation=generation)
        return await self._generate(request, [self._ids(ids)], asked.generation, ChatForm(self.service))

    def _check_model(self, values: dict[str, Any]) -> None:
        name = values.get("model")
        if name is not None and name != self.service.name:
            raise self._no_model(str(name))

    def _ids(self, prompt: str | Sequence[int]) -> list[int]:
        ids = self.service.tokenizer.prompt(prompt) if isinstance(prompt, str) else list(prompt)
        limit = self.service.config.limit_tokens
        if not all(0 <= id < self.service.vocab_size for id in ids):
            raise ApiError(400, f"the prompt has an id that is not below {self.service.vocab_size:,}", "prompt")
        if len(ids) > limit:
            raise ApiError(
                400, f"the prompt has {len(ids):,} tokens; {limit:,} are the most", "prompt", "context_length_exceeded"
            )
        return ids

    async def _generate(self, request: Request, prompts: list[list[int]], asked: Generation, form: Form) -> Response:
        if len(prompts) * asked.best_of > MOST_TEXTS:
            raise ApiError(
                400, f"{len(prompts) * asked.best_of:,} texts are asked for; {MOST_TEXTS:,} are the most", "n"
            )
        if any(id >= self.service.vocab_size for id, _ in asked.bias):
            raise ApiError(400, f"logit_bias has an id that is not below {self.service.vocab_size:,}", "logit_bias")
        if self.stopping:
            raise ApiError(503, "the server is stopping", code="stopping")
        config = self.service.config
        if (
            sum(not each.begun for each in self.service.pending) >= config.queue
            and len(self.service.pending) >= self.service.worker.rows
        ):
            raise ApiError(429, "too many requests wait; come again in a moment", code="queue_full")
        work = Work(self.service, prompts, asked)
        if not asked.stream:
            async with work.running(request) as deltas:
                async for _ in deltas:
                    pass
            return JSONResponse(form.whole(work))
        return StreamingResponse(
            self._events(request, work, form),
            media_type="text/event-stream",
            headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"},
        )

    async def _events(self, request: Request, work: Work, form: Form) -> AsyncIterator[bytes]:
        try:
            async with work.running(request) as deltas:
                for first in form.first(work):
                    yield _event(first)
                async for index, delta in deltas:
                    if delta.text or delta.tokens or delta.reason:
                        yield _event(form.chunk(work, index, delta))
            if work.asked.include_usage:
                yield _event(form.usage_chunk(work))
            yield b"data: [DONE]\n\n"
        except ApiError as error:
            yield _event(error.body())
        except UserError as error:
            yield _event(ApiError(500, error.message).body())


def _event(values: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(values, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n\n"


async def _not_found(request: Request, error: Exception) -> Response:
    return error_response(ApiError(404, f"there is no route {request.method} {request.url.path:.200}"))


async def _not_allowed(request: Request, error: Exception) -> Response:
    return error_response(ApiError(405, f"{request.url.path:.200} does not take {request.method:.20}"))


_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; "
    "frame-ancestors 'none'"
)


def page() -> str:
    """The page on which people try the model: style and script are in it."""
    folder = files("gpt.serve") / "page"
    text = (folder / "page.html").read_text(encoding="utf-8")
    for name in ("page.css", "page.js"):
        text = text.replace(f"/* {name} */", (folder / name).read_text(encoding="utf-8"))
    return text
