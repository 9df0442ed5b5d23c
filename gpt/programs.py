"""Programs that torch's compiler makes for this processor, kept between commands.

A program is machine code. The folder that holds them must be the user's alone: whoever can write there can run code as
the user.
"""

import hashlib
import os
import platform
import stat
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Note = Callable[[str], None]
Program = Callable[[list[Tensor]], list[Tensor]]


def find(key: object, export: Callable[[], torch.export.ExportedProgram], note: Note, what: str) -> Program:
    """The program of a ``key``, which names code, shapes and dtypes: opened, or compiled from ``export`` and kept;
    ``note`` is told before. It is for this torch, processor and number of threads. Raises whatever the compiler or the
    disk raises: `OSError` for a folder that is open to others."""
    path = own_folder() / f"{digest(key)}.pt2"
    try:
        return _opened(path)
    except RuntimeError:  # there is none, or it is damaged
        note(f"compiling {what} for this processor and shape: some 20 seconds, once")
        with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
            os.replace(compile(export(), Path(scratch)), path)
    return _opened(path)


def digest(key: object) -> str:
    """The name of a program."""
    capabilities: dict[str, object] = getattr(torch.cpu, "get_capabilities", dict)()
    machine = (sys.platform, platform.machine(), sorted(capabilities.items()), torch.get_num_threads())
    return hashlib.sha256(repr((torch.__version__, machine, _SETTINGS, key)).encode()).hexdigest()[:32]


# Inductor's. The processor's own flags say which instructions there are; trying each with the compiler takes seconds.
_SETTINGS: Mapping[str, object] = {"cpp.vec_isa_ok": True}


def compile(exported: torch.export.ExportedProgram, scratch: Path) -> Path:
    """Compiles a program in an empty folder, and returns its file."""
    from unittest import mock  # only to compile

    path = scratch / "program.pt2"
    own = {"TORCHINDUCTOR_CACHE_DIR": str(scratch)}  # no code from elsewhere
    with warnings.catch_warnings(), mock.patch.dict(os.environ, own), torch.no_grad():
        warnings.simplefilter("ignore")
        torch._inductor.aoti_compile_and_package(exported, package_path=str(path), inductor_configs=dict(_SETTINGS))
    return path


def _opened(path: Path) -> Program:
    loader: Any = torch._C._aoti.AOTIModelPackageLoader(str(path), "model", True, 1, -1)
    run: Program = loader.boxed_run
    return run


def cache_folder() -> Path:
    """The folder of programs."""
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or "~/AppData/Local"
    else:
        base = os.environ.get("XDG_CACHE_HOME") or ("~/Library/Caches" if sys.platform == "darwin" else "~/.cache")
    return Path(base).expanduser() / "gpt" / "blocks"


def own_folder() -> Path:
    """Makes the folder of programs, or sees that it is the user's alone."""
    folder = cache_folder()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise OSError(f"{folder} is not a folder")
    if hasattr(os, "getuid") and (found.st_uid != os.getuid() or found.st_mode & 0o077):
        raise OSError(f"{folder} is open to others, who could put code there (chmod 700 it, or remove it)")
    return folder
