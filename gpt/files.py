"""Whole files and folders or none: written beside their place, synced, renamed. Modes follow the umask.

And what every room asks of a file: JSON that may be damaged, a sum, an error of the disk in words.
"""

import contextlib
import dataclasses
import errno
import hashlib
import json
import math
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Literal, TypeVar, get_args, get_origin, get_type_hints

from filelock import FileLock, Timeout

from gpt.errors import UserError, WorkError
from gpt.settings import from_dict, without_none

JSON_LIMIT = 64 * 2**20  # bytes; no JSON file of ours is larger
FULL = (errno.ENOSPC, errno.EDQUOT)
LOCK = ".lock"
TEMPORARY, ASIDE = ".tmp-", ".tmp-was-"  # before the names of what is written, and of what it replaces
T = TypeVar("T")


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """A file to fill that becomes ``path`` when all went well, and vanishes otherwise. Raises OSError."""
    beside = path.parent / f".tmp-{os.getpid()}-{path.name}"
    try:
        with beside.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except BaseException:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)
        raise


def write_file(path: Path, data: bytes) -> None:
    """All of ``data`` at ``path``, or nothing. Raises OSError."""
    with whole_file(path) as file:
        file.write(data)


def write_pieces(path: Path, pieces: Iterable[Any]) -> str:
    """All pieces one after the other at ``path``, or nothing; their sha256, from memory. Raises OSError."""
    digest = hashlib.sha256()
    with whole_file(path) as file:
        for piece in pieces:
            file.write(piece)
            digest.update(piece)
    return digest.hexdigest()


def side_by_side(do: Callable[[str], T], names: Iterable[str]) -> dict[str, T]:
    """What ``do`` gives for each file, two at a time: one processor's sums and copies are slower than a disk. Raises
    what one that fails does, once none is at work. A program that ends at once does not wait for these threads, as it
    would for those of concurrent.futures."""
    from multiprocessing.pool import ThreadPool  # 15 ms, which `--help` has no use for

    names = list(names)
    with ThreadPool(2) as pool:
        return dict(zip(names, pool.map(do, names, chunksize=1), strict=True))


def sync_folder(path: Path) -> None:
    """Makes renames in a folder last, where the system can: Windows cannot open folders, and some shares cannot sync
    them. Raises OSError where the disk fails."""
    if sys.platform == "win32":
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; `UserError` where there is none, it is huge, or it is something else."""
    try:
        with reading(path):
            size = path.stat().st_size
            if size > JSON_LIMIT:
                raise UserError(f"{path} has {size:,} bytes: far more than such a file needs")
            value = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        raise UserError(f"{path} is damaged: it is not JSON") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} is damaged: it holds no JSON object")
    return value


def checked(cls: type[T], values: Any, where: str) -> T:
    """A dataclass of numbers, words and further dataclasses from JSON that may be damaged: every field of its type,
    every number finite. Raises `UserError` naming ``where``."""
    if not isinstance(values, dict):
        raise UserError(f"{where} is damaged: no {cls.__name__} is in it")
    hints = get_type_hints(cls)
    found = dict(values)
    for key, value in values.items():
        if key not in hints:
            raise UserError(f"{where} is damaged: it has a key {key[:40]!r}")
        kind = hints[key]
        inner = without_none(kind)
        if dataclasses.is_dataclass(inner):
            found[key] = None if value is None and inner is not kind else checked(inner, value, where)  # type: ignore[arg-type]
        elif not _fits(value, kind):
            raise UserError(f"{where} is damaged: {key} is {str(value)[:40]!r}")
    return from_dict(cls, found, where)


def _fits(value: Any, kind: Any) -> bool:
    inner = without_none(kind)
    if value is None:
        return inner is not kind
    if get_origin(inner) is Literal:
        return value in get_args(inner)
    if inner is float:
        return type(value) in (int, float) and abs(value) <= sys.float_info.max and math.isfinite(value)
    if inner is int:
        return type(value) is int and abs(value) < 2**63
    return isinstance(value, get_origin(inner) or inner) and (inner is bool or type(value) is not bool)


def to_json(values: Mapping[str, Any]) -> bytes:
    """JSON for people and programs alike: indented, UTF-8, a newline at the end."""
    return (json.dumps(values, indent=2, ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace")


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turns what the system says of reading ``path``, or what lies below it, into a `UserError`."""
    try:
        yield
    except OSError as error:
        said = f"cannot read {error.filename or path}: {error.strerror or error}"
        raise UserError(said, "look at its permissions" if isinstance(error, PermissionError) else "") from None


