"""Data-parallel runs of two processes, executed by `ranks.py`."""

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
from conftest import Gpt, assert_same, curve, facts, one_line_of_what_and_what_next
from ranks import OPTIONS, RUNS, SIX_STEPS, copy_killed_run
from several import RANKS, assert_trained_alike, losses, train_all, write_texts
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

import gpt as library
from gpt.config.train import TrainConfig
from gpt.parallel import environment
from gpt.parallel import launch as launching
from gpt.parallel.launch import LaunchResult, _find_first_failure, launch
from gpt.parallel.world import Ranks
from gpt.system.errors import UserError
from gpt.training.recipe import Recipe, plan

pytestmark = pytest.mark.skipif(not Path("/proc").exists(), reason="looks for processes where Linux has them")


@pytest.fixture(scope="module")
def several_trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same runs trained by one process (in ``one``) and by two (in ``two``)."""
    return train_all(tmp_path_factory.mktemp("ranks"), RUNS, RANKS)


def rank_report(several_trained: Path, rank: int) -> dict[str, Any]:
    return dict(json.loads((several_trained / f"heard-{rank}.json").read_text()))


@pytest.mark.parametrize("name", RUNS)
def test_two_processes_match_one(several_trained: Path, name: str) -> None:
    one, two = several_trained / "one" / name, several_trained / "two" / name
    assert_trained_alike(one, two, norm_tolerance=1e-2, rel=1e-4)
    records = [json.loads((run / "run.json").read_text()) for run in (one, two)]
    assert len(losses(two)) == records[0]["resolved"]["steps"]
    assert [record["compute"]["processes"] for record in records] == [1, 2]
    assert records[0]["resolved"]["batch_tokens"] == records[1]["resolved"]["batch_tokens"]
    text_losses = [library.load(run).loss("the cat sat on the mat") for run in (one, two)]
    assert text_losses[1] == pytest.approx(text_losses[0], rel=1e-3)


def test_gradients_are_all_reduced_once_per_step(several_trained: Path) -> None:
    """Only the last micro-batch of a step all-reduces."""
    syncs = rank_report(several_trained, 1)["summed"]
    assert syncs["adamw"] == [False, True] * 6
    assert syncs["muon"] == [True] * 6
    assert syncs["modern"] == [False, False, False, True] * 6


def test_resume_of_two_processes_is_bit_exact_with_dropout(several_trained: Path) -> None:
    assert_same(several_trained / "two/resumed", several_trained / "two/dropout")
    assert curve(several_trained / "two/resumed") == curve(several_trained / "two/dropout")


def test_dropout_differs_between_ranks() -> None:
    world = Ranks.__new__(Ranks)

    def draw(rank: int, step: int) -> float:
        world.rank = rank
        world.seed(5, step)
        return torch.rand(1).item()

    assert len({draw(0, 1), draw(1, 1), draw(0, 2), draw(0, 1)}) == 3


def test_resume_with_another_number_of_processes_matches(several_trained: Path, workdir: Path) -> None:
    """Batches stay the same. Results are equal up to rounding."""
    expected = losses(several_trained / "one/adamw")
    assert losses(several_trained / "two/from-one") == pytest.approx(expected, rel=1e-4)
    notes = rank_report(several_trained, 0)["notes"]
    assert any(line.startswith("2 processes instead of 1: same batches") for line in notes)
    copy_killed_run(str(several_trained / "two/adamw"), "from-two", 4)
    run_events: list[Any] = []
    library.resume("from-two", run_events.append)
    assert losses(Path("from-two")) == pytest.approx(expected, rel=1e-4)
    assert any("1 process instead of 2" in getattr(event, "text", "") for event in run_events)


def test_nan_loss_on_one_rank_rolls_back_all_ranks_to_rank_0s_snapshot(several_trained: Path) -> None:
    logged_events = curve(several_trained / "two/poisoned")
    (rollback,) = [line for line in logged_events if line["event"] == "rollback"]
    assert (rollback["step"], rollback["failed_step"]) == (4, 9)
    assert [line["step"] for line in logged_events if line["event"] == "step" and line["loss"] is None] == [7, 8, 9]
    assert (logged_events[-1]["event"], logged_events[-1]["reason"]) == ("end", "steps")
    (on_rank_0,), (on_rank_1,) = (rank_report(several_trained, rank)["rolled_back"] for rank in (0, 1))
    assert on_rank_0["has"] == on_rank_1["has"]
    assert on_rank_0["step"] == on_rank_1["step"] == 4
    assert any("momentum" in name for name in on_rank_0["has"])
    assert (on_rank_0["kept"], on_rank_1["kept"]) == (len(on_rank_0["has"]), 0)


@pytest.mark.parametrize("sharding", ["none", "full"])
def test_all_ranks_halve_the_micro_batch_before_the_first_step(several_trained: Path, sharding: str) -> None:
    """One replica runs out of memory. Sharded ranks do so together, in the forward and in the backward pass."""
    little, small = (several_trained / f"two/{name}-{sharding}" for name in ("little", "small"))
    assert_same(little, small)
    assert json.loads((little / "run.json").read_text())["resolved"]["micro_batch"] == 1
    notes = rank_report(several_trained, 0)["notes"]
    assert notes.count("out of memory: from now on, 1 of 8 sequences at once") == 2


# Processes that fail


@pytest.mark.slow
def test_error_on_one_rank_is_reported_once(workdir: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write_texts()
    result = launch([sys.executable, str(RANKS), "broken"], 2)
    assert result == LaunchResult(1, 1, None, Path("broken"))
    message = "error: internal error in gpt: RuntimeError: boom\nhint: please report it, with the traceback that --debug prints\n"
    assert capfd.readouterr() == ("", message)
    assert library.resume("broken").steps == 12


@pytest.fixture
def short_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """By default, the launcher waits 30 seconds for a rank that hangs."""
    monkeypatch.setattr(LocalElasticAgent, "_stop_workers", lambda agent, group: agent._shutdown(timeout=1))


@pytest.mark.slow
@pytest.mark.usefixtures("short_patience")
def test_killed_rank_ends_a_rank_that_hangs(workdir: Path, gpt: Gpt, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other rank hangs, as in an NCCL collective."""
    write_texts()
    command = [sys.executable, str(RANKS), "killed"]
    monkeypatch.setattr(launching, "launch", lambda words, nproc, start_time: launch(command, nproc, start_time))
    done = gpt("train", "book.txt", "--nproc", "2")
    message = "process 1 of 2 was killed by SIGKILL, possibly by the system because memory ran out"
    one_line_of_what_and_what_next(done, message, code=1)
    assert done.err.endswith("hint: resume with: gpt train --resume killed\n")
    assert library.resume("killed", nproc=1).steps == 12


