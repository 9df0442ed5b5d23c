"""Resuming: wherever a run stops, the resumed run equals an uninterrupted run, bit for bit."""

import json
import math
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from conftest import TINY, Done, Gpt, assert_same, curve, more, one_line_of_what_and_what_next, send, slow
from ranks import make_killed_after, steady_clock
from safetensors.torch import load_file, save_file

import gpt as library
from gpt.config import events
from gpt.runs import checkpoint, folder
from gpt.system.errors import Interrupted, UserError, WorkError
from gpt.training import step as stepping
from gpt.training.time_budget import Clock

STEPS = 12
FAST: dict[str, Any] = {**TINY, "dtype": "float32", "vocab_size": 400, "steps": STEPS, "eval_every": 4, "dropout": 0.1}

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGINT to send")


def interrupt_at(
    k: int, train: Callable[..., Any], kind: type[events.Event] = events.StepEvent, ahead: int = 0
) -> list[Any]:
    """Sends SIGINT at the event of step k, with up to ``ahead`` steps in flight. Returns the events."""
    run_events: list[Any] = []

    def on_event(event: Any) -> None:
        run_events.append(event)
        if isinstance(event, kind) and event.step == k:
            send(signal.SIGINT)

    with pytest.raises(Interrupted, match=f"interrupted at step ({k}|{k + ahead}) of"):
        train(listen=on_event)
    return run_events


@pytest.mark.parametrize(
    ("optimizer", "stops"),
    [("muon", (1, 7)), slow("adamw", (5, STEPS)), *(more(name, (2, 4, 5, STEPS - 1)) for name in ("muon", "adamw"))],
)
def test_resume_is_bit_exact(text: Path, optimizer: str, stops: tuple[int, ...]) -> None:
    settings: dict[str, Any] = {**FAST, "optimizer": optimizer, "eval_every": 4, "sample_every": 5, "save_every": 3}
    uninterrupted = library.train(text, out="whole", **settings)
    for k in stops:
        run = Path(f"at-{k}")
        interrupt_at(k, lambda listen, run=run: library.train(text, out=run, listen=listen, **settings))
        assert folder.checkpoints(run)[-1].step == k
        if k < STEPS - 1:  # Interrupts the run again.
            run_events = interrupt_at(k + 1, lambda listen, run=run: library.resume(run, listen))
            assert any(isinstance(event, events.ResumeEvent) for event in run_events)
        result = library.resume(run)
        assert_same(run, uninterrupted.run)
        assert curve(run) == curve(uninterrupted.run)
        assert (result.val_loss, result.sample, result.steps) == (uninterrupted.val_loss, uninterrupted.sample, STEPS)
        assert result.checkpoint.name == uninterrupted.checkpoint.name


@pytest.mark.parametrize("kind", [events.SaveEvent, slow(events.EvalEvent), slow(events.SampleEvent)])
def test_interrupt_between_steps_is_bit_exact(text: Path, kind: type[events.Event]) -> None:
    settings: dict[str, Any] = {**FAST, "sample_every": 4, "save_every": 4}
    uninterrupted = library.train(text, out="whole", **settings)
    run_events: list[Any] = []

    def on_event(event: Any) -> None:
        run_events.append(event)
        if isinstance(event, kind) and event.step >= 4:
            send(signal.SIGINT)

    with pytest.raises(Interrupted):
        library.train(text, out="parts", listen=on_event, **settings)
    library.resume("parts")
    assert_same(Path("parts"), uninterrupted.run)
    assert curve(Path("parts")) == curve(uninterrupted.run)


