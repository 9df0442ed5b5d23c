"""The learning rate as a pure function of the step."""

import math
from typing import Literal

FLOOR = 0.1  # of the peak, where the cosine ends (GPT-3, appendix B)


def lr_at(step: int, *, peak: float, warmup: int, steps: int, schedule: Literal["cosine", "constant"]) -> float:
    """The rate of step 1 … ``steps``: a line from 0 to ``peak`` over ``warmup`` steps, then a cosine or the peak."""
    if step < warmup:
        return peak * step / warmup
    if schedule == "constant":
        return peak
    progress = (step - warmup) / max(1, steps - warmup)
    return peak * (FLOOR + (1 - FLOOR) * (1 + math.cos(math.pi * progress)) / 2)
