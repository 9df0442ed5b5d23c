"""The fake CUDA device itself: errors, recorded waits, cleanup."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

Disguise = Callable[..., Any]


def test_exit_restores_torch(disguise: Disguise) -> None:
    before = vars(torch.cuda).copy()
    with disguise():
        assert torch.ones(2, device="cuda").sum().item() == 2
    assert all(getattr(torch.cuda, name) is original for name, original in before.items())
    assert torch.accelerator.current_accelerator() is None
    with pytest.raises((AssertionError, RuntimeError), match=r"CUDA"):
        torch.ones(1, device="cuda")
    x = torch.ones(3, requires_grad=True)
    (2 * x).sum().backward()
    assert x.grad is not None


def test_mixed_devices_raise(disguise: Disguise) -> None:
    with disguise(2):
        on_cpu, on_first, on_second = torch.ones(2), torch.ones(2, device="cuda"), torch.ones(2, device="cuda:1")
        for left, right in ((on_cpu, on_first), (on_first, on_cpu), (on_first, on_second)):
            with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
                left + right
        with pytest.raises(RuntimeError, match="indices should be either on cpu or on the same device"):
            on_cpu[torch.tensor([0], device="cuda")]
        with pytest.raises(RuntimeError, match="only dense CPU tensors can be pinned"):
            on_first.pin_memory()
        assert (on_first + torch.ones(())).tolist() == [2, 2]  # Host scalars are allowed.
        assert (on_first.to("cuda:1") + on_second).device == torch.device("cuda:1")


def test_every_wait_is_recorded(disguise: Disguise) -> None:
    with disguise() as device:
        x = torch.arange(4.0, device="cuda")
        (x * x).sum()
        x[1:] = 0
        x.to("cuda", torch.bfloat16)
        torch.ones(2).pin_memory().to("cuda", non_blocking=True)
        assert device.waits == []
        waits: list[Callable[[], Any]] = [
            lambda: float(x[0]), lambda: x.tolist(), lambda: x.cpu(), lambda: x.nonzero(), lambda: x[x > 1],
            lambda: torch.tensor([1], device="cuda"), lambda: torch.ones(2).to("cuda", non_blocking=True),
            lambda: x[torch.tensor([0])], lambda: torch.cuda.synchronize(), lambda: bool((x == x).all()),
        ]  # fmt: skip
        for wait in waits:
            device.waits.clear()
            wait()
            assert len(device.waits) == 1
        kind, line = device.waits[0]
        assert (kind, line.split(":")[0]) == ("_local_scalar_dense", "test_disguise.py")


def test_copies_are_incomplete_until_the_host_waits(disguise: Disguise) -> None:
    with disguise(2):
        buffers = []
        for index in range(2):
            x = torch.full((2,), 7.0, device=f"cuda:{index}")
            buffers.append(torch.empty(2, pin_memory=True).copy_(x, non_blocking=True))
            x.zero_()  # The copy must not contain this later write.
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(1))
        assert all(buffer.isnan().all() for buffer in buffers)
        event.synchronize()
        assert buffers[0].isnan().all()
        assert buffers[1].tolist() == [7, 7]
        torch.cuda.synchronize()  # The current device is device 0.
        assert buffers[0].tolist() == [7, 7]
