"""A corpus: sources, split into training and held-out text. The text is streamed, never all in memory."""

import codecs
import contextlib
import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import groupby, islice
from typing import Any, Literal

from gpt.config import events
from gpt.config.text import ReadConfig, TextConfig
from gpt.corpus.shards import Side
from gpt.documents.documents import MIN_FIRST_CHUNK, Chunk, Reader, Skipped, is_plain, utf8_size
from gpt.documents.download import OnBytes, ignore
from gpt.documents.sources import find, find_published_held_out, identity, run_name
from gpt.documents.unpack import Source, open_source
from gpt.system.errors import UserError
from gpt.system.words import counted
from gpt.tokenizers.boundaries import parts

MIN_HASHED_DOCUMENTS = 200  # Minimum number of documents for a split by hash.
HEAD = 2**16  # Bytes of a file that show whether its lines end in carriage returns.
ENCODE_CHARACTERS = 2**18  # Characters per encoding call for a long document.

Listener = Callable[[events.Note | events.Progress], None]

AssignedChunks = Iterator[tuple[Chunk, bool]]  # The flag is True for held-out chunks.


@dataclass(frozen=True)
class Survey:
    """The size of the text, from a first look at the sources."""

    documents: int  # Counting stops at `MIN_HASHED_DOCUMENTS`.
    bytes: int  # UTF-8 bytes, estimated if ``sizes`` is None.
    sizes: list[int] | None  # UTF-8 bytes by source, or None if counting stopped.


def survey(sources: Sequence[Source], config: ReadConfig) -> Survey:
    """Counts bytes, and up to `MIN_HASHED_DOCUMENTS` documents. In strict mode and without ``--split-on``, reads only
    the first bytes of plain UTF-8 files without carriage returns."""
    is_exact = config.split_on is None and config.errors == "strict" and not config.skip_bad
    # A size of 0 can mean that the size is unknown.
    is_exact &= config.encoding.lower() in ("utf-8", "utf8")
    unread_sizes = [
        _unread_size(source) if is_exact and source.size > 0 and is_plain(source) else None for source in sources
    ]
    documents, sizes = 0, []
    stored_bytes = text_bytes = 1  # Bytes of the opened sources, as stored and as text.
    bytes_read = 0
    reader = Reader(config)

    def on_bytes(done: int) -> None:
        nonlocal bytes_read
        bytes_read = done

    for source, unread_size in zip(sources, unread_sizes, strict=True):
        if unread_size is not None:
            sizes.append(unread_size)
            documents += unread_size > 0
        else:
            sizes.append(0)
            bytes_read = 0
            for chunk in reader.documents(source, on_bytes):
                documents += chunk.begins
                sizes[-1] += utf8_size(chunk.text)
                if documents >= MIN_HASHED_DOCUMENTS:
                    break
            stored_bytes, text_bytes = stored_bytes + bytes_read, text_bytes + sizes[-1]
        if documents >= MIN_HASHED_DOCUMENTS:
            opened_size = sum(s.size for s, unread in zip(sources, unread_sizes, strict=True) if unread is None)
            return Survey(
                MIN_HASHED_DOCUMENTS,
                sum(s.size for s in sources) - opened_size + opened_size * text_bytes // stored_bytes,
                None,
            )
    return Survey(documents, sum(sizes), sizes)


def _unread_size(source: Source) -> int | None:
    """Returns the size of a text without its byte-order mark, or None if it has carriage returns. Does not open
    URLs."""
    if "://" in source.name:
        return source.size
    with contextlib.closing(open_source(source, lambda size: None)) as stream:
        head = stream.read(HEAD) or b""
    return None if b"\r" in head else source.size - 3 * head.startswith(codecs.BOM_UTF8)


