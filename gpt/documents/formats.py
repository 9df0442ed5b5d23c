"""Decodes bytes to text, and reads records from JSON lines, JSON, CSV, TSV and Parquet."""

import codecs
import contextlib
import csv
import io
import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

from gpt.documents.unpack import BUFFER, ByteStream, damage_error, reason, translate_errors
from gpt.system.distribution import install_extra
from gpt.system.errors import UserError, WorkError
from gpt.system.words import counted

BLOCK = 2**18  # Bytes. Larger blocks are slower, because each needs new memory from the system.


_WIDE_BOMS = {  # UTF-32 must be first, because its little-endian mark starts with UTF-16's.
    codecs.BOM_UTF32_LE: "utf-32", codecs.BOM_UTF32_BE: "utf-32", codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}  # fmt: skip


_NO_TEXT = ("raw-unicode-escape", "unicode-escape", "utf-7")  # They can decode to unpaired surrogates.


class TextEncoding:
    """A text encoding with its error handling. ``replaced`` counts replacements of invalid bytes."""

    def __init__(self, encoding: str, errors: str) -> None:
        try:
            if codecs.lookup(encoding).name in _NO_TEXT:
                raise LookupError
            b"a".decode(encoding)
        except LookupError:
            raise UserError(f'"{encoding}" is not a text encoding', "utf-8, latin-1, cp1252, utf-16 …") from None
        except UnicodeError:
            pass  # In this encoding, a character has more than one byte.
        self.name = encoding
        self.errors = errors
        self.replaced = 0
        codec = codecs.lookup(encoding).name
        self.is_utf8 = codec == "utf-8"
        self.is_wide = codec.startswith(("utf-16", "utf-32"))  # A line break has several bytes, some of them zero.

    def decode(self, data: bytes) -> str:
        """Decodes all of ``data``. Raises UnicodeDecodeError under "strict"."""
        text = data.decode(self.name, self.errors)
        if self.errors == "replace":
            self._count(text, data.decode(self.name, "ignore"))
        return text

    def _count(self, text: str, known: str) -> None:
        """Counts what was replaced in ``text``. ``known`` is the text without invalid bytes."""
        self.replaced += text.count("\ufffd") - known.count("\ufffd")

    def blocks(self, name: str, stream: ByteStream) -> Iterator[str]:
        """Yields the text of a stream block by block, without its byte-order mark. Raises `UserError` at the first
        invalid byte."""
        new_decoder = codecs.getincrementaldecoder(self.name)
        decoder, ignoring = new_decoder(self.errors), new_decoder("ignore")
        offset, line, at_start = 0, 1, True  # Position of the block's first byte.
        block = self._first_block(name, stream)
        while True:
            zero_at = -1 if self.is_wide else block.find(b"\0")
            known = block if zero_at < 0 else block[:zero_at]
            text, bad_byte = self._decode_block(name, decoder, known, final=not block)
            if self.errors == "replace":
                self._count(text, ignoring.decode(known, final=not block))
            if at_start and text:
                text, at_start = text.removeprefix("\ufeff"), False
            text, zero, _ = text.partition("\0")
            line += text.count("\n")
            if text:
                yield text
            if zero_at >= 0 or zero:
                hint = "give plain text, or use --skip-bad to skip such files"
                raise UserError(f"{name} is not text: it has a zero byte in line {line:,}", hint)
            offset += len(block)
            if bad_byte is not None:
                raise self.error(name, bad_byte, offset - len(bad_byte.object) + bad_byte.start, line)
            if not block:
                return
            block = stream.read(BLOCK)

    def _first_block(self, name: str, stream: ByteStream) -> bytes:
        block = stream.read(BLOCK)
        while len(block) < 4 and (next_block := stream.read(BLOCK)):
            block += next_block
        self.check_bom(name, block)
        return block

    def check_bom(self, name: str, data: bytes) -> None:
        """Raises `UserError` if a file read as UTF-8 starts with the byte-order mark of UTF-16 or UTF-32."""
        if self.is_utf8 and (encoding := find_wide(data)):
            raise UserError(f"{name} is {encoding.upper()}, not UTF-8", f"add --encoding {encoding}")

    def _decode_block(
        self, name: str, decoder: codecs.IncrementalDecoder, block: bytes, final: bool
    ) -> tuple[str, UnicodeDecodeError | None]:
        state = decoder.getstate()
        try:
            return decoder.decode(block, final), None
        except UnicodeDecodeError as error:
            decoder.setstate(state)
            earlier = len(error.object) - len(block)  # Bytes of a character that began in an earlier block.
            return decoder.decode(block[: max(0, error.start - earlier)]), error
        except UnicodeError as error:  # UTF-16 without a byte-order mark.
            raise UserError(f"{name} is not {self.shown}: {reason(error)}", self.hint_for(b"")) from None

    @property
    def shown(self) -> str:
        """The encoding's name for messages."""
        return "UTF-8" if self.is_utf8 else self.name

    def hint_for(self, data: bytes) -> str:
        """Returns advice for a line in another encoding, with the most plausible one."""
        from charset_normalizer import from_bytes  # Only errors need it.

        advice, line = "set its --encoding, such as cp1252", data.partition(b"\n")[0][:MAX_GUESSED]
        if line and (best := from_bytes(line, cp_isolation=_PLAUSIBLE).best()) is not None:
            advice = f"--encoding {best.encoding} reads it as “{' '.join(str(best).split())[:40]}”"
        return f"{advice}; or use --errors replace or --skip-bad"

    def error(self, name: str, error: UnicodeDecodeError, offset: int, line: int) -> UserError:
        """Returns the error for an invalid byte at an offset and line."""
        byte = error.object[error.start]
        where = f"byte 0x{byte:02x} at offset {offset:,}, line {line:,}"
        line_start = error.object.rfind(b"\n", 0, error.start) + 1
        hint = self.hint_for(error.object[line_start:])
        return UserError(f"{name} is not {self.shown}: {where}", hint)


