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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path, PurePath
from typing import Any, BinaryIO, cast
from urllib.parse import urlsplit

from gpt.distribution import install, install_extra
from gpt.errors import UserError, WorkError, did_you_mean
from gpt.text import catalogue
from gpt.text.documents import Skipped
from gpt.text.download import OnBytes, ignore
from gpt.text.token_folder import is_token_folder
from gpt.text.tokenizer_files import RANKS, WHOLE
from gpt.text.unpack import ByteStream, Copy, Source, file_source, reason, translated

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
    finder = _Finder(skipped)
    once: dict[str, Source] = {}
    for text in dict.fromkeys(texts):
        for source in finder.sources(text, on_bytes):
            once.setdefault(identity(source), source)
    for (one, many), places in finder.left_out.items():
        if places:
            what = f"{one}: " if len(places) == 1 else f"{len(places):,} {many}, such as "
            note(f"skipped {what}{next(iter(places.values()))}")
    return list(once.values())


def identity(source: Source) -> str:
    """Returns what identifies a source: the real path of a file on disk, else the name."""
    on_disk = source.time and "://" not in source.name
    return os.path.realpath(source.name) if on_disk else source.name


def published(texts: Sequence[str], on_bytes: OnBytes = ignore) -> list[Source]:
    """Returns the held-out text that was published with a corpus, where ``texts`` is that corpus alone."""
    if len(texts) == 1 and _status(texts[0]) is None and texts[0] in catalogue.names():
        return catalogue.val_sources(texts[0], on_bytes)
    return []


def _status(text: str) -> os.stat_result | None:
    """Returns the status of the file or folder of that name; None where there is none."""
    try:
        return Path(text).stat() if text else None
    except PermissionError as error:
        raise _unreadable(text, error) from None
    except (OSError, ValueError):
        return None


def _unreadable(name: str, error: OSError) -> UserError:
    return UserError(f"cannot read {name}: {reason(error)}", "check its permissions, or use --skip-bad to skip it")


def _is_tokens(folder: str) -> bool:
    """Whether a folder is a token folder. Other folders may have a manifest.json too."""
    with contextlib.suppress(PermissionError):  # an error where the folder is listed
        return any(Path(folder, name).is_file() for name in (RANKS, WHOLE)) and is_token_folder(folder)
    return False


def _type(path: str) -> int:
    """Returns the type of a path, as in `stat`. An unreadable path counts as a file: `_file` then raises."""
    try:
        return stat.S_IFMT(Path(path).stat().st_mode)
    except PermissionError:
        return stat.S_IFREG
    except OSError:
        return 0


_BROKEN = ("a broken link", "broken links")
_UPWARD = ("a link to a folder above it", "links to folders above them")
_SPECIAL = ("a pipe, socket or device", "pipes, sockets or devices")


