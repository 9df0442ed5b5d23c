"""Opens and decompresses sources: byte streams, ``.gz`` and ``.zst`` files, members of ``.zip`` and ``.tar`` archives.

Errors name the file on one line. Member names are never used as paths.
"""

import contextlib
import gzip
import io
import mmap
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

from gpt.system.distribution import install_extra
from gpt.system.errors import UserError, WorkError


@dataclass(frozen=True, slots=True)
class Source:
    """A file, URL or corpus entry with documents."""

    name: str  # Path, URL, "stdin" or "pydocs/with". The suffix determines the format.
    size: int  # Stored size in bytes.
    time: int  # Modification time in nanoseconds since 1970, or 0 if unknown.
    open: Callable[[], BinaryIO]  # Opens a new stream at the first byte.
    temporary: bool = False  # Standard input or a pipe, copied to disk for this process.
    lines: bool = False  # Whether rows are lines of one text instead of documents.


def file_source(name: str, path: Path) -> Source:
    """Returns a local file as a source."""
    status = path.stat()
    return Source(name, status.st_size, status.st_mtime_ns, partial(open, path, "rb"))  # type: ignore[arg-type]


BUFFER = 2**18  # Bytes per read of compressed files and lines.

OnBytes = Callable[[int], None]  # Called with the number of stored bytes read so far.


class StreamError(UserError):
    """A damaged or unreadable stream. ``name`` is the file's name."""

    def __init__(self, name: str, message: str, hint: str = "") -> None:
        super().__init__(message, hint)
        self.name = name


def reason(error: BaseException) -> str:
    """Returns an error's message on one line."""
    message = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
    return message.splitlines()[0]


def damage_error(name: str, error: Exception) -> StreamError:
    """Returns the error for a file whose contents do not match its suffix."""
    return StreamError(name, f"{name} is damaged: {reason(error)}", "get it again, or skip it with --skip-bad")


