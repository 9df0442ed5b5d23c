"""Resolves TEXT arguments to sources: files, folders, patterns, standard input, URLs and named corpora."""

import contextlib
import datetime
import email.utils
import fnmatch
import functools
import glob
import io
import os
import re
import shlex
import stat
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path, PurePath
from typing import Any, BinaryIO, TextIO, cast
from urllib.parse import urlsplit

from gpt.documents import catalogue
from gpt.documents.documents import UNSUPPORTED, Skipped, is_plain
from gpt.documents.download import OnBytes, ignore
from gpt.documents.formats import find_wide
from gpt.documents.unpack import (
    BUFFER,
    UNPACK,
    ByteStream,
    Copy,
    PackedFile,
    Source,
    file_source,
    open_source,
    reason,
    translate_errors,
)
from gpt.system.distribution import install, install_extra
from gpt.system.errors import UserError, WorkError, did_you_mean
from gpt.system.files import suggest_name
from gpt.tokenizers.saving import RANKS, TOKENIZER_JSON

DEFAULT_CORPUS = "pydocs"
MANIFEST = "manifest.json"  # of a finished token folder
PROGRESS = "progress.jsonl"  # of an unfinished token folder


def find(texts: Sequence[str], skipped: Skipped | None = None, on_bytes: OnBytes = ignore) -> list[Source]:
    """Returns the sources that ``texts`` name, in order and without duplicates. Without ``texts``, returns the default
    corpus.

    A text is ``-`` (standard input), a file, a folder (recursive, sorted, without hidden entries and token folders), a
    URL, a pattern, or a corpus of the catalogue, tried in this order. Raises `UserError` for anything else, and for
    unreadable paths unless ``skipped`` counts them. ``on_bytes`` is called with the download progress.
    """
    if not texts:
        return catalogue.sources(DEFAULT_CORPUS)  # The default corpus, even if there is a file called pydocs.
    skipped = skipped or Skipped()
    finder = _Finder(skipped)
    unique: dict[str, Source] = {}
    for text in dict.fromkeys(texts):
        for source in finder.sources(text, on_bytes):
            unique.setdefault(identity(source), source)
    for kind, paths in finder.skipped_paths.items():
        names = ", ".join(list(paths.values())[: skipped.limit]) + (" …" if len(paths) > skipped.limit else "")
        skipped.note(f"skipped {kind}: {len(paths):,}: {names}")
    return list(unique.values())


def is_token_folder(path: str | Path) -> bool:
    """Whether ``path`` is a token folder, finished or not."""
    return (Path(path) / MANIFEST).is_file() or (Path(path) / PROGRESS).is_file()


def identity(source: Source) -> str:
    """Returns the identity of a source: the real path of a local file, otherwise the name."""
    name = source.name.removeprefix("file://")
    return os.path.realpath(name) if source.time and "://" not in name else name


def find_published_held_out(texts: Sequence[str], on_bytes: OnBytes = ignore) -> list[Source]:
    """Returns the published held-out text if ``texts`` is a single corpus that has one."""
    if len(texts) == 1 and _stat(texts[0]) is None and texts[0] in catalogue.names():
        return catalogue.val_sources(texts[0], on_bytes)
    return []


def _stat(text: str) -> os.stat_result | None:
    try:
        return Path(text).stat() if text else None
    except PermissionError as error:
        raise _unreadable(text, error) from None
    except (OSError, ValueError):
        return None


def _unreadable(name: str, error: OSError) -> UserError:
    return UserError(f"cannot read {name}: {reason(error)}", "check its permissions, or use --skip-bad to skip it")


def _has_tokens(folder: str) -> bool:
    """Whether a folder is a token folder. Other folders can have a manifest.json too."""
    with contextlib.suppress(PermissionError):  # Listing the folder raises the error again.
        return any(Path(folder, name).is_file() for name in (RANKS, TOKENIZER_JSON)) and is_token_folder(folder)
    return False


def _file_type(path: str) -> int:
    """Returns the file type, as in `stat`. Treats an unreadable path as a file, because opening it raises the error."""
    try:
        return stat.S_IFMT(Path(path).stat().st_mode)
    except PermissionError:
        return stat.S_IFREG
    except OSError:
        return 0


