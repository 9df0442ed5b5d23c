"""Bytes → characters, exactly; where that cannot be done, the byte and the line it stands in."""

import codecs
import threading
from collections.abc import Iterator

from gpt.errors import UserError
from gpt.text.streams import Stream, reason

BLOCK = 2**18  # bytes decoded at once; more is slower, since memory for it is fetched from the system each time


class _Count(threading.local):
    replaced = 0


_count = _Count()


def _replace(error: UnicodeError) -> tuple[str | bytes, int]:
    _count.replaced += 1
    return codecs.replace_errors(error)


codecs.register_error("gpt.replace", _replace)  # "replace", counted: U+FFFD may stand in a text of its own accord


class Characters:
    """A way to read bytes: an encoding, and what becomes of bytes that are not of it. ``replaced`` counts these."""

    def __init__(self, encoding: str, errors: str) -> None:
        try:
            b"a".decode(encoding)
        except LookupError:
            raise UserError(f'"{encoding}" is no encoding of text', "utf-8, latin-1, cp1252, utf-16 …") from None
        except UnicodeError:
            pass  # a unit is longer than a byte
        self.encoding = encoding
        self.errors = "gpt.replace" if errors == "replace" else "strict"
        self.replaced = 0
        name = codecs.lookup(encoding).name
        self.is_utf8 = name == "utf-8"
        self.wide = name.startswith(("utf-16", "utf-32"))  # a line break and most else has zero bytes in it

    def decode(self, data: bytes) -> str:
        """All of ``data``. Raises UnicodeDecodeError under "strict"."""
        try:
            return data.decode(self.encoding)
        except UnicodeDecodeError:
            if self.errors == "strict":
                raise
        before = _count.replaced
        text = data.decode(self.encoding, self.errors)
        self.replaced += _count.replaced - before
        return text

    def blocks(self, name: str, stream: Stream) -> Iterator[str]:
        """The text of a stream, a block at a time; before an error, all that comes before it."""
        decoder = codecs.getincrementaldecoder(self.encoding)(self.errors)
        offset, line = 0, 1  # of the block's first byte
        block = self._first(name, stream)
        while True:
            zero = -1 if self.wide else block.find(b"\0")
            text, bad = self._as_far_as_it_goes(name, decoder, block if zero < 0 else block[:zero], final=not block)
            text, found, _ = text.partition("\0") if self.wide else (text, "", "")
            if text:
                yield text
            line += text.count("\n")
            if zero >= 0:
                raise _zero(name, f"byte at offset {offset + zero:,}")
            if found:
                raise _zero(name, f"character in line {line:,}")
            offset += len(block)
            if bad is not None:
                raise self.error(name, bad, offset - len(bad.object) + bad.start, line)
            if not block:
                return
            block = stream.read(BLOCK)

    def _first(self, name: str, stream: Stream) -> bytes:
        block = stream.read(BLOCK)
        while len(block) < 2 and (more := stream.read(BLOCK)):
            block += more
        if self.is_utf8 and block[:2] in (b"\xff\xfe", b"\xfe\xff"):
            raise UserError(f"{name} is UTF-16, not UTF-8", "say so: --encoding utf-16")
        return block

    def _as_far_as_it_goes(
        self, name: str, decoder: codecs.IncrementalDecoder, block: bytes, final: bool
    ) -> tuple[str, UnicodeDecodeError | None]:
        """Characters up to the first byte that is none, and what is wrong with that."""
        state, before = decoder.getstate(), _count.replaced
        try:
            text = decoder.decode(block, final)
            self.replaced += _count.replaced - before
            return text, None
        except UnicodeDecodeError as error:
            decoder.setstate(state)  # error.object: what was left of the block before, and this one
            good = len(block) - len(error.object) + error.start
            return decoder.decode(block[: max(0, good)]), error
        except UnicodeError as error:
            raise UserError(f"{name} is not {self.shown}: {reason(error)}", self.hint) from None

    @property
    def shown(self) -> str:
        """The encoding as a user knows it."""
        return "UTF-8" if self.is_utf8 else self.encoding

    @property
    def hint(self) -> str:
        """What to do about bytes of another encoding."""
        other = "if it is Latin-1: --encoding latin-1" if self.is_utf8 else "--encoding says what it is"
        return f"{other}; or --errors replace, or --skip-bad"

    def error(self, name: str, error: UnicodeDecodeError, offset: int, line: int) -> UserError:
        """The first byte that is not of the encoding, and where it stands."""
        byte = error.object[error.start]
        where = f"byte 0x{byte:02x} at offset {offset:,}, line {line:,}"
        return UserError(f"{name} is not {self.shown}: {where}", self.hint)


def _zero(name: str, where: str) -> UserError:
    return UserError(
        f"{name} is no text: it has a zero {where}", "give plain text, or leave such files out: --skip-bad"
    )
