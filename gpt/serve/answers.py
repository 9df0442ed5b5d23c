"""Answers: a request's texts during generation, and the JSON that clients receive."""

import asyncio
import itertools
import json
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gpt.chat.tool_calls import AnswerParser, CallFormat, find_format
from gpt.config.serve import ServeConfig
from gpt.decoding.constraint import Constraint, ConstraintCache
from gpt.decoding.engine import Request as EngineRequest
from gpt.decoding.engine import Update
from gpt.insight.passages import TrainingText
from gpt.serve.choices import Choice, Delta, Prompt, chat_logprobs, completion_logprobs
from gpt.serve.metrics import ServerMetrics
from gpt.serve.protocol import ApiError, Generation
from gpt.serve.worker import Ticket, Worker
from gpt.system.files import Stamps
from gpt.tokenizers.tokenizer import Tokenizer

MIN_LIMIT = 4096  # Minimum default of --limit-tokens, because a completion can outgrow the context.
KEEPALIVE_SECONDS = 15.0  # Interval of keep-alive comments in a silent stream.
MAX_TOKENS_IN_LOOP = 64  # Larger chunks of a stream, such as an echoed prompt, are encoded outside of the event loop.


@dataclass(frozen=True)
class Service:
    """The model, its worker and the settings, shared by all routes."""

    name: str
    tokenizer: Tokenizer
    context_length: int  # Also the maximum length of a prompt.
    worker: Worker
    config: ServeConfig
    metrics: ServerMetrics
    created: int  # Server start, as Unix time.
    defaults: Mapping[str, Any] = field(default_factory=dict)  # Defaults of request fields.
    training: TrainingText | None = None  # Clients can see passages of it.
    stamps: Stamps = Stamps(())  # The model's files.
    pending: "set[Answer]" = field(default_factory=set)

    @property
    def limit_tokens(self) -> int:
        """The maximum number of tokens to generate per text."""
        return self.config.limit_tokens or max(MIN_LIMIT, self.context_length)

    @cached_property
    def constraints(self) -> ConstraintCache:
        """The compiled constraints of structured output."""
        return ConstraintCache(self.tokenizer, lambda: self.call_format.trigger)

    @cached_property
    def call_format(self) -> CallFormat:
        """How the model writes tool calls."""
        return find_format(self.tokenizer)


class Answer:
    """A request's texts during generation, from `begin` to `end`."""

    def __init__(
        self,
        service: Service,
        prompts: list[Prompt],
        generation: Generation,
        constraint: Constraint | None = None,
        client: str = "",
    ) -> None:
        self.service, self.prompts, self.generation = service, prompts, generation
        self.id = secrets.token_hex(12)
        self.created = int(time.time())
        # When the first text got a slot, and when the first and the last update arrived.
        self._prefill_time = self.first_time = self._last_time = 0.0
        self.choices: list[Choice] = []
        # The queue needs no maximum size, because the number of requested tokens is limited.
        self._events: asyncio.Queue[tuple[int, Update] | ApiError] = asyncio.Queue()
        self._tickets: list[Ticket] = []
        seed = secrets.randbits(63) if generation.seed is None else generation.seed
        config = generation.config
        for number, (prompt, index) in enumerate(itertools.product(prompts, range(generation.n))):
            deliver = lambda update, number=number: self._events.put_nowait((number, update))
            request = EngineRequest(
                prompt.ids, config, seed, index, generation.bias, constraint=constraint, group=(client, self.id)
            )
            self.choices.append(Choice(service.tokenizer, config, prompt, generation.echo, generation.stop_ids))
            if generation.rendered.thinking or generation.rendered.call_format:
                self.choices[-1].parser = AnswerParser(generation.rendered.thinking, generation.rendered.call_format)
            self._tickets.append(Ticket(request, deliver))

    def begin(self) -> None:
        """Submits the requests to the worker."""
        self._start_time = time.monotonic()
        self.service.pending.add(self)
        self.service.metrics.prompt_tokens.inc(sum(len(prompt.ids) for prompt in self.prompts))
        self.service.worker.add(self._tickets)

    def end(self) -> None:
        """Cancels all requests that are still running."""
        self.service.pending.discard(self)
        self.service.metrics.seconds.observe(time.monotonic() - self._start_time)
        self.service.metrics.cached_tokens.inc(self._count_cached())
        self._cancel()

    def fail(self, error: ApiError) -> None:
        """Ends the answer with an error."""
        self._events.put_nowait(error)
        self._cancel()

    def _cancel(self) -> None:
        tickets = zip(self._tickets, self.choices, strict=True)
        if running := [ticket for ticket, choice in tickets if choice.builder.reason is None]:
            self.service.worker.cancel(running)

    async def run(self) -> AsyncIterator[tuple[int, Delta] | None]:
        """Yields (choice index, delta), or None after `KEEPALIVE_SECONDS` of silence. Raises `ApiError`,
        `UserError`."""
        remaining = len(self.choices)
        while remaining:
            try:
                async with asyncio.timeout(KEEPALIVE_SECONDS):
                    event = await self._events.get()
            except TimeoutError:
                yield None
                continue
            if isinstance(event, ApiError):
                raise event
            index, update = event
            choice = self.choices[index]
            if choice.builder.reason is not None:
                continue
            self._last_time = time.monotonic()
            if not self.first_time:
                self.first_time, self._prefill_time = self._last_time, update.started or self._last_time
                self.service.metrics.first_token.observe(self.first_time - self._start_time)
                self.service.metrics.queue_seconds.observe(self._prefill_time - self._start_time)
            delta = choice.push(update)
            if delta.reason is not None:
                remaining -= 1
                if update.reason is None:  # The engine doesn't detect stop strings, so cancel its request.
                    self.service.worker.cancel([self._tickets[index]])
            yield index, delta
            await asyncio.sleep(0)  # `get` on a non-empty queue doesn't yield to other tasks.

    def usage(self) -> dict[str, Any]:
        """Returns token counts. Prompts and prefix cache hits count once, not per choice."""
        prompt = sum(len(prompt.ids) for prompt in self.prompts)
        cached = self._count_cached()
        generated = sum(len(choice.builder.tokens) for choice in self.choices)
        usage = {
            "prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated,
            "prompt_tokens_details": {"cached_tokens": cached},
        }  # fmt: skip
        if reasoning_tokens := sum(choice.reasoning_tokens for choice in self.choices):
            usage["completion_tokens_details"] = {"reasoning_tokens": reasoning_tokens}
        return usage

    def _count_cached(self) -> int:
        """Returns the number of prompt tokens from the prefix cache."""
        return sum(choice.cached for choice in self.choices[:: self.generation.n])

    def timings(self) -> dict[str, dict[str, float]]:
        """Returns the field ``timings`` of llama.cpp's server, or nothing before the answer is complete."""
        if any(choice.builder.reason is None for choice in self.choices):
            return {}
        usage, cached = self.usage(), self._count_cached()
        values: dict[str, float] = {"cache_n": cached}
        for name, count, seconds in (
            ("prompt", usage["prompt_tokens"] - cached, self.first_time - self._prefill_time),
            ("predicted", usage["completion_tokens"], self._last_time - self.first_time),
        ):
            milliseconds = max(1000 * seconds, 1e-3)
            values |= {
                f"{name}_n": count, f"{name}_ms": milliseconds, f"{name}_per_token_ms": milliseconds / max(1, count),
                f"{name}_per_second": 1000 * count / milliseconds,
            }  # fmt: skip
        return {"timings": values}


