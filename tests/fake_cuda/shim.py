"""Builds, loads and installs the C++ part of the fake device (shim.cpp)."""

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
RELEASE = "2.13"  # The torch release whose internals are replaced
COMPILERS = ("c++", "g++", "clang++")


class Unavailable(Exception):
    """The fake device cannot run here."""


def compiler() -> str | None:
    return next(filter(None, map(shutil.which, filter(None, [os.environ.get("CXX"), *COMPILERS]))), None)


def why_not() -> str | None:
    """Returns why the fake device cannot run here, or None."""
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
    """Compiles the shim into ``folder`` once and returns its path. Raises `Unavailable`."""
    if (reason := why_not()) is not None:
        raise Unavailable(reason)
    content = hashlib.sha256(SOURCE.read_bytes() + torch.__version__.encode()).hexdigest()[:16]
    path = folder / f"shim-{content}.so"
    if not path.exists():
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            done = subprocess.run(_command(Path(scratch) / path.name), capture_output=True, text=True, check=False)
            if done.returncode:
                last_line = (done.stderr.strip() or f"exit status {done.returncode}").splitlines()[-1]
                raise Unavailable(f"the disguise's C++ does not compile here: {last_line}")
            # Other processes can build concurrently, so the rename must be atomic.
            (Path(scratch) / path.name).replace(path)
    return path


def _command(target: Path) -> list[str | Path]:
    torch_folder = Path(torch.__file__).parent
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"
    flags = ["-std=c++20", "-O0", "-shared", "-fPIC", abi, f"-I{torch_folder / 'include'}", f"-L{torch_folder / 'lib'}"]
    return [compiler() or "c++", *flags, "-o", target, SOURCE, "-lc10", "-ltorch_cpu"]


@functools.cache
def _load(path: Path) -> ctypes.CDLL:
    # The first backward pass starts autograd's device threads, so it must run before the fake device exists.
    torch.ones((), requires_grad=True).backward()  # type: ignore[no-untyped-call]
    return ctypes.CDLL(str(path))


@contextlib.contextmanager
def put_on(folder: Path) -> Iterator[None]:
    """Makes this process accept CUDA tensors. Raises `Unavailable`."""
    library = _load(build(folder))
    library.install()
    try:
        yield
    finally:
        library.uninstall()
