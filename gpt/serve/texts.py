"""Tokens of one choice → its text, its log-probabilities, and its finish reason, as clients read them."""

import codecs
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from gpt.decoding.engine import Update
from gpt.decoding.logits import Token
from gpt.decoding.stream import TextStream
from gpt.errors import UserError
from gpt.sample_config import SampleConfig
from gpt.text.tokenizer import Tokenizer

_REASONS = {"eot": "stop", "stop": "stop", "length": "length"}


@dataclass
class Delta:
    """New text of a choice, and the tokens that it is made of with the offset of each in the whole text."""

    text: str = ""
    tokens: list[tuple[Token, int]] = field(default_factory=list)
    reason: str | None = None
    error: UserError | None = None


class Choice:
    """One text, from its engine updates. With ``echo`` it begins with its prompt."""

    def __init__(
        self, tokenizer: Tokenizer, config: SampleConfig, prompt: Sequence[int], echo: bool, logprobs: bool
    ) -> None:
        self.tokenizer, self.config, self.prompt, self.echo, self.logprobs = tokenizer, config, prompt, echo, logprobs
        self.count = 0  # tokens that were generated
        self.logprob = 0.0  # their sum
        self.done = False
        self._stream = TextStream(tokenizer, config.stop)
        self._offsets = _Offsets(tokenizer)
        self._begun = False

    def push(self, update: Update) -> Delta:
        """Takes an update and returns what it adds."""
        delta = Delta(error=update.error)
        if not self._begun and update.error is None:
            self._begin(update, delta)
        for token in update.tokens:
            if self._stream.stopped:
                break
            self.count += 1
            self.logprob += token.logprob or 0.0
            ends = token.id in self.tokenizer.ends and not self.config.ignore_eot
            if self.logprobs:
                delta.tokens.append((token, self._offsets.take(token.id, shown=not ends)))
            if not ends:
                delta.text += self._stream.push(token.id)
        reason = "stop" if self._stream.stopped else update.reason
        if reason is not None:
            delta.text += self._stream.flush()
            delta.reason = _REASONS[reason]
        self.done = reason is not None or update.error is not None
        return delta

    def _begin(self, update: Update, delta: Delta) -> None:
        self._begun = True
        if self.echo:
            delta.text += text_of(self.tokenizer, self.prompt)
            tokens = update.prompt or [Token(id, None) for id in self.prompt]
            if self.logprobs:
                delta.tokens += [
                    (token, self._offsets.take(token.id, token.id != self.tokenizer.bos)) for token in tokens
                ]


def text_of(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """The text of a prompt's ids, without what begins it."""
    return tokenizer.document_bytes(ids).decode("utf-8", "replace")


class _Offsets:
    """The place of each token in the text: the number of characters that are whole before it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._length = 0

    def take(self, id: int, shown: bool) -> int:
        at = self._length
        if shown:
            self._length += len(self._decoder.decode(self.tokenizer.decode_bytes([id])))
        return at


def token_text(tokenizer: Tokenizer, id: int) -> str:
    """A token as clients see it: its text, or its bytes where these are no characters."""
    data = tokenizer.decode_bytes([id])
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def completion_logprobs(tokenizer: Tokenizer, tokens: Iterable[tuple[Token, int]]) -> dict[str, Any]:
    """Log-probabilities in the form of ``/v1/completions``."""
    found: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for token, offset in tokens:
        found["tokens"].append(token_text(tokenizer, token.id))
        found["token_logprobs"].append(token.logprob)
        # The likeliest, and the token itself where it is not one of them; of two with one text the likelier.
        likely = dict(sorted((*token.top, (token.id, token.logprob)), key=lambda each: each[1] or 0.0))
        top = {token_text(tokenizer, id): logprob for id, logprob in likely.items()}
        found["top_logprobs"].append(None if token.logprob is None else top)
        found["text_offset"].append(offset)
    return found


def chat_logprobs(tokenizer: Tokenizer, tokens: Iterable[tuple[Token, int]]) -> dict[str, Any]:
    """Log-probabilities in the form of ``/v1/chat/completions``."""

    def entry(id: int, logprob: float | None) -> dict[str, Any]:
        return {
            "token": token_text(tokenizer, id), "logprob": logprob, "bytes": list(tokenizer.decode_bytes([id])),
            "id": id,
        }  # fmt: skip

    content = [
        {**entry(token.id, token.logprob), "top_logprobs": [entry(*each) for each in token.top]} for token, _ in tokens
    ]
    return {"content": content, "refusal": None}
