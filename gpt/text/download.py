"""Downloads a file whole or not at all: checked by size and sha256, resumed where it was cut."""

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
from typing import IO, Any
from urllib.parse import urlsplit

from filelock import FileLock, Timeout

from gpt.errors import WorkError
from gpt.files import file_sha256, sync_folder, write_file
from gpt.text.unpack import reason

OnBytes = Callable[[int, int | None], None]  # gets the bytes that are here, and those of the whole file if known

TIMEOUT = 60.0  # seconds without a byte
WAITS = (1.0, 2.0, 4.0, 8.0, 16.0)  # seconds before each further try; all of them again after any progress
BLOCK = 2**17  # bytes
BUSY = {408, 425, 429, 500, 502, 503, 504}  # HTTP statuses after which another try may succeed


def ignore(done: int, total: int | None) -> None:
    """The listener that shows no progress."""


def fetch(
    url: str,
    target: Path,
    sha256: str | None = None,
    size: int | None = None,
    on_bytes: OnBytes = ignore,
    waits: Sequence[float] = WAITS,
) -> Path:
    """Downloads ``url`` to ``target``, unless the file is there already and whole. Returns ``target``.

    After a cut or a Ctrl-C the bytes so far stay beside ``target``, and the download is resumed, now or by the next
    call. Processes that want the same file wait for one of them. Raises `WorkError` without a network or room on the
    disk, and for a file of another size or sha256 than published.
    """
    with _disk_errors(target):
        if not is_whole(target, sha256, size):
            target.parent.mkdir(parents=True, exist_ok=True)
            download = _Download(url, target, sha256, size, on_bytes)
            with download.locked():
                if not is_whole(target, sha256, size):
                    download.run(waits)
    return target


def is_whole(target: Path, sha256: str | None, size: int | None) -> bool:
    """Whether ``target`` is the published file: by its sha256 if one is published, else by its size.

    A stamp beside it spares the checksum of a file that has not changed since.
    """
    if sha256 is None or not seems_whole(target, size):
        return seems_whole(target, size)
    path, stamp = _stamp(target, sha256)
    with contextlib.suppress(OSError):
        if path.read_bytes() == stamp:
            return True
    if file_sha256(target) != sha256:
        return False
    _write_stamp(target, sha256)
    return True


def seems_whole(target: Path, size: int | None) -> bool:
    """Whether there is a file, of the published size if one is published. Reads nothing."""
    return target.exists() and size in (None, _size(target))


def bytes_here(url: str, target: Path, sha256: str | None, size: int | None) -> int:
    """Returns how many bytes of ``target`` are on the disk: all, or those of an unfinished download."""
    return _size(target if seems_whole(target, size) else _Download(url, target, sha256, size, ignore).part)


