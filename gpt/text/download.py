"""Downloads that go on where they were cut, and that count only when they are whole."""

import contextlib
import hashlib
import http.client
import os
import re
import shutil
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from email.message import Message
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

from gpt.errors import UserError, WorkError
from gpt.files import file_sum, read_json, sync_folder, to_json, write_file

OnBytes = Callable[[int, int | None], None]  # bytes that are there, and of how many, where that is known

TIMEOUT = 60.0  # seconds without a byte
WAITS = (1.0, 2.0, 4.0, 8.0, 16.0)  # seconds before each further try; all of them again after any progress
BLOCK = 2**17
BUSY = {408, 425, 429, 500, 502, 503, 504}  # statuses that may be others in a while


def ignore(done: int, total: int | None) -> None:
    """For those who do not watch."""


def fetch(
    url: str,
    target: Path,
    sha256: str | None = None,
    size: int | None = None,
    on_bytes: OnBytes = ignore,
    waits: Sequence[float] = WAITS,
) -> Path:
    """``target``, downloaded from ``url`` unless it is there already and whole.

    What came before a cut or a Ctrl-C stays beside it and is continued, now or the next time, if the server still has
    the same file. Raises `WorkError` where there is no network, no room, or something else than what was published.
    """
    download = _Download(url, target, sha256, size, on_bytes)
    with _disk_errors(target):
        if is_whole(url, target, sha256, size):
            return target
        target.parent.mkdir(parents=True, exist_ok=True)
        with _alone(download.lock, download.watch_another):
            if not is_whole(url, target, sha256, size):
                download.run(waits)
                download.finish()
    return target


def is_whole(url: str, target: Path, sha256: str | None, size: int | None) -> bool:
    """Whether ``target`` is what ``url`` stands for: by its sum where one is published, else by its size.

    A stamp beside it spares the sum of a file that has not changed since. A file without a stamp was put there by hand.
    """
    try:
        stat = target.stat()
    except OSError:
        return False
    if size is not None and stat.st_size != size:
        return False
    stamp = _read_or_empty(_stamp(target))
    if (stamp.get("size"), stamp.get("mtime_ns")) != (stat.st_size, stat.st_mtime_ns):
        stamp = {}
    if sha256 is None:
        return bool(stamp.get("url", url) == url)
    if stamp.get("sha256") == sha256:
        return True
    if file_sum(target) != sha256:
        return False
    _write_stamp(url, target, sha256)
    return True


def seems_whole(target: Path, size: int | None) -> bool:
    """Whether there is a file of the published size, if any is published. Reads nothing."""
    return _size(target) == size if size is not None else target.exists()


def bytes_here(url: str, target: Path, sha256: str | None, size: int | None) -> int:
    """How many bytes of ``target`` are here already: all, or as many as its part has."""
    if seems_whole(target, size):
        return _size(target)
    return _size(_Download(url, target, sha256, size, ignore).part)


