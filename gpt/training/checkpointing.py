"""Writes checkpoints in a thread while training continues, and rolls back to the snapshot in memory."""

import math
import shutil
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from gpt.model.lora import find_roles
from gpt.runs import adapter, checkpoint, folder
from gpt.runs.checkpoint import Files
from gpt.system.errors import WorkError
from gpt.system.files import DISK_FULL, disk_errors
from gpt.training.context import RunContext
from gpt.training.journal import Journal
from gpt.training.recipe import Recipe
from gpt.training.state import STATE, TENSORS, Snapshot, TrainState
from gpt.training.strategy import WEIGHT, Strategy, with_prefix

SPARE_BYTES = 2**20  # disk space to leave free


class Checkpointer:
    """Snapshots the state of a run, writes checkpoints in the background, and rolls back."""

    def __init__(
        self,
        run: RunContext,
        strategy: Strategy,
        scaler: torch.amp.GradScaler,
        state: TrainState,
        tokenizer: checkpoint.TokenizerFiles,
        journal: Journal,
    ) -> None:
        self.run, self.strategy, self.scaler, self.state, self.tokenizer = run, strategy, scaler, state, tokenizer
        self.journal = journal
        self.snapshot = Snapshot()  # the rollback target
        moments = strategy.optimizer.shapes(strategy.shapes)
        elements = sum(map(math.prod, [*strategy.shapes.values(), *moments.values()]))
        self.size = 4 * elements + sum(map(len, tokenizer.files.values()))  # approximate checkpoint size in bytes
        make_writer = partial(
            Writer, run.path, run.recipe.keep, state.start, state.settled_step, journal.report_save, run.session.warn
        )
        if run.world.is_main:
            self.writer = make_writer(on_finished=strategy.finish_save)
        else:
            self.writer = make_writer(serve=lambda: strategy.serve(self.snapshot.tensors))

    def take_snapshot(self) -> None:
        """Copies the training state to host memory."""
        self.writer.wait()  # The writer may still be reading the previous snapshot.
        self.state.seconds = time.perf_counter() - self.run.start_time
        self.state.metrics_bytes = self.journal.metrics.size if self.journal.metrics else 0
        self.snapshot.take(self.strategy, self.scaler, self.state)

    def roll_back(self, **changes: Any) -> None:
        """Restores the newest snapshot, then applies ``changes`` to the state."""
        snapshot_state = self.snapshot.restore(self.strategy, self.scaler)
        vars(self.state).update(vars(snapshot_state), **changes)

    def save(self, recipe: Recipe) -> None:
        """Takes a snapshot and starts writing it."""
        self.take_snapshot()
        self.writer.begin(self.state.step, self.size, self._prepare_files(recipe))

    def _prepare_files(self, recipe: Recipe) -> Callable[[], Files]:
        """Returns a function that builds the snapshot's checkpoint files in any thread."""
        run, snapshot, state = self.run, self.snapshot, self.snapshot.state
        training_json = snapshot.to_training_json(recipe, run.machine())
        recipe = recipe.cycle(state.cycle)
        meta: dict[str, Any] = {
            "step": state.step,
            "tokens_seen": state.step * recipe.batch_tokens,
            "val_loss": state.measured_loss if state.measured_step == state.step else None,
        }
        store: checkpoint.Store | None = None
        if run.init and recipe.lora_rank:
            meta["adapter"] = {"sha256": run.init.sha256}
            roles = find_roles(recipe.lora_targets, recipe.model)
            store = partial(adapter.contents, run.init.adapter(recipe.lora_rank, recipe.lora_alpha), roles)
        full = {name: self.strategy.full_tensor(name, tensor) for name, tensor in snapshot.tensors.items()}
        weights = with_prefix(full, WEIGHT)
        state_tensors = {name: tensor for name, tensor in full.items() if not name.startswith(WEIGHT)}

        def build_files() -> Files:
            if self.journal.metrics is not None:
                self.journal.metrics.sync()
            model_files = checkpoint.contents(recipe.saved_model, weights, self.tokenizer, meta, store)
            return {**model_files, STATE: training_json, TENSORS: state_tensors}

        return build_files


