"""SIGINT and SIGTERM: the first asks for an orderly end, the second ends at once."""

import signal
import threading
from types import FrameType
from typing import Self

from gpt.errors import Interrupted


class StopSignal:
    """While active, notes the first SIGINT or SIGTERM in ``signum`` instead of dying of it; the second raises
    `Interrupted` wherever it strikes, which nothing on disk minds.

    Outside the main thread, where Python takes no signals, nothing is changed.
    """

    def __init__(self) -> None:
        self.signum: int | None = None
        self._before: dict[int, signal._HANDLER] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for signum in (signal.SIGINT, signal.SIGTERM):
                self._before[signum] = signal.signal(signum, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        if self.signum is not None:
            raise Interrupted(signum, "interrupted twice: ended at once; checkpoints saved before are whole")
        self.signum = signum
