"""Beam search: the likeliest texts side by side, a step at a time, ranked and ended as transformers does."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gpt.decoding.context import Context
from gpt.decoding.generate import Request, Token, no_logits, prompt_tokens, read
from gpt.decoding.logits import EXCLUDED, Filters
from gpt.sample_config import SampleConfig

Stops = Callable[[Sequence[int]], bool]  # whether a text of these ids ends with a stop text


@dataclass(frozen=True)
class Hypothesis:
    """A text of the search. ``total`` is the sum that it is ranked by, ``score`` that over its length to the power of
    the length penalty; ``reason`` is how it ended: ``length``, ``eot`` or ``stop``; None: it lives."""

    tokens: tuple[Token, ...]
    total: float
    score: float = -math.inf
    reason: str | None = None

    @property
    def ids(self) -> list[int]:
        """Its ids, without the prompt's."""
        return [token.id for token in self.tokens]


@dataclass(frozen=True)
class BeamEvent:
    """What has become of prompt ``number``: its tokens, ids that all hypotheses agree on, the best at the end."""

    number: int
    agreed: Sequence[int] = ()
    prompt: Sequence[Token] | None = None
    best: Sequence[Hypothesis] | None = None


class Search:
    """The hypotheses of one prompt: at most ``config.beam`` that live, as many that have ended."""

    def __init__(self, config: SampleConfig, eot: int, stops: Stops | None = None) -> None:
        self.config = config
        self.eot = eot
        self.stops = stops
        self.live = [Hypothesis((), 0.0)]
        self.ended: list[Hypothesis] = []  # best first
        self.done = config.max_tokens == 0
        self._agreed = 0
        if self.done:
            self.ended = [Hypothesis((), 0.0, 0.0, "length")]

    def advance(self, logprobs: Tensor, shaped: Tensor) -> list[int]:
        """Goes on by a token, from the model's own log-probabilities (live, V) and those that are ranked, of the same
        shape. Returns which of the hypotheses before each of those that live now comes from."""
        width = self.config.beam
        found = self._candidates(shaped, 2 * width)  # so many that half of them go on, even if each beam may end
        parts = zip(*found, strict=True) if found else ((), (), ())
        _, rows, ids = (list(part) for part in parts)
        tokens = read(logprobs, rows, ids, self.config.logprobs)
        live: list[Hypothesis] = []
        parents: list[int] = []
        for rank, ((total, parent, _), token) in enumerate(zip(found, tokens, strict=True)):
            grown = (*self.live[parent].tokens, token)
            reason = self._reason(grown)
            if reason is None and len(live) < width:
                live.append(Hypothesis(grown, total))
                parents.append(parent)
            elif reason is not None and rank < width:
                score = total / len(grown) ** self.config.length_penalty
                self.ended.append(Hypothesis(grown, total, score, reason))
        self.live = live
        self.ended = sorted(self.ended, key=lambda each: -each.score)[:width]
        self.done = not live or self._settled()
        return parents

    def _candidates(self, shaped: Tensor, count: int) -> list[tuple[float, int, int]]:
        """The likeliest ways on, best first: (sum of log-probabilities, hypothesis, id). Raises `NotANumber` where a
        hypothesis has none."""
        totals = shaped + torch.tensor([each.total for each in self.live], device=shaped.device)[:, None]
        values, ids = totals.topk(min(count, totals.size(-1)), dim=-1)
        rows = values.tolist()
        if not all(row[0] > EXCLUDED for row in rows):  # NaN comes first
            raise no_logits()
        ways = [
            (value, parent, id)
            for parent, row in enumerate(zip(rows, ids.tolist(), strict=True))
            for value, id in zip(*row, strict=True)
            if value > EXCLUDED
        ]
        return sorted(ways, key=lambda way: -way[0])[:count]

    def _reason(self, tokens: Sequence[Token]) -> str | None:
        if tokens[-1].id == self.eot and not self.config.ignore_eot:
            return "eot"
        if self.stops is not None and self.stops([token.id for token in tokens]):
            return "stop"
        return "length" if len(tokens) == self.config.max_tokens else None

    def _settled(self) -> bool:
        """Whether what has ended stays the best (with ``off`` by a guess: as if the best live one ended now)."""
        if len(self.ended) < self.config.beam:
            return False
        if self.config.early_stopping == "on" or self.config.beam == 1:
            return True
        length = len(self.live[0].tokens)
        if self.config.early_stopping == "never" and self.config.length_penalty > 0:
            length = self.config.max_tokens
        hoped: float = self.live[0].total / length**self.config.length_penalty
        return hoped <= self.ended[-1].score

    def agreed(self) -> list[int]:
        """Ids that every hypothesis, living or ended, goes on with after those that this has returned before."""
        every = [each.tokens for each in (self.ended[:1] if self.done else [*self.live, *self.ended])]
        start = at = self._agreed
        while all(len(tokens) > at and tokens[at].id == every[0][at].id for tokens in every):
            at += 1
        self._agreed = at
        return [token.id for token in every[0][start:at]]


