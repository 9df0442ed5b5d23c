"""Training runs: results, schedules, checkpoints, faults, and defaults."""

import copy
import dataclasses
import itertools
import json
import math
import random
import re
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import FAST, TINY, Gpt, facts, losses, make_text, one_line_of_what_and_what_next, resolved, train, weights
from ranks import to_options

import gpt
from gpt.config import events
from gpt.config.device import Compute, pick
from gpt.config.model import PRESETS, GPTConfig
from gpt.config.settings import from_dict, to_toml
from gpt.config.train import TrainConfig
from gpt.corpus.batches import Batches
from gpt.corpus.token_folder import TokenFolder
from gpt.model.decoder import GPT
from gpt.model.params import named_parameters
from gpt.runs import folder
from gpt.system import programs
from gpt.system.errors import UserError, WorkError
from gpt.system.interrupt import StopSignal
from gpt.training import evaluation, recipe, schedule
from gpt.training import step as stepping
from gpt.training.optim import Muon, make_optimizer
from gpt.training.time_budget import Clock, Costs, TimeBudget

TINY_WORDS = to_options(TINY)
CPU = Compute(torch.device("cpu"), torch.float32)


def lr_at(step: int, **recipe: Any) -> float:
    return schedule.lr_at(SimpleNamespace(**recipe), step)  # type: ignore[arg-type]


def test_loss_decreases(text: Path) -> None:
    result, run_events = train(text, steps=60, lr=1e-2)
    first, last = losses(run_events)[0], losses(run_events)[-1]
    # The initial distribution is uniform.
    assert first == pytest.approx(math.log(400), abs=0.3)
    assert last < first - 1.5
    assert result.val_loss < first - 1.5
    assert result.steps == 60
    assert result.tokens_seen == 60 * 256
    assert result.parameters == sum(tensor.numel() for tensor in weights(result.run).values())


def test_same_seed_is_bit_exact(text: Path) -> None:
    runs = [train(text, steps=12, dropout=0.1, seed=seed) for seed in (1, 1, 2)]
    first, second, different = (weights(result.run) for result, _ in runs)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert losses(runs[0][1]) == losses(runs[1][1])
    assert not torch.equal(first["transformer.wte.weight"], different["transformer.wte.weight"])
    checkpoints = [folder.find_checkpoint(str(result.run)) for result, _ in runs[:2]]
    for path in checkpoints[0].iterdir():  # training.json contains durations.
        if path.name not in ("training.json", "checksums.json"):
            assert path.read_bytes() == (checkpoints[1] / path.name).read_bytes()


@pytest.mark.slow
def test_monitoring_does_not_change_training(text: Path) -> None:
    """Sampling, evaluation and saves do not affect the random state."""
    monitored, _ = train(text, steps=12, dropout=0.1, eval_every=3, sample_every=2, save_every=1)
    unmonitored, _ = train(text, steps=12, dropout=0.1, eval_every=12, sample_every=0, save_every=12)
    assert all(
        torch.equal(a, b)
        for a, b in zip(weights(monitored.run).values(), weights(unmonitored.run).values(), strict=True)
    )


