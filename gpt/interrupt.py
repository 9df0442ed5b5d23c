"""Handles signals that ask a command to stop: finishes cleanly after the first, stops immediately after the second."""

import math
import signal
import threading
import time
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import Self, TypeVar

from gpt.errors import Interrupted

T = TypeVar("T")

# Ctrl-C, `kill`, and a closed terminal or ssh connection. Windows has no SIGHUP.
SIGNALS: tuple[int, ...] = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
)


def handled_signals() -> tuple[int, ...]:
    """Returns the signals that this process does not ignore. nohup makes it ignore SIGHUP, and a script's ``&`` makes
    it ignore SIGINT, which is meant for the foreground program."""
    return tuple(signum for signum in SIGNALS if signal.getsignal(signum) is not signal.SIG_IGN)


class Stopped(Exception):
    """Raised when a signal stops optional work."""


class StopSignal:
    """Records the first signal of `handled_signals` in ``signum``. Raises `Interrupted` at the second, wherever the
    code is; files on disk stay intact. While ``at_once`` is set, raises it at the first signal.

    Does nothing outside the main thread, because Python handles signals only there.
    """

    def __init__(self, at_once: bool = False) -> None:
        self.signum: int | None = None
        self.at_once = at_once
        self.deadline = math.inf  # of `until_signal`, in `time.perf_counter` seconds
        self._previous_handlers: dict[int, signal._HANDLER] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for signum in handled_signals():
                self._previous_handlers[signum] = signal.signal(signum, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for signum, handler in self._previous_handlers.items():
            signal.signal(signum, handler)

    def until_signal(self, items: Iterable[T]) -> Iterator[T]:
        """Yields the items until a signal arrives, then raises `Stopped`. Ends at the deadline, but not before the
        first item."""
        for item in items:
            if self.signum is not None:
                raise Stopped
            yield item
            if self.is_late:
                return

    @property
    def is_late(self) -> bool:
        """Whether the deadline has passed."""
        return time.perf_counter() > self.deadline

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        previous, self.signum = self.signum, signum
        if self.at_once:
            raise Interrupted(signum)
        if previous is not None:
            raise Interrupted(signum, "interrupted twice: stopped at once; earlier checkpoints are intact")


def interruption(error: BaseException | None) -> Interrupted | None:
    """Returns the `Interrupted` among an error's causes, if any: other code can wrap it in another exception."""
    while error is not None and not isinstance(error, Interrupted):
        error = error.__cause__ or error.__context__
    return error
