"""Reads and writes safetensors files, tensor by tensor; a file is checked before any tensor is read."""

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

from gpt.errors import UserError, check_text
from gpt.files import open_regular, reading

Array = npt.NDArray[Any]
WEIGHTS = ("F32", "F16", "BF16")
HINT = "copy or save it again"
_CODES = {
    "float32": "F32", "float64": "F64", "float16": "F16",
    "int64": "I64", "int8": "I8", "uint32": "U32", "uint8": "U8",
}  # fmt: skip
_SIZES = {"F32": 4, "F16": 2, "BF16": 2, "I8": 1, "U8": 1}
_LENGTH = struct.Struct("<Q")
_ALIGNED = 8  # bytes to which the header is filled up
# Of a header: a tensor takes about 100; other programs' may have metadata and masks besides.
_HEADER_ROOM, _HEADER_EACH = 2**16, 2**10


@dataclass(frozen=True)
class Deferred:
    """An array that is gathered or computed when it is written, and freed after."""

    shape: tuple[int, ...]
    get: Callable[[], Array]  # of BF16, which numpy does not have, its bits as uint16
    code: str = "F32"  # its dtype in the file

    @property
    def itemsize(self) -> int:
        """Bytes of a number."""
        return _SIZES[self.code]

    @property
    def nbytes(self) -> int:
        """Bytes of its numbers."""
        return math.prod(self.shape) * self.itemsize

    @property
    def T(self) -> "Deferred":  # noqa: N802
        """Transposed."""
        return Deferred(self.shape[::-1], lambda: self.get().T, self.code)

    def split(self, rows: Sequence[slice]) -> "list[Deferred]":
        """Some of its rows each. It is gathered for the first of them that is written and freed after the last."""
        held: list[Array] = []

        def get(some: slice) -> Array:
            if not held:
                held.extend([self.get()] * len(rows))
            return held.pop()[some]

        return [Deferred((some.stop - some.start, *self.shape[1:]), partial(get, some), self.code) for some in rows]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return self.get()


Arrays = Mapping[str, Array | Deferred]


def pieces(tensors: Arrays) -> Iterator[bytes | memoryview]:
    """The bytes of a safetensors file, piece by piece, as safetensors itself writes it. One tensor at a time is made
    contiguous, so that no second copy of all of them is in memory."""
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].itemsize, item[0]))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, array in ordered:
        start, end = end, end + array.nbytes
        shape = list(array.shape)
        code = array.code if isinstance(array, Deferred) else _CODES[array.dtype.name]
        header[name] = {"dtype": code, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNED)
    yield _LENGTH.pack(len(text)) + text
    for _, array in ordered:
        yield np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def nbytes(tensors: Arrays) -> int:
    """About the bytes of a file of these tensors."""
    return sum(array.nbytes for array in tensors.values()) + 128 * len(tensors)


@dataclass(frozen=True)
class Found:
    """A tensor in a file, by its name there."""

    file: Path
    name: str

    def mapped(self) -> Tensor:
        """The tensor as it is stored, read from the disk where it is looked at. It has a mapping of its own, which ends
        with it: what was read of a file is not kept in memory for the rest of it."""
        with _opened(self.file) as opened:
            tensor: Tensor = opened.get_tensor(self.name)
            return tensor


def find(
    files: Sequence[Path],
    shapes: Mapping[str, tuple[int, ...]],
    where: str,
    *,
    ours: Callable[[str], str | None] = lambda name: name,
    dtypes: Sequence[str] | Mapping[str, str] = WEIGHTS,
) -> dict[str, Found]:
    """Finds the tensors of some files, by the name that ``ours`` gives them (None: left out), and reads none.

    The names, shapes and dtypes of all are compared with the ``shapes`` that may be there, and the lengths of headers
    with their number: nothing is allocated by a file's word alone. ``dtypes`` are those that all may have, or the one
    of each by name. Raises `UserError`; ``where`` names the source of the shapes.
    """
    found: dict[str, Found] = {}
    for file in files:
        _check_header(file, len(shapes))
        with _opened(file) as opened:
            for theirs in opened.keys():  # noqa: SIM118
                name = ours(theirs)
                if name is None:
                    continue
                tensor = opened.get_slice(theirs)
                shape, dtype = tuple(tensor.get_shape()), tensor.get_dtype()
                if name not in shapes:
                    raise UserError(f"{file} has a tensor {theirs[:80]} that {where} does not expect")
                if shape != shapes[name]:
                    raise UserError(f"{file}: {theirs} has the shape {shape}; {where} expects {shapes[name]}")
                allowed = [dtypes[name]] if isinstance(dtypes, Mapping) else dtypes
                if dtype not in allowed:
                    raise UserError(f"{file}: {theirs} is {dtype}; {', '.join(allowed)} can be read")
                found[name] = Found(file, theirs)
    return found


def check_all(files: Sequence[Path], expected: Iterable[str], found: Iterable[str]) -> None:
    """Raises `UserError` unless every ``expected`` tensor was ``found`` in the files."""
    missing = sorted(set(expected) - set(found))
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise UserError(f"{files[0].parent}: the tensor {missing[0]}{more} is missing from the weights")


def _check_header(file: Path, count: int) -> None:
    """Raises `UserError` for a header that is longer than those of ``count`` tensors."""
    with reading(file), open_regular(file) as opened:
        start = opened.read(_LENGTH.size)
        size = os.fstat(opened.fileno()).st_size
    length = _LENGTH.unpack(start)[0] if len(start) == _LENGTH.size else size
    if length > min(size - _LENGTH.size, _HEADER_ROOM + _HEADER_EACH * count):
        raise UserError(f"{file} is damaged or not a safetensors file: its header has {length:,} bytes", HINT)


@contextlib.contextmanager
def _opened(file: Path) -> Iterator[Any]:
    check_text(f"the path {str(file)!r}", str(file), "rename the folder: safetensors only opens UTF-8 names")
    try:
        with safe_open(file, framework="pt") as opened:
            yield opened
    except (SafetensorError, OSError) as error:
        raise UserError(f"{file} is damaged or not a safetensors file: {error}", HINT) from None
