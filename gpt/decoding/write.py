"""Prompts → texts: generates many samples or beams together and streams them in order."""

import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from gpt.config.sample import SampleConfig
from gpt.decoding.constraint import Constraint
from gpt.decoding.context import capacity
from gpt.decoding.engine import Engine, Request, Update
from gpt.decoding.logits import Token
from gpt.decoding.stream import TextBuilder, TextStream
from gpt.system.errors import UserError
from gpt.tokenizers.tokenizer import Tokenizer

MAX_BATCH = {"cpu": 16, "cuda": 64, "mps": 16}  # Maximum default batch size, by device.


@dataclass(frozen=True)
class Sample:
    """A generated text.

    ``text`` excludes the prompt and the stop string. ``tokens`` include the stop string, but not the end-of-text.
    ``logprob`` is the sum of log-probabilities in nats, before filters. It includes the end-of-text. ``finish_reason``
    is ``length``, ``eot`` or ``stop`` (a stop string, or complete structured output).
    """

    text: str
    tokens: list[int]
    logprob: float
    finish_reason: str
    dropped: int = 0  # Number of prompt tokens cut off to fit in the context.
    slid: bool = False  # Whether the text outgrew the context and its beginning was dropped.
    score: float | None = None  # Beam search only.
    logprobs: Sequence[Token] | None = None  # Includes the end-of-text.
    prompt_logprobs: Sequence[Token] | None = None


@dataclass(frozen=True)
class Piece:
    """New text of sample ``index`` of prompt ``prompt``. The last piece has the whole ``sample``."""

    prompt: int
    index: int
    text: str
    sample: Sample | None = None


@dataclass
class _Text:
    """Sample ``index`` of prompt ``prompt``. Its pieces wait until all earlier texts have ended."""

    prompt: int
    index: int
    builder: TextBuilder
    waiting: list[Piece] = field(default_factory=list)


class TextGenerator:
    """Generates texts with the settings of one call. Raises `UserError` for settings the model doesn't support."""

    def __init__(
        self, engine: Engine, tokenizer: Tokenizer, config: SampleConfig, seed: int, constraint: Constraint | None
    ) -> None:
        self.engine, self.tokenizer, self.config, self.seed = engine, tokenizer, config, seed
        self.constraint = constraint
        self.model, self.compute = engine.context.model, engine.context.compute
        if config.beam > self.model.config.vocab_size:
            vocab_size = self.model.config.vocab_size
            raise UserError(f"beam is {config.beam}, but the model has only {vocab_size:,} tokens", "use fewer beams")
        self._bias = tuple((self._token(word), value) for word, value in config.biases())
        self._stops = self._ends_with_stop if config.stop else None

    def _token(self, word: str) -> int:
        ids = self.tokenizer.encode(word, specials=True, continues=True).tolist()
        if len(ids) != 1:
            parts = " ".join(repr(self.tokenizer.decode([id])) for id in ids)
            raise UserError(f'bias: "{word}" is {len(ids)} tokens: {parts}', "give one token; a leading space counts")
        return int(ids[0])

    def write(self, prompts: Sequence[str | list[int]], indices: Sequence[int] = (0,)) -> Iterator[Piece]:
        """Yields the texts of the samples ``indices``, or of the beams, of each prompt. The pieces of a text come
        before those of later texts, which are already being computed."""
        ids = [self.tokenizer.prompt(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]
        requested = indices if not self.config.beam else (0,)  # One search yields all beams of a prompt.
        wanted = ((number, index) for number in range(len(ids)) for index in requested)
        for piece in self._write(ids, wanted, len(ids) * len(requested)):
            if piece.index in indices:
                yield piece

    def _write(self, prompts: list[list[int]], wanted: Iterator[tuple[int, int]], count: int) -> Iterator[Piece]:
        """Yields the pieces of the texts in ``wanted``: ``count`` pairs (prompt, index)."""
        config, engine, width = self.config, self.engine, max(1, self.config.beam)
        positions = engine.context.round_up(max(map(len, prompts), default=1) + config.max_tokens)
        max_rows = min(MAX_BATCH[self.compute.device.type], capacity(self.model, self.compute, positions))
        batch = max(1, min(config.batch or max_rows // width, count))
        settings = (self._bias, self._stops, self.constraint, (self,))
        texts: dict[int, _Text] = {}
        inbox, order = deque[Update](), deque[_Text]()
        try:
            while True:
                with engine.lock:
                    if new := list(itertools.islice(wanted, batch - len(texts))):
                        engine.reserve(batch * width, positions)
                    for number, index in new:
                        request = Request(prompts[number], config, self.seed, index, *settings)
                        order.append(_Text(number, index, TextBuilder(self.tokenizer, config)))
                        texts[engine.add(request, inbox.append)] = order[-1]
                    if texts and not inbox:
                        engine.step()
                if not texts:
                    return
                while inbox:
                    update = inbox.popleft()
                    if update.number not in texts:  # A stop string ended it.
                        continue
                    text = texts[update.number]
                    text.waiting += self._pieces(text, update, len(prompts[text.prompt]))
                    if text.builder.reason is not None:
                        engine.cancel(update.number)  # The engine doesn't detect stop strings in samples.
                        del texts[update.number]
                    while order:
                        first = order[0]
                        pieces, first.waiting = first.waiting, []
                        yield from pieces
                        if first.builder.reason is None:
                            break
                        order.popleft()
        finally:
            engine.cancel(*texts)

    def _pieces(self, text: _Text, update: Update, prompt_length: int) -> list[Piece]:
        """Returns the pieces of an update. If it is the text's last update, its pieces have samples."""
        new_text = text.builder.push(update)
        if text.builder.reason is None:
            return [Piece(text.prompt, text.index, new_text)]
        score = update.best[0].score if update.best else None
        pieces = [Piece(text.prompt, text.index, new_text, self._sample(text.builder, prompt_length, score))]
        for index, hypothesis in enumerate(update.best[1:], 1):
            beam = TextBuilder(self.tokenizer, self.config)
            new_text = beam.push(Update(update.number, hypothesis.tokens, text.builder.prompt, hypothesis.reason))
            pieces.append(Piece(text.prompt, index, new_text, self._sample(beam, prompt_length, hypothesis.score)))
        return pieces

    def _sample(self, text: TextBuilder, prompt_length: int, score: float | None) -> Sample:
        block_size = self.model.config.block_size
        dropped = max(0, prompt_length - block_size)
        tokens = [token.id for token in text.tokens]
        return Sample(
            text="".join(text.pieces),
            tokens=tokens[:-1] if text.reason == "eot" else tokens,
            logprob=text.logprob,
            finish_reason=text.reason or "length",
            dropped=dropped,
            slid=prompt_length - dropped + len(tokens) > block_size + 1,  # The last token is never fed back.
            score=score,
            logprobs=None if self.config.logprobs is None else text.tokens,
            prompt_logprobs=text.prompt,
        )

    def _ends_with_stop(self, ids: Sequence[int]) -> bool:
        """Whether ``ids`` end with a stop string."""
        max_bytes = max(len(stop.encode()) for stop in self.config.stop)
        stream = TextStream(self.tokenizer, self.config.stop)
        for id in ids[-max_bytes:]:  # A token has at least one byte.
            stream.push(id)
        return stream.stopped
