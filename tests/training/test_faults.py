"""Disk faults, forged files, killed runs. `tests/stress/faults.py` covers more."""

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
from gpt.config import events
from gpt.runs import checkpoint, folder, tensors
from gpt.system import files
from gpt.system.errors import Interrupted, WorkError
from gpt.system.interrupt import Stopped, StopSignal
from gpt.training import checkpointing
from tests.stress import faults

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="kills and limits are POSIX's")
FAST: dict[str, Any] = {**TINY, "dtype": "float32", "vocab_size": 400, "steps": 12, "eval_every": 4, "save_every": 4}


def test_tensor_files_match_safetensors() -> None:
    example = {
        "b": torch.arange(6, dtype=torch.float32).view(2, 3),
        "a.é": torch.tensor(1.5),
        "c": torch.tensor([1, 2], dtype=torch.int64),
        "d": torch.tensor([7], dtype=torch.uint8),
        "e": torch.zeros(0, 4),
    }
    written = b"".join(tensors.pieces({name: tensor.numpy() for name, tensor in example.items()}))
    assert written == save(example, {"format": "pt"})
    transposed = b"".join(tensors.pieces({"x": example["b"].numpy().T}))
    assert transposed == save({"x": example["b"].T.contiguous()}, {"format": "pt"})


@pytest.mark.parametrize("every", [7, more(1)])
def test_failed_write_or_sync_keeps_the_old_checkpoint(tmp_path: Path, every: int) -> None:
    outcomes = faults.failing_saves(tmp_path, (errno.ENOSPC,), every)
    assert sum(outcomes.values()) > 50 / every
    assert all(outcome.startswith("the old one is intact") for outcome in outcomes), outcomes


def test_files_and_folder_are_synced_before_the_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, int]] = []  # (operation, inode)
    contents = faults.small_checkpoint_files()
    replace, fsync = os.replace, os.fsync

    def record_rename(source: Any, target: Any) -> None:
        calls.append(("name", Path(source).stat().st_ino))
        replace(source, target)

    def record_sync(descriptor: int) -> None:
        calls.append(("sync", os.fstat(descriptor).st_ino))
        fsync(descriptor)

    monkeypatch.setattr(os, "replace", record_rename)
    monkeypatch.setattr(os, "fsync", record_sync)
    saved = tmp_path / "step-000001"
    checkpoint.write(saved, contents)
    for path in [*saved.iterdir(), saved]:
        inode = path.stat().st_ino
        assert calls.index(("sync", inode)) < calls.index(("name", inode)), path
    assert calls[-2:] == [("name", saved.stat().st_ino), ("sync", tmp_path.stat().st_ino)]


