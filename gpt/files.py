"""Whole files and folders or none: written beside their place, synced, renamed. Modes follow the umask.

And what every room asks of a file: JSON that may be damaged, a sum, an error of the disk in words.
"""

import contextlib
import errno
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from gpt.errors import UserError, WorkError

JSON_LIMIT = 64 * 2**20  # bytes; no JSON file of ours is larger


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


def sync_folder(path: Path) -> None:
    """Makes renames in a folder last, where the system can (Windows cannot open folders)."""
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
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
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
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
    """A folder to fill that becomes ``target`` when all went well, and vanishes otherwise."""
    beside = target.parent / f".tmp-{target.name}"
    shutil.rmtree(beside, ignore_errors=True)  # a killed run's
    beside.mkdir()
    try:
        yield beside
        sync_folder(beside)
        os.replace(beside, target)
        sync_folder(target.parent)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise


def file_sum(path: Path) -> str:
    """sha256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
