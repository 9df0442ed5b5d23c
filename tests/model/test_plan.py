"""Plans of `gpt params --devices`."""

import json
import time
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from conftest import Gpt, facts, one_line_of_what_and_what_next
from models import rank_parameters

from benchmarks import plan as plan_page
from gpt.config.model import PRESETS, GPTConfig
from gpt.config.plan import PlanConfig
from gpt.config.train import TrainConfig
from gpt.model.memory import Setup, count_step_memory, divisors, logits_at_once
from gpt.model.params import breakdown, flops_per_token, flops_sampled
from gpt.model.plan import USABLE, fits, plans, setups, step_rows, with_largest_micro_batch
from gpt.system.errors import UserError
from gpt.system.peaks import KINDS
from gpt.training import recipe

# Training FLOPs for 300 billion tokens (Brown et al. 2020, table D.1)
TABLE_D1 = {
    "gpt3-125m": 2.25e20,
    "gpt3-1.3b": 2.38e21,
    "gpt3-13b": 2.31e22,
    "gpt3-175b": 3.14e23,
}


@pytest.mark.parametrize("name", TABLE_D1)
def test_training_flops_match_the_gpt3_paper(gpt: Gpt, name: str) -> None:
    flops = json.loads(gpt("params", name, "--tokens", "300e9", "--json").out)["flops"]
    assert flops["tokens"] == 300 * 10**9
    assert flops["training_without_scores"] == pytest.approx(TABLE_D1[name], rel=0.01)
    config = PRESETS[name].model
    scores = 12 * config.n_layer * config.n_embd * config.block_size
    assert flops["trained_token"] == 6 * (breakdown(config).trainable - breakdown(config).positions) + scores
    assert flops["training"] == flops["trained_token"] * flops["tokens"]
    assert flops_per_token(config, 77) == 3 * flops_sampled(config, 77)


def test_plan_for_gpt3_on_512_devices_fits(gpt: Gpt) -> None:
    command = ("params", "gpt3-175b", "--devices", "512", "--kind", "h100-80gb", "--tokens", "300e9")
    output = json.loads(gpt(*command, "--json").out)
    plan = output["plan"]
    assert (plan["devices"], plan["shard"], plan["fits"]) == (512, "full", True)
    # Parameters, gradients and Muon's state are about equally large. With AdamW, they take 16 bytes per parameter.
    assert output["trainable"] * 16 / 512 > output["memory"]["parameters"] * 3
    assert plan["peak"] <= plan["room"] == int(USABLE * 80e9)
    seconds = flops_per_token(PRESETS["gpt3-175b"].model, 2048) * 300e9 / (512 * 989.4e12 * 0.4)
    assert output["time"]["days"] == plan["days"] == pytest.approx(seconds / 86_400)
    assert output["time"]["tokens_per_second"] == pytest.approx(300e9 / seconds)
    integers = [v for k, v in output["memory"].items() if k not in ("moments", "sampling")]
    assert all(type(n) is int for n in [*integers, *output["memory"]["moments"].values()])
    out = gpt(*command).out
    assert f"--shard full --micro-batch {plan['micro_batch']} --recompute" in out
    assert "nothing fits" in out  # Nothing fits on a single device.
    assert f"MFU: {plan['days']:.3g} days on 512 h100-80gb" in out
    short = gpt("params", "gpt2", "--devices", "1", "--kind", "h100-80gb", "--tokens", "1e9").out
    assert "MFU: 36 min 01 s on 1 h100-80gb" in short
    assert "617,558,016" in out  # The token embedding, in the parameter table


def test_plan_that_does_not_fit_is_reported(gpt: Gpt) -> None:
    done = gpt("params", "gpt3-175b", "--devices", "2", "--kind", "t4-16gb", "--dtype", "float16")
    assert done.code == 0
    assert "does not fit in 14.4 GB" in done.out
    assert not json.loads(gpt("params", "gpt3-175b", "--devices", "2", "--json").out)["plan"]["fits"]


@pytest.mark.parametrize(("preset", "kind"), [("gpt2", "rtx-4090-24gb"), ("gpt3-6.7b", "a100-80gb")])
def test_first_setup_that_fits_is_chosen(preset: str, kind: str) -> None:
    plan_config = PlanConfig(kind=kind, devices=12)
    config, batch = PRESETS[preset].model, PRESETS[preset].batch_tokens
    device_plans = plans(config, plan_config, batch * 3)
    assert [plan.devices for plan in device_plans] == [1, 2, 4, 8, 12]
    usable_memory = int(USABLE * KINDS[kind].memory)
    rows = step_rows(config, batch * 3, False)
    for plan in device_plans:
        rejected_setups = list(setups(config, plan_config, rows, plan.devices))
        if plan.fits:
            rejected_setups = rejected_setups[: rejected_setups.index(replace(plan.setup, loss_chunk=0))]
        assert all(
            count_step_memory(config, replace(setup, loss_chunk=128)).peak > usable_memory for setup in rejected_setups
        )
        assert plan.fits == (plan.memory.peak <= usable_memory)
        assert plan.memory == count_step_memory(config, plan.setup)
    assert all(slower.days >= faster.days for slower, faster in pairwise(device_plans) if slower.days and faster.days)