def test_step_applies_adamw_to_the_clipped_gradient(text: Path) -> None:
    """Compares with an explicit loop."""
    result, run_events = train(
        text, steps=3, val_fraction=0.1, schedule="constant", warmup=0, lr=1e-2, clip=0.5, optimizer="adamw"
    )
    record = json.loads((result.run / "run.json").read_text())
    shape = gpt.GPTConfig(**record["resolved"]["model"])
    torch.manual_seed(1337)
    model = GPT(shape)
    decayed = [p for p in model.parameters() if p.dim() > 1]
    undecayed = [p for p in model.parameters() if p.dim() == 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": undecayed, "weight_decay": 0}], lr=1e-2, betas=(0.9, 0.95)
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
        event = [e for e in run_events if isinstance(e, events.StepEvent)][step]
        assert event.loss == pytest.approx(loss.item(), rel=1e-4)
        assert event.grad_norm == pytest.approx(norm, rel=1e-3)
    table = named_parameters(shape)
    for name, tensor in weights(result.run).items():
        expected = model.state_dict()[name.removeprefix("transformer.")]
        if table[name.removeprefix("transformer.")].is_matrix:
            expected = expected.t()
        assert torch.allclose(tensor, expected, atol=2e-4), name


@pytest.mark.parametrize(("decay", "embedding_decay"), [(0.1, 0.0), (0.5, 1.0)])
def test_parameter_groups_of_muon_and_adamw(decay: float, embedding_decay: float) -> None:
    model = GPT(gpt.GPTConfig(50, 8, 2, 2, 16))
    (adamw_only,) = make_optimizer(model, "adamw", decay).optimizers
    assert [(group["weight_decay"], {p.dim() for p in group["params"]}) for group in adamw_only.param_groups] == [
        (decay, {2}), (0, {1})
    ]  # fmt: skip
    muon, adamw = parts = make_optimizer(model, "muon", decay).optimizers
    assert [group["weight_decay"] for part in parts for group in part.param_groups] == [
        *3 * [decay],
        embedding_decay,
        0,
    ]
    names = {id(p): name for name, p in model.named_parameters()}
    (qkv, projections, mlp), (embeddings, vectors) = (
        [{names[id(p)] for p in group["params"]} for group in part.param_groups] for part in (muon, adamw)
    )
    assert qkv == {f"h.{layer}.attn.c_attn.weight" for layer in range(2)}
    assert mlp == {f"h.{layer}.mlp.c_fc.weight" for layer in range(2)}
    assert len(projections) == 2 * 2
    assert embeddings == {"wte.weight", "wpe.weight"}
    assert set(names.values()) == qkv | projections | mlp | embeddings | vectors


@pytest.mark.filterwarnings("default")  # Compiler warnings are not errors here.
def test_compiled_muon_update_matches_and_compiles_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Covers changing learning rates, skipped steps and restored momenta."""
    torch_compile, graphs = torch.compile, []

    def backend(module: Any, inputs: Any) -> Any:
        graphs.append(module)
        return module.forward

    monkeypatch.setattr(
        torch, "compile", lambda function, options: torch_compile(function, backend=backend, fullgraph=True)
    )
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = GPT(GPTConfig(50, 16, 2, 2, 32))
    copied_model = copy.deepcopy(model)
    uncompiled, compiled = make_optimizer(model, "muon", 0.1), make_optimizer(copied_model, "muon", 0.1)
    for step in range(5):
        for p, q in zip(model.parameters(), copied_model.parameters(), strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        if step == 0:
            compiled.optimizers[0].compile()
        if step == 3:
            compiled.restore(compiled.state())
        for optimizer in (uncompiled, compiled):
            optimizer.set_lr(0.01 * (step + 1))
            optimizer.step(torch.tensor(step == 2))
    assert len(graphs) == 1
    for p, q in zip(model.parameters(), copied_model.parameters(), strict=True):
        assert torch.allclose(p, q, atol=1e-6)


@pytest.mark.parametrize("shape", [(8, 8), (8, 32), (32, 8)])
def test_muon_matches_torch(shape: tuple[int, int]) -> None:
    """Singular values of torch.optim.Muon's updates vary between 0.7 and 1.2."""
    torch.manual_seed(0)
    actual, expected = (torch.nn.Parameter(torch.ones(shape)) for _ in range(2))
    muon = Muon([{"params": [actual], "rows": shape[:1]}], lr=0.02, weight_decay=0.1, dtype=torch.bfloat16)
    oracle = torch.optim.Muon([expected], lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for _ in range(4):
        actual.grad = torch.randn(shape)
        expected.grad = actual.grad.clone()
        muon.step()
        oracle.step()
    assert (actual - expected).norm() < 0.3 * (expected - 1).norm()
    assert not torch.allclose(actual, torch.ones(shape), atol=2e-2)


def test_query_key_and_value_are_orthogonalized_separately() -> None:
    torch.manual_seed(0)
    fused = torch.nn.Parameter(torch.zeros(24, 8))
    parts = [torch.nn.Parameter(torch.zeros(8, 8)) for _ in range(3)]
    fused.grad = torch.randn(24, 8)
    for part, grad in zip(parts, fused.grad.chunk(3), strict=True):
        part.grad = grad.clone()
    Muon([{"params": [fused], "rows": (8, 8, 8)}], 0.1, 0.0, torch.float32).step()
    Muon([{"params": parts, "rows": (8,)}], 0.1, 0.0, torch.float32).step()
    assert torch.allclose(fused, torch.cat(parts), atol=1e-6)


def test_linear_schedule_warms_up_and_decays() -> None:
    learning_rates = [lr_at(s, lr=1.0, warmup=10, steps=100, decay=40, schedule="linear") for s in range(1, 101)]
    assert learning_rates[:10] == pytest.approx([i / 10 for i in range(1, 11)])
    assert set(learning_rates[9:61]) == {1.0}
    assert learning_rates[60:] == pytest.approx([(40 - i) / 40 for i in range(40)])


def test_decay_longer_than_the_run_starts_at_the_peak(text: Path, gpt: Gpt) -> None:
    options = ["--steps", "4", "--decay", "9", "--warmup", "0", "--lr", "1", *TINY_WORDS]
    assert gpt("train", text, "-o", "run", *options).code == 0
    lines = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    assert [line["lr"] for line in lines if line["event"] == "step"] == pytest.approx([1, 0.75, 0.5, 0.25])


def test_cosine_and_constant_schedules() -> None:
    learning_rates = [lr_at(step, lr=1.0, warmup=10, steps=100, decay=0, schedule="cosine") for step in range(1, 101)]
    assert learning_rates[:10] == pytest.approx([i / 10 for i in range(1, 11)])
    assert max(learning_rates) == learning_rates[9] == 1.0
    assert learning_rates[-1] == pytest.approx(0.1)
    assert learning_rates[54] == pytest.approx(0.55)  # the middle of the decay
    assert all(a >= b for a, b in itertools.pairwise(learning_rates[9:]))
    assert lr_at(50, lr=2.0, warmup=10, steps=100, decay=0, schedule="constant") == 2.0
    assert lr_at(1, lr=2.0, warmup=0, steps=1, decay=0, schedule="cosine") == pytest.approx(0.2)


SLOW = Costs(
    token=0.0012, window=2.0, sample=4.0, save=1.0, default_windows=32, all_windows=110, pairs=500, elapsed=30.0
)
QUICK = dataclasses.replace(SLOW, token=1e-5, window=0.001, sample=0.1, save=0.05, all_windows=1000, elapsed=3.0)


@pytest.fixture
def shares(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A list of the shares of the time that have passed before the first step and after each step. It replaces the
    clock of timed runs, which otherwise depends on the speed of this machine."""
    shares = [0.0]
    remaining = iter(shares)
    monkeypatch.setattr(Clock, "share", lambda clock: next(remaining))
    monkeypatch.setattr(TimeBudget, "tokens", lambda budget, costs, step_tokens: 100.0 * step_tokens)
    return shares


@pytest.mark.parametrize("schedule", ["linear", "cosine", "constant"])
def test_learning_rate_of_a_timed_run_follows_the_clock(text: Path, schedule: str, shares: list[float]) -> None:
    """The machine becomes four times slower halfway, so 100 planned steps end after 62."""
    shares += [step / 100 for step in range(1, 51)] + [(50 + 4 * step) / 100 for step in range(1, 13)] + [1.0]
    result, run_events = train(text, minutes=1.0, schedule=schedule, teachers=0)
    resolved = json.loads((result.run / "run.json").read_text())["resolved"]
    assert result.steps == resolved["steps"] == 63
    plan = {**resolved, "steps": 100}
    learning_rates = [event.lr for event in run_events if isinstance(event, events.StepEvent)]
    assert learning_rates == pytest.approx([lr_at(100 * share + 1, **plan) for share in shares[:-1]])  # type: ignore[arg-type]
    assert learning_rates[-1] < {"linear": 0.05, "cosine": 0.11, "constant": 1.1}[schedule] * resolved["lr"]


@pytest.mark.parametrize(
    ("intervals", "evaluated"),
    [
        ({"eval_every": None}, [*range(5, 51, 5), 52, 53, 54, 55, 57, 58, 59, 60, 62]),
        ({"eval_every": 25}, [25, 50, 62]),
    ],
    ids=["by the clock", "by steps"],
)
def test_evaluations_of_a_timed_run_follow_the_clock(
    text: Path, shares: list[float], intervals: dict[str, int | None], evaluated: list[int]
) -> None:
    shares += [step / 100 for step in range(1, 51)] + [(50 + 4 * step) / 100 for step in range(1, 12)] + [1.0]
    _, run_events = train(text, minutes=600.0, **intervals, teachers=0)
    steps = [event.step for event in run_events if isinstance(event, events.EvalEvent)]
    assert steps == evaluated


@pytest.mark.parametrize(
    ("settings", "expected"),
    [({"decay": 0}, {"decay": 0}), ({"decay": 1000, "warmup": 1000}, {"decay": 100, "warmup": 100})],
    ids=["none", "longer than the run"],
)
def test_warmup_and_decay_of_a_timed_run_are_shares_of_it(
    text: Path, shares: list[float], settings: dict[str, int], expected: dict[str, int]
) -> None:
    shares += [0.5, 1.0]
    result, _ = train(text, minutes=1.0, **settings, teachers=0)
    record = json.loads((result.run / "run.json").read_text())
    assert result.steps == 2
    assert {name: record["resolved"][name] for name in expected} == expected


@pytest.mark.slow
def test_timed_run_compiles_once(text: Path, monkeypatch: pytest.MonkeyPatch, shares: list[float]) -> None:
    """The speed is measured with the program of the run."""
    lookups: list[GPTConfig] = []

    def find(key: Any, *args: object) -> Any:
        lookups.append(key[1])
        raise OSError("there is no compiler")

    monkeypatch.setattr(programs, "find", find)
    shares += [1.0]
    train(text, minutes=1.0, compile="on", teachers=0)
    assert [model.dropout for model in lookups] == [lookups[0].dropout] * 2  # for the measurement and for the run


@pytest.mark.parametrize(
    ("minutes", "slowness", "settings", "compiles"),
    [
        (1.0, 1, {}, False), (3.0, 1, {}, True), (3.0, 4, {}, False),  # Compiling also takes longer on a busy machine.
        (3.0, 1, {"teachers": 4}, True), (2.0, 1, {}, True), (2.0, 1, {"teachers": 4}, False),  # Two programs.
        (0.5, 9, {"compile": "on"}, True), (60.0, 1, {"compile": "off"}, False), (60.0, 1, {"preset": "small"}, False),
    ],
)  # fmt: skip
def test_timed_run_compiles_if_that_pays_back(
    minutes: float, slowness: float, settings: dict[str, Any], compiles: bool
) -> None:
    """``slowness`` is the measured time of a step, relative to two quiet cores."""
    config = TrainConfig(**{"preset": "nano", "teachers": 0, "minutes": minutes, **settings})
    known = facts(tokens=10**6, vocab_size=1024, dtype="bfloat16", has_compiler=True)
    draft = recipe.plan(config, known)
    token = slowness * recipe.estimate_seconds(draft, "cpu", "bfloat16") / (draft.steps * draft.batch_tokens)
    costs = dataclasses.replace(QUICK, token=token or 1e-3, elapsed=5.0)
    plan = recipe.plan(config, dataclasses.replace(known, costs=costs))
    assert plan.compile == compiles
    assert (plan.budget is None) == compiles  # The speed of the program is still to be measured.


def test_slow_compilation_leaves_a_shorter_run() -> None:
    """No error ends a run that compiled for longer than its minutes."""
    costs = dataclasses.replace(QUICK, elapsed=600.0, compiled=True)
    known = facts(tokens=10**6, costs=dataclasses.replace(QUICK, elapsed=5.0), compiled_costs=costs, has_compiler=True)
    plan = recipe.plan(TrainConfig(minutes=5.0, compile="on", teachers=0), known)
    assert plan.budget
    assert plan.compile
    assert 1 <= plan.steps <= 0.1 * 300 / (QUICK.token * plan.batch_tokens) + 1


def test_final_evaluation_ends_at_the_deadline(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows are spread over the held-out text, however many are measured. At least one batch is."""
    stop = StopSignal()
    assert [*stop.until_signal("abc")] == ["a", "b", "c"]
    stop.deadline = 0.0
    assert [*stop.until_signal("abc")] == ["a"]
    for count in (10, 30, 99):
        first = sorted(evaluation.interleave(range(100))[:count])
        assert max(b - a for a, b in itertools.pairwise([0, *first, 100])) <= 3 * 100 / count


def test_time_budget_determines_the_tokens() -> None:
    budget = TimeBudget(total=100.0, evaluations=10.0, end=5.0)
    costs = dataclasses.replace(QUICK, token=0.01, elapsed=10.0)
    assert budget.tokens(costs, 10) == pytest.approx(7500)  # 90 s minus 5 s at the end and 10 s of evaluations
    assert budget.training_seconds(10.0) == 85
    assert budget.training_seconds(99.0) == 10  # Getting ready took too long.
    late = dataclasses.replace(costs, elapsed=100.5)
    assert budget.tokens(late, 10) == pytest.approx(1000)  # A busy machine tokenized and measured slowly.
    for elapsed, step_tokens in ((100.5, 1000), (84.8, 1000)):
        with pytest.raises(gpt.UserError, match="no time to train") as error:
            budget.tokens(dataclasses.replace(costs, elapsed=elapsed), step_tokens)
        minutes = float(error.value.hint.split()[4].rstrip(","))
        assert minutes > 100 / 60
        longer = dataclasses.replace(budget, total=60 * minutes)
        longer.tokens(dataclasses.replace(costs, elapsed=elapsed), step_tokens)


def test_overhead_is_limited_to_a_fifth_of_the_time() -> None:
    """A large model on a slow machine gets fewer evaluations and no samples."""
    budget = TimeBudget.fitting(5, SLOW, evals=20)
    assert 30 + budget.evaluations + budget.end <= 0.2 * 300
    assert budget.tokens(SLOW, 1000) >= 0.8 * 300 / 0.0012
    assert (budget.pauses, budget.windows, budget.last_windows, budget.samples) == (3, 1, 2, False)
    # More than a fifth of the time is already spent.
    late = TimeBudget.fitting(5, dataclasses.replace(SLOW, elapsed=90.0), evals=20)
    assert late.evaluations + late.end <= 0.2 * 300 / 2
    assert late.windows == late.last_windows == 1
    uncut = TimeBudget.fitting(1, QUICK, evals=20)
    assert (uncut.pauses, uncut.windows, uncut.last_windows, uncut.samples) == (20, 32, 1000, True)


def test_short_examples_are_all_evaluated(workdir: Path, gpt: Gpt, shares: list[float]) -> None:
    """Rows are much shorter than the context, and only some of their tokens are targets."""
    shares += [1.0]
    pairs = [{"prompt": f"{number} is", "completion": f" n{number}"} for number in range(400)]
    Path("pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    words = ["--pairs", "--block-size", "512", "--vocab-size", "270", "--batch-tokens", "512", "--json"]
    words += ["--n-layer", "1", "--n-head", "1", "--n-embd", "16"]
    val_tokens = []
    for length in (["--steps", "2"], ["--minutes", "600"]):
        done = gpt("train", "pairs.jsonl", *length, *words, "-o", length[1])
        assert ": 362 pairs to train on, 38 held out" in done.err
        states = [json.loads(path.read_text())["state"] for path in Path(length[1]).glob("step-*/training.json")]
        assert all(state["windows"] >= 38 for state in states)
        val_tokens.append(json.loads(done.out)["val_tokens"])
    assert val_tokens[0] == val_tokens[1]


@pytest.mark.slow
def test_timed_fine_tuning_shrinks_the_batch(run_folder: Path, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is time for 3,200 tokens, so each of 100 steps gets one sequence of 32 tokens."""
    monkeypatch.setattr(TimeBudget, "tokens", lambda *args: 3200.0)
    monkeypatch.setattr(Clock, "share", lambda clock: 1.0)
    result = gpt.train(text, init=str(run_folder), minutes=1.0, lora_rank=2, dtype="float32", sample_every=0)
    resolved = json.loads((result.run / "run.json").read_text())["resolved"]
    assert resolved["batch_tokens"] == 32
    assert result.val_tokens > 0


def test_run_folder_contents(text: Path) -> None:
    result, _events = train(text, steps=20, eval_every=5, save_every=5, keep=2, sample_every=10)
    run = result.run
    assert run == Path("runs/book")
    record = json.loads((run / "run.json").read_text())
    assert record["sources"][0]["bytes"] == text.stat().st_size
    assert record["settings"]["steps"] == 20
    assert record["resolved"]["model"]["n_embd"] == 32
    assert record["versions"]["torch"] == torch.__version__
    assert not list(run.rglob(".tmp-*"))
    saved_steps = [entry.step for entry in folder.checkpoints(run)]
    assert saved_steps[-2:] == [15, 20]
    assert len(saved_steps) <= 3
    index = json.loads((run / "index.json").read_text())
    assert run / index["best"] == result.checkpoint
    second, _ = train(text, steps=2)
    assert second.run == Path("runs/book-2")


SCHEMA = {
    "step": {"event", "step", "tokens", "seconds", "loss", "lr", "grad_norm", "tokens_per_second", "mfu"},
    "eval": {"event", "step", "tokens", "seconds", "val_loss", "best"},
    "sample": {"event", "step", "tokens", "seconds", "text", "prompt", "verdict"},
    "frame": {
        "event",
        "step",
        "tokens",
        "seconds",
        "text",
        "prompt",
        "pieces",
        "probabilities",
        "heads",
        "kinds",
        "attention",
        "layers",
        "lens",
        "lens_probabilities",
    },
    "save": {"event", "step", "tokens", "seconds", "checkpoint"},
    "end": {"event", "step", "tokens", "seconds", "reason", "checkpoint", "val_loss", "bits_per_byte"},
}


def test_metrics_match_the_documented_schema(text: Path) -> None:
    result, run_events = train(text, steps=6, sample_every=3, eval_every=3)
    lines = (result.run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    keys = {}
    for line in lines:
        values = json.loads(line)
        keys[values["event"]] = set(values)
        assert events.to_json(events.from_json(line)) == line
    assert keys == SCHEMA
    assert [events.from_json(line) for line in lines] == [e for e in run_events if isinstance(e, events.Event)]
    assert json.loads(lines[-1])["reason"] == "steps"


def test_events_with_nan_and_infinity_are_valid_json() -> None:
    event = events.StepEvent(1, 2, 3.0, loss=math.nan, lr=0.1, grad_norm=math.inf, tokens_per_second=1.0)
    assert json.loads(events.to_json(event))["loss"] is None
    parsed = events.from_json(events.to_json(event))
    assert isinstance(parsed, events.StepEvent)
    assert math.isnan(parsed.loss)
    for bad in ("", "[]", "{}", '{"event": "nothing"}', '{"event": "step"}', "null"):
        with pytest.raises(UserError):
            events.from_json(bad)


def test_format_seconds() -> None:
    assert [events.format_seconds(s) for s in (0.4, 59.6, 60, 200, 3599, 7500)] == [
        "0 s", "1 min 00 s", "1 min 00 s", "3 min 20 s", "59 min 59 s", "2 h 05 min",
    ]  # fmt: skip


def test_best_checkpoint_is_kept_and_reported(text: Path) -> None:
    """The learning rate wrecks the model after its best checkpoint."""
    result, run_events = train(text, steps=60, eval_every=10, lr=0.5, warmup=58, keep=1)
    evals = {e.step: e.val_loss for e in run_events if isinstance(e, events.EvalEvent)}
    best = min(evals, key=lambda step: evals[step])
    assert best < 60
    assert result.checkpoint.name == folder.step_name(best)
    assert result.val_loss == pytest.approx(evals[best], rel=1e-4)
    assert gpt.load(result.run).path == result.checkpoint
    assert [entry.step for entry in folder.checkpoints(result.run)] == [best, 60]
    assert not folder.can_resume(result.checkpoint)  # Old checkpoints keep only their weights.
    assert folder.can_resume(result.run / folder.step_name(60))


def test_checkpoint_between_evaluations_has_no_loss(text: Path) -> None:
    run_events: list[Any] = []
    run = gpt.train(
        text, listen=run_events.append, **{**FAST, "steps": 8, "eval_every": 4, "save_every": 2, "keep": 9}
    ).run
    measured_losses = {event.step: event.val_loss for event in run_events if isinstance(event, events.EvalEvent)}
    assert sorted(measured_losses) == [4, 8]
    assert {entry.step: entry.val_loss for entry in folder.checkpoints(run)} == {2: None, 6: None, **measured_losses}


def test_patience_stops_a_run_without_progress_and_saves_it(text: Path) -> None:
    result, run_events = train(text, steps=200, eval_every=2, save_every=1000, lr=0.5, warmup=150, patience=3)
    evals = [e.best for e in run_events if isinstance(e, events.EvalEvent)]
    assert result.steps < 200
    assert evals[-4:] == [True, False, False, False]
    assert run_events[-1].reason == "patience"
    assert folder.checkpoints(result.run)[-1].step == result.steps


@pytest.mark.parametrize(
    ("known", "settings", "patience"),
    [
        ({"rows": 500}, {}, 5),
        ({"rows": 500}, {"steps": 400, "eval_every": 10}, 10),  # a quarter of the run
        ({"rows": 500}, {"steps": 400, "eval_every": 200}, 5),
        ({"rows": 500}, {"patience": 0}, 0),
        ({"rows": 500}, {"patience": 3}, 3),
        ({"rows": 500, "held_out": False}, {}, 0),
        ({}, {}, 0),
    ],
)
def test_only_runs_on_examples_have_patience_by_default(known: Any, settings: Any, patience: int) -> None:
    config = TrainConfig(pairs="rows" in known, **settings)
    assert recipe.plan(config, facts(**known)).patience == patience


@pytest.mark.parametrize(
    ("settings", "words", "verdict"),
    [
        ({}, "overfitted after", "overfitted, and the best checkpoint is used"),
        ({"lora_rank": 4, "lr": 0.1}, "the held-out loss was lowest at", "saturated"),  # too small to overfit
    ],
)
def test_fine_tunes_that_do_not_improve_stop_and_use_the_best_checkpoint(
    run_folder: Path, workdir: Path, settings: Any, words: str, verdict: str
) -> None:
    """The completions are random, so nothing that is learned from some of them helps with others."""
    rng = random.Random(0)
    pairs = [{"prompt": f"{n}=", "completion": str(rng.randrange(10**6))} for n in range(60)]
    Path("pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    heard: list[Any] = []
    config = {"init": str(run_folder), "pairs": True, "steps": 120, "sample_every": 0, "eval_every": 4, "lr": 0.02}
    result = gpt.train("pairs.jsonl", listen=heard.append, out="tuned", **{**config, **settings})
    best = int(result.checkpoint.name.removeprefix("step-"))
    evals = [event for event in heard if isinstance(event, events.EvalEvent)]
    patience = json.loads(Path("tuned/run.json").read_text())["resolved"]["patience"]
    assert result.steps == best + 4 * patience < 120
    assert min(evals, key=lambda event: event.val_loss).step == best
    notes = [event.text for event in heard if isinstance(event, events.Note)]
    assert any(note.startswith(f"{words} step {best}; that checkpoint is used") for note in notes)
    sample = next(event for event in reversed(heard) if isinstance(event, events.SampleEvent))
    assert (sample.step, sample.text, sample.prompt) == (best, result.sample, result.prompt)
    assert result.verdict.startswith(verdict) and sample.verdict == result.verdict


@pytest.mark.parametrize("has_few", [True, False])
def test_samples_of_few_documents_begin_with_held_out_text(
    text: Path, monkeypatch: pytest.MonkeyPatch, has_few: bool
) -> None:
    if not has_few:
        monkeypatch.setattr("gpt.training.data.MIN_DOCUMENTS", 1)
    result, heard = train(text, steps=2, sample_every=1)
    samples = [event for event in heard if isinstance(event, events.SampleEvent)]
    assert [sample.step for sample in samples] == [1, 2]
    assert all(sample.text.startswith(sample.prompt) for sample in samples)
    assert {sample.prompt for sample in samples} == {result.prompt}
    assert bool(result.prompt) == has_few
    assert "\n" + result.prompt in text.read_text(encoding="utf-8")[-len(text.read_bytes()) // 8 :]


def test_plan_comes_before_compiling(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stepping.Stepper, "compile", lambda stepper: None)
    monkeypatch.setattr("gpt.training.recipe.CPU_FLOPS_PER_WIDTH", dict.fromkeys(("float32", "bfloat16"), 1.0))
    heard = train(text, steps=2, compile="on")[1]
    compiling = heard.index(events.Progress("compiling the step"))
    plan = [event.text for event in heard[:compiling] if isinstance(event, events.Note)]
    assert plan[-2].startswith("model nano: ") and plan[-1].startswith("2 steps of 256 tokens, ")
    assert re.search(r" \(about .+ on two cores\), on cpu", plan[-1])


def test_tiny_text_is_told_what_to_expect(workdir: Path, text: Path) -> None:
    heard = []
    for size in (900, 10_000):
        Path("tiny.txt").write_bytes(text.read_bytes()[:size])
        heard += [event.text for event in train(Path("tiny.txt"), steps=1)[1] if isinstance(event, events.Note)]
    assert [note for note in heard if "expect letters" in note] == [
        "the text has only 900 bytes: expect letters and broken words; for sentences, give a megabyte"
    ]


def test_reported_loss_matches_evaluate(text: Path, tmp_path: Path) -> None:
    result, _ = train(text, steps=10)
    data = text.read_bytes()
    held_out = data[len(data) - round(len(data) * 0.1) :].decode()
    measured = gpt.load(result.run).evaluate([held_out])
    assert measured.loss == pytest.approx(result.val_loss, rel=1e-6)
    assert measured.bits_per_byte == pytest.approx(result.bits_per_byte, rel=1e-6)


def test_held_out_text_does_not_affect_training(text: Path) -> None:
    """The texts differ only in the held-out part."""
    data = text.read_bytes()
    held_out_start = len(data) - round(len(data) * 0.1)
    changed_text = text.with_name("other.txt")
    changed_text.write_bytes(data[:held_out_start] + b"q" * (len(data) - held_out_start))
    one, _ = train(text, steps=4)
    two, _ = train(changed_text, steps=4)
    assert all(torch.equal(a, b) for a, b in zip(weights(one.run).values(), weights(two.run).values(), strict=True))
    assert two.val_loss != one.val_loss


def test_separate_held_out_text_is_evaluated(text: Path) -> None:
    held_out_text = text.with_name("held.txt")
    held_out_text.write_text(make_text(300, seed=9), encoding="utf-8")
    result, _ = train(text, steps=4, val_text=str(held_out_text))
    assert gpt.load(result.run).loss(held_out_text.read_bytes().decode()) == pytest.approx(result.val_loss, rel=1e-5)
    document = TokenFolder(result.run / "tokens").stream("train").documents[0]
    decoded = gpt.load(result.run).tokenizer.decode(document[:].tolist())
    assert decoded == text.read_bytes().decode()


def test_held_out_part_of_one_token_is_refused(workdir: Path) -> None:
    short_text = workdir / "short.txt"
    short_text.write_text("twelve bytes")
    with pytest.raises(UserError, match="1 held-out bytes are one token"):
        gpt.train(short_text, tokenizer="bytes", steps=1)
    assert not Path("runs").exists()


def test_run_without_held_out_text_reports_no_loss(text: Path) -> None:
    result, _ = train(text, steps=5, val_fraction=0)
    assert (result.val_loss, result.bits_per_byte) == (None, None)
    assert result.checkpoint.name == "step-000005"


def test_short_text_reduces_the_context(workdir: Path) -> None:
    short_text = workdir / "short.txt"
    short_text.write_text("hello world, " * 3)
    result, run_events = train(short_text, steps=2, tokenizer="bytes", vocab_size=None, block_size=64, batch_tokens=128)
    notes = [e.text for e in run_events if isinstance(e, events.Note)]
    assert any("context reduced from 64 to 36" in note for note in notes)
    assert gpt.load(result.run).model.config.block_size == 36


def scale_loss(monkeypatch: pytest.MonkeyPatch, factor: float, calls: range) -> None:
    """Multiplies the loss by ``factor`` in the computations ``calls``, counted from 1."""
    original, call_numbers = stepping.tied_cross_entropy, itertools.count(1)
    monkeypatch.setattr(
        stepping, "tied_cross_entropy", lambda *args: original(*args) * (factor if next(call_numbers) in calls else 1)
    )


def test_repeated_nan_loss_ends_the_run(
    text: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    command: Gpt = request.getfixturevalue("gpt")
    original = stepping.tied_cross_entropy
    scale_loss(monkeypatch, math.nan, range(7, 1000))
    run_events: list[events.Event] = []
    with pytest.raises(WorkError, match="the loss became nan .* at step 9"):
        gpt.train(text, steps=20, eval_every=3, listen=run_events.append, **TINY)
    (rollback,) = [event for event in run_events if isinstance(event, events.RollbackEvent)]
    assert (rollback.step, rollback.failed_step, rollback.rate_factor) == (6, 9, 0.3)
    assert gpt.load("runs/book").path.name == "step-000006"
    assert json.loads(Path("runs/book/metrics.jsonl").read_text().splitlines()[-1])["reason"] == "diverged"
    one_line_of_what_and_what_next(command("train", "--resume"), "no unfinished run")
    monkeypatch.setattr(stepping, "tied_cross_entropy", original)
    assert command("train", "--resume", "runs/book").code == 0  # An explicit --resume continues a diverged run.


def test_nan_step_is_skipped(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scale_loss(monkeypatch, math.nan, range(6, 7))
    result, run_events = train(text, steps=20, eval_every=6, save_every=6, keep=9)
    assert not any(isinstance(event, events.RollbackEvent) for event in run_events)
    assert math.isnan(losses(run_events)[5])
    # The skipped step 6 is not evaluated.
    assert [event.step for event in run_events if isinstance(event, events.EvalEvent)] == [12, 18, 20]
    assert [entry.step for entry in folder.checkpoints(result.run)] == [12, 18, 20]
    assert math.isfinite(result.val_loss)
    assert all(tensor.isfinite().all() for tensor in weights(result.run).values())


def test_exploding_loss_rolls_back_with_a_lower_learning_rate(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights and moments are restored, so the next loss is reproduced."""
    scale_loss(monkeypatch, 1000, range(46, 49))
    result, run_events = train(text, steps=60, lr=1e-2, eval_every=15, schedule="constant", dropout=0.0)
    (rollback,) = [event for event in run_events if isinstance(event, events.RollbackEvent)]
    assert (rollback.step, rollback.failed_step) == (45, 48)
    after = [event for event in run_events[run_events.index(rollback) :] if isinstance(event, events.StepEvent)]
    assert [event.step for event in after] == list(range(46, 61))
    assert [event.lr for event in after] == pytest.approx([3e-3] * 15)
    (first,) = [e for e in run_events[: run_events.index(rollback)] if isinstance(e, events.StepEvent) and e.step == 46]
    assert after[0].loss == pytest.approx(first.loss / 1000, rel=1e-5)
    assert result.steps == 60


# Defaults chosen for the user


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"steps": 10, "warmup": 40}, ["warmup is 40 steps, the run 10: the learning rate reaches 0.25 of its peak"]),
        ({"steps": 10, "warmup": 10, "decay": 3}, []),
        ({"steps": 10, "decay": 40}, ["decay is 40 steps, the run 10: the learning rate decays in all of them"]),
        ({"steps": 10, "schedule": "cosine", "decay": 3}, ["--decay has no effect with --schedule cosine"]),
    ],
)
def test_settings_without_effect_are_reported(settings: dict[str, Any], expected: list[str]) -> None:
    config = TrainConfig(preset="nano", **settings)
    notes = recipe.notes(config, facts(), recipe.plan(config, facts()))
    assert len(notes) == len(expected)
    assert all(note.startswith(line) for note, line in zip(notes, expected, strict=True))


def test_every_preset_resolves() -> None:
    for name, preset in PRESETS.items():
        plan = resolved(preset=name)
        assert plan.lr == 2 * preset.lr  # the learning rate for Muon
        assert plan.batch_tokens == plan.rows * plan.model.block_size
        assert plan.rows % plan.micro_batch == 0
        assert abs(plan.batch_tokens - preset.batch_tokens) < preset.model.block_size


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"epochs": 1.0}, (0.0, 0.1)),
        ({"epochs": 4.0, "n_tokens": 45_000}, (0.0, 0.33)),  # A decay of 1 would need 12 epochs.
        ({"epochs": 10.0, "n_tokens": 400_000}, (0.0, 0.28)),  # A decay of 1 would need 36 epochs.
        ({"epochs": 18.0, "n_tokens": 45_000}, (0.1, 1.0)),
        ({"epochs": 18.0, "n_tokens": 60_000}, (0.0, 1.0)),
        ({"epochs": 6.0, "dropout": 0.3}, (0.3, 0.47)),
        ({"epochs": 6.0, "weight_decay": 0.0}, (0.0, 0.0)),
    ],
)
def test_dropout_and_weight_decay_follow_from_epochs(settings: dict[str, Any], expected: tuple[float, float]) -> None:
    plan = resolved(preset="nano", **settings)
    assert (plan.model.dropout, plan.weight_decay) == expected


