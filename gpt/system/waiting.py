"""Controls how torch's CPU threads wait for each other. Imports no torch.

Threads synchronize thousands of times per second. GNU OpenMP, which torch uses on Linux, lets them spin until the last
thread arrives. Spinning is fastest if each thread has a core, and very slow otherwise: next to one busy program on two
cores, `nano` trained at a tenth of its speed. `watch` finds threads that wait for a core. If a core is idle, the system
has put two threads on one core, and `watch` moves them apart. If no core is idle, other programs need the cores, and
`watch` turns spinning off for a while.

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

# GNU OpenMP reads these variables when torch is imported. The spin count is OpenMP's default. With this policy, OpenMP
# does not spin if there are more OpenMP threads than cores (GOMP_SPINCOUNT in its manual). `Spinning` relies on this.
POLICY = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "300000"}
TASKS = Path("/proc/self/task")  # Only Linux reports how long threads waited.
CPUS = Path("/proc/stat")
PERIOD = 0.2  # Seconds between samples.
# `watch` acts if all threads together wait at least this many seconds per second. On two cores, threads wait 0.05 s, or
# 0.4 to 0.8 s next to a busy program.
MIN_WAITING = 0.3
MIN_IDLE = 0.7  # Minimum idle share of an idle core.
# Seconds without spinning. If threads still wait after a pause, the next pause is twice as long.
FIRST_PAUSE, MAX_PAUSE = 1.0, 8.0


def set_policy() -> None:
    """Sets the OpenMP wait policy unless the user has set one. Must be called before torch is imported."""
    if sys.platform == "linux" and not any(name in os.environ for name in POLICY):
        os.environ.update(POLICY)


_watching = threading.Lock()  # Locked forever by the first `watch`.


def watch() -> None:
    """Starts a thread that watches this process's threads. Does nothing without GNU OpenMP (other OpenMP libraries
    yield cores by themselves), if the user has set a wait policy, or if the system does not report waiting times."""
    policy = {name: os.environ[name] for name in POLICY if name in os.environ}
    openmp = ctypes.CDLL(None) if sys.platform == "linux" else None
    if policy not in ({}, POLICY) or not hasattr(openmp, "GOMP_parallel") or not next(TASKS.glob("*/schedstat"), None):
        return
    if _watching.acquire(blocking=False):
        threading.Thread(target=_watch, args=(Spinning(openmp),), name="gpt-waiting", daemon=True).start()


def end_threads() -> None:
    """Ends the calling thread's OpenMP threads before another thread computes. Otherwise there would be more threads
    than cores. Spinning would then be off, and a server would decode at half speed."""
    openmp = ctypes.CDLL(None) if sys.platform == "linux" else None
    if hasattr(openmp, "GOMP_parallel") and hasattr(openmp, "omp_pause_resource_all"):
        assert openmp is not None
        openmp.omp_pause_resource_all(1)  # 1 is omp_pause_soft: threads restart when needed.


class Spinning:
    """Turns spinning off by adding idle threads, since GNU OpenMP does not spin with more threads than cores."""

    def __init__(self, openmp: Any) -> None:
        self.openmp = openmp
        self.idlers: tuple[threading.Thread, threading.Event] | None = None

    def off(self) -> None:
        """Makes threads sleep instead of spin, from their next wait."""
        if self.idlers is None:
            done = threading.Event()
            thread = threading.Thread(target=self._idle, args=(done,), name="gpt-idlers", daemon=True)
            thread.start()
            self.idlers = thread, done

    def on(self) -> None:
        """Lets threads spin again."""
        if self.idlers is not None:
            thread, done = self.idlers
            done.set()
            thread.join()
            self.idlers = None

    def _idle(self, done: threading.Event) -> None:
        # An OpenMP team lives as long as the thread that starts it. Its threads only run `omp_get_level`, then idle.
        self.openmp.GOMP_parallel(self.openmp.omp_get_level, None, len(os.sched_getaffinity(0)), 0)
        done.wait()


@dataclass
class CpuTimes:
    """Waiting seconds of each thread in this process, and idle seconds of each core."""

    at: float
    waited: dict[int, float]
    idle: dict[int, float]

    @classmethod
    def now(cls) -> "CpuTimes":
        """Reads the counters."""
        waited, tick = {}, os.sysconf("SC_CLK_TCK")
        for task in TASKS.glob("*/schedstat"):
            with contextlib.suppress(OSError, ValueError, IndexError):  # The thread has ended.
                waited[int(task.parent.name)] = int(task.read_text().split()[1]) / 1e9
        idle = {}
        for name, *ticks in (line.split() for line in CPUS.read_text().splitlines()):
            if name.startswith("cpu") and name != "cpu":
                idle[int(name.removeprefix("cpu"))] = int(ticks[3]) / tick
        return cls(time.perf_counter(), waited, idle)

    def since(self, before: "CpuTimes") -> "CpuTimes":
        """Returns the changes since earlier counters, per second."""
        seconds = self.at - before.at
        return CpuTimes(
            seconds,
            {task: (s - before.waited.get(task, s)) / seconds for task, s in self.waited.items()},
            {cpu: (s - before.idle.get(cpu, s)) / seconds for cpu, s in self.idle.items()},
        )


def _watch(spinning: Spinning) -> None:
    pause = FIRST_PAUSE
    with contextlib.suppress(OSError):  # The system stopped reporting.
        before = CpuTimes.now()
        while True:
            time.sleep(PERIOD)
            now = CpuTimes.now()
            shares, before = now.since(before), now
            if sum(shares.waited.values()) < MIN_WAITING:
                pause = FIRST_PAUSE
            elif not move_apart(shares):
                spinning.off()
                time.sleep(pause)
                spinning.on()
                pause = min(2 * pause, MAX_PAUSE)
                before = CpuTimes.now()


def move_apart(shares: CpuTimes) -> bool:
    """Moves waiting threads to idle cores, one per core; the system can move them again. Returns whether any core is
    idle."""
    allowed = os.sched_getaffinity(0)
    idle = [cpu for cpu, idle_share in shares.idle.items() if idle_share > MIN_IDLE and cpu in allowed]
    waiting = sorted(shares.waited, key=lambda task: -shares.waited[task])
    for task, cpu in zip(waiting, idle, strict=False):
        with contextlib.suppress(OSError):  # The thread has ended.
            previous = os.sched_getaffinity(task)
            os.sched_setaffinity(task, {cpu})
            os.sched_setaffinity(task, previous)
    return bool(idle)
