"""Going on: N steps are k and N − k, bit for bit, whatever is in between."""

import json
import math
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import TINY, Done, Gpt, assert_same, curve, more, one_line_of_what_and_what_next, send, slow
from safetensors.torch import load_file, save_file

import gpt as library
from gpt import events
from gpt.errors import Interrupted, UserError, WorkError
from gpt.runs import checkpoint, folder
from gpt.training import step as stepping
from gpt.words import counted

STEPS = 12
FAST: dict[str, Any] = {**TINY, "dtype": "float32", "vocab_size": 400, "steps": STEPS, "eval_every": 4, "dropout": 0.1}

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGINT to send")


def interrupted_at(
    k: int, do: Callable[..., Any], kind: type[events.Event] = events.StepEvent, ahead: int = 0
) -> list[Any]:
    """Lets ``do`` train until an event of step k, and sends SIGINT then, when up to ``ahead`` more were begun."""
    heard: list[Any] = []

    def strike(event: Any) -> None:
        heard.append(event)
        if isinstance(event, kind) and event.step == k:
            send(signal.SIGINT)

    with pytest.raises(Interrupted, match=f"interrupted at step ({k}|{k + ahead}) of"):
        do(listen=strike)
    return heard


@pytest.mark.parametrize(
    ("optimizer", "stops"),
    [("muon", (1, 7)), slow("adamw", (5, STEPS)), *(more(each, (2, 4, 5, STEPS - 1)) for each in ("muon", "adamw"))],
)
def test_any_k(text: Path, optimizer: str, stops: tuple[int, ...]) -> None:
    settings: dict[str, Any] = {**FAST, "optimizer": optimizer, "eval_every": 4, "sample_every": 5, "save_every": 3}
    whole = library.train(text, out="whole", **settings)
    for k in stops:
        run = Path(f"at-{k}")
        interrupted_at(k, lambda listen, run=run: library.train(text, out=run, listen=listen, **settings))
        assert folder.checkpoints(run)[-1].step == k
        if k < STEPS - 1:  # and again
            heard = interrupted_at(k + 1, lambda listen, run=run: library.resume(run, listen))
            assert any(isinstance(event, events.ResumeEvent) for event in heard)
        result = library.resume(run)
        assert_same(run, whole.run)
        assert curve(run) == curve(whole.run)
        assert (result.val_loss, result.sample, result.steps) == (whole.val_loss, whole.sample, STEPS)
        assert result.checkpoint.name == whole.checkpoint.name


@pytest.mark.parametrize("kind", [events.SaveEvent, slow(events.EvalEvent), slow(events.SampleEvent)])
def test_interrupted_between_steps(text: Path, kind: type[events.Event]) -> None:
    settings: dict[str, Any] = {**FAST, "sample_every": 4, "save_every": 4}
    whole = library.train(text, out="whole", **settings)
    heard: list[Any] = []

    def strike(event: Any) -> None:
        heard.append(event)
        if isinstance(event, kind) and event.step >= 4:
            send(signal.SIGINT)

    with pytest.raises(Interrupted):
        library.train(text, out="parts", listen=strike, **settings)
    library.resume("parts")
    assert_same(Path("parts"), whole.run)
    assert curve(Path("parts")) == curve(whole.run)


def test_what_stood_behind_the_checkpoint_is_cut(text: Path) -> None:
    """A killed run has written metrics that its newest checkpoint knows nothing of, perhaps half a line."""
    settings: dict[str, Any] = FAST
    whole = library.train(text, out="whole", **settings)
    interrupted_at(5, lambda listen: library.train(text, out="parts", listen=listen, **settings))
    with Path("parts/metrics.jsonl").open("a") as file:
        file.write('{"event": "step", "step": 6, "tokens": 1, "seconds": 1}\n{"event": "st')
    (Path("parts") / ".tmp-step-000099").mkdir()
    (Path("parts") / "step-000005").rename("parts/.tmp-was-step-000005")  # between two renames
    Path("parts/index.json").unlink()
    heard: list[Any] = []
    library.resume("parts", lambda event: heard.append((event, Path("parts/index.json").exists())))
    assert [(event.step, indexed) for event, indexed in heard if isinstance(event, events.ResumeEvent)] == [(5, True)]
    assert curve(Path("parts")) == curve(whole.run)
    assert not list(Path("parts").rglob(".tmp*"))


