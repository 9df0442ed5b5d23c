"""Prompts → texts: samples or beams, many at once, in pieces and in order."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from gpt.decoding.constraint import Constraint
from gpt.decoding.context import ContextPool, capacity
from gpt.decoding.engine import Engine, Request, Update
from gpt.decoding.logits import Token
from gpt.decoding.stream import TextStream
from gpt.errors import UserError
from gpt.sample_config import SampleConfig
from gpt.text.tokenizer import Tokenizer

ROWS = {"cpu": 16, "cuda": 64, "mps": 16}  # computed at once: what one read of the weights can serve
# Steps from which compiling gains time on a GPU: it takes half a minute or more, and saves the host's 1 to 2 ms a step
# (estimated: no GPU was at hand). Not fewer where a graph is there already: texts would depend on what came before.
COMPILED_FROM = 20_000
ROOMS = 256  # positions: a context has room for a multiple of them, so that the next request finds one that fits


@dataclass(frozen=True)
class Sample:
    """A generated text: ``text`` is without the prompt, ``tokens`` without the end-of-text that ended it, ``logprob``
    the sum over both, in nats, under the model itself. ``finish_reason`` is ``length``, ``eot`` or ``stop``, which is
    also that of structured output to which nothing can be added. The tokens that a stop text stands in are among
    ``tokens``, and it is not in ``text``."""

    text: str
    tokens: list[int]
    logprob: float
    finish_reason: str
    dropped: int = 0  # tokens of the prompt that the context had no room for
    slid: bool = False  # whether the text outgrew the context, so that its beginning was forgotten
    score: float | None = None  # of a beam search
    logprobs: Sequence[Token] | None = None  # each token's, and the end-of-text's, if asked for
    prompt_logprobs: Sequence[Token] | None = None


@dataclass(frozen=True)
class Piece:
    """Some more text of sample ``index`` of prompt ``prompt``; the last piece has the whole ``sample``."""

    prompt: int
    index: int
    text: str
    sample: Sample | None = None


class _Text:
    """The text of sample ``index`` of prompt ``number``, as its tokens come."""

    def __init__(self, number: int, index: int, tokenizer: Tokenizer, config: SampleConfig) -> None:
        self.number, self.index = number, index
        self.stream = TextStream(tokenizer, config.stop)
        self.pieces: list[str] = []
        self.tokens: list[Token] = []
        self.prompt: Sequence[Token] | None = None
        self._hidden = frozenset() if config.ignore_eot else tokenizer.ends

    def push(self, tokens: Iterable[Token]) -> str:
        """Takes tokens, up to the one that completes a stop text. Returns the text that they add."""
        shown = ""
        for token in tokens:
            if self.stream.stopped:
                break
            self.tokens.append(token)
            if token.id not in self._hidden:
                self.pieces.append(self.stream.push(token.id))
                shown += self.pieces[-1]
        return shown

    def flush(self) -> str:
        """Returns the text that was held back."""
        self.pieces.append(self.stream.flush())
        return self.pieces[-1]


class TextGenerator:
    """Generates texts with the settings of one call: encodes prompts, runs an engine, and decodes its tokens. Raises
    `UserError` for settings that the model cannot follow."""

    def __init__(
        self,
        contexts: ContextPool,
        tokenizer: Tokenizer,
        config: SampleConfig,
        seed: int,
        constraint: Constraint | None = None,
    ) -> None:
        self.contexts, self.tokenizer, self.config, self.seed = contexts, tokenizer, config, seed
        self.constraint = constraint
        self.model, self.compute = contexts.model, contexts.compute
        if config.beam > self.model.config.vocab_size:
            size = self.model.config.vocab_size
            raise UserError(f"beam is {config.beam}, but the model has only {size:,} tokens", "use fewer beams")
        self._bias = tuple((self._token(word), value) for word, value in config.biases())
        self._stops = self._ends_with_stop if config.stop else None

    def _token(self, word: str) -> int:
        ids = self.tokenizer.encode(word, specials=True, continues=True).tolist()
        if len(ids) != 1:
            parts = " ".join(repr(self.tokenizer.decode([id])) for id in ids)
            raise UserError(f'bias: "{word}" is {len(ids)} tokens: {parts}', "give one token; a leading space counts")
        return int(ids[0])

    def write(
        self, prompts: Sequence[str | list[int]], indices: Sequence[int] = (0,), done: Collection[tuple[int, int]] = ()
    ) -> Iterator[Piece]:
        """Yields samples ``indices`` of each prompt, a text or its ids, or its beams, a piece at a time, one text after
        the other: while one is yielded, those after it are computed meanwhile. Texts that are ``done`` (prompt, index)
        are left out."""
        ids = [self.tokenizer.prompt(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]
        wanted: Iterator[tuple[int, int]]
        if self.config.beam:  # a prompt's texts come together
            best = range(self.config.n_best)
            left = [number for number in range(len(ids)) if not all((number, index) in done for index in best)]
            wanted, count = ((number, 0) for number in left), len(left)
        else:
            every = ((number, index) for number in range(len(ids)) for index in indices)
            wanted = (each for each in every if each not in done)
            count = len(ids) * len(indices) - sum(number < len(ids) and index in indices for number, index in done)
        told = self._write(ids, wanted, count)
        yield from (piece for piece in told if (piece.prompt, piece.index) not in done)

    def _write(self, prompts: list[list[int]], wanted: Iterator[tuple[int, int]], count: int) -> Iterator[Piece]:
        """Yields the texts of ``count`` ``wanted`` prompts and indices, each of which begins once a row is free."""
        texts: dict[int, _Text] = {}
        turns = _Turns()
        with self.contexts.lease(*self._shape(prompts, count)) as context:
            engine = Engine(context, self.tokenizer.ends)
            while True:
                while engine.free >= max(1, self.config.beam) and (next_one := next(wanted, None)):
                    number, index = next_one
                    settings = (self.config, self.seed, index, self._bias, self._stops, self.constraint)
                    request = Request(prompts[number], *settings)
                    texts[engine.add(request)] = _Text(number, index, self.tokenizer, self.config)
                if not engine.busy:
                    return
                for update in engine.step():
                    text = texts[update.number]
                    pieces = self._pieces(text, update, len(prompts[text.number]))
                    if ended := pieces[-1].sample is not None:
                        engine.cancel(update.number)  # a sample that came to a stop text
                        del texts[update.number]
                    for piece in pieces:
                        yield from turns.take(update.number, piece, last=ended and piece is pieces[-1])

    def _shape(self, prompts: Sequence[Sequence[int]], count: int) -> tuple[int, int, bool]:
        """Returns the rows of a context, the positions of each, and whether to compile. There are as many rows as
        texts, as were asked for, or as the device has memory for."""
        config, width, size = self.config, max(1, self.config.beam), self.model.config.block_size
        longest = max(map(len, prompts), default=1) + config.max_tokens
        room = min(-(-longest // ROOMS) * ROOMS, size)
        fitting = min(ROWS[self.compute.device.type], capacity(self.model, self.compute, room))
        at_once = config.batch or max(1, fitting // width)
        rows = max(1, min(at_once, count))
        long = self.compute.device.type == "cuda" and config.max_tokens * count >= COMPILED_FROM * rows
        return width * rows, room, config.compile == "on" or (config.compile == "auto" and long)

    def _pieces(self, text: _Text, update: Update, prompt: int) -> list[Piece]:
        """Returns the pieces that an update adds to a text whose prompt has so many tokens; with samples at its end."""
        if update.error is not None:
            raise update.error
        text.prompt = update.prompt or text.prompt
        shown = text.push(update.tokens)
        reason = update.reason
        if text.stream.stopped and not self.config.beam:  # searches look for stop texts themselves
            reason = "stop"
        if reason is None:
            return [Piece(text.number, text.index, shown)]
        score = update.best[0].score if update.best else None
        shown += text.flush()
        if text.stream.stopped and not self.config.beam:  # the rest has completed a stop text
            reason = "stop"
        pieces = [Piece(text.number, text.index, shown, self._sample(text, reason, prompt, score))]
        for index, each in enumerate(update.best[1:], 1):
            other = _Text(text.number, index, self.tokenizer, self.config)
            other.prompt = text.prompt
            shown = other.push(each.tokens) + other.flush()
            sample = self._sample(other, each.reason or "length", prompt, each.score)
            pieces.append(Piece(text.number, index, shown, sample))
        return pieces

    def _sample(self, text: _Text, reason: str, prompt: int, score: float | None = None) -> Sample:
        size, config = self.model.config.block_size, self.config
        dropped = max(0, prompt - size)
        tokens = [token.id for token in text.tokens]
        return Sample(
            text="".join(text.pieces),
            tokens=tokens[:-1] if reason == "eot" else tokens,
            logprob=sum(token.logprob or 0.0 for token in text.tokens),
            finish_reason=reason,
            dropped=dropped,
            slid=prompt - dropped + len(tokens) > size + 1,  # the last one is only predicted
            score=score,
            logprobs=None if config.logprobs is None else text.tokens,
            prompt_logprobs=text.prompt,
        )

    def _ends_with_stop(self, ids: Sequence[int]) -> bool:
        """Whether the text of ``ids``, which had no stop text without the last, has one."""
        longest = max(len(stop.encode()) for stop in self.config.stop)
        stream = TextStream(self.tokenizer, self.config.stop)
        for id in ids[-longest:]:  # a token is a byte at least
            stream.push(id)
        return stream.stopped


class _Turns:
    """Puts pieces of texts in order, one text after the other: pieces that come before their turn wait."""

    def __init__(self) -> None:
        self._waiting: dict[int, list[Piece]] = defaultdict(list)
        self._ended: set[int] = set()
        self._turn = 0

    def take(self, number: int, piece: Piece, last: bool) -> Iterator[Piece]:
        """Takes a piece of text ``number``, and yields those whose turn it is."""
        self._waiting[number].append(piece)
        if last:
            self._ended.add(number)
        yield from self._waiting.pop(self._turn, ())
        while self._turn in self._ended:
            self._ended.remove(self._turn)
            self._turn += 1
            yield from self._waiting.pop(self._turn, ())
