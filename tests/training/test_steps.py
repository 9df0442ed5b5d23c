"""A step by itself: left out where its gradient is no number, told one later on a GPU, compiled, of a growing batch."""

import copy
import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal
from unittest.mock import Mock

import pytest
import torch
from conftest import losses, resolved, slow, train, weights

import gpt
from gpt import events, programs
from gpt.config import TrainConfig
from gpt.device import Compute, Download
from gpt.errors import Interrupted, UserError
from gpt.model.decoder import GPT
from gpt.training import recipe
from gpt.training import step as stepping
from gpt.training.native import GradientProgram
from gpt.training.optim import make_optimizer
from gpt.training.parallel import Single
from gpt.training.state import Snapshot, TrainState


@pytest.mark.parametrize("kind", ["muon", "adamw"])
def test_a_step_that_is_left_out_changes_nothing(kind: Literal["muon", "adamw"]) -> None:
    torch.manual_seed(0)
    model = GPT(gpt.GPTConfig(50, 8, 2, 2, 16))
    optimizer = make_optimizer(model, kind, 0.1)
    optimizer.set_lr(0.1)

    def step(value: float, unless: bool) -> None:
        for n, p in enumerate(model.parameters()):
            p.grad = torch.full_like(p, value * (n + 1)) + torch.linspace(0, 1, p.numel()).view_as(p)
        optimizer.step(torch.tensor(unless))

    step(1.0, False)
    before = copy.deepcopy([model.state_dict(), *(part.state_dict() for part in optimizer.optimizers)])
    step(math.nan, True)
    after = [model.state_dict(), *(part.state_dict() for part in optimizer.optimizers)]
    assert str(before) == str(after)
    assert all(torch.equal(before[0][name], after[0][name]) for name in before[0])
    step(2.0, False)
    assert not torch.equal(before[0]["h.0.mlp.c_fc.weight"], model.h[0].mlp.c_fc.weight)  # type: ignore[union-attr]
    assert all(p.isfinite().all() for p in model.parameters())


def test_a_snapshot_remembers_the_scale_of_the_loss() -> None:
    """As a run in float16 has it."""
    model = GPT(gpt.GPTConfig(50, 8, 1, 1, 8))
    optimizer, scaler = make_optimizer(model, "adamw", 0.1), torch.amp.GradScaler("cpu", init_scale=8.0)
    parallel = Single(model, optimizer, Compute(torch.device("cpu"), torch.float32))
    scaler.scale(torch.ones(()))
    snapshot = Snapshot()
    snapshot.take(parallel, scaler, TrainState(step=3))
    for p in model.parameters():
        p.grad = torch.full_like(p, math.inf)
    for part in optimizer.optimizers:
        scaler.unscale_(part)
    scaler.update()
    assert scaler.get_scale() == 4.0
    assert snapshot.restore(parallel, scaler).step == 3
    assert scaler.get_scale() == 8.0


class Late(Download):
    """As from a GPU: what a step came to is there once its event is waited for."""

    def __init__(self, *values: torch.Tensor) -> None:
        super().__init__(*values)
        self.arrived = Mock()

    def read(self, wait: Any = None) -> list[Any]:
        self.arrived = None
        return super().read()


def test_steps_told_one_later_are_the_same(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"steps": 20, "eval_every": 6, "save_every": 4, "sample_every": 7, "dropout": 0.1}
    at_once, heard = train(text, **settings)
    monkeypatch.setattr(stepping, "Download", Late)
    later, heard_later = train(text, **settings)
    told, told_later = (
        [(type(e), getattr(e, "step", 0)) for e in each if not isinstance(e, events.SaveEvent)]
        for each in (heard, heard_later)  # but saves, which are by a thread, at any time
    )
    assert told == told_later
    assert losses(heard) == losses(heard_later)
    assert all(torch.equal(one, weights(later.run)[name]) for name, one in weights(at_once.run).items())


def interpreted(key: object, trace: Any, note: Any, what: str) -> programs.Program:
    """The program of a step as a graph, which no compiler has seen."""
    graph, _ = trace()
    return lambda tensors: list(graph(*tensors))


