"""Whole files or none: written beside their place, synced, renamed. Modes follow the umask."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


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
