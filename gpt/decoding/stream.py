"""Ids → text as they come: a character is shown once all of its bytes are there, and a stop text never."""

import codecs
from collections.abc import Sequence

from gpt.text.tokenizer import Tokenizer


class TextStream:
    """Decodes ids one by one, up to the first of the ``stops``; bytes that never become a character come out as U+FFFD.

    What may become a stop text is held back until it has, or cannot any more.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._stops = stops
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self.stopped = False  # whether a stop text has come

    def push(self, id: int) -> str:
        """The text that ``id`` completes; may be empty."""
        return self._show(self._decoder.decode(self._tokenizer.decode_bytes([id])))

    def flush(self) -> str:
        """What is left at the end: U+FFFD where a character was cut off."""
        text = self._show(self._decoder.decode(b"", final=True)) + self._held
        self._held = ""
        return text

    def _show(self, text: str) -> str:
        if self.stopped:
            return ""
        text = self._held + text
        start = first_stop(text, self._stops)
        if start is not None:
            self.stopped, self._held = True, ""
            return text[:start]
        held = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]


def first_stop(text: str, stops: Sequence[str]) -> int | None:
    """Where the stop text begins that is the first to be complete; of those that end together, the longest."""
    found = [(at + len(stop), at) for stop in stops if (at := text.find(stop)) >= 0]
    return min(found)[1] if found else None


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of ``text`` a stop text may begin with, short of all of it."""
    most = min(len(text), len(stop) - 1)
    return next((n for n in range(most, 0, -1) if text.endswith(stop[:n])), 0)
