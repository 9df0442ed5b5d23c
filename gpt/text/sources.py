"""A user's TEXT arguments → sources: files, folders, patterns, standard input, addresses, corpora by name."""

import contextlib
import datetime
import email.utils
import fnmatch
import glob
import io
import os
import shlex
import stat
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path, PurePath
from typing import Any, BinaryIO, cast
from urllib.parse import urlsplit

from gpt.errors import UserError, WorkError, did_you_mean
from gpt.text import catalogue
from gpt.text.documents import Skipped
from gpt.text.download import OnBytes, ignore
from gpt.text.token_folder import is_token_folder
from gpt.text.tokenizer_files import RANKS, WHOLE
from gpt.text.unpack import ByteStream, Source, reason, spool

DEFAULT = "pydocs"  # the corpus to read where no text is given

OnNote = Callable[[str], None]


def no_note(note: str) -> None:
    """The listener that prints nothing."""


def find(
    texts: Sequence[str], skipped: Skipped | None = None, on_bytes: OnBytes = ignore, note: OnNote = no_note
) -> list[Source]:
    """Returns the sources that ``texts`` name, each once, in the order given; without ``texts``, those of `DEFAULT`.

    A text is ``-`` (standard input), a file, a folder (recursive, sorted, without hidden entries and token folders), an
    address, a pattern, or a corpus of the catalogue, looked for in this order. Raises `UserError` for anything else and
    for unreadable files and folders, which ``skipped``, if given, counts instead. ``on_bytes`` gets the progress of a
    corpus that is fetched, ``note`` what a folder contains that is not read.
    """
    if not texts:
        return catalogue.sources(DEFAULT)  # even if a file has that name
    left_out = _LeftOut()
    found = (source for text in dict.fromkeys(texts) for source in _sources_of(text, skipped, on_bytes, left_out))
    once: dict[str, Source] = {}
    for source in found:
        once.setdefault(identity(source), source)
    for line in left_out.notes():
        note(line)
    return list(once.values())


_LEFT_OUT = {  # kinds of paths, in words
    "broken": ("a broken link", "broken links"),
    "upward": ("a link to a folder above it", "links to folders above them"),
    "special": ("a pipe, socket or device", "pipes, sockets or devices"),
}


class _LeftOut:
    """What folders contain that is not read."""

    def __init__(self) -> None:
        self.paths: dict[str, dict[str, str]] = {kind: {} for kind in _LEFT_OUT}

    def add(self, kind: str, path: str) -> None:
        """Adds a path, which may have been added by another name."""
        place = Path(os.path.realpath(Path(path).parent), Path(path).name)
        self.paths[kind].setdefault(str(place), path)

    def notes(self) -> Iterator[str]:
        """Yields a line for each kind."""
        for kind, (one, many) in _LEFT_OUT.items():
            paths = list(self.paths[kind].values())
            if paths:
                what = f"{one}: " if len(paths) == 1 else f"{len(paths):,} {many}, such as "
                yield f"skipped {what}{paths[0]}"


def identity(source: Source) -> str:
    """Returns what identifies a source: the real path of a file on disk, else the name."""
    on_disk = source.time and "://" not in source.name
    return os.path.realpath(source.name) if on_disk else source.name


def published(texts: Sequence[str], on_bytes: OnBytes = ignore) -> list[Source]:
    """Returns the held-out text that was published with a corpus, where ``texts`` is that corpus alone."""
    if len(texts) == 1 and _status(texts[0]) is None and texts[0] in catalogue.names():
        return catalogue.val_sources(texts[0], on_bytes)
    return []


def _sources_of(text: str, skipped: Skipped | None, on_bytes: OnBytes, left_out: _LeftOut) -> list[Source]:
    if text == "-":
        return [_standard_input()]
    status = _status(text)
    if status is not None:
        return _folder(text, skipped, left_out) if stat.S_ISDIR(status.st_mode) else _files([text], skipped)
    if "://" in text:
        return find_remote(text)
    if glob.has_magic(text):
        return _pattern(text, skipped, left_out)
    if text in catalogue.names():
        return catalogue.sources(text, on_bytes)
    if "/" in text or "\\" in text or "." in text:
        raise UserError(f"there is no file {text}", "give a file, a folder, - for standard input, or a corpus by name")
    raise UserError(f'there is no file and no corpus called "{text}"', did_you_mean(text, catalogue.names()))


