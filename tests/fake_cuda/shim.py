"""The few lines of C++ that the disguise needs (shim.cpp): built on first use, loaded, put on and taken off."""

import contextlib
import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

SOURCE = Path(__file__).with_name("shim.cpp")
RELEASE = "2.13"  # of torch, whose internals the disguise replaces
COMPILERS = ("c++", "g++", "clang++")


class Unavailable(Exception):
    """The disguise cannot be worn here; its text says why."""


def compiler() -> str | None:
    """The C++ compiler that ``CXX`` names, or the first that is there."""
    return next(filter(None, map(shutil.which, filter(None, [os.environ.get("CXX"), *COMPILERS]))), None)


def why_not() -> str | None:
    """Why the disguise cannot be worn here; None where it can."""
    if not torch.__version__.startswith(f"{RELEASE}."):
        return f"the disguise is written for torch {RELEASE}; this is {torch.__version__}"
    if torch.version.cuda or torch.version.hip:
        return "the disguise is for builds of torch without CUDA; this one has CUDA's own device guard"
    if sys.platform != "linux":
        return f"the disguise was tried on Linux alone; this is {sys.platform}"
    if compiler() is None:
        return f"the disguise needs a C++ compiler: none of {', '.join(COMPILERS)} is there, and CXX names none"
    return None


def build(folder: Path) -> Path:
    """The shim in ``folder``, compiled unless it is there. Raises `Unavailable` where it cannot be."""
    if (reason := why_not()) is not None:
        raise Unavailable(reason)
    content = hashlib.sha256(SOURCE.read_bytes() + torch.__version__.encode()).hexdigest()[:16]
    built = folder / f"shim-{content}.so"
    if not built.exists():
        with tempfile.TemporaryDirectory(dir=folder) as place:
            done = subprocess.run(_command(Path(place) / built.name), capture_output=True, text=True, check=False)
            if done.returncode:
                last = (done.stderr.strip() or f"exit status {done.returncode}").splitlines()[-1]
                raise Unavailable(f"the disguise's C++ does not compile here: {last}")
            (Path(place) / built.name).replace(built)  # whole at once: other processes may look for it
    return built


def _command(target: Path) -> list[str | Path]:
    inside = Path(torch.__file__).parent
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"
    flags = ["-std=c++20", "-O0", "-shared", "-fPIC", abi, f"-I{inside / 'include'}", f"-L{inside / 'lib'}"]
    return [compiler() or "c++", *flags, "-o", target, SOURCE, "-lc10", "-ltorch_cpu"]


@functools.cache
def _load(path: Path) -> ctypes.CDLL:
    # Autograd makes a thread for each device that it finds in its first pass, and keeps them: there shall be none.
    torch.ones((), requires_grad=True).backward()  # type: ignore[no-untyped-call]
    return ctypes.CDLL(str(path))


@contextlib.contextmanager
def put_on(folder: Path) -> Iterator[None]:
    """While it lasts, this process takes tensors on CUDA. Raises `Unavailable`."""
    library = _load(build(folder))
    library.put_on()
    try:
        yield
    finally:
        library.take_off()