MAX_GUESSED = 2**16  # Bytes of a line whose encoding is guessed.
_PLAUSIBLE = ["utf_8", "cp1252", "cp1251", "euc_kr", "shift_jis", "gb18030"]


def find_wide(data: bytes) -> str | None:
    """Returns the encoding of a file that starts with the byte-order mark of UTF-16 or UTF-32."""
    return next((encoding for bom, encoding in _WIDE_BOMS.items() if data.startswith(bom)), None)


MAX_RECORD = 64 * 2**20  # Maximum bytes of a line, or characters of a CSV row or JSON value.
MAX_JSON = 2**28  # Maximum characters of a JSON file, which is read whole.
ROWS = 64  # Parquet rows per batch.
_decode_json = json.JSONDecoder().raw_decode  # Twice as fast as json.loads.
# A byte that is no character is decoded to one of the surrogates U+DC80 to U+DCFF.
_BAD_BYTES = re.compile("[\udc80-\udcff]+")
_ESCAPED_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_UNPAIRED = re.compile("[\ud800-\udc7f\udd00-\udfff]")

OnBad = Callable[[UserError], None]  # Raises the error or counts it.
Raw = TypeVar("Raw")
Value = TypeVar("Value")


@dataclass(frozen=True)
class RecordForm(Generic[Value]):
    """What is read of a record, and what becomes of it."""

    keys: tuple[str, ...]
    parse: Callable[[dict[str, Any], Callable[[], str]], Value]  # From a record and its place. Raises `BadRecord`.
    hint: str
    strings: bool = True
    json_hint: str = ""  # Appended to hints about JSON files.
    alternatives: tuple[tuple[str, ...], ...] = ()  # Other sets of keys that a record can have instead of ``keys``.
    optional: tuple[str, ...] = ()

    def columns(self, available: Collection[str]) -> list[str]:
        """Returns the keys to read, given the ``available`` keys."""
        required = next((keys for keys in (self.keys, *self.alternatives) if {*keys} <= {*available}), self.keys)
        return [*required, *(name for name in self.optional if name in available)]


class BadRecord(UserError):
    """An error in a record, without its place."""


def text_form(field: str) -> RecordForm[str]:
    """Returns the form that reads the string at the key ``field``."""
    hint = "--field names the key or column that holds the text"
    json_hint = "; to train on the raw JSON, rename the file to .txt"
    return RecordForm((field,), lambda record, place: get_string(record, field, hint), hint, json_hint=json_hint)


