"""Serves the page of a run while it trains, with the standard library, on the loopback address."""

import contextlib
import functools
import math
import os
import shlex
import sys
import threading
import time
import webbrowser
import zlib
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from io import BufferedReader
from pathlib import Path
from socketserver import ThreadingTCPServer
from typing import Any

from gpt.config.serve import is_loopback
from gpt.insight.report import History, Report, read_held_out_losses, stored_trend
from gpt.insight.yardsticks import describe
from gpt.runs import folder
from gpt.runs.record import RunRecord
from gpt.system.errors import UserError
from gpt.system.files import open_regular, write_file
from gpt.system.words import as_json

from . import page

POLL_SECONDS = 0.5
CLOSE_SECONDS = 2.0  # How long the end of a command waits for browsers to read the last events.
MAX_BODY = 2000  # Bytes of a sentence.
PIECE_BYTES = 2**22  # Bytes of metrics per message.
FULL_BYTES = 2**18  # Metrics of more bytes are thinned: every second step, every third …
MARK_BYTES = 64
EARLIER_RUNS = 8
STEP = b'{"event": "step"'
KINDS = ("pairs", "chat", "preferences", "reward")  # settings that change what a loss means


def read_new_lines(path: Path, mark: str) -> tuple[bytes, str]:
    """Returns the whole lines of a file after a mark, and the mark of their end: an offset, and a checksum of the bytes
    before it. If the file does not fit the mark, because a resume has cut it, starts over with a line that says so."""
    with open_regular(path) as file:
        offset, _, checksum = mark.partition("-")
        start = int(offset) if offset.isdecimal() and len(offset) < 20 else 0
        start = start if start and _checksum(file, start) == checksum else 0
        file.seek(start)
        data = file.read(PIECE_BYTES)
        size = data.rfind(b"\n") + 1
        if not size:
            return b"", mark
        every = 1 + size // FULL_BYTES
        numbered = enumerate(data[:size].splitlines())
        lines = [line for number, line in numbered if number % every == 0 or not line.startswith(STEP)]
        if not start:
            lines.insert(0, b'{"event": "restart"}')
        return b"\n".join(lines), f"{start + size}-{_checksum(file, start + size)}"


def _checksum(file: BufferedReader, end: int) -> str:
    start = max(0, end - MARK_BYTES)
    file.seek(start)
    return str(zlib.crc32(file.read(end - start)))


