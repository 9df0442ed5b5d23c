"""Extracts the text of HTML, EPUB, DOCX and PDF files. `gpt.documents.extract` runs this program in a separate process:
a hostile file can loop forever, allocate gigabytes or crash a C library, and Python cannot stop a thread.

The first line of stdin is an object of limits. A request is a line ``{"kind", "encoding", "errors"}`` and blocks of the
file, each after a line with its size; a size of 0 ends the file. The program answers with a line ``{"size",
"replaced"}`` and that many bytes of UTF-8, or with a line ``{"error", "hint"}`` or ``{"missing"}``. An answer that
takes longer than ``seconds``, plus one per ``rate`` bytes, ends the process.

Blank lines separate paragraphs and headings, line breaks separate list items and table rows, and tabs separate cells.
The program imports nothing from gpt.
"""

import codecs
import contextlib
import faulthandler
import io
import json
import os
import posixpath
import re
import signal
import statistics
import sys
import unicodedata
import zipfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from html.parser import HTMLParser
from itertools import pairwise
from typing import IO, Any
from urllib.parse import unquote
from xml.parsers import expat

_GET_AGAIN = "get it again, or skip it with --skip-bad"
_RENAME = "rename it if it has another format, or skip it with --skip-bad"


class Unreadable(Exception):
    """A file that cannot be read as text. The message continues a sentence that starts with the file's name."""

    def __init__(self, message: str, hint: str = _GET_AGAIN) -> None:
        super().__init__(message)
        self.hint = hint


SPACE, TAB, LINE, BLANK = 1, 2, 3, 4
_GAPS = ("", " ", "\t", "\n", "\n\n")


class Text:
    """Text in pieces. Between two pieces is one gap, the largest that was requested, or none."""

    longest = 2**26  # Maximum characters.

    def __init__(self) -> None:
        self.pieces: list[str] = []
        self.length, self.pending = 0, 0

    def gap(self, size: int) -> None:
        """Requests a gap before the next piece."""
        self.pending = max(self.pending, size)

    def write(self, piece: str) -> None:
        """Appends a piece. Raises `Unreadable` if the text becomes too long."""
        if piece:
            gap = _GAPS[self.pending] if self.pieces else ""
            if gap and self.pending != SPACE:
                self.pieces[-1] = self.pieces[-1].rstrip()
            self.pieces += (gap, piece)
            self.pending = 0
            self.length += len(gap) + len(piece)
            if self.length > self.longest:
                raise Unreadable(f"has more than {self.longest:,} characters", "split it into several files")

    def __str__(self) -> str:
        return "".join(self.pieces)


_BOMS = {codecs.BOM_UTF8: "utf-8-sig", codecs.BOM_UTF32_LE: "utf-32", codecs.BOM_UTF32_BE: "utf-32",
         codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}  # fmt: skip
_DECLARED = re.compile(
    rb"""<meta\b[^>]*?\bcharset\s*=\s*["']?\s*([\w.:-]+)|<\?xml\b[^>]*?\bencoding\s*=\s*["']([\w.:-]+)""", re.IGNORECASE
)
# Browsers read these labels so. A file whose declaration is readable as ASCII is not UTF-16.
_BROWSER_CODECS = {"iso8859-1": "cp1252", "ascii": "cp1252", "gb2312": "gb18030", "gbk": "gb18030", "utf-16": "utf-8"}


_replaced = {"bytes": 0}  # Invalid bytes replaced by U+FFFD in the current file.


def decode(data: bytes, encoding: str, errors: str) -> str:
    """Decodes HTML by its byte-order mark, otherwise by the encoding that it declares, otherwise as ``encoding``."""
    if (declared := _DECLARED.search(data[:4096])) is not None:
        with contextlib.suppress(LookupError, ValueError):
            label = codecs.lookup((declared[1] or declared[2]).decode()).name
            label = _BROWSER_CODECS.get(label, label)
            b"a".decode(label)  # Raises LookupError for codecs that are not text encodings.
            encoding = label
    encoding = next((name for bom, name in _BOMS.items() if data.startswith(bom)), encoding)
    try:
        text = data.decode(encoding, errors)
        if errors == "replace":
            _replaced["bytes"] += text.count("\ufffd") - data.decode(encoding, "ignore").count("\ufffd")
    except UnicodeDecodeError as error:
        where = f"byte 0x{data[error.start]:02x} at offset {error.start:,}"
        raise Unreadable(f"is not {encoding}: {where}", "use --encoding, --errors replace or --skip-bad") from None
    if "\0" in text:
        raise Unreadable("is not text: it has a zero byte", _RENAME)
    return text


