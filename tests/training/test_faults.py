"""Faults: disks that fail, files that are damaged or forged, runs that are killed. `tests/stress/faults.py` does many."""

import errno
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from conftest import TINY, Done, Gpt, more, one_line_of_what_and_what_next, send
from safetensors.torch import save

import gpt as library
from gpt import events, files
from gpt.errors import Interrupted, WorkError
from gpt.interrupt import Stopped, StopSignal
from gpt.runs import checkpoint, folder, tensors
from gpt.training import checkpointing
from tests.stress import faults

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="kills and limits are POSIX's")
FAST: dict[str, Any] = {**TINY, "dtype": "float32", "vocab_size": 400, "steps": 12, "eval_every": 4, "save_every": 4}


def test_what_we_write_is_what_safetensors_writes() -> None:
    some = {
        "b": torch.arange(6, dtype=torch.float32).view(2, 3),
        "a.é": torch.tensor(1.5),
        "c": torch.tensor([1, 2], dtype=torch.int64),
        "d": torch.tensor([7], dtype=torch.uint8),
        "e": torch.zeros(0, 4),
    }
    ours = b"".join(tensors.pieces({name: tensor.numpy() for name, tensor in some.items()}))
    assert ours == save(some, {"format": "pt"})
    turned = b"".join(tensors.pieces({"x": some["b"].numpy().T}))
    assert turned == save({"x": some["b"].T.contiguous()}, {"format": "pt"})


@pytest.mark.parametrize("every", [7, more(1)])
def test_every_write_and_sync_of_a_save_that_fails(tmp_path: Path, every: int) -> None:
    outcomes = faults.failing_saves(tmp_path, (errno.ENOSPC,), every)
    assert sum(outcomes.values()) > 50 / every
    assert all(outcome.startswith("the old one is intact") for outcome in outcomes), outcomes


def test_everything_is_synced_before_it_takes_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[tuple[str, int]] = []  # what, and the inode to which
    contents = faults.small_checkpoint_files()
    replace, fsync = os.replace, os.fsync

    def renamed(source: Any, target: Any) -> None:
        done.append(("name", Path(source).stat().st_ino))
        replace(source, target)

    def synced(descriptor: int) -> None:
        done.append(("sync", os.fstat(descriptor).st_ino))
        fsync(descriptor)

    monkeypatch.setattr(os, "replace", renamed)
    monkeypatch.setattr(os, "fsync", synced)
    saved = tmp_path / "step-000001"
    checkpoint.write(saved, contents)
    for path in [*saved.iterdir(), saved]:
        inode = path.stat().st_ino
        assert done.index(("sync", inode)) < done.index(("name", inode)), path
    assert done[-2:] == [("name", saved.stat().st_ino), ("sync", tmp_path.stat().st_ino)]