class Records(Generic[Raw]):
    """The records of a file, parsed by ``form``. ``on_bad`` is called with errors in records."""

    unit = "line"

    def __init__(
        self, name: str, stream: ByteStream, form: RecordForm[Any], encoding: TextEncoding, on_bad: OnBad
    ) -> None:
        self.name, self.stream, self.form, self.encoding, self.on_bad = name, stream, form, encoding, on_bad
        self.json_hint = ""

    def _rows(self) -> Iterator[tuple[int, Raw]]:
        """Yields the number and the raw data of each record."""
        raise NotImplementedError

    def _parse(self, number: int, row: Raw) -> dict[str, Any] | None:
        """Returns a record's values, or None if it is empty. Raises `BadRecord`."""
        raise NotImplementedError

    def _unread_keys(self, available: Collection[str]) -> dict[str, Any]:
        """Returns placeholders for the columns that a form of several keys does not read."""
        read = self.form.columns(available) if self.form.optional else available
        return {key: ... for key in available if key not in read}

    def values(self) -> Iterator[Any]:
        """Yields what the form makes of each record."""
        for number, row in self._rows():
            try:
                record = self._parse(number, row)
                if record is not None:
                    yield self.form.parse(record, partial(self._place, number))
            except BadRecord as record_error:
                self.on_bad(self._error(number, record_error.message, record_error.hint + self.json_hint))
            except RecursionError:
                self.on_bad(self._error(number, "JSON that is nested too deep", "--skip-bad skips such records"))

    def _mend(self, text: str) -> str:
        """Replaces bytes and unpaired surrogates that are no characters. In strict mode, raises `BadRecord`."""
        with contextlib.suppress(UnicodeEncodeError):
            text.encode()  # This is faster than a search for surrogates.
            return text
        text, count = _UNPAIRED.subn("\ufffd", text)
        self.encoding.replaced += count
        if count and self.encoding.errors == "strict":
            raise BadRecord("an unpaired surrogate is not a character", "use --errors replace or --skip-bad")
        try:
            return _BAD_BYTES.sub(lambda run: self.encoding.decode(run[0].encode("ascii", "surrogateescape")), text)
        except UnicodeDecodeError as error:
            hint = self.encoding.hint_for(text.encode("utf-8", "surrogateescape"))
            raise BadRecord(f"not {self.encoding.shown}: byte 0x{error.object[error.start]:02x}", hint) from None

    def _place(self, number: int) -> str:
        name = self.name.encode("utf-8", "backslashreplace").decode()  # File names can be invalid UTF-8.
        return f"{name}, {self.unit} {number:,}"

    def _error(self, number: int, message: str, hint: str) -> UserError:
        return UserError(f"{self._place(number)}: {message}", hint)

    def _too_long(self, number: int) -> UserError:
        problem = f"longer than {MAX_RECORD:,} bytes"
        return self._error(number, problem, "split it into several, or use --skip-bad to skip it")

    @contextlib.contextmanager
    def _text(self) -> Iterator[io.TextIOWrapper]:
        """Opens the text, with bytes that are no characters as surrogates, because columns that are not read can have
        them."""
        buffered = io.BufferedReader(self.stream, BUFFER)
        self.encoding.check_bom(self.name, buffered.peek(4))
        try:
            yield io.TextIOWrapper(buffered, self.encoding.name, "surrogateescape", newline="\n")
        except UnicodeError as error:  # UTF-16 and UTF-32 that are damaged.
            hint = self.encoding.hint_for(b"")
            raise UserError(f"{self.name} is not {self.encoding.shown}: {reason(error)}", hint) from None

    def _lines(self) -> Iterator[tuple[int, str]]:
        """Yields number and text of each line, including the line break."""
        with self._text() as text:
            number = 0
            while line := text.readline(MAX_RECORD + 1):
                number += 1
                if len(line) <= MAX_RECORD:
                    yield number, line.lstrip("\ufeff")  # Each of several concatenated files can start with it.
                else:
                    self.on_bad(self._too_long(number))
                    while line and not line.endswith("\n"):
                        line = text.readline(MAX_RECORD)


