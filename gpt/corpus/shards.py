"""Shards: memory-mapped files of token ids, and a stream over several shards.

Layout, little-endian: an 8-byte magic; version, dtype code (2 or 4 bytes per id), vocabulary size and flags as uint32;
id count and document count as uint64; the ids; padding to 8 bytes; the offset of each document's first id as uint64.
Every document starts with an end-of-text id. Flag 1: the file starts inside a document of the previous file.
"""

import contextlib
import mmap
import os
import struct
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from gpt.system.errors import UserError
from gpt.system.files import file_sha256, open_regular, write_pieces

MAGIC = b"GPTIDS\r\n"
VERSION = 2
HEADER = struct.Struct("<8sIIIIQQ")
CONTINUES_DOCUMENT = 1
HINT = "create it again from the text"

Side = Literal["train", "val"]
SIDES: tuple[Side, ...] = ("train", "val")


Ids = npt.NDArray[np.unsignedinteger[Any]]  # uint16 or uint32
Offsets = npt.NDArray[np.uint64]


def id_type(vocab_size: int) -> np.dtype[np.unsignedinteger[Any]]:
    """Returns uint16 if all ids fit, otherwise uint32."""
    return np.dtype("<u2" if vocab_size <= 2**16 else "<u4")


def write_shard(path: Path, ids: Iterable[Ids], offsets: Offsets, vocab_size: int) -> str:
    """Writes ids and document offsets to ``path`` atomically. Returns the sha256. Raises `UserError` for an id outside
    the vocabulary."""
    parts = [np.ascontiguousarray(part, id_type(vocab_size)) for part in ids]
    count = sum(map(len, parts))
    if max((int(part.max()) for part in parts if len(part)), default=0) >= vocab_size:
        raise UserError(f"cannot write an id outside the vocabulary of {vocab_size:,} to {path}")
    flags = CONTINUES_DOCUMENT if count and (not len(offsets) or offsets[0]) else 0
    itemsize = id_type(vocab_size).itemsize
    header = HEADER.pack(MAGIC, VERSION, itemsize, vocab_size, flags, count, len(offsets))
    padding = bytes(-count * itemsize % 8)
    return write_pieces(path, [header, *parts, padding, np.ascontiguousarray(offsets, "<u8")])


class Shard:
    """A memory-mapped file of ids. `take` checks ids against the vocabulary. Raises `UserError` if the file is
    truncated or not a shard."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._map: mmap.mmap | None = None
        with self._translate_errors(), open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            header = file.read(HEADER.size)
        self._check_header(header, size)

    @contextlib.contextmanager
    def _translate_errors(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError) as error:  # Mapping an empty file raises ValueError.
            raise UserError(f"cannot read {self.path}: {getattr(error, 'strerror', None) or error}", HINT) from None

    def _get_map(self) -> mmap.mmap:
        """Maps the file on first use, because a corpus can have more files than a process can open."""
        if self._map is None:
            with self._translate_errors(), open_regular(self.path) as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            if hasattr(self._map, "madvise"):
                self._map.madvise(mmap.MADV_RANDOM)
        return self._map

    def _check_header(self, header: bytes, size: int) -> None:
        if len(header) < HEADER.size or header[:8] != MAGIC:
            raise UserError(f"{self.path} is not a gpt token file", HINT)
        _, version, self.itemsize, self.vocab_size, flags, self.count, self.documents = HEADER.unpack(header)
        if version != VERSION or self.itemsize not in (2, 4):
            raise UserError(
                f"{self.path} has version {version}, dtype code {self.itemsize}; this program reads version {VERSION}",
                HINT,
            )
        self.continues = bool(flags & CONTINUES_DOCUMENT)
        self._dtype = np.dtype(f"<u{self.itemsize}")
        ids_end = HEADER.size + self.count * self.itemsize
        self._offsets_start = ids_end + -(self.count * self.itemsize) % 8
        expected_size = self._offsets_start + self.documents * 8
        if size != expected_size:
            raise UserError(f"{self.path} has {size:,} bytes; its header requires {expected_size:,}", HINT)

    def __len__(self) -> int:
        return int(self.count)

    def take(self, start: int, stop: int) -> Ids:
        """Returns a copy of ids ``start`` to ``stop`` - 1. Raises `UserError` for an id outside the vocabulary."""
        stop = min(stop, self.count)
        position = HEADER.size + start * self.itemsize
        ids: Ids = np.frombuffer(self._get_map(), self._dtype, max(0, stop - start), position).copy()
        if len(ids) and int(ids.max()) >= self.vocab_size:
            raise UserError(
                f"{self.path} contains id {int(ids.max())}, outside its vocabulary of {self.vocab_size:,}", HINT
            )
        return ids

    def offsets(self) -> Offsets:
        """Returns the positions of the documents' end-of-text ids. Raises `UserError` if they are out of order."""
        offsets: Offsets = np.frombuffer(self._get_map(), "<u8", self.documents, self._offsets_start).copy()
        has_wrong_start = self.count > 0 and not self.continues and (not len(offsets) or offsets[0] != 0)
        is_unordered = len(offsets) and (np.any(offsets[1:] <= offsets[:-1]) or offsets[-1] >= self.count)
        if has_wrong_start or is_unordered:
            raise UserError(f"{self.path} has document offsets out of order", HINT)
        return offsets

    def release(self) -> None:
        """Unmaps the file. The pages stay in the page cache."""
        if self._map is not None:
            self._map.close()
            self._map = None

    def verify(self, sha256: str) -> None:
        """Reads the whole file. Raises `UserError` if its sha256 differs or ids or offsets are out of bounds."""
        with self._translate_errors():
            if file_sha256(self.path) != sha256:
                raise UserError(f"{self.path} is damaged: its sha256 has changed since it was created", HINT)
        for start in range(0, len(self), 2**22):
            self.take(start, start + 2**22)
            self.release()
        self.offsets()


