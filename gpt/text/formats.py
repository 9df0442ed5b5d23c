"""Bytes → text: an encoding, and the records in JSON lines, JSON, CSV, TSV and Parquet."""

import codecs
import contextlib
import csv
import io
import json
import re
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

from gpt.distribution import install_extra
from gpt.errors import UserError, WorkError
from gpt.text.unpack import BUFFER, ByteStream, damaged, reason, translated
from gpt.words import counted

BLOCK = 2**18  # bytes decoded at once; more is slower, since the system then provides new memory for each block


class _Invalid(threading.local):
    """What the handlers of decoding errors below found in this thread."""

    replaced = 0  # counted, since U+FFFD may also stand in the text itself
    error: UnicodeDecodeError | None = None


_invalid = _Invalid()


def _replace(error: UnicodeError) -> tuple[str | bytes, int]:
    _invalid.replaced += 1
    return codecs.replace_errors(error)


def _stop(error: UnicodeError) -> tuple[str, int]:
    """Keeps the text before an invalid byte, and nothing after it."""
    assert isinstance(error, UnicodeDecodeError)
    _invalid.error = error
    return "", len(error.object)


codecs.register_error("gpt.replace", _replace)
codecs.register_error("gpt.stop", _stop)


_BOM = codecs.BOM_UTF8
_MARKS = re.compile("^\ufeff+", re.MULTILINE)
_WIDE_MARKS = {  # those of UTF-32 first: UTF-16's is the beginning of one of them
    codecs.BOM_UTF32_LE: "utf-32", codecs.BOM_UTF32_BE: "utf-32", codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}  # fmt: skip


class TextEncoding:
    """An encoding, and what to do with bytes that are invalid in it. ``replaced`` counts those that were replaced."""

    def __init__(self, encoding: str, errors: str) -> None:
        try:
            b"a".decode(encoding)
        except LookupError:
            raise UserError(f'"{encoding}" is not a text encoding', "utf-8, latin-1, cp1252, utf-16 …") from None
        except UnicodeError:
            pass  # a unit is longer than a byte
        self.name = encoding
        self.errors = "gpt.replace" if errors == "replace" else "strict"
        self.replaced = 0
        codec = codecs.lookup(encoding).name
        self.is_utf8 = codec == "utf-8"
        self.unicode = codec.startswith("utf")  # whose decoders take care of a mark
        self.wide = codec.startswith(("utf-16", "utf-32"))  # most characters, line breaks too, have zero bytes

    def decode(self, data: bytes) -> str:
        """Decodes all of ``data``. Raises UnicodeDecodeError under "strict"."""
        if self.errors == "strict":
            return data.decode(self.name)
        before = _invalid.replaced
        text = data.decode(self.name, self.errors)
        self.replaced += _invalid.replaced - before
        return text

    def blocks(self, name: str, stream: ByteStream) -> Iterator[str]:
        """Yields the text of a stream block by block, up to the first bad byte, which then raises `UserError`.

        Leaves out a byte-order mark at the start of the text, and of a line: there another file was appended.
        """
        decoder = codecs.getincrementaldecoder(self.name)("gpt.stop" if self.errors == "strict" else self.errors)
        offset, line = 0, 1  # of the block's first byte
        starts_line = True
        block = self._first(name, stream)
        if not self.unicode and block.startswith(_BOM):  # which would be "ï»¿" in Latin-1
            block, offset = block.removeprefix(_BOM), len(_BOM)
        while True:
            zero = -1 if self.wide else block.find(b"\0")
            text, bad = self._decoded(name, decoder, block if zero < 0 else block[:zero], final=not block)
            text, found, _ = text.partition("\0") if self.wide else (text, "", "")
            line += text.count("\n")
            if "\ufeff" in text:
                text = _MARKS.sub("", text if starts_line else "-" + text)[not starts_line :]
            if text:
                starts_line = text.endswith("\n")
                yield text
            if zero >= 0 or found:
                where = f"character in line {line:,}" if found else f"byte at offset {offset + zero:,}"
                hint = "give plain text, or use --skip-bad to skip such files"
                raise UserError(f"{name} is not text: it has a zero {where}", hint)
            offset += len(block)
            if bad is not None:
                raise self.error(name, bad, offset - len(bad.object) + bad.start, line)
            if not block:
                return
            block = stream.read(BLOCK)

    def _first(self, name: str, stream: ByteStream) -> bytes:
        block = stream.read(BLOCK)
        while len(block) < 4 and (more := stream.read(BLOCK)):
            block += more
        self.check_mark(name, block)
        return block

    def check_mark(self, name: str, start: bytes) -> None:
        """Raises `UserError` for a file that is to be UTF-8 and has the byte-order mark of UTF-16 or UTF-32."""
        if self.is_utf8:
            for mark, encoding in _WIDE_MARKS.items():
                if start.startswith(mark):
                    raise UserError(f"{name} is {encoding.upper()}, not UTF-8", f"add --encoding {encoding}")

    def _decoded(
        self, name: str, decoder: codecs.IncrementalDecoder, block: bytes, final: bool
    ) -> tuple[str, UnicodeDecodeError | None]:
        """Returns the characters before the first invalid byte, and the error there."""
        before, _invalid.error = _invalid.replaced, None
        try:
            text = decoder.decode(block, final)
        except UnicodeError as error:  # not of a byte: UTF-16 without its mark
            raise UserError(f"{name} is not {self.shown}: {reason(error)}", self.hint) from None
        self.replaced += _invalid.replaced - before
        return text, _invalid.error

    @property
    def shown(self) -> str:
        """The encoding's name for messages."""
        return "UTF-8" if self.is_utf8 else self.name

    @property
    def hint(self) -> str:
        """The advice for bytes of another encoding."""
        other = "for Latin-1, use --encoding latin-1" if self.is_utf8 else "set its --encoding"
        return f"{other}; or use --errors replace or --skip-bad"

    def error(self, name: str, error: UnicodeDecodeError, offset: int, line: int) -> UserError:
        """Returns the error for an invalid byte, with its place."""
        byte = error.object[error.start]
        where = f"byte 0x{byte:02x} at offset {offset:,}, line {line:,}"
        return UserError(f"{name} is not {self.shown}: {where}", self.hint)