def check_space(folder: Path, needed: int) -> None:
    """Raises `WorkError` where ``folder``, which need not exist yet, has no room for ``needed`` more bytes."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise WorkError(
            f"not enough space for {needed:,} bytes in {folder}: {free:,} are free",
            "free up space, or set GPT_CACHE_DIR to a folder on another disk",
        )


class _Cut(Exception):
    """The connection ended before the file did."""


class _Download:
    """A download in progress; ``part`` holds the bytes so far. Another address, size or sha256 has another part.

    A part needs no validator such as an ETag: the catalogue's addresses name a fixed revision, or have a sha256.
    """

    def __init__(self, url: str, target: Path, sha256: str | None, size: int | None, on_bytes: OnBytes) -> None:
        self.url, self.target, self.sha256, self.size, self.on_bytes = url, target, sha256, size, on_bytes
        key = hashlib.sha256(f"{url}\n{sha256}\n{size}".encode()).hexdigest()[:12]
        self.part = target.with_name(f".{target.name}.{key}.part")
        self.answered = False  # whether any server has answered at all

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Holds the lock of ``target``; while another process or thread has it, shows how far that one has come."""
        lock = FileLock(self.target.with_name(f".{self.target.name}.lock"))
        while not lock.is_locked:
            try:
                lock.acquire(timeout=0.1)
            except Timeout:
                self.on_bytes(_size(self.part), self.size)
        try:
            yield
        finally:
            lock.release()

    def run(self, waits: Sequence[float]) -> None:
        """Makes ``part`` whole, in as many tries as ``waits`` allow since the last progress; checks and renames it."""
        left, most = list(waits), _size(self.part)
        while _size(self.part) != self.size:
            try:
                self._request()
                break
            except _Cut as cut:
                if _size(self.part) > most:
                    left, most = list(waits), _size(self.part)
                if not self.answered or not left:
                    raise self._error(f"cannot download {self.url}: {cut}") from None
                time.sleep(left.pop(0))
        if self.sha256 is not None and (found := file_sha256(self.part)) != self.sha256:
            raise self._wrong(
                f"returned {_size(self.part):,} bytes that differ from the published file: "
                f"their sha256 is {found[:16]}…, not {self.sha256[:16]}…"
            )
        os.replace(self.part, self.target)
        sync_folder(self.target.parent)
        if self.sha256 is not None:
            _write_stamp(self.target, self.sha256)

    def _request(self) -> None:
        """Makes one request, for all bytes after those of the part. Raises `_Cut`."""
        done = _size(self.part)
        with self._open(done) as response:
            if response.status in BUSY:
                raise _Cut(f"HTTP Error {response.status}: {response.reason}")
            resumes = response.status == 206 and response.headers.get("Content-Range", "").startswith(f"bytes {done}-")
            if done and response.status in (206, 416) and not resumes:
                self.part.unlink()  # the file has shrunk, or the server counts in another way
                return self._request()
            if response.status != 200 and not (done and resumes):
                raise self._error(f"cannot download {self.url}: HTTP Error {response.status}: {response.reason}")
            done = done if resumes else 0
            length = response.headers.get("Content-Length", "")
            total = done + int(length) if length.isdecimal() else self.size
            if self.size not in (None, total):
                raise self._wrong(f"has {total:,} bytes, not the {self.size:,} that were published")
            self._receive(response, done, total)

    def _open(self, done: int) -> Any:
        request = urllib.request.Request(self.url, headers={"User-Agent": "gpt", "Accept-Encoding": "identity"})
        if done:
            request.add_header("Range", f"bytes={done}-")
        try:
            response = urllib.request.build_opener(Redirects).open(request, timeout=TIMEOUT)
        except urllib.error.HTTPError as error:
            response = error
        except (http.client.HTTPException, OSError) as error:
            self.answered |= not isinstance(error, urllib.error.URLError)  # a URLError: no server was reached
            raise _Cut(reason(getattr(error, "reason", error))) from None
        self.answered = True
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
            raise self._wrong(f"returned more than the {total:,} bytes that were published")
        if total is not None and done < total:
            raise _Cut(f"the connection was cut after {done:,} of {total:,} bytes")

    def _read(self, response: Any) -> bytes:
        try:
            return bytes(response.read(BLOCK))
        except (http.client.HTTPException, OSError) as error:
            raise _Cut(reason(error)) from None

    def _wrong(self, what: str) -> WorkError:
        """Removes the part, which is of no use, and returns the error."""
        self.part.unlink(missing_ok=True)
        return self._error(f"{self.url} {what}")

    def _error(self, message: str) -> WorkError:
        return WorkError(message, f"on a machine with a network, download {self.url}; then put it at {self.target}")


class Redirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects, but never from https to anything else."""

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        """Returns the next request. Raises `WorkError` where anyone could change its answer."""
        before, after = urlsplit(req.full_url).scheme, urlsplit(newurl).scheme
        if after != "https" and not before == after == "http":
            fp.close()
            raise WorkError(
                f"{req.full_url} redirects from {before} to {after}: {newurl}",
                "gpt does not follow such a redirect; try another network",
            )
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _stamp(target: Path, sha256: str) -> tuple[Path, bytes]:
    """Returns the path of the stamp, and what it holds while ``target`` has this sha256."""
    stat = target.stat()
    return target.with_name(f".{target.name}.ok"), f"{sha256} {stat.st_size} {stat.st_mtime_ns}\n".encode()


def _write_stamp(target: Path, sha256: str) -> None:
    with contextlib.suppress(OSError):  # a read-only cache: the checksum is computed again next time
        write_file(*_stamp(target, sha256))


@contextlib.contextmanager
def _disk_errors(target: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        free = ""
        with contextlib.suppress(OSError):
            free = f"; {shutil.disk_usage(target.parent).free:,} bytes are free there"
        raise WorkError(
            f"cannot save {target}: {error.strerror or error}{free}",
            "free up space, or set GPT_CACHE_DIR to another folder; the bytes so far are kept",
        ) from None
