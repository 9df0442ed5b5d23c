"""Requests → tokens: each step gives every running text its next token, in one pass. Knows ids, not text."""

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor

from gpt.decoding import sampler
from gpt.decoding.beam import Search
from gpt.decoding.context import Context, Slot, select
from gpt.decoding.logits import Filters, Token, key_of, step_key
from gpt.decoding.sampler import Draw
from gpt.decoding.scheduler import Scheduler
from gpt.decoding.sequence import Request, TextState, Update
from gpt.device import Download, upload
from gpt.errors import UserError
from gpt.sample_config import SampleConfig

__all__ = ["Engine", "Request", "Update", "generate"]
CHUNK = 2048  # ids of prompts that a step reads at most, which bounds its activations


class Engine:
    """Generates for many requests at once, each with settings of its own, which come and go between steps. A text ends
    with any of the ids ``ends``. A step reads at most ``chunk`` ids of prompts (`Scheduler`).

    Tokens depend on the request alone and not on what runs beside it, up to the rounding of sums (docs/generate.md). An
    error that is one request's own, such as NaN logits, ends that request with an update; an error that `step` raises
    ends the engine.
    """

    def __init__(self, context: Context, ends: Collection[int], chunk: int = CHUNK) -> None:
        self.context, self.ends = context, ends
        self.scheduler = Scheduler(context, chunk)
        self._number = 0  # of the next request
        self._filters: WeakValueDictionary[Any, Filters] = WeakValueDictionary()  # texts that share them are one group
        self._draws: list[Draw] = []  # the last step's, unless they have been read

    @property
    def busy(self) -> bool:
        """Whether requests wait or run."""
        return bool(self.scheduler.waiting or self.running)

    @property
    def running(self) -> int:
        """The number of requests that run."""
        return sum(not text.done for text in self.scheduler.running)

    @property
    def free(self) -> int:
        """The number of slots left for further requests; negative where requests wait for more than there are."""
        texts = (*self.scheduler.waiting, *self.scheduler.running)
        return len(self.context.slots) - sum(text.request.width for text in texts if not text.done)

    def add(self, request: Request) -> int:
        """Queues a request and returns its number, by which updates name it. Raises `UserError` for one that the model
        or the context cannot serve."""
        self._check(request)
        config = request.config
        filters = Filters(config, self.ends, request.bias)
        filters = self._filters.setdefault(filters.key, filters)
        constraint = request.constraint and request.constraint.copy()
        search = Search(config, self.ends, request.stops, constraint) if config.beam else None
        key = key_of(request.seed, request.index, request.ids)
        self.scheduler.waiting.append(TextState(self._number, request, filters, search, key, constraint))
        self._number += 1
        return self._number - 1

    def _check(self, request: Request) -> None:
        size, room, slots = self.context.vocab_size, self.context.cache.room, len(self.context.slots)
        beam = request.config.beam
        if beam > slots:
            raise UserError(f"beam is {beam}, but only {slots:,} sequences fit at once", "use fewer beams")
        longest = min(len(request.ids) + request.config.max_tokens, self.context.size)
        if longest > room:
            raise UserError(
                f"a request may take {longest:,} tokens, but the KV cache holds {room:,}",
                "shorten the prompt, or lower --max-tokens",
            )
        ids = [*request.ids, *(id for id, _ in request.bias)]
        if not request.ids or not 0 <= min(ids) <= max(ids) < size:
            raise UserError(f"a request needs one or more ids from 0 to {size - 1:,}", "use the model's tokenizer")

    def cancel(self, *numbers: int) -> None:
        """Ends requests without another update; their slots are free in the next step. Those that have ended are left
        alone."""
        self.scheduler.cancel({*numbers})

    def run(self) -> Iterator[Update]:
        """Steps until no request waits or runs."""
        while self.busy:
            yield from self.step()

    @torch.inference_mode()
    def step(self) -> list[Update]:
        """Starts the waiting requests for which there are free slots, and gives every running one its next token, or
        several where guesses were right. Returns an update for each running request.

        On a GPU the tokens of a step are read after the next one has been launched, as long as no text ends and the
        next step needs nothing of them but their ids: the GPU never waits for the host. No slot is given to another
        request before what was launched for it has been read."""
        if any(text.done for text in self.scheduler.running):
            self._read()
        self.scheduler.release()
        texts = self.scheduler.plan()
        unread, self._draws = self._draws, []
        if self.context.compiled is not None:
            decoding = [text for text in texts if text.count == 1 and text.left <= 1 and text.request.config.max_tokens]
            texts = [text for text in texts if text not in decoding]
            if decoding:
                self._decode_compiled(decoding, unread)
        if texts:
            self._compute(texts, unread)
        for each in unread:
            sampler.take(each, self.context, self.ends)
        if not self._runs_ahead():
            self._read()
        return [text.update() for text in self.scheduler.running]

    def _runs_ahead(self) -> bool:
        """Whether the next step is launched before the tokens of this one are read."""
        return self.context.compute.device.type == "cuda" and all(
            text.runs_ahead and self.context.room(text.live[0]) for each in self._draws for text, _ in each.places
        )

    def _read(self) -> None:
        """Reads the tokens that are on their way."""
        draws, self._draws = self._draws, []
        for each in draws:
            sampler.take(each, self.context, self.ends)

    def _compute(self, texts: list[TextState], unread: Sequence[Draw]) -> None:
        """Computes the next ids of texts in one pass, and chooses tokens after those that are then read to their end.
        The newest ids of some are only on the device, in ``unread``: they come first."""
        context = self.context
        order = lambda each: (each[0].left > 0, each[0].count, each[1].at)
        work = sorted(((text, slot) for text in texts for slot in text.live), key=order)
        known = [id for text, slot in work for id in text.next_ids(slot)]
        parts = [] if context.compiled or not unread else [_in_order(unread)]
        parts += [upload(known, context.compute.device)] if known else []
        x = context.forward(
            [(slot, text.count) for text, slot in work], torch.cat(parts) if len(parts) > 1 else parts[0]
        )
        ends = dict(zip((slot for _, slot in work), itertools.accumulate(text.count for text, _ in work), strict=True))
        for text, slot in work:
            if text.prompt:
                sampler.echo(text, x[ends[slot] - text.count : ends[slot]], context)
        self._choose(dict.fromkeys(text for text, _ in work), ends, lambda rows: context.logits(select(x, rows)))

    def _decode_compiled(self, texts: list[TextState], unread: Sequence[Draw]) -> None:
        """Computes the next id of texts by the context's compiled step, which chooses too where all of them have
        filters of logits alone."""
        context, filters = self.context, texts[0].filters
        for each in unread:
            if each.ids is not None:
                context.last[upload(each.rows, context.compute.device)] = each.ids
        known = {slot.at: slot.text[-1] for text in texts if text.left for slot in text.live}
        if known:
            new = upload([[id] for id in known.values()], context.compute.device)
            context.last[upload([*known], context.compute.device)] = new
        slots = [slot for text in texts for slot in text.live]
        if any(
            text.search or text.constraint or text.filters is not filters or filters.shapes(text.index + 1)
            for text in texts
        ):
            [logits] = context.next_tokens(slots)
            self._choose(texts, {slot: n for n, slot in enumerate(slots, 1)}, lambda rows: select(logits, rows))
            return
        keys = [step_key(text.key, text.index + 1) for text in texts] if filters.draws else []
        top = max(text.request.config.logprobs or 0 for text in texts)
        scored = context.next_tokens(slots, filters, keys, top)
        self._draws.append(Draw([(text, 0) for text in texts], None, Download(*scored)))

    def _choose(
        self, texts: Iterable[TextState], ends: Mapping[Slot, int], logits: Callable[[list[int]], Tensor]
    ) -> None:
        """Chooses tokens after texts that are read to their end. ``ends``: the place after each slot's last id in the
        pass; ``logits`` computes those after some places."""
        read = [text for text in texts if text.left <= 0 and not text.done]
        for text in read:
            if text.request.config.max_tokens == 0:
                text.end("length")
        searches = [text for text in read if text.search and not text.done]
        first = {text.filters: text.number for text in reversed(read)}  # texts with the same filters side by side
        samples = sorted(
            (text for text in read if not (text.search or text.done)), key=lambda text: first[text.filters]
        )
        places = [(text, t) for text in samples for t in range(len(text.guesses) + 1)]
        rows = [ends[text.live[0]] - len(text.guesses) + t - 1 for text, t in places]
        rows += [ends[slot] - 1 for text in searches for slot in text.live]
        if not rows:
            return
        found = torch.split(logits(rows), [len(places), *(len(text.live) for text in searches)])
        if places:
            self._draws.append(sampler.draw(found[0], places))
        for text, each in zip(searches, found[1:], strict=True):
            sampler.extend(text, each, self.context)


def _in_order(draws: Sequence[Draw]) -> Tensor:
    """Returns drawn ids, (n), in the order of their slots."""
    rows = [row for each in draws for row in each.rows]
    ids = torch.cat([each.ids for each in draws if each.ids is not None]) if len(draws) > 1 else draws[0].ids
    assert ids is not None
    return (ids if rows == sorted(rows) else ids[upload(np.argsort(rows), ids.device)])[:, 0]


def generate(
    context: Context, prompt: Sequence[int], config: SampleConfig, ends: Collection[int], seed: int = 0, index: int = 0
) -> Iterator[Token]:
    """Yields tokens after ``prompt``, one id at least, until ``max_tokens`` or one of ``ends``, which is yielded last.
    Raises `NotANumber` where the logits are NaN."""
    engine = Engine(context, ends)
    engine.add(Request(prompt, config, seed, index))
    for update in engine.run():
        if update.error is not None:
            raise update.error
        yield from update.tokens
