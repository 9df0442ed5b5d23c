"""Training for so many minutes: the preset that learns most in them, and the steps that fit."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated

import numpy as np

from gpt.config import Arch, TrainConfig, find_preset
from gpt.device import Compute
from gpt.errors import UserError
from gpt.model.decoder import GPT
from gpt.model.params import breakdown
from gpt.settings import Count, Within
from gpt.training.optim import make_optimizer
from gpt.training.parallel import Single
from gpt.training.recipe import resolve
from gpt.training.step import Stepper

PROBE_SHARE, PROBE_SECONDS = 0.03, 5.0  # of the whole time, and at most, spent on measuring
PROBE_STEPS = (2, 6)  # at least, and where they take no more than those seconds; the first ones allocate
OVERHEAD = 0.2  # of the whole time, for everything but training: what does not fit into it is cut
END_SECONDS = 2.0  # to read back the last checkpoint, and to end
SAVE_RATE = 250e6  # bytes of a checkpoint a second: written, synced, read back and hashed

SIZES = ("pico", "nano", "tiny", "micro", "mini", "small", "gpt2")
# Tokens a parameter that a size must have time to read, uncompiled, before it beats the one below, and bytes of text a
# parameter that it needs; `nano` needs no least text (docs/defaults.md).
TOKENS, BYTES = 1.0, 0.4
NANO_TOKENS: dict[Arch, float] = {"gpt2": 3.0, "modern": 1.5}
GAIN = 3.0  # how much faster than a small model, per parameter, a large one may be at most
TRIED = 65_536  # tokens per step at most, while the rate is measured
STEPS = (2, 4)  # that allocate, and that are timed

Seconds = Annotated[float, Within(-1e12, 1e12)]
Rate = Callable[[str], float]


@dataclass(frozen=True)
class TimeBudget:
    """The deadline of a run, the seconds that its parts take, and how much of them fits."""

    deadline: Seconds  # on the clock of time.perf_counter
    step: Annotated[float, Within(1e-9, 1e9)]
    evaluations: Seconds  # all periodic ones, with their samples and checkpoints
    end: Seconds  # everything after the last step
    pauses: Count = 20  # evaluations, with a checkpoint each
    samples: bool = True  # whether there is time for texts sampled in between
    windows: Count = 0  # of held-out text in an evaluation; 0: as many as is usual
    last_windows: Count = 0  # in the measure of the best checkpoint; 0: all
    answers: Count = 0  # pairs of each side that are checked for an exact answer; 0: as many as is usual

    @classmethod
    def fitting(cls, minutes: float, began: float, now: float, costs: "Costs", evals: float) -> "TimeBudget":
        """The budget of ``minutes`` from ``began``, with about ``evals`` evaluations where they fit. What has been
        spent, evaluations, samples, checkpoints and the last measure take at most `OVERHEAD` of the whole; but a
        quarter of that is theirs whatever came before."""
        allowed = OVERHEAD * 60 * minutes
        spare = max(allowed - (now - began), allowed / 4)
        pauses = max(1.0, min(evals, spare / 4 / (costs.window + costs.save)))
        windows = min(costs.usual_windows, int(spare / 4 / (pauses * costs.window)))
        samples = 4 * costs.sample <= spare / 4
        last = min(costs.whole_windows, int(spare / 4 / (1.5 * costs.window)))  # it computes in float32
        answers = min(costs.pairs, last // 2)  # on each side
        texts = (4 if samples else 1) * costs.sample
        return cls(
            deadline=began + 60 * minutes,
            step=costs.step,
            evaluations=pauses * (windows * costs.window + costs.save) + texts - costs.sample,
            end=1.5 * costs.window * (last + 2 * answers) + costs.save + costs.sample + END_SECONDS,
            pauses=math.ceil(pauses),
            samples=samples,
            windows=max(1, windows),
            last_windows=max(1, last),
            answers=max(1, answers),
        )

    def steps(self, now: float) -> int:
        """The steps of the whole run, as estimated before it. Raises `UserError` if none fits."""
        left = self.deadline - self.end - self.evaluations - now
        if left < 4 * self.step:
            needed = (4 * self.step - left + self.deadline - now) / 60
            raise UserError(
                f"there is no time to train: a step takes {self.step:.2g} s, and {max(0.0, left):.0f} s are left",
                f"give at least --minutes {math.ceil(10 * needed) / 10:g}, or a smaller --batch-tokens, --block-size "
                "or model",
            )
        return int(left / self.step)

    def steps_left(self, now: float, step: float) -> int:
        """The steps that still fit, at ``step`` seconds each, evaluations and checkpoints included."""
        return max(1, round((self.deadline - self.end - now) / step))

    def describe(self, batch_tokens: int) -> str:
        """The rate, for a person."""
        return f"a step takes {1000 * self.step:,.0f} ms, {batch_tokens / self.step:,.0f} tokens/s"


@dataclass(frozen=True)
class Costs:
    """Seconds, as measured, and how many windows there are."""

    step: float
    window: float  # of held-out text
    sample: float  # a text of the usual length
    save: float  # a checkpoint
    usual_windows: int
    whole_windows: int
    pairs: int  # that are usually checked, on each side


def preset_for_minutes(
    config: TrainConfig, compute: Compute, n_bytes: int, note: Callable[[str], None], processes: int = 1
) -> TrainConfig:
    """``config`` with the preset for its ``minutes``, if it leaves that open; tells ``note`` why. Several ``processes``
    are taken to be so many times as fast as this one."""
    shape = (config.n_layer, config.n_head, config.n_kv_head, config.n_embd, config.block_size)
    if config.minutes is None or config.preset != "auto" or config.init is not None or any(shape):
        return config

    def rate(name: str) -> float:
        return processes * measured_rate(name, config, compute)

    name, why = largest_preset(config.minutes, n_bytes, config.arch or "gpt2", rate)
    note(f"size {name}: {why}")
    return replace(config, preset=name)


def needs(name: str, arch: Arch) -> tuple[float, float]:
    """Tokens to read and bytes of text, for each parameter, that a size above the smallest needs."""
    return (NANO_TOKENS[arch], 0.0) if name == "nano" else (TOKENS, BYTES)


def largest_preset(minutes: float, n_bytes: int, arch: Arch, rate: Rate) -> tuple[str, str]:
    """The largest preset that has the tokens and bytes which it `needs`, and the reason. ``rate`` gives a preset's
    tokens per second."""
    chosen, *larger = SIZES
    pace = rate(chosen)
    for name in larger:
        n, below = parameters(name), parameters(chosen)
        tokens, least = needs(name, arch)
        if n * least > n_bytes:
            return chosen, f"{name} has {n:,} parameters, more than {1 / least:g} for each byte of the text"
        seconds = tokens * n / (GAIN * pace * below / n)  # at least, to read so much
        if seconds <= 60 * minutes:
            faster = rate(name)
            seconds = tokens * n / faster
        if seconds > 60 * minutes:
            needed = f"{name} would need at least {seconds / 60:,.1f} minutes to be better"
            return chosen, f"at {pace:,.0f} tokens/s; {needed}"
        chosen, pace = name, faster
    return chosen, "the largest that is chosen by itself"


def parameters(name: str) -> int:
    """The parameters of a preset that are trained."""
    return breakdown(find_preset(name).model).trainable


def measured_rate(name: str, config: TrainConfig, compute: Compute) -> float:
    """The tokens per second of a preset's steps here, on random ids."""
    preset = find_preset(name)
    V, T = preset.model.vocab_size, preset.model.block_size
    batch = max(T, min(preset.batch_tokens, TRIED) // T * T)
    asked = TrainConfig(preset=name, steps=1, batch_tokens=batch)
    like = {each: getattr(config, each) for each in ("arch", "positions", "window", "optimizer")}
    recipe = resolve(replace(asked, **like), compute, V, batch + 1, V, False, lambda text: None)
    model = GPT(recipe.model).to(compute.device)
    optimizer = make_optimizer(model, recipe.optimizer, recipe.weight_decay, compute.dtype)
    stepper = Stepper(Single(model, optimizer, compute), recipe, lambda micro_batch: None)
    ids = np.random.default_rng(0).integers(V, size=(recipe.rows, T))
    for _ in range(STEPS[0]):
        stepper.step(ids, ids, 0.0).read()
    started = time.perf_counter()
    for _ in range(STEPS[1]):
        stepper.step(ids, ids, 0.0).read()
    return STEPS[1] * batch / (time.perf_counter() - started)