def check_space(folder: Path, needed: int) -> None:
    """Raises `WorkError` where ``folder``, which need not be there yet, has no room for ``needed`` more bytes."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise WorkError(
            f"no room for {needed:,} bytes in {folder}: {free:,} are free",
            "make room, or set GPT_CACHE_DIR to a folder on another disk",
        )


class _Cut(Exception):
    """The connection ended before the file did."""


class _Download:
    """One file on its way: ``part`` is what has come of it, ``note`` which version of it the server had."""

    def __init__(self, url: str, target: Path, sha256: str | None, size: int | None, on_bytes: OnBytes) -> None:
        self.url, self.target, self.sha256, self.size, self.on_bytes = url, target, sha256, size, on_bytes
        # Another address or another sum is another part.
        key = hashlib.sha256(f"{url}\n{sha256}\n{size}".encode()).hexdigest()[:12]
        self.part = target.with_name(f".{target.name}.{key}.part")
        self.note = target.with_name(f".{target.name}.{key}.part.json")
        self.lock = target.with_name(f".{target.name}.lock")
        self.answered = False  # whether there is a network and a server at all

    def run(self, waits: Sequence[float]) -> None:
        """Makes ``part`` whole, in as many tries as ``waits`` allow since the last progress."""
        left, most = list(waits), _size(self.part)
        while True:
            try:
                return self._try()
            except _Cut as cut:
                if _size(self.part) > most:
                    left, most = list(waits), _size(self.part)
                if not self.answered or not left:
                    raise self._error(f"cannot download {self.url}: {cut}") from None
                time.sleep(left.pop(0))

    def finish(self) -> None:
        """Checks ``part`` and makes it ``target``."""
        if self.sha256 is not None and (found := file_sum(self.part)) != self.sha256:
            size = _size(self.part)
            self._forget()
            raise self._error(
                f"{self.url} gave {size:,} bytes that are not what was published: "
                f"their sha256 is {found[:16]}…, not {self.sha256[:16]}…"
            )
        os.replace(self.part, self.target)
        sync_folder(self.target.parent)
        _write_stamp(self.url, self.target, self.sha256)
        self.note.unlink(missing_ok=True)

    def watch_another(self) -> None:
        """Tells how far the process has come that is fetching the same file."""
        self.on_bytes(_size(self.part), self.size)

    def _try(self) -> None:
        """One request, from where the part ends. Raises `_Cut`."""
        done, total, validator = self._kept()
        if done and done == total:
            return
        with self._open(done, validator) as response:
            if done and not (response.status == 200 or _continues(response, done, total, validator)):
                self._forget()  # the file has changed, or the server counts in another way
                return self._try()
            if response.status == 200:
                done = 0
                self._forget()
            elif not done:
                raise self._error(f"{self.url} answers with status {response.status}, which was not asked for")
            total = self._total(response, done)
            if total is not None:
                check_space(self.part.parent, total - done)
            if not done:
                write_file(self.note, to_json({"total": total, "validator": _validator(response.headers)}))
            self._receive(response, total)

    def _open(self, done: int, validator: str) -> Any:
        request = urllib.request.Request(self.url, headers={"User-Agent": "gpt", "Accept-Encoding": "identity"})
        if done:
            request.add_header("Range", f"bytes={done}-")
            request.add_header("If-Range", validator)
        try:
            response = urllib.request.build_opener(Redirects).open(request, timeout=TIMEOUT)
        except urllib.error.HTTPError as error:
            self.answered = True
            if error.code == 416 and done:
                return error  # a response as any other, to which `_try` begins anew
            error.close()
            if error.code in BUSY:
                raise _Cut(str(error)) from None
            raise self._error(f"cannot download {self.url}: {error}") from None
        except (http.client.HTTPException, OSError) as error:
            self.answered |= not isinstance(error, urllib.error.URLError)  # which says that nobody was reached
            raise _Cut(_reason(error)) from None
        self.answered = True
        return response

    def _total(self, response: Any, done: int) -> int | None:
        """The length of the whole file, as published or as the server says; both must agree."""
        length = response.headers.get("Content-Length", "")
        total = done + int(length) if length.isdecimal() else None
        if response.status == 206:
            total = _range(response.headers)[1] or total
        if total is not None and self.size is not None and total != self.size:
            self._forget()
            raise self._error(f"{self.url} has {total:,} bytes, not the {self.size:,} that were published")
        return self.size if total is None else total

    def _receive(self, response: Any, total: int | None) -> None:
        with self.part.open("ab") as file:
            done = file.tell()
            self.on_bytes(done, total)
            while block := self._read(response):
                file.write(block)
                done += len(block)
                self.on_bytes(done, total)
            file.flush()
            os.fsync(file.fileno())
        if total is not None and done > total:
            self._forget()
            raise self._error(f"{self.url} gave more than the {total:,} bytes that were published")
        if total is not None and done < total:
            raise _Cut(f"the connection was cut after {done:,} of {total:,} bytes")

    def _read(self, response: Any) -> bytes:
        try:
            return bytes(response.read(BLOCK))
        except (http.client.HTTPException, OSError) as error:
            raise _Cut(_reason(error)) from None

    def _kept(self) -> tuple[int, int | None, str]:
        """Bytes of the part, of how many, and the name of that version; 0 bytes where it cannot be continued."""
        note, done = _read_or_empty(self.note), _size(self.part)
        total, validator = note.get("total"), note.get("validator")
        if not done or (done != total and not validator):
            return 0, None, ""
        return done, total, str(validator)

    def _forget(self) -> None:
        self.part.unlink(missing_ok=True)
        self.note.unlink(missing_ok=True)

    def _error(self, message: str) -> WorkError:
        return WorkError(message, f"with a network elsewhere: download {self.url} and put it at {self.target}")


class Redirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects, but never from a safe connection to an open one."""

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        """The next request. Raises `WorkError` where its answer could be anyone's."""
        before, after = urlsplit(req.full_url).scheme, urlsplit(newurl).scheme
        if after != "https" and not before == after == "http":
            fp.close()
            raise WorkError(
                f"{req.full_url} redirects from {before} to {after}: {newurl}",
                "this is not followed; try another network",
            )
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _validator(headers: Message) -> str:
    """What names a version of a file: a strong ETag, or else the time of its last change."""
    tag = headers.get("ETag", "")
    return headers.get("Last-Modified", "") if not tag or tag.startswith("W/") else tag


