"""The preset chosen for a time budget."""

from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import TINY, facts, resolved

from gpt.config.device import Compute
from gpt.config.train import TrainConfig
from gpt.parallel.world import World
from gpt.training import measuring, recipe, size
from gpt.training.size import (
    MIN_NANO_TOKENS,
    MIN_TOKENS,
    SIZES,
    largest_preset,
    measure_throughput,
    parameters,
    preset_for_minutes,
)

CPU = Compute(torch.device("cpu"), torch.float32)


def fake_throughput(flops: float, measured_names: list[str]) -> Callable[[str], float]:
    """Simulates a device of ``flops`` FLOPs per second."""

    def tokens_per_second(name: str) -> float:
        measured_names.append(name)
        return flops / (6 * parameters(name))

    return tokens_per_second


def count_teachers(tokens: int, passes: float, preset: str = "tiny", rows: int = 0, **settings: Any) -> int:
    """Returns the default number of teachers of a run with so many passes over a text."""
    config = TrainConfig(preset=preset, epochs=passes, **settings)
    return recipe.count_teachers(config, facts(bytes=3 * tokens, tokens=tokens, rows=rows))


def test_teachers_are_chosen_for_texts_that_a_run_reads_too_often() -> None:
    """The cases of benchmarks/defaults.md, in tokens and passes."""
    assert count_teachers(411_270, 38.6) == 4  # tinyshakespeare, ten minutes
    assert count_teachers(151_181, 20, "nano") == 2  # English FAQ, 480 kB
    assert count_teachers(143_668, 180, "nano") == 8  # pydocs
    assert count_teachers(411_270, 10) == count_teachers(411_270, 20) == count_teachers(542_461, 27) == 0
    assert count_teachers(20_000, 40) == 0  # The teachers would have fewer than 100 steps.
    counts = [count_teachers(411_270, passes) for passes in range(5, 200, 5)]
    assert counts == sorted(counts)


@pytest.mark.parametrize(("tokens", "settings"), [(1_100_000, {}), (400_000, {"rows": 100, "pairs": True})])
def test_teachers_are_never_chosen_for_large_texts_or_examples(tokens: int, settings: dict[str, Any]) -> None:
    assert count_teachers(tokens, 150, **settings) == 0


@pytest.mark.parametrize(
    ("settings", "layout"), [({}, "qwen3"), ({"arch": "gpt2"}, "gpt2"), ({"preset": "gpt2"}, "gpt2")]
)
def test_small_presets_are_modern(settings: dict[str, Any], layout: str) -> None:
    assert resolved(**settings).model.layout == layout


def test_size_grows_with_time() -> None:
    times = (0.1, 1, 3, 10, 30, 100, 1000, 1e5, 1e7)
    presets = [largest_preset(minutes, 10**12, fake_throughput(1e11, []))[0] for minutes in times]
    assert presets == sorted(presets, key=SIZES.index)
    assert presets[0] == "pico"
    assert presets[-1] == "gpt2"
    for below, name in pairwise(SIZES):
        # Minutes to train on the minimum tokens per parameter
        minutes = (MIN_NANO_TOKENS if name == "nano" else MIN_TOKENS) * 6 * parameters(name) ** 2 / 1e11 / 60
        assert largest_preset(1.01 * minutes, 10**12, fake_throughput(1e11, []))[0] == name
        chosen_before, why = largest_preset(0.99 * minutes, 10**12, fake_throughput(1e11, []))
        assert chosen_before == below
        assert f"; {name} would need at least {minutes:,.1f} minutes" in why


@pytest.mark.parametrize(
    ("name", "tokens_per_parameter", "chosen"),
    [("nano", 1.4, "pico"), ("nano", 1.6, "nano"), ("tiny", 0.9, "nano"), ("tiny", 1.1, "tiny")],
)
def test_size_is_limited_by_tokens_per_parameter(
    name: str, tokens_per_parameter: float, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(size, "measure_throughput", lambda name, config, compute: 10_000.0)
    minutes = tokens_per_parameter * parameters(name) / 10_000 / 60
    assert preset_for_minutes(TrainConfig(minutes=minutes), CPU, 10**9, lambda text: None).preset == chosen


def test_size_is_limited_by_the_bytes_of_text() -> None:
    min_bytes = parameters("mini") * 2 // 5
    for n_bytes, chosen in ((min_bytes + 1, "mini"), (min_bytes - 1, "micro"), (1000, "nano")):
        name, why = largest_preset(1e7, n_bytes, fake_throughput(1e14, []))
        assert name == chosen
        assert f"{SIZES[SIZES.index(name) + 1]} has" in why


@pytest.mark.parametrize(("step_seconds", "steps"), [(0.01, 7), (0.5, 4), (60.0, 2)])
def test_timing_takes_a_small_share_of_the_minutes(
    step_seconds: float, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock: list[float] = []
    monkeypatch.setattr(size, "time", SimpleNamespace(perf_counter=lambda: sum(clock)))
    done = SimpleNamespace(read=lambda wait: clock.append(step_seconds))
    monkeypatch.setattr(size.Stepper, "step", lambda *args: done)
    speed = measure_throughput("pico", TrainConfig(minutes=1.0), CPU)
    assert speed == pytest.approx(1024 / step_seconds)
    assert len(clock) == steps


def test_sizes_out_of_reach_are_not_measured() -> None:
    measured_names: list[str] = []
    assert largest_preset(1, 10**12, fake_throughput(1e11, measured_names))[0] == "pico"
    assert measured_names == ["pico", "nano"]


@pytest.mark.parametrize(
    "settings", [{}, {"minutes": 1, "preset": "mini"}, {"minutes": 1, "n_layer": 3}, {"minutes": 1, **TINY}]
)
def test_explicit_size_is_kept(settings: dict[str, object]) -> None:
    config = TrainConfig(**settings)  # type: ignore[arg-type]
    assert preset_for_minutes(config, CPU, 10**6, lambda text: pytest.fail(text)) is config


@pytest.mark.slow
def test_throughput_is_measured_on_this_machine() -> None:
    notes: list[str] = []
    config = preset_for_minutes(TrainConfig(minutes=10**6), CPU, 800_000, notes.append)
    assert config.preset == "nano"
    assert notes == ["size nano: tiny has 2,164,672 parameters, more than 2.5 per byte of text"]
    assert 100 < measure_throughput("nano", TrainConfig(), CPU) < 1e7


def test_window_time_ignores_the_first_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU loads kernels in the first evaluation. In later evaluations, many windows take as long as one."""
    sizes: list[int] = []

    def measure(windows: Any, compute: Any, stop: Any) -> None:
        clock.append(0.001 if sizes else 0.2)
        sizes.append(len(windows))

    clock: list[float] = []
    monkeypatch.setattr(measuring, "time", SimpleNamespace(perf_counter=lambda: sum(clock)))
    single: Any = SimpleNamespace(world=World(), model=None, compute=None)
    windows: Any = range(100)
    assert measuring.measure_window_seconds(single, windows, 0.3, measure) == pytest.approx(0.001 / 64)
    assert sizes == [1, 1, 4, 16, 64]
    assert measuring.measure_window_seconds(single, windows[:0], 2.0, measure) < 1e-6