@pytest.mark.slow
@pytest.mark.usefixtures("short_patience")
def test_rank_ends_when_a_collective_times_out(workdir: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A machine that loses power does not close its connections."""
    write_texts()
    result = launch([sys.executable, str(RANKS), "silent"], 2)
    assert (result.status, result.run) == (1, Path("silent"))
    assert library.resume("silent", nproc=1).steps == 12


def test_compiler_missing_on_one_rank_disables_compilation_on_all(several_trained: Path) -> None:
    notes = rank_report(several_trained, 0)["notes"]
    assert notes.count("steps are not compiled: it failed in another process") == 2


@pytest.mark.slow
def test_ranks_with_different_options_are_refused(workdir: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write_texts()
    result = launch([sys.executable, str(RANKS), "otherwise"], 2)
    assert (result.status, result.rank) == (2, 0)
    err = capfd.readouterr().err
    assert err.startswith("error: processes do not agree: seed is 7 in process 0 and 8 in process 1\nhint: ")
    assert err.count("\n") == 2
    assert not Path("otherwise").exists()


@pytest.mark.slow
def test_training_under_torchrun(workdir: Path) -> None:
    write_texts()
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "gpt_cli"]
    words = ["train", "book.txt", *OPTIONS, "-o", "run", "--json"]
    done = subprocess.run([*command, *words], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["steps"] == 12
    assert done.stderr.count("12 steps of 128 tokens") == 1
    assert "on 2 processes, each on cpu, 1 thread" in done.stderr


# Invalid settings and environments


@pytest.mark.parametrize(("nproc", "message"), [("0", "it must be between 1 and 1,024"), ("2000", "nproc is 2000")])
def test_invalid_nproc_is_refused(gpt: Gpt, nproc: str, message: str) -> None:
    one_line_of_what_and_what_next(gpt("train", "book.txt", "--nproc", nproc), message)


def make_recipe(processes: int, **settings: Any) -> Recipe:
    config = TrainConfig(**{**SIX_STEPS, "block_size": 32, "batch_tokens": 256, "steps": 3, **settings})
    return plan(config, facts(tokens=10**5, vocab_size=400, processes=processes))


def test_too_little_memory_for_the_processes_is_refused(
    gpt: Gpt, workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpt.parallel.launch.host_memory", lambda: 8 * 2**30)
    Path("book.txt").write_text("the cat " * 500)
    done = gpt("train", "book.txt", "--nproc", "1024")
    one_line_of_what_and_what_next(done, "1,024 processes take 275 GB just to start, and this machine has 9 GB")


def test_batch_that_cannot_be_split_is_refused() -> None:
    with pytest.raises(UserError, match="the 8 sequences of a step cannot be split evenly over 3 processes") as error:
        make_recipe(3)
    assert error.value.hint == "use --batch-tokens 288 or 192, or --nproc 1 or 2 or 4 or 8"
    with pytest.raises(UserError, match="does not divide the 4 sequences"):
        make_recipe(2, micro_batch=8)
    assert make_recipe(2).micro_batch == 4
    assert make_recipe(3, batch_tokens=None).rows % 3 == 0


def test_port_in_use_is_refused(gpt: Gpt, monkeypatch: pytest.MonkeyPatch) -> None:
    write_texts()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        monkeypatch.setenv("MASTER_PORT", str(listener.getsockname()[1]))
        one_line_of_what_and_what_next(gpt("train", "book.txt", "--nproc", "2"), "is in use")
    monkeypatch.setenv("MASTER_PORT", "many")
    one_line_of_what_and_what_next(gpt("train", "book.txt", "--nproc", "2"), 'MASTER_PORT is "many"')


def test_recently_closed_port_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system reserves a closed port for a minute."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.create_connection(server.getsockname())
        server.accept()[0].close()
        client.close()
        port = server.getsockname()[1]
    monkeypatch.setenv("MASTER_PORT", str(port))
    assert launching._port() == port


def test_incomplete_environment_is_refused(gpt: Gpt, workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_texts()
    with pytest.raises(UserError, match="2 processes were requested"):
        library.train("book.txt", nproc=2)
    monkeypatch.setenv("WORLD_SIZE", "2")
    one_line_of_what_and_what_next(gpt("train", "book.txt"), "WORLD_SIZE is 2, and RANK is not set")
    monkeypatch.setenv("RANK", "0")
    done = gpt("train", "book.txt", "--nproc", "2")
    one_line_of_what_and_what_next(done, "--nproc and torchrun both start processes")
    monkeypatch.setenv("WORLD_SIZE", "x")
    one_line_of_what_and_what_next(gpt("train", "book.txt"), 'WORLD_SIZE is "x"')


def test_too_few_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_first_failed_rank_determines_the_exit_status() -> None:
    assert _find_first_failure({0: 75, 1: -9}, "r") == LaunchResult(1, 1, 9, Path("r"))
    assert _find_first_failure({0: -15, 1: 2}, None) == LaunchResult(2, 1, None, None)
    assert _find_first_failure({0: 143, 1: 1}, None) == LaunchResult(1, 1)
    assert _find_first_failure({0: 143, 1: 75}, None) == LaunchResult(143, 0)
    assert _find_first_failure({0: 75}, None) == LaunchResult(1, 0)
    # Rank 0 hung and was killed half a minute later.
    assert _find_first_failure({1: -9, 0: -9}, None) == LaunchResult(1, 1, 9)


@pytest.mark.slow
def test_reported_status_survives_a_later_kill() -> None:
    """The launcher can kill rank 0 after rank 0 reports its status. The reported status counts."""
    code = """
import os, signal, time
from gpt.parallel import environment
environment.write_message(environment.STATUS, 143 + int(os.environ["RANK"]))
while environment.read_message(os.environ[environment.LAUNCHER], environment.STATUS) != "143":
    time.sleep(0.01)
os.kill(os.getpid(), signal.SIGTERM) if os.environ["RANK"] == "0" else os._exit(75)
"""
    assert launch([sys.executable, "-c", code], 2) == LaunchResult(143)


@pytest.mark.slow
def test_second_ctrl_c_ends_all_processes(workdir: Path) -> None:
    """The processes ignore repeated signals, as during a long save."""
    rank = """
import os, pathlib, time
from gpt.system.interrupt import StopSignal
from gpt.parallel import environment
with StopSignal(is_ctrl_c=environment.is_ctrl_c) as stop:
    pathlib.Path("ready-" + os.environ["RANK"]).touch()
    while True:
        time.sleep(0.01)
        if stop.signum:
            pathlib.Path("stopping-" + os.environ["RANK"]).touch()
"""
    code = f"import sys; from gpt.parallel.launch import launch; sys.exit(launch([sys.executable, '-c', {rank!r}], 2).status)"
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)

    def wait_for(name: str) -> None:
        while not all(Path(f"{name}-{rank}").exists() for rank in range(2)):
            assert process.poll() is None
            time.sleep(0.01)

    wait_for("ready")
    process.send_signal(signal.SIGINT)
    wait_for("stopping")
    for signum in (signal.SIGTERM, signal.SIGHUP):
        time.sleep(0.4)
        process.send_signal(signum)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(1)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130


def test_launcher_restores_logging_and_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's launcher writes a log."""
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "ERROR")  # An existing value is not overwritten.

    def process_state() -> tuple[object, ...]:
        return logging.root.manager.disable, dict(os.environ)

    before = process_state()
    with launching._environment(str(tmp_path), 1.5):
        assert environment.read_start_time() == 1.5
    assert process_state() == before


@pytest.mark.parametrize("rank", [None, 0, 1])
def test_process_of_a_group_exits_without_interpreter_shutdown(rank: int | None) -> None:
    """A torch thread could abort the shutdown. Functions registered with atexit still run."""
    code = """
import atexit
from gpt_cli import processes
status = []
processes.exit_before_shutdown(status)
atexit.register(print, "last words", end="")
class Kept:
    def __del__(self): print(", taken apart")
kept = Kept()
status.append(3)
raise SystemExit(3)
"""
    group_environment = {} if rank is None else {"WORLD_SIZE": "2", "RANK": str(rank)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | group_environment, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (3, "")
    assert done.stdout == "last words" + (", taken apart\n" if rank is None else "")
