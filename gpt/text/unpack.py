"""Sources and their bytes, unpacked: counted streams, ``.gz`` and ``.zst``, the members of ``.zip`` and ``.tar``.

Errors name the file in one line. Nothing is unpacked to a path, and names in archives are never used as one.
"""

import contextlib
import gzip
import io
import mmap
import re
import shutil
import sys
import tarfile
import tempfile
import weakref
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from gpt.distribution import install_extra
from gpt.errors import UserError, WorkError


@dataclass(frozen=True, slots=True)
class Source:
    """A file, an address or an entry of a corpus that documents are read from."""

    name: str  # as a user writes it: a path, an address, "stdin", "pydocs/with"; its suffix tells the format
    size: int  # bytes as they are stored
    time: int  # of its last change, nanoseconds since 1970; 0 if unknown
    open: Callable[[], BinaryIO]  # opens a new stream at the first byte
    temporary: bool = False  # standard input or a pipe, kept on the disk for this process alone
    lines: bool = False  # rows are the lines of one text, not documents


def file_source(name: str, path: Path) -> Source:
    """Returns a file on the disk as a source."""
    status = path.stat()
    return Source(name, status.st_size, status.st_mtime_ns, partial(open, path, "rb"))  # type: ignore[arg-type]


BUFFER = 2**18  # bytes read at once from a packed file, or one of lines

OnBytes = Callable[[int], None]  # gets the number of stored bytes read so far


class StreamError(UserError):
    """A stream that is damaged or unreadable. ``name`` is the file's."""

    def __init__(self, name: str, message: str, hint: str = "") -> None:
        super().__init__(message, hint)
        self.name = name


def reason(error: BaseException) -> str:
    """Returns an error's message, on one line."""
    words = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
    return words.splitlines()[0]


def damaged(name: str, error: Exception) -> StreamError:
    """Returns the error for a file that is not what its suffix promises."""
    return StreamError(name, f"{name} is damaged: {reason(error)}", "get it again, or skip it with --skip-bad")