# Suffixes of files that are known not to be text. They are read only if they are named.
_is_not_text = re.compile(
    r".*\.(a|avi|avif|bin|blend|bmp|class|db|deb|dll|dmg|dylib|eot|exe|flac|gguf|gif|gmo|h5|heic|ico|inv|iso|jar"
    r"|jpe?g|lib|m4[av]|mk[av]|mo|mov|mp[34]|msi|np[yz]|o|obj|od[ps]|ogg|onnx|opus|otf|pack|pcap|pdb|pickle|pkl|png|pptx?"
    r"|psd|pth?|py[cdo]|rpm|safetensors|so|sqlite3?|svg|tiff?|tt[cf]|wasm|wav|web[mp]|whl|wm[av]|woff2?|xlsx?)"
).fullmatch
_GENERATED_FOLDERS = {"node_modules", "__pycache__"}


def _is_text(path: str) -> bool:
    """Whether a file of a folder can be text. Unreadable files count, because opening them raises the error."""
    with contextlib.suppress(UserError, OSError):
        source = file_source(path, Path(path))
        file = PackedFile(path, Path(path).name.lower(), partial(open_source, source, lambda size: None))
        while (ending := "." + file.kind.rpartition(".")[2]) in UNPACK:
            file = file.unpack(ending)
        if _is_not_text(file.kind) or ending in UNSUPPORTED:
            return False
        if is_plain(replace(source, name=file.kind)):
            with contextlib.closing(file.open()) as stream:
                block = stream.read(BUFFER)
                return b"\0" not in block or find_wide(block) is not None
    return True


class _Finder:
    """Resolves TEXT arguments. ``skipped`` counts unreadable paths. ``skipped_paths`` contains other skipped paths by
    kind and real path."""

    def __init__(self, skipped: Skipped) -> None:
        self.skipped = skipped
        self.skipped_paths: dict[str, dict[Path, str]] = defaultdict(dict)

    def sources(self, text: str, on_bytes: OnBytes) -> Iterable[Source]:
        """Returns the sources that an argument names."""
        if text == "-":
            return [_stdin_source()]
        status = _stat(text)
        if status is not None:
            return self._folder_sources(text) if stat.S_ISDIR(status.st_mode) else self._file_sources([text])
        if "://" in text:
            return find_remote(text)
        if glob.has_magic(text):
            return self._pattern_sources(text)
        if text in catalogue.names():
            return catalogue.sources(text, on_bytes)
        if "/" in text or "\\" in text or "." in text:
            hint = "give a file, a folder, - for standard input, or a corpus by name"
            raise UserError(f"there is no file {text}", suggest_name(text, hint))
        hint = suggest_name(text, did_you_mean(text, catalogue.names()))
        raise UserError(f'there is no file and no corpus called "{text}"', hint)

    def _folder_sources(self, folder: str) -> list[Source]:
        if _has_tokens(folder):
            raise UserError(f"{folder} is already tokenized", f"use it as it is: gpt train {shlex.quote(folder)}")
        files = self._file_sources(self._walk(folder))
        if not files:
            raise UserError(f"the folder {folder} has no text files in it (hidden ones are skipped)")
        return files

    def _pattern_sources(self, pattern: str) -> list[Source]:
        """Returns the matching files and the files below matching folders, sorted."""
        paths: set[str] = set()
        parts = PurePath(pattern).parts
        stars_at = parts.index("**") if "**" in parts else len(parts)  # glob would follow link cycles below "**".
        for match in glob.iglob(pattern if stars_at == len(parts) else str(PurePath(*parts[:stars_at]))):
            if _file_type(match) == stat.S_IFDIR:
                if Path(match).name in ("", "..") or self._mark_seen(match, set()):
                    files = self._walk(match)
                    paths.update(
                        path for path in files if _matches(PurePath(path).relative_to(match).parts, parts[stars_at:])
                    )
            elif _file_type(match) == stat.S_IFREG and stars_at == len(parts):
                paths.add(match)
        if not paths:
            hint = "** matches subfolders: 'texts/**/*.txt'; hidden files are skipped"
            raise UserError(f"no file matches {pattern}", hint)
        return self._file_sources(sorted(paths))

    def _walk(self, folder: str) -> Iterator[str]:
        """Yields the regular files below a folder, sorted, without hidden files and token folders. Follows links, but
        reads each folder once."""

        def cannot_list(error: OSError) -> None:
            self.skipped.add(_unreadable(f"the folder {error.filename}", error))

        seen = {os.path.realpath(folder)}
        for parent, folders, names in os.walk(folder, onerror=cannot_list, followlinks=True):
            if _has_tokens(parent):
                folders.clear()
                continue
            for name in _GENERATED_FOLDERS.intersection(folders):
                self._record_skipped("folders of other programs", str(Path(parent, name)))
            visible_names = [name for name in sorted(folders) if name[0] != "." and name not in _GENERATED_FOLDERS]
            folders[:] = [name for name in visible_names if self._mark_seen(str(Path(parent, name)), seen)]
            for path in (str(Path(parent, name)) for name in sorted(names) if not name.startswith(".")):
                kind = _file_type(path)
                if kind == stat.S_IFREG and not _is_text(path):
                    self._record_skipped("files that are not text", path)
                elif kind == stat.S_IFREG:
                    yield path
                else:
                    self._record_skipped("pipes, sockets and devices" if kind else "broken links", path)

    def _mark_seen(self, path: str, seen: set[str]) -> bool:
        """Adds the real path of a folder to ``seen``. Returns False for a repeated folder, and for a link to a parent
        folder, which also contains files that the user did not name."""
        real_path = Path(os.path.realpath(path))
        if str(real_path) in seen:
            return False
        parent = Path(os.path.realpath(Path(path).parent))
        if parent.is_relative_to(real_path):
            self._record_skipped("links to folders above them", path)
            return False
        seen.add(str(real_path))
        return True

    def _record_skipped(self, kind: str, path: str) -> None:
        """Records a skipped path. Several links to the same path count once."""
        real_path = Path(os.path.realpath(Path(path).parent), Path(path).name)
        self.skipped_paths[kind].setdefault(real_path, path)

    def _file_sources(self, paths: Iterable[str]) -> list[Source]:
        files = []
        for path in paths:
            try:
                files.append(_file(path))
            except UserError as error:
                self.skipped.add(error)
        return files


