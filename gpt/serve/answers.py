"""Answers: the texts of a request while they are generated, and the shapes in which clients read them."""

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from starlette.requests import Request

from gpt.decoding.engine import Request as EngineRequest
from gpt.decoding.engine import Update
from gpt.serve.metrics import ServerMetrics
from gpt.serve.protocol import ApiError, Generation
from gpt.serve.texts import Choice, Delta, chat_logprobs, completion_logprobs
from gpt.serve.worker import Ticket, Worker
from gpt.serve_config import ServeConfig
from gpt.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Service:
    """What the routes answer from."""

    name: str
    tokenizer: Tokenizer
    vocab_size: int  # of the model
    block_size: int
    worker: Worker
    config: ServeConfig
    metrics: ServerMetrics
    created: int
    pending: "set[InFlight]" = field(default_factory=set)  # requests that are being answered


@dataclass(eq=False)
class InFlight:
    """A request that is being answered."""

    begun: bool = False
    failed: ApiError | None = None
    wake: Callable[[], None] = lambda: None


class Work:
    """The texts of a request while they are generated."""

    def __init__(self, service: Service, prompts: list[list[int]], asked: Generation) -> None:
        self.service, self.prompts, self.asked = service, prompts, asked
        self.id = secrets.token_hex(12)
        self.created = int(time.time())
        seed = secrets.randbits(63) if asked.seed is None else asked.seed
        self.choices: list[Choice] = []
        self.deltas: list[list[Delta]] = []
        self._events: asyncio.Queue[tuple[int, Update] | None] = asyncio.Queue()
        self._tickets: list[Ticket] = []
        for ids in prompts:
            for index in range(asked.best_of):
                at = len(self.choices)
                self.choices.append(
                    Choice(service.tokenizer, asked.config, ids, asked.echo, asked.logprobs is not None)
                )
                self.deltas.append([])
                engine = EngineRequest(ids, asked.config, seed, index, asked.bias)
                self._tickets.append(Ticket(engine, partial(self._deliver, at)))

    def _deliver(self, at: int, update: Update) -> None:
        self._events.put_nowait((at, update))

    @contextlib.asynccontextmanager
    async def running(self, request: Request) -> AsyncIterator[AsyncIterator[tuple[int, Delta]]]:
        """Generates. At the end, also an early one, what still runs is cancelled."""
        service, pending = self.service, InFlight()
        pending.wake = lambda: self._events.put_nowait(None)
        service.pending.add(pending)
        gone = asyncio.create_task(_gone(request, pending))
        service.metrics.prompt_tokens.inc(sum(map(len, self.prompts)))
        for ticket in self._tickets:
            service.worker.add(ticket)
        try:
            yield self._run(pending)
        finally:
            gone.cancel()
            service.pending.discard(pending)
            for ticket, choice in zip(self._tickets, self.choices, strict=True):
                if not choice.done:
                    service.worker.cancel(ticket)

    async def _run(self, pending: InFlight) -> AsyncIterator[tuple[int, Delta]]:
        began = time.monotonic()
        left = len(self.choices)
        while left:
            event = await self._events.get()
            if pending.failed is not None:
                raise pending.failed
            if event is None:
                continue
            at, update = event
            choice = self.choices[at]
            if choice.done:
                continue
            if not pending.begun:
                pending.begun = True
                self.service.metrics.first_token.observe(time.monotonic() - began)
            delta = choice.push(update)
            if delta.error is not None:
                raise delta.error
            if delta.reason is not None:
                left -= 1
                if update.reason is None:  # at a stop text, which the engine does not know
                    self.service.worker.cancel(self._tickets[at])
            if not self.asked.stream:
                self.deltas[at].append(delta)
            yield at, delta

    def best(self) -> list[int]:
        """The choices that are returned: of each prompt the n with the highest mean log-probability."""
        asked, found = self.asked, list[int]()
        for start in range(0, len(self.choices), asked.best_of):
            every = range(start, start + asked.best_of)
            ranked = sorted(every, key=lambda at: -self.choices[at].logprob / max(1, self.choices[at].count))
            found += ranked[: asked.n] if asked.best_of > asked.n else every
        return found

    def usage(self) -> dict[str, int]:
        """Counts of ids."""
        prompt, generated = sum(map(len, self.prompts)), sum(choice.count for choice in self.choices)
        return {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated}


