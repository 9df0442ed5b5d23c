"""Training for so many minutes: the preset that learns most in them, and the steps that fit."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial

import numpy as np

from gpt.config import Arch, TrainConfig, find_preset
from gpt.device import Compute
from gpt.evaluate import Window
from gpt.interrupt import StopSignal
from gpt.model.decoder import GPT
from gpt.model.params import breakdown
from gpt.settings import checked
from gpt.training.context import Session
from gpt.training.data import Batched, Dataset
from gpt.training.evaluation import ASKED, mean_loss, sample_seconds, windows_to_evaluate
from gpt.training.finetune import InitCheckpoint
from gpt.training.optim import make_optimizer
from gpt.training.pace import Costs, TimeBudget
from gpt.training.parallel import Parallel, Single, parallelize
from gpt.training.recipe import Recipe, broadcast, check_model, resolve
from gpt.training.state import seed_all
from gpt.training.step import Stepper

PROBE_SHARE, PROBE_SECONDS = 0.03, 5.0  # of the whole time, and at most, spent on measuring
PROBE_STEPS = (2, 6)  # at least, and where they take no more than those seconds; the first ones allocate
SAVE_RATE = 250e6  # bytes of a checkpoint a second: written, synced, read back and hashed

SIZES = ("pico", "nano", "tiny", "micro", "mini", "small", "gpt2")
# Tokens a parameter that a size must have time to read, uncompiled, before it beats the one below, and bytes of text a
# parameter that it needs; `nano` needs no least text (benchmarks/defaults.md).
TOKENS, BYTES = 1.0, 0.4
NANO_TOKENS: dict[Arch, float] = {"gpt2": 3.0, "modern": 1.5}
GAIN = 3.0  # how much faster than a small model, per parameter, a large one may be at most
TRIED = 65_536  # tokens per step at most, while the rate is measured
STEPS = (3, 4)  # that allocate, load kernels and capture a graph, and that are timed

Rate = Callable[[str], float]


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
            return chosen, f"{name} has {n:,} parameters, more than {1 / least:g} per byte of text"
        seconds = tokens * n / (GAIN * pace * below / n)  # at least, to read so much
        if seconds <= 60 * minutes:
            faster = rate(name)
            seconds = tokens * n / faster
        if seconds > 60 * minutes:
            needed = f"{name} would need at least {seconds / 60:,.1f} minutes to be better"
            return chosen, f"at {pace:,.0f} tokens/s; {needed}"
        chosen, pace = name, faster
    return chosen, "the largest size that auto chooses"


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


@dataclass(frozen=True)
class Planner:
    """Decides the recipe of a new run: rank 0's, on all ranks."""

    config: TrainConfig
    compute: Compute
    data: Dataset
    init: InitCheckpoint | None
    session: Session

    def plan(self) -> tuple[Recipe, TimeBudget | None]:
        """The recipe, and the budget of a run for some minutes. Raises `UserError` if memory or time is too short."""
        config, world, note = self.config, self.session.world, self.session.note
        recipe = self.resolve(config, note)
        world.raise_on_all(partial(check_model, recipe, self.compute, world.data_size, world.local_size))
        if config.minutes is None:
            return recipe, None
        note("measuring training speed on this machine")
        # Whether it compiles is decided by the minutes, not by the steps that fit into them.
        known, fits = replace(config, minutes=None, compile="on" if recipe.compile else "off"), math.inf
        if self.init is not None and config.batch_tokens is None:  # a step of the usual batch may take minutes
            single = replace(self.resolve(config, most_tokens=1), compile=False)
            fits = self.measure(single, 0.0)[1] * single.batch_tokens
            recipe = self.resolve(config, most_tokens=fits)
        if recipe.compile:  # a program is for one dropout and micro-batch: take those of an uncompiled run
            _, steps = self.measure(replace(recipe, compile=False), 0.0)
            recipe = self.resolve(replace(known, steps=steps), most_tokens=fits)
            known = replace(known, dropout=recipe.model.dropout, micro_batch=str(recipe.micro_batch))
        budget, steps = self.measure(recipe, PROBE_SHARE)
        every = config.eval_every or math.ceil(steps / budget.pauses)
        samples = config.sample_every if config.sample_every is not None or budget.samples else 0
        recipe = self.resolve(replace(known, steps=steps, eval_every=every, sample_every=samples), most_tokens=fits)
        note(budget.describe(recipe.batch_tokens))
        return recipe, budget

    def resolve(
        self, config: TrainConfig, note: Callable[[str], None] = lambda text: None, most_tokens: float = math.inf
    ) -> Recipe:
        """The recipe of ``config``; fine-tuning reads ``most_tokens`` in the time that it has."""
        data, world, shape = self.data, self.session.world, self.init.model if self.init else None
        return broadcast(
            world,
            lambda: resolve(
                config, self.compute, data.bytes, data.tokens, data.tokenizer.vocab_size, data.held_out_tokens > 0,
                note, shape, data.rows, world.data_size, most_tokens,
            ),
        )  # fmt: skip

    def measure(self, recipe: Recipe, share: float) -> tuple[TimeBudget, int]:
        """Measures how long steps, evaluations and samples take here, for a ``share`` of the minutes. Returns the
        budget, and the steps that fit into it."""
        world, data, minutes = self.session.world, self.data, self.config.minutes or 0.0
        seed_all(recipe.seed)
        parallel = parallelize(recipe, self.compute, world, self.init)
        stepper = Stepper(parallel, recipe, lambda micro_batch: None)
        if recipe.compile:
            stepper.compile(self.session.note)  # the run itself reports an error
        seconds = step_seconds(stepper, data.batches(recipe), share * 60 * minutes, most := PROBE_SHARE * 60 * minutes)
        timed = seconds[STEPS[0] :] or seconds[1:]
        held_out = data.some_windows(recipe.model.block_size, windows_to_evaluate(recipe))
        with stepper.eager():
            window = window_seconds(parallel, held_out, most)
            sample = sample_seconds(parallel, data)
        targets = sum(len(each.y) - each.skipped for each in held_out) / max(1, len(held_out))
        costs = Costs(
            step=sum(timed) / len(timed),
            window=window,
            sample=sample,
            save=3 * 4 * sum(map(math.prod, parallel.shapes.values())) / SAVE_RATE,  # weights, two moments in float32
            usual_windows=len(held_out),
            whole_windows=math.ceil(data.held_out_targets / max(1.0, targets)),
            pairs=ASKED if data.pairs else 0,
        )
        evals, began = recipe.steps / recipe.eval_every, self.session.began
        values = world.broadcast_object(
            lambda: asdict(TimeBudget.fitting(minutes, began, time.perf_counter(), costs, evals))
        )
        budget = checked(TimeBudget, values, "the budget of process 0")
        return budget, world.broadcast_object(lambda: budget.steps(time.perf_counter()))