Int64s = npt.NDArray[np.int64]
RELEASE_EVERY = 2**26  # Maximum mapped bytes.
RELEASE_MAPS = 256  # Maximum mapped files.


class TokenStream:
    """The ids of several shards as a sequence, read on demand."""

    def __init__(self, shards: Sequence[Shard]) -> None:
        self.shards = [shard for shard in shards if len(shard)]
        self._starts = np.cumsum([0, *(len(shard) for shard in self.shards)])
        self._touched = 0  # Bytes mapped since the last release.
        self._mapped_shards: set[int] = set()

    def __len__(self) -> int:
        return int(self._starts[-1])

    def take(self, start: int, length: int) -> Int64s:
        """Returns ``length`` ids starting at ``start``, int64. Wraps around at the end of the stream."""
        out = np.empty(length, np.int64)
        filled = 0
        while filled < length:
            position = (start + filled) % len(self)
            index = int(np.searchsorted(self._starts, position, "right")) - 1
            offset = position - int(self._starts[index])
            self._mapped_shards.add(index)
            part = self.shards[index].take(offset, offset + length - filled)
            out[filled : filled + len(part)] = part
            filled += len(part)
        self._count_read(length)
        return out

    def _count_read(self, length: int) -> None:
        """Limits resident memory by releasing shards after many reads. A read counts as at least 64 KiB."""
        self._touched += max(2**16, 4 * length)
        if self._touched > RELEASE_EVERY or len(self._mapped_shards) > RELEASE_MAPS:
            self.release()

    def release(self) -> None:
        """Unmaps all shards. Reading a shard maps it again."""
        for index in self._mapped_shards:
            self.shards[index].release()
        self._touched = 0
        self._mapped_shards.clear()

    @cached_property
    def offsets(self) -> Int64s:
        """The start of each document, and the end of the stream."""
        parts = []
        for shard, start in zip(self.shards, self._starts, strict=False):
            parts.append(shard.offsets().astype(np.int64) + start)
            shard.release()
        return np.concatenate([*parts, self._starts[-1:]])

    @property
    def documents(self) -> "TokenDocuments":
        """The documents of the stream, without end-of-text."""
        return TokenDocuments(self)


class TokenDocument:
    """The ids of one document, read when sliced."""

    def __init__(self, stream: TokenStream, start: int, stop: int) -> None:
        self.stream, self.start, self.stop = stream, start, stop

    def __len__(self) -> int:
        return self.stop - self.start

    def __getitem__(self, part: slice) -> Int64s:
        start, stop, step = part.indices(len(self))
        return self.stream.take(self.start + start, max(0, stop - start))[::step]


class TokenDocuments:
    """The documents of a stream."""

    def __init__(self, stream: TokenStream) -> None:
        self.stream = stream

    @property
    def lengths(self) -> Int64s:
        """The number of ids of each document."""
        lengths: Int64s = np.diff(self.stream.offsets) - 1
        return lengths

    def __len__(self) -> int:
        return len(self.stream.offsets) - 1

    def __getitem__(self, index: int) -> TokenDocument:
        start, end = self.stream.offsets[index : index + 2].tolist()
        return TokenDocument(self.stream, start + 1, end)

    def __iter__(self) -> Iterator[TokenDocument]:
        return (self[index] for index in range(len(self)))