def _matches(names: Sequence[str], pattern: Sequence[str]) -> bool:
    """Whether a path or one of its parent folders matches a pattern with ``**``."""
    if not pattern:
        return True
    if pattern[0] == "**":
        return any(_matches(names[start:], pattern[1:]) for start in range(len(names) + 1))
    return bool(names) and fnmatch.fnmatch(names[0], pattern[0]) and _matches(names[1:], pattern[1:])


def _file(path: str) -> Source:
    try:
        kind = stat.S_IFMT(Path(path).stat().st_mode)
        if kind in (stat.S_IFCHR, stat.S_IFBLK):  # Reading a device might never end.
            raise UserError(f"{path} is a device, not a text", "give a file, a folder, or - for standard input")
        return file_source(path, Path(path)) if kind == stat.S_IFREG else _spool(path, open(path, "rb"))
    except OSError as error:
        raise _unreadable(path, error) from None


def _stdin_source() -> Source:
    if sys.stdin is None:
        raise UserError("there is no standard input to read", "give a file")
    return _spool_stdin(sys.stdin)


@functools.lru_cache(maxsize=1)  # A command can read the text twice.
def _spool_stdin(stdin: TextIO) -> Source:
    return _spool("stdin", stdin.buffer)


def _spool(name: str, stream: BinaryIO) -> Source:
    """Copies a stream to disk, because streams can be read only once."""
    copy = Copy(name, ByteStream(stream, lambda error: UserError(f"cannot read {name}: {reason(error)}")))
    return Source(name, copy.size, 0, cast(Callable[[], BinaryIO], copy.open), temporary=True)


def run_name(texts: Sequence[str]) -> str:
    """Returns the name of a run on ``texts``: the first text's name without its format suffixes."""
    text = texts[0] if texts else DEFAULT_CORPUS
    if text == "-":
        return "stdin"
    exists = _stat(text) is not None
    if "://" in text and not exists:
        parts = urlsplit(text)
        text = parts.netloc + parts.path
    path = Path(os.path.abspath(text))
    while glob.has_magic(path.name) and not exists:  # A run on a pattern is named after the folder.
        path = path.parent
    if path.suffix.lower() in (".gz", ".zst"):
        path = path.with_suffix("")
    return (path.name if path.is_dir() else path.stem) or "text"


_TIMEOUT = 60.0  # Seconds without data before a connection counts as lost.
# Keys of the modification time in fsspec.
_TIME_KEYS = ("mtime", "LastModified", "last_modified", "Last-Modified", "updated", "created")


