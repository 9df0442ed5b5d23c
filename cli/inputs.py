"""Reads files and stdin up to size limits."""

import contextlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from gpt.config.settings import MAX_TOML_BYTES, parse_toml
from gpt.system.errors import UserError, check_text
from gpt.system.files import suggest_name

from .show import render

MAX_TEXT_BYTES = 64 * 2**20  # Maximum bytes of a text.


def read_text(words: str | None, file: Path | None, what: str, flag: str) -> str:
    """Returns ``words``, or the text of ``file`` (``-`` is stdin). Raises `UserError` if both are given."""
    if words is not None and file is not None:
        raise UserError(f"a {what} and {flag} were both given", "give only one of them")
    if file is not None:
        with open_input(file, f"the {what}") as stream:
            data = _read_bounded(stream, file, MAX_TEXT_BYTES, f"that is the limit for a {what}")
        try:
            words = data.decode("utf-8").removeprefix("\ufeff").replace("\r\n", "\n")
        except UnicodeDecodeError as error:
            raise UserError(
                f"{display_name(file)} is not UTF-8: byte 0x{data[error.start]:02x} at offset {error.start:,}"
            ) from None
    words = words or ""
    check_text(f"the {what}", words)
    return words


def read_toml(file: Path) -> dict[str, Any]:
    """Reads a TOML file."""
    with open_input(file, "settings") as stream:
        data = _read_bounded(stream, file, MAX_TOML_BYTES, "that is the limit for a settings file")
    return parse_toml(data, str(file))


def _read_bounded(stream: BinaryIO, file: Path, max_bytes: int, hint: str) -> bytes:
    """Reads a whole stream. Raises `UserError` above ``max_bytes``, because a device can be endless."""
    data = stream.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise UserError(f"{display_name(file)} has more than {max_bytes:,} bytes", hint)
    return data


def display_name(file: Path) -> str:
    """Returns the path, or ``stdin`` for ``-``."""
    return "stdin" if str(file) == "-" else str(file)


@contextlib.contextmanager
def open_input(file: Path, what: str) -> Iterator[BinaryIO]:
    """Opens a file, or stdin for ``-``. Raises `UserError` if the input cannot be read."""
    if str(file) == "-" and sys.stdin is None:
        raise UserError("there is no standard input to read", "give a file")
    announce_stdin([str(file)], what)
    try:
        if str(file) == "-":
            yield sys.stdin.buffer
        else:
            with file.open("rb") as stream:
                yield stream
    except OSError as error:
        hint = "" if file.exists() else suggest_name(file)
        raise UserError(f"cannot read {display_name(file)}: {error.strerror or error}", hint) from None


def announce_stdin(texts: Sequence[str] | None, what: str = "the text") -> None:
    """Prints a note if ``texts`` include stdin and stdin is a terminal."""
    if "-" in (texts or ()) and sys.stdin is not None and sys.stdin.isatty():
        render.note(f"reading {what} from stdin; end with Ctrl-D")