def test_metrics_after_the_checkpoint_are_truncated(text: Path) -> None:
    """A killed run leaves metrics newer than its checkpoint, possibly half a line."""
    settings: dict[str, Any] = FAST
    uninterrupted = library.train(text, out="whole", **settings)
    interrupt_at(5, lambda listen: library.train(text, out="parts", listen=listen, **settings))
    with Path("parts/metrics.jsonl").open("a") as file:
        file.write('{"event": "step", "step": 6, "tokens": 1, "seconds": 1}\n{"event": "st')
    (Path("parts") / ".tmp-step-000099").mkdir()
    # The run was killed between two renames.
    (Path("parts") / "step-000005").rename("parts/.tmp-was-step-000005")
    Path("parts/index.json").unlink()
    run_events: list[Any] = []
    library.resume("parts", lambda event: run_events.append((event, Path("parts/index.json").exists())))
    assert [(event.step, has_index) for event, has_index in run_events if isinstance(event, events.ResumeEvent)] == [
        (5, True)
    ]
    assert curve(Path("parts")) == curve(uninterrupted.run)
    assert not list(Path("parts").rglob(".tmp*"))


def test_resume_does_not_repeat_the_checkpoints_step(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings: dict[str, Any] = {**FAST, "sample_every": 4, "save_every": 4, "keep": 9}
    uninterrupted = library.train(text, out="whole", **settings)
    shutil.copytree("whole", "parts")
    make_killed_after(Path("parts"), 8)
    with monkeypatch.context() as patch:  # Step 8 is already saved.
        patch.setattr(checkpoint, "write", lambda target, contents: pytest.fail(f"{target} is written"))
        interrupt_at(8, lambda listen: library.resume("parts", listen), events.ResumeEvent)
    library.resume("parts")
    assert_same(Path("parts"), uninterrupted.run)
    assert curve(Path("parts")) == curve(uninterrupted.run)


def test_resume_without_a_checkpoint_restarts_at_step_1(text: Path) -> None:
    uninterrupted = library.train(text, out="whole", **FAST)
    shutil.copytree("whole", "parts")
    make_killed_after(Path("parts"), 0)
    record = json.loads(Path("parts/run.json").read_text())
    library.resume("parts", nproc=1)
    assert_same(Path("parts"), uninterrupted.run)
    (resumed,) = json.loads(Path("parts/run.json").read_text())["resumed"]
    assert (resumed["step"], resumed["given"]) == (0, {"nproc": 1})  # the default of the next resume
    # The run was killed during tokenization.
    for key in ("resolved", "tokens", "tokenizer", "sources", "compute", "versions"):
        del record[key]
    for path in Path("parts").iterdir():
        if path.name != "run.json":
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    Path("parts/run.json").write_text(json.dumps(record))
    assert library.resume("parts").val_loss == uninterrupted.val_loss
    assert_same(Path("parts"), uninterrupted.run)


@pytest.mark.slow
def test_resume_picks_the_newest_unfinished_run(gpt: Gpt, text: Path) -> None:
    one_line_of_what_and_what_next(gpt("train", "--resume"), "there is no unfinished run")
    for name in ("one", "two"):
        run = Path("runs") / name
        interrupt_at(3, lambda listen, run=run: library.train(text, out=run, listen=listen, **FAST))
    library.train(text, out="runs/done", **FAST)
    done = gpt("train", "--resume", "--quiet", "--json")
    assert done.code == 0
    assert json.loads(done.out)["run"] == str(Path("runs/two"))
    assert json.loads(gpt("train", "--resume=", "--json").out)["run"] == str(Path("runs/one"))
    one_line_of_what_and_what_next(gpt("train", "--json", "--resume"), "there is no unfinished run")
    finished = gpt("train", "--resume", "runs/two", "--json")
    assert json.loads(finished.out) == json.loads(done.out)
    assert "finished" in finished.err
    text_output = gpt("train", "--resume", "runs/two")
    assert text_output.out.startswith("saved  runs/two/step-")


def test_options_that_cannot_change_on_resume_are_refused(gpt: Gpt, text: Path) -> None:
    interrupt_at(3, lambda listen: library.train(text, out="runs/x", listen=listen, **FAST))
    before = {path: path.read_bytes() for path in Path("runs/x").rglob("*") if path.is_file()}
    for words, message in (
        (["book.txt"], "a text (book.txt) cannot be given with --resume"),
        (["--lr", "0.1"], "--lr cannot be given with --resume"),
        (["--steps", "4"], "the run has 12 steps; --steps 4 is fewer"),
        (["--micro-batch", "3"], "a micro-batch of 3 does not divide"),
        (["--keep", "0"], "keep is 0"),
    ):
        one_line_of_what_and_what_next(gpt("train", *words, "--resume", "runs/x"), message)
    one_line_of_what_and_what_next(gpt("train", "--resume", "runs/none"), "there is no run runs/none")
    assert {path: path.read_bytes() for path in Path("runs/x").rglob("*") if path.is_file()} == before


def test_environment_variables_count_as_options_on_resume(
    gpt: Gpt, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt_at(3, lambda listen: library.train(text, out="runs/x", listen=listen, **FAST))
    monkeypatch.setenv("GPT_TRAIN_LR", "0.5")
    one_line_of_what_and_what_next(gpt("train", "--resume"), "--lr cannot be given with --resume")
    monkeypatch.delenv("GPT_TRAIN_LR")
    monkeypatch.setenv("GPT_TRAIN_RESUME", "runs/x")
    monkeypatch.setenv("GPT_TRAIN_EPOCHS", "3")  # This variable is refused too, unless --steps overrides it.
    one_line_of_what_and_what_next(gpt("train"), "--epochs cannot be given with --resume")
    assert gpt("train", "--steps", "13").code == 0


@pytest.mark.slow
def test_resume_with_more_steps_matches_a_longer_run(text: Path) -> None:
    """With a constant schedule, a run that is extended to 20 steps equals a run of 20 steps."""
    settings: dict[str, Any] = {**FAST, "schedule": "constant", "warmup": 2, "decay": 6, "eval_every": 4, "keep": 9}
    planned = library.train(text, out="long", **{**settings, "steps": 20})
    library.train(text, out="short", **settings)
    run_events: list[Any] = []
    result = library.resume("short", run_events.append, steps=20)
    assert_same(result.run, planned.run)
    assert result.val_loss == planned.val_loss
    notes = [event.text for event in run_events if isinstance(event, events.Note)]
    assert any("20 steps instead of 12: from step 12, the constant schedule" in note for note in notes)
    assert library.resume("short").steps == 20
    make_killed_after(Path("short"), 12)  # The checkpoint's plan has 12 steps.
    assert library.resume("short").steps == 20
    assert_same(Path("short"), planned.run)


@pytest.mark.slow
def test_more_steps_restore_the_peak_learning_rate(text: Path) -> None:
    library.train(text, out="x", **{**FAST, "lr": 1e-2, "decay": 6, "warmup": 0})
    run_events: list[Any] = []
    library.resume("x", run_events.append, steps=24)
    learning_rates = {event.step: event.lr for event in run_events if isinstance(event, events.StepEvent)}
    assert [learning_rates[step] for step in range(13, 20)] == [1e-2] * 7
    assert learning_rates[24] == pytest.approx(1e-2 / 6)
    note = next(e.text for e in run_events if isinstance(e, events.Note) and "instead of 12" in e.text)
    assert "with 6 of final decay; the next learning rate is 0.01" in note


@pytest.mark.slow
def test_resume_with_another_micro_batch_is_equal_up_to_rounding(text: Path) -> None:
    settings: dict[str, Any] = {**FAST, "dropout": 0.0}
    uninterrupted = library.train(text, out="whole", **settings)
    interrupt_at(4, lambda listen: library.train(text, out="parts", listen=listen, **settings))
    run_events: list[Any] = []
    result = library.resume("parts", run_events.append, micro_batch=2)
    assert result.val_loss == pytest.approx(uninterrupted.val_loss, rel=1e-5)
    assert any("equal up to rounding" in e.text for e in run_events if isinstance(e, events.Note))
    assert json.loads(Path("parts/run.json").read_text())["resolved"]["micro_batch"] == 2


@pytest.mark.parametrize("kind", ["pairs", "chat"])
def test_changed_pairs_and_chats_are_refused(workdir: Path, kind: str) -> None:
    examples: list[dict[str, Any]] = [{"prompt": f"{n} =>", "completion": f" {n * n}"} for n in range(60)]
    if kind == "chat":
        roles = {"prompt": "user", "completion": "assistant"}
        turns = [[{"role": roles[key], "content": text} for key, text in example.items()] for example in examples]
        examples = [{"messages": messages} for messages in turns]
    lines = [json.dumps(example) for example in examples]
    Path("lines.jsonl").write_text("\n".join(lines))
    settings: dict[str, Any] = {**TINY, "vocab_size": 270, kind: True, "steps": 3, "dtype": "float32"}
    interrupt_at(1, lambda listen: library.train("lines.jsonl", out="parts", listen=listen, **settings))
    Path("lines.jsonl").write_text("\n".join(lines[:-1]))
    with pytest.raises(UserError, match="the text of parts has changed"):
        library.resume("parts")


def test_resume_of_adapters_is_bit_exact(run_folder: Path, text: Path) -> None:
    base = Path(shutil.copytree(folder.find_checkpoint(str(run_folder)), "base"))
    settings: dict[str, Any] = {"init": base, "steps": 8, "dtype": "float32", "lora_rank": 4, "dropout": 0.1}
    uninterrupted = library.train(text, out="whole", **settings)
    interrupt_at(3, lambda listen: library.train(text, out="parts", listen=listen, **settings))
    result = library.resume("parts")
    assert_same(result.run, uninterrupted.run)
    assert curve(result.run) == curve(uninterrupted.run)
    assert json.loads(Path("parts/run.json").read_text())["init"]["sha256"] == folder.weight_checksums(base)
    make_killed_after(Path("parts"), 3)
    base.rename("elsewhere")
    with pytest.raises(UserError, match="base"):
        library.resume("parts")


def test_changed_base_model_is_refused(run_folder: Path, text: Path) -> None:
    """A run without a checkpoint restarts from the base model."""
    base = Path(shutil.copytree(folder.find_checkpoint(str(run_folder)), "base"))
    library.train(text, out="x", init=base, steps=2, dtype="float32")
    make_killed_after(Path("x"), 0)
    weights = load_file(base / "model.safetensors")
    weights["transformer.ln_f.bias"] += 1
    save_file(weights, base / "model.safetensors", {"format": "pt"})
    (base / "checksums.json").unlink()
    folder.write_checksums(base)
    with pytest.raises(UserError, match="x was started from .*base, whose weights have changed"):
        library.resume("x")


def test_timed_run_that_patience_had_ended_takes_no_step_on_resume(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {**FAST, "steps": None, "minutes": 60.0, "teachers": 0, "lr": 0.0, "patience": 1}
    with steady_clock(40):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr("gpt.training.loop.evaluate_best", Mock(side_effect=KeyboardInterrupt))
            library.train(text, out="run", **settings)
        last = folder.checkpoints(Path("run"))[-1].step
        assert library.resume("run").steps == last < 40


def test_resumed_timed_run_has_the_time_that_was_left(text: Path) -> None:
    settings = {**FAST, "steps": None, "minutes": 60.0, "teachers": 0}
    run_events = interrupt_at(20, lambda listen: library.train(text, out="parts", listen=listen, **settings))
    plan = next(event for event in run_events if isinstance(event, events.Plan))
    state = json.loads(Path("parts/step-000020/training.json").read_text())["state"]
    assert state["training_seconds"] == plan.seconds > 6
    assert 0 < state["share"] < 1
    with pytest.raises(UserError, match="--steps cannot extend a run with --minutes"):
        library.resume("parts", steps=10**6)
    resumed_events: list[Any] = []
    with pytest.MonkeyPatch.context() as patched:
        shares = iter([state["share"], 1.0])
        patched.setattr(Clock, "share", lambda clock: next(shares))
        result = library.resume("parts", resumed_events.append)
    resumed_plan = next(event for event in resumed_events if isinstance(event, events.Plan))
    assert resumed_plan.seconds == pytest.approx(plan.seconds * (1 - state["share"]))
    assert resumed_plan.steps == plan.steps
    assert result.steps == 21
    first = next(event for event in resumed_events if isinstance(event, events.StepEvent))
    assert first.step == 21


@pytest.fixture
def loss_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that grows by one item with each loss. The seventh to ninth losses are NaN."""
    original = stepping.tied_cross_entropy
    loss_calls: list[int] = []

    def compute_loss(*args: torch.Tensor) -> torch.Tensor:
        loss_calls.append(1)
        return original(*args) * (math.nan if 6 < len(loss_calls) <= 9 else 1)

    monkeypatch.setattr(stepping, "tied_cross_entropy", compute_loss)
    return loss_calls


def test_resume_after_a_rollback_is_bit_exact(text: Path, loss_calls: list[int]) -> None:
    """The checkpoint includes the lower learning rate and the NaN losses so far."""
    settings: dict[str, Any] = {**FAST, "eval_every": 3}
    uninterrupted = library.train(text, out="whole", **settings)
    loss_calls.clear()

    def on_event(event: Any) -> None:
        if isinstance(event, events.StepEvent) and len(loss_calls) == 11:
            send(signal.SIGINT)

    with pytest.raises(Interrupted):
        library.train(text, out="parts", listen=on_event, **settings)
    result = library.resume("parts")
    assert_same(result.run, uninterrupted.run)
    assert curve(result.run) == curve(uninterrupted.run)
    assert any(line["event"] == "rollback" for line in curve(result.run))


@pytest.mark.usefixtures("loss_calls")
def test_rollback_does_not_count_evaluations_twice(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "gpt.training.loop.measure_held_out", lambda *args: (5.0, 1, {})
    )  # The first evaluation is the best.
    settings: dict[str, Any] = {**FAST, "eval_every": 2, "save_every": 4, "patience": 3}
    run = library.train(text, out="run", **settings).run
    lines = [line for line in curve(run) if line["event"] in ("eval", "rollback", "end")]
    logged = [(line["event"], line["step"]) for line in lines]
    repeated_events = [("eval", 6), ("eval", 8), ("end", 8)]  # Second and third evaluations after the best one
    assert logged == [("eval", 2), ("eval", 4), ("eval", 6), ("rollback", 4), *repeated_events]


def test_nan_held_out_loss_before_the_first_step_ends_the_run(
    run_folder: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no earlier state to roll back to."""
    monkeypatch.setattr("gpt.training.loop.measure_held_out", lambda *args: (math.nan, 1, {}))
    with pytest.raises(WorkError, match="^the held-out loss became nan at step 0, ") as error:
        library.train(text, out="tuned", init=str(run_folder), steps=4)
    assert error.value.hint == "train with a lower --lr; nothing was saved yet"
    assert json.loads(Path("tuned/run.json").read_text())["ended"] == "diverged"


@pytest.mark.slow
def test_resume_keeps_the_patience_count(text: Path) -> None:
    settings: dict[str, Any] = {**FAST, "steps": 200, "eval_every": 2, "lr": 0.5, "warmup": 150, "patience": 3}
    uninterrupted = library.train(text, out="whole", **settings)
    interrupt_at(uninterrupted.steps - 3, lambda listen: library.train(text, out="parts", listen=listen, **settings))
    assert library.resume("parts").steps == uninterrupted.steps
    assert_same(Path("parts"), uninterrupted.run)


def test_more_steps_reset_the_patience_count(text: Path) -> None:
    settings: dict[str, Any] = {**FAST, "eval_every": 2, "patience": 2, "lr": 5.0, "warmup": 4, "steps": 40}
    first = library.train(text, out="x", **settings)
    assert first.steps < 40
    assert library.resume("x", steps=50).steps == first.steps + 4


def test_damaged_latest_checkpoint_falls_back_to_an_older_one(gpt: Gpt, text: Path) -> None:
    settings: dict[str, Any] = {**FAST, "save_every": 3, "eval_every": 100, "keep": 5}
    uninterrupted = library.train(text, out="whole", **settings)
    interrupt_at(7, lambda listen: library.train(text, out="runs/x", listen=listen, **settings))
    for name, file in (("step-000007", "training.safetensors"), ("step-000006", "model.safetensors")):
        path = Path("runs/x") / name / file
        data = bytearray(path.read_bytes())
        data[-9] ^= 1
        path.write_bytes(data)
    sampled = gpt("sample", "the", "-m", "runs/x:latest", "--greedy")
    assert sampled.code == 0
    assert "damaged" not in sampled.err  # The weights of the latest checkpoint are intact.
    done = gpt("train", "--resume", "runs/x")
    assert done.code == 0
    for step in (7, 6):
        assert f"step-00000{step}" in done.err
    assert "from step 3" in done.err
    assert_same(Path("runs/x"), uninterrupted.run)
    assert [entry.step for entry in folder.checkpoints(Path("runs/x"))] == [3, 6, 9, 12]
    path = Path("runs/x/step-000012/model.safetensors")
    path.write_bytes(path.read_bytes()[:-3])
    sampled = gpt("sample", "the", "-m", "runs/x:latest", "--greedy")
    assert sampled.code == 0
    assert "using the checkpoint before it" in sampled.err
    for path in Path("runs/x").glob("step-*/model.safetensors"):
        path.write_bytes(b"")
    one_line_of_what_and_what_next(gpt("sample", "-m", "runs/x:latest"), "no intact checkpoint")


def test_checkpoint_with_only_weights_cannot_be_resumed(gpt: Gpt, text: Path) -> None:
    interrupt_at(3, lambda listen: library.train(text, out="runs/x", listen=listen, **FAST))
    for path in Path("runs/x").glob("step-*/training.*"):
        path.unlink()
    done = gpt("train", "--resume")
    one_line_of_what_and_what_next(done, "contain only weights")
    assert "--init" in done.err


def test_second_process_cannot_write_the_same_run(gpt: Gpt, text: Path) -> None:
    attempts: list[Done] = []

    def on_event(event: Any) -> None:
        if isinstance(event, events.StepEvent) and event.step == 2:
            attempts.append(gpt("train", "--resume", "runs/x"))

    library.train(text, out="runs/x", listen=on_event, **FAST)
    one_line_of_what_and_what_next(attempts[0], "another process is writing runs/x")


@pytest.mark.slow
@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("dtype", ["float16", more("float32"), more("bfloat16")])
def test_resume_is_bit_exact_on_a_gpu(text: Path, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are deterministic. With float16, the loss scale is restored too."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    try:
        settings: dict[str, Any] = {**FAST, "steps": 8, "dtype": dtype, "device": "cuda", "eval_every": 4}
        uninterrupted = library.train(text, out="whole", **settings)
        for k in (1, 6):
            run = Path(f"at-{k}")
            # A GPU runs one step ahead, unless an evaluation or save is due.
            interrupt_at(k, lambda listen, run=run: library.train(text, out=run, listen=listen, **settings), ahead=1)
            library.resume(run)
            assert_same(run, uninterrupted.run)
    finally:
        torch.use_deterministic_algorithms(False)


def test_finished_run_starts_no_processes(run_folder: Path, gpt: Gpt, monkeypatch: pytest.MonkeyPatch) -> None:
    """``--nproc`` has no effect unless ``--steps`` extends the run."""
    shutil.copytree(run_folder, "run")
    record = json.loads(Path("run/run.json").read_text())
    record["settings"]["nproc"] = 2
    Path("run/run.json").write_text(json.dumps(record))
    process_counts: list[int] = []
    monkeypatch.setattr("gpt_cli.processes.start", lambda words, nproc, started_at: process_counts.append(nproc) or 0)
    for words in ([], ["--nproc", "3"], ["--steps", "30"]):
        done = gpt("train", "--resume", "run", "--json", *words)
        assert (done.code, done.err, process_counts) == (0, "run is finished\n", [])
        assert json.loads(done.out)["steps"] == 30
    assert gpt("train", "--resume", "run", "--steps", "31").out == ""
    assert gpt("train", "--resume", "run", "--steps", "31", "--nproc", "3").out == ""
    assert process_counts == [2, 3]
