"""Chooses the preset and the number of steps for ``--minutes``."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from gpt.config import Arch, TrainConfig, find_preset
from gpt.device import Compute
from gpt.errors import UserError
from gpt.evaluate import Window
from gpt.interrupt import StopSignal
from gpt.model.decoder import GPT
from gpt.model.loss import IGNORED
from gpt.model.params import breakdown
from gpt.runs.yardsticks import MAX_TEXT_BYTES, MAX_TRAIN_BYTES
from gpt.settings import checked
from gpt.training.context import Session
from gpt.training.data import BatchSource, Dataset
from gpt.training.evaluation import MAX_CHECKED_PAIRS, estimate_sample_seconds, mean_loss, windows_to_evaluate
from gpt.training.finetune import InitCheckpoint
from gpt.training.optim import make_optimizer
from gpt.training.recipe import Recipe, broadcast, check_model, resolve
from gpt.training.state import seed_all
from gpt.training.step import Stepper
from gpt.training.strategy import Single, Strategy, make_strategy
from gpt.training.teachers import TaughtBatches, Teachers, can_read
from gpt.training.time_budget import INTERVALS, Costs, TimeBudget

PROBE_SHARE, PROBE_SECONDS = 0.03, 5.0  # steps are timed for this share of the minutes, but at most this many seconds
PROBE_STEPS = (2, 6)  # at least 2 steps are timed, and 6 if `max_seconds` permits; the first ones allocate memory
SAVE_BYTES_PER_SECOND = 250e6  # assumed speed of writing, syncing, reading back and hashing
XZ_BYTES_PER_SECOND = 1e6  # assumed speed of compressing the text, which takes two threads

SIZES = ("pico", "nano", "tiny", "micro", "mini", "small", "gpt2")
# A preset beats the next smaller one from this many training tokens and bytes of text per parameter, measured without
# compiling. `nano` needs no minimum of text (benchmarks/defaults.md).
MIN_TOKENS, MIN_BYTES = 1.0, 0.4
MIN_NANO_TOKENS: dict[Arch, float] = {"gpt2": 3.0, "modern": 1.5}
MAX_SPEEDUP = 3.0  # maximum ratio of a larger model's FLOP/s to a smaller one's
MAX_TIMED_TOKENS = 65_536  # maximum tokens per step while throughput is measured
TIMING_STEPS = (3, 4)  # warmup steps (allocation, kernel loading, graph capture), and timed steps

# A run trains teachers if it makes at least this many passes over its text, and this many times the training tokens per
# parameter. It trains one teacher per `TEACHER_PASSES` passes (benchmarks/defaults.md).
MIN_TAUGHT_PASSES, MIN_TAUGHT_RATIO = 24.0, 150.0
TEACHER_PASSES, MIN_TEACHERS, MAX_TEACHERS = 9.0, 4, 8
MIN_TEACHER_STEPS = 100
COMPILED_SPEEDUP = 1.3  # typical speed of compiled steps, relative to uncompiled ones
EVALUATIONS = 20  # default number of evaluations

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

    name, reason = largest_preset(
        config.minutes / (2 if config.teachers else 1), n_bytes, config.arch or "gpt2", measure
    )
    note(f"size {name}: {reason}")
    return replace(config, preset=name)


def find_minimums(name: str, arch: Arch) -> tuple[float, float]:
    """Returns a preset's minimum tokens and bytes of text per parameter."""
    return (MIN_NANO_TOKENS[arch], 0.0) if name == "nano" else (MIN_TOKENS, MIN_BYTES)


def largest_preset(minutes: float, n_bytes: int, arch: Arch, measure: Throughput) -> tuple[str, str]:
    """Returns the largest preset with enough time and text, and the reason. ``measure`` returns tokens per second."""
    preset, *candidates = SIZES
    throughput = measure(preset)
    for name in candidates:
        n, smaller = parameters(name), parameters(preset)
        min_tokens, min_bytes = find_minimums(name, arch)
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
    recipe = resolve(replace(timing_config, **run_settings), compute, V, batch + 1, V, False, lambda text: None)
    model = GPT(recipe.model).to(compute.device)
    optimizer = make_optimizer(model, recipe.optimizer, recipe.weight_decay, compute.dtype)
    stepper = Stepper(Single(model, optimizer, compute), recipe, lambda micro_batch: None)
    ids = np.random.default_rng(0).integers(V, size=(recipe.rows, recipe.model.block_size))
    for _ in range(TIMING_STEPS[0]):
        stepper.step(ids, ids, 0.0).read()
    start = time.perf_counter()
    for _ in range(TIMING_STEPS[1]):
        stepper.step(ids, ids, 0.0).read()
    return TIMING_STEPS[1] * batch / (time.perf_counter() - start)