MAX_RECORD = 64 * 2**20  # bytes of a line, characters of a CSV row or of a JSON value
ROWS = 64  # of a Parquet file, read at once
_decode = json.JSONDecoder().raw_decode  # json.loads takes twice as long: it looks for white space around each value
_NO_SPACE, _NO_SPACE_OR_COMMA = re.compile(r"[^ \t\r\n]"), re.compile(r"[^ \t\r\n,]")
_SURROGATE = re.compile("[\ud800-\udfff]")

ROLES = ("system", "developer", "user", "assistant")
OnBad = Callable[[UserError], None]  # raises the error, or counts it


Place = Callable[[int], str]  # the number of a record → its place in words


@dataclass(frozen=True)
class RecordForm:
    """What is read from each record of a file."""

    keys: tuple[str, ...]  # of the values that a record must have
    text: Callable[[dict[str, Any], int, Place], str]  # a record and its number → a document. Raises `_Bad`
    hint: str
    strings: bool = True  # whether the values are strings
    otherwise: str = ""  # added to the hints for JSON
    synonyms: tuple[str, ...] = ()  # other names of the only key
    optional: tuple[str, ...] = ()  # keys of further values, which need not be there

    def columns(self, known: Collection[str]) -> list[str]:
        """Returns the names of the values to read, where a table has ``known`` ones."""
        found = [next((name for name in (key, *self.synonyms) if name in known), key) for key in self.keys]
        return found + [name for name in self.optional if name in known]


class _AllKeys(RecordForm):
    """A form that reads every value of a record."""

    def columns(self, known: Collection[str]) -> list[str]:
        return [*known] or [""]