class _Finder:
    """Finds what a user's words name. ``skipped``, if given, counts what cannot be read.

    ``left_out``: the paths in folders that are not read, by kind and by their real places.
    """

    def __init__(self, skipped: Skipped | None) -> None:
        self.skipped = skipped
        self.left_out: dict[tuple[str, str], dict[Path, str]] = {kind: {} for kind in (_BROKEN, _UPWARD, _SPECIAL)}

    def sources(self, text: str, on_bytes: OnBytes) -> Iterable[Source]:
        """Returns the sources that a word names."""
        if text == "-":
            return [_standard_input()]
        status = _status(text)
        if status is not None:
            return self._folder(text) if stat.S_ISDIR(status.st_mode) else self._files([text])
        if "://" in text:
            return find_remote(text)
        if glob.has_magic(text):
            return self._pattern(text)
        if text in catalogue.names():
            return catalogue.sources(text, on_bytes)
        if "/" in text or "\\" in text or "." in text:
            hint = "give a file, a folder, - for standard input, or a corpus by name"
            raise UserError(f"there is no file {text}", hint)
        raise UserError(f'there is no file and no corpus called "{text}"', did_you_mean(text, catalogue.names()))

    def _folder(self, folder: str) -> list[Source]:
        if _is_tokens(folder):
            raise UserError(f"{folder} is already tokenized", f"use it as it is: gpt train {shlex.quote(folder)}")
        found = self._files(self._below(folder))
        if not found:
            raise UserError(f"the folder {folder} has no files in it (hidden ones are skipped)")
        return found

    def _pattern(self, pattern: str) -> list[Source]:
        """Returns the files that a pattern matches, and those below folders that it matches, sorted."""
        paths: set[str] = set()
        parts = PurePath(pattern).parts
        at = parts.index("**") if "**" in parts else len(parts)  # where glob itself would follow links without end
        for match in glob.iglob(pattern if at == len(parts) else str(PurePath(*parts[:at]))):
            if _type(match) == stat.S_IFDIR:
                if Path(match).name in ("", "..") or self._is_new(match, set()):
                    below = self._below(match)
                    paths.update(
                        path for path in below if _matches(PurePath(path).relative_to(match).parts, parts[at:])
                    )
            elif _type(match) == stat.S_IFREG and at == len(parts):
                paths.add(match)
        if not paths:
            hint = "** matches subfolders: 'texts/**/*.txt'; hidden files are skipped"
            raise UserError(f"no file matches {pattern}", hint)
        return self._files(sorted(paths))

    def _below(self, folder: str) -> Iterator[str]:
        """Yields the regular files below a folder, sorted, without hidden ones and token folders. Links are followed,
        each folder is read once."""

        def cannot_list(error: OSError) -> None:
            self._bad(_unreadable(f"the folder {error.filename}", error))

        seen = {os.path.realpath(folder)}
        for parent, folders, names in os.walk(folder, onerror=cannot_list, followlinks=True):
            if _is_tokens(parent):
                folders.clear()
                continue
            visible = [name for name in sorted(folders) if not name.startswith(".")]
            folders[:] = [name for name in visible if self._is_new(str(Path(parent, name)), seen)]
            for path in (str(Path(parent, name)) for name in sorted(names) if not name.startswith(".")):
                kind = _type(path)
                if kind == stat.S_IFREG:
                    yield path
                else:
                    self._leave_out(_SPECIAL if kind else _BROKEN, path)

    def _is_new(self, path: str, seen: set[str]) -> bool:
        """Whether a folder, or what a link to one leads to, is still to be read; from now on it is in ``seen``.

        A link to a folder that it is in is left out: all that is around the folder asked for would be read with it.
        """
        real = Path(os.path.realpath(path))
        if str(real) in seen:
            return False
        around = Path(os.path.realpath(Path(path).parent))
        if around.is_relative_to(real):
            self._leave_out(_UPWARD, path)
            return False
        seen.add(str(real))
        return True

    def _leave_out(self, kind: tuple[str, str], path: str) -> None:
        """Adds a path, which may have been added by another name."""
        place = Path(os.path.realpath(Path(path).parent), Path(path).name)
        self.left_out[kind].setdefault(place, path)

    def _files(self, paths: Iterable[str]) -> list[Source]:
        found = []
        for path in paths:
            try:
                found.append(_file(path))
            except UserError as error:
                self._bad(error)
        return found

    def _bad(self, error: UserError) -> None:
        """Counts an error, or raises it where nothing is to be skipped."""
        if self.skipped is None:
            raise error from None
        self.skipped.add(error)


def _matches(names: Sequence[str], pattern: Sequence[str]) -> bool:
    """Whether a path, or a folder that it leads through, matches a pattern with ``**``."""
    if not pattern:
        return True
    if pattern[0] == "**":
        return any(_matches(names[start:], pattern[1:]) for start in range(len(names) + 1))
    return bool(names) and fnmatch.fnmatch(names[0], pattern[0]) and _matches(names[1:], pattern[1:])