@pytest.mark.parametrize(
    ("settings", "in_bfloat16", "in_float32"),
    [
        ({}, True, True), ({"steps": 1000}, False, False), ({"steps": 1000, "compile": "on"}, True, True),
        ({"compile": "off"}, False, False), ({"minutes": 60.0}, False, False),  # Its speed is not known yet.
        ({"recompute": True}, False, False), ({"shard": "full"}, False, False),
        ({"teachers": 4, "steps": 2000}, False, False), ({"teachers": 4, "steps": 4000}, True, True),
        ({"preset": "small", "steps": 10**6}, False, False),
    ],
)  # fmt: skip
def test_cpu_compilation_depends_on_length_size_and_dtype(
    settings: dict[str, Any], in_bfloat16: bool, in_float32: bool
) -> None:
    """The steps of a run are compiled if they take at least 70 seconds in bfloat16, or 140 in float32."""
    for has_compiler in (True, False):
        for dtype, compiles in (("bfloat16", in_bfloat16), ("float32", in_float32)):
            known = facts(tokens=10**6, dtype=dtype, has_compiler=has_compiler)
            actual = recipe.plan(TrainConfig(**{"preset": "nano", **settings}), known).compile
            assert actual == (compiles and (has_compiler or settings.get("compile") == "on"))


