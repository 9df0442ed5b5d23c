"""Training steps: skipped steps, late losses, compiled code, growing batches."""

import copy
import json
import math
from pathlib import Path
from typing import Any, Literal
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from conftest import facts, losses, resolved, slow, train, weights
from models import CPU, tiny_model, tiny_stepper, trace_without_compiling

import gpt
from gpt.config import events
from gpt.config.device import Compute, Download
from gpt.config.model import PRESETS
from gpt.config.train import TrainConfig
from gpt.model import memory
from gpt.model.decoder import GPT
from gpt.model.loss import IGNORED
from gpt.system import programs
from gpt.system.errors import Interrupted, UserError
from gpt.training import recipe
from gpt.training import step as stepping
from gpt.training.cpu_step import GradientProgram
from gpt.training.evaluation import EVAL_TOKENS, windows_to_evaluate
from gpt.training.optim import make_optimizer
from gpt.training.state import Snapshot, TrainState
from gpt.training.strategy import Single


@pytest.mark.parametrize("kind", ["muon", "adamw"])
def test_skipped_step_changes_nothing(kind: Literal["muon", "adamw"]) -> None:
    torch.manual_seed(0)
    model = GPT(gpt.GPTConfig(50, 8, 2, 2, 16))
    optimizer = make_optimizer(model, kind, 0.1)
    optimizer.set_lr(0.1)

    def step(value: float, skip: bool) -> None:
        for n, p in enumerate(model.parameters()):
            p.grad = torch.full_like(p, value * (n + 1)) + torch.linspace(0, 1, p.numel()).view_as(p)
        optimizer.step(torch.tensor(skip))

    step(1.0, False)
    before = copy.deepcopy([model.state_dict(), *(part.state_dict() for part in optimizer.optimizers)])
    step(math.nan, True)
    after = [model.state_dict(), *(part.state_dict() for part in optimizer.optimizers)]
    assert str(before) == str(after)
    assert all(torch.equal(before[0][name], after[0][name]) for name in before[0])
    step(2.0, False)
    assert not torch.equal(before[0]["h.0.mlp.c_fc.weight"], model.h[0].mlp.c_fc.weight)  # type: ignore[union-attr]
    assert all(p.isfinite().all() for p in model.parameters())


def test_snapshot_restores_the_loss_scale() -> None:
    model = GPT(gpt.GPTConfig(50, 8, 1, 1, 8))
    optimizer, scaler = make_optimizer(model, "adamw", 0.1), torch.amp.GradScaler("cpu", init_scale=8.0)
    strategy = Single(model, optimizer, Compute(torch.device("cpu"), torch.float32))
    scaler.scale(torch.ones(()))
    snapshot = Snapshot()
    snapshot.take(strategy, scaler, TrainState(step=3))
    for p in model.parameters():
        p.grad = torch.full_like(p, math.inf)
    for part in optimizer.optimizers:
        scaler.unscale_(part)
    scaler.update()
    assert scaler.get_scale() == 4.0
    assert snapshot.restore(strategy, scaler).step == 3
    assert scaler.get_scale() == 8.0


class LateDownload(Download):
    """Simulates a download whose values arrive when `read` is called."""

    def __init__(self, *values: torch.Tensor) -> None:
        super().__init__(*values)
        self.arrived = Mock()

    def read(self, wait: Any = None) -> list[Any]:
        self.arrived = None
        return super().read()


def test_late_downloads_do_not_change_events_or_weights(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"steps": 20, "eval_every": 6, "save_every": 4, "sample_every": 7, "dropout": 0.1}
    immediate, immediate_events = train(text, **settings)
    monkeypatch.setattr(stepping, "Download", LateDownload)
    late, late_events = train(text, **settings)
    timed = events.SaveEvent, events.FrameEvent  # Saves run in a thread, and frames are made if there is time.
    immediate_kinds, late_kinds = (
        [(type(event), getattr(event, "step", 0)) for event in run_events if not isinstance(event, timed)]
        for run_events in (immediate_events, late_events)
    )
    assert immediate_kinds == late_kinds
    assert losses(immediate_events) == losses(late_events)
    assert all(torch.equal(tensor, weights(late.run)[name]) for name, tensor in weights(immediate.run).items())


