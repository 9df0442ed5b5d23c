"""How many threads compute, and how they wait for each other."""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from conftest import TINY, Gpt, make_text
from models import CPU

from gpt import device, waiting
from gpt.waiting import CpuTimes

CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
needs_openmp = pytest.mark.skipif(
    sys.platform != "linux" or not next(waiting.TASKS.glob("*/schedstat"), None) or CORES < 2,
    reason="needs Linux and two cores",
)


@pytest.fixture(autouse=True)
def numbers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = torch.get_num_threads()
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(device, "_torch_threads", lambda: 4)
    monkeypatch.setattr(device, "cores", lambda: 4)
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("asked", "environment", "decoding", "expected"),
    [
        (None, None, None, 3),  # the container's cores
        (3, None, None, 3),
        (3, "2", 100, 3),
        (None, "2", 100, 4),  # torch has read it when it was imported
        (None, None, 3_700_000, 2),
    ],
)
def test_threads_are_asked_for_or_chosen_by_the_work(
    asked: int | None, environment: str | None, decoding: int | None, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if environment:
        monkeypatch.setenv("OMP_NUM_THREADS", environment)
    monkeypatch.setattr(device, "cores", lambda: 3)
    device.use_threads(CPU, asked, decoding)
    assert torch.get_num_threads() == expected


@pytest.mark.slow
def test_commands_take_threads(gpt: Gpt, run_folder: Path, workdir: Path) -> None:
    def used(*more: str) -> str:
        done = gpt("bench", "-m", run_folder, "--rounds", "1", "-n", "2", "--json", *more)
        return str(json.loads(done.out)["device"])

    assert used("--threads", "3") == "cpu, 3 threads"
    assert used() == "cpu, 1 thread"  # a tiny model
    assert gpt("sample", "the", "-m", run_folder, "--threads", "2", "-n", "2").code == 0
    assert torch.get_num_threads() == 2
    Path("text.txt").write_text(make_text(300))
    assert gpt("eval", "text.txt", "-m", run_folder, "--threads", "3").code == 0
    assert torch.get_num_threads() == 3
    for number in ("0", "5000"):
        for command in (["sample", "-m", run_folder], ["eval", "text.txt", "-m", run_folder], ["train", "text.txt"]):
            done = gpt(*command, "--threads", number)
            assert (done.code, done.err[:17]) == (2, "error: threads is")
            assert "it must be between 1 and 4" in done.err


@pytest.mark.slow
def test_threads_of_a_run_are_kept_and_may_be_changed(gpt: Gpt, workdir: Path) -> None:
    Path("text.txt").write_bytes(make_text().encode())
    options = [word for name, value in TINY.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    words = ("--threads", "3", "--steps", "4", "--vocab-size", "300", *options)
    assert gpt("train", "text.txt", "-o", "run", *words).code == 0
    assert json.loads(Path("run/run.json").read_text())["compute"]["threads"] == 3
    torch.set_num_threads(4)
    done = gpt("train", "--resume", "run", "--steps", "6")
    assert "3 threads, as before, instead of 4" in done.err
    done = gpt("train", "--resume", "run", "--steps", "8", "--threads", "2")
    assert "2 threads instead of 3: equal up to rounding" in done.err
    assert torch.get_num_threads() == 2
    training = json.loads(next(Path("run").glob("step-000008/training.json")).read_text())
    assert training["machine"]["threads"] == 2


def test_the_policy_is_ours_only_where_the_user_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    for name in waiting.POLICY:
        monkeypatch.delenv(name, raising=False)
    waiting.set_policy()
    assert waiting.POLICY.items() <= os.environ.items()
    monkeypatch.delenv("OMP_WAIT_POLICY")
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    waiting.set_policy()
    assert "OMP_WAIT_POLICY" not in os.environ
    assert os.environ["GOMP_SPINCOUNT"] == "7"


@pytest.mark.parametrize(
    ("given", "watched"),
    [({}, True), (waiting.POLICY, True), ({"OMP_WAIT_POLICY": "passive"}, False), ({"GOMP_SPINCOUNT": "7"}, False)],
)
@needs_openmp
def test_threads_whose_waiting_the_user_has_chosen_are_not_watched(
    given: dict[str, str], watched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in waiting.POLICY:
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    begun: list[object] = []
    monkeypatch.setattr(waiting, "_watching", threading.Lock())
    monkeypatch.setattr(waiting, "_watch", begun.append)
    waiting.watch()
    waiting.watch()  # once is enough
    deadline = time.monotonic() + 5
    while watched and not begun and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(begun) == watched


class FakeSpinning(waiting.Spinning):
    def __init__(self, said: list[str]) -> None:
        self.said = said

    def off(self) -> None:
        self.said.append("off")

    def on(self) -> None:
        self.said.append("on")


class Ended(Exception):
    pass


def watched(
    shares: list[tuple[float, float]], monkeypatch: pytest.MonkeyPatch
) -> tuple[list[str], list[tuple[int, set[int]]]]:
    """What a watch does where threads wait and a core is idle for these shares of each time between two looks."""
    said: list[str] = []
    moved: list[tuple[int, set[int]]] = []
    now = {"at": 0.0, "waited": 0.0, "idle": 0.0}
    left = list(shares)

    def sleep(seconds: float) -> None:
        if seconds != waiting.PERIOD:
            said.append(f"{seconds:g} s")
            now["at"] += seconds
            return
        if not left:
            raise Ended
        waited, idle = left.pop(0)
        now["at"] += seconds
        now["waited"] += seconds * waited
        now["idle"] += seconds * idle

    monkeypatch.setattr(waiting.time, "sleep", sleep)
    monkeypatch.setattr(
        CpuTimes,
        "now",
        lambda: CpuTimes(now["at"], {7: now["waited"] / 2, 9: now["waited"] / 2}, {0: 0.0, 1: now["idle"]}),
    )
    monkeypatch.setattr(waiting.os, "sched_getaffinity", lambda task: {0, 1}, raising=False)
    monkeypatch.setattr(waiting.os, "sched_setaffinity", lambda task, cpus: moved.append((task, cpus)), raising=False)
    with pytest.raises(Ended):
        waiting._watch(FakeSpinning(said))
    return said, moved


def test_threads_that_are_alone_go_on_spinning(monkeypatch: pytest.MonkeyPatch) -> None:
    assert watched([(0.05, 0.5)] * 20, monkeypatch) == ([], [])


def test_beside_other_programs_threads_sleep_for_longer_and_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    said, moved = watched([(0.8, 0.0)] * 5, monkeypatch)
    assert said == ["off", "1 s", "on", "off", "2 s", "on", "off", "4 s", "on", "off", "8 s", "on", "off", "8 s", "on"]
    assert moved == []
    said, _ = watched([(0.8, 0.0), (0.8, 0.0), (0.1, 0.0), (0.8, 0.0)], monkeypatch)
    assert said[-2] == "1 s"  # it was over in between


def test_threads_on_one_core_are_moved_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    said, moved = watched([(0.9, 1.0)], monkeypatch)
    assert said == []
    assert moved == [(7, {1}), (7, {0, 1})]  # and may go anywhere after


WAITS = """
import contextlib
from gpt import waiting
waiting.set_policy()
import ctypes, torch
torch.set_num_threads(2)
a, b = torch.randn(512, 256), torch.randn(256, 256)

def switches():
    found = 0
    for task in waiting.TASKS.glob("*/status"):
        with contextlib.suppress(OSError):  # it has ended
            lines = task.read_text().splitlines()
            found += sum(int(line.split()[1]) for line in lines if line.startswith("voluntary"))
    return found

def waits():
    before = switches()
    for _ in range(300):
        a @ b
    return switches() - before

spinning = waiting.Spinning(ctypes.CDLL(None))
waits()
found = [min(waits() for _ in range(5))]
spinning.off()
found.append(min(waits() for _ in range(5)))
spinning.on()
found.append(min(waits() for _ in range(5)))
print(*found)
"""


@pytest.mark.more
@needs_openmp
def test_threads_sleep_while_spinning_is_off() -> None:
    environment = {name: value for name, value in os.environ.items() if name not in waiting.POLICY}
    done = subprocess.run([sys.executable, "-c", WAITS], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    before, off, after = map(int, done.stdout.split())
    assert off > 150, "about one for each product"
    assert before < off / 3
    assert after < off / 3


@needs_openmp
def test_threads_end_before_another_thread_computes() -> None:
    """GNU OpenMP would not spin while two threads have teams of their own."""
    code = (
        "import os, threading, torch; from gpt import waiting\n"
        "def team():\n"
        "    torch.ones(2**20).exp()\n"
        "    return len(os.listdir('/proc/self/task'))\n"
        "torch.set_num_threads(2)\n"
        "alone = len(os.listdir('/proc/self/task'))\n"
        "assert team() == alone + 1\n"
        "waiting.end_threads()\n"
        "found = []\n"
        "thread = threading.Thread(target=lambda: found.append(team()))\n"
        "thread.start(); thread.join()\n"
        "assert found == [alone + 2], (alone, found)  # the thread, and one of its team\n"
        "assert team() == alone + 1\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