async def _gone(request: Request, pending: InFlight) -> None:
    """Waits until the client has gone."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
    pending.failed = ApiError(499, "the client has gone")
    pending.wake()


class Form:
    """The shape of answers of a route."""

    kind, chunk_kind, prefix = "", "", ""

    def __init__(self, service: Service) -> None:
        self.service = service

    def _head(self, work: Work, kind: str) -> dict[str, Any]:
        return {
            "id": f"{self.prefix}-{work.id}", "object": kind, "created": work.created, "model": self.service.name
        }  # fmt: skip

    def _choice(self, delta: Delta, asked: Generation, streamed: bool) -> dict[str, Any]:
        raise NotImplementedError

    def whole(self, work: Work) -> dict[str, Any]:
        """The answer to a request that is no stream."""
        choices = []
        for index, at in enumerate(work.best()):
            deltas = work.deltas[at]
            joined = Delta(
                "".join(each.text for each in deltas), [token for each in deltas for token in each.tokens],
                deltas[-1].reason,
            )  # fmt: skip
            choices.append({"index": index, **self._choice(joined, work.asked, False), "finish_reason": joined.reason})
        return {**self._head(work, self.kind), "choices": choices, "usage": work.usage()}

    def first(self, work: Work) -> list[dict[str, Any]]:
        """Chunks before any text."""
        return []

    def chunk(self, work: Work, index: int, delta: Delta) -> dict[str, Any]:
        """A chunk of a stream."""
        choice = {"index": index, **self._choice(delta, work.asked, True), "finish_reason": delta.reason}
        usage = {"usage": None} if work.asked.include_usage else {}
        return {**self._head(work, self.chunk_kind), "choices": [choice], **usage}

    def usage_chunk(self, work: Work) -> dict[str, Any]:
        """The last chunk, where counts were asked for."""
        return {**self._head(work, self.chunk_kind), "choices": [], "usage": work.usage()}


class CompletionForm(Form):
    """Answers of ``/v1/completions``."""

    kind = chunk_kind = "text_completion"
    prefix = "cmpl"

    def _choice(self, delta: Delta, asked: Generation, streamed: bool) -> dict[str, Any]:
        logprobs = None
        if asked.logprobs is not None:
            logprobs = completion_logprobs(self.service.tokenizer, delta.tokens)
            if asked.token_details:  # as /v1/chat/completions has them: ids and bytes, which texts may not tell apart
                logprobs["content"] = chat_logprobs(self.service.tokenizer, delta.tokens)["content"]
        return {"text": delta.text, "logprobs": logprobs}


class ChatForm(Form):
    """Answers of ``/v1/chat/completions``."""

    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def _choice(self, delta: Delta, asked: Generation, streamed: bool) -> dict[str, Any]:
        logprobs = None if asked.logprobs is None else chat_logprobs(self.service.tokenizer, delta.tokens)
        message = {"content": delta.text} if streamed else {"role": "assistant", "content": delta.text, "refusal": None}
        return {"delta" if streamed else "message": message, "logprobs": logprobs}

    def first(self, work: Work) -> list[dict[str, Any]]:
        """Chunks before any text: whose turn it is."""
        usage = {"usage": None} if work.asked.include_usage else {}
        return [
            {
                **self._head(work, self.chunk_kind), **usage,
                "choices": [{"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None,
                             "finish_reason": None}],
            }
            for index in range(len(work.choices))
        ]  # fmt: skip
