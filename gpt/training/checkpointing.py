"""Checkpoints, written in a thread while training continues, and the copy in memory that a rollback restores."""

import math
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from gpt.errors import WorkError
from gpt.files import FULL, disk_errors
from gpt.model.lora import find_roles
from gpt.runs import adapter, checkpoint, folder
from gpt.runs.checkpoint import Files
from gpt.training.context import RunContext
from gpt.training.journal import Journal
from gpt.training.pace import TimeBudget
from gpt.training.parallel import WEIGHT, Parallel
from gpt.training.recipe import Recipe
from gpt.training.state import STATE, TENSORS, Snapshot, TrainState

SPARE = 2**20  # bytes that are left free beside a checkpoint
ROOM_SECONDS, ROOM_PAUSE = 60.0, 2.0  # how long the end of a run waits for a full disk, and how often it looks


class Checkpointer:
    """Copies the state of a run, has it written while training continues, and restores it."""

    def __init__(
        self,
        run: RunContext,
        parallel: Parallel,
        scaler: torch.amp.GradScaler,
        state: TrainState,
        tokenizer: checkpoint.TokenizerFiles,
        journal: Journal,
    ) -> None:
        self.run, self.parallel, self.scaler, self.state, self.tokenizer = run, parallel, scaler, state, tokenizer
        self.journal = journal
        self.snapshot = Snapshot()  # the newest good state
        self.fixed = {name: tensor.cpu().numpy() for name, tensor in checkpoint.fixed(parallel.own).items()}
        moments = parallel.optimizer.shapes(parallel.own, parallel.shapes)
        numbers = sum(map(math.prod, [*parallel.shapes.values(), *moments.values()]))
        self.size = 4 * numbers + sum(map(len, tokenizer.files.values()))  # about the bytes of a checkpoint
        writes = partial(Writer, run.run, run.recipe.keep, state.settled_step, journal.saved, run.session.warn)
        if run.world.is_main:
            self.writer = writes(ended=parallel.finish_save)
        else:
            self.writer = writes(serve=lambda: parallel.serve(self.snapshot.tensors))

    def remember(self) -> None:
        """Copies the state into memory."""
        self.writer.wait()  # it reads the copy before
        self.state.seconds = time.perf_counter() - self.run.began
        self.state.metrics_bytes = self.journal.metrics.size if self.journal.metrics else 0
        self.snapshot.take(self.parallel, self.scaler, self.state)

    def roll_back(self, **changes: Any) -> None:
        """Restores the newest copy, but for ``changes`` of its state."""
        good = self.snapshot.restore(self.parallel, self.scaler)
        vars(self.state).update(vars(good), **changes)

    def save(self, recipe: Recipe, budget: TimeBudget | None, stopped: Callable[[], bool] | None = None) -> None:
        """Copies the state, and starts to write it. With ``stopped`` it is the last one: waits until it is written, and
        for room until ``stopped``. Raises `WorkError` then if the disk stays full."""
        self.remember()
        files = self._files(recipe, budget)
        if stopped is None:
            self.writer.begin(self.state.step, self.size, files)
        else:
            self.writer.last(self.state.step, self.size, files, stopped)

    def _files(self, recipe: Recipe, budget: TimeBudget | None) -> Callable[[], Files]:
        """Makes the function that returns the files of a checkpoint of the snapshot, in any thread."""
        run, snapshot, state = self.run, self.snapshot, self.snapshot.state
        meta: dict[str, Any] = {
            "step": state.step,
            "tokens_seen": recipe.tokens(state.step),
            "val_loss": state.measured_loss if state.measured_step == state.step else None,
        }
        store: checkpoint.Store | None = None
        if run.init and recipe.lora_rank:
            meta["adapter"] = {"sha256": run.init.sha256}
            roles = find_roles(recipe.lora_targets, recipe.model)
            store = partial(adapter.contents, run.init.adapter(recipe.lora_rank, recipe.lora_alpha), roles)
        full = {name: self.parallel.full_tensor(name, tensor) for name, tensor in snapshot.tensors.items()}
        weights = {name.removeprefix(WEIGHT): tensor for name, tensor in full.items() if name.startswith(WEIGHT)}
        weights = weights if "adapter" in meta else {**self.fixed, **weights}
        rest = {name: tensor for name, tensor in full.items() if not name.startswith(WEIGHT)}
        if budget is not None:
            budget = replace(budget, deadline=budget.deadline - run.began)
        about = snapshot.about(recipe, run.machine(), budget)

        def files() -> Files:
            if self.journal.metrics is not None:
                self.journal.metrics.sync()
            whole = checkpoint.contents(recipe.saved_model, weights, self.tokenizer, meta, store)
            return {**whole, STATE: about, TENSORS: rest}

        return files


