"""Beam search: the likeliest texts side by side, a step at a time, ranked and ended as transformers does."""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from torch import Tensor

from gpt.decoding.constraint import Constraint
from gpt.decoding.logits import EXCLUDED, Token, no_logits, scores, tokens
from gpt.device import Download, upload
from gpt.sample_config import SampleConfig

Stops = Callable[[Sequence[int]], bool]  # returns whether the text of these ids ends with a stop text


@dataclass(frozen=True)
class Hypothesis:
    """A text of a search. ``total`` is the sum of its log-probabilities after penalties, by which it is ranked;
    ``score`` is ``total`` over its length to the power of the length penalty. ``reason`` is its finish reason:
    ``length``, ``eot`` or ``stop``; None: it lives. ``constraint``: what may follow, if not anything."""

    tokens: tuple[Token, ...]
    total: float
    score: float = -math.inf
    reason: str | None = None
    constraint: Constraint | None = None

    @property
    def ids(self) -> list[int]:
        """Its ids, without the prompt's."""
        return [token.id for token in self.tokens]


class Search:
    """A beam search after one prompt: at most ``config.beam`` hypotheses live, and as many have ended."""

    def __init__(
        self,
        config: SampleConfig,
        ends: Collection[int],
        stops: Stops | None = None,
        constraint: Constraint | None = None,
    ) -> None:
        self.config = config
        self.ends = ends
        self.stops = stops
        self.live = [Hypothesis((), 0.0, constraint=constraint)]
        self.ended: list[Hypothesis] = []  # best first
        self.done = config.max_tokens == 0
        self._agreed = 0
        if self.done:
            self.ended = [Hypothesis((), 0.0, 0.0, "length")]

    def advance(self, logprobs: Tensor, shaped: Tensor) -> list[int]:
        """Extends the living hypotheses by a token, from the model's own log-probabilities (live, V) and those that
        are ranked, of the same shape. Returns the parent of each hypothesis that lives now: its place among those that
        lived before. Raises `UserError` where a hypothesis has no continuation."""
        width = self.config.beam
        found = self._candidates(logprobs, shaped, 2 * width)  # half of them live on, even if every beam ends
        live: list[Hypothesis] = []
        parents: list[int] = []
        for rank, (total, parent, token) in enumerate(found):
            grown = (*self.live[parent].tokens, token)
            constraint = self.live[parent].constraint
            constraint = constraint.after(token.id) if constraint is not None else None
            reason = self._reason(grown, constraint)
            if reason is None and len(live) < width:
                live.append(Hypothesis(grown, total, constraint=constraint))
                parents.append(parent)
            elif reason is not None and rank < width:
                score = _score(total, len(grown), self.config.length_penalty)
                self.ended.append(Hypothesis(grown, total, score, reason))
        self.live = live
        self.ended = sorted(self.ended, key=lambda each: -each.score)[:width]
        self.done = not live or self._settled()
        return parents

    def _candidates(self, logprobs: Tensor, shaped: Tensor, count: int) -> list[tuple[float, int, Token]]:
        """The likeliest continuations, best first: (sum of log-probabilities, hypothesis, token)."""
        sums = shaped + upload([[each.total] for each in self.live], shaped.device)
        likeliest = sums.topk(min(count, sums.size(-1)), dim=-1)
        top = self.config.logprobs or 0
        *scored, totals = Download(*scores(likeliest.indices, logprobs, top), likeliest.values).read()
        if not all(row[0] > EXCLUDED for row in totals):  # NaN comes first
            raise no_logits()
        ways = [
            (total, parent, token)
            for parent, row in enumerate(zip(totals, tokens(scored, [top] * len(totals)), strict=True))
            for total, token in zip(*row, strict=True)
            if total > EXCLUDED
        ]
        return sorted(ways, key=lambda way: -way[0])[:count]

    def _reason(self, tokens: Sequence[Token], constraint: Constraint | None) -> str | None:
        if tokens[-1].id in self.ends and not self.config.ignore_eot:
            return "eot"
        if constraint is not None and constraint.ended:
            return "stop"
        if self.stops is not None and self.stops([token.id for token in tokens]):
            return "stop"
        return "length" if len(tokens) == self.config.max_tokens else None

    def _settled(self) -> bool:
        """Whether the ended hypotheses stay the best; with ``off`` a guess: as if the best living one ended now."""
        if len(self.ended) < self.config.beam:
            return False
        if self.config.early_stopping == "on" or self.config.beam == 1:
            return True
        length = len(self.live[0].tokens)
        if self.config.early_stopping == "never" and self.config.length_penalty > 0:
            length = self.config.max_tokens
        hoped = _score(self.live[0].total, length, self.config.length_penalty)
        return hoped <= self.ended[-1].score

    def agreed(self) -> list[Token]:
        """Tokens that all hypotheses, living or ended, have in common, after those that were returned before. Once the
        search is done, the rest of the best text."""
        every = [each.tokens for each in (self.ended[:1] if self.done else [*self.live, *self.ended])]
        start = at = self._agreed
        while all(len(tokens) > at and tokens[at].id == every[0][at].id for tokens in every):
            at += 1
        self._agreed = at
        return list(every[0][start:at])


def _score(total: float, length: int, penalty: float) -> float:
    """The score of a text: ``total`` over its length to the power of ``penalty``, of any size."""
    try:
        return float(total / length**penalty)
    except OverflowError:
        return -0.0
    except ZeroDivisionError:
        return -math.inf
