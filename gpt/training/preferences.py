"""The reference of preferences: the log-probabilities of all answers under the model before training.

They are computed once, before the first step, and kept in the run's folder, so that no second model is in memory."""

import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt

from gpt.config import events
from gpt.insight.evaluate import Window
from gpt.runs import tensors
from gpt.system.errors import UserError
from gpt.system.files import disk_errors, write_pieces
from gpt.training.context import RunContext
from gpt.training.evaluation import sum_log_probs
from gpt.training.example_rows import ExampleRows
from gpt.training.strategy import Strategy

REFERENCE, HINT = "reference.safetensors", "restore it, or start the training again"


def open_reference(run: RunContext, strategy: Strategy) -> None:
    """Sets the reference of the run's preferences: reads its file, or computes it with the untrained model of
    ``strategy`` and writes the file. Raises `UserError` if the file is missing in a resumed run, or belongs to another
    model or other data."""
    path, world = run.path / REFERENCE, run.world
    sets = {name: rows for name, rows in zip(("train", "held_out"), run.data.preferences or (), strict=True) if rows}
    identity = _identify(run, sets.values())
    if world.broadcast_object(path.exists):
        shapes = {"identity": identity.shape, **{name: (len(rows) // 2, 2) for name, rows in sets.items()}}
        arrays = {
            name: found.mapped().numpy()
            for name, found in tensors.find([path], shapes, "this run", dtypes=("U8", "F32")).items()
        }
        if arrays.keys() != shapes.keys() or not np.array_equal(arrays["identity"], identity):
            raise UserError(f"{path} belongs to another model or other data", HINT)
    elif run.saved is not None:
        raise UserError(f"{path} is missing", HINT)
    else:
        arrays = {"identity": identity, **{name: _compute(rows, run, strategy) for name, rows in sets.items()}}
        with disk_errors(run.path):
            if world.is_main:
                write_pieces(path, tensors.pieces(arrays))
    for name, rows in sets.items():
        rows.reference = arrays[name]


def _identify(run: RunContext, sets: Iterable[ExampleRows]) -> npt.NDArray[np.uint8]:
    """Returns a checksum of the model before training, and of the ids and targets of all answers."""
    digest = hashlib.sha256(json.dumps(run.record.init and run.record.init.sha256, sort_keys=True).encode())
    for row in itertools.chain.from_iterable(sets):
        digest.update(row.ids.tobytes() + row.counts.tobytes())
    return np.frombuffer(digest.digest(), np.uint8)


def _compute(rows: ExampleRows, run: RunContext, strategy: Strategy) -> npt.NDArray[np.float32]:
    def windows() -> Iterator[Window]:
        for index in range(len(rows)):
            run.session.listen(events.Progress("read by the model before training", index, len(rows), "answers"))
            yield rows.window(index)

    return sum_log_probs(strategy, len(rows), windows(), run.compute, run.session.stop).numpy().astype(np.float32)
