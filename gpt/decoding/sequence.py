"""Engine requests, their states and their updates."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from gpt.config.sample import SampleConfig
from gpt.decoding.beam import Hypothesis, Search, StopCheck
from gpt.decoding.constraint import Constraint
from gpt.decoding.context import Slot
from gpt.decoding.logits import Filters, Token, sample_key
from gpt.system.errors import UserError

Group = tuple[object, ...]  # A group of requests, after those that it is part of.


@dataclass(frozen=True)
class Request:
    """A request to continue ``ids``, which must not be empty.

    It asks for sample number ``index`` with ``seed``, or for a beam search if ``config.beam`` is set. The engine
    ignores the strings in ``config.stop`` and ``config.bias``. Instead, ``bias`` has (id, value) pairs: each value is
    added to the logit of its id. ``stops`` detects the stop strings of a beam search. When a sample reaches a stop
    string, the caller must cancel it.
    """

    ids: Sequence[int]
    config: SampleConfig = SampleConfig()
    seed: int = 0
    index: int = 0
    bias: tuple[tuple[int, float], ...] = ()
    stops: StopCheck | None = None
    constraint: Constraint | None = None
    group: Group = (None,)  # Groups get equally many slots (`Scheduler`).

    @property
    def width(self) -> int:
        """The number of slots the request needs."""
        return max(1, self.config.beam)


@dataclass(frozen=True)
class Update:
    """New tokens of request ``number`` and, at the end, its finish reason or error.

    The first update after prefill has the ``prompt`` tokens, if their log-probabilities were requested. In a beam
    search, ``tokens`` are shared by all hypotheses, and the last update has the ``best`` hypotheses, sorted. ``reason``
    is ``length``, ``eot`` or ``stop``. ``cached`` counts prompt ids from the prefix cache. ``started`` is when the
    request got a slot, by `time.monotonic`.
    """

    number: int
    tokens: Sequence[Token] = ()
    prompt: Sequence[Token] | None = None
    reason: str | None = None
    best: Sequence[Hypothesis] = ()
    error: UserError | None = None
    cached: int = 0
    started: float = field(default=0.0, compare=False)


Deliver = Callable[[Update], object]


@dataclass(eq=False)
class RequestState:
    """A waiting or running request, and the contents of its next update."""

    number: int
    request: Request
    filters: Filters
    search: Search | None
    ids: Sequence[int]  # The ids to prefill: the prompt, and the tokens before a pause.
    start: int  # Index in ``ids`` of the first id to prefill.
    deliver: Deliver | None = None
    constraint: Constraint | None = None  # For running samples. Beam hypotheses have separate constraints.
    slots: list[Slot] = field(default_factory=list)  # Of a running request.
    live_slots: list[Slot] = field(default_factory=list)  # One slot, or one per live hypothesis.
    count: int = 0  # Number of ids that each live slot gets in the current step.
    prefix_leader: "RequestState | None" = None  # The running request that computes the same prefix.
    done: bool = False
    cached: int = 0
    started: float = 0.0
    tokens: list[Token] = field(default_factory=list)
    prompt: list[Token] = field(default_factory=list)
    reason: str | None = None
    error: UserError | None = None

    @cached_property
    def key(self) -> int:
        """The key for random numbers. Hashing a long prompt takes a while, so each step hashes only those it needs."""
        return sample_key(self.request.seed, self.request.index, self.request.ids)

    @property
    def uncomputed(self) -> int:
        """The number of known ids without keys and values: several during prefill, and one while decoding. It is 0
        while the newest id is only on the device."""
        slot = self.live_slots[0]
        return len(slot.token_ids) - slot.start - slot.length

    @property
    def token_index(self) -> int:
        """The index of the token after the computed positions. The first generated token has index 0."""
        slot = self.live_slots[0]
        return slot.start + slot.length - len(self.request.ids)

    @property
    def can_run_ahead(self) -> bool:
        """Whether the next token can be computed before the host has read the previous token."""
        needs_host = self.search is not None or self.constraint is not None or self.filters.looks_back
        return not (needs_host or self.token_index + 1 == self.request.config.max_tokens)

    def next_ids(self, slot: Slot) -> list[int]:
        """Returns the known ids that a slot gets in the current step."""
        return slot.token_ids[slot.computed :][: self.count]

    def take(self, token: Token, ends: Collection[int]) -> None:
        """Appends a token, and ends the request if the token is the last."""
        config, [slot] = self.request.config, self.live_slots
        slot.token_ids.append(token.id)
        self.tokens.append(token)
        try:
            if self.constraint is not None:
                self.constraint.take(token.id)
        except UserError as error:
            self.end(error=error)
            return
        if token.id in ends and not config.ignore_eot:
            self.end("eot")
        elif self.constraint is not None and self.constraint.ended:
            self.end("stop")
        elif len(slot.token_ids) - len(self.request.ids) == config.max_tokens:
            self.end("length")

    def end(self, reason: str | None = None, error: UserError | None = None) -> None:
        """Ends the request. A cancelled request has neither a reason nor an error."""
        self.reason, self.error, self.done = reason, error, True

    def update(self) -> Update:
        """Delivers and returns everything new since the last update."""
        tokens, self.tokens = self.tokens, []
        prompt: list[Token] | None = None
        if self.prompt and self.token_index >= 0:  # The whole prompt has been computed.
            prompt, self.prompt = self.prompt, []
        best: Sequence[Hypothesis] = ()
        if self.search is not None and self.error is None:
            tokens = self.search.take_agreed()
            best = self.search.ended if self.done else ()
        update = Update(self.number, tokens, prompt, self.reason, best, self.error, self.cached, self.started)
        if self.deliver is not None:
            self.deliver(update)
        return update