@pytest.mark.filterwarnings("default")  # Compiler warnings are not errors here.
def test_compiled_steps_match_up_to_rounding(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The traced graph runs uncompiled, because compiling takes half a minute."""
    settings = {"steps": 6, "sample_every": 3, "eval_every": 3, "dropout": 0.1, "micro_batch": "8"}
    _, uncompiled_events = train(text, **settings)
    monkeypatch.setattr(programs, "find", trace_without_compiling)
    _, compiled_events = train(text, **settings, compile="on")
    assert losses(compiled_events) == pytest.approx(losses(uncompiled_events), rel=1e-4)
    notes = [event.text for event in compiled_events if isinstance(event, events.Note)]
    assert any(note.startswith("compiled in") for note in notes), notes


def test_each_shape_and_dtype_has_a_separate_program(monkeypatch: pytest.MonkeyPatch) -> None:
    digests: list[str] = []
    monkeypatch.setattr(programs, "find", lambda key, *_: digests.append(programs.digest(key)))

    def add_program(
        rows: int = 4, dtype: torch.dtype = torch.bfloat16, separator: int | None = None, **shape: Any
    ) -> None:
        defaults = {"vocab_size": 50, "block_size": 8, "n_layer": 1, "n_head": 2, "n_embd": 16}
        model = GPT(gpt.GPTConfig(**{**defaults, **shape}))
        compute = Compute(torch.device("cpu"), dtype)
        GradientProgram(stepping.Objective(model, 0, separator), model, compute, rows, lambda text: None)

    add_program()
    add_program()
    assert digests[0] == digests[1]
    add_program(rows=2)
    add_program(dtype=torch.float32)
    add_program(separator=1)
    shapes = {"vocab_size": 51, "block_size": 4, "n_layer": 2, "n_head": 1, "n_embd": 32, "dropout": 0.1}
    for name, value in shapes.items():
        add_program(**{name: value})
    assert len(set(digests)) == len(digests) - 1


@pytest.mark.parametrize(
    ("lengths", "micro_batch", "parts"),
    [
        ([100, 100, 100], 2, [(0, 2, 128), (2, 3, 128)]),
        ([100, 90, 60, 40, 20, 19], 6, [(0, 3, 128), (3, 5, 64), (5, 6, 32)]),
        ([100, 90, 60, 40, 20, 19], 2, [(0, 2, 128), (2, 4, 64), (4, 6, 32)]),
    ],
)
def test_micro_batches_have_rows_of_similar_lengths(
    lengths: list[int], micro_batch: int, parts: list[tuple[int, int, int]]
) -> None:
    stepper = tiny_stepper(CPU)
    stepper.micro_batch = micro_batch
    for y in (np.full((len(lengths), 100), IGNORED), np.full((len(lengths), 2, 100), IGNORED)):
        for row, length in enumerate(lengths):
            y[row, ..., length // 2 : length] = 1
        assert stepper.split(y) == [(slice(start, end), length) for start, end, length in parts]


@pytest.mark.parametrize("recomputes", [False, True])
def test_short_documents_are_trained_as_if_alone(recomputes: bool) -> None:
    model = tiny_model(positions="rotary").train()
    model.recompute = recomputes
    documents = torch.tensor([[49, 1, 2, 3]]), torch.tensor([[49, 4, 5]])
    packed = model.trunk(torch.cat(documents, 1), separator=49)
    alone = torch.cat([model.trunk(ids) for ids in documents], 1)
    assert torch.allclose(packed, alone, atol=1e-5)
    for arch, count, separator in [("modern", 10_000, 7), ("gpt2", 10_000, None), ("modern", 1000, None)]:
        plan = recipe.plan(TrainConfig(arch=arch, block_size=64), facts(separator=7, documents=count))
        assert plan.separator == separator


def test_signal_during_compilation_interrupts_the_run(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any) -> Any:
        try:
            raise Interrupted(15, "interrupted before the first step")
        except Interrupted as error:  # Torch's compiler wraps exceptions.
            raise RuntimeError(f"Interrupted: {error}") from None

    monkeypatch.setattr(programs, "find", interrupt)
    with pytest.raises(Interrupted, match="the run was removed"):
        train(text, steps=6, compile="on", out="struck")
    assert not Path("struck").exists()


@pytest.mark.parametrize("compiles", [False, slow(True)])
def test_failed_compilation_falls_back_to_uncompiled_steps(
    text: Path, monkeypatch: pytest.MonkeyPatch, compiles: bool
) -> None:
    """The program fails to compile or to run. Its trial consumes dropout's random numbers."""

    def fail(*args: Any) -> Any:
        raise RuntimeError("no C++ compiler\nlong story")

    uncompiled, uncompiled_events = train(text, steps=6, dropout=0.1)
    monkeypatch.setattr(programs, "find", (lambda *args: fail) if compiles else fail)
    result, run_events = train(text, steps=6, compile="on", dropout=0.1)
    (warning,) = [event for event in run_events if isinstance(event, events.Note) and event.warning]
    assert warning.text == "steps are not compiled: no C++ compiler"
    assert losses(run_events) == losses(uncompiled_events)
    assert json.loads((result.run / "run.json").read_text())["resolved"]["compile"] is False
    assert all(torch.equal(tensor, weights(result.run)[name]) for name, tensor in weights(uncompiled.run).items())


def test_micro_batch_of_a_failing_program_is_recomputed_uncompiled(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiled program that runs out of memory raises this error."""
    settings = {"steps": 6, "dropout": 0.1, "micro_batch": "8", "save_every": 3}
    _, uncompiled_events = train(text, **settings)
    calls = 0

    def find_failing_program(*args: Any) -> programs.Program:
        program = trace_without_compiling(*args)

        def run(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
            nonlocal calls
            calls += 1
            if calls > 6:  # The program fails in the middle of a batch.
                raise RuntimeError("API call failed\nsomewhere")
            return program(tensors)

        return run

    monkeypatch.setattr(programs, "find", find_failing_program)
    result, run_events = train(text, **settings, compile="on")
    assert calls == 7
    (warning,) = [event for event in run_events if isinstance(event, events.Note) and event.warning]
    assert warning.text.startswith("from now on, steps are not compiled")
    assert warning.text.endswith("bit for bit: API call failed")
    assert losses(run_events) == pytest.approx(losses(uncompiled_events), rel=1e-4)
    assert json.loads((result.run / "run.json").read_text())["resolved"]["compile"] is False


@pytest.mark.slow
def test_resume_warns_when_compilation_is_lost(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "find", trace_without_compiling)
    first_part, _ = train(text, steps=3, compile="on")

    def fail(*_: Any) -> Any:
        raise OSError("there is no g++")

    monkeypatch.setattr(programs, "find", fail)
    run_events: list[Any] = []
    gpt.resume(first_part.run, run_events.append, steps=6)
    (warning,) = [event for event in run_events if isinstance(event, events.Note) and event.warning]
    assert warning.text.startswith("from now on, steps are not compiled")


def test_large_logits_are_computed_in_chunks(text: Path) -> None:
    assert resolved().loss_chunk == 0
    huge = resolved(preset="gpt2", vocab_size=2**24, n_tokens=10**9, n_layer=1, n_embd=16, n_head=1)
    assert huge.micro_batch == 1
    assert 128 <= huge.loss_chunk < 1024
    chunks = [memory.positions_at_once(2**20, 1024, 0, device) for device in ("cpu", "mps", "cuda")]
    assert chunks[0] == chunks[1] < chunks[2]  # The plan counts MPS as a CPU.


def test_huge_step_counts_resolve_immediately(text: Path) -> None:
    """Schedules are computed on demand."""
    small = {"n_layer": 1, "n_head": 1, "n_embd": 8, "block_size": 8, "batch_tokens": 64}
    maxima = dict.fromkeys(("eval_every", "save_every", "warmup", "decay", "patience", "sample_every"), 2**53)
    resolved(steps=2**53, **maxima, **small)
    with pytest.raises(UserError, match=r"^1e\+15 epochs are 15,625,000,000,000,000,000 steps; the limit is 9,007,199"):
        resolved(epochs=1e15, n_tokens=10**6, **small)
    with pytest.raises(UserError, match="^minutes is 1e\\+300; it must be between 0 and 10,000,000"):
        TrainConfig(minutes=1e300)


def test_pairs_are_evaluated_on_as_many_tokens_as_text() -> None:
    """Pairs of 105 tokens in a context of 1,024."""
    base = PRESETS["gpt2"].model
    known = facts(bytes=400_000, tokens=105_000, vocab_size=50_257, base=base, rows=1000)
    planned = recipe.plan(TrainConfig(init="base", pairs=True), known)
    assert planned.model.block_size == 1024
    assert windows_to_evaluate(planned) == EVAL_TOKENS[0] // 105


def test_too_little_memory_is_refused_before_allocation() -> None:
    known = facts(memory=2**33, host_memory=2**33)
    small = {"n_layer": 1, "n_head": 1, "n_embd": 8, "block_size": 8}
    with pytest.raises(UserError, match=r"the ids of a step of 1,073,741,824 tokens take 51.5 GB, .* has 8.6 GB"):
        recipe.plan(TrainConfig(batch_tokens=2**30, **small), known)
    recipe.plan(TrainConfig(batch_tokens=2**26, **small), known)
    with pytest.raises(UserError, match=r"parameters take [\d,.]+ GB in training .* only 8.6 GB"):
        recipe.check_model(resolved(n_layer=2**14), known)
    recipe.check_model(resolved(), known)
    gpu = facts(device="cuda", memory=2**50, host_memory=2**22)
    with pytest.raises(UserError, match=r"checkpoints take [\d.,]+ GB of host memory, but only 0.0 GB"):
        recipe.check_model(resolved(), gpu)
    recipe.check_model(resolved(), facts(device="cuda", memory=2**50))
    taught, known = resolved(teachers=1), facts(tokens=2**20, device="cuda", memory=2**50, host_memory=2**30)
    with pytest.raises(UserError, match=r"checkpoints and probabilities of teachers take 1\.\d GB of host memory"):
        recipe.check_model(taught, known)
