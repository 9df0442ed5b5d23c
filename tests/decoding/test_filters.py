"""Logits filters and sampling, compared with Transformers on random logits."""

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    MinPLogitsWarper,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from gpt.config.sample import SampleConfig
from gpt.decoding import logits as filters

V = 50
IDS = torch.zeros(1, 1, dtype=torch.long)
SEEDS = st.integers(0, 10**6)


def random_logits(seed: int, rows: int = 1) -> Tensor:
    return 3 * torch.randn(rows, V, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=200)
@given(SEEDS, st.integers(1, 60), st.floats(0.01, 0.99), st.floats(0.1, 3.0))
def test_temperature_top_k_top_p_and_min_p_match_transformers(seed: int, k: int, p: float, t: float) -> None:
    logits = random_logits(seed)
    scaled = filters.apply_temperature(logits, t)
    expected = TemperatureLogitsWarper(t)(IDS, logits)
    assert torch.allclose(scaled.softmax(-1), expected.softmax(-1), atol=1e-6)
    assert torch.equal(filters.keep_top_k(logits, k), TopKLogitsWarper(k)(IDS, logits))
    assert torch.equal(filters.keep_min_p(logits, p), MinPLogitsWarper(p)(IDS, logits))
    kept_mask = filters.keep_top_p(logits, p) > -math.inf
    expected_mask = TopPLogitsWarper(p)(IDS, logits) > -math.inf
    sums = logits.softmax(-1).sort(descending=True).values.cumsum(-1)
    if (sums - p).abs().min() > 1e-5:  # A sum equal to p can round either way.
        assert torch.equal(kept_mask, expected_mask)


@settings(max_examples=200)
@given(
    SEEDS, st.lists(st.integers(0, 6), min_size=1, max_size=30), st.floats(0.1, 5.0), st.integers(1, 5),
    st.dictionaries(st.integers(0, V - 1), st.floats(-9, 9), max_size=5),
)  # fmt: skip
def test_penalties_ngrams_and_bias_match_transformers(
    seed: int, past_ids: list[int], penalty: float, n: int, bias: dict[int, float]
) -> None:
    logits = random_logits(seed)
    ids = torch.tensor([past_ids])
    expected = RepetitionPenaltyLogitsProcessor(penalty)(ids, logits.clone())
    assert torch.equal(filters.penalize(logits[0], past_ids, penalty), expected[0])
    expected = NoRepeatNGramLogitsProcessor(n)(ids, logits.clone())
    assert torch.equal(filters.exclude(logits[0], filters.find_repeats(past_ids, n)), expected[0])
    if bias:
        expected = SequenceBiasLogitsProcessor({(id,): value for id, value in bias.items()})(ids, logits.clone())
        adjusted = filters.Filters(SampleConfig(), {0}, list(bias.items())).adjust(logits, [past_ids], [0])
        assert torch.allclose(adjusted, expected, atol=1e-6)


class CountedSlices(list[int]):
    count = 0

    def __getitem__(self, key: Any) -> Any:
        self.count += isinstance(key, slice)
        return super().__getitem__(key)


@pytest.mark.parametrize("n", [0, 1, 2, 3, 40, 500, 1000])
@pytest.mark.parametrize("next_id", [
    lambda at: 7, lambda at: at % 3, lambda at: at.bit_count() % 2, lambda at: at * at % 11, lambda at: 2**31 - at % 500,
])  # fmt: skip
def test_repeated_ngrams_are_found_in_linear_time(n: int, next_id: Callable[[int], int]) -> None:
    ids = CountedSlices(map(next_id, range(1000)))
    ngrams = [tuple(list.__getitem__(ids, slice(start, start + n))) for start in range(1000 - n + 1)]
    tail = tuple(list.__getitem__(ids, slice(1000 - n + 1, None)))
    expected = sorted({ngram[-1] for ngram in ngrams if n and ngram[:-1] == tail})
    assert filters.find_repeats(ids, n) == expected
    assert ids.count <= 2 + len(expected)


@settings(max_examples=100)
@given(
    SEEDS, st.lists(st.integers(0, 6), max_size=30), st.lists(st.integers(0, 6), max_size=30),
    st.floats(-2, 2), st.floats(-2, 2),
)  # fmt: skip
def test_presence_and_frequency_penalties_match_openai(
    seed: int, prompt: list[int], generated_ids: list[int], presence: float, frequency: float
) -> None:
    """``logit[j] -= count[j] * frequency + (count[j] > 0) * presence``, counting only generated tokens."""
    logits = random_logits(seed)
    expected = logits.clone()
    for id in range(V):
        count = generated_ids.count(id)
        expected[0, id] -= count * frequency + (count > 0) * presence
    config = SampleConfig(presence_penalty=presence, frequency_penalty=frequency)
    adjusted = filters.Filters(config, {0}).adjust(logits, [[*prompt, *generated_ids]], [len(generated_ids)])
    assert torch.allclose(adjusted, expected, atol=1e-6)


@settings(max_examples=50)
@given(SEEDS)
def test_order_of_filters_matches_transformers(seed: int) -> None:
    config = SampleConfig(temperature=0.7, top_k=20, top_p=0.8, min_p=0.05, repetition_penalty=1.5, no_repeat_ngram=2)
    logits, past_ids = random_logits(seed, 2), [[1, 2, 3, 1], [4, 4, 4, 4]]
    expected = SequenceBiasLogitsProcessor({(7,): 2.0})(torch.tensor(past_ids), logits.clone())
    for processor in (
        RepetitionPenaltyLogitsProcessor(1.5), NoRepeatNGramLogitsProcessor(2), TemperatureLogitsWarper(0.7),
        TopKLogitsWarper(20), TopPLogitsWarper(0.8), MinPLogitsWarper(0.05),
    ):  # fmt: skip
        expected = processor(torch.tensor(past_ids), expected)
    pipeline = filters.Filters(config, {49}, [(7, 2.0)])
    filtered = pipeline.keep(pipeline.adjust(logits, past_ids, [0, 0]))
    assert torch.equal(filtered > -math.inf, expected > -math.inf)
    assert torch.allclose(filtered.softmax(-1), expected.softmax(-1), atol=1e-6)


