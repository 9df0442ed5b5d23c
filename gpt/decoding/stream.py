"""Ids → text as they come: a character is shown once all of its bytes are there."""

import codecs

from gpt.text.tokenizer import Tokenizer


class TextStream:
    """Decodes ids one by one; bytes that never become a character come out as U+FFFD."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, id: int) -> str:
        """The text that ``id`` completes; may be empty."""
        return self._decoder.decode(self._tokenizer.decode_bytes([id]))

    def flush(self) -> str:
        """What is left at the end: U+FFFD where a character was cut off."""
        return self._decoder.decode(b"", final=True)