def test_data_lost_by_the_disk_is_detected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The new checkpoint is discarded."""
    contents, fsync = faults.small_checkpoint_files(), os.fsync

    def sync_and_truncate(descriptor: int) -> None:
        fsync(descriptor)
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.ftruncate(descriptor, 5)

    monkeypatch.setattr(os, "fsync", sync_and_truncate)
    with pytest.raises(OSError, match="what was written does not read back the same"):
        checkpoint.write(tmp_path / "step-000001", contents)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="the system cannot be told to forget a file")
def test_read_back_bypasses_the_page_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    evicted_inodes: set[int] = set()
    contents, fadvise = faults.small_checkpoint_files(), os.posix_fadvise

    def record_eviction(descriptor: int, start: int, length: int, advice: int) -> None:
        if (start, length, advice) == (0, 0, os.POSIX_FADV_DONTNEED):
            evicted_inodes.add(os.fstat(descriptor).st_ino)
        fadvise(descriptor, start, length, advice)

    monkeypatch.setattr(os, "posix_fadvise", record_eviction)
    saved = tmp_path / "step-000001"
    checkpoint.write(saved, contents)
    assert evicted_inodes == {path.stat().st_ino for path in saved.iterdir()}


def test_leftovers_of_a_killed_save_are_replaced(tmp_path: Path) -> None:
    for name in (".tmp-step-000001", "step-000001"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "stale").write_text("old")
    with files.atomic_folder(tmp_path / "step-000001", replace=True) as temporary:
        (temporary / "x").write_text("new")
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")] == ["step-000001", "step-000001/x"]


def test_failed_rename_restores_the_old_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "step-000001"
    target.mkdir()
    (target / "x").write_text("old")
    replace = os.replace

    def fail_rename(source: Any, destination: Any) -> None:
        if Path(source).name == ".tmp-step-000001":
            raise OSError(errno.EIO, "Input/output error")
        replace(source, destination)

    monkeypatch.setattr(os, "replace", fail_rename)
    with pytest.raises(OSError, match="Input/output"), files.atomic_folder(target, replace=True) as temporary:
        (temporary / "x").write_text("new")
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]
    assert (target / "x").read_text() == "old"


def test_damaged_copies_are_refused(tmp_path: Path) -> None:
    for scenario in (faults.damaged_copies, faults.damaged_tokens):
        report = scenario(tmp_path, 60)
        assert dict(report.outcomes) == {"refused": 60}
        assert report.memory < 2


FORGERIES: list[Callable[[dict[str, Any]], object]] = [
    lambda record: record.update(format=2),
    lambda record: record.update(texts=[1]),
    lambda record: record["settings"].update(unheard_of=1),
    lambda record: record.update(compute={"device": "../x", "dtype": "float32", "threads": 1}),
    lambda record: record.update(compute={"device": "cpu", "dtype": "float32", "threads": 10**9}),
    lambda record: record["resolved"].update(model={"vocab_size": 2**60}),
    lambda record: record.update(sources=[{"name": "/etc/passwd"}]),
    lambda record: record.update(tokenizer={"fingerprint": "0"}),
]


@pytest.mark.parametrize("change", FORGERIES)
def test_forged_run_record_is_refused(gpt: Gpt, killed_run: Path, change: Callable[[dict[str, Any]], object]) -> None:
    run = killed_run
    record = json.loads((run / "run.json").read_text())
    change(record)
    (run / "run.json").write_text(json.dumps(record))
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    done = gpt("train", "--resume", run)
    assert done.code == 2
    one_line_of_what_and_what_next(Done(done.code, done.out, "\n".join(done.err.splitlines()[-2:])), "")
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("data", [b"", b"[" * 100_000, b"null", b"\xff\xfe"])
def test_run_record_that_is_not_json_is_refused(gpt: Gpt, killed_run: Path, data: bytes) -> None:
    (killed_run / "run.json").write_bytes(data)
    one_line_of_what_and_what_next(gpt("train", "--resume", killed_run), "run.json is damaged")


@pytest.fixture
def killed_run(run_folder: Path) -> Path:
    """A run that was killed before its first checkpoint."""
    run = Path(shutil.copytree(run_folder, "runs/x", ignore=shutil.ignore_patterns("step-*", "index.json")))
    record = json.loads((run / "run.json").read_text())
    del record["ended"], record["result"]
    (run / "run.json").write_text(json.dumps(record))
    (run / "metrics.jsonl").write_bytes(b"")
    return run


def test_result_checkpoint_outside_the_run_is_refused(gpt: Gpt, run_folder: Path, workdir: Path) -> None:
    run = Path(shutil.copytree(run_folder, "runs/x"))
    record = json.loads((run / "run.json").read_text())
    for name in ("../../../etc", "..", "", None, 7, "step-000030/..", "x" * 9999):
        record["result"]["checkpoint"] = name
        (run / "run.json").write_text(json.dumps(record))
        one_line_of_what_and_what_next(gpt("train", "--resume", run), "is not a checkpoint")


# Full disks


def raise_disk_full(target: Path, contents: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_low_disk_space_is_reported_before_the_first_step(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpointing.shutil, "disk_usage", lambda path: SimpleNamespace(free=500_000))
    run_events: list[Any] = []
    with pytest.raises(WorkError, match="a checkpoint needs about .*, but only 0.5 MB are free"):
        library.train(text, out="runs/x", listen=run_events.append, **FAST)
    assert not any(isinstance(event, events.StepEvent) for event in run_events)
    assert not Path("runs").exists()


def test_training_continues_on_a_full_disk(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is full at steps 4 and 8; the save at step 12 succeeds."""
    attempts = mock.Mock(side_effect=[OSError(errno.ENOSPC, "No space left on device")] * 2 + [mock.DEFAULT])
    attempts.return_value = None
    write = checkpoint.write
    monkeypatch.setattr(checkpoint, "write", lambda *args: (attempts(args[0].name), write(*args)))
    run_events: list[Any] = []
    result = library.train(text, out="runs/x", listen=run_events.append, **FAST)
    assert result.checkpoint.name == "step-000012"
    assert [call.args[0] for call in attempts.call_args_list] == ["step-000004", "step-000008", "step-000012"]
    warnings = [event.text for event in run_events if isinstance(event, events.Note) and event.warning]
    assert warnings == ["step 4 could not be saved: No space left on device; the next save will try again"]
    assert [event.step for event in run_events if isinstance(event, events.StepEvent)] == list(range(1, 13))


