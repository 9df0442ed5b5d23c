"""Runs with ``--minutes``: how they divide their time, and the clock that training follows."""

import math
import time
from dataclasses import dataclass
from typing import Annotated

from gpt.config.settings import Count, Within
from gpt.system.errors import UserError

OVERHEAD = 0.2  # share of the time for everything except training steps
GROWTH = 1.5  # A longer run spends a fifth more on evaluations, and measures its speed for longer.
END_SECONDS = 2.0  # time to read back the last checkpoint and exit
MIN_TRAINING = 0.1  # minimum share of the time for training, however long it took to get ready
MIN_STEPS = 4
INTERVALS = ("eval_every", "save_every", "sample_every")  # settings that can follow the clock

Seconds = Annotated[float, Within(-1e12, 1e12)]


@dataclass(frozen=True)
class Costs:
    """The measured seconds of a run's parts, and the numbers of windows and pairs to evaluate."""

    token: float  # a token in a training step
    window: float  # a held-out window
    sample: float  # a sample of default length
    save: float  # writing a checkpoint
    default_windows: int
    all_windows: int
    pairs: int  # default pairs to check per split
    yardsticks: float = 0.0  # measuring the yardsticks of the held-out text
    compiled: bool = False  # whether the steps were compiled
    elapsed: float = 0.0  # since the start of the run


@dataclass(frozen=True)
class TimeBudget:
    """How a run divides its time, and which evaluations and samples fit."""

    total: Seconds  # from the start of the run
    evaluations: Seconds = 0.0  # time for all periodic evaluations, with samples and checkpoints
    end: Seconds = 0.0  # time for everything after the last step
    pauses: Count = 20  # number of periodic evaluations, each with a checkpoint
    samples: bool = True  # whether evaluations include a sample
    windows: Count = 0  # held-out windows per evaluation; 0 for the default
    last_windows: Count = 0  # held-out windows for the best checkpoint; 0 for all
    answers: Count = 0  # pairs per split to check for exact answers; 0 for the default

    @classmethod
    def fitting(cls, minutes: float, costs: Costs, evals: float) -> "TimeBudget":
        """Plans a run of ``minutes``, with about ``evals`` evaluations if they fit.

        `OVERHEAD` is the share of the total for everything except steps. The time spent so far is subtracted from this
        share, but at least a quarter of the share is left for evaluations, samples, checkpoints and the final
        evaluation.
        """
        overhead = OVERHEAD * 60 * minutes
        spare = max(overhead - costs.elapsed, overhead / 4)
        pauses = max(1.0, min(evals, spare / 4 / (costs.window + costs.save)))
        windows = min(costs.default_windows, int(spare / 4 / (pauses * costs.window)))
        samples = 4 * costs.sample <= spare / 4
        # Assumes that a window takes 1.5 times as long in the final evaluation, which can be in float32.
        last_windows = min(costs.all_windows, int(spare / 4 / (1.5 * costs.window)))
        answers = min(costs.pairs, last_windows // 2)  # pairs per split
        last_evaluation = 1.5 * costs.window * (last_windows + 2 * answers)
        sample_seconds = (4 if samples else 1) * costs.sample
        return cls(
            total=60 * minutes,
            evaluations=pauses * (windows * costs.window + costs.save) + sample_seconds - costs.sample,
            end=last_evaluation + costs.save + costs.sample + costs.yardsticks + END_SECONDS,
            pauses=math.ceil(pauses),
            samples=samples,
            windows=max(1, windows),
            last_windows=max(1, last_windows),
            answers=max(1, answers),
        )

    def training_seconds(self, elapsed: float, teachers: int = 0) -> float:
        """The time from the first step to the last, evaluations included, if the first step is after ``elapsed``
        seconds. If that many ``teachers`` still come before the model itself, the time of the next of them: an equal
        share of the rest of the first half."""
        left = self.total / 2 if teachers else self.total - self.end
        return max(left - elapsed, MIN_TRAINING * self.total) / max(1, teachers)

    def tokens(self, costs: Costs, step_tokens: int) -> float:
        """Estimates the training tokens. Raises `UserError` if the time is too short for `MIN_STEPS` steps of
        ``step_tokens``. Once the step was compiled, a shorter run is better than none."""
        step, others = costs.token * step_tokens, self.end + self.evaluations
        spare = max(self.total - others - costs.elapsed, MIN_TRAINING * self.total)
        if not costs.compiled and spare < MIN_STEPS * step:
            minutes = GROWTH * (costs.elapsed + others + MIN_STEPS * step) / 60
            raise UserError(
                f"there is no time to train: a step takes {step:.2g} s, and {costs.elapsed:.0f} of {self.total:.0f} s "
                "have passed",
                f"use at least --minutes {math.ceil(10 * minutes) / 10:g}, or a smaller --batch-tokens, --block-size "
                "or model",
            )
        return spare / costs.token


class Clock:
    """Follows the share of the training time that has passed. A resumed run continues at its ``share``."""

    def __init__(self, seconds: float, share: float = 0.0) -> None:
        self.seconds, self.start = seconds, time.perf_counter() - share * seconds

    @property
    def end(self) -> float:
        """When training ends, in `time.perf_counter` seconds."""
        return self.start + self.seconds

    def share(self) -> float:
        """Returns the share of the training time that has passed, from 0 to 1."""
        return min(1.0, (time.perf_counter() - self.start) / self.seconds)
