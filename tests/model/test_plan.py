"""`gpt params --devices`: what fits on how many devices, what it costs, what is said of it."""

import json
import time
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from conftest import Gpt, one_line_of_what_and_what_next
from models import rank_parameters

from benchmarks import plan as plan_page
from gpt.config import PRESETS, TrainConfig
from gpt.device import Compute
from gpt.model.memory import Setup, divisors, logits_at_once, training
from gpt.model.params import breakdown, flops_per_token, flops_sampled
from gpt.model.plan import USABLE, fits, largest, plans, setups, step_rows
from gpt.peaks import KINDS
from gpt.plan_config import PlanConfig
from gpt.training.recipe import resolve

# Brown et al. 2020, table D.1: FLOPs of the training of models, of 300 billion tokens each.
TABLE_D1 = {
    "gpt3-125m": 2.25e20,
    "gpt3-1.3b": 2.38e21,
    "gpt3-13b": 2.31e22,
    "gpt3-175b": 3.14e23,
}


@pytest.mark.parametrize("name", TABLE_D1)
def test_operations_of_the_gpt3_paper(gpt: Gpt, name: str) -> None:
    said = json.loads(gpt("params", name, "--tokens", "300e9", "--json").out)["flops"]
    assert said["tokens"] == 300 * 10**9
    assert said["training_without_scores"] == pytest.approx(TABLE_D1[name], rel=0.01)
    config = PRESETS[name].model
    scores = 12 * config.n_layer * config.n_embd * config.block_size
    assert said["trained_token"] == 6 * (breakdown(config).trainable - breakdown(config).positions) + scores
    assert said["training"] == said["trained_token"] * said["tokens"]
    assert flops_per_token(config, 77) == 3 * flops_sampled(config, 77)


def test_gpt3_on_a_thousand_devices(gpt: Gpt) -> None:
    words = ("params", "gpt3-175b", "--devices", "1024", "--kind", "h100-80gb", "--tokens", "300e9")
    said = json.loads(gpt(*words, "--json").out)
    plan = said["plan"]
    assert (plan["devices"], plan["shard"], plan["fits"]) == (1024, "full", True)
    assert said["trainable"] * 16 / 1024 > said["memory"]["parameters"] * 3  # Muon, and gradients, are less than AdamW
    assert plan["peak"] <= plan["room"] == int(USABLE * 80e9)
    seconds = flops_per_token(PRESETS["gpt3-175b"].model, 2048) * 300e9 / (1024 * 989.4e12 * 0.4)
    assert said["time"]["days"] == plan["days"] == pytest.approx(seconds / 86_400)
    assert said["time"]["tokens_per_second"] == pytest.approx(300e9 / seconds)
    integers = [v for k, v in said["memory"].items() if k not in ("moments", "sampling")]
    assert all(type(n) is int for n in [*integers, *said["memory"]["moments"].values()])
    out = gpt(*words).out
    assert f"--shard full --tensor {plan['tensor']} --micro-batch {plan['micro_batch']} --recompute" in out
    assert "nothing fits" in out  # on one
    assert "617,558,016" in out  # the table of parameters is there too


def test_what_does_not_fit_is_said(gpt: Gpt) -> None:
    done = gpt("params", "gpt3-175b", "--devices", "2", "--kind", "t4-16gb", "--dtype", "float16")
    assert done.code == 0
    assert "does not fit in 14.4 GB" in done.out
    assert not json.loads(gpt("params", "gpt3-175b", "--devices", "2", "--json").out)["plan"]["fits"]


@pytest.mark.parametrize(("preset", "kind"), [("gpt2", "rtx-4090-24gb"), ("gpt3-6.7b", "a100-80gb")])
def test_the_first_that_fits_is_taken(preset: str, kind: str) -> None:
    asked = PlanConfig(kind=kind, devices=12)
    config, batch = PRESETS[preset].model, PRESETS[preset].batch_tokens
    found = plans(config, asked, batch * 3)
    assert [plan.devices for plan in found] == [1, 2, 4, 8, 12]
    room = int(USABLE * KINDS[kind].memory)
    rows = step_rows(config, batch * 3, False)
    for plan in found:
        before = list(setups(config, asked, rows, plan.devices))
        if plan.fits:
            before = before[: before.index(replace(plan.setup, loss_chunk=0))]
        assert all(training(config, replace(each, loss_chunk=128)).peak > room for each in before)
        assert plan.fits == (plan.memory.peak <= room)
        assert plan.memory == training(config, plan.setup)
    assert all(one.days >= more.days for one, more in pairwise(found) if one.days and more.days)


