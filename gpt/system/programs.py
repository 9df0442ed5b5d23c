"""Caches programs that compilers build for this processor: torch's for training, and the C compiler for decoding.

Only the user can access the cache folder, because gpt runs the machine code in it.
"""

import contextlib
import hashlib
import os
import platform
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from gpt.system.errors import UserError
from gpt.system.files import file_sha256, private_folder, sync_folder, user_folder

Note = Callable[[str], None]
T = TypeVar("T")
Program = Callable[[list[Tensor]], list[Tensor]]
Graph = tuple[torch.fx.GraphModule, tuple[Any, ...]]  # A module and its example inputs.
MAX_PROGRAMS = 50  # Maximum number of cached programs, about 4 MB each.
SCRATCH = "making-"  # Name prefix of compilation folders.


def find(key: object, trace: Callable[[], Graph], note: Note, what: str) -> Program:
    """Returns a program for this torch, processor and number of threads. ``key`` identifies its code, shapes and
    dtypes. Loads the program from the cache. If it is not cached, calls ``note`` and compiles the graph from ``trace``.
    The cache keeps the `MAX_PROGRAMS` most recently used programs.

    Raises any compiler or disk error, and `UserError` for a folder that others can access.
    """

    def build(scratch: Path) -> Path:
        if shutil.which(compiler()) is None:
            raise OSError(f"there is no {compiler()}, a C++ compiler")
        note(f"compiling {what} for this CPU and model shape: about 20 seconds, once")
        return compile(trace(), scratch)

    return load(digest(key), ".pt2", build, lambda path: _open(path), note)


def load(name: str, suffix: str, build: Callable[[Path], Path], open: Callable[[Path], T], note: Note) -> T:
    """Opens the program ``name`` from the cache. If it is not cached, calls ``build`` with an empty folder, in which it
    writes the program."""
    folder = own_folder()
    for path in folder.glob(f"{name}-*{suffix}"):
        if not _is_intact(path):
            note(f"{path} is damaged")
            path.unlink(missing_ok=True)
            continue
        # Loading fails if another system that shares this home folder compiled the program.
        with contextlib.suppress(RuntimeError, OSError):
            program = open(path)
            with contextlib.suppress(OSError):  # The folder is read-only, or the file was just deleted.
                os.utime(path)
            return program
    with tempfile.TemporaryDirectory(prefix=SCRATCH, dir=folder) as scratch:
        built = build(Path(scratch))
        with built.open("rb+") as file:
            os.fsync(file.fileno())
        path = folder / f"{name}-{file_sha256(built)}{suffix}"
        os.replace(built, path)
    sync_folder(folder)
    with contextlib.suppress(OSError):  # Another command is deleting files, or has one open.
        _tidy(folder)
    return open(path)


def _is_intact(path: Path) -> bool:
    """Whether a program matches the sha256 in its name. Damaged programs could crash the process."""
    try:
        return path.stem.endswith(f"-{file_sha256(path)}")
    except (OSError, UserError):  # A bad sector, or not a regular file.
        return False


def _tidy(folder: Path) -> None:
    """Deletes the least recently used programs and the leftovers of killed commands."""
    programs = [path for path in folder.iterdir() if path.suffix in (".pt2", ".so")]
    for program in sorted(programs, key=lambda path: path.stat().st_mtime)[:-MAX_PROGRAMS]:
        program.unlink()
    for leftover in folder.glob(f"{SCRATCH}*"):
        if time.time() - leftover.stat().st_mtime > 24 * 3600:
            shutil.rmtree(leftover, ignore_errors=True)


def compiler() -> str:
    """Returns the name of the C++ compiler that Inductor calls."""
    return os.environ.get("CXX", {"darwin": "clang++", "win32": "cl"}.get(sys.platform, "g++"))


def compiles_by_default() -> bool:
    """Whether to compile by default: not on macOS, where calling a missing compiler opens an installation dialog."""
    return sys.platform != "darwin" and shutil.which(compiler()) is not None


def digest(key: object) -> str:
    """Returns a program's name: a hash of the key, the processor, the number of threads, the torch version and
    `_SETTINGS`."""
    capabilities: dict[str, object] = getattr(torch.cpu, "get_capabilities", dict)()
    machine = (sys.platform, platform.machine(), sorted(capabilities.items()), torch.get_num_threads())
    return hashlib.sha256(repr((torch.__version__, machine, _SETTINGS, key)).encode()).hexdigest()[:32]


# Inductor settings. The wrapper only calls kernels, so it needs no optimization. Precompiled headers would take 300 MB
# in the system's temporary folder, where other users could plant them.
_SETTINGS: Mapping[str, object] = {
    "aot_inductor.package": True,
    "aot_inductor.compile_wrapper_opt_level": "O0",
    "aot_inductor.precompile_headers": False,
    "cpp.vec_isa_ok": True,
}


def compile(graph: Graph, scratch: Path) -> Path:
    """Compiles a program in an empty folder and returns its file."""
    from torch._inductor.package.package import package_aoti
    from torch._inductor.runtime.cache_dir_utils import temporary_cache_dir

    path = scratch / "program.pt2"
    # Inductor's default cache is in the system's temporary folder, where other users could plant code.
    with warnings.catch_warnings(), temporary_cache_dir(str(scratch)), torch.no_grad():
        warnings.simplefilter("ignore")
        files: Any = torch._inductor.aot_compile(graph[0], graph[1], options=dict(_SETTINGS))
        package_aoti(str(path), files)
    return path


def _open(path: Path) -> Program:
    loader: Any = torch._C._aoti.AOTIModelPackageLoader(str(path), "model", True, 1, -1)
    run: Program = loader.boxed_run
    return run


def own_folder() -> Path:
    """Creates or checks the folder of programs."""
    return private_folder(user_folder() / "programs")
