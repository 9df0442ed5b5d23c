"""The disguise itself: it computes, it refuses what CUDA refuses, it tells waits, and nothing of it stays."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Gpt

from fake_cuda import shim

Disguise = Callable[..., Any]


def test_nothing_of_it_stays(disguise: Disguise) -> None:
    before = {name: getattr(torch.cuda, name) for name in dir(torch.cuda)}
    with disguise():
        assert torch.cuda.is_available()
        assert torch.ones(2, device="cuda").sum().item() == 2
    after = {name: getattr(torch.cuda, name) for name in dir(torch.cuda)}
    assert {name for name in before if before[name] is not after.get(name)} == set()
    assert not torch.cuda.is_available()
    assert torch.accelerator.current_accelerator() is None
    with pytest.raises((AssertionError, RuntimeError), match=r"CUDA"):
        torch.ones(1, device="cuda")
    x = torch.ones(3, requires_grad=True)
    (2 * x).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [2, 2, 2]
    assert torch.nn.Linear(2, 2).to(torch.float64).weight.dtype == torch.float64


def test_tensors_of_several_devices_do_not_meet(disguise: Disguise) -> None:
    with disguise(2):
        here, there, other = torch.ones(2), torch.ones(2, device="cuda"), torch.ones(2, device="cuda:1")
        for left, right in ((here, there), (there, here), (there, other)):
            with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
                left + right
        with pytest.raises(RuntimeError, match="indices should be either on cpu or on the same device"):
            here[torch.tensor([0], device="cuda")]
        with pytest.raises(RuntimeError, match="only dense CPU tensors can be pinned"):
            there.pin_memory()
        assert (there + torch.ones(())).tolist() == [2, 2]  # a number from the host may come along
        assert (there.to("cuda:1") + other).device == torch.device("cuda:1")


def test_every_wait_is_told(disguise: Disguise) -> None:
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
        kind, where = device.waits[0]
        assert (kind, where.split(":")[0]) == ("_local_scalar_dense", "test_disguise.py")


def test_memory_once_pinned_does_not_make_a_new_tensor_pinned(disguise: Disguise) -> None:
    with disguise() as device:
        for _ in range(50):
            torch.ones(2).pin_memory().to("cuda", non_blocking=True)
            assert device.waits == []
            torch.ones(2).to("cuda", non_blocking=True)
            assert len(device.waits) == 1
            device.waits.clear()


def test_what_was_not_waited_for_has_not_come(disguise: Disguise) -> None:
    with disguise(2) as device:
        buffers = []
        for index in range(2):
            x = torch.full((2,), 7.0, device=f"cuda:{index}")
            buffers.append(torch.empty(2, pin_memory=True).copy_(x, non_blocking=True))
            x.zero_()  # after the copy
        early = torch.cuda.Event()  # type: ignore[no-untyped-call]
        early.record(torch.cuda.current_stream(1))
        assert all(buffer.isnan().all() for buffer in buffers)
        early.synchronize()
        assert buffers[0].isnan().all()
        assert buffers[1].tolist() == [7, 7]
        torch.cuda.synchronize()  # of the current device, the first
        assert buffers[0].tolist() == [7, 7]
        assert device.sent_by(0) == device.sent_by(1) == []
        count = torch.empty(1, dtype=torch.long, pin_memory=True)
        count.copy_(torch.ones(1, dtype=torch.long, device="cuda"), non_blocking=True)
        assert count.item() == 99


def test_kernels_are_counted_and_views_are_not(disguise: Disguise) -> None:
    with disguise() as device:
        x = torch.empty(4, 4, device="cuda")
        x.view(16)[2:].unsqueeze(0).detach().T.expand(14, 3)
        assert not device.launches
        x.zero_().add_(1)
        x.float().exp()  # it is float32 already
        assert device.launches == {"zero_": 1, "add_": 1, "exp": 1}


def test_memory_and_device_can_fail(disguise: Disguise) -> None:
    with disguise() as device:
        device.most = 64
        torch.ones(16, device="cuda")
        with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
            torch.ones(17, device="cuda")
        x = torch.ones(1, device="cuda")
        device.lost = "CUDA error: unspecified launch failure"
        for work in (lambda: x + 1, lambda: torch.cuda.synchronize(), lambda: x.item()):
            with pytest.raises(torch.AcceleratorError, match="unspecified launch failure"):
                work()


def test_why_it_cannot_be_worn(disguise: Disguise, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert shim.why_not() is None
    with monkeypatch.context() as patch:
        patch.setattr(torch, "__version__", "2.14.1+cpu")
        assert shim.why_not() == "the disguise is written for torch 2.13; this is 2.14.1+cpu"
    with monkeypatch.context() as patch:
        patch.setattr(torch.version, "cuda", "13.0")
        assert "builds of torch without CUDA" in (shim.why_not() or "")
    with monkeypatch.context() as patch:
        patch.setenv("PATH", str(tmp_path))
        patch.delenv("CXX", raising=False)
        reason = "the disguise needs a C++ compiler: none of c++, g++, clang++ is there, and CXX names none"
        assert shim.why_not() == reason
        with pytest.raises(shim.Unavailable, match="needs a C"):
            shim.build(tmp_path)
    broken = tmp_path / "cxx"
    broken.write_text("#!/bin/sh\necho 'no such header' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    with pytest.raises(shim.Unavailable, match=r"does not compile here: no such header"):
        shim.build(tmp_path)
    assert list(tmp_path.glob("*.so")) == []


def test_a_build_with_cuda_and_no_device_is_refused(gpt: Gpt, workdir: Path) -> None:
    """Whatever the build: what counts is whether there is a device."""
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    Path("book.txt").write_text("a text " * 100)
    done = gpt("train", "book.txt", "--device", "cuda")
    assert (done.code, done.out) == (2, "")
    assert done.err.splitlines()[-2:] == [
        'error: this machine (or this build of torch) has no device "cuda"', "hint: present: cpu",
    ]  # fmt: skip
