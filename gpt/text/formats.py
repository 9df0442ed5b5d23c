"""Bytes → text: an encoding, and the values of one field in JSON lines, CSV and Parquet."""

import codecs
import csv
import io
import json
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from gpt.errors import UserError, WorkError
from gpt.text.unpack import BUFFER, ByteStream, damaged, reason

BLOCK = 2**18  # bytes decoded at once; more is slower, since the system then provides new memory for each block


class _Count(threading.local):
    replaced = 0


_count = _Count()


def _replace(error: UnicodeError) -> tuple[str | bytes, int]:
    _count.replaced += 1
    return codecs.replace_errors(error)


codecs.register_error("gpt.replace", _replace)  # counts, since U+FFFD may also stand in the text itself


class TextEncoding:
    """An encoding, and what to do with bytes that are invalid in it. ``replaced`` counts those that were replaced."""

    def __init__(self, encoding: str, errors: str) -> None:
        try:
            b"a".decode(encoding)
        except LookupError:
            raise UserError(f'"{encoding}" is no encoding of text', "utf-8, latin-1, cp1252, utf-16 …") from None
        except UnicodeError:
            pass  # a unit is longer than a byte
        self.name = encoding
        self.errors = "gpt.replace" if errors == "replace" else "strict"
        self.replaced = 0
        codec = codecs.lookup(encoding).name
        self.is_utf8 = codec == "utf-8"
        self.wide = codec.startswith(("utf-16", "utf-32"))  # most characters, line breaks too, have zero bytes

    def decode(self, data: bytes) -> str:
        """Decodes all of ``data``. Raises UnicodeDecodeError under "strict"."""
        try:
            return data.decode(self.name)
        except UnicodeDecodeError:
            if self.errors == "strict":
                raise
        before = _count.replaced
        text = data.decode(self.name, self.errors)
        self.replaced += _count.replaced - before
        return text

    def blocks(self, name: str, stream: ByteStream) -> Iterator[str]:
        """Yields the text of a stream block by block, up to the first bad byte, which then raises `UserError`."""
        decoder = codecs.getincrementaldecoder(self.name)(self.errors)
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

    def _first(self, name: str, stream: ByteStream) -> bytes:
        block = stream.read(BLOCK)
        while len(block) < 2 and (more := stream.read(BLOCK)):
            block += more
        if self.is_utf8 and block[:2] in (b"\xff\xfe", b"\xfe\xff"):
            raise UserError(f"{name} is UTF-16, not UTF-8", "say so: --encoding utf-16")
        return block

    def _as_far_as_it_goes(
        self, name: str, decoder: codecs.IncrementalDecoder, block: bytes, final: bool
    ) -> tuple[str, UnicodeDecodeError | None]:
        """Returns the characters before the first invalid byte, and the error there."""
        state, before = decoder.getstate(), _count.replaced
        try:
            text = decoder.decode(block, final)
            self.replaced += _count.replaced - before
            return text, None
        except UnicodeDecodeError as error:
            decoder.setstate(state)  # error.object: the rest of the block before, and this block
            good = len(block) - len(error.object) + error.start
            return decoder.decode(block[: max(0, good)]), error
        except UnicodeError as error:
            raise UserError(f"{name} is not {self.shown}: {reason(error)}", self.hint) from None

    @property
    def shown(self) -> str:
        """The encoding's name for messages."""
        return "UTF-8" if self.is_utf8 else self.name

    @property
    def hint(self) -> str:
        """The advice for bytes of another encoding."""
        other = "if it is Latin-1: --encoding latin-1" if self.is_utf8 else "--encoding says what it is"
        return f"{other}; or --errors replace, or --skip-bad"

    def error(self, name: str, error: UnicodeDecodeError, offset: int, line: int) -> UserError:
        """Returns the error for an invalid byte, with its place."""
        byte = error.object[error.start]
        where = f"byte 0x{byte:02x} at offset {offset:,}, line {line:,}"
        return UserError(f"{name} is not {self.shown}: {where}", self.hint)


