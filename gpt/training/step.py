"""An optimizer step: gradient accumulation over micro-batches, loss scaling, gradient clipping, and the update.

The host prepares the next batch without waiting for the device: `Download.read` returns a step's loss later, and the
device itself skips a step with non-finite gradients.
"""

import contextlib
import math
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy.typing as npt
import torch
from torch import Tensor, nn

from gpt.device import Download, keep_freed_memory, random_states, set_random_states, upload
from gpt.errors import PeerLost, first_line, is_out_of_memory
from gpt.interrupt import interruption
from gpt.model.decoder import GPT
from gpt.model.loss import IGNORED, tied_cross_entropy
from gpt.model.memory import divisors
from gpt.training.cpu_step import GradientProgram
from gpt.training.gpu_step import StepGraph, compile_halves, uncompile_halves
from gpt.training.recipe import Recipe
from gpt.training.strategy import Strategy
from gpt.training.teachers import Teachers

T = TypeVar("T")

EAGER_STEPS = 2  # eager steps with a batch shape before its graph is captured; they allocate memory and load kernels


class Objective(nn.Module):
    """The summed loss of a micro-batch, in nats, as a module for `DistributedDataParallel`."""

    def __init__(self, model: GPT, chunk: int, teacher_weight: float = 0.0) -> None:
        super().__init__()
        self.model, self.chunk, self.teacher_weight = model, chunk, teacher_weight
        self.loss: Callable[..., Tensor] = tied_cross_entropy

    def forward(self, x: Tensor, y: Tensor, *teachers: Tensor) -> Tensor:
        """Computes the loss on inputs x and targets y, (rows, T). ``teachers`` are the tensors of `Teachers`."""
        lesson = (self.teacher_weight, *teachers) if teachers else ()
        return self.loss(self.model.trunk(x), self.model.unembedding, y, self.chunk, *lesson)


class PeerFailure(PeerLost):
    """A micro-batch failed on another rank."""


