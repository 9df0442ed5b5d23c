"""One optimizer step: the gradients of a whole batch, accumulated over micro-batches, clipped, applied.

Nothing here waits for the device: a step's loss is read when it is wanted (`Download.read`), and a step whose gradient
is not finite is skipped on the device itself. So the host prepares the next batch while a GPU computes.
"""

import contextlib
import math
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor, nn

from gpt.device import Download, keep_freed_memory, random_states, set_random_states, upload
from gpt.errors import PeerLost, first_line, is_out_of_memory
from gpt.interrupt import interruption
from gpt.model.decoder import GPT
from gpt.model.loss import IGNORED, tied_cross_entropy
from gpt.model.memory import divisors
from gpt.training.compiling import StepGraph, compile_halves, uncompile_halves
from gpt.training.native import GradientProgram
from gpt.training.parallel import Parallel
from gpt.training.recipe import Recipe

UNREPEATED = 2  # steps of a shape before its graph is made: the first allocate, and load kernels


class Objective(nn.Module):
    """The summed loss of a micro-batch, in nats, as a module, so that it can be wrapped."""

    def __init__(self, model: GPT, chunk: int) -> None:
        super().__init__()
        self.model, self.chunk = model, chunk
        self.loss: Callable[[Tensor, Tensor, Tensor, int], Tensor] = tied_cross_entropy

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """The loss of inputs x and targets y, (rows, T)."""
        return self.loss(self.model.trunk(x), self.model.unembedding, y, self.chunk)


class FailedElsewhere(PeerLost):
    """A micro-batch that all ranks tried failed on another one."""