@dataclass
class _Group:
    """A prompt's search, and the rows of the context in which its live hypotheses lie."""

    number: int
    search: Search
    rows: list[int]


class BeamBatch:
    """Searches side by side, as many as the context has room for; each has ``config.beam`` rows of it, in a block.

    Iterate over it for events.
    """

    def __init__(
        self, context: Context, filters: Filters, requests: Iterable[Request], stops: Stops | None = None
    ) -> None:
        self.context = context
        self.filters = filters
        self.width = filters.config.beam
        self._stops = stops
        self._waiting = enumerate(requests)
        self._groups: list[_Group] = []  # group g has the rows from g * width on

    @torch.inference_mode()
    def __iter__(self) -> Iterator[BeamEvent]:
        yield from self._admit()
        while self._groups:
            self._step()
            for group in reversed(self._groups):
                yield from self._report(group)
            yield from self._admit()

    def _admit(self) -> Iterator[BeamEvent]:
        while (len(self._groups) + 1) * self.width <= self.context.rows:
            number, request = next(self._waiting, (0, None))
            if request is None:
                return
            first = len(self._groups) * self.width
            x = self.context.fill(first, [request.prompt])  # (1, T, C)
            group = _Group(number, Search(self.filters.config, self.filters.eot, self._stops), [first])
            self._groups.append(group)
            if self.filters.config.echo_logprobs:
                kept = request.prompt[self.context.dropped[first] :]
                top = self.filters.config.logprobs or 0
                yield BeamEvent(number, prompt=prompt_tokens(self.context, x[0], kept, top))
            if not group.search.done:
                self._advance(group, self.context.logits(x[:, -1]))
            yield from self._report(group)

    def _step(self) -> None:
        """Takes in each hypothesis's last token, and lets every search go on."""
        last = [[0] for _ in range(len(self._groups) * self.width)]
        for group in self._groups:
            for row, each in zip(group.rows, group.search.live, strict=True):
                last[row] = [each.tokens[-1].id]
        logits = self.context.logits(self.context.step(last)[:, -1])
        for group in self._groups:
            self._advance(group, logits[group.rows])

    def _advance(self, group: _Group, logits: Tensor) -> None:
        logprobs = logits.log_softmax(-1)
        past = [self.context.ids[row] for row in group.rows]
        counts = [len(each.tokens) for each in group.search.live]
        parents = group.search.advance(logprobs, self.filters.shape(logprobs, past, counts))
        if not group.search.done:
            self._place(group, [group.rows[parent] for parent in parents])

    def _place(self, group: _Group, sources: list[int]) -> None:
        """Gives each hypothesis a row: the first child of a row stays in it, others get copies in free rows."""
        first = self._groups.index(group) * self.width
        free = [row for row in range(first, first + self.width) if row not in sources]
        group.rows = []
        for source in sources:
            row = source
            if source in group.rows:
                row = free.pop()
                self.context.copy(source, row)
            group.rows.append(row)
        for row in free:  # computed along, and ignored
            self.context.copy(sources[0], row)

    def _report(self, group: _Group) -> Iterator[BeamEvent]:
        """Tells what a search has come to, and frees its rows if it is done: the last group moves into them."""
        yield BeamEvent(group.number, agreed=group.search.agreed())
        if not group.search.done:
            return
        yield BeamEvent(group.number, best=group.search.ended[: self.filters.config.n_best])
        at, last = self._groups.index(group), self._groups.pop()
        if last is not group:
            self._groups[at] = last
            shift = (len(self._groups) - at) * self.width
            for row in range(at * self.width, (at + 1) * self.width):
                self.context.copy(row + shift, row)
            last.rows = [row - shift for row in last.rows]
