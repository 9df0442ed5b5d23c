"""Chooses device, dtype (mixed precision or not) and threads from the machine's capabilities, never from timings."""

import contextlib
import ctypes
import functools
import math
import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, get_args

import torch
from torch import Tensor

from gpt.config.train import DEVICE, MAX_THREADS, Device, Dtype
from gpt.system import waiting
from gpt.system.errors import UserError, did_you_mean
from gpt.system.peaks import cores, host_memory
from gpt.system.words import counted

# Parameters per thread when decoding. On two cores, two threads were faster than one by a factor of 1.11 at 0.9 M
# parameters, 1.25 at 3.7 M, 1.35 at 12 M and 1.51 at 124 M. Next to four other programs, the factor at 0.9 M was 0.4.
PARAMETERS_PER_THREAD = 2_000_000
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # Constants of malloc.h.
MAX_KEPT_BYTES = 2**25  # Maximum threshold that glibc accepts.
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Compute:
    """A device, the dtype of its matrix products, and the number of processes that share it. Training keeps weights in
    float32."""

    device: torch.device
    dtype: torch.dtype
    shared_by: int = 1
    step_threads: int = 0  # CPU threads of decoding steps in C, or 0 if torch computes them with its own.

    @property
    def dtype_name(self) -> str:
        """``float32``, ``bfloat16`` or ``float16``."""
        return str(self.dtype).removeprefix("torch.")

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        """Returns a context in which matrix products run in ``dtype``."""
        if self.dtype == torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=self.dtype)

    def memory(self) -> int:
        """Returns this process's share of the device's memory in bytes. Counts all memory, because free memory varies
        between runs."""
        is_gpu = self.device.type == "cuda"
        total = torch.cuda.get_device_properties(self.device).total_memory if is_gpu else host_memory()
        return int(total) // self.shared_by

    def describe(self) -> str:
        """Returns a description such as ``cpu, 2 threads, bfloat16``."""
        if self.device.type == "cuda":
            return f"{torch.cuda.get_device_name(self.device)}, {self.dtype_name}"
        count = self.step_threads or torch.get_num_threads()
        threads = f", {counted(count, 'thread')}" if self.device.type == "cpu" else ""
        return f"{self.device.type}{threads}, {self.dtype_name}"


def trim_memory() -> None:
    """Returns freed memory to the system. Only CUDA and glibc keep it and can return it."""
    torch.cuda.empty_cache()
    with contextlib.suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)


def upload(values: Any, device: torch.device) -> Tensor:
    """Copies an array or nested lists to a device. Uses pinned memory for a GPU, so that the host does not wait."""
    tensor = torch.as_tensor(values)
    if device.type != "cuda":
        return tensor.to(device)
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor).to(device, non_blocking=True)


class Download:
    """An asynchronous copy of tensors on one device to the host, packed into one transfer on a GPU.

    Tensors must be float32, or integers below 2³¹.
    """

    def __init__(self, *tensors: Tensor) -> None:
        self.arrived: torch.cuda.Event | None = None  # None if `read` copies synchronously
        self._tensors = tensors
        if tensors[0].device.type == "cuda":
            bits = [(tensor.float() if tensor.is_floating_point() else tensor.int()).flatten() for tensor in tensors]
            packed = torch.cat([tensor.view(torch.int32) for tensor in bits])
            self._host = torch.empty(len(packed), dtype=torch.int32, pin_memory=True).copy_(packed, non_blocking=True)
            self.arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            # The tensors' device may not be the current device.
            self.arrived.record(torch.cuda.current_stream(packed.device))

    def read(self, wait: Callable[[torch.cuda.Event], object] = lambda event: event.synchronize()) -> list[Any]:
        """Returns each tensor as a number or nested lists. ``wait`` blocks until the device reaches an event."""
        if self.arrived is None:
            return [tensor.tolist() for tensor in self._tensors]
        wait(self.arrived)
        parts = torch.split(self._host, [tensor.numel() for tensor in self._tensors])
        return [
            (part.view(torch.float32) if tensor.is_floating_point() else part).view(tensor.shape).tolist()
            for part, tensor in zip(parts, self._tensors, strict=True)
        ]