def find_remote(address: str) -> list[Source]:
    """Returns the files of a URL, which can be a folder or a pattern, sorted and without hidden files. Raises
    `UserError` if there is no file, `WorkError` if the network or a package that fsspec needs is missing."""
    with translate_errors(partial(_remote_error, address)):
        fs, path = _open_filesystem(address)
        infos = dict(_remote_files(fs, path, address))
        sources = [_remote_source(fs, path, info) for path, info in sorted(infos.items())]
    if not sources:
        raise UserError(f"there is no file at {address}", "a folder or a pattern must match files")
    return sources


def _open_filesystem(address: str) -> tuple[Any, str]:
    import fsspec  # Only URLs need fsspec.

    options: dict[str, Any] = {}
    try:
        if address.startswith(("http://", "https://")):
            import aiohttp

            timeout = aiohttp.ClientTimeout(total=None, sock_connect=_TIMEOUT, sock_read=_TIMEOUT)
            options = {"client_kwargs": {"timeout": timeout}}  # The default aborts downloads after 5 minutes.
        fs, path = fsspec.core.url_to_fs(address, **options)
    except ImportError as error:
        cause = error.__cause__ if isinstance(error.__cause__, ImportError) else error
        hint = install_extra("remote") if cause.name in ("aiohttp", None) else install(str(cause.name))
        raise WorkError(f"{address} cannot be read yet: {reason(error)}", hint) from None
    except ValueError as error:
        raise UserError(f"{address}: {reason(error)}", "use one of fsspec: https://, s3://, gs://, hf:// …") from None
    return fs, path


def _remote_files(fs: Any, path: str, address: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    is_web = address.startswith(("http://", "https://"))
    if "*" in path or "[" in path or ("?" in path and not is_web):
        entries = fs.glob(path, detail=True)
    elif is_web and address.endswith("/"):  # fsspec treats any page with links as a folder.
        entries = {path: {"type": "directory"}}
    else:
        entries = {path: fs.info(path)}
    for name, info in entries.items():
        if info["type"] == "file" or (len(entries) == 1 and info["type"] != "directory"):
            yield name, info
        if info["type"] != "directory":  # This is a file, a pipe or a broken link.
            continue
        for file, file_info in fs.find(name, detail=True).items():
            if file_info["type"] == "file" and not any(
                part.startswith(".") for part in file.removeprefix(name).split("/")
            ):
                yield file, file_info


def _remote_source(fs: Any, path: str, info: Mapping[str, Any]) -> Source:
    address = fs.unstrip_protocol(path)
    return Source(address, int(info.get("size") or 0), _remote_time(info), partial(_open_remote, address))


def _remote_time(info: Mapping[str, Any]) -> int:
    """Returns the modification time in nanoseconds, or 0 if unknown."""
    for value in map(info.get, _TIME_KEYS):
        with contextlib.suppress(TypeError, ValueError):
            if isinstance(value, str):
                is_iso = value[:1].isdigit()
                value = datetime.datetime.fromisoformat(value) if is_iso else email.utils.parsedate_to_datetime(value)
            return int((value.timestamp() if isinstance(value, datetime.datetime) else value) * 1e9)  # type: ignore[operator]
    return 0


def _open_remote(address: str) -> BinaryIO:
    to_error = partial(_remote_error, address)
    is_web = address.startswith(("http://", "https://"))
    with translate_errors(to_error):
        fs, path = _open_filesystem(address)
        file = fs.open(path, "rb", **({"block_size": 0} if is_web else {}))  # One request per file, not per block.
    return cast(BinaryIO, _WholeBlocks(ByteStream(file, to_error, seekable=not is_web and file.seekable())))


class _WholeBlocks(io.BufferedReader):
    """Reads full blocks regardless of the network, because a resume must cut the text at the same places."""

    def read1(self, size: int = -1, /) -> bytes:
        """Returns ``size`` bytes, or fewer at the end."""
        return self.read(size)


def _remote_error(address: str, error: Exception) -> UserError:
    cause = error.__cause__ if isinstance(error.__cause__, Exception) else error
    status = getattr(cause, "status", None)
    if status in (404, 410) or (isinstance(error, FileNotFoundError) and cause is error):
        return UserError(f"there is no {address}", "check the address")
    message = f"{status} {getattr(cause, 'message', '')}" if status else reason(cause)
    return WorkError(f"cannot read {address}: {message}", "check the network and the address")
