"""Downloads files atomically: size and sha256 are verified before the rename."""

import contextlib
import http.client
import os
import shutil
import string
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import quote, urlsplit

from filelock import FileLock

from gpt.documents.unpack import reason
from gpt.system.errors import WorkError
from gpt.system.files import file_sha256, sync_folder

OnBytes = Callable[[int, int | None], None]  # Called with downloaded bytes, and the total if known.

TIMEOUT = 60.0  # Maximum seconds without data.
BLOCK = 2**17  # Bytes per read.
_HUB = "https://huggingface.co"


def ignore(done: int, total: int | None) -> None:
    """Discards progress."""


def fetch(
    url: str, target: Path, sha256: str | None = None, size: int | None = None, on_bytes: OnBytes = ignore
) -> Path:
    """Downloads ``url`` to ``target``, unless a file of the published size exists. Returns ``target``.

    Other processes wait for the download. Raises `WorkError` without a network or disk space, or for a wrong size or
    sha256.
    """
    if has_published_size(target, size):
        return target
    part = target.with_name(f".{target.name}.part")
    with _download_errors(url, target):
        target.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(target.with_name(f".{target.name}.lock")):
            if not has_published_size(target, size):
                on_bytes(0, size)
                _download(url, part, on_bytes, size)
                _verify(part, sha256, size)
                os.replace(part, target)
                sync_folder(target.parent)
    return target


def has_published_size(target: Path, size: int | None) -> bool:
    """Whether ``target`` exists with the published size, if any. Its checksum was verified when it was downloaded."""
    return target.exists() and size in (None, target.stat().st_size)


def check_space(folder: Path, needed: int, way_out: str = "set GPT_CACHE_DIR to a folder on another disk") -> None:
    """Raises `WorkError` if the disk of ``folder`` (which need not exist) has less than ``needed`` free bytes."""
    free = shutil.disk_usage(next(path for path in (folder, *folder.absolute().parents) if path.exists())).free
    if needed > free:
        message = f"not enough space for {needed:,} bytes in {folder}: {free:,} are free"
        raise WorkError(message, f"free up space, or {way_out}")


class _BadDownload(Exception):
    """What was downloaded is not what was published."""


def _verify(part: Path, sha256: str | None, size: int | None) -> None:
    actual_size, actual_sha256 = part.stat().st_size, file_sha256(part) if sha256 else None
    if size not in (None, actual_size) or actual_sha256 != sha256:
        part.unlink()
        published = f"{size:,} bytes" if size not in (None, actual_size) else f"the sha256 {str(sha256)[:16]}…"
        raise _BadDownload(f"returned {actual_size:,} bytes that differ from the published file of {published}")


def _download(url: str, part: Path, on_bytes: OnBytes, size: int | None) -> None:
    if url.startswith(_HUB):
        url = os.environ.get("HF_ENDPOINT", _HUB).rstrip("/") + url.removeprefix(_HUB)
    ascii_url = quote(url, safe=string.punctuation)  # Addresses in a browser have spaces and letters such as ü.
    request = urllib.request.Request(ascii_url, headers={"User-Agent": "gpt", "Accept-Encoding": "identity"})
    with urllib.request.urlopen(request, timeout=TIMEOUT) as response, part.open("wb") as file:
        if urlsplit(response.url).scheme not in ("https", urlsplit(url).scheme):
            raise _BadDownload(f"redirects to {response.url}, which is not secure")
        length = response.headers.get("Content-Length", "")
        size = size if size is not None or not length.isdecimal() else int(length)
        done = 0
        while block := response.read(BLOCK):
            file.write(block)
            done += len(block)
            on_bytes(done, size)
            if size is not None and done > size:
                break
        if size is not None and done < size:
            raise _BadDownload(f"was cut after {done:,} of {size:,} bytes")
        file.flush()
        os.fsync(file.fileno())


@contextlib.contextmanager
def _download_errors(url: str, target: Path) -> Iterator[None]:
    hint = f"on a machine with a network, download {url}; then put it at {target}"
    try:
        yield
    except _BadDownload as error:
        raise WorkError(f"{url} {error}", hint) from None
    except (urllib.error.URLError, http.client.HTTPException, TimeoutError, ConnectionError, ValueError) as error:
        cause = getattr(error, "reason", error)
        if isinstance(error, urllib.error.HTTPError):
            error.close()
            cause = error
        raise WorkError(f"cannot download {url}: {cause}", hint) from None
    except OSError as error:
        space = "free up space, or set GPT_CACHE_DIR to another folder"
        raise WorkError(f"cannot save {target}: {reason(error)}", space) from None
