"""The C decoder as a library: compiles decoder.c on first use, and describes its structures to ctypes.

`gpt.system.programs` caches the library between commands.
"""

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from gpt.system import programs

SOURCES = [Path(__file__).with_name(name) for name in ("decoder.c", "packing.h", "products.h")]
# Without -ffp-contract=off, the compiler could round the same sum differently in two kernels.
FLAGS = ["-O3", "-std=gnu11", "-ffp-contract=off", "-fPIC", "-shared", "-pthread", "-Wno-psabi"]
NATIVE = ["-mcpu=native"] if platform.machine().lower() in ("arm64", "aarch64") else ["-march=native"]
COMPILE_SECONDS = 120  # Compiling takes about 3 seconds of CPU time.
Note = Callable[[str], None]

_pointer, _int, _long = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64


def _structure(name: str, **fields: Any) -> Any:
    return type(name, (ctypes.Structure,), {"_fields_": list(fields.items())})


# The structures of decoder.c, which documents their fields.
Linear = _structure(
    "Linear", weights=_pointer, scales=_pointer, minimums=_pointer, bias=_pointer, outputs=_int, inputs=_int,
    kind=_int, unused=_int,
)  # fmt: skip
Norm = _structure("Norm", weight=_pointer, bias=_pointer)
Block = _structure(
    "Block", ln_1=Norm, q_norm=Norm, k_norm=Norm, ln_2=Norm, c_attn=Linear, c_proj=Linear, c_fc=Linear,
    mlp_c_proj=Linear, keys=_pointer, values=_pointer, columns=_long, window=_long,
)  # fmt: skip
Model = _structure(
    "Model", n_layer=_int, n_embd=_int, n_head=_int, n_kv_head=_int, head_size=_int, n_inner=_int, is_gated=_int,
    max_rows=_int, epsilon=ctypes.c_float, unused=_int, wte=Linear, lm_head=Linear, position_table=_pointer,
    rope=_pointer, rope_positions=_long, h=_pointer, ln_f=Norm, memory=_pointer,
)  # fmt: skip


def compiler() -> list[str]:
    """Returns the command of the C compiler: ``CC``, by default ``cc``."""
    return shlex.split(os.environ.get("CC", "")) or ["cc"]


def compile(folder: Path, flags: list[str] = NATIVE) -> Path:
    """Compiles the decoder in a folder. Raises OSError if there is no compiler, or if it fails or hangs."""
    command = compiler()
    # On macOS, calling a missing compiler opens an installation dialog.
    is_missing = sys.platform == "darwin" and subprocess.run(["xcode-select", "-p"], capture_output=True).returncode
    if is_missing or shutil.which(command[0]) is None:
        raise OSError(f"there is no C compiler ({command[0]}); install gcc or clang")
    path = folder / "decoder.so"
    words = [*command, *FLAGS, *flags, str(SOURCES[0]), "-o", str(path), "-lm"]
    process = subprocess.Popen(
        words, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True
    )
    try:
        _, errors = process.communicate(timeout=COMPILE_SECONDS)
    except BaseException as error:
        os.killpg(process.pid, signal.SIGKILL)  # The compiler runs other programs.
        process.communicate()
        if isinstance(error, subprocess.TimeoutExpired):
            raise OSError(f"{command[0]} took more than {COMPILE_SECONDS} seconds") from None
        raise
    if process.returncode or not path.is_file():
        lines = [line for line in errors.decode(errors="replace").splitlines() if "error" in line]
        reason = lines[0].strip() if lines else f"status {process.returncode}"
        raise OSError(f"{Path(command[0]).name} failed: {reason}")
    return path


def open_library(path: Path) -> ctypes.CDLL:
    """Loads a compiled decoder. If its folder is mounted without execution, loads a copy in memory."""
    try:
        library = ctypes.CDLL(str(path))
    except OSError:
        if not hasattr(os, "memfd_create"):
            raise
        file = os.memfd_create("gpt-decoder")
        os.write(file, path.read_bytes())
        library = ctypes.CDLL(f"/proc/self/fd/{file}")
    model = ctypes.POINTER(Model)
    for name, result, arguments in (
        ("memory_size", _long, [model]),
        ("forward", None, [model, _int, _pointer, _pointer, _pointer, _pointer, _int]),
        ("unembed", None, [model, _int, _pointer, _pointer, _int]),
        ("pack", _int, [ctypes.POINTER(Linear), _int, _pointer, _long, _long, _pointer, _int]),
        ("restore", None, [_int, _pointer, _long, _long, _pointer, _long, _int, _pointer, _int]),
    ):
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


def _key() -> str:
    """Returns the library's name: a hash of its source, its compiler and this CPU."""
    try:
        cpu = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
        features = [line for line in cpu if line.startswith(("flags", "Features", "CPU part", "model name"))]
    except OSError:
        features = [platform.processor(), torch.backends.cpu.get_cpu_capability()]
    machine = (sys.platform, platform.machine(), features, compiler(), FLAGS, NATIVE)
    content = [path.read_bytes() for path in SOURCES]
    return "decoder-" + hashlib.sha256(repr((content, machine)).encode()).hexdigest()[:32]


def load(note: Note) -> ctypes.CDLL:
    """Returns the decoder for this CPU, compiled now if it is not cached. Raises any compiler or disk error."""

    def build(scratch: Path) -> Path:
        note("compiling the decoder for this CPU: a few seconds, once")
        return compile(scratch)

    return programs.load(_key(), ".so", build, open_library, note)