class _Bad(UserError):
    """An error in a record, whose place is still to be added."""


def text_form(field: str) -> RecordForm:
    """Documents: the string at the key ``field`` of each record."""
    hint = "--field names the key or column that holds the text"
    otherwise = "; to train on the raw JSON, rename the file to .txt"
    return RecordForm((field,), lambda record, number, place: _string(record, field, hint), hint, otherwise=otherwise)


def _pair(record: dict[str, Any], number: int, place: Place) -> str:
    prompt, completion = (_string(record, key, PAIRS.hint, null=False) for key in PAIRS.keys)
    return json.dumps([prompt, completion, place(number)], ensure_ascii=False)


def _chat(record: dict[str, Any], number: int, place: Place) -> str:
    hint = CHATS.hint
    messages = record.get(CHATS.columns(record)[0])
    if isinstance(messages, str):  # as a table holds them
        with contextlib.suppress(ValueError, RecursionError):
            messages = json.loads(messages)
    if not isinstance(messages, list) or not all(isinstance(each, dict) for each in messages):
        raise _Bad('it has no list of objects "messages"', hint)
    if any(_uses_tools(each) for each in [record, *messages]):
        raise _Bad(
            "it uses tools, which are not supported",
            f"give conversations with the roles {', '.join(ROLES)}, without tools; --skip-bad skips others",
        )
    found = [_message(each) for each in messages]
    system = record.get("system")
    if isinstance(system, str) and system and not any(message["role"] in ("system", "developer") for message in found):
        messages, found = [{}, *messages], [{"role": "system", "content": system}, *found]
    answers = [at for at, message in enumerate(found) if message["role"] == "assistant"]
    context = [at for at in answers if not _counts(messages[at])]
    if len(context) == len(answers):
        what = 'every assistant message has "weight": 0' if answers else "it has no assistant message"
        raise _Bad(f"{what}: there is nothing to learn", hint)
    return json.dumps([found, place(number), context], ensure_ascii=False)


def _message(message: dict[str, Any]) -> dict[str, str]:
    """Returns the role and the content of a message, and its thoughts if it has some, as templates read them."""
    if "from" in message and "role" not in message:  # ShareGPT
        message = {**message, "role": message["from"], "content": message.get("value")}
    role = _string(message, "role", CHATS.hint, null=False)
    role = _SYNONYMS.get(role, role)
    if role not in ROLES:
        raise _Bad(f"there is no role {role!r:.40}", f"roles are {', '.join(ROLES)}")
    content = message.get("content")
    if isinstance(content, list):
        if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in content):
            raise _Bad('"content" has a part that is not text', "only text is supported; --skip-bad skips others")
        message = {**message, "content": "".join(part["text"] for part in content)}
    return {"role": role, "content": _string(message, "content", CHATS.hint, null=False), **reasoning(message)}


def reasoning(message: dict[str, Any]) -> dict[str, str]:
    """Returns a message's reasoning, if it has any, by the names that chat templates read."""
    names = ("reasoning_content", "thinking", "reasoning")
    thoughts = next((message[key] for key in names if isinstance(message.get(key), str)), None)
    return {} if thoughts is None else dict.fromkeys(names[:2], thoughts)


def _counts(message: dict[str, Any]) -> bool:
    """Whether an answer is to be learned: OpenAI's files leave it out by a ``weight`` of 0."""
    weight = message.get("weight")
    if weight not in (None, 0, 1):
        raise _Bad(f'"weight" is {weight!r:.40}, not 0 or 1', "1 trains on the answer; 0 uses it only as context")
    return weight != 0


def _uses_tools(values: dict[str, Any]) -> bool:
    """Whether a record declares tools, or a message calls one or is what it returned."""
    given = [values.get(key) for key in (*_TOOLS, "tool_calls", "function_call", "tool_call_id")]
    called = any(each and not (isinstance(each, str) and each.strip() in ("", "[]", "{}", "null")) for each in given)
    return called or not {values.get(key) for key in ("role", "from") if isinstance(values.get(key), str)}.isdisjoint(
        ("tool", "function", "ipython", "function_call", "observation")
    )


