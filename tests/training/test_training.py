"""Training: it learns, it repeats, and it ends as it should."""

import copy
import dataclasses
import itertools
import json
import math
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import FAST, TINY, Gpt, losses, make_text, one_line_of_what_and_what_next, resolved, train, weights

import gpt
from gpt import events, programs
from gpt.config import PRESETS, GPTConfig, TrainConfig
from gpt.device import Compute, pick
from gpt.errors import UserError, WorkError
from gpt.model.decoder import GPT
from gpt.model.params import named_parameters
from gpt.runs import folder
from gpt.settings import from_dict, to_toml
from gpt.text.batches import Batches
from gpt.text.token_folder import TokenFolder
from gpt.training import recipe
from gpt.training import step as stepping
from gpt.training.optim import Muon, make_optimizer
from gpt.training.pace import Costs, TimeBudget
from gpt.training.recipe import Recipe

CPU = Compute(torch.device("cpu"), torch.float32)


def lr_at(step: int, **recipe: Any) -> float:
    return Recipe.lr_at(SimpleNamespace(**{"planned": 0} | recipe), step)  # type: ignore[arg-type]


def test_it_learns(text: Path) -> None:
    result, heard = train(text, steps=60, lr=1e-2)
    first, last = losses(heard)[0], losses(heard)[-1]
    assert first == pytest.approx(math.log(400), abs=0.3)  # at first every id is as likely as any other
    assert last < first - 1.5
    assert result.val_loss < first - 1.5
    assert result.steps == 60
    assert result.tokens_seen == 60 * 256
    assert result.parameters == sum(tensor.numel() for tensor in weights(result.run).values())


def test_the_same_seed_gives_the_same_bits(text: Path) -> None:
    runs = [train(text, steps=12, dropout=0.1, seed=seed) for seed in (1, 1, 2)]
    one, same, other = (weights(result.run) for result, _ in runs)
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert losses(runs[0][1]) == losses(runs[1][1])
    assert not torch.equal(one["transformer.wte.weight"], other["transformer.wte.weight"])
    checkpoints = [folder.find_checkpoint(str(result.run)) for result, _ in runs[:2]]
    for path in checkpoints[0].iterdir():  # training.json tells how long things took
        if path.name not in ("training.json", "checksums.json"):
            assert path.read_bytes() == (checkpoints[1] / path.name).read_bytes()


@pytest.mark.slow
def test_what_is_watched_changes_nothing(text: Path) -> None:
    """Sampling, evaluating and saving leave the random state of training alone."""
    one, _ = train(text, steps=12, dropout=0.1, eval_every=3, sample_every=2, save_every=1)
    other, _ = train(text, steps=12, dropout=0.1, eval_every=12, sample_every=0, save_every=12)
    assert all(torch.equal(a, b) for a, b in zip(weights(one.run).values(), weights(other.run).values(), strict=True))


def test_a_step_is_adamw_on_the_clipped_gradient(text: Path) -> None:
    """Three steps of the loop against the same by hand."""
    result, heard = train(
        text, steps=3, val_fraction=0.1, schedule="constant", warmup=0, lr=1e-2, clip=0.5, optimizer="adamw"
    )
    record = json.loads((result.run / "run.json").read_text())
    shape = gpt.GPTConfig(**record["resolved"]["model"])
    torch.manual_seed(1337)
    model = GPT(shape)
    decayed = [p for p in model.parameters() if p.dim() > 1]
    plain = [p for p in model.parameters() if p.dim() == 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0}], lr=1e-2, betas=(0.9, 0.95)
    )
    batches = Batches(TokenFolder(result.run / "tokens").stream("train"), shape.block_size, 8, 1337)
    for step in range(3):
        x, y = (torch.from_numpy(a) for a in batches.global_batch(step))
        loss = torch.nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        norm = math.sqrt(sum(p.grad.square().sum().item() for p in model.parameters() if p.grad is not None))
        for p in model.parameters():
            assert p.grad is not None
            p.grad *= min(1.0, 0.5 / norm)
        optimizer.step()
        optimizer.zero_grad()
        event = [e for e in heard if isinstance(e, events.StepEvent)][step]
        assert event.loss == pytest.approx(loss.item(), rel=1e-4)
        assert event.grad_norm == pytest.approx(norm, rel=1e-3)
    table = named_parameters(shape)
    for name, tensor in weights(result.run).items():
        by_hand = model.state_dict()[name.removeprefix("transformer.")]
        if table[name.removeprefix("transformer.")].is_matrix:
            by_hand = by_hand.t()
        assert torch.allclose(tensor, by_hand, atol=2e-4), name


