"""Limits of the machine: memory, cores, standard streams, home and current folder."""

import errno
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from conftest import Gpt, one_line_of_what_and_what_next

from gpt.config.device import Compute
from gpt.system import files, peaks
from gpt.system.errors import UserError, is_out_of_memory, is_out_of_threads

posix = pytest.mark.skipif(sys.platform == "win32", reason="a POSIX system")
GIB = 2**30
V1 = (("4", "memory"), ("7", "cpu,cpuacct"))
V2 = (("0", ""),)


def write_machine_files(folder: Path, cgroup: str, root: str, limits: Mapping[str, str], version: int = 2) -> None:
    """Writes /proc and cgroup files for a process in ``cgroup``. The mount shows the hierarchy from ``root`` on.

    ``limits`` maps the paths of files below the mount to their contents.
    """
    proc, mounts = folder / "proc", []
    proc.mkdir()
    for number, names in V2 if version == 2 else V1:
        place = folder / "cgroup" / names
        kind, options = ("cgroup2", "rw,nsdelegate") if version == 2 else ("cgroup", f"rw,{names}")
        mounts.append(f"{number} 25 0:22 {root} {place} rw,nosuid shared:4 - {kind} {kind} {options}")
    (proc / "mountinfo").write_text("\n".join(["22 1 254:0 / / rw,relatime - ext4 /dev/root rw", *mounts]) + "\n")
    hierarchies = V2 if version == 2 else V1
    (proc / "cgroup").write_text("".join(f"{number}:{names}:{cgroup}\n" for number, names in hierarchies))
    for name, text in limits.items():
        path = folder / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")


@pytest.fixture(autouse=True)
def eight_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peaks, "PROC", tmp_path / "proc")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    monkeypatch.setattr(os, "sysconf", lambda name: {"SC_PHYS_PAGES": 64 * GIB // 4096}.get(name, 4096), raising=False)
    monkeypatch.setattr(os, "sysconf_names", {"SC_PHYS_PAGES": 1}, raising=False)


@pytest.mark.parametrize(
    ("cgroup", "root", "version", "limits", "memory", "cores"),
    [
        ("/", "/", 2, {}, 64 * GIB, 8),
        ("/", "/", 2, {"memory.max": str(2 * GIB), "cpu.max": "150000 100000"}, 2 * GIB, 2),
        ("/a/b", "/", 2, {"a/memory.max": str(GIB), "a/b/memory.max": str(3 * GIB)}, GIB, 8),
        ("/a/b", "/", 2, {"other/memory.max": "1", "a/b/c/cpu.max": "1 100000"}, 64 * GIB, 8),
        ("/docker/x", "/docker/x", 2, {"memory.max": str(GIB), "cpu.max": "300000 100000"}, GIB, 3),
        ("/docker/x/job", "/docker/x", 2, {"job/memory.max": str(GIB)}, GIB, 8),
        ("/../y", "/", 2, {"memory.max": str(GIB)}, GIB, 8),
        ("/elsewhere", "/docker/x", 2, {"cpu.max": "100000 100000"}, 64 * GIB, 1),
        ("/", "/", 2, {"memory.max": "nonsense", "cpu.max": ""}, 64 * GIB, 8),
        ("/", "/", 2, {"cpu.max": "1600000 100000", "memory.max": str(128 * GIB)}, 64 * GIB, 8),
        (
            "/k/pod", "/", 1,
            {
                "memory/k/pod/memory.limit_in_bytes": str(2 * GIB), "memory/memory.limit_in_bytes": "9223372036854771712",
                "cpu,cpuacct/k/cpu.cfs_quota_us": "250000", "cpu,cpuacct/k/cpu.cfs_period_us": "100000",
                "cpu,cpuacct/k/pod/cpu.cfs_quota_us": "-1", "cpu,cpuacct/k/pod/cpu.cfs_period_us": "100000",
            },
            2 * GIB, 3,
        ),
    ],
)  # fmt: skip
@posix
def test_memory_and_cores_respect_cgroup_limits(
    cgroup: str, root: str, version: int, limits: dict[str, str], memory: int, cores: int, tmp_path: Path
) -> None:
    write_machine_files(tmp_path, cgroup, root, limits, version)
    assert peaks.host_memory() == memory
    assert peaks.cores() == cores
    assert Compute(torch.device("cpu"), torch.float32, shared_by=2).memory() == memory // 2


@pytest.fixture
def homeless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Simulates a user without HOME and without a name; returns the temporary folder."""
    for name in ("XDG_CACHE_HOME", "LOCALAPPDATA", "HF_HOME", "GPT_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)

    def unknown() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", unknown)
    monkeypatch.setattr(files.tempfile, "gettempdir", lambda: str(tmp_path))
    return tmp_path


@posix
def test_a_user_without_home_gets_a_private_folder(homeless: Path) -> None:
    place = homeless / f"gpt-{os.getuid()}"
    for folder in (files.cache_dir(), files.user_folder(), files.in_home(".cache/huggingface")):
        assert folder.is_relative_to(place)
    assert place.stat().st_mode & 0o777 == 0o700


@posix
@pytest.mark.parametrize("kind", ["open", "link", "file"])
def test_an_unsafe_private_folder_is_refused(kind: str, homeless: Path) -> None:
    place = homeless / f"gpt-{os.getuid()}"
    if kind == "open":
        place.mkdir()
        place.chmod(0o777)
    elif kind == "link":
        (homeless / "other").mkdir(mode=0o700)
        place.symlink_to(homeless / "other")
    else:
        place.touch()
    with pytest.raises((UserError, FileExistsError), match=str(place)):
        files.cache_dir()


@posix
@pytest.mark.parametrize("has_cache", [True, False])
def test_a_read_only_home_is_used_if_it_has_a_cache(
    has_cache: bool, homeless: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Covers a container image whose home has a cache written by another uid."""
    home = homeless / "home"
    cache = home / ("Library/Caches" if sys.platform == "darwin" else ".cache") / "gpt"
    (cache if has_cache else home).mkdir(parents=True)
    monkeypatch.setattr(Path, "home", lambda: home)
    assert files.cache_dir() == cache
    monkeypatch.setattr(os, "access", lambda path, mode: mode == os.F_OK and Path(path).exists())
    assert (files.cache_dir() == cache) == has_cache


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you"),
        RuntimeError("could not create a primitive descriptor for a matmul primitive"),
        RuntimeError("MPS backend out of memory (MPS allocated: 9 GB)"),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
    ],
)
def test_out_of_memory_errors_are_recognized(error: Exception) -> None:
    assert is_out_of_memory(error)
    assert not is_out_of_threads(error)
    assert not is_out_of_memory(OSError(errno.ENOSPC, "full"))
    assert not is_out_of_memory(RuntimeError("can't start new thread"))


