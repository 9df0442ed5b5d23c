"""Writing on CUDA as it is on the CPU: every kind of request gives the same texts; evaluation and inspection too."""

import functools
import math
import random
import tomllib
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from conftest import TINY, Gpt, make_text, more, slow
from models import CPU, EOT, PROMPTS, tiny_model

import gpt
from gpt import SampleConfig, api, inspect
from gpt.bench_config import BenchConfig
from gpt.decoding.context import CACHE_SHARE, KEPT, Context
from gpt.decoding.engine import Engine, Request, Update
from gpt.decoding.token_step import next_tokens
from gpt.device import Compute
from gpt.errors import NotANumber, UserError
from gpt.model.params import cache_bytes

Disguise = Callable[..., Any]
COUNTS = Path(__file__).parent.with_name("counts.toml")
REQUESTS: list[dict[str, Any]] = [
    {"greedy": True},
    {},
    {"top_k": 9, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.2, "no_repeat_ngram": 3, "min_tokens": 3},
    {"logprobs": 2, "echo_logprobs": True, "stop": ("e",), "bias": (" the=-2",)},
    {"beam": 3, "n_best": 2},
    {"greedy": True, "speculate": 3},
    {"max_tokens": 40, "compile": "on"},  # past the context, 32
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run of each arch."""
    place = tmp_path_factory.mktemp("models")
    (place / "text.txt").write_bytes(make_text().encode())
    settings: dict[str, Any] = {**TINY, "steps": 4, "dtype": "float32", "vocab_size": 300}
    return {
        arch: gpt.train(place / "text.txt", out=str(place / arch), arch=arch, **settings).run
        for arch in ("gpt2", "modern")
    }


def texts(path: Path, device: str, settings: dict[str, Any]) -> list[tuple[str, float]]:
    config = SampleConfig(**{"max_tokens": 12, **settings})
    with mock.patch.object(torch, "compile", lambda model, **how: model):  # the steps that it would compile
        model = gpt.load(path, device=device, dtype="float32", sampling=config)
        pieces = model.write_all(["the cat ", "dogs"], config, 3, 1 if config.beam else 2)
        return [(piece.sample.text, piece.sample.logprob) for piece in pieces if piece.sample]


@pytest.mark.parametrize(
    ("settings", "arch"),
    [
        (REQUESTS[-1], "modern"),
        *((each, "gpt2") for each in REQUESTS[:2]),
        *(slow(each, "gpt2") for each in REQUESTS[2:]),
    ],
    ids=str,
)
def test_texts_are_the_same(models: dict[str, Path], disguise: Disguise, settings: dict[str, Any], arch: str) -> None:
    here = texts(models[arch], "cpu", settings)
    with disguise():
        there = texts(models[arch], "cuda", settings)
    assert [text for text, _ in there] == [text for text, _ in here]
    assert [value for _, value in there] == pytest.approx([value for _, value in here], abs=1e-4)


ALL_KINDS: list[dict[str, Any]] = [
    {}, {"greedy": True}, {"logprobs": 2}, {"top_k": 5, "top_p": 0.9}, {"min_tokens": 4}, {"max_tokens": 1},
    {"presence_penalty": 1.0}, {"beam": 2},
]  # fmt: skip


def requests(rng: random.Random) -> Iterator[Request]:
    for n in range(20):
        config = SampleConfig(**{"max_tokens": rng.randint(2, 20), **rng.choice(ALL_KINDS)})
        bias = rng.choice([(), (), ((EOT, 2.0),)])
        yield Request(rng.choice([*PROMPTS, [*range(20), n % 47]]), config, rng.randrange(3), n, bias)


@pytest.mark.slow
@pytest.mark.parametrize("fixed", [True, more(False)])
def test_requests_that_come_and_go_are_as_on_the_cpu(
    disguise: Disguise, fixed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Most steps are launched before the last one's tokens are read. Rows end, are cancelled and given to others, whose
    prompts begin as theirs did."""
    monkeypatch.setattr("gpt.decoding.scheduler.REUSED_FROM", 1)
    rng = random.Random(1)
    wanted = list(requests(rng))
    expected = [told(alone(request)) for request in wanted]
    with disguise() as device:
        model = tiny_model(24).to("cuda")
        compute = Compute(torch.device("cuda"), torch.float32)
        context = Context(model, compute, 4, step=functools.partial(next_tokens, model) if fixed else None)
        engine = Engine(context, {EOT}, 8)
        events: list[list[Update]] = [[] for _ in wanted]
        cancelled, steps, left = set(), 0, deque(wanted)
        while left or engine.busy:
            for _ in range(min(len(left), rng.randrange(2))):
                engine.add(left.popleft())
            for update in engine.step():
                assert update.number not in cancelled
                events[update.number].append(update)
            steps += 1
            if rng.random() < 0.05:
                cancelled.add(number := rng.randrange(len(wanted) - len(left)))
                engine.cancel(number)
        waits = device.kinds()
    for number, each in enumerate(events):
        found = told(each)
        cut = number in cancelled and not any(update.reason for update in each)
        assert found == (expected[number][: len(found)] if cut else expected[number])
    assert waits["event"] <= 2 * steps


@pytest.mark.slow
@pytest.mark.parametrize("cancelled", [False, True])
def test_what_is_not_finite_stays_in_its_row(disguise: Disguise, cancelled: bool) -> None:
    """The first token ends a request, while the next step is under way: whose logits are NaN, since the end's embedding
    is. Its row is given to another request."""
    expected = told(alone(Request([1, 2, 3], SampleConfig(max_tokens=8, ignore_eot=True), bias=((EOT, -1e9),))))
    with disguise():
        model = tiny_model(24).to("cuda")
        model.lm_head = torch.nn.Linear(16, 50, bias=False, device="cuda")
        with torch.no_grad():
            model.lm_head.weight.copy_(model.wte.weight)
            model.wte.weight[EOT] = torch.nan
        compute = Compute(torch.device("cuda"), torch.float32)
        engine = Engine(Context(model, compute, 2, step=functools.partial(next_tokens, model)), {EOT})
        ends = Request([5] * 9, SampleConfig(max_tokens=8), bias=((EOT, 1e9),))
        good = Request([1, 2, 3], SampleConfig(max_tokens=8, ignore_eot=True), bias=((EOT, -1e9),))
        for request in (ends, good, good, good):
            engine.add(request)
        events: dict[int, list[Update]] = {}
        for at in range(40):
            for update in engine.step():
                events.setdefault(update.number, []).append(update)
            if cancelled and at == 1:
                engine.cancel(0)
    assert [told(events[number]) for number in (1, 2, 3)] == [expected] * 3


def alone(request: Request) -> list[Update]:
    engine = Engine(Context(tiny_model(24), CPU, request.width), {EOT})
    engine.add(request)
    return list(engine.run())


def told(updates: list[Update]) -> list[int]:
    return [token.id for update in updates for token in update.tokens]


def test_a_text_is_written_on_the_second_device(models: dict[str, Path], disguise: Disguise) -> None:
    here = texts(models["modern"], "cpu", {})
    with disguise(2):
        assert texts(models["modern"], "cuda:1", {})[0][0] == here[0][0]
        with pytest.raises(UserError, match='no device "cuda:2"'):
            gpt.load(models["modern"], device="cuda:2")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int8"])
def test_narrow_weights_write(models: dict[str, Path], disguise: Disguise, dtype: str) -> None:
    """Texts may differ from float32's; their log-probabilities are about the same."""
    config = SampleConfig(greedy=True, max_tokens=5)
    (_, whole), *_ = texts(models["gpt2"], "cpu", {"greedy": True, "max_tokens": 5})
    with disguise():
        writing = gpt.load(models["gpt2"], device="cuda", dtype=dtype, sampling=config).write("the cat ", config)
        assert "".join(writing) == writing.sample.text
    assert writing.sample.logprob == pytest.approx(whole, abs=1.5)


def test_the_loss_of_a_text_and_what_goes_on_inside_are_the_same(models: dict[str, Path], disguise: Disguise) -> None:
    def look(device: str) -> Any:
        model = gpt.load(models["gpt2"], device=device, dtype="float32")
        loss = model.evaluate(["the cat sat on the mat while dogs chased cats, " * 3], stride=8).loss
        found = inspect.look(model.model, model.tokenizer.encode("the cat sat"), model.tokenizer)
        near = inspect.Embeddings(model.model, model.tokenizer)
        return loss, found, near.neighbors(near.find("cat"), 3), inspect.positions(model.model)

    here = look("cpu")
    with disguise():
        there = look("cuda")
    assert there[0] == pytest.approx(here[0], abs=1e-5)
    assert np.allclose(there[1].patterns, here[1].patterns, atol=1e-5)
    assert np.allclose(there[1].logits, here[1].logits, atol=1e-4)
    assert [each.id for each in there[2]] == [each.id for each in here[2]]
    assert np.allclose(there[3].similarity, here[3].similarity, atol=1e-5)


def test_bench_measures(models: dict[str, Path], disguise: Disguise, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpt.decoding.bench._PROBE_BYTES", 2**16)
    with disguise():
        config = BenchConfig(prompt_tokens=4, new_tokens=4, rounds=1)
        found = api.bench(models["gpt2"], config, device="cuda", dtype="float32")
    assert found.device == "NVIDIA H100 80GB HBM3"
    assert found.speed.decode_tokens_per_second > 0


@pytest.mark.slow
def test_a_lost_device_is_one_line(models: dict[str, Path], disguise: Disguise, gpt: Gpt) -> None:
    with disguise() as device:
        device.lost = "CUDA error: unspecified launch failure\nCUDA kernel errors might be reported later.\n"
        done = gpt("sample", "-m", models["gpt2"], "--device", "cuda", "the cat")
    assert (done.code, done.out) == (1, "")
    assert done.err.splitlines()[-2] == "error: the device failed: CUDA error: unspecified launch failure"


class Captures:
    """Stands in for torch.compile, and counts its calls and the CUDA graphs that it would capture: one for each shape
    of a step and each place in memory of keys and values."""

    def __init__(self) -> None:
        self.compiled = self.captured = self.steps = 0
        self.places: weakref.WeakSet[Any] = weakref.WeakSet()

    def __call__(self, stack: Callable[..., Any], **how: Any) -> Callable[..., Any]:
        self.compiled += 1

        def step(model: Any, cache: Any, *rest: Any) -> Any:
            self.steps += 1
            if cache not in self.places:
                self.captured += 1
                self.places.add(cache)
            return stack(model, cache, *rest)

        return step


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> Captures:
    stand_in = Captures()
    monkeypatch.setattr(torch, "compile", stand_in)
    return stand_in


COMPILED = SampleConfig(max_tokens=3, compile="on")


def written(model: gpt.LanguageModel, count: int = 1, prompt: str = "the cat ") -> list[str]:
    pieces = model.write_all([prompt], COMPILED, 3, count)
    return [piece.sample.text for piece in pieces if piece.sample is not None]


def test_later_calls_capture_nothing(models: dict[str, Path], disguise: Disguise, captures: Captures) -> None:
    with disguise():
        model = gpt.load(models["gpt2"], device="cuda", dtype="float32", sampling=COMPILED)
        assert written(model) == written(model)
        assert len({text for prompt in ("a", "dogs", "the mat") for text in written(model, prompt=prompt)}) == 3
        assert len("".join(model.write("the cat ", COMPILED))) > 0
        found = {"compiled": captures.compiled, "captured": captures.captured}
        steps = captures.steps
        "".join(model.write("the cat ", SampleConfig(max_tokens=3, compile="off")))
        assert captures.steps == steps > 0
    assert found == tomllib.loads(COUNTS.read_text(encoding="utf-8"))["calls"]


@pytest.mark.slow
def test_contexts_are_bounded_in_number_and_memory(
    models: dict[str, Path], disguise: Disguise, captures: Captures, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With room for seven rows, of contexts of three, two and four rows the oldest goes."""
    with disguise():
        model = gpt.load(models["gpt2"], device="cuda", dtype="float32", sampling=COMPILED)
        for count in range(1, KEPT + 3):
            written(model, count)
        assert (captures.compiled, captures.captured, len(captures.places)) == (1, KEPT + 2, KEPT)
        for count in (KEPT + 2, KEPT, KEPT + 2):  # kept
            written(model, count)
        assert captures.captured == KEPT + 2
        written(model, 1)  # freed long ago
        assert (captures.captured, len(captures.places)) == (KEPT + 3, KEPT)
        captures.places.clear()
        room = int(7.5 * cache_bytes(model.model.config, 32, 4) / CACHE_SHARE)
        monkeypatch.setattr(Compute, "memory", lambda self: room)
        model = gpt.load(models["gpt2"], device="cuda", dtype="float32", sampling=COMPILED)
        for count, kept in ((3, [3]), (2, [3, 2]), (4, [2, 4]), (7, [7])):
            written(model, count)
            assert sorted(cache.rows for cache in captures.places) == sorted(kept)


def test_texts_that_are_written_at_the_same_time_or_ended_early_share_no_context(
    models: dict[str, Path], disguise: Disguise, captures: Captures, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is ended early gives its context back; an error does not."""
    with disguise():
        model = gpt.load(models["gpt2"], device="cuda", dtype="float32", sampling=COMPILED)
        alone = ["".join(model.write(prompt, COMPILED)) for prompt in ("a", "b")]
        both = [model.write(prompt, COMPILED) for prompt in ("a", "b")]
        assert ["".join(pieces) for pieces in zip(*zip(*both, strict=True), strict=True)] == alone
        assert captures.captured == 2
        begun = model.write_all(["dogs"], COMPILED)
        next(begun)
        begun.close()
        assert "".join(model.write("a", COMPILED)) == alone[0]
        assert captures.captured == 2
        with monkeypatch.context() as patched:
            patched.setattr(Context, "logits", lambda self, x: x.new_full((*x.shape[:-1], 300), math.nan))
            for _ in both:
                with pytest.raises(NotANumber):
                    "".join(model.write("the cat", COMPILED))
        assert "".join(model.write("a", COMPILED)) == alone[0]
        assert captures.captured == 3