@pytest.mark.parametrize(("decay", "of_embeddings"), [(0.1, 0.0), (0.5, 1.0)])
def test_muon_is_for_the_matrices_of_the_blocks_and_vectors_do_not_decay(decay: float, of_embeddings: float) -> None:
    model = GPT(gpt.GPTConfig(50, 8, 2, 2, 16))
    (alone,) = make_optimizer(model, "adamw", decay).optimizers
    assert [(group["weight_decay"], {p.dim() for p in group["params"]}) for group in alone.param_groups] == [
        (decay, {2}), (0, {1})
    ]  # fmt: skip
    muon, adamw = parts = make_optimizer(model, "muon", decay).optimizers
    assert [group["weight_decay"] for part in parts for group in part.param_groups] == [decay, decay, of_embeddings, 0]
    names = {id(p): name for name, p in model.named_parameters()}
    (fused, single), (embeddings, vectors) = (
        [{names[id(p)] for p in group["params"]} for group in part.param_groups] for part in (muon, adamw)
    )
    assert fused == {f"h.{layer}.attn.c_attn.weight" for layer in range(2)}
    assert len(single) == 2 * 3
    assert embeddings == {"wte.weight", "wpe.weight"}
    assert set(names.values()) == fused | single | embeddings | vectors


@pytest.mark.filterwarnings("default")  # the compiler warns of its own doings
def test_a_compiled_update_is_the_same_and_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the rate is, where a step is skipped, and with momenta that were restored."""
    real, made = torch.compile, []

    def backend(module: Any, inputs: Any) -> Any:
        made.append(module)
        return module.forward

    monkeypatch.setattr(torch, "compile", lambda code, options: real(code, backend=backend, fullgraph=True))
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = GPT(GPTConfig(50, 16, 2, 2, 32))
    other = copy.deepcopy(model)
    plain, compiled = make_optimizer(model, "muon", 0.1), make_optimizer(other, "muon", 0.1)
    for step in range(5):
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        if step == 0:
            compiled.optimizers[0].compile()
        if step == 3:
            compiled.restore(other, compiled.state(other))
        for optimizer in (plain, compiled):
            optimizer.set_lr(0.01 * (step + 1))
            optimizer.step(torch.tensor(step == 2))
    assert len(made) == 1
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.allclose(p, q, atol=1e-6)


@pytest.mark.parametrize("shape", [(8, 8), (8, 32), (32, 8)])
def test_muon_is_torchs(shape: tuple[int, int]) -> None:
    """torch.optim.Muon is the oracle; its singular values lie elsewhere in [0.7, 1.2]."""
    torch.manual_seed(0)
    ours, theirs = (torch.nn.Parameter(torch.ones(shape)) for _ in range(2))
    muon = Muon([{"params": [ours]}], lr=0.02, weight_decay=0.1, dtype=torch.bfloat16)
    oracle = torch.optim.Muon([theirs], lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for _ in range(4):
        ours.grad = torch.randn(shape)
        theirs.grad = ours.grad.clone()
        muon.step()
        oracle.step()
    assert (ours - theirs).norm() < 0.3 * (theirs - 1).norm()
    assert not torch.allclose(ours, torch.ones(shape), atol=2e-2)


def test_query_key_and_value_are_orthogonalized_apart() -> None:
    torch.manual_seed(0)
    fused = torch.nn.Parameter(torch.zeros(24, 8))
    parts = [torch.nn.Parameter(torch.zeros(8, 8)) for _ in range(3)]
    fused.grad = torch.randn(24, 8)
    for part, grad in zip(parts, fused.grad.chunk(3), strict=True):
        part.grad = grad.clone()
    Muon([{"params": [fused], "fused": (8, 8, 8)}], 0.1, 0.0, torch.float32).step()
    Muon([{"params": parts}], 0.1, 0.0, torch.float32).step()
    assert torch.allclose(fused, torch.cat(parts), atol=1e-6)


def test_the_linear_schedule() -> None:
    rates = [lr_at(s, lr=1.0, warmup=10, steps=100, decay=40, schedule="linear") for s in range(1, 101)]
    assert rates[:10] == pytest.approx([i / 10 for i in range(1, 11)])
    assert set(rates[9:61]) == {1.0}
    assert rates[60:] == pytest.approx([(40 - i) / 40 for i in range(40)])


def test_schedule() -> None:
    rates = [lr_at(step, lr=1.0, warmup=10, steps=100, decay=0, schedule="cosine") for step in range(1, 101)]
    assert rates[:10] == pytest.approx([i / 10 for i in range(1, 11)])
    assert max(rates) == rates[9] == 1.0
    assert rates[-1] == pytest.approx(0.1)
    assert rates[54] == pytest.approx(0.55)  # halfway down
    assert all(a >= b for a, b in itertools.pairwise(rates[9:]))
    assert lr_at(50, lr=2.0, warmup=10, steps=100, decay=0, schedule="constant") == 2.0
    assert lr_at(1, lr=2.0, warmup=0, steps=1, decay=0, schedule="cosine") == pytest.approx(0.2)


@pytest.mark.parametrize("schedule", ["linear", "cosine", "constant"])
@pytest.mark.parametrize("fitted", [20, 50, 130])
def test_fitting_into_the_minutes_moves_no_learning_rate(schedule: str, fitted: int) -> None:
    plan = resolved(steps=100, warmup=10, decay=50, lr=1.0, schedule=schedule, **TINY)
    fit = dataclasses.replace(plan, steps=50 + fitted, decay=fitted, planned=100)
    assert [fit.lr_at(step) for step in range(51)] == [plan.lr_at(step) for step in range(51)]
    rates = [fit.lr_at(step) for step in range(50, 51 + fitted)]
    assert rates[-1] == pytest.approx(plan.lr_at(100), abs=1 / 20)
    steepest = 1.5 if schedule == "cosine" else 1  # π / 2 · 0.9 at the middle, as a multiple of the mean slope
    assert all(0 <= a - b <= steepest / fitted + 1e-9 for a, b in itertools.pairwise(rates))


@pytest.mark.slow
def test_minutes_become_steps_that_can_be_repeated(text: Path) -> None:
    timed, _ = train(text, minutes=0.1, optimizer="muon", dropout=0.0)
    record = json.loads((timed.run / "run.json").read_text())
    resolved = record["resolved"]
    assert timed.steps == resolved["steps"]
    assert record["settings"]["minutes"] == 0.1
    again, _ = train(
        text, steps=timed.steps, warmup=resolved["warmup"], decay=resolved["decay"], dropout=0.0,
        weight_decay=resolved["weight_decay"],
        eval_every=resolved["eval_every"], save_every=resolved["save_every"],
    )  # fmt: skip
    assert again.val_loss == timed.val_loss
    one, other = weights(timed.run), weights(again.run)
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.slow
def test_a_timed_run_compiles_once(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the dropout of as many plain steps as fit, and not with that of the steps that are guessed before, nor of the
    compiled ones that fit."""
    sought: list[GPTConfig] = []

    def find(key: Any, *args: object) -> Any:
        sought.append(key[1])
        raise OSError("there is no compiler")

    monkeypatch.setattr(programs, "find", find)
    fit = iter([30, 400])
    monkeypatch.setattr(TimeBudget, "steps", lambda budget, now: next(fit))
    monkeypatch.setattr(TimeBudget, "steps_left", lambda budget, now, pace: 1)
    text.write_text(make_text(1000), encoding="utf-8")
    timed, _ = train(text, minutes=1.0, compile="on")
    record = json.loads((timed.run / "run.json").read_text())
    for more in ({"minutes": 1.0}, {"steps": 400}):
        assert resolved(n_tokens=record["tokens"]["train"], **TINY, **more).model.dropout > 0
    assert record["resolved"]["model"]["dropout"] == 0
    assert [model.dropout for model in sought] == [0, 0]  # by who measures, and by the run


