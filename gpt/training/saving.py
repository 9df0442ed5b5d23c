"""Checkpoints written in a thread while training goes on, and what is done when the disk does not take them."""

import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from gpt.errors import WorkError
from gpt.files import FULL, disk_errors
from gpt.runs import checkpoint, folder
from gpt.runs.checkpoint import Files
from gpt.training.state import STATE, TENSORS

SPARE = 2**20  # bytes that are left free beside a checkpoint
ROOM_SECONDS, ROOM_PAUSE = 60.0, 2.0  # how long the end of a run waits for a disk that is full, and how often it looks


@dataclass
class Save:
    """A checkpoint on its way to the disk."""

    step: int
    files: Callable[[], Files]
    failed: Exception | None = None


class Saver:
    """One thread that writes at a time. ``done`` hears of a checkpoint that is whole on the disk, ``warn`` of one that
    could not be written; both are called by who asks, never by the thread. ``ended`` is called, wherever that is known,
    when nothing more is read of what was to be saved."""

    def __init__(
        self,
        run: Path,
        keep: int,
        done: Callable[[int], None],
        warn: Callable[[str], None],
        ended: Callable[[], None] = lambda: None,
    ) -> None:
        self.run, self.keep, self.done, self.warn, self.ended = run, keep, done, warn, ended
        self.step = -1  # the newest checkpoint's
        self.failed: OSError | None = None  # why the newest save came to nothing
        self._save: Save | None = None
        self._thread: threading.Thread | None = None
        self._insists = False  # whether a save that fails is followed by another one

    def begin(self, step: int, size: int, files: Callable[[], Files]) -> None:
        """Starts to write a checkpoint of about ``size`` bytes; what ``files`` gives must not change until `wait`."""
        self.wait()
        self._save = Save(step, files)
        free = shutil.disk_usage(self.run).free
        if free < size + SPARE:
            self._save.failed = OSError(FULL[0], f"about {_mb(size)} are needed, and {_mb(free)} are free")
            self._ended()
        else:
            self._thread = threading.Thread(target=self._write, args=(self._save,), daemon=True)
            self._thread.start()
        self.poll()

    def poll(self) -> None:
        """Says what became of a save that has come to its end."""
        save = self._save
        if save is None or (self._thread is not None and self._thread.is_alive()):
            return
        self._save = self._thread = None
        if save.failed is not None and not isinstance(save.failed, OSError):
            raise save.failed
        if save.failed is None:
            self.step = max(self.step, save.step)
            self.done(save.step)
        elif self.failed is None:  # said once
            self.warn(f"step {save.step:,} cannot be saved: {said(save.failed)}; the run goes on, and tries again")
        self.failed = save.failed

    def wait(self) -> None:
        """Until nothing is being written."""
        if self._thread is not None:
            self._thread.join()
        self.poll()

    def _write(self, save: Save) -> None:
        try:
            checkpoint.write(self.run / folder.step_name(save.step), save.files())
            folder.prune(self.run, self.keep, newest=save.step)
            folder.write_index(self.run)
        except Exception as error:
            save.failed = error
        try:
            self._ended()
        except Exception as error:
            save.failed = save.failed or error

    def _ended(self) -> None:
        if not self._insists:
            self.ended()

    def last(self, step: int, size: int, files: Callable[[], Files], stopped: Callable[[], bool]) -> None:
        """Saves the end of a run, whatever it takes: with its training state, else the weights alone, else waiting for
        room until ``stopped``. Raises `WorkError` where that was needed, or was in vain."""
        self._insists = True
        try:
            self._last(step, size, files, stopped)
        finally:
            self._insists = False
            self.ended()

    def _last(self, step: int, size: int, files: Callable[[], Files], stopped: Callable[[], bool]) -> None:
        self.begin(step, size, files)
        self.wait()
        if self.failed is None:
            return
        first, began = self.failed, time.monotonic()
        self.warn(f"waiting {ROOM_SECONDS:.0f} s for room in {self.run}")
        while not stopped() and time.monotonic() - began < ROOM_SECONDS:
            self.begin(step, 0, lambda: weights_alone(files()))
            self.wait()
            if self.failed is None:
                raise WorkError(
                    f"step {step:,} could not be saved at first: {said(first)}",
                    f"its weights are in {self.run / folder.step_name(step)}; --resume goes on from before it",
                )
            time.sleep(ROOM_PAUSE)
        newest = f"the newest checkpoint is {folder.step_name(self.step)}" if self.step >= 0 else "nothing was saved"
        raise WorkError(
            f"step {step:,} could not be saved and is lost: {said(first)}",
            f"{newest}; make room, then go on from there with --resume",
        )


class NoSaver(Saver):
    """That of a process which writes nothing, since another one does."""

    def begin(self, step: int, size: int, files: Callable[[], Files]) -> None:
        """Saves nothing."""
        self.step = step

    def last(self, step: int, size: int, files: Callable[[], Files], stopped: Callable[[], bool]) -> None:
        """Saves nothing."""
        self.step = step


def weights_alone(files: Files) -> Files:
    """A checkpoint without what going on needs."""
    return {name: data for name, data in files.items() if name not in (STATE, TENSORS)}


def check_room(run: Path, size: int) -> None:
    """Raises `WorkError` where a run's first checkpoint would not fit."""
    with disk_errors(run):
        free = shutil.disk_usage(run).free
    if free < size + SPARE:
        raise WorkError(
            f"a checkpoint needs about {_mb(size)}, and {_mb(free)} are free in {run}",
            "make room, or give another place with --out",
        )


def said(error: OSError) -> str:
    """What the system says."""
    return error.strerror or str(error)


def _mb(size: int) -> str:
    return f"{size / 1e6:,.1f} MB" if size < 1e8 else f"{size / 1e6:,.0f} MB"
