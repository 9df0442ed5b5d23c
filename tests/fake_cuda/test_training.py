"""Training on the fake CUDA device."""

import contextlib
import json
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from conftest import Gpt, losses, make_text, slow, weights
from models import tiny_stepper

import gpt
from gpt.config import events
from gpt.config.device import Compute, upload
from gpt.model.decoder import GPT
from gpt.runs import folder
from gpt.system.cuda_graph import GraphedFunction
from gpt.system.errors import device_failure, is_out_of_memory
from gpt.training import step as stepping

Disguise = Callable[..., Any]
SMALL: dict[str, Any] = {
    "n_layer": 2, "n_head": 2, "n_embd": 32, "block_size": 32, "batch_tokens": 128, "tokenizer": "bytes", "lr": 3e-3,
    "sample_every": 0, "dtype": "float32",
}  # fmt: skip
# Tolerances for losses of about 5. The two devices use different attention kernels, which round differently.
ROUNDING = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 1e-2}


@pytest.fixture
def text(workdir: Path) -> Path:
    path = workdir / "book.txt"
    path.write_bytes(make_text(2000).encode())
    return path


def train(device: str, **settings: Any) -> tuple[Any, list[Any]]:
    run_events: list[Any] = []
    result = gpt.train("book.txt", listen=run_events.append, device=device, **{**SMALL, "steps": 4, **settings})
    return result, run_events


def notes(run_events: list[Any]) -> list[str]:
    return [event.text for event in run_events if isinstance(event, events.Note)]


@pytest.mark.parametrize(
    "settings",
    [
        {"arch": "modern"}, slow({}), slow({"dtype": "bfloat16"}), slow({"micro_batch": "1", "recompute": True}),
        slow({"teachers": 1, "steps": 16}), slow({"pairs": True, "batch_tokens": 256}),
    ],
    ids=str,
)  # fmt: skip
def test_losses_match_the_cpu(text: Path, disguise: Disguise, settings: dict[str, Any]) -> None:
    if "pairs" in settings:
        lines = [json.dumps({"prompt": f"{n} plus one is ", "completion": f"{n + 1}"}) for n in range(40)]
        text.write_text("\n".join(lines) + "\n")
    on_cpu, cpu_events = train("cpu", eval_every=2, **settings)
    with disguise():
        on_cuda, cuda_events = train("cuda", eval_every=2, **settings)
    rounding = ROUNDING[settings.get("dtype", "float32")]
    assert losses(cuda_events) == pytest.approx(losses(cpu_events), abs=rounding)
    assert on_cuda.val_loss == pytest.approx(on_cpu.val_loss, abs=rounding)


@pytest.mark.slow
def test_float16_losses_start_like_float32_and_decrease(text: Path, disguise: Disguise) -> None:
    """Steps are skipped until the loss scale is small enough. The trial of compiled code does not affect the scale."""
    with disguise():
        _, float16_events = train("cuda", dtype="float16", steps=8)
        _, float32_events = train("cuda", steps=8)
        with mock.patch.object(torch, "compile", lambda function, **options: function):
            _, compiled_events = train("cuda", dtype="float16", compile="on", steps=8)
    assert all(map(math.isfinite, losses(float16_events)))
    assert losses(float16_events)[0] == pytest.approx(losses(float32_events)[0], abs=ROUNDING["float16"])
    assert losses(float16_events)[-1] < losses(float16_events)[0]
    assert losses(compiled_events) == pytest.approx(losses(float16_events), abs=1e-3)


@pytest.mark.slow
def test_chunked_logits_match_the_cpu(text: Path, disguise: Disguise, monkeypatch: pytest.MonkeyPatch) -> None:
    _, cpu_events = train("cpu")
    monkeypatch.setattr(
        "gpt.training.recipe.with_loss_chunks", lambda model, setup, memory: replace(setup, loss_chunk=64)
    )
    with disguise():
        result, cuda_events = train("cuda", micro_batch="4")
    assert json.loads((result.run / "run.json").read_text())["resolved"]["loss_chunk"] == 64
    assert losses(cuda_events) == pytest.approx(losses(cpu_events), abs=1e-5)