@pytest.mark.parametrize(
    ("settings", "compiles"),
    [
        ({"steps": 100}, True),  # 124 million parameters and 52 million tokens
        ({"steps": 50}, False),
        ({"steps": 50, "compile": "on"}, True),
        ({"preset": "nano", "steps": 10**6}, False),
    ],
)
def test_gpu_compiles_long_runs_of_large_models(settings: dict[str, Any], compiles: bool) -> None:
    gpu = facts(tokens=250_000_000, vocab_size=50_257, device="cuda", dtype="bfloat16", memory=80 * 2**30)
    assert recipe.plan(TrainConfig(**{"preset": "gpt2", **settings}), gpu).compile == compiles


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"epochs": 0.0}, "epochs is 0;"),
        ({"batch_tokens": 100}, "batch-tokens 100 is not a multiple of the context, 128"),
        ({"micro_batch": "3"}, "a micro-batch of 3 does not divide"),
        ({"micro_batch": "x"}, 'micro-batch is "x"'),
        ({"dropout": 1.0}, "dropout is 1.0"),
    ],
)
def test_contradicting_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        resolved(**settings)


def test_vocab_size_needs_tokenizer_auto() -> None:
    with pytest.raises(UserError, match="needs --tokenizer auto"):
        TrainConfig(tokenizer="bytes", vocab_size=300)


