"""Sources → documents, whatever they are packed in, without ever holding a whole file.

A file goes through its endings from the outermost on: ``.gz`` and ``.zst`` are unpacked, archives give their members,
tables and JSON lines the values of a field; anything else is plain text.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial

from gpt.config import ReadConfig
from gpt.errors import UserError, WorkError
from gpt.text import archives, pieces, records
from gpt.text.characters import Characters
from gpt.text.source import Piece, Skipped, Source
from gpt.text.streams import UNPACK, Blocks, File, OnBytes, Stream, StreamError, any_order, damaged, of_source, spooled

DEPTH = 8  # wrappings that are unwrapped; an archive may hold itself

Texts = Callable[[str, Stream, str, Characters, records.OnBad], Iterator[str]]
RECORDS: dict[str, Texts] = {
    ".jsonl": records.jsonl,
    ".ndjson": records.jsonl,
    ".csv": partial(records.table, delimiter=","),
    ".tsv": partial(records.table, delimiter="\t"),
    ".parquet": records.parquet,
}


def _nobody(size: int) -> None:
    """Listens to no progress."""


class Reader:
    """Reads documents as a `ReadConfig` says, and counts what was replaced and what was left out."""

    records: Mapping[str, Texts] = RECORDS

    def __init__(self, config: ReadConfig) -> None:
        if config.split_on is not None and "\n" in config.split_on:
            raise UserError("--split-on has a line break in it", "give one line, without its end")
        self.config = config
        self._characters = Characters(config.encoding, config.errors)
        self._utf8 = Characters("utf-8", config.errors)  # for formats that leave no choice
        self._skipped = Skipped()
        self._lines = False  # of the source that is read

    @property
    def replaced(self) -> int:
        """How many times U+FFFD was written for bytes that are not of the encoding."""
        return self._characters.replaced + self._utf8.replaced

    @property
    def skipped(self) -> int:
        """How many files, members, lines and rows were left out."""
        return self._skipped.count

    @property
    def skipped_examples(self) -> list[str]:
        """Why, for the first few of them."""
        return self._skipped.examples

    def documents(self, source: Source, on_bytes: OnBytes = _nobody) -> Iterator[Piece]:
        """The documents of a source, none of them empty, in pieces.

        The first piece of each holds all of it or at least `pieces.HEAD` characters. ``on_bytes`` hears how many of
        the source's bytes were read so far. Raises `UserError` for what is damaged or no text, unless ``skip_bad``.
        """
        self._lines = source.lines
        furthest = 0

        def tell(size: int) -> None:  # what is read a second time is no news
            nonlocal furthest
            furthest = max(furthest, size)
            on_bytes(furthest)

        with self._skipping(source.name):
            yield from self._read(File(source.name, _kind(source.name), partial(of_source, source, tell)))
        if source.size:
            on_bytes(source.size)

    @contextlib.contextmanager
    def _skipping(self, name: str) -> Iterator[None]:
        """Counts what cannot be read below ``name``, under ``skip_bad``; what breaks off around it is raised."""
        try:
            yield
        except UserError as error:
            if isinstance(error, StreamError) and not error.name.startswith(name):
                raise
            self._on_bad(error)

    def _on_bad(self, error: UserError) -> None:
        if not self.config.skip_bad or isinstance(error, WorkError):
            raise error
        self._skipped.add(error)

    def _read(self, file: File) -> Iterator[Piece]:
        if file.depth > DEPTH:
            raise UserError(f"{file.name} is wrapped more than {DEPTH} times", "unpack it, and give the files")
        ending = "." + file.kind.rpartition(".")[2]
        if ending in UNPACK:
            yield from self._read(file.unpacked(ending))
        elif ending == ".zip":
            yield from self._members(archives.zip_members(file))
        elif ending == ".tar":
            yield from self._members(archives.tar_members(file))
        elif ending in RECORDS:
            yield from self._records(file, ending)
        elif self.config.skip_bad:
            yield from self._whole(file)
        else:
            yield from (piece for piece in self._plain(file) if piece is not None)

    def _members(self, members: Iterator[File]) -> Iterator[Piece]:
        with contextlib.closing(members):  # type: ignore[type-var]
            for member in members:
                with self._skipping(member.name):
                    yield from self._read(member)

    def _records(self, file: File, ending: str) -> Iterator[Piece]:
        characters = self._utf8 if ending == ".parquet" else self._characters
        with any_order(file) if ending == ".parquet" else contextlib.closing(file.open()) as stream:
            if characters.wide:  # lines are found as bytes
                blocks = (block.encode() for block in characters.blocks(file.name, stream))
                stream, characters = Stream(Blocks(blocks), partial(damaged, file.name)), self._utf8
            texts = self.records[ending](file.name, stream, self.config.field, characters, self._on_bad)
            if self._lines:
                yield from filter(None, pieces.pieces(text or " \n" for text in texts))  # WikiText's blank lines
            else:
                yield from pieces.whole(texts)

    def _plain(self, file: File) -> Iterator[Piece | None]:
        """A plain text's documents; None after each that is whole."""
        with contextlib.closing(file.open()) as stream:
            blocks = self._characters.blocks(file.name, stream)
            separator = self.config.split_on
            yield from pieces.pieces(blocks if separator is None else pieces.split(blocks, separator))

    def _whole(self, file: File) -> Iterator[Piece]:
        """Those documents of a plain text that are whole: a file with a long one is read twice."""
        with contextlib.ExitStack() as stack:
            if not file.again:
                file = stack.enter_context(spooled(file))
            done, held = 0, None
            replaced = self._characters.replaced
            first = self._plain(file)
            for piece in first:
                if piece is not None and held is not None:
                    break  # a long one
                if piece is None and held is not None:
                    yield held
                    done += 1
                held = piece
            else:
                return
            whole, error = done, None
            try:
                for piece in first:
                    whole += piece is None
            except UserError as bad:
                error = bad
            self._characters.replaced = replaced
            yield from _between(self._plain(file), done, whole)
            if error is not None:
                raise error


def _between(documents: Iterator[Piece | None], start: int, end: int) -> Iterator[Piece]:
    """The pieces of documents ``start`` to ``end``, as slices count them."""
    number = 0
    for piece in documents:
        if number == end:
            return
        if piece is None:
            number += 1
        elif number >= start:
            yield piece


def _kind(name: str) -> str:
    kind = name.lower()
    return kind.partition("?")[0].partition("#")[0] if "://" in kind else kind


def is_plain(source: Source) -> bool:
    """Whether a source is plain text as it is stored: one document, as long as the file, unless it is to be split."""
    ending = "." + _kind(source.name).rpartition(".")[2]
    return ending not in {*UNPACK, *RECORDS, ".zip", ".tar"}