PAIRS = RecordForm(("prompt", "completion"), _pair, '--pairs reads records {"prompt": "…", "completion": "…"}')
_SYNONYMS = {"human": "user", "gpt": "assistant", "model": "assistant"}  # of roles
_TOOLS = ("tools", "functions")
CHATS = RecordForm(
    ("messages",),
    _chat,
    '--chat reads records {"messages": [{"role": "user", "content": "…"}, …]}',
    strings=False,
    synonyms=("conversations", "conversation"),
    optional=("system", *_TOOLS),
)

KEYS = _AllKeys((), lambda record, number, place: json.dumps(sorted(record)), "", strings=False)  # a record's keys


Raw = TypeVar("Raw")


class Records(Generic[Raw]):
    """The records of a file, and what ``form`` reads from each. ``on_bad`` gets what is wrong with one."""

    unit = "line"  # what places are counted in

    def __init__(self, name: str, stream: ByteStream, form: RecordForm, encoding: TextEncoding, on_bad: OnBad) -> None:
        self.name, self.stream, self.form, self.encoding, self.on_bad = name, stream, form, encoding, on_bad
        self.otherwise = ""  # what else to do about a bad record

    def _rows(self) -> Iterator[tuple[int, Raw]]:
        """Yields the records as they are stored, and the number of each."""
        raise NotImplementedError

    def _parse(self, number: int, row: Raw) -> dict[str, Any] | None:
        """Returns the values of a record; None for an empty one. Raises `_Bad`, or a `UserError` that has its place."""
        raise NotImplementedError

    def documents(self) -> Iterator[str]:
        """Yields what the form makes of the records."""
        for number, row in self._rows():
            try:
                record = self._parse(number, row)
                if record is not None:
                    text = self.form.text(record, number, self._place)
                    yield text if text.isascii() else _without_surrogates(text, self.encoding)
            except _Bad as bad:
                self.on_bad(self._error(number, bad.message, bad.hint + self.otherwise))
            except UserError as error:
                self.on_bad(error)

    def _place(self, number: int) -> str:
        name = self.name.encode("utf-8", "backslashreplace").decode()  # it may be no UTF-8, and is part of a document
        return f"{name}, {self.unit} {number:,}"

    def _error(self, number: int, message: str, hint: str) -> UserError:
        return UserError(f"{self._place(number)}: {message}", hint)

    def _too_long(self, number: int) -> UserError:
        what = f"longer than {MAX_RECORD:,} bytes"
        return self._error(number, what, "split it into several, or use --skip-bad to skip it")

    def _lines(self) -> Iterator[tuple[int, tuple[int, bytes]]]:
        """Yields the number of each line, with its offset and its bytes, its end included."""
        buffered = io.BufferedReader(self.stream, BUFFER)
        number, offset = 0, 0
        while line := buffered.readline(MAX_RECORD + 1):
            number += 1
            if number == 1:
                self.encoding.check_mark(self.name, line)
            if len(line) <= MAX_RECORD:
                yield number, (offset, line)
            else:
                self.on_bad(self._too_long(number))
                while line and not line.endswith(b"\n"):
                    offset += len(line)
                    line = buffered.readline(MAX_RECORD)
            offset += len(line)


class JSONLines(Records[tuple[int, bytes]]):
    """JSON lines, an object each."""

    def _rows(self) -> Iterator[tuple[int, tuple[int, bytes]]]:
        return self._lines()

    def _parse(self, number: int, row: tuple[int, bytes]) -> dict[str, Any] | None:
        offset, line = row
        if line.startswith(_BOM):  # of the file, or of one that was appended
            line, offset = line.removeprefix(_BOM), offset + len(_BOM)
        try:
            text = self.encoding.decode(line).lstrip("\ufeff").strip(" \t\r\n")
        except UnicodeDecodeError as error:
            raise self.encoding.error(self.name, error, offset + error.start, number) from None
        return _object(text) if text else None


