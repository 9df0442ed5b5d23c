"""Tokens of one choice → its text, its log-probabilities, and its finish reason, as clients read them."""

import codecs
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from gpt.decoding.engine import Update
from gpt.decoding.logits import Token
from gpt.decoding.stream import TextStream
from gpt.errors import UserError
from gpt.sample_config import SampleConfig
from gpt.text.tokenizer import Tokenizer

_REASONS = {"eot": "stop", "stop": "stop", "length": "length"}
_LEAST = -9999.0  # in the place of a log-probability of minus infinity, which JSON does not have


@dataclass(frozen=True)
class Prompt:
    """The ids that a text is generated after. The first ``hidden`` ones begin a text and are no part of it."""

    ids: Sequence[int]
    hidden: int


def read_prompt(tokenizer: Tokenizer, prompt: str | Sequence[int]) -> Prompt:
    """Returns the prompt that a client gave as text or as ids."""
    if not isinstance(prompt, str):
        return Prompt(prompt, int(prompt[0] == tokenizer.bos))
    ids = tokenizer.prompt(prompt)
    return Prompt(ids, int(tokenizer.bos is not None or not prompt))


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
        self,
        tokenizer: Tokenizer,
        config: SampleConfig,
        prompt: Prompt,
        echo: bool,
        stop_ids: Collection[int] = (),
    ) -> None:
        self.tokenizer, self.config, self.prompt, self.echo = tokenizer, config, prompt, echo
        self.stop_ids = stop_ids  # further ones that end the text
        self.count = 0  # tokens that were generated
        self.cached = 0  # ids of the prompt that came from the prefix cache
        self.logprob = 0.0  # their sum
        self.done = False
        self._stream = TextStream(tokenizer, config.stop)
        self._offsets = _Offsets(tokenizer)
        self._begun = False

    def push(self, update: Update) -> Delta:
        """Takes an update and returns what it adds."""
        delta = Delta(error=update.error)
        self.cached = max(self.cached, update.cached)
        if self.echo and not self._begun and update.error is None:
            self._add_prompt(update, delta)
        self._begun = True
        for token in update.tokens:
            if self._stream.stopped:
                break
            self.count += 1
            self.logprob += token.logprob or 0.0
            stops = token.id in self.stop_ids
            ends = stops or (token.id in self.tokenizer.ends and not self.config.ignore_eot)
            if self.config.logprobs is not None:
                delta.tokens.append((token, self._offsets.take(token.id, shown=not ends)))
            if not ends:
                delta.text += self._stream.push(token.id)
            if stops:
                delta.text += self._stream.flush()
                self._stream.stopped = True
        reason = "stop" if self._stream.stopped else update.reason
        if reason is not None:
            delta.text += self._stream.flush()
            delta.reason = _REASONS["stop" if self._stream.stopped else reason]  # the rest may complete a stop text
        self.done = reason is not None or update.error is not None
        return delta

    def _add_prompt(self, update: Update, delta: Delta) -> None:
        hidden = self.prompt.hidden
        delta.text = text_of(self.tokenizer, self.prompt)
        if self.config.logprobs is not None:
            tokens = update.prompt or [Token(id, None) for id in self.prompt.ids]
            if self.tokenizer.backend.adds_space:
                self._offsets.begin(-1)  # a space was put before the text, which is no part of it
            delta.tokens = [(token, self._offsets.take(token.id, at >= hidden)) for at, token in enumerate(tokens)]
            self._offsets.begin(len(delta.text))


def text_of(tokenizer: Tokenizer, prompt: Prompt) -> str:
    """Returns the text of a prompt, without what begins it."""
    data = tokenizer.decode_bytes(prompt.ids[prompt.hidden :])
    return data.removeprefix(b" " if tokenizer.backend.adds_space else b"").decode("utf-8", "replace")


class _Offsets:
    """The place of each token in the text: that of its first character, which it may share with the token before it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.begin(0)

    def begin(self, length: int) -> None:
        """Continues after ``length`` characters of the text."""
        self._length = length
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def take(self, id: int, shown: bool) -> int:
        """Returns the place of the next token."""
        data = self.tokenizer.decode_bytes([id]) if shown else b""
        pending, _ = self._decoder.getstate()
        if pending and not (data and _continues(pending + data[:1])):  # the character before stays cut off: U+FFFD
            self.begin(self._length + 1)
        at = max(0, self._length)
        self._length += len(self._decoder.decode(data))
        return at


def _continues(data: bytes) -> bool:
    """Whether bytes are a character, or the beginning of one."""
    try:
        codecs.utf_8_decode(data, "strict", False)
    except UnicodeDecodeError:
        return False
    return True


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
        found["text_offset"].append(offset)
        if token.logprob is None:
            found["token_logprobs"].append(None)
            found["top_logprobs"].append(None)
            continue
        found["token_logprobs"].append(max(token.logprob, _LEAST))
        # The likeliest, and the token itself where it is not one of them; of two with one text the likelier.
        likely = sorted({(token.id, token.logprob), *token.top}, key=lambda each: -each[1])
        top: dict[str, float] = {}
        for id, logprob in likely:
            top.setdefault(token_text(tokenizer, id), max(logprob, _LEAST))
        found["top_logprobs"].append(top)
    return found


def chat_logprobs(tokenizer: Tokenizer, tokens: Iterable[tuple[Token, int]]) -> dict[str, Any]:
    """Log-probabilities in the form of ``/v1/chat/completions``."""

    def entry(id: int, logprob: float | None) -> dict[str, Any]:
        data, shown = tokenizer.decode_bytes([id]), max(_LEAST if logprob is None else logprob, _LEAST)
        return {"token": token_text(tokenizer, id), "logprob": shown, "bytes": list(data), "id": id}

    content = [
        {**entry(token.id, token.logprob), "top_logprobs": [entry(*each) for each in token.top]} for token, _ in tokens
    ]
    return {"content": content, "refusal": None}
