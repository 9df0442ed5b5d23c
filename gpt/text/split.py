"""What is trained on and what is held out."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from gpt.errors import UserError

HASHED_SPLIT_FROM = 200  # documents; from here on a document's own hash decides where it goes


@dataclass(frozen=True)
class Document:
    """A piece of text that stands by itself: a file, or an entry of a corpus; ``name`` says where it came from."""

    name: str
    text: str


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
