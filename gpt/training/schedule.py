"""The learning rate as a pure function of the step."""

import math
from typing import Literal

FLOOR = 0.1  # of the peak, where the cosine ends (GPT-3, appendix B)
Schedule = Literal["linear", "cosine", "constant"]


def lr_at(step: int, *, peak: float, warmup: int, steps: int, decay: int, schedule: Schedule) -> float:
    """The rate of step 1 … ``steps``: a line from 0 to ``peak`` over ``warmup`` steps, then the peak and, over the last
    ``decay`` steps, a line towards 0 (Hägele et al. 2024, arXiv 2405.18392); a cosine down to a tenth; or the peak."""
    if step < warmup:
        return peak * step / warmup
    if schedule == "constant":
        return peak
    if schedule == "linear":
        return peak * min(1.0, (steps + 1 - step) / max(1, decay))
    progress = (step - warmup) / max(1, steps - warmup)
    return peak * (FLOOR + (1 - FLOOR) * (1 + math.cos(math.pi * progress)) / 2)
