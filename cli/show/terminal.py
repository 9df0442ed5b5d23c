"""Consoles and streams that are safe for any text, encoding and reader."""

import contextlib
import os
import sys
from collections.abc import Iterable
from typing import Any, TextIO

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

# Characters that a terminal interprets or hides: control codes except line feed and tab, and Unicode's characters for
# line breaks, text direction and annotation. File names, JSON keys and generated text can contain such characters.
_CONTROL_CODES = (*range(9), *range(11, 32), *range(127, 160), 0x061C, *range(0x2028, 0x202F), *range(0x2066, 0x2070),
           *range(0xFFF9, 0xFFFC))  # fmt: skip
_ESCAPES = {code: f"\\u{code:04x}" for code in _CONTROL_CODES}  # JSON uses the same escapes.
_SYMBOLS = _ESCAPES | {code: chr(0x2400 + code) for code in range(32) if code in _CONTROL_CODES} | {127: "␡"}


def write(text: str, is_json: bool = False) -> None:
    """Writes text to stdout and flushes it. On a terminal, control characters become symbols, or JSON's escapes."""
    sys.stdout.write(text.translate(_ESCAPES if is_json else _SYMBOLS) if sys.stdout.isatty() else text)
    sys.stdout.flush()


class SafeConsole(Console):
    """A console that shows control characters in text as symbols. It breaks lines between words, and only on a
    terminal."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.soft_wrap = not self.is_terminal

    def escape(self, text: str) -> str:
        """Replaces control characters by symbols on a terminal. Leaves text unchanged in a file or pipe."""
        return text.translate(_SYMBOLS) if self.is_terminal else text

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Escapes all segments except rich's own control codes."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(self.escape(segment.text), segment.style)


class _StderrConsole(SafeConsole):
    """A console on stderr that is silent after a write error: a closed pipe or terminal, or a full disk."""

    def _check_buffer(self) -> None:
        try:
            super()._check_buffer()
        except OSError:
            self.on_broken_pipe()

    def on_broken_pipe(self) -> None:
        """Silences stderr. Rich's own method would exit."""
        self.quiet = True
        redirect_to_null(sys.stderr)


def stderr() -> SafeConsole:
    """Returns a console for progress, notes and errors."""
    return _StderrConsole(stderr=True, highlight=False, markup=False, emoji=False)


def stdout() -> SafeConsole:
    """Returns a console for results, 160 columns wide in a file or pipe."""
    width = None if sys.stdout.isatty() else 160
    return SafeConsole(highlight=False, width=width, markup=False, emoji=False)


def redirect_to_null(stream: TextIO) -> None:
    """Redirects a stream to the null device, so that flushing it at exit cannot fail."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def make_output_safe() -> None:
    """Makes stdout and stderr escape characters that their encoding lacks, instead of raising.

    If stdout or stderr is closed at startup, replaces it with the null device. The command then works and returns 0,
    as a Python program with ``print`` does. The null device also takes the free file descriptor: otherwise a file
    opened later would take the descriptor and receive the output of libraries.
    """
    try:
        os.fstat(0)
    except OSError:  # `sys.stdin` remains None, so commands can report that there is no stdin.
        os.set_inheritable(os.open(os.devnull, os.O_RDONLY), True)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            null_device = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
            os.set_inheritable(null_device.fileno(), True)
            setattr(sys, name, null_device)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, ValueError):
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
