"""Teachers: other models whose probabilities a run learns from (Hinton et al. 2015, arXiv 1503.02531)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gpt.config import TrainConfig
from gpt.device import Compute
from gpt.errors import UserError
from gpt.model.decoder import GPT
from gpt.model.loss import encode_probabilities, mean_probabilities
from gpt.model.params import breakdown
from gpt.runs import checkpoint, folder
from gpt.text.batches import Batches, Int64s
from gpt.text.tokenizer import Tokenizer
from gpt.training.data import BatchSource
from gpt.training.finetune import InitCheckpoint
from gpt.training.recipe import Facts, Recipe, can_read, divide_time, plan

TEACHERS = "teachers"  # subfolder of the run folder, for the runs of its own teachers
READ_TOKENS = 8192  # positions of a text that teachers read at once
# A run trains teachers if it makes at least this many passes over its text, and this many times the training tokens per
# parameter. It trains one teacher per `TEACHER_PASSES` passes (benchmarks/defaults.md).
MIN_TAUGHT_PASSES, MIN_TAUGHT_RATIO = 24.0, 150.0
TEACHER_PASSES, MIN_TEACHERS, MAX_TEACHERS = 9.0, 4, 8
MIN_TEACHER_STEPS = 100

Uint8s = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class TaughtBatches:
    """Batches of a text, with the teachers' probabilities of every target."""

    batches: Batches
    codes: Uint8s  # (N, V): `encode_probabilities` of the id after each id of the ring

    def global_batch(self, step: int, rank: int = 0, ranks: int = 1) -> tuple[Int64s, Int64s, Uint8s]:
        """Returns this rank's inputs and targets, (rows / ranks, T), and codes, (rows / ranks, T, V)."""
        starts = self.batches.starts(step, rank, ranks)
        positions = (starts[:, None] + np.arange(self.batches.block_size)) % len(self.codes)
        return *self.batches.windows_at(starts), self.codes[positions]


