"""How the threads that share a computation on a CPU wait for each other. Torch is not imported.

They meet after each part of it, thousands of times a second. GNU OpenMP, which torch uses on Linux, has those that come
first spin until the others are there: the fastest way while each thread has a core of its own, and a collapse where one
has not (beside one busy program on two cores `nano` trained at a tenth of its speed). `watch` looks for threads that
want a core and don't get one. Where cores are idle all the same, the system has put two threads on one: they are moved
apart. Where none is, other programs use them, and for a while threads sleep instead of spinning.

How threads wait changes no number that they compute.
"""

import contextlib
import ctypes
import os
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Read by GNU OpenMP when torch is imported. It spins as long as it does by default; but while there are more OpenMP
# threads than cores, it does not spin at all, which is how spinning is turned off later (its manual, GOMP_SPINCOUNT).
POLICY = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "300000"}
TASKS = Path("/proc/self/task")  # Linux alone says how long a thread waited for a core
CPUS = Path("/proc/stat")
PERIOD = 0.2  # seconds between two looks
WAITING = 0.3  # of each second, all threads together. Beside one busy program on two cores: 0.4 to 0.8; alone: 0.05
IDLE = 0.7  # of a core's time
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 8.0  # seconds without spinning, doubled while threads wait for cores after it too


def set_policy() -> None:
    """Says how threads wait, where the user has not. To be called before torch is imported."""
    if sys.platform == "linux" and not any(name in os.environ for name in POLICY):
        os.environ.update(POLICY)


_watching = threading.Lock()  # held from the first `watch` on


def watch() -> None:
    """Watches this process's threads from now on, in a thread of its own. Does nothing where threads wait in another
    way than GNU OpenMP's (macOS, Windows: LLVM's and Intel's give way to others), where the user has said how they
    wait, or where the system does not tell how long they waited for a core."""
    given = {name: os.environ[name] for name in POLICY if name in os.environ}
    openmp = ctypes.CDLL(None) if sys.platform == "linux" else None
    if given not in ({}, POLICY) or not hasattr(openmp, "GOMP_parallel") or not next(TASKS.glob("*/schedstat"), None):
        return
    if _watching.acquire(blocking=False):
        threading.Thread(target=_watch, args=(Spinning(openmp),), name="gpt-waiting", daemon=True).start()


class Spinning:
    """Turns spinning off and on again, by GNU OpenMP threads that do nothing but be more than there are cores."""

    def __init__(self, openmp: Any) -> None:
        self.openmp = openmp
        self.idlers: tuple[threading.Thread, threading.Event] | None = None

    def off(self) -> None:
        """Threads sleep where they wait for each other, from their next meeting on."""
        if self.idlers is None:
            over = threading.Event()
            thread = threading.Thread(target=self._idle, args=(over,), name="gpt-idlers", daemon=True)
            thread.start()
            self.idlers = thread, over

    def on(self) -> None:
        """They spin again."""
        if self.idlers is not None:
            thread, over = self.idlers
            over.set()
            thread.join()
            self.idlers = None

    def _idle(self, over: threading.Event) -> None:
        # A team belongs to the thread that asks for it, and ends with it. Its members do no more than this call.
        self.openmp.GOMP_parallel(self.openmp.omp_get_level, None, len(os.sched_getaffinity(0)), 0)
        over.wait()


@dataclass
class Look:
    """What the system says: seconds that each thread of this process waited for a core, and that each core was idle."""

    at: float
    waited: dict[int, float]
    idle: dict[int, float]

    @classmethod
    def now(cls) -> "Look":
        """As it is."""
        waited, tick = {}, os.sysconf("SC_CLK_TCK")
        for task in TASKS.glob("*/schedstat"):
            with contextlib.suppress(OSError, ValueError, IndexError):  # it has ended
                waited[int(task.parent.name)] = int(task.read_text().split()[1]) / 1e9
        idle = {}
        for name, *ticks in (line.split() for line in CPUS.read_text().splitlines()):
            if name.startswith("cpu") and name != "cpu":
                idle[int(name.removeprefix("cpu"))] = int(ticks[3]) / tick
        return cls(time.perf_counter(), waited, idle)

    def since(self, before: "Look") -> "Look":
        """Shares of the time since an earlier look."""
        seconds = self.at - before.at
        return Look(
            seconds,
            {task: (s - before.waited.get(task, s)) / seconds for task, s in self.waited.items()},
            {cpu: (s - before.idle.get(cpu, s)) / seconds for cpu, s in self.idle.items()},
        )


def _watch(spinning: Spinning) -> None:
    pause = FIRST_PAUSE
    with contextlib.suppress(OSError):  # a system that stops telling is watched no longer
        before = Look.now()
        while True:
            time.sleep(PERIOD)
            look = Look.now()
            share, before = look.since(before), look
            if sum(share.waited.values()) < WAITING:
                pause = FIRST_PAUSE
            elif not move_apart(share):
                spinning.off()
                time.sleep(pause)
                spinning.on()
                pause = min(2 * pause, LONGEST_PAUSE)
                before = Look.now()


def move_apart(share: Look) -> bool:
    """Moves threads that wait for a core to cores that are idle, one each, and leaves it to the system where they go
    from there. Whether there were any."""
    allowed = os.sched_getaffinity(0)
    idle = [cpu for cpu, part in share.idle.items() if part > IDLE and cpu in allowed]
    waiting = sorted(share.waited, key=lambda task: -share.waited[task])
    for task, cpu in zip(waiting, idle, strict=False):
        with contextlib.suppress(OSError):  # it has ended
            anywhere = os.sched_getaffinity(task)
            os.sched_setaffinity(task, {cpu})
            os.sched_setaffinity(task, anywhere)
    return bool(idle)