def test_settings_round_trip_through_toml() -> None:
    config = TrainConfig(steps=7, lr=0.01, out='a "b" \\ c\x7f\né', val_fraction=0.2)
    assert from_dict(TrainConfig, tomllib.loads(to_toml(dataclasses.asdict(config))), "x") == config


def test_unavailable_devices_and_dtypes_are_refused() -> None:
    if not torch.cuda.is_available():
        with pytest.raises(UserError, match='no device "cuda"'):
            pick("cuda")
    with pytest.raises(UserError, match='no dtype "int4"'):
        pick("cpu", "int4")
    with pytest.raises(UserError, match="float16"):
        pick("cpu", "float16")
    assert pick("cpu").dtype == torch.float32


@pytest.mark.slow
def test_loss_decreases_in_bfloat16(text: Path) -> None:
    _, run_events = train(text, steps=60, lr=3e-3, dtype="bfloat16")
    assert losses(run_events)[-1] < losses(run_events)[0] - 0.5


def test_first_ten_losses_are_frozen(text: Path) -> None:
    """Detects changes of arithmetic, data order or initialization."""
    _, run_events = train(text, steps=10, lr=1e-2, warmup=2, optimizer="adamw", schedule="cosine")
    assert losses(run_events) == pytest.approx(FROZEN, abs=2e-3)


FROZEN: list[float] = [5.9912, 5.8383, 5.5959, 5.3777, 5.1782, 5.0426, 4.9415, 4.8673, 4.8932, 4.8721]
