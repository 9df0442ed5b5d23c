"""Whole files and folders or none: written beside their place, synced, renamed. Modes follow the umask.

And what every room asks of a file: JSON that may be damaged, a sum, an error of the disk in words.
"""

import contextlib
import hashlib
import json
import os
import shutil
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
        if path.stat().st_size > JSON_LIMIT:
            raise UserError(f"{path} has {path.stat().st_size:,} bytes: far more than such a file needs")
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from None
    except (ValueError, RecursionError):
        raise UserError(f"{path} is damaged: it is not JSON") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} is damaged: it holds no JSON object")
    return value


def to_json(values: Mapping[str, Any]) -> bytes:
    """JSON for people and programs alike: indented, UTF-8, a newline at the end."""
    return (json.dumps(values, indent=2, ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace")


@contextlib.contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turns what the system says of a write below ``path`` into a `WorkError`."""
    try:
        yield
    except OSError as error:
        free = ""
        with contextlib.suppress(OSError):
            free = f"; {shutil.disk_usage(path if path.exists() else path.parent).free / 1e6:,.0f} MB are free there"
        raise WorkError(
            f"cannot write {path}: {error.strerror or error}{free}",
            "make room, or give another place with --out; checkpoints saved before, if any, are whole",
        ) from None


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