def _zero(name: str, where: str) -> UserError:
    return UserError(
        f"{name} is no text: it has a zero {where}", "give plain text, or leave such files out: --skip-bad"
    )


MAX_RECORD = 64 * 2**20  # bytes of a line, characters of a CSV row
ROWS = 64  # of a Parquet file, read at once
_BOM = b"\xef\xbb\xbf"
_parse = json.JSONDecoder().raw_decode  # json.loads takes twice as long: it looks for white space around each value
_SURROGATE = re.compile("[\ud800-\udfff]")

ROLES = ("system", "user", "assistant")
OnBad = Callable[[UserError], None]  # raises the error, or counts it


def _lines(name: str, stream: ByteStream, on_bad: OnBad) -> Iterator[tuple[int, int, bytes]]:
    """Yields the number, the offset and the bytes of each line, its end included."""
    buffered = io.BufferedReader(stream, BUFFER)
    number, offset = 0, 0
    while line := buffered.readline(MAX_RECORD + 1):
        number += 1
        if len(line) <= MAX_RECORD:
            yield number, offset, line
        else:
            on_bad(_too_long(name, number))
            while line and not line.endswith(b"\n"):
                offset += len(line)
                line = buffered.readline(MAX_RECORD)
        offset += len(line)


def _too_long(name: str, line: int) -> UserError:
    return UserError(
        f"{name}, line {line:,}: longer than {MAX_RECORD:,} bytes", "cut it into several, or --skip-bad leaves it out"
    )


class _Bad(Exception):
    """An error in a line, with a hint; the caller adds the line's number."""


def jsonl(name: str, stream: ByteStream, field: str, encoding: TextEncoding, on_bad: OnBad) -> Iterator[str]:
    """Yields the string at the key ``field`` of each line's object."""
    hint = "--field names the key that holds the text"
    return _objects(name, stream, encoding, on_bad, lambda record, number: _string(record, field, hint))


def pairs(name: str, stream: ByteStream, field: str, encoding: TextEncoding, on_bad: OnBad) -> Iterator[str]:
    """Yields the prompt, the completion and the place of each line's object, as a JSON list."""

    def pair(record: dict[str, Any], number: int) -> str:
        hint = '--pairs reads {"prompt": "…", "completion": "…"}, one a line'
        prompt, completion = (_string(record, key, hint, null=False) for key in ("prompt", "completion"))
        return json.dumps([prompt, completion, f"{name}, line {number:,}"], ensure_ascii=False)

    return _objects(name, stream, encoding, on_bad, pair)


def chats(name: str, stream: ByteStream, field: str, encoding: TextEncoding, on_bad: OnBad) -> Iterator[str]:
    """Yields the messages and the place of each line's object, as a JSON list."""

    def chat(record: dict[str, Any], number: int) -> str:
        hint = '--chat reads {"messages": [{"role": "user", "content": "…"}, …]}, one a line'
        messages = record.get("messages")
        if not isinstance(messages, list) or not all(isinstance(each, dict) for each in messages):
            raise _Bad('no list of objects "messages" in it', hint)
        found = [{key: _string(each, key, hint, null=False) for key in ("role", "content")} for each in messages]
        for role in (message["role"] for message in found):
            if role not in ROLES:
                raise _Bad(f"there is no role {role!r:.40}", f"roles are {', '.join(ROLES)}")
        if not any(message["role"] == "assistant" for message in found):
            raise _Bad("no message is the assistant's: there is nothing to learn", hint)
        return json.dumps([found, f"{name}, line {number:,}"], ensure_ascii=False)

    return _objects(name, stream, encoding, on_bad, chat)