@pytest.mark.slow
def test_minutes_alone_decide_whether_a_timed_run_compiles(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the steps that fit into them, which would compile here: they were measured without."""
    sought: list[object] = []
    monkeypatch.setattr(programs, "find", lambda key, *args: sought.append(key))
    monkeypatch.setattr(recipe, "compiles_unasked", lambda: True)
    monkeypatch.setitem(recipe.CPU_RATE, "float32", 1e-9)
    monkeypatch.setattr(TimeBudget, "steps", lambda budget, now: 400)
    monkeypatch.setattr(TimeBudget, "steps_left", lambda budget, now, pace: 1)
    assert resolved(n_tokens=10**6, **TINY, steps=400, dtype="float32").compile
    timed, _ = train(text, minutes=1.0, dtype="float32")
    assert not json.loads((timed.run / "run.json").read_text())["resolved"]["compile"]
    assert not sought


def test_steps_that_fit_into_a_time() -> None:
    pace = TimeBudget(deadline=100.0, step=0.1, evaluations=10.0, end=5.0)
    assert pace.steps(now=10.0) == 750  # 90 s, less 5 at the end and 20 evaluations
    assert pace.steps_left(now=50.0, step=0.15) == 300
    assert pace.steps_left(now=99.0, step=0.15) == 1
    with pytest.raises(gpt.UserError, match="no time to train") as error:
        pace.steps(now=84.8)
    assert "--minutes 0.3" in error.value.hint


SLOW = Costs(step=1.2, window=2.0, sample=4.0, save=1.0, usual_windows=32, whole_windows=110, pairs=500)


def test_everything_but_training_takes_a_fifth_of_the_time() -> None:
    """Of a large model on a slow machine: what does not fit is cut."""
    budget = TimeBudget.fitting(5, began=0.0, now=30.0, costs=SLOW, evals=20)
    assert 30 + budget.evaluations + budget.end <= 0.2 * 300
    assert budget.steps(now=30.0) >= 0.8 * 300 / 1.2
    assert (budget.pauses, budget.windows, budget.last_windows, budget.samples) == (3, 1, 2, False)
    late = TimeBudget.fitting(5, began=0.0, now=90.0, costs=SLOW, evals=20)  # more than a fifth is spent already
    assert late.evaluations + late.end <= 0.2 * 300 / 2
    assert late.windows == late.last_windows == 1
    fast = dataclasses.replace(SLOW, step=0.01, window=0.001, sample=0.1, save=0.05, whole_windows=1000)
    whole = TimeBudget.fitting(1, began=0.0, now=3.0, costs=fast, evals=20)
    assert (whole.pauses, whole.windows, whole.last_windows, whole.samples) == (20, 32, 1000, True)


@pytest.mark.slow
def test_fine_tuning_for_minutes_takes_batches_that_fit(run_folder: Path, text: Path) -> None:
    """Where a step of the usual batch would take the whole time."""
    steps: list[int] = []

    def slow(budget: TimeBudget, now: float) -> int:
        steps.append(5 if steps else 64)  # what fits: 64 steps of one sequence, then 5 of the batch for that
        return steps[-1]

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(TimeBudget, "steps", slow)
        patched.setattr(TimeBudget, "steps_left", lambda budget, now, pace: 1)
        result = gpt.train(text, init=str(run_folder), minutes=1.0, lora_rank=2, dtype="float32", sample_every=0)
    resolved = json.loads((result.run / "run.json").read_text())["resolved"]
    assert resolved["batch_tokens"] == 32  # 64 sequences of 32 tokens in 100 steps: one each
    assert result.val_tokens > 0


def test_the_run_folder(text: Path) -> None:
    result, _heard = train(text, steps=20, eval_every=5, save_every=5, keep=2, sample_every=10)
    run = result.run
    assert run == Path("runs/book")
    record = json.loads((run / "run.json").read_text())
    assert record["sources"][0]["bytes"] == text.stat().st_size
    assert record["settings"]["steps"] == 20
    assert record["resolved"]["model"]["n_embd"] == 32
    assert record["versions"]["torch"] == torch.__version__
    assert not list(run.rglob(".tmp-*"))
    saved = [entry.step for entry in folder.checkpoints(run)]
    assert saved[-2:] == [15, 20]
    assert len(saved) <= 3
    index = json.loads((run / "index.json").read_text())
    assert run / index["best"] == result.checkpoint
    second, _ = train(text, steps=2)
    assert second.run == Path("runs/book-2")


SCHEMA = {
    "step": {"event", "step", "tokens", "seconds", "loss", "lr", "grad_norm", "tokens_per_second", "mfu"},
    "eval": {"event", "step", "tokens", "seconds", "val_loss", "best"},
    "sample": {"event", "step", "tokens", "seconds", "text"},
    "save": {"event", "step", "tokens", "seconds", "checkpoint"},
    "end": {"event", "step", "tokens", "seconds", "reason", "checkpoint", "val_loss", "bits_per_byte"},
}


def test_metrics_are_as_documented(text: Path) -> None:
    result, heard = train(text, steps=6, sample_every=3, eval_every=3)
    lines = (result.run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    seen = {}
    for line in lines:
        values = json.loads(line)
        seen[values["event"]] = set(values)
        assert events.to_json(events.from_json(line)) == line
    assert seen == SCHEMA
    assert [events.from_json(line) for line in lines] == [e for e in heard if isinstance(e, events.Event)]
    assert json.loads(lines[-1])["reason"] == "steps"


def test_events_of_numbers_that_are_none() -> None:
    event = events.StepEvent(1, 2, 3.0, loss=math.nan, lr=0.1, grad_norm=math.inf, tokens_per_second=1.0)
    assert json.loads(events.to_json(event))["loss"] is None
    again = events.from_json(events.to_json(event))
    assert isinstance(again, events.StepEvent)
    assert math.isnan(again.loss)
    for bad in ("", "[]", "{}", '{"event": "nothing"}', '{"event": "step"}', "null"):
        with pytest.raises(UserError):
            events.from_json(bad)


def test_times_for_people() -> None:
    assert [events.format_seconds(s) for s in (0.4, 59.6, 60, 200, 3599, 7500)] == [
        "0 s", "1 min 00 s", "1 min 00 s", "3 min 20 s", "59 min 59 s", "2 h 05 min",
    ]  # fmt: skip


def test_the_best_checkpoint_is_kept_and_reported(text: Path) -> None:
    """A rate that wrecks the model after a while: the best is from before, and it is what the run ends with."""
    result, heard = train(text, steps=60, eval_every=10, lr=0.5, warmup=58, keep=1)
    evals = {e.step: e.val_loss for e in heard if isinstance(e, events.EvalEvent)}
    best = min(evals, key=lambda step: evals[step])
    assert best < 60
    assert result.checkpoint.name == folder.step_name(best)
    assert result.val_loss == pytest.approx(evals[best], rel=1e-4)
    assert gpt.load(result.run).path == result.checkpoint
    assert [entry.step for entry in folder.checkpoints(result.run)] == [best, 60]
    assert not folder.can_resume(result.checkpoint)  # it is old, and keeps its weights alone
    assert folder.can_resume(result.run / folder.step_name(60))


def test_a_checkpoint_between_evaluations_has_no_loss(text: Path) -> None:
    heard: list[Any] = []
    run = gpt.train(text, listen=heard.append, **{**FAST, "steps": 8, "eval_every": 4, "save_every": 2, "keep": 9}).run
    measured = {event.step: event.val_loss for event in heard if isinstance(event, events.EvalEvent)}
    assert sorted(measured) == [4, 8]
    assert {entry.step: entry.val_loss for entry in folder.checkpoints(run)} == {2: None, 6: None, **measured}


def test_patience_ends_a_run_that_gets_no_better_and_saves_its_end(text: Path) -> None:
    result, heard = train(text, steps=200, eval_every=2, save_every=1000, lr=0.5, warmup=150, patience=3)
    evals = [e.best for e in heard if isinstance(e, events.EvalEvent)]
    assert result.steps < 200
    assert evals[-4:] == [True, False, False, False]
    assert heard[-1].reason == "patience"
    assert folder.checkpoints(result.run)[-1].step == result.steps


def test_reported_loss_is_what_eval_says(text: Path, tmp_path: Path) -> None:
    result, _ = train(text, steps=10)
    data = text.read_bytes()
    held_out = data[len(data) - round(len(data) * 0.1) :].decode()
    measured = gpt.load(result.run).evaluate([held_out])
    assert measured.loss == pytest.approx(result.val_loss, rel=1e-6)
    assert measured.bits_per_byte == pytest.approx(result.bits_per_byte, rel=1e-6)


def test_the_held_out_text_is_never_learnt_from(text: Path) -> None:
    """Two texts that differ in the held-out part alone give the same vocabulary and weights."""
    data = text.read_bytes()
    cut = len(data) - round(len(data) * 0.1)
    other = text.with_name("other.txt")
    other.write_bytes(data[:cut] + b"q" * (len(data) - cut))
    one, _ = train(text, steps=4)
    two, _ = train(other, steps=4)
    assert all(torch.equal(a, b) for a, b in zip(weights(one.run).values(), weights(two.run).values(), strict=True))
    assert two.val_loss != one.val_loss


def test_a_held_out_text_of_its_own(text: Path) -> None:
    other = text.with_name("held.txt")
    other.write_text(make_text(300, seed=9), encoding="utf-8")
    result, _ = train(text, steps=4, val_text=str(other))
    assert gpt.load(result.run).loss(other.read_bytes().decode()) == pytest.approx(result.val_loss, rel=1e-5)
    document = TokenFolder(result.run / "tokens").stream("train").documents[0]
    decoded = gpt.load(result.run).tokenizer.decode(document[:].tolist())
    assert decoded == text.read_bytes().decode()


def test_a_held_out_part_of_one_token_is_refused(workdir: Path) -> None:
    short = workdir / "short.txt"
    short.write_text("twelve bytes")
    with pytest.raises(UserError, match="1 held-out bytes are one token"):
        gpt.train(short, tokenizer="bytes", steps=1)
    assert not Path("runs").exists()


def test_nothing_held_out(text: Path) -> None:
    result, _ = train(text, steps=5, val_fraction=0)
    assert (result.val_loss, result.bits_per_byte) == (None, None)
    assert result.checkpoint.name == "step-000005"


def test_a_text_shorter_than_the_context_shrinks_it(workdir: Path) -> None:
    short = workdir / "short.txt"
    short.write_text("hello world, " * 3)
    result, heard = train(short, steps=2, tokenizer="bytes", vocab_size=None, block_size=64, batch_tokens=128)
    notes = [e.text for e in heard if isinstance(e, events.Note)]
    assert any("context reduced from 64 to 36" in note for note in notes)
    assert gpt.load(result.run).model.config.block_size == 36


def times(monkeypatch: pytest.MonkeyPatch, factor: float, calls: range) -> None:
    """Multiplies the loss by a factor in some of its computations, counted from 1."""
    whole, done = stepping.tied_cross_entropy, itertools.count(1)
    monkeypatch.setattr(
        stepping, "tied_cross_entropy", lambda *args: whole(*args) * (factor if next(done) in calls else 1)
    )


def test_a_loss_that_is_no_number_stops_the_run(
    text: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    command: Gpt = request.getfixturevalue("gpt")
    whole = stepping.tied_cross_entropy
    times(monkeypatch, math.nan, range(7, 1000))
    heard: list[events.Event] = []
    with pytest.raises(WorkError, match="the loss became nan .* at step 9"):
        gpt.train(text, steps=20, eval_every=3, listen=heard.append, **TINY)
    (back,) = [event for event in heard if isinstance(event, events.RollbackEvent)]
    assert (back.step, back.failed_step, back.rate_factor) == (6, 9, 0.3)
    assert gpt.load("runs/book").path.name == "step-000006"
    assert json.loads(Path("runs/book/metrics.jsonl").read_text().splitlines()[-1])["reason"] == "diverged"
    one_line_of_what_and_what_next(command("train", "--resume"), "no unfinished run")
    monkeypatch.setattr(stepping, "tied_cross_entropy", whole)
    assert command("train", "--resume", "runs/book").code == 0  # but it goes on where that is asked for


def test_out_of_memory_halves_what_is_computed_at_once(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, heard_whole = train(text, steps=6, micro_batch="8", dropout=0.0)
    trunk = GPT.trunk

    def limited(self: GPT, idx: torch.Tensor, *rest: Any) -> torch.Tensor:
        if self.training and idx.size(0) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return trunk(self, idx, *rest)

    monkeypatch.setattr(GPT, "trunk", limited)
    parts, heard = train(text, steps=6, micro_batch="8", dropout=0.0)  # whose accumulation changes nothing
    assert losses(heard) == pytest.approx(losses(heard_whole), rel=1e-4)
    assert json.loads((parts.run / "run.json").read_text())["resolved"]["micro_batch"] == 2
    said = [event.text for event in heard if isinstance(event, events.Note)]
    assert "out of memory: from now on, 4 of 8 sequences at once" in said
    assert "out of memory: from now on, 2 of 8 sequences at once" in said
    assert parts.val_loss == pytest.approx(whole.val_loss, rel=1e-3)


def test_a_bad_step_is_left_out_and_the_run_goes_on(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    times(monkeypatch, math.nan, range(6, 7))
    result, heard = train(text, steps=20, eval_every=6, save_every=6, keep=9)
    assert not any(isinstance(event, events.RollbackEvent) for event in heard)
    assert math.isnan(losses(heard)[5])
    assert [event.step for event in heard if isinstance(event, events.EvalEvent)] == [12, 18, 20]  # and not at step 6
    assert [entry.step for entry in folder.checkpoints(result.run)] == [12, 18, 20]
    assert math.isfinite(result.val_loss)
    assert all(tensor.isfinite().all() for tensor in weights(result.run).values())


def test_an_exploded_loss_goes_back_once_with_a_lower_rate(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Going back restores weights and moments: what follows is what a run with that rate would do from there."""
    times(monkeypatch, 1000, range(46, 49))
    result, heard = train(text, steps=60, lr=1e-2, eval_every=15, schedule="constant", dropout=0.0)
    (back,) = [event for event in heard if isinstance(event, events.RollbackEvent)]
    assert (back.step, back.failed_step) == (45, 48)
    after = [event for event in heard[heard.index(back) :] if isinstance(event, events.StepEvent)]
    assert [event.step for event in after] == list(range(46, 61))
    assert [event.lr for event in after] == pytest.approx([3e-3] * 15)
    (first,) = [e for e in heard[: heard.index(back)] if isinstance(e, events.StepEvent) and e.step == 46]
    assert after[0].loss == pytest.approx(first.loss / 1000, rel=1e-5)
    assert result.steps == 60


# What is decided for the user


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"steps": 10, "warmup": 40}, ["warmup is 40 steps, the run 10: the learning rate reaches 0.25 of its peak"]),
        ({"steps": 10, "warmup_tokens": 40_960}, ["warmup is 40 steps, the run 10: the learning rate reaches 0.25"]),
        ({"steps": 10, "warmup": 10, "decay": 3}, []),
        ({"steps": 10, "schedule": "cosine", "decay": 3}, ["--decay has no effect with --schedule cosine"]),
    ],
)
def test_settings_of_no_use_are_said(settings: dict[str, Any], said: list[str]) -> None:
    notes: list[str] = []
    recipe.resolve(TrainConfig(preset="nano", **settings), CPU, 400_000, 140_000, 1024, True, notes.append)
    assert len(notes) == len(said)
    assert all(note.startswith(line) for note, line in zip(notes, said, strict=True))


