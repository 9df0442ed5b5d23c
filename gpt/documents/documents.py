"""Reads sources as documents in chunks, unpacking compressed files and archives. Files are streamed.

File suffixes are processed from last to first: ``.gz`` and others are decompressed, archives yield members, JSON and
tables yield the values of a field, and the text of documents such as HTML and PDF is extracted. Other files are plain
text.
"""

import contextlib
import io
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from gpt.config.text import ReadConfig
from gpt.documents import formats
from gpt.documents.extract import Extractor, document_kind
from gpt.documents.formats import RecordForm, Records, TextEncoding, Value, text_form
from gpt.documents.unpack import (
    MEMBERS,
    UNPACK,
    OnBytes,
    PackedFile,
    Source,
    StreamError,
    open_seekable,
    open_source,
    temporary_file_errors,
)
from gpt.system.errors import UserError, WorkError


def utf8_size(text: str) -> int:
    """Returns the size of a text in UTF-8 bytes."""
    return len(text) if text.isascii() else len(text.encode())


@dataclass(frozen=True, slots=True)
class Chunk:
    """A part of a document. ``begins`` is True for the first part; the others follow in order."""

    text: str
    begins: bool


OnNote = Callable[[str], None]


@dataclass
class Skipped:
    """The number of files, members, lines and rows skipped by ``--skip-bad``. ``note`` is called with the first
    ``limit`` errors."""

    skip_bad: bool = False
    note: OnNote = lambda note: None
    limit: int = 10
    count: int = 0

    def add(self, error: UserError) -> None:
        """Counts an error. Raises it without ``skip_bad``, and always if a package is missing."""
        if not self.skip_bad or isinstance(error, WorkError):
            raise error
        self.count += 1
        if self.count <= self.limit:
            self.note(f"skipped: {error.message}")


MIN_FIRST_CHUNK = 2**16  # Minimum characters of a document's first chunk, unless the document is shorter.
CHUNK_LENGTH = 2**20  # Approximate characters of a chunk.


def split_at(blocks: Iterable[str], separator: str) -> Iterator[str | None]:
    """Yields the text between ``separator`` lines, and None for each separator."""
    separator_line = re.compile(rf"(?<=\n){re.escape(separator)}\n")
    pending = "\n"  # Either empty, or a line break (virtual or already yielded) and the text after it.
    for block in blocks:
        text = pending + block
        line_start = text.rfind("\n") + 1
        # The next block can make the last line a separator.
        safe_end = line_start if line_start and separator.startswith(text[line_start:]) else len(text)
        first_part, *parts = separator_line.split(text[:safe_end])
        if first_part := first_part[len(pending[:1]) :]:
            yield first_part
        for part in parts:
            yield None
            if part:
                yield part
        pending = text[line_start - 1 :] if safe_end == line_start else ""
    if pending[1:] == separator:
        yield None
    elif pending[1:]:
        yield pending[1:]


