"""Whether a run notices that other programs use its cores."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpt.training import crowd
from gpt.training.crowd import Crowd


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, float]:
    """Seconds, and those without a core, as the watched steps see them."""
    now = {"seconds": 0.0, "waited": 0.0}
    monkeypatch.setattr(crowd.time, "perf_counter", lambda: now["seconds"])
    monkeypatch.setattr(crowd, "waited", lambda: now["waited"])
    monkeypatch.setattr(crowd, "TASKS", tmp_path)
    return now


def run(clock: dict[str, float], threads: int, waited: float, steps: int = 30) -> list[str]:
    """The notes of so many steps of a second, in each of which threads waited so long."""
    notes: list[str] = []
    watched = Crowd(threads, notes.append)
    for _ in range(steps):
        clock["seconds"] += 5.0  # between steps, which does not count
        clock["waited"] += 50.0
        with watched.step():
            clock["seconds"] += 1.0
            clock["waited"] += waited
    return notes


def test_it_is_said_once_and_when_it_is_clear(clock: dict[str, float]) -> None:
    [note] = run(clock, 2, 0.83)
    assert "other programs use the cores too, and 2 threads" in note
    assert "OMP_NUM_THREADS=1" in note
    assert run(clock, 2, 0.83, steps=9) == []
    assert len(run(clock, 2, 0.83, steps=10)) == 1


def test_nothing_is_said_of_a_quiet_machine_or_of_one_thread(clock: dict[str, float]) -> None:
    assert run(clock, 2, 0.1) == []
    assert run(clock, 1, 0.83) == []


def test_nothing_is_said_where_the_system_does_not_tell(
    clock: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(crowd, "TASKS", Path("/nowhere"))
    assert run(clock, 2, 0.83) == []


@pytest.mark.skipif(not crowd.TASKS.is_dir(), reason="Linux alone says how long a thread waited")
def test_what_linux_tells() -> None:
    """Two processes on one core: each waits about half of the time."""
    code = """
import os, subprocess, sys, time
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
from gpt.training.crowd import waited
other = subprocess.Popen([sys.executable, "-c", "while True: pass"])
try:
    before, began = waited(), time.perf_counter()
    while time.perf_counter() - began < 1.5:
        pass
    print(waited() - before)
finally:
    other.kill()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ, check=True)
    assert 0.2 < float(done.stdout) <= 2.0
