"""Programs that torch's compiler makes for this processor, kept between commands.

A program is machine code. The folder that holds them must be the user's alone: whoever can write there can run code as
the user.
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
from typing import Any

import torch
from torch import Tensor

from gpt.errors import UserError
from gpt.files import file_sha256, private_folder, sync_folder, user_folder

Note = Callable[[str], None]
Program = Callable[[list[Tensor]], list[Tensor]]
Graph = tuple[torch.fx.GraphModule, tuple[Any, ...]]  # with inputs as it was traced with
KEPT = 50  # programs, of some 4 MB each
SCRATCH = "making-"  # begins the names of folders where programs are compiled


def find(key: object, trace: Callable[[], Graph], note: Note, what: str, options: Mapping[str, object] = {}) -> Program:
    """Returns the program of a ``key``, which names code, shapes and dtypes, for this torch, processor and number of
    threads. It is opened, or compiled from what ``trace`` returns with further ``options`` of Inductor, which ``note``
    announces, and kept among the `KEPT` that were used last.

    Raises whatever the compiler or the disk raises, and `UserError` for a folder that is open to others.
    """
    folder, name = own_folder(), digest(key)
    for path in folder.glob(f"{name}-*.pt2"):
        if not _is_whole(path):
            note(f"{path} is damaged")
            path.unlink(missing_ok=True)
            continue
        with contextlib.suppress(RuntimeError):  # a system with other libraries, which shares this home, compiled it
            program = _opened(path)
            with contextlib.suppress(OSError):  # of a folder that is read-only, or a file that was just deleted
                os.utime(path)
            return program
    if shutil.which(compiler()) is None:
        raise OSError(f"there is no {compiler()}, a C++ compiler")
    note(f"compiling {what} for this CPU and model shape: about 20 seconds, once")
    with tempfile.TemporaryDirectory(prefix=SCRATCH, dir=folder) as scratch:
        made = compile(trace(), Path(scratch), options)
        with made.open("rb+") as file:
            os.fsync(file.fileno())
        path = folder / f"{name}-{file_sha256(made)}.pt2"
        os.replace(made, path)
    sync_folder(folder)
    with contextlib.suppress(OSError):  # another command deletes them too, or has one open
        _tidy(folder)
    return _opened(path)


def _is_whole(path: Path) -> bool:
    """Whether a program has the sha256 in its name: torch would run a damaged one until it crashes."""
    try:
        return path.stem.endswith(f"-{file_sha256(path)}")
    except (OSError, UserError):  # a bad sector, or no regular file
        return False


def _tidy(folder: Path) -> None:
    """Deletes all programs but those that were used last, and what killed commands left."""
    for old in sorted(folder.glob("*.pt2"), key=lambda each: each.stat().st_mtime)[:-KEPT]:
        old.unlink()
    for left in folder.glob(f"{SCRATCH}*"):
        if time.time() - left.stat().st_mtime > 24 * 3600:
            shutil.rmtree(left, ignore_errors=True)


def compiler() -> str:
    """The name of the C++ compiler that Inductor calls."""
    return os.environ.get("CXX", {"darwin": "clang++", "win32": "cl"}.get(sys.platform, "g++"))


def compiles_unasked() -> bool:
    """Whether programs are compiled without being asked for. Not on macOS, where the name of a compiler that is not
    there opens a window that offers it."""
    return sys.platform != "darwin" and shutil.which(compiler()) is not None


def digest(key: object) -> str:
    """The name of a program."""
    capabilities: dict[str, object] = getattr(torch.cpu, "get_capabilities", dict)()
    machine = (sys.platform, platform.machine(), sorted(capabilities.items()), torch.get_num_threads())
    return hashlib.sha256(repr((torch.__version__, machine, _SETTINGS, key)).encode()).hexdigest()[:32]


# Inductor's. The wrapper only calls kernels, which have a level of their own. Headers would be precompiled in the
# system's temporary folder, 300 MB that others might have put there.
_SETTINGS: Mapping[str, object] = {
    "aot_inductor.package": True,
    "aot_inductor.compile_wrapper_opt_level": "O0",
    "aot_inductor.precompile_headers": False,
    "cpp.vec_isa_ok": True,
}


def compile(graph: Graph, scratch: Path, options: Mapping[str, object] = {}) -> Path:
    """Compiles a program in an empty folder, and returns its file."""
    from torch._inductor.package.package import package_aoti
    from torch._inductor.runtime.cache_dir_utils import temporary_cache_dir

    path = scratch / "program.pt2"
    # The system's temporary folder, where Inductor caches code, may hold code that others put there.
    with warnings.catch_warnings(), temporary_cache_dir(str(scratch)), torch.no_grad():
        warnings.simplefilter("ignore")
        files: Any = torch._inductor.aot_compile(graph[0], graph[1], options={**_SETTINGS, **options})
        package_aoti(str(path), files)
    return path


def _opened(path: Path) -> Program:
    loader: Any = torch._C._aoti.AOTIModelPackageLoader(str(path), "model", True, 1, -1)
    run: Program = loader.boxed_run
    return run


def own_folder() -> Path:
    """Makes the folder of programs, or checks that it is the user's alone."""
    return private_folder(user_folder() / "programs")