def _file(path: str) -> Source:
    try:
        kind = stat.S_IFMT(Path(path).stat().st_mode)
        if kind in (stat.S_IFCHR, stat.S_IFBLK):  # which may never end
            raise UserError(f"{path} is a device, not a text", "give a file, a folder, or - for standard input")
        return file_source(path, Path(path)) if kind == stat.S_IFREG else _spooled(path, open(path, "rb"))
    except OSError as error:
        raise _unreadable(path, error) from None


def _standard_input() -> Source:
    if sys.stdin is None:
        raise UserError("there is no standard input to read", "give a file")
    return _spooled("stdin", sys.stdin.buffer)


def _spooled(name: str, stream: BinaryIO) -> Source:
    """Copies a stream to the disk, since it can be read only once."""
    copy = Copy(name, ByteStream(stream, lambda error: UserError(f"cannot read {name}: {reason(error)}")))
    return Source(name, copy.size, 0, cast(Callable[[], BinaryIO], copy.open), temporary=True)


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
    with translated(partial(_remote_error, address)):
        files, path = _filesystem(address)
        found = dict(_remote_files(files, path, address))
        sources = [_remote_source(files, path, info) for path, info in sorted(found.items())]
    if not sources:
        raise UserError(f"there is no file at {address}", "a folder or a pattern must match files")
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
        hint = install_extra("remote") if cause.name in ("aiohttp", None) else install(str(cause.name))
        raise WorkError(f"{address} cannot be read yet: {reason(error)}", hint) from None
    except ValueError as error:
        raise UserError(f"{address}: {reason(error)}", "use one of fsspec: https://, s3://, gs://, hf:// …") from None
    return files, path


def _remote_files(files: Any, path: str, address: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    web = address.startswith(("http://", "https://"))
    if "*" in path or "[" in path or ("?" in path and not web):
        found = files.glob(path, detail=True)
    elif web and address.endswith("/"):  # fsspec takes any page with links for a folder
        found = {path: {"type": "directory"}}
    else:
        found = {path: files.info(path)}
    for name, info in found.items():
        if info["type"] == "file" or (len(found) == 1 and info["type"] != "directory"):
            yield name, info
        if info["type"] != "directory":  # a pipe, or a link that leads nowhere
            continue
        for file, about in files.find(name, detail=True).items():
            if about["type"] == "file" and not any(part.startswith(".") for part in file.removeprefix(name).split("/")):
                yield file, about


def _remote_source(files: Any, path: str, info: Mapping[str, Any]) -> Source:
    address = files.unstrip_protocol(path)
    return Source(address, int(info.get("size") or 0), _remote_time(info), partial(_open_remote, address))


def _remote_time(info: Mapping[str, Any]) -> int:
    """Returns the time of the last change in nanoseconds, 0 if the file system does not tell it."""
    for value in map(info.get, _TIMES):
        with contextlib.suppress(TypeError, ValueError):
            if isinstance(value, str):
                iso = value[:1].isdigit()
                value = datetime.datetime.fromisoformat(value) if iso else email.utils.parsedate_to_datetime(value)
            return int((value.timestamp() if isinstance(value, datetime.datetime) else value) * 1e9)  # type: ignore[operator]
    return 0


def _open_remote(address: str) -> BinaryIO:
    to_error = partial(_remote_error, address)
    web = address.startswith(("http://", "https://"))
    with translated(to_error):
        files, path = _filesystem(address)
        file = files.open(path, "rb", **({"block_size": 0} if web else {}))  # one request instead of one for each block
    return cast(BinaryIO, _WholeBlocks(ByteStream(file, to_error, seekable=not web and file.seekable())))


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
        return UserError(f"there is no {address}", "check the address")
    words = f"{status} {getattr(cause, 'message', '')}" if status else reason(cause)
    return WorkError(f"cannot read {address}: {words}", "check the network and the address")
