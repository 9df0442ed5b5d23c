"""A corpus: its sources in groups, and the split into training and held-out text. It keeps no text in memory."""

import codecs
import contextlib
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
from gpt.text.boundaries import parts
from gpt.text.documents import HEAD, Chunk, Reader, Skipped, is_plain, utf8_size
from gpt.text.shards import Side
from gpt.text.sources import find, identity, published, run_name
from gpt.text.unpack import Source, open_source
from gpt.words import counted

HASHED_SPLIT_FROM = 200  # documents
GROUP_BYTES = 2**26  # stored bytes of a group's sources; a larger source is a group by itself
PART = 2**18  # characters of a long document to encode at once

Listener = Callable[[events.Note | events.Progress], None]

Assigned = Iterator[tuple[Chunk, bool]]  # chunks, and whether each is held out


@dataclass(frozen=True)
class Survey:
    """The size of the text, from a first look at the sources."""

    documents: int  # at most `HASHED_SPLIT_FROM`: the count stops there
    bytes: int  # of text in UTF-8; an estimate where `sizes` is None
    sizes: list[int] | None  # of each source, if all were counted


def survey(sources: Sequence[Source], config: ReadConfig) -> Survey:
    """Counts documents up to `HASHED_SPLIT_FROM`, and bytes. Of plain files in UTF-8 only the first bytes are read."""
    exact = config.split_on is None and config.errors == "strict" and not config.skip_bad
    utf8 = config.encoding.lower() in ("utf-8", "utf8")
    unopened = [exact and utf8 and source.size > 0 and is_plain(source) for source in sources]  # 0 may mean unknown
    documents, sizes = 0, []
    stored = text = 1  # bytes of the opened sources
    position = 0  # in the source that is being read
    reader = Reader(config)

    def on_bytes(done: int) -> None:
        nonlocal position
        position = done

    for source, plain in zip(sources, unopened, strict=True):
        if plain:
            sizes.append(source.size - _mark(source))
            documents += sizes[-1] > 0
        else:
            sizes.append(0)
            position = 0
            for chunk in reader.documents(source, on_bytes):
                documents += chunk.begins
                sizes[-1] += utf8_size(chunk.text)
                if documents >= HASHED_SPLIT_FROM:
                    break
            stored, text = stored + position, text + sizes[-1]
        if documents >= HASHED_SPLIT_FROM:
            packed = sum(s.size for s, plain in zip(sources, unopened, strict=True) if not plain)
            return Survey(HASHED_SPLIT_FROM, sum(s.size for s in sources) - packed + packed * text // stored, None)
    return Survey(documents, sum(sizes), sizes)


def _mark(source: Source) -> int:
    """Returns the bytes of a byte-order mark at a source's start. An address is not opened for that."""
    if "://" in source.name:
        return 0
    with contextlib.closing(open_source(source, lambda size: None)) as stream:
        return 3 * (stream.read(3) == codecs.BOM_UTF8)


@dataclass(frozen=True)
class Split:
    """The rule which text is held out: a pure function of a document and its place.

    Of fewer than `HASHED_SPLIT_FROM` documents the end of the bytes, which may cut a document. From there on by a hash
    of the seed and the document's beginning, so that adding documents moves none.
    """

    by: Literal["hash", "end", "text", "nothing"]  # "text": a separate text is held out
    fraction: float
    seed: int
    bound: float = 0.0  # by hash: documents with a smaller share are held out
    starts: tuple[int, ...] = ()  # by end: bytes of text before each source …
    kept: int = 0  # … and bytes to train on

    def describe(self) -> dict[str, Any]:
        """Returns the rule for the manifest."""
        values: dict[str, Any] = {"by": self.by, "fraction": self.fraction, "seed": self.seed}
        if self.by == "end":
            values["kept"] = self.kept
        if self.by == "hash":
            values["bound"] = self.bound
        return values

    def assign(self, chunks: Iterable[Chunk], number: int) -> Assigned:
        """Yields the chunks of source ``number``, each with whether it is held out."""
        if self.by == "end":
            return self._at_end(chunks, self.starts[number])
        return self._by_hash(chunks) if self.by == "hash" else ((chunk, False) for chunk in chunks)

    def _by_hash(self, chunks: Iterable[Chunk]) -> Assigned:
        held_out = False
        for chunk in chunks:
            if chunk.begins:
                held_out = hash_fraction(chunk.text, self.seed) < self.bound
            yield chunk, held_out

    def _at_end(self, chunks: Iterable[Chunk], position: int) -> Assigned:
        for chunk in chunks:
            left = self.kept - position
            size = utf8_size(chunk.text)
            position += size
            if left <= 0 or size <= left:
                yield chunk, left <= 0
                continue
            head = chunk.text.encode()[:left].decode("utf-8", "ignore")  # never cuts a character
            if head:
                yield Chunk(head, chunk.begins), False
            yield Chunk(chunk.text[len(head) :], True), True


def hash_fraction(text: str, seed: int) -> float:
    """Returns a number in [0, 1): a hash of the seed and the document's first `HEAD` characters."""
    digest = hashlib.sha256(f"{seed}\0{text[:HEAD]}".encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def plan_split(
    sources: Sequence[Source], found: Survey, config: ReadConfig, fraction: float, seed: int, own_text: bool = False
) -> Split:
    """Returns the split of a corpus. No side is empty, unless ``fraction`` is 0 or a separate text is held out.

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
            f"the text is too short to hold out {fraction:g} of it: {counted(found.bytes, 'byte')}",
            "give more text, or use --val-fraction 0 to hold out nothing",
        )
    return Split("end", fraction, seed, starts=starts, kept=kept)


def _bound(sources: Sequence[Source], config: ReadConfig, fraction: float, seed: int) -> float:
    """Returns ``fraction``, or the nearest bound with documents on both sides. Reads until there is one on each."""
    least, most = 1.0, 0.0
    reader = Reader(config)
    for source in sources:
        one = config.split_on is None and is_plain(source)
        for chunk in islice(reader.documents(source), 1 if one else None):
            if chunk.begins:
                place = hash_fraction(chunk.text, seed)
                least, most = min(least, place), max(most, place)
                if least < fraction <= most:
                    return fraction
    if least == most:
        raise UserError(
            f"all documents have the same first {HEAD:,} characters, so none can be held out",
            "give a text to hold out with --val-text, or use --val-fraction 0 to hold out nothing",
        )
    return most if most < fraction else math.nextafter(least, 1)  # documents below it are held out


class TextSample(Iterator[str]):
    """About ``limit`` bytes of a text of about ``total``, spread evenly over it; all of a shorter text."""

    def __init__(self, chunks: Iterable[Chunk], total: int, limit: int) -> None:
        self.seen = self.taken = 0  # bytes of the text so far, and of the sample
        self._total, self._limit = total, limit
        self._chosen = self._choose(chunks)

    def __next__(self) -> str:
        return next(self._chosen)

    def _choose(self, chunks: Iterable[Chunk]) -> Iterator[str]:
        portion = min(HEAD, max(1024, self._limit // 64))  # characters
        for chunk in chunks:
            for start in range(0, len(chunk.text), portion):
                text = chunk.text[start : start + portion]
                wanted = self.taken * self._total <= self._limit * self.seen and self.taken < self._limit
                self.seen += utf8_size(text)
                if wanted:
                    part = text.encode()[: self._limit - self.taken].decode("utf-8", "ignore")
                    self.taken += utf8_size(part)
                    if part:
                        yield part


@dataclass(frozen=True)
class Corpus:
    """Sources, and the rule which of their text is held out. Sources from ``val_from`` on are held out as a whole."""

    name: str
    texts: tuple[str, ...]
    asked: Mapping[str, Any]  # the settings of the tokenizer
    reading: ReadConfig
    sources: list[Source]
    val_from: int
    split: Split
    found: Survey

    @cached_property
    def groups(self) -> list[range]:
        """Ranges of sources whose ids share shards. They depend on the sources' sizes alone."""
        groups: list[range] = []
        size = 0
        for number, source in enumerate(self.sources):
            if not groups or number == self.val_from or size + source.size > GROUP_BYTES:
                groups.append(range(number, number))
                size = 0
            size += source.size
            groups[-1] = range(groups[-1].start, number + 1)
        return groups

    def assign(self, chunks: Iterable[Chunk], number: int) -> Assigned:
        """Yields the chunks of source ``number``, each with whether it is held out."""
        if number >= self.val_from:
            return ((chunk, True) for chunk in chunks)
        return self.split.assign(chunks, number)

    @property
    def train_bytes(self) -> int:
        """Bytes of text to train on; an estimate where not all was counted."""
        if self.split.by == "end":
            return self.split.kept
        return round(self.found.bytes * (1 - self.split.fraction))

    @property
    def first_held_out(self) -> str | None:
        """The name of the first source with held-out text, where the end of several sources is held out."""
        if self.split.by != "end" or len(self.sources) == 1:
            return None
        return next(
            source.name
            for source, start, size in zip(self.sources, self.split.starts, self.found.sizes or (), strict=True)
            if start + size > self.split.kept
        )

    def training_text(self) -> Iterator[Chunk]:
        """Yields the text to train on."""
        reader = Reader(self.reading)
        for number, source in enumerate(self.sources[: self.val_from]):
            chunks = self.assign(reader.documents(source), number)
            yield from (chunk for chunk, held_out in chunks if not held_out)

    def identity(self) -> str:
        """Returns a sha256 over the names and sizes of the sources."""
        digest = hashlib.sha256(f"{self.val_from}\n".encode())
        for source in self.sources:
            digest.update((json.dumps([source.name, source.size]) + "\n").encode())
        return digest.hexdigest()


def open_corpus(texts: Sequence[str], config: TextConfig, listen: Listener = lambda event: None) -> Corpus:
    """Finds the sources and decides the split. ``listen`` gets notes, and the progress of a corpus that is fetched.

    A file of ``--val-text`` that is also among ``texts`` is not trained on.

    Raises `UserError` for anything that is no text, or too short.
    """

    def on_bytes(done: int, total: int | None) -> None:
        listen(events.Progress("fetched", done, total or done))

    reading = ReadConfig(**{f.name: getattr(config, f.name) for f in fields(ReadConfig)})
    skipped = Skipped() if reading.skip_bad else None

    def note(text: str) -> None:
        listen(events.Note(text))

    found_sources = find(texts, skipped, on_bytes, note)
    own: list[Source] = []
    if config.val_text is not None:
        own = find([config.val_text], skipped, on_bytes, note)
    elif config.val_fraction == TextConfig.val_fraction:
        own = published(texts, on_bytes)
    if skipped is not None and skipped.count:
        listen(events.Note(f"skipped {skipped.count:,} unreadable: {skipped.first}"))
    found_sources = _without(found_sources, own, listen)
    found = survey(found_sources, reading)
    if not found.documents or not found.bytes:
        what = f"{texts[0]} is empty" if len(texts) == 1 else f"all of {', '.join(texts)} is empty"
        raise UserError(f"{what}: 0 characters", "give a file with some text in it")
    asked = {key: getattr(config, key) for key in ("tokenizer", "vocab_size", "sample_bytes")}
    split = plan_split(found_sources, found, reading, config.val_fraction, config.seed, bool(own))
    return Corpus(
        run_name(texts), tuple(texts), asked, reading, [*found_sources, *own], len(found_sources), split, found
    )


def _without(sources: list[Source], own: Sequence[Source], listen: Listener) -> list[Source]:
    """Returns the sources without those of the separate held-out text."""
    held_out = {identity(source) for source in own}
    kept = [source for source in sources if identity(source) not in held_out]
    if not kept:
        raise UserError("all of the text is in --val-text, so nothing is left to train on", "hold out another text")
    if len(kept) < len(sources):
        count = len(sources) - len(kept)
        what = f"{counted(count, 'file')} of --val-text {'are' if count != 1 else 'is'} also in TEXT"
        listen(events.Note(f"{what}: held out, not trained on"))
    return kept


def cut_documents(assigned: Assigned, pattern: str) -> Iterator[tuple[str, bool, Side, bool]]:
    """Yields documents in texts to encode one by one: each with whether it begins a document, its side, and whether
    it ends inside a pattern's piece that was too long."""
    number = 0

    def document(each: tuple[Chunk, bool]) -> tuple[int, Side]:
        nonlocal number
        chunk, held_out = each
        number += chunk.begins
        return number, "val" if held_out else "train"

    for (_, side), chunks in groupby(assigned, document):
        for i, (text, cut) in enumerate(parts((chunk.text for chunk, _ in chunks), pattern, PART)):
            yield text, i == 0, side, cut
