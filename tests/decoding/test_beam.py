"""Beam search, compared with Transformers and exhaustive search."""

import itertools
import math
import random
from typing import Any

import pytest
import torch
from models import CPU, engine_of, loud, push
from transformers import GPT2Config, GPT2LMHeadModel

from gpt.config.model import GPTConfig
from gpt.config.sample import SampleConfig
from gpt.decoding.beam import Hypothesis, Search
from gpt.decoding.context import Context
from gpt.decoding.engine import Request, generate
from gpt.model.decoder import GPT
from gpt.runs import checkpoint

EARLY_STOPPING = {"off": False, "on": True, "never": "never"}


def model_pair(vocab_size: int, seed: int, spread: float = 0.5) -> tuple[GPT, GPT2LMHeadModel]:
    """Returns `gpt` and Transformers models with equal weights. A larger ``spread`` sharpens their distributions."""
    config = GPTConfig(vocab_size, 64, 2, 2, 16)
    model = loud(config, seed, spread)
    reference = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=vocab_size, n_positions=64, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
        )
    ).eval()
    missing = reference.load_state_dict(checkpoint.to_stored(config, model.state_dict()), strict=False)
    assert missing.missing_keys == ["lm_head.weight"]
    reference.tie_weights()
    return model, reference


def search(
    model: GPT, prompts: list[list[int]], eot: int, rows: int = 1, num: int = 1, **settings: Any
) -> list[tuple[list[int], list[Hypothesis]]]:
    """Returns each prompt's streamed ids and ``num`` best hypotheses."""
    config = SampleConfig(**settings)
    context = Context(model, CPU, rows * config.beam)
    streamed: list[list[int]] = [[] for _ in prompts]
    best: list[list[Hypothesis]] = [[] for _ in prompts]
    for event in engine_of(context, map(Request, prompts), config, eot=eot).run():
        streamed[event.number] += [token.id for token in event.tokens]
        if event.best:
            best[event.number] = list(event.best[:num])
    return list(zip(streamed, best, strict=True))


def random_settings(number: int) -> dict[str, Any]:
    rng = random.Random(number)
    beam = rng.randint(2, 8)
    return {
        "beam": beam,
        "length_penalty": rng.choice([0.0, 0.5, 1.0, 1.5, 2.0]),
        "early_stopping": rng.choice(list(EARLY_STOPPING)),
        "num": rng.randint(1, beam),
        "no_repeat_ngram": rng.choice([0, 0, 2, 3]),
        "repetition_penalty": rng.choice([0.0, 0.0, 1.3]),
        "max_tokens": (max_tokens := rng.randint(1, 14)),
        "min_tokens": min(max_tokens, rng.choice([0, 0, 3])),
    }


def transformers_beam_search(
    reference: GPT2LMHeadModel, prompt: list[int], eot: int, **settings: Any
) -> tuple[list[list[int]], list[float]]:
    x = torch.tensor([prompt])
    out = reference.generate(
        x, attention_mask=torch.ones_like(x), do_sample=False, num_beams=settings["beam"], eos_token_id=eot,
        pad_token_id=eot, length_penalty=settings["length_penalty"],
        early_stopping=EARLY_STOPPING[settings["early_stopping"]],
        num_return_sequences=settings["num"], no_repeat_ngram_size=settings["no_repeat_ngram"] or None,
        repetition_penalty=settings["repetition_penalty"] or None, max_new_tokens=settings["max_tokens"],
        min_new_tokens=settings["min_tokens"] or None, return_dict_in_generate=True, output_scores=True,
    )  # fmt: skip
    ids = [row[len(prompt) :].tolist() for row in out.sequences]
    return [row[: row.index(eot) + 1] if eot in row else row for row in ids], out.sequences_scores.tolist()


