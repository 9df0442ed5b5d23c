"""One optimizer step: gradients of a whole batch, accumulated over parts of it, clipped, applied.

Nothing here waits for the device: what a step came to is read when it is wanted (`Outcome.read`), and a step whose
gradient is no number is left out on the device itself. So the host prepares the next batch while a GPU computes.
"""

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from gpt.device import Compute
from gpt.errors import is_out_of_memory
from gpt.model.decoder import GPT
from gpt.model.loss import IGNORED, tied_cross_entropy
from gpt.model.memory import divisors
from gpt.parallel.world import World
from gpt.training.optim import Optimizers
from gpt.training.recipe import Recipe

if TYPE_CHECKING:
    from gpt.parallel.shard import Sharded  # which takes seconds to import


@dataclass(frozen=True)
class Outcome:
    """Loss and gradient norm of a step, on their way to the host."""

    values: Tensor
    arrived: torch.cuda.Event | None

    @classmethod
    def of(cls, loss: Tensor, norm: Tensor) -> "Outcome":
        """Sends them off."""
        values = torch.stack([loss, norm])
        if values.device.type != "cuda":
            return cls(values, None)
        on_host = torch.empty(2, pin_memory=True).copy_(values, non_blocking=True)
        arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        arrived.record(torch.cuda.current_stream(values.device))  # where it is copied; another device may be current
        return cls(on_host, arrived)

    def read(self) -> tuple[float, float]:
        """Loss, in nats a token, and norm, once the step is computed."""
        if self.arrived is not None:
            self.arrived.synchronize()
        loss, norm = self.values.tolist()
        return loss, norm


