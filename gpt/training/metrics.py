"""``metrics.jsonl``: whole lines or none, whatever the disk does."""

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

from gpt.files import disk_errors, open_regular
from gpt.runs.folder import KEPT, METRICS


class Metrics:
    """The file, open to append. What cannot be written is left out, which ``warn`` hears of once, and goes on when it
    can be again: a full disk is no reason to stop a run."""

    def __init__(self, run: Path, warn: Callable[[str], None], upto: int = 0) -> None:
        """``upto``: what lies behind so many bytes is of a run that was cut off, and is done again."""
        self.path, self.warn, self.failing = run / METRICS, warn, False
        with disk_errors(run, KEPT):
            before = b""
            if self.path.exists():
                with open_regular(self.path) as file:
                    before = file.read(upto)
            self.file = self.path.open("ab", buffering=0)
            whole = before.rfind(b"\n") + 1
            self.file.truncate(whole)
        self.size = whole

    def write(self, line: str) -> None:
        """One more line."""
        data = (line + "\n").encode("utf-8", "backslashreplace")
        try:
            if self.file.write(data) != len(data):
                raise OSError(0, "only a part was written")
            self.size += len(data)
            self.failing = False
        except OSError as error:
            if not self.failing:
                self.warn(f"cannot write {self.path}: {error.strerror}; the run goes on, and its metrics have a gap")
            self.failing = True
            self._cut()

    def sync(self) -> None:
        """Makes it last. Raises OSError."""
        os.fsync(self.file.fileno())

    def close(self) -> None:
        """Closes it."""
        self.file.close()

    def _cut(self) -> None:
        with contextlib.suppress(OSError):
            self.file.truncate(self.size)