class Form:
    """The response format of a route."""

    kind, chunk_kind, prefix = "", "", ""
    end = b"data: [DONE]\n\n"  # The end of a stream.

    def _head(self, answer: Answer, kind: str) -> dict[str, Any]:
        id, name = f"{self.prefix}-{answer.id}", answer.service.name
        return {"id": id, "object": kind, "created": answer.created, "model": name}

    def _choice(self, answer: Answer, delta: Delta) -> dict[str, Any]:
        raise NotImplementedError

    def whole(self, answer: Answer) -> bytes:
        """Returns a complete response. Encodes choices one by one, because the JSON encoder holds the GIL."""
        choices = []
        for index, choice in enumerate(answer.choices):
            delta = choice.whole
            choices.append(to_json({"index": index, **self._choice(answer, delta), "finish_reason": delta.reason}))
        head = to_json({**self._head(answer, self.kind), "usage": answer.usage(), **answer.timings()})
        return head[:-1] + b', "choices": [' + b", ".join(choices) + b"]}"

    def first(self, answer: Answer) -> list[dict[str, Any]]:
        """Returns the chunks sent before any text."""
        return []

    def chunks(self, answer: Answer, index: int, delta: Delta) -> list[dict[str, Any]]:
        """Returns the chunks of new text."""
        choice = {"index": index, **self._choice(answer, delta), "finish_reason": delta.reason}
        timings = {} if answer.generation.include_usage else answer.timings()
        return [{**self._chunk_head(answer), "choices": [choice], **timings}]

    def _chunk_head(self, answer: Answer) -> dict[str, Any]:
        return self._head(answer, self.chunk_kind) | ({"usage": None} if answer.generation.include_usage else {})

    def last(self, answer: Answer) -> list[dict[str, Any]]:
        """Returns the chunks sent after all text: token counts, if the client wants them."""
        head = self._head(answer, self.chunk_kind)
        chunk = {**head, "choices": [], "usage": answer.usage(), **answer.timings()}
        return [chunk] if answer.generation.include_usage else []

    def failure(self, answer: Answer, error: ApiError) -> dict[str, Any]:
        """Returns the last chunk of a stream that ends with an error."""
        return error.body()


