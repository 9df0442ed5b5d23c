"""Training on CUDA as it is on the CPU, step by step: the same losses, the same files, and what only a GPU can do."""

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

import gpt
from gpt import events
from gpt.device import Compute, upload
from gpt.errors import device_failure, is_out_of_memory
from gpt.model.decoder import GPT
from gpt.runs import folder
from gpt.training import step as stepping
from gpt.training.optim import make_optimizer
from gpt.training.parallel import Single
from gpt.training.recipe import resolve
from gpt.training.step import Stepper

Disguise = Callable[..., Any]
SMALL: dict[str, Any] = {
    "n_layer": 2, "n_head": 2, "n_embd": 32, "block_size": 32, "batch_tokens": 128, "tokenizer": "bytes", "lr": 3e-3,
    "sample_every": 0, "dtype": "float32",
}  # fmt: skip
ROUNDING = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 1e-2}  # of losses around 5, attention being another kernel


@pytest.fixture
def text(workdir: Path) -> Path:
    path = workdir / "book.txt"
    path.write_bytes(make_text(2000).encode())
    return path


def train(device: str, **settings: Any) -> tuple[Any, list[Any]]:
    heard: list[Any] = []
    result = gpt.train("book.txt", listen=heard.append, device=device, **{**SMALL, "steps": 4, **settings})
    return result, heard


def notes(heard: list[Any]) -> list[str]:
    return [each.text for each in heard if isinstance(each, events.Note)]


@pytest.mark.parametrize(
    "settings",
    [
        {"arch": "modern"}, slow({}), slow({"dtype": "bfloat16"}), slow({"micro_batch": "1", "recompute": True}),
        slow({"batch_ramp": 500, "steps": 8}),
    ],
    ids=str,
)  # fmt: skip
def test_a_run_learns_the_same(text: Path, disguise: Disguise, settings: dict[str, Any]) -> None:
    here, heard_here = train("cpu", eval_every=2, **settings)
    with disguise():
        there, heard_there = train("cuda", eval_every=2, **settings)
    rounding = ROUNDING[settings.get("dtype", "float32")]
    assert losses(heard_there) == pytest.approx(losses(heard_here), abs=rounding)
    assert there.val_loss == pytest.approx(here.val_loss, abs=rounding)


@pytest.mark.slow
def test_float16_finds_its_scale_and_follows_float32(text: Path, disguise: Disguise) -> None:
    """The first steps are left out, until the scale of the loss is small enough: the loss stays what it was. The trial
    of compiled code leaves nothing in the scaler that the first step would stumble over."""
    with disguise():
        _, half = train("cuda", dtype="float16", steps=8)
        _, whole = train("cuda", steps=8)
        with mock.patch.object(torch, "compile", lambda code, **how: code):
            _, compiled = train("cuda", dtype="float16", compile="on", steps=8)
    assert all(map(math.isfinite, losses(half)))
    assert losses(half)[0] == pytest.approx(losses(whole)[0], abs=ROUNDING["float16"])
    assert losses(half)[-1] < losses(half)[0]
    assert losses(compiled) == pytest.approx(losses(half), abs=1e-3)


@pytest.mark.slow
def test_logits_in_chunks_give_the_same(text: Path, disguise: Disguise, monkeypatch: pytest.MonkeyPatch) -> None:
    _, here = train("cpu")
    monkeypatch.setattr("gpt.training.recipe.in_chunks", lambda model, setup, memory: replace(setup, loss_chunk=64))
    with disguise():
        result, there = train("cuda", micro_batch="4")
    assert json.loads((result.run / "run.json").read_text())["resolved"]["loss_chunk"] == 64
    assert losses(there) == pytest.approx(losses(here), abs=1e-5)