@contextlib.contextmanager
def disk_errors(path: Path, kept: str = "") -> Iterator[None]:
    """Turns what the system says of a write below ``path`` into a `WorkError`. ``kept``: what is whole all the same."""
    try:
        yield
    except OSError as error:
        hint, free = "give another place with --out", ""
        if error.errno in FULL:
            hint = f"make room, or {hint}"
            with contextlib.suppress(OSError):
                space = shutil.disk_usage(path if path.exists() else path.parent).free
                free = f"; {space / 1e6:,.0f} MB are free there"
        said = f"cannot write {path}: {error.strerror or error}{free}"
        raise WorkError(said, f"{hint}; {kept}" if kept else hint) from None


def check_new(path: Path, hint: str) -> None:
    """Raises `UserError` where something of that name is there, a link to nowhere too, and `WorkError` where no folder
    can be made there: before the work, not after it."""
    with disk_errors(path):
        if path.exists() or path.is_symlink():
            raise UserError(f"{path} is there already; nothing is overwritten", hint)
        nearest = next(folder for folder in path.absolute().parents if folder.exists())
        tempfile.TemporaryDirectory(prefix=".tmp-", dir=nearest).cleanup()


@contextlib.contextmanager
def whole_folder(target: Path) -> Iterator[Path]:
    """A folder to fill that becomes ``target`` when all went well, and vanishes otherwise. Where there is a ``target``,
    it goes once the new one is whole; `recover` undoes a crash between the two renames."""
    beside, aside = target.parent / f"{TEMPORARY}{target.name}", target.parent / f"{ASIDE}{target.name}"
    shutil.rmtree(beside, ignore_errors=True)  # a killed run's
    beside.mkdir()
    try:
        yield beside
        sync_folder(beside)
        if target.exists():
            os.replace(target, aside)
        os.replace(beside, target)
        sync_folder(target.parent)
    except BaseException:
        if aside.exists() and not target.exists():
            os.replace(aside, target)
        shutil.rmtree(beside, ignore_errors=True)
        raise
    shutil.rmtree(aside, ignore_errors=True)


def recover(parent: Path) -> None:
    """Puts back what `whole_folder` had set aside when it was killed, and takes away what was not finished."""
    for aside in parent.glob(f"{ASIDE}*"):
        target = parent / aside.name.removeprefix(ASIDE)
        if not target.exists():
            os.replace(aside, target)
    for left in parent.glob(f"{TEMPORARY}*"):
        if left.is_dir() and not left.is_symlink():
            shutil.rmtree(left, ignore_errors=True)
        else:
            left.unlink(missing_ok=True)


@contextlib.contextmanager
def locked(folder: Path, hint: str) -> Iterator[None]:
    """Holds a folder for this process alone, until it lets go or dies. Raises `UserError` where another one has it."""
    lock = FileLock(folder / LOCK, timeout=0)
    with disk_errors(folder):
        try:
            lock.acquire()
        except Timeout:
            raise UserError(f"another process is writing {folder}", hint) from None
    try:
        yield
    finally:
        lock.release()


def file_sum(path: Path, from_disk: bool = False) -> str:
    """sha256 of a file, in hexadecimal; ``from_disk``: not of what the system still has of it in memory."""
    with path.open("rb") as file:
        if from_disk and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return hashlib.file_digest(file, "sha256").hexdigest()


def cache_dir() -> Path:
    """The per-user folder for downloads: ``GPT_CACHE_DIR``, or where the platform keeps caches."""
    if os.environ.get("GPT_CACHE_DIR"):
        return Path(os.environ["GPT_CACHE_DIR"])
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "gpt" / "cache"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "gpt"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gpt"
