"""Chooses the preset for ``--minutes``."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from gpt.config.device import Compute
from gpt.config.model import find_preset
from gpt.config.train import TrainConfig
from gpt.model.decoder import GPT
from gpt.model.params import breakdown
from gpt.training.memory_probe import fit_micro_batch
from gpt.training.optim import make_optimizer
from gpt.training.recipe import Facts, plan
from gpt.training.step import Stepper
from gpt.training.strategy import Single

SIZES = ("pico", "nano", "tiny", "micro", "mini", "small", "gpt2")
# A preset beats the next smaller one from this many training tokens and bytes of text per parameter, measured without
# compiling. `nano` needs more tokens and no minimum of text (benchmarks/defaults.md).
MIN_TOKENS, MIN_NANO_TOKENS, MIN_BYTES = 1.0, 1.5, 0.4
MAX_SPEEDUP = 3.0  # maximum ratio of a larger model's FLOP/s to a smaller one's
MAX_TIMED_TOKENS = 65_536  # maximum tokens per step while throughput is measured
TIMING_STEPS = (3, 4)  # warmup steps (allocation, kernel loading, graph capture), and timed steps
TIMING_SHARE = 0.03  # share of the time after which no further step is timed

Throughput = Callable[[str], float]


def preset_for_minutes(
    config: TrainConfig, compute: Compute, n_bytes: int, note: Callable[[str], None], processes: int = 1
) -> TrainConfig:
    """Chooses the preset for ``config.minutes``, or half of them with ``teachers``, unless the user chose a model.
    Passes the reason to ``note``. Assumes that speed is proportional to ``processes``."""
    shape = (config.n_layer, config.n_head, config.n_kv_head, config.n_embd, config.block_size)
    if config.minutes is None or config.preset != "auto" or config.init is not None or any(shape):
        return config

    def measure(name: str) -> float:
        return processes * measure_throughput(name, config, compute)

    minutes = config.minutes / (2 if config.teachers else 1)
    name, reason = largest_preset(minutes, n_bytes, measure)
    note(f"size {name}: {reason}")
    return replace(config, preset=name)


def largest_preset(minutes: float, n_bytes: int, measure: Throughput) -> tuple[str, str]:
    """Returns the largest preset with enough time and text, and the reason. ``measure`` returns tokens per second."""
    preset, *candidates = SIZES
    throughput = measure(preset)
    for name in candidates:
        n, smaller = parameters(name), parameters(preset)
        min_tokens, min_bytes = (MIN_NANO_TOKENS, 0.0) if name == "nano" else (MIN_TOKENS, MIN_BYTES)
        if n * min_bytes > n_bytes:
            return preset, f"{name} has {n:,} parameters, more than {1 / min_bytes:g} per byte of text"
        seconds = min_tokens * n / (MAX_SPEEDUP * throughput * smaller / n)  # a lower bound
        if seconds <= 60 * minutes:
            larger_throughput = measure(name)
            seconds = min_tokens * n / larger_throughput
        if seconds > 60 * minutes:
            reason = f"{name} would need at least {seconds / 60:,.1f} minutes to be better"
            return preset, f"at {throughput:,.0f} tokens/s; {reason}"
        preset, throughput = name, larger_throughput
    return preset, "the largest size that auto chooses"


def parameters(name: str) -> int:
    """Returns the number of trainable parameters of a preset."""
    return breakdown(find_preset(name).model).trainable


def measure_throughput(name: str, config: TrainConfig, compute: Compute) -> float:
    """Measures a preset's training throughput on random ids, in tokens per second."""
    preset = find_preset(name)
    V, T = preset.model.vocab_size, preset.model.block_size
    batch = max(T, min(preset.batch_tokens, MAX_TIMED_TOKENS) // T * T)
    timing_config = TrainConfig(preset=name, steps=1, batch_tokens=batch)
    run_settings = {field: getattr(config, field) for field in ("arch", "positions", "window", "optimizer")}
    facts = Facts.on(compute, bytes=V, tokens=batch + 1, vocab_size=V, held_out=False)
    recipe = plan(replace(timing_config, **run_settings), facts)
    model = GPT(recipe.model).to(compute.device)
    optimizer = make_optimizer(model, recipe.optimizer, recipe.weight_decay, compute.dtype)
    stepper = Stepper(Single(model, optimizer, compute), recipe)
    fit_micro_batch(stepper, T)
    ids = np.random.default_rng(0).integers(V, size=(recipe.rows, recipe.model.block_size))
    max_seconds = TIMING_SHARE * 60 * (config.minutes or math.inf)
    return batch / time_step(stepper, lambda step: (ids, ids), max_seconds, sum(TIMING_STEPS))


def time_step(
    stepper: Stepper, batch: Callable[[int], Sequence[npt.NDArray[Any]]], max_seconds: float, max_steps: int = 2**63
) -> float:
    """Returns the mean seconds of a training step on the batch of each step. Times at least two steps, and ignores
    the first ones."""
    world, seconds = stepper.world, list[float]()
    while len(seconds) < 2 or (len(seconds) < max_steps and world.broadcast_object(lambda: sum(seconds) < max_seconds)):
        start = time.perf_counter()
        x, y, *lesson = batch(len(seconds))
        stepper.step(x, y, 0.0, *lesson).read(world.synchronize)
        seconds.append(time.perf_counter() - start)
    timed = seconds[TIMING_STEPS[0] :] or seconds[1:]
    return sum(timed) / len(timed)