@pytest.mark.slow
def test_a_run_goes_back_where_its_loss_explodes(
    text: Path, disguise: Disguise, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the snapshot, which came by copies that do not wait. The step that was begun meanwhile, the eighth, is undone."""
    whole, calls = stepping.tied_cross_entropy, []

    def poisoned(*args: Any) -> Any:
        calls.append(1)
        return whole(*args) * (math.nan if 5 <= len(calls) <= 8 else 1)

    monkeypatch.setattr(stepping, "tied_cross_entropy", poisoned)
    with disguise():
        result, heard = train("cuda", steps=10, eval_every=4)
    (back,) = [each for each in heard if isinstance(each, events.RollbackEvent)]
    assert (back.step, back.failed_step, result.steps) == (4, 7, 10)
    told = [each.step for each in heard if isinstance(each, events.StepEvent)]
    assert told == [*range(1, 8), *range(5, 11)]
    assert all(map(math.isfinite, losses(heard)[-6:]))
    assert all(each.isfinite().all() for each in weights(result.run).values())


@pytest.mark.parametrize(
    ("first", "then", "optimizer"),
    [("cpu", "cuda", "muon"), slow("cuda", "cpu", "adamw"), slow("cuda", "cuda", "muon")],
)
def test_a_run_goes_on_elsewhere(text: Path, disguise: Disguise, first: str, then: str, optimizer: str) -> None:
    def on(device: str) -> Any:
        return disguise() if device == "cuda" else contextlib.nullcontext()

    def six_steps(first: str, then: str) -> dict[str, torch.Tensor]:
        with on(first):
            run = train(first, optimizer=optimizer)[0].run
        with on(then):
            assert gpt.resume(run, steps=6, device=then).steps == 6
        return weights(run)

    here = six_steps("cpu", "cpu")
    for name, there in six_steps(first, then).items():
        assert torch.allclose(there, here[name], atol=2e-4), name


@pytest.mark.slow
def test_adapters_learn_the_same(text: Path, disguise: Disguise) -> None:
    base = train("cpu", steps=1, out="base")[0].run
    settings: dict[str, Any] = {"init": str(base), "steps": 3, "lora_rank": 2, "dtype": "float32"}
    heard: dict[str, list[Any]] = {"cpu": [], "cuda": []}
    gpt.train("book.txt", listen=heard["cpu"].append, device="cpu", **settings)
    with disguise():
        gpt.train("book.txt", listen=heard["cuda"].append, device="cuda", **settings)
    assert losses(heard["cuda"]) == pytest.approx(losses(heard["cpu"]), abs=1e-5)


@pytest.mark.slow
def test_pairs_learn_the_same(workdir: Path, disguise: Disguise) -> None:
    lines = [json.dumps({"prompt": f"{n} plus one is ", "completion": f"{n + 1}"}) for n in range(40)]
    Path("book.txt").write_text("\n".join(lines) + "\n")
    settings: dict[str, Any] = {"pairs": True, "batch_tokens": 256}
    _, here = train("cpu", **settings)
    with disguise():
        _, there = train("cuda", **settings)
    assert losses(there) == pytest.approx(losses(here), abs=1e-5)


def test_a_step_on_the_second_device(disguise: Disguise) -> None:
    """Its loss is waited for there, and not on the device that is current."""
    here = stepper(torch.device("cpu"))
    with disguise(2):
        there = stepper(torch.device("cuda:1"))
        ids = np.zeros((4, 16), np.int64)
        assert torch.cuda.current_device() == 0
        assert there.step(ids, ids, 0.01).read() == pytest.approx(here.step(ids, ids, 0.01).read(), abs=1e-5)


def stepper(device: torch.device) -> Stepper:
    asked = gpt.TrainConfig(
        preset="nano", n_layer=2, n_head=2, n_embd=32, block_size=16, batch_tokens=64, micro_batch="2", steps=3,
        compile="off", dropout=0.0,
    )  # fmt: skip
    compute = Compute(device, torch.float32)
    recipe = resolve(asked, compute, 10**6, 10**5, 101, False, lambda note: None)
    torch.manual_seed(0)
    model = GPT(recipe.model).to(device)
    optimizer = make_optimizer(model, recipe.optimizer, 0.1, torch.float32)
    return Stepper(Single(model, optimizer, compute), recipe, lambda n: None)


def test_windows_of_a_batch_are_uploaded_without_a_wait(disguise: Disguise) -> None:
    """Inputs and targets are views of one array, a column apart."""
    with disguise() as device:
        waits = len(device.waits)
        x = upload(np.arange(12).reshape(3, 4)[:, :-1], torch.device("cuda"))
        assert len(device.waits) == waits
        assert x.cpu().tolist() == [[0, 1, 2], [4, 5, 6], [8, 9, 10]]


@pytest.mark.slow
def test_a_lost_device_ends_a_run_with_one_line(text: Path, disguise: Disguise, gpt: Gpt) -> None:
    """Its last checkpoint is whole, and the run goes on from there."""
    words = "train book.txt -o run --tokenizer bytes --preset nano --n-layer 1 --block-size 16 --batch-tokens 64 "
    words += "--save-every 2 --eval-every 2 --dtype float32 --compile off --device cuda --sample-every 0 --steps"
    with disguise() as device:
        lose = partial(setattr, device, "lost", LOST)
        with mock.patch("gpt.training.journal.Journal.saved", lambda journal, step: lose() if step == 4 else None):
            done = gpt(*words.split(), "9")
        assert device.lost
    assert (done.code, done.out) == (1, "")
    assert done.err.splitlines()[-2:] == [
        "error: the device cuda failed: CUDA error: an illegal memory access was encountered",
        "hint: resume with: gpt train --resume run",
    ]
    with disguise():
        assert gpt("train", "--resume", "run", "--quiet").code == 0
    assert (folder.find_checkpoint("run:latest")).name == folder.step_name(9)


def test_a_library_without_memory_is_no_lost_device() -> None:
    full = RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")
    assert is_out_of_memory(full)
    assert device_failure(full) is None
    assert device_failure(RuntimeError(LOST)) == LOST.splitlines()[0]


LOST = """CUDA error: an illegal memory access was encountered
CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be incorrect.
For debugging consider passing CUDA_LAUNCH_BLOCKING=1
"""
