"""Writes files and folders atomically: syncs a temporary sibling, then renames it. Modes follow the umask.

Also reads untrusted JSON, computes checksums, takes locks and explains disk errors.
"""

import contextlib
import errno
import hashlib
import json
import os
import shutil
import stat
import sys
import tempfile
import threading
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping
from difflib import get_close_matches
from io import BufferedReader
from itertools import chain, islice
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from filelock import FileLock, Timeout

from gpt.system.errors import UserError, WorkError, check_text

JSON_LIMIT = 64 * 2**20  # Maximum bytes of a JSON file; gpt writes no larger ones.
LINE_LIMIT = 2**20  # Maximum bytes of a line.
LINES_LIMIT = 2**30  # Maximum bytes of a JSON-lines file.
MAX_NAME_BYTES = 255
MAX_NAMES = 10_000  # Maximum names to compare with a missing one.
MAX_JSON_DEPTH = 64  # Maximum nesting levels of JSON.
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
LOCKS_UNSUPPORTED = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP)
LOCK = ".lock"
TEMPORARY, BACKUP = ".tmp-", ".tmp-was-"  # Name prefixes of unfinished files, and of replaced files.
EXISTS_MESSAGE = "another process has created it in the meantime, and nothing is overwritten"
T = TypeVar("T")


@contextlib.contextmanager
def atomic_file(path: Path, digest: "hashlib._Hash | None" = None, new: bool = False) -> Iterator[BinaryIO]:
    """Yields a temporary file and renames it to ``path`` at the end, or deletes it after an error. Before renaming,
    checks that the sha256 of the file on disk equals ``digest``, if given. Raises OSError (FileExistsError if ``new``
    and ``path`` exists)."""
    temporary = path.parent / _temporary_name(path)
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if digest is not None and file_sha256(temporary, from_disk=True) != digest.hexdigest():
            raise OSError(errno.EIO, "what was written does not read back the same", str(path))
        if new and os.path.lexists(path):
            raise FileExistsError(errno.EEXIST, EXISTS_MESSAGE, str(path))
        os.replace(temporary, path)
        sync_folder(path.parent)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def _temporary_name(path: Path) -> str:
    """Returns a hidden sibling's name. Truncates a long name from the left, to stay below 255 bytes."""
    return f"{TEMPORARY}{os.getpid()}-{path.name[-50:]}"


def write_file(path: Path, data: bytes) -> str:
    """Writes ``data`` with `write_pieces`."""
    return write_pieces(path, [data])


def write_pieces(path: Path, pieces: Iterable[Any], new: bool = False) -> str:
    """Writes pieces to ``path`` atomically, verifies them on disk, and returns their sha256. Raises OSError like
    `atomic_file`."""
    digest = hashlib.sha256()
    with atomic_file(path, digest, new) as file:
        for piece in pieces:
            file.write(piece)
            digest.update(piece)
    return digest.hexdigest()