_is_void = re.compile("area|base|br|col|embed|hr|img|input|link|meta|param|source|track|wbr").fullmatch
_is_skipped = re.compile(
    "audio|button|canvas|datalist|footer|iframe|nav|noscript|object|rp|rt|script|select|style|svg|template|textarea"
    "|title|video|navigation|banner|contentinfo|search"  # The last four are roles.
).fullmatch
_is_paragraph = re.compile(
    "address|article|aside|blockquote|body|details|dl|fieldset|figure|footer|form|h[1-6]|header|hr|main|nav|ol|p|pre"
    "|section|table|ul"
).fullmatch
_is_line = re.compile("caption|center|dd|div|dt|figcaption|legend|li|option|summary|tbody|tfoot|thead|tr").fullmatch
_is_cell = re.compile("td|th").fullmatch
_closes_itself = re.compile("dd|dt|li|option|p|td|th|tr").fullmatch  # The next element of this kind closes it.
_SPACES = re.compile(r"[ \t\n\r\f]+")
_INVISIBLE = re.compile(r"display\s*:\s*none")


class Page(HTMLParser):
    """The visible text of an HTML page, without navigation, forms and footers. ``main`` is the text of ``<main>``."""

    def __init__(self, data: str) -> None:
        super().__init__()
        self.text, self.main = Text(), Text()
        # The open elements: the name, and whether it is hidden, preformatted, and inside <main>.
        self.open = [("", False, False, False)]
        self.feed(data)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Opens an element."""
        if _closes_itself(tag) and self.open[-1][0] == tag:
            self.handle_endtag(tag)
        self._separate(tag)
        if not _is_void(tag):
            values = dict(attrs)
            role, style = values.get("role") or "", values.get("style") or ""
            is_skipped = bool(_is_skipped(tag) or _is_skipped(role) or "hidden" in values or _INVISIBLE.search(style))
            _, was_hidden, was_pre, was_main = self.open[-1]
            is_main = tag == "main" or role == "main"
            self.open.append((tag, was_hidden or is_skipped, was_pre or tag == "pre", was_main or is_main))

    def handle_endtag(self, tag: str) -> None:
        """Closes an element and the open elements inside it."""
        if any(name == tag for name, *_ in self.open[1:]):
            while self.open.pop()[0] != tag:
                pass
        if not _is_void(tag):
            self._separate(tag)

    def handle_data(self, data: str) -> None:
        """Adds text. White space collapses, except in preformatted text."""
        _, is_hidden, is_pre, is_main = self.open[-1]
        data = data.replace("\xad", "")  # Soft hyphens.
        for text in () if is_hidden else (self.text, self.main) if is_main else (self.text,):
            if is_pre:
                data = data.replace("\r\n", "\n")
                text.write(data.removeprefix("\n") if text.pending == BLANK else data)
                continue
            words = _SPACES.sub(" ", data)
            text.gap(SPACE if words.startswith(" ") else 0)
            text.write(words.strip(" "))
            text.gap(SPACE if words.endswith(" ") else 0)

    def _separate(self, tag: str) -> None:
        for text in (self.text, self.main):
            if tag == "br":
                text.gap(BLANK if text.pending == LINE else LINE)
            elif _is_paragraph(tag):
                text.gap(BLANK)
            elif _is_line(tag):
                text.gap(LINE)
            elif _is_cell(tag):
                text.gap(TAB)

    def __str__(self) -> str:
        return (str(self.main) or str(self.text)).strip("\n")


def read_html(file: io.BytesIO, encoding: str, errors: str) -> str:
    """Returns the text of an HTML page."""
    return str(Page(decode(file.getvalue(), encoding, errors)))


class Archive:
    """The members of a ZIP file. Raises `Unreadable` if they unpack to more than ``largest`` bytes."""

    largest = 2**28

    def __init__(self, file: io.BytesIO, kind: str) -> None:
        if file.getvalue()[:8] == b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1":  # Encrypted Office files and Word 97 files.
            raise Unreadable("is encrypted, or a .doc", f"save it as {kind} without a password, or use --skip-bad")
        if not zipfile.is_zipfile(file):
            raise Unreadable(f"is not {kind}, or is cut off", _RENAME)
        self.zip = zipfile.ZipFile(file)
        self.names = set(self.zip.namelist())
        self.size = 0

    def read(self, name: str) -> bytes:
        """Returns a member."""
        if name not in self.names:
            raise Unreadable(f"is damaged: it has no {name[:200]}")
        info = self.zip.getinfo(name)
        if info.flag_bits & 1 or info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise Unreadable("is encrypted, or packed with a method other than deflate", "save it without a password")
        with self.zip.open(info) as member:
            data = member.read(self.largest - self.size + 1)
        self.size += len(data)
        if self.size > self.largest:
            raise Unreadable(f"unpacks to more than {self.largest >> 20:,} MiB", "split it, or skip it with --skip-bad")
        return data


def parse_xml(data: bytes, start: Callable[[str, dict[str, str]], None], **handlers: Callable[..., None]) -> None:
    """Parses XML. ``start`` and ``end`` get names without namespaces. Raises `Unreadable` for an entity declaration;
    expat itself never fetches anything."""

    def refuse(*args: Any) -> None:
        raise Unreadable("declares XML entities, which such files never need", "skip it with --skip-bad")

    parser = expat.ParserCreate(namespace_separator=" ")
    parser.buffer_text = True
    parser.EntityDeclHandler = refuse
    parser.StartElementHandler = lambda name, values: start(
        name.rpartition(" ")[2], {key.rpartition(" ")[2]: value for key, value in values.items()}
    )
    if "end" in handlers:
        parser.EndElementHandler = lambda name: handlers["end"](name.rpartition(" ")[2])
        parser.CharacterDataHandler = handlers["text"]
    parser.Parse(data, True)


def elements(data: bytes) -> list[tuple[str, dict[str, str]]]:
    """Returns the names and attributes of all elements of an XML file."""
    found: list[tuple[str, dict[str, str]]] = []
    parse_xml(data, lambda name, values: found.append((name, values)))
    return found


_FONT_OBFUSCATION = ("http://www.idpf.org/2008/embedding", "http://ns.adobe.com/pdf/enc#RC")


def read_epub(file: io.BytesIO, encoding: str, errors: str) -> str:
    """Returns the text of an EPUB in the order of its spine, without the navigation page."""
    archive = Archive(file, "an EPUB")
    if "META-INF/encryption.xml" in archive.names and any(
        name == "EncryptionMethod" and values.get("Algorithm") not in _FONT_OBFUSCATION
        for name, values in elements(archive.read("META-INF/encryption.xml"))
    ):
        raise Unreadable("is protected by DRM", "use a copy without DRM, or skip it with --skip-bad")
    container = elements(archive.read("META-INF/container.xml"))
    package = next((values.get("full-path", "") for name, values in container if name == "rootfile"), "")
    pages, spine, contents = {}, [], set()
    for name, values in elements(archive.read(package)):
        path = unquote(values.get("href", "").partition("#")[0])
        path = posixpath.normpath(posixpath.join(posixpath.dirname(package), path))
        if name == "item" and "html" in values.get("media-type", ""):
            pages[values.get("id")] = path
            contents |= {path} if "nav" in values.get("properties", "").split() else set()
        elif name == "itemref":
            spine.append(values.get("idref"))
        elif name == "reference" and values.get("type") == "toc":  # The navigation page of EPUB 2.
            contents.add(path)
    text = Text()
    for path in dict.fromkeys(pages[id] for id in spine if id in pages):
        if path not in contents:
            text.gap(BLANK)
            text.write(read_html(io.BytesIO(archive.read(path)), "utf-8", errors))
    return str(text)


class Docx(Text):
    """The text of a part of a DOCX file, without deleted text and tables of contents."""

    SKIPPED = ("del", "moveFrom", "Fallback")  # Fallback repeats a text box for old versions of Word.

    def __init__(self) -> None:
        super().__init__()
        self.skipped, self.cells = 0, 0
        self.is_text = self.is_contents = self.begins = False
        self.paragraph_gap = BLANK

    def start(self, name: str, values: dict[str, str]) -> None:
        """Opens an element."""
        if name in self.SKIPPED:
            self.skipped += 1
        elif name == "tbl":
            self.gap(0 if self.cells else BLANK)
        elif name == "tc":
            self.cells += 1
        elif name == "p":
            self.begins, self.is_contents, self.paragraph_gap = True, False, SPACE if self.cells else BLANK
        elif name == "pStyle" and values.get("val", "").startswith("TOC"):
            self.is_contents = True
        elif name == "numPr" or (name == "pStyle" and values.get("val", "").startswith("List")):
            self.paragraph_gap = min(self.paragraph_gap, LINE)
        elif name == "t":
            self.is_text = True
        elif name in ("br", "cr"):
            self.gap(LINE)
        elif name == "tab" and not values:  # A tab stop has attributes.
            self.gap(TAB)
        elif name == "noBreakHyphen":
            self.text("-", True)

    def end(self, name: str) -> None:
        """Closes an element."""
        if name in self.SKIPPED:
            self.skipped -= 1
        elif name == "t":
            self.is_text = False
        elif name == "p":
            self.gap(self.paragraph_gap)
        elif name == "tc":
            self.cells -= 1
            self.pending = TAB
        elif name in ("tr", "tbl"):
            self.pending = LINE if name == "tr" else BLANK

    def text(self, piece: str, is_text: bool = False) -> None:
        """Adds text."""
        if (is_text or self.is_text) and not self.skipped and not self.is_contents:
            self.gap(self.paragraph_gap if self.begins else 0)
            self.write(piece)
            self.begins = False


def read_docx(file: io.BytesIO, encoding: str, errors: str) -> str:
    """Returns the text of a DOCX file, then its footnotes and endnotes."""
    archive = Archive(file, "a DOCX")
    targets = (
        values.get("Target", "").lstrip("/")
        for name, values in elements(archive.read("_rels/.rels"))
        if name == "Relationship" and values.get("Type", "").endswith("/officeDocument")
    )
    main = next(targets, "word/document.xml")
    folder = posixpath.dirname(main)
    text = Text()
    for path in (main, posixpath.join(folder, "footnotes.xml"), posixpath.join(folder, "endnotes.xml")):
        if path == main or path in archive.names:
            part = Docx()
            parse_xml(archive.read(path), part.start, end=part.end, text=part.text)
            text.gap(BLANK)
            text.write(str(part))
    return str(text)


@dataclass(slots=True)
class Row:
    """A line of a PDF page, in points from the bottom left."""

    text: str
    left: float
    right: float
    bottom: float
    size: float  # Font size.
    margin: float = 0.0  # The right end of the longest line of its column.

    def joined(self, row: "Row") -> list["Row"]:
        """Returns this row and the next, as one row if they are on the same line: table cells, or a superscript."""
        distance, size = row.left - self.right, max(self.size, row.size)
        if distance < -1 or abs(row.bottom - self.bottom) > 0.6 * size:
            return [self, row]
        space = "\t" if distance > size else " " if distance > 0.2 * size else ""
        bottom = self.bottom if self.size >= row.size else row.bottom
        return [Row(self.text + space + row.text, self.left, row.right, bottom, size)]

    def follows(self, other: "Row", pages: int) -> bool:
        """Whether this is the running header or footer ``other`` some ``pages`` later: at the same height, with the
        same text, and with numbers that are equal or count pages. A roman numeral can be anything."""
        if abs(self.bottom - other.bottom) > 3 or _NUMBER.sub("#", self.text) != _NUMBER.sub("#", other.text):
            return False
        numbers = zip(_NUMBER.findall(self.text), _NUMBER.findall(other.text), strict=True)
        return all(not a.isdigit() or not b.isdigit() or int(a) - int(b) in (0, pages) for a, b in numbers)


_NUMBER = re.compile(r"\d{1,9}|^\W*[ivxlcdm]+\W*$", re.IGNORECASE | re.ASCII)
_MARK = "\x02"  # PDFium's code for a hyphen-minus at the end of a line. The line break is missing.
_SOFT = "\u2010\xad"
_LIGATURES = {ord(c): unicodedata.normalize("NFKC", c) for c in map(chr, range(0xFB00, 0xFB07))}
_CONTROLS = dict.fromkeys([*range(9), *range(14, 32), 127, 0xAD, 0xFFFE, 0xFFFF])
_BULLET = re.compile(r"[•◦▪‣●○■–*-] |\(?(\d{1,3}|[a-z])[.)] ")


def _rows(page: Any, raw: Any) -> list[Row]:
    """Returns the lines of a page in reading order."""
    text_page = page.get_textpage()
    handle = text_page.raw
    chars = [chr(raw.FPDFText_GetUnicode(handle, i)) for i in range(text_page.count_chars())]
    rows: list[Row] = []
    start = 0
    for end in [i for i, char in enumerate(chars, 1) if char in ("\n", "\r", _MARK)] + [len(chars)]:
        visible = [i for i in range(start, end) if (chars[i] > " " and not chars[i].isspace()) or chars[i] == _MARK]
        start = end
        if visible:
            first, middle, last = visible[0], visible[len(visible) // 2], visible[-1]
            left, bottom, _, _ = text_page.get_charbox(first, loose=True)
            right = text_page.get_charbox(last, loose=True)[2]
            sizes = [raw.FPDFText_GetFontSize(text_page, i) for i in (first, middle, last)]
            text = "".join(chars[first : last + 1])
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")  # On Windows, PDFium uses UTF-16.
            row = Row(text.translate(_LIGATURES), left, right, bottom, statistics.median(sizes))
            rows[-1:] = rows[-1].joined(row) if rows else [row]
    text_page.close()
    return rows


def _without_edges(pages: list[list[Row]]) -> Iterator[list[Row]]:
    """Yields the pages without running headers, footers and page numbers: the two highest and the two lowest lines, if
    one of the nearest four pages has the same text at the same height."""
    edges = []
    for rows in pages:
        by_height = sorted(rows, key=lambda row: row.bottom)
        edges.append([*by_height[:2], *by_height[2:][-2:]])
    for i, rows in enumerate(pages):
        near = [(j, row) for j in (i - 2, i - 1, i + 1, i + 2) if 0 <= j < len(pages) for row in edges[j]]
        running = {id(row) for row in edges[i] if any(row.follows(other, i - j) for j, other in near)}
        yield [row for row in rows if id(row) not in running]


def _columns(pages: Iterable[list[Row]]) -> Iterator[list[Row]]:
    """Yields the columns of pages, and sets the margins of their rows."""
    for rows in pages:
        columns: list[list[Row]] = []
        for row in rows:
            if not columns or row.bottom > columns[-1][-1].bottom + row.size:
                columns.append([])
            columns[-1].append(row)
        for column in columns:
            margin = max(row.right for row in column)
            for row in column:
                row.margin = margin
            yield column


def _is_cjk(char: str) -> bool:
    """Whether a character belongs to a script that puts no spaces between words."""
    return unicodedata.east_asian_width(char) in ("W", "F") and not "\uac00" <= char <= "\ud7a3"  # Korean has spaces.


def _gap_between(above: Row, row: Row, pitch: float | None) -> int:
    """Returns the gap between two lines. ``pitch`` is the usual distance of lines of this size; None across columns."""
    word = row.text[0] if _is_cjk(row.text[0]) else row.text.split(maxsplit=1)[0]
    has_room = above.margin - above.right > (row.right - row.left) * (len(word) + 2) / max(1, len(row.text))
    ends_sentence = above.text.rstrip("\"'”’»)」』）")[-1:] in tuple(".!?:…。！？：")
    if abs(above.size - row.size) > 0.08 * row.size or (pitch is None and has_room):
        return BLANK
    if pitch is not None and above.bottom - row.bottom > 1.25 * pitch:
        return BLANK
    if pitch is not None and row.left > above.left + 0.8 * row.size and (has_room or ends_sentence):
        return BLANK
    return LINE if has_room or _BULLET.match(row.text) else SPACE


def _join(columns: list[list[Row]]) -> str:
    """Returns the text of lines. Joins the lines of a paragraph and mends hyphenated words."""
    distances = defaultdict(list)
    for column in columns:
        for above, row in pairwise(column):
            if abs(above.size - row.size) < 0.5 and above.bottom - row.bottom > 0.5 * row.size:
                distances[round(row.size)].append(above.bottom - row.bottom)
    pitches = {size: statistics.median_low(values) for size, values in distances.items()}
    text, mend, previous = Text(), _Mender(columns), None
    for column in columns:
        for i, row in enumerate(column):
            if previous is not None:
                size = _gap_between(previous, row, pitches.get(round(row.size), 9e9) if i else None)
                mended = mend(text.pieces[-1], row.text) if size == SPACE or previous.text.endswith(_MARK) else None
                text.pieces[-1] = text.pieces[-1] if mended is None else mended
                text.gap(size if mended is None else 0)
            text.write(row.text)
            previous = row
    return str(text).translate(_CONTROLS)


class _Mender:
    """Joins words that were hyphenated or broken at the end of a line."""

    def __init__(self, columns: list[list[Row]]) -> None:
        rows = [row.text for column in columns for row in column]
        self.words = {word for row in rows for word in re.findall(r"\w+(?:-\w+)*", row)}
        self.has_soft = any(row[-1] in _SOFT for row in rows)  # Otherwise all hyphens look the same.

    def __call__(self, ending: str, row: str) -> str | None:
        """Returns the line before ``row``, without a hyphen that does not belong to the word. Returns None if the line
        does not end inside a word."""
        before, hyphen = ending[:-1], ending[-1]
        if hyphen in _SOFT:
            return before
        if (hyphen in "/—" and not before[-1:].isspace()) or (_is_cjk(hyphen) and _is_cjk(row[0])):
            return ending
        if hyphen not in ("-", _MARK) or not before[-1:].isalpha() or not row[0].islower():
            return ending.replace(_MARK, "-") if hyphen == _MARK else None
        start, rest = re.findall(r"\w*$", before)[0], re.findall(r"^\w*", row)[0]
        is_compound = f"{start}-{rest}" in self.words and start + rest not in self.words
        return before + "-" if self.has_soft or is_compound else before


def read_pdf(file: io.BytesIO, encoding: str, errors: str) -> str:
    """Returns the text of a PDF."""
    import pypdfium2
    from pypdfium2 import raw

    data = file.getvalue()
    if b"%PDF-" not in data[:1024]:
        raise Unreadable("is not a PDF", _RENAME)
    if b"%%EOF" not in data[-(2**16) :]:
        raise Unreadable("is damaged: its end is missing")
    try:
        document = pypdfium2.PdfDocument(data)
    except pypdfium2.PdfiumError:
        if raw.FPDF_GetLastError() in (raw.FPDF_ERR_PASSWORD, raw.FPDF_ERR_SECURITY):
            raise Unreadable("is encrypted", "save it without a password, or skip it with --skip-bad") from None
        raise
    pages, scans = [], 0
    for page in document:
        pages.append(_rows(page, raw))
        scans += not pages[-1] and any(page.get_objects([raw.FPDF_PAGEOBJ_IMAGE], max_depth=3))
        page.close()
    if scans > len(pages) / 2:
        where = "" if scans == len(pages) else f" on {scans:,} of {len(pages):,} pages"
        raise Unreadable(f"has no text{where}, only images", "run OCR on it, or skip it with --skip-bad")
    return _join([*_columns(_without_edges(pages))])


_READERS = {"html": read_html, "epub": read_epub, "docx": read_docx, "pdf": read_pdf}


def answer(request: dict[str, Any], file: io.BytesIO) -> tuple[dict[str, Any], bytes]:
    """Returns the answer to a request, and the text."""
    _replaced["bytes"] = 0
    try:
        text = _READERS[request["kind"]](file, request["encoding"], request["errors"]).encode(errors="replace")
        if not text.strip():
            raise Unreadable("has no text", "skip it with --skip-bad")
        return {"size": len(text), "replaced": _replaced["bytes"]}, text
    except Unreadable as error:
        return {"error": str(error), "hint": error.hint}, b""
    except ImportError as error:
        return {"missing": error.name}, b""
    except MemoryError:
        return {"error": "needs too much memory", "hint": "split it, or skip it with --skip-bad"}, b""
    except Exception as error:  # Libraries raise many exception types.
        reason = (str(error) or type(error).__name__).splitlines()[0][:200]
        return {"error": f"is damaged: {reason}", "hint": _GET_AGAIN}, b""


def serve(requests: IO[bytes], out: IO[bytes]) -> None:
    """Answers all requests."""
    settings = json.loads(requests.readline())
    Text.longest, Archive.largest = settings["longest"], settings["unpacked"]
    if sys.platform != "win32":
        import resource

        with contextlib.suppress(ValueError, OSError):  # macOS refuses this limit.
            resource.setrlimit(resource.RLIMIT_AS, (settings["memory"], settings["memory"]))
    with open(os.devnull, "w") as devnull:
        for line in requests:
            request, file = json.loads(line), io.BytesIO()
            while (size := int(requests.readline())) > 0:
                file.write(requests.read(size))
            seconds = settings["seconds"] + file.tell() // settings["rate"]
            # A C thread that does not need the GIL ends the process after the time limit.
            faulthandler.dump_traceback_later(seconds, exit=True, file=devnull)
            reply, text = answer(request, file)
            faulthandler.cancel_dump_traceback_later()
            out.write(json.dumps(reply).encode() + b"\n" + text)
            out.flush()


if __name__ == "__main__":
    for name in {"SIGINT", "SIGTERM", "SIGHUP"} & {*dir(signal)}:
        signal.signal(getattr(signal, name), signal.SIG_IGN)  # The parent process ends this one.
    serve(sys.stdin.buffer, sys.stdout.buffer)