class JSONFile(Records[Any]):
    """A JSON file, parsed as its text comes in: an array of objects, or objects one after another, on one line each or
    on several. If the file's object holds a single list of records, these are read."""

    def _rows(self) -> Iterator[tuple[int, Any]]:
        self.otherwise = self.form.otherwise
        self._blocks = self.encoding.blocks(self.name, self.stream)
        self._text, self._at = "", 0  # what is in memory, and the position in it
        self._line, self._counted = 1, 0  # the line of the position `_counted`
        self._skipped = _NO_SPACE
        array = self._next() == "["
        if array:
            self._at, self._skipped = self._at + 1, _NO_SPACE_OR_COMMA
        while (mark := self._next()) and not (array and mark == "]"):
            line = self._line_at(self._at)
            try:
                value = self._value()
            except UserError as error:
                if array:
                    raise
                self.on_bad(error)
                self._find_object()
                continue
            yield from ((line, record) for record in ([value] if array else self._records(value)))
        if array:
            self._at += 1
            if not mark or self._next():
                what = "there is more after the array" if mark else "the array is not closed"
                raise self._not_json(what, self._at)

    def _parse(self, number: int, row: Any) -> dict[str, Any]:
        if not isinstance(row, dict):
            raise _Bad("not a JSON object", self.form.hint)
        return row

    def _records(self, value: Any) -> list[Any]:
        """Returns the records that a value of the file stands for: those of its only list of them, or itself."""
        if not isinstance(value, dict) or self.form.columns(value)[0] in value:
            return [value]
        lists = [each for each in value.values() if isinstance(each, list) and each]
        lists = [each for each in lists if isinstance(each[0], dict) and self.form.columns(each[0])[0] in each[0]]
        return lists[0] if len(lists) == 1 else [value]

    def _next(self) -> str:
        """Skips white space. Returns the character after it, or nothing at the end."""
        while True:
            found = self._skipped.search(self._text, self._at)
            self._at = found.start() if found else len(self._text)
            if found or not self._more():
                return self._text[self._at : self._at + 1]

    def _value(self) -> Any:
        """Returns the value at the position, and moves behind it."""
        while True:
            try:
                value, end = _decode(self._text, self._at)
                if end < len(self._text) or not self._more():  # more digits may follow
                    self._at = end
                    return value
            except RecursionError:
                raise self._not_json("it is nested too deep", self._at) from None
            except ValueError as error:  # also where the rest is not in memory yet
                if not self._more():
                    raise self._not_json(
                        getattr(error, "msg", reason(error)), getattr(error, "pos", self._at)
                    ) from None

    def _more(self) -> bool:
        """Reads at least as much as is in memory from the position on. Returns False at the end."""
        parts, size = [self._text[self._at :]], 2 * (len(self._text) - self._at)
        if size > 2 * MAX_RECORD:
            raise self._too_long(self._line_at(self._at))
        while sum(map(len, parts)) <= size and (block := next(self._blocks, "")):
            parts.append(block)
        if len(parts) == 1:
            return False
        self._line_at(self._at)
        self._text, self._at, self._counted = "".join(parts), 0, 0
        return True

    def _find_object(self) -> None:
        """Moves to the next line that begins with an object, or to the end."""
        while (found := self._text.find("\n{", self._at)) < 0:
            self._at = max(self._at, len(self._text) - 1)  # a line may end there
            if not self._more():
                self._at = len(self._text)
                return
        self._at = found + 1

    def _line_at(self, position: int) -> int:
        """Returns the number of the line at a position, which is not before the last one asked for."""
        self._line += self._text.count("\n", self._counted, position)
        self._counted = position
        return self._line

    def _not_json(self, what: str, position: int) -> UserError:
        hint = "give an array of objects, or objects in sequence, or use --skip-bad" + self.otherwise
        return self._error(self._line_at(position), f"not JSON: {what}", hint)


