"""Downloads files atomically: interrupted downloads resume, and size and sha256 are verified before the rename."""

import contextlib
import hashlib
import http.client
import os
import shutil
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from filelock import FileLock

from gpt.documents.unpack import reason
from gpt.system.errors import WorkError
from gpt.system.files import file_sha256, sync_folder

OnBytes = Callable[[int, int | None], None]  # Called with downloaded bytes, and the total if known.

TIMEOUT = 60.0  # Maximum seconds without data.
RETRY_DELAYS = (1.0, 2.0, 4.0, 8.0, 16.0)  # Seconds before each retry. Any progress resets the list.
BLOCK = 2**17  # Bytes per read.
RETRY_STATUSES = {408, 425, 429, 500, 502, 503, 504}  # HTTP statuses that justify a retry.


def ignore(done: int, total: int | None) -> None:
    """Discards progress."""


def fetch(
    url: str,
    target: Path,
    sha256: str | None = None,
    size: int | None = None,
    on_bytes: OnBytes = ignore,
    retry_delays: Sequence[float] = RETRY_DELAYS,
) -> Path:
    """Downloads ``url`` to ``target``, unless a file of the published size exists. Returns ``target``.

    After a disconnect or Ctrl-C, this or the next call resumes from a partial file next to ``target``. Other processes
    wait for the download. Raises `WorkError` without a network or disk space, or for a wrong size or sha256.
    """
    with _disk_errors(target):
        if not has_published_size(target, size):
            target.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(target.with_name(f".{target.name}.lock")):
                if not has_published_size(target, size):
                    _Download(url, target, sha256, size, on_bytes).run(retry_delays)
    return target


def has_published_size(target: Path, size: int | None) -> bool:
    """Whether ``target`` exists with the published size, if any. Its checksum was verified when it was downloaded."""
    return target.exists() and size in (None, _file_size(target))


def check_space(folder: Path, needed: int) -> None:
    """Raises `WorkError` if the disk of ``folder`` (which need not exist) has less than ``needed`` free bytes."""
    free = shutil.disk_usage(next(path for path in (folder, *folder.absolute().parents) if path.exists())).free
    if needed > free:
        raise WorkError(
            f"not enough space for {needed:,} bytes in {folder}: {free:,} are free",
            "free up space, or set GPT_CACHE_DIR to a folder on another disk",
        )


class _ConnectionLost(Exception):
    """The connection ended early."""


class _Download:
    """A download in progress. The name of its file ``part`` depends on URL, size and sha256.

    Resuming needs no ETag, because catalogue URLs name a fixed revision or have a sha256.
    """

    def __init__(self, url: str, target: Path, sha256: str | None, size: int | None, on_bytes: OnBytes) -> None:
        self.url, self.target, self.sha256, self.size, self.on_bytes = url, target, sha256, size, on_bytes
        key = hashlib.sha256(f"{url}\n{sha256}\n{size}".encode()).hexdigest()[:12]
        self.part = target.with_name(f".{target.name}.{key}.part")
        self.has_reached_server = False

    def run(self, retry_delays: Sequence[float]) -> None:
        """Completes ``part``, verifies it and renames it. ``retry_delays`` limits the retries without progress."""
        delays, max_size = list(retry_delays), _file_size(self.part)
        while _file_size(self.part) != self.size:
            try:
                self._request()
                break
            except _ConnectionLost as error:
                if _file_size(self.part) > max_size:
                    delays, max_size = list(retry_delays), _file_size(self.part)
                if not self.has_reached_server or not delays:
                    raise self._make_error(f"cannot download {self.url}: {error}") from None
                time.sleep(delays.pop(0))
        if self.sha256 is not None and (actual_sha256 := file_sha256(self.part)) != self.sha256:
            raise self._discard_part(
                f"returned {_file_size(self.part):,} bytes that differ from the published file: "
                f"their sha256 is {actual_sha256[:16]}…, not {self.sha256[:16]}…"
            )
        os.replace(self.part, self.target)
        sync_folder(self.target.parent)

    def _request(self) -> None:
        """Requests all missing bytes. Raises `_ConnectionLost` for errors that justify a retry."""
        part_size = _file_size(self.part)
        with self._open(part_size) as response:
            if response.status in RETRY_STATUSES:
                raise _ConnectionLost(f"HTTP Error {response.status}: {response.reason}")
            is_resumed = response.status == 206 and response.headers.get("Content-Range", "").startswith(
                f"bytes {part_size}-"
            )
            if part_size and response.status in (206, 416) and not is_resumed:
                self.part.unlink()  # The file shrank, or the server returned another range.
                return self._request()
            if response.status != 200 and not (part_size and is_resumed):
                raise self._make_error(f"cannot download {self.url}: HTTP Error {response.status}: {response.reason}")
            part_size = part_size if is_resumed else 0
            length = response.headers.get("Content-Length", "")
            total = part_size + int(length) if length.isdecimal() else self.size
            if self.size not in (None, total):
                raise self._discard_part(f"has {total:,} bytes, not the {self.size:,} that were published")
            self._receive(response, part_size, total)

    def _open(self, part_size: int) -> Any:
        request = urllib.request.Request(self.url, headers={"User-Agent": "gpt", "Accept-Encoding": "identity"})
        if part_size:
            request.add_header("Range", f"bytes={part_size}-")
        try:
            response = urllib.request.urlopen(request, timeout=TIMEOUT)
        except urllib.error.HTTPError as error:
            response = error
        except (http.client.HTTPException, OSError) as error:
            # A URLError means that no server was reached.
            self.has_reached_server |= not isinstance(error, urllib.error.URLError)
            raise _ConnectionLost(reason(getattr(error, "reason", error))) from None
        self.has_reached_server = True
        if urlsplit(response.url).scheme not in ("https", urlsplit(self.url).scheme):
            response.close()
            raise self._make_error(f"{self.url} redirects to {response.url}, which is not secure")
        return response

    def _receive(self, response: Any, done: int, total: int | None) -> None:
        with self.part.open("ab" if done else "wb") as file:
            self.on_bytes(done, total)
            while (total is None or done <= total) and (block := self._read(response)):
                file.write(block)
                done += len(block)
                self.on_bytes(done, total)
            file.flush()
            os.fsync(file.fileno())
        if total is not None and done > total:
            raise self._discard_part(f"returned more than the {total:,} bytes that were published")
        if total is not None and done < total:
            raise _ConnectionLost(f"the connection was cut after {done:,} of {total:,} bytes")

    def _read(self, response: Any) -> bytes:
        try:
            return bytes(response.read(BLOCK))
        except (http.client.HTTPException, OSError) as error:
            raise _ConnectionLost(reason(error)) from None

    def _discard_part(self, problem: str) -> WorkError:
        """Removes the invalid part and returns the error."""
        self.part.unlink(missing_ok=True)
        return self._make_error(f"{self.url} {problem}")

    def _make_error(self, message: str) -> WorkError:
        return WorkError(message, f"on a machine with a network, download {self.url}; then put it at {self.target}")


def _file_size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


@contextlib.contextmanager
def _disk_errors(target: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise WorkError(
            f"cannot save {target}: {reason(error)}",
            "free up space, or set GPT_CACHE_DIR to another folder; the bytes so far are kept",
        ) from None
