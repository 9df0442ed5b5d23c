"""A CUDA device that is the CPU in disguise, for tests of code for CUDA on machines without one.

In ``disguised()`` tensors can be made on ``cuda``. They say that they lie there and hold numbers that the CPU computes,
so that training and decoding give what they give on the CPU. Beyond that:

- operators on tensors of several devices raise, as CUDA's do;
- every wait of the host for the device is noted, with the line of ours that caused it (`Device.waits`);
- every operator that would launch a kernel is counted (`Device.launches`), views not;
- a copy to pinned memory that nobody waits for leaves NaN (99 in whole numbers) in its buffer, until an event that was
  recorded on its device, or the device itself, has been waited for;
- a device can be lost (`Device.lost`).

What it cannot show: kernels' numerics, and which attention kernel CUDA would choose; whether an operator has a kernel
for CUDA; CUDA graphs and what `torch.compile` makes for a GPU (``torch.compile`` must be patched away); races between
streams; the allocator; NCCL; time.

It replaces internals of torch and is written for one release (`shim.RELEASE`). A few lines of C++ (shim.cpp) are
compiled on first use. All of it is undone at the end of the context: the process has no CUDA again.
"""

from .device import Device
from .runtime import disguised
from .shim import Unavailable, build, why_not

__all__ = ["Device", "Unavailable", "build", "disguised", "why_not"]
