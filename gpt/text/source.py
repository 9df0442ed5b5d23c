"""What readers pass on: where text lies, the pieces that a document comes in, and what was left out."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import BinaryIO

from gpt.errors import UserError

EXAMPLES = 5  # messages that are kept of all that was left out


@dataclass(frozen=True, slots=True)
class Source:
    """A file, an address or an entry of a corpus that documents are read from."""

    name: str  # as a user would write it: a path, an address, "stdin", "pydocs/with"; its ending tells the format
    size: int  # bytes as they are stored
    time: int  # of its last change, nanoseconds since 1970; 0 where nobody knows
    open: Callable[[], BinaryIO]  # a new stream from its first byte
    passing: bool = False  # it can be read once, and lies on the disk for this process alone
    lines: bool = False  # its rows are the lines of one text, not documents


def utf8_size(text: str) -> int:
    """Bytes of a text in UTF-8."""
    return len(text) if text.isascii() else len(text.encode())


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a document. Documents come one after the other; each begins with a piece that ``begins`` it."""

    text: str
    begins: bool


@dataclass
class Skipped:
    """What ``--skip-bad`` left out: how much, and the first few reasons."""

    count: int = 0
    examples: list[str] = field(default_factory=list)

    def add(self, error: UserError) -> None:
        """Counts what could not be read, for the reason that ``error`` gives."""
        self.count += 1
        if len(self.examples) < EXAMPLES:
            self.examples.append(error.message)
