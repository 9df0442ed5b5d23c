"""Learning from teachers: the gradient is that of the mixed loss, and the loss shown is still that of the text."""

import json
import shutil
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
    losses,
    one_line_of_what_and_what_next,
    resolved,
    send,
    train,
    weights,
)
from models import CPU, SHAPES, loud, save, tiny_model, trace_without_compiling
from ranks import copy_killed_run
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
from gpt.training.teachers import Teachers, find_teacher

PUPIL: dict[str, Any] = {"steps": 8, "save_every": 3, "eval_every": 4, "seed": 5}


def mixed_loss(
    logits: torch.Tensor, teacher_logits: list[torch.Tensor], targets: torch.Tensor, weight: float
) -> torch.Tensor:
    """The definition, in plain torch: summed over targets (N), for logits (N, V)."""
    log_p, counted = logits.log_softmax(-1), targets != IGNORED
    q = torch.zeros_like(log_p)
    for each in teacher_logits:
        n = min(each.size(-1), q.size(-1))
        q[:, :n] += each[:, :n].softmax(-1) / len(teacher_logits)
    text = F.nll_loss(log_p, targets, ignore_index=IGNORED, reduction="sum")
    return (1 - weight) * text - weight * (q * log_p).sum(-1)[counted].sum()


@pytest.mark.filterwarnings("default")  # Compiler warnings are not errors here.
@pytest.mark.parametrize("weight", [0.0, 0.7, 1.0])
@pytest.mark.parametrize(("chunk", "compiled", "padded"), [(0, False, False), (4, False, True), (4, True, True)])
def test_gradients_match_autograd(
    weight: float, chunk: int, compiled: bool, padded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Teachers have other widths and vocabularies than the pupil, whose ids are the first of each teacher's."""
    torch.manual_seed(3)
    random = partial(torch.randn, dtype=torch.float64)
    leaves = [random(2, 5, 4).requires_grad_(), random(11, 4).requires_grad_()]
    teachers = [random(2, 5, 3), random(11, 3), random(2, 5, 6), random(13, 6), random(2, 5, 3), random(9, 3)]
    targets = torch.randint(9, (2, 5))
    targets[1, 2] = IGNORED
    monkeypatch.setattr("gpt.model.memory.ALIGNED_ON", ("cpu",) if padded else ())
    torch._dynamo.reset()
    loss = torch.compile(tied_cross_entropy, backend="aot_eager", fullgraph=True) if compiled else tied_cross_entropy
    total = loss(*leaves, targets, chunk, weight, *teachers)
    plain = tied_cross_entropy(*leaves, targets, chunk)
    torch.testing.assert_close(total, plain)
    logits = (leaves[0] @ leaves[1].t()).flatten(0, 1)
    teacher_logits = [(h @ w.t()).flatten(0, 1) for h, w in zip(teachers[::2], teachers[1::2], strict=True)]
    expected = torch.autograd.grad(mixed_loss(logits, teacher_logits, targets.flatten(), weight) / 7, leaves)
    actual = torch.autograd.grad(total / 7, leaves)
    for pair in zip(actual, expected, strict=True):
        torch.testing.assert_close(*pair, atol=1e-14, rtol=1e-12)
    if weight == 0 and not compiled:
        assert all(map(torch.equal, actual, torch.autograd.grad(plain / 7, leaves)))


def add_gradients(stepper: Stepper, *batch: torch.Tensor) -> torch.Tensor:
    """Adds the gradients of a batch of two micro-batches. Returns the mean loss."""
    n_targets = torch.tensor(batch[1].numel())
    parts = [[tensor[rows] for tensor in batch] for rows in (slice(0, 2), slice(2, 4))]
    return torch.stack([stepper.backward(x, y, n_targets, lesson) for x, y, *lesson in parts]).sum()


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("arch", ["gpt2", "modern"])
@pytest.mark.parametrize("traced", [False, True])
def test_steps_have_the_gradients_of_the_definition(
    arch: Arch, traced: bool, workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two teachers with dropout and a longer context, of both architectures; micro-batches; the traced program."""
    monkeypatch.setattr(programs, "find", trace_without_compiling)
    paths = [
        save(Path(f"teacher-{other}"), loud(GPTConfig.of(other, 257, 24, 1, 2, 12 + 4 * seed, dropout=0.5), seed))
        for seed, other in enumerate(("gpt2", "modern"))
    ]
    teachers = Teachers([find_teacher(str(path)) for path in paths], CPU)
    model = loud(GPTConfig.of(arch, 257, 16, 2, 2, 16), 7).train()
    strategy = Single(model, make_optimizer(model, "muon", 0.1), CPU)
    settings = {"batch_tokens": 64, "micro_batch": "2", "block_size": 16, "teacher": ("a", "b"), "teacher_weight": 0.6}
    plan = resolved_with(teachers, **settings)
    assert plan.teacher_weight == 0.6
    stepper = Stepper(strategy, plan, teachers)
    if traced:
        assert stepper.compile() is None
        assert stepper.program is not None
    x, y = torch.randint(257, (2, 4, 16))
    loss = add_gradients(stepper, x, y)
    gradients = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    logits = model(x).flatten(0, 1)
    with torch.no_grad():
        teacher_logits = [library.load(path).model(x).flatten(0, 1) for path in paths]
    (mixed_loss(logits, teacher_logits, y.flatten(), 0.6) / y.numel()).backward()
    assert loss.item() == pytest.approx(F.cross_entropy(logits, y.flatten()).item(), rel=1e-5)
    for name, p in model.named_parameters():
        torch.testing.assert_close(gradients[name], p.grad, atol=1e-5, rtol=1e-3, msg=name)


class Ids(list[int]):
    """A ring of ids in memory."""

    def take(self, start: int, length: int) -> Any:
        return np.array([self[(start + i) % len(self)] for i in range(length)])


@pytest.mark.parametrize("T", [7, 8])
def test_teachers_read_each_id_with_half_a_window_of_context(T: int, workdir: Path) -> None:
    """The second teacher has a padded vocabulary."""
    paths = [save(Path(f"teacher-{V}"), loud(GPTConfig.of("modern", V, 8, 1, 2, 16), V)) for V in (257, 272)]
    ids = np.random.default_rng(0).integers(257, size=45)
    batches = Batches(Ids(ids), T, 3, seed=4)
    teachers, reports = Teachers([find_teacher(str(path)) for path in paths], CPU), list[Any]()
    plan = resolved_with(teachers, block_size=T, batch_tokens=3 * T)
    session = Session(World(), StopSignal(), reports.append, 0.0)
    teachers.read(batches, plan, Path(), session, max_seconds=0)
    assert teachers.codes is None
    teachers.read(batches, plan, Path(), session)
    assert [(reports[i].done, reports[i].total) for i in (1, -1)] == [(0, 45), (45, 45)]
    assert teachers.codes is not None
    probabilities = decode_probabilities(torch.from_numpy(teachers.codes))
    models, stride = [library.load(path).model for path in paths], -(-T // 2)
    for position in range(45):
        start = max(s for s in range(0, 45, stride) if T - stride <= (position - s) % 45 < T)
        window = torch.tensor([[ids[(start + i) % 45] for i in range((position - start) % 45 + 1)]])
        with torch.no_grad():
            expected = sum(model(window)[0, -1, :257].softmax(-1) for model in models) / 2
        torch.testing.assert_close(probabilities[position], expected, atol=5e-3, rtol=0)
    x, y, codes = teachers.teach(batches).global_batch(1)  # type: ignore[misc]
    plain_x, plain_y = batches.global_batch(1)
    assert np.array_equal(x, plain_x)
    assert np.array_equal(y, plain_y)
    for start, row in zip(batches.starts(1), codes, strict=True):
        assert np.array_equal(row, teachers.codes[(start + np.arange(T)) % 45])


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("traced", [False, True])
def test_steps_learn_from_read_probabilities(traced: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "find", trace_without_compiling)
    model = loud(GPTConfig.of("gpt2", 257, 16, 2, 2, 16), 7).train()
    strategy = Single(model, make_optimizer(model, "muon", 0.1), CPU)
    teachers = Teachers([], CPU)
    teachers.codes = encode_probabilities(torch.randn(100, 257).mul(2).softmax(-1)).numpy()
    plan = replace(
        resolved_with(teachers, batch_tokens=64, micro_batch="2", block_size=16), teacher_weight=0.6, weight_decay=0.1
    )
    stepper = Stepper(strategy, plan, teachers)
    if traced:
        assert stepper.compile() is None
    batches = teachers.teach(Batches(Ids(np.random.default_rng(0).integers(257, size=100)), 16, 4, seed=4))
    x, y, codes = map(torch.from_numpy, batches.global_batch(0))
    add_gradients(stepper, x, y, codes)
    gradients = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    log_p, q = model(x).log_softmax(-1), decode_probabilities(codes)
    (F.nll_loss(log_p.flatten(0, 1), y.flatten()) * 0.4 - 0.6 * (q * log_p).sum(-1).mean()).backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(gradients[name], p.grad, atol=1e-5, rtol=1e-3, msg=name)
    with pytest.raises(AssertionError, match="lost its teachers' probabilities"):
        stepper.step(x.numpy(), y.numpy(), 0.0)


def test_codes_keep_probabilities_to_the_third_digit() -> None:
    q = torch.randn(50, 1000).mul(3).softmax(-1)
    torch.testing.assert_close(decode_probabilities(encode_probabilities(q)), q, atol=4e-3, rtol=0)


def resolved_with(teachers: Teachers, **settings: Any) -> recipe.Recipe:
    return recipe.plan(TrainConfig(**settings), facts(vocab_size=257, teachers=tuple(teachers.shapes)))


def test_weight_0_equals_training_without_teachers(text: Path, run_folder: Path) -> None:
    settings = PUPIL | {"vocab_size": None, "weight_decay": 0.1}
    plain, plain_events = train(text, out="plain", tokenizer=str(run_folder), **settings)
    taught, taught_events = train(text, out="taught", teacher=(run_folder, run_folder), teacher_weight=0.0, **settings)
    assert losses(taught_events) == losses(plain_events)
    assert all(torch.equal(tensor, weights(plain.run)[name]) for name, tensor in weights(taught.run).items())
    assert curve(taught.run) == curve(plain.run)


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("gpt2", {}),
        ("qwen3", {"pairs": True}),
        ("qwen2", {"lora_rank": 2}),
        ("mistral", {"lora_rank": 2, "pairs": True}),
    ],
)
def test_a_copy_of_the_teacher_has_nothing_to_learn(
    family: str, settings: dict[str, Any], text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The teacher does not read the text beforehand, so it has the pupil's context."""
    monkeypatch.setattr(recipe, "MAX_LESSON_BYTES", 0)
    base = save(Path("base"), loud(SHAPES[family], 1))
    lines = [json.dumps({"prompt": f"{n} =>", "completion": f" {n * n}"}) for n in range(40)]
    Path("pairs.jsonl").write_text("\n".join(lines))
    for weight, is_zero in ((1.0, True), (0.9, False)):
        result, _ = train(
            Path("pairs.jsonl") if "pairs" in settings else text, vocab_size=None, n_layer=None, n_head=None, n_embd=None,
            arch=None, init=base, teacher=base, steps=1, teacher_weight=weight, **settings,
        )  # fmt: skip
        (norm,) = [line["grad_norm"] for line in curve(result.run) if line["event"] == "step"]
        assert (norm < 1e-5) == is_zero, norm


def test_pupil_takes_the_teachers_tokenizer_and_resumes_bit_exactly(text: Path, run_folder: Path) -> None:
    settings = {**PUPIL, "vocab_size": None, "teacher": run_folder, "arch": "modern", "dropout": 0.1}
    whole, run_events = train(text, out="whole", **settings)
    teacher = library.load(run_folder)
    assert library.load(whole.run).tokenizer.fingerprint == teacher.tokenizer.fingerprint
    notes = [getattr(event, "text", "") for event in run_events]
    assert any(note.startswith(f"teachers: {run_folder}, with a weight of 0.8 in the loss") for note in notes)
    record = json.loads(Path("whole/run.json").read_text())
    assert [each["path"] for each in record["teachers"]] == [str(teacher.path)]
    assert record["resolved"]["weight_decay"] == 0.3
    copy_killed_run("whole", "parts", 3)
    library.resume("parts")
    assert_same(Path("parts"), Path("whole"))
    assert curve(Path("parts")) == curve(Path("whole"))


def test_changed_or_missing_teacher_is_refused_on_resume(text: Path, gpt: Gpt, run_folder: Path) -> None:
    teacher = shutil.copytree(library.load(run_folder).path, "teacher")
    train(text, out="whole", vocab_size=None, teacher=teacher, **PUPIL)
    copy_killed_run("whole", "pupil", 3)
    save(Path("teacher"), loud(GPTConfig(257, 32, 1, 2, 16)))
    one_line_of_what_and_what_next(gpt("train", "--resume", "pupil"), "whose weights have changed")
    shutil.rmtree("teacher")
    one_line_of_what_and_what_next(gpt("train", "--resume", "pupil"), "there is no run or checkpoint")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tokenizer", "bytes"], "has another tokenizer (bpe, 400 ids) than the run (bytes, 257 ids)"),
        (["--block-size", "48", "--batch-tokens", "480"], "has a context of 32, shorter than the run's, 48"),
        (["--teacher", "nowhere"], "there is no run or checkpoint nowhere"),
        (["--teacher-weight", "1.5"], "teacher-weight is 1.5; it must be between 0 and 1"),
    ],
)
def test_unsuitable_teachers_are_refused(
    gpt: Gpt, text: Path, run_folder: Path, options: list[str], message: str
) -> None:
    one_line_of_what_and_what_next(gpt("train", text, "--teacher", run_folder, *options), message)
    assert not Path("runs").exists()