def _object(line: str) -> dict[str, Any]:
    try:
        record, end = _decode(line)
        if end < len(line):
            raise ValueError("there is more after the object")
    except RecursionError:
        raise _Bad("JSON that is nested too deep", "--skip-bad skips such lines") from None
    except ValueError as error:
        raise _Bad(f"not JSON: {reason(error)}", "give one object per line; --skip-bad skips other lines") from None
    if not isinstance(record, dict):
        hint = "give one object per line (for an array, name the file .json), or use --skip-bad"
        raise _Bad("not a JSON object", hint)
    return record


def _string(record: dict[str, Any], field: str, hint: str, null: bool = True) -> str:
    """Returns the string at a key; with ``null``, an empty one for null."""
    value = record.get(field, record)
    if value is record:
        raise _Bad(_missing(field, record, "keys"), hint)
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
        raise _Bad("an unpaired surrogate is not a character", "use --errors replace or --skip-bad")
    value, count = _SURROGATE.subn("\ufffd", value)
    encoding.replaced += count
    return value


def _missing(field: str, known: Iterable[Any], what: str) -> str:
    """Returns the message for a field that is missing."""
    some = list(known)
    names = ", ".join(map(str, some[:20])) + (", …" if len(some) > 20 else "") or "none"
    return f'it has no "{field}"; its {what}: {names}'


class Table(Records[list[str]]):
    """The rows of a table; the first one names the columns. In CSV a row may span lines within quotes, of `MAX_RECORD`
    characters together. TSV has no quotes (its media type, text/tab-separated-values): a row is a line."""

    delimiter = ","

    def _rows(self) -> Iterator[tuple[int, list[str]]]:
        rows = self._good_rows()
        line, self._header = next(rows, (0, [*self.form.keys]))
        keys = self.form.columns(self._header)
        for key in keys:
            if key not in self._header:
                raise self._error(line, _missing(key, self._header, "columns"), self._column_hint())
            if self._header.count(key) > 1:
                what = f'it has {self._header.count(key)} columns called "{key}"'
                raise self._error(line, what, "rename all but one")
        self._columns = {key: self._header.index(key) for key in keys}
        yield from rows

    def _parse(self, number: int, row: list[str]) -> dict[str, Any] | None:
        if row == self._header:  # of a file that was appended
            return None
        if len(row) != len(self._header):
            what = "a field with a comma or a line break must be quoted"
            if self.delimiter == "\t":
                what = "a .tsv field cannot contain tabs or line breaks, and quotes are ordinary characters"
            raise _Bad(
                f"{counted(len(row), 'field')}, but the header has {len(self._header)}",
                f"{what}; --skip-bad skips such rows",
            )
        return {key: _cell(row[column], self.encoding) for key, column in self._columns.items()}

    def _column_hint(self) -> str:
        for other, word in ((";", "semicolons"), ("\t", "tabs"), (",", "commas"), ("|", "bars")):
            if other != self.delimiter and len(self._header) == 1 and self.form.keys[0] in self._header[0].split(other):
                return f"its columns are separated by {word}: convert it to commas (.csv) or tabs (.tsv)"
        return self.form.hint

    def _good_rows(self) -> Iterator[tuple[int, list[str]]]:
        """Yields the rows that are not empty, each with the number of its first line."""
        csv.field_size_limit(MAX_RECORD)  # for the whole process
        self._left = self._lines()
        self._first = self._last = self._size = 0  # the row's first line, last line so far, and characters
        tabs = self.delimiter == "\t"
        reader = map(_tab_separated, self) if tabs else csv.reader(self, delimiter=self.delimiter, strict=True)
        while True:
            self._first = self._size = 0
            try:
                row = next(reader, None)
            except csv.Error as error:
                line, what = self._last, str(error)
                if what == "unexpected end of data":
                    line, what = self._first, "a quote is never closed"
                self.on_bad(self._error(line, what, "fix it, or use --skip-bad to skip it"))
            except UserError as error:
                self.on_bad(error)
            else:
                if row is None:
                    return
                if row:
                    yield self._first, row

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        """Returns the next line, for the parser. Unlike a generator, this continues after an error."""
        self._last, (_, line) = next(self._left)
        self._first = self._first or self._last
        if not self._size:  # the start of a row: of the file's first, or of a file that was appended
            line = line.removeprefix(_BOM)
        # Invalid bytes are carried through: they matter only in the wanted field.
        text = line.decode(self.encoding.name, "surrogateescape")
        if not self._size:
            text = text.lstrip("\ufeff")  # of another encoding
        self._size += len(text)
        if self._size > MAX_RECORD:
            raise self._too_long(self._last)
        return text