class PageServer(ThreadingTCPServer):
    """Serves the page of ``run``, and its metrics as server-sent events, until `end`. Each browser has a thread, so a
    slow one delays nobody."""

    daemon_threads, block_on_close = True, False

    def __init__(self, run: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.run, self.has_ended, self.streams = run, threading.Event(), set[threading.Thread]()

    def handle_error(self, *_: object) -> None:
        """Ignores browsers that close a connection."""

    def end(self) -> None:
        """Stops after the streams have sent the last events, or after `CLOSE_SECONDS`."""
        self.has_ended.set()
        deadline = time.monotonic() + CLOSE_SECONDS
        for stream in list(self.streams):
            stream.join(max(0.0, deadline - time.monotonic()))
        self.shutdown()
        self.server_close()

    def describe(self) -> dict[str, Any]:
        """Returns what the page needs to know about the run besides its metrics. Raises `UserError`."""
        record = RunRecord.read(self.run)
        report, resolved, result = Report(self.run, record, History(), None), record.resolved or {}, record.result or {}
        model, budget, measured = resolved.get("model"), resolved.get("budget"), report.yardsticks
        levels, bits = {}, result.get("bits_per_byte")
        if isinstance(model, dict) and measured is not None:
            nats_per_bit = math.log(float(str(model["vocab_size"]))) / measured.uniform
            names = {"uniform": measured.uniform, "unigram": measured.unigram, "xz": measured.xz}
            levels = {name: value * nats_per_bit for name, value in names.items() if value}
        return {
            "event": "run",
            "name": report.name,
            "texts": record.texts or [],
            "steps": resolved.get("steps"),
            "teachers": report.settings["teachers"],
            "planned": budget.get("total") if isinstance(budget, dict) else None,
            "levels": levels,
            "earlier": self.earlier,
            "sample": result.get("sample"),
            "verdict": describe(bits if isinstance(bits, float) else None, measured, stored_trend(record)),
            "path": shlex.quote(str(self.run)),
            "chat": result.get("chat"),
        }

    @functools.cached_property
    def earlier(self) -> list[dict[str, Any]]:
        """The held-out losses of the last earlier runs next to this one whose losses can be compared with its own."""

        def kind(record: RunRecord) -> tuple[Any, ...]:
            examples = [(record.settings or {}).get(name) for name in KINDS]
            return Report(self.run, record, History(), None).held_out, record.tokenizer, examples

        own, runs = RunRecord.read(self.run), list[tuple[str, Path]]()
        for path in folder.runs_in(self.run.absolute().parent):
            with contextlib.suppress(UserError):
                record = RunRecord.read(path)
                runs += [(record.started, path)] if record.started < own.started and kind(record) == kind(own) else []
        curves = [{"name": path.name, "points": read_held_out_losses(path)} for _, path in sorted(runs)[-EARLIER_RUNS:]]
        return [curve for curve in curves if curve["points"]]


class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    timeout = 30.0  # seconds for a browser that sends or reads nothing

    def do_GET(self) -> None:
        if self._is_allowed():
            if self.path == "/":
                self._answer(200, page.html("watch", f"watch: {self.server.run.name}", {}), "text/html")
            elif self.path == "/events":
                self._stream()
            else:
                self._answer(404)

    def do_POST(self) -> None:
        if self._is_allowed():
            size = self.headers.get("Content-Length", "")
            if self.path != "/sentence":
                self._answer(404)
            elif not size.isdecimal() or len(size) > 9 or int(size) > MAX_BODY:
                self._answer(413, f"a sentence has up to {MAX_BODY} bytes".encode())
            else:
                try:
                    write_file(self.server.run / folder.SENTENCE, self.rfile.read(int(size)))
                    self._answer(204)
                except OSError as error:
                    self._answer(500, f"cannot write {folder.SENTENCE}: {error.strerror}".encode())

    def _is_allowed(self) -> bool:
        """Refuses foreign hosts and origins, since any web page can reach a server on this machine."""
        hosts, origins = self.headers.get_all("Host", []), self.headers.get_all("Origin", [])
        is_allowed = len(hosts) == 1 and is_loopback(hosts[0]) and origins in ([], [f"http://{hosts[0]}"])
        if not is_allowed:
            self._answer(403, b"this host or origin is not allowed")
        return is_allowed

    def _answer(self, status: int, body: bytes = b"", kind: str = "text/plain") -> None:
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Security-Policy", "frame-ancestors 'none'")
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(body)

    def _stream(self) -> None:
        """Sends what is new about the run, with the mark as the event's id, from which a browser continues when it
        reconnects."""
        server, mark, known = self.server, self.headers.get("Last-Event-ID", ""), ""
        self._answer(200, kind="text/event-stream")
        server.streams.add(threading.current_thread())
        try:
            while True:
                is_last = server.has_ended.is_set()
                with contextlib.suppress(UserError):
                    if (facts := as_json(server.describe())) != known:
                        known = facts
                        self._send(facts.encode(), mark)
                with contextlib.suppress(UserError, FileNotFoundError):
                    while (new := read_new_lines(server.run / folder.METRICS, mark))[0]:
                        lines, mark = new
                        self._send(lines, mark)
                if is_last:
                    break
                self.wfile.write(b":\n\n")  # Fails if the browser has gone.
                server.has_ended.wait(POLL_SECONDS)
            self._send(b'{"event": "closed"}', mark)
        finally:
            server.streams.discard(threading.current_thread())

    def _send(self, lines: bytes, mark: str) -> None:
        self.wfile.write(b"id: " + mark.encode() + b"\ndata: " + lines.replace(b"\n", b"\ndata: ") + b"\n\n")

    def log_message(self, *_: object) -> None:
        """Prints nothing."""


@contextlib.contextmanager
def serving(run: Path, note: Callable[[str], None]) -> Iterator[None]:
    """Serves a run's page inside the ``with`` block, and opens it on a desktop."""
    server = PageServer(run)
    address = f"http://127.0.0.1:{server.server_address[1]}/"
    threading.Thread(target=server.serve_forever, args=(POLL_SECONDS,), daemon=True).start()
    note(f"watch it learn: {address}")
    has_desktop = sys.platform in ("darwin", "win32") or {"DISPLAY", "WAYLAND_DISPLAY"} & set(os.environ)
    if has_desktop and sys.stderr.isatty():
        threading.Thread(target=webbrowser.open, args=(address,), daemon=True).start()
    try:
        yield
    finally:
        server.end()
