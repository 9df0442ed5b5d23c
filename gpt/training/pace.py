"""Planning for runs with ``--minutes``: how many steps, evaluations and samples fit."""

import math
from dataclasses import dataclass
from typing import Annotated

from gpt.errors import UserError
from gpt.settings import Count, Within

OVERHEAD = 0.2  # share of the time for everything except training steps
OVERHEAD_GROWTH = 1.5  # A longer run spends a fifth more on evaluations, and measures its speed for longer.
END_SECONDS = 2.0  # time to read back the last checkpoint and exit

Seconds = Annotated[float, Within(-1e12, 1e12)]


@dataclass(frozen=True)
class TimeBudget:
    """A plan of a run's time: the deadline, how long each part takes, and which evaluations and samples fit."""

    deadline: Seconds  # in `time.perf_counter` seconds
    step: Annotated[float, Within(1e-9, 1e9)]
    evaluations: Seconds  # time for all periodic evaluations, with samples and checkpoints
    end: Seconds  # time for everything after the last step
    pauses: Count = 20  # number of periodic evaluations, each with a checkpoint
    samples: bool = True  # whether evaluations include a sample
    windows: Count = 0  # held-out windows per evaluation; 0 for the default
    last_windows: Count = 0  # held-out windows for the best checkpoint; 0 for all
    answers: Count = 0  # pairs per split to check for exact answers; 0 for the default

    @classmethod
    def fitting(cls, minutes: float, start_time: float, now: float, costs: "Costs", evals: float) -> "TimeBudget":
        """Plans a run of ``minutes`` from ``start_time``, with about ``evals`` evaluations if they fit.

        `OVERHEAD` is the share of the total for everything except steps. The time spent so far is subtracted from this
        share, but at least a quarter of the share is left for evaluations, samples, checkpoints and the final
        evaluation.
        """
        overhead = OVERHEAD * 60 * minutes
        spare = max(overhead - (now - start_time), overhead / 4)
        pauses = max(1.0, min(evals, spare / 4 / (costs.window + costs.save)))
        windows = min(costs.default_windows, int(spare / 4 / (pauses * costs.window)))
        samples = 4 * costs.sample <= spare / 4
        # Assumes that a window takes 1.5 times as long in the final evaluation, which can be in float32.
        last_windows = min(costs.all_windows, int(spare / 4 / (1.5 * costs.window)))
        answers = min(costs.pairs, last_windows // 2)  # pairs per split
        last_evaluation = 1.5 * costs.window * (last_windows + 2 * answers)
        sample_seconds = (4 if samples else 1) * costs.sample
        return cls(
            deadline=start_time + 60 * minutes,
            step=costs.step,
            evaluations=pauses * (windows * costs.window + costs.save) + sample_seconds - costs.sample,
            end=last_evaluation + costs.save + costs.sample + costs.yardsticks + END_SECONDS,
            pauses=math.ceil(pauses),
            samples=samples,
            windows=max(1, windows),
            last_windows=max(1, last_windows),
            answers=max(1, answers),
        )

    def steps(self, now: float, minutes: float) -> int:
        """Estimates the steps of a run of ``minutes`` before it starts. Raises `UserError` if no step fits."""
        spare = self.deadline - self.end - self.evaluations - now
        if spare < 4 * self.step:
            enough = OVERHEAD_GROWTH * (minutes + (4 * self.step - spare) / 60)
            raise UserError(
                f"there is no time to train: a step takes {self.step:.2g} s, but only {max(0.0, spare):.0f} s are left",
                f"use at least --minutes {math.ceil(10 * enough) / 10:g}, or a smaller --batch-tokens, --block-size "
                "or model",
            )
        return int(spare / self.step)

    def steps_left(self, now: float, step: float) -> int:
        """The number of steps that still fit. ``step`` is the time per step, with evaluations and checkpoints
        included."""
        return max(1, round((self.deadline - self.end - now) / step))

    def describe(self, batch_tokens: int) -> str:
        """The time per step and the throughput, as text."""
        return f"a step takes {1000 * self.step:,.0f} ms, {batch_tokens / self.step:,.0f} tokens/s"


@dataclass(frozen=True)
class Costs:
    """The measured seconds of a run's parts, and the numbers of windows and pairs to evaluate."""

    step: float
    window: float  # a held-out window
    sample: float  # a sample of default length
    save: float  # writing a checkpoint
    default_windows: int
    all_windows: int
    pairs: int  # default pairs to check per split
    yardsticks: float = 0.0  # measuring the yardsticks of the held-out text
