"""Sources → documents in chunks, whatever they are packed in. No file is held as a whole.

A file's suffixes are read from the last one on: ``.gz`` and ``.zst`` are unpacked, archives yield their members, JSON
and tables the values of a field; anything else is plain text.
"""

import contextlib
import sys
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from gpt.config import ReadConfig
from gpt.errors import UserError, WorkError
from gpt.text import formats
from gpt.text.formats import RecordForm, Records, TextEncoding, text_form
from gpt.text.unpack import (
    UNPACK,
    ByteStream,
    OnBytes,
    PackedFile,
    Source,
    StreamError,
    damaged,
    open_source,
    opened_seekable,
    tar_members,
    zip_members,
)


def utf8_size(text: str) -> int:
    """Returns the number of bytes of a text in UTF-8."""
    return len(text) if text.isascii() else len(text.encode())


@dataclass(frozen=True, slots=True)
class Chunk:
    """A part of a document's text. The chunks of a document follow each other; the first one ``begins`` it."""

    text: str
    begins: bool


@dataclass
class Skipped:
    """The files, members, lines and rows that ``--skip-bad`` left out: their number, and the first error."""

    count: int = 0
    first: str = ""

    def add(self, error: UserError) -> None:
        """Counts an error."""
        self.count += 1
        self.first = self.first or error.message


HEAD = 2**16  # characters; a document's first chunk holds at least so many, or all of it
LENGTH = 2**20  # characters of a chunk, about


def split_at(blocks: Iterable[str], separator: str) -> Iterator[str | None]:
    """Yields the text between lines that equal ``separator`` (or that and a carriage return), and None for each."""
    needle = "\n" + separator
    held = "\n"  # its first character is yielded already, or stands for a line break before the first line
    for block in blocks:
        text = held + block
        start = min(1, len(held))  # text[:start] is yielded already
        at = text.find(needle)
        while at >= 0:
            end = at + len(needle)
            end += text.startswith("\r", end)
            if text.startswith("\n", end):
                if start <= at:
                    yield text[start : at + 1]
                yield None
                start = end + 1
                at = text.find(needle, end)
            else:
                at = text.find(needle, at + 1)
        line = text.rfind("\n") + 1
        cut = line if line and (separator + "\r").startswith(text[line:]) else len(text)  # it may become a separator
        if start < cut:
            yield text[start:cut]
        held = text[line - 1 :] if cut == line else ""
    if held[1:] in (separator, separator + "\r"):
        yield None
    elif held[1:]:
        yield held[1:]


