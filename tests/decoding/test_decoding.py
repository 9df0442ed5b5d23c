"""Rows of ids: the context past its size, seeds, batches, what ends a text."""

import math
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import slow
from models import CPU, EOT, PROMPTS, batched, engine_of, loud, push, tiny_model
from torch import Tensor

from gpt.config import GPTConfig
from gpt.decoding.context import CACHE_SHARE, Context, ContextPool
from gpt.decoding.engine import Request, generate
from gpt.decoding.logits import Token
from gpt.decoding.sampler import POSITIONS_AT_ONCE
from gpt.decoding.write import ROWS, Sample, TextGenerator
from gpt.device import Compute
from gpt.errors import UserError
from gpt.model import kernels
from gpt.model.decoder import GPT
from gpt.sample_config import SampleConfig
from gpt.text.tokenizer import bytes_tokenizer


def ids_of(model: GPT, prompt: list[int], config: SampleConfig, **seed: int) -> list[int]:
    return [token.id for token in generate(Context(model, CPU), prompt, config, ends={EOT}, **seed)]


def without_cache(model: GPT, prompt: list[int], ids: list[int]) -> Iterator[float]:
    """The log-probabilities of ``ids``, each from a whole forward of what the context holds: the end of the prompt, and
    half of the context each time that it is full."""
    size = model.config.block_size
    window = prompt[-size:]
    for id in ids:
        with torch.no_grad():
            yield float(model(torch.tensor([window]))[0, -1].log_softmax(-1)[id])
        window = [*window, id] if len(window) < size else [*window, id][-max(1, size // 2) :]


@pytest.mark.parametrize("positions", ["learned", "sinusoidal"])
@pytest.mark.parametrize("prompt", [[EOT], [3], list(range(15)), list(range(16)), list(range(40))])
def test_past_the_context_absolute_positions_go_on_from_its_last_half(prompt: list[int], positions: str) -> None:
    for size in (16, 1, 3):
        model = tiny_model(size, positions)
        config = SampleConfig(temperature=1.5, max_tokens=60, ignore_eot=True)
        found = list(generate(Context(model, CPU), prompt, config, {EOT}, seed=4))
        assert len({token.id for token in found}) > 5
        expected = list(without_cache(model, prompt, [token.id for token in found]))
        assert [token.logprob for token in found] == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("arch", ["gpt2", "modern"])
@pytest.mark.parametrize("prompt", [[EOT], [3], list(range(16)), list(range(40))])
def test_past_the_context_rotary_positions_see_exactly_the_last_ones(
    prompt: list[int], arch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against one forward over everything, in which a mask shows each position the 16 up to itself."""
    model = tiny_model(16, "rotary", arch)
    config = SampleConfig(temperature=1.5, max_tokens=60, ignore_eot=True)
    found = list(generate(Context(model, CPU), prompt, config, {EOT}, seed=4))
    assert len({token.id for token in found}) > 5
    whole = tiny_model(128, "rotary", arch)

    def banded(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float, scale: float | None) -> Tensor:
        at = torch.arange(q.size(2))
        band = (at <= at[:, None]) & (at > at[:, None] - 16)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=band, scale=scale)

    monkeypatch.setattr(kernels, "attend", banded)
    ids = [*prompt[-16:], *(token.id for token in found)]
    with torch.no_grad():
        logprobs = whole(torch.tensor([ids]))[0].log_softmax(-1)
    expected = [float(logprobs[at - 1, ids[at]]) for at in range(len(ids) - 60, len(ids))]
    assert [token.logprob for token in found] == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("positions", ["learned", "rotary"])
def test_a_copied_slot_goes_on_as_its_source_does(positions: str) -> None:
    """Texts that begin alike, or not, before and after the context has dropped something of one or the other."""
    model, rng = tiny_model(8, positions), random.Random(0)
    for _ in range(50):
        context = Context(model, CPU, 3)
        whole = [rng.randrange(50) for _ in range(8)]
        push(context, *(whole[: rng.randrange(1, 8)] for _ in range(3)))
        for _ in range(rng.randrange(12)):
            push(context, *([rng.randrange(2)] for _ in range(3)))
        first, second, third = context.slots
        for source, target in ((first, second), (second, third)):
            context.copy(source, target)
            push(context, [5], [5], [rng.randrange(50)])
        assert (first.text, first.start, first.length) == (second.text, second.start, second.length)
        context.copy(second, third)
        x = push(context, [7], [7], [7])
        assert torch.allclose(x[0], x[1], atol=1e-4)
        assert torch.allclose(x[0], x[2], atol=1e-4)


def test_rotary_sliding_computes_nothing_anew() -> None:
    context = Context(tiny_model(16, "rotary"), CPU)
    push(context, list(range(16)))
    for _ in range(40):
        push(context, [7])
    assert context.slots[0].length == 56


@pytest.mark.parametrize("positions", ["learned", "sinusoidal", "rotary"])
@pytest.mark.parametrize("rows", [1, slow(2), 3, slow(7)])
@pytest.mark.parametrize(
    "more", [{}, {"greedy": True}, {"repetition_penalty": 1.3, "no_repeat_ngram": 2, "min_tokens": 4}]
)
def test_batched_equals_one_by_one(rows: int, positions: str, more: dict[str, object]) -> None:
    """Prompts of mixed lengths, some longer than the context, texts that outgrow it, others that end early."""
    model = tiny_model(16, positions)
    config = SampleConfig(**{"max_tokens": 25, "temperature": 1.5, **more})  # type: ignore[arg-type]
    requests = [Request(prompt, index=index) for index, prompt in enumerate(PROMPTS)]
    found = batched(model, requests, config, rows, seed=3)
    for request, tokens in zip(requests, found, strict=True):
        alone = list(generate(Context(model, CPU), request.ids, config, {EOT}, seed=3, index=request.index))
        assert [token.id for token in tokens] == [token.id for token in alone]
        assert [token.logprob for token in tokens] == pytest.approx([token.logprob for token in alone], abs=1e-4)
    if not more:
        assert len({len(tokens) for tokens in found}) > 1  # some have met an end-of-text


def test_whoever_listens_may_end_a_request_that_is_told_of_or_another() -> None:
    config = SampleConfig(greedy=True, max_tokens=12, ignore_eot=True)
    engine = engine_of(Context(tiny_model(16), CPU, 3), [Request([1]), Request([2]), Request([3])], config)
    counts = [0, 0, 0]
    for event in engine.run():
        counts[event.number] += len(event.tokens)
        if event.number == 0:
            engine.cancel(1)
        if counts[2] == 3:
            engine.cancel(2)
    assert counts == [12, 1, 3]


def test_sample_depends_on_seed_and_index_alone() -> None:
    config = SampleConfig(max_tokens=20, ignore_eot=True)
    some = [ids_of(tiny_model(), [1], config, seed=seed, index=n) for seed, n in ((1, 3), (1, 3), (1, 2), (2, 3))]
    assert some[0] == some[1] and some[0] not in some[2:]


def test_a_prompts_log_probabilities_are_those_of_one_forward() -> None:
    """Of what the context keeps; looked at in parts, of which there are three. There are 50 ids, and 99 are asked for."""
    model, prompt = tiny_model(2 * POSITIONS_AT_ONCE + 9), [at * at % 47 for at in range(200)]
    config = SampleConfig(max_tokens=0, echo_logprobs=True, logprobs=99)
    [told] = engine_of(Context(model, CPU), [Request(prompt)], config).run()
    kept = prompt[-model.config.block_size :]
    with torch.no_grad():
        logprobs = model(torch.tensor([kept]))[0].log_softmax(-1)
    assert told.prompt is not None
    assert [token.id for token in told.prompt] == kept
    assert told.prompt[0] == Token(kept[0], None)
    for at, token in enumerate(told.prompt[1:], 1):
        assert token.logprob == pytest.approx(logprobs[at - 1, token.id].item(), abs=1e-4)
        assert token.top[0][1] == pytest.approx(logprobs[at - 1].max().item(), abs=1e-4)
        assert len(token.top) == 50


# Texts


def writer(config: SampleConfig, block_size: int = 64) -> TextGenerator:
    """Of a model whose ids are bytes."""
    return TextGenerator(
        ContextPool(loud(GPTConfig(257, block_size, 2, 2, 16)), CPU), bytes_tokenizer(), config, seed=3
    )


def samples(config: SampleConfig, prompts: list[str], num: int = 1, **more: Any) -> list[Sample]:
    return [piece.sample for piece in writer(config).write(prompts, range(num), **more) if piece.sample is not None]


def test_samples_that_stop_early_leave_others_as_they_are() -> None:
    config = SampleConfig(max_tokens=60, ignore_eot=True)
    whole = samples(config, ["a", "b"], num=4)
    letters = {letter for letter in set(whole[5].text + whole[2].text) - set(whole[0].text) if letter.isascii()}
    stops = sorted(letters)[:4]  # while others stop, the first goes on, and all wait for it
    cut = samples(replace(config, stop=tuple(stops)), ["a", "b"], num=4)
    assert [sample.finish_reason for sample in cut].count("stop") > 2
    for one, other in zip(whole, cut, strict=True):
        assert other.tokens == one.tokens[: len(other.tokens)]
        assert other.text == one.text[: len(other.text)]
        assert other.finish_reason == ("stop" if any(stop in one.text for stop in stops) else "length")
        assert not any(stop in other.text for stop in stops)


@pytest.mark.parametrize("how", [{"greedy": True}, {"beam": 2}])
def test_an_end_of_text_that_ends_nothing_is_text(how: dict[str, Any]) -> None:
    bias = {"bias": ("<|endoftext|>=1000",), "max_tokens": 5}
    [sample] = samples(SampleConfig(ignore_eot=True, **bias, **how), ["a"])
    assert (sample.tokens, sample.text, sample.finish_reason) == ([256] * 5, "<|endoftext|>" * 5, "length")
    [sample] = samples(SampleConfig(**bias, **how), ["a"])
    assert (sample.tokens, sample.text, sample.finish_reason) == ([], "", "eot")


def test_what_is_done_is_not_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    computed = [0]
    begin = Context.begin

    def counted(self: Context, *args: Any) -> None:
        computed[-1] += 1
        begin(self, *args)

    monkeypatch.setattr(Context, "begin", counted)
    config = SampleConfig(max_tokens=5)
    expected = [samples(config, ["a"], 2)[0], samples(config, ["b"], 2)[1]]
    computed.append(0)
    assert samples(config, ["a", "b"], 2, done={(0, 1), (1, 0)}) == expected
    assert computed == [4, 2]


def test_a_text_has_slid_once_the_context_forgets(monkeypatch: pytest.MonkeyPatch) -> None:
    slides: list[int] = []
    slide = Context.slide
    monkeypatch.setattr(Context, "slide", lambda self, slot: slides.append(slot.at) or slide(self, slot))
    for count, slid in ((60, False), (61, False), (62, True)):  # the last one is only predicted
        slides.clear()
        [sample] = samples(SampleConfig(max_tokens=count, ignore_eot=True), ["abcd"])
        assert (sample.slid, bool(slides)) == (slid, slid)


def test_so_many_at_once_as_the_memory_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    size = Context(writer(SampleConfig()).model, CPU).cache.nbytes
    for fitting, width, rows in ((3, 1, 3), (6, 2, 6), (5, 2, 4), (0, 1, 1), (999, 1, ROWS["cpu"]), (999, 5, 15)):
        monkeypatch.setattr(Compute, "memory", lambda self, n=fitting: int((n + 0.5) * size / CACHE_SHARE))
        config = SampleConfig(max_tokens=20, beam=width if width > 1 else 0)
        assert writer(config)._shape([[1, 2], [1]], 50) == (rows, 64, False)
    assert writer(SampleConfig(max_tokens=20, batch=7))._shape([[1, 2]], 50)[0] == 7


def test_settings_that_mean_nothing() -> None:
    some: list[dict[str, Any]] = [{"temperature": math.inf}, {"top_k": -1}, {"max_tokens": -1}, {"max_tokens": 1.5}]
    for settings in some:
        [(name, value)] = settings.items()
        with pytest.raises(UserError, match=f"{name.replace('_', '-')} is {value}"):
            SampleConfig(**settings)
