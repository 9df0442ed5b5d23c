"""Files, folders and standard input → documents, and the split into what is trained on and what is held out."""

import hashlib
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpt.errors import UserError, did_you_mean
from gpt.text import catalogue

DEFAULT = "pydocs"  # the corpus that is read where no text is given
HASHED_SPLIT_FROM = 200  # documents; from here on a document's own hash decides where it goes


@dataclass(frozen=True)
class Document:
    """A piece of text that stands by itself: a file, or an entry of a corpus; ``name`` says where it came from."""

    name: str
    text: str


@dataclass(frozen=True)
class Source:
    """One file, or catalogue entry, that was read, for the run's record."""

    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Corpus:
    """Documents and where they came from. ``name`` is what a run on them is called."""

    name: str
    documents: list[Document]
    sources: list[Source]

    @property
    def bytes(self) -> int:
        """Length of the whole text in UTF-8."""
        return sum(source.bytes for source in self.sources)


def read(texts: Sequence[str]) -> Corpus:
    """The documents of files, folders (recursive, sorted, hidden entries skipped), ``-`` (standard input) and names of
    the catalogue, each once, in the order given; of `DEFAULT` where none is.

    Raises `UserError` naming the file for anything that is no text.
    """
    documents: list[Document] = []
    sources: list[Source] = []
    for raw in [_raw(text) for text in dict.fromkeys(texts)] or [catalogue.read(DEFAULT)]:
        for name, data in raw:
            documents.append(Document(name, _decode(name, data)))
            sources.append(Source(name, len(data), hashlib.sha256(data).hexdigest()))
    if not any(document.text for document in documents):
        what = f"{texts[0]} is empty" if len(texts) == 1 else f"all of {', '.join(texts)} is empty"
        raise UserError(f"{what}: 0 characters", "give a file with some text in it")
    return Corpus(_run_name(texts[0]) if texts else DEFAULT, [d for d in documents if d.text], sources)


def _raw(text: str) -> Iterator[tuple[str, bytes]]:
    """Names and bytes of everything that one TEXT means. What is on disk comes before the catalogue's names."""
    path = Path(text)
    if text == "-":
        yield "stdin", sys.stdin.buffer.read()
    elif path.is_dir():
        yield from ((str(file), _bytes(file)) for file in _files(path))
    elif path.exists():
        yield text, _bytes(path)
    elif text in catalogue.names():
        yield from catalogue.read(text)
    elif "/" in text or "\\" in text or "." in text:
        raise UserError(f"there is no file {text}", "give a file, a folder, - for standard input, or a corpus by name")
    else:
        raise UserError(f'there is no file and no corpus called "{text}"', did_you_mean(text, catalogue.names()))


def _files(folder: Path) -> list[Path]:
    files = []
    for parent, folders, names in os.walk(folder, onerror=_cannot_list):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        paths = (Path(parent, name) for name in sorted(names) if not name.startswith("."))
        files += [path for path in paths if path.is_file()]  # no pipes and devices
    if not files:
        raise UserError(f"the folder {folder} has no files in it (hidden ones are skipped)")
    return files


def _cannot_list(error: OSError) -> None:
    raise UserError(f"cannot read the folder {error.filename}: {error.strerror or error}") from None


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from None


def _decode(name: str, data: bytes) -> str:
    """UTF-8 to text, exactly; a `UserError` names offset and line of the first byte that is not."""
    if data[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise UserError(f"{name} is UTF-16, not UTF-8", f"convert it: iconv -f UTF-16 -t UTF-8 {name} > utf8.txt")
    if b"\0" in data:
        offset = data.index(b"\0")
        raise UserError(f"{name} is no text: it has a zero byte at offset {offset:,}", "give plain UTF-8 text")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise UserError(
            f"{name} is not UTF-8: byte 0x{data[error.start]:02x} at offset {error.start:,}, line {line:,}",
            f"if it is Latin-1, convert it: iconv -f LATIN1 -t UTF-8 {name} > utf8.txt",
        ) from None


def _run_name(text: str) -> str:
    return "stdin" if text == "-" else Path(os.path.abspath(text)).stem or "text"


def split(documents: Sequence[Document], fraction: float, seed: int) -> tuple[list[Document], list[Document]]:
    """Training and held-out documents. Both keep their order; together they are the whole text.

    Fewer than `HASHED_SPLIT_FROM` documents: the last ``fraction`` of the characters' bytes is held out, cutting a
    document where it must. From there on each document goes by a hash of the seed and its own text, so that adding
    documents moves none. Never an empty side, unless ``fraction`` is 0.
    """
    if not 0 <= fraction < 1:
        raise UserError(f"val-fraction is {fraction}; it must lie in [0, 1)")
    if fraction == 0:
        return list(documents), []
    if len(documents) >= HASHED_SPLIT_FROM:
        train, held_out = _split_by_hash(documents, fraction, seed)
    else:
        train, held_out = _split_at_end(documents, fraction)
    if not train or not held_out:
        size = sum(len(document.text) for document in documents)
        raise UserError(
            f"the text is too short to hold {fraction:g} of it out: {size:,} character{'s' * (size != 1)}",
            "give more text, or --val-fraction 0 to hold nothing out",
        )
    return train, held_out


def _split_by_hash(documents: Sequence[Document], fraction: float, seed: int) -> tuple[list[Document], list[Document]]:
    shares = [_share(document, seed) for document in documents]
    bound = max(fraction, min(shares) * 1.0000001)  # at least one is held out
    train = [document for document, share in zip(documents, shares, strict=True) if share >= bound]
    held_out = [document for document, share in zip(documents, shares, strict=True) if share < bound]
    return train, held_out


def _share(document: Document, seed: int) -> float:
    """Where a document lies between 0 and 1, by a hash of the seed and its text."""
    digest = hashlib.sha256(f"{seed}\0{document.text}".encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def _split_at_end(documents: Sequence[Document], fraction: float) -> tuple[list[Document], list[Document]]:
    left = round(sum(len(d.text.encode()) for d in documents) * fraction)  # bytes still to be held out
    train = list(documents)
    held_out: list[Document] = []
    while left > 0 and train:
        last = train.pop()
        data = last.text.encode()
        if len(data) <= left:
            held_out.insert(0, last)
        else:
            head = data[: len(data) - left].decode("utf-8", "ignore")  # never inside a character
            train.append(Document(last.name, head))
            held_out.insert(0, Document(last.name, last.text[len(head) :]))
        left -= len(data)
    return [d for d in train if d.text], held_out
