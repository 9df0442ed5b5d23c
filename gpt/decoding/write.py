"""Prompts → texts: samples or beams, many at once, each piece of text as it comes and in order."""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from gpt.decoding.beam import BeamBatch, Hypothesis
from gpt.decoding.context import Context
from gpt.decoding.generate import Batch, Request, Token
from gpt.decoding.logits import Filters
from gpt.decoding.stream import TextStream
from gpt.decoding.weights import compiled
from gpt.device import Compute
from gpt.errors import UserError
from gpt.model.decoder import GPT
from gpt.model.params import cache_bytes
from gpt.sample_config import SampleConfig
from gpt.text.tokenizer import Tokenizer

ROWS = {"cpu": 16, "cuda": 64, "mps": 16}  # computed at once: what memory can be read for once
COMPILED_FROM = 2000  # steps from which compiling, which takes half a minute, gains time
ROOMS = 256  # positions: a compiled step has room for a multiple of them
CACHE_SHARE = 0.25  # of the device's memory that keys and values may take


@dataclass(frozen=True)
class Sample:
    """A generated text: ``text`` is without the prompt, ``tokens`` without the end-of-text that ended it, ``logprob``
    the sum over both, in nats, under the model itself. ``finish_reason`` is ``length``, ``eot`` or ``stop``; the
    tokens that a stop text stands in are among ``tokens``, and it is not in ``text``."""

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
    """Some more text of sample ``index`` of prompt ``prompt``; the last has the whole ``sample``."""

    prompt: int
    index: int
    text: str
    sample: Sample | None = None


@dataclass
class _Text:
    """A sample on its way."""

    stream: TextStream
    pieces: list[str] = field(default_factory=list)
    tokens: list[Token] = field(default_factory=list)
    prompt: Sequence[Token] | None = None

    def push(self, id: int) -> str:
        self.pieces.append(self.stream.push(id))
        return self.pieces[-1]

    def flush(self) -> str:
        self.pieces.append(self.stream.flush())
        return self.pieces[-1]