def _status(text: str) -> os.stat_result | None:
    """Returns the status of the file or folder of that name; None where there is none."""
    try:
        return Path(text).stat() if text else None
    except PermissionError as error:
        raise _unreadable(text, error) from None
    except (OSError, ValueError):
        return None


def _unreadable(name: str, error: OSError) -> UserError:
    return UserError(f"cannot read {name}: {reason(error)}", "look at its permissions, or leave it out: --skip-bad")


def _folder(folder: str, skipped: Skipped | None, left_out: _LeftOut) -> list[Source]:
    if _is_tokens(folder):
        raise UserError(f"{folder} is tokenized already", f"gpt train {shlex.quote(folder)} takes it as it is")
    found = _files(_below(folder, skipped, left_out), skipped)
    if not found:
        raise UserError(f"the folder {folder} has no files in it (hidden ones are skipped)")
    return found


def _is_tokens(folder: str) -> bool:
    """Whether a folder is a token folder. Other folders may have a manifest.json too."""
    with contextlib.suppress(PermissionError):  # an error where the folder is listed
        return any(Path(folder, name).is_file() for name in (RANKS, WHOLE)) and is_token_folder(folder)
    return False


def _below(folder: str, skipped: Skipped | None, left_out: _LeftOut) -> Iterator[str]:
    """Yields the regular files below a folder, sorted, without hidden ones and token folders. Links are followed, each
    folder is read once."""

    def cannot_list(error: OSError) -> None:
        _bad(_unreadable(f"the folder {error.filename}", error), skipped)

    seen = {os.path.realpath(folder)}
    for parent, folders, names in os.walk(folder, onerror=cannot_list, followlinks=True):
        if _is_tokens(parent):
            folders.clear()
            continue
        visible = [str(Path(parent, name)) for name in sorted(folders) if not name.startswith(".")]
        around = os.path.realpath(parent) if visible else ""
        folders[:] = [Path(path).name for path in visible if _is_new(path, around, seen, left_out)]
        for path in (str(Path(parent, name)) for name in sorted(names) if not name.startswith(".")):
            kind = _type(path)
            if kind == stat.S_IFREG:
                yield path
            else:
                left_out.add("special" if kind else "broken", path)


def _is_new(path: str, around: str, seen: set[str], left_out: _LeftOut) -> bool:
    """Whether a folder, or what a link to one leads to, is still to be read; from now on it is in ``seen``. ``around``
    is the real path of the folder that it is in.

    A link to a folder that it is in is left out: all that is around the folder asked for would be read with it.
    """
    real = os.path.realpath(path)
    if real in seen:
        return False
    if (around.removesuffix(os.sep) + os.sep).startswith(real.removesuffix(os.sep) + os.sep):
        left_out.add("upward", path)
        return False
    seen.add(real)
    return True


def _type(path: str) -> int:
    """Returns the type of a path, as in `stat`. An unreadable path counts as a file: `_file` then raises."""
    try:
        return stat.S_IFMT(Path(path).stat().st_mode)
    except PermissionError:
        return stat.S_IFREG
    except OSError:
        return 0


def _bad(error: UserError, skipped: Skipped | None) -> None:
    """Counts an error, or raises it where nothing is to be skipped."""
    if skipped is None:
        raise error from None
    skipped.add(error)


def _pattern(pattern: str, skipped: Skipped | None, left_out: _LeftOut) -> list[Source]:
    """Returns the files that a pattern matches, and those below folders that it matches, sorted."""
    paths: set[str] = set()
    parts = PurePath(pattern).parts
    at = parts.index("**") if "**" in parts else len(parts)  # where glob itself would follow links without end
    for match in glob.iglob(pattern if at == len(parts) else str(PurePath(*parts[:at]))):
        if _type(match) == stat.S_IFDIR:
            named = Path(match).name not in ("", "..")
            if named and not _is_new(match, os.path.realpath(Path(match).parent), set(), left_out):
                continue
            below = _below(match, skipped, left_out)
            paths.update(path for path in below if _matches(PurePath(path).relative_to(match).parts, parts[at:]))
        elif _type(match) == stat.S_IFREG and at == len(parts):
            paths.add(match)
    if not paths:
        raise UserError(
            f"no file matches {pattern}", "** goes into folders: 'texts/**/*.txt'; hidden files are skipped"
        )
    return _files(sorted(paths), skipped)