@contextlib.contextmanager
def translated(to_error: Callable[[Exception], UserError]) -> Iterator[None]:
    """Turns what a library raises, of whatever type, into a `UserError`."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise to_error(error) from None


class ByteStream(io.RawIOBase):
    """A wrapper of another stream. A read may be short, so that all bytes before a damaged one are returned.

    ``to_error`` turns what ``inner`` raises into a `UserError`; ``on_read`` gets the number of bytes of each read.
    """

    def __init__(
        self, inner: Any, to_error: Callable[[Exception], UserError], on_read: OnBytes | None = None,
        *, seekable: bool = False, close: tuple[Any, ...] = (),
    ) -> None:  # fmt: skip
        self.inner = inner
        self.to_error = to_error
        self.on_read = on_read
        self._read = getattr(inner, "read1", inner.read)
        self._seekable = seekable
        self._to_close = (inner, *close)

    def readinto(self, buffer: Any, /) -> int:
        """Reads into a buffer; returns the number of bytes, 0 only at the end."""
        with translated(self.to_error):
            data: bytes = self._read(len(buffer))
        buffer[: len(data)] = data
        if self.on_read is not None:
            self.on_read(len(data))
        return len(data)

    def readable(self) -> bool:
        """True."""
        return True

    def seekable(self) -> bool:
        """Whether `seek` costs little."""
        return self._seekable

    def seek(self, offset: int, whence: int = 0, /) -> int:
        """Seeks in the wrapped stream; returns the new position."""
        with translated(self.to_error):
            if whence == 2:  # a mapped file does not seek to before its start
                self.inner.seek(0, 2)
                offset, whence = max(0, self.inner.tell() + offset), 0
            self.inner.seek(offset, whence)
        return self.tell()

    def tell(self) -> int:
        """Returns the position in the wrapped stream."""
        return int(self.inner.tell())

    def close(self) -> None:
        """Closes the wrapped streams."""
        if not self.closed:
            super().close()
            for each in self._to_close:
                _close(each)


def _close(file: Any) -> None:
    with contextlib.suppress(OSError):  # a copy may have bytes that the disk has no room for
        file.close()


def open_source(source: Source, on_bytes: OnBytes) -> ByteStream:
    """Opens a source. ``on_bytes`` gets the number of bytes read so far."""
    done = 0

    def count(size: int) -> None:
        nonlocal done
        done += size
        on_bytes(min(done, source.size) if source.size else done)

    def to_error(error: Exception) -> UserError:
        hint = "check the file and its disk, or skip it with --skip-bad"
        return StreamError(source.name, f"cannot read {source.name}: {reason(error)}", hint)

    try:
        inner = source.open()
        return ByteStream(inner, to_error, count, seekable=inner.seekable())
    except OSError as error:
        raise to_error(error) from None


class Copy:
    """A copy of a stream, in a temporary file without a name that exists until nobody can open it any more.

    Raises `WorkError` where the disk has no room.
    """

    def __init__(self, name: str, stream: ByteStream) -> None:
        self.name = name
        try:
            self._file = tempfile.TemporaryFile()  # noqa: SIM115
            weakref.finalize(self, _close, self._file)
            shutil.copyfileobj(stream, self._file, BUFFER)
            self._file.flush()
        except OSError as error:
            hint = "free up space there, or set TMPDIR to another folder"
            raise WorkError(f"cannot write to {tempfile.gettempdir()}: {reason(error)}", hint) from None
        self.size = self._file.tell()

    def open(self) -> ByteStream:
        """Opens the copy, as often as needed. Each stream has a position of its own, in forked processes too."""
        view = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ) if self.size else io.BytesIO()
        return ByteStream(view, partial(damaged, self.name), seekable=True)


@dataclass(frozen=True, slots=True)
class PackedFile:
    """A source, or a member of an archive, with the formats that are still to be unpacked."""

    name: str  # for errors: "texts.zip/one.txt.gz"
    kind: str  # the name in lower case, without the suffixes that are unpacked already
    open: Callable[[], ByteStream]
    reopenable: bool = True
    depth: int = 0  # formats unpacked so far

    def unpacked(self, ending: str) -> "PackedFile":
        """Returns the file with ``ending``, one of `UNPACK`, unpacked."""
        unpack, inner = UNPACK[ending]
        kind = self.kind.removesuffix(ending) + inner
        return replace(self, kind=kind, open=lambda: unpack(self.name, self.open()), depth=self.depth + 1)

    def spooled(self) -> "PackedFile":
        """Returns a copy that can be opened again and is seekable."""
        with contextlib.closing(self.open()) as stream:
            return replace(self, open=Copy(self.name, stream).open, reopenable=True)


@contextlib.contextmanager
def opened_seekable(file: PackedFile) -> Iterator[ByteStream]:
    """Opens a file as a seekable stream: as it is, or spooled where it is not seekable."""
    with contextlib.closing(file.open()) as stream:
        if stream.seekable():
            yield stream
        else:
            with contextlib.closing(Copy(file.name, stream).open()) as copy:
                yield copy


def gunzip(name: str, packed: ByteStream) -> ByteStream:
    """Unpacks gzip, member after member."""
    buffered = io.BufferedReader(packed, BUFFER)
    return ByteStream(gzip.GzipFile(fileobj=buffered), partial(damaged, name), close=(buffered,))


def unzstd(name: str, packed: ByteStream) -> ByteStream:
    """Unpacks Zstandard, frame after frame. Before Python 3.14, raises `WorkError` without the package."""
    try:
        if sys.version_info >= (3, 14):
            import compression.zstd as zstd
        else:
            import backports.zstd as zstd
    except ImportError:
        raise WorkError(f"{name} needs the package backports.zstd", install_extra("zstd")) from None
    buffered = io.BufferedReader(packed, BUFFER)
    return ByteStream(zstd.ZstdFile(buffered), partial(damaged, name), close=(buffered,))


# How to unpack a suffix, and the suffix that is left.
UNPACK: dict[str, tuple[Callable[[str, ByteStream], ByteStream], str]] = {
    ".gz": (gunzip, ""),
    ".zst": (unzstd, ""),
    ".tgz": (gunzip, ".tar"),
    ".tzst": (unzstd, ".tar"),
}


HEADER_LIMIT = 2**20  # bytes of a long name or a table of attributes in a .tar
_METHODS = {zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED}  # the others cannot be unpacked in bounded memory
_EXTENDED = {tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK, tarfile.XHDTYPE, tarfile.XGLTYPE, b"X"}


def zip_members(archive: PackedFile) -> Iterator[PackedFile]:
    """Yields the regular files of a ``.zip`` that are not hidden."""

    def opened(info: zipfile.ZipInfo, name: str) -> ByteStream:
        if info.flag_bits & 1:
            raise UserError(f"{name} is encrypted", "unpack the archive yourself, and give the files")
        if info.compress_type not in _METHODS:
            method = f"method {info.compress_type}; only deflate (8) is supported"
            raise UserError(f"{name} is compressed with {method}", "unpack the archive yourself, and give the files")
        return ByteStream(members.open(info), partial(damaged, name))

    with (
        opened_seekable(archive) as stream,
        translated(partial(damaged, archive.name)),
        zipfile.ZipFile(io.BufferedReader(stream, BUFFER)) as members,
    ):
        for info in members.infolist():
            if not info.is_dir() and not _hidden(info.filename):
                yield _member(archive, info.filename, partial(opened, info), reopenable=True)


def tar_members(archive: PackedFile) -> Iterator[PackedFile]:
    """Yields the regular files of a ``.tar`` that are not hidden. Each must be read before the next one."""

    def opened(info: tarfile.TarInfo, name: str) -> ByteStream:
        return ByteStream(members.extractfile(info), partial(damaged, archive.name))

    with (
        contextlib.closing(archive.open()) as stream,
        translated(partial(damaged, archive.name)),
        tarfile.open(fileobj=stream, mode="r|", bufsize=BUFFER, tarinfo=_Header) as members,
    ):
        while (info := members.next()) is not None:
            members.members.clear()  # type: ignore[attr-defined]  # it would keep them all
            if info.isreg() and not _hidden(info.name):
                yield _member(archive, info.name, partial(opened, info), reopenable=False)
        while stream.read(BUFFER):  # a checksum of the packed archive is at its end
            pass


class _Header(tarfile.TarInfo):
    """A header for which damage is an error; `tarfile` takes a damaged header for the end."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> "_Header":
        """Reads a header of 512 bytes. Raises tarfile.ReadError where it is damaged or too large."""
        try:
            info = super().frombuf(buf, encoding, errors)
        except tarfile.HeaderError as error:
            if not buf.strip(b"\0"):  # the end
                raise
            raise tarfile.ReadError(str(error)) from None
        if info.type in _EXTENDED and info.size > HEADER_LIMIT:
            raise tarfile.ReadError(f"a header of {info.size:,} bytes")
        return info


def _member(archive: PackedFile, name: str, opened: Callable[[str], ByteStream], *, reopenable: bool) -> PackedFile:
    """Returns a member; opening it is an error if its name leads out of the archive."""
    printable = "".join(c if c.isprintable() else "?" for c in name)
    shown = f"{archive.name}/{printable}"

    def open_() -> ByteStream:
        if name.startswith(("/", "\\")) or re.match(r"[A-Za-z]:[/\\]", name) or ".." in _parts(name):
            raise UserError(
                f"{archive.name} is unsafe: its member {printable} points outside the archive",
                "a normal archive has no such names; unpack it yourself if you trust it",
            )
        with translated(partial(damaged, shown)):
            return opened(shown)

    return PackedFile(shown, name.lower(), open_, reopenable, archive.depth + 1)


def _hidden(name: str) -> bool:
    return any((part.startswith(".") and part not in (".", "..")) or part == "__MACOSX" for part in _parts(name))


def _parts(name: str) -> list[str]:
    return name.replace("\\", "/").split("/")