class Stamps:
    """The size and time of memory-mapped files. Reading a mapped file that another program has cut short ends the
    process (SIGBUS)."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self._statuses = {path: path.stat() for path in paths}

    def check(self) -> None:
        """Raises `WorkError` if a file was overwritten. A file that was replaced by renaming stays mapped."""
        for path, before in self._statuses.items():
            with contextlib.suppress(OSError):
                now = path.stat()
                is_same = (now.st_size, now.st_mtime_ns) == (before.st_size, before.st_mtime_ns)
                if now.st_ino == before.st_ino and not is_same:
                    hint = "start the program again, and replace a model's files by renaming new ones"
                    raise WorkError(f"the model's file {path.name} was changed while it was in use", hint)


def map_in_threads(task: Callable[[str], T], names: Iterable[str]) -> dict[str, T]:
    """Returns ``task(name)`` for each file. Uses two threads, because checksums and copies on one core are slower than
    a disk. Raises the first error after both threads have stopped. The threads are daemons, so they do not delay a
    second Ctrl-C. Unlike a multiprocessing pool, they need no semaphore in /dev/shm."""
    names = list(names)
    remaining, results, errors = iter(names), dict[str, T](), list[BaseException]()

    def work() -> None:
        for name in remaining:  # `next` on a list's iterator is atomic.
            try:
                results[name] = task(name)
            except BaseException as error:
                errors.append(error)
            if errors:
                return

    threads = [threading.Thread(target=work, daemon=True) for _ in names[:2]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return {name: results[name] for name in names}


def sync_folder(path: Path) -> None:
    """Makes renames in a folder durable. Does nothing where this is impossible: Windows cannot open folders, some
    network shares cannot sync them, and some folders are not readable. Raises OSError if the disk fails."""
    if sys.platform == "win32":
        return
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except PermissionError:
        return
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def usable_name(name: str) -> str:
    """Turns a file name into a folder name: UTF-8 without control characters, short enough to append a number."""
    clean = "".join("_" if unicodedata.category(char) in ("Cc", "Cs") else char for char in name)
    return clean.encode()[:100].decode(errors="ignore")


def make_folder(path: Path) -> None:
    """Creates a folder and its missing parents durably. Raises OSError (FileExistsError if the folder exists)."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True)
    for folder in missing:
        sync_folder(folder.parent)


def open_regular(path: Path, limit: int | None = None) -> BufferedReader:
    """Opens a regular file of at most ``limit`` bytes, without blocking on a FIFO or device. Checks the file after
    opening it, so no other file can replace it in between.

    Raises `UserError` for any other file and for an invalid name, and OSError like `open`.
    """
    try:
        file = open(path, "rb", opener=_open_nonblocking)  # noqa: SIM115
    except ValueError:  # The name has a zero byte or a lone surrogate.
        raise UserError(f"{str(path)!r} cannot be the name of a file") from None
    status = os.fstat(file.fileno())
    if not stat.S_ISREG(status.st_mode):
        file.close()
        raise UserError(f"{path} is a pipe, a device or a socket, not a regular file", "replace it with a copy")
    if limit is not None and status.st_size > limit:
        file.close()
        raise UserError(f"{path} has {status.st_size:,} bytes, more than the limit of {limit:,}")
    return file


def _open_nonblocking(name: str, flags: int) -> int:
    return os.open(name, flags | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0))


def is_file_name(name: str) -> bool:
    """Whether an untrusted name is a valid, printable file name without folders."""
    fits = name.isprintable() and 0 < len(name.encode()) <= MAX_NAME_BYTES
    return fits and name != ".." and Path(name).name == name


def read_regular(path: Path, limit: int) -> bytes:
    """Reads a regular file of at most ``limit`` bytes. Raises `UserError`."""
    with reading(path), open_regular(path, limit=limit) as file:
        data = file.read(limit + 1)
    if len(data) > limit:  # The file has grown.
        raise UserError(f"{path} has more than the limit of {limit:,} bytes")
    return data


def read_lines(file: BufferedReader) -> Iterator[bytes]:
    """Yields the lines of a file, truncated to `LINE_LIMIT` bytes, which makes longer lines invalid JSON."""
    while line := file.readline(LINE_LIMIT):
        yield line
        while len(line) == LINE_LIMIT and not line.endswith(b"\n"):
            line = file.readline(LINE_LIMIT)


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object from a file. Raises `UserError` if it is missing, huge or damaged."""
    try:
        value = json.loads(read_regular(path, JSON_LIMIT))
    except (ValueError, RecursionError):
        raise UserError(f"{path} is damaged: it is not JSON") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} is damaged: it is not a JSON object")
    if not _is_flat(value):
        raise UserError(f"{path} is damaged: its values are nested more than {MAX_JSON_DEPTH} deep")
    return value


def _is_flat(value: Any) -> bool:
    """Whether lists and objects are nested at most `MAX_JSON_DEPTH` deep."""
    level, kinds = [value], {dict, list}
    for _ in range(MAX_JSON_DEPTH):
        children = chain.from_iterable(outer.values() if type(outer) is dict else outer for outer in level)
        level = [child for child in children if type(child) in kinds]
        if not level:
            return True
    return False


def to_json(values: Mapping[str, Any]) -> bytes:
    """Returns indented JSON with a final newline."""
    return (json.dumps(values, indent=2, ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace")


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turns an OSError while reading ``path``, or a file below it, into a `UserError`."""
    try:
        yield
    except OSError as error:
        message = f"cannot read {error.filename or path}: {error.strerror or error}"
        raise UserError(message, "check its permissions" if isinstance(error, PermissionError) else "") from None