def _objects(
    name: str, stream: ByteStream, encoding: TextEncoding, on_bad: OnBad, text_of: Callable[[dict[str, Any], int], str]
) -> Iterator[str]:
    """Yields ``text_of(object, number)`` for each line."""
    for number, offset, line in _lines(name, stream, on_bad):
        if number == 1 and line.startswith(_BOM):
            line, offset = line[len(_BOM) :], len(_BOM)
        try:
            text = encoding.decode(line).strip(" \t\r\n")
            if text:
                value = text_of(_object(text), number)
                if "\\" in text and not value.isascii():
                    value = _without_surrogates(value, encoding)
                yield value
        except UnicodeDecodeError as error:
            on_bad(encoding.error(name, error, offset + error.start, number))
        except _Bad as bad:
            on_bad(_at_line(name, number, bad))


def _at_line(name: str, line: int, bad: _Bad) -> UserError:
    message, hint = bad.args
    return UserError(f"{name}, line {line:,}: {message}", hint)


def _object(line: str) -> dict[str, Any]:
    try:
        record, end = _parse(line)
        if end < len(line):
            raise ValueError("there is more behind the object")
    except RecursionError:
        raise _Bad("JSON that is too deep", "--skip-bad leaves such lines out") from None
    except ValueError as error:
        raise _Bad(f"not JSON: {reason(error)}", "one object a line; --skip-bad leaves others out") from None
    if not isinstance(record, dict):
        raise _Bad("not a JSON object", "one object a line; --skip-bad leaves others out")
    return record


def _string(record: dict[str, Any], field: str, hint: str, null: bool = True) -> str:
    """Returns the string at a key; with ``null``, an empty one for null."""
    value = record.get(field, record)
    if value is record:
        raise _Bad(_missing(field, record, "keys")[0], hint)
    if value is None and null:
        return ""
    if not isinstance(value, str):
        raise _Bad(f'"{field}" is not a string', hint)
    return value


def _without_surrogates(value: str, encoding: TextEncoding) -> str:
    r"""A half of a surrogate pair, as ``"\ud800"`` gives, is no character, and cannot be written as UTF-8."""
    if not _SURROGATE.search(value):
        return value
    if encoding.errors == "strict":
        raise _Bad("half a surrogate pair is no character", "--errors replace, or --skip-bad")
    value, count = _SURROGATE.subn("\ufffd", value)
    encoding.replaced += count
    return value


def _missing(field: str, known: Iterable[Any], what: str) -> tuple[str, str]:
    """Returns the message and the hint for a field that is missing."""
    some = list(known)
    names = ", ".join(map(str, some[:20])) + (", …" if len(some) > 20 else "") or "none"
    return f'no "{field}" in it; its {what}: {names}', "--field names the one that holds the text"


def table(
    name: str, stream: ByteStream, field: str, encoding: TextEncoding, on_bad: OnBad, delimiter: str
) -> Iterator[str]:
    """Yields the values of a column of CSV; the first row names the columns."""
    rows = _Rows(name, _lines(name, stream, on_bad), encoding.name, delimiter).good(on_bad)
    line, header = next(rows, (0, [field]))
    if field not in header:
        raise _at_line(name, line, _Bad(*_missing(field, header, "columns")))
    column = header.index(field)
    for line, row in rows:
        try:
            if len(row) <= column:
                message = f'{len(row)} fields, and "{field}" is number {column + 1}'
                raise _Bad(message, "mend the row, or --skip-bad leaves it out")
            yield _cell(row[column], encoding)
        except _Bad as bad:
            on_bad(_at_line(name, line, bad))


