"""Beam search, id for id against transformers and against every text there is."""

import itertools
import math
import random
from typing import Any

import pytest
import torch
from models import CPU, engine_of, loud, push
from transformers import GPT2Config, GPT2LMHeadModel

from gpt.config import GPTConfig
from gpt.decoding.beam import Hypothesis, Search
from gpt.decoding.context import Context
from gpt.decoding.engine import Request, generate
from gpt.model.decoder import GPT
from gpt.runs import checkpoint
from gpt.sample_config import SampleConfig

EARLY = {"off": False, "on": True, "never": "never"}


def pair(vocab_size: int, seed: int, spread: float = 0.5) -> tuple[GPT, GPT2LMHeadModel]:
    """The same random weights, here and in transformers; a larger spread makes likelier ids stand out."""
    config = GPTConfig(vocab_size, 64, 2, 2, 16)
    model = loud(config, seed, spread)
    theirs = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=vocab_size, n_positions=64, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
        )
    ).eval()
    missing = theirs.load_state_dict(checkpoint.to_stored(config, model.state_dict()), strict=False)
    assert missing.missing_keys == ["lm_head.weight"]
    theirs.tie_weights()
    return model, theirs


def search(
    model: GPT, prompts: list[list[int]], eot: int, rows: int = 1, **settings: Any
) -> list[tuple[list[int], list[Hypothesis]]]:
    """For each prompt the ids that were agreed on along the way, and the best texts."""
    config = SampleConfig(**settings)
    context = Context(model, CPU, rows * config.beam)
    agreed: list[list[int]] = [[] for _ in prompts]
    best: list[list[Hypothesis]] = [[] for _ in prompts]
    for event in engine_of(context, map(Request, prompts), config, eot=eot).run():
        agreed[event.number] += [token.id for token in event.tokens]
        if event.best:
            best[event.number] = list(event.best)
    return list(zip(agreed, best, strict=True))


def case(number: int) -> dict[str, Any]:
    """Settings by chance: widths 1–8, penalties 0–2 …"""
    chance = random.Random(number)
    beam = chance.randint(2, 8)
    return {
        "beam": beam,
        "length_penalty": chance.choice([0.0, 0.5, 1.0, 1.5, 2.0]),
        "early_stopping": chance.choice(list(EARLY)),
        "n_best": chance.randint(1, beam),
        "no_repeat_ngram": chance.choice([0, 0, 2, 3]),
        "repetition_penalty": chance.choice([0.0, 0.0, 1.3]),
        "max_tokens": (most := chance.randint(1, 14)),
        "min_tokens": min(most, chance.choice([0, 0, 3])),
    }


def theirs_best(
    theirs: GPT2LMHeadModel, prompt: list[int], eot: int, **how: Any
) -> tuple[list[list[int]], list[float]]:
    x = torch.tensor([prompt])
    out = theirs.generate(
        x, attention_mask=torch.ones_like(x), do_sample=False, num_beams=how["beam"], eos_token_id=eot, pad_token_id=eot,
        length_penalty=how["length_penalty"], early_stopping=EARLY[how["early_stopping"]],
        num_return_sequences=how["n_best"], no_repeat_ngram_size=how["no_repeat_ngram"] or None,
        repetition_penalty=how["repetition_penalty"] or None, max_new_tokens=how["max_tokens"],
        min_new_tokens=how["min_tokens"] or None, return_dict_in_generate=True, output_scores=True,
    )  # fmt: skip
    ids = [row[len(prompt) :].tolist() for row in out.sequences]
    return [each[: each.index(eot) + 1] if eot in each else each for each in ids], out.sequences_scores.tolist()


# Beside those by chance: a penalty below 0, under which a longer text cannot become better.
NEVER = {"length_penalty": -1.0, "early_stopping": "never", "max_tokens": 12}
CASES = [*enumerate(map(case, range(60))), *((n, case(n) | NEVER) for n in range(60, 72))]


@pytest.mark.parametrize(("number", "how"), CASES)
def test_equal_to_transformers(number: int, how: dict[str, Any]) -> None:
    eot = number % 30
    model, theirs = pair(30, number, 0.3)
    prompt = [random.Random(number).randrange(30) for _ in range(1 + number % 7)]
    expected, scores = theirs_best(theirs, prompt, eot, **how)
    [(agreed, found)] = search(model, [prompt], eot, **how)
    assert [each.ids for each in found] == expected
    assert [each.score for each in found] == pytest.approx(scores, abs=1e-4)
    assert agreed == expected[0]


@pytest.mark.parametrize("penalty", [0.0, 1.0, 2.0])
@pytest.mark.parametrize("seed", range(4))
def test_so_many_beams_that_nothing_is_lost_equals_brute_force(seed: int, penalty: float) -> None:
    """On 4 ids, the best of all texts of up to 4 tokens."""
    model, _ = pair(4, seed)
    eot, most = 0, 4
    scores: dict[tuple[int, ...], float] = {}
    for length in range(1, most + 1):
        for ids in itertools.product(range(4), repeat=length):
            if eot in ids[:-1] or (length < most and ids[-1] != eot):
                continue
            with torch.no_grad():
                logprobs = model(torch.tensor([[1, *ids]]))[0].log_softmax(-1)
            total = sum(float(logprobs[at, id]) for at, id in enumerate(ids))
            scores[ids] = total / length**penalty
    ranked = sorted(scores, key=lambda ids: -scores[ids])[:5]
    how = {"beam": 100, "length_penalty": penalty, "early_stopping": "never", "max_tokens": most, "n_best": 5}
    [(_, found)] = search(model, [[1]], eot, **how)
    assert [tuple(each.ids) for each in found] == ranked
    assert [each.score for each in found] == pytest.approx([scores[ids] for ids in ranked], abs=1e-4)


