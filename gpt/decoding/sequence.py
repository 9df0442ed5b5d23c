"""What is asked of the engine, what it answers, and the record of each text in between."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from gpt.decoding.beam import Hypothesis, Search, Stops
from gpt.decoding.constraint import Constraint
from gpt.decoding.context import Slot
from gpt.decoding.logits import Filters, Token
from gpt.decoding.lookup import Lookup
from gpt.errors import UserError
from gpt.sample_config import SampleConfig


@dataclass(frozen=True)
class Request:
    """A text to generate after ``ids``, of which there is at least one.

    Sample ``index`` of ``seed``, or a beam search where ``config`` has beams. ``config.stop`` and ``config.bias`` are
    texts, which the engine does not know: ``bias`` has ids and what is added to their logits; ``stops`` says where a
    hypothesis of a search ends. Whoever turns a sample's tokens into text cancels it at its stop text. ``constraint``:
    what the text has to be.
    """

    ids: Sequence[int]
    config: SampleConfig = SampleConfig()
    seed: int = 0
    index: int = 0
    bias: tuple[tuple[int, float], ...] = ()
    stops: Stops | None = None
    constraint: Constraint | None = None

    @property
    def width(self) -> int:
        """The number of slots that it needs."""
        return max(1, self.config.beam)


@dataclass(frozen=True)
class Update:
    """One update for request ``number``: new tokens and, at the end, the finish reason or the error.

    ``prompt`` are the prompt's tokens, in the first update, where their log-probabilities were asked for. A search's
    ``tokens`` are those that all of its hypotheses agree on; its texts are in ``best`` at the end, the best one first.
    ``reason`` is ``length``, ``eot`` or ``stop``. ``cached``: ids of the prompt that came from the prefix cache.
    """

    number: int
    tokens: Sequence[Token] = ()
    prompt: Sequence[Token] | None = None
    reason: str | None = None
    best: Sequence[Hypothesis] = ()
    error: UserError | None = None
    cached: int = 0


@dataclass(eq=False)
class TextState:
    """A request that waits or runs, and what its next update will say."""

    number: int
    request: Request
    filters: Filters
    search: Search | None
    key: int  # of its random numbers
    constraint: Constraint | None  # of its text so far; in a search each hypothesis has its own
    slots: list[Slot] = field(default_factory=list)  # its own; none while it waits
    live: list[Slot] = field(default_factory=list)  # those in use: one, or one for each living hypothesis
    count: int = 0  # ids that each live slot gets in the current step
    guesses: list[int] = field(default_factory=list)  # those at the end of them that may turn out wrong
    lookup: Lookup = field(default_factory=Lookup)
    behind: "TextState | None" = None  # while it waits: the text whose prompt begins the same, and is being read
    done: bool = False
    cached: int = 0
    tokens: list[Token] = field(default_factory=list)
    prompt: list[Token] = field(default_factory=list)
    reason: str | None = None
    error: UserError | None = None

    @property
    def left(self) -> int:
        """How many known ids its slots don't have keys and values of: several while it reads, one while it decodes;
        none when the newest is known to the device alone."""
        slot = self.live[0]
        return len(slot.text) - slot.start - slot.length

    @property
    def index(self) -> int:
        """The place of the token that follows what its slots have computed, the prompt's not counted."""
        slot = self.live[0]
        return slot.start + slot.length - len(self.request.ids)

    @property
    def runs_ahead(self) -> bool:
        """Whether its next token can be computed before the host knows its last one."""
        config = self.request.config
        known = self.search is not None or self.constraint is not None or self.filters.looks_back or config.speculate
        return not (known or self.index + 1 == config.max_tokens)

    def next_ids(self, slot: Slot) -> list[int]:
        """The ids that a slot gets in the current step, so far as they are known."""
        return (slot.text[slot.computed :] + self.guesses)[: self.count]

    def guess(self, room: int) -> list[int]:
        """Guesses ids after its text, where a sample asks for that; ``room``: how many positions are left."""
        config, text = self.request.config, self.live[0].text
        made = len(text) - len(self.request.ids)
        most = min(room - 1, config.speculate, config.max_tokens - made - 1)
        apart = self.search is not None or self.constraint is not None  # whose guesses are not masked
        return self.lookup.guess(text, most) if most > 0 and made and not apart else []

    def take(self, token: Token, ends: Collection[int]) -> None:
        """Appends a token, which may be the last."""
        config, [slot] = self.request.config, self.live
        slot.text.append(token.id)
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
        elif len(slot.text) - len(self.request.ids) == config.max_tokens:
            self.end("length")

    def end(self, reason: str | None = None, error: UserError | None = None) -> None:
        """Ends it; without a reason or an error because nobody wants it any longer."""
        self.reason, self.error, self.done = reason, error, True

    def update(self) -> Update:
        """Returns what is new since the last update."""
        tokens, self.tokens = self.tokens, []
        prompt: list[Token] | None = None
        if self.prompt and self.index >= 0:  # all of it has been read
            prompt, self.prompt = self.prompt, []
        best: Sequence[Hypothesis] = ()
        if self.search is not None and self.error is None:
            tokens = self.search.agreed()
            if self.done:
                best = self.search.ended[: self.request.config.n_best]
        return Update(self.number, tokens, prompt, self.reason, best, self.error, self.cached)
