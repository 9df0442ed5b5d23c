"""A fake CUDA device that computes on the CPU, for tests of CUDA code on machines without a GPU.

Inside ``disguised()``, tensors can be created on ``cuda``. Training and decoding give the CPU's results. Also:

- Operators on tensors of several devices raise, as on CUDA.
- `Device.waits` records each wait of the host for the device, with the line of `gpt` that caused it.
- `Device.launches` counts operators that would launch a kernel. Views do not count.
- A copy to pinned memory leaves NaN (99 for integers) in its buffer until the host waits for the device or its event.
- A device can fail (`Device.failure`).

Not covered: kernel numerics; the attention kernel that CUDA would choose; operators without a CUDA kernel; CUDA graphs
and code compiled for a GPU (tests must patch ``torch.compile``); races between streams; the allocator; NCCL; timing.

It replaces internals of one torch release (`shim.RELEASE`) and compiles a few lines of C++ (shim.cpp) on first use. On
exit, the process has no CUDA again.
"""

from .device import Device
from .runtime import disguised
from .shim import Unavailable, build, why_not

__all__ = ["Device", "Unavailable", "build", "disguised", "why_not"]