@pytest.mark.parametrize("early", EARLY)
@pytest.mark.parametrize("number", range(10))
def test_one_beam_is_greedy(number: int, early: str) -> None:
    model, _ = pair(30, number, 0.3)
    endless = SampleConfig(greedy=True, max_tokens=12, ignore_eot=True)
    eot = [token.id for token in generate(Context(model, CPU), [1, 2], endless, ())][number]  # it comes, some time
    [(agreed, [best])] = search(model, [[1, 2]], eot, beam=1, max_tokens=12, early_stopping=early)
    greedy = list(generate(Context(model, CPU), [1, 2], SampleConfig(greedy=True, max_tokens=12), {eot}))
    assert best.ids == agreed == [token.id for token in greedy]
    assert [token.logprob for token in best.tokens] == pytest.approx([token.logprob for token in greedy], abs=1e-5)


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_batched_equals_one_by_one(rows: int) -> None:
    model, _ = pair(30, 1, 0.3)
    prompts = [[1], [2, 3, 4, 5], [6, 7], [8, 9, 10], [11]]
    how: dict[str, Any] = {"beam": 3, "n_best": 2, "max_tokens": 12}
    alone = [search(model, [prompt], 5, **how)[0] for prompt in prompts]
    together = search(model, prompts, 5, rows, **how)
    for (agreed, found), (alone_agreed, expected) in zip(together, alone, strict=True):
        assert agreed == alone_agreed
        assert [each.ids for each in found] == [each.ids for each in expected]
        assert [each.score for each in found] == pytest.approx([each.score for each in expected], abs=1e-4)


@pytest.mark.parametrize(("arch", "positions"), [("gpt2", "learned"), ("modern", "rotary"), ("gpt2", "rotary")])
def test_past_the_context(arch: str, positions: str) -> None:
    """A context of 8 against a search that computes each hypothesis by itself, without sharing rows."""
    model = loud(GPTConfig.of(arch, 20, 8, 2, 2, 16, positions=positions))  # type: ignore[arg-type]
    [(_, found)] = search(model, [[1, 2, 3]], 0, beam=3, n_best=3, max_tokens=20, ignore_eot=True)
    assert len({tuple(each.ids) for each in found}) == 3
    for each in found:
        alone = Context(model, CPU)
        x = push(alone, [1, 2, 3])
        logprobs = []
        for token in each.tokens:
            logprobs.append(float(alone.logits(x[0]).log_softmax(-1)[token.id]))
            x = push(alone, [token.id])
        assert [token.logprob for token in each.tokens] == pytest.approx(logprobs, abs=1e-4)
        assert each.score == pytest.approx(sum(logprobs) / 20, abs=1e-4)


def test_what_is_agreed_on_comes_before_the_end() -> None:
    model, _ = pair(30, 3, 1.0)
    config = SampleConfig(beam=2, max_tokens=30, ignore_eot=True)
    told = [
        list(event.tokens)
        for event in engine_of(Context(model, CPU, 3), [Request([1, 2])], config, eot=0).run()
        if event.reason is None
    ]
    assert sum(map(bool, told)) > 2


def test_the_models_own_log_probability_is_kept_beside_the_score() -> None:
    model, _ = pair(30, 3, 0.3)
    [(_, [best])] = search(model, [[1, 2]], 0, beam=3, max_tokens=10, repetition_penalty=1.5, ignore_eot=True)
    with torch.no_grad():
        logprobs = model(torch.tensor([[1, 2, *best.ids]]))[0].log_softmax(-1)
    own = [float(logprobs[at, id]) for at, id in enumerate(best.ids, 1)]
    assert [token.logprob for token in best.tokens] == pytest.approx(own, abs=1e-4)
    assert not math.isclose(sum(own) / len(own), best.score, abs_tol=1e-3)


def test_what_cannot_become_better_than_what_has_ended_is_not_gone_on_with() -> None:
    even = torch.zeros(1, 2).log_softmax(-1)
    found = Search(SampleConfig(beam=2, max_tokens=9, length_penalty=0.0), ends={0})
    found.advance(even, torch.tensor([[-1.0, 0.0]]))  # one ends at -1, one lives at 0
    assert not found.done
    found.advance(even, torch.tensor([[-1.0, -1.0]]))  # another ends at -1, and one lives at -1: no better
    assert found.done


@pytest.mark.parametrize("penalty", [100.0, -100.0])
def test_a_score_of_a_long_text_under_a_large_penalty(penalty: float) -> None:
    """A power of the length may be larger, or smaller, than a float can be."""
    even = torch.zeros(1, 2).log_softmax(-1)
    for length in (1, 10, 5000):
        found = Search(SampleConfig(beam=2, max_tokens=9999, length_penalty=penalty), ends={0})
        found.advance(even, torch.tensor([[-1.0, -2.0]]))
        token = found.live[0].tokens[0]
        found.live = [Hypothesis((token,) * length, -1.0 * length)]
        found.advance(even, torch.tensor([[-1.0, -0.5]]))
        assert all(-math.inf <= each.score <= 0 for each in found.ended)