def test_what_the_disk_did_not_keep_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that takes a write and holds something else: the new checkpoint never gets its name."""
    contents, fsync = faults.small_checkpoint_files(), os.fsync

    def lossy(descriptor: int) -> None:
        fsync(descriptor)
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.ftruncate(descriptor, 5)

    monkeypatch.setattr(os, "fsync", lossy)
    with pytest.raises(OSError, match="what was written does not read back the same"):
        checkpoint.write(tmp_path / "step-000001", contents)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="the system cannot be told to forget a file")
def test_what_is_read_back_comes_from_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forgotten: set[int] = set()
    contents, fadvise = faults.small_checkpoint_files(), os.posix_fadvise

    def forgets(descriptor: int, start: int, length: int, how: int) -> None:
        if (start, length, how) == (0, 0, os.POSIX_FADV_DONTNEED):
            forgotten.add(os.fstat(descriptor).st_ino)
        fadvise(descriptor, start, length, how)

    monkeypatch.setattr(os, "posix_fadvise", forgets)
    saved = tmp_path / "step-000001"
    checkpoint.write(saved, contents)
    assert forgotten == {path.stat().st_ino for path in saved.iterdir()}


def test_what_a_killed_save_left_is_in_nobodys_way(tmp_path: Path) -> None:
    for name in (".tmp-step-000001", "step-000001"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "stale").write_text("old")
    with files.whole_folder(tmp_path / "step-000001", replace=True) as beside:
        (beside / "x").write_text("new")
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")] == ["step-000001", "step-000001/x"]


def test_where_the_new_one_cannot_take_its_name_the_old_one_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "step-000001"
    target.mkdir()
    (target / "x").write_text("old")
    replace = os.replace

    def fails(source: Any, to: Any) -> None:
        if Path(source).name == ".tmp-step-000001":
            raise OSError(errno.EIO, "Input/output error")
        replace(source, to)

    monkeypatch.setattr(os, "replace", fails)
    with pytest.raises(OSError, match="Input/output"), files.whole_folder(target, replace=True) as beside:
        (beside / "x").write_text("new")
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]
    assert (target / "x").read_text() == "old"


def test_damaged_copies_are_refused(tmp_path: Path) -> None:
    for do in (faults.damaged_copies, faults.damaged_tokens):
        tried = do(tmp_path, 60)
        assert dict(tried.outcomes) == {"refused": 60}
        assert tried.memory < 2


HOSTILE: list[Callable[[dict[str, Any]], object]] = [
    lambda record: record.update(format=2),
    lambda record: record.update(texts=[1]),
    lambda record: record["settings"].update(unheard_of=1),
    lambda record: record.update(compute={"device": "../x", "dtype": "float32", "threads": 1}),
    lambda record: record.update(compute={"device": "cpu", "dtype": "float32", "threads": 10**9}),
    lambda record: record["resolved"].update(model={"vocab_size": 2**60}),
    lambda record: record.update(sources=[{"name": "/etc/passwd"}]),
    lambda record: record.update(tokenizer={"fingerprint": "0"}),
]


@pytest.mark.parametrize("change", HOSTILE)
def test_a_forged_record_of_a_run(gpt: Gpt, begun: Path, change: Callable[[dict[str, Any]], object]) -> None:
    run = begun
    record = json.loads((run / "run.json").read_text())
    change(record)
    (run / "run.json").write_text(json.dumps(record))
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    done = gpt("train", "--resume", run)
    assert done.code == 2
    one_line_of_what_and_what_next(Done(done.code, done.out, "\n".join(done.err.splitlines()[-2:])), "")
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("data", [b"", b"[" * 100_000, b"null", b"\xff\xfe"])
def test_a_record_that_is_no_json(gpt: Gpt, begun: Path, data: bytes) -> None:
    (begun / "run.json").write_bytes(data)
    one_line_of_what_and_what_next(gpt("train", "--resume", begun), "run.json is damaged")


@pytest.fixture
def begun(run_folder: Path) -> Path:
    """A run that was set up and killed before its first checkpoint."""
    run = Path(shutil.copytree(run_folder, "runs/x", ignore=shutil.ignore_patterns("step-*", "index.json")))
    record = json.loads((run / "run.json").read_text())
    del record["ended"], record["result"]
    (run / "run.json").write_text(json.dumps(record))
    (run / "metrics.jsonl").write_bytes(b"")
    return run


def test_a_result_cannot_point_elsewhere(gpt: Gpt, run_folder: Path, workdir: Path) -> None:
    run = Path(shutil.copytree(run_folder, "runs/x"))
    record = json.loads((run / "run.json").read_text())
    for name in ("../../../etc", "..", "", None, 7, "step-000030/..", "x" * 9999):
        record["result"]["checkpoint"] = name
        (run / "run.json").write_text(json.dumps(record))
        one_line_of_what_and_what_next(gpt("train", "--resume", run), "is not a checkpoint")


# The disk


def full(target: Path, contents: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_no_room_is_said_before_the_first_step(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpointing.shutil, "disk_usage", lambda path: SimpleNamespace(free=500_000))
    heard: list[Any] = []
    with pytest.raises(WorkError, match="a checkpoint needs about .*, but only 0.5 MB are free"):
        library.train(text, out="runs/x", listen=heard.append, **FAST)
    assert not any(isinstance(event, events.StepEvent) for event in heard)
    assert not Path("runs").exists()


def test_a_full_disk_stops_no_training(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps 4 and 8 find no room; step 12 does."""
    tried = mock.Mock(side_effect=[OSError(errno.ENOSPC, "No space left on device")] * 2 + [mock.DEFAULT])
    tried.return_value = None
    write = checkpoint.write
    monkeypatch.setattr(checkpoint, "write", lambda *given: (tried(given[0].name), write(*given)))
    heard: list[Any] = []
    result = library.train(text, out="runs/x", listen=heard.append, **FAST)
    assert result.checkpoint.name == "step-000012"
    assert [call.args[0] for call in tried.call_args_list] == ["step-000004", "step-000008", "step-000012"]
    warnings = [event.text for event in heard if isinstance(event, events.Note) and event.warning]
    assert warnings == ["step 4 could not be saved: No space left on device; the run continues and will try again"]
    assert [event.step for event in heard if isinstance(event, events.StepEvent)] == list(range(1, 13))