def test_disk_that_stays_full_exits_with_status_1(gpt: Gpt, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library.train(text, out="runs/one", **{**FAST, "steps": 4})
    write = checkpoint.write
    monkeypatch.setattr(checkpoint, "write", raise_disk_full)
    done = gpt("train", "--resume", "runs/one", "--steps", "8")
    assert done.code == 1
    assert "step 8 could not be saved and is lost: No space left on device" in done.err
    assert "the newest checkpoint is step-000004" in done.err
    assert faults.torn(Path("runs/one")) == []

    monkeypatch.setattr(checkpoint, "write", write)
    assert gpt("train", "--resume", "runs/one").code == 0
    assert folder.can_resume(Path("runs/one/step-000008"))


def test_bug_in_a_save_is_not_reported_as_a_disk_fault(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "write", mock.Mock(side_effect=RuntimeError("boom")))
    with pytest.raises(RuntimeError, match="boom"):
        library.train(text, out="runs/x", **FAST)


def test_metrics_are_synced_before_the_checkpoint_that_records_their_length(
    text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, int]] = []
    replace, fsync = os.replace, os.fsync
    metrics = Path("runs/x/metrics.jsonl")

    def record_rename(source: Any, target: Any) -> None:
        if str(target).endswith("step-000012"):
            calls.append(("name", metrics.stat().st_size))
        replace(source, target)

    def record_sync(descriptor: int) -> None:
        if metrics.exists() and os.fstat(descriptor).st_ino == metrics.stat().st_ino:
            calls.append(("sync", os.fstat(descriptor).st_size))
        fsync(descriptor)

    monkeypatch.setattr(os, "replace", record_rename)
    monkeypatch.setattr(os, "fsync", record_sync)
    run = library.train(text, out="runs/x", **{**FAST, "eval_every": 12, "save_every": 12}).run
    state = json.loads((run / "step-000012/training.json").read_text())["state"]
    assert calls == [("sync", state["metrics_bytes"]), ("name", state["metrics_bytes"])]


