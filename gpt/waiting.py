"""Controls how torch's CPU threads wait for each other. Imports no torch.

The threads of a computation meet after each part of it, thousands of times per second. GNU OpenMP, which torch uses on
Linux, lets the first ones spin until the others arrive. That is fastest while each thread has a core of its own, and
very slow otherwise: beside one busy program on two cores `nano` trained at a tenth of its speed. `watch` looks for
threads that wait for a core. If there are idle cores, the system has put two threads on one core, and they are moved
apart. If there are none, other programs use the cores, and for a while threads sleep instead of spinning.

Results do not depend on how threads wait.
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
    """Sets the OpenMP wait policy unless the user has set one. Must be called before torch is imported."""
    if sys.platform == "linux" and not any(name in os.environ for name in POLICY):
        os.environ.update(POLICY)


_watching = threading.Lock()  # held from the first `watch` on


def watch() -> None:
    """Starts a thread that watches this process's threads. Does nothing without GNU OpenMP (the OpenMP of macOS and
    Windows yields cores by itself), where the user has set a wait policy, or where the system does not report how long
    threads waited for a core."""
    given = {name: os.environ[name] for name in POLICY if name in os.environ}
    openmp = ctypes.CDLL(None) if sys.platform == "linux" else None
    if given not in ({}, POLICY) or not hasattr(openmp, "GOMP_parallel") or not next(TASKS.glob("*/schedstat"), None):
        return
    if _watching.acquire(blocking=False):
        threading.Thread(target=_watch, args=(Spinning(openmp),), name="gpt-waiting", daemon=True).start()


def end_threads() -> None:
    """Ends the OpenMP threads of the calling thread before another thread computes. With both threads' there would be
    more than cores, and GNU OpenMP would not spin: a server would decode at half its speed."""
    openmp = ctypes.CDLL(None) if sys.platform == "linux" else None
    if hasattr(openmp, "GOMP_parallel") and hasattr(openmp, "omp_pause_resource_all"):
        assert openmp is not None
        openmp.omp_pause_resource_all(1)  # omp_pause_soft: they start again when they are needed


class Spinning:
    """Turns spinning off and on again, by starting and ending idle threads: GNU OpenMP does not spin while there are
    more threads than cores."""

    def __init__(self, openmp: Any) -> None:
        self.openmp = openmp
        self.idlers: tuple[threading.Thread, threading.Event] | None = None

    def off(self) -> None:
        """Lets threads sleep while they wait, from their next wait on."""
        if self.idlers is None:
            over = threading.Event()
            thread = threading.Thread(target=self._idle, args=(over,), name="gpt-idlers", daemon=True)
            thread.start()
            self.idlers = thread, over

    def on(self) -> None:
        """Lets threads spin again."""
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
class CpuTimes:
    """Seconds that each thread of this process waited for a core, and that each core was idle, as Linux counts them."""

    at: float
    waited: dict[int, float]
    idle: dict[int, float]

    @classmethod
    def now(cls) -> "CpuTimes":
        """Reads the counters."""
        waited, tick = {}, os.sysconf("SC_CLK_TCK")
        for task in TASKS.glob("*/schedstat"):
            with contextlib.suppress(OSError, ValueError, IndexError):  # it has ended
                waited[int(task.parent.name)] = int(task.read_text().split()[1]) / 1e9
        idle = {}
        for name, *ticks in (line.split() for line in CPUS.read_text().splitlines()):
            if name.startswith("cpu") and name != "cpu":
                idle[int(name.removeprefix("cpu"))] = int(ticks[3]) / tick
        return cls(time.perf_counter(), waited, idle)

    def since(self, before: "CpuTimes") -> "CpuTimes":
        """Returns the shares of the time since earlier counters."""
        seconds = self.at - before.at
        return CpuTimes(
            seconds,
            {task: (s - before.waited.get(task, s)) / seconds for task, s in self.waited.items()},
            {cpu: (s - before.idle.get(cpu, s)) / seconds for cpu, s in self.idle.items()},
        )


def _watch(spinning: Spinning) -> None:
    pause = FIRST_PAUSE
    with contextlib.suppress(OSError):  # a system that stops telling is watched no longer
        before = CpuTimes.now()
        while True:
            time.sleep(PERIOD)
            look = CpuTimes.now()
            share, before = look.since(before), look
            if sum(share.waited.values()) < WAITING:
                pause = FIRST_PAUSE
            elif not move_apart(share):
                spinning.off()
                time.sleep(pause)
                spinning.on()
                pause = min(2 * pause, LONGEST_PAUSE)
                before = CpuTimes.now()


def move_apart(share: CpuTimes) -> bool:
    """Moves threads that wait for a core to idle cores, one each; the system may move them on from there. Returns
    whether there were idle cores."""
    allowed = os.sched_getaffinity(0)
    idle = [cpu for cpu, part in share.idle.items() if part > IDLE and cpu in allowed]
    waiting = sorted(share.waited, key=lambda task: -share.waited[task])
    for task, cpu in zip(waiting, idle, strict=False):
        with contextlib.suppress(OSError):  # it has ended
            anywhere = os.sched_getaffinity(task)
            os.sched_setaffinity(task, {cpu})
            os.sched_setaffinity(task, anywhere)
    return bool(idle)
