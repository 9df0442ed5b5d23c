"""Bytes of a source, unpacked: streams that count what is read, .gz and .zst, members of .zip and .tar.

Errors are one line that names the file. Nothing is unpacked to a path.
"""

import contextlib
import gzip
import io
import re
import shutil
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, BinaryIO, Protocol, cast

from gpt.errors import UserError, WorkError


@dataclass(frozen=True, slots=True)
class Source:
    """A file, an address or an entry of a corpus that documents are read from."""

    name: str  # as a user would write it: a path, an address, "stdin", "pydocs/with"; its ending tells the format
    size: int  # bytes as they are stored
    time: int  # of its last change, nanoseconds since 1970; 0 where nobody knows
    open: Callable[[], BinaryIO]  # a new stream from its first byte
    passing: bool = False  # it can be read once, and lies on the disk for this process alone
    lines: bool = False  # its rows are the lines of one text, not documents


BUFFER = 2**18  # bytes between a file and what unpacks it, or takes it apart into lines
IN_MEMORY = 2**22  # bytes; what is spooled and longer goes to the disk
ZSTD_STEP = 128  # bytes; each 4 of them may stand for a block of 128 KiB, so a step gives 4 MiB at most

OnBytes = Callable[[int], None]  # is told how many stored bytes were read so far


class StreamError(UserError):
    """A stream that breaks off: damaged, or unreadable. ``name`` is its file's."""

    def __init__(self, name: str, message: str, hint: str = "") -> None:
        super().__init__(message, hint)
        self.name = name


class Readable(Protocol):
    """The part of a file object that a `ByteStream` needs."""

    def read(self, size: int, /) -> bytes: ...  # noqa: D102
    def close(self) -> None: ...  # noqa: D102


class ByteStream(io.RawIOBase):
    """Another stream, read as it comes: a read may be short, so that nothing is lost before a damage.

    What ``inner`` raises goes through ``told``, the number of bytes read to ``on_read``.
    """

    def __init__(
        self, inner: Readable, told: Callable[[Exception], UserError], on_read: OnBytes | None = None,
        *, seekable: bool = False, close: tuple[Readable, ...] = (),
    ) -> None:  # fmt: skip
        self.inner: Any = inner
        self.told = told
        self.on_read = on_read
        self._read = getattr(inner, "read1", inner.read)
        self._seekable = seekable
        self._to_close = (inner, *close)

    def read(self, size: int = -1, /) -> bytes:
        """At most ``size`` bytes; none at the end alone."""
        if size < 0:
            return self.readall() or b""
        try:
            data: bytes = self._read(size)
        except UserError:
            raise
        except Exception as error:
            raise self.told(error) from None
        if self.on_read is not None:
            self.on_read(len(data))
        return data

    def readinto(self, buffer: Any, /) -> int:
        """As `read`, into a buffer."""
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def readable(self) -> bool:
        """It is."""
        return True

    def seekable(self) -> bool:
        """Whether its parts can be read in any order, at little cost."""
        return self._seekable

    def seek(self, offset: int, whence: int = 0, /) -> int:
        """As the stream below does."""
        try:
            return int(self.inner.seek(offset, whence))
        except UserError:
            raise
        except Exception as error:
            raise self.told(error) from None

    def tell(self) -> int:
        """As the stream below does."""
        return int(self.inner.tell())

    def close(self) -> None:
        """Closes all that it was made of."""
        if not self.closed:
            super().close()
            for each in self._to_close:
                with contextlib.suppress(OSError):
                    each.close()


@dataclass(frozen=True, slots=True)
class PackedFile:
    """A source, or a member of an archive, on its way through the formats that it is wrapped in."""

    name: str  # as errors call it: "texts.zip/one.txt.gz"
    kind: str  # its name in small letters, less the endings that were unwrapped
    open: Callable[[], ByteStream]
    again: bool = True  # whether it can be opened more than once
    depth: int = 0  # wrappings around it

    def unpacked(self, ending: str) -> "PackedFile":
        """What its ending, one of `UNPACK`, was put around."""
        unpack, inner = UNPACK[ending]
        kind = self.kind.removesuffix(ending) + inner
        return PackedFile(self.name, kind, lambda: unpack(self.name, self.open()), self.again, self.depth + 1)


def reason(error: BaseException) -> str:
    """What an error says, on one line."""
    words = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
    return words.splitlines()[0]


def damaged(name: str, error: Exception) -> StreamError:
    """A file that is not what its ending promises, or is so no longer."""
    return StreamError(name, f"{name} is damaged: {reason(error)}", "get it once more, or leave it out with --skip-bad")