@dataclass(frozen=True)
class Split:
    """The rule for held-out text: a pure function of a document and its position.

    With fewer than `MIN_HASHED_DOCUMENTS` documents, the last bytes are held out, even if this cuts a document.
    Otherwise a hash of the seed and the document's start decides, so other documents do not matter.
    """

    by: Literal["hash", "end", "text", "nothing"]  # "text" means a separate held-out text.
    fraction: float
    seed: int
    bound: float = 0.0  # With "hash", documents whose `hash_fraction` is below this are held out.
    starts: tuple[int, ...] = ()  # With "end", the bytes of text before each source.
    train_bytes: int = 0  # With "end", the bytes to train on.

    def describe(self) -> dict[str, Any]:
        """Returns the rule as recorded in the manifest."""
        values: dict[str, Any] = {"by": self.by, "fraction": self.fraction, "seed": self.seed}
        if self.by == "end":
            values["kept"] = self.train_bytes
        if self.by == "hash":
            values["bound"] = self.bound
        return values

    def assign(self, chunks: Iterable[Chunk], source_index: int) -> AssignedChunks:
        """Yields the chunks of source ``source_index``, and whether each is held out."""
        if self.by == "end":
            return self._split_at_end(chunks, self.starts[source_index])
        return self._split_by_hash(chunks) if self.by == "hash" else ((chunk, False) for chunk in chunks)

    def _split_by_hash(self, chunks: Iterable[Chunk]) -> AssignedChunks:
        held_out = False
        for chunk in chunks:
            if chunk.begins:
                held_out = hash_fraction(chunk.text, self.seed) < self.bound
            yield chunk, held_out

    def _split_at_end(self, chunks: Iterable[Chunk], position: int) -> AssignedChunks:
        for chunk in chunks:
            remaining = self.train_bytes - position
            size = utf8_size(chunk.text)
            position += size
            if remaining <= 0 or size <= remaining:
                yield chunk, remaining <= 0
                continue
            head = chunk.text.encode()[:remaining].decode("utf-8", "ignore")  # Drops a partial character.
            if head:
                yield Chunk(head, chunk.begins), False
            yield Chunk(chunk.text[len(head) :], True), True


