"""Extracts the text of documents in a separate process (`gpt.documents.document_readers`) with limits on time, memory
and size, because documents can be hostile."""

import contextlib
import json
import subprocess
from pathlib import Path
from typing import Any

from gpt.config.text import ReadConfig
from gpt.documents.unpack import BUFFER, ByteStream
from gpt.system.child import end_program, start_program
from gpt.system.distribution import install_extra
from gpt.system.errors import UserError, WorkError

KINDS = {
    ".html": "html", ".htm": "html", ".xhtml": "xhtml", ".epub": "epub", ".docx": "docx", ".pdf": "pdf", ".eml": "mail",
    ".ipynb": "notebook", ".srt": "subtitles", ".vtt": "subtitles",
}  # fmt: skip


def document_kind(name: str) -> str | None:
    """Returns the kind of a document to extract text from, given its name in lower case, or None."""
    base = name.replace("\\", "/").rpartition("/")[2]
    if base.endswith(".txt") and ("whatsapp" in base or base == "_chat.txt"):
        return "chat"
    return KINDS.get("." + base.rpartition(".")[2])


MAX_BYTES = 2**28  # Bytes of a file, and of what is unpacked from it.
MAX_CHARACTERS = 2**26  # Characters of its text.
MEMORY_LIMIT = 2**30  # Bytes for the whole process.
SECONDS, RATE = 60, 2**20  # Limit of 60 s plus 1 s per MiB.
PROGRAM = Path(__file__).with_name("document_readers.py")
_SETTINGS = {
    "memory": MEMORY_LIMIT, "longest": MAX_CHARACTERS, "unpacked": MAX_BYTES, "seconds": SECONDS, "rate": RATE,
}  # fmt: skip
_SKIP = "or skip it with --skip-bad"


class Extractor:
    """A process that extracts text. It starts on the first request and restarts after being killed."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def extract(self, name: str, kind: str, stream: ByteStream, config: ReadConfig) -> tuple[str, int]:
        """Returns the text of a document and the number of replaced invalid bytes. Raises `UserError` if the document
        cannot be read within the limits, `WorkError` without the package that reads it."""
        process, size = self._process, 0
        reply: dict[str, Any] = {}
        if process is None or process.poll() is not None:
            process = self._process = start_program(PROGRAM, _SETTINGS, self)
        try:
            with contextlib.suppress(OSError):  # The process has ended.
                size = _send(process, name, kind, stream, config)
                reply, data = _receive(process)
        finally:
            if not reply:  # Also after an interrupt, or the next request would get this reply.
                self._process = None
                end_program(process)
        if not reply:
            limits = f"{SECONDS + size // RATE} s or {MEMORY_LIMIT >> 20:,} MiB of memory"
            raise UserError(f"{name} takes more than {limits}, or crashes its reader", f"get it again, {_SKIP}")
        if "missing" in reply:
            raise WorkError(f"{name} needs the package {reply['missing']}", install_extra("documents"))
        if "error" in reply:
            raise UserError(f"{name} {reply['error']}", reply["hint"])
        return data.decode(), reply["replaced"]


def _send(process: "subprocess.Popen[bytes]", name: str, kind: str, stream: ByteStream, config: ReadConfig) -> int:
    """Sends a request. Returns the size of the file. Raises `UserError` if it is too large."""
    assert process.stdin is not None
    request = {"kind": kind, "encoding": config.encoding, "errors": config.errors}
    process.stdin.write(json.dumps(request).encode() + b"\n")
    size, block = 0, stream.read(BUFFER)
    while block:
        size += len(block)
        if size > MAX_BYTES:
            raise UserError(f"{name} has more than {MAX_BYTES >> 20} MiB", f"split it into several files, {_SKIP}")
        process.stdin.write(b"%d\n" % len(block) + block)
        block = stream.read(BUFFER)
    process.stdin.write(b"0\n")
    process.stdin.flush()
    return size


def _receive(process: "subprocess.Popen[bytes]") -> tuple[dict[str, Any], bytes]:
    """Returns the reply and the text, or an empty reply if the process has ended."""
    assert process.stdout is not None
    line = process.stdout.readline()
    reply = json.loads(line) if line.endswith(b"\n") else {}
    data = process.stdout.read(reply.get("size", 0))
    return (reply, data) if len(data) == reply.get("size", 0) else ({}, b"")