def random_states(device: torch.device) -> dict[str, Tensor]:
    """Returns the states of torch's random generators on the host and on the GPU."""
    states = {"torch": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    elif device.type == "mps":
        states["mps"] = torch.mps.get_rng_state()
    return states


def set_random_states(device: torch.device, states: Mapping[str, Tensor]) -> None:
    """Restores the states of the random generators on the host and on ``device``. Ignores states of other devices.
    Raises TypeError or RuntimeError."""
    torch.set_rng_state(states["torch"].cpu())
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"].cpu(), device)
    elif device.type == "mps" and "mps" in states:
        torch.mps.set_rng_state(states["mps"].cpu())


def pick(device: str = "auto", dtype: str = "auto", *, training: bool = False) -> Compute:
    """Chooses the device and dtype. Raises `UserError` if this machine does not have them.

    On a CPU, ``auto`` means bfloat16 for training if the processor multiplies it natively, and otherwise float32: for
    inference, exactness is worth more than speed.
    """
    chosen = _device(device)
    if dtype == "auto":
        if chosen.type == "cuda":
            use_bfloat16 = has_bfloat16_cores(chosen)
        else:
            use_bfloat16 = chosen.type == "cpu" and training and has_native_bfloat16()
        return Compute(chosen, torch.bfloat16 if use_bfloat16 else torch.float32)
    if dtype not in DTYPES:
        raise UserError(f'there is no dtype "{dtype}"', did_you_mean(dtype, get_args(Dtype)))
    if dtype == "float16" and chosen.type == "cpu":
        message = "float16 is slow on a CPU" + (", and overflows in training" if training else "")
        raise UserError(message, "use bfloat16 or float32 on the CPU")
    return Compute(chosen, DTYPES[dtype])


def _device(name: str) -> torch.device:
    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if name == "auto":
        return torch.device(next(kind for kind in available if available[kind]))
    match = re.fullmatch(DEVICE, name)
    if match is None:
        raise UserError(f'there is no device "{name}"', did_you_mean(name, get_args(Device)))
    if not available[match[1]] or (match[2] and match[1] == "cuda" and int(match[2][1:]) >= torch.cuda.device_count()):
        names = ", ".join(kind for kind in available if available[kind])
        raise UserError(f'this machine (or this build of torch) has no device "{name}"', f"available: {names}")
    return torch.device(name)


def use_threads(compute: Compute, requested: int | None = None, parameters: int | None = None) -> None:
    """Sets the number of CPU threads: ``requested``, else ``OMP_NUM_THREADS``, else torch's default or the available
    cores, whichever is less. For decoding with a model of ``parameters``, the default is at most one thread per
    `PARAMETERS_PER_THREAD` parameters, because decoding steps are short. Starts `gpt.system.waiting`. Raises
    `UserError` for an invalid number."""
    if requested is not None and not 1 <= requested <= MAX_THREADS:
        raise UserError(f"threads is {requested:,}; it must be between 1 and {MAX_THREADS:,}")
    if compute.device.type != "cpu":
        return
    if _lent_threads:
        torch.set_num_threads(_lent_threads.pop())
    if requested is None and not os.environ.get("OMP_NUM_THREADS"):
        if parameters is not None:
            requested = min(_torch_threads(), cores(), math.ceil(parameters / PARAMETERS_PER_THREAD))
        elif cores() < torch.get_num_threads():
            requested = cores()
    if requested is not None:
        _torch_threads()
        torch.set_num_threads(requested)
    waiting.watch()


_lent_threads: list[int] = []  # Torch's threads before `lend_threads`, until the next `use_threads`.


def lend_threads(compute: Compute) -> Compute:
    """Gives torch's threads to decoding steps in C, and leaves torch one: its threads would spin after each operation
    between two steps, on cores that the next step needs."""
    _lent_threads.append(torch.get_num_threads())
    torch.set_num_threads(1)
    return replace(compute, step_threads=_lent_threads[-1])


def keep_freed_memory() -> None:
    """Makes glibc keep freed blocks of up to `MAX_KEPT_BYTES` for reuse. Does nothing on other platforms.

    Every training step allocates the same activations. If glibc returned them to the system, every 4 KiB would cost a
    page fault: 20,000 per step of `micro`, a fifth of its time.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
        mallopt(M_MMAP_THRESHOLD, MAX_KEPT_BYTES)


@functools.cache
def _torch_threads() -> int:
    """Returns torch's default number of threads."""
    return torch.get_num_threads()


def has_bfloat16_cores(device: torch.device) -> bool:
    """Whether a GPU multiplies bfloat16 matrices in hardware: Ampere (2020) and newer."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 8


def has_native_bfloat16() -> bool:
    """Whether this processor multiplies bfloat16 matrices in hardware (AMX or AVX512-BF16).

    Emulated bfloat16 is slower than float32 (pytorch#86270).
    """
    capabilities: dict[str, object] = getattr(torch.cpu, "get_capabilities", dict)()
    return bool(capabilities.get("amx_bf16") or capabilities.get("avx512_bf16"))