class Teachers:
    """Teachers on a device, without gradients or dropout. ``found`` are their checkpoints.

    They `read` a text once, before the run, because a pupil sees it many times. If the probabilities don't fit into
    memory, they compute them for every batch.
    """

    def __init__(self, found: Sequence[InitCheckpoint], compute: Compute) -> None:
        self.found, self.compute = found, compute
        self.shapes = [teacher.model for teacher in found]
        self.codes: Uint8s | None = None

    @cached_property
    def models(self) -> list[GPT]:
        """The models, loaded on first use. Their weights are in bfloat16 if the run computes in it."""
        dtype = torch.bfloat16 if self.compute.dtype == torch.bfloat16 else torch.float32
        models = [checkpoint.load(each.path, self.compute.device, dtype=dtype).model.to(dtype) for each in self.found]
        return [model.eval().requires_grad_(False) for model in models]

    def read(self, batches: BatchSource, recipe: Recipe, report: Callable[[int, int], None]) -> None:
        """Computes the mean of the teachers' probabilities after each id of a text, if there are teachers and they
        `can_read` it. Calls ``report`` with the ids done and their total.

        Windows of T ids overlap by half, so that each prediction has at least T / 2 ids of context.
        """
        if not self.found or not isinstance(batches, Batches) or not can_read(len(batches.ids), recipe):
            return
        n, T, vocab_size = len(batches.ids), batches.block_size, recipe.model.vocab_size
        stride = -(-T // 2)
        codes, starts = np.empty((n, vocab_size), np.uint8), np.arange(0, n, stride)
        for windows in np.split(starts, range(0, len(starts), max(1, READ_TOKENS // T))[1:]):
            report(int(windows[0]), n)
            x, _ = batches.windows_at(windows)
            tensors = self(torch.from_numpy(x.copy()).to(self.compute.device))
            states = [stream[:, T - stride :].flatten(0, 1) for stream in tensors[::2]]
            with torch.no_grad(), self.compute.autocast():
                q = mean_probabilities(states, [table[:vocab_size] for table in tensors[1::2]], vocab_size)
            codes[(windows[:, None] + np.arange(T - stride, T)).ravel() % n] = encode_probabilities(q).cpu().numpy()
        report(n, n)
        self.codes = codes
        del self.models  # frees their memory

    def teach(self, batches: BatchSource) -> BatchSource | TaughtBatches:
        """Adds the probabilities to the batches of a text that the teachers have read."""
        if self.codes is None or not isinstance(batches, Batches):
            return batches
        return TaughtBatches(batches, self.codes)

    @torch.no_grad()
    def __call__(self, x: Tensor) -> list[Tensor]:
        """Computes each teacher's residual stream for ids x, (rows, T). Returns the streams, (rows, T, C), each with
        its teacher's unembedding, (V, C). The loss turns them into probabilities, a chunk at a time. After `read`, the
        batches have the probabilities."""
        assert self.codes is None, "the batch has lost its teachers' probabilities"
        with self.compute.autocast():
            pairs = [(model.trunk(x).contiguous(), model.unembedding.detach()) for model in self.models]
        return [tensor for pair in pairs for tensor in pair]

    def placeholder(self, x: Tensor) -> list[Tensor]:
        """Returns tensors of the shapes that the loss gets with a batch x, for trials of a step."""
        if self.codes is None:
            return self(x)
        return [torch.ones(*x.shape, self.codes.shape[1], dtype=torch.uint8, device=x.device)]


def count_teachers(config: TrainConfig, facts: Facts) -> int:
    """The number of teachers that a run should train first. They pay off only if the model would read the text so
    often that it learns little more from it (benchmarks/defaults.md)."""
    recipe = plan(replace(config, teachers=0), facts.unmeasured)
    if facts.base or facts.rows or config.teacher or not can_read(facts.tokens, recipe):
        return 0
    tokens: float = recipe.tokens(recipe.steps)
    if config.minutes is not None and facts.costs is not None:
        tokens = divide_time(config, recipe, facts.costs, config.minutes)[1]
    steps, passes = round(tokens / recipe.batch_tokens), tokens / facts.tokens
    if passes < MIN_TAUGHT_PASSES or passes < MIN_TAUGHT_RATIO * facts.tokens / breakdown(recipe.model).trainable:
        return 0
    count = min(MAX_TEACHERS, max(MIN_TEACHERS, int(passes / TEACHER_PASSES)))
    return count if steps >= 2 * count * MIN_TEACHER_STEPS else 0


def count_teacher_steps(config: TrainConfig, facts: Facts) -> int:
    """The number of steps of each of the run's own teachers, which share half of its steps or minutes."""
    recipe, costs = plan(config, facts.unmeasured), facts.compiled_costs or facts.costs
    steps = recipe.steps
    if config.minutes is not None and costs is not None:
        try:
            steps = round(divide_time(config, recipe, costs, config.minutes / 2)[1] / recipe.batch_tokens)
        except UserError as error:
            raise UserError(error.message, "use more --minutes, or --teachers 0") from None
    return max(1, steps // (config.teachers or 1))


def find_teacher(name: str) -> InitCheckpoint:
    """Returns the teacher that ``name`` names. Raises `UserError` if there is none."""
    path = folder.find_checkpoint(name)
    return InitCheckpoint(name, path, *checkpoint.peek(path), folder.weight_checksums(path))


def own_teachers(run: Path, config: TrainConfig) -> list[InitCheckpoint]:
    """Returns the teachers that the run trained itself. Raises `UserError` if one is missing or damaged."""
    return [find_teacher(str(run / TEACHERS / str(number))) for number in range(1, (config.teachers or 0) + 1)]


def whole_run(path: Path) -> Path:
    """Returns the run that the run at ``path`` is a part of: for a run's own teacher, that run."""
    return path.parent.parent if path.parent.name == TEACHERS and folder.is_run(path.parent.parent) else path


def choose_tokenizer(
    config: TrainConfig, init: InitCheckpoint | None, teachers: Sequence[InitCheckpoint]
) -> Tokenizer | None:
    """Returns the tokenizer of the base model, or of the first teacher unless the user chose one."""
    if init is not None:
        return init.tokenizer
    return teachers[0].tokenizer if teachers and config.tokenizer == "auto" and config.vocab_size is None else None


def check_tokenizers(teachers: Sequence[InitCheckpoint], tokenizer: Tokenizer) -> None:
    """Raises `UserError` for a teacher with another tokenizer than the run's."""
    for teacher in teachers:
        if tokenizer.fingerprint != teacher.tokenizer.fingerprint or tokenizer.usable > teacher.model.vocab_size:
            raise UserError(
                f"the teacher {teacher.name} has another tokenizer ({teacher.tokenizer.name}, "
                f"{teacher.tokenizer.usable:,} ids) than the run ({tokenizer.name}, {tokenizer.usable:,} ids)",
                f"the run and all of its teachers need the same one: --tokenizer {teacher.path}",
            )
