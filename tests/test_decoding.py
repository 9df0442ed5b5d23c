"""Filters, sampling, sliding, streaming, against transformers and brute force."""

import math
from collections import Counter

import pytest
import torch
from conftest import make_text
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from gpt.config import GPTConfig, SampleConfig
from gpt.decoding import logits as filters
from gpt.decoding.generate import Context, generate
from gpt.decoding.stream import TextStream
from gpt.device import Compute
from gpt.errors import UserError
from gpt.model.decoder import GPT
from gpt.text import tokenizer

CPU = Compute(torch.device("cpu"), torch.float32)
IDS = torch.zeros(1, 1, dtype=torch.long)


def tiny_model(block_size: int = 16, positions: str = "learned") -> GPT:
    torch.manual_seed(0)
    model = GPT(GPTConfig(50, block_size, 2, 2, 16, positions=positions)).eval()  # type: ignore[arg-type]
    for parameter in model.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    return model


def ids_of(model: GPT, prompt: list[int], config: SampleConfig, *, cached: bool = True, **seed: int) -> list[int]:
    return [token.id for token in generate(Context(model, CPU, cached=cached), prompt, config, eot=49, **seed)]


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 10**6), k=st.integers(1, 60), p=st.floats(0.01, 0.99), t=st.floats(0.1, 3.0))
def test_filters_equal_transformers(seed: int, k: int, p: float, t: float) -> None:
    logits = 3 * torch.randn(1, 50, generator=torch.Generator().manual_seed(seed))
    ours = filters.warm(logits, t)
    theirs = TemperatureLogitsWarper(t)(IDS, logits)
    assert torch.allclose(ours.softmax(-1), theirs.softmax(-1), atol=1e-6)
    assert torch.equal(filters.keep_top_k(logits, k), TopKLogitsWarper(k)(IDS, logits))
    kept_ours = filters.keep_top_p(logits, p) > -math.inf
    kept_theirs = TopPLogitsWarper(p)(IDS, logits) > -math.inf
    sums = logits.softmax(-1).sort(descending=True).values.cumsum(-1)
    if (sums - p).abs().min() > 1e-5:  # a sum that lands on p itself may round either way
        assert torch.equal(kept_ours, kept_theirs)


def test_filters_at_their_edges() -> None:
    logits = torch.tensor([1.0, 3.0, 2.0])
    for off in (
        filters.keep_top_k(logits, 0),
        filters.keep_top_k(logits, 99),
        filters.keep_top_p(logits, 0),
        filters.keep_top_p(logits, 1),
    ):
        assert torch.equal(off, logits)
    assert filters.keep_top_p(logits, 1e-9).argmax() == 1
    assert torch.isfinite(filters.keep_top_p(logits, 1e-9)).sum() == 1
    assert torch.isfinite(filters.exclude(logits, [1])).tolist() == [True, False, True]
    assert torch.equal(filters.exclude(logits[:1], [0]), logits[:1])  # one id always stays
    warmed = filters.warm(logits, 1e-40)
    assert warmed.softmax(-1).tolist() == [0, 1, 0]


def test_sampling_follows_the_distribution() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0])
    generator = torch.Generator().manual_seed(0)
    config = SampleConfig(temperature=0.7, top_k=3)
    counts = Counter(filters.choose(logits, config, generator) for _ in range(20_000))
    expected = torch.tensor([0.0, 1.0, 2.0, -math.inf]).div(0.7).softmax(-1)
    for id in range(4):
        assert counts[id] / 20_000 == pytest.approx(expected[id].item(), abs=0.012)


@pytest.mark.parametrize("positions", ["learned", "sinusoidal"])
@pytest.mark.parametrize("prompt", [[], [3], list(range(15)), list(range(16)), list(range(40))])
def test_cached_equals_uncached_past_the_context(prompt: list[int], positions: str) -> None:
    model = tiny_model(16, positions)
    for config in (
        SampleConfig(greedy=True, max_tokens=60, ignore_eot=True),
        SampleConfig(max_tokens=60, ignore_eot=True),
    ):
        cached, plain = (ids_of(model, prompt, config, cached=cached, seed=5) for cached in (True, False))
        assert cached == plain
        assert len(cached) == 60


