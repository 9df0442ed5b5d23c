"""Archives → their members, one after the other, in the archive's order. Nothing is unpacked to a path."""

import contextlib
import io
import re
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from functools import partial

from gpt.errors import UserError
from gpt.text.streams import BUFFER, File, Stream, any_order, damaged

HEADER_LIMIT = 2**20  # bytes of a long name or a table of attributes in a .tar; more would only fill memory
_METHODS = {zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED}  # the others cannot be unpacked in bounded memory
_EXTENDED = {tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK, tarfile.XHDTYPE, tarfile.XGLTYPE, b"X"}


def zip_members(archive: File) -> Iterator[File]:
    """The regular, visible files of a ``.zip``."""
    with any_order(archive) as stream, _told(archive.name), _zip(stream) as opened:
        for info in opened.infolist():
            if not info.is_dir() and not _hidden(info.filename):
                yield _member(archive, info.filename, partial(_open_zipped, archive.name, opened, info), again=True)


def _zip(stream: Stream) -> zipfile.ZipFile:
    return zipfile.ZipFile(io.BufferedReader(stream, BUFFER))


def _open_zipped(archive: str, opened: zipfile.ZipFile, info: zipfile.ZipInfo) -> Stream:
    name = member_name(archive, info.filename)
    if info.flag_bits & 1:
        raise UserError(f"{name} is encrypted", "unpack the archive yourself, and give the files")
    if info.compress_type not in _METHODS:
        method = f"method {info.compress_type}; only deflate (8) is read"
        raise UserError(f"{name} is packed by {method}", "unpack the archive yourself, and give the files")
    try:
        return Stream(opened.open(info), lambda error: damaged(name, error))
    except UserError:
        raise
    except Exception as error:
        raise damaged(name, error) from None


def tar_members(archive: File) -> Iterator[File]:
    """The regular, visible files of a ``.tar``, read as a stream: each must be read before the next."""
    with contextlib.closing(archive.open()) as stream, _told(archive.name):
        opened = tarfile.open(fileobj=stream, mode="r|", bufsize=BUFFER, tarinfo=_Header)  # noqa: SIM115
        while (info := opened.next()) is not None:
            opened.members.clear()  # type: ignore[attr-defined]  # it would remember them all
            if info.isreg() and not _hidden(info.name):
                yield _member(archive, info.name, partial(_open_tarred, archive.name, opened, info), again=False)
        while stream.read(BUFFER):  # what packs the archive is checked by its very end
            pass


def _open_tarred(archive: str, opened: tarfile.TarFile, info: tarfile.TarInfo) -> Stream:
    inner = opened.extractfile(info)
    assert inner is not None, "a regular file has contents"
    return Stream(inner, lambda error: damaged(archive, error))


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


def _member(archive: File, name: str, open_: Callable[[], Stream], *, again: bool) -> File:
    """A member; opening it is an error where its name would lead out of the archive."""
    if name.startswith(("/", "\\")) or re.match(r"[A-Za-z]:[/\\]", name) or ".." in _parts(name):

        def open_() -> Stream:
            raise UserError(
                f"{archive.name} is refused: its member {member_name('', name)[1:]} leads out of it",
                "no honest archive has such a name; unpack it yourself if you trust it",
            )

    return File(member_name(archive.name, name), name.lower(), open_, again, archive.depth + 1)


def _hidden(name: str) -> bool:
    return any((part.startswith(".") and part not in (".", "..")) or part == "__MACOSX" for part in _parts(name))


def _parts(name: str) -> list[str]:
    return name.replace("\\", "/").split("/")
