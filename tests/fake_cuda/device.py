"""Tensors that say they lie on CUDA and hold numbers of the CPU, and the device that computes with them."""

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
NOT_TO_BLAME = (str(Path(__file__).parent / "device.py"), str(Path(torch.__file__).parent))
OURS = str(Path(__file__).resolve().parents[2] / "gpt")
CPU = torch.device("cpu")

# Whose result the host reads, or whose result has a shape that the device's numbers decide.
WAITS = {
    aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default, aten._unique2.default,
    aten.is_nonzero.default, aten.equal.default, aten.bincount.default, aten.repeat_interleave.Tensor,
}  # fmt: skip
INDEXING = {
    aten.index.Tensor, aten.index_put_.default, aten.index_put.default, aten._index_put_impl_.default,
    aten._unsafe_index.Tensor,
}  # fmt: skip
# What makes a tensor without computing its numbers, and what reads one number that is there.
NO_KERNEL = {"empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "_local_scalar_dense"}
RUBBISH = 99  # what a buffer of whole numbers holds until its copy has been waited for; floats are NaN


class Disguised(Tensor):
    """A tensor on ``cuda:index`` whose ``numbers`` are a tensor on the CPU."""

    numbers: Tensor
    device_of: "Device"

    @staticmethod
    def __new__(cls, inner: Tensor, of: "Device", index: int = 0) -> Self:
        made: Self = Tensor._make_wrapper_subclass(
            cls, inner.size(), strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype,
            layout=inner.layout, device=torch.device("cuda", index),
        )  # fmt: skip
        return made

    def __init__(self, inner: Tensor, of: "Device", index: int = 0) -> None:
        self.numbers, self.device_of = inner, of

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Disguised({self.numbers})"

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def tolist(self) -> Any:
        """A copy's: torch's own refuses subclasses."""
        return self.cpu().tolist()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        (first, *_) = (each for each in tree_leaves((args, kwargs)) if isinstance(each, Disguised))
        return first.device_of.run(func, args, kwargs or {})


def _inner(value: Any) -> Any:
    return value.numbers if isinstance(value, Disguised) else value


@dataclass(frozen=True, eq=False)
class Arriving:
    """A copy on its way to the host: what will stand in ``buffer`` once it has been waited for."""

    buffer: Tensor
    numbers: Tensor
    index: int  # the device that sends it


class Device(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """``count`` devices, as a context in which ``device="cuda"`` makes tensors on them."""

    def __init__(self, count: int = 1) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = count
        self.current = 0
        self.waits: list[tuple[str, str]] = []  # each wait of the host for the device: of what kind, and where
        self.launches: Counter[str] = Counter()  # operators that launch a kernel at least, and copies
        self.lost = ""  # what CUDA says of everything from now on
        # By address, and kept: memory that was freed may come back as a tensor that is not pinned.
        self._pinned: dict[int, torch.UntypedStorage] = {}
        self._arriving: list[Arriving] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.run(func, args, kwargs or {})

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What an operator gives, where it is called with the device's tensors or makes one; else what it gives."""
        if _is_made_of_others(func):  # inference mode brings these here in one piece
            with self:
                out = func.decompose(*args, **kwargs)
                if out is not NotImplemented:
                    return out
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        ours = [each for each in tensors if isinstance(each, Disguised)]
        asked = None if kwargs.get("device") is None else torch.device(kwargs["device"])
        if not ours and (asked is None or asked.type != "cuda"):
            return self._on_host(func, args, kwargs)
        if self.lost:
            raise torch.AcceleratorError(self.lost)
        if func is aten.is_pinned.default:
            return False
        if func is aten.copy_.default:
            return self._copy(args[0], args[1], kwargs.get("non_blocking", args[2] if len(args) > 2 else False))
        if func is aten._to_copy.default:
            return self._to(args[0], dict(kwargs), asked)
        if kwargs.get("pin_memory") and (asked is None or asked.type == "cuda"):
            raise RuntimeError("Only dense CPU tensors can be pinned")
        self._check(func, args, ours, tensors)
        return self._compute(func, args, kwargs, ours, asked)

    def _on_host(self, func: Any, args: Any, kwargs: Any) -> Any:
        if not kwargs.get("pin_memory"):
            return func(*args, **kwargs)
        return self.pin(func(*args, **{**kwargs, "pin_memory": False}))

    def _check(self, func: Any, args: Any, ours: Iterable[Tensor], tensors: Iterable[Tensor]) -> None:
        """Notes a wait that the operator means. Raises for tensors on several devices, as CUDA does."""
        if func in WAITS:
            self.wait(func._schema.name.removeprefix("aten::"))
        host = [each for each in tensors if not isinstance(each, Disguised)]
        if func in INDEXING:
            if not isinstance(args[0], Disguised):
                raise RuntimeError("indices should be either on cpu or on the same device as the indexed tensor (cpu)")
            for index in tree_leaves(args[1]):
                if isinstance(index, Disguised) and index.dtype in (torch.bool, torch.uint8):
                    self.wait("index by a mask")
                elif isinstance(index, Tensor) and not isinstance(index, Disguised):
                    self.wait("index from the host")
            host = [each for each in host if not any(each is index for index in tree_leaves(args[1]))]
        devices = {str(each.device) for each in (*ours, *host) if each.dim() or isinstance(each, Disguised)}
        if len(devices) > 1:
            raise RuntimeError(
                "Expected all tensors to be on the same device, but found at least two devices, "
                f"{' and '.join(sorted(devices, reverse=True))}! ({func})"
            )

    def _compute(self, func: Any, args: Any, kwargs: Any, ours: list[Any], asked: torch.device | None) -> Any:
        name, is_view = func._schema.name.removeprefix("aten::"), _is_view(func)
        if not is_view and name not in NO_KERNEL:
            self.launches[name] += 1
        index = ours[0].device.index if ours else self._index(asked)
        inner = tree_map(_inner, dict(kwargs))
        if inner.get("device") is not None:
            inner["device"] = CPU
        pins = inner.pop("pin_memory", False)
        out = func(*tree_map(_inner, args), **inner)
        if asked is not None and asked.type != "cuda":
            return self.pin(out) if pins else out
        # Under inference mode a view of a tensor from outside of it is one from outside too.
        outside = is_view and torch.is_inference_mode_enabled() and bool(ours) and not ours[0].is_inference()
        with torch.inference_mode(False) if outside else contextlib.nullcontext():
            out = tree_map(lambda each: self.wrap(each, index) if isinstance(each, Tensor) else each, out)
        if ours and func is not aten._local_scalar_dense.default:
            return return_and_correct_aliasing(func, args, kwargs, out)  # type: ignore[no-untyped-call]
        return out

    def wrap(self, inner: Tensor, index: int) -> Disguised:
        return Disguised(inner, self, index)

    def _index(self, asked: torch.device | None) -> int:
        return self.current if asked is None or asked.index is None else asked.index

    # Copies and waits

    def wait(self, kind: str) -> None:
        """Notes that the host waits for the device, and the line of ours that is to blame."""
        if self.lost:
            raise torch.AcceleratorError(self.lost)
        frames = [frame for frame in traceback.extract_stack() if not frame.filename.startswith(NOT_TO_BLAME)]
        frame = next((each for each in reversed(frames) if each.filename.startswith(OURS)), frames[-1])
        self.waits.append((kind, f"{Path(frame.filename).name}:{frame.lineno}"))

    def pin(self, tensor: Tensor) -> Tensor:
        """The tensor, from now on as if it lay in pinned memory."""
        storage = tensor.untyped_storage()
        self._pinned[storage.data_ptr()] = storage
        return tensor

    def _is_pinned(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._pinned

    def _copy(self, target: Tensor, source: Tensor, non_blocking: bool) -> Tensor:
        self.launches["copy"] += 1
        if isinstance(target, Disguised):
            if not isinstance(source, Disguised):
                self._upload(source, non_blocking)
            target.numbers.copy_(_inner(source))
            return target
        assert isinstance(source, Disguised)
        if non_blocking and self._is_pinned(target):
            self._arriving.append(Arriving(target, source.numbers.clone(), source.device.index))
            with torch.no_grad():
                return target.fill_(float("nan") if target.is_floating_point() else RUBBISH)
        self.arrive(self.sent_by(source.device.index))
        self.wait("device to host")
        return target.copy_(source.numbers)

    def _to(self, source: Tensor, kwargs: dict[str, Any], asked: torch.device | None) -> Tensor:
        non_blocking = kwargs.pop("non_blocking", False)
        kwargs = {name: value for name, value in kwargs.items() if name not in ("device", "pin_memory")}
        self.launches["copy"] += 1
        goes_to_host = asked is not None and asked.type != "cuda"
        if goes_to_host:
            self.arrive(self.sent_by(source.device.index))
            self.wait("device to host")
        elif not isinstance(source, Disguised):
            self._upload(source, non_blocking)
        out: Tensor = aten._to_copy.default(_inner(source), **kwargs)
        if goes_to_host:
            return out
        stays = isinstance(source, Disguised) and (asked is None or asked.index is None)
        return self.wrap(out, source.device.index if stays else self._index(asked))

    def _upload(self, source: Tensor, non_blocking: bool) -> None:
        if not (non_blocking and self._is_pinned(source) and source.is_contiguous()):  # CUDA copies gaps by way of a
            self.wait("host to device")  # buffer of its own, which is not pinned

    def sent_by(self, index: int) -> list[Arriving]:
        """Copies of one device that are on their way to the host."""
        return [each for each in self._arriving if each.index == index]

    def arrive(self, copies: Iterable[Arriving]) -> None:
        """Puts numbers where they were sent, unless they have come already."""
        copies = list(copies)
        for each in self._arriving:
            if any(each is one for one in copies):
                each.buffer.copy_(each.numbers)
        self._arriving = [each for each in self._arriving if not any(each is one for one in copies)]

    def kinds(self) -> Counter[str]:
        """How many waits there were of each kind."""
        return Counter(kind for kind, _ in self.waits)


def _is_made_of_others(func: Any) -> bool:
    return bool(
        func._can_decompose()
        and torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")
    )


def _is_view(func: Any) -> bool:
    infos = [argument.alias_info for argument in func._schema.arguments]
    return any(info is not None and not info.is_write for info in infos)
