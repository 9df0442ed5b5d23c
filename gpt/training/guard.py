"""What a run does when its loss is no number or explodes: leave the step out, go back once at a lower rate, stop."""

import math

from gpt.training.state import TrainState

TOLERATED = 3  # bad steps in a row
LOWER = 0.3  # the factor of the rate after going back
MARGIN = 1.0  # nats a token: a loss so far above that of guessing has exploded


class Guard:
    """Judges steps by their loss, and keeps count in ``state``. ``guessing`` is ln V, the loss of a model that knows
    nothing."""

    def __init__(self, vocab_size: int, state: TrainState) -> None:
        self.guessing = math.log(vocab_size)
        self.state = state

    def judge(self, loss: float, norm: float, scaled: bool) -> None:
        """Counts a step as bad whose loss or gradient is no number, or whose loss has exploded. With a scaled loss
        (float16) an infinite gradient is the scaler's business."""
        sound = math.isfinite(loss) and (math.isfinite(norm) or scaled)
        self.state.has_learnt |= loss < self.guessing - MARGIN
        exploded = self.state.has_learnt and loss > self.guessing + MARGIN
        self.state.bad_steps = 0 if sound and not exploded else self.state.bad_steps + 1

    @property
    def failed(self) -> bool:
        """Whether leaving steps out does not help."""
        return self.state.bad_steps >= TOLERATED
