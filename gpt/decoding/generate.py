"""Prompts' ids → more ids: rows are filled with prompts, then a step gives each row a token. Knows nothing of text."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gpt.decoding.context import Context
from gpt.decoding.logits import Filters, key_of, step_key
from gpt.decoding.lookup import Lookup
from gpt.errors import NotANumber
from gpt.sample_config import SampleConfig

POSITIONS_AT_ONCE = 64  # of a prompt, whose logits are looked at together


@dataclass(frozen=True)
class Token:
    """An id and its log-probability (nats) under the model itself: no filter, temperature 1; None where nothing stands
    before it. ``top``: the likeliest ids in its place with theirs, if asked for."""

    id: int
    logprob: float | None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Request:
    """A sample to make: its prompt's ids, of which there is one at least, and its number within the prompt's."""

    prompt: Sequence[int]
    index: int = 0


@dataclass(frozen=True)
class Event:
    """What has become of request ``number``: it begins with its prompt's tokens (where their log-probabilities were
    asked for), then come ``tokens``, and at the end the ``reason``: ``length`` or ``eot``."""

    number: int
    tokens: Sequence[Token] = ()
    prompt: Sequence[Token] | None = None
    reason: str | None = None


@dataclass
class _Row:
    number: int
    key: int
    count: int = 0  # ids generated so far
    last: int = 0  # the newest of them, which the context has not taken in
    guessed: list[int] = field(default_factory=list)  # what may follow it
    taken: int = 1  # ids that the context has taken in at once, of which the first is certain
    right: int = 0  # guesses among them that have turned out right
    lookup: Lookup = field(default_factory=Lookup)
    ended: bool = False


class Batch:
    """Samples that are made together, as many at once as the context has rows; the others follow as rows get free.

    Iterate over it for events. Whoever listens may end a request with `end`.
    """

    def __init__(self, context: Context, filters: Filters, requests: Iterable[Request], seed: int = 0) -> None:
        self.context = context
        self.filters = filters
        self.config = filters.config
        self._waiting = enumerate(requests)
        self._seed = seed
        self._active: list[_Row] = []  # row r of the context is that of _active[r]
        self._logits: Tensor | None = None  # (n, T, V): what follows each active row's last T ids

    def end(self, number: int) -> None:
        """Nothing more of this request is wanted."""
        for row in self._active:
            row.ended = row.ended or row.number == number

    @torch.inference_mode()
    def __iter__(self) -> Iterator[Event]:
        yield from self._admit()
        while self._active:
            yield from self._choose()
            self._retire()
            if self._active:
                self._guess()
                self._step()
            yield from self._admit()

    def _admit(self) -> Iterator[Event]:
        """Fills free rows with waiting requests."""
        while len(self._active) < self.context.rows:
            some = [pair for _, pair in zip(range(self.context.rows - len(self._active)), self._waiting, strict=False)]
            if not some:
                return
            yield from self._begin(some)

    def _begin(self, some: list[tuple[int, Request]]) -> Iterator[Event]:
        x = self.context.fill(len(self._active), [request.prompt for _, request in some])  # (n, T, C)
        rows = range(len(self._active), len(self._active) + len(some))
        ends = self.context.cache.lengths[rows.start : rows.stop] - 1
        new = [_Row(number, key_of(self._seed, request.index, request.prompt)) for number, request in some]
        if self.config.echo_logprobs:
            for at, (row, (number, request)) in enumerate(zip(rows, some, strict=True)):
                kept = request.prompt[self.context.dropped[row] :]
                yield Event(number, prompt=prompt_tokens(self.context, x[at], kept, self.config.logprobs or 0))
        if self.config.max_tokens == 0:
            yield from (Event(row.number, reason="length") for row in new)
            return
        logits = self.context.logits(x[range(len(some)), ends])[:, None]  # (n, 1, V)
        if self._logits is not None:
            wide = logits.new_zeros(len(new), self._logits.size(1), logits.size(-1))
            wide[:, :1] = logits
            logits = torch.cat([self._logits, wide])
        self._logits = logits
        self._active += new

    def _guess(self) -> None:
        """Has the context look ahead, where the text so far says what may come; a wrong guess changes no text."""
        if not self.config.speculate:
            return
        room = min(self.context.room(at) for at in range(len(self._active))) - 1
        for at, row in enumerate(self._active):
            most = min(room, self.config.speculate, self.config.max_tokens - row.count - 1)
            row.guessed = row.lookup.guess([*self.context.ids[at], row.last], most) if most > 0 else []

    def _step(self) -> None:
        """Has the context take in each row's last id and guesses, all rows padded to the longest."""
        most = max(len(row.guessed) for row in self._active)
        ids = [[row.last, *row.guessed, *[0] * (most - len(row.guessed))] for row in self._active]
        self._logits = self.context.logits(self.context.step(ids))
        for row in self._active:
            row.taken = most + 1

    def _choose(self) -> Iterator[Event]:
        """Gives each active row a token, and one more for each guess that was right."""
        assert self._logits is not None
        going = self._active
        for t in range(self._logits.size(1)):
            yield from self._choose_after(t, going)
            going = [row for row in going if not row.ended and row.guessed[t : t + 1] == [row.last]]
            if not going:
                break
            for row in going:
                row.right = t + 1
        for at, row in enumerate(self._active):
            self.context.rewind(at, row.taken - 1 - row.right)
            row.taken, row.right, row.guessed = 1, 0, []

    def _choose_after(self, t: int, going: Sequence[_Row]) -> Iterator[Event]:
        """Gives rows their token after the first ``t`` guesses."""
        assert self._logits is not None
        logits = self._logits[:, t]
        past: Sequence[Sequence[int]] = [()] * len(going)
        if len(going) < len(self._active) or self.config.looks_back:
            rows = [at for at, row in enumerate(self._active) if any(row is each for each in going)]
            logits = logits[rows]
            past = [self.context.ids[at][: len(self.context.ids[at]) - self._active[at].taken + 1 + t] for at in rows]
        shaped = self.filters.shape(logits, past, [row.count for row in going])
        keys = [step_key(row.key, row.count) for row in going] if self.config.draws else []
        ids = self.filters.choose(shaped, keys).tolist()
        tokens = read(logits.log_softmax(-1), range(len(ids)), ids, self.config.logprobs)
        for row, token in zip(going, tokens, strict=True):
            row.last = token.id
            row.count += 1
            ends = token.id == self.filters.eot and not self.config.ignore_eot
            reason = "eot" if ends else "length" if row.count == self.config.max_tokens else None
            row.ended = row.ended or reason is not None
            yield Event(row.number, [token], reason=reason)

    def _retire(self) -> None:
        """Frees the rows of what has ended: the last active row takes the place of one before it."""
        self._logits = None
        for at in reversed(range(len(self._active))):
            if self._active[at].ended:
                last = self._active.pop()
                if at < len(self._active):
                    self._active[at] = last
                    self.context.copy(len(self._active), at)


