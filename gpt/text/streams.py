"""Streams of bytes: counted, unpacked, spooled. What goes wrong in one is told in a line that names its file."""

import contextlib
import gzip
import io
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO, Protocol, cast

from gpt.errors import UserError, WorkError
from gpt.text.source import Source

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
    """The part of a file object that a `Stream` needs."""

    def read(self, size: int, /) -> bytes: ...  # noqa: D102
    def close(self) -> None: ...  # noqa: D102


class Stream(io.RawIOBase):
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
class File:
    """A source, or a member of an archive, on its way through the formats that it is wrapped in."""

    name: str  # as errors call it: "texts.zip/one.txt.gz"
    kind: str  # its name in small letters, less the endings that were unwrapped
    open: Callable[[], Stream]
    again: bool = True  # whether it can be opened more than once
    depth: int = 0  # wrappings around it

    def unpacked(self, ending: str) -> "File":
        """What its ending, one of `UNPACK`, was put around."""
        unpack, inner = UNPACK[ending]
        kind = self.kind.removesuffix(ending) + inner
        return File(self.name, kind, lambda: unpack(self.name, self.open()), self.again, self.depth + 1)


def reason(error: BaseException) -> str:
    """What an error says, on one line."""
    words = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
    return words.splitlines()[0]


def damaged(name: str, error: Exception) -> StreamError:
    """A file that is not what its ending promises, or is so no longer."""
    return StreamError(name, f"{name} is damaged: {reason(error)}", "get it once more, or leave it out with --skip-bad")


def of_source(source: Source, on_bytes: OnBytes) -> Stream:
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
        return Stream(inner, told, count, seekable=inner.seekable())
    except OSError as error:
        raise told(error) from None


def gunzip(name: str, packed: Stream) -> Stream:
    """What is packed by gzip, member after member."""
    buffered = io.BufferedReader(packed, BUFFER)
    return Stream(gzip.GzipFile(fileobj=buffered), lambda error: damaged(name, error), close=(buffered,))


def unzstd(name: str, packed: Stream) -> Stream:
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

    return Stream(Blocks(frames()), lambda error: damaged(name, error), close=(packed,))


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
def spooled(file: File) -> Iterator[File]:
    """A copy, to be opened as often as one likes and read in any order: in memory if it is small, else on the disk."""
    with contextlib.closing(file.open()) as stream, spool(stream) as copy:

        def again() -> Stream:
            copy.seek(0)
            return Stream(_Kept(copy), lambda error: damaged(file.name, error), seekable=True)

        yield File(file.name, file.kind, again, True, file.depth)


@contextlib.contextmanager
def any_order(file: File) -> Iterator[Stream]:
    """Its bytes, to be read in any order: as they lie there, or spooled where they come one after the other."""
    with contextlib.closing(file.open()) as stream:
        if stream.seekable():
            yield stream
        else:
            with spool(stream) as copy:
                yield Stream(copy, lambda error: damaged(file.name, error), seekable=True)


def spool(stream: Stream, in_memory: int = IN_MEMORY) -> BinaryIO:
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
UNPACK: dict[str, tuple[Callable[[str, Stream], Stream], str]] = {
    ".gz": (gunzip, ""),
    ".zst": (unzstd, ""),
    ".tgz": (gunzip, ".tar"),
    ".tzst": (unzstd, ".tar"),
}