def of_source(source: Source, on_bytes: OnBytes) -> ByteStream:
    """A source's bytes from the first on. ``on_bytes`` hears how many were read in all."""
    done = 0

    def count(size: int) -> None:
        nonlocal done
        done += size
        on_bytes(min(done, source.size) if source.size else done)

    def told(error: Exception) -> UserError:
        hint = "look at the file and its disk, or leave it out with --skip-bad"
        return StreamError(source.name, f"cannot read {source.name}: {reason(error)}", hint)

    try:
        inner = source.open()
        return ByteStream(inner, told, count, seekable=inner.seekable())
    except OSError as error:
        raise told(error) from None


def gunzip(name: str, packed: ByteStream) -> ByteStream:
    """What is packed by gzip, member after member."""
    buffered = io.BufferedReader(packed, BUFFER)
    return ByteStream(gzip.GzipFile(fileobj=buffered), lambda error: damaged(name, error), close=(buffered,))


def unzstd(name: str, packed: ByteStream) -> ByteStream:
    """What is packed by Zstandard, frame after frame. Raises `WorkError` without the library."""
    try:
        import zstandard
    except ImportError:
        raise WorkError(f"{name} needs the package zstandard", "pip install 'gpt[zstd]'") from None

    def frames() -> Iterator[bytes]:
        frame = None
        while data := packed.read(BUFFER):
            for start in range(0, len(data), ZSTD_STEP):
                rest = data[start : start + ZSTD_STEP]
                while rest:
                    frame = frame or zstandard.ZstdDecompressor().decompressobj()
                    yield frame.decompress(rest)
                    rest = b""
                    if frame.eof:  # the only sign of a whole frame; the library's own reader is silent on a cut
                        rest, frame = frame.unused_data, None
        if frame is not None:
            raise EOFError("it ends in the middle of a frame")

    return ByteStream(Blocks(frames()), lambda error: damaged(name, error), close=(packed,))


class Blocks:
    """Blocks of bytes as something to `read` from."""

    def __init__(self, blocks: Iterator[bytes]) -> None:
        self.blocks = blocks
        self.rest = b""

    def read(self, size: int, /) -> bytes:
        """At most ``size`` bytes; none at the end alone."""
        while not self.rest:
            block = next(self.blocks, None)
            if block is None:
                return b""
            self.rest = block
        data, self.rest = self.rest[:size], self.rest[size:]
        return data

    def close(self) -> None:
        """Ends what the blocks come from."""
        close = getattr(self.blocks, "close", None)
        if close is not None:
            close()


@contextlib.contextmanager
def spooled(file: PackedFile) -> Iterator[PackedFile]:
    """A copy, to be opened as often as one likes and read in any order: in memory if it is small, else on the disk."""
    with contextlib.closing(file.open()) as stream, spool(stream) as copy:

        def again() -> ByteStream:
            copy.seek(0)
            return ByteStream(_Kept(copy), lambda error: damaged(file.name, error), seekable=True)

        yield PackedFile(file.name, file.kind, again, True, file.depth)


@contextlib.contextmanager
def any_order(file: PackedFile) -> Iterator[ByteStream]:
    """Its bytes, to be read in any order: as they lie there, or spooled where they come one after the other."""
    with contextlib.closing(file.open()) as stream:
        if stream.seekable():
            yield stream
        else:
            with spool(stream) as copy:
                yield ByteStream(copy, lambda error: damaged(file.name, error), seekable=True)


def spool(stream: ByteStream, in_memory: int = IN_MEMORY) -> BinaryIO:
    """All of a stream in a temporary file without a name. Raises `WorkError` where there is no room for it."""
    made = tempfile.SpooledTemporaryFile(in_memory) if in_memory else tempfile.TemporaryFile()  # noqa: SIM115
    copy = cast(BinaryIO, made)
    try:
        shutil.copyfileobj(stream, copy, BUFFER)
        copy.seek(0)
    except OSError as error:
        copy.close()
        hint = "make room there, or name another folder in TMPDIR"
        raise WorkError(f"cannot write to {tempfile.gettempdir()}: {reason(error)}", hint) from None
    except BaseException:
        copy.close()
        raise
    return copy


class _Kept:
    """A file that stays open when who reads it closes it."""

    def __init__(self, file: BinaryIO) -> None:
        self.read, self.seek, self.tell = file.read, file.seek, file.tell

    def close(self) -> None:
        """Does nothing."""


