"""Beam search with the ranking and stopping rules of Transformers."""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from torch import Tensor

from gpt.config.device import Download, upload
from gpt.config.sample import SampleConfig
from gpt.decoding.constraint import Constraint
from gpt.decoding.logits import EXCLUDED, Token, nan_error, score_tokens, to_tokens

StopCheck = Callable[[Sequence[int]], bool]  # Returns whether the text of the ids ends with a stop string.


@dataclass(frozen=True)
class Hypothesis:
    """A candidate sequence of a beam search.

    Live hypotheses are ranked by ``total``, the sum of log-probabilities after penalties. Ended hypotheses are ranked
    by ``score``, which is ``total`` / length ** length_penalty. ``reason`` is ``length``, ``eot`` or ``stop``, or None
    for a live hypothesis.
    """

    tokens: tuple[Token, ...]
    total: float
    score: float = -math.inf
    reason: str | None = None
    constraint: Constraint | None = None

    @property
    def ids(self) -> list[int]:
        """The generated ids, without the prompt."""
        return [token.id for token in self.tokens]


class Search:
    """A beam search for one prompt. ``config.beam`` limits both the live and the ended hypotheses."""

    def __init__(
        self,
        config: SampleConfig,
        ends: Collection[int],
        stops: StopCheck | None = None,
        constraint: Constraint | None = None,
    ) -> None:
        self.config, self.ends, self.stops = config, ends, stops
        self.live = [Hypothesis((), 0.0, constraint=constraint)]
        self.ended: list[Hypothesis] = []  # Sorted, best first.
        self.done = config.max_tokens == 0
        self._agreed_length = 0
        if self.done:
            self.ended = [Hypothesis((), 0.0, 0.0, "length")]

    def advance(self, logprobs: Tensor, adjusted: Tensor) -> list[int]:
        """Extends the live hypotheses by a token and returns the parent index of each new hypothesis.

        Ranks candidates by ``adjusted``, (live, V), the log-probabilities after constraints, bias and penalties. Their
        tokens report ``logprobs``, (live, V), from before these adjustments. Raises `UserError` if a hypothesis has no
        continuation.
        """
        width = self.config.beam
        candidates = self._candidates(logprobs, adjusted, 2 * width)  # If half of these end, the beam is still full.
        live: list[Hypothesis] = []
        parents: list[int] = []
        for rank, (total, parent, token) in enumerate(candidates):
            sequence = (*self.live[parent].tokens, token)
            constraint = self.live[parent].constraint
            constraint = constraint.with_token(token.id) if constraint is not None else None
            reason = self._finish_reason(sequence, constraint)
            if reason is None and len(live) < width:
                live.append(Hypothesis(sequence, total, constraint=constraint))
                parents.append(parent)
            elif reason is not None and rank < width:
                score = _score(total, len(sequence), self.config.length_penalty)
                self.ended.append(Hypothesis(sequence, total, score, reason))
        self.live = live
        self.ended = sorted(self.ended, key=lambda hypothesis: -hypothesis.score)[:width]
        self.done = not live or self._is_settled()
        return parents

    def _candidates(self, logprobs: Tensor, adjusted: Tensor, count: int) -> list[tuple[float, int, Token]]:
        """Returns the best continuations, sorted, as (sum of log-probabilities, parent index, token)."""
        sums = adjusted + upload([[hypothesis.total] for hypothesis in self.live], adjusted.device)
        best = sums.topk(min(count, sums.size(-1)), dim=-1)
        top = self.config.logprobs or 0
        *token_scores, totals = Download(*score_tokens(best.indices, logprobs, top), best.values).read()
        if not all(row[0] > EXCLUDED for row in totals):  # `topk` sorts NaN first.
            raise nan_error()
        candidates = [
            (total, parent, token)
            for parent, row in enumerate(zip(totals, to_tokens(token_scores, [top] * len(totals)), strict=True))
            for total, token in zip(*row, strict=True)
            if total > EXCLUDED
        ]
        return sorted(candidates, key=lambda candidate: -candidate[0])[:count]

    def _finish_reason(self, sequence: Sequence[Token], constraint: Constraint | None) -> str | None:
        if sequence[-1].id in self.ends and not self.config.ignore_eot:
            return "eot"
        if constraint is not None and constraint.ended:
            return "stop"
        if self.stops is not None and self.stops([token.id for token in sequence]):
            return "stop"
        return "length" if len(sequence) == self.config.max_tokens else None

    def _is_settled(self) -> bool:
        """Whether the best hypotheses are final. With ``early_stopping`` off, this is an estimate."""
        if len(self.ended) < self.config.beam:
            return False
        if self.config.early_stopping == "on" or self.config.beam == 1:
            return True
        length = len(self.live[0].tokens)
        if self.config.early_stopping == "never" and self.config.length_penalty > 0:
            length = self.config.max_tokens
        attainable_score = _score(self.live[0].total, length, self.config.length_penalty)
        return attainable_score <= self.ended[-1].score

    def take_agreed(self) -> list[Token]:
        """Returns the new tokens that all hypotheses share. After the search, returns the rest of the best sequence."""
        sequences = [hypothesis.tokens for hypothesis in (self.ended[:1] if self.done else [*self.live, *self.ended])]
        start = end = self._agreed_length
        while all(len(tokens) > end and tokens[end].id == sequences[0][end].id for tokens in sequences):
            end += 1
        self._agreed_length = end
        return list(sequences[0][start:end])


def _score(total: float, length: int, penalty: float) -> float:
    """Returns ``total`` / ``length`` ** ``penalty``, without raising on overflow."""
    try:
        return float(total / length**penalty)
    except OverflowError:
        return -0.0
    except ZeroDivisionError:
        return -math.inf