def step_seconds(stepper: Stepper, batches: Batched, enough: float, most: float) -> list[float]:
    """The seconds of steps, which take ``enough`` of them if that is not much; ``most`` bounds slow ones."""
    world, seconds = stepper.world, list[float]()
    enough = min(enough, PROBE_SECONDS)

    def goes_on() -> bool:
        spent = sum(seconds)
        return spent < enough or (len(seconds) < PROBE_STEPS[1] and spent < most)

    while len(seconds) < PROBE_STEPS[0] or world.broadcast_object(goes_on):
        before = time.perf_counter()
        stepper.step(*batches.global_batch(len(seconds), world.data_rank, world.data_size), 0.0).read(world.synchronize)
        seconds.append(time.perf_counter() - before)
    return seconds


def window_seconds(parallel: Parallel, windows: Sequence[Window], most: float) -> float:
    """The seconds that a window takes to evaluate: of one, for which a GPU loads its kernels, of one again, and of four
    times as many each time, while that takes ``most`` at most."""
    at_once, following, seconds = 1, 1, 1e-9
    while windows:
        started = time.perf_counter()
        mean_loss(parallel, parallel.model, windows[:at_once], parallel.compute, StopSignal())
        seconds = max((time.perf_counter() - started) / at_once, 1e-9)
        if parallel.world.all_reduce_max(following > len(windows) or following * seconds > most):
            break
        at_once, following = following, 4 * following
    return seconds