class Stepper:
    """Optimizer steps of a model. ``on_halved`` hears the new micro-batch when memory ran out, ``on_uncompiled`` the
    error of a compiled program, without which steps go on."""

    def __init__(
        self,
        parallel: Parallel,
        recipe: Recipe,
        on_halved: Callable[[int], None],
        on_uncompiled: Callable[[str], None] = lambda why: None,
    ) -> None:
        self.parallel, self.world = parallel, parallel.world
        self.on_halved, self.on_uncompiled = on_halved, on_uncompiled
        self.model, self.optimizer, self.compute = parallel.model, parallel.optimizer, parallel.compute
        self.micro_batch, self.clip = recipe.micro_batch, recipe.clip or math.inf
        self.scaler = parallel.scaler()
        self.objective = Objective(self.model, recipe.loss_chunk)
        self.wrapped = parallel.wrap(self.objective)
        if self.compute.device.type == "cpu":
            keep_freed_memory()
        self.tried = 0  # the most positions at once that all ranks are known to have memory for
        self.compiled = False
        self.one_program = recipe.compiles_whole_step(self.compute, self.world.size)
        self.program: GradientProgram | None = None  # on a CPU: what computes full micro-batches, once compiled
        self.repeats = recipe.uses_cuda_graph(self.compute, self.world.size)
        self.shape, self.alike = torch.Size(), 0  # of the last batch, and how many of that shape came in a row
        self.graph: StepGraph | None = None  # of steps of that shape
        if self.repeats:
            self.optimizer.keep_lr_on(self.compute.device)

    @property
    def scaled(self) -> bool:
        """Whether the loss is scaled, so that an infinite gradient is usual."""
        return self.scaler.is_enabled()

    def compile(self, note: Callable[[str], None] = lambda text: None) -> str | None:
        """Compiles, if that works on all ranks; else steps stay eager. Returns the compiler's error, None if it
        works.

        Where a step has collectives, a compiler that fails on one rank would leave the others waiting in them: so each
        rank first compiles something small by itself."""
        works: list[Callable[[], object]] = [partial(self._compile, note)]
        if self.world.size > 1:
            works.insert(0, torch.compile(lambda: torch.ones(1, device=self.compute.device) + 1))
        for work in works:
            failed = _failure(work)
            if self.world.all_reduce_max(failed is not None):
                self._uncompile()
                if failed is None or isinstance(failed, FailedElsewhere):
                    return "it failed in another process"
                return first_line(failed)
        return None

    def _compile(self, note: Callable[[str], None]) -> None:
        """Compiles, and tries it on a micro-batch. Raises the compiler's error.

        One process on a CPU has a program of the whole step. Others compile the model's parts and the loss.
        """
        state = random_states(self.compute.device)
        shape = (self.micro_batch, self.model.config.block_size)
        idx = torch.zeros(shape, dtype=torch.long, device=self.compute.device)
        try:
            if self.one_program:
                program = GradientProgram(self.objective, self.model, self.compute, self.micro_batch, note)
                program(idx, idx, torch.tensor(idx.numel()))
                self.program = program
            else:
                self.compiled = True
                compile_halves(self.model, self.compute.device)
                self.objective.loss = torch.compile(tied_cross_entropy)
                self.gradients(idx, idx)
                self.optimizer.compile()
        finally:
            set_random_states(self.compute.device, state)
        self._zero_grad()

    def _uncompile(self) -> None:
        """Goes back to eager execution."""
        self.program = None
        uncompile_halves(self.model)
        self.objective.loss = tied_cross_entropy
        self.compiled = False
        self.optimizer.uncompile()
        self._zero_grad()

    def _zero_grad(self) -> None:
        """Frees all gradients, also those that are not yet where the optimizer finds them."""
        self.model.zero_grad()
        self.optimizer.zero_grad()

    def eager(self) -> contextlib.AbstractContextManager[object]:
        """A context of eager execution, for lengths that vary: each would be compiled anew."""
        return torch.compiler.set_stance("force_eager") if self.compiled else contextlib.nullcontext()

    def step(self, x: npt.NDArray[Any], y: npt.NDArray[Any], lr: float) -> Download:
        """Takes one step on inputs x and targets y, (rows, T). If its loss or gradient is not finite, weights and
        moments stay as they are."""
        self.optimizer.set_lr(lr)
        batch = upload(x, self.compute.device), upload(y, self.compute.device)
        return Download(*(self._repeated(*batch) or self._applied(self.gradients(*batch))))

    def _applied(self, loss: Tensor) -> tuple[Tensor, Tensor]:
        """Updates the weights by the gradients of ``loss``. Returns it, and the gradients' norm."""
        norm = self.parallel.clip_grad_norm(self.scaler, self.clip)
        self.optimizer.step(skip=~(loss.isfinite() & norm.isfinite()))
        if self.scaled:
            self.scaler.update()
        self.optimizer.zero_grad()
        return loss, norm

    def _repeated(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor] | None:
        """Takes the step as a CUDA graph, from the third batch of one shape on; before, and where none can be made,
        returns None."""
        if not self.repeats:
            return None
        if x.shape != self.shape:
            self.shape, self.alike, self.graph = x.shape, 0, None
        self.alike += 1
        if self.alike <= UNREPEATED:
            return None
        if self.graph is None:
            try:
                self.graph = StepGraph(lambda x, y: self._applied(self._accumulated(x, y)), x, y, self.model.buffers())
            except RuntimeError:
                self.repeats = False
                self._zero_grad()
                return None
        return self.graph(x, y)

    def forget_graph(self) -> None:
        """Drops the CUDA graph: at the end, with its memory, or when weights and moments were set to others."""
        self.alike, self.graph = 0, None

    def gradients(self, x: Tensor, y: Tensor) -> Tensor:
        """Computes the gradients of the mean loss over all targets that count, scaled in float16. Returns that loss.
        Inputs x and targets y are (rows, T), this data rank's share of the batch.

        If memory runs out, half as many sequences are computed at once from then on; the gradients are the same up to
        rounding. One of several ranks cannot begin again while the others wait for its gradients: so each first tries
        a micro-batch by itself whenever it is larger than any before, and if that fails on one rank, it fails on all.
        Ranks that compute each forward pass together cannot do that, and do not begin again. A program does not say
        why it failed: without it, the same is computed again.
        """
        while True:
            state = random_states(self.compute.device)
            known = min(self.micro_batch, x.size(0)) * x.size(1) <= self.tried
            try:
                if self.parallel.needs_trial and not known:
                    self._try(x[: self.micro_batch], y[: self.micro_batch])
                    known = True
                return self._accumulated(x, y)
            except Exception as error:
                smaller = [d for d in divisors(x.size(0)) if d < self.micro_batch]
                why = first_line(error) if self.program is not None and isinstance(error, RuntimeError) else None
                if why is None and not (self.parallel.can_retry and is_out_of_memory(error) and smaller and not known):
                    raise
            # After the handler: the error keeps alive what was computed.
            self._zero_grad()
            if self.compute.device.type == "cuda":
                torch.cuda.empty_cache()
            set_random_states(self.compute.device, state)
            if why is not None:
                self.program = None
                self.on_uncompiled(why)
                continue
            self.micro_batch = max((d for d in smaller if 2 * d <= self.micro_batch), default=1)
            self.on_halved(self.micro_batch)

    def _try(self, x: Tensor, y: Tensor) -> None:
        """Computes a micro-batch's gradients and frees them. If that fails on any rank, it raises on all: MemoryError,
        or the error itself."""
        failed: Exception | None = None
        state = random_states(self.compute.device)
        self.model.train()
        try:
            with self.parallel.no_sync():
                self._backward(x, y, 1.0)
        except Exception as error:
            failed = error.with_traceback(None)  # it keeps alive what was computed
        self._zero_grad()
        set_random_states(self.compute.device, state)
        match self.world.all_reduce_max(0 if failed is None else 1 if is_out_of_memory(failed) else 2):
            case 1:
                raise MemoryError
            case 2:
                raise failed or FailedElsewhere
        self.tried = x.numel()

    def _accumulated(self, x: Tensor, y: Tensor) -> Tensor:
        """Adds up the gradients of a batch, a micro-batch at a time. Returns its mean loss."""
        if not self.model.training:
            self.model.train()
        total = torch.zeros((), device=self.compute.device)
        counted = self.world.all_reduce((y != IGNORED).sum())
        for rows in range(0, x.size(0), self.micro_batch):
            part = slice(rows, rows + self.micro_batch)
            last = rows + self.micro_batch >= x.size(0)
            with contextlib.nullcontext() if last else self.parallel.no_sync():
                total += self._backward(x[part], y[part], counted)
        return self.world.all_reduce(total)

    def _backward(self, x: Tensor, y: Tensor, counted: Tensor | float) -> Tensor:
        """Adds the gradients of a micro-batch. Returns its summed loss, divided by ``counted``."""
        if self.program is not None and x.shape == self.program.shape:
            return self.program(x, y, torch.as_tensor(counted))
        with self.compute.autocast():
            loss: Tensor = self.wrapped(x, y) / counted
        self.scaler.scale(self.parallel.backward_loss(loss)).backward()  # type: ignore[no-untyped-call]
        return loss.detach()


def _failure(work: Callable[[], object]) -> Exception | None:
    """Does some work of a compiler. Returns the error, of any kind, that it raises."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Inductor's advice to those who write kernels
            work()
    except Exception as error:
        if (stopped := interruption(error)) is not None:
            raise stopped from None
        if isinstance(error, PeerLost) and not isinstance(error, FailedElsewhere):
            raise
        return error
    return None
