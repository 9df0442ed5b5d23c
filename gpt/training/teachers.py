"""Teachers: other models whose probabilities a run learns from (Hinton et al. 2015, arXiv 1503.02531)."""

import contextlib
import math
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gpt.config import events
from gpt.config.device import Compute
from gpt.config.train import TrainConfig
from gpt.corpus.batches import Batches, Int64s
from gpt.model.decoder import GPT
from gpt.model.loss import encode_probabilities, mean_probabilities
from gpt.runs import checkpoint, folder
from gpt.system.errors import UserError
from gpt.system.files import TEMPORARY, atomic_folder, disk_errors, write_pieces
from gpt.tokenizers.tokenizer import Tokenizer
from gpt.training.context import Session
from gpt.training.data import BatchSource
from gpt.training.finetune import InitCheckpoint
from gpt.training.recipe import Recipe, can_read

TEACHERS = "teachers"  # subfolder of the run folder, for the weights of its own teachers
READ_TOKENS = 8192  # positions of a text that teachers read at once
COPY_BYTES = 2**24  # bytes copied at once

Uint8s = npt.NDArray[np.uint8]
T = TypeVar("T")


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

    They `read` a text once, before the pupil, which sees it many times. If the probabilities don't fit into memory,
    they compute them for every batch.
    """

    def __init__(self, found: Sequence[InitCheckpoint], compute: Compute, separator: int | None = None) -> None:
        self.found, self.compute, self.separator = found, compute, separator
        self.shapes = [teacher.model for teacher in found]
        self.codes: Uint8s | None = None

    @cached_property
    def models(self) -> list[GPT]:
        """The models, loaded on first use. Their weights are in bfloat16 if the run computes in it."""
        dtype = torch.bfloat16 if self.compute.dtype == torch.bfloat16 else torch.float32
        models = [checkpoint.load_model(each.path, self.compute.device, dtype=dtype).to(dtype) for each in self.found]
        return [model.eval().requires_grad_(False) for model in models]

    def read(
        self, batches: BatchSource, recipe: Recipe, run: Path, session: Session, max_seconds: float = math.inf
    ) -> None:
        """Computes the mean of the teachers' probabilities after each id of a text, if there are teachers and they
        `can_read` it. Gives up after a signal, or if it would take more than ``max_seconds``.

        One process of each machine does this. The others map its result, through a file in ``run`` that is removed.
        """
        if not self.found or not isinstance(batches, Batches) or not can_read(len(batches.ids), recipe):
            return
        world, shape = session.world, (len(batches.ids), recipe.model.vocab_size)
        if world.local_rank == 0:
            self.codes = self._read(batches, recipe.model.vocab_size, session, max_seconds)
        if world.all_reduce_max(world.local_rank == 0 and self.codes is None):
            self.codes = None
            return
        vars(self).pop("models", None)  # frees their memory
        if world.local_size == 1:
            return
        path = run / f"{TEMPORARY}codes-{world.rank - world.local_rank}"
        with disk_errors(run):
            if self.codes is not None:
                self.codes.tofile(path)
            world.all_reduce_max(0)
            self.codes = np.asarray(np.memmap(path, np.uint8, "r", shape=shape))
            world.all_reduce_max(0)
        with contextlib.suppress(OSError):  # Windows cannot remove a mapped file.
            path.unlink(missing_ok=True)

    def pretend_to_read(self, batches: BatchSource, recipe: Recipe) -> None:
        """Uses dummy probabilities, which take as long, if the teachers `can_read` the text."""
        if self.found and isinstance(batches, Batches) and can_read(len(batches.ids), recipe):
            self.codes = np.broadcast_to(np.uint8(1), (len(batches.ids), recipe.model.vocab_size))

    def _read(self, batches: Batches, vocab_size: int, session: Session, max_seconds: float) -> Uint8s | None:
        """Returns the codes of a text, or None if it gave up. Windows of T ids overlap by half, so that each prediction
        has at least T / 2 ids of context."""
        n, T, begin = len(batches.ids), batches.block_size, time.perf_counter()
        stride = -(-T // 2)
        codes, starts = np.empty((n, vocab_size), np.uint8), np.arange(0, n, stride)
        for windows in np.split(starts, range(0, len(starts), max(1, READ_TOKENS // T))[1:]):
            done, elapsed = int(windows[0]), time.perf_counter() - begin
            if session.stop.signum is not None:
                return None
            if elapsed > max_seconds / 8 and elapsed * n > max_seconds * done:
                session.note("reading the text takes too long: the teachers compute the probabilities of every batch")
                return None
            session.listen(events.Progress("read by the teachers", done, n, "tokens"))
            x, _ = batches.windows_at(windows)
            tensors = self(torch.from_numpy(x.copy()).to(self.compute.device))
            states = [stream[:, T - stride :].flatten(0, 1) for stream in tensors[::2]]
            with torch.no_grad(), self.compute.autocast():
                q = mean_probabilities(states, [table[:vocab_size] for table in tensors[1::2]], vocab_size)
            codes[(windows[:, None] + np.arange(T - stride, T)).ravel() % n] = encode_probabilities(q).cpu().numpy()
        session.listen(events.Progress("read by the teachers", n, n, "tokens"))
        return codes

    def teach(self, batches: T) -> T | TaughtBatches:
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
            pairs = [
                (model.trunk(x, separator=self.separator).contiguous(), model.unembedding.detach())
                for model in self.models
            ]
        return [tensor for pair in pairs for tensor in pair]

    def placeholder(self, x: Tensor) -> list[Tensor]:
        """Returns tensors of the shapes that the loss gets with a batch x, for trials of a step."""
        if self.codes is None:
            return self(x)
        return [torch.ones(*x.shape, self.codes.shape[1], dtype=torch.uint8, device=x.device)]


def find_teacher(name: str) -> InitCheckpoint:
    """Returns the teacher that ``name`` names. Raises `UserError` if there is none."""
    path = folder.find_checkpoint(name)
    return InitCheckpoint(name, path, *checkpoint.peek(path), folder.weight_checksums(path))


def keep_teacher(run: Path, number: int, start: int) -> str:
    """Copies the weights of the best checkpoint after step ``start`` to the folder of the run's own teacher ``number``.
    Returns the folder's name in the run."""
    best = folder.best([entry for entry in folder.checkpoints(run) if entry.step > start])
    target = run / TEACHERS / str(number)
    with disk_errors(run):
        target.parent.mkdir(exist_ok=True)
        shutil.rmtree(target, ignore_errors=True)
        with atomic_folder(target) as copy:
            for path in (run / best.name).iterdir():
                if path.name not in folder.TRAINING:
                    with path.open("rb") as file:
                        write_pieces(copy / path.name, iter(partial(file.read, COPY_BYTES), b""))
    return f"{TEACHERS}/{number}"


def own_teachers(run: Path, count: int) -> list[InitCheckpoint]:
    """Returns the teachers that the run trained itself. Raises `UserError` if one is missing or damaged."""
    return [find_teacher(str(run / TEACHERS / str(number))) for number in range(1, count + 1)]


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
