"""SIGINT and SIGTERM: the first asks for an orderly end, the second ends at once."""

import signal
import threading
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import Self, TypeVar

from gpt.errors import Interrupted

T = TypeVar("T")


class Stopped(Exception):
    """Work that may be left off was, since a signal came."""


class StopSignal:
    """While active, notes the first SIGINT or SIGTERM in ``signum`` instead of dying of it; the second raises
    `Interrupted` wherever it strikes, which nothing on disk minds. As long as ``at_once``, the first does.

    Outside the main thread, where Python takes no signals, nothing is changed.
    """

    def __init__(self, at_once: bool = False) -> None:
        self.signum: int | None = None
        self.at_once = at_once
        self._before: dict[int, signal._HANDLER] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for signum in (signal.SIGINT, signal.SIGTERM):
                self._before[signum] = signal.signal(signum, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)

    def watching(self, items: Iterable[T]) -> Iterator[T]:
        """The items, until a signal comes. Raises `Stopped` then."""
        for item in items:
            if self.signum is not None:
                raise Stopped
            yield item

    def _note(self, signum: int, frame: FrameType | None) -> None:
        first, self.signum = self.signum, signum
        if self.at_once:
            raise Interrupted(signum, "interrupted before the first step")
        if first is not None:
            raise Interrupted(signum, "interrupted twice: ended at once; checkpoints saved before are whole")


def interruption(error: BaseException | None) -> Interrupted | None:
    """The signal behind an error, which whatever it struck in may have put into words of its own."""
    while error is not None and not isinstance(error, Interrupted):
        error = error.__cause__ or error.__context__
    return error
