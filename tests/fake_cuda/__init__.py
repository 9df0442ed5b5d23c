"""A fake CUDA device that computes on the CPU, for tests of CUDA code on machines without a GPU.

Inside ``disguised()``, tensors can be created on ``cuda``. Training and decoding give the CPU's results. The device
also imitates and records CUDA:

- Operators on tensors of several devices raise, as on CUDA.
- `Device.waits` records each host wait, with the line of `gpt` that caused it.
- `Device.launches` counts operators that would launch a kernel. Views do not count.
- A pinned buffer contains NaN, or 99 if it stores integers, until the host waits for the copy into the buffer.
- `Device.failure` makes further CUDA calls fail.
- A CUDA graph records operators without running those that write to their inputs. Its replay runs all of them with the
  addresses of the capture, and counts as one launch. A host wait or a copy from the host ends the capture with an error.

Not covered: kernel numerics; the attention kernel that CUDA would choose; operators without a CUDA kernel; code
compiled for a GPU (tests must patch ``torch.compile``); races between streams; the allocator; NCCL; timing.

The device replaces internals of one torch release (`shim.RELEASE`) and compiles a few lines of C++ (shim.cpp) on first
use. Leaving ``disguised()`` restores torch.
"""

from .device import Device
from .runtime import disguised
from .shim import Unavailable, build, why_not

__all__ = ["Device", "Unavailable", "build", "disguised", "why_not"]