@contextlib.contextmanager
def disk_errors(path: Path, intact: str = "") -> Iterator[None]:
    """Turns an OSError while writing ``path`` into a `WorkError`. Its hint includes ``intact``, a note about data that
    is still intact."""
    try:
        yield
    except OSError as error:
        hint, free_note, named_path = "choose another path with --out", "", path
        if error.filename is not None:
            failed_path = Path(os.fsdecode(error.filename))
            named_path = path if path.absolute().parent in failed_path.absolute().parents else failed_path
        if error.errno in DISK_FULL:
            hint = f"free up space, or {hint}"
            with contextlib.suppress(OSError):
                free_bytes = shutil.disk_usage(named_path if named_path.exists() else named_path.parent).free
                free_note = f"; {free_bytes / 1e6:,.0f} MB are free there"
        message = f"cannot write {named_path}: {error.strerror or error}{free_note}"
        raise WorkError(message, f"{hint}; {intact}" if intact else hint) from None


def suggest_name(path: str | Path, otherwise: str = "") -> str:
    """Returns a hint for a missing path: the closest name in its folder, or else ``otherwise``."""
    path, names = Path(path), list[str]()
    with contextlib.suppress(OSError, ValueError):
        names = [entry.name for entry in islice(os.scandir(path.parent), MAX_NAMES) if not entry.name.startswith(".")]
    matches = get_close_matches(path.name, names, n=1, cutoff=0.75)
    return f'did you mean "{path.parent / matches[0]}"?' if matches else otherwise


def check_new(path: Path, hint: str) -> None:
    """Raises `UserError` if ``path`` is not UTF-8 or exists (a broken link counts too). Raises `WorkError` if no folder
    can be created there. Called before long work."""
    with disk_errors(path):
        check_text(f"the name {str(path)!r}", str(path), hint)
        if path.exists() or path.is_symlink():
            raise UserError(f"{path} already exists; nothing is overwritten", hint)
        existing_parent = next(folder for folder in path.absolute().parents if folder.exists())
        tempfile.TemporaryDirectory(prefix=".tmp-", dir=existing_parent).cleanup()


@contextlib.contextmanager
def atomic_folder(target: Path, replace: bool = False) -> Iterator[Path]:
    """Yields a temporary folder and renames it to ``target`` at the end, or deletes it after an error. With
    ``replace``, replaces an existing ``target`` in two renames; `recover` undoes a crash between them. Otherwise raises
    OSError if ``target`` exists."""
    # The name for a replacement is fixed, so that it can be found after a crash. The name for a new folder is unique,
    # because two processes can create the folder at the same time.
    temporary = target.parent / (f"{TEMPORARY}{target.name}" if replace else _temporary_name(target))
    backup = target.parent / f"{BACKUP}{target.name}"
    shutil.rmtree(temporary, ignore_errors=True)  # A killed process can leave the folder behind.
    temporary.mkdir()
    try:
        yield temporary
        sync_folder(temporary)
        if replace and target.exists():
            os.replace(target, backup)
        elif not replace and (target.exists() or target.is_symlink()):
            raise FileExistsError(errno.EEXIST, EXISTS_MESSAGE, str(target))
        try:
            os.replace(temporary, target)
        except OSError as error:
            if error.errno != errno.ENOTEMPTY:
                raise
            raise FileExistsError(errno.EEXIST, EXISTS_MESSAGE, str(target)) from None
        sync_folder(target.parent)
    except BaseException:
        if backup.exists() and not target.exists():
            os.replace(backup, target)
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    shutil.rmtree(backup, ignore_errors=True)


