"""Reads and writes safetensors files, tensor by tensor. A file is validated before any tensor is read."""

import contextlib
import json
import math
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from torch import Tensor

from gpt.system.errors import UserError, check_text
from gpt.system.files import open_regular, reading

Array = npt.NDArray[Any]
WEIGHTS = ("F32", "F16", "BF16")
HINT = "copy or save it again"
CODES = {
    "float32": "F32", "float64": "F64", "float16": "F16", "bfloat16": "BF16",
    "int64": "I64", "int8": "I8", "uint32": "U32", "uint8": "U8",
}  # fmt: skip
_SIZES = {"F32": 4, "F16": 2, "BF16": 2, "I8": 1, "U8": 1}
_LENGTH = struct.Struct("<Q")
_ALIGNMENT = 8  # The header is padded to a multiple of these bytes.
# Maximum bytes of a header: a fixed part, and a part per tensor. A tensor takes about 100 bytes. The rest is for
# metadata and masks that other programs add.
_HEADER_BASE, _HEADER_PER_TENSOR = 2**16, 2**10


@dataclass(frozen=True)
class Deferred:
    """An array that is computed or gathered when it is written, then freed."""

    shape: tuple[int, ...]
    get: Callable[[], Array]  # returns BF16 as uint16, because numpy lacks BF16
    code: str = "F32"  # safetensors dtype

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return _SIZES[self.code]

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return math.prod(self.shape) * self.itemsize

    @property
    def T(self) -> "Deferred":  # noqa: N802
        """The transposed array."""
        return Deferred(self.shape[::-1], lambda: self.get().T, self.code)

    def split(self, rows: Sequence[slice]) -> "list[Deferred]":
        """Returns one deferred array per slice of rows. Writing the first slice gathers the array; writing the last
        slice frees it."""
        references: list[Array] = []

        def get(part: slice) -> Array:
            if not references:
                references.extend([self.get()] * len(rows))
            return references.pop()[part]

        return [Deferred((part.stop - part.start, *self.shape[1:]), partial(get, part), self.code) for part in rows]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return self.get()


Arrays = Mapping[str, Array | Deferred]


def pieces(tensors: Arrays) -> Iterator[bytes | memoryview]:
    """Yields the bytes of a safetensors file, as safetensors itself writes them. Makes one tensor at a time contiguous,
    to avoid a second copy of all tensors."""
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].itemsize, item[0]))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, array in ordered:
        start, end = end, end + array.nbytes
        shape = list(array.shape)
        code = array.code if isinstance(array, Deferred) else CODES[array.dtype.name]
        header[name] = {"dtype": code, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    yield _LENGTH.pack(len(text)) + text
    for _, array in ordered:
        yield np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def nbytes(tensors: Arrays) -> int:
    """Returns the approximate file size of these tensors in bytes."""
    return sum(array.nbytes for array in tensors.values()) + 128 * len(tensors)


@dataclass(frozen=True)
class Found:
    """A tensor in a file."""

    file: Path
    name: str

    def mapped(self) -> Tensor:
        """Returns the tensor as stored, memory-mapped. Freeing the tensor frees its mapping, so data already read does
        not stay in memory."""
        with _open(self.file) as handle:
            tensor: Tensor = handle.get_tensor(self.name)
            return tensor


def find(
    files: Sequence[Path],
    shapes: Mapping[str, tuple[int, ...]],
    where: str,
    *,
    ours: Callable[[str], str | None] = lambda name: name,
    dtypes: Sequence[str] | Mapping[str, str] = WEIGHTS,
) -> dict[str, Found]:
    """Finds tensors in files without reading their data. ``ours`` maps a tensor's name in the file to gpt's name, or to
    None to ignore the tensor.

    Validates names, shapes and dtypes. ``dtypes`` lists the allowed dtypes, or maps each name to its dtype. Limits
    header lengths by the number of ``shapes``, so an untrusted file cannot cause large allocations. Raises `UserError`
    naming ``where``, the source of the shapes.
    """
    entries: dict[str, Found] = {}
    for file in files:
        _check_header(file, len(shapes))
        with _open(file) as handle:
            for stored_name in handle.keys():  # noqa: SIM118
                name = ours(stored_name)
                if name is None:
                    continue
                tensor = handle.get_slice(stored_name)
                shape, dtype = tuple(tensor.get_shape()), tensor.get_dtype()
                if name not in shapes:
                    raise UserError(f"{file} has a tensor {stored_name[:80]} that {where} does not expect")
                if shape != shapes[name]:
                    raise UserError(f"{file}: {stored_name} has the shape {shape}; {where} expects {shapes[name]}")
                allowed = [dtypes[name]] if isinstance(dtypes, Mapping) else dtypes
                if dtype not in allowed:
                    raise UserError(f"{file}: {stored_name} is {dtype}; {', '.join(allowed)} can be read")
                entries[name] = Found(file, stored_name)
    return entries


def check_all(path: Path, expected: Iterable[str], found: Iterable[str]) -> None:
    """Raises `UserError` unless every ``expected`` tensor was ``found`` in the weights at ``path``."""
    missing = sorted(set(expected) - set(found))
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise UserError(f"{path}: the tensor {missing[0]}{more} is missing from the weights", HINT)


def _check_header(file: Path, count: int) -> None:
    """Raises `UserError` for a header too long for ``count`` tensors."""
    with reading(file), open_regular(file) as opened:
        start = opened.read(_LENGTH.size)
        size = os.fstat(opened.fileno()).st_size
    length = _LENGTH.unpack(start)[0] if len(start) == _LENGTH.size else size
    if length > min(size - _LENGTH.size, _HEADER_BASE + _HEADER_PER_TENSOR * count):
        raise UserError(f"{file} is damaged or not a safetensors file: its header has {length:,} bytes", HINT)


@contextlib.contextmanager
def _open(file: Path) -> Iterator[Any]:
    check_text(f"the path {str(file)!r}", str(file), "rename the folder: safetensors only opens UTF-8 names")
    try:
        with safe_open(file, framework="pt") as handle:
            yield handle
    except (SafetensorError, OSError) as error:
        raise UserError(f"{file} is damaged or not a safetensors file: {error}", HINT) from None