def test_a_disk_that_stays_full_is_status_1(gpt: Gpt, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library.train(text, out="runs/one", **{**FAST, "steps": 4})
    monkeypatch.setattr(checkpointing, "ROOM_SECONDS", 0.3)
    monkeypatch.setattr(checkpointing, "ROOM_PAUSE", 0.05)
    write = checkpoint.write
    monkeypatch.setattr(checkpoint, "write", full)
    done = gpt("train", "--resume", "runs/one", "--steps", "8")
    assert done.code == 1
    assert "step 8 could not be saved and is lost: No space left on device" in done.err
    assert "the newest checkpoint is step-000004" in done.err
    assert faults.torn(Path("runs/one")) == []

    monkeypatch.setattr(checkpoint, "write", lambda *given: (full if "training.json" in given[1] else write)(*given))
    done = gpt("train", "--resume", "runs/one")
    assert done.code == 1
    assert "its weights are in runs/one/step-000008" in done.err
    assert gpt("sample", "the", "-m", "runs/one:latest", "-n", "3").code == 0
    monkeypatch.setattr(checkpoint, "write", write)
    assert gpt("train", "--resume", "runs/one").code == 0
    assert folder.can_resume(Path("runs/one/step-000008"))


def test_a_fault_while_a_checkpoint_is_written_is_no_fault_of_the_disk(
    text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "write", mock.Mock(side_effect=RuntimeError("boom")))
    with pytest.raises(RuntimeError, match="boom"):
        library.train(text, out="runs/x", **FAST)


def test_the_wait_for_room_ends_with_a_signal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = mock.Mock(side_effect=full)
    monkeypatch.setattr(checkpoint, "write", tried)
    monkeypatch.setattr(checkpointing, "ROOM_PAUSE", 0.01)
    writer = checkpointing.Writer(tmp_path, 1, -1, lambda step: None, lambda text: None)
    with pytest.raises(WorkError, match="step 4 could not be saved and is lost"):
        writer.last(4, 10, dict, lambda: tried.call_count == 3)
    assert tried.call_count == 3


def test_metrics_last_longer_than_what_tells_their_length(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[tuple[str, int]] = []
    replace, fsync = os.replace, os.fsync
    metrics = Path("runs/x/metrics.jsonl")

    def renamed(source: Any, target: Any) -> None:
        if str(target).endswith("step-000012"):
            done.append(("name", metrics.stat().st_size))
        replace(source, target)

    def synced(descriptor: int) -> None:
        if metrics.exists() and os.fstat(descriptor).st_ino == metrics.stat().st_ino:
            done.append(("sync", os.fstat(descriptor).st_size))
        fsync(descriptor)

    monkeypatch.setattr(os, "replace", renamed)
    monkeypatch.setattr(os, "fsync", synced)
    run = library.train(text, out="runs/x", **{**FAST, "eval_every": 12, "save_every": 12}).run
    state = json.loads((run / "step-000012/training.json").read_text())["state"]
    assert done == [("sync", state["metrics_bytes"]), ("name", state["metrics_bytes"])]


def test_a_signal_that_cannot_be_saved_is_status_1(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def strike(event: Any) -> None:
        if isinstance(event, events.StepEvent) and event.step == 5:
            failing = mock.Mock(side_effect=OSError(errno.EIO, "Input/output error"))
            monkeypatch.setattr(checkpoint, "write", failing)
            send(signal.SIGTERM)

    with pytest.raises(WorkError, match="interrupted at step 5, which could not be saved: Input/output error") as error:
        library.train(text, out="runs/x", listen=strike, **FAST)
    assert "gpt train --resume runs/x" in error.value.hint


def test_metrics_that_cannot_be_written_have_a_gap(text: Path) -> None:
    from gpt.training.logs import Metrics

    class Full:
        def __init__(self, file: Any) -> None:
            self.file, self.full = file, False

        def write(self, data: bytes) -> int:
            return int(self.file.write(data[:5] if self.full else data))

        def __getattr__(self, name: str) -> Any:
            return getattr(self.file, name)

    said: list[str] = []
    metrics = Metrics(text.parent, said.append)
    metrics.file = full = Full(metrics.file)  # type: ignore[assignment]
    metrics.write("one")
    full.full = True
    metrics.write("two, which is long")
    metrics.write("three, which is long")
    full.full = False
    metrics.write("four")
    metrics.close()
    assert (text.parent / "metrics.jsonl").read_text() == "one\nfour\n"
    assert len(said) == 1


# Writing beside training


@pytest.mark.parametrize("until", [6, 8])
def test_training_goes_on_while_a_checkpoint_is_written(
    text: Path, monkeypatch: pytest.MonkeyPatch, until: int
) -> None:
    """The write of step 4 ends only after step 6 is done, or while the save of step 8 waits for it; what it holds is
    step 4 all the same."""
    write = checkpoint.write
    reached = threading.Event()

    def slow(target: Path, contents: Any) -> None:
        if target.name == "step-000004":
            assert reached.wait(60)
            time.sleep(0.3 * (until == 8))  # in which that save would copy what is being written, if it did not wait
        write(target, contents)

    def watch(event: Any) -> None:
        heard.append(event)
        if isinstance(event, events.StepEvent) and event.step == until:
            reached.set()

    heard: list[Any] = []
    plain = library.train(text, out="plain", **FAST, keep=9)
    monkeypatch.setattr(checkpoint, "write", slow)
    beside = library.train(text, out="beside", listen=watch, **FAST, keep=9)
    saves = {event.checkpoint: event.step for event in heard if isinstance(event, events.SaveEvent)}
    assert saves["step-000004"] >= until
    for name in ("model.safetensors", "training.safetensors"):
        one, other = (run / "step-000004" / name for run in (plain.run, beside.run))
        assert one.read_bytes() == other.read_bytes()


def test_what_is_being_written_becomes_whole_though_the_run_fails(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = checkpoint.write
    struck = threading.Event()

    def slow(target: Path, contents: Any) -> None:
        assert struck.wait(60)
        time.sleep(0.5)
        write(target, contents)

    def strike(event: Any) -> None:
        if isinstance(event, events.StepEvent) and event.step == 5:
            struck.set()
            raise RuntimeError("boom")

    monkeypatch.setattr(checkpoint, "write", slow)
    with pytest.raises(RuntimeError, match="boom"):
        library.train(text, out="runs/x", listen=strike, **FAST)
    assert [entry.step for entry in folder.checkpoints(Path("runs/x"))] == [4]
    folder.verify_checksums(Path("runs/x/step-000004"), training=True)


@pytest.mark.slow
def test_a_lock_that_a_dead_process_held_is_free(begun: Path) -> None:
    run = begun
    code = f"from gpt.files import locked; from pathlib import Path; locked(Path({str(run)!r}), '').__enter__(); import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -signal.SIGKILL
    assert (run / ".lock").exists()
    assert library.resume(run).steps == 30


# Whole commands


@pytest.mark.slow
def test_killed_and_interrupted_commands_go_on(tmp_path: Path) -> None:
    """One is killed within a save, one gets a signal; resumed, both end in the state of a third."""
    killed, stopped = faults.many(range(1, 2), tmp_path, faults.killed, faults.stopped)
    assert set(killed) <= {"within a save", "training", "begun", "before run.json", "finished"}, killed
    assert set(stopped) <= {"saved and gone on with", "before the first step", "finished"}, stopped


def test_work_that_is_watched_is_left_off_at_a_signal_and_others_do_what_they_did_before() -> None:
    before = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)}
    done = []
    with StopSignal() as stop, pytest.raises(Stopped):
        for item in stop.watching(range(9)):
            done.append(item)
            if item == 3:
                send(signal.SIGTERM)
    assert done == [0, 1, 2, 3]
    assert stop.signum == signal.SIGTERM
    assert {signum: signal.getsignal(signum) for signum in before} == before


def test_a_second_signal_ends_at_once_and_tears_nothing(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though a checkpoint is being written that takes long."""
    write = checkpoint.write
    let_go = threading.Event()

    def slow(target: Path, contents: Any) -> None:
        let_go.wait(60)
        write(target, contents)

    def strike(event: Any) -> None:
        if isinstance(event, events.StepEvent) and event.step == 8:
            monkeypatch.setattr(checkpoint, "write", slow)
        if isinstance(event, events.StepEvent) and event.step == 10:
            send(signal.SIGINT)
            threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()

    began = time.monotonic()
    with pytest.raises(Interrupted, match="twice") as stop:
        library.train(text, out="runs/x", listen=strike, **FAST)
    assert time.monotonic() - began < 50
    assert stop.value.exit_code == 143
    assert library.load("runs/x").path.name == "step-000004"
    let_go.set()


def test_a_folder_that_has_come_to_be_there_is_not_replaced(tmp_path: Path) -> None:
    """Unless that is meant: between the look at the start of a long work and its end somebody may make one."""
    target = tmp_path / "mine"
    with pytest.raises(FileExistsError), files.whole_folder(target):
        target.mkdir()
        (target / "note.txt").write_text("mine")
    assert (target / "note.txt").read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
