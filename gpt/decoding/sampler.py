"""Chooses tokens for running requests from logits: greedily, at random, or by beam search."""

import itertools
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gpt.config.device import Download, upload
from gpt.decoding.constraint import apply_constraints
from gpt.decoding.context import Context
from gpt.decoding.logits import as_int64, nan_error, score_tokens, step_key, to_tokens
from gpt.decoding.sequence import RequestState
from gpt.system.errors import UserError

POSITIONS_AT_ONCE = 64  # Maximum number of prompt positions whose logits are computed together.


@dataclass(frozen=True)
class Draw:
    """A token for each request, chosen on the device and being copied to the host."""

    states: Sequence[RequestState]
    ids: Tensor  # Ids (n, 1) on the device.
    scores: Download


def draw(logits: Tensor, states: Sequence[RequestState]) -> Draw:
    """Chooses a token for each request from logits (n, V). Batches adjacent requests with equal filters."""
    chosen_ids: list[Tensor] = []
    offset = 0
    for filters, members in itertools.groupby(states, key=lambda state: state.filters):
        group = [*members]
        sequences = [state.live_slots[0].token_ids if filters.looks_back else () for state in group]
        counts = [state.token_index for state in group]
        allowed = apply_constraints(logits[offset : offset + len(group)], [state.constraint for state in group])
        adjusted = filters.adjust(allowed, sequences, counts)
        keys = [step_key(state.key, state.token_index) for state in group] if filters.draws else []
        chosen_ids.append(filters.choose(adjusted, upload(as_int64(keys), logits.device))[:, None])
        offset += len(group)
    ids = torch.cat(chosen_ids) if len(chosen_ids) > 1 else chosen_ids[0]
    top = max(state.request.config.logprobs or 0 for state in states)
    return Draw(states, ids, Download(*score_tokens(ids, logits, top)))


def take(batch: Draw, context: Context, ends: Collection[int]) -> None:
    """Reads tokens from the device and appends them to their requests."""
    top = [state.request.config.logprobs or 0 for state in batch.states]
    for state, [token] in zip(batch.states, to_tokens(batch.scores.read(), top), strict=True):
        if math.isnan(token.logprob or 0.0):
            fail(state, nan_error(), context)
        elif not state.done:  # The previous token or a cancellation can have ended the request.
            state.take(token, ends)


def extend(state: RequestState, logits: Tensor, context: Context) -> None:
    """Extends a beam search by a token, given logits (n, V) of its live hypotheses. If a hypothesis has several
    children, copies its slot."""
    assert state.search is not None
    logprobs = logits.log_softmax(-1)
    allowed = apply_constraints(logprobs, [hypothesis.constraint for hypothesis in state.search.live])
    sequences = [slot.token_ids for slot in state.live_slots]
    adjusted = state.filters.adjust(allowed, sequences, [state.token_index] * len(sequences))
    try:
        parents = [state.live_slots[parent] for parent in state.search.advance(logprobs, adjusted)]
    except UserError as error:
        fail(state, error, context)
        return
    if state.search.done:
        state.end(state.search.ended[0].reason)
        return
    spare_slots = [slot for slot in state.slots if slot not in parents]
    state.live_slots = []
    for parent in parents:
        slot = parent
        if slot in state.live_slots:
            slot = spare_slots.pop()
            context.copy(parent, slot)
        state.live_slots.append(slot)
    for slot, hypothesis in zip(state.live_slots, state.search.live, strict=True):
        slot.token_ids.append(hypothesis.tokens[-1].id)


def echo(state: RequestState, x: Tensor, context: Context) -> None:
    """Scores prompt tokens from the residual stream (T, C) of the preceding positions."""
    [slot], top = state.live_slots, state.request.config.logprobs or 0
    ids = slot.token_ids[slot.computed - len(x) + 1 :][: len(x)]
    for start in range(0, len(ids), POSITIONS_AT_ONCE):
        chunk = ids[start : start + POSITIONS_AT_ONCE]
        logits = context.logits(x[start : start + len(chunk)])
        token_scores = Download(*score_tokens(upload([[id] for id in chunk], x.device), logits, top)).read()
        state.prompt += [token for [token] in to_tokens(token_scores, [top] * len(chunk))]
    if any(math.isnan(token.logprob or 0.0) for token in state.prompt):
        fail(state, nan_error(), context)


def fail(state: RequestState, error: UserError, context: Context) -> None:
    """Ends a request with an error, unless it has already ended. Clears its slots, which can contain NaN."""
    if not state.done:
        state.end(error=error)
    for slot in state.slots:
        context.clear(slot)
