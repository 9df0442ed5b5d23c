"""Unusual environments: no shared memory, hang-ups, ignored signals, hostile current folders, odd file names."""

import contextlib
import errno
import io
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from conftest import FAST, TINY, Gpt, make_text, more, one_line_of_what_and_what_next, send, train
from ranks import to_options

import gpt as library
from gpt.config import events
from gpt.system import files
from gpt.system.errors import Interrupted, WorkError
from gpt.system.interrupt import SIGNALS, StopSignal, handled_signals

posix = pytest.mark.skipif(sys.platform == "win32", reason="Windows has other signals and names")
SETTINGS = to_options(TINY)
BYTES_NAME = "b\udcff.txt"  # The byte 0xff, as in names from old archives


# /dev/shm


@pytest.fixture
def no_semaphores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes semaphores fail, as they do if /dev/shm is full, read-only or missing."""

    def raise_no_space(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("multiprocessing.synchronize.SemLock.__init__", raise_no_space)


def test_checkpoints_need_no_shared_memory(no_semaphores: None, text: Path) -> None:
    result, _ = train(text, steps=4, save_every=2)
    assert library.load(f"{result.run}:step-4").generate("the", max_tokens=3)


def test_disk_errors_name_the_failing_path(workdir: Path) -> None:
    outside_error = OSError(errno.ENOSPC, "No space left on device", "/elsewhere/pool")
    with pytest.raises(WorkError, match="cannot write /elsewhere/pool: No space"), files.disk_errors(Path("run/step")):
        raise outside_error
    inside_error = OSError(errno.ENOSPC, "No space left on device", str(workdir / "run" / ".tmp-step" / "x"))
    with pytest.raises(WorkError, match="cannot write run/step: No space"), files.disk_errors(Path("run/step")):
        raise inside_error


# Modules in the current folder

SHADOWS = ("gpt", "gpt_cli", "gpt_data", "torch", "numpy", "jinja2", "sitecustomize", "usercustomize")


@posix
@pytest.mark.slow
def test_modules_in_the_current_folder_are_not_imported(workdir: Path) -> None:
    """Runs commands that start processes: for ranks, multiprocessing's resource tracker and chat templates."""
    for name in {*sys.stdlib_module_names, *SHADOWS} - {"__main__"}:
        Path(f"{name}.py").write_text(f"open('IMPORTED', 'a').write({name!r} + '\\n')\nraise SystemExit(77)\n")
    message = '{"messages": [{"role": "user", "content": "%s"}, {"role": "assistant", "content": "%s"}]}\n'
    Path("chat.jsonl").write_text("".join(message % pair for pair in pairwise(make_text(3000).split())), "utf-8")
    train_options = [*SETTINGS, "--steps", "2", "--quiet"]
    tokenizer_options = ["--vocab-size", "300"]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONSAFEPATH"}
    command = shutil.which("gpt", path=Path(sys.executable).parent)
    assert command is not None
    for args in (
        ["train", "chat.jsonl", *train_options, *tokenizer_options, "--chat", "--nproc", "2", "-o", "chat"],
        ["sample", "-i", "-m", "chat", "-n", "2"],
    ):
        result = subprocess.run([command, *args], input=b"hello\n", capture_output=True, env=environment, timeout=200)
        assert result.returncode == 0, (args, result.stderr)
        assert not Path("IMPORTED").exists(), (args, Path("IMPORTED").read_text())


# Signals


@posix
@pytest.mark.parametrize("signum", SIGNALS)
def test_a_signal_saves_the_run(text: Path, signum: int) -> None:
    def send_at_step_3(event: Any) -> None:
        if isinstance(event, events.StepEvent) and event.step == 3:
            send(signum)

    with pytest.raises(Interrupted, match="saved in") as interrupted:
        library.train(text, listen=send_at_step_3, **FAST, steps=50, eval_every=100)
    assert interrupted.value.exit_code == 128 + signum
    assert library.load("runs/book").path.name.startswith("step-0000")


@posix
@pytest.mark.parametrize("signum", SIGNALS)
def test_ignored_signals_stay_ignored(signum: int) -> None:
    before = signal.signal(signum, signal.SIG_IGN)
    try:
        with StopSignal(at_once=True) as stop:
            send(signum)
        assert stop.signum is None
        assert signum not in handled_signals()
        assert signal.getsignal(signum) is signal.SIG_IGN
    finally:
        signal.signal(signum, before)
    assert signum in handled_signals()


@posix
@pytest.mark.parametrize("signum", SIGNALS)
def test_interrupted_eval_leaves_no_files(
    run_folder: Path, text: Path, monkeypatch: pytest.MonkeyPatch, signum: int
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(text.parent))
    model = library.load(run_folder)
    for moment in ("listen", "on_window"):  # during tokenization, during scoring
        with pytest.raises(Interrupted, match="^interrupted$") as interrupted:
            model.evaluate_files([str(text)], **{moment: lambda *_: send(signum)})
        assert interrupted.value.exit_code == 128 + signum
        assert [path.name for path in text.parent.iterdir()] == ["book.txt"]


SHELLS = {"none": [], "bash": ["bash", "--norc", "-i"], "dash": ["dash", "-i"], "zsh": ["zsh", "-f", "-i"]}