# What unpacks an ending, and the ending that is left.
UNPACK: dict[str, tuple[Callable[[str, ByteStream], ByteStream], str]] = {
    ".gz": (gunzip, ""),
    ".zst": (unzstd, ""),
    ".tgz": (gunzip, ".tar"),
    ".tzst": (unzstd, ".tar"),
}


HEADER_LIMIT = 2**20  # bytes of a long name or a table of attributes in a .tar; more would only fill memory
_METHODS = {zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED}  # the others cannot be unpacked in bounded memory
_EXTENDED = {tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK, tarfile.XHDTYPE, tarfile.XGLTYPE, b"X"}


def zip_members(archive: PackedFile) -> Iterator[PackedFile]:
    """The regular, visible files of a ``.zip``."""
    with any_order(archive) as stream, _told(archive.name), _zip(stream) as opened:
        for info in opened.infolist():
            if not info.is_dir() and not _hidden(info.filename):
                yield _member(archive, info.filename, partial(_open_zipped, archive.name, opened, info), again=True)


def _zip(stream: ByteStream) -> zipfile.ZipFile:
    return zipfile.ZipFile(io.BufferedReader(stream, BUFFER))


def _open_zipped(archive: str, opened: zipfile.ZipFile, info: zipfile.ZipInfo) -> ByteStream:
    name = member_name(archive, info.filename)
    if info.flag_bits & 1:
        raise UserError(f"{name} is encrypted", "unpack the archive yourself, and give the files")
    if info.compress_type not in _METHODS:
        method = f"method {info.compress_type}; only deflate (8) is read"
        raise UserError(f"{name} is packed by {method}", "unpack the archive yourself, and give the files")
    try:
        return ByteStream(opened.open(info), lambda error: damaged(name, error))
    except UserError:
        raise
    except Exception as error:
        raise damaged(name, error) from None


def tar_members(archive: PackedFile) -> Iterator[PackedFile]:
    """The regular, visible files of a ``.tar``, read as a stream: each must be read before the next."""
    with contextlib.closing(archive.open()) as stream, _told(archive.name):
        opened = tarfile.open(fileobj=stream, mode="r|", bufsize=BUFFER, tarinfo=_Header)  # noqa: SIM115
        while (info := opened.next()) is not None:
            opened.members.clear()  # type: ignore[attr-defined]  # it would remember them all
            if info.isreg() and not _hidden(info.name):
                yield _member(archive, info.name, partial(_open_tarred, archive.name, opened, info), again=False)
        while stream.read(BUFFER):  # what packs the archive is checked by its very end
            pass


def _open_tarred(archive: str, opened: tarfile.TarFile, info: tarfile.TarInfo) -> ByteStream:
    inner = opened.extractfile(info)
    assert inner is not None, "a regular file has contents"
    return ByteStream(inner, lambda error: damaged(archive, error))


class _Header(tarfile.TarInfo):
    """A header that is damaged is an error; `tarfile` takes it for the end."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> "_Header":
        """The header in 512 bytes."""
        try:
            info = super().frombuf(buf, encoding, errors)
        except tarfile.HeaderError as error:
            if not buf.strip(b"\0"):  # the end
                raise
            raise tarfile.ReadError(str(error)) from None
        if info.type in _EXTENDED and info.size > HEADER_LIMIT:
            raise tarfile.ReadError(f"a header of {info.size:,} bytes")
        return info


@contextlib.contextmanager
def _told(name: str) -> Iterator[None]:
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise damaged(name, error) from None


def member_name(archive: str, name: str) -> str:
    """What errors call a member."""
    return f"{archive}/" + "".join(c if c.isprintable() else "?" for c in name)


def _member(archive: PackedFile, name: str, open_: Callable[[], ByteStream], *, again: bool) -> PackedFile:
    """A member; opening it is an error where its name would lead out of the archive."""
    if name.startswith(("/", "\\")) or re.match(r"[A-Za-z]:[/\\]", name) or ".." in _parts(name):

        def open_() -> ByteStream:
            raise UserError(
                f"{archive.name} is refused: its member {member_name('', name)[1:]} leads out of it",
                "no honest archive has such a name; unpack it yourself if you trust it",
            )

    return PackedFile(member_name(archive.name, name), name.lower(), open_, again, archive.depth + 1)


def _hidden(name: str) -> bool:
    return any((part.startswith(".") and part not in (".", "..")) or part == "__MACOSX" for part in _parts(name))


def _parts(name: str) -> list[str]:
    return name.replace("\\", "/").split("/")
