"""How many steps fit into the minutes that a run may take, from how long a few of them took."""

import math
from dataclasses import dataclass
from typing import Annotated

from gpt.errors import UserError
from gpt.settings import Within

PROBE_SHARE, PROBE_SECONDS = 0.03, 5.0  # of the whole time, and at most, spent on measuring
END_SECONDS = 2.0  # the last checkpoint measured, saved, read back and sampled from; the program's own end

Seconds = Annotated[float, Within(-1e12, 1e12)]


@dataclass(frozen=True)
class Pace:
    """When a run must end, and how long its parts take, in seconds."""

    deadline: Seconds  # on the clock of time.perf_counter
    step: Annotated[float, Within(1e-9, 1e9)]
    evaluations: Seconds  # all periodic ones
    end: Seconds  # all after the last step

    def steps(self, now: float) -> int:
        """Steps of the whole run, as far as one can tell before it. Raises `UserError` where none fits."""
        left = self.deadline - self.end - self.evaluations - now
        if left < 4 * self.step:
            needed = (4 * self.step - left + self.deadline - now) / 60
            raise UserError(
                f"there is no time to train: a step takes {self.step:.2g} s, and {max(0.0, left):.0f} s are left",
                f"give at least --minutes {math.ceil(10 * needed) / 10:g}, or a smaller --preset",
            )
        return int(left / self.step)

    def steps_left(self, now: float, step: float) -> int:
        """Steps that still fit, at ``step`` seconds for each with its share of evaluations and checkpoints."""
        return max(1, round((self.deadline - self.end - now) / step))

    def describe(self, batch_tokens: int) -> str:
        """For a person."""
        return f"a step takes {1000 * self.step:,.0f} ms, {batch_tokens / self.step:,.0f} tokens/s"
