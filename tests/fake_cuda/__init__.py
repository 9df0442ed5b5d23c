"""A fake CUDA device that computes on the CPU, for testing CUDA code on machines without a GPU.

Inside ``disguised()``, tensors can be created on ``cuda``. They report that device, but the CPU computes their values,
so training and decoding give the same results as on the CPU. Also:

- Operators on tensors of several devices raise, as on CUDA.
- `Device.waits` records each time the host waits for the device, with the line of `gpt` that caused it.
- `Device.launches` counts operators that would launch a kernel; views do not count.
- A copy to pinned memory fills its buffer with NaN (99 for integers), until the host waits for an event recorded on the
  device, or for the device.
- A device can fail (`Device.failure`).

It cannot show: the numerics of kernels; which attention kernel CUDA would choose; whether an operator has a CUDA
kernel; CUDA graphs and code of `torch.compile` for a GPU (tests must patch ``torch.compile``); races between streams;
the allocator; NCCL; timing.

It replaces torch internals and supports one release (`shim.RELEASE`). It compiles a few lines of C++ (shim.cpp) on
first use. On exit, the process has no CUDA again.
"""

from .device import Device
from .runtime import disguised
from .shim import Unavailable, build, why_not

__all__ = ["Device", "Unavailable", "build", "disguised", "why_not"]