@pytest.mark.filterwarnings("default")  # the compiler warns of its own doings
def test_compiled_steps_are_the_same_to_rounding(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a backend that compiles nothing, since that takes half a minute: what is tested is what is handed over."""
    settings = {"steps": 6, "sample_every": 3, "eval_every": 3, "dropout": 0.1, "micro_batch": "8"}
    _, plain = train(text, **settings)
    monkeypatch.setattr(programs, "find", interpreted)
    _, compiled = train(text, **settings, compile="on")
    assert losses(compiled) == pytest.approx(losses(plain), rel=1e-4)
    said = [event.text for event in compiled if isinstance(event, events.Note)]
    assert any(line.startswith("compiled in") for line in said), said


def test_a_step_has_a_program_for_each_shape_and_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[str] = []
    monkeypatch.setattr(programs, "find", lambda key, *_: found.append(programs.digest(key)))

    def look_for(rows: int = 4, dtype: torch.dtype = torch.bfloat16, **shape: Any) -> None:
        usual = {"vocab_size": 50, "block_size": 8, "n_layer": 1, "n_head": 2, "n_embd": 16}
        model = GPT(gpt.GPTConfig(**{**usual, **shape}))
        compute = Compute(torch.device("cpu"), dtype)
        GradientProgram(stepping.Objective(model, 0), model, compute, rows, lambda text: None)

    look_for()
    look_for()
    assert found[0] == found[1]
    look_for(rows=2)
    look_for(dtype=torch.float32)
    shapes = {"vocab_size": 51, "block_size": 4, "n_layer": 2, "n_head": 1, "n_embd": 32, "dropout": 0.1}
    for name, value in shapes.items():
        look_for(**{name: value})
    assert len(set(found)) == len(found) - 1


def test_a_signal_while_compiling_is_no_failure_of_it(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def struck(*_: Any) -> Any:
        try:
            raise Interrupted(15, "interrupted before the first step")
        except Interrupted as error:  # as torch's compiler puts it
            raise RuntimeError(f"Interrupted: {error}") from None

    monkeypatch.setattr(programs, "find", struck)
    with pytest.raises(Interrupted, match="the run was removed"):
        train(text, steps=6, compile="on", out="struck")
    assert not Path("struck").exists()


@pytest.mark.parametrize("made", [False, slow(True)])
def test_where_compiling_fails_the_run_goes_on(text: Path, monkeypatch: pytest.MonkeyPatch, made: bool) -> None:
    """Whether there is no program, or one that does not run. With dropout, whose random numbers the trial takes."""

    def broken(*args: Any) -> Any:
        raise RuntimeError("no C++ compiler\nlong story")

    plain, heard_plain = train(text, steps=6, dropout=0.1)
    monkeypatch.setattr(programs, "find", (lambda *args: broken) if made else broken)
    result, heard = train(text, steps=6, compile="on", dropout=0.1)
    (warning,) = [event for event in heard if isinstance(event, events.Note) and event.warning]
    assert warning.text == "steps are not compiled: no C++ compiler"
    assert losses(heard) == losses(heard_plain)
    assert json.loads((result.run / "run.json").read_text())["resolved"]["compile"] is False
    assert all(torch.equal(one, weights(result.run)[name]) for name, one in weights(plain.run).items())


def test_where_a_program_fails_later_its_batch_is_computed_without(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when memory runs out in it, which it does not say."""
    settings = {"steps": 6, "dropout": 0.1, "micro_batch": "8", "save_every": 3}
    _, heard_plain = train(text, **settings)
    calls = 0

    def failing(*given: Any) -> programs.Program:
        program = interpreted(*given)

        def run(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
            nonlocal calls
            calls += 1
            if calls > 6:  # in the middle of a batch
                raise RuntimeError("API call failed\nsomewhere")
            return program(tensors)

        return run

    monkeypatch.setattr(programs, "find", failing)
    result, heard = train(text, **settings, compile="on")
    assert calls == 7
    (warning,) = [event for event in heard if isinstance(event, events.Note) and event.warning]
    assert warning.text.startswith("from now on, steps are not compiled")
    assert warning.text.endswith("bit for bit: API call failed")
    assert losses(heard) == pytest.approx(losses(heard_plain), rel=1e-4)
    assert json.loads((result.run / "run.json").read_text())["resolved"]["compile"] is False


@pytest.mark.slow
def test_a_resumed_run_says_that_it_is_compiled_no_more(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "find", interpreted)
    begun, _ = train(text, steps=3, compile="on")

    def none(*_: Any) -> Any:
        raise OSError("there is no g++")

    monkeypatch.setattr(programs, "find", none)
    heard: list[Any] = []
    gpt.resume(begun.run, heard.append, steps=6)
    (warning,) = [event for event in heard if isinstance(event, events.Note) and event.warning]
    assert warning.text.startswith("from now on, steps are not compiled")


def test_gpt3s_recipe(text: Path) -> None:
    found = resolved(
        preset="gpt3-125m", n_tokens=10**12, epochs=0.3, schedule="cosine", warmup_tokens=375_000_000,
        batch_ramp=4_000_000_000, optimizer="adamw", micro_batch="16",
    )  # fmt: skip
    assert found.ramp is not None
    assert found.ramp.first * 2048 == 32_768
    assert found.tokens(found.steps) == pytest.approx(3e11, rel=1e-5)
    assert found.tokens(found.warmup) == pytest.approx(375e6, rel=1e-2)
    result, heard = train(text, epochs=2, batch_ramp=1500, warmup_tokens=500)
    told = [event for event in heard if isinstance(event, events.StepEvent)]
    grown = [b.tokens - a.tokens for a, b in pairwise(told)]
    assert told[0].tokens < 256  # the whole batch
    assert grown[-1] == 256
    assert grown == sorted(grown)
    assert result.tokens_seen == told[-1].tokens
    assert told[-1].tokens >= 2 * json.loads((result.run / "run.json").read_text())["tokens"]["train"]


def test_logits_in_chunks_where_they_do_not_fit(text: Path) -> None:
    assert resolved().loss_chunk == 0
    huge = resolved(preset="gpt2", vocab_size=2**24, n_tokens=10**9, n_layer=1, n_embd=16, n_head=1)
    assert huge.micro_batch == 1
    assert 128 <= huge.loss_chunk < 1024


def test_lengths_that_only_a_number_can_have(text: Path) -> None:
    """They are computed when they are needed, so that a run with them begins at once."""
    small = {"n_layer": 1, "n_head": 1, "n_embd": 8, "block_size": 8, "batch_tokens": 64}
    assert resolved(steps=10**12, **small).tokens(10**12) == 64 * 10**12
    assert resolved(steps=10**6, batch_ramp=2**53, **small).tokens(10**6) < 64 * 10**6
    most = dict.fromkeys(("eval_every", "save_every", "warmup", "decay", "patience", "sample_every"), 2**53)
    resolved(steps=2**53, warmup_tokens=None, **most, **small)
    with pytest.raises(UserError, match=r"^1e\+15 epochs are 15,625,000,000,000,000,000 steps; the limit is 9,007,199"):
        resolved(epochs=1e15, n_tokens=10**6, **small)
    with pytest.raises(UserError, match="^minutes is 1e\\+300; it must be between 0 and 10,000,000"):
        TrainConfig(minutes=1e300)


def test_what_the_machine_cannot_hold_is_refused_before_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = 8 * 2**30
    monkeypatch.setattr(recipe, "host_memory", lambda: memory)
    monkeypatch.setattr(Compute, "memory", lambda self: memory)
    small = {"n_layer": 1, "n_head": 1, "n_embd": 8, "block_size": 8}
    with pytest.raises(UserError, match=r"the ids of a step of 1,073,741,824 tokens take 51.5 GB, .* has 8.6 GB"):
        resolved(batch_tokens=2**30, **small)
    resolved(batch_tokens=2**26, **small)
    with pytest.raises(UserError, match=r"parameters take [\d,.]+ GB in training .* only 8.6 GB"):
        recipe.check_model(resolved(n_layer=2**14), Compute(torch.device("cpu"), torch.float32), 1)
    recipe.check_model(resolved(), Compute(torch.device("cpu"), torch.float32), 1)
    host, memory = 2**22, 2**50
    monkeypatch.setattr(recipe, "host_memory", lambda: host)
    with pytest.raises(UserError, match=r"host memory: [\d.,]+ GB, but only 0.0 GB"):
        recipe.check_model(resolved(), Compute(torch.device("cuda"), torch.float32), 1)
    host = memory
    recipe.check_model(resolved(), Compute(torch.device("cuda"), torch.float32), 1)
    with pytest.raises(UserError, match=r"too many sizes"):
        resolved(batch_tokens=2**25, batch_ramp=10**12, micro_batch="1", **{**small, "block_size": 1})
