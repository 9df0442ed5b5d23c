"""The arithmetic of a run of so many minutes: what its parts take, and how much of them fits."""

import math
from dataclasses import dataclass
from typing import Annotated

from gpt.errors import UserError
from gpt.settings import Count, Within

OVERHEAD = 0.2  # of the whole time, for everything but training: what does not fit into it is cut
END_SECONDS = 2.0  # to read back the last checkpoint, and to end

Seconds = Annotated[float, Within(-1e12, 1e12)]


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
                f"there is no time to train: a step takes {self.step:.2g} s, but only {max(0.0, left):.0f} s are left",
                f"use at least --minutes {math.ceil(10 * needed) / 10:g}, or a smaller --batch-tokens, --block-size "
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
