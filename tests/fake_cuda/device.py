"""Tensors that report a CUDA device but store values on the CPU, and the device that runs their operators."""

import contextlib
import traceback
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map

aten = torch.ops.aten
SKIPPED_PATHS = (str(Path(__file__).parent / "device.py"), str(Path(torch.__file__).parent))
GPT_FOLDER = str(Path(__file__).resolve().parents[2] / "gpt")
CPU = torch.device("cpu")

# The host reads the results or output shapes of these operators.
WAITING_OPS = {
    aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default, aten._unique2.default,
    aten.is_nonzero.default, aten.equal.default, aten.bincount.default, aten.repeat_interleave.Tensor,
}  # fmt: skip
INDEXING_OPS = {
    aten.index.Tensor, aten.index_put_.default, aten.index_put.default, aten._index_put_impl_.default,
    aten._unsafe_index.Tensor,
}  # fmt: skip
COPIES = {aten.copy_.default, aten._to_copy.default}
CAPTURING = "operation not permitted when stream is capturing"
# Operators that compute nothing
OPS_WITHOUT_KERNEL = {"empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "_local_scalar_dense"}
STALE_INTEGER = 99  # Value of integer buffers while their copy is pending. Float buffers contain NaN.


class FakeCudaTensor(Tensor):
    """A tensor on ``cuda:index`` whose values are in ``cpu_data``."""

    cpu_data: Tensor
    owner: "Device"

    @staticmethod
    def __new__(cls, cpu_data: Tensor, owner_device: "Device", index: int = 0) -> Self:
        tensor: Self = Tensor._make_wrapper_subclass(
            cls, cpu_data.size(), strides=cpu_data.stride(), storage_offset=cpu_data.storage_offset(),
            dtype=cpu_data.dtype, layout=cpu_data.layout, device=torch.device("cuda", index),
        )  # fmt: skip
        return tensor

    def __init__(self, cpu_data: Tensor, owner_device: "Device", index: int = 0) -> None:
        self.cpu_data, self.owner = cpu_data, owner_device

    def __repr__(self) -> str:  # type: ignore[override]
        return f"FakeCudaTensor({self.cpu_data})"

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def tolist(self) -> Any:
        """Torch's `tolist` refuses subclasses."""
        return self.cpu().tolist()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        (first, *_) = (tensor for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, FakeCudaTensor))
        return first.owner.run(func, args, kwargs or {})


def _unwrap(value: Any) -> Any:
    return value.cpu_data if isinstance(value, FakeCudaTensor) else value


@dataclass(frozen=True, eq=False)
class PendingCopy:
    """A pending copy of ``cpu_data`` into the host ``buffer``."""

    buffer: Tensor
    cpu_data: Tensor
    index: int  # source device


