"""Decodes bytes to text, and reads records from JSON lines, JSON, CSV, TSV and Parquet."""

import codecs
import contextlib
import csv
import io
import json
import re
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from typing import Any, Generic, TypeVar

from gpt.documents.unpack import BUFFER, ByteStream, damage_error, reason, translate_errors
from gpt.system.distribution import install_extra
from gpt.system.errors import UserError, WorkError
from gpt.system.words import counted

BLOCK = 2**18  # Bytes. Larger blocks are slower, because each needs new memory from the system.


class _DecodingErrors(threading.local):
    """Decoding errors of this thread, recorded by the error handlers below."""

    replaced = 0  # A separate count, because the text itself can contain U+FFFD.
    error: UnicodeDecodeError | None = None


_decoding_errors = _DecodingErrors()


def _count_and_replace(error: UnicodeError) -> tuple[str | bytes, int]:
    _decoding_errors.replaced += 1
    return codecs.replace_errors(error)


def _stop_at_error(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    _decoding_errors.error = error
    return "", len(error.object)


codecs.register_error("gpt.replace", _count_and_replace)
codecs.register_error("gpt.stop", _stop_at_error)


_BOM = codecs.BOM_UTF8
_BOMS_AT_LINE_START = re.compile("^\ufeff+", re.MULTILINE)
_WIDE_BOMS = {  # UTF-32 must be first, because its little-endian mark starts with UTF-16's.
    codecs.BOM_UTF32_LE: "utf-32", codecs.BOM_UTF32_BE: "utf-32", codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}  # fmt: skip


class TextEncoding:
    """A text encoding with its error handling. ``replaced`` counts replacements of invalid bytes."""

    def __init__(self, encoding: str, errors: str) -> None:
        try:
            b"a".decode(encoding)
        except LookupError:
            raise UserError(f'"{encoding}" is not a text encoding', "utf-8, latin-1, cp1252, utf-16 …") from None
        except UnicodeError:
            pass  # In this encoding, a character has more than one byte.
        self.name = encoding
        self.errors = "gpt.replace" if errors == "replace" else "strict"
        self.replaced = 0
        codec = codecs.lookup(encoding).name
        self.is_utf8 = codec == "utf-8"
        self.is_unicode = codec.startswith("utf")  # Byte-order marks decode to U+FEFF.
        self.is_wide = codec.startswith(("utf-16", "utf-32"))  # A line break has several bytes, some of them zero.

    def decode(self, data: bytes) -> str:
        """Decodes all of ``data``. Raises UnicodeDecodeError under "strict"."""
        if self.errors == "strict":
            return data.decode(self.name)
        old_count = _decoding_errors.replaced
        text = data.decode(self.name, self.errors)
        self.replaced += _decoding_errors.replaced - old_count
        return text

    def blocks(self, name: str, stream: ByteStream) -> Iterator[str]:
        """Yields the text of a stream block by block. Raises `UserError` at the first invalid byte. Removes byte-order
        marks from the starts of lines, because files can be concatenated."""
        decoder = codecs.getincrementaldecoder(self.name)("gpt.stop" if self.errors == "strict" else self.errors)
        offset, line = 0, 1  # Position of the block's first byte.
        starts_line = True
        block = self._first_block(name, stream)
        if not self.is_unicode and block.startswith(_BOM):  # Latin-1 would decode the mark to "ï»¿".
            block, offset = block.removeprefix(_BOM), len(_BOM)
        while True:
            zero_at = -1 if self.is_wide else block.find(b"\0")
            text, bad_byte = self._decode_block(
                name, decoder, block if zero_at < 0 else block[:zero_at], final=not block
            )
            text, zero_character, _ = text.partition("\0") if self.is_wide else (text, "", "")
            line += text.count("\n")
            if "\ufeff" in text:
                text = _BOMS_AT_LINE_START.sub("", text if starts_line else "-" + text)[not starts_line :]
            if text:
                starts_line = text.endswith("\n")
                yield text
            if zero_at >= 0 or zero_character:
                where = f"character in line {line:,}" if zero_character else f"byte at offset {offset + zero_at:,}"
                hint = "give plain text, or use --skip-bad to skip such files"
                raise UserError(f"{name} is not text: it has a zero {where}", hint)
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
        """Raises `UserError` if a file read as UTF-8 starts as UTF-16 or UTF-32."""
        if self.is_utf8 and (encoding := guess_wide(data[:SAMPLE])):
            raise UserError(f"{name} is {encoding.upper()}, not UTF-8", f"add --encoding {encoding}")

    def _decode_block(
        self, name: str, decoder: codecs.IncrementalDecoder, block: bytes, final: bool
    ) -> tuple[str, UnicodeDecodeError | None]:
        old_count, _decoding_errors.error = _decoding_errors.replaced, None
        try:
            text = decoder.decode(block, final)
        except UnicodeError as error:  # UTF-16 without a byte-order mark.
            raise UserError(f"{name} is not {self.shown}: {reason(error)}", self.hint_for(b"")) from None
        self.replaced += _decoding_errors.replaced - old_count
        return text, _decoding_errors.error

    @property
    def shown(self) -> str:
        """The encoding's name for messages."""
        return "UTF-8" if self.is_utf8 else self.name

    def hint_for(self, data: bytes) -> str:
        """Returns advice for a line in another encoding, with the most plausible one."""
        from charset_normalizer import from_bytes  # Only errors need it.

        advice, line = "set its --encoding, such as cp1252", data.partition(b"\n")[0][:MAX_GUESSED]
        if (best := from_bytes(line, cp_isolation=_PLAUSIBLE).best()) is not None:
            advice = f"--encoding {best.encoding} reads it as “{' '.join(str(best).split())[:40]}”"
        return f"{advice}; or use --errors replace or --skip-bad"

    def error(self, name: str, error: UnicodeDecodeError, offset: int, line: int) -> UserError:
        """Returns the error for an invalid byte at an offset and line."""
        byte = error.object[error.start]
        where = f"byte 0x{byte:02x} at offset {offset:,}, line {line:,}"
        line_start = error.object.rfind(b"\n", 0, error.start) + 1
        hint = self.hint_for(error.object[line_start:])
        return UserError(f"{name} is not {self.shown}: {where}", hint)


SAMPLE = 4096  # Bytes that show the encoding.
MAX_GUESSED = 2**16  # Bytes of a line whose encoding is guessed.
_PLAUSIBLE = ["cp1252", "cp1251", "euc_kr", "shift_jis", "gb18030"]


def guess_wide(data: bytes) -> str | None:
    """Returns the encoding of UTF-16 and UTF-32: by the byte-order mark, otherwise by the zero bytes of UTF-16's ASCII
    characters."""
    if (marked := next((encoding for bom, encoding in _WIDE_BOMS.items() if data.startswith(bom)), None)) is not None:
        return marked
    encoding = "utf-16-le" if data[1::2].count(0) > data[::2].count(0) else "utf-16-be"
    try:
        text = codecs.getincrementaldecoder(encoding)().decode(data) if b"\0" in data else ""
    except UnicodeDecodeError:
        return None
    words = text.split()
    has_ascii = 4 * data.count(0) >= max(8, len(data)) or words != [text]
    return encoding if words and has_ascii and "".join(words).isprintable() else None


MAX_RECORD = 64 * 2**20  # Maximum bytes of a line, or characters of a CSV row or JSON value.
MAX_JSON = 2**28  # Maximum characters of a JSON file, which is read whole.
ROWS = 64  # Parquet rows per batch.
_decode_json = json.JSONDecoder().raw_decode  # Twice as fast as json.loads.
_NON_SPACE, _NON_SPACE_OR_COMMA = re.compile(r"[^ \t\r\n]"), re.compile(r"[^ \t\r\n,]")
# A byte that is no character is decoded to one of the surrogates U+DC80 to U+DCFF.
_SURROGATE, _BAD_BYTES = re.compile("[\ud800-\udfff]"), re.compile("[\udc80-\udcff]+")
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
                    value = self.form.parse(record, partial(self._place, number))
                    yield self._clean(value)
            except BadRecord as record_error:
                self.on_bad(self._error(number, record_error.message, record_error.hint + self.json_hint))

    def _clean(self, value: Any) -> Any:
        """Replaces bytes and unpaired surrogates that are no characters, in strings and what contains them. In strict
        mode, raises `BadRecord`."""
        if isinstance(value, str):
            return value if value.isascii() or not _SURROGATE.search(value) else self._mend(value)
        if isinstance(value, list):
            return list(map(self._clean, value))
        if isinstance(value, dict):
            return {key: self._clean(item) for key, item in value.items()}
        if is_dataclass(value) and not isinstance(value, type):
            return replace(value, **self._clean({part.name: getattr(value, part.name) for part in fields(value)}))
        return value

    def _mend(self, value: str) -> str:
        value, count = _UNPAIRED.subn("\ufffd", value)
        self.encoding.replaced += count
        if count and self.encoding.errors == "strict":
            raise BadRecord("an unpaired surrogate is not a character", "use --errors replace or --skip-bad")
        try:
            return _BAD_BYTES.sub(lambda run: self.encoding.decode(run[0].encode("ascii", "surrogateescape")), value)
        except UnicodeDecodeError as error:
            hint = self.encoding.hint_for(value.encode("utf-8", "surrogateescape"))
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
        """Opens the text, with bytes that are no characters as surrogates, because records that are not read can have
        them."""
        buffered = io.BufferedReader(self.stream, BUFFER)
        head = buffered.peek(SAMPLE)
        self.encoding.check_bom(self.name, head[:SAMPLE])
        if head.startswith(_BOM):  # Some editors put it before text in other encodings.
            buffered.read(len(_BOM))
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
                if number == 1 and "\r" in line.rstrip() and not line.endswith("\n"):
                    problem = "its lines end in carriage returns (\\r) without line feeds"
                    raise UserError(f"{self.name}: {problem}", "convert them: tr '\\r' '\\n' < FILE > NEW")
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
        row = row.strip(" \t\r\n")
        try:
            return _parse_object(row) if row else None
        except BadRecord:
            self._clean(row)  # The encoding can be the cause.
            raise


class JSONFile(Records[Any]):
    """The objects of a JSON file: an array, objects in sequence, or an object whose only list of objects has the
    records. The whole file must fit into memory."""

    def _rows(self) -> Iterator[tuple[int, Any]]:
        self.json_hint = self.form.json_hint
        with self._text() as file:
            text = file.read(MAX_JSON + 1).lstrip("\ufeff")
        if len(text) > MAX_JSON:
            hint = "convert it to .jsonl, one object per line, which has no limit: jq -c '.[]' in.json > out.jsonl"
            raise UserError(f"{self.name} has more than {MAX_JSON:,} characters of JSON", hint)
        line, counted_to = 1, 0
        match = _NON_SPACE.search(text)
        is_array = match is not None and match[0] == "["
        find_value = _NON_SPACE_OR_COMMA.search if is_array else _NON_SPACE.search
        match = find_value(text, match.end() if match and is_array else 0)
        while match is not None and not (is_array and match[0] == "]"):
            position = match.start()
            line, counted_to = line + text.count("\n", counted_to, position), position
            try:
                value, end = _decode_json(text, position)
            except (ValueError, RecursionError) as error:
                bad_line = line + text.count("\n", position, getattr(error, "pos", position))
                bad = self._not_json(bad_line, getattr(error, "msg", "it is nested too deep"))
                if is_array:
                    raise bad from None
                self.on_bad(bad)
                end = text.find("\n{", position) + 1 or len(text)
            else:
                yield from ((line, record) for record in ([value] if is_array else self._extract_records(value)))
            match = find_value(text, end)
        if is_array and match is None:
            raise self._not_json(line + text.count("\n", counted_to), "the array is not closed")
        if is_array and match is not None and _NON_SPACE.search(text, match.end()):
            raise self._not_json(line + text.count("\n", counted_to), "there is more after the array")

    def _not_json(self, line: int, problem: str) -> UserError:
        hint = "give an array of objects, or objects in sequence, or use --skip-bad" + self.json_hint
        return self._error(line, f"not JSON: {problem}", hint)

    def _parse(self, number: int, row: Any) -> dict[str, Any]:
        if not isinstance(row, dict):
            raise BadRecord("not a JSON object", self.form.hint)
        return row

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
    except RecursionError:
        raise BadRecord("JSON that is nested too deep", "--skip-bad skips such lines") from None
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
    """The rows of a table with a header row. Quoted CSV fields can contain line breaks; a CSV row has at most
    `MAX_RECORD` characters. TSV has no quotes (media type text/tab-separated-values), so each line is a row."""

    delimiter = ","

    def _rows(self) -> Iterator[tuple[int, list[str]]]:
        rows = self._non_empty_rows()
        line, self._header = next(rows, (0, [*self.form.keys]))
        keys = self.form.columns(self._header)
        for key in keys:
            if key not in self._header:
                raise self._error(line, _missing_message(key, self._header, "columns"), self._column_hint())
            if self._header.count(key) > 1:
                problem = f'it has {self._header.count(key)} columns called "{key}"'
                raise self._error(line, problem, "rename all but one")
        self._columns = {key: self._header.index(key) for key in keys}
        self._unread = self._unread_keys(self._header)
        yield from rows

    def _parse(self, number: int, row: list[str]) -> dict[str, Any] | None:
        if row == self._header:  # With concatenated files, the header is repeated.
            return None
        if len(row) != len(self._header):
            rule = "a field with a comma or a line break must be quoted"
            if self.delimiter == "\t":
                rule = "a .tsv field cannot contain tabs or line breaks, and quotes are ordinary characters"
            raise BadRecord(
                f"{counted(len(row), 'field')}, but the header has {len(self._header)}",
                f"{rule}; --skip-bad skips such rows",
            )
        record = {key: row[column] for key, column in self._columns.items()}
        if any("\0" in value for value in record.values()):
            raise BadRecord("a zero byte is not text", "--skip-bad skips such rows")
        return record | self._unread

    def _column_hint(self) -> str:
        for separator in {*";\t,|"} - {self.delimiter} if len(self._header) == 1 else ():
            if self.form.keys[0] in self._header[0].split(separator):
                return f"its columns are separated by {separator!r}: convert it to commas (.csv) or tabs (.tsv)"
        return option_hint(self._header, self.form.hint)

    def _non_empty_rows(self) -> Iterator[tuple[int, list[str]]]:
        """Yields non-empty rows with their first line number."""
        csv.field_size_limit(MAX_RECORD)  # The limit applies to the whole process.
        self._remaining_lines = self._lines()
        self._first_line = self._last_line = self._row_size = 0
        is_tsv = self.delimiter == "\t"
        reader = map(_split_tabs, self) if is_tsv else csv.reader(self, delimiter=self.delimiter, strict=True)
        while True:
            self._first_line = self._row_size = 0
            try:
                row = next(reader, None)
            except csv.Error as error:
                line, problem = self._last_line, str(error)
                if problem == "unexpected end of data":
                    line, problem = self._first_line, "a quote is never closed"
                self.on_bad(self._error(line, problem, "fix it, or use --skip-bad to skip it"))
            except UserError as error:
                self.on_bad(error)
            else:
                if row is None:
                    return
                if row:
                    yield self._first_line, row

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        """Returns the next line for the parser. Unlike a generator, this iterator can continue after an error."""
        self._last_line, line = next(self._remaining_lines)
        self._first_line = self._first_line or self._last_line
        self._row_size += len(line)
        if self._row_size > MAX_RECORD:
            raise self._too_long(self._last_line)
        return line


class TSVTable(Table):
    """The rows of a .tsv file."""

    delimiter = "\t"


def _split_tabs(line: str) -> list[str]:
    line = line.removesuffix("\n").removesuffix("\r")
    return line.split("\t") if line else []


class Parquet(Records[tuple[Any, ...]]):
    """The rows of a Parquet file. Raises `WorkError` without pyarrow."""

    unit = "row"

    def _rows(self) -> Iterator[tuple[int, tuple[Any, ...]]]:
        try:
            from pyarrow import parquet as pq
        except ImportError:
            raise WorkError(f"{self.name} needs the package pyarrow", install_extra("parquet")) from None
        with translate_errors(partial(damage_error, self.name)):  # pyarrow raises many exception types.
            metadata = pq.read_metadata(self.stream)
            schema = metadata.schema.to_arrow_schema()
            self._keys = keys = self.form.columns(schema.names)
            self._unread = self._unread_keys(schema.names)
            for key in keys:
                if key not in schema.names:
                    hint = option_hint(schema.names, self.form.hint)
                    raise UserError(f"{self.name}: {_missing_message(key, schema.names, 'columns')}", hint)
                kind = schema.field(key).type
                if self.form.strings and not _is_string_type(kind):
                    raise UserError(f'{self.name}: "{key}" contains {kind}, not strings', self.form.hint)
            dictionaries = keys if self.form.strings else None
            with pq.ParquetFile(self.stream, metadata=metadata, read_dictionary=dictionaries) as file:
                batches = file.iter_batches(ROWS, columns=keys, use_threads=False)
                columns = ([_column_values(batch.column(key)) for key in keys] for batch in batches)
                yield from enumerate((row for batch in columns for row in zip(*batch, strict=True)), 1)

    def _parse(self, number: int, row: tuple[Any, ...]) -> dict[str, Any]:
        if any(isinstance(value, str) and len(value) > MAX_RECORD for value in row):
            raise BadRecord(f"longer than {MAX_RECORD:,} characters", "split it into several, or use --skip-bad")
        return dict(zip(self._keys, row, strict=True)) | self._unread


def _column_values(column: Any) -> list[Any]:
    """Returns the values of a column. Strings can be invalid UTF-8."""
    import pyarrow as pa

    if isinstance(column, pa.DictionaryArray):
        column = column.dictionary_decode()
    if not _is_string_type(column.type):
        return list(column.to_pylist())
    values = column.cast(pa.large_binary()).to_pylist()
    return [None if value is None else value.decode("utf-8", "surrogateescape") for value in values]


def _is_string_type(kind: Any) -> bool:
    import pyarrow as pa

    value_type = kind.value_type if pa.types.is_dictionary(kind) else kind
    return str(value_type) in ("string", "large_string", "string_view", "null")
