"""Guesses from the text so far change no text, and are found where there are any."""

from dataclasses import replace

import pytest
import torch
from conftest import slow
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from models import CPU, EOT, PROMPTS, batched, engine_of, tiny_model

from gpt.decoding.context import Context
from gpt.decoding.engine import Request, generate
from gpt.decoding.lookup import LONGEST, Lookup
from gpt.sample_config import SampleConfig


def last_time(ids: list[int], count: int) -> list[int]:
    """What followed the last earlier place where the longest possible end of ``ids`` stands."""
    for length in range(min(LONGEST, len(ids)), 0, -1):
        for at in range(len(ids) - 1, length - 1, -1):
            if ids[at - length : at] == ids[-length:]:
                return (ids[at:] * count)[:count]
    return []


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # a shared machine may stand still
@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.lists(st.integers(1, 5), min_size=1, max_size=9))
def test_a_guess_is_what_followed_last_time(ids: list[int], steps: list[int]) -> None:
    lookup, end = Lookup(), 0
    for step in steps:
        end = min(len(ids), end + step)
        assert lookup.guess(ids[:end], step) == last_time(ids[:end], step)


@pytest.mark.parametrize("positions", ["learned", "rotary"])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(
    "more",
    [
        {"greedy": True},
        slow({"greedy": True, "ignore_eot": True}),
        slow({"temperature": 0.3}),
        {"temperature": 0.3, "repetition_penalty": 1.1, "no_repeat_ngram": 4, "min_tokens": 6},
    ],
)
def test_the_text_is_the_same(rows: int, positions: str, more: dict[str, object]) -> None:
    """Not in distribution alone: token for token, since a token's randomness belongs to its place."""
    model = tiny_model(40, positions)
    requests = [Request(prompt, index=index) for index, prompt in enumerate([*PROMPTS, [1, 2, 3] * 5])]
    plain, guessed = (
        batched(model, requests, SampleConfig(max_tokens=70, speculate=most, **more), rows, seed=3)  # type: ignore[arg-type]
        for most in (0, 5)
    )
    for one, other in zip(plain, guessed, strict=True):
        assert [token.id for token in one] == [token.id for token in other]
        assert [token.logprob for token in one] == pytest.approx([token.logprob for token in other], abs=1e-4)


def test_guesses_stay_within_the_room_that_there_is() -> None:
    """Of each slot, whatever others guess."""
    model, prompts = tiny_model(40), [[1, 2, 3] * 6, [4], [1, 2] * 5]
    config = SampleConfig(max_tokens=12, speculate=5, temperature=0.3, ignore_eot=True)
    room = max(map(len, prompts)) + config.max_tokens
    found: list[list[int]] = [[] for _ in prompts]
    for event in engine_of(Context(model, CPU, 3, room), map(Request, prompts), config, seed=3).run():
        found[event.number] += [token.id for token in event.tokens]
    for prompt, ids in zip(prompts, found, strict=True):
        plain = generate(Context(model, CPU), prompt, replace(config, speculate=0), {EOT}, seed=3)
        assert ids == [token.id for token in plain]


@pytest.mark.parametrize("rows", [1, 2])
def test_right_guesses_save_steps(rows: int) -> None:
    model = tiny_model(200)
    with torch.no_grad():  # a model that repeats: each id is followed by the next but one
        for block in model.h:
            block.attn.c_proj.weight.zero_()  # type: ignore[union-attr]
            block.attn.c_proj.bias.zero_()  # type: ignore[union-attr]
            block.mlp.c_proj.weight.zero_()  # type: ignore[union-attr]
            block.mlp.c_proj.bias.zero_()  # type: ignore[union-attr]
        model.wpe.weight.zero_()
    context = Context(model, CPU, rows)
    config = SampleConfig(greedy=True, max_tokens=60, speculate=4, ignore_eot=True)
    steps = []
    step = context.forward
    context.forward = lambda *args: steps.append(args) or step(*args)  # type: ignore[method-assign,func-returns-value]
    found = list(engine_of(context, [Request([1, 1, 1])] * rows, config).run())
    assert sum(len(event.tokens) for event in found) == 60 * rows
    assert len(steps) <= 14
    assert context.slots[0].text[:3] == [1, 1, 1]