@contextlib.contextmanager
def translate_errors(to_error: Callable[[Exception], UserError]) -> Iterator[None]:
    """Converts any library exception to a `UserError`."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise to_error(error) from None


class ByteStream(io.RawIOBase):
    """A wrapped stream. Reads can be short, because bytes before damage are still returned. ``to_error`` converts
    exceptions of ``inner``. ``on_read`` is called with the size of each read."""

    def __init__(
        self, inner: Any, to_error: Callable[[Exception], UserError], on_read: OnBytes | None = None,
        *, seekable: bool = False,
    ) -> None:  # fmt: skip
        self.inner = inner
        self.to_error = to_error
        self.on_read = on_read
        self._read = getattr(inner, "read1", inner.read)
        self._seekable = seekable

    def readinto(self, buffer: Any, /) -> int:
        """Reads into a buffer. Returns the number of bytes, which is 0 only at the end."""
        with translate_errors(self.to_error):
            data: bytes = self._read(len(buffer))
        buffer[: len(data)] = data
        if self.on_read is not None:
            self.on_read(len(data))
        return len(data)

    def readable(self) -> bool:
        """Returns True."""
        return True

    def seekable(self) -> bool:
        """Whether `seek` is cheap."""
        return self._seekable

    def seek(self, offset: int, whence: int = 0, /) -> int:
        """Seeks in the wrapped stream. Returns the new position."""
        with translate_errors(self.to_error):
            if whence == 2:  # A mapped file cannot seek before its start.
                self.inner.seek(0, 2)
                offset, whence = max(0, self.inner.tell() + offset), 0
            self.inner.seek(offset, whence)
        return self.tell()

    def tell(self) -> int:
        """Returns the position in the wrapped stream."""
        return int(self.inner.tell())

    def close(self) -> None:
        """Closes the wrapped stream."""
        if not self.closed:
            super().close()
            _close(self.inner)


def _close(file: Any) -> None:
    with contextlib.suppress(OSError):  # Closing a copy fails if the disk is full.
        file.close()


def open_source(source: Source, on_bytes: OnBytes) -> ByteStream:
    """Opens a source. ``on_bytes`` is called with the bytes read so far."""
    bytes_read = 0

    def count(size: int) -> None:
        nonlocal bytes_read
        bytes_read += size
        on_bytes(min(bytes_read, source.size) if source.size else bytes_read)

    def to_error(error: Exception) -> UserError:
        hint = "check the file and its disk, or skip it with --skip-bad"
        return StreamError(source.name, f"cannot read {source.name}: {reason(error)}", hint)

    try:
        inner = source.open()
        return ByteStream(inner, to_error, count, seekable=inner.seekable())
    except OSError as error:
        raise to_error(error) from None


@contextlib.contextmanager
def temporary_file_errors() -> Iterator[None]:
    """Converts errors of a temporary file to `WorkError`."""
    try:
        yield
    except OSError as error:
        hint = "free up space there, or set TMPDIR to another folder"
        raise WorkError(f"cannot write to {tempfile.gettempdir()}: {reason(error)}", hint) from None


class Copy:
    """A copy of a stream in a temporary file that exists as long as this object or its streams. Raises `WorkError` if
    the disk is full."""

    def __init__(self, name: str, stream: ByteStream) -> None:
        self.name = name
        with temporary_file_errors():
            self._file = tempfile.TemporaryFile()  # noqa: SIM115
            weakref.finalize(self, _close, self._file)
            shutil.copyfileobj(stream, self._file, BUFFER)
            self._file.flush()
        self.size = self._file.tell()

    def open(self) -> ByteStream:
        """Opens the copy. Each stream has an independent position, even in forked processes."""
        view = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ) if self.size else io.BytesIO()
        return ByteStream(view, partial(damage_error, self.name), seekable=True)


@dataclass(frozen=True, slots=True)
class PackedFile:
    """A source or archive member, possibly compressed."""

    name: str  # Name for errors, such as "texts.zip/one.txt.gz".
    kind: str  # Lower-case name without the suffixes unpacked so far.
    open: Callable[[], ByteStream]
    depth: int = 0

    def unpack(self, ending: str) -> "PackedFile":
        """Returns the file after unpacking ``ending``, a key of `UNPACK`."""
        unpack, inner = UNPACK[ending]
        kind = self.kind.removesuffix(ending) + inner
        return replace(self, kind=kind, open=lambda: unpack(self.name, self.open()), depth=self.depth + 1)


@contextlib.contextmanager
def open_seekable(file: PackedFile) -> Iterator[ByteStream]:
    """Opens a file as a seekable stream, through a copy if needed."""
    with contextlib.closing(file.open()) as stream:
        if stream.seekable():
            yield stream
        else:
            with contextlib.closing(Copy(file.name, stream).open()) as copy:
                yield copy


def gunzip(name: str, packed: ByteStream) -> ByteStream:
    """Decompresses gzip with any number of members."""
    return ByteStream(gzip.GzipFile(fileobj=io.BufferedReader(packed, BUFFER)), partial(damage_error, name))


def unzstd(name: str, packed: ByteStream) -> ByteStream:
    """Decompresses Zstandard with any number of frames. Before Python 3.14, raises `WorkError` without
    backports.zstd."""
    try:
        if sys.version_info >= (3, 14):
            import compression.zstd as zstd
        else:
            import backports.zstd as zstd
    except ImportError:
        raise WorkError(f"{name} needs the package backports.zstd", install_extra("zstd")) from None
    return ByteStream(zstd.ZstdFile(io.BufferedReader(packed, BUFFER)), partial(damage_error, name))


# The decompressor of each suffix, and the suffix after decompression.
UNPACK: dict[str, tuple[Callable[[str, ByteStream], ByteStream], str]] = {
    ".gz": (gunzip, ""),
    ".zst": (unzstd, ""),
    ".tgz": (gunzip, ".tar"),
}


HEADER_LIMIT = 2**20  # Bytes of a long name or an attribute table in a .tar.
_SUPPORTED_METHODS = {zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED}  # The other methods need unbounded memory.
_EXTENDED_TYPES = {tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK, tarfile.XHDTYPE, tarfile.XGLTYPE, b"X"}


def zip_members(archive: PackedFile) -> Iterator[PackedFile]:
    """Yields the regular files of a ``.zip`` that are not hidden."""

    def open_member(info: zipfile.ZipInfo, name: str) -> ByteStream:
        if info.flag_bits & 1 or info.compress_type not in _SUPPORTED_METHODS:
            problem = "is encrypted, or packed with a method other than deflate"
            raise UserError(f"{name} {problem}", "unpack the archive yourself, and give the files")
        return ByteStream(members.open(info), partial(damage_error, name))

    with (
        open_seekable(archive) as stream,
        translate_errors(partial(damage_error, archive.name)),
        zipfile.ZipFile(io.BufferedReader(stream, BUFFER)) as members,
    ):
        for info in members.infolist():
            if not info.is_dir() and not _is_hidden(info.filename):
                yield _member(archive, info.filename, partial(open_member, info))


def tar_members(archive: PackedFile) -> Iterator[PackedFile]:
    """Yields the regular files of a ``.tar`` that are not hidden. The caller must read each file before
    requesting the next."""

    def open_member(info: tarfile.TarInfo, name: str) -> ByteStream:
        return ByteStream(members.extractfile(info), partial(damage_error, archive.name))

    with (
        contextlib.closing(archive.open()) as stream,
        translate_errors(partial(damage_error, archive.name)),
        tarfile.open(fileobj=stream, mode="r|", bufsize=BUFFER, tarinfo=_StrictHeader) as members,
    ):
        while (info := members.next()) is not None:
            members.members.clear()  # type: ignore[attr-defined]  # tarfile would store all headers.
            if info.isreg() and not _is_hidden(info.name):
                yield _member(archive, info.name, partial(open_member, info))
        while stream.read(BUFFER):  # The checksum of a compressed archive is at its end.
            pass


MAX_MAIL = 2**28  # Bytes of a message in an mbox.


def mbox_members(archive: PackedFile) -> Iterator[PackedFile]:
    """Yields the messages of an mbox file."""
    with (
        contextlib.closing(archive.open()) as stream,
        translate_errors(partial(damage_error, archive.name)),
        io.BufferedReader(stream, BUFFER) as lines,
    ):
        message, number, ends = bytearray(), 0, True  # Before a message is an empty line, or nothing.
        while line := lines.readline(BUFFER):
            if ends and line.startswith(b"From ") and message:
                number += 1
                yield _message(archive, number, bytes(message))
                message.clear()
            message += line.removeprefix(b">") if line.lstrip(b">").startswith(b"From ") else line
            if len(message) > MAX_MAIL:
                raise UserError(f"{archive.name} has a message of more than {MAX_MAIL >> 20} MiB", "is it an mbox?")
            ends = line in (b"\n", b"\r\n")
        if message:
            yield _message(archive, number + 1, bytes(message))


def _message(archive: PackedFile, number: int, data: bytes) -> PackedFile:
    name = f"{archive.name}/{number}.eml"
    head, _, rest = data.partition(b"\n")
    data = rest if head.startswith(b"From ") else data
    return PackedFile(
        name, name.lower(), lambda: ByteStream(io.BytesIO(data), partial(damage_error, name)), depth=archive.depth + 1
    )


class _StrictHeader(tarfile.TarInfo):
    """A header that raises an error if damaged. `tarfile` treats damage as the end."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> "_StrictHeader":
        """Parses a header of 512 bytes. Raises tarfile.ReadError if it is damaged or too large."""
        try:
            info = super().frombuf(buf, encoding, errors)
        except tarfile.HeaderError as error:
            if not buf.strip(b"\0"):  # This is the end of the archive.
                raise
            raise tarfile.ReadError(str(error)) from None
        if info.type in _EXTENDED_TYPES and info.size > HEADER_LIMIT:
            raise tarfile.ReadError(f"a header of {info.size:,} bytes")
        return info


def _member(archive: PackedFile, name: str, open_member: Callable[[str], ByteStream]) -> PackedFile:
    """Returns a member. Its name can be anything, because it is never used as a path."""
    full_name = f"{archive.name}/" + "".join(c if c.isprintable() else "?" for c in name)

    def open_checked() -> ByteStream:
        with translate_errors(partial(damage_error, full_name)):
            return open_member(full_name)

    return PackedFile(full_name, name.lower(), open_checked, archive.depth + 1)


# The function that yields the members of each kind of archive.
MEMBERS: dict[str, Callable[[PackedFile], Iterator[PackedFile]]] = {
    ".zip": zip_members,
    ".tar": tar_members,
    ".mbox": mbox_members,
}


def _is_hidden(name: str) -> bool:
    parts = name.replace("\\", "/").split("/")
    return any((part.startswith(".") and part not in (".", "..")) or part == "__MACOSX" for part in parts)
