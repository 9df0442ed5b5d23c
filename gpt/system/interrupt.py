"""Handles signals that ask a command to stop: finishes cleanly after the first, stops at once after a second Ctrl-C."""

import math
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Self, TypeVar

from gpt.system.errors import Interrupted

T = TypeVar("T")

# Ctrl-C, `kill`, and a closed terminal or ssh connection. Windows has no SIGHUP.
SIGNALS: tuple[int, ...] = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
)

SECOND_CTRL_C_SECONDS = 0.3  # Programs repeat a signal within milliseconds. A person takes longer.


def handled_signals() -> tuple[int, ...]:
    """Returns the signals that this process does not ignore. nohup makes it ignore SIGHUP, and a script's ``&`` makes
    it ignore SIGINT, which is meant for the foreground program."""
    return tuple(signum for signum in SIGNALS if signal.getsignal(signum) is not signal.SIG_IGN)


class Stopped(Exception):
    """Raised when a signal stops optional work."""


def end_at_once(signum: int) -> None:
    """Raises `Interrupted`, wherever the code is; files on disk stay intact."""
    raise Interrupted(signum, "interrupted twice: stopped at once; earlier checkpoints are intact")


class StopSignal:
    """Records the first signal of `handled_signals` in ``signum`` and calls ``on_first``. Calls ``on_second`` at a
    later Ctrl-C. While ``at_once`` is set, raises `Interrupted` at both.

    Ignores all other repeated signals. A shell and the kernel both send SIGHUP when a terminal closes, and process
    managers signal a process and its group.

    Does nothing outside the main thread, because Python handles signals only there.
    """

    def __init__(
        self,
        at_once: bool = False,
        on_first: Callable[[int], object] = lambda signum: None,
        on_second: Callable[[int], object] = end_at_once,
        is_ctrl_c: Callable[[int], bool] = lambda signum: signum == signal.SIGINT,
    ) -> None:
        self.signum: int | None = None
        self.at_once, self.on_first, self.on_second, self.is_ctrl_c = at_once, on_first, on_second, is_ctrl_c
        self._first_time = 0.0
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
        now, is_first = time.monotonic(), self.signum is None
        if is_first:
            self.signum, self._first_time = signum, now
        elif now - self._first_time < SECOND_CTRL_C_SECONDS or not self.is_ctrl_c(signum):
            return
        if self.at_once:
            raise Interrupted(signum)
        (self.on_first if is_first else self.on_second)(signum)


def interruption(error: BaseException | None) -> Interrupted | None:
    """Returns the `Interrupted` among an error's causes, if any: other code can wrap it in another exception."""
    while error is not None and not isinstance(error, Interrupted):
        error = error.__cause__ or error.__context__
    return error
