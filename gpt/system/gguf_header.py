"""Reads the header of a GGUF file: metadata, and the place of each tensor. Checks every count, length and offset.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The package gguf has a reader too, but it trusts
the header, and needs seconds for a vocabulary of 150,000 tokens.
"""

import functools
import math
import mmap
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from gpt.system.errors import UserError
from gpt.system.files import open_regular, reading

MAGIC = b"GGUF"
VERSIONS = (2, 3)
HINT = "copy or download it again"
MAX_HEADER = 2**27  # Maximum bytes of a header. With 262,000 tokens and 514,000 merges (Gemma), it has about 2²⁴.
MAX_TEXTS = 2**21  # Maximum texts in all lists of a header.
MAX_TENSORS, MAX_KEYS, MAX_NAME, MAX_DIMENSIONS, MAX_SHARDS = 2**16, 2**16, 2**12, 4, 1_000
_ENDED = f"its header is cut short, or has more than {MAX_HEADER:,} bytes"
T = TypeVar("T")
_NUMBERS = {0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8"}
_STRING, _ARRAY = 8, 9
_SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")


@dataclass(frozen=True)
class TensorInfo:
    """The type and place of a tensor."""

    file: Path
    shape: tuple[int, ...]  # Rows first, as in torch.
    type: int  # A number in ggml's list of types.
    offset: int  # Bytes from the start of the file.


@dataclass(frozen=True)
class Header:
    """Metadata and tensors of a GGUF file, or of all its shards."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]


def is_gguf(path: Path) -> bool:
    """Whether a path is a GGUF file, whatever its name. Raises `UserError` if it cannot be read."""
    with reading(path):
        if not path.is_file():
            return False
        with open_regular(path) as file:
            return file.read(len(MAGIC)) == MAGIC


def read_value(metadata: Mapping[str, Any], key: str, default: T, where: object) -> T:
    """Returns the value of a key, or ``default``. Raises `UserError` for a value of another type than the default."""
    value = metadata.get(key, default)
    if type(value) is type(default):
        return value
    shown = repr(value[:9] if isinstance(value, list | np.ndarray | str) else value)
    raise UserError(f"{where} is damaged: {key} is {shown:.60}, not of type {type(default).__name__}", HINT)


def header(path: Path) -> Header:
    """Returns the header of a file. It is cached until the file changes."""
    with reading(path):
        status = path.stat()
    return _kept(path, status.st_size, status.st_mtime_ns)


@functools.lru_cache(maxsize=4)
def _kept(path: Path, size: int, changed: int) -> Header:
    return read_header(path)


def read_header(path: Path) -> Header:
    """Reads the headers of a file and of its other shards. Raises `UserError` for damage."""
    first = _read_file(path)
    count = read_value(first.metadata, "split.count", 1, path)
    if not 0 <= count <= MAX_SHARDS:
        raise UserError(f"{path} is damaged: it is split into {count:,} files", HINT)
    if count <= 1:
        return first
    files = list_shards(path)
    if len(files) != count:
        message = f"{path} is one of {count} files of a model, and its name does not say which"
        raise UserError(message, f"give all of them their names: NAME-00001-of-{count:05}.gguf …")
    headers = [_read_file(each) for each in files]
    for number, each in enumerate(headers):
        if [read_value(each.metadata, f"split.{key}", -1, each.path) for key in ("no", "count")] != [number, count]:
            raise UserError(f"{each.path} is not part {number + 1} of {count} of this model", HINT)
    tensors = {name: info for each in headers for name, info in each.tensors.items()}
    if len(tensors) != sum(len(each.tensors) for each in headers):
        raise UserError(f"{path}: a tensor is in two of its {count} files", HINT)
    return Header(path, headers[0].metadata, tensors)


def list_shards(path: Path) -> list[Path]:
    """Returns the shards of a model, named ``NAME-00001-of-00003.gguf``, by any one of them. Raises `UserError` if a
    shard is missing."""
    name = _SHARD.fullmatch(path.name)
    if name is None or not 1 <= int(name[3]) <= MAX_SHARDS:
        return [path]
    files = [path.with_name(f"{name[1]}-{n:05}-of-{name[3]}.gguf") for n in range(1, int(name[3]) + 1)]
    missing = next((each for each in files if not each.is_file()), None)
    if missing is not None:
        raise UserError(f"{path} is one of {len(files)} files of a model, and {missing.name} is missing", "download it")
    return files


def _read_file(path: Path) -> Header:
    with reading(path), open_regular(path) as file:
        if file.read(len(MAGIC)) != MAGIC:
            raise UserError(f"{path} is not a GGUF file", HINT)
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                return _Reader(path, data).read()
            except _Damage as damage:
                raise UserError(f"{path} is damaged: {damage}", HINT) from None


class _Damage(Exception):
    """The header contradicts itself or the size of its file."""


class _Reader:
    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data, self.end, self.at = path, data, min(len(data), MAX_HEADER), len(MAGIC)
        self.texts = 0  # Texts in the lists read so far.

    def read(self) -> Header:
        """Returns the header. Raises `_Damage`, and `UserError` for a version that cannot be read."""
        version = self._number("<u4")
        if version not in VERSIONS:
            swapped = version in [int.from_bytes(each.to_bytes(4, "little"), "big") for each in VERSIONS]
            what = "is for big-endian machines" if swapped else f"has version {version}"
            raise UserError(f"{self.path} {what}; gpt reads GGUF versions 2 and 3", "convert it again with llama.cpp")
        tensors, keys = self._count(MAX_TENSORS, "tensors"), self._count(MAX_KEYS, "keys")
        metadata: dict[str, Any] = {}
        for _ in range(keys):
            name = self._string(MAX_NAME)
            if name in metadata:
                raise _Damage(f"the key {name[:80]} is there twice")
            metadata[name] = self._value(self._number("<u4"), name)
        infos = [self._tensor() for _ in range(tensors)]
        alignment = read_value(metadata, "general.alignment", 32, self.path)
        if not 1 <= alignment <= 2**16:
            raise _Damage(f"its alignment is {alignment:,}")
        start = -(-self.at // alignment) * alignment
        found = {}
        for name, shape, type_, offset in infos:
            if name in found:
                raise _Damage(f"the tensor {name[:80]} is there twice")
            found[name] = TensorInfo(self.path, shape, type_, start + offset)
        return Header(self.path, metadata, found)

    def _bytes(self, size: int) -> bytes:
        self.at += size
        if self.at > self.end:
            raise _Damage(_ENDED)
        return self.data[self.at - size : self.at]

    def _number(self, dtype: str) -> Any:
        return np.frombuffer(self._bytes(np.dtype(dtype).itemsize), dtype)[0].item()

    def _count(self, most: int, what: str) -> int:
        count: int = self._number("<u8")
        if count > most:
            raise _Damage(f"it claims to have {count:,} {what}")
        return count

    def _string(self, most: int = MAX_HEADER) -> str:
        length: int = self._number("<u8")
        if length > most:
            raise _Damage(f"a text in its header claims to have {length:,} bytes")
        return self._bytes(length).decode("utf-8", "surrogateescape")

    def _value(self, kind: int, name: str) -> Any:
        if kind == _STRING:
            return self._string()
        if kind in _NUMBERS:
            return self._number(_NUMBERS[kind])
        if kind != _ARRAY:
            raise _Damage(f"{name[:80]} has the unknown type {kind}")
        inner = self._number("<u4")
        if inner == _STRING:
            self.texts += (count := self._count(MAX_HEADER, f"texts in {name[:80]}"))
            if self.texts > MAX_TEXTS:
                raise _Damage(f"its lists have {self.texts:,} texts or more, and the limit is {MAX_TEXTS:,}")
            return self._strings(count)
        if inner not in _NUMBERS:
            raise _Damage(f"{name[:80]} is a list of the unknown type {inner}")
        dtype = np.dtype(_NUMBERS[inner])
        count = self._count(MAX_HEADER, f"numbers in {name[:80]}")
        return np.frombuffer(self._bytes(count * dtype.itemsize), dtype)

    def _strings(self, count: int) -> list[str]:
        """Reads a list of strings in one loop, because a vocabulary has hundreds of thousands."""
        found, at, data, end = [], self.at, self.data, self.end - 8
        length_at = struct.Struct("<Q").unpack_from
        for _ in range(count):
            if at > end:
                raise _Damage(_ENDED)
            start = at + 8
            at = start + length_at(data, at)[0]
            if at > self.end:
                raise _Damage(_ENDED)
            found.append(data[start:at].decode("utf-8", "surrogateescape"))
        self.at = at
        return found

    def _tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name, dimensions = self._string(MAX_NAME), self._number("<u4")
        if not 1 <= dimensions <= MAX_DIMENSIONS:
            raise _Damage(f"the tensor {name[:80]} has {dimensions:,} dimensions")
        shape = tuple(self._number("<u8") for _ in range(dimensions))[::-1]
        type_, offset = self._number("<u4"), self._number("<u8")
        if math.prod(shape) > 2**60 or offset > len(self.data):
            raise _Damage(f"the tensor {name[:80]} does not fit into the file")
        return name, shape, type_, offset


def mapped(info: TensorInfo, rows: int, row_bytes: int) -> npt.NDArray[np.uint8]:
    """Maps the bytes of a tensor, (rows, row_bytes), without reading them."""
    # Copy-on-write, because torch warns about read-only arrays. The file never changes.
    return np.memmap(info.file, np.uint8, "c", info.offset, (rows, row_bytes))