def test_every_preset_resolves() -> None:
    for name, preset in PRESETS.items():
        found = resolved(preset=name)
        assert found.lr == 2 * preset.lr  # Muon's
        assert found.batch_tokens == found.rows * found.model.block_size
        assert found.rows % found.micro_batch == 0
        assert abs(found.batch_tokens - preset.batch_tokens) < preset.model.block_size


@pytest.mark.parametrize(
    ("settings", "decided"),
    [
        ({"epochs": 1.0}, (0.0, 0.1)),
        ({"epochs": 4.0, "n_tokens": 45_000}, (0.0, 0.33)),  # a third of 12 passes
        ({"epochs": 10.0, "n_tokens": 400_000}, (0.0, 0.29)),  # a decay of 1 would take 80 · 0.43 passes
        ({"epochs": 18.0, "n_tokens": 45_000}, (0.1, 1.0)),
        ({"epochs": 18.0, "n_tokens": 60_000}, (0.0, 1.0)),
        ({"epochs": 6.0, "dropout": 0.3}, (0.3, 0.5)),
        ({"epochs": 6.0, "weight_decay": 0.0}, (0.0, 0.0)),
    ],
)
def test_a_text_that_is_read_often(settings: dict[str, Any], decided: tuple[float, float]) -> None:
    found = resolved(preset="nano", **settings)
    assert (found.model.dropout, found.weight_decay) == decided


