"""Ids → text, streamed in whole characters and up to a stop string."""

import codecs
from collections.abc import Collection, Sequence

from gpt.config.sample import SampleConfig
from gpt.decoding.logits import Token
from gpt.decoding.sequence import Update
from gpt.tokenizers.tokenizer import Tokenizer


def find_overlap(text: str, stops: Sequence[str]) -> int:
    """Returns the length of the longest end of ``text`` that starts a stop string."""
    longest = min(len(text), max(map(len, stops), default=0))
    return next((n for n in range(longest, 0, -1) if any(stop.startswith(text[-n:]) for stop in stops)), 0)


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
        overlap = find_overlap(text, self._stops)
        self._held_back = text[len(text) - overlap :]
        return text[: len(text) - overlap]


class TextBuilder:
    """Builds a text from the engine's updates. ``tokens`` include the stop string and the end-of-text, which
    ``pieces`` exclude. ``reason`` is set at the end. ``stop_ids`` are additional end-of-text ids."""

    def __init__(self, tokenizer: Tokenizer, config: SampleConfig, stop_ids: Collection[int] = ()) -> None:
        self.pieces: list[str] = []
        self.tokens: list[Token] = []
        self.prompt: Sequence[Token] | None = None
        self.reason: str | None = None
        self.stop_ids = frozenset(stop_ids)
        self.hidden = self.stop_ids if config.ignore_eot else self.stop_ids | tokenizer.ends
        self._stream = TextStream(tokenizer, config.stop)
        self._is_beam = config.beam > 0  # Beam search detects stop strings itself.

    @property
    def logprob(self) -> float:
        """The sum of the tokens' log-probabilities."""
        return sum(token.logprob or 0.0 for token in self.tokens)

    def push(self, update: Update) -> str:
        """Adds an update up to the end of a stop string, and returns the new text. Raises the update's error."""
        if update.error is not None:
            raise update.error
        self.prompt = update.prompt or self.prompt
        text, stream = "", self._stream
        for token in update.tokens:
            if stream.stopped:
                break
            self.tokens.append(token)
            if token.id not in self.hidden:
                text += stream.push(token.id)
            elif token.id in self.stop_ids:
                text += stream.flush()
                stream.stopped = True
        if update.reason is not None or (stream.stopped and not self._is_beam):
            text += stream.flush()  # This can complete a stop string.
            self.reason = "stop" if stream.stopped and not self._is_beam else update.reason
        self.pieces.append(text)
        return text