class Writer:
    """What writes texts with one model, as one request asks. Raises `UserError` for what the model cannot do."""

    def __init__(
        self,
        model: GPT,
        tokenizer: Tokenizer,
        compute: Compute,
        config: SampleConfig,
        seed: int,
        note: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.note = note
        self.model, self.tokenizer, self.compute, self.config, self.seed = model, tokenizer, compute, config, seed
        if config.beam > model.config.vocab_size:
            raise UserError(
                f"beam is {config.beam}; the model has {model.config.vocab_size:,} tokens", "take fewer beams"
            )
        self.filters = Filters(config, tokenizer.eot, [(self._token(word), value) for word, value in config.biases()])

    def _token(self, word: str) -> int:
        ids = self.tokenizer.encode(word, specials=True).tolist()
        if len(ids) != 1:
            parts = " ".join(repr(self.tokenizer.decode([id])) for id in ids)
            raise UserError(f'bias: "{word}" is {len(ids)} tokens: {parts}', "name one token; a space before it counts")
        return int(ids[0])

    def write(
        self, prompts: Sequence[str], indices: Sequence[int] = (0,), done: Collection[tuple[int, int]] = ()
    ) -> Iterator[Piece]:
        """The samples ``indices`` of each prompt, or its beams, a piece at a time, one text after the other: while one
        is told, those after it are computed along. Texts that are ``done`` (prompt, index) are left out."""
        ids = [self.tokenizer.encode(prompt).tolist() or [self.tokenizer.eot] for prompt in prompts]
        if self.config.beam:
            first = max((number for number, _ in done), default=0)  # a prompt's texts come together
            told = self._search(ids, range(first, len(ids)))
        else:
            wanted = ((number, index) for number in range(len(ids)) for index in indices)
            count = len(ids) * len(indices) - sum(number < len(ids) and index in indices for number, index in done)
            told = self._draw(ids, (each for each in wanted if each not in done), count)
        yield from (piece for piece in told if (piece.prompt, piece.index) not in done)

    def _context(self, ids: Sequence[Sequence[int]], count: int, width: int) -> Context:
        """Room for as many texts at once as there are, as were asked for, or as the device can hold."""
        longest = max(map(len, ids), default=1) + self.config.max_tokens
        room = min(longest, self.model.config.block_size)
        shape = self.model.config
        row = width * cache_bytes(shape, room, self.compute.dtype.itemsize)
        fitting = int(CACHE_SHARE * self.compute.memory() / row)
        at_once = self.config.batch or max(1, min(ROWS[self.compute.device.type] // width, fitting))
        rows = max(1, min(at_once, count))
        step = None
        if self.config.compile == "on" or (
            self.config.compile == "auto"
            and self.compute.device.type == "cuda"
            and self.config.max_tokens * count >= COMPILED_FROM * rows
        ):
            step = compiled(self.model, self.compute, self.note)
            room = min(-(-room // ROOMS) * ROOMS, shape.block_size)  # few lengths, each of which is compiled
        return Context(self.model, self.compute, width * rows, room, step)

    def _draw(self, ids: list[list[int]], wanted: Iterable[tuple[int, int]], count: int) -> Iterator[Piece]:
        """``wanted``: prompts and indices, ``count`` of them, each of which is looked at when a row is free for it."""
        begun: dict[int, tuple[int, int]] = {}

        def requests() -> Iterator[Request]:
            for at, (number, index) in enumerate(wanted):
                begun[at] = number, index
                yield Request(ids[number], index)

        context = self._context(ids, count, 1)
        batch = Batch(context, self.filters, requests(), self.seed)
        texts: dict[int, _Text] = defaultdict(self._text)
        turns = _Turns()
        for event in batch:
            text, (number, index), reason = texts[event.number], begun[event.number], event.reason
            text.prompt = event.prompt or text.prompt
            shown = ""
            for token in event.tokens:
                text.tokens.append(token)
                if token.id != self.tokenizer.eot or self.config.ignore_eot:
                    shown += text.push(token.id)
                if text.stream.stopped:
                    reason = "stop"
                    batch.end(event.number)
                    break
            sample = None
            if reason is not None:
                shown += text.flush()
                sample = self._sample(texts.pop(event.number), reason, len(ids[number]))
                del begun[event.number]
            yield from turns.take(event.number, Piece(number, index, shown, sample), last=sample is not None)

    def _text(self) -> "_Text":
        return _Text(TextStream(self.tokenizer, self.config.stop))

    def _sample(self, text: _Text, reason: str, prompt: int, best: Hypothesis | None = None) -> Sample:
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
            score=None if best is None else best.score,
            logprobs=None if config.logprobs is None else text.tokens,
            prompt_logprobs=text.prompt,
        )

    def _search(self, ids: list[list[int]], numbers: range) -> Iterator[Piece]:
        wanted = [ids[number] for number in numbers]
        context = self._context(wanted, len(wanted), self.config.beam)
        stops = self._ends_with_stop if self.config.stop else None
        texts: dict[int, _Text] = defaultdict(self._text)
        turns = _Turns()
        for event in BeamBatch(context, self.filters, (Request(each) for each in wanted), stops):
            text, number = texts[event.number], numbers[event.number]
            text.prompt = event.prompt or text.prompt
            shown = "".join(map(text.push, self._visible(event.agreed)))
            pieces = [Piece(number, 0, shown)]
            if event.best is not None:
                del texts[event.number]
                pieces += self._tell(number, event.best, text, len(wanted[event.number]))
            for piece in pieces:
                yield from turns.take(event.number, piece, last=event.best is not None and piece is pieces[-1])

    def _tell(self, number: int, best: Sequence[Hypothesis], first: _Text, prompt: int) -> Iterator[Piece]:
        """The ends of a search: the best text, all of which has been pushed, and those after it."""
        for index, each in enumerate(best):
            text = self._text() if index else first
            shown = "".join(map(text.push, self._visible(each.ids))) if index else ""
            shown += text.flush()
            text.tokens, text.prompt = list(each.tokens), first.prompt
            yield Piece(number, index, shown, self._sample(text, each.reason or "length", prompt, each))

    def _visible(self, ids: Iterable[int]) -> Iterator[int]:
        return (id for id in ids if id != self.tokenizer.eot or self.config.ignore_eot)

    def _ends_with_stop(self, ids: Sequence[int]) -> bool:
        """Whether the text of ``ids``, which had no stop text without the last, has one."""
        longest = max(len(stop.encode()) for stop in self.config.stop)
        stream = TextStream(self.tokenizer, self.config.stop)
        for id in ids[-longest:]:  # a token is a byte at least
            stream.push(id)
        return stream.stopped


class _Turns:
    """Puts pieces of texts in order, one text after the other: what comes too early waits."""

    def __init__(self) -> None:
        self._waiting: dict[int, list[Piece]] = defaultdict(list)
        self._ended: set[int] = set()
        self._turn = 0

    def take(self, number: int, piece: Piece, last: bool) -> Iterator[Piece]:
        """Takes a piece of text ``number``, and gives those whose turn it is."""
        self._waiting[number].append(piece)
        if last:
            self._ended.add(number)
        yield from self._waiting.pop(self._turn, ())
        while self._turn in self._ended:
            self._ended.remove(self._turn)
            self._turn += 1
            yield from self._waiting.pop(self._turn, ())
