"""Replacements for functions of ``torch.cuda``."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from . import shim
from .device import Device, FakeCudaTensor, PendingCopy

H100 = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3", total_memory=80 * 2**30, major=9, minor=0, multi_processor_count=132
)


@contextlib.contextmanager
def disguised(folder: Path, count: int = 1) -> Iterator[Device]:
    """Gives this process ``count`` CUDA devices. ``folder`` caches the compiled shim.

    Raises `Unavailable`.
    """
    device = Device(count)
    lifts_only_cpu_tensors = torch._C._only_lift_cpu_tensors()
    overwrites = torch.__future__.get_overwrite_module_params_on_conversion()
    with shim.put_on(folder), contextlib.ExitStack() as undo:
        for name, replacement in _replacements(device).items():
            undo.enter_context(mock.patch.object(torch.cuda, name, replacement))
        undo.enter_context(mock.patch.object(Tensor, "pin_memory", _pin_memory(device)))
        # GradScaler and autocast call this function to check for CUDA.
        undo.enter_context(mock.patch.object(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False))
        # As on a GPU, lists become host tensors before the upload.
        undo.callback(torch._C._set_only_lift_cpu_tensors, lifts_only_cpu_tensors)
        torch._C._set_only_lift_cpu_tensors(True)
        # Module.to cannot swap the data of a tensor subclass, so it must replace parameters.
        undo.callback(torch.__future__.set_overwrite_module_params_on_conversion, overwrites)
        torch.__future__.set_overwrite_module_params_on_conversion(True)
        # Autograd has no thread for the fake device.
        undo.enter_context(torch.autograd.set_multithreading_enabled(False))
        undo.enter_context(device)
        yield device


def _replacements(device: Device) -> dict[str, Any]:
    states = [torch.zeros(16, dtype=torch.uint8) for _ in range(device.count)]
    index = _make_device_index(device)

    def synchronize(spec: Any = None) -> None:
        device.wait("synchronize")
        device.complete(device.pending_from(index(spec)))

    return {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_lazy_init": lambda: None,
        "device_count": lambda: device.count,
        "current_device": lambda: device.current,
        "set_device": lambda spec: setattr(device, "current", index(spec)),
        "current_stream": lambda spec=None: SimpleNamespace(index=index(spec)),
        "is_current_stream_capturing": lambda: False,
        "synchronize": synchronize,
        "Event": _make_event_class(device),
        "Stream": lambda spec=None: SimpleNamespace(index=index(spec)),
        "stream": lambda stream: contextlib.nullcontext(),
        "CUDAGraph": lambda: SimpleNamespace(),
        "graph": _make_graph_context(device),
        "graph_pool_handle": lambda: (0, 1),
        "get_device_properties": lambda spec=None: H100,
        "get_device_name": lambda spec=None: H100.name,
        "get_device_capability": lambda spec=None: (H100.major, H100.minor),
        "is_bf16_supported": lambda *_, **__: True,
        "empty_cache": lambda: None,
        "memory_allocated": lambda spec=None: 0,
        "max_memory_allocated": lambda spec=None: 0,
        "reset_peak_memory_stats": lambda spec=None: None,
        # The CPU generates random numbers, so these states are unused.
        "get_rng_state": lambda spec="cuda": states[index(spec)].clone(),
        "set_rng_state": lambda state, spec="cuda": states[index(spec)].copy_(state),
        "manual_seed": lambda seed: None,
        "manual_seed_all": lambda seed: None,
    }


def _make_device_index(device: Device) -> Callable[[Any], int]:
    def index(spec: Any) -> int:
        """Accepts an index, a name, a `torch.device`, or None for the current device."""
        if isinstance(spec, int):
            return spec
        explicit_index = None if spec is None else torch.device(spec).index
        return device.current if explicit_index is None else explicit_index

    return index


def _make_event_class(device: Device) -> type:
    class Event:
        """An event. `synchronize` completes the device-to-host copies that were pending at `record`."""

        def __init__(self, **_: Any) -> None:
            self.pending: list[PendingCopy] = []

        def record(self, stream: Any = None) -> None:
            self.pending = device.pending_from(device.current if stream is None else stream.index)

        def synchronize(self) -> None:
            device.wait("event")
            device.complete(self.pending)

    return Event


def _make_graph_context(device: Device) -> Callable[..., Any]:
    @contextlib.contextmanager
    def capture(graph: Any, **_: Any) -> Iterator[None]:
        device.recording = operators = []
        graph.replay = lambda: device.replay(operators)
        try:
            yield
        finally:
            device.recording = None

    return capture


def _pin_memory(device: Device) -> Callable[..., Tensor]:
    def pin_memory(tensor: Tensor, _: Any = None) -> Tensor:
        if isinstance(tensor, FakeCudaTensor):
            raise RuntimeError("cannot pin 'torch.cuda.FloatTensor' only dense CPU tensors can be pinned")
        return device.pin(torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype).copy_(tensor))

    return pin_memory
