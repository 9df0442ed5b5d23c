"""The number of compute threads, and how they wait for each other."""

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
from ranks import to_options

from gpt.config import device
from gpt.decoding import native
from gpt.system import waiting
from gpt.system.waiting import CpuTimes

CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
needs_openmp = pytest.mark.skipif(
    sys.platform != "linux" or not next(waiting.TASKS.glob("*/schedstat"), None) or CORES < 2,
    reason="needs Linux and two cores",
)


@pytest.fixture(autouse=True)
def four_cores(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    original_threads = torch.get_num_threads()
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(device, "_torch_threads", lambda: 4)
    monkeypatch.setattr(device, "cores", lambda: 4)
    monkeypatch.setattr(device, "_lent_threads", [])  # Another test can have loaded a model.
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(original_threads)


@pytest.mark.parametrize(
    ("option", "environment", "decoding", "expected"),
    [
        (None, None, None, 3),  # The container limits the cores.
        (3, None, None, 3),
        (3, "2", 100, 3),
        (None, "2", 100, 4),  # Torch reads the variable only at import.
        (None, None, 3_700_000, 2),
    ],
)
def test_thread_count_depends_on_option_environment_and_model(
    option: int | None, environment: str | None, decoding: int | None, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if environment:
        monkeypatch.setenv("OMP_NUM_THREADS", environment)
    monkeypatch.setattr(device, "cores", lambda: 3)
    device.use_threads(CPU, option, decoding)
    assert torch.get_num_threads() == expected


def test_torch_has_one_thread_next_to_steps_in_c() -> None:
    device.use_threads(CPU, 3)
    compute = device.lend_threads(CPU)
    assert (compute.step_threads, compute.describe(), torch.get_num_threads()) == (3, "cpu, 3 threads, float32", 1)
    device.use_threads(CPU)  # As for training in the same process.
    assert torch.get_num_threads() == 3


@pytest.mark.slow
def test_commands_have_a_threads_option(gpt: Gpt, run_folder: Path, workdir: Path) -> None:
    assert gpt("sample", "the", "-m", run_folder, "--threads", "2", "-n", "2").code == 0
    assert torch.get_num_threads() == (1 if native.find(print) else 2)
    Path("text.txt").write_text(make_text(300))
    assert gpt("eval", "text.txt", "-m", run_folder, "--threads", "3").code == 0
    assert torch.get_num_threads() == 3
    for number in ("0", "5000"):
        for command in (["sample", "-m", run_folder], ["eval", "text.txt", "-m", run_folder], ["train", "text.txt"]):
            result = gpt(*command, "--threads", number)
            assert (result.code, result.err[:17]) == (2, "error: threads is")
            assert "it must be between 1 and 4" in result.err


@pytest.mark.slow
def test_resume_keeps_or_changes_threads(gpt: Gpt, workdir: Path) -> None:
    Path("text.txt").write_bytes(make_text().encode())
    options = to_options(TINY)
    words = ("--threads", "3", "--steps", "4", "--vocab-size", "300", *options)
    assert gpt("train", "text.txt", "-o", "run", *words).code == 0
    assert json.loads(Path("run/run.json").read_text())["compute"]["threads"] == 3
    torch.set_num_threads(4)
    result = gpt("train", "--resume", "run", "--steps", "6")
    assert "on cpu, 3 threads" in result.err
    result = gpt("train", "--resume", "run", "--steps", "8", "--threads", "2")
    assert "2 threads instead of 3: equal up to rounding" in result.err
    assert torch.get_num_threads() == 2
    training = json.loads(next(Path("run").glob("step-000008/training.json")).read_text())
    assert training["machine"]["threads"] == 2


def test_user_wait_policy_takes_precedence(monkeypatch: pytest.MonkeyPatch) -> None:
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
    ("environment", "watched"),
    [({}, True), (waiting.POLICY, True), ({"OMP_WAIT_POLICY": "passive"}, False), ({"GOMP_SPINCOUNT": "7"}, False)],
)
@needs_openmp
def test_watcher_starts_unless_the_user_set_a_policy(
    environment: dict[str, str], watched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in waiting.POLICY:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    threads: list[object] = []
    monkeypatch.setattr(waiting, "_watching", threading.Lock())
    monkeypatch.setattr(waiting, "_watch", threads.append)
    waiting.watch()
    waiting.watch()  # A second call has no effect.
    deadline = time.monotonic() + 60
    while watched and not threads and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(threads) == watched


class FakeSpinning(waiting.Spinning):
    def __init__(self, calls: list[str]) -> None:
        self.calls = calls

    def off(self) -> None:
        self.calls.append("off")

    def on(self) -> None:
        self.calls.append("on")


class WatchEnded(Exception):
    pass


def run_watcher(
    shares: list[tuple[float, float]], monkeypatch: pytest.MonkeyPatch
) -> tuple[list[str], list[tuple[int, set[int]]]]:
    """Runs the watcher on simulated times; returns its calls and the CPU affinities that it sets.

    For each period, ``shares`` has two fractions: how long threads wait, and how long a core is idle.
    """
    calls: list[str] = []
    affinities: list[tuple[int, set[int]]] = []
    clock = {"at": 0.0, "waited": 0.0, "idle": 0.0}
    remaining_shares = list(shares)

    def sleep(seconds: float) -> None:
        if seconds != waiting.PERIOD:
            calls.append(f"{seconds:g} s")
            clock["at"] += seconds
            return
        if not remaining_shares:
            raise WatchEnded
        waiting_share, idle = remaining_shares.pop(0)
        clock["at"] += seconds
        clock["waited"] += seconds * waiting_share
        clock["idle"] += seconds * idle

    monkeypatch.setattr(waiting.time, "sleep", sleep)
    monkeypatch.setattr(
        CpuTimes,
        "now",
        lambda: CpuTimes(clock["at"], {7: clock["waited"] / 2, 9: clock["waited"] / 2}, {0: 0.0, 1: clock["idle"]}),
    )
    monkeypatch.setattr(waiting.os, "sched_getaffinity", lambda task: {0, 1}, raising=False)
    monkeypatch.setattr(
        waiting.os, "sched_setaffinity", lambda task, cpus: affinities.append((task, cpus)), raising=False
    )
    with pytest.raises(WatchEnded):
        waiting._watch(FakeSpinning(calls))
    return calls, affinities


def test_threads_keep_spinning_on_an_idle_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_watcher([(0.05, 0.5)] * 20, monkeypatch) == ([], [])


def test_pauses_grow_while_other_programs_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, affinities = run_watcher([(0.8, 0.0)] * 5, monkeypatch)
    assert calls == ["off", "1 s", "on", "off", "2 s", "on", "off", "4 s", "on", "off", "8 s", "on", "off", "8 s", "on"]
    assert affinities == []
    calls, _ = run_watcher([(0.8, 0.0), (0.8, 0.0), (0.1, 0.0), (0.8, 0.0)], monkeypatch)
    assert calls[-2] == "1 s"  # The pause resets after a quiet period.


def test_threads_sharing_a_core_are_separated(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, affinities = run_watcher([(0.9, 1.0)], monkeypatch)
    assert calls == []
    assert affinities == [(7, {1}), (7, {0, 1})]  # The affinity is restored.


COUNT_SWITCHES = """
import contextlib
from gpt.system import waiting
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
    result = subprocess.run([sys.executable, "-c", COUNT_SWITCHES], capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr
    default, off, after = map(int, result.stdout.split())
    assert off > 150, "about one for each product"
    assert default < off / 3
    assert after < off / 3


@needs_openmp
def test_end_threads_frees_the_thread_team() -> None:
    """GNU OpenMP does not spin while two threads have teams."""
    code = (
        "import os, threading, time, torch; from gpt.system import waiting\n"
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
        "end = time.monotonic() + 30  # threads that have ended take a moment to go\n"
        "while team() != alone + 1: assert time.monotonic() < end\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
