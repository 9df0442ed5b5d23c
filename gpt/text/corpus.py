"""A corpus as it was asked for: its sources in groups, the split, and a tokenizer for it; none of its text is kept."""

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import groupby, islice
from typing import Any, Literal

from gpt import events
from gpt.config import ReadConfig, TextConfig
from gpt.errors import UserError
from gpt.text import sources as words
from gpt.text.boundaries import parts
from gpt.text.documents import HEAD, Chunk, Reader, Skipped, is_plain, utf8_size
from gpt.text.shards import Side
from gpt.text.unpack import Source
from gpt.words import counted

HASHED_SPLIT_FROM = 200  # documents

Halved = Iterator[tuple[Chunk, bool]]  # pieces, and whether each is held out


@dataclass(frozen=True)
class Survey:
    """What a first look at the sources tells."""

    documents: int  # all of them, or `HASHED_SPLIT_FROM` where there are that many or more
    bytes: int  # of text in UTF-8; an estimate where `sizes` is None
    sizes: list[int] | None  # each source's, where all were counted


def survey(sources: Sequence[Source], config: ReadConfig) -> Survey:
    """Counts documents up to `HASHED_SPLIT_FROM`, and bytes. Plain files in UTF-8 are not opened for it."""
    exact = config.split_on is None and config.errors == "strict" and not config.skip_bad
    unopened = [exact and config.encoding.lower() in ("utf-8", "utf8") and is_plain(source) for source in sources]
    documents, sizes = 0, []
    stored = text = 1  # bytes of what was opened
    reader = Reader(config)
    for source, plain in zip(sources, unopened, strict=True):
        if plain:
            documents += source.size > 0
            sizes.append(source.size)
        else:
            counted = _Count()
            for piece in reader.documents(source, counted.stored):
                documents += piece.begins
                counted.text += utf8_size(piece.text)
                if documents >= HASHED_SPLIT_FROM:
                    break
            sizes.append(counted.text)
            stored, text = stored + counted.position, text + counted.text
        if documents >= HASHED_SPLIT_FROM:
            packed = sum(s.size for s, plain in zip(sources, unopened, strict=True) if not plain)
            return Survey(HASHED_SPLIT_FROM, sum(s.size for s in sources) - packed + packed * text // stored, None)
    return Survey(documents, sum(sizes), sizes)


class _Count:
    """Bytes of a source: its text, and how far reading came in what is stored."""

    def __init__(self) -> None:
        self.text = self.position = 0

    def stored(self, position: int) -> None:
        self.position = position


@dataclass(frozen=True)
class Split:
    """The rule, with nothing left open: a pure function of a document and where it stands."""

    by: Literal["hash", "end", "text", "nothing"]  # "text": a text of its own is held out
    fraction: float
    seed: int
    bound: float = 0.0  # by hash: what lies below is held out
    starts: tuple[int, ...] = ()  # at the end: the bytes of text before each source …
    kept: int = 0  # … and how many are trained on

    def describe(self) -> dict[str, Any]:
        """For the manifest."""
        values: dict[str, Any] = {"by": self.by, "fraction": self.fraction, "seed": self.seed}
        if self.by == "end":
            values["kept"] = self.kept
        if self.by == "hash":
            values["bound"] = self.bound
        return values

    def halve(self, pieces: Iterable[Chunk], number: int) -> Halved:
        """The pieces of source ``number``, each with whether it is held out."""
        if self.by == "end":
            return self._at_end(pieces, self.starts[number])
        return self._by_hash(pieces) if self.by == "hash" else ((piece, False) for piece in pieces)

    def _by_hash(self, pieces: Iterable[Chunk]) -> Halved:
        held_out = False
        for piece in pieces:
            if piece.begins:
                held_out = share(piece.text, self.seed) < self.bound
            yield piece, held_out

    def _at_end(self, pieces: Iterable[Chunk], position: int) -> Halved:
        for piece in pieces:
            left = self.kept - position
            size = utf8_size(piece.text)
            position += size
            if left <= 0 or size <= left:
                yield piece, left <= 0
                continue
            head = piece.text.encode()[:left].decode("utf-8", "ignore")  # never inside a character
            if head:
                yield Chunk(head, piece.begins), False
            yield Chunk(piece.text[len(head) :], True), True


def share(text: str, seed: int) -> float:
    """Where a document lies between 0 and 1, by a hash of the seed and its first `HEAD` characters."""
    digest = hashlib.sha256(f"{seed}\0{text[:HEAD]}".encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def plan_split(
    sources: Sequence[Source], found: Survey, config: ReadConfig, fraction: float, seed: int, own_text: bool = False
) -> Split:
    """The split of a corpus. No side is empty, unless ``fraction`` is 0 or a text of its own is held out.

    Raises `UserError` where the text is too short, or its documents too much alike, to have two sides.
    """
    if own_text or fraction == 0:
        return Split("text" if own_text else "nothing", 0.0 if own_text else fraction, seed)
    if found.documents >= HASHED_SPLIT_FROM:
        return Split("hash", fraction, seed, bound=_bound(sources, config, fraction, seed))
    assert found.sizes is not None
    starts = tuple(sum(found.sizes[:number]) for number in range(len(found.sizes)))
    kept = found.bytes - round(found.bytes * fraction)
    if kept < 1 or kept >= found.bytes:
        raise UserError(
            f"the text is too short to hold {fraction:g} of it out: {counted(found.bytes, 'byte')}",
            "give more text, or --val-fraction 0 to hold nothing out",
        )
    return Split("end", fraction, seed, starts=starts, kept=kept)


def _bound(sources: Sequence[Source], config: ReadConfig, fraction: float, seed: int) -> float:
    """``fraction``, or what is nearest to it and has shares on both sides. It is looked for no further than it takes
    to see one on each."""
    least, most = 1.0, 0.0
    reader = Reader(config)
    for source in sources:
        one = config.split_on is None and is_plain(source)
        for piece in islice(reader.documents(source), 1 if one else None):
            if piece.begins:
                place = share(piece.text, seed)
                least, most = min(least, place), max(most, place)
                if least < fraction <= most:
                    return fraction
    if least == most:
        raise UserError(
            f"all documents are alike in their first {HEAD:,} characters: no part of them can be held out",
            "name a text to hold out with --val-text, or --val-fraction 0 to hold nothing out",
        )
    return most if most < fraction else math.nextafter(least, 1)  # what lies below it is held out


class Spread(Iterator[str]):
    """About ``limit`` bytes of a text of about ``total``, from everywhere in it; all of it where that is less."""

    def __init__(self, pieces: Iterable[Chunk], total: int, limit: int) -> None:
        self.seen = self.taken = 0  # bytes of the text so far, and of what was chosen of them
        self._total, self._limit = total, limit
        self._chosen = self._choose(pieces)

    def __next__(self) -> str:
        return next(self._chosen)

    def _choose(self, pieces: Iterable[Chunk]) -> Iterator[str]:
        portion = min(HEAD, max(1024, self._limit // 64))  # characters
        for piece in pieces:
            for start in range(0, len(piece.text), portion):
                text = piece.text[start : start + portion]
                wanted = self.taken * self._total <= self._limit * self.seen and self.taken < self._limit
                self.seen += utf8_size(text)
                if wanted:
                    part = text.encode()[: self._limit - self.taken].decode("utf-8", "ignore")
                    self.taken += utf8_size(part)
                    if part:
                        yield part


Listener = Callable[[events.Note | events.Progress], None]

GROUP_BYTES = 2**26  # of sources, as stored, that make a group; a larger source is one by itself


@dataclass(frozen=True)
class Corpus:
    """Sources and the rule that says which of their text is held out. ``own_from``: where those of a text of its own,
    which is held out whole, begin."""

    name: str
    texts: tuple[str, ...]
    asked: Mapping[str, Any]  # the words that say which tokenizer
    reading: ReadConfig
    sources: list[Source]
    own_from: int
    split: Split
    found: Survey

    @cached_property
    def groups(self) -> list[range]:
        """Sources that are read one after the other and whose ids share files. They depend on nothing else."""
        groups: list[range] = []
        size = 0
        for number, source in enumerate(self.sources):
            if not groups or number == self.own_from or size + source.size > GROUP_BYTES:
                groups.append(range(number, number))
                size = 0
            size += source.size
            groups[-1] = range(groups[-1].start, number + 1)
        return groups

    def halve(self, pieces: Iterable[Chunk], number: int) -> Halved:
        """The pieces of source ``number``, each with whether it is held out."""
        if number >= self.own_from:
            return ((piece, True) for piece in pieces)
        return self.split.halve(pieces, number)

    @property
    def train_bytes(self) -> int:
        """Text to train on; an estimate where not all was counted."""
        if self.split.by == "end":
            return self.split.kept
        return round(self.found.bytes * (1 - self.split.fraction))

    @property
    def first_held_out(self) -> str | None:
        """The source from which on, or inside which, text is held out, where that is the end of several."""
        if self.split.by != "end" or len(self.sources) == 1:
            return None
        return next(
            source.name
            for source, start, size in zip(self.sources, self.split.starts, self.found.sizes or (), strict=True)
            if start + size > self.split.kept
        )

    def training_text(self) -> Iterator[Chunk]:
        """All that is trained on."""
        reader = Reader(self.reading)
        for number, source in enumerate(self.sources[: self.own_from]):
            halves = self.halve(reader.documents(source), number)
            yield from (piece for piece, held_out in halves if not held_out)

    def identity(self) -> str:
        """A sum over what there is to read."""
        digest = hashlib.sha256(f"{self.own_from}\n".encode())
        for source in self.sources:
            digest.update((json.dumps([source.name, source.size]) + "\n").encode())
        return digest.hexdigest()


def open_corpus(texts: Sequence[str], config: TextConfig, listen: Listener = lambda event: None) -> Corpus:
    """Finds the sources and decides the split: what is held out as a text of its own is not trained on. ``listen``
    hears of that, and how far a corpus is fetched.

    Raises `UserError` for anything that is no text, or too short.
    """

    def on_bytes(done: int, total: int | None) -> None:
        listen(events.Progress("fetched", done, total or done))

    reading = ReadConfig(**{f.name: getattr(config, f.name) for f in fields(ReadConfig)})
    skipped = Skipped() if reading.skip_bad else None
    found_sources = words.find(texts, skipped, on_bytes)
    own: list[Source] = []
    if config.val_text is not None:
        own = words.find([config.val_text], skipped, on_bytes)
    elif config.val_fraction == TextConfig.val_fraction:
        own = words.published(texts, on_bytes)
    if skipped is not None and skipped.count:
        listen(events.Note(f"left out, since nobody may look at them: {skipped.count:,}; {skipped.examples[0]}"))
    found_sources = _without(found_sources, own, listen)
    found = survey(found_sources, reading)
    if not found.documents or not found.bytes:
        what = f"{texts[0]} is empty" if len(texts) == 1 else f"all of {', '.join(texts)} is empty"
        raise UserError(f"{what}: 0 characters", "give a file with some text in it")
    asked = {key: getattr(config, key) for key in ("tokenizer", "vocab_size", "sample_bytes")}
    split = plan_split(found_sources, found, reading, config.val_fraction, config.seed, bool(own))
    return Corpus(
        words.run_name(texts), tuple(texts), asked, reading, [*found_sources, *own], len(found_sources), split, found
    )


def _without(sources: list[Source], own: Sequence[Source], listen: Listener) -> list[Source]:
    """The sources that are not held out as a text of their own."""
    held_out = {words.place(source) for source in own}
    kept = [source for source in sources if words.place(source) not in held_out]
    if not kept:
        raise UserError("all of the text is in --val-text: nothing is left to train on", "hold out another text")
    if len(kept) < len(sources):
        count = len(sources) - len(kept)
        what = f"{counted(count, 'file')} of --val-text {'are' if count != 1 else 'is'} among the text"
        listen(events.Note(f"{what}: held out, not trained on"))
    return kept


PIECE = 2**18  # characters of a long document that are encoded at once


def cut_documents(halves: Iterator[tuple[Chunk, bool]], pattern: str) -> Iterator[tuple[str, bool, Side, bool]]:
    """Documents in texts that can be encoded one by one: each with whether it begins a document, its side, and whether
    a token's piece had to be cut at its end."""
    number = 0

    def document(half: tuple[Chunk, bool]) -> tuple[int, Side]:
        nonlocal number
        piece, held_out = half
        number += piece.begins
        return number, "val" if held_out else "train"

    for (_, side), pieces in groupby(halves, document):
        chunks = (piece.text for piece, _ in pieces)
        for i, (text, cut) in enumerate(parts(chunks, pattern, PIECE)):
            yield text, i == 0, side, cut
