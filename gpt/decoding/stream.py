"""Ids → text, piece by piece: whole characters only, and nothing of a stop text."""

import codecs
from collections.abc import Sequence

from gpt.text.tokenizer import Tokenizer


class TextStream:
    """Decodes ids one by one, up to the first stop text. Bytes that never become a character are decoded as U+FFFD.

    Text that may be the beginning of a stop text is held back until it is known whether it is.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._stops = stops
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self.stopped = False  # whether a stop text was found

    def push(self, id: int) -> str:
        """Returns the text that ``id`` completes, which may be empty."""
        return self._show(self._decoder.decode(self._tokenizer.decode_bytes([id])))

    def flush(self) -> str:
        """Returns the rest of the text; U+FFFD for a character that was cut off."""
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
    """Returns where the stop text begins that is complete first; of those that end together, the longest."""
    found = [(at + len(stop), at) for stop in stops if (at := text.find(stop)) >= 0]
    return min(found)[1] if found else None


def _overlap(text: str, stop: str) -> int:
    """Returns how many characters at the end of ``text`` begin a stop text, short of all of it."""
    most = min(len(text), len(stop) - 1)
    return next((n for n in range(most, 0, -1) if text.endswith(stop[:n])), 0)
