"""Learning from teachers: the gradient is that of the mixed loss, and the loss shown is still that of the text."""

import json
import signal
import sys
import weakref
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import (
    FAST,
    Gpt,
    assert_same,
    curve,
    facts,
    one_line_of_what_and_what_next,
    resolved,
    send,
    train,
)
from models import CPU, loud, save, tiny_model, trace_without_compiling
from safetensors.torch import load_file

import gpt as library
from gpt.config import events
from gpt.config.model import Arch, GPTConfig
from gpt.config.train import TrainConfig
from gpt.corpus.batches import Batches
from gpt.insight import report
from gpt.model.loss import IGNORED, decode_probabilities, encode_probabilities, tied_cross_entropy
from gpt.model.memory import Setup, count_step_memory
from gpt.parallel.world import World
from gpt.runs import folder
from gpt.system import programs
from gpt.system.errors import Interrupted, UserError
from gpt.system.interrupt import StopSignal
from gpt.training import loop, recipe
from gpt.training.context import Session
from gpt.training.optim import make_optimizer
from gpt.training.step import Stepper
from gpt.training.strategy import Single, make_strategy
from gpt.training.teachers import TaughtBatches, read_text


@pytest.mark.filterwarnings("default")  # Compiler warnings are not errors here.
@pytest.mark.parametrize(("chunk", "compiled", "padded"), [(0, False, False), (4, False, True), (4, True, True)])
def test_gradients_match_autograd(chunk: int, compiled: bool, padded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(3)
    leaves = [torch.randn(shape, dtype=torch.float64).requires_grad_() for shape in ((2, 5, 4), (11, 4))]
    codes = encode_probabilities(torch.randn(2, 5, 11).mul(2).softmax(-1))
    targets = torch.randint(11, (2, 5))
    targets[1, 2] = IGNORED
    monkeypatch.setattr("gpt.model.memory.ALIGNED_ON", ("cpu",) if padded else ())
    torch._dynamo.reset()
    loss = torch.compile(tied_cross_entropy, backend="aot_eager", fullgraph=True) if compiled else tied_cross_entropy
    total = loss(*leaves, targets, chunk, codes)
    torch.testing.assert_close(total, tied_cross_entropy(*leaves, targets, chunk))
    log_p, counted = (leaves[0] @ leaves[1].t()).log_softmax(-1), targets != IGNORED
    text = F.nll_loss(log_p.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")
    q = decode_probabilities(codes.flatten(0, 1)).view(codes.shape)
    mixed = 0.2 * text - 0.8 * (q * log_p).sum(-1)[counted].sum()  # The definition.
    expected = torch.autograd.grad(mixed / 7, leaves)
    for pair in zip(torch.autograd.grad(total / 7, leaves), expected, strict=True):
        torch.testing.assert_close(*pair, atol=1e-7, rtol=1e-6)


def add_gradients(stepper: Stepper, *batch: torch.Tensor) -> torch.Tensor:
    """Adds the gradients of a batch of two micro-batches. Returns the mean loss."""
    n_targets = torch.tensor(batch[1].numel())
    parts = [[tensor[rows] for tensor in batch] for rows in (slice(0, 2), slice(2, 4))]
    return torch.stack([stepper.backward(x, y, n_targets, lesson) for x, y, *lesson in parts]).sum()


class Ids(list[int]):
    """A ring of ids in memory."""

    def take(self, start: int, length: int) -> Any:
        return np.array([self[(start + i) % len(self)] for i in range(length)])


@pytest.mark.parametrize("T", [7, 8])
def test_teachers_read_each_id_with_half_a_window_of_context(T: int, workdir: Path) -> None:
    configs = [GPTConfig.of(arch, 257, 8, 1, 2, 16, dropout=0.5) for arch in ("gpt2", "modern")]
    paths = [save(Path(f"teacher-{seed}"), loud(config, seed)) for seed, config in enumerate(configs)]
    ids, reports = np.random.default_rng(0).integers(257, size=45), list[Any]()
    batches = Batches(Ids(ids), T, 3, seed=4)
    stop = StopSignal()
    read = partial(read_text, paths, batches, CPU, None, Session(World(), stop, reports.append, 0.0))
    taught = read()
    assert taught is not None
    assert [(reports[i].done, reports[i].total) for i in (0, -1)] == [(0, 45), (45, 45)]
    probabilities = decode_probabilities(torch.from_numpy(taught.codes))
    models, stride = [library.load(path).model for path in paths], -(-T // 2)
    for position in range(45):
        start = max(s for s in range(0, 45, stride) if T - stride <= (position - s) % 45 < T)
        window = torch.tensor([[ids[(start + i) % 45] for i in range((position - start) % 45 + 1)]])
        with torch.no_grad():
            expected = sum(model(window)[0, -1].softmax(-1) for model in models) / 2
        torch.testing.assert_close(probabilities[position], expected, atol=5e-3, rtol=0)
    x, y, codes = taught.global_batch(1)
    plain_x, plain_y = batches.global_batch(1)
    assert np.array_equal(x, plain_x)
    assert np.array_equal(y, plain_y)
    for start, row in zip(batches.starts(1), codes, strict=True):
        assert np.array_equal(row, taught.codes[(start + np.arange(T)) % 45])
    stop.signum = signal.SIGTERM
    assert read() is None


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(("arch", "traced"), [("gpt2", False), ("gpt2", True), ("modern", True)])
def test_steps_learn_from_read_probabilities(arch: Arch, traced: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "find", trace_without_compiling)
    model = loud(GPTConfig.of(arch, 257, 16, 2, 2, 16), 7).train()
    strategy = Single(model, make_optimizer(model, "muon", 0.1), CPU)
    codes = encode_probabilities(torch.randn(100, 257).mul(2).softmax(-1)).numpy()
    settings = {"batch_tokens": 64, "micro_batch": "2", "block_size": 16, "teachers": 1}
    plan = recipe.plan(TrainConfig(**settings), facts(vocab_size=257))
    stepper = Stepper(strategy, plan)
    if traced:
        assert stepper.compile() is None
        assert stepper.program is not None
    batches = TaughtBatches(Batches(Ids(np.random.default_rng(0).integers(257, size=100)), 16, 4, seed=4), codes)
    x, y, codes = map(torch.from_numpy, batches.global_batch(0))
    loss = add_gradients(stepper, x, y, codes)
    gradients = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    log_p, q = model(x).log_softmax(-1), decode_probabilities(codes)
    text = F.nll_loss(log_p.flatten(0, 1), y.flatten())
    (text * 0.2 - 0.8 * (q * log_p).sum(-1).mean()).backward()
    assert loss.item() == pytest.approx(text.item(), rel=1e-5)
    for name, p in model.named_parameters():
        torch.testing.assert_close(gradients[name], p.grad, atol=1e-5, rtol=1e-3, msg=name)


def test_codes_keep_probabilities_to_the_third_digit() -> None:
    q = torch.randn(50, 1000).mul(3).softmax(-1)
    torch.testing.assert_close(decode_probabilities(encode_probabilities(q)), q, atol=4e-3, rtol=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--init", "x"], "--teachers cannot be combined with --init"),
        (["--pairs"], "--teachers cannot be combined with --pairs"),
        (["--chat"], "--teachers cannot be combined with --chat"),
        (["--tokenizer", "bytes", "--batch-tokens", "1048576"], "GB for the text and 0.27 GB for a step"),
    ],
)
def test_unsuitable_runs_have_no_teachers(
    options: list[str], message: str, gpt: Gpt, workdir: Path, text: Path
) -> None:
    one_line_of_what_and_what_next(gpt("train", text, "--teachers", "2", *options), message)
    assert not Path("runs").exists()
    with pytest.raises(UserError, match="with 9,000 ids, teachers would need 1.3 GB"):
        resolved(vocab_size=9000, teachers=1)


def test_memory_of_teachers_is_planned() -> None:
    config = tiny_model().config
    alone, taught = (count_step_memory(config, Setup(8, is_taught=is_taught)).logits for is_taught in (False, True))
    assert taught >= alone + 8 * config.block_size * config.vocab_size * 4
    known = facts(vocab_size=257, device="cuda", memory=300 * 10**9, host_memory=2**40)
    huge = resolved(preset="gpt3-13b", vocab_size=257, teachers=8, steps=8, batch_tokens=2**16)
    with pytest.raises(UserError, match=r"\(weights, gradients, optimizer state, teachers\), but only"):
        recipe.check_model(huge, known)
    recipe.check_model(replace(huge, own_teachers=None), known)


OWN: dict[str, Any] = {"steps": 12, "eval_every": 2, "save_every": 2, "dropout": 0.1, "teachers": 2, "arch": "modern"}


def interrupt_after(steps: int, work: Any) -> None:
    """Sends SIGINT at the event of this many steps."""
    left = [steps]

    def on_event(event: Any) -> None:
        left[0] -= isinstance(event, events.StepEvent)
        if isinstance(event, events.StepEvent) and left[0] == 0:
            send(signal.SIGINT)

    with pytest.raises(Interrupted, match=r"resume with: gpt train --resume parts$"):
        work(listen=on_event)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGINT to send")
def test_own_teachers_and_resume_in_and_between_cycles(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two teachers take 3 of 12 steps each, and the model takes 6. The second teacher starts with the weights of the
    first. The memory of each is free before the next."""
    parameters, starts = list[weakref.ref[Any]](), list[torch.Tensor]()

    def make(*args: Any) -> Any:
        assert all(parameter() is None for parameter in parameters)
        strategy = make_strategy(*args)
        parameters.extend(map(weakref.ref, strategy.model.parameters()))
        starts.append(strategy.model.wte.weight.detach().clone())
        return strategy

    with monkeypatch.context() as patch:
        patch.setattr(loop, "make_strategy", make)
        whole, run_events = train(text, out="whole", **OWN)
    plans = [(event.phase, event.steps) for event in run_events if isinstance(event, events.Plan)]
    assert plans == [("teacher 1 of 2", 12), ("teacher 2 of 2", 12), ("pupil", 12)]
    assert whole.steps == 12
    assert [entry.step for entry in folder.checkpoints(whole.run)] == [10, 12]
    assert [step.step for step in report.read_history(whole.run).steps] == [*range(7, 13)]
    assert not list(Path("whole/teachers").rglob("training.*"))
    first, second = teacher_weights("whole")
    assert torch.equal(starts[1], first["model.embed_tokens.weight"])
    assert not any(torch.equal(starts[2], each["model.embed_tokens.weight"]) for each in (first, second))
    interrupt_after(2, partial(train_quietly, text, out="parts", **OWN))
    assert library.load("parts").path == Path("parts/step-000002")
    for steps in (1, 3, 2):
        interrupt_after(steps, partial(library.resume, "parts"))
    kills = {
        "before keeping": "loop.keep_teacher",
        "kept": "loop.read_text",
        "reading": "teachers.encode_probabilities",
    }
    for run, place in kills.items():
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(f"gpt.training.{place}", Mock(side_effect=KeyboardInterrupt))
            train_quietly(text, lambda event: None, out=run, **OWN)
    for run in ("parts", *kills):
        result = library.resume(run)
        assert (result.val_loss, result.sample) == (whole.val_loss, whole.sample)
        assert_same(Path(run), Path("whole"))
        assert curve(Path(run)) == curve(Path("whole"))
        for actual, expected in zip(teacher_weights(run), (first, second), strict=True):
            assert all(torch.equal(tensor, expected[name]) for name, tensor in actual.items())


def teacher_weights(run: str) -> list[dict[str, torch.Tensor]]:
    return [load_file(f"{run}/teachers/{number}/model.safetensors") for number in (1, 2)]


def train_quietly(text: Path, listen: Any, **settings: Any) -> None:
    library.train(text, listen=listen, **{**FAST, **settings})


def test_command_with_own_teachers_prints_one_result(text: Path, gpt: Gpt) -> None:
    small = ["--n-layer", "1", "--n-head", "2", "--n-embd", "16", "--block-size", "16", "--batch-tokens", "64"]
    done = gpt("train", text, "-o", "x", "--teachers", "2", "--steps", "8", "--json", *small)
    assert done.code == 0, done.err
    assert Path(json.loads(done.out)["run"]) == Path("x")
    assert "the teachers have a weight of 0.8 in the loss" in done.err