class Objective(nn.Module):
    """What is made small: the summed loss of a micro-batch, in nats. It is a module so that it can be wrapped."""

    def __init__(self, model: GPT, chunk: int) -> None:
        super().__init__()
        self.model, self.chunk = model, chunk
        self.loss: Callable[[Tensor, Tensor, Tensor, int], Tensor] = tied_cross_entropy

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Of inputs x and targets y, (rows, T)."""
        return self.loss(self.model.trunk(x), self.model.wte.weight, y, self.chunk)


class Stepper:
    """Steps of a model, in one process or as one of a ``world``. ``on_halved`` hears the new micro-batch where memory
    ran out. Where the model is ``sharded``, the optimizer is that of this process's parts."""

    def __init__(
        self,
        model: GPT,
        optimizer: Optimizers,
        compute: Compute,
        recipe: Recipe,
        on_halved: Callable[[int], None],
        world: World | None = None,
        sharded: "Sharded | None" = None,
    ) -> None:
        self.model, self.optimizer, self.compute, self.on_halved = model, optimizer, compute, on_halved
        self.micro_batch, self.clip, self.world = recipe.micro_batch, recipe.clip or math.inf, world or World()
        self.sharded = sharded
        make_scaler = torch.amp.GradScaler if sharded is None else sharded.scaler
        self.scaler = make_scaler(compute.device.type, enabled=compute.dtype == torch.float16)
        self.objective = Objective(model, recipe.loss_chunk)
        self.wrapped = self.world.wrap(self.objective) if sharded is None else self.objective
        self.tried = 0  # the most positions at once that several processes know to have memory for
        self.compiled = False

    @property
    def scaled(self) -> bool:
        """Whether the loss is scaled, so that an infinite gradient is nothing unusual."""
        return self.scaler.is_enabled()

    def compile(self) -> None:
        """Compiles the blocks and the loss, and tries them on a micro-batch. Raises what the compiler does; `uncompile`
        undoes it.

        Block by block, since all share one compiled form: a whole stack takes the longer to compile the deeper it is.
        """
        self.compiled = True
        for block in self.model.h:
            block.compile()
        self.objective.loss = torch.compile(tied_cross_entropy)
        state = _random_state(self.compute.device)
        shape = (self.micro_batch, self.model.config.block_size)
        idx = torch.zeros(shape, dtype=torch.long, device=self.compute.device)
        self.gradients(idx, idx)
        self.optimizer.zero_grad()
        _set_random_state(self.compute.device, state)

    def uncompile(self) -> None:
        """Goes back to what runs as it is written."""
        for block in self.model.h:
            block._compiled_call_impl = None
        self.objective.loss = tied_cross_entropy
        self.compiled = False
        self.optimizer.zero_grad()

    def as_written(self) -> contextlib.AbstractContextManager[object]:
        """A context without compiling, for lengths that vary: each would be compiled anew."""
        return torch.compiler.set_stance("force_eager") if self.compiled else contextlib.nullcontext()

    def step(self, x: npt.NDArray[Any], y: npt.NDArray[Any], lr: float) -> Outcome:
        """One step on inputs x and targets y, (rows, T), unless its loss or gradient is no number: then weights and
        moments stay as they are."""
        loss, norm = self.gradients(_on(self.compute.device, x), _on(self.compute.device, y))
        self.optimizer.set_lr(lr)
        self.optimizer.step(unless=~(loss.isfinite() & norm.isfinite()))
        if self.scaled:
            self.scaler.update()
        self.optimizer.zero_grad()
        return Outcome.of(loss, norm)

    def gradients(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Leaves the clipped gradients of the mean loss over all targets that count. Gives that loss, and the
        gradients' norm before clipping.

        Where memory runs out, half as many sequences are computed at once from then on; the gradients are the same up
        to rounding. Inputs x and targets y are (rows, T), this process's share of the batch.

        Of several processes one cannot begin anew while the others wait for its gradients. So each first tries a
        micro-batch by itself, whenever there is more in one than before; what fails then, fails in all of them.
        Where each forward pass is computed together, there is no such trial, and no beginning anew.
        """
        if self.sharded is not None:
            return self._gradients(x, y)
        while True:
            state = _random_state(self.compute.device)
            known = min(self.micro_batch, x.size(0)) * x.size(1) <= self.tried
            try:
                if self.world.size > 1 and not known:
                    self._try(x[: self.micro_batch], y[: self.micro_batch])
                    known = True
                return self._gradients(x, y)
            except Exception as error:
                smaller = [d for d in divisors(x.size(0)) if d < self.micro_batch]
                if not is_out_of_memory(error) or not smaller or known:
                    raise
            # Not in the handler: the error holds on to what was computed.
            self.optimizer.zero_grad()
            if self.compute.device.type == "cuda":
                torch.cuda.empty_cache()
            _set_random_state(self.compute.device, state)
            self.micro_batch = max((d for d in smaller if 2 * d <= self.micro_batch), default=1)
            self.on_halved(self.micro_batch)

    def _try(self, x: Tensor, y: Tensor) -> None:
        """Computes a micro-batch's gradients and forgets them. Where that fails in any process it does in all: raises
        MemoryError, or what it failed of."""
        failed: Exception | None = None
        state = _random_state(self.compute.device)
        self.model.train()
        try:
            with self.world.accumulating(self.wrapped):
                self._backward(x, y, 1.0)
        except Exception as error:
            failed = error.with_traceback(None)  # which holds on to what was computed
        self.optimizer.zero_grad()
        _set_random_state(self.compute.device, state)
        match self.world.most(0 if failed is None else 1 if is_out_of_memory(failed) else 2):
            case 1:
                raise MemoryError
            case 2:
                raise failed or RuntimeError("it failed in another process")
        self.tried = x.numel()

    def _gradients(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        self.model.train()
        total = torch.zeros((), device=self.compute.device)
        counted = self.world.add((y != IGNORED).sum())
        for rows in range(0, x.size(0), self.micro_batch):
            part = slice(rows, rows + self.micro_batch)
            last = rows + self.micro_batch >= x.size(0)
            with contextlib.nullcontext() if last else self._accumulating():
                total += self._backward(x[part], y[part], counted)
        self.world.add(total)
        if self.sharded is not None:
            self.sharded.collect()
        for part_of in self.optimizer.parts:
            self.scaler.unscale_(part_of)
        clip = partial(clip_grad_norm_, self.model.parameters()) if self.sharded is None else self.sharded.clip
        return total, clip(self.clip)

    def _accumulating(self) -> contextlib.AbstractContextManager[object]:
        return self.world.accumulating(self.wrapped) if self.sharded is None else self.sharded.accumulating()

    def _backward(self, x: Tensor, y: Tensor, counted: Tensor | float) -> Tensor:
        """Adds the gradients of a micro-batch; gives its summed loss over ``counted``. Gradients of several processes
        are averaged, and are to be the sum: hence the factor."""
        with self.compute.autocast():
            loss: Tensor = self.wrapped(x, y) / counted
        with self.world.watching_peers():
            scaled = self.scaler.scale(loss * self.world.rows if self.world.rows > 1 else loss)
            scaled.backward()  # type: ignore[no-untyped-call]
        return loss.detach()


def _on(device: torch.device, array: npt.NDArray[Any]) -> Tensor:
    """An array's copy on a device; a GPU fetches it from pinned memory while it computes."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def _random_state(device: torch.device) -> tuple[Tensor, Tensor | None]:
    return torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None


def _set_random_state(device: torch.device, state: tuple[Tensor, Tensor | None]) -> None:
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state(state[1], device)
