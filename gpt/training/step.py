"""One optimizer step: gradients of a whole batch, accumulated over parts of it, clipped, applied."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from gpt.device import Compute
from gpt.errors import is_out_of_memory
from gpt.model.decoder import GPT
from gpt.model.loss import IGNORED, cross_entropy
from gpt.training.optim import Optimizers
from gpt.training.recipe import Recipe, divisors


class Stepper:
    """Steps of a model. ``on_halved`` hears the new micro-batch where memory ran out."""

    def __init__(
        self, model: GPT, optimizer: Optimizers, compute: Compute, recipe: Recipe, on_halved: Callable[[int], None]
    ) -> None:
        self.model, self.optimizer, self.compute, self.on_halved = model, optimizer, compute, on_halved
        self.micro_batch, self.clip = recipe.micro_batch, recipe.clip or math.inf
        self.scaler = torch.amp.GradScaler(compute.device.type, enabled=compute.dtype == torch.float16)

    @property
    def scaled(self) -> bool:
        """Whether the loss is scaled, so that an infinite gradient is nothing unusual."""
        return self.scaler.is_enabled()

    def gradients(self, x: Tensor, y: Tensor) -> tuple[float, float]:
        """Leaves the clipped gradients of the mean loss over all targets that count. Gives that loss, and the
        gradients' norm before clipping.

        Where memory runs out, half as many sequences are computed at once from then on; the gradients are the same up
        to rounding. Inputs x and targets y are (rows, T).
        """
        while True:
            state = _random_state(self.compute.device)
            try:
                return self._gradients(x, y)
            except Exception as error:
                smaller = [d for d in divisors(x.size(0)) if d < self.micro_batch]
                if not is_out_of_memory(error) or not smaller:
                    raise
            # Not in the handler: the error holds on to what was computed.
            self.optimizer.zero_grad()
            if self.compute.device.type == "cuda":
                torch.cuda.empty_cache()
            _set_random_state(self.compute.device, state)
            self.micro_batch = max((d for d in smaller if 2 * d <= self.micro_batch), default=1)
            self.on_halved(self.micro_batch)

    def _gradients(self, x: Tensor, y: Tensor) -> tuple[float, float]:
        self.model.train()
        total = torch.zeros((), device=self.compute.device)
        counted = (y != IGNORED).sum()
        for rows in range(0, x.size(0), self.micro_batch):
            part = slice(rows, rows + self.micro_batch)
            with self.compute.autocast():
                logits = self.model(x[part])
            loss = cross_entropy(logits, y[part]) * ((y[part] != IGNORED).sum() / counted)
            self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        for part_of in self.optimizer.parts:
            self.scaler.unscale_(part_of)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        return float(total), float(norm)

    def apply(self) -> None:
        """What the optimizer makes of the gradients."""
        for part in self.optimizer.parts:
            self.scaler.step(part)

    def clear(self) -> None:
        """Forgets the gradients."""
        self.scaler.update()
        self.optimizer.zero_grad()


def _random_state(device: torch.device) -> tuple[Tensor, Tensor | None]:
    return torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None


def _set_random_state(device: torch.device, state: tuple[Tensor, Tensor | None]) -> None:
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state(state[1], device)