def _matches(names: Sequence[str], pattern: Sequence[str]) -> bool:
    """Whether a path, or a folder that it leads through, matches a pattern with ``**``."""
    if not pattern:
        return True
    if pattern[0] == "**":
        return any(_matches(names[start:], pattern[1:]) for start in range(len(names) + 1))
    return bool(names) and fnmatch.fnmatch(names[0], pattern[0]) and _matches(names[1:], pattern[1:])


def _files(paths: Iterator[str] | Sequence[str], skipped: Skipped | None) -> list[Source]:
    found = []
    for path in paths:
        try:
            found.append(_file(path))
        except UserError as error:
            _bad(error, skipped)
    return found


def _file(path: str) -> Source:
    try:
        status = Path(path).stat()
        if stat.S_ISCHR(status.st_mode) or stat.S_ISBLK(status.st_mode):  # which may never end
            raise UserError(f"{path} is a device, and no text", "give a file, a folder, or - for standard input")
        if not stat.S_ISREG(status.st_mode):  # a pipe, as in <(command)
            return _spooled(path, open(path, "rb"))
    except OSError as error:
        raise _unreadable(path, error) from None
    return Source(path, status.st_size, status.st_mtime_ns, partial(open, path, "rb"))  # type: ignore[arg-type]


def _standard_input() -> Source:
    if sys.stdin is None:
        raise UserError("there is no standard input to read", "give a file")
    return _spooled("stdin", sys.stdin.buffer)


def _spooled(name: str, stream: BinaryIO) -> Source:
    """Copies a stream to the disk, since it can be read only once."""
    copy = _Copy(
        spool(ByteStream(stream, lambda error: UserError(f"cannot read {name}: {reason(error)}")), in_memory=0)
    )
    return Source(name, copy.size, 0, copy.open, temporary=True)


class _Copy:
    """A file without a name that exists until nobody can open it any more."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.size = os.fstat(file.fileno()).st_size
        weakref.finalize(self, file.close)

    def open(self) -> BinaryIO:
        return cast(BinaryIO, io.BufferedReader(_View(self)))

    def read(self, position: int, size: int) -> bytes:
        if hasattr(os, "pread"):
            return os.pread(self.file.fileno(), size, position)  # a forked process shares the file's position
        self.file.seek(position)
        return self.file.read(size)


class _View(io.RawIOBase):
    """A reader of a copy, with its own position."""

    def __init__(self, copy: _Copy) -> None:
        self.copy = copy
        self.position = 0

    def readinto(self, buffer: Any, /) -> int:
        data = self.copy.read(self.position, len(buffer))
        buffer[: len(data)] = data
        self.position += len(data)
        return len(data)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.position

    def seek(self, offset: int, whence: int = 0, /) -> int:
        start = (0, self.position, self.copy.size)[whence]
        self.position = max(0, start + offset)
        return self.position


def run_name(texts: Sequence[str]) -> str:
    """Returns the name of a run on ``texts``: the first text's, without the suffixes of its format."""
    text = texts[0] if texts else DEFAULT
    if text == "-":
        return "stdin"
    there = _status(text) is not None
    if "://" in text and not there:
        parts = urlsplit(text)
        text = parts.netloc + parts.path
    path = Path(os.path.abspath(text))
    while glob.has_magic(path.name) and not there:  # a pattern is named after its folder
        path = path.parent
    if path.suffix.lower() in (".gz", ".zst"):
        path = path.with_suffix("")
    return path.stem or "text"


_SLOW = 60.0  # seconds without a byte until a connection counts as lost
_TIMES = ("mtime", "LastModified", "last_modified", "Last-Modified", "updated", "created")  # file systems' names for it