class JSONLines(Records[str]):
    """JSON lines: one object per line."""

    def _rows(self) -> Iterator[tuple[int, str]]:
        return self._lines()

    def _parse(self, number: int, row: str) -> dict[str, Any] | None:
        row = self._mend(row.strip(" \t\r\n"))
        if not row:
            return None
        record = _parse_object(row)
        return self._clean(record) if _ESCAPED_SURROGATE.search(row) else record

    def _clean(self, record: Any) -> Any:
        text = json.dumps(record, ensure_ascii=False)
        mended = self._mend(text)
        return record if mended is text else json.loads(mended)


class JSONFile(JSONLines):
    """The objects of a JSON file: an array, an object whose only list of objects has the records, or JSON lines. The
    whole file must fit into memory."""

    def _rows(self) -> Iterator[tuple[int, Any]]:
        self.json_hint = self.form.json_hint
        with self._text() as file:
            text = file.read(MAX_JSON + 1).lstrip("\ufeff")
        if len(text) > MAX_JSON:
            hint = "convert it to .jsonl, one object per line, which has no limit: jq -c '.[]' in.json > out.jsonl"
            raise UserError(f"{self.name} has more than {MAX_JSON:,} characters of JSON", hint)
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            if text.lstrip().startswith("["):
                too_deep = isinstance(error, RecursionError)
                problem = f"not JSON: {'it is nested too deep' if too_deep else getattr(error, 'msg', reason(error))}"
                raise self._error(getattr(error, "lineno", 1), problem, "fix it, or use --skip-bad") from None
            yield from enumerate(text.split("\n"), 1)
        else:
            self.unit = "record"
            yield from enumerate(value if isinstance(value, list) else self._extract_records(value), 1)

    def _parse(self, number: int, row: Any) -> dict[str, Any] | None:
        if self.unit == "line":
            return super()._parse(number, row)
        if not isinstance(row, dict):
            raise BadRecord("not a JSON object", self.form.hint)
        record: dict[str, Any] = self._clean(row)
        return record

    def _extract_records(self, value: Any) -> list[Any]:
        """Returns the value's only list of records, or a list of the value itself."""
        if not isinstance(value, dict) or self.form.columns(value)[0] in value:
            return [value]
        lists = [item for item in value.values() if isinstance(item, list) and item]
        lists = [item for item in lists if isinstance(item[0], dict) and self.form.columns(item[0])[0] in item[0]]
        return lists[0] if len(lists) == 1 else [value]


def _parse_object(line: str) -> dict[str, Any]:
    try:
        record, end = _decode_json(line)
        if end < len(line):
            raise ValueError("there is more after the object")
    except ValueError as error:
        raise BadRecord(
            f"not JSON: {reason(error)}", "give one object per line; --skip-bad skips other lines"
        ) from None
    if not isinstance(record, dict):
        hint = "give one object per line (for an array, name the file .json), or use --skip-bad"
        raise BadRecord("not a JSON object", hint)
    return record


def get_string(record: Mapping[str, Any], field: str, hint: str, null: bool = True) -> str:
    """Returns the string at a key. With ``null``, null becomes an empty string."""
    value = record.get(field, record)
    if value is record:
        raise BadRecord(_missing_message(field, record, "keys"), option_hint(record, hint))
    if value is None and null:
        return ""
    if not isinstance(value, str):
        raise BadRecord(f'"{field}" is not a string', hint)
    return value


def parse_column(value: Any) -> Any:
    """Returns the value of a column. Tables store lists and objects as JSON."""
    if isinstance(value, str):
        with contextlib.suppress(ValueError, RecursionError):
            return json.loads(value)
    return value


def _missing_message(field: str, available: Iterable[Any], plural: str) -> str:
    keys = list(available)
    names = ", ".join(map(str, keys[:20])) + (", …" if len(keys) > 20 else "") or "none"
    return f'it has no "{field}"; its {plural}: {names}'


def option_hint(available: Collection[str], hint: str) -> str:
    """Returns the option that reads records with these keys, or ``hint``."""
    if not {"messages", "conversations", "conversation"}.isdisjoint(available):
        return "--chat reads records with messages"
    if {"instruction", "output"} <= {*available}:
        return "--chat reads records with instruction, input and output"
    if {"chosen", "rejected"} <= {*available}:
        return "--preferences reads records with chosen and rejected"
    return "--pairs reads records with prompt and completion" if {"prompt", "completion"} <= {*available} else hint


