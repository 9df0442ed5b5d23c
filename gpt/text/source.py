"""What readers pass on: where text lies, and the pieces that a document comes in."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import BinaryIO


@dataclass(frozen=True, slots=True)
class Source:
    """A file, an address or an entry of a corpus that documents are read from."""

    name: str  # as a user would write it: a path, an address, "stdin", "pydocs/with"; its ending tells the format
    size: int  # bytes as they are stored
    time: int  # of its last change, nanoseconds since 1970; 0 where nobody knows
    open: Callable[[], BinaryIO]  # a new stream from its first byte


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a document. Documents come one after the other; each begins with a piece that ``begins`` it."""

    text: str
    begins: bool
