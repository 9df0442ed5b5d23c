"""Resolves TEXT arguments to sources: files, folders, patterns, standard input, URLs and named corpora."""

import contextlib
import fnmatch
import functools
import glob
import hashlib
import os
import re
import shlex
import stat
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path, PurePath
from typing import Any, BinaryIO, TextIO, cast
from urllib.parse import urlsplit

from gpt.documents import catalogue
from gpt.documents.documents import UNSUPPORTED, Skipped, is_plain
from gpt.documents.download import OnBytes, fetch, ignore
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
from gpt.system.errors import UserError, WorkError, did_you_mean
from gpt.system.files import cache_dir, is_file_name, suggest_name
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
    """Whether ``path`` is a token folder, finished or not. Other folders can have a manifest.json too."""
    kinds = (MANIFEST, PROGRESS), (RANKS, TOKENIZER_JSON)
    return all(any(Path(path, name).is_file() for name in names) for names in kinds)


def identity(source: Source) -> str:
    """Returns the identity of a source: the real path of a local file, otherwise the name."""
    return os.path.realpath(source.name) if source.time and "://" not in source.name else source.name


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
    with contextlib.suppress(PermissionError):  # Listing the folder raises the error again.
        return is_token_folder(folder)
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
_is_lock_file = re.compile(
    r"(bun|cargo|composer|flake|gemfile|mix|pdm|pipfile|podfile|poetry|pubspec|uv|yarn)\.lock|go\.sum|gradle\.lockfile"
    r"|npm-shrinkwrap\.json|package-lock\.json|packages\.lock\.json|pnpm-lock\.yaml"
).fullmatch
_GENERATED_FOLDERS = {"node_modules", "__pycache__"}
_OWN_FILES = [{"run.json", "metrics.jsonl"}, {"gpt.json"}]  # of a run; of a model or a tokenizer


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
            return find_remote(text, on_bytes)
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
            hint = "runs and models are skipped, too; a run's tokens are in RUN/tokens"
            raise UserError(f"the folder {folder} has no text files in it (hidden ones are skipped)", hint)
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
        """Yields the regular files below a folder, sorted, without hidden files, and folders that gpt wrote. Follows
        links, but reads each folder once."""

        def cannot_list(error: OSError) -> None:
            self.skipped.add(_unreadable(f"the folder {error.filename}", error))

        seen = {os.path.realpath(folder)}
        for parent, folders, names in os.walk(folder, onerror=cannot_list, followlinks=True):
            if _has_tokens(parent):
                folders.clear()
                continue
            if any(own.issubset(names) for own in _OWN_FILES):
                self._record_skipped("folders of runs and models", parent)
                folders.clear()
                continue
            for name in _GENERATED_FOLDERS.intersection(folders):
                self._record_skipped("folders of other programs", str(Path(parent, name)))
            visible_names = [name for name in sorted(folders) if name[0] != "." and name not in _GENERATED_FOLDERS]
            folders[:] = [name for name in visible_names if self._mark_seen(str(Path(parent, name)), seen)]
            for path in (str(Path(parent, name)) for name in sorted(names) if not name.startswith(".")):
                kind = _file_type(path)
                if kind == stat.S_IFREG and _is_lock_file(Path(path).name.lower()):
                    self._record_skipped("lock files", path)
                elif kind == stat.S_IFREG and not _is_text(path):
                    self._record_skipped("files that gpt does not read", path)
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


def find_remote(address: str, on_bytes: OnBytes = ignore) -> list[Source]:
    """Returns the file of a web address, downloaded once into the cache, or the files of an address on the Hub, which
    can be a folder or a pattern, sorted and without hidden files. Raises `UserError` if there is no file, `WorkError`
    without a network."""
    scheme, _, path = address.partition("://")
    if scheme in ("http", "https"):
        with translate_errors(lambda error: UserError(f"{address} is not an address: {reason(error)}", "check it")):
            name = PurePath(urlsplit(address).path).name
        folder = cache_dir() / "web" / hashlib.sha256(os.fsencode(address)).hexdigest()[:16]
        target = folder / (name if all(map(is_file_name, (name, f".{name}.part"))) else "index.html")
        return [file_source(address, fetch(address, target, on_bytes=on_bytes))]
    if scheme != "hf":
        hint = "use https:// or hf://datasets/OWNER/NAME/…, or copy the text to this machine first"
        raise UserError(f"gpt cannot read {scheme}:// addresses: {address}", hint)
    with translate_errors(partial(_hub_error, address)):
        from huggingface_hub import HfFileSystem  # A slow import.

        hub: Any = HfFileSystem()
        found = hub.glob(path, detail=True) if glob.has_magic(path) else {path: hub.info(path)}
        for name in [name for name, info in found.items() if info["type"] == "directory"]:
            found |= hub.find(name, detail=True)
    names = sorted(name for name, info in found.items() if info["type"] == "file" and "/." not in name)
    if not names:
        raise UserError(f"there is no file at {address}", "a folder or a pattern must match files")
    return [Source(f"hf://{name}", int(found[name]["size"] or 0), 0, partial(_open_on_hub, name)) for name in names]


def _open_on_hub(path: str) -> BinaryIO:
    from huggingface_hub import HfFileSystem

    to_error = partial(_hub_error, f"hf://{path}")
    with translate_errors(to_error):
        file: Any = HfFileSystem().open(path, "rb")
    return cast(BinaryIO, ByteStream(file, to_error, seekable=True))


def _hub_error(address: str, error: Exception) -> UserError:
    if isinstance(error, FileNotFoundError):
        return UserError(f"there is no {address}", "check the address; a private dataset needs a login: hf auth login")
    return WorkError(f"cannot read {address}: {reason(error)}", "check the network and the address")