class Table(Records[list[str]]):
    """The rows of a .csv file with a header row. Quoted fields can contain line breaks; a row has at most `MAX_RECORD`
    characters."""

    delimiter = ","
    quoting: Any = csv.QUOTE_MINIMAL
    rule = "a field with a comma or a line break must be quoted"

    def _rows(self) -> Iterator[tuple[int, list[str]]]:
        rows = self._non_empty_rows()
        line, self._header = next(rows, (0, [*self.form.keys]))
        keys = self.form.columns(self._header)
        for key in keys:
            if (count := self._header.count(key)) != 1:
                problem = f'it has {count} columns called "{key}"'
                problem = problem if count else _missing_message(key, self._header, "columns")
                raise self._error(line, problem, option_hint(self._header, self.form.hint))
        self._columns = {key: self._header.index(key) for key in keys}
        self._unread = self._unread_keys(self._header)
        yield from rows

    def _parse(self, number: int, row: list[str]) -> dict[str, Any]:
        if len(row) != len(self._header):
            problem = f"{counted(len(row), 'field')}, but the header has {len(self._header)}"
            raise BadRecord(problem, f"{self.rule}; --skip-bad skips such rows")
        return {key: self._mend(row[column]) for key, column in self._columns.items()} | self._unread

    def _non_empty_rows(self) -> Iterator[tuple[int, list[str]]]:
        """Yields non-empty rows with the number of their last line."""
        csv.field_size_limit(MAX_RECORD)  # The limit applies to the whole process.
        number = size = 0

        def lines() -> Iterator[str]:
            nonlocal number, size
            for number, line in self._lines():
                size += len(line)
                if size > MAX_RECORD:
                    raise self._too_long(number)
                yield line

        reader = csv.reader(lines(), delimiter=self.delimiter, quoting=self.quoting, strict=True)
        while True:
            size = 0
            try:
                row = next(reader, None)
            except csv.Error as error:
                problem = str(error).partition(" - ")[0]  # Then it mentions Python's open().
                self.on_bad(self._error(number, problem, "fix its quotes, or use --skip-bad to skip it"))
                continue
            if row is None:
                return
            if row:
                yield number, row


class TSVTable(Table):
    """The rows of a .tsv file. It has no quotes (media type text/tab-separated-values), so each line is a row."""

    delimiter, quoting = "\t", csv.QUOTE_NONE
    rule = "a .tsv field cannot contain tabs or line breaks, and quotes are ordinary characters"


_STRING_TYPE = re.compile(r"(large_)?string(_view)?|null|dictionary<values=(large_)?string(_view)?,.*")


class Parquet(Records[dict[str, Any]]):
    """The rows of a Parquet file. Raises `WorkError` without pyarrow."""

    unit = "row"

    def _rows(self) -> Iterator[tuple[int, dict[str, Any]]]:
        try:
            from pyarrow import parquet as pq
        except ImportError:
            raise WorkError(f"{self.name} needs the package pyarrow", install_extra("parquet")) from None
        with (
            translate_errors(partial(damage_error, self.name)),  # pyarrow raises many exception types.
            pq.ParquetFile(self.stream) as file,
        ):
            schema = file.schema_arrow
            keys = self.form.columns(schema.names)
            self._unread = self._unread_keys(schema.names)
            for key in keys:
                if key not in schema.names:
                    hint = option_hint(schema.names, self.form.hint)
                    raise UserError(f"{self.name}: {_missing_message(key, schema.names, 'columns')}", hint)
                kind = schema.field(key).type
                if self.form.strings and not _STRING_TYPE.fullmatch(str(kind)):
                    raise UserError(f'{self.name}: "{key}" contains {kind}, not strings', self.form.hint)
            batches = file.iter_batches(ROWS, columns=keys, use_threads=False)
            yield from enumerate((row for batch in batches for row in batch.to_pylist()), 1)

    def _parse(self, number: int, row: dict[str, Any]) -> dict[str, Any]:
        return row | self._unread
