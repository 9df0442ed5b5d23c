"""Answers: the texts of a request while they are generated, and the shapes in which clients read them."""

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gpt.decoding.constraint import Constraint, ConstraintCache
from gpt.decoding.engine import Request as EngineRequest
from gpt.decoding.engine import Update
from gpt.errors import UserError
from gpt.serve.metrics import ServerMetrics
from gpt.serve.protocol import ApiError, Generation
from gpt.serve.texts import Choice, Delta, Prompt, chat_logprobs, completion_logprobs
from gpt.serve.worker import Ticket, Worker
from gpt.serve_config import ServeConfig
from gpt.text.tokenizer import Tokenizer

QUIET_SECONDS = 15.0  # after which a stream gets a comment, so that no proxy takes it for dead


@dataclass(frozen=True)
class Service:
    """The model, its worker and the settings that the routes share."""

    name: str
    tokenizer: Tokenizer
    block_size: int
    worker: Worker
    config: ServeConfig
    metrics: ServerMetrics
    created: int  # when the server started, in seconds since 1970
    defaults: Mapping[str, Any] = field(default_factory=dict)  # fields of requests that leave them out
    pending: "set[Answer]" = field(default_factory=set)  # answers that are being generated

    @cached_property
    def constraints(self) -> ConstraintCache:
        """The constraints of structured output, compiled for the model's vocabulary."""
        return ConstraintCache(self.tokenizer)


class Answer:
    """The texts of a request while they are generated, from `begin` to `end`."""

    def __init__(
        self, service: Service, prompts: list[Prompt], asked: Generation, constraint: Constraint | None = None
    ) -> None:
        self.service, self.prompts, self.asked = service, prompts, asked
        self.id = secrets.token_hex(12)
        self.created = int(time.time())
        self.begun = False  # whether any of it has been generated
        self.choices: list[Choice] = []
        self.deltas: list[list[Delta]] = []  # of each choice, where the answer is no stream
        self._error: ApiError | None = None
        self._events: asyncio.Queue[tuple[int, Update] | None] = asyncio.Queue()  # as many as tokens are asked for
        self._tickets: list[Ticket] = []
        seed = secrets.randbits(63) if asked.seed is None else asked.seed
        for prompt in prompts:
            for index in range(asked.best_of):
                deliver = partial(self._deliver, len(self.choices))
                request = EngineRequest(prompt.ids, asked.config, seed, index, asked.bias, constraint=constraint)
                self.choices.append(Choice(service.tokenizer, asked.config, prompt, asked.echo, asked.stop_ids))
                self.deltas.append([])
                self._tickets.append(Ticket(request, deliver))

    def _deliver(self, at: int, update: Update) -> None:
        self._events.put_nowait((at, update))

    def begin(self) -> None:
        """Submits the texts."""
        self._started = time.monotonic()
        self.service.pending.add(self)
        self.service.metrics.prompt_tokens.inc(sum(len(prompt.ids) for prompt in self.prompts))
        self.service.worker.add(self._tickets)

    def end(self) -> None:
        """Cancels what still runs."""
        self.service.pending.discard(self)
        self.service.metrics.seconds.observe(time.monotonic() - self._started)
        self._cancel()

    def fail(self, error: ApiError) -> None:
        """Makes an error the end of the answer."""
        self._error = error
        self._events.put_nowait(None)
        self._cancel()

    def _cancel(self) -> None:
        running = [ticket for ticket, each in zip(self._tickets, self.choices, strict=True) if not each.done]
        if running:
            self.service.worker.cancel(running)

    async def run(self) -> AsyncIterator[tuple[int, Delta] | None]:
        """Yields what is added to choices, each with its number, until all have ended; None whenever nothing came for
        `QUIET_SECONDS`. Raises `ApiError` and `UserError`."""
        left = len(self.choices)
        while left:
            try:
                async with asyncio.timeout(QUIET_SECONDS):
                    event = await self._events.get()
            except TimeoutError:
                yield None
                continue
            if self._error is not None:
                raise self._error
            assert event is not None
            at, update = event
            choice = self.choices[at]
            if choice.done:
                continue
            if not self.begun:
                self.begun = True
                self.service.metrics.first_token.observe(time.monotonic() - self._started)
            delta = choice.push(update)
            if delta.error is not None:
                raise delta.error
            if delta.reason is not None:
                left -= 1
                if update.reason is None:  # at a stop text, which the engine does not know
                    self.service.worker.cancel([self._tickets[at]])
            if not self.asked.stream:
                self.deltas[at].append(delta)
            yield at, delta
            await asyncio.sleep(0)  # others' turn: a queue that is not empty lets nobody else run

    def best(self) -> list[int]:
        """Returns the choices of the answer: of each prompt the n with the highest mean log-probability."""
        asked, found = self.asked, list[int]()
        for start in range(0, len(self.choices), asked.best_of):
            every = range(start, start + asked.best_of)
            ranked = sorted(every, key=lambda at: -self.choices[at].logprob / max(1, self.choices[at].count))
            found += ranked[: asked.n] if asked.best_of > asked.n else every
        return found

    def usage(self) -> dict[str, Any]:
        """Returns counts of ids. A prompt counts once, and what the prefix cache had of it for its first choice."""
        prompt = sum(len(prompt.ids) for prompt in self.prompts)
        cached = sum(choice.cached for choice in self.choices[:: self.asked.best_of])
        generated = sum(choice.count for choice in self.choices)
        return {
            "prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated,
            "prompt_tokens_details": {"cached_tokens": cached},
        }  # fmt: skip