def test_failure_to_start_a_thread_is_reported(gpt: Gpt, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("gpt_cli.main.make_app", fail)
    one_line_of_what_and_what_next(gpt("params"), "the system cannot start another thread", 1)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a current folder cannot be removed, or keeps its name")
def test_a_deleted_current_folder_is_an_error(gpt: Gpt, run_folder: Path, workdir: Path) -> None:
    deleted = workdir / "gone"
    deleted.mkdir()
    os.chdir(deleted)
    deleted.rmdir()
    for words in (["train", "text.txt"], ["sample", "-m", run_folder], ["params"], ["data", "list"]):
        one_line_of_what_and_what_next(gpt(*words), "the current folder no longer exists")
    for words in (["--version"], ["train", "--help"], []):
        assert gpt(*words).code == 0


def test_training_processes_need_a_loopback_device(gpt: Gpt, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*args: object, **kwargs: object) -> None:
        raise OSError(errno.ENETUNREACH, "Network is unreachable")

    monkeypatch.setattr(socket, "create_connection", unreachable)
    result = gpt("train", text, "--nproc", "2", "--device", "cpu")
    one_line_of_what_and_what_next(result, "cannot connect to each other at 127.0.0.1: Network is unreachable")
    assert not Path("runs").exists()


@posix
@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_standard_streams_do_not_stop_the_work(closed: str, gpt: Gpt, workdir: Path) -> None:
    """The command must not write output to a file that reused a closed descriptor."""
    Path("text.txt").write_text("some words\n" * 100)
    code = "from gpt_cli.main import run; run()"
    command = [sys.executable, "-c", code, "tokenize", "text.txt", "--tokenizer", "bytes", "-o", "tokens"]
    result = subprocess.run(["sh", "-c", f'exec "$@" {closed}', "sh", *command], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert ("train on it" in result.stdout) == (">" not in closed.replace("2>", ""))
    assert gpt("tokenize", "text.txt", "--tokenizer", "bytes", "-o", "expected").code == 0
    for path in Path("expected").glob("*.ids"):
        assert Path("tokens", path.name).read_bytes() == path.read_bytes()