class Writer:
    """Writes checkpoints in a background thread, one at a time. ``step`` is the step of the newest checkpoint. Those up
    to ``start`` are of the run's own teachers.

    The caller's thread calls ``on_saved`` after each complete checkpoint and ``warn`` after a failure. Either thread
    calls ``on_finished`` when a save needs no more data from other ranks. On other ranks, ``serve`` sends rank 0 the
    data it requests.
    """

    def __init__(
        self,
        run: Path,
        keep: int,
        start: int,
        step: int,
        on_saved: Callable[[int], None],
        warn: Callable[[str], None],
        on_finished: Callable[[], None] = lambda: None,
        serve: Callable[[], None] | None = None,
    ) -> None:
        self.run, self.keep, self.start, self.on_saved, self.warn = run, keep, start, on_saved, warn
        self.step = max(start, step)
        self.on_finished, self.serve = on_finished, serve
        self.save_error: OSError | None = None  # disk error of the newest save
        self._thread: threading.Thread | None = None
        self._thread_step = -1
        self._thread_error: Exception | None = None

    def begin(self, step: int, size: int, files: Callable[[], Files]) -> None:
        """Starts writing a checkpoint of about ``size`` bytes. The data of ``files()`` must not change until `wait`."""
        self.wait()
        self._thread_step, self._thread_error = step, None
        self._thread = threading.Thread(target=self._save, args=(size, files), daemon=True)
        self._thread.start()

    def poll(self) -> None:
        """Reports a finished save. Raises any error except a disk error."""
        if self._thread is None or self._thread.is_alive():
            return
        self._thread = None
        if self._thread_error is not None and not isinstance(self._thread_error, OSError):
            raise self._thread_error
        if self._thread_error is None:
            self.step = max(self.step, self._thread_step)
            self.on_saved(self._thread_step)
        elif self.save_error is None:  # Warn only about the first of consecutive failures.
            reason = error_text(self._thread_error)
            self.warn(f"step {self._thread_step:,} could not be saved: {reason}; the next save will try again")
        self.save_error = self._thread_error

    def wait(self) -> None:
        """Waits for the current save and reports it."""
        if self._thread is not None:
            self._thread.join()
        self.poll()

    def _save(self, size: int, files: Callable[[], Files]) -> None:
        try:
            if self.serve is None:
                self._write(size, files)
            else:
                self.serve()
        except Exception as error:
            self._thread_error = error
        try:
            self.on_finished()
        except Exception as error:
            self._thread_error = self._thread_error or error

    def _write(self, size: int, files: Callable[[], Files]) -> None:
        free = shutil.disk_usage(self.run).free
        if free < size + SPARE_BYTES:
            raise OSError(DISK_FULL[0], f"about {_mb(size)} are needed, but only {_mb(free)} are free")
        checkpoint.write(self.run / folder.step_name(self._thread_step), files())
        folder.prune(self.run, self.keep, self._thread_step, self.start)
        folder.write_index(self.run)

    def finish(self) -> None:
        """Waits for the checkpoint of the last step. Raises `WorkError` if it could not be written."""
        self.wait()
        if self.save_error is not None:
            newest = (
                f"the newest checkpoint is {folder.step_name(self.step)}" if self.step >= 0 else "nothing was saved"
            )
            message = f"step {self._thread_step:,} could not be saved and is lost: {error_text(self.save_error)}"
            raise WorkError(message, f"{newest}; free up space, then resume from there with --resume")


def check_disk_space(run: Path, size: int) -> None:
    """Raises `WorkError` if a checkpoint of ``size`` bytes does not fit on the disk."""
    with disk_errors(run):
        free = shutil.disk_usage(run).free
    if free < size + SPARE_BYTES:
        message = f"a checkpoint needs about {_mb(size)}, but only {_mb(free)} are free in {run}"
        raise WorkError(message, "free up space, or choose another run folder with --out")


def error_text(error: OSError) -> str:
    """Returns the system's message for an error."""
    return error.strerror or str(error)


def _mb(size: int) -> str:
    return f"{size / 1e6:,.1f} MB" if size < 1e8 else f"{size / 1e6:,.0f} MB"