def killed_after(run: Path, step: int) -> None:
    """Makes a run what it would be if it had been killed before the next checkpoint was whole."""
    for entry in folder.checkpoints(run):
        if entry.step > step:
            shutil.rmtree(run / entry.name)
    record = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({k: v for k, v in record.items() if k not in ("ended", "result")}))


def test_what_was_due_at_a_checkpoint_s_step_is_not_done_again(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings: dict[str, Any] = {**FAST, "sample_every": 4, "save_every": 4, "keep": 9}
    whole = library.train(text, out="whole", **settings)
    shutil.copytree("whole", "parts")
    killed_after(Path("parts"), 8)
    with monkeypatch.context() as patch:  # what is saved is not saved again
        patch.setattr(checkpoint, "write", lambda target, contents: pytest.fail(f"{target} is written"))
        interrupted_at(8, lambda listen: library.resume("parts", listen), events.ResumeEvent)
    library.resume("parts")
    assert_same(Path("parts"), whole.run)
    assert curve(Path("parts")) == curve(whole.run)


@pytest.mark.slow
def test_threads_are_as_many_as_before(text: Path) -> None:
    """Sums depend on them."""
    threads = torch.get_num_threads()
    library.train(text, out="x", **{**FAST, "save_every": 4, "keep": 9})
    killed_after(Path("x"), 8)
    heard: list[Any] = []
    torch.set_num_threads(threads + 1)
    try:
        library.resume("x", heard.append)
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(threads)
    said = f"{counted(threads, 'thread')}, as before, instead of {threads + 1}: it affects rounding"
    assert said in [event.text for event in heard if isinstance(event, events.Note)]


def test_without_a_checkpoint_it_starts_at_the_first_step(text: Path) -> None:
    whole = library.train(text, out="whole", **FAST)
    shutil.copytree("whole", "parts")
    killed_after(Path("parts"), 0)
    record = json.loads(Path("parts/run.json").read_text())
    library.resume("parts")
    assert_same(Path("parts"), whole.run)
    for key in ("resolved", "tokens", "tokenizer", "sources", "compute", "versions"):  # while it tokenized
        del record[key]
    for path in Path("parts").iterdir():
        if path.name != "run.json":
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    Path("parts/run.json").write_text(json.dumps(record))
    assert library.resume("parts").val_loss == whole.val_loss
    assert_same(Path("parts"), whole.run)


@pytest.mark.slow
def test_the_newest_unfinished_run_is_meant(gpt: Gpt, text: Path) -> None:
    one_line_of_what_and_what_next(gpt("train", "--resume"), "there is no unfinished run")
    for name in ("one", "two"):
        run = Path("runs") / name
        interrupted_at(3, lambda listen, run=run: library.train(text, out=run, listen=listen, **FAST))
    library.train(text, out="runs/done", **FAST)
    done = gpt("train", "--resume", "--quiet", "--json")
    assert done.code == 0
    assert json.loads(done.out)["run"] == str(Path("runs/two"))
    assert json.loads(gpt("train", "--resume=", "--json").out)["run"] == str(Path("runs/one"))
    one_line_of_what_and_what_next(gpt("train", "--json", "--resume"), "there is no unfinished run")
    again = gpt("train", "--resume", "runs/two", "--json")
    assert json.loads(again.out) == json.loads(done.out)
    assert "finished" in again.err
    plain = gpt("train", "--resume", "runs/two")
    assert plain.out.startswith("saved  runs/two/step-")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["book.txt"], "a text (book.txt) cannot be given with --resume"),
        (["--lr", "0.1"], "--lr cannot be given with --resume"),
        (["--steps", "4"], "the run has 12 steps; --steps 4 is fewer"),
        (["--micro-batch", "3"], "a micro-batch of 3 does not divide"),
        (["--keep", "0"], "keep is 0"),
    ],
)
def test_what_may_not_be_joined(gpt: Gpt, text: Path, words: list[str], message: str) -> None:
    interrupted_at(3, lambda listen: library.train(text, out="runs/x", listen=listen, **FAST))
    before = {path: path.read_bytes() for path in Path("runs/x").rglob("*") if path.is_file()}
    one_line_of_what_and_what_next(gpt("train", *words, "--resume", "runs/x"), message)
    one_line_of_what_and_what_next(gpt("train", "--resume", "runs/none"), "there is no run runs/none")
    assert {path: path.read_bytes() for path in Path("runs/x").rglob("*") if path.is_file()} == before