# A negative length penalty makes longer texts score lower.
NEGATIVE_PENALTY = {"length_penalty": -1.0, "early_stopping": "never", "max_tokens": 12}
CASES = [
    *enumerate(map(random_settings, range(60))),
    *((n, random_settings(n) | NEGATIVE_PENALTY) for n in range(60, 72)),
]


@pytest.mark.parametrize(("number", "settings"), CASES)
def test_beam_search_matches_transformers(number: int, settings: dict[str, Any]) -> None:
    eot = number % 30
    model, reference = model_pair(30, number, 0.3)
    prompt = [random.Random(number).randrange(30) for _ in range(1 + number % 7)]
    expected, scores = transformers_beam_search(reference, prompt, eot, **settings)
    [(streamed, hypotheses)] = search(model, [prompt], eot, **settings)
    assert [hypothesis.ids for hypothesis in hypotheses] == expected
    assert [hypothesis.score for hypothesis in hypotheses] == pytest.approx(scores, abs=1e-4)
    assert streamed == expected[0]


@pytest.mark.parametrize("penalty", [0.0, 1.0, 2.0])
@pytest.mark.parametrize("seed", range(4))
def test_wide_beam_matches_exhaustive_search(seed: int, penalty: float) -> None:
    """Compares with every text of up to 4 tokens over 4 ids."""
    model, _ = model_pair(4, seed)
    eot, max_tokens = 0, 4
    scores: dict[tuple[int, ...], float] = {}
    for length in range(1, max_tokens + 1):
        for ids in itertools.product(range(4), repeat=length):
            if eot in ids[:-1] or (length < max_tokens and ids[-1] != eot):
                continue
            with torch.no_grad():
                logprobs = model(torch.tensor([[1, *ids]]))[0].log_softmax(-1)
            total = sum(float(logprobs[position, id]) for position, id in enumerate(ids))
            scores[ids] = total / length**penalty
    ranked = sorted(scores, key=lambda ids: -scores[ids])[:5]
    settings = {
        "beam": 100,
        "length_penalty": penalty,
        "early_stopping": "never",
        "max_tokens": max_tokens,
        "num": 5,
    }
    [(_, hypotheses)] = search(model, [[1]], eot, **settings)
    assert [tuple(hypothesis.ids) for hypothesis in hypotheses] == ranked
    assert [hypothesis.score for hypothesis in hypotheses] == pytest.approx([scores[ids] for ids in ranked], abs=1e-4)


@pytest.mark.parametrize("early_stopping", EARLY_STOPPING)
@pytest.mark.parametrize("number", range(10))
def test_one_beam_matches_greedy_decoding(number: int, early_stopping: str) -> None:
    model, _ = model_pair(30, number, 0.3)
    endless = SampleConfig(greedy=True, max_tokens=12, ignore_eot=True)
    eot = [token.id for token in generate(Context(model, CPU), [1, 2], endless, ())][number]
    [(streamed, [best])] = search(model, [[1, 2]], eot, beam=1, max_tokens=12, early_stopping=early_stopping)
    greedy = list(generate(Context(model, CPU), [1, 2], SampleConfig(greedy=True, max_tokens=12), {eot}))
    assert best.ids == streamed == [token.id for token in greedy]
    assert [token.logprob for token in best.tokens] == pytest.approx([token.logprob for token in greedy], abs=1e-5)


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_batched_beams_match_single_prompts(rows: int) -> None:
    model, _ = model_pair(30, 1, 0.3)
    prompts = [[1], [2, 3, 4, 5], [6, 7], [8, 9, 10], [11]]
    settings: dict[str, Any] = {"beam": 3, "num": 2, "max_tokens": 12}
    single = [search(model, [prompt], 5, **settings)[0] for prompt in prompts]
    batch_results = search(model, prompts, 5, rows, **settings)
    for (streamed, hypotheses), (expected_ids, expected) in zip(batch_results, single, strict=True):
        assert streamed == expected_ids
        assert [hypothesis.ids for hypothesis in hypotheses] == [hypothesis.ids for hypothesis in expected]
        assert [hypothesis.score for hypothesis in hypotheses] == pytest.approx(
            [hypothesis.score for hypothesis in expected], abs=1e-4
        )


