"""Ids → text, streamed in whole characters and up to a stop string."""

import codecs
from collections.abc import Sequence

from gpt.tokenizers.tokenizer import Tokenizer


class TextStream:
    """Decodes ids up to the first stop string. Holds back text that could start a stop string. Invalid bytes become
    U+FFFD."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._stops = stops
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held_back = ""
        self.stopped = False  # Whether a stop string was found.

    def push(self, id: int) -> str:
        """Returns the text that ``id`` completes, possibly empty."""
        return self._release(self._decoder.decode(self._tokenizer.decode_bytes([id])))

    def flush(self) -> str:
        """Returns the rest of the text, with U+FFFD for an incomplete character."""
        text = self._release(self._decoder.decode(b"", final=True)) + self._held_back
        self._held_back = ""
        return text

    def _release(self, text: str) -> str:
        if self.stopped:
            return ""
        text = self._held_back + text
        matches = [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]
        if matches:  # The stop string that ends first. If several end together, the longest wins.
            self.stopped, self._held_back = True, ""
            return text[: min(matches)[1]]
        overlap = max((_overlap_length(text, stop) for stop in self._stops), default=0)
        self._held_back = text[len(text) - overlap :]
        return text[: len(text) - overlap]


def _overlap_length(text: str, stop: str) -> int:
    """Returns the length of the longest suffix of ``text`` that is a proper prefix of ``stop``."""
    limit = min(len(text), len(stop) - 1)
    return next((n for n in range(limit, 0, -1) if text.endswith(stop[:n])), 0)