class _Rows:
    """The rows of a CSV table. A row may span lines within quotes, of `MAX_RECORD` characters together."""

    def __init__(self, name: str, lines: Iterator[tuple[int, int, bytes]], encoding: str, delimiter: str) -> None:
        self.name, self.encoding = name, encoding
        self._lines = lines
        self._reader = csv.reader(self, delimiter=delimiter, strict=True)
        self._first = self._line = self._size = 0  # the row's first line, last line so far, and characters

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        """Returns the next line, for the parser. Unlike a generator, this continues after an error."""
        self._line, _, line = next(self._lines)
        self._first = self._first or self._line
        if self._line == 1:
            line = line.removeprefix(_BOM)
        # Invalid bytes are carried through: they matter only in the wanted field.
        text = line.decode(self.encoding, "surrogateescape")
        self._size += len(text)
        if self._size > MAX_RECORD:
            raise _too_long(self.name, self._line)
        return text

    def good(self, on_bad: OnBad) -> Iterator[tuple[int, list[str]]]:
        """Yields the rows that are not empty, each with the number of its first line."""
        while True:
            self._first = self._size = 0
            try:
                row = self._next_row()
            except UserError as error:
                on_bad(error)
                continue
            if row is None:
                return
            if row:
                yield self._first, row

    def _next_row(self) -> list[str] | None:
        limit = csv.field_size_limit(MAX_RECORD)  # a setting of the whole process: restored after each row
        try:
            return next(self._reader, None)
        except csv.Error as error:
            line, what = self._line, str(error)
            if what == "unexpected end of data":
                line, what = self._first, "a quote is never closed"
            message = f"{self.name}, line {line:,}: {what}"
            raise UserError(message, "mend it, or --skip-bad leaves it out") from None
        finally:
            csv.field_size_limit(limit)


def _cell(value: str, encoding: TextEncoding) -> str:
    if "\0" in value:
        raise _Bad("a zero byte is no text", "--skip-bad leaves such rows out")
    if value.isascii() or not _SURROGATE.search(value):
        return value
    try:
        return encoding.decode(value.encode(encoding.name, "surrogateescape"))
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise _Bad(f"not {encoding.shown}: byte 0x{byte:02x}", encoding.hint) from None


def parquet(name: str, stream: ByteStream, field: str, encoding: TextEncoding, on_bad: OnBad) -> Iterator[str]:
    """Yields the values of a column of strings. Raises `WorkError` without pyarrow."""
    try:
        import pyarrow as pa
        from pyarrow import parquet as pq
    except ImportError:
        raise WorkError(f"{name} needs the package pyarrow", "pip install 'gpt[parquet]'") from None
    row = 0
    try:
        about = pq.read_metadata(stream)
        _check_column(name, field, about.schema.to_arrow_schema())
        with pq.ParquetFile(stream, metadata=about, read_dictionary=[field]) as opened:
            for batch in opened.iter_batches(ROWS, columns=[field], use_threads=False):
                column = batch.column(batch.schema.get_field_index(field))
                if isinstance(column, pa.DictionaryArray):
                    column = column.dictionary_decode()
                for data in column.cast(pa.large_binary()).to_pylist():
                    row += 1
                    yield _utf8(name, row, data or b"", encoding, on_bad)
    except UserError:
        raise
    except Exception as error:  # pyarrow raises many kinds
        raise damaged(name, error) from None


def _check_column(name: str, field: str, schema: Any) -> None:
    import pyarrow as pa

    if field not in schema.names:
        message, hint = _missing(field, schema.names, "columns")
        raise UserError(f"{name}: {message}", hint)
    kind = schema.field(field).type
    plain = kind.value_type if pa.types.is_dictionary(kind) else kind
    strings = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view, pa.types.is_null)
    if not any(is_it(plain) for is_it in strings):
        raise UserError(f'{name}: "{field}" holds {kind}, not strings', "--field names the column that holds the text")


def _utf8(name: str, row: int, data: bytes, encoding: TextEncoding, on_bad: OnBad) -> str:
    where = f"{name}, row {row:,}"
    try:
        if len(data) <= MAX_RECORD:
            return encoding.decode(data)
        on_bad(UserError(f"{where}: longer than {MAX_RECORD:,} bytes", "cut it into several, or --skip-bad"))
    except UnicodeDecodeError as error:
        on_bad(UserError(f"{where}: not UTF-8: byte 0x{data[error.start]:02x}", "--errors replace, or --skip-bad"))
    return ""