@pytest.mark.parametrize(("arch", "positions"), [("gpt2", "learned"), ("modern", "rotary"), ("gpt2", "rotary")])
def test_beam_scores_past_the_context_match_a_sliding_context(arch: str, positions: str) -> None:
    model = loud(GPTConfig.of(arch, 20, 8, 2, 2, 16, positions=positions))  # type: ignore[arg-type]
    [(_, hypotheses)] = search(model, [[1, 2, 3]], 0, beam=3, num=3, max_tokens=20, ignore_eot=True)
    assert len({tuple(hypothesis.ids) for hypothesis in hypotheses}) == 3
    for hypothesis in hypotheses:
        context = Context(model, CPU)
        x = push(context, [1, 2, 3])
        logprobs = []
        for token in hypothesis.tokens:
            logprobs.append(float(context.logits(x[0]).log_softmax(-1)[token.id]))
            x = push(context, [token.id])
        assert [token.logprob for token in hypothesis.tokens] == pytest.approx(logprobs, abs=1e-4)
        assert hypothesis.score == pytest.approx(sum(logprobs) / 20, abs=1e-4)


def test_tokens_shared_by_all_beams_are_streamed() -> None:
    model, _ = model_pair(30, 3, 1.0)
    config = SampleConfig(beam=2, max_tokens=30, ignore_eot=True)
    streamed = [
        list(event.tokens)
        for event in engine_of(Context(model, CPU, 3), [Request([1, 2])], config, eot=0).run()
        if event.reason is None
    ]
    assert sum(map(bool, streamed)) > 2


def test_logprobs_ignore_penalties_but_scores_do_not() -> None:
    model, _ = model_pair(30, 3, 0.3)
    [(_, [best])] = search(model, [[1, 2]], 0, beam=3, max_tokens=10, repetition_penalty=1.5, ignore_eot=True)
    with torch.no_grad():
        logprobs = model(torch.tensor([[1, 2, *best.ids]]))[0].log_softmax(-1)
    expected = [float(logprobs[position, id]) for position, id in enumerate(best.ids, 1)]
    assert [token.logprob for token in best.tokens] == pytest.approx(expected, abs=1e-4)
    assert not math.isclose(sum(expected) / len(expected), best.score, abs_tol=1e-3)


def test_search_ends_when_no_live_hypothesis_can_win() -> None:
    uniform = torch.zeros(1, 2).log_softmax(-1)
    beam_search = Search(SampleConfig(beam=2, max_tokens=9, length_penalty=0.0), ends={0})
    # One hypothesis ends with a score of -1, and one continues with a score of 0.
    beam_search.advance(uniform, torch.tensor([[-1.0, 0.0]]))
    assert not beam_search.done
    # A second hypothesis ends with a score of -1, and the live hypothesis has a score of -1 too.
    beam_search.advance(uniform, torch.tensor([[-1.0, -1.0]]))
    assert beam_search.done


@pytest.mark.parametrize("penalty", [100.0, -100.0])
def test_scores_stay_finite_under_a_large_length_penalty(penalty: float) -> None:
    """``length**penalty`` overflows or underflows a float."""
    uniform = torch.zeros(1, 2).log_softmax(-1)
    for length in (1, 10, 5000):
        beam_search = Search(SampleConfig(beam=2, max_tokens=9999, length_penalty=penalty), ends={0})
        beam_search.advance(uniform, torch.tensor([[-1.0, -2.0]]))
        token = beam_search.live[0].tokens[0]
        beam_search.live = [Hypothesis((token,) * length, -1.0 * length)]
        beam_search.advance(uniform, torch.tensor([[-1.0, -0.5]]))
        assert all(-math.inf <= hypothesis.score <= 0 for hypothesis in beam_search.ended)
