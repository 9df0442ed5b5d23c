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
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BufferedReader
from pathlib import Path
from socketserver import TCPServer
from typing import Any

from gpt.config import events
from gpt.config.serve import is_loopback
from gpt.insight.report import History, Report, read_held_out_losses, stored_trend
from gpt.insight.yardsticks import describe
from gpt.runs import folder
from gpt.runs.record import RunRecord
from gpt.system.errors import Interrupted, UserError
from gpt.system.files import open_regular, write_file
from gpt.system.interrupt import StopSignal
from gpt.system.words import as_json

from . import page

Listener = Callable[[Any], None]

POLL_SECONDS = 0.5
CLOSE_SECONDS = 2.0  # How long the end of a command waits for browsers to read the last events.
STALLED_SECONDS = 30.0  # Timeout for a browser that doesn't read.
MAX_BODY = 2000  # Bytes of a sentence.
PIECE_BYTES = 2**22  # Bytes of metrics per message.
FULL_BYTES = 2**18  # Metrics of more bytes are thinned: every second step, every third …
MARK_BYTES = 64
EARLIER_RUNS = 8
STEP = b'{"event": "step"'
HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


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


class PageServer(ThreadingHTTPServer):
    """Serves the page of ``run``, and its metrics as server-sent events, until `end`. Each browser has a thread, so a
    slow one delays nobody."""

    daemon_threads, block_on_close = True, False

    def __init__(self, run: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.run, self.has_ended, self.streams = run, threading.Event(), set[threading.Thread]()

    def server_bind(self) -> None:
        """Binds the socket without looking up this machine's name, which can take seconds."""
        TCPServer.server_bind(self)

    def handle_error(self, *_: object) -> None:
        """Ignores browsers that close a connection."""

    @property
    def address(self) -> str:
        """The page's address."""
        return f"http://127.0.0.1:{self.server_address[1]}/"

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
        model, budget, settings = resolved.get("model"), resolved.get("budget"), record.settings or {}
        units = {"preferences": "nats per preference", "reward": "minus the reward"}
        unit = next((unit for kind, unit in units.items() if settings.get(kind)), "nats per token")
        levels = {}
        if isinstance(model, dict) and unit == "nats per token":
            levels["uniform"] = uniform = math.log(float(str(model["vocab_size"])))
            if (measured := report.yardsticks) is not None:
                known = {"unigram": measured.unigram, "xz": measured.xz, "PPMd": measured.ppmd}
                levels |= {name: bits / measured.uniform * uniform for name, bits in known.items() if bits}
        path, bits = shlex.quote(str(self.run)), result.get("bits_per_byte")
        commands = [f"gpt chat -m {path}" if result.get("chat") else f'gpt sample "Once upon" -m {path}']
        commands += [f"gpt report {path} -o film.html", f'gpt inspect attention "TEXT" -m {path} -o attention.html']
        return {
            "event": "run",
            "name": report.name,
            "texts": record.texts or [],
            "steps": resolved.get("steps"),
            "seconds": budget.get("total") if isinstance(budget, dict) else None,
            "unit": unit,
            "levels": levels,
            "earlier": self.earlier,
            "sample": result.get("sample"),
            "verdict": describe(bits if isinstance(bits, float) else None, report.yardsticks, stored_trend(record)),
            "resume": f"gpt train --resume {path}",
            "commands": commands,
        }

    @functools.cached_property
    def earlier(self) -> list[dict[str, Any]]:
        """The held-out losses of the last earlier runs next to this one whose losses can be compared with its own."""

        def kind(record: RunRecord) -> tuple[Any, ...]:
            settings = record.settings or {}
            examples = [settings.get(name) for name in ("pairs", "chat", "preferences", "reward")]
            return Report(self.run, record, History(), None).held_out, record.tokenizer, examples

        own, runs = RunRecord.read(self.run), list[tuple[str, Path]]()
        for path in folder.runs_in(self.run.absolute().parent):
            with contextlib.suppress(UserError):
                record = RunRecord.read(path)
                runs += [(record.started, path)] if record.started < own.started and kind(record) == kind(own) else []
        return [
            {"name": path.name, "points": points}
            for _, path in sorted(runs)[-EARLIER_RUNS:]
            if (points := read_held_out_losses(path))
        ]


class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    timeout = STALLED_SECONDS

    def do_GET(self) -> None:
        if self._is_allowed():
            if self.path == "/":
                self._answer(200, page.html("watch", f"watch: {self.server.run.name}", {}), "text/html")
            elif self.path == "/events":
                self._stream()
            else:
                self._answer(404, b"not found")

    def do_POST(self) -> None:
        if self._is_allowed():
            size = self.headers.get("Content-Length", "")
            if self.path != "/sentence":
                self._answer(404, b"not found")
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
        self._send_headers(kind, {"Content-Length": str(len(body))})
        self.wfile.write(body)

    def _send_headers(self, kind: str, more: dict[str, str]) -> None:
        for name, value in {"Content-Type": f"{kind}; charset=utf-8", **HEADERS, **more}.items():
            self.send_header(name, value)
        self.end_headers()

    def _stream(self) -> None:
        """Sends what is new about the run, with the mark as the event's id, from which a browser continues when it
        reconnects."""
        server, mark, known = self.server, self.headers.get("Last-Event-ID", ""), ""
        self.send_response(200)
        self._send_headers("text/event-stream", {})
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
    threading.Thread(target=server.serve_forever, args=(POLL_SECONDS,), daemon=True).start()
    note(f"watch it learn: {server.address}")
    has_desktop = sys.platform in ("darwin", "win32") or os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    if has_desktop and sys.stderr.isatty():
        threading.Thread(target=webbrowser.open, args=(server.address,), daemon=True).start()
    try:
        yield
    finally:
        server.end()


@contextlib.contextmanager
def watching(listen: Listener, note: Callable[[str], None]) -> Iterator[Listener]:
    """Yields a listener that also serves the page of the run, once the run has a folder."""
    with contextlib.ExitStack() as until_ended:

        def listen_and_serve(event: Any) -> None:
            if isinstance(event, events.Opened):
                until_ended.enter_context(serving(Path(event.run), note))
            listen(event)

        yield listen_and_serve


def serve(run: Path, note: Callable[[str], None]) -> None:
    """Serves a run's page until a signal arrives. Raises `Interrupted`."""
    with StopSignal() as stop, serving(run, note):
        while stop.signum is None:
            time.sleep(POLL_SECONDS)
    raise Interrupted(stop.signum, "the page has ended; it changes nothing about the run")
