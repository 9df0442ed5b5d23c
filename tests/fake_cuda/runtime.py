"""``torch.cuda`` as it would be with a device, for as long as the disguise is worn."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from . import shim
from .device import Arriving, Device, Disguised

# CUDA's names for an H100, and what the program asks of it.
H100 = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3", total_memory=80 * 2**30, major=9, minor=0, multi_processor_count=132
)


@contextlib.contextmanager
def disguised(folder: Path, count: int = 1) -> Iterator[Device]:
    """A context in which this process has ``count`` CUDA devices. ``folder``: where the shim is built, or lies.

    Raises `Unavailable` where that cannot be.
    """
    device = Device(count)
    lifts_cpu_tensors_alone = torch._C._only_lift_cpu_tensors()
    overwrites = torch.__future__.get_overwrite_module_params_on_conversion()
    with shim.put_on(folder), contextlib.ExitStack() as undo:
        for name, stand_in in _stand_ins(device).items():
            undo.enter_context(mock.patch.object(torch.cuda, name, stand_in))
        undo.enter_context(mock.patch.object(Tensor, "pin_memory", _pin_memory(device)))
        # GradScaler and autocast ask whether there is CUDA in words of their own.
        undo.enter_context(mock.patch.object(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False))
        # Lists become tensors on the host first, and travel as they do to a GPU.
        undo.callback(torch._C._set_only_lift_cpu_tensors, lifts_cpu_tensors_alone)
        torch._C._set_only_lift_cpu_tensors(True)
        # Module.to puts new parameters in the place of the old: data of a subclass cannot be put into them.
        undo.callback(torch.__future__.set_overwrite_module_params_on_conversion, overwrites)
        torch.__future__.set_overwrite_module_params_on_conversion(True)
        # The threads that autograd has for devices were made before there was one.
        undo.enter_context(torch.autograd.set_multithreading_enabled(False))
        undo.enter_context(device)
        yield device


def _stand_ins(device: Device) -> dict[str, Any]:
    """What stands in for functions and types of ``torch.cuda``."""
    states = [torch.zeros(16, dtype=torch.uint8) for _ in range(device.count)]
    index = _index_on(device)

    def synchronize(where: Any = None) -> None:
        device.wait("synchronize")
        device.arrive(device.sent_by(index(where)))

    return {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_lazy_init": lambda: None,
        "device_count": lambda: device.count,
        "current_device": lambda: device.current,
        "set_device": lambda where: setattr(device, "current", index(where)),
        "current_stream": lambda where=None: SimpleNamespace(index=index(where)),
        "is_current_stream_capturing": lambda: False,
        "synchronize": synchronize,
        "Event": _event_of(device),
        "get_device_properties": lambda where=None: H100,
        "get_device_name": lambda where=None: H100.name,
        "get_device_capability": lambda where=None: (H100.major, H100.minor),
        "is_bf16_supported": lambda *_, **__: True,
        "empty_cache": lambda: None,
        "memory_allocated": lambda where=None: 0,
        "max_memory_allocated": lambda where=None: 0,
        "reset_peak_memory_stats": lambda where=None: None,
        # Numbers are drawn from the CPU's generator; these states are kept and mean nothing.
        "get_rng_state": lambda where="cuda": states[index(where)].clone(),
        "set_rng_state": lambda state, where="cuda": states[index(where)].copy_(state),
        "manual_seed": lambda seed: None,
        "manual_seed_all": lambda seed: None,
    }


def _index_on(device: Device) -> Callable[[Any], int]:
    def index(where: Any) -> int:
        """Of a device as torch.cuda takes them: a number, a name, a `torch.device`, or None for the current one."""
        if isinstance(where, int):
            return where
        named = None if where is None else torch.device(where).index
        return device.current if named is None else named

    return index


def _event_of(device: Device) -> type:
    class Event:
        """Marks what was sent to the host before it, on one device's stream."""

        def __init__(self, **_: Any) -> None:
            self.before: list[Arriving] = []

        def record(self, stream: Any = None) -> None:
            self.before = device.sent_by(device.current if stream is None else stream.index)

        def synchronize(self) -> None:
            device.wait("event")
            device.arrive(self.before)

    return Event


def _pin_memory(device: Device) -> Callable[..., Tensor]:
    def pin_memory(tensor: Tensor, _: Any = None) -> Tensor:
        if isinstance(tensor, Disguised):
            raise RuntimeError("cannot pin 'torch.cuda.FloatTensor' only dense CPU tensors can be pinned")
        return device.pin(torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype).copy_(tensor))

    return pin_memory
