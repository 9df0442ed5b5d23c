"""An optimizer step: upload the batch, accumulate gradients over micro-batches, clip them, update the weights.

`Stepper` runs it eagerly. A CPU can run the forward and backward pass as one program (`cpu_step`). A GPU can run
compiled halves of blocks (`gpu_step`), and the whole step as one graph (`gpt.system.cuda_graph`). The host prepares the
next batch without waiting for the device: `Download.read` returns a step's loss later, and the device itself skips a
step with non-finite gradients.
"""

import contextlib
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy.typing as npt
import torch
from torch import Tensor, nn

from gpt.config.device import Download, keep_freed_memory, random_states, set_random_states, upload
from gpt.model.decoder import GPT
from gpt.model.loss import IGNORED, chunked_losses, score_preferences, tied_cross_entropy
from gpt.system.cuda_graph import GraphedFunction
from gpt.system.errors import PeerLost, first_line
from gpt.system.interrupt import interruption
from gpt.training.cpu_step import GradientProgram
from gpt.training.gpu_step import compile_halves, uncompile_halves
from gpt.training.recipe import Recipe
from gpt.training.strategy import Strategy

T = TypeVar("T")
LENGTHS = 32  # Sequences have multiples of this length, because torch prepares each new shape of a bfloat16 product.


class Objective(nn.Module):
    """The summed loss of a micro-batch, in nats, as a module for `DistributedDataParallel`."""

    def __init__(self, model: GPT, chunk: int, separator: int | None = None) -> None:
        super().__init__()
        self.model, self.chunk, self.separator = model, chunk, separator
        self.loss: Callable[..., Tensor] = tied_cross_entropy

    def forward(self, x: Tensor, y: Tensor, *lesson: Tensor) -> Tensor:
        """Computes the loss on inputs x and targets y, (rows, T). ``lesson`` has codes of `TaughtBatches`, if any."""
        stream = self.model.trunk(x, separator=self.separator)
        return self.loss(stream, self.model.unembedding, y, self.chunk, *lesson)

    def count(self, y: Tensor) -> Tensor:
        """Counts what the loss is the mean of."""
        return (y != IGNORED).sum()


class ScoredObjective(Objective):
    """A loss of rows, with scores of them. The batches add ``columns`` numbers to each row."""

    columns = 2

    def count(self, y: Tensor) -> Tensor:
        """Counts the rows."""
        return torch.tensor(len(y), device=y.device)


class RewardObjective(ScoredObjective):
    """Minus the rewards of a micro-batch, with their policy gradient, and the rows' other scores, all summed. As in
    Dr. GRPO (Liu et al. 2025, arXiv 2503.20783), an answer's length does not weigh its tokens."""

    columns = 4

    def __init__(self, model: GPT, chunk: int, answer_tokens: int) -> None:
        super().__init__(model, chunk)
        self.answer_tokens = answer_tokens

    def forward(self, x: Tensor, y: Tensor, *scores: Tensor) -> Tensor:
        """Computes the scores for inputs x and targets y, (rows, T), and the advantages and scores of
        `gpt.training.rewards.AnswerBatches`, (rows, 4)."""
        advantages, others = scores[0][:, :1], scores[0][:, 1:].sum(0)
        factors = (advantages / self.answer_tokens).expand_as(y)
        total = self.loss(self.model.trunk(x), self.model.unembedding, y, self.chunk, factors=factors)
        return torch.cat([total - total.detach() - others[:1], others])


class PreferenceObjective(ScoredObjective):
    """The `score_preferences` of a micro-batch, summed. The first, the loss of DPO, has a gradient."""

    def __init__(self, model: GPT, chunk: int, beta: float) -> None:
        super().__init__(model, chunk)
        self.beta = beta

    def forward(self, x: Tensor, y: Tensor, *reference: Tensor) -> Tensor:
        """Computes the scores for inputs x and targets y, (rows, 2, T), and the reference's log-probabilities,
        (rows, 2). Logits are computed only for targets, and twice: the gradient of a token depends on the margin."""
        stream, y = self.model.trunk(x.flatten(0, 1)), y.flatten(0, 1)
        is_target, weight = y != IGNORED, self.model.unembedding
        stream, ids = stream[is_target], y[is_target]
        losses = torch.zeros(y.shape, device=y.device)
        losses.masked_scatter_(is_target, chunked_losses(stream, weight, ids, self.chunk))
        rewards = self.beta * (-losses.sum(-1).view(-1, 2) - reference[0])
        slopes = self.beta * torch.sigmoid(rewards[:, 1] - rewards[:, 0])
        factors = torch.stack([slopes, -slopes], -1).view(-1, 1).expand_as(y)[is_target]
        total = self.loss(stream[:, None], weight, ids[:, None], self.chunk, factors=factors[:, None])
        scores = score_preferences(rewards)
        return torch.cat([scores[:1] + total - total.detach(), scores[1:]])