def hash_fraction(text: str, seed: int) -> float:
    """Hashes the seed and the document's first `MIN_FIRST_CHUNK` characters to [0, 1)."""
    digest = hashlib.sha256(f"{seed}\0{text[:MIN_FIRST_CHUNK]}".encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def plan_split(
    sources: Sequence[Source],
    text_size: Survey,
    config: ReadConfig,
    fraction: float,
    seed: int,
    has_val_text: bool = False,
) -> Split:
    """Returns the split of a corpus. Neither side is empty, unless ``fraction`` is 0 or a separate text is held out.

    Raises `UserError` if the text is too short, or its documents too similar, to split.
    """
    if has_val_text or fraction == 0:
        return Split("text" if has_val_text else "nothing", 0.0 if has_val_text else fraction, seed)
    if text_size.documents >= MIN_HASHED_DOCUMENTS:
        return Split("hash", fraction, seed, bound=_find_bound(sources, config, fraction, seed))
    assert text_size.sizes is not None
    starts = tuple(sum(text_size.sizes[:i]) for i in range(len(text_size.sizes)))
    train_bytes = text_size.bytes - round(text_size.bytes * fraction)
    if train_bytes < 1 or train_bytes >= text_size.bytes:
        raise UserError(
            f"the text is too short to hold out {fraction:g} of it: {counted(text_size.bytes, 'byte')}",
            "give more text, or use --val-fraction 0 to hold out nothing",
        )
    return Split("end", fraction, seed, starts=starts, train_bytes=train_bytes)


def _find_bound(sources: Sequence[Source], config: ReadConfig, fraction: float, seed: int) -> float:
    """Returns ``fraction``, or the nearest bound if one side of ``fraction`` would have no documents. Stops reading
    when both sides have a document."""
    lowest, highest = 1.0, 0.0
    reader = Reader(config)
    for source in sources:
        is_single_document = config.split_on is None and is_plain(source)
        for chunk in islice(reader.documents(source), 1 if is_single_document else None):
            if chunk.begins:
                score = hash_fraction(chunk.text, seed)
                lowest, highest = min(lowest, score), max(highest, score)
                if lowest < fraction <= highest:
                    return fraction
    if lowest == highest:
        raise UserError(
            f"all documents have the same first {MIN_FIRST_CHUNK:,} characters, so none can be held out",
            "give a text to hold out with --val-text, or use --val-fraction 0 to hold out nothing",
        )
    return highest if highest < fraction else math.nextafter(lowest, 1)  # Documents below the bound are held out.


class TextSample(Iterator[str]):
    """About ``limit`` bytes, sampled evenly from a text of about ``total`` bytes. Shorter texts are used in full."""

    def __init__(self, chunks: Iterable[Chunk], total: int, limit: int) -> None:
        self.bytes_seen = self.bytes_taken = 0  # Bytes of the text and the sample so far.
        self._total, self._limit = total, limit
        self._pieces = self._sample(chunks)

    def __next__(self) -> str:
        return next(self._pieces)

    def _sample(self, chunks: Iterable[Chunk]) -> Iterator[str]:
        piece_size = min(MIN_FIRST_CHUNK, max(1024, self._limit // 64))
        for chunk in chunks:
            for start in range(0, len(chunk.text), piece_size):
                text = chunk.text[start : start + piece_size]
                is_sampled = (
                    self.bytes_taken * self._total <= self._limit * self.bytes_seen and self.bytes_taken < self._limit
                )
                self.bytes_seen += utf8_size(text)
                if is_sampled:
                    sampled_text = text.encode()[: self._limit - self.bytes_taken].decode("utf-8", "ignore")
                    self.bytes_taken += utf8_size(sampled_text)
                    if sampled_text:
                        yield sampled_text


@dataclass(frozen=True)
class Corpus:
    """Sources and their split. All sources from ``first_val_source`` onward are held out entirely."""

    name: str
    texts: tuple[str, ...]
    tokenizer_settings: Mapping[str, Any]  # The tokenizer settings of a `TextConfig`.
    reading: ReadConfig
    sources: list[Source]
    first_val_source: int
    split: Split
    survey: Survey

    def assign(self, chunks: Iterable[Chunk], source_index: int) -> AssignedChunks:
        """Yields the chunks of source ``source_index``, and whether each is held out."""
        if source_index >= self.first_val_source:
            return ((chunk, True) for chunk in chunks)
        return self.split.assign(chunks, source_index)

    @property
    def train_bytes(self) -> int:
        """Bytes of training text, estimated if counting stopped."""
        if self.split.by == "end":
            return self.split.train_bytes
        return round(self.survey.bytes * (1 - self.split.fraction))

    @property
    def first_held_out(self) -> str | None:
        """The name of the first source with held-out text. None unless the end of several sources is held out."""
        if self.split.by != "end" or len(self.sources) == 1:
            return None
        return next(
            source.name
            for source, start, size in zip(self.sources, self.split.starts, self.survey.sizes or (), strict=True)
            if start + size > self.split.train_bytes
        )

    def training_text(self) -> Iterator[Chunk]:
        """Yields the training text."""
        reader = Reader(self.reading)
        for index, source in enumerate(self.sources[: self.first_val_source]):
            chunks = self.assign(reader.documents(source), index)
            yield from (chunk for chunk, held_out in chunks if not held_out)

    def identity(self) -> str:
        """Returns a sha256 of the sources' names and sizes."""
        digest = hashlib.sha256(f"{self.first_val_source}\n".encode())
        for source in self.sources:
            digest.update((json.dumps([source.name, source.size]) + "\n").encode())
        return digest.hexdigest()


def open_corpus(
    texts: Sequence[str], config: TextConfig, listen: Listener = lambda event: None, named: int = Skipped.limit
) -> Corpus:
    """Finds the sources and plans the split. ``listen`` receives notes, with the names of at most ``named`` skipped
    files, and download progress.

    Raises `UserError` for invalid or too short text.
    """

    def on_bytes(done: int, total: int | None) -> None:
        listen(events.Progress("fetched", done, total or done))

    read_config = ReadConfig(**{f.name: getattr(config, f.name) for f in fields(ReadConfig)})

    def note(text: str) -> None:
        listen(events.Note(text))

    skipped = Skipped(config.skip_bad, note, named)
    train_sources, val_sources = find_sources(texts, config, skipped, on_bytes)
    if skipped.count:
        note(f"skipped {counted(skipped.count, 'unreadable file or folder', 'unreadable files and folders')}")
    text_size = survey(train_sources, read_config)
    if not text_size.bytes:
        raise empty_error(texts, "characters", config)
    if config.val_text is not None and not survey(val_sources, read_config).bytes:
        raise empty_error([config.val_text], "characters", config)
    tokenizer_settings = {key: getattr(config, key) for key in ("tokenizer", "vocab_size", "sample_bytes")}
    split = plan_split(train_sources, text_size, read_config, config.val_fraction, config.seed, bool(val_sources))
    return Corpus(
        run_name(texts),
        tuple(texts),
        tokenizer_settings,
        read_config,
        [*train_sources, *val_sources],
        len(train_sources),
        split,
        text_size,
    )


def find_sources(
    texts: Sequence[str], config: TextConfig, skipped: Skipped, on_bytes: OnBytes = ignore
) -> tuple[list[Source], list[Source]]:
    """Returns the sources of the training text and of a separate held-out text. A file in both is held out. Raises
    `UserError` if none is left to train on."""
    sources = find(texts, skipped, on_bytes)
    val_sources: list[Source] = []
    if config.val_text is not None:
        val_sources = find([config.val_text], skipped, on_bytes)
        if config.val_fraction != TextConfig.val_fraction:
            skipped.note("--val-fraction has no effect with --val-text")
    elif config.val_fraction == TextConfig.val_fraction:
        val_sources = find_published_held_out(texts, on_bytes)
    held_out = {identity(source) for source in val_sources}
    remaining = [source for source in sources if identity(source) not in held_out]
    if not remaining:
        raise UserError("all of the text is in --val-text, so nothing is left to train on", "hold out another text")
    if len(remaining) < len(sources):
        count = len(sources) - len(remaining)
        subject = f"{counted(count, 'file')} of --val-text {'are' if count != 1 else 'is'} also in TEXT"
        skipped.note(f"{subject}: held out, not trained on")
    return remaining, val_sources


def empty_error(
    texts: Sequence[str], plural: str, config: ReadConfig, hint: str = "give a file with some text in it"
) -> UserError:
    """Returns the error for texts without anything to read."""
    subject = f"{texts[0]} is empty" if len(texts) == 1 else f"all of {', '.join(texts)} is empty"
    if config.skip_bad:
        hint += "; without --skip-bad, gpt stops at the first thing that it cannot read"
    return UserError(f"{subject}: 0 {plural}", hint)


def cut_documents(assigned: AssignedChunks, pattern: str) -> Iterator[tuple[str, bool, Side, bool]]:
    """Yields parts to encode. A part is (text, whether the text begins a document, side, whether the text ends inside a
    piece)."""
    document_number = 0

    def document_key(item: tuple[Chunk, bool]) -> tuple[int, Side]:
        nonlocal document_number
        chunk, held_out = item
        document_number += chunk.begins
        return document_number, "val" if held_out else "train"

    for (_, side), chunks in groupby(assigned, document_key):
        for i, (text, ends_inside_piece) in enumerate(
            parts((chunk.text for chunk, _ in chunks), pattern, ENCODE_CHARACTERS)
        ):
            yield text, i == 0, side, ends_inside_piece