class CompletionForm(Form):
    """The response format of ``/v1/completions``."""

    kind = chunk_kind = "text_completion"
    prefix = "cmpl"

    def _choice(self, answer: Answer, delta: Delta) -> dict[str, Any]:
        logprobs, tokenizer = None, answer.service.tokenizer
        if answer.generation.config.logprobs is not None:
            logprobs = completion_logprobs(tokenizer, delta.tokens)
            if answer.generation.token_details:  # Ids and bytes distinguish tokens with the same text.
                logprobs["content"] = chat_logprobs(tokenizer, delta.tokens)["content"]
        return {"text": delta.text, "logprobs": logprobs}


class InfillForm(Form):
    """The response format of ``/infill``, which is llama.cpp's."""

    end = b""

    def whole(self, answer: Answer) -> bytes:
        """Returns a complete response."""
        return to_json(self._end(answer, answer.choices[0].whole.text))

    def chunks(self, answer: Answer, index: int, delta: Delta) -> list[dict[str, Any]]:
        """Returns the chunk of new text."""
        return [{"index": index, "content": delta.text, "stop": False}]

    def last(self, answer: Answer) -> list[dict[str, Any]]:
        """Returns the chunk of the end."""
        return [self._end(answer, "")]

    def _end(self, answer: Answer, text: str) -> dict[str, Any]:
        builder, usage = answer.choices[0].builder, answer.usage()
        stop_type = "eos" if builder.tokens and builder.tokens[-1].id in builder.hidden else "word"
        return {
            "index": 0, "content": text, "stop": True, "model": answer.service.name, "truncated": False,
            "stop_type": "limit" if builder.reason == "length" else stop_type,
            "tokens_predicted": usage["completion_tokens"], "tokens_evaluated": usage["prompt_tokens"],
            "tokens_cached": usage["prompt_tokens_details"]["cached_tokens"], **answer.timings(),
        }  # fmt: skip


class ChatForm(Form):
    """The response format of ``/v1/chat/completions``."""

    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def _choice(self, answer: Answer, delta: Delta) -> dict[str, Any]:
        has_logprobs = answer.generation.config.logprobs is not None
        logprobs = chat_logprobs(answer.service.tokenizer, delta.tokens) if has_logprobs else None
        parts = {"content": delta.text, "reasoning_content": delta.reasoning, "tool_calls": delta.calls}
        present = {key: value for key, value in parts.items() if value}
        if answer.generation.stream:
            return {"delta": present or {"content": ""}, "logprobs": logprobs}
        message = {"role": "assistant", "content": None if delta.calls else "", "refusal": None, **present}
        return {"message": message, "logprobs": logprobs}

    def first(self, answer: Answer) -> list[dict[str, Any]]:
        """Returns a chunk with the role for each choice."""
        role = {"delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        head = self._chunk_head(answer)
        return [{**head, "choices": [{"index": index, **role}]} for index in range(len(answer.choices))]


class Stream(Response):
    """An answer as server-sent events."""

    media_type = "text/event-stream"

    def __init__(self, answer: Answer, form: Form) -> None:
        super().__init__(headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self.answer, self.form = answer, form
        self.report: Callable[[BaseException], ApiError] = ApiError.of  # Called with an error.

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends chunks as the answer grows. An error becomes the last chunk."""
        state = scope["state"]
        state["status"] = 499  # The client disconnected, unless overwritten below.
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async for event in self._events():
                await send({"type": "http.response.body", "body": event, "more_body": True})
            state["status"] = 200
            await send({"type": "http.response.body", "body": self.form.end})
        except asyncio.CancelledError:  # The client disconnected.
            raise
        except BaseException as reason:
            error = self.report(reason)
            state["status"] = error.status
            await send({"type": "http.response.body", "body": _to_events([self.form.failure(self.answer, error)])})
        finally:
            self.answer.end()

    async def _events(self) -> AsyncIterator[bytes]:
        answer, form = self.answer, self.form
        yield _to_events(form.first(answer))
        async for update in answer.run():
            if update is None:
                yield b": keep-alive\n\n"
            elif len(update[1].tokens) > MAX_TOKENS_IN_LOOP:
                yield await asyncio.to_thread(lambda chunk: _to_events(form.chunks(answer, *chunk)), update)
            elif update[1] != Delta():
                yield _to_events(form.chunks(answer, *update))
        yield await asyncio.to_thread(lambda: _to_events(form.last(answer)))


def _to_events(chunks: Iterable[dict[str, Any]]) -> bytes:
    """Returns chunks as server-sent events, named after the ``type`` of the chunk if it has one."""
    return b"".join(
        (f"event: {chunk['type']}\n".encode() if "type" in chunk else b"") + b"data: " + to_json(chunk) + b"\n\n"
        for chunk in chunks
    )


_LINE_SEPARATORS = {code: f"\\u{code:04x}" for code in (0x85, 0x2028, 0x2029)}


def to_json(values: Any) -> bytes:
    """Returns JSON in UTF-8. Escapes all line separators of Python's `splitlines`, because some clients split streams
    there. JSON itself escapes characters below U+0020."""
    return json.dumps(values, ensure_ascii=False, allow_nan=False).translate(_LINE_SEPARATORS).encode()