class Writer:
    """Writes checkpoints, one at a time, in a thread. ``step`` is that of the newest one. ``done`` is called for each
    that is whole on the disk, and ``warn`` if one could not be written, both in the caller's thread. ``ended`` is
    called, in either thread, when nothing more is read of a save. Other ranks than 0 ``serve`` what rank 0 asks for
    while it writes."""

    def __init__(
        self,
        run: Path,
        keep: int,
        step: int,
        done: Callable[[int], None],
        warn: Callable[[str], None],
        ended: Callable[[], None] = lambda: None,
        serve: Callable[[], None] | None = None,
    ) -> None:
        self.run, self.keep, self.step, self.done, self.warn = run, keep, step, done, warn
        self.ended, self.serve = ended, serve
        self.failed: OSError | None = None  # why the newest save failed
        self._thread: threading.Thread | None = None
        self._step = -1  # the checkpoint that the thread writes
        self._error: Exception | None = None  # what went wrong in it
        self._retrying = False  # whether a save that fails is followed by another one

    def begin(self, step: int, size: int, files: Callable[[], Files]) -> None:
        """Starts to write a checkpoint of about ``size`` bytes; what ``files`` returns must not change until `wait`."""
        self.wait()
        self._step, self._error = step, None
        self._thread = threading.Thread(target=self._save, args=(size, files), daemon=True)
        self._thread.start()

    def poll(self) -> None:
        """Reports a save that has ended. Raises what ended it, unless that was the disk."""
        if self._thread is None or self._thread.is_alive():
            return
        self._thread = None
        if self._error is not None and not isinstance(self._error, OSError):
            raise self._error
        if self._error is None:
            self.step = max(self.step, self._step)
            self.done(self._step)
        elif self.failed is None:  # said once
            why = error_text(self._error)
            self.warn(f"step {self._step:,} could not be saved: {why}; the run continues and will try again")
        self.failed = self._error

    def wait(self) -> None:
        """Waits until nothing is being written."""
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
            self._error = error
        try:
            if not self._retrying:
                self.ended()
        except Exception as error:
            self._error = self._error or error

    def _write(self, size: int, files: Callable[[], Files]) -> None:
        free = shutil.disk_usage(self.run).free
        if free < size + SPARE:
            raise OSError(FULL[0], f"about {_mb(size)} are needed, but only {_mb(free)} are free")
        checkpoint.write(self.run / folder.step_name(self._step), files())
        folder.prune(self.run, self.keep, newest=self._step)
        folder.write_index(self.run)

    def last(self, step: int, size: int, files: Callable[[], Files], stopped: Callable[[], bool]) -> None:
        """Saves the end of a run, whatever it takes: with its training state, else the weights alone, else waiting for
        room until ``stopped``. Raises `WorkError` if that was needed, or was in vain."""

        def weights() -> Files:
            return {name: data for name, data in files().items() if name not in folder.TRAINING}

        self._retrying = True
        try:
            self.begin(step, size, files)
            self.wait()
            first = self.failed
            if first is None:
                return
            began = time.monotonic()
            self.warn(f"waiting {ROOM_SECONDS:.0f} s for disk space in {self.run}")
            while not stopped() and time.monotonic() - began < ROOM_SECONDS:
                self.begin(step, 0, weights)
                self.wait()
                if self.failed is None:
                    raise WorkError(
                        f"step {step:,} could not be saved at first: {error_text(first)}",
                        f"its weights are in {self.run / folder.step_name(step)}; --resume continues from before it",
                    )
                time.sleep(ROOM_PAUSE)
        finally:
            self._retrying = False
            self.ended()
        newest = f"the newest checkpoint is {folder.step_name(self.step)}" if self.step >= 0 else "nothing was saved"
        raise WorkError(
            f"step {step:,} could not be saved and is lost: {error_text(first)}",
            f"{newest}; free up space, then resume from there with --resume",
        )


def check_room(run: Path, size: int) -> None:
    """Raises `WorkError` if a run's first checkpoint would not fit."""
    with disk_errors(run):
        free = shutil.disk_usage(run).free
    if free < size + SPARE:
        raise WorkError(
            f"a checkpoint needs about {_mb(size)}, but only {_mb(free)} are free in {run}",
            "free up space, or choose another run folder with --out",
        )


def error_text(error: OSError) -> str:
    """The system's words for an error."""
    return error.strerror or str(error)


def _mb(size: int) -> str:
    return f"{size / 1e6:,.1f} MB" if size < 1e8 else f"{size / 1e6:,.0f} MB"