@pytest.mark.slow
def test_rollback_after_nan_losses_discards_the_step_in_flight(
    text: Path, disguise: Disguise, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Step 8 is in flight during the rollback and is discarded. The first loss is that of the memory probe."""
    original, calls = stepping.tied_cross_entropy, []

    def compute_loss(*args: Any) -> Any:
        calls.append(1)
        return original(*args) * (math.nan if 6 <= len(calls) <= 9 else 1)

    monkeypatch.setattr(stepping, "tied_cross_entropy", compute_loss)
    monkeypatch.setattr("gpt.system.cuda_graph.EAGER_CALLS", 99)  # A graph would not call the function.
    with disguise():
        result, run_events = train("cuda", steps=10, eval_every=4)
    (rollback,) = [event for event in run_events if isinstance(event, events.RollbackEvent)]
    assert (rollback.step, rollback.failed_step, result.steps) == (4, 7, 10)
    steps = [event.step for event in run_events if isinstance(event, events.StepEvent)]
    assert steps == [*range(1, 8), *range(5, 11)]
    assert all(map(math.isfinite, losses(run_events)[-6:]))
    assert all(tensor.isfinite().all() for tensor in weights(result.run).values())


@pytest.mark.parametrize(
    ("first", "second", "optimizer"),
    [("cpu", "cuda", "muon"), slow("cuda", "cpu", "adamw"), slow("cuda", "cuda", "muon")],
)
def test_resume_on_another_device_matches_the_cpu(
    text: Path, disguise: Disguise, first: str, second: str, optimizer: str
) -> None:
    def device_context(device: str) -> Any:
        return disguise() if device == "cuda" else contextlib.nullcontext()

    def six_steps(first: str, second: str) -> dict[str, torch.Tensor]:
        with device_context(first):
            run = train(first, optimizer=optimizer)[0].run
        with device_context(second):
            assert gpt.resume(run, steps=6, device=second).steps == 6
        return weights(run)

    expected = six_steps("cpu", "cpu")
    for name, tensor in six_steps(first, second).items():
        assert torch.allclose(tensor, expected[name], atol=2e-4), name


@pytest.mark.slow
def test_adapter_losses_match_the_cpu(text: Path, disguise: Disguise) -> None:
    base = train("cpu", steps=1, out="base")[0].run
    settings: dict[str, Any] = {"init": str(base), "steps": 3, "lora_rank": 2, "dtype": "float32"}
    run_events: dict[str, list[Any]] = {"cpu": [], "cuda": []}
    gpt.train("book.txt", listen=run_events["cpu"].append, device="cpu", **settings)
    with disguise():
        gpt.train("book.txt", listen=run_events["cuda"].append, device="cuda", **settings)
    assert losses(run_events["cuda"]) == pytest.approx(losses(run_events["cpu"]), abs=1e-5)


@pytest.mark.parametrize("fails", [False, True])
def test_cuda_graph_is_captured_once_or_its_failure_is_reported_once(
    text: Path, disguise: Disguise, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """A capture that fails leaves gradients behind."""
    captures, capture = [], GraphedFunction.capture

    def count_captures(graphed: Any, *batch: Any) -> Any:
        if not hasattr(graphed.function, "__self__"):  # The graph of a sample.
            return capture(graphed, *batch)
        captures.append(1)
        if fails:
            weight = graphed.function.__self__.model.wte.weight
            weight.grad = torch.ones_like(weight)
            raise RuntimeError("operation not permitted when stream is capturing\nand more")
        return capture(graphed, *batch)

    monkeypatch.setattr(GraphedFunction, "capture", count_captures)
    _, cpu_events = train("cpu", steps=7, eval_every=3)
    with disguise():
        _, cuda_events = train("cuda", steps=7, eval_every=3)
    assert len(captures) == 1
    assert losses(cuda_events) == pytest.approx(losses(cpu_events), abs=1e-5)
    message = "steps run without a CUDA graph, which is slower: operation not permitted when stream is capturing"
    assert [note for note in notes(cuda_events) if "CUDA graph" in note] == [message] * fails


def test_out_of_memory_before_the_first_step_halves_the_micro_batch(
    text: Path, disguise: Disguise, monkeypatch: pytest.MonkeyPatch
) -> None:
    trunk = GPT.trunk

    def limited(self: GPT, idx: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
        if self.training and len(idx) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return trunk(self, idx, *rest, **options)

    with disguise():
        _, small_events = train("cuda", micro_batch="1", dropout=0.1)
        monkeypatch.setattr(GPT, "trunk", limited)
        _, little_events = train("cuda", micro_batch="4", dropout=0.1)
    assert losses(little_events) == losses(small_events)
    assert "out of memory: from now on, 1 of 4 sequences at once" in notes(little_events)


def test_step_on_the_second_device_matches_the_cpu(disguise: Disguise) -> None:
    on_cpu = tiny_stepper(Compute(torch.device("cpu"), torch.float32))
    with disguise(2):
        on_cuda = tiny_stepper(Compute(torch.device("cuda:1"), torch.float32))
        ids = np.zeros((4, 16), np.int64)
        assert torch.cuda.current_device() == 0
        assert on_cuda.step(ids, ids, 0.01).read() == pytest.approx(on_cpu.step(ids, ids, 0.01).read(), abs=1e-5)


def test_batches_are_uploaded_without_a_wait(disguise: Disguise) -> None:
    """Inputs and targets are overlapping views of one array."""
    with disguise() as device:
        waits = len(device.waits)
        x = upload(np.arange(12).reshape(3, 4)[:, :-1], torch.device("cuda"))
        assert len(device.waits) == waits
        assert x.cpu().tolist() == [[0, 1, 2], [4, 5, 6], [8, 9, 10]]


@pytest.mark.slow
def test_device_failure_ends_a_run_with_a_one_line_error(text: Path, disguise: Disguise, gpt: Gpt) -> None:
    """The run resumes from its last checkpoint."""
    words = "train book.txt -o run --tokenizer bytes --preset nano --n-layer 1 --block-size 16 --batch-tokens 64 "
    words += "--save-every 2 --eval-every 2 --dtype float32 --compile off --device cuda --sample-every 0 --steps"
    with disguise() as device:
        fail = partial(setattr, device, "failure", CUDA_ERROR)
        with mock.patch(
            "gpt.training.journal.Journal.report_save", lambda journal, step: fail() if step == 4 else None
        ):
            done = gpt(*words.split(), "9")
        assert device.failure
    assert (done.code, done.out) == (1, "")
    assert done.err.splitlines()[-2:] == [
        "error: the device cuda failed: CUDA error: an illegal memory access was encountered",
        "hint: resume with: gpt train --resume run",
    ]
    with disguise():
        assert gpt("train", "--resume", "run", "--quiet").code == 0
    assert (folder.find_checkpoint("run:latest")).name == folder.step_name(9)


def test_cublas_out_of_memory_is_not_a_device_failure() -> None:
    error = RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")
    assert is_out_of_memory(error)
    assert device_failure(error) is None
    assert device_failure(RuntimeError(CUDA_ERROR)) == CUDA_ERROR.splitlines()[0]


CUDA_ERROR = """CUDA error: an illegal memory access was encountered
CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be incorrect.
For debugging consider passing CUDA_LAUNCH_BLOCKING=1
"""