def make_chunks(parts: Iterable[str | None]) -> Iterator[Chunk | None]:
    """Yields the chunks of documents, and None after each complete document. In ``parts``, None ends a document."""
    pending: list[str] = []
    size, begins = 0, True
    for part in parts:
        if part is not None:
            pending.append(part)
            size += len(part)
        if size and (part is None or size >= (MIN_FIRST_CHUNK if begins else CHUNK_LENGTH // 2)):
            yield Chunk("".join(pending), begins)
            pending, size, begins = [], 0, False
        if part is None and not begins:
            yield None
            begins = True
    if size:
        yield Chunk("".join(pending), begins)
    if size or not begins:
        yield None


T = TypeVar("T")
ReadFile = Callable[[PackedFile, str], Iterator[T]]  # Reads an unpacked file, given its suffix.
MAX_HELD = 2**24  # Bytes of a document that waits for its end in memory.
# Formats that gpt does not read, and how to convert them.
UNSUPPORTED = {
    ".doc": "save it as .docx (LibreOffice)",
    **dict.fromkeys((".bz2", ".xz", ".7z", ".rar"), "unpack it, or compress it with gzip or zstd instead"),
    **dict.fromkeys((".fb2", ".odt", ".rtf"), "convert it: pandoc FILE -t plain --wrap=none -o FILE.txt"),
}
MAX_DEPTH = 8  # Maximum nesting of formats. An archive can contain itself.

RECORD_FORMATS: dict[str, type[Records[Any]]] = {
    ".jsonl": formats.JSONLines,
    ".ndjson": formats.JSONLines,
    ".jsonlines": formats.JSONLines,
    ".json": formats.JSONFile,
    ".csv": formats.Table,
    ".tsv": formats.TSVTable,
    ".parquet": formats.Parquet,
}


class Reader:
    """Reads documents or records according to a `ReadConfig`. Counts replaced bytes and skipped items."""

    def __init__(self, config: ReadConfig, skipped: Skipped | None = None) -> None:
        if config.split_on is not None and "\n" in config.split_on:
            raise UserError("--split-on contains a line break", "give a single line without the line break")
        self.config = config
        self._encoding = TextEncoding(config.encoding, config.errors)
        self.skipped = skipped or Skipped(config.skip_bad)
        self._extractor = Extractor()

    @property
    def replaced(self) -> int:
        """How many U+FFFD characters replaced invalid bytes."""
        return self._encoding.replaced

    def documents(self, source: Source, on_bytes: OnBytes = lambda size: None) -> Iterator[Chunk]:
        """Yields the documents of a source in nonempty chunks. A record's text is the string at ``--field``.

        A document's first chunk has at least `MIN_FIRST_CHUNK` characters, unless the document is shorter. ``on_bytes``
        is called with the source bytes read so far. Raises `UserError` for damaged or non-text files, unless
        ``skip_bad``.
        """
        return self._open(source, partial(self._read_text, source.lines), on_bytes)

    def records(self, source: Source, form: RecordForm[Value]) -> Iterator[Value]:
        """Yields what ``form`` makes of each record of a source. Files with an unknown suffix are JSON lines. Raises
        `UserError` for damaged files and records, unless ``skip_bad``."""
        return self._open(source, partial(self._read_records, form))

    def _open(self, source: Source, read: ReadFile[T], on_bytes: OnBytes = lambda size: None) -> Iterator[T]:
        """Yields what ``read`` yields of each file of a source, unpacked."""
        with self._skipping(source.name):
            open_stream = partial(open_source, source, on_bytes)
            yield from self._unpack(PackedFile(source.name, _normalize_name(source.name), open_stream), read)
        if source.size:
            on_bytes(source.size)

    @contextlib.contextmanager
    def _skipping(self, name: str) -> Iterator[None]:
        """With ``skip_bad``, counts errors inside ``name``. Errors of enclosing streams propagate."""
        try:
            yield
        except UserError as error:
            if isinstance(error, StreamError) and not error.name.startswith(name):
                raise
            self.skipped.add(error)

    def _unpack(self, file: PackedFile, read: ReadFile[T]) -> Iterator[T]:
        if file.depth > MAX_DEPTH:
            raise UserError(f"{file.name} is packed more than {MAX_DEPTH} levels deep", "unpack it, and give the files")
        ending = "." + file.kind.rpartition(".")[2]
        if ending in UNPACK:
            yield from self._unpack(file.unpack(ending), read)
        elif ending in MEMBERS:
            with contextlib.closing(MEMBERS[ending](file)) as members:  # type: ignore[type-var]
                for member in members:
                    with self._skipping(member.name):
                        yield from self._unpack(member, read)
        elif ending in UNSUPPORTED:
            hint = f"{UNSUPPORTED[ending]}; or skip it with --skip-bad"
            raise UserError(f"{file.name}: gpt does not read {ending} files", hint)
        else:
            yield from read(file, ending)

    def _read_text(self, joins_rows: bool, file: PackedFile, ending: str) -> Iterator[Chunk]:
        if ending in RECORD_FORMATS:
            texts = self._read_records(text_form(self.config.field), file, ending)
            if joins_rows:
                yield from filter(None, make_chunks(text or " \n" for text in texts))  # Keep WikiText's blank lines.
            else:
                yield from _cut(texts)
        elif (kind := document_kind(file.kind)) is not None:
            with contextlib.closing(file.open()) as stream:
                text, replaced = self._extractor.extract(file.name, kind, stream, self.config)
            self._encoding.replaced += replaced
            yield from _cut([text])
        elif self.config.skip_bad:
            yield from self._read_complete(file)
        else:
            yield from (chunk for chunk in self._read_plain(file) if chunk is not None)

    def _read_records(self, form: RecordForm[Value], file: PackedFile, ending: str) -> Iterator[Value]:
        with open_seekable(file) if ending == ".parquet" else contextlib.closing(file.open()) as stream:
            record_type = RECORD_FORMATS.get(ending, formats.JSONLines)
            yield from record_type(file.name, stream, form, self._encoding, self.skipped.add).values()

    def _read_plain(self, file: PackedFile) -> Iterator[Chunk | None]:
        """Yields the chunks of plain-text documents, and None after each complete document."""
        with contextlib.closing(file.open()) as stream:
            blocks = _normalize_line_breaks(self._encoding.blocks(file.name, stream))
            separator = self.config.split_on
            yield from make_chunks(blocks if separator is None else split_at(blocks, separator))

    def _read_complete(self, file: PackedFile) -> Iterator[Chunk]:
        """Yields the complete documents before the first error: each document waits for its end, on disk if it is
        long."""
        sizes: list[int] = []
        with (
            temporary_file_errors(),
            tempfile.SpooledTemporaryFile(MAX_HELD, "w+", encoding="utf-8", newline="") as held,
        ):
            for chunk in self._read_plain(file):
                if chunk is not None:
                    held.write(chunk.text)
                    sizes.append(len(chunk.text))
                    continue
                held.seek(0)
                yield from (Chunk(held.read(size), i == 0) for i, size in enumerate(sizes))
                held.seek(0)
                held.truncate()
                sizes.clear()


def _cut(texts: Iterable[str]) -> Iterator[Chunk]:
    for text in texts:
        for start in range(0, len(text), CHUNK_LENGTH):
            yield Chunk(text[start : start + CHUNK_LENGTH], start == 0)


def _normalize_line_breaks(blocks: Iterable[str]) -> Iterator[str]:
    r"""Replaces ``\r\n`` and ``\r`` by ``\n``, as Python does in text files."""
    decoder = io.IncrementalNewlineDecoder(None, translate=True)
    yield from map(decoder.decode, blocks)
    yield decoder.decode("", final=True)


def _normalize_name(name: str) -> str:
    lower_name = name.lower()
    return lower_name.partition("?")[0].partition("#")[0] if "://" in lower_name else lower_name


def is_plain(source: Source) -> bool:
    """Whether a source is uncompressed plain text. Without ``--split-on``, such a source is a single document."""
    ending = "." + _normalize_name(source.name).rpartition(".")[2]
    known = {*UNPACK, *RECORD_FORMATS, *MEMBERS, *UNSUPPORTED}
    return ending not in known and document_kind(_normalize_name(source.name)) is None


def has_records(source: Source) -> bool:
    """Whether a source is a file of records, compressed or not. Archives do not count."""
    kind = _normalize_name(source.name)
    while (ending := "." + kind.rpartition(".")[2]) in UNPACK:
        kind = kind.removesuffix(ending) + UNPACK[ending][1]
    return ending in RECORD_FORMATS
