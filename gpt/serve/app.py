"""The routes of the server: OpenAI's API, tokenizer, health, metrics and web page."""

import asyncio
import hmac
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any, TypeVar

from prometheus_client import generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from gpt.chat import tool_calls
from gpt.chat.tool_calls import Rendered
from gpt.decoding.engine import Engine
from gpt.playground.page import assemble
from gpt.serve.access import Access
from gpt.serve.answers import Answer, ChatForm, CompletionForm, Form, InfillForm, Service, Stream
from gpt.serve.choices import Prompt, read_prompt
from gpt.serve.in_flight import SMALL_BODY, InFlight, busy_error
from gpt.serve.infill import fill, find_end_ids
from gpt.serve.inspection import inspect
from gpt.serve.origins import Guard, error_response
from gpt.serve.protocol import (
    ApiError,
    ChatPrompt,
    Generation,
    clean,
    read_chat,
    read_chat_prompt,
    read_completion,
    read_infill,
    read_json,
)
from gpt.serve.responses import ResponseForm, of_chat, to_chat
from gpt.system.errors import UserError

BODY_SECONDS = 30.0
MAX_TEXTS = 1024  # Maximum prompts times choices per request.
MAX_PENDING_TEXTS = 4 * MAX_TEXTS  # For requests of more texts than the server generates at once.
SMALL_CONSTRAINT = 2**14  # Characters of the constraints that don't wait for larger ones.
MAX_VALUES = 2**21  # Maximum tokens and log-probabilities per request.
T = TypeVar("T")
_PUBLIC_ROUTES = ("/", "/health", "/models", "/models/{id:path}")  # Routes that need no API key.