def read(logprobs: Tensor, rows: Sequence[int], ids: Sequence[int], top: int | None = None) -> list[Token]:
    """Tokens for ids that were chosen in rows of the model's own log-probabilities (n, V). Raises `NotANumber` where
    one is NaN: a single NaN among the logits makes all of a row NaN, and so do logits that are all -inf. The chosen
    ones are read back anyway, so this check waits for no device."""
    chosen = logprobs[rows, ids].tolist()
    if any(map(math.isnan, chosen)):
        raise no_logits()
    if not top:
        return [Token(id, value) for id, value in zip(ids, chosen, strict=True)]
    values, likeliest = logprobs[rows].topk(min(top, logprobs.size(-1)), dim=-1)
    tops = [tuple(zip(*pair, strict=True)) for pair in zip(likeliest.tolist(), values.tolist(), strict=True)]
    return [Token(*token) for token in zip(ids, chosen, tops, strict=True)]


def no_logits() -> NotANumber:
    """The error of a model that says nothing about the next token."""
    return NotANumber("the model's logits are no finite numbers, so that no token can be chosen")


def prompt_tokens(context: Context, x: Tensor, ids: Sequence[int], top: int) -> list[Token]:
    """A prompt's tokens, from the residual stream (T, C) of its ids; nothing stands before the first."""
    tokens = [Token(ids[0], None)]
    for start in range(0, len(ids) - 1, POSITIONS_AT_ONCE):
        part = ids[start + 1 : start + 1 + POSITIONS_AT_ONCE]
        logprobs = context.logits(x[start : start + len(part)]).log_softmax(-1)
        tokens += read(logprobs, range(len(part)), part, top)
    return tokens


def generate(
    context: Context, prompt: Sequence[int], config: SampleConfig, eot: int, seed: int = 0, index: int = 0
) -> Iterator[Token]:
    """Yields ids after ``prompt`` until ``max_tokens`` or end-of-text, which is yielded last. An empty prompt starts
    from end-of-text, as a document does."""
    for event in Batch(context, Filters(config, eot), [Request(prompt or [eot], index)], seed):
        yield from event.tokens