@pytest.mark.parametrize(
    ("settings", "in_bfloat16", "in_float32"),
    [
        ({}, True, True), ({"steps": 1000}, False, False), ({"steps": 1000, "compile": "on"}, True, True),
        ({"compile": "off"}, False, False), ({"minutes": 0.9}, False, False), ({"minutes": 1.0}, True, False),
        ({"minutes": 2.4}, True, True), ({"recompute": True}, False, False), ({"shard": "full"}, False, False),
        ({"tensor": 2}, False, False), ({"preset": "small", "minutes": 60.0}, False, False),
        ({"preset": "mini", "minutes": 1.0}, False, False), ({"preset": "mini", "minutes": 4.0}, True, True),
    ],
)  # fmt: skip
def test_a_cpu_compiles_by_length_size_and_dtype(
    settings: dict[str, Any], in_bfloat16: bool, in_float32: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bfloat16 a minute is just long enough for four blocks."""
    for there in (True, False):
        monkeypatch.setattr(recipe, "compiles_unasked", lambda there=there: there)
        for dtype, compiles in (("bfloat16", in_bfloat16), ("float32", in_float32)):
            found = resolved(n_tokens=10**6, dtype=dtype, **{"preset": "nano", **settings}).compile
            assert found == (compiles and (there or settings.get("compile") == "on"))


@pytest.mark.parametrize(
    ("settings", "compiles"),
    [
        ({"steps": 100}, True),  # 124 million parameters, 52 million tokens
        ({"steps": 50}, False),
        ({"minutes": 5.0}, True),
        ({"minutes": 4.9}, False),  # though the 1,000 steps that are guessed would
        ({"minutes": 4.9, "compile": "on"}, True),
        ({"preset": "nano", "minutes": 60.0}, False),
    ],
)
def test_a_gpu_compiles_long_runs_of_large_steps(
    settings: dict[str, Any], compiles: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Compute, "memory", lambda self: 80 * 2**30)
    gpu = Compute(torch.device("cuda"), torch.bfloat16)
    config = TrainConfig(**{"preset": "gpt2", **settings})
    assert recipe.resolve(config, gpu, 10**9, 250_000_000, 50_257, True, lambda text: None).compile == compiles


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"epochs": 0.0}, "epochs is 0;"),
        ({"batch_tokens": 100}, "batch-tokens 100 is not a multiple of the context, 64"),
        ({"micro_batch": "3"}, "a micro-batch of 3 does not divide"),
        ({"micro_batch": "x"}, 'micro-batch is "x"'),
        ({"dropout": 1.0}, "dropout is 1.0"),
    ],
)
def test_settings_that_contradict(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        resolved(**settings)


def test_a_vocabulary_size_for_a_fixed_vocabulary() -> None:
    with pytest.raises(UserError, match="needs --tokenizer auto"):
        TrainConfig(tokenizer="bytes", vocab_size=300)


def test_any_settings_come_back_from_toml() -> None:
    config = TrainConfig(steps=7, lr=0.01, out='a "b" \\ c\x7f\né', val_fraction=0.2)
    assert from_dict(TrainConfig, tomllib.loads(to_toml(dataclasses.asdict(config))), "x") == config


def test_devices_that_are_not_there() -> None:
    if not torch.cuda.is_available():
        with pytest.raises(UserError, match='no device "cuda"'):
            pick("cuda")
    with pytest.raises(UserError, match='no dtype "int4"'):
        pick("cpu", "int4")
    with pytest.raises(UserError, match="float16"):
        pick("cpu", "float16")
    assert pick("cpu").dtype == torch.float32


@pytest.mark.slow
def test_bfloat16_learns_too(text: Path) -> None:
    _, heard = train(text, steps=60, lr=3e-3, dtype="bfloat16")
    assert losses(heard)[-1] < losses(heard)[0] - 0.5


def test_first_ten_losses(text: Path) -> None:
    """Frozen: a change of arithmetic, data order or initialization shows here."""
    _, heard = train(text, steps=10, lr=1e-2, warmup=2, optimizer="adamw", schedule="cosine")
    assert losses(heard) == pytest.approx(FROZEN, abs=2e-3)


FROZEN: list[float] = [5.9912, 5.8383, 5.5959, 5.3777, 5.1782, 5.0426, 4.9415, 4.8673, 4.8932, 4.8721]