@pytest.mark.parametrize("preset", ["gpt3-350m", "gpt3-2.7b", "gpt3-6.7b"])
@pytest.mark.parametrize("kind", ["h100-80gb", "t4-16gb", "cpu"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_plan_has_the_micro_batch_of_gpt_train(preset: str, kind: str, dtype: Any) -> None:
    """``gpt train`` chooses these values for ``--micro-batch auto``."""
    shape, memory = PRESETS[preset].model, KINDS["t4-16gb" if kind == "cpu" else kind].memory
    settings: dict[str, Any] = {"preset": preset, "dropout": 0.0, "steps": 1}
    device = "cpu" if kind == "cpu" else "cuda"
    known = facts(tokens=10**9, vocab_size=shape.vocab_size, device=device, dtype=dtype, memory=memory)
    planned = recipe.plan(TrainConfig(**settings), known)
    plan_config = PlanConfig(kind=kind, devices=1, dtype=dtype)
    setup = next(setups(shape, plan_config, step_rows(shape, PRESETS[preset].batch_tokens, False), 1))
    assert (planned.micro_batch, planned.loss_chunk) == (setup.micro_batch, setup.loss_chunk)


def test_frozen_base_leaves_memory_for_activations() -> None:
    """A 1.5B base model in bfloat16 on a GPU with 16 GB. In float32 with two moments it would take 24."""
    base = PRESETS["gpt2-xl"].model
    config = TrainConfig(init="base", lora_rank=8, steps=1, block_size=512, batch_tokens=2**14)

    def known(base: GPTConfig) -> recipe.Facts:
        vocab_size = base.vocab_size
        return facts(tokens=10**9, vocab_size=vocab_size, device="cuda", dtype="bfloat16", memory=16 * 10**9, base=base)

    planned = recipe.plan(config, known(base))
    assert planned.micro_batch == 4
    recipe.check_model(planned, known(base))
    large = known(replace(base, n_layer=260))
    with pytest.raises(UserError, match=r"8,[\d,]+ parameters take 17\.0 GB in training"):
        recipe.check_model(recipe.plan(config, large), large)


def test_micro_batch_is_the_largest_that_fits_without_chunks() -> None:
    config, memory = PRESETS["gpt2"].model, 16 * 10**9
    setup = with_largest_micro_batch(config, Setup(), 96, memory)
    assert (setup.loss_chunk, setup.accumulates) == (0, True)
    next_micro_batch = min(n for n in divisors(96) if n > setup.micro_batch)
    assert fits(config, setup, memory)
    assert not fits(config, replace(setup, micro_batch=next_micro_batch), memory)
    assert with_largest_micro_batch(config, Setup(), setup.micro_batch, memory) == replace(setup, accumulates=False)
    # Logits take most of the memory.
    large_vocabulary = replace(config, vocab_size=10**6, n_layer=1, n_embd=48)
    # This is slightly less memory than full logits need.
    small_memory = int(count_step_memory(large_vocabulary, Setup(accumulates=True)).peak / USABLE) - 10**6
    chunked = with_largest_micro_batch(large_vocabulary, Setup(), 96, small_memory)
    assert (chunked.micro_batch, 0 < chunked.loss_chunk < config.block_size) == (1, True)
    assert fits(large_vocabulary, chunked, small_memory)


def test_logits_per_chunk_fit_int32() -> None:
    """On 80 GB, a micro-batch of GPT-2 124M has 6.6·10⁹ logits, too many for int32."""
    config, memory = PRESETS["gpt2"].model, KINDS["h100-80gb"].memory
    setup = with_largest_micro_batch(config, Setup(), 512, memory)
    assert (setup.micro_batch, setup.loss_chunk) == (128, 0)
    for micro_batch in (1, 41, 128, 512):
        assert logits_at_once(config, Setup(micro_batch)) * 50_304 < 2**31


@pytest.mark.parametrize(
    ("name", "ranks"), [("gpt2", 1), ("gpt2", 8), ("gpt2", 32), ("gpt3-175b", 128), ("gpt3-175b", 512)]
)
def test_rank_memory_matches_its_shard(name: str, ranks: int) -> None:
    """The first rank has the largest shard."""
    config = PRESETS[name].model
    estimate = count_step_memory(config, Setup(data=ranks, shard=True, optimizer="adamw"))
    parameter_count = rank_parameters(config, ranks)
    assert estimate.parameters == estimate.gradients == pytest.approx(4 * parameter_count, rel=0.01)
    assert estimate.optimizer == pytest.approx(8 * parameter_count, rel=0.01)


def test_options_of_a_plan_are_accepted_by_train(gpt: Gpt) -> None:
    config = PRESETS["gpt3-175b"].model
    *_, plan = plans(config, PlanConfig(devices=64, optimizer="adamw"), 2**21)
    setup = plan.setup
    assert (setup.optimizer, setup.data, setup.shard, setup.recompute) == ("adamw", 64, True, True)
    printed_config = gpt("train", "--preset", "gpt3-175b", "--nproc", "8", *plan.options.split(), "--print-config").out
    options = ('shard = "full"', f'micro_batch = "{setup.micro_batch}"', "recompute = true")
    assert all(line in printed_config for line in options)


def test_smallest_setup_is_reported_if_none_fits() -> None:
    config, plan_config = PRESETS["gpt3-175b"].model, PlanConfig(kind="a100-80gb", devices=4)
    for plan in plans(config, plan_config, 2**21):
        rows = step_rows(config, 2**21, False)
        peaks = [count_step_memory(config, setup).peak for setup in setups(config, plan_config, rows, plan.devices)]
        assert not plan.fits
        assert plan.memory.peak == min(peaks)
    assert plan.memory.peak < peaks[0]


def test_single_rank_is_not_sharded() -> None:
    config = PRESETS["gpt2"].model
    for devices in (1, 2):
        plan_config = PlanConfig(devices=devices)
        assert any(setup.shard for setup in setups(config, plan_config, 64, devices)) == (devices > 1)


def test_json_has_the_same_sections_for_all_flags(gpt: Gpt) -> None:
    expected = json.loads(gpt("params", "gpt2", "--json").out)
    for flags in (["--devices", "2"], ["--mfu", "0.5"]):
        output = json.loads(gpt("params", "gpt2", *flags, "--json").out)
        assert list(output) == [*expected, "plan", "memory", "plans", "flops", "time"]
        assert all(output[key] == expected[key] for key in expected)
    assert "are unknown" in gpt("params", "nano", "--kind", "cpu").out
    outputs = [
        json.loads(line) for line in gpt("params", "gpt2", "gpt2-xl", "--devices", "1", "--json").out.splitlines()
    ]
    assert outputs[0]["time"]["days"] < outputs[1]["time"]["days"]


def test_params_of_a_checkpoint_include_memory(gpt: Gpt, run_folder: Any) -> None:
    output = json.loads(gpt("params", run_folder, "--dtype", "float32", "--json").out)
    assert output["memory"]["parameters"] == 4 * output["trainable"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--devices", "0"], "devices is 0"),
        (["--tokens", "nan"], "tokens is nan; it must be 1 or more, and finite"),
        (["--batch-tokens", "1099511628800"], "batch-tokens is 1099511628800; it must be between 1 and"),
        (["--list"], "--list shows all presets, but gpt2 asks for a single shape"),
        (["--mfu", "1.5"], "mfu is 1.5"),
        (["--batch-tokens", "1000"], "batch-tokens 1,000 is not a multiple of the context, 1,024"),
        (["--devices", "3"], "the 512 sequences of a step cannot be split evenly over 3 devices"),
        (["--dtype", "int8"], 'there is no dtype "int8"'),
        (["--mfu", "0.5", "-o", "x.html"], "--mfu estimates training"),
    ],
)
def test_invalid_options_are_refused(gpt: Gpt, args: list[str], message: str) -> None:
    one_line_of_what_and_what_next(gpt("params", "gpt2", *args), message)


def test_hints_contain_valid_options(gpt: Gpt) -> None:
    assert 'did you mean "h100-80gb"?' in gpt("params", "gpt2", "--kind", "h100-80").err
    assert gpt("params", "gpt2", "--mfu", "0.5", "-o", "x.html").err.endswith("hint: leave out -o\n")
    hint = gpt("params", "gpt2", "--devices", "3").err.splitlines()[-1]
    for options in hint.removeprefix("hint: use ").split(", or "):
        assert gpt("params", "gpt2", "--devices", "3", *options.split()).code == 0, hint


def test_plan_page_is_current() -> None:
    assert plan_page.PAGE.read_text(encoding="utf-8") == plan_page.page(), "regenerate it: python -m benchmarks.plan"


def test_huge_batch_is_planned_quickly(gpt: Gpt) -> None:
    start = time.monotonic()
    done = gpt("params", "gpt2", "--batch-tokens", str(2**40), "--json")
    assert done.code == 0, done.err
    assert time.monotonic() - start < 30
