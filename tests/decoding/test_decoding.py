"""Decoding: sliding contexts, seeds, batches, finish reasons."""

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

from gpt.config.device import Compute
from gpt.config.model import GPTConfig
from gpt.config.sample import SampleConfig
from gpt.decoding.context import CACHE_SHARE, Context
from gpt.decoding.engine import Engine, Request, generate
from gpt.decoding.logits import Token
from gpt.decoding.sampler import POSITIONS_AT_ONCE
from gpt.decoding.write import MAX_BATCH, Sample, TextGenerator
from gpt.model import kernels
from gpt.model.decoder import GPT
from gpt.system.errors import UserError
from gpt.tokenizers.tokenizer import bytes_tokenizer


def generate_ids(model: GPT, prompt: list[int], config: SampleConfig, **seed: int) -> list[int]:
    return [token.id for token in generate(Context(model, CPU), prompt, config, ends={EOT}, **seed)]


def logprobs_without_cache(model: GPT, prompt: list[int], ids: list[int]) -> Iterator[float]:
    """Yields the log-probabilities of ``ids``. Recomputes the whole window for each id, and cuts a full window to its
    last half."""
    size = model.config.block_size
    window = prompt[-size:]
    for id in ids:
        with torch.no_grad():
            yield float(model(torch.tensor([window]))[0, -1].log_softmax(-1)[id])
        window = [*window, id] if len(window) < size else [*window, id][-max(1, size // 2) :]


@pytest.mark.parametrize("prompt", [[EOT], [3], list(range(15)), list(range(16)), list(range(40))])
def test_full_context_with_absolute_positions_keeps_its_last_half(prompt: list[int]) -> None:
    for size in (16, 1, 3):
        model = tiny_model(size)
        config = SampleConfig(temperature=1.5, max_tokens=60, ignore_eot=True)
        tokens = list(generate(Context(model, CPU), prompt, config, {EOT}, seed=4))
        assert len({token.id for token in tokens}) > 5
        expected = list(logprobs_without_cache(model, prompt, [token.id for token in tokens]))
        assert [token.logprob for token in tokens] == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("arch", ["gpt2", "modern"])
@pytest.mark.parametrize("prompt", [[EOT], [3], list(range(16)), list(range(40))])
def test_rotary_model_attends_to_exactly_the_last_16_positions(
    prompt: list[int], arch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reference is one forward pass with a band mask of 16 positions."""
    model = tiny_model(16, "rotary", arch)
    config = SampleConfig(temperature=1.5, max_tokens=60, ignore_eot=True)
    tokens = list(generate(Context(model, CPU), prompt, config, {EOT}, seed=4))
    assert len({token.id for token in tokens}) > 5
    long_model = tiny_model(128, "rotary", arch)

    def attend_in_band(
        q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float, scale: float | None, documents: None
    ) -> Tensor:
        position = torch.arange(q.size(2))
        band = (position <= position[:, None]) & (position > position[:, None] - 16)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=band, scale=scale)

    monkeypatch.setattr(kernels, "attend", attend_in_band)
    ids = [*prompt[-16:], *(token.id for token in tokens)]
    with torch.no_grad():
        logprobs = long_model(torch.tensor([ids]))[0].log_softmax(-1)
    expected = [float(logprobs[position - 1, ids[position]]) for position in range(len(ids) - 60, len(ids))]
    assert [token.logprob for token in tokens] == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("positions", ["learned", "rotary"])
def test_copied_slot_continues_like_its_source(positions: str) -> None:
    """Covers slots before and after sliding, with and without a common prefix."""
    model, rng = tiny_model(8, positions), random.Random(0)
    for _ in range(50):
        context = Context(model, CPU, 3)
        ids = [rng.randrange(50) for _ in range(8)]
        push(context, *(ids[: rng.randrange(1, 8)] for _ in range(3)))
        for _ in range(rng.randrange(12)):
            push(context, *([rng.randrange(2)] for _ in range(3)))
        first, second, third = context.slots
        for source, target in ((first, second), (second, third)):
            context.copy(source, target)
            push(context, [5], [5], [rng.randrange(50)])
        assert (first.token_ids, first.start, first.length) == (second.token_ids, second.start, second.length)
        context.copy(second, third)
        x = push(context, [7], [7], [7])
        assert torch.allclose(x[0], x[1], atol=1e-4)
        assert torch.allclose(x[0], x[2], atol=1e-4)


def test_rotary_sliding_recomputes_nothing() -> None:
    context = Context(tiny_model(16, "rotary"), CPU)
    push(context, list(range(16)))
    for _ in range(40):
        push(context, [7])
    assert context.slots[0].length == 56


@pytest.mark.parametrize("positions", ["learned", "rotary"])
@pytest.mark.parametrize("rows", [1, slow(2), 3, slow(7)])
@pytest.mark.parametrize(
    "settings", [{}, {"greedy": True}, {"repetition_penalty": 1.3, "no_repeat_ngram": 2, "min_tokens": 4}]
)
def test_batched_requests_match_single_requests(rows: int, positions: str, settings: dict[str, object]) -> None:
    """Some prompts and texts exceed the context, and some texts end early."""
    model = tiny_model(16, positions)
    config = SampleConfig(**{"max_tokens": 25, "temperature": 1.5, **settings})  # type: ignore[arg-type]
    requests = [Request(prompt, index=index) for index, prompt in enumerate(PROMPTS)]
    results = batched(model, requests, config, rows, seed=3)
    for request, tokens in zip(requests, results, strict=True):
        single = list(generate(Context(model, CPU), request.ids, config, {EOT}, seed=3, index=request.index))
        assert [token.id for token in tokens] == [token.id for token in single]
        assert [token.logprob for token in tokens] == pytest.approx([token.logprob for token in single], abs=1e-4)
    if not settings:
        assert len({len(tokens) for tokens in results}) > 1


def test_requests_can_be_cancelled_during_an_update() -> None:
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


def test_sample_depends_only_on_seed_and_index() -> None:
    config = SampleConfig(max_tokens=20, ignore_eot=True)
    texts = [
        generate_ids(tiny_model(), [1], config, seed=seed, index=n) for seed, n in ((1, 3), (1, 3), (1, 2), (2, 3))
    ]
    assert texts[0] == texts[1] and texts[0] not in texts[2:]


def test_prompt_logprobs_match_one_forward_pass() -> None:
    """The logits of the truncated prompt are computed in three chunks. Up to 99 alternatives include all 50 ids."""
    model, prompt = tiny_model(2 * POSITIONS_AT_ONCE + 9), [position * position % 47 for position in range(200)]
    config = SampleConfig(max_tokens=0, echo_logprobs=True, logprobs=99)
    [update] = engine_of(Context(model, CPU), [Request(prompt)], config).run()
    truncated_prompt = prompt[-model.config.block_size :]
    with torch.no_grad():
        logprobs = model(torch.tensor([truncated_prompt]))[0].log_softmax(-1)
    assert update.prompt is not None
    assert [token.id for token in update.prompt] == truncated_prompt
    assert update.prompt[0] == Token(truncated_prompt[0], None)
    for position, token in enumerate(update.prompt[1:], 1):
        assert token.logprob == pytest.approx(logprobs[position - 1, token.id].item(), abs=1e-4)
        assert token.top[0][1] == pytest.approx(logprobs[position - 1].max().item(), abs=1e-4)
        assert len(token.top) == 50


# Texts


def text_generator(config: SampleConfig, block_size: int = 64) -> TextGenerator:
    tokenizer = bytes_tokenizer()
    engine = Engine(Context(loud(GPTConfig(257, block_size, 2, 2, 16)), CPU), tokenizer.ends)
    return TextGenerator(engine, tokenizer, config, 3, None)


def generate_samples(config: SampleConfig, prompts: list[str], num: int = 1, **options: Any) -> list[Sample]:
    return [
        piece.sample
        for piece in text_generator(config).write(prompts, range(num), **options)
        if piece.sample is not None
    ]


def test_early_stop_does_not_affect_other_samples() -> None:
    config = SampleConfig(max_tokens=60, ignore_eot=True)
    full_samples = generate_samples(config, ["a", "b"], num=4)
    letters = {
        letter
        for letter in set(full_samples[5].text + full_samples[2].text) - set(full_samples[0].text)
        if letter.isascii()
    }
    # The first sample contains no stop string.
    stops = sorted(letters)[:4]
    stopped_samples = generate_samples(replace(config, stop=tuple(stops)), ["a", "b"], num=4)
    assert [sample.finish_reason for sample in stopped_samples].count("stop") > 2
    for full, early in zip(full_samples, stopped_samples, strict=True):
        assert early.tokens == full.tokens[: len(early.tokens)]
        assert early.text == full.text[: len(early.text)]
        assert early.finish_reason == ("stop" if any(stop in full.text for stop in stops) else "length")
        assert not any(stop in early.text for stop in stops)


@pytest.mark.parametrize("settings", [{"greedy": True}, {"beam": 2}])
def test_ignored_end_of_text_is_part_of_the_text(settings: dict[str, Any]) -> None:
    bias = {"bias": ("<|endoftext|>=1000",), "max_tokens": 5}
    [sample] = generate_samples(SampleConfig(ignore_eot=True, **bias, **settings), ["a"])
    assert (sample.tokens, sample.text, sample.finish_reason) == ([256] * 5, "<|endoftext|>" * 5, "length")
    [sample] = generate_samples(SampleConfig(**bias, **settings), ["a"])
    assert (sample.tokens, sample.text, sample.finish_reason) == ([], "", "eot")


def test_slid_is_set_when_the_context_slides(monkeypatch: pytest.MonkeyPatch) -> None:
    slides: list[int] = []
    slide = Context.slide
    monkeypatch.setattr(Context, "slide", lambda self, slot: slides.append(slot.row) or slide(self, slot))
    # The last token never enters the context.
    for count, expected_slid in ((60, False), (61, False), (62, True)):
        slides.clear()
        [sample] = generate_samples(SampleConfig(max_tokens=count, ignore_eot=True), ["abcd"])
        assert (sample.slid, bool(slides)) == (expected_slid, expected_slid)


def test_batch_size_fits_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpt.decoding.context.resident_bytes", lambda *args: 0)
    size = Context(text_generator(SampleConfig()).model, CPU).cache.nbytes

    def count_rows(config: SampleConfig) -> int:
        generator = text_generator(config)
        next(generator.write([[1, 2], [1]] * 20, range(2)))
        return len(generator.engine.context.slots)

    for rows_that_fit, width, rows in (
        (3, 1, 3),
        (6, 2, 6),
        (5, 2, 4),
        (0, 1, 1),
        (999, 1, MAX_BATCH["cpu"]),
        (999, 5, 15),
    ):
        monkeypatch.setattr(Compute, "memory", lambda self, n=rows_that_fit: int((n + 0.5) * size / CACHE_SHARE))
        assert count_rows(SampleConfig(max_tokens=20, beam=width if width > 1 else 0)) == rows
    assert count_rows(SampleConfig(max_tokens=20, batch=7)) == 7


def test_invalid_settings_are_refused() -> None:
    invalid: list[dict[str, Any]] = [{"temperature": math.inf}, {"top_k": -1}, {"max_tokens": -1}, {"max_tokens": 1.5}]
    for settings in invalid:
        [(name, value)] = settings.items()
        with pytest.raises(UserError, match=f"{name.replace('_', '-')} is {value}"):
            SampleConfig(**settings)