class Stepper:
    """Takes optimizer steps on all ranks. ``on_uncompiled`` is called with the error if a compiled program fails and is
    dropped. With teachers, the loss is still the cross-entropy with the text; only its gradient changes. The loss of
    preferences and answers comes with their scores."""

    def __init__(
        self,
        strategy: Strategy,
        recipe: Recipe,
        note: Callable[[str], None] = lambda text: None,
        on_uncompiled: Callable[[str], None] = lambda why: None,
    ) -> None:
        self.strategy, self.world, self.recipe = strategy, strategy.world, recipe
        self.model, self.optimizer, self.compute = strategy.model, strategy.optimizer, strategy.compute
        self.note, self.on_uncompiled = note, on_uncompiled
        self.micro_batch, self.clip = recipe.micro_batch, recipe.clip or math.inf
        self.scaler = strategy.scaler()
        self.objective = Objective(self.model, recipe.loss_chunk, recipe.separator)
        if recipe.beta:
            self.objective = PreferenceObjective(self.model, recipe.loss_chunk, recipe.beta)
        elif recipe.reward:
            self.objective = RewardObjective(self.model, recipe.loss_chunk, recipe.answer_tokens)
        self.wrapped = strategy.wrap(self.objective)
        if self.compute.device.type == "cpu":
            keep_freed_memory()
        self.has_compiled_halves = False
        self.program: GradientProgram | None = None  # a CPU's replacement of `backward` for full micro-batches
        self.graph: GraphedFunction[tuple[Tensor, Tensor]] | None = None  # a GPU's replacement of `update`
        if recipe.uses_cuda_graph(self.compute, self.world.size):
            self.optimizer.keep_lr_on(self.compute.device)
            self.graph = GraphedFunction(self.update, self.model.buffers, self._give_up_graph)

    def step(self, x: npt.NDArray[Any], y: npt.NDArray[Any], lr: float, *lesson: npt.NDArray[Any]) -> Download:
        """Takes a step on this rank's inputs x and targets y, (rows, T). ``lesson`` is what the batches add to
        them. Returns the loss and the gradient norm. If one is not finite, weights and moments do not change."""
        self.optimizer.set_lr(lr)
        batch = [upload(array, self.compute.device) for array in (x, y, *lesson)]
        return Download(*(self.graph(*batch) if self.graph else self.update(*batch, parts=self.split(y))))

    def split(self, y: npt.NDArray[Any]) -> list[tuple[slice, int]]:
        """Returns the rows of each micro-batch, and their length up to the last target, rounded up to a multiple of
        `LENGTHS`. Rows of examples are sorted by length, so a micro-batch ends before a row of less than half its
        length, which would be mostly padding. Sharded ranks need equally many micro-batches."""
        is_target = (y != IGNORED).reshape(len(y), -1, y.shape[-1]).any(1)
        lengths = (y.shape[-1] - is_target[:, ::-1].argmax(1)).tolist()
        starts = [0]
        for row, length in enumerate(lengths):
            is_short = 2 * length < lengths[starts[-1]] and not self.recipe.is_sharded
            if is_short or row - starts[-1] == self.micro_batch:
                starts.append(row)
        ends = [*starts[1:], len(y)]
        parts = [(slice(start, end), max(lengths[start:end])) for start, end in zip(starts, ends, strict=True)]
        return [(part, length + -length % LENGTHS) for part, length in parts]

    def update(
        self, x: Tensor, y: Tensor, *lesson: Tensor, parts: Sequence[tuple[slice, int]] = ()
    ) -> tuple[Tensor, Tensor]:
        """Accumulates the gradients of the mean loss over all counted targets, clips them and updates the weights.
        Returns the mean loss and the gradient norm. ``parts`` are from `split`."""
        if not self.model.training:
            self.model.train()
        loss = torch.zeros((), device=self.compute.device)
        n_targets = self.world.all_reduce(self.objective.count(y))
        starts = range(0, len(x), self.micro_batch)
        parts = parts or [(slice(row, row + self.micro_batch), x.size(-1)) for row in starts]
        for number, (part, length) in enumerate(parts, 1):
            inputs, targets = x[part, ..., :length], y[part, ..., :length]
            with contextlib.nullcontext() if number == len(parts) else self.strategy.no_sync():
                loss = loss + self.backward(inputs, targets, n_targets, [tensor[part] for tensor in lesson])
        loss = self.world.all_reduce(loss)
        norm = self.strategy.clip_grad_norm(self.scaler, self.clip)
        self.optimizer.step(skip=~(loss.isfinite().all() & norm.isfinite()))
        self.scaler.update()
        self.optimizer.zero_grad()
        return loss, norm

    def backward(self, x: Tensor, y: Tensor, n_targets: Tensor, lesson: Sequence[Tensor]) -> Tensor:
        """Adds the gradients of a micro-batch, scaled in float16. Returns its summed loss, divided by ``n_targets``."""
        if self.program is not None and x.shape == self.program.shape:
            try:
                return self.program(x, y, n_targets, lesson)
            except RuntimeError as error:
                self.program = None
                self.on_uncompiled(first_line(error))
        with self.compute.autocast():
            loss: Tensor = self.wrapped(x, y, *lesson) / n_targets
        self.scaler.scale(self.strategy.backward_loss(loss.view(-1)[0])).backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def placeholder_batch(self, length: int) -> tuple[Tensor, Tensor, Tensor, Sequence[Tensor]]:
        """Returns arguments of `backward` for a full micro-batch of sequences of ``length`` tokens."""
        sides, device = (2,) * bool(self.recipe.beta), self.compute.device
        x = torch.zeros((self.micro_batch, *sides, length), dtype=torch.long, device=device)
        lesson = []
        if isinstance(self.objective, ScoredObjective):
            lesson = [torch.zeros((len(x), self.objective.columns), device=device)]
        elif self.recipe.own_teachers:
            lesson = [torch.ones((*x.shape, self.recipe.model.vocab_size), dtype=torch.uint8, device=device)]
        return x, x, torch.tensor(x.numel(), device=device), lesson

    def compile(self) -> str | None:
        """Compiles the step on all ranks. If one fails, all stay eager. Returns the compiler's error, if any.

        Each rank first compiles a trivial function. Otherwise, a rank with a failing compiler would leave the others
        waiting in the step's collectives.
        """
        tasks: list[Callable[[], object]] = [self._compile]
        if self.world.size > 1:
            tasks.insert(0, torch.compile(lambda: torch.ones(1, device=self.compute.device) + 1))
        for task in tasks:
            error = _run_compiler(task)
            if self.world.all_reduce_max(error is not None):
                self._uncompile()
                return "it failed in another process" if error is None else first_line(error)
        return None

    def _compile(self) -> None:
        """Compiles the step and runs a micro-batch. Raises the compiler's error.

        A single process on a CPU gets one program (`GradientProgram`). Otherwise, compiles blocks, loss and optimizer.
        """
        state, batch = random_states(self.compute.device), self.placeholder_batch(self.model.config.block_size)
        try:
            if self.recipe.compiles_whole_step(self.compute.device.type, self.world.size):
                rows, teachers = self.micro_batch, batch[-1]
                program = GradientProgram(self.objective, self.model, self.compute, rows, self.note, teachers)
                program(*batch)
                self.program = program
            else:
                self.has_compiled_halves = True
                compile_halves(self.model, self.compute.device)
                self.objective.loss = torch.compile(tied_cross_entropy)
                with self.strategy.trial():
                    self.backward(*batch)
                self.optimizer.compile()
        finally:
            set_random_states(self.compute.device, state)
        self.strategy.zero_grad()

    def _uncompile(self) -> None:
        self.program, self.has_compiled_halves = None, False
        uncompile_halves(self.model)
        self.objective.loss = tied_cross_entropy
        self.optimizer.uncompile()
        self.strategy.zero_grad()

    def run_eagerly(self, work: Callable[[], T]) -> T:
        """Runs an evaluation or a sample eagerly, because its varying lengths would cause recompilations."""
        with torch.compiler.set_stance("force_eager") if self.has_compiled_halves else contextlib.nullcontext():
            return work()

    def drop_graph(self) -> None:
        """Frees the CUDA graph, at the end of training or after weights and moments were replaced."""
        if self.graph is not None:
            self.graph.drop()

    def _give_up_graph(self, why: str) -> None:
        self.graph = None
        self.strategy.zero_grad()
        self.note(f"steps run without a CUDA graph, which is slower: {why:.200}")


def _run_compiler(task: Callable[[], object]) -> Exception | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Hides Inductor's advice to kernel developers.
            task()
    except Exception as error:
        if (signal := interruption(error)) is not None:
            raise signal from None
        if isinstance(error, PeerLost):
            raise
        return error
    return None