class Server:
    """The ASGI application and its requests in flight. The field ``model`` of a request chooses one of the services;
    without it, the first answers."""

    def __init__(self, services: Sequence[Service], note: Callable[[str], None] = lambda text: None) -> None:
        self.services, self.note = {service.name: service for service in services}, note
        self.config, metrics = services[0].config, services[0].metrics
        self.stopping = False  # Whether to reject new requests.
        self.aborted = False
        self._inspecting = asyncio.Lock()
        metrics.waiting.set_function(lambda: sum(not answer.first_time for answer in self.pending))
        metrics.running.set_function(lambda: sum(engine.running for engine in self._engines))
        metrics.cached.set_function(
            lambda: sum(slot.length for engine in self._engines for slot in engine.context.slots)
        )
        routes = [
            Route(f"{prefix}{path}", partial(self._answer, path, handler), methods=[method])
            for method, path, handler in (
                ("POST", "/completions", partial(self._complete, read_completion, CompletionForm)),
                ("POST", "/infill", partial(self._complete, read_infill, InfillForm)),
                ("POST", "/chat/completions", self._chat),
                ("POST", "/responses", self._responses),
                ("GET", "/models", self._models),
                ("GET", "/models/{id:path}", self._model),
                ("POST", "/tokenize", self._tokenize),
                ("POST", "/detokenize", self._detokenize),
                ("GET", "/tokenizer_info", self._tokenizer_info),
                ("POST", "/inspect", self._inspect),
                ("POST", "/trace", self._trace),
                ("GET", "/health", self._health),
                ("GET", "/metrics", self._metrics),
            )
            for prefix in ("/v1", "")
        ]
        routes.append(Route("/", partial(self._answer, "/", self._page), methods=["GET"]))
        routing = Starlette(routes=routes, exception_handlers={404: _not_found, 405: _not_allowed})
        self.in_flight = InFlight(routing, metrics)
        guard, log = Guard(self.in_flight, self.config), note if self.config.access_log else None
        self.app: ASGIApp = Access(guard, metrics, log)

    @property
    def _engines(self) -> list[Engine]:
        """The engines of the models that are loaded."""
        return [engine for service in self.services.values() if (engine := service.worker.engine) is not None]

    @property
    def pending(self) -> list[Answer]:
        """The answers that are not complete."""
        return [answer for service in self.services.values() for answer in service.pending]

    def abort(self) -> None:
        """Ends all requests with an error."""
        self.aborted = True
        for answer in self.pending:
            answer.fail(_stopping_error())

    async def _answer(
        self, route: str, handler: Callable[[Request], Awaitable[Response]], request: Request
    ) -> Response:
        request.state.route = route
        try:
            if route not in _PUBLIC_ROUTES:
                self._check_key(request)
            if request.method == "POST":
                self._check_running()
                rows = sum(service.worker.rows for service in self.services.values())
                if self.in_flight.count > rows + self.config.queue:
                    raise busy_error("too many requests are waiting")
            response = await handler(request)
        except asyncio.CancelledError:  # The client disconnected.
            raise
        except BaseException as error:  # A Rust panic is not an Exception.
            return error_response(self._report(route, error))
        if isinstance(response, Stream):
            response.report = partial(self._report, route)
        return response

    def _report(self, route: str, reason: BaseException) -> ApiError:
        """Converts an error for the client, and prints it if it is not the client's."""
        error = ApiError.of(reason)
        if error.status == 500:
            self.note(f"{route}: {error.message}")
        return error

    def _check_key(self, request: Request) -> None:
        key = self.config.api_key
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        is_correct = key is None or hmac.compare_digest(token.strip().encode(), key.encode())
        if not is_correct or (key is not None and scheme.lower() != "bearer"):
            raise ApiError(
                401, "the key is missing or wrong: send it as Authorization: Bearer KEY", code="invalid_api_key"
            )

    async def _read(self, request: Request) -> tuple[dict[str, Any], Service]:
        """Returns the fields of a request, and the service of its model."""
        values = await self._json(request)
        return values, self._find(values.get("model"))

    async def _json(self, request: Request) -> dict[str, Any]:
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise ApiError(415, "the body must be JSON: send Content-Type: application/json")
        if (coding := request.headers.get("content-encoding", "identity").lower()) != "identity":
            raise ApiError(415, f"the body has the Content-Encoding {coding:.40}; send it uncompressed")
        try:
            async with asyncio.timeout(BODY_SECONDS):
                body = await request.body()
        except TimeoutError:
            raise ApiError(408, f"the body did not arrive within {BODY_SECONDS:g} s") from None
        request.state.lane = "large text" if len(body) > SMALL_BODY else "text"
        return await self._in_thread(request, lambda: read_json(body))

    async def _in_thread(self, request: Request, work: Callable[[], T], lane: str = "") -> T:
        """Runs ``work`` in a thread of the request's lane, unless the client disconnects before it starts."""
        lanes = self.in_flight.lanes
        return await asyncio.get_running_loop().run_in_executor(lanes[lane or request.state.lane], work)

    async def _models(self, request: Request) -> Response:
        models = [_model_object(service) for service in self.services.values()]
        return JSONResponse({"object": "list", "data": models})

    async def _model(self, request: Request) -> Response:
        return JSONResponse(_model_object(self._find(request.path_params["id"], ready=False)))

    def _find(self, name: Any, ready: bool = True) -> Service:
        """Returns the service of a model. Raises `ApiError` for an unknown name, or `ApiError` or `UserError` if the
        model cannot generate text."""
        names = list(self.services)
        service = self.services.get(names[0] if name is None else str(name))
        if service is None:
            known = " and ".join(f'"{each}"' for each in names)
            message = f'there is no model "{clean(str(name)):.80}"; this server has {known}'
            raise ApiError(404, message, "model", "model_not_found")
        if ready:
            _check_ready(service)
        return service

    async def _health(self, request: Request) -> Response:
        self._check_running()
        for service in self.services.values():
            _check_ready(service)
        return JSONResponse({"status": "ok"})

    async def _metrics(self, request: Request) -> Response:
        registry = next(iter(self.services.values())).metrics.registry
        return Response(generate_latest(registry), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _tokenize(self, request: Request) -> Response:
        values, service = await self._read(request)
        text = values.get("prompt")
        if values.get("messages") is not None:
            if text is not None:
                raise ApiError(400, "prompt and messages cannot be combined; send one of them", "prompt")
            chat_prompt = await self._in_thread(request, lambda: read_chat_prompt(values))
            ids = await self._encode(request, service, (await self._render(request, service, chat_prompt)).text)
        elif isinstance(text, str):
            adds_bos = values.get("add_special_tokens") is not False
            ids = await self._in_thread(request, lambda: _to_ids(service, clean(text), adds_bos))
        else:
            raise ApiError(400, "prompt must be a string", "prompt")
        values = {"count": len(ids), "max_model_len": service.context_length, "tokens": ids}
        return await self._in_thread(request, lambda: JSONResponse(values))

    async def _detokenize(self, request: Request) -> Response:
        values, service = await self._read(request)

        def decode() -> Response:
            return JSONResponse({"prompt": service.tokenizer.decode(_read_ids(service, values, "tokens"))})

        return await self._in_thread(request, decode)

    async def _inspect(self, request: Request) -> Response:
        values, service = await self._read(request)
        ids = await self._in_thread(request, lambda: _read_ids(service, values, "ids"))
        if not ids:
            raise ApiError(400, "ids must not be empty", "ids")
        async with self._inspecting:  # Between two inspections, the worker computes a step of all requests.
            values = await service.worker.run(lambda context: inspect(context, service.tokenizer, ids))
        return await self._in_thread(request, lambda: JSONResponse(values))

    async def _trace(self, request: Request) -> Response:
        values, service = await self._read(request)
        training = service.training
        if training is None:
            raise ApiError(403, "this server does not show passages of its training text")
        ids = await self._in_thread(request, lambda: _read_ids(service, values, "ids"))
        indexes = [values.get("at"), values.get("first", 0)]
        for name, index, end in zip(("at", "first"), indexes, (len(ids), len(ids) + 1), strict=True):
            if type(index) is not int or not 0 <= index < end:
                raise ApiError(400, f"{name} must be an index of ids", name)
        return JSONResponse(await self._in_thread(request, lambda: training.trace(ids, *indexes), "large text"))

    async def _tokenizer_info(self, request: Request) -> Response:
        tokenizer = self._find(request.query_params.get("model")).tokenizer
        words = {id: word for word, id in tokenizer.all_specials.items()}
        return JSONResponse({
            "tokenizer_class": "gpt", "name": tokenizer.name, "vocab_size": tokenizer.vocab_size,
            "eos_token": tokenizer.eot_token, "eos_token_id": tokenizer.eot,
            "bos_token": None if tokenizer.bos is None else words.get(tokenizer.bos), "bos_token_id": tokenizer.bos,
            "eos_token_ids": sorted(tokenizer.ends), "special_token_ids": sorted(words),
            "pad_token": None, "chat_template": tokenizer.chat_template,
        })  # fmt: skip

    async def _page(self, request: Request) -> Response:
        text, policy = page()
        return HTMLResponse(text, headers={"Content-Security-Policy": policy, "Referrer-Policy": "no-referrer"})

    async def _complete(
        self, read: Callable[..., tuple[list[str | Sequence[int]], Generation]], form: type[Form], request: Request
    ) -> Response:
        values, service = await self._read(request)

        def make_prompts() -> tuple[list[Prompt], Generation]:
            texts, generation = read(values, service.limit_tokens, service.defaults)
            if (gap := generation.gap) is not None:
                generation = replace(generation, stop_ids=generation.stop_ids | find_end_ids(service.tokenizer))
                texts = [fill(service.tokenizer, text, gap, service.context_length) for text in texts]
            return [_make_prompt(service, text) for text in texts], generation

        prompts, generation = await self._in_thread(request, make_prompts)
        return await self._generate(request, service, prompts, generation, form())

    async def _chat(self, request: Request) -> Response:
        values, service = await self._read(request)
        return await self._generate_chat(request, service, values, ChatForm())

    async def _responses(self, request: Request) -> Response:
        values, service = await self._read(request)
        try:
            form = await self._in_thread(request, lambda: ResponseForm(values, service.defaults))
            chat_values = await self._in_thread(request, lambda: to_chat(values))
            return await self._generate_chat(request, service, chat_values, form)
        except ApiError as error:
            raise of_chat(error, values) from None

    async def _generate_chat(
        self, request: Request, service: Service, values: Mapping[str, Any], form: Form
    ) -> Response:
        limit, defaults = service.limit_tokens, service.defaults
        chat_prompt, generation = await self._in_thread(request, lambda: read_chat(values, limit, defaults))
        rendered = await self._render(request, service, chat_prompt)
        _check_length(service, rendered.text, "messages")
        ids = await self._encode(request, service, rendered.text)
        prompt, free_positions = _make_prompt(service, ids, "messages"), service.context_length - len(ids)
        if free_positions < 1:
            raise _too_long_error("messages", f"{len(ids):,} tokens, which fills the context")
        max_tokens = min(free_positions, generation.config.max_tokens)
        min_tokens = min(generation.config.min_tokens, max_tokens)
        config = replace(generation.config, max_tokens=max_tokens, min_tokens=min_tokens)
        generation = replace(generation, config=config, rendered=rendered)
        return await self._generate(request, service, [prompt], generation, form)

    async def _render(self, request: Request, service: Service, chat_prompt: ChatPrompt) -> Rendered:
        """Renders a conversation with the chat template."""
        if service.tokenizer.chat_template is None:
            raise ApiError(400, "this model has no chat template for messages; use /v1/completions", "messages")
        find_format = lambda: service.call_format
        render = partial(tool_calls.render, service.tokenizer, find_format=find_format, **vars(chat_prompt))
        return await self._in_thread(request, render, lane="chat")

    async def _encode(self, request: Request, service: Service, text: str) -> list[int]:
        """Returns the ids of a rendered conversation."""
        return await self._in_thread(request, lambda: service.tokenizer.encode(text, specials=True).tolist())

    def _check_running(self) -> None:
        """Raises `ApiError` if the server is about to end."""
        if self.stopping:
            raise _stopping_error()

    async def _generate(
        self, request: Request, service: Service, prompts: list[Prompt], generation: Generation, form: Form
    ) -> Response:
        _check_size(service, prompts, generation)
        constraint, config, rendered = None, generation.config, generation.rendered
        if generation.constrained_by is not None:
            try:
                find_constraint = partial(service.constraints.find, config, rendered.grammar, rendered.thinking)
                size = sum(map(len, rendered.grammar or (config.constraint or ("", ""))[1]))
                lane = "constraint" if size <= SMALL_CONSTRAINT else "large constraint"
                constraint = await self._in_thread(request, find_constraint, lane)
            except UserError as error:
                raise ApiError(400, error.message, generation.constrained_by) from None
        client = request.client.host if request.client else ""
        answer = await self._in_thread(request, lambda: Answer(service, prompts, generation, constraint, client))
        if self.aborted:
            raise _stopping_error()
        pending_texts = sum(len(pending.choices) for pending in (*self.pending, answer))
        if len(answer.choices) > service.worker.rows and pending_texts > MAX_PENDING_TEXTS:
            raise busy_error("too many large requests are in flight")
        request.state.answer = answer
        answer.begin()
        if generation.stream:
            return Stream(answer, form)
        try:
            async for _ in answer.run():
                pass
            body = await self._in_thread(request, lambda: form.whole(answer))
            return Response(body, media_type="application/json")
        finally:
            answer.end()


def _model_object(service: Service) -> dict[str, Any]:
    config = service.worker.model_config
    return {
        "id": service.name, "object": "model", "created": service.created, "owned_by": "gpt",
        "context_length": service.context_length, "layers": config.n_layer, "heads": config.n_head,
        "can_trace": service.training is not None, "sampling": service.defaults,
    }  # fmt: skip


def _check_ready(service: Service) -> None:
    """Raises `UserError` if the model cannot generate text."""
    if (engine := service.worker.engine) is not None and engine.failure is not None:
        raise engine.failure
    service.stamps.check()


def _to_ids(service: Service, text: str, adds_bos: bool) -> list[int]:
    """Returns the ids of a text. If the text is a special token, returns only its id."""
    tokenizer = service.tokenizer
    if text in tokenizer.all_specials:
        return [tokenizer.all_specials[text]]
    ids: list[int] = tokenizer.encode(text, specials=bool(tokenizer.files)).tolist()
    return [tokenizer.bos, *ids] if adds_bos and tokenizer.bos is not None else ids


def _read_ids(service: Service, values: dict[str, Any], name: str) -> list[int]:
    ids, vocab_size = values.get(name), service.tokenizer.usable
    if not isinstance(ids, list) or not all(type(id) is int and 0 <= id < vocab_size for id in ids):
        raise ApiError(400, f"{name} must be a list of ids below {vocab_size:,}", name)
    return ids


def _make_prompt(service: Service, text_or_ids: str | Sequence[int], field: str = "prompt") -> Prompt:
    limit, vocab_size = service.context_length, service.tokenizer.usable
    if isinstance(text_or_ids, str):
        _check_length(service, text_or_ids)
    prompt = read_prompt(service.tokenizer, text_or_ids)
    if not all(0 <= id < vocab_size for id in prompt.ids):
        raise ApiError(400, f"prompt has an id that is not below {vocab_size:,}", "prompt")
    if len(prompt.ids) > limit:
        raise _too_long_error(field, f"{len(prompt.ids):,} tokens, but the context has {limit:,}")
    return prompt


def _check_length(service: Service, text: str, field: str = "prompt") -> None:
    """Raises `ApiError` if a lower bound on the text's tokens exceeds the context. Does not tokenize."""
    limit, min_tokens = service.context_length, service.tokenizer.estimate_min_tokens(text)
    if min_tokens > limit:
        raise _too_long_error(field, f"at least {min_tokens:,} tokens, but the context has {limit:,}")


def _check_size(service: Service, prompts: list[Prompt], generation: Generation) -> None:
    config, vocab_size = generation.config, service.tokenizer.usable
    if any(id >= vocab_size for id, _ in generation.bias):
        raise ApiError(400, f"logit_bias has an id that is not below {vocab_size:,}", "logit_bias")
    longest = max(len(prompt.ids) for prompt in prompts)
    texts = len(prompts) * generation.n
    if texts > MAX_TEXTS:
        raise ApiError(400, f"n: {texts:,} completions are requested; the limit is {MAX_TEXTS:,}", "n")
    tokens = texts * (config.max_tokens + (longest if generation.echo else 0))
    if tokens * (1 + (config.logprobs or 0)) > MAX_VALUES:
        raise ApiError(
            400, f"max_tokens: {texts:,} completions of {tokens:,} tokens in all, with log-probabilities, exceed "
            f"{MAX_VALUES:,} values; request fewer at once", "max_tokens",
        )  # fmt: skip


def _stopping_error() -> ApiError:
    return ApiError(503, "the server is stopping", code="stopping")


def _too_long_error(field: str, length: str) -> ApiError:
    subject = "the conversation" if field == "messages" else "the prompt"
    return ApiError(400, f"{subject} has {length}", field, "context_length_exceeded")


async def _not_found(request: Request, error: Exception) -> Response:
    return error_response(ApiError(404, f"there is no route {request.method} {request.url.path:.200}"))


async def _not_allowed(request: Request, error: Exception) -> Response:
    return error_response(ApiError(405, f"{request.url.path:.200} does not take {request.method:.20}"))


@cache
def page() -> tuple[str, str]:
    """Returns the web page and its Content-Security-Policy."""
    return assemble(("server.js",))
