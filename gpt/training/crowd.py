"""Whether other programs want the cores that a run computes on.

Threads that share a computation wait for each other awake. One that has lost its core to another program holds up the
rest, which then spend theirs on waiting: beside one busy program on two cores a step of `nano` took 2 to 7 times
as long with two threads, and 1.1 times with one (docs/runs.md).
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path

ENOUGH = 10.0  # seconds of steps to judge by
TOO_MUCH = 0.5  # of each second that threads were without a core; one busy program on two cores: 0.83, none: 0.1
TASKS = Path("/proc/self/task")  # Linux alone says how long a thread waited


class Crowd:
    """Watches the first steps of a run on so many ``threads``, and tells ``note`` once where they wait for cores."""

    def __init__(self, threads: int, note: Callable[[str], None]) -> None:
        self.threads, self.note = threads, note
        self.seconds = self.waited = 0.0
        self.over = threads < 2 or not TASKS.is_dir()

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """A context for a step."""
        if self.over:
            yield
            return
        began, before = time.perf_counter(), waited()
        yield
        self.seconds += time.perf_counter() - began
        self.waited += waited() - before
        self.over = self.seconds >= ENOUGH
        if self.over and self.waited > TOO_MUCH * self.seconds:
            self.note(
                f"other programs use the cores too, and {self.threads} threads, which wait for each other, are slow "
                "then: with OMP_NUM_THREADS=1 before the command there is one, which may be faster"
            )


def waited() -> float:
    """Seconds for which threads of this process would have run and had no core, so far; of those that live."""
    return sum(_waited(task) for task in TASKS.glob("*/schedstat")) / 1e9


def _waited(task: Path) -> int:
    try:
        return int(task.read_text().split()[1])
    except (OSError, ValueError, IndexError):  # it has ended, or the kernel does not count
        return 0
