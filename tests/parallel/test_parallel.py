"""Several processes train as one does: two of them, over gloo. `ranks.py` is what they run."""

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Gpt, assert_same, curve, one_line_of_what_and_what_next
from ranks import LONG, RUNS, WORDS, cut
from several import RANKS, assert_killed_and_gone_on, assert_trained_alike, losses, texts, trained

import gpt as library
from gpt.config import TrainConfig
from gpt.device import Compute
from gpt.errors import UserError
from gpt.interrupt import SIGNALS
from gpt.parallel import environment
from gpt.parallel import launch as launching
from gpt.parallel.launch import Ended, _ended, launch
from gpt.parallel.world import Ranks
from gpt.text.batches import Ramp
from gpt.training.recipe import Recipe, resolve

pytestmark = pytest.mark.skipif(not Path("/proc").exists(), reason="looks for processes where Linux has them")


@pytest.fixture(scope="module")
def several_trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which ``one`` process and then ``two`` have trained the same."""
    return trained(tmp_path_factory.mktemp("ranks"), RUNS, RANKS)


def heard_by(several_trained: Path, rank: int) -> dict[str, Any]:
    return dict(json.loads((several_trained / f"heard-{rank}.json").read_text()))


@pytest.mark.parametrize("name", RUNS)
def test_two_train_as_one_does(several_trained: Path, name: str) -> None:
    one, two = several_trained / "one" / name, several_trained / "two" / name
    assert len(losses(two)) == LONG["steps"]
    assert_trained_alike(one, two, norms=1e-2, rel=1e-4)
    says = [json.loads((run / "run.json").read_text()) for run in (one, two)]
    assert [said["compute"]["processes"] for said in says] == [1, 2]
    assert says[0]["resolved"]["batch_tokens"] == says[1]["resolved"]["batch_tokens"]
    said_of = [library.load(run).loss("the cat sat on the mat") for run in (one, two)]
    assert said_of[1] == pytest.approx(said_of[0], rel=1e-3)


def test_gradients_are_summed_once_a_step(several_trained: Path) -> None:
    """After the last of the micro-batches, and not while one is tried."""
    summed = heard_by(several_trained, 1)["summed"]
    assert summed["adamw"] == [False, *[False, True] * 6]
    assert summed["muon"] == [False, *[True] * 6]
    assert summed["modern"] == [False, *[False, False, False, True] * 6]


def test_a_run_goes_on_bit_for_bit_with_dropout(several_trained: Path) -> None:
    assert_same(several_trained / "two/resumed", several_trained / "two/dropout")
    assert curve(several_trained / "two/resumed") == curve(several_trained / "two/dropout")


def test_each_process_drops_out_what_is_its_own() -> None:
    world = Ranks.__new__(Ranks)

    def drawn(rank: int, step: int, tensor: int = 1) -> float:
        world.rank, world.tensor = rank, tensor
        world.seed(5, step)
        return torch.rand(1).item()

    assert len({drawn(0, 1), drawn(1, 1), drawn(0, 2), drawn(0, 1)}) == 3
    for rank, row in ((0, 0), (1, 0), (2, 1)):  # two ranks share each sequence, and what is dropped of it
        assert drawn(rank, 1, tensor=2) == drawn(row, 1)


def test_a_run_goes_on_with_another_number(several_trained: Path, workdir: Path) -> None:
    """From one to two, and from two to one: the same batches, and equal to rounding."""
    expected = losses(several_trained / "one/adamw")
    assert losses(several_trained / "two/from-one") == pytest.approx(expected, rel=1e-4)
    notes = heard_by(several_trained, 0)["notes"]
    assert any(line.startswith("2 processes instead of 1: same batches") for line in notes)
    cut(str(several_trained / "two/adamw"), "from-two", 4)
    heard: list[Any] = []
    library.resume("from-two", heard.append)
    assert losses(Path("from-two")) == pytest.approx(expected, rel=1e-4)
    assert any("1 process instead of 2" in getattr(event, "text", "") for event in heard)


def test_a_loss_that_is_no_number_in_one_is_none_in_all_and_all_go_back_to_rank_0s_copy(several_trained: Path) -> None:
    told = curve(several_trained / "two/poisoned")
    (back,) = [line for line in told if line["event"] == "rollback"]
    assert (back["step"], back["failed_step"]) == (4, 8)
    assert [line["step"] for line in told if line["event"] == "step" and line["loss"] is None] == [6, 7, 8]
    assert (told[-1]["event"], told[-1]["reason"]) == ("end", "steps")
    (here,), (there,) = (heard_by(several_trained, rank)["rolled_back"] for rank in (0, 1))
    assert here["has"] == there["has"]
    assert here["step"] == there["step"] == 4
    assert any("momentum" in name for name in here["has"])
    assert (here["kept"], there["kept"]) == (len(here["has"]), 0)


def test_memory_that_is_short_in_one_is_short_in_all(several_trained: Path) -> None:
    assert json.loads((several_trained / "two/little/run.json").read_text())["resolved"]["micro_batch"] == 1
    notes = heard_by(several_trained, 0)["notes"]
    assert [line for line in notes if line.startswith("out of memory")] == [
        "out of memory: from now on, 2 of 8 sequences at once",
        "out of memory: from now on, 1 of 8 sequences at once",
    ]


# Processes that end before their time


def test_a_kill_of_one_ends_all_and_the_run_goes_on(several_trained: Path, workdir: Path) -> None:
    texts()
    assert_killed_and_gone_on(WORDS, 1, several_trained / "two/whole")


@pytest.mark.slow
def test_an_error_in_one_is_said_once(workdir: Path, capfd: pytest.CaptureFixture[str]) -> None:
    texts()
    ended = launch([sys.executable, str(RANKS), "broken"], 2)
    assert ended == Ended(1, 1, None, Path("broken"))
    said = "error: internal error in gpt: RuntimeError: boom\nhint: please report it, with the traceback that --debug prints\n"
    assert capfd.readouterr() == ("", said)
    assert library.resume("broken").steps == 12


@pytest.mark.slow
def test_a_lost_rank_ends_others_that_hear_of_nothing(workdir: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """As in a collective of NCCL. The last checkpoint is there to resume from."""
    texts()
    began = time.monotonic()
    ended = launch([sys.executable, str(RANKS), "killed"], 2)
    assert ended == Ended(1, 1, signal.SIGKILL, Path("killed"))
    assert time.monotonic() - began < 30 + 60  # to start, and to end
    assert capfd.readouterr() == ("", "")
    assert library.resume("killed", nproc=1).steps == 12


@pytest.mark.slow
def test_a_rank_that_hears_nothing_for_too_long_ends(workdir: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """As where another machine has lost its power, which breaks no connection."""
    texts()
    ended = launch([sys.executable, str(RANKS), "silent"], 2)
    assert (ended.status, ended.run) == (1, Path("silent"))
    assert library.resume("silent", nproc=1).steps == 12


@pytest.mark.slow
def test_a_compiler_that_one_rank_lacks_is_used_by_none(workdir: Path) -> None:
    texts()
    assert launch([sys.executable, str(RANKS), "uncompilable"], 2) == Ended(0)
    notes = json.loads(Path("heard.json").read_text())
    assert notes.count("steps are not compiled: it failed in another process") == 3


@pytest.mark.slow
def test_other_words_for_one(workdir: Path, capfd: pytest.CaptureFixture[str]) -> None:
    texts()
    ended = launch([sys.executable, str(RANKS), "otherwise"], 2)
    assert (ended.status, ended.rank) == (2, 0)
    err = capfd.readouterr().err
    assert err.startswith("error: processes do not agree: seed is 7 in process 0 and 8 in process 1\nhint: ")
    assert err.count("\n") == 2
    assert not Path("otherwise").exists()


@pytest.mark.slow
def test_torchrun(workdir: Path) -> None:
    texts()
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "gpt_cli"]
    words = ["train", "book.txt", *WORDS, "-o", "run", "--json"]
    done = subprocess.run([*command, *words], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["steps"] == 12
    assert done.stderr.count("12 steps of 128 tokens") == 1
    assert "on 2 processes, each on cpu, 1 thread" in done.stderr


# What cannot be


@pytest.mark.parametrize(("number", "message"), [("0", "it must be between 1 and 1,024"), ("2000", "nproc is 2000")])
def test_numbers_that_cannot_be(gpt: Gpt, number: str, message: str) -> None:
    one_line_of_what_and_what_next(gpt("train", "book.txt", "--nproc", number), message)


def recipe(processes: int, **settings: Any) -> Recipe:
    asked = TrainConfig(**{**LONG, "block_size": 32, "batch_tokens": 256, "steps": 3, **settings})
    compute = Compute(torch.device("cpu"), torch.float32)
    return resolve(asked, compute, 10**5, 10**5, 400, True, lambda note: None, None, 0, processes)


def test_more_processes_than_a_machine_has_room_for(gpt: Gpt, workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpt.parallel.launch.host_memory", lambda: 8 * 2**30)
    Path("book.txt").write_text("the cat " * 500)
    done = gpt("train", "book.txt", "--nproc", "1024")
    one_line_of_what_and_what_next(done, "1,024 processes take 275 GB just to start, and this machine has 9 GB")


def test_a_batch_that_cannot_be_shared() -> None:
    with pytest.raises(UserError, match="the 8 sequences of a step cannot be split evenly over 3 processes") as error:
        recipe(3)
    assert error.value.hint == "use --batch-tokens 288 or 192, or --nproc 1 or 2 or 4 or 8"
    with pytest.raises(UserError, match="does not divide the 4 sequences"):
        recipe(2, micro_batch=8)
    assert recipe(2).micro_batch == 4
    assert recipe(3, batch_tokens=None).rows % 3 == 0
    ramp = recipe(4, batch_tokens=1024, batch_ramp=4096, micro_batch=2).ramp
    assert ramp == Ramp(32, 4, 128, 8, 4)
    sizes = [ramp.before(step + 1) - ramp.before(step) for step in range(100)]
    assert (sizes[0], sizes[-1]) == (4, 32)
    assert not any(size % 4 for size in sizes)


def test_a_port_that_is_taken(gpt: Gpt, monkeypatch: pytest.MonkeyPatch) -> None:
    texts()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        monkeypatch.setenv("MASTER_PORT", str(taken.getsockname()[1]))
        one_line_of_what_and_what_next(gpt("train", "book.txt", "--nproc", "2"), "is in use")
    monkeypatch.setenv("MASTER_PORT", "many")
    one_line_of_what_and_what_next(gpt("train", "book.txt", "--nproc", "2"), 'MASTER_PORT is "many"')


def test_a_port_that_was_in_use_a_moment_ago_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system holds the end of a connection that was closed from there for a minute."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.create_connection(server.getsockname())
        server.accept()[0].close()
        client.close()
        port = server.getsockname()[1]
    monkeypatch.setenv("MASTER_PORT", str(port))
    assert launching._port() == port


def test_an_environment_that_is_not_whole(gpt: Gpt, workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts()
    with pytest.raises(UserError, match="2 processes were requested"):
        library.train("book.txt", nproc=2)
    monkeypatch.setenv("WORLD_SIZE", "2")
    one_line_of_what_and_what_next(gpt("train", "book.txt"), "WORLD_SIZE is 2, and RANK is not set")
    monkeypatch.setenv("RANK", "0")
    started = gpt("train", "book.txt", "--nproc", "2")
    one_line_of_what_and_what_next(started, "--nproc and torchrun both start processes")
    monkeypatch.setenv("WORLD_SIZE", "x")
    one_line_of_what_and_what_next(gpt("train", "book.txt"), 'WORLD_SIZE is "x"')


def test_gpus_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    world = Ranks.__new__(Ranks)
    world.local_size, world.local_rank = 4, 3
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(UserError, match="4 processes need a GPU each; this machine has 2"):
        world._device("cuda")
    world.local_size = 2
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    with pytest.raises(UserError, match="no NCCL"):
        world._device("cuda")
    with pytest.raises(UserError, match="cannot share mps"):
        world._device("mps")


def test_which_process_ended_the_others() -> None:
    assert _ended({0: 75, 1: -9}, "r") == Ended(1, 1, 9, Path("r"))
    assert _ended({0: -15, 1: 2}, None) == Ended(2, 1, None, None)
    assert _ended({0: 143, 1: 1}, None) == Ended(1, 1)
    assert _ended({0: 143, 1: 75}, None) == Ended(143, 0)
    assert _ended({0: 75}, None) == Ended(1, 0)
    assert _ended({1: -9, 0: -9}, None) == Ended(1, 1, 9)  # rank 0 was killed half a minute later, since it hung


@pytest.mark.slow
def test_a_status_that_was_said_stands_whatever_ends_a_process_after_that() -> None:
    """A launcher that sees another one's end first tells the one that has said its word to end too. Rank 0's word counts."""
    code = """
