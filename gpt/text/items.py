"""The text of a group of sources as items, the portions in which it is encoded: the same ones each time it is read."""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import groupby

from gpt.text.boundaries import parts
from gpt.text.corpus import Corpus
from gpt.text.readers import Reader
from gpt.text.source import Piece, Source, utf8_size
from gpt.text.tokens import Side, SourceRecord

PIECE = 2**18  # characters of a long document that are encoded at once
ITEM = 2**19  # characters of an item …
ITEM_DOCUMENTS = 4096  # … in so many texts at most

OnBytes = Callable[[int, int], None]  # told a source's number and how far its bytes are read


@dataclass
class Item:
    """Texts to be encoded at once, each with whether it begins a document and which side it is for."""

    texts: list[str] = field(default_factory=list)
    begins: list[bool] = field(default_factory=list)
    sides: list[Side] = field(default_factory=list)


@dataclass
class Mark:
    """Where an item ends: all that must be known to go on after it."""

    group: int
    items: int  # of the group, this one included
    last: bool = False  # of the group
    bytes: dict[Side, int] = field(default_factory=lambda: {"train": 0, "val": 0})  # of the item's text
    sources: list[SourceRecord] = field(default_factory=list)  # that end in the item
    counts: dict[str, int] = field(default_factory=dict)  # of the group so far


def read_items(corpus: Corpus, group: int, pattern: str, on_bytes: OnBytes) -> Iterator[tuple[Item, Mark]]:
    """The items of a group, in order. The last one may be empty."""
    reader = Reader(corpus.reading)
    item, mark, size, cuts = Item(), Mark(group, 1), 0, 0

    def counts() -> dict[str, int]:
        return {"replaced": reader.replaced, "skipped": reader.skipped, "cut_pieces": cuts}

    for number in corpus.groups[group]:
        source = _Source(corpus, number, reader, on_bytes)
        for text, begins, side, cut in cut_documents(source.halves(), pattern):
            item.texts.append(text)
            item.begins.append(begins)
            item.sides.append(side)
            mark.bytes[side] += utf8_size(text)
            size += len(text)
            cuts += cut
            if size >= ITEM or len(item.texts) >= ITEM_DOCUMENTS:
                mark.counts = counts()
                yield item, mark
                item, mark, size = Item(), Mark(group, mark.items + 1), 0
        mark.sources.append(source.record(group))
    mark.counts, mark.last = counts(), True
    yield item, mark


def cut_documents(halves: Iterator[tuple[Piece, bool]], pattern: str) -> Iterator[tuple[str, bool, Side, bool]]:
    """Documents in texts that can be encoded one by one: each with whether it begins a document, its side, and whether
    a token's piece had to be cut at its end."""
    number = 0

    def document(half: tuple[Piece, bool]) -> tuple[int, Side]:
        nonlocal number
        piece, held_out = half
        number += piece.begins
        return number, "val" if held_out else "train"

    for (_, side), pieces in groupby(halves, document):
        chunks = (piece.text for piece, _ in pieces)
        for i, (text, cut) in enumerate(parts(chunks, pattern, PIECE)):
            yield text, i == 0, side, cut


class _Source:
    """A source while it is read: its text's sum, bytes and documents."""

    def __init__(self, corpus: Corpus, number: int, reader: Reader, on_bytes: OnBytes) -> None:
        self.source: Source = corpus.sources[number]
        self.corpus, self.number, self.reader, self.on_bytes = corpus, number, reader, on_bytes
        self.documents = self.bytes = 0
        self.sum = hashlib.sha256()

    def halves(self) -> Iterator[tuple[Piece, bool]]:
        return iter(self.corpus.halve(self._counted(), self.number))

    def _counted(self) -> Iterator[Piece]:
        for piece in self.reader.documents(self.source, lambda position: self.on_bytes(self.number, position)):
            data = piece.text.encode()
            self.sum.update(data)
            self.bytes += len(data)
            self.documents += piece.begins
            yield piece

    def record(self, group: int) -> SourceRecord:
        source = self.source
        return SourceRecord(
            group, source.name, source.size, source.time, self.documents, self.bytes, self.sum.hexdigest()
        )
