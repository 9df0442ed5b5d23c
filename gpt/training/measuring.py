"""Measures the costs of a run with ``--minutes``."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from gpt.config import events
from gpt.insight.evaluate import Window
from gpt.insight.yardsticks import MAX_TEXT_BYTES, MAX_TRAIN_BYTES
from gpt.model.loss import IGNORED
from gpt.system.interrupt import StopSignal
from gpt.training.context import Inputs, Session
from gpt.training.evaluation import (
    MAX_CHECKED_PAIRS,
    estimate_sample_seconds,
    measure_held_out,
    windows_to_evaluate,
)
from gpt.training.memory_probe import fit_micro_batch
from gpt.training.recipe import Facts, Recipe
from gpt.training.rewards import with_answers
from gpt.training.size import TIMING_SHARE, time_step
from gpt.training.state import seed_all
from gpt.training.step import Stepper
from gpt.training.strategy import Strategy, make_strategy
from gpt.training.time_budget import Costs

PROBE_SECONDS = 5.0  # maximum time for which steps are timed
SAVE_BYTES_PER_SECOND = 250e6  # assumed speed of writing, syncing, reading back and hashing
XZ_BYTES_PER_SECOND = 1e6  # assumed speed of compressing the text, which takes two threads


@dataclass(frozen=True)
class Meter:
    """Measures the costs of a run of ``minutes`` on all ranks."""

    minutes: float
    inputs: Inputs
    session: Session

    def measure(self, draft: Recipe, facts: Facts) -> Facts:
        """Returns ``facts`` with the costs that the ``draft`` is waiting for: of uncompiled steps, or after that of
        compiled ones."""
        session, compiled = self.session, facts.costs is not None
        session.note("measuring training speed on this machine")
        session.listen(events.Progress("measuring"))
        costs = self._measure(replace(draft, compile=compiled, own_teachers=None))
        session.note(f"{1 / costs.token:,.0f} tokens/s")
        # What else comes before the first step: the yardsticks, and the reference of preferences.
        yardsticks = min(self.inputs.data.bytes, MAX_TRAIN_BYTES + MAX_TEXT_BYTES) / XZ_BYTES_PER_SECOND
        reference = costs.window * sum(map(len, self.inputs.data.preferences or ()))
        elapsed = time.perf_counter() - session.start_time + yardsticks + reference
        costs = replace(costs, compiled=compiled, elapsed=elapsed)
        return replace(facts, compiled_costs=costs) if compiled else replace(facts, costs=costs)

    def _measure(self, recipe: Recipe) -> Costs:
        """Times training steps, evaluations and a sample."""
        world, data = self.session.world, self.inputs.data
        seed_all(recipe.seed)
        strategy = make_strategy(recipe, self.inputs.compute, world, self.inputs.init)
        batches = data.batches(recipe)
        answered = with_answers(batches, strategy, recipe, data.tokenizer, self.session.stop)
        stepper = Stepper(strategy, recipe, self.session.note)
        fit_micro_batch(stepper, batches.length + recipe.answer_tokens)
        if recipe.compile:
            stepper.compile()  # The run itself reports compilation errors.
        max_seconds = TIMING_SHARE * 60 * self.minutes
        batch = partial(answered.global_batch, rank=world.rank, ranks=world.size)
        step_seconds = time_step(stepper, batch, min(max_seconds, PROBE_SECONDS))
        held_out = data.sample_windows(recipe.model.block_size, windows_to_evaluate(recipe))
        targets = sum(int((w.y[w.skipped :] != IGNORED).sum()) for w in held_out) / max(1, len(held_out))
        measure = partial(measure_held_out, strategy, data, recipe)
        return Costs(
            token=step_seconds / recipe.batch_tokens,
            window=stepper.run_eagerly(lambda: measure_window_seconds(strategy, held_out, max_seconds, measure)),
            sample=stepper.run_eagerly(lambda: estimate_sample_seconds(strategy, data)),
            # Weights and two moments in float32.
            save=3 * 4 * sum(map(math.prod, strategy.shapes.values())) / SAVE_BYTES_PER_SECOND,
            default_windows=len(held_out),
            all_windows=math.ceil(data.held_out_targets / max(1.0, targets)),
            pairs=MAX_CHECKED_PAIRS if data.pairs else 0,
        )


def measure_window_seconds(
    strategy: Strategy, windows: Sequence[Window], max_seconds: float, measure: Callable[..., object]
) -> float:
    """Measures evaluation seconds per window on batches of 1, 1, 4, 16, … windows. Stops before a batch that would take
    more than ``max_seconds``. A GPU loads its kernels in the first batch."""
    batch, next_batch, seconds = 1, 1, 1e-9
    while windows:
        start = time.perf_counter()
        measure(windows[:batch], strategy.compute, StopSignal())
        seconds = max((time.perf_counter() - start) / batch, 1e-9)
        if strategy.world.all_reduce_max(next_batch > len(windows) or next_batch * seconds > max_seconds):
            break
        batch, next_batch = next_batch, 4 * next_batch
    return seconds