def recover(parent: Path) -> None:
    """Restores the backups of a killed `atomic_folder`, and deletes unfinished files and folders."""
    for backup in parent.glob(f"{BACKUP}*"):
        target = parent / backup.name.removeprefix(BACKUP)
        if not target.exists():
            os.replace(backup, target)
    for leftover in parent.glob(f"{TEMPORARY}*"):
        if leftover.is_dir() and not leftover.is_symlink():
            shutil.rmtree(leftover, ignore_errors=True)
        else:
            leftover.unlink(missing_ok=True)


@contextlib.contextmanager
def locked(folder: Path, hint: str) -> Iterator[None]:
    """Locks a folder. Raises `UserError` if another process holds the lock, or the file system has no locks."""
    lock = FileLock(folder / LOCK, timeout=0)
    with disk_errors(folder):
        try:
            lock.acquire()
        except Timeout:
            raise UserError(f"another process is writing {folder}", hint) from None
        except OSError as error:
            if error.errno not in LOCKS_UNSUPPORTED:
                raise
            message = f"{folder} is on a file system without locks, so two processes could write there at once"
            raise UserError(message, "choose a path on another file system with --out") from None
    try:
        yield
    finally:
        lock.release()


def file_sha256(path: Path, from_disk: bool = False) -> str:
    """Returns a file's sha256 in hexadecimal; ``from_disk`` bypasses the page cache."""
    with open_regular(path) as file:
        if from_disk and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return hashlib.file_digest(file, "sha256").hexdigest()


def cache_dir() -> Path:
    """Returns the user's folder for downloads: ``GPT_CACHE_DIR`` or the platform's cache folder."""
    if os.environ.get("GPT_CACHE_DIR"):
        return Path(os.environ["GPT_CACHE_DIR"])
    return user_folder() / "cache" if sys.platform == "win32" else user_folder()


def user_folder() -> Path:
    """Returns the user's gpt folder for caches. Raises the same errors as `in_home`."""
    if sys.platform == "win32":
        variable, subfolder = "LOCALAPPDATA", "AppData/Local"
    else:
        variable, subfolder = "XDG_CACHE_HOME", "Library/Caches" if sys.platform == "darwin" else ".cache"
    parent = os.environ.get(variable)
    return Path(parent) / "gpt" if parent else in_home(f"{subfolder}/gpt")


def in_home(subfolder: str) -> Path:
    """Returns a folder in the user's home. If home is not writable, as with the arbitrary uid of a container, returns
    one in a private temporary folder. Raises `UserError` if another user owns that folder."""
    with contextlib.suppress(RuntimeError):  # Without HOME, an unknown uid has no home.
        folder = Path.home() / subfolder
        existing_parent = next(parent for parent in (folder, *folder.absolute().parents) if os.access(parent, os.F_OK))
        if existing_parent == folder or os.access(existing_parent, os.W_OK):
            return folder
    owner = f"-{os.getuid()}" if hasattr(os, "getuid") else ""
    return private_folder(Path(tempfile.gettempdir()) / f"gpt{owner}") / subfolder


def private_folder(folder: Path) -> Path:
    """Creates a folder that only this user can access, or checks an existing folder. Raises `UserError` if other users
    can access it, and OSError if it cannot be created."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise UserError(f"{folder} is not a folder", "remove it")
    if hasattr(os, "getuid") and (status.st_uid != os.getuid() or status.st_mode & 0o077):
        message = f"{folder} is open to other users, who could put files there"
        raise UserError(message, f"chmod 700 {folder}, or remove it")
    return folder