def _range(headers: Message) -> tuple[int | None, int | None]:
    """Where a part of a file begins, and how long the file is."""
    found = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", headers.get("Content-Range", "").strip())
    if not found:
        return None, None
    return int(found[1]), int(found[2]) if found[2].isdecimal() else None


def _continues(response: Any, done: int, total: int | None, validator: str) -> bool:
    """Whether a response goes on with the same file where the part ends."""
    if response.status != 206 or _validator(response.headers) != validator:
        return False
    start, length = _range(response.headers)
    return start == done and (total is None or length in (None, total))


def _reason(error: Exception) -> str:
    """What the system says; urllib wraps it."""
    inner = getattr(error, "reason", error)
    return str(getattr(inner, "strerror", None) or inner) or type(error).__name__


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _stamp(target: Path) -> Path:
    return target.with_name(f".{target.name}.ok")


def _write_stamp(url: str, target: Path, sha256: str | None) -> None:
    stat = target.stat()
    stamp = {"url": url, "size": stat.st_size, "mtime_ns": stat.st_mtime_ns, "sha256": sha256}
    with contextlib.suppress(OSError):  # a cache that may only be read: summed again next time
        write_file(_stamp(target), to_json(stamp))


def _read_or_empty(path: Path) -> dict[str, Any]:
    try:
        return read_json(path)
    except UserError:
        return {}


@contextlib.contextmanager
def _disk_errors(target: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        free = ""
        with contextlib.suppress(OSError):
            free = f"; {shutil.disk_usage(target.parent).free:,} bytes are free there"
        raise WorkError(
            f"cannot keep {target}: {error.strerror or error}{free}",
            "make room, or set GPT_CACHE_DIR to another folder of yours; what has come is kept",
        ) from None


@contextlib.contextmanager
def _alone(path: Path, waiting: Callable[[], None]) -> Iterator[None]:
    """Holds the lock ``path``; while another process or thread has it, calls ``waiting`` again and again."""
    while True:
        with path.open("ab") as file:
            while not _lock(file.fileno()):
                waiting()
                time.sleep(0.1)
            if not _is_at(file.fileno(), path):
                continue  # whoever had it has removed it, and another one may stand there
            try:
                yield
            finally:
                with contextlib.suppress(OSError):  # Windows keeps what is open
                    path.unlink()
            return


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except OSError:
        return False


def _lock(descriptor: int) -> bool:
    """Takes a lock that ends with the file's closing, or the process; True too where the system has none to give."""
    try:
        if sys.platform == "win32":
            import msvcrt

            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    except OSError:
        pass
    return True