@pytest.mark.parametrize("preset", ["gpt3-350m", "gpt3-2.7b", "gpt3-6.7b"])
@pytest.mark.parametrize("kind", ["h100-80gb", "t4-16gb", "cpu"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_what_train_takes_is_what_is_said(monkeypatch: pytest.MonkeyPatch, preset: str, kind: str, dtype: Any) -> None:
    """Under ``--micro-batch auto``."""
    shape, room = PRESETS[preset].model, KINDS["t4-16gb" if kind == "cpu" else kind].memory
    monkeypatch.setattr(Compute, "_memory", lambda compute: room)
    monkeypatch.setattr("gpt.peaks.host_memory", lambda: room)
    compute = Compute(torch.device("cpu" if kind == "cpu" else "cuda"), getattr(torch, dtype))
    settings: dict[str, Any] = {"preset": preset, "dropout": 0.0, "steps": 1}
    config = TrainConfig(**settings)
    recipe = resolve(config, compute, 10**9, 10**9, shape.vocab_size, False, lambda note: None)
    asked = PlanConfig(kind=kind, devices=1, recompute="off", dtype=dtype)
    [plan] = plans(shape, asked, PRESETS[preset].batch_tokens)
    assert (recipe.micro_batch, recipe.loss_chunk) == (plan.setup.micro_batch, plan.setup.loss_chunk)


def test_a_micro_batch_is_the_largest_that_fits_with_its_logits_at_once() -> None:
    config, room = PRESETS["gpt2"].model, 16 * 10**9
    found = largest(config, Setup(), 96, room)
    assert (found.loss_chunk, found.accumulates) == (0, True)
    above = min(n for n in divisors(96) if n > found.micro_batch)
    assert fits(config, found, room)
    assert not fits(config, replace(found, micro_batch=above), room)
    assert largest(config, Setup(), found.micro_batch, room) == replace(found, accumulates=False)
    many = replace(config, vocab_size=10**6, n_layer=1, n_embd=48)  # so that one sequence's logits are most of it
    little = int(training(many, Setup(accumulates=True)).peak / USABLE) - 10**6  # a little less than these want
    one = largest(many, Setup(), 96, little)
    assert (one.micro_batch, 0 < one.loss_chunk < config.block_size) == (1, True)
    assert fits(many, one, little)


def test_logits_can_be_counted_in_int32() -> None:
    """Whatever is computed at once: of GPT-2 124M on 80 GB that is 128 sequences, of 6.6·10⁹ logits."""
    config, room = PRESETS["gpt2"].model, KINDS["h100-80gb"].memory
    found = largest(config, Setup(), 512, room)
    assert (found.micro_batch, found.loss_chunk) == (128, 0)
    for micro_batch in (1, 41, 128, 512):
        assert logits_at_once(config, Setup(micro_batch)) * 50_304 < 2**31


@pytest.mark.parametrize(
    ("name", "data", "tensor"),
    [("gpt2", 1, 1), ("gpt2", 8, 1), ("gpt2", 1, 4), ("gpt2", 4, 2), ("gpt3-175b", 128, 8), ("gpt3-175b", 512, 2)],
)
def test_a_rank_holds_its_part(name: str, data: int, tensor: int) -> None:
    """Against the cut itself, of which the first rank has the most."""
    config = PRESETS[name].model
    counted = training(config, Setup(data=data, shard=True, tensor=tensor, optimizer="adamw"))
    found = rank_parameters(config, data, tensor)
    assert counted.parameters == counted.gradients == pytest.approx(4 * found, rel=0.01)
    assert counted.optimizer == pytest.approx(8 * found, rel=0.01)


def test_what_is_asked_for_is_kept_and_train_takes_it(gpt: Gpt) -> None:
    config = PRESETS["gpt3-6.7b"].model
    asked = PlanConfig(devices=8, shard="full", tensor=2, micro_batch=2, recompute="on", optimizer="adamw")
    *_, plan = plans(config, asked, 2**21)
    assert plan.setup == Setup(2, True, "bfloat16", "adamw", True, 0, 4, True, 2)
    said = gpt("train", "--preset", "gpt3-6.7b", "--nproc", "8", *plan.options.split(), "--print-config").out
    assert all(line in said for line in ('shard = "full"', "tensor = 2", 'micro_batch = "2"', "recompute = true"))
    *_, plan = plans(config, PlanConfig(devices=2, shard="none", tensor=2, recompute="off"), 2**21)
    assert (plan.setup.shard, plan.setup.tensor, plan.setup.data, plan.setup.recompute) == (False, 2, 1, False)


def test_where_nothing_fits_what_needs_least_is_told() -> None:
    config, asked = PRESETS["gpt3-175b"].model, PlanConfig(kind="a100-80gb", devices=4)
    for plan in plans(config, asked, 2**21):
        rows = step_rows(config, 2**21, False)
        peaks = [training(config, each).peak for each in setups(config, asked, rows, plan.devices)]
        assert not plan.fits
        assert plan.memory.peak == min(peaks)
    assert plan.memory.peak < peaks[0]


def test_a_device_by_itself_shares_nothing_out() -> None:
    config = PRESETS["gpt2"].model
    for devices, tensor in ((1, 1), (2, 2), (4, 2)):
        asked = PlanConfig(devices=devices, tensor=tensor)
        assert any(each.shard for each in setups(config, asked, 64, devices)) == (devices > tensor)


def test_sections(gpt: Gpt) -> None:
    plain = json.loads(gpt("params", "gpt2", "--json").out)
    for flags in (["--devices", "2"], ["--mfu", "0.5"], ["--memory"], ["--flops", "--time"]):
        said = json.loads(gpt("params", "gpt2", *flags, "--json").out)
        assert list(said) == [*plain, "plan", "memory", "plans", "flops", "time"]
        assert all(said[key] == plain[key] for key in plain)
    assert "are unknown" in gpt("params", "nano", "--kind", "cpu").out
    both = [json.loads(line) for line in gpt("params", "gpt2", "gpt2-xl", "--devices", "1", "--json").out.splitlines()]
    assert both[0]["time"]["days"] < both[1]["time"]["days"]


def test_a_checkpoint_has_costs_too(gpt: Gpt, run_folder: Any) -> None:
    said = json.loads(gpt("params", run_folder, "--dtype", "float32", "--json").out)
    assert said["memory"]["parameters"] == 4 * said["trainable"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--devices", "0"], "devices is 0"),
        (["--tokens", "nan"], "tokens is nan; it must be 1 or more, and finite"),
        (["--batch-tokens", "1099511628800"], "batch-tokens is 1099511628800; it must be between 1 and"),
        (["--list"], "--list shows all presets, but gpt2 asks for a single shape"),
        (["--mfu", "1.5"], "mfu is 1.5"),
        (["--micro-batch", "7"], "a micro-batch of 7 does not divide the 512 sequences of a rank"),
        (["--batch-tokens", "1000"], "batch-tokens 1,000 is not a multiple of the context, 1,024"),
        (["--devices", "16", "--tensor", "8"], "the model's 12 heads cannot be split evenly over 8 ranks"),
        (["--devices", "6", "--tensor", "4"], "--tensor 4 does not divide the 6 devices"),
        (["--devices", "3"], "the 512 sequences of a step cannot be split evenly over 3 devices"),
        (["--shard", "ful"], 'there is no shard "ful"'),
        (["--dtype", "int8"], 'there is no dtype "int8"'),
        (["--mfu", "0.5", "-o", "x.html"], "--mfu estimates training"),
        (["--time", "-o", "x.html"], "--devices estimates training"),
    ],
)
def test_wrong_input_is_one_clear_line(gpt: Gpt, args: list[str], message: str) -> None:
    one_line_of_what_and_what_next(gpt("params", "gpt2", *args), message)


def test_hints_can_be_typed_as_they_stand(gpt: Gpt) -> None:
    assert 'did you mean "h100-80gb"?' in gpt("params", "gpt2", "--kind", "h100-80").err
    hint = gpt("params", "gpt2", "--devices", "3").err.splitlines()[-1]
    for words in hint.removeprefix("hint: use ").split(", or "):
        assert gpt("params", "gpt2", "--devices", "3", *words.split()).code == 0, hint


def test_the_page_of_plans_is_current() -> None:
    assert plan_page.PAGE.read_text(encoding="utf-8") == plan_page.page(), "regenerate it: python -m benchmarks.plan"


def test_a_batch_of_any_size_is_planned_at_once(gpt: Gpt) -> None:
    began = time.monotonic()
    done = gpt("params", "gpt2", "--batch-tokens", str(2**40), "--json")
    assert done.code == 0, done.err
    assert time.monotonic() - began < 30