class TabbedTable(Table):
    """The rows of a .tsv file."""

    delimiter = "\t"


def _tab_separated(line: str) -> list[str]:
    line = line.removesuffix("\n").removesuffix("\r")
    return line.split("\t") if line else []


def _cell(value: str, encoding: TextEncoding) -> str:
    if "\0" in value:
        raise _Bad("a zero byte is not text", "--skip-bad skips such rows")
    if value.isascii() or not _SURROGATE.search(value):
        return value
    return _decoded(value.encode(encoding.name, "surrogateescape"), encoding, encoding.hint)


def _decoded(data: bytes, encoding: TextEncoding, hint: str) -> str:
    try:
        return encoding.decode(data)
    except UnicodeDecodeError as error:
        raise _Bad(f"not {encoding.shown}: byte 0x{data[error.start]:02x}", hint) from None


class Parquet(Records[tuple[Any, ...]]):
    """The rows of a Parquet file. Raises `WorkError` without pyarrow."""

    unit = "row"

    def _rows(self) -> Iterator[tuple[int, tuple[Any, ...]]]:
        try:
            from pyarrow import parquet as pq
        except ImportError:
            raise WorkError(f"{self.name} needs the package pyarrow", install_extra("parquet")) from None
        with translated(partial(damaged, self.name)):  # pyarrow raises many kinds
            about = pq.read_metadata(self.stream)
            schema = about.schema.to_arrow_schema()
            self._keys = keys = self.form.columns(schema.names)
            for key in keys:
                if key not in schema.names:
                    raise UserError(f"{self.name}: {_missing(key, schema.names, 'columns')}", self.form.hint)
                kind = schema.field(key).type
                if self.form.strings and not _is_text(kind):
                    raise UserError(f'{self.name}: "{key}" contains {kind}, not strings', self.form.hint)
            dictionaries = keys if self.form.strings else None
            with pq.ParquetFile(self.stream, metadata=about, read_dictionary=dictionaries) as opened:
                batches = opened.iter_batches(ROWS, columns=keys, use_threads=False)
                columns = ([_values(batch.column(key)) for key in keys] for batch in batches)
                yield from enumerate((row for batch in columns for row in zip(*batch, strict=True)), 1)

    def _parse(self, number: int, row: tuple[Any, ...]) -> dict[str, Any]:
        if any(isinstance(value, bytes) and len(value) > MAX_RECORD for value in row):
            raise _Bad(f"longer than {MAX_RECORD:,} bytes", "split it into several, or use --skip-bad")
        hint = "use --errors replace or --skip-bad"
        decoded = (_decoded(value, self.encoding, hint) if isinstance(value, bytes) else value for value in row)
        return dict(zip(self._keys, decoded, strict=True))


def _values(column: Any) -> list[Any]:
    """Returns the values of a column; strings as bytes, which may be invalid."""
    import pyarrow as pa

    if isinstance(column, pa.DictionaryArray):
        column = column.dictionary_decode()
    values: list[Any] = (column.cast(pa.large_binary()) if _is_text(column.type) else column).to_pylist()
    return values


def _is_text(kind: Any) -> bool:
    import pyarrow as pa

    plain = kind.value_type if pa.types.is_dictionary(kind) else kind
    return str(plain) in ("string", "large_string", "string_view", "null")