def test_failed_save_after_a_signal_is_an_error(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def on_event(event: Any) -> None:
        if isinstance(event, events.StepEvent) and event.step == 5:
            failing_write = mock.Mock(side_effect=OSError(errno.EIO, "Input/output error"))
            monkeypatch.setattr(checkpoint, "write", failing_write)
            send(signal.SIGTERM)

    with pytest.raises(WorkError, match="interrupted at step 5, which could not be saved: Input/output error") as error:
        library.train(text, out="runs/x", listen=on_event, **FAST)
    assert "gpt train --resume runs/x" in error.value.hint


def test_metrics_skip_lines_while_the_disk_is_full(text: Path) -> None:
    from gpt.training.logs import Metrics

    class FullableFile:
        def __init__(self, file: Any) -> None:
            self.file, self.is_full = file, False

        def write(self, data: bytes) -> int:
            return int(self.file.write(data[:5] if self.is_full else data))

        def __getattr__(self, name: str) -> Any:
            return getattr(self.file, name)

    warnings: list[str] = []
    metrics = Metrics(text.parent, warnings.append)
    metrics.file = file_on_disk = FullableFile(metrics.file)  # type: ignore[assignment]
    metrics.write("one")
    file_on_disk.is_full = True
    metrics.write("two, which is long")
    metrics.write("three, which is long")
    file_on_disk.is_full = False
    metrics.write("four")
    metrics.close()
    assert (text.parent / "metrics.jsonl").read_text() == "one\nfour\n"
    assert len(warnings) == 1


# Background saves


@pytest.mark.parametrize("until", [6, 8])
def test_training_continues_during_a_save(text: Path, monkeypatch: pytest.MonkeyPatch, until: int) -> None:
    """The save of step 4 ends after step 6, or while step 8 waits to be saved. The files of the delayed save match
    those of an undelayed run."""
    write = checkpoint.write
    step_reached = threading.Event()

    def write_slowly(target: Path, contents: Any) -> None:
        if target.name == "step-000004":
            assert step_reached.wait(60)
            # During this sleep, a save of step 8 that does not wait would overwrite the data.
            time.sleep(0.3 * (until == 8))
        write(target, contents)

    def watch(event: Any) -> None:
        run_events.append(event)
        if isinstance(event, events.StepEvent) and event.step == until:
            step_reached.set()

    run_events: list[Any] = []
    undelayed = library.train(text, out="plain", **FAST, keep=9)
    monkeypatch.setattr(checkpoint, "write", write_slowly)
    delayed = library.train(text, out="beside", listen=watch, **FAST, keep=9)
    saves = {event.checkpoint: event.step for event in run_events if isinstance(event, events.SaveEvent)}
    assert saves["step-000004"] >= until
    for name in ("model.safetensors", "training.safetensors"):
        undelayed_file, delayed_file = (run / "step-000004" / name for run in (undelayed.run, delayed.run))
        assert undelayed_file.read_bytes() == delayed_file.read_bytes()


def test_save_in_progress_completes_when_the_run_fails(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = checkpoint.write
    run_failed = threading.Event()

    def write_slowly(target: Path, contents: Any) -> None:
        assert run_failed.wait(60)
        time.sleep(0.5)
        write(target, contents)

    def on_event(event: Any) -> None:
        if isinstance(event, events.StepEvent) and event.step == 5:
            run_failed.set()
            raise RuntimeError("boom")

    monkeypatch.setattr(checkpoint, "write", write_slowly)
    with pytest.raises(RuntimeError, match="boom"):
        library.train(text, out="runs/x", listen=on_event, **FAST)
    assert [entry.step for entry in folder.checkpoints(Path("runs/x"))] == [4]
    folder.verify_checksums(Path("runs/x/step-000004"), training=True)


@pytest.mark.slow
def test_lock_of_a_dead_process_is_free(killed_run: Path) -> None:
    run = killed_run
    code = f"from gpt.system.files import locked; from pathlib import Path; locked(Path({str(run)!r}), '').__enter__(); import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -signal.SIGKILL
    assert (run / ".lock").exists()
    assert library.resume(run).steps == 30


# Whole commands


@pytest.mark.slow
def test_killed_and_interrupted_commands_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One run is killed during its fourth save, one is interrupted at step 14. Both resume to the state of an
    uninterrupted run."""
    monkeypatch.setattr(faults, "TINY", [*faults.TINY, "--steps", "30"])
    killed_outcomes, stopped_outcomes = faults.many(range(59, 60), tmp_path, faults.killed, faults.stopped)
    assert set(killed_outcomes) <= {"within a save", "training", "begun", "before run.json", "finished"}, (
        killed_outcomes
    )
    assert set(stopped_outcomes) <= {"saved and gone on with", "before the first step", "finished"}, stopped_outcomes


def test_signal_stops_iteration_and_handlers_are_restored() -> None:
    before = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)}
    items = []
    with StopSignal() as stop, pytest.raises(Stopped):
        for item in stop.until_signal(range(9)):
            items.append(item)
            if item == 3:
                send(signal.SIGTERM)
    assert items == [0, 1, 2, 3]
    assert stop.signum == signal.SIGTERM
    assert {signum: signal.getsignal(signum) for signum in before} == before


@pytest.mark.parametrize(
    ("later_signals", "is_final"),
    [
        ([(0.001, signal.SIGHUP)], False),  # The shell and the kernel send SIGHUP when a terminal closes.
        ([(0.001, signal.SIGTERM), (0.002, signal.SIGHUP)], False),
        ([(9, signal.SIGHUP), (99, signal.SIGTERM), (999, signal.SIGTERM)], False),
        ([(0.01, signal.SIGINT)], False),  # A program that forwards Ctrl-C
        ([(0.5, signal.SIGINT)], True),
        ([(0.01, signal.SIGTERM), (0.5, signal.SIGINT)], True),
    ],
)
@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_only_a_later_ctrl_c_is_a_second_request(
    monkeypatch: pytest.MonkeyPatch, first: int, later_signals: list[tuple[float, int]], is_final: bool
) -> None:
    now, calls = 100.0, list[str]()
    monkeypatch.setattr("gpt.system.interrupt.time", SimpleNamespace(monotonic=lambda: now))
    with StopSignal(on_first=lambda signum: calls.append("first"), on_second=lambda signum: calls.append("second")):
        send(first)
        for seconds, signum in later_signals:
            now = 100 + seconds
            send(signum)
    assert calls == ["first", "second"][: 1 + is_final]


def test_second_ctrl_c_exits_without_a_torn_checkpoint(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = checkpoint.write
    release = threading.Event()

    def write_slowly(target: Path, contents: Any) -> None:
        release.wait(600)
        write(target, contents)

    def on_event(event: Any) -> None:
        if isinstance(event, events.StepEvent) and event.step == 8:
            monkeypatch.setattr(checkpoint, "write", write_slowly)
        if isinstance(event, events.StepEvent) and event.step == 10:
            ctrl_c.start()
            send(signal.SIGTERM)
            send(signal.SIGHUP)

    ctrl_c = threading.Timer(1, os.kill, (os.getpid(), signal.SIGINT))
    with pytest.raises(Interrupted, match="twice") as stop:
        library.train(text, out="runs/x", listen=on_event, **FAST)
    ctrl_c.cancel()
    assert stop.value.exit_code == 130
    assert library.load("runs/x").path.name == "step-000004"
    release.set()


def test_folder_created_during_a_write_is_not_replaced(tmp_path: Path) -> None:
    """The folder appears after the first check."""
    target = tmp_path / "mine"
    with pytest.raises(FileExistsError), files.atomic_folder(target):
        target.mkdir()
        (target / "note.txt").write_text("mine")
    assert (target / "note.txt").read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
