"""Ids on disk: a file that says what it is, checked when it is opened, mapped into memory and not read.

Layout, little-endian: an 8-byte magic, then version, dtype code (2 or 4 bytes an id), vocabulary size and flags as
uint32; count of ids and count of documents as uint64; the ids; padding to 8 bytes; the offset of each document's
first id as uint64. A document is its end-of-text, which stands before it, and its ids.
"""

import struct
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt

from gpt.errors import UserError
from gpt.files import whole_file
from gpt.text.tokenizer import Ids, Tokenizer

MAGIC = b"GPTIDS\r\n"
VERSION = 1
HEADER = struct.Struct("<8sIIIIQQ")


@dataclass(frozen=True)
class Shard:
    """Ids and where documents start in them; ``ids[offsets[d]]`` is the end-of-text before document d."""

    ids: npt.NDArray[np.uint16] | npt.NDArray[np.uint32]
    offsets: npt.NDArray[np.uint64]

    def documents(self) -> Iterator[npt.NDArray[np.int64]]:
        """Each document's ids, without end-of-text."""
        for start, end in pairwise([*self.offsets.tolist(), len(self.ids)]):
            yield self.ids[start + 1 : end].astype(np.int64)


def encode_documents(tokenizer: Tokenizer, texts: Sequence[str]) -> Shard:
    """The texts as ids, each after an end-of-text; uint16 where the vocabulary allows."""
    dtype = np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32
    eot = np.array([tokenizer.eot], np.uint32)
    parts: list[Ids] = []
    offsets: list[int] = []
    position = 0
    for text in texts:
        ids = tokenizer.encode(text)
        offsets.append(position)
        parts += [eot, ids]
        position += 1 + len(ids)
    ids = np.concatenate(parts).astype(dtype) if parts else np.array([], dtype)
    return Shard(ids, np.array(offsets, np.uint64))


def write(path: Path, shard: Shard, vocab_size: int) -> None:
    """All of ``shard`` at ``path``, or nothing: written beside it, synced, renamed."""
    _check_little_endian()
    header = HEADER.pack(MAGIC, VERSION, shard.ids.itemsize, vocab_size, 0, len(shard.ids), len(shard.offsets))
    with whole_file(path) as file:
        file.write(header)
        shard.ids.tofile(file)
        file.write(bytes(-shard.ids.nbytes % 8))
        shard.offsets.tofile(file)


def read(path: Path) -> tuple[Shard, int]:
    """The shard at ``path``, memory-mapped, and its vocabulary's size.

    Raises `UserError` where the file is another kind, cut short, or holds ids outside its vocabulary.
    """
    _check_little_endian()
    hint = "make it again from the text"
    size = path.stat().st_size
    with path.open("rb") as file:
        header = file.read(HEADER.size)
    if len(header) < HEADER.size or header[:8] != MAGIC:
        raise UserError(f"{path} is no token file of ours", hint)
    _, version, itemsize, vocab_size, _, count, documents = HEADER.unpack(header)
    if version != VERSION or itemsize not in (2, 4):
        raise UserError(
            f"{path} has version {version}, dtype code {itemsize}; this program reads version {VERSION}", hint
        )
    ids_end = HEADER.size + count * itemsize
    offsets_start = ids_end + -(count * itemsize) % 8
    if size != offsets_start + documents * 8:
        raise UserError(f"{path} has {size:,} bytes; its header promises {offsets_start + documents * 8:,}", hint)
    if not count:
        return Shard(np.array([], np.uint16), np.array([], np.uint64)), vocab_size
    ids = np.memmap(path, np.uint16 if itemsize == 2 else np.uint32, "r", HEADER.size, (count,))
    offsets = np.fromfile(path, np.uint64, documents, offset=offsets_start)
    if int(ids.max()) >= vocab_size:
        raise UserError(f"{path} holds id {int(ids.max())}, outside its vocabulary of {vocab_size:,}", hint)
    if documents and (offsets[0] != 0 or np.any(np.diff(offsets.astype(np.int64)) <= 0) or offsets[-1] >= count):
        raise UserError(f"{path} has document offsets out of order", hint)
    return Shard(ids, offsets), vocab_size


def _check_little_endian() -> None:
    if sys.byteorder != "little":
        raise UserError("token files are little-endian and this machine is not")