@dataclass
class Planner:
    """Chooses a new run's recipe on rank 0, for all ranks."""

    config: TrainConfig
    compute: Compute
    data: Dataset
    init: InitCheckpoint | None
    session: Session
    teachers: Teachers
    costs: Costs | None = None  # set by the first measurement

    def plan(self) -> tuple[Recipe, TimeBudget | None]:
        """Returns the recipe, and the time budget for ``minutes``. Raises `UserError` without enough memory or time."""
        config, note = self.config, self.session.note
        if config.minutes is None:
            recipe = self.resolve(config, note)
            self.check(recipe)
            return recipe, None
        # The default batch of fine-tuning depends on the tokens that there is time for, and can take minutes.
        has_default_batch = self.init is not None and config.batch_tokens is None
        budget, tokens = self.fit(self.resolve(config, max_tokens=1 if has_default_batch else math.inf), config.minutes)
        draft = self.resolve(config, max_tokens=tokens)
        planned = replace(config, minutes=None, compile="on" if draft.compile else "off")
        if draft.compile:  # A compiled program has a fixed dropout and micro-batch, and a speed of its own.
            steps = max(1, round(tokens / draft.batch_tokens))
            draft = self.resolve(replace(planned, steps=steps), max_tokens=tokens)
            planned = replace(planned, dropout=draft.model.dropout, micro_batch=str(draft.micro_batch))
            budget, tokens = self.fit(draft, config.minutes, compiled=True)
        steps = max(1, round(tokens / draft.batch_tokens))
        eval_every = config.eval_every or math.ceil(steps / budget.pauses)
        samples = config.sample_every if config.sample_every is not None or budget.samples else 0
        planned = replace(planned, steps=steps, eval_every=eval_every, sample_every=samples)
        recipe = self.resolve(planned, note, tokens)
        self.check(recipe)
        by_clock = ["steps", *(name for name in INTERVALS if getattr(config, name) is None)]
        if config.eval_every is not None and "save_every" in by_clock:
            by_clock.remove("save_every")
        return replace(recipe, warmup=min(recipe.warmup, steps), by_clock=" ".join(by_clock)), budget

    def choose_teachers(self) -> None:
        """Decides how many teachers the run trains first, if the user did not."""
        if self.config.teachers is not None:
            return
        count = self.count_teachers()
        self.config = replace(self.config, teachers=count)
        if count:
            self.session.note(
                f"{count} teachers train first, in half of the {'steps' if self.config.minutes is None else 'time'}: a "
                "single run would read the text too often to learn more from it (--teachers 0 turns this off)"
            )

    def count_teachers(self) -> int:
        """The number of teachers that a run should train first. They pay off only if the model would read the text so
        often that it learns little more from it (benchmarks/defaults.md)."""
        config, data = self.config, self.data
        recipe = self.resolve(replace(config, teachers=0))
        if self.init or data.rows or config.teacher or not can_read(data.tokens, recipe):
            return 0
        tokens: float = recipe.tokens(recipe.steps)
        if config.minutes is not None:
            tokens = self.fit(recipe, config.minutes)[1]
        steps, passes = round(tokens / recipe.batch_tokens), tokens / data.tokens
        if passes < MIN_TAUGHT_PASSES or passes < MIN_TAUGHT_RATIO * data.tokens / breakdown(recipe.model).trainable:
            return 0
        count = min(MAX_TEACHERS, max(MIN_TEACHERS, int(passes / TEACHER_PASSES)))
        return count if steps >= 2 * count * MIN_TEACHER_STEPS else 0

    def count_teacher_steps(self, recipe: Recipe) -> int:
        """The number of steps of each of the run's own teachers, which share half of its steps or minutes."""
        count, minutes, steps = self.config.teachers or 1, self.config.minutes, recipe.steps
        if minutes is not None:
            try:
                steps = round(self.fit(recipe, minutes / 2, recipe.compile)[1] / recipe.batch_tokens)
            except UserError as error:
                raise UserError(error.message, "use more --minutes, or --teachers 0") from None
        return max(1, steps // count)

    def fit(self, recipe: Recipe, minutes: float, compiled: bool = False) -> tuple[TimeBudget, float]:
        """Divides the minutes of a run. Returns the budget and the number of training tokens that fit. Measures the
        speed of ``compiled`` steps, or estimates it from that of others. Raises `UserError` without enough memory or
        time."""
        world, costs, is_estimate = self.session.world, self.costs, recipe.compile and not compiled
        if costs is None or compiled:
            self.check(recipe)
            self.session.note("measuring training speed on this machine")
            measured = self.measure(replace(recipe, compile=compiled), 0.0 if is_estimate else PROBE_SHARE)
            costs = checked(Costs, world.broadcast_object(lambda: asdict(measured)), "the speed of process 0")
            self.costs = self.costs or costs
            self.session.note(f"{1 / costs.token:,.0f} tokens/s")
        token_seconds = costs.token / (COMPILED_SPEEDUP if is_estimate else 1)
        step_seconds = token_seconds * recipe.batch_tokens
        evals = 60 * minutes / step_seconds / recipe.eval_every if self.config.eval_every else EVALUATIONS
        elapsed = world.broadcast_object(lambda: time.perf_counter() - self.session.start_time)
        budget = TimeBudget.fitting(minutes, elapsed, costs, evals)
        return budget, budget.tokens(elapsed, token_seconds, recipe.batch_tokens)

    def check(self, recipe: Recipe) -> None:
        """Raises `UserError` on all ranks if the run does not fit into memory."""
        world = self.session.world
        world.raise_on_all(
            partial(check_model, recipe, self.compute, world.data_size, world.local_size, self.teachers.shapes)
        )

    def resolve(
        self, config: TrainConfig, note: Callable[[str], None] = lambda text: None, max_tokens: float = math.inf
    ) -> Recipe:
        """Resolves ``config`` on all ranks. ``max_tokens`` is the number of tokens that fine-tuning has time for."""
        data, world, shape = self.data, self.session.world, self.init.model if self.init else None
        return broadcast(
            world,
            lambda: resolve(
                config, self.compute, data.bytes, data.tokens, data.tokenizer.vocab_size, data.held_out_tokens > 0,
                note, shape, data.rows, world.data_size, max_tokens, self.teachers.shapes,
            ),
        )  # fmt: skip

    def measure(self, recipe: Recipe, share: float) -> Costs:
        """Times training steps for a ``share`` of the minutes, and then evaluations and a sample."""
        world, data = self.session.world, self.data
        seed_all(recipe.seed)
        strategy = make_strategy(recipe, self.compute, world, self.init)
        stepper = Stepper(strategy, recipe, lambda micro_batch: None, teachers=self.teachers)
        if recipe.compile:
            stepper.compile(self.session.note)  # The run itself reports compilation errors.
        batches, total = self.teachers.teach(data.batches(recipe)), 60 * (self.config.minutes or 0.0)
        max_seconds = PROBE_SHARE * total
        seconds = time_steps(stepper, batches, share * total, max_seconds)
        step_seconds = seconds[TIMING_STEPS[0] :] or seconds[1:]
        held_out = data.sample_windows(recipe.model.block_size, windows_to_evaluate(recipe))
        targets = sum(int((w.y[w.skipped :] != IGNORED).sum()) for w in held_out) / max(1, len(held_out))
        return Costs(
            token=sum(step_seconds) / len(step_seconds) / recipe.batch_tokens,
            window=stepper.run_eagerly(lambda: measure_window_seconds(strategy, held_out, max_seconds)),
            sample=stepper.run_eagerly(lambda: estimate_sample_seconds(strategy, data)),
            # Weights and two moments in float32.
            save=3 * 4 * sum(map(math.prod, strategy.shapes.values())) / SAVE_BYTES_PER_SECOND,
            default_windows=len(held_out),
            all_windows=math.ceil(data.held_out_targets / max(1.0, targets)),
            pairs=MAX_CHECKED_PAIRS if data.pairs else 0,
            yardsticks=min(data.bytes, MAX_TRAIN_BYTES + MAX_TEXT_BYTES) / XZ_BYTES_PER_SECOND,
        )


def time_steps(
    stepper: Stepper, batches: BatchSource | TaughtBatches, target: float, max_seconds: float
) -> list[float]:
    """Times training steps for ``target`` seconds. If too few steps fit (see `PROBE_STEPS`), continues for up to
    ``max_seconds``."""
    world, seconds, lesson = stepper.world, list[float](), list[Any]()
    target = min(target, PROBE_SECONDS)

    def needs_more() -> bool:
        elapsed = sum(seconds)
        return elapsed < target or (len(seconds) < PROBE_STEPS[1] and elapsed < max_seconds)

    while len(seconds) < PROBE_STEPS[0] or world.broadcast_object(needs_more):
        start = time.perf_counter()
        x, y, *lesson = batches.global_batch(len(seconds), world.data_rank, world.data_size)
        stepper.step(x, y, 0.0, *lesson).read(world.synchronize)
        seconds.append(time.perf_counter() - start)
    return seconds


def measure_window_seconds(strategy: Strategy, windows: Sequence[Window], max_seconds: float) -> float:
    """Measures evaluation seconds per window on batches of 1, 1, 4, 16, … windows. Stops before a batch that would take
    more than ``max_seconds``. A GPU loads its kernels in the first batch."""
    batch, next_batch, seconds = 1, 1, 1e-9
    while windows:
        start = time.perf_counter()
        mean_loss(strategy, strategy.model, windows[:batch], strategy.compute, StopSignal())
        seconds = max((time.perf_counter() - start) / batch, 1e-9)
        if strategy.world.all_reduce_max(next_batch > len(windows) or next_batch * seconds > max_seconds):
            break
        batch, next_batch = next_batch, 4 * next_batch
    return seconds