class Device(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context manager that provides ``count`` CUDA devices."""

    def __init__(self, count: int = 1) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = count
        self.current = 0
        self.waits: list[tuple[str, str]] = []  # (kind, source line) of each host wait
        self.launches: Counter[str] = Counter()  # Launched kernels and copies by operator
        self.failure = ""  # Error message of all further CUDA calls, if any
        # Keeping the storages prevents an unpinned tensor from reusing an address.
        self._pinned: dict[int, torch.UntypedStorage] = {}
        self._pending: list[PendingCopy] = []
        self.recording: list[tuple[Any, ...]] | None = None  # Operators of the CUDA graph that is being captured

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.run(func, args, kwargs or {})

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Runs an operator on this device if it involves CUDA tensors, otherwise on the host."""
        if _is_composite(func):  # Inference mode dispatches composite operators undecomposed.
            with self:
                out = func.decompose(*args, **kwargs)
                if out is not NotImplemented:
                    return out
        tensors = [tensor for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, Tensor)]
        fake_tensors = [tensor for tensor in tensors if isinstance(tensor, FakeCudaTensor)]
        requested_device = None if kwargs.get("device") is None else torch.device(kwargs["device"])
        if not fake_tensors and (requested_device is None or requested_device.type != "cuda"):
            return self._on_host(func, args, kwargs)
        if self.failure:
            raise torch.AcceleratorError(self.failure)
        if func is aten.is_pinned.default:
            return False
        if self.recording is None or _is_view(func):
            return self._run(func, args, kwargs, fake_tensors, tensors, requested_device)
        if any(not isinstance(tensor, FakeCudaTensor) and (tensor.dim() or func in COPIES) for tensor in tensors):
            raise RuntimeError(CAPTURING)
        if func._schema.is_mutable:
            out = kwargs.get("out", args[0]) if func._schema.returns else None
        else:
            out = self._run(func, args, kwargs, fake_tensors, tensors, requested_device)
        self.recording.append((func, args, kwargs, out))
        return out

    def replay(self, operators: list[tuple[Any, ...]]) -> None:
        """Runs the recorded operators with the addresses of the capture. Counts one launch."""
        launches = self.launches.copy()
        for func, args, kwargs, out in operators:
            result = self.run(func, args, kwargs)
            if not func._schema.is_mutable:
                for old, new in zip(tree_leaves(out), tree_leaves(result), strict=True):
                    if isinstance(old, FakeCudaTensor):
                        old.cpu_data.copy_(new.cpu_data)
        self.launches = launches + Counter(graph=1)

    def _run(
        self, func: Any, args: Any, kwargs: Any, fake_tensors: list[Any], tensors: list[Tensor],
        requested_device: torch.device | None,
    ) -> Any:  # fmt: skip
        if func is aten.copy_.default:
            return self._copy(args[0], args[1], kwargs.get("non_blocking", args[2] if len(args) > 2 else False))
        if func is aten._to_copy.default:
            return self._to(args[0], dict(kwargs), requested_device)
        if kwargs.get("pin_memory") and (requested_device is None or requested_device.type == "cuda"):
            raise RuntimeError("Only dense CPU tensors can be pinned")
        self._check(func, args, fake_tensors, tensors)
        return self._compute(func, args, kwargs, fake_tensors, requested_device)

    def _on_host(self, func: Any, args: Any, kwargs: Any) -> Any:
        if not kwargs.get("pin_memory"):
            return func(*args, **kwargs)
        return self.pin(func(*args, **{**kwargs, "pin_memory": False}))

    def _check(self, func: Any, args: Any, fake_tensors: Iterable[Tensor], tensors: Iterable[Tensor]) -> None:
        """Records the operator's host waits. Raises for mixed devices, as CUDA does."""
        if func in WAITING_OPS:
            self.wait(func._schema.name.removeprefix("aten::"))
        host_tensors = [tensor for tensor in tensors if not isinstance(tensor, FakeCudaTensor)]
        if func in INDEXING_OPS:
            if not isinstance(args[0], FakeCudaTensor):
                raise RuntimeError("indices should be either on cpu or on the same device as the indexed tensor (cpu)")
            for index in tree_leaves(args[1]):
                if isinstance(index, FakeCudaTensor) and index.dtype in (torch.bool, torch.uint8):
                    self.wait("index by a mask")
                elif isinstance(index, Tensor) and not isinstance(index, FakeCudaTensor):
                    self.wait("index from the host")
            host_tensors = [
                tensor for tensor in host_tensors if not any(tensor is index for index in tree_leaves(args[1]))
            ]
        devices = {
            str(tensor.device)
            for tensor in (*fake_tensors, *host_tensors)
            if tensor.dim() or isinstance(tensor, FakeCudaTensor)
        }
        if len(devices) > 1:
            raise RuntimeError(
                "Expected all tensors to be on the same device, but found at least two devices, "
                f"{' and '.join(sorted(devices, reverse=True))}! ({func})"
            )

    def _compute(
        self, func: Any, args: Any, kwargs: Any, fake_tensors: list[Any], requested_device: torch.device | None
    ) -> Any:
        name, is_view = func._schema.name.removeprefix("aten::"), _is_view(func)
        if not is_view and name not in OPS_WITHOUT_KERNEL:
            self.launches[name] += 1
        index = fake_tensors[0].device.index if fake_tensors else self._index(requested_device)
        cpu_kwargs = tree_map(_unwrap, dict(kwargs))
        if cpu_kwargs.get("device") is not None:
            cpu_kwargs["device"] = CPU
        pins = cpu_kwargs.pop("pin_memory", False)
        out = func(*tree_map(_unwrap, args), **cpu_kwargs)
        if requested_device is not None and requested_device.type != "cuda":
            return self.pin(out) if pins else out
        # In inference mode, a view of a normal tensor is a normal tensor too.
        is_normal_view = (
            is_view and torch.is_inference_mode_enabled() and bool(fake_tensors) and not fake_tensors[0].is_inference()
        )
        with torch.inference_mode(False) if is_normal_view else contextlib.nullcontext():
            out = tree_map(lambda tensor: self.wrap(tensor, index) if isinstance(tensor, Tensor) else tensor, out)
        if fake_tensors and func is not aten._local_scalar_dense.default:
            return return_and_correct_aliasing(func, args, kwargs, out)  # type: ignore[no-untyped-call]
        return out

    def wrap(self, cpu_data: Tensor, index: int) -> FakeCudaTensor:
        return FakeCudaTensor(cpu_data, self, index)

    def _index(self, requested_device: torch.device | None) -> int:
        return self.current if requested_device is None or requested_device.index is None else requested_device.index

    # Copies and waits

    def wait(self, kind: str) -> None:
        """Records a wait and the line of `gpt` that caused it."""
        if self.failure:
            raise torch.AcceleratorError(self.failure)
        if self.recording is not None:
            raise RuntimeError(CAPTURING)
        frames = [frame for frame in traceback.extract_stack() if not frame.filename.startswith(SKIPPED_PATHS)]
        frame = next(
            (candidate for candidate in reversed(frames) if candidate.filename.startswith(GPT_FOLDER)), frames[-1]
        )
        self.waits.append((kind, f"{Path(frame.filename).name}:{frame.lineno}"))

    def pin(self, tensor: Tensor) -> Tensor:
        """Marks the tensor's memory as pinned."""
        storage = tensor.untyped_storage()
        self._pinned[storage.data_ptr()] = storage
        return tensor

    def _is_pinned(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._pinned

    def _copy(self, target: Tensor, source: Tensor, non_blocking: bool) -> Tensor:
        self.launches["copy"] += 1
        if isinstance(target, FakeCudaTensor):
            if not isinstance(source, FakeCudaTensor):
                self._upload(source, non_blocking)
            target.cpu_data.copy_(_unwrap(source))
            return target
        assert isinstance(source, FakeCudaTensor)
        if non_blocking and self._is_pinned(target):
            self._pending.append(PendingCopy(target, source.cpu_data.clone(), source.device.index))
            with torch.no_grad():
                return target.fill_(float("nan") if target.is_floating_point() else STALE_INTEGER)
        self.complete(self.pending_from(source.device.index))
        self.wait("device to host")
        return target.copy_(source.cpu_data)

    def _to(self, source: Tensor, kwargs: dict[str, Any], requested_device: torch.device | None) -> Tensor:
        non_blocking = kwargs.pop("non_blocking", False)
        kwargs = {name: value for name, value in kwargs.items() if name not in ("device", "pin_memory")}
        self.launches["copy"] += 1
        goes_to_host = requested_device is not None and requested_device.type != "cuda"
        if goes_to_host:
            self.complete(self.pending_from(source.device.index))
            self.wait("device to host")
        elif not isinstance(source, FakeCudaTensor):
            self._upload(source, non_blocking)
        out: Tensor = aten._to_copy.default(_unwrap(source), **kwargs)
        if goes_to_host:
            return out
        stays_on_device = isinstance(source, FakeCudaTensor) and (
            requested_device is None or requested_device.index is None
        )
        return self.wrap(out, source.device.index if stays_on_device else self._index(requested_device))

    def _upload(self, source: Tensor, non_blocking: bool) -> None:
        # CUDA copies a strided tensor through an unpinned buffer.
        if not (non_blocking and self._is_pinned(source) and source.is_contiguous()):
            self.wait("host to device")

    def pending_from(self, index: int) -> list[PendingCopy]:
        """Returns pending copies from one device to the host."""
        return [copy for copy in self._pending if copy.index == index]

    def complete(self, copies: Iterable[PendingCopy]) -> None:
        """Completes pending copies."""
        copies = list(copies)
        for copy in self._pending:
            if any(copy is other for other in copies):
                copy.buffer.copy_(copy.cpu_data)
        self._pending = [copy for copy in self._pending if not any(copy is other for other in copies)]

    def wait_counts(self) -> Counter[str]:
        return Counter(kind for kind, _ in self.waits)


def _is_composite(func: Any) -> bool:
    return bool(
        func._can_decompose()
        and torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")
    )


def _is_view(func: Any) -> bool:
    infos = [argument.alias_info for argument in func._schema.arguments]
    return any(info is not None and not info.is_write for info in infos)