import os, signal, time
from gpt.parallel import environment
environment.tell(environment.STATUS, 143 + int(os.environ["RANK"]))
while environment.told(os.environ[environment.LAUNCHER], environment.STATUS) != "143":
    time.sleep(0.01)
os.kill(os.getpid(), signal.SIGTERM) if os.environ["RANK"] == "0" else os._exit(75)
"""
    assert launch([sys.executable, "-c", code], 2) == Ended(143)


def test_a_launcher_leaves_this_process_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's takes signals and writes a log."""
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "ERROR")  # the one variable that stays

    def told() -> tuple[object, ...]:
        handlers = [signal.getsignal(signum) for signum in SIGNALS]
        return *handlers, logging.root.manager.disable, dict(os.environ)

    before = told()
    with launching._environment(str(tmp_path), 1.5):
        assert environment.began() == 1.5
        for signum in SIGNALS:
            signal.signal(signum, signal.SIG_IGN)
    assert told() == before


@pytest.mark.parametrize("rank", [None, 0, 1])
def test_one_of_several_ends_before_python_takes_itself_apart(rank: int | None) -> None:
    """In which a thread of torch's could abort it; what was registered to run at the end still does."""
    code = """
import atexit
from gpt_cli import processes
status = []
processes.end_abruptly(status)
atexit.register(print, "last words", end="")
class Kept:
    def __del__(self): print(", taken apart")
kept = Kept()
status.append(3)
raise SystemExit(3)
"""
    several = {} if rank is None else {"WORLD_SIZE": "2", "RANK": str(rank)}
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | several, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (3, "")
    assert done.stdout == "last words" + (", taken apart\n" if rank is None else "")