def test_greedy_is_the_argmax_of_the_whole_forward() -> None:
    model = tiny_model(64)
    ids = [1, 2, 3]
    for _ in range(30):
        with torch.no_grad():
            ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    for config in (SampleConfig(greedy=True, max_tokens=30), SampleConfig(temperature=0, max_tokens=30)):
        found = ids_of(model, [1, 2, 3], config)
        assert found == ids[3:][: len(found)]
        assert len(found) == 30 or found[-1] == 49


def test_sliding_keeps_the_last_half() -> None:
    context = Context(tiny_model(16), CPU)
    context.extend(list(range(16)))
    assert not context.slid
    context.extend([20])
    assert context.slid
    assert context.ids == [9, 10, 11, 12, 13, 14, 15, 20]
    long = Context(tiny_model(16), CPU)
    long.extend(list(range(40)))
    assert (long.ids, long.slid) == (list(range(24, 40)), True)
    one = Context(tiny_model(1), CPU)
    one.extend([1])
    one.extend([2])
    assert one.ids == [2]


def test_sample_depends_on_seed_and_index_alone() -> None:
    model = tiny_model()
    config = SampleConfig(max_tokens=20, ignore_eot=True)
    assert ids_of(model, [1], config, seed=1, index=3) == ids_of(model, [1], config, seed=1, index=3)
    assert ids_of(model, [1], config, seed=1, index=3) != ids_of(model, [1], config, seed=1, index=2)
    assert ids_of(model, [1], config, seed=2, index=3) != ids_of(model, [1], config, seed=1, index=3)


def test_end_of_text_ends_unless_told_otherwise() -> None:
    model = tiny_model()
    with torch.no_grad():
        model.ln_f.weight.zero_()
        model.ln_f.bias.copy_(model.wte.weight[49] * 10)  # end-of-text is the likeliest, always
    greedy = {"greedy": True, "max_tokens": 9}
    assert ids_of(model, [1], SampleConfig(**greedy)) == [49]  # type: ignore[arg-type]
    assert ids_of(model, [1], SampleConfig(**greedy, ignore_eot=True)) == [49] * 9  # type: ignore[arg-type]
    found = ids_of(model, [1], SampleConfig(**greedy, min_tokens=4))  # type: ignore[arg-type]
    assert len(found) == 5
    assert 49 not in found[:4]
    assert ids_of(model, [1], SampleConfig(max_tokens=0)) == []


def test_logprob_is_the_models_own() -> None:
    model = tiny_model(64)
    config = SampleConfig(temperature=0.5, top_k=3, max_tokens=12, ignore_eot=True)
    tokens = list(generate(Context(model, CPU), [1, 2], config, eot=49, seed=3))
    ids = [1, 2] + [token.id for token in tokens]
    with torch.no_grad():
        logprobs = model(torch.tensor([ids])).log_softmax(-1)[0]
    for at, token in enumerate(tokens, 2):
        assert token.logprob == pytest.approx(logprobs[at - 1, token.id].item(), abs=1e-4)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -0.1}, "temperature is -0.1"),
        ({"temperature": math.nan}, "temperature is nan"),
        ({"temperature": math.inf}, "temperature is inf"),
        ({"top_p": 1.5}, "top-p is 1.5"),
        ({"top_p": -0.5}, "top-p is -0.5"),
        ({"top_k": -1}, "top-k is -1"),
        ({"max_tokens": -1}, "max-tokens is -1"),
        ({"max_tokens": 1.5}, "max-tokens is 1.5"),
    ],
)
def test_settings_that_mean_nothing(settings: dict[str, float], message: str) -> None:
    with pytest.raises(UserError, match=message):
        SampleConfig(**settings)  # type: ignore[arg-type]


@given(st.text(max_size=30), st.binary(max_size=6))
def test_streaming_shows_whole_characters_and_loses_nothing(text: str, junk: bytes) -> None:
    tok = tokenizer.bytes_tokenizer()
    for data in (text.encode(), text.encode() + junk):
        stream = TextStream(tok)
        pieces = [stream.push(byte) for byte in data] + [stream.flush()]
        assert "".join(pieces) == data.decode("utf-8", "replace")
    stream = TextStream(tok)
    assert not any("\ufffd" in stream.push(byte) for byte in "é🐕\u4e2d".encode())


def test_a_literal_replacement_character_streams() -> None:
    tok = tokenizer.learn_tokenizer([make_text()], 300)
    stream = TextStream(tok)
    ids = tok.encode("a\ufffdb").tolist()
    assert "".join(stream.push(id) for id in ids) + stream.flush() == "a\ufffdb"