@posix
@pytest.mark.slow
@pytest.mark.parametrize(
    ("shell", "processes"),
    [("none", 1), ("bash", 1), more("dash", 1), more("zsh", 1), more("none", 2), more("bash", 2)],
)
def test_closing_the_terminal_saves_the_run(text: Path, shell: str, processes: int) -> None:
    """Both the kernel and an interactive shell send SIGHUP, and all later writes to the terminal fail."""
    import pty

    if shell != "none" and not shutil.which(shell):
        pytest.skip(f"{shell} is not installed")
    leader, terminal = pty.openpty()
    os.set_blocking(leader, False)
    options = ["--vocab-size", "300", "--steps", "1000000", "--teachers", "0", "--compile", "off", "-o", "run"]
    code = "from gpt_cli.main import run; run()"
    words = [sys.executable, "-c", code, "train", str(text), *SETTINGS, *options, "--nproc", str(processes)]
    process = subprocess.Popen(
        SHELLS[shell] or words, stdin=terminal, stdout=terminal, stderr=terminal, start_new_session=True,
        preexec_fn=lambda: _take_terminal(terminal),
    )  # fmt: skip
    os.close(terminal)
    if shell != "none":
        os.write(leader, f"{shlex.join(words)}\n".encode())
    metrics, output = Path("run/metrics.jsonl"), b""

    def wait_for(line: bytes) -> None:
        nonlocal output
        end = time.monotonic() + 100
        while not (metrics.exists() and line in metrics.read_bytes()):
            assert time.monotonic() < end, output
            time.sleep(0.05)
            with contextlib.suppress(OSError):
                output += os.read(leader, 65536)

    wait_for(b'"step": 5')
    os.close(leader)
    if shell == "none":  # A shell's SIGHUP arrives milliseconds after the kernel's, or at the same time.
        for _ in range(5):
            time.sleep(0.004)
            process.send_signal(signal.SIGHUP)
    wait_for(b'"reason": "signal"')
    process.wait(60)
    # After the run has ended, its handlers are gone, and a late SIGHUP kills the process. Shells see the same status.
    assert shell != "none" or process.returncode in (128 + signal.SIGHUP, -signal.SIGHUP)
    assert library.load("run").path.name.startswith("step-")


def _take_terminal(terminal: int) -> None:
    import fcntl
    import termios

    fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)


def test_unwritable_stderr_does_not_stop_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    from gpt_cli.show import render, terminal

    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(sys, "stderr", Gone())
    console = terminal.stderr()
    console.print("step 1")
    console.print("step 2")
    render.note("done")


# Names


@posix
@pytest.mark.skipif(sys.platform == "darwin", reason="macOS has no names that are not UTF-8")
def test_text_names_need_not_be_utf8(gpt: Gpt) -> None:
    Path(BYTES_NAME).write_text(make_text(), encoding="utf-8")
    result = gpt("train", BYTES_NAME, *SETTINGS, "--vocab-size", "300", "--steps", "2", "--quiet")
    assert result.code == 0, result.err
    assert Path("runs/b_").is_dir()
    assert gpt("sample", "the", "-n", "2").code == 0
    assert gpt("train", "--resume", "runs/b_").code == 0
    assert gpt("report").code == 0
    assert gpt("eval", BYTES_NAME, "-m", "runs/b_", "--quiet").code == 0
    Path("runs/b_").rename("m\udcff")
    one_line_of_what_and_what_next(gpt("sample", "the", "-m", "m\udcff"), "is not UTF-8")


@posix
@pytest.mark.parametrize(
    "words",
    [
        ["train", "book.txt", "--steps", "1", *SETTINGS, "--out", "r\udcff"],
        ["tokenize", "book.txt", "--tokenizer", "bytes", "-o", "r\udcff"],
        ["tokenizer", "train", "book.txt", "-o", "r\udcff"],
    ],
)
def test_output_names_must_be_utf8(gpt: Gpt, text: Path, words: list[str]) -> None:
    one_line_of_what_and_what_next(gpt(*words), "is not UTF-8")
    assert [path.name for path in Path().iterdir()] == ["book.txt"]


@pytest.mark.parametrize(
    ("name", "usable"),
    [
        ("book", "book"), ("b\udcffk", "b_k"), ("a\nb\x1b[2J", "a_b_[2J"), ("книга" * 60, "книга" * 10),
        ("می‌خواهم", "می‌خواهم"),
    ],
)  # fmt: skip
def test_file_names_are_made_usable(name: str, usable: str) -> None:
    assert files.usable_name(name) == usable


@pytest.mark.parametrize("name", ["x" * 250 + ".html", "я" * 125 + ".html"])
def test_names_can_have_255_bytes(gpt: Gpt, run_folder: Path, text: Path, name: str) -> None:
    assert gpt("inspect", "neighbors", "the", "-m", run_folder, "-o", name).code == 0
    folder = name[:-5] + "12345"
    assert len(os.fsencode(folder)) == 255
    assert gpt("export", "-m", run_folder, "-o", folder).code == 0
    assert gpt("tokenize", text, "--tokenizer", "bytes", "-o", folder[:-1] + "6").code == 0
    assert not list(Path().glob(".tmp-*"))


# Locks and syncs


@posix
@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_an_error(
    gpt: Gpt, text: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    import fcntl

    def refuse(*args: Any) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", refuse)
    result = gpt("train", text, *SETTINGS, "--steps", "1")
    one_line_of_what_and_what_next(result, "runs/book is on a file system without locks")
    assert not Path("runs").exists()


def test_writing_a_file_syncs_its_parent_folders(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[Path] = []
    monkeypatch.setattr(files, "sync_folder", lambda path: synced.append(path.absolute()))
    files.make_folder(Path("runs/a/b"))
    assert synced == [workdir / "runs" / "a", workdir / "runs", workdir]
    synced.clear()
    files.write_file(Path("runs/page.html"), b"")
    assert synced == [workdir / "runs"]