class Form:
    """The shape of answers of a route."""

    kind, chunk_kind, prefix = "", "", ""

    def __init__(self, service: Service) -> None:
        self.service = service

    def _head(self, answer: Answer, kind: str) -> dict[str, Any]:
        return {
            "id": f"{self.prefix}-{answer.id}", "object": kind, "created": answer.created, "model": self.service.name
        }  # fmt: skip

    def _choice(self, delta: Delta, asked: Generation) -> dict[str, Any]:
        raise NotImplementedError

    def whole(self, answer: Answer) -> bytes:
        """Returns an answer that is no stream. Choices are encoded one by one, since an encoder lets no other thread
        run."""
        choices = []
        for index, at in enumerate(answer.best()):
            deltas = answer.deltas[at]
            text = "".join(delta.text for delta in deltas)
            joined = Delta(text, [token for delta in deltas for token in delta.tokens], deltas[-1].reason)
            choices.append(
                to_json({"index": index, **self._choice(joined, answer.asked), "finish_reason": joined.reason})
            )
        head = to_json({**self._head(answer, self.kind), "usage": answer.usage()})
        return head[:-1] + b', "choices": [' + b", ".join(choices) + b"]}"

    def first(self, answer: Answer) -> list[dict[str, Any]]:
        """Returns chunks before any text."""
        return []

    def chunk(self, answer: Answer, index: int, delta: Delta) -> dict[str, Any]:
        """Returns a chunk of a stream."""
        choice = {"index": index, **self._choice(delta, answer.asked), "finish_reason": delta.reason}
        return {**self._chunk_head(answer), "choices": [choice]}

    def _chunk_head(self, answer: Answer) -> dict[str, Any]:
        return self._head(answer, self.chunk_kind) | ({"usage": None} if answer.asked.include_usage else {})

    def usage_chunk(self, answer: Answer) -> dict[str, Any]:
        """Returns the last chunk, where counts were asked for."""
        return {**self._head(answer, self.chunk_kind), "choices": [], "usage": answer.usage()}


class CompletionForm(Form):
    """Answers of ``/v1/completions``."""

    kind = chunk_kind = "text_completion"
    prefix = "cmpl"

    def _choice(self, delta: Delta, asked: Generation) -> dict[str, Any]:
        logprobs = None
        if asked.config.logprobs is not None:
            logprobs = completion_logprobs(self.service.tokenizer, delta.tokens)
            if asked.token_details:  # as /v1/chat/completions has them: ids and bytes, which texts may not tell apart
                logprobs["content"] = chat_logprobs(self.service.tokenizer, delta.tokens)["content"]
        return {"text": delta.text, "logprobs": logprobs}


class ChatForm(Form):
    """Answers of ``/v1/chat/completions``."""

    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def _choice(self, delta: Delta, asked: Generation) -> dict[str, Any]:
        logprobs = None if asked.config.logprobs is None else chat_logprobs(self.service.tokenizer, delta.tokens)
        if asked.stream:
            return {"delta": {"content": delta.text}, "logprobs": logprobs}
        return {"message": {"role": "assistant", "content": delta.text, "refusal": None}, "logprobs": logprobs}

    def first(self, answer: Answer) -> list[dict[str, Any]]:
        """Returns a chunk for each choice that says whose turn it is."""
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
        self.ended: Callable[[int], None] = lambda status: None  # told how it ended: its own status came before that

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends chunks as the answer grows; an error is the last one."""
        status = 499  # unless it comes to its end
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async for values in self._chunks():
                event = b": keep-alive\n\n" if values is None else b"data: " + to_json(values) + b"\n\n"
                await send({"type": "http.response.body", "body": event, "more_body": True})
            status = 200
            await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})
        except (ApiError, UserError) as error:
            status = ApiError.of(error).status
            event = b"data: " + to_json(ApiError.of(error).body()) + b"\n\n"
            await send({"type": "http.response.body", "body": event})
        finally:
            self.ended(status)
            self.answer.end()

    async def _chunks(self) -> AsyncIterator[dict[str, Any] | None]:
        answer, form = self.answer, self.form
        for first in form.first(answer):
            yield first
        async for added in answer.run():
            if added is None:
                yield None
            elif (delta := added[1]).text or delta.tokens or delta.reason:
                yield form.chunk(answer, *added)
        if answer.asked.include_usage:
            yield form.usage_chunk(answer)


_LINE_ENDS = {code: f"\\u{code:04x}" for code in (0x85, 0x2028, 0x2029)}


def to_json(values: Any) -> bytes:
    """Returns JSON in UTF-8. Characters at which some clients of streams split lines, as Python's `splitlines` does,
    are written as escapes; JSON itself escapes those below U+0020."""
    return json.dumps(values, ensure_ascii=False, allow_nan=False).translate(_LINE_ENDS).encode()
