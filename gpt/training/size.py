"""Which size learns most in the minutes that a run may take: by the size of the text and the rate measured here."""

import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from gpt.config import TrainConfig, find_preset
from gpt.device import Compute
from gpt.model.decoder import GPT
from gpt.model.params import breakdown
from gpt.training.optim import make_optimizer
from gpt.training.recipe import resolve
from gpt.training.step import Stepper

LADDER = ("nano", "micro", "mini", "small", "gpt2")
TOKENS = 1.0  # a parameter that a size must have time to read before it is better than the one below (docs/defaults.md)
GAIN = 3.0  # how much faster than a small model, per parameter, a large one may be at most
TRIED = 65_536  # tokens a step at most, while the rate is measured
STEPS = (2, 4)  # that allocate, and that are timed

Rate = Callable[[str], float]


def sized(
    config: TrainConfig, compute: Compute, n_bytes: int, note: Callable[[str], None], processes: int = 1
) -> TrainConfig:
    """``config`` with the preset for its ``minutes``, where it leaves that open; tells ``note`` why. Several
    ``processes`` are taken to be so many times as fast as this one."""
    shape = (config.n_layer, config.n_head, config.n_embd, config.block_size)
    if config.minutes is None or config.preset != "auto" or config.init is not None or any(shape):
        return config
    name, why = preset_for(config.minutes, n_bytes, lambda name: processes * measured_rate(name, config, compute))
    note(f"size {name}: {why}")
    return replace(config, preset=name)


def preset_for(minutes: float, n_bytes: int, rate: Rate) -> tuple[str, str]:
    """The largest size that is smaller than the text and has time to read a token a parameter, and why it is that.
    ``rate``: tokens a second of a size."""
    chosen, pace = LADDER[0], rate(LADDER[0])
    for name in LADDER[1:]:
        n, below = parameters(name), parameters(chosen)
        if n > n_bytes:
            return chosen, f"{name} has {n:,} parameters, more than the text has bytes"
        seconds = TOKENS * n / (GAIN * pace * below / n)  # at least, to read so much
        if seconds <= 60 * minutes:
            faster = rate(name)
            seconds = TOKENS * n / faster
        if seconds > 60 * minutes:
            return chosen, f"at {pace:,.0f} tokens/s; {name} would need some {seconds / 60:,.0f} minutes to be better"
        chosen, pace = name, faster
    return chosen, "the largest that is chosen by itself"


def parameters(name: str) -> int:
    """What a size has to learn."""
    return breakdown(find_preset(name).model).trainable


def measured_rate(name: str, config: TrainConfig, compute: Compute) -> float:
    """Tokens a second of steps of a preset here, on ids that mean nothing."""
    preset = find_preset(name)
    V, T = preset.model.vocab_size, preset.model.block_size
    batch = max(T, min(preset.batch_tokens, TRIED) // T * T)
    asked = TrainConfig(preset=name, arch=config.arch, positions=config.positions, optimizer=config.optimizer, steps=1)
    recipe = resolve(replace(asked, batch_tokens=batch), compute, V, batch + 1, V, False, lambda text: None)
    model = GPT(recipe.model).to(compute.device)
    optimizer = make_optimizer(model, recipe.optimizer, recipe.weight_decay, compute.dtype)
    stepper = Stepper(model, optimizer, compute, recipe, lambda micro_batch: None)
    ids = np.random.default_rng(0).integers(V, size=(recipe.rows, T))
    for _ in range(STEPS[0]):
        stepper.step(ids, ids, 0.0).read()
    started = time.perf_counter()
    for _ in range(STEPS[1]):
        stepper.step(ids, ids, 0.0).read()
    return STEPS[1] * batch / (time.perf_counter() - started)