def test_memory_of_teachers_is_planned() -> None:
    config, teacher = tiny_model().config, GPTConfig(1000, 64, 4, 4, 64)
    alone, taught = (
        count_step_memory(config, Setup(8, dtype="bfloat16", teachers=teachers)) for teachers in ((), (teacher,) * 2)
    )
    parameters = sum(p.numel() for p in library.GPT(teacher).parameters())
    assert taught.teachers == 2 * 2 * parameters
    assert taught.peak >= alone.peak + taught.teachers
    huge = GPTConfig(50_257, 1024, 2**14, 64, 2**13)
    with pytest.raises(UserError, match=r"\(weights, gradients, optimizer state, teachers\), but only"):
        recipe.check_model(resolved(), facts(teachers=(huge,)))


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
    kills = {"before keeping": "loop.keep_teacher", "kept": "loop.own_teachers", "reading": "teachers.Teachers._read"}
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


def test_command_with_own_and_given_teachers_prints_one_result(text: Path, gpt: Gpt, run_folder: Path) -> None:
    small = ["--n-layer", "1", "--n-head", "2", "--n-embd", "16", "--block-size", "16", "--batch-tokens", "64"]
    done = gpt("train", text, "-o", "x", "--teachers", "2", "--teacher", run_folder, "--steps", "8", "--json", *small)
    assert done.code == 0, done.err
    assert Path(json.loads(done.out)["run"]) == Path("x")
    assert f"teachers: x/teachers/1, x/teachers/2, {run_folder}, with" in done.err.replace("\\", "/")
