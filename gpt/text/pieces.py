"""Blocks of text → documents → pieces."""

from collections.abc import Iterable, Iterator

from gpt.text.source import Piece

HEAD = 2**16  # characters; a document's first piece holds so many, or all of it
LENGTH = 2**20  # characters of a piece, about


def split(blocks: Iterable[str], separator: str) -> Iterator[str | None]:
    """The text between lines that equal ``separator`` (a carriage return at their end apart); None: a document ends."""
    needle = "\n" + separator
    held = "\n"  # its first character was passed on, or stands for the line break before the first line
    for block in blocks:
        text = held + block
        start = min(1, len(held))  # text[:start] was passed on
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


def pieces(parts: Iterable[str | None]) -> Iterator[Piece | None]:
    """The pieces of documents, of which None ends each but the last one; None after each that is whole."""
    held: list[str] = []
    size, begins = 0, True
    for part in parts:
        if part is not None:
            held.append(part)
            size += len(part)
        if size and (part is None or size >= (HEAD if begins else LENGTH // 2)):
            yield Piece("".join(held), begins)
            held, size, begins = [], 0, False
        if part is None and not begins:
            yield None
            begins = True
    if size:
        yield Piece("".join(held), begins)
    if size or not begins:
        yield None


def whole(texts: Iterable[str]) -> Iterator[Piece]:
    """The pieces of documents that are there as a whole; empty ones are none."""
    for text in texts:
        if 0 < len(text) <= LENGTH:
            yield Piece(text, True)
        else:
            yield from (Piece(text[at : at + LENGTH], at == 0) for at in range(0, len(text), LENGTH))
