"""What a run does when its loss is no number or explodes: leave the step out, go back once at a lower rate, stop."""

import copy
import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from gpt.model.decoder import GPT
from gpt.training.optim import Optimizers
from gpt.training.state import TrainState

TOLERATED = 3  # bad steps in a row
LOWER = 0.3  # the factor of the rate after going back
MARGIN = 1.0  # nats a token: a loss so far above that of guessing has exploded


class Guard:
    """Judges steps by their loss. ``guessing`` is ln V, the loss of a model that knows nothing."""

    def __init__(self, vocab_size: int) -> None:
        self.guessing = math.log(vocab_size)
        self.bad = 0  # steps in a row
        self.has_learnt = False  # a loss well below guessing was seen

    def judge(self, loss: float, norm: float, scaled: bool) -> None:
        """Counts a step as bad whose loss or gradient is no number, or whose loss has exploded. With a scaled loss
        (float16) an infinite gradient is the scaler's business."""
        sound = math.isfinite(loss) and (math.isfinite(norm) or scaled)
        self.has_learnt |= loss < self.guessing - MARGIN
        exploded = self.has_learnt and loss > self.guessing + MARGIN
        self.bad = 0 if sound and not exploded else self.bad + 1

    @property
    def failed(self) -> bool:
        """Whether leaving steps out does not help."""
        return self.bad >= TOLERATED


@dataclass(frozen=True)
class Snapshot:
    """A run as it was at a step, in the host's memory."""

    model: dict[str, Any]
    optimizers: list[dict[str, Any]]
    state: TrainState

    @classmethod
    def of(cls, model: GPT, optimizers: Optimizers, state: TrainState) -> "Snapshot":
        """Copies everything."""
        parts = [_on_host(part.state_dict()) for part in optimizers.parts]
        return cls(_on_host(model.state_dict()), parts, copy.copy(state))

    def restore(self, model: GPT, optimizers: Optimizers) -> None:
        """Puts weights and moments back."""
        model.load_state_dict(self.model)
        for part, values in zip(optimizers.parts, self.optimizers, strict=True):
            part.load_state_dict(copy.deepcopy(values))


def _on_host(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: _on_host(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_on_host(each) for each in value]
    return value
