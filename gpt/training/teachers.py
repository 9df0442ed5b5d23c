"""A run's own teachers: models whose probabilities it learns from (Hinton et al. 2015, arXiv 1503.02531)."""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from gpt.config import events
from gpt.config.device import Compute
from gpt.corpus.batches import Batches, Int64s
from gpt.model.loss import encode_probabilities
from gpt.runs import checkpoint, folder
from gpt.system.files import atomic_folder, disk_errors, write_pieces
from gpt.training.context import Session

TEACHERS = "teachers"  # subfolder of the run folder, for their weights
READ_TOKENS = 8192  # positions of a text that teachers read at once
COPY_BYTES = 2**24  # bytes copied at once

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


@torch.no_grad()
def read_text(
    teachers: Sequence[Path], batches: Batches, compute: Compute, separator: int | None, session: Session
) -> TaughtBatches | None:
    """Adds the mean of the teachers' probabilities to the batches of a text. Returns None after a signal.

    The teachers read the text once, before the pupil, which sees it many times. Windows of T ids overlap by half, so
    that each prediction has at least T / 2 ids of context. Weights are in bfloat16 if the run computes in it.
    """
    dtype = torch.bfloat16 if compute.dtype == torch.bfloat16 else torch.float32
    models = [checkpoint.load_model(path, compute.device, dtype=dtype).to(dtype).eval() for path in teachers]
    n, T = len(batches.ids), batches.block_size
    stride = -(-T // 2)
    codes, starts = np.empty((n, models[0].config.vocab_size), np.uint8), np.arange(0, n, stride)
    for windows in np.split(starts, range(0, len(starts), max(1, READ_TOKENS // T))[1:]):
        if session.stop.signum is not None:
            return None
        session.listen(events.Progress("read by the teachers", int(windows[0]), n, "tokens"))
        x = torch.from_numpy(batches.windows_at(windows)[0].copy()).to(compute.device)
        q = torch.zeros((), device=compute.device)
        for model in models:  # One at a time, because probabilities are wide.
            with compute.autocast():
                logits = model.unembed(model.trunk(x, separator=separator)[:, T - stride :].flatten(0, 1))
            q = q + logits.float().softmax(-1) / len(models)
        codes[(windows[:, None] + np.arange(T - stride, T)).ravel() % n] = encode_probabilities(q).cpu().numpy()
    session.listen(events.Progress("read by the teachers", n, n, "tokens"))
    return TaughtBatches(batches, codes)


def keep_teacher(run: Path, number: int, start: int) -> str:
    """Copies the weights of the best checkpoint after step ``start`` to the folder of teacher ``number``. Returns the
    folder's name in the run."""
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
