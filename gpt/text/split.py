"""What is trained on and what is held out, decided while documents stream by.

Fewer than `HASHED_SPLIT_FROM` documents: the end of the bytes, in order, cutting a document where it must. From there
on each document goes by a hash of the seed and its own beginning, so that adding documents moves none.
"""

import hashlib
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

from gpt.config import ReadConfig
from gpt.errors import UserError
from gpt.text.pieces import HEAD
from gpt.text.readers import Reader, is_plain
from gpt.text.source import Piece, Source, utf8_size
from gpt.words import counted

HASHED_SPLIT_FROM = 200  # documents

Halved = Iterator[tuple[Piece, bool]]  # pieces, and whether each is held out


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

    def halve(self, pieces: Iterable[Piece], number: int) -> Halved:
        """The pieces of source ``number``, each with whether it is held out."""
        if self.by == "end":
            return self._at_end(pieces, self.starts[number])
        return self._by_hash(pieces) if self.by == "hash" else ((piece, False) for piece in pieces)

    def _by_hash(self, pieces: Iterable[Piece]) -> Halved:
        held_out = False
        for piece in pieces:
            if piece.begins:
                held_out = share(piece.text, self.seed) < self.bound
            yield piece, held_out

    def _at_end(self, pieces: Iterable[Piece], position: int) -> Halved:
        for piece in pieces:
            left = self.kept - position
            size = utf8_size(piece.text)
            position += size
            if left <= 0 or size <= left:
                yield piece, left <= 0
                continue
            head = piece.text.encode()[:left].decode("utf-8", "ignore")  # never inside a character
            if head:
                yield Piece(head, piece.begins), False
            yield Piece(piece.text[len(head) :], True), True


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

    def __init__(self, pieces: Iterable[Piece], total: int, limit: int) -> None:
        self.seen = self.taken = 0  # bytes of the text so far, and of what was chosen of them
        self._total, self._limit = total, limit
        self._chosen = self._choose(pieces)

    def __next__(self) -> str:
        return next(self._chosen)

    def _choose(self, pieces: Iterable[Piece]) -> Iterator[str]:
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