def find_remote(address: str) -> list[Source]:
    """Returns the file at an address, or the files of its folder or pattern, sorted, without hidden ones.

    Raises `UserError` where there is none, `WorkError` where a package that fsspec needs, or the network, is missing.
    """
    try:
        files, path = _filesystem(address)
        found = dict(_remote_files(files, path, address))
        sources = [_remote_source(files, path, info) for path, info in sorted(found.items())]
    except UserError:
        raise
    except Exception as error:  # of any library that fsspec uses
        raise _remote_error(address, error) from None
    if not sources:
        raise UserError(f"there is no file at {address}", "a folder's name, or a pattern, must lead to one")
    return sources


def _filesystem(address: str) -> tuple[Any, str]:
    import fsspec  # here, since only addresses need it

    options: dict[str, Any] = {}
    try:
        if address.startswith(("http://", "https://")):
            import aiohttp

            timeout = aiohttp.ClientTimeout(total=None, sock_connect=_SLOW, sock_read=_SLOW)
            options = {"client_kwargs": {"timeout": timeout}}  # the default ends a download after 5 minutes
        files, path = fsspec.core.url_to_fs(address, **options)
    except ImportError as error:
        cause = error.__cause__ if isinstance(error.__cause__, ImportError) else error
        package = "'gpt[remote]'" if cause.name in ("aiohttp", None) else cause.name
        raise WorkError(f"{address} cannot be read yet: {reason(error)}", f"pip install {package}") from None
    except ValueError as error:
        raise UserError(f"{address}: {reason(error)}", "https://, s3://, gs://, hf:// … are read by fsspec") from None
    return files, path


def _remote_files(files: Any, path: str, address: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    web = address.startswith(("http://", "https://"))
    if "*" in path or "[" in path or ("?" in path and not web):
        for name, info in files.glob(path, detail=True).items():
            if info["type"] == "file":
                yield name, info
            else:
                yield from _remote_below(files, name)
    elif web and address.endswith("/"):  # fsspec takes any page with links for a folder
        yield from _remote_below(files, path)
    else:
        info = files.info(path)
        if info["type"] == "directory":
            yield from _remote_below(files, path)
        else:
            yield path, info


def _remote_below(files: Any, folder: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for name, info in files.find(folder, detail=True).items():
        inside = name.removeprefix(folder).split("/")
        if info["type"] == "file" and not any(part.startswith(".") for part in inside):
            yield name, info


def _remote_source(files: Any, path: str, info: Mapping[str, Any]) -> Source:
    address = files.unstrip_protocol(path)
    return Source(address, int(info.get("size") or 0), _remote_time(info), partial(_open_remote, address))


def _remote_time(info: Mapping[str, Any]) -> int:
    """Returns the time of the last change in nanoseconds, 0 if the file system does not tell it."""
    for key in _TIMES:
        value = info.get(key)
        try:
            if isinstance(value, str):
                iso = value[:1].isdigit()
                value = datetime.datetime.fromisoformat(value) if iso else email.utils.parsedate_to_datetime(value)
            if isinstance(value, datetime.datetime):
                value = value.timestamp()
            if isinstance(value, int | float):
                return int(value * 1e9)
        except ValueError:
            continue
    return 0


def _open_remote(address: str) -> BinaryIO:
    try:
        files, path = _filesystem(address)
        web = address.startswith(("http://", "https://"))
        file = files.open(path, "rb", **({"block_size": 0} if web else {}))  # one request instead of one for each block
    except UserError:
        raise
    except Exception as error:
        raise _remote_error(address, error) from None
    seekable = not web and file.seekable()
    return cast(BinaryIO, _WholeBlocks(ByteStream(file, partial(_remote_error, address), seekable=seekable)))


class _WholeBlocks(io.BufferedReader):
    """Reads whole blocks, however little the network gives at once: a resume expects text to be cut where it was."""

    def read1(self, size: int = -1, /) -> bytes:
        """Returns ``size`` bytes, fewer only at the end."""
        return self.read(size)


def _remote_error(address: str, error: Exception) -> UserError:
    """Returns the error for an address, on one line."""
    cause = error.__cause__ if isinstance(error.__cause__, Exception) else error
    status = getattr(cause, "status", None)
    if status in (404, 410) or (isinstance(error, FileNotFoundError) and cause is error):
        return UserError(f"there is no {address}", "look whether the address is right")
    words = f"{status} {getattr(cause, 'message', '')}" if status else reason(cause)
    return WorkError(f"cannot read {address}: {words}", "look whether the network and the address are right")
