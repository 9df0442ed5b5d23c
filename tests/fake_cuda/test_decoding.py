"""Decoding, evaluation and inspection on the fake CUDA device."""

import math
import random
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
from gpt import SampleConfig
from gpt.config.device import Compute
from gpt.decoding.context import Context
from gpt.decoding.engine import Engine, Request, Update
from gpt.insight import inspect
from gpt.system.cuda_graph import GraphedFunction
from gpt.system.errors import NotANumber, UserError

Disguise = Callable[..., Any]
REQUESTS: list[dict[str, Any]] = [
    {"greedy": True},
    {},
    {"top_k": 9, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.2, "no_repeat_ngram": 3, "min_tokens": 3},
    {"logprobs": 2, "echo_logprobs": True, "stop": ("e",), "bias": (" the=-2",)},
    {"beam": 3},
    {"max_tokens": 40},  # 40 tokens exceed the context of 32.
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    (folder / "text.txt").write_bytes(make_text().encode())
    settings: dict[str, Any] = {**TINY, "steps": 4, "dtype": "float32", "vocab_size": 300}
    return {
        arch: gpt.train(folder / "text.txt", out=str(folder / arch), **settings | {"arch": arch}).run
        for arch in ("gpt2", "modern")
    }


def sample_all(path: Path, device: str, settings: dict[str, Any]) -> list[tuple[str, float]]:
    config = SampleConfig(**{"max_tokens": 12, **settings})
    model = gpt.load(path, device=device, dtype="float32", for_decoding=True)
    pieces = model.write_all(["the cat ", "dogs"], config, 3, num=2)
    return [(piece.sample.text, piece.sample.logprob) for piece in pieces if piece.sample]


@pytest.mark.parametrize(
    ("settings", "arch"),
    [
        (REQUESTS[-1], "modern"),
        *((settings, "gpt2") for settings in REQUESTS[:2]),
        *(slow(settings, "gpt2") for settings in REQUESTS[2:]),
    ],
    ids=str,
)
def test_samples_match_the_cpu(
    models: dict[str, Path], disguise: Disguise, settings: dict[str, Any], arch: str
) -> None:
    on_cpu = sample_all(models[arch], "cpu", settings)
    with disguise():
        on_cuda = sample_all(models[arch], "cuda", settings)
    assert [text for text, _ in on_cuda] == [text for text, _ in on_cpu]
    assert [value for _, value in on_cuda] == pytest.approx([value for _, value in on_cpu], abs=1e-4)


ALL_KINDS: list[dict[str, Any]] = [
    {}, {"greedy": True}, {"logprobs": 2}, {"top_k": 5, "top_p": 0.9}, {"min_tokens": 4}, {"max_tokens": 1},
    {"presence_penalty": 1.0}, {"beam": 2},
]  # fmt: skip


def random_requests(rng: random.Random) -> Iterator[Request]:
    for n in range(20):
        config = SampleConfig(**{"max_tokens": rng.randint(2, 20), **rng.choice(ALL_KINDS)})
        bias = rng.choice([(), (), ((EOT, 2.0),)])
        yield Request(rng.choice([*PROMPTS, [*range(20), n % 47]]), config, rng.randrange(3), n, bias)


@pytest.mark.slow
@pytest.mark.parametrize("eager_calls", [0, more(99)])
def test_concurrent_requests_match_the_cpu(
    disguise: Disguise, eager_calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each step launches before the host reads the previous step's tokens. Later requests reuse the slots of ended and
    cancelled ones."""
    monkeypatch.setattr("gpt.decoding.scheduler.MIN_SHARED_PREFIX", 1)
    monkeypatch.setattr("gpt.decoding.token_step.MIN_COLUMNS", 8)
    monkeypatch.setattr("gpt.system.cuda_graph.EAGER_CALLS", eager_calls)
    rng = random.Random(1)
    requests = list(random_requests(rng))
    expected = [token_ids(run_alone(request)) for request in requests]
    with disguise() as device:
        model = tiny_model(24).to("cuda")
        compute = Compute(torch.device("cuda"), torch.float32)
        engine = Engine(Context(model, compute, 4, note=pytest.fail), {EOT}, 8)
        events: list[list[Update]] = [[] for _ in requests]
        cancelled_numbers, steps, queue = set(), 0, deque(requests)
        while queue or engine.busy:
            for _ in range(min(len(queue), rng.randrange(2))):
                engine.add(queue.popleft())
            for update in engine.step():
                assert update.number not in cancelled_numbers
                events[update.number].append(update)
            steps += 1
            if rng.random() < 0.05:
                cancelled_numbers.add(number := rng.randrange(len(requests) - len(queue)))
                engine.cancel(number)
        waits = device.wait_counts()
    for number, updates in enumerate(events):
        actual = token_ids(updates)
        was_cut = number in cancelled_numbers and not any(update.reason for update in updates)
        assert actual == (expected[number][: len(actual)] if was_cut else expected[number])
    assert waits["event"] <= 2 * steps


@pytest.mark.slow
@pytest.mark.parametrize("cancelled", [False, True])
def test_nan_logits_do_not_reach_other_requests(
    disguise: Disguise, cancelled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request ends while its next step, whose logits are NaN, is in flight. A later request reuses the slot."""
    monkeypatch.setattr("gpt.system.cuda_graph.EAGER_CALLS", 0)
    expected = token_ids(
        run_alone(Request([1, 2, 3], SampleConfig(max_tokens=8, ignore_eot=True), bias=((EOT, -1e9),)))
    )
    with disguise():
        model = tiny_model(24).to("cuda")
        model.lm_head = torch.nn.Linear(16, 50, bias=False, device="cuda")
        with torch.no_grad():
            model.lm_head.weight.copy_(model.wte.weight)
            model.wte.weight[EOT] = torch.nan
        compute = Compute(torch.device("cuda"), torch.float32)
        engine = Engine(Context(model, compute, 2), {EOT})
        ending_request = Request([5] * 9, SampleConfig(max_tokens=8), bias=((EOT, 1e9),))
        good_request = Request([1, 2, 3], SampleConfig(max_tokens=8, ignore_eot=True), bias=((EOT, -1e9),))
        for request in (ending_request, good_request, good_request, good_request):
            engine.add(request)
        events: dict[int, list[Update]] = {}
        for step in range(40):
            for update in engine.step():
                events.setdefault(update.number, []).append(update)
            if cancelled and step == 1:
                engine.cancel(0)
    assert [token_ids(events[number]) for number in (1, 2, 3)] == [expected] * 3


def run_alone(request: Request) -> list[Update]:
    engine = Engine(Context(tiny_model(24), CPU, request.width), {EOT})
    engine.add(request)
    return list(engine.run())


def token_ids(updates: list[Update]) -> list[int]:
    return [token.id for update in updates for token in update.tokens]


def test_generation_on_the_second_device_matches_the_cpu(models: dict[str, Path], disguise: Disguise) -> None:
    on_cpu = sample_all(models["modern"], "cpu", {})
    with disguise(2):
        assert sample_all(models["modern"], "cuda:1", {})[0][0] == on_cpu[0][0]
        with pytest.raises(UserError, match='no device "cuda:2"'):
            gpt.load(models["modern"], device="cuda:2")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int8"])
def test_generation_with_narrow_weights_is_close_to_float32(
    models: dict[str, Path], disguise: Disguise, dtype: str
) -> None:
    """Texts can differ from float32, but log-probabilities are close."""
    config = SampleConfig(greedy=True, max_tokens=5)
    (_, expected), *_ = sample_all(models["gpt2"], "cpu", {"greedy": True, "max_tokens": 5})
    with disguise():
        writing = gpt.load(models["gpt2"], device="cuda", dtype=dtype, for_decoding=True).write("the cat ", config)
        assert "".join(writing) == writing.sample.text
    assert writing.sample.logprob == pytest.approx(expected, abs=1.5)


def test_evaluation_and_inspection_match_the_cpu(models: dict[str, Path], disguise: Disguise) -> None:
    def inspect_on(device: str) -> Any:
        model = gpt.load(models["gpt2"], device=device, dtype="float32")
        loss = model.evaluate(["the cat sat on the mat while dogs chased cats, " * 3], stride=8).loss
        view = inspect.inspect_prompt(model.model, model.tokenizer.encode("the cat sat"), model.tokenizer)
        embeddings = inspect.Embeddings(model.model, model.tokenizer)
        return loss, view, embeddings.neighbors(embeddings.find("cat"), 3)

    on_cpu = inspect_on("cpu")
    with disguise():
        on_cuda = inspect_on("cuda")
    assert on_cuda[0] == pytest.approx(on_cpu[0], abs=1e-5)
    assert np.allclose(on_cuda[1].patterns, on_cpu[1].patterns, atol=1e-5)
    assert np.allclose(on_cuda[1].logits, on_cpu[1].logits, atol=1e-4)
    assert [neighbor.id for neighbor in on_cuda[2]] == [neighbor.id for neighbor in on_cpu[2]]


@pytest.mark.slow
def test_device_failure_is_a_one_line_error(models: dict[str, Path], disguise: Disguise, gpt: Gpt) -> None:
    with disguise() as device:
        device.failure = "CUDA error: unspecified launch failure\nCUDA kernel errors might be reported later.\n"
        done = gpt("sample", "-m", models["gpt2"], "--device", "cuda", "the cat")
    assert (done.code, done.out) == (1, "")
    assert done.err.splitlines()[-2] == "error: the device failed: CUDA error: unspecified launch failure"


class Captures:
    """Counts captured graphs, and the caches of living contexts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count, self.caches = 0, weakref.WeakSet[Any]()
        capture = GraphedFunction.capture

        def count_and_capture(function: Any, *inputs: Any) -> Any:
            self.count += 1
            self.caches.add(function.function.func.__self__.cache)
            return capture(function, *inputs)

        monkeypatch.setattr("gpt.system.cuda_graph.EAGER_CALLS", 0)
        monkeypatch.setattr(GraphedFunction, "capture", count_and_capture)


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> Captures:
    return Captures(monkeypatch)


THREE = SampleConfig(max_tokens=3, ignore_eot=True)


def generate(model: gpt.LanguageModel, count: int = 1, prompt: str = "the cat ") -> list[str]:
    pieces = model.write_all([prompt], THREE, 3, count)
    return [piece.sample.text for piece in pieces if piece.sample is not None]


def test_later_calls_reuse_the_captured_graphs(models: dict[str, Path], disguise: Disguise, captures: Captures) -> None:
    with disguise() as device:
        model = gpt.load(models["gpt2"], device="cuda", dtype="float32", note=pytest.fail)
        assert generate(model) == generate(model)
        assert len({text for prompt in ("a", "dogs", "the mat") for text in generate(model, prompt=prompt)}) == 3
        assert len("".join(model.write("the cat ", THREE))) > 0
        assert device.launches["graph"] == 13  # Two per text, and the prompt "a" of one token.
    assert captures.count == 2  # Of the first slot, and of any other one.


@pytest.mark.parametrize(
    "error", [RuntimeError("operation not permitted\nand more"), torch.OutOfMemoryError("out of memory\nand more")]
)
def test_failed_capture_leaves_eager_steps_and_one_note(
    models: dict[str, Path], disguise: Disguise, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = [text for text, _ in sample_all(models["modern"], "cpu", {})]
    notes: list[str] = []
    with disguise():
        monkeypatch.setattr(GraphedFunction, "capture", mock.Mock(side_effect=error))
        model = gpt.load(models["modern"], device="cuda", dtype="float32", note=notes.append)
        pieces = model.write_all(["the cat ", "dogs"], SampleConfig(max_tokens=12), 3, num=2)
        assert [piece.sample.text for piece in pieces if piece.sample] == expected
    reason = str(error).splitlines()[0]
    assert notes == [f"decoding steps run without CUDA graphs, which is slower: {reason}"]


def test_concurrent_closed_and_failed_generators_share_one_context(
    models: dict[str, Path], disguise: Disguise, captures: Captures, monkeypatch: pytest.MonkeyPatch
) -> None:
    with disguise():
        model = gpt.load(models["gpt2"], device="cuda", dtype="float32")
        expected = ["".join(model.write(prompt, THREE)) for prompt in ("a", "b")]
        generators = [model.write(prompt, THREE) for prompt in ("a", "b")]
        assert ["".join(pieces) for pieces in zip(*zip(*generators, strict=True), strict=True)] == expected
        closed_generator = model.write_all(["dogs"], THREE)
        next(closed_generator)
        closed_generator.close()
        assert "".join(model.write("a", THREE)) == expected[0]
        with monkeypatch.context() as patched:
            patched.setattr(Context, "logits", lambda self, x: x.new_full((*x.shape[:-1], 300), math.nan))
            for _ in generators:
                with pytest.raises(NotANumber):
                    "".join(model.write("the cat", THREE))
        assert "".join(model.write("a", THREE)) == expected[0]
        assert len(captures.caches) == 1