def chunks_of(parts: Iterable[str | None]) -> Iterator[Chunk | None]:
    """Yields the chunks of documents, and None after each document that is whole. In ``parts`` None ends a document."""
    held: list[str] = []
    size, begins = 0, True
    for part in parts:
        if part is not None:
            held.append(part)
            size += len(part)
        if size and (part is None or size >= (HEAD if begins else LENGTH // 2)):
            yield Chunk("".join(held), begins)
            held, size, begins = [], 0, False
        if part is None and not begins:
            yield None
            begins = True
    if size:
        yield Chunk("".join(held), begins)
    if size or not begins:
        yield None


DEPTH = 8  # formats unpacked around each other at most; an archive may hold itself

RECORDS: dict[str, type[Records[Any]]] = {
    ".jsonl": formats.JSONLines,
    ".ndjson": formats.JSONLines,
    ".jsonlines": formats.JSONLines,
    ".json": formats.JSONFile,
    ".csv": formats.Table,
    ".tsv": formats.TabbedTable,
    ".parquet": formats.Parquet,
}


def _ignore(size: int) -> None:
    """The listener that shows no progress."""


class Reader:
    """Reads documents as a `ReadConfig` says; counts replaced bytes and skipped items.

    With a ``form``, every file has records, JSON lines if its suffix is unknown, and what the form makes of one is a
    single chunk. Without it, the text of a record is the string at ``--field``.
    """

    def __init__(self, config: ReadConfig, form: RecordForm | None = None) -> None:
        if config.split_on is not None and "\n" in config.split_on:
            raise UserError("--split-on contains a line break", "give a single line without the line break")
        self.config = config
        self._form, self._only_records = form or text_form(config.field), form is not None
        self._encoding = TextEncoding(config.encoding, config.errors)
        self._utf8 = TextEncoding("utf-8", config.errors)  # for formats that are always UTF-8
        self.skipped = Skipped()
        self._lines = False  # `Source.lines` of the current source

    @property
    def replaced(self) -> int:
        """The number of U+FFFD written for invalid bytes."""
        return self._encoding.replaced + self._utf8.replaced

    def documents(self, source: Source, on_bytes: OnBytes = _ignore) -> Iterator[Chunk]:
        """Yields the documents of a source in chunks; none is empty.

        The first chunk of a document holds all of it or at least `HEAD` characters. ``on_bytes`` gets the number of
        the source's bytes read so far. Raises `UserError` for files that are damaged or no text, unless
        ``skip_bad``.
        """
        self._lines = source.lines
        furthest = 0

        def tell(size: int) -> None:  # `_whole` may read a file twice
            nonlocal furthest
            furthest = max(furthest, size)
            on_bytes(furthest)

        with self._skipping(source.name):
            yield from self._read(PackedFile(source.name, _kind(source.name), partial(open_source, source, tell)))
        if source.size:
            on_bytes(source.size)

    @contextlib.contextmanager
    def _skipping(self, name: str) -> Iterator[None]:
        """Under ``skip_bad``, counts errors in ``name`` and what it holds; raises those of streams around it."""
        try:
            yield
        except UserError as error:
            if isinstance(error, StreamError) and not error.name.startswith(name):
                raise
            self._on_bad(error)

    def _on_bad(self, error: UserError) -> None:
        if not self.config.skip_bad or isinstance(error, WorkError):
            raise error
        self.skipped.add(error)

    def _read(self, file: PackedFile) -> Iterator[Chunk]:
        if file.depth > DEPTH:
            raise UserError(f"{file.name} is packed more than {DEPTH} levels deep", "unpack it, and give the files")
        ending = "." + file.kind.rpartition(".")[2]
        if ending in UNPACK:
            yield from self._read(file.unpacked(ending))
        elif ending == ".zip":
            yield from self._members(zip_members(file))
        elif ending == ".tar":
            yield from self._members(tar_members(file))
        elif ending in RECORDS or self._only_records:
            yield from self._records(file, ending)
        elif self.config.skip_bad:
            yield from self._whole(file)
        else:
            yield from (chunk for chunk in self._plain(file) if chunk is not None)

    def _members(self, members: Iterator[PackedFile]) -> Iterator[Chunk]:
        with contextlib.closing(members):  # type: ignore[type-var]
            for member in members:
                with self._skipping(member.name):
                    yield from self._read(member)

    def _records(self, file: PackedFile, ending: str) -> Iterator[Chunk]:
        encoding = self._utf8 if ending == ".parquet" else self._encoding
        with opened_seekable(file) if ending == ".parquet" else contextlib.closing(file.open()) as stream:
            if encoding.wide:  # lines are split as bytes
                blocks = (block.encode() for block in encoding.blocks(file.name, stream))
                stream, encoding = ByteStream(_Blocks(blocks), partial(damaged, file.name)), self._utf8
            kind = RECORDS.get(ending, formats.JSONLines)
            texts = kind(file.name, stream, self._form, encoding, self._on_bad).documents()
            if self._lines:
                yield from filter(None, chunks_of(text or " \n" for text in texts))  # WikiText's blank lines
            else:
                size = sys.maxsize if self._only_records else LENGTH
                for text in texts:
                    for at in range(0, len(text), size):
                        yield Chunk(text[at : at + size], at == 0)

    def _plain(self, file: PackedFile) -> Iterator[Chunk | None]:
        """Yields the chunks of a plain text's documents; None after each that is whole."""
        with contextlib.closing(file.open()) as stream:
            blocks = self._encoding.blocks(file.name, stream)
            separator = self.config.split_on
            yield from chunks_of(blocks if separator is None else split_at(blocks, separator))

    def _whole(self, file: PackedFile) -> Iterator[Chunk]:
        """Yields the chunks of the documents before the first error, then raises it. Reads the file twice."""
        file = file if file.reopenable else file.spooled()
        whole, error, replaced = 0, None, self._encoding.replaced
        try:
            for chunk in self._plain(file):
                whole += chunk is None
        except UserError as bad:
            error = bad
        self._encoding.replaced = replaced
        for chunk in self._plain(file) if whole else ():
            if chunk is not None:
                yield chunk
                continue
            whole -= 1
            if not whole:
                break
        if error is not None:
            raise error


class _Blocks:
    """Blocks of bytes as a file object."""

    def __init__(self, blocks: Generator[bytes, None, None]) -> None:
        self.blocks = blocks
        self.close = blocks.close
        self.rest = b""

    def read(self, size: int, /) -> bytes:
        block = self.rest or next(self.blocks, b"")
        self.rest = block[size:]
        return block[:size]


def _kind(name: str) -> str:
    kind = name.lower()
    return kind.partition("?")[0].partition("#")[0] if "://" in kind else kind


def is_plain(source: Source) -> bool:
    """Whether a source is plain text as stored: one document as long as the file, unless it is to be split."""
    ending = "." + _kind(source.name).rpartition(".")[2]
    return ending not in {*UNPACK, *RECORDS, ".zip", ".tar"}


def has_records(source: Source) -> bool:
    """Whether a source is a file of records, packed or not. Archives may hold anything."""
    kind = _kind(source.name)
    while (ending := "." + kind.rpartition(".")[2]) in UNPACK:
        kind = kind.removesuffix(ending) + UNPACK[ending][1]
    return ending in RECORDS
