"""Tokens of a choice → text, log-probabilities and finish reason, in the format of OpenAI's API."""

import codecs
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from gpt.chat.tool_calls import AnswerParser, Parts
from gpt.config.sample import SampleConfig
from gpt.decoding.engine import Update
from gpt.decoding.logits import Token
from gpt.decoding.stream import TextBuilder
from gpt.tokenizers.tokenizer import Tokenizer

_MIN_LOGPROB = -9999.0  # Replaces minus infinity, which JSON doesn't support.


@dataclass(frozen=True)
class Prompt:
    """The ids of a prompt. The first ``hidden`` ids only mark its start and have no text."""

    ids: Sequence[int]
    hidden: int


def read_prompt(tokenizer: Tokenizer, prompt: str | Sequence[int]) -> Prompt:
    """Returns the prompt for a client's text or ids."""
    if not isinstance(prompt, str):
        return Prompt(prompt, int(prompt[0] == tokenizer.bos))
    ids = tokenizer.prompt(prompt)
    return Prompt(ids, int(tokenizer.bos is not None or not prompt))


@dataclass
class Delta(Parts):
    """New parts of a choice, and its tokens with their offsets in the whole text."""

    tokens: list[tuple[Token, int]] = field(default_factory=list)
    reason: str | None = None


class Choice:
    """A text built from engine updates. With ``echo``, it starts with the prompt. A ``parser`` separates reasoning and
    tool calls from it."""

    def __init__(
        self, tokenizer: Tokenizer, config: SampleConfig, prompt: Prompt, echo: bool, stop_ids: Collection[int] = ()
    ) -> None:
        self.tokenizer, self.config, self.prompt = tokenizer, config, prompt
        self.echo = echo  # Whether the next text starts with the prompt.
        self.parser: AnswerParser | None = None
        self.cached = 0  # Prompt ids from the prefix cache.
        self.reasoning_tokens = 0
        self.whole = Delta()  # Everything so far.
        self.builder = TextBuilder(tokenizer, config, stop_ids)
        self._offsets = _Offsets(tokenizer)

    def push(self, update: Update) -> Delta:
        """Adds an update and returns the new text. Raises the update's error."""
        builder, count, delta = self.builder, len(self.builder.tokens), Delta()
        new_text = builder.push(update)
        self.cached = max(self.cached, update.cached)
        if self.echo:
            self._add_prompt(update, delta)
            self.echo = False
        delta.text += new_text
        if self.config.logprobs is not None:
            delta.tokens += [
                (token, self._offsets.take(token.id, shown=token.id not in builder.hidden))
                for token in builder.tokens[count:]
            ]
        delta.reason = "stop" if builder.reason == "eot" else builder.reason
        if self.parser is not None:
            text, delta.text = delta.text, ""
            self.parser.push(text, delta.reason is not None, delta)
            if self.parser.is_thinking or delta.reasoning:
                self.reasoning_tokens = len(builder.tokens)
            if delta.reason == "stop" and self.parser.is_complete:
                delta.reason = "tool_calls"
            self.whole.calls = self.parser.calls
        self.whole.text += delta.text
        self.whole.reasoning += delta.reasoning
        self.whole.tokens += delta.tokens
        self.whole.reason = delta.reason
        return delta

    def _add_prompt(self, update: Update, delta: Delta) -> None:
        ids, hidden, adds_space = self.prompt.ids, self.prompt.hidden, self.tokenizer.backend.adds_space
        data = self.tokenizer.decode_bytes(ids[hidden:]).removeprefix(b" " if adds_space else b"")
        delta.text = data.decode("utf-8", "replace")
        if self.config.logprobs is not None:
            tokens = update.prompt or [Token(id, None) for id in ids]
            if adds_space:
                self._offsets.begin(-1)  # Don't count the space that the tokenizer adds before the text.
            delta.tokens = [(token, self._offsets.take(token.id, at >= hidden)) for at, token in enumerate(tokens)]
            self._offsets.begin(len(delta.text))


class _Offsets:
    """The offset of each token in the text. Tokens that share a character have the same offset."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.begin(0)

    def begin(self, length: int) -> None:
        """Continues after ``length`` characters of the text."""
        self._length = length
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def take(self, id: int, shown: bool) -> int:
        """Returns the offset of the next token."""
        data = self.tokenizer.decode_bytes([id]) if shown else b""
        pending, _ = self._decoder.getstate()
        # An incomplete character becomes U+FFFD.
        if pending and not (data and _is_character_start(pending + data[:1])):
            self.begin(self._length + 1)
        offset = max(0, self._length)
        self._length += len(self._decoder.decode(data))
        return offset


def _is_character_start(data: bytes) -> bool:
    """Whether the bytes are a character or the start of one."""
    try:
        codecs.utf_8_decode(data, "strict", False)
    except UnicodeDecodeError:
        return False
    return True


def token_text(tokenizer: Tokenizer, id: int) -> str:
    """Returns a token as clients see it: its text, or its bytes if they are not valid UTF-8."""
    data = tokenizer.decode_bytes([id])
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def completion_logprobs(tokenizer: Tokenizer, tokens: Iterable[tuple[Token, int]]) -> dict[str, Any]:
    """Returns log-probabilities in the format of ``/v1/completions``."""
    logprobs: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for token, offset in tokens:
        logprobs["tokens"].append(token_text(tokenizer, token.id))
        logprobs["text_offset"].append(offset)
        if token.logprob is None:
            logprobs["token_logprobs"].append(None)
            logprobs["top_logprobs"].append(None)
            continue
        logprobs["token_logprobs"].append(max(token.logprob, _MIN_LOGPROB))
        # If two tokens have the same text, the more likely token wins.
        alternatives = sorted({(token.id, token.logprob), *token.top}, key=lambda pair: -pair[1])
        top: dict[str, float] = {}
        for id, logprob in alternatives:
            top.setdefault(token_text(tokenizer, id), max(logprob, _MIN_LOGPROB))
        logprobs["top_logprobs"].append(top)
    return logprobs


def chat_logprobs(tokenizer: Tokenizer, tokens: Iterable[tuple[Token, int]]) -> dict[str, Any]:
    """Returns log-probabilities in the format of ``/v1/chat/completions``."""

    def entry(id: int, logprob: float | None) -> dict[str, Any]:
        finite_logprob = _MIN_LOGPROB if logprob is None else max(logprob, _MIN_LOGPROB)
        data = list(tokenizer.decode_bytes([id]))
        return {"token": token_text(tokenizer, id), "logprob": finite_logprob, "bytes": data, "id": id}

    content = [
        {**entry(token.id, token.logprob), "top_logprobs": [entry(*each) for each in token.top]} for token, _ in tokens
    ]
    return {"content": content, "refusal": None}