def test_a_twin_in_the_environment_counts(gpt: Gpt, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupted_at(3, lambda listen: library.train(text, out="runs/x", listen=listen, **FAST))
    monkeypatch.setenv("GPT_TRAIN_LR", "0.5")
    one_line_of_what_and_what_next(gpt("train", "--resume"), "--lr cannot be given with --resume")
    monkeypatch.delenv("GPT_TRAIN_LR")
    monkeypatch.setenv("GPT_TRAIN_RESUME", "runs/x")
    monkeypatch.setenv("GPT_TRAIN_EPOCHS", "3")  # neither may this be given, but beside --steps it is not
    one_line_of_what_and_what_next(gpt("train"), "--epochs cannot be given with --resume")
    assert gpt("train", "--steps", "13").code == 0


@pytest.mark.slow
def test_more_steps(text: Path) -> None:
    """Under a constant rate they are those of a run that was as long from the start."""
    settings: dict[str, Any] = {**FAST, "schedule": "constant", "warmup": 2, "decay": 6, "eval_every": 4, "keep": 9}
    long = library.train(text, out="long", **{**settings, "steps": 20})
    library.train(text, out="short", **settings)
    notes: list[Any] = []
    result = library.resume("short", notes.append, steps=20)
    assert_same(result.run, long.run)
    assert result.val_loss == long.val_loss
    said = [each.text for each in notes if isinstance(each, events.Note)]
    assert any("20 steps instead of 12: from step 12, the constant schedule" in line for line in said)
    assert library.resume("short").steps == 20
    killed_after(Path("short"), 12)  # whose checkpoint knows of 12 steps alone
    assert library.resume("short").steps == 20
    assert_same(Path("short"), long.run)


@pytest.mark.slow
def test_a_linear_schedule_goes_up_again(text: Path) -> None:
    library.train(text, out="x", **{**FAST, "lr": 1e-2, "decay": 6, "warmup": 0})
    heard: list[Any] = []
    library.resume("x", heard.append, steps=24)
    rates = {event.step: event.lr for event in heard if isinstance(event, events.StepEvent)}
    assert [rates[step] for step in range(13, 20)] == [1e-2] * 7
    assert rates[24] == pytest.approx(1e-2 / 6)
    said = next(e.text for e in heard if isinstance(e, events.Note) and "instead of 12" in e.text)
    assert "with 6 of final decay; the next learning rate is 0.01" in said


@pytest.mark.slow
def test_another_micro_batch_is_equal_to_rounding(text: Path) -> None:
    settings: dict[str, Any] = {**FAST, "dropout": 0.0}
    whole = library.train(text, out="whole", **settings)
    interrupted_at(4, lambda listen: library.train(text, out="parts", listen=listen, **settings))
    heard: list[Any] = []
    result = library.resume("parts", heard.append, micro_batch="2")
    assert result.val_loss == pytest.approx(whole.val_loss, rel=1e-5)
    assert any("equal up to rounding" in e.text for e in heard if isinstance(e, events.Note))
    assert json.loads(Path("parts/run.json").read_text())["resolved"]["micro_batch"] == 2


def chat(question: str, answer: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


@pytest.mark.parametrize(
    ("kind", "fine_tunes", "line"),
    [
        slow("pairs", False, lambda a, b: {"prompt": a, "completion": b}),
        slow("chat", False, chat),
        ("chat", True, chat),
    ],
)
def test_pairs_and_chats(
    workdir: Path, run_folder: Path, kind: str, fine_tunes: bool, line: Callable[..., Any]
) -> None:
    lines = [json.dumps(line(f"{n} =>", f" {n * n}")) for n in range(60)]
    Path("lines.jsonl").write_text("\n".join(lines))
    start = {"init": run_folder} if fine_tunes else {**TINY, "vocab_size": 270}
    settings: dict[str, Any] = {**start, kind: True, "steps": 6, "dropout": 0.1, "dtype": "float32"}
    whole = library.train("lines.jsonl", out="whole", **settings)
    interrupted_at(3, lambda listen: library.train("lines.jsonl", out="parts", listen=listen, **settings))
    shutil.copytree("parts", "other")
    result = library.resume("parts")
    assert_same(result.run, whole.run)
    assert (result.val_loss, result.sample, result.prompt) == (whole.val_loss, whole.sample, whole.prompt)
    Path("lines.jsonl").write_text("\n".join(lines[:-1]))
    with pytest.raises(UserError, match="the text of other has changed"):
        library.resume("other")


@pytest.mark.parametrize("rank", [slow(None), 4])
def test_fine_tuning(run_folder: Path, text: Path, rank: int | None) -> None:
    base = Path(shutil.copytree(folder.find_checkpoint(str(run_folder)), "base"))
    settings: dict[str, Any] = {"init": base, "steps": 8, "dtype": "float32", "lora_rank": rank, "dropout": 0.1}
    settings["merge_lora"] = rank is not None
    whole = library.train(text, out="whole", **settings)
    interrupted_at(3, lambda listen: library.train(text, out="parts", listen=listen, **settings))
    result = library.resume("parts")
    assert_same(result.run, whole.run)
    assert curve(result.run) == curve(whole.run)
    assert json.loads(Path("parts/run.json").read_text())["init"]["sha256"] == folder.weight_checksums(base)
    if rank is not None:
        assert (result.run / "merged/model.safetensors").read_bytes() == (
            whole.run / "merged/model.safetensors"
        ).read_bytes()
        interrupted_at(3, lambda listen: library.train(text, out="other", listen=listen, **settings))
        base.rename("elsewhere")
        with pytest.raises(UserError, match="base"):
            library.resume("other")


def test_a_base_that_is_another_now(run_folder: Path, text: Path) -> None:
    """Of a run that has no checkpoint yet, which would begin from it."""
    base = Path(shutil.copytree(folder.find_checkpoint(str(run_folder)), "base"))
    library.train(text, out="x", init=base, steps=2, dtype="float32")
    killed_after(Path("x"), 0)
    weights = load_file(base / "model.safetensors")
    weights["transformer.ln_f.bias"] += 1
    save_file(weights, base / "model.safetensors", {"format": "pt"})
    (base / "checksums.json").unlink()
    folder.write_checksums(base)
    with pytest.raises(UserError, match="x was started from .*base, whose weights have changed"):
        library.resume("x")


@pytest.mark.slow
def test_minutes(text: Path) -> None:
    """The steps, and the time spent, are those of the run before."""
    settings = {**FAST, "steps": None, "minutes": 0.15}
    heard = interrupted_at(40, lambda listen: library.train(text, out="parts", listen=listen, **settings))
    planned = next(event.steps for event in heard if isinstance(event, events.Plan))
    record = json.loads(Path("parts/run.json").read_text())
    assert record["resolved"]["steps"] == planned
    saved = json.loads(Path("parts/step-000040/training.json").read_text())
    assert 0 < saved["pace"]["deadline"] <= 9.0
    again: list[Any] = []
    result = library.resume("parts", again.append)
    assert next(event.steps for event in again if isinstance(event, events.Plan)) == planned
    assert 3 < result.seconds < 30
    assert result.steps > 40


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Computations of the loss so far, of which the seventh to ninth give NaN."""
    whole_loss = stepping.tied_cross_entropy
    calls: list[int] = []

    def poisoned(*args: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return whole_loss(*args) * (math.nan if 6 < len(calls) <= 9 else 1)

    monkeypatch.setattr(stepping, "tied_cross_entropy", poisoned)
    return calls


def test_a_run_that_went_back(text: Path, calls: list[int]) -> None:
    """The lower rate is part of the state, and so is the loss that is no number in between."""
    settings: dict[str, Any] = {**FAST, "eval_every": 3}
    whole = library.train(text, out="whole", **settings)
    calls.clear()

    def strike(event: Any) -> None:
        if isinstance(event, events.StepEvent) and len(calls) == 11:
            send(signal.SIGINT)

    with pytest.raises(Interrupted):
        library.train(text, out="parts", listen=strike, **settings)
    result = library.resume("parts")
    assert_same(result.run, whole.run)
    assert curve(result.run) == curve(whole.run)
    assert any(line["event"] == "rollback" for line in curve(result.run))


@pytest.mark.usefixtures("calls")
def test_going_back_counts_no_evaluation_twice(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither that of the state which the run goes back to, nor those that it will come to again."""
    monkeypatch.setattr("gpt.training.loop.mean_loss", lambda *args: 5.0)  # the first one is the best
    settings: dict[str, Any] = {**FAST, "eval_every": 2, "save_every": 4, "patience": 3}
    run = library.train(text, out="run", **settings).run
    lines = [line for line in curve(run) if line["event"] in ("eval", "rollback", "end")]
    told = [(line["event"], line["step"]) for line in lines]
    again = [("eval", 6), ("eval", 8), ("end", 8)]  # the second and third after the best
    assert told == [("eval", 2), ("eval", 4), ("eval", 6), ("rollback", 4), *again]


def test_a_held_out_loss_that_is_no_number_before_the_first_step_ends_the_run(
    run_folder: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no state to go back to."""
    monkeypatch.setattr("gpt.training.loop.mean_loss", lambda *args: math.nan)
    with pytest.raises(WorkError, match="^the held-out loss became nan at step 0, ") as error:
        library.train(text, out="tuned", init=str(run_folder), steps=4)
    assert error.value.hint == "train with a lower --lr; nothing was saved yet"
    assert json.loads(Path("tuned/run.json").read_text())["ended"] == "diverged"


@pytest.mark.slow
def test_patience_is_remembered(text: Path) -> None:
    settings: dict[str, Any] = {**FAST, "steps": 200, "eval_every": 2, "lr": 0.5, "warmup": 150, "patience": 3}
    whole = library.train(text, out="whole", **settings)
    interrupted_at(whole.steps - 3, lambda listen: library.train(text, out="parts", listen=listen, **settings))
    assert library.resume("parts").steps == whole.steps
    assert_same(Path("parts"), whole.run)


def test_with_more_steps_patience_begins_anew(text: Path) -> None:
    settings: dict[str, Any] = {**FAST, "eval_every": 2, "patience": 2, "lr": 5.0, "warmup": 4, "steps": 40}
    first = library.train(text, out="x", **settings)
    assert first.steps < 40
    assert library.resume("x", steps=50).steps == first.steps + 4


def test_a_damaged_latest_falls_back(gpt: Gpt, text: Path) -> None:
    settings: dict[str, Any] = {**FAST, "save_every": 3, "eval_every": 100, "keep": 5}
    whole = library.train(text, out="whole", **settings)
    interrupted_at(7, lambda listen: library.train(text, out="runs/x", listen=listen, **settings))
    for name, file in (("step-000007", "training.safetensors"), ("step-000006", "model.safetensors")):
        path = Path("runs/x") / name / file
        data = bytearray(path.read_bytes())
        data[-9] ^= 1
        path.write_bytes(data)
    sampled = gpt("sample", "the", "-m", "runs/x:latest", "--greedy")
    assert sampled.code == 0
    assert "damaged" not in sampled.err  # the weights of the latest are whole
    done = gpt("train", "--resume", "runs/x")
    assert done.code == 0
    for step in (7, 6):
        assert f"step-00000{step}" in done.err
    assert "from step 3" in done.err
    assert_same(Path("runs/x"), whole.run)
    assert [entry.step for entry in folder.checkpoints(Path("runs/x"))] == [3, 6, 9, 12]
    path = Path("runs/x/step-000012/model.safetensors")
    path.write_bytes(path.read_bytes()[:-3])
    sampled = gpt("sample", "the", "-m", "runs/x:latest", "--greedy")
    assert sampled.code == 0
    assert "using the checkpoint before it" in sampled.err
    for path in Path("runs/x").glob("step-*/model.safetensors"):
        path.write_bytes(b"")
    one_line_of_what_and_what_next(gpt("sample", "-m", "runs/x:latest"), "no intact checkpoint")


def test_weights_alone_cannot_be_gone_on_from(gpt: Gpt, text: Path) -> None:
    interrupted_at(3, lambda listen: library.train(text, out="runs/x", listen=listen, **FAST))
    for path in Path("runs/x").glob("step-*/training.*"):
        path.unlink()
    done = gpt("train", "--resume")
    one_line_of_what_and_what_next(done, "contain only weights")
    assert "--init" in done.err


def test_one_writer(gpt: Gpt, text: Path) -> None:
    met: list[Done] = []

    def meanwhile(event: Any) -> None:
        if isinstance(event, events.StepEvent) and event.step == 2:
            met.append(gpt("train", "--resume", "runs/x"))

    library.train(text, out="runs/x", listen=meanwhile, **FAST)
    one_line_of_what_and_what_next(met[0], "another process is writing runs/x")


@pytest.mark.slow
@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("dtype", ["float16", more("float32"), more("bfloat16")])
def test_any_k_on_a_gpu(text: Path, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With kernels that are deterministic; under float16 the loss scaler goes on too."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    try:
        settings: dict[str, Any] = {**FAST, "steps": 8, "dtype": dtype, "device": "cuda", "eval_every": 4}
        whole = library.train(text, out="whole", **settings)
        for k in (1, 6):
            run = Path(f"at-{k}")
            # A GPU computes the next step while one is told, unless something else is due between them.
            interrupted_at(k, lambda listen, run=run: library.train(text, out=run, listen=listen, **settings), ahead=1)
            library.resume(run)
            assert_same(run, whole.run)
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_finished_run_of_several_takes_one_process(
    run_folder: Path, gpt: Gpt, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many it had, or are asked for; with more steps it is not finished."""
    shutil.copytree(run_folder, "run")
    record = json.loads(Path("run/run.json").read_text())
    record["settings"]["nproc"] = 2
    Path("run/run.json").write_text(json.dumps(record))
    started: list[int] = []
    monkeypatch.setattr("gpt_cli.processes.start", lambda words, nproc, began: started.append(nproc) or 0)
    for words in ([], ["--nproc", "3"], ["--steps", "30"]):
        done = gpt("train", "--resume", "run", "--json", *words)
        assert (done.code, done.err, started) == (0, "run is finished\n", [])
        assert json.loads(done.out)["steps"] == 30
    assert gpt("train", "--resume", "run", "--steps", "31").out == ""
    assert gpt("train", "--resume", "run", "--steps", "31", "--nproc", "3").out == ""
    assert started == [2, 3]
