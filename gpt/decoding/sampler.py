"""Logits → tokens: each text's filters, draws, guesses that are checked, and beams."""

import itertools
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gpt.decoding.constraint import Constraint, masked
from gpt.decoding.context import Context
from gpt.decoding.logits import Filters, as_int64, no_logits, scores, step_key, tokens
from gpt.decoding.sequence import TextState
from gpt.device import Download, upload
from gpt.errors import UserError

POSITIONS_AT_ONCE = 64  # of a prompt, whose logits are computed together
Place = tuple[TextState, int]  # the token after a text's known ids and this many of its guesses


@dataclass(frozen=True)
class Draw:
    """A token for each of some places, chosen on the device and on its way to the host."""

    places: Sequence[Place]
    ids: Tensor | None  # (n, 1), on the device; None: the context has them as its slots' `last`
    scores: Download

    @property
    def rows(self) -> list[int]:
        """The rows of the places' slots."""
        return [text.live[0].at for text, _ in self.places]


def draw(logits: Tensor, places: Sequence[Place]) -> Draw:
    """Chooses a token for each place from its logits (n, V). Those with the same filters lie side by side and are
    filtered together."""
    chosen: list[Tensor] = []
    done = 0
    for filters, group in itertools.groupby(places, key=lambda place: place[0].filters):
        some = [*group]
        texts = [text.live[0].text + text.guesses[:t] if filters.looks_back else () for text, t in some]
        counts = [text.index - len(text.guesses) + t for text, t in some]
        constraints = [text.constraint for text, _ in some]
        adjusted = adjust(filters, logits[done : done + len(some)], constraints, texts, counts)
        keys = [step_key(text.key, n) for (text, _), n in zip(some, counts, strict=True)] if filters.draws else []
        chosen.append(filters.choose(adjusted, upload(as_int64(keys), logits.device))[:, None])
        done += len(some)
    ids = torch.cat(chosen) if len(chosen) > 1 else chosen[0]
    top = max(text.request.config.logprobs or 0 for text, _ in places)
    return Draw(places, ids, Download(*scores(ids, logits, top)))


def adjust(
    filters: Filters,
    logits: Tensor,
    constraints: Sequence[Constraint | None],
    texts: Sequence[Sequence[int]],
    counts: Sequence[int],
) -> Tensor:
    """What samples and beams have in common before a token is chosen: logits (n, V) of ``texts``, ``counts`` of whose
    ids were generated, masked and adjusted."""
    return filters.shape(masked(logits, constraints), texts, counts)


def take(drawn: Draw, context: Context, ends: Collection[int]) -> None:
    """Reads tokens and gives them to their texts, to each as long as its guesses are right."""
    top = [text.request.config.logprobs or 0 for text, _ in drawn.places]
    for (text, t), [token] in zip(drawn.places, tokens(drawn.scores.read(), top), strict=True):
        [slot], guesses = text.live, text.guesses
        if t and (text.done or len(slot.text) != slot.computed - len(guesses) + t or slot.text[-1] != guesses[t - 1]):
            continue
        if math.isnan(token.logprob or 0.0):
            fail(text, no_logits(), context)
        elif not text.done:  # else it ended with the token before, or was cancelled
            text.take(token, ends)
    for text, _ in drawn.places:
        [slot] = text.live
        if text.guesses and slot.text:
            slot.length = len(slot.text) - 1 - slot.start
        text.guesses = []


def extend(text: TextState, logits: Tensor, context: Context) -> None:
    """Extends a search by a token, from logits (n, V) after each of its living hypotheses. A parent's first child stays
    in its slot, the others get copies."""
    assert text.search is not None
    logprobs = logits.log_softmax(-1)
    constraints, texts = [each.constraint for each in text.search.live], [slot.text for slot in text.live]
    adjusted = adjust(text.filters, logprobs, constraints, texts, [text.index] * len(texts))
    try:
        parents = [text.live[parent] for parent in text.search.advance(logprobs, adjusted)]
    except UserError as error:
        fail(text, error, context)
        return
    if text.search.done:
        text.end(text.search.ended[0].reason)
        return
    spare = [slot for slot in text.slots if slot not in parents]
    text.live = []
    for parent in parents:
        slot = parent
        if slot in text.live:
            slot = spare.pop()
            context.copy(parent, slot)
        text.live.append(slot)
    for slot, each in zip(text.live, text.search.live, strict=True):
        slot.text.append(each.tokens[-1].id)


def echo(text: TextState, x: Tensor, context: Context) -> None:
    """Adds a prompt's tokens that follow positions of the residual stream (T, C), the newest of the text."""
    [slot], top = text.live, text.request.config.logprobs or 0
    ids = slot.text[slot.computed - len(x) + 1 :][: len(x)]
    for at in range(0, len(ids), POSITIONS_AT_ONCE):
        some = ids[at : at + POSITIONS_AT_ONCE]
        logits = context.logits(x[at : at + len(some)])
        scored = Download(*scores(upload([[id] for id in some], x.device), logits, top)).read()
        text.prompt += [token for [token] in tokens(scored, [top] * len(some))]
    if any(math.isnan(token.logprob or 0.0) for token in text.prompt):
        fail(text, no_logits(), context)


def fail(text: TextState, error: UserError, context: Context) -> None:
    """Ends a text with an error, unless it has ended. Its slots may hold NaN, which must not reach later texts."""
    if not text.done:
        text.end(error=error)
    for slot in text.slots:
        context.clear(slot)