class Stepper:
    """Takes optimizer steps. ``on_halved`` is called with the new micro-batch after running out of memory (OOM).
    ``on_uncompiled`` is called with the error when a compiled program fails and is dropped. With ``teachers``, the loss
    is still the cross-entropy with the text; only its gradient changes."""

    def __init__(
        self,
        strategy: Strategy,
        recipe: Recipe,
        on_halved: Callable[[int], None],
        on_uncompiled: Callable[[str], None] = lambda why: None,
        teachers: Teachers | None = None,
    ) -> None:
        self.strategy, self.world = strategy, strategy.world
        self.teachers = teachers or Teachers([], strategy.compute)
        self.on_halved, self.on_uncompiled = on_halved, on_uncompiled
        self.model, self.optimizer, self.compute = strategy.model, strategy.optimizer, strategy.compute
        self.micro_batch, self.clip = recipe.micro_batch, recipe.clip or math.inf
        self.full_rows = recipe.rows // self.world.data_size  # rows of a full batch; a ramp starts with fewer
        self.scaler = strategy.scaler()
        self.objective = Objective(self.model, recipe.loss_chunk, recipe.teacher_weight)
        self.wrapped = strategy.wrap(self.objective)
        if self.compute.device.type == "cpu":
            keep_freed_memory()
        self.max_tokens_run = 0  # the largest micro-batch, in tokens, that every rank has run
        self.compiled = False
        self.compiles_whole_step = recipe.compiles_whole_step(self.compute.device.type, self.world.size)
        self.program: GradientProgram | None = None  # program for full micro-batches on a CPU
        self.uses_cuda_graph = recipe.uses_cuda_graph(self.compute, self.world.size)
        self.shape, self.shape_count = torch.Size(), 0  # shape of the last batch, and how many batches in a row had it
        self.graph: StepGraph | None = None  # CUDA graph of a step with this shape
        if self.uses_cuda_graph:
            self.optimizer.keep_lr_on(self.compute.device)

    @property
    def has_loss_scale(self) -> bool:
        """Whether the loss is scaled, so infinite gradients are normal."""
        return self.scaler.is_enabled()

    def compile(self, note: Callable[[str], None] = lambda text: None) -> str | None:
        """Compiles the step on all ranks. If one fails, all stay eager. Returns the compiler's error, if any.

        Each rank first compiles a trivial function. Otherwise, a rank with a failing compiler would leave the others
        waiting in the step's collectives.
        """
        tasks: list[Callable[[], object]] = [partial(self._compile, note)]
        if self.world.size > 1:
            tasks.insert(0, torch.compile(lambda: torch.ones(1, device=self.compute.device) + 1))
        for task in tasks:
            error = _run_compiler(task)
            if self.world.all_reduce_max(error is not None):
                self._uncompile()
                if error is None or isinstance(error, PeerFailure):
                    return "it failed in another process"
                return first_line(error)
        return None

    def _compile(self, note: Callable[[str], None]) -> None:
        """Compiles the step and runs a micro-batch. Raises the compiler's error.

        A single process on a CPU gets one program (`GradientProgram`). Otherwise, compiles blocks, loss and optimizer.
        """
        state = random_states(self.compute.device)
        shape = (self.micro_batch, self.model.config.block_size)
        idx = torch.zeros(shape, dtype=torch.long, device=self.compute.device)
        try:
            if self.compiles_whole_step:
                lesson = self.teachers(idx)
                program = GradientProgram(self.objective, self.model, self.compute, self.micro_batch, note, lesson)
                program(idx, idx, torch.tensor(idx.numel()), lesson)
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
        """Returns to eager execution."""
        self.program = None
        uncompile_halves(self.model)
        self.objective.loss = tied_cross_entropy
        self.compiled = False
        self.optimizer.uncompile()
        self._zero_grad()

    def _zero_grad(self) -> None:
        """Frees all gradients, including those of a sharded model that the optimizer doesn't see yet."""
        self.model.zero_grad()
        self.optimizer.zero_grad()

    def run_eagerly(self, work: Callable[[], T]) -> T:
        """Runs an evaluation or a sample eagerly, because its varying lengths would cause recompilations. After an OOM,
        permanently drops the CUDA graph, which reserves memory, and repeats ``work``."""
        with torch.compiler.set_stance("force_eager") if self.compiled else contextlib.nullcontext():
            try:
                return work()
            except Exception as error:
                if self.graph is None or not is_out_of_memory(error):
                    raise
            # Free memory outside the handler, because the error keeps activations alive.
            self.uses_cuda_graph = False
            self.drop_graph()
            torch.cuda.empty_cache()
            return work()

    def step(self, x: npt.NDArray[Any], y: npt.NDArray[Any], lr: float, *lesson: npt.NDArray[Any]) -> Download:
        """Takes a step on inputs x and targets y, (rows, T). ``lesson`` is what `TaughtBatches` adds to them. A
        non-finite loss or gradient leaves weights and moments unchanged."""
        self.optimizer.set_lr(lr)
        batch = [upload(array, self.compute.device) for array in (x, y, *lesson)]
        return Download(*(self._replay_graph(*batch) or self._update(self.gradients(*batch))))

    def _update(self, loss: Tensor) -> tuple[Tensor, Tensor]:
        """Clips the gradients of ``loss`` and updates the weights. Returns the loss and the gradient norm."""
        norm = self.strategy.clip_grad_norm(self.scaler, self.clip)
        self.optimizer.step(skip=~(loss.isfinite() & norm.isfinite()))
        if self.has_loss_scale:
            self.scaler.update()
        self.optimizer.zero_grad()
        return loss, norm

    def _replay_graph(self, x: Tensor, *others: Tensor) -> tuple[Tensor, Tensor] | None:
        """Takes the step by replaying its CUDA graph. Returns None if there is no graph: for the first two batches of a
        shape, or if capturing fails."""
        if not self.uses_cuda_graph:
            return None
        if x.shape != self.shape:
            self.shape, self.shape_count, self.graph = x.shape, 0, None
        self.shape_count += 1
        if self.shape_count <= EAGER_STEPS:
            return None
        if self.graph is None:
            try:
                self.graph = StepGraph(
                    lambda *batch: self._update(self._accumulate(*batch)), (x, *others), self.model.buffers()
                )
            except RuntimeError:
                self.uses_cuda_graph = False
                self._zero_grad()
                return None
        return self.graph(x, *others)

    def drop_graph(self) -> None:
        """Drops the CUDA graph, at the end of training or after weights and moments were replaced."""
        self.shape_count, self.graph = 0, None

    def gradients(self, x: Tensor, y: Tensor, *lesson: Tensor) -> Tensor:
        """Computes the gradients of the mean loss over all counted targets. Returns the mean loss.

        Inputs x and targets y, (rows, T), are this data rank's share of the batch. In float16, the gradients are
        scaled. An OOM permanently halves the micro-batch; the gradients are equal up to rounding. A replica cannot
        repeat a step while others wait for its gradients. So replicas first try each micro-batch that is larger than
        any before; if one replica fails, all do. Sharded ranks cannot retry, because their forward passes are
        collective. A compiled program does not report why it failed, so the step is repeated without the program.
        """
        while True:
            state, rows = random_states(self.compute.device), min(self.micro_batch, x.size(0))
            known_to_fit = rows * x.size(1) <= self.max_tokens_run
            try:
                if self.strategy.needs_trial and not known_to_fit:
                    self._try_micro_batch(*(tensor[: self.micro_batch] for tensor in (x, y, *lesson)))
                    known_to_fit = True
                return self._accumulate(x, y, *lesson)
            except Exception as error:
                reason = first_line(error) if self.program is not None and isinstance(error, RuntimeError) else None
                if reason is None and not (
                    self.strategy.can_retry and is_out_of_memory(error) and rows > 1 and not known_to_fit
                ):
                    raise
            # Free memory outside the handler, because the error keeps activations alive.
            self._zero_grad()
            if self.compute.device.type == "cuda":
                torch.cuda.empty_cache()
            set_random_states(self.compute.device, state)
            if reason is not None:
                self.program = None
                self.on_uncompiled(reason)
                continue
            self.micro_batch = max(d for d in divisors(self.full_rows) if 2 * d <= rows)
            self.on_halved(self.micro_batch)

    def _try_micro_batch(self, x: Tensor, y: Tensor, *lesson: Tensor) -> None:
        """Computes a micro-batch's gradients and frees them. If any rank fails, all ranks raise an error. If every
        failure was an OOM, this is `MemoryError`. Otherwise, each rank raises its own error, or `PeerFailure` if it had
        none."""
        failure: Exception | None = None
        state = random_states(self.compute.device)
        self.model.train()
        try:
            with self.strategy.no_sync():
                self._backward(x, y, 1.0, lesson)
        except Exception as error:
            failure = error.with_traceback(None)  # The traceback keeps activations alive.
        self._zero_grad()
        set_random_states(self.compute.device, state)
        match self.world.all_reduce_max(0 if failure is None else 1 if is_out_of_memory(failure) else 2):
            case 1:
                raise MemoryError
            case 2:
                raise failure or PeerFailure
        self.max_tokens_run = x.numel()

    def _accumulate(self, x: Tensor, y: Tensor, *lesson: Tensor) -> Tensor:
        """Accumulates gradients over micro-batches. Returns the batch's mean loss."""
        if not self.model.training:
            self.model.train()
        total = torch.zeros((), device=self.compute.device)
        n_targets = self.world.all_reduce((y != IGNORED).sum())
        for row in range(0, x.size(0), self.micro_batch):
            part = slice(row, row + self.micro_batch)
            is_last = row + self.micro_batch >= x.size(0)
            with contextlib.nullcontext() if is_last else self.strategy.no_sync():
                total += self._backward(x[part], y[part], n_targets, [tensor[part] for tensor in lesson])
        return self.world.all_reduce(total)

    def _backward(self, x: Tensor, y: Tensor, n_targets: Tensor | float, lesson: Sequence[Tensor] = ()) -> Tensor:
        """Adds the gradients of a micro-batch. Returns the micro-batch's summed loss, divided by ``n_targets``."""
        lesson = lesson or self.teachers(x)
        if self.program is not None and x.shape == self.program.shape:
            return self.program(x, y, torch.as_tensor(n_targets), lesson)
        with self.compute.autocast():
            loss: Tensor = self.wrapped(x, y, *lesson) / n_targets
        self.scaler.scale(self.strategy.backward_loss(loss)).backward()  # type: ignore[no-untyped-call]
        return loss.detach()


def _run_compiler(task: Callable[[], object]) -> Exception | None:
    """Runs a compilation and returns its error, if any."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Hides Inductor's advice to kernel developers.
            task()
    except Exception as error:
        if (signal := interruption(error)) is not None:
            raise signal from None
        if isinstance(error, PeerLost) and not isinstance(error, PeerFailure):
            raise
        return error
    return None
