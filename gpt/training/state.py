"""What a run knows of itself while it goes on."""

import math
from dataclasses import dataclass


@dataclass
class TrainState:
    """Everything, beside weights and optimizer, that decides what happens next."""

    step: int = 0  # optimizer steps done; the next batch is a function of it
    best_loss: float = math.inf  # lowest held-out loss so far, nats a token
    evals_since_best: int = 0  # for patience
    saved_step: int = -1  # the newest checkpoint's
    rate_factor: float = 1.0  # of the learning rate; lower once the run had to go back
    step_seconds: float = 0.0  # spent on steps alone, without evaluation, sampling and saving