@settings(max_examples=100)
@given(
    st.lists(st.sampled_from([0.0, 1.0, -1e30, 1e30, 5.0]), min_size=1, max_size=6), st.floats(0, 100),
    st.integers(0, 9), st.floats(0, 1), st.floats(0, 1), st.integers(0, 3), st.lists(st.integers(0, 5), max_size=12),
)  # fmt: skip
def test_filters_always_leave_a_token(
    values: list[float], t: float, k: int, p: float, m: float, n: int, past_ids: list[int]
) -> None:
    config = SampleConfig(temperature=t, top_k=k, top_p=p, min_p=m, no_repeat_ngram=n, min_tokens=1)
    past_ids = [id % len(values) for id in past_ids]
    pipeline = filters.Filters(config, {0})
    adjusted = pipeline.adjust(torch.tensor([values]), [past_ids], [0])
    choice = int(pipeline.choose(adjusted, torch.tensor([[3]]))[0])
    assert adjusted[0, choice] > -math.inf


def test_filters_at_boundary_values() -> None:
    logits = torch.tensor([1.0, 3.0, 2.0])
    for unfiltered in (
        filters.keep_top_k(logits, 0), filters.keep_top_k(logits, 99), filters.keep_top_p(logits, 0),
        filters.keep_top_p(logits, 1), filters.keep_min_p(logits, 0), filters.penalize(logits, [1], 0),
    ):  # fmt: skip
        assert torch.equal(unfiltered, logits)
    assert filters.keep_top_p(logits, 1e-9).argmax() == 1
    assert torch.isfinite(filters.keep_top_p(logits, 1e-9)).sum() == 1
    ties = torch.tensor([[0.0, 0.0, 0.0, 0.0], [-1e9, 5.0, -1e9, 5.0]])  # Softmax is exact here.
    assert torch.isfinite(filters.keep_top_p(ties, 0.75)).tolist() == [[True] * 3 + [False], [False, True] * 2]
    assert torch.isfinite(filters.keep_top_p(ties.double(), 0.5)).sum() == 3  # Torch sorts float64.
    assert torch.isfinite(filters.keep_min_p(logits, 1)).tolist() == [False, True, False]
    assert torch.isfinite(filters.exclude(logits, [1])).tolist() == [True, False, True]
    assert torch.equal(filters.exclude(logits[:1], [0]), logits[:1])
    assert not filters.apply_temperature(logits, 1e-300).isnan().any()  # float32 rounds this temperature to 0.
    scaled = filters.apply_temperature(logits, 1e-40)
    assert scaled.softmax(-1).tolist() == [0, 1, 0]


def draw(logits: Tensor, config: SampleConfig, count: int) -> list[int]:
    keys = [filters.step_key(filters.sample_key(1, number, []), number % 7) for number in range(count)]
    return (
        filters.Filters(config, {0}).choose(logits.expand(count, -1), torch.from_numpy(filters.as_int64(keys))).tolist()
    )


def test_draws_follow_the_distribution() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0])
    counts = Counter(draw(logits, SampleConfig(temperature=0.7, top_k=3), 20_000))
    expected = torch.tensor([0.0, 1.0, 2.0, -math.inf]).div(0.7).softmax(-1)
    for id in range(4):
        assert counts[id] / 20_000 == pytest.approx(expected[id].item(), abs=0.012)


def test_uniform_draws_are_unbiased() -> None:
    """Chi-square test of a uniform distribution over 400 ids."""
    counts = torch.bincount(torch.tensor(draw(torch.zeros(400), SampleConfig(temperature=1), 20_000)), minlength=400)
    chi = float(((counts - 50) ** 2 / 50).sum())
    assert abs(chi - 399) < 5 * math.sqrt(2 * 399)
    assert abs(float(counts[:200].sum()) - 10_000) < 5 * math.sqrt(5_000)


def test_consecutive_steps_are_independent() -> None:
    keys = [[filters.step_key(filters.sample_key(1, number, []), step) for number in range(20_000)] for step in (0, 1)]
    first, second = (filters.gumbel(torch.from_numpy(filters.as_int64(step_keys)), 2).argmax(-1) for step_keys in keys)
    pair_counts = Counter(zip(first.tolist(), second.tolist(), strict=True))
    assert all(abs(count - 5000) < 5 * math.sqrt(20_000 * 3 / 16) for count in pair_counts.values())


def test_random_bits_are_frozen() -> None:
    """Seeds must reproduce texts in later versions. The bits are SplitMix64's first outputs for state 0."""
    words = filters.bits(torch.tensor([[0]]), 3)[0].tolist()
    assert [word % 2**64 for word in words] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    noise = filters.gumbel(torch.tensor([[0]]), 3)[0].tolist()
    expected = [-math.log(-math.log1p(-(word % 2**64) / 2**64)) for word in words]
    assert noise == pytest.approx(expected, abs=1e-5)
    assert filters.sample_key(5, 3, [1, 2]) == 0x5B92E44643BFB132
    assert filters.step_key(filters.sample_key(5, 3, [1, 2]), 1) == 0x5DFBDA60E208DBF0
