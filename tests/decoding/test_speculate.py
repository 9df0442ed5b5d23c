"""Speculative decoding by prompt lookup."""

from dataclasses import replace

import pytest
import torch
from conftest import slow
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from models import CPU, EOT, PROMPTS, batched, engine_of, tiny_model

from gpt.config.sample import SampleConfig
from gpt.decoding.context import Context
from gpt.decoding.engine import Request, generate
from gpt.decoding.lookup import MAX_NGRAM, Lookup


def expected_guess(ids: list[int], count: int) -> list[int]:
    """Returns the ids after the last earlier occurrence of the longest repeated suffix."""
    for length in range(min(MAX_NGRAM, len(ids)), 0, -1):
        for position in range(len(ids) - 1, length - 1, -1):
            if ids[position - length : position] == ids[-length:]:
                return (ids[position:] * count)[:count]
    return []


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # A shared machine can stall.
@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.lists(st.integers(1, 5), min_size=1, max_size=9))
def test_guess_continues_the_last_match(ids: list[int], steps: list[int]) -> None:
    lookup, end = Lookup(), 0
    for step in steps:
        end = min(len(ids), end + step)
        assert lookup.guess(ids[:end], step) == expected_guess(ids[:end], step)


@pytest.mark.parametrize("positions", ["learned", "rotary"])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(
    "sampling",
    [
        {"greedy": True},
        slow({"greedy": True, "ignore_eot": True}),
        slow({"temperature": 0.3}),
        {"temperature": 0.3, "repetition_penalty": 1.1, "no_repeat_ngram": 4, "min_tokens": 6},
    ],
)
def test_speculation_does_not_change_the_text(rows: int, positions: str, sampling: dict[str, object]) -> None:
    """Random numbers depend only on the position."""
    model = tiny_model(40, positions)
    requests = [Request(prompt, index=index) for index, prompt in enumerate([*PROMPTS, [1, 2, 3] * 5])]
    without_guesses, with_guesses = (
        batched(model, requests, SampleConfig(max_tokens=70, speculate=guesses, **sampling), rows, seed=3)  # type: ignore[arg-type]
        for guesses in (0, 5)
    )
    for expected, actual in zip(without_guesses, with_guesses, strict=True):
        assert [token.id for token in expected] == [token.id for token in actual]
        assert [token.logprob for token in expected] == pytest.approx([token.logprob for token in actual], abs=1e-4)


def test_guesses_fit_the_slot() -> None:
    model, prompts = tiny_model(40), [[1, 2, 3] * 6, [4], [1, 2] * 5]
    config = SampleConfig(max_tokens=12, speculate=5, temperature=0.3, ignore_eot=True)
    capacity = max(map(len, prompts)) + config.max_tokens
    generated: list[list[int]] = [[] for _ in prompts]
    for event in engine_of(Context(model, CPU, 3, capacity), map(Request, prompts), config, seed=3).run():
        generated[event.number] += [token.id for token in event.tokens]
    for prompt, ids in zip(prompts, generated, strict=True):
        expected = generate(Context(model, CPU), prompt, replace(config, speculate=0), {EOT}, seed=3)
        assert ids == [token.id for token in expected]


@pytest.mark.parametrize("rows", [1, 2])
def test_correct_guesses_save_steps(rows: int) -> None:
    model = tiny_model(200)
    with torch.no_grad():  # The model repeats itself.
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
    updates = list(engine_of(context, [Request([1, 1, 1])] * rows, config).run())
    assert sum(len(event.tokens) for event in updates) == 60 * rows
    assert len(steps) <= 14
    assert context.slots[0].token_ids[:3] == [1, 1, 1]
