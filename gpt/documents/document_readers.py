"""Extracts the text of documents. `gpt.documents.extract` runs this program in a separate process: a hostile file can
loop forever, allocate gigabytes or crash a C library, and Python cannot stop a thread.

The first line of stdin is an object of limits. A request is a line ``{"kind", "encoding", "errors"}`` and blocks of the
file, each after a line with its size; a size of 0 ends the file. The program answers with a line ``{"size",
"replaced"}`` and that many bytes of UTF-8, or with a line ``{"error", "hint"}`` or ``{"missing"}``. An answer that
takes longer than ``seconds``, plus one per ``rate`` bytes, ends the process.

EPUB and DOCX files become HTML; one function makes text of HTML. Blank lines separate paragraphs and headings, line
breaks separate list items and table rows, and tabs separate cells. The program imports nothing from gpt.
"""

import codecs
import contextlib
import faulthandler
import io
import json
import math
import os
import posixpath
import re
import signal
import statistics
import sys
import unicodedata
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from typing import IO, Any
from urllib.parse import unquote
from xml.etree import ElementTree

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
    """Text in pieces. Between two pieces is one gap, the largest that was requested, and then the requested tabs."""

    longest = 2**26  # Maximum characters.

    def __init__(self) -> None:
        self.pieces: list[str] = []
        self.length, self.pending, self.tabs = 0, 0, 0

    def gap(self, size: int) -> None:
        """Requests a gap before the next piece."""
        self.pending = max(self.pending, size)

    def write(self, piece: str) -> None:
        """Appends a piece. Raises `Unreadable` if the text becomes too long."""
        if piece:
            gap = _GAPS[self.pending] if self.pieces and not (self.tabs and self.pending < LINE) else ""
            gap += "\t" * self.tabs
            if gap not in ("", " ") and self.pieces:
                self.pieces[-1] = self.pieces[-1].rstrip()
            self.pieces += (gap, piece)
            self.pending = self.tabs = 0
            self.length += len(gap) + len(piece)
            if self.length > self.longest:
                raise Unreadable(f"has more than {self.longest:,} characters", "split it into several files")

    def __str__(self) -> str:
        return "".join(self.pieces)


_BOMS = {codecs.BOM_UTF8: "utf-8-sig", codecs.BOM_UTF32_LE: "utf-32", codecs.BOM_UTF32_BE: "utf-32",
         codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}  # fmt: skip
_DECLARATION = re.compile(
    rb"""<\?xml\b[^>]*?\bencoding\s*=\s*["']([\w.:-]+)|<meta\b[^>]*?\bcharset\s*=\s*["']?\s*([\w.:-]+)""", re.IGNORECASE
)
_replaced = {"bytes": 0}  # Invalid bytes replaced by U+FFFD in the current file.


def _declared_encoding(data: bytes) -> str | None:
    """Returns the encoding that HTML or XML declares, as browsers read labels."""
    import webencodings

    match = _DECLARATION.search(data[:4096])
    encoding = webencodings.lookup((match[1] or match[2]).decode()) if match else None
    if encoding is None:
        return None
    # A file whose declaration is readable as ASCII is not UTF-16.
    return "utf-8" if encoding.name.startswith("utf-16") else str(encoding.codec_info.name)


def decode(data: bytes, encoding: str, errors: str, label: str = "", is_html: bool = True) -> str:
    """Decodes text by its byte-order mark, otherwise by the ``label`` from outside it or the encoding that HTML
    declares. If there is none, or if it is not the right one, decodes it as ``encoding``."""
    import webencodings

    found = webencodings.lookup(label.replace("latin-", "latin")) if label else None
    declared = found.codec_info.name if found is not None else _declared_encoding(data) if is_html else None
    declared = next((name for bom, name in _BOMS.items() if data.startswith(bom)), declared)
    text = None
    if declared is not None:
        with contextlib.suppress(UnicodeDecodeError):
            text = data.decode(declared)
        if text is None and encoding == "utf-8":
            encoding = declared
    try:
        if text is None:
            text = data.decode(encoding, errors)
            if errors == "replace":
                _replaced["bytes"] += text.count("\ufffd") - data.decode(encoding, "ignore").count("\ufffd")
    except UnicodeDecodeError as error:
        where = f"byte 0x{data[error.start]:02x} at offset {error.start:,}"
        raise Unreadable(f"is not {encoding}: {where}", "use --encoding, --errors replace or --skip-bad") from None
    if "\0" in text:
        raise Unreadable("is not text: it has a zero byte", _RENAME)
    return text.replace("\r\n", "\n")


_VOID = "area|base|br|col|embed|hr|img|input|link|meta|param|source|track|wbr"
_is_skipped = re.compile(
    "-comment|annotation|annotation-xml|audio|button|canvas|datalist|dialog|footer|head|iframe|nav|noscript|object|rp|rt"
    "|script|select|style|svg|template|textarea|title|video"
    "|navigation|banner|contentinfo|search|pagebreak|noteref|doc-(pagebreak|noteref|backlink|toc)"  # These are roles.
).fullmatch
_is_paragraph = re.compile(
    "address|article|aside|blockquote|body|details|dl|fieldset|figure|footer|form|h[1-6]|header|hr|main|nav|ol|p|pre"
    "|section|table|ul"
).fullmatch
_is_line = re.compile("caption|center|dd|div|dt|figcaption|legend|li|option|summary|tbody|tfoot|thead|tr").fullmatch
_is_inline = re.compile("a|abbr|b|em|font|i|mjx-math|small|span|strong|sub|sup").fullmatch
_SPACES = re.compile(r"[ \t\n\r\f]+")
_INVISIBLE = re.compile(r"display\s*:\s*none|visibility\s*:\s*hidden", re.IGNORECASE)
_DISPLAY = re.compile(r"^\{\\displaystyle (.*)\}$", re.DOTALL)  # Wikipedia's formulas.
_IN_LAYOUT = "table, p, div, ul, ol, dl, h1, h2, h3, h4, h5, h6, pre, blockquote"  # A table of data has none inside.


def _is_hidden(node: Any) -> bool:
    """Whether a reader does not see an element, or sees no text of the page in it."""
    if _is_skipped(node.tag):
        return True
    values = node.attributes
    roles = f"{values.get('role') or ''} {values.get('epub:type') or ''}".split()
    is_formula = "mathml" in (values.get("class") or "")  # KaTeX and Wikipedia hide the MathML of a formula.
    is_invisible = "hidden" in values or bool(_INVISIBLE.search(values.get("style") or ""))
    is_copy = values.get("aria-hidden") == "true" and bool(_is_inline(node.tag))
    is_permalink = node.tag == "a" and node.text() in ("¶", "#", "§")
    return any(map(_is_skipped, roles)) or is_copy or is_permalink or (is_invisible and not is_formula)


class _Page:
    """Collects the text of an HTML element."""

    def __init__(self, root: Any) -> None:
        self.text = Text()
        self.preformatted = 0  # How many open elements are <pre>.
        self.has_cells: list[bool] = []  # Whether each open table has data, in cells that tabs separate.
        self.column = 0
        node, depth = root, 0  # Without recursion, because elements can be nested deep.
        while True:
            if node.tag == "-text" or not _is_hidden(node):
                child = self._open(node)
                if child is not None:
                    node, depth = child, depth + 1
                    continue
                self._close(node)
            while depth and node.next is None:
                node, depth = node.parent, depth - 1
                self._close(node)
            if not depth:
                return
            node = node.next

    def _open(self, node: Any) -> Any:
        """Opens an element or adds text. Returns the first child to visit."""
        tag = node.tag
        if tag == "-text":
            self._write(node.text_content or "")
            return None
        if tag == "math" and (formula := node.css_first('annotation[encoding="application/x-tex"]')) is not None:
            self._write(_DISPLAY.sub(r"\1", formula.text()))
            return None
        self._separate(tag)
        self.preformatted += tag == "pre"
        if tag == "table":
            self.has_cells.append(len(node.css(_IN_LAYOUT)) == 1)
        elif tag == "tr":
            self.text.tabs = self.column = 0
        elif tag in ("td", "th") and self.has_cells and self.has_cells[-1]:
            self.text.tabs += self.column > 0
            self.column += 1
        elif tag in ("td", "th"):
            self.text.gap(LINE)
        return node.first_child

    def _close(self, node: Any) -> None:
        self._separate(node.tag if node.tag != "br" else "")
        self.preformatted -= node.tag == "pre"
        if node.tag == "table" and self.has_cells:
            self.has_cells.pop()
            self.text.tabs = 0

    def _write(self, data: str) -> None:
        """Adds text. White space collapses, except in preformatted text."""
        data = data.replace("\xad", "")  # Soft hyphens.
        if self.preformatted:
            self.text.write(data)
            return
        words = _SPACES.sub(" ", data)
        self.text.gap(SPACE if words.startswith(" ") else 0)
        self.text.write(words.strip(" "))
        self.text.gap(SPACE if words.endswith(" ") else 0)

    def _separate(self, tag: str) -> None:
        text = self.text
        if tag == "br":
            text.gap(BLANK if text.pending == LINE else LINE)
        elif tag == "x-tab":
            text.gap(TAB)
        elif _is_paragraph(tag):
            text.gap(BLANK)
        elif _is_line(tag):
            text.gap(LINE)


def page_text(html: str) -> str:
    """Returns the visible text of an HTML page, without navigation, forms and footers: that of its <main>, if any."""
    from selectolax.lexbor import LexborHTMLParser

    tree = LexborHTMLParser(html)
    main = tree.css_first("main, [role=main]")
    text = str(_Page(main).text) if main is not None else ""
    return (text or str(_Page(tree.root).text)).strip("\n")


def read_html(file: io.BytesIO, encoding: str, errors: str) -> str:
    """Returns the text of an HTML page."""
    return page_text(decode(file.getvalue(), encoding, errors))


_CDATA = re.compile(r"<!\[CDATA\[(.*?)\]\]>", re.DOTALL)
_CLOSES_ITSELF = re.compile(rf"<(?!(?:{_VOID})\b)([\w:-]+)([^<>]*)/>")


def _xhtml(data: bytes, encoding: str, errors: str) -> str:
    """Returns XHTML in the syntax of HTML, where elements do not close themselves."""
    text = _CDATA.sub(lambda match: escape(match[1]), decode(data, encoding, errors))
    return _CLOSES_ITSELF.sub(r"<\1\2></\1>", text)


def read_xhtml(file: io.BytesIO, encoding: str, errors: str) -> str:
    """Returns the text of an XHTML page."""
    return page_text(_xhtml(file.getvalue(), encoding, errors))


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

    def xml(self, name: str) -> ElementTree.Element:
        """Returns the root of an XML member, without namespaces. Raises `Unreadable` for an entity declaration; expat
        itself never fetches anything, and limits how much entities grow."""
        data = self.read(name)
        if b"<!ENTITY" in data:
            raise Unreadable("declares XML entities, which such files never need", "skip it with --skip-bad")
        root = ElementTree.fromstring(data)
        for element in root.iter():
            element.tag = element.tag.rpartition("}")[2]
            element.attrib.update({key.rpartition("}")[2]: value for key, value in element.attrib.items()})
        return root


_FONT_OBFUSCATION = ("http://www.idpf.org/2008/embedding", "http://ns.adobe.com/pdf/enc#RC")


def read_epub(file: io.BytesIO, encoding: str, errors: str) -> str:
    """Returns the text of an EPUB in the order of its spine."""
    archive = Archive(file, "an EPUB")
    if "META-INF/encryption.xml" in archive.names and any(
        method.get("Algorithm") not in _FONT_OBFUSCATION
        for method in archive.xml("META-INF/encryption.xml").iter("EncryptionMethod")
    ):
        raise Unreadable("is protected by DRM", "use a copy without DRM, or skip it with --skip-bad")
    roots = archive.xml("META-INF/container.xml").iter("rootfile")
    package = next((root.get("full-path", "") for root in roots), "")
    root, pages = archive.xml(package), {}
    for item in root.iter("item"):
        if "html" in item.get("media-type", ""):
            folder, href = posixpath.dirname(package), unquote(item.get("href", "").partition("#")[0])
            pages[item.get("id")] = posixpath.normpath(posixpath.join(folder, href))
    order = dict.fromkeys(pages[id] for item in root.iter("itemref") if (id := item.get("idref")) in pages)
    return "\n\n".join(filter(None, (page_text(_xhtml(archive.read(path), "utf-8", errors)) for path in order)))


_DOCX_HTML = {
    "br": "<br>", "cr": "<br>", "tab": "<x-tab></x-tab>", "ptab": "<x-tab></x-tab>", "noBreakHyphen": "-", "sup": "^",
    "sub": "_", "sym": "\ufffd",
}  # fmt: skip
_DOCX_BLOCKS = {"tbl": "table", "tr": "tr", "tc": "td", "p": "p"}
# Fallback repeats a text box for old versions of Word, and rt is the reading of a ruby.
_DOCX_SKIPPED = {"del", "moveFrom", "Fallback", "rt", "instrText", "pPr", "delText"}


def _docx_html(element: ElementTree.Element, in_cell: bool = False) -> str:
    """Returns a part of a DOCX file as HTML, without deleted text and tables of contents."""
    tag, gallery = element.tag, element.find("sdtPr/docPartObj/docPartGallery")
    if tag in _DOCX_SKIPPED or (gallery is not None and gallery.get("val") == "Table of Contents"):
        return ""
    if tag == "t":
        return escape(element.text or "")
    if tag == "altChunk":
        raise Unreadable("has another document in it", "save it again in Word, or use --skip-bad")
    html = "".join(_docx_html(child, in_cell or tag == "tc") for child in element)
    if tag == "p" and in_cell:
        return f"{html} "
    block = "li" if tag == "p" and element.find("pPr/numPr") is not None else _DOCX_BLOCKS.get(tag)
    return f"<{block}>{html}</{block}>" if block else _DOCX_HTML.get(tag, "") + html


def read_docx(file: io.BytesIO, encoding: str, errors: str) -> str:
    """Returns the text of a DOCX file, then its footnotes and endnotes."""
    archive = Archive(file, "a DOCX")
    targets = (
        part.get("Target", "").lstrip("/")
        for part in archive.xml("_rels/.rels")
        if part.get("Type", "").endswith("/officeDocument")
    )
    main = next(targets, "word/document.xml")
    folder = posixpath.dirname(main)
    notes = [posixpath.join(folder, name) for name in ("footnotes.xml", "endnotes.xml")]
    parts = [main, *(path for path in notes if path in archive.names)]
    return page_text("".join(_docx_html(archive.xml(path)) for path in parts))


@dataclass(slots=True)
class Row:
    """A line of a PDF page, in points from the bottom left."""

    text: str
    left: float
    right: float
    bottom: float
    size: float  # Font size.

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
_CONTENTS = re.compile(r"(\. ?){5,}\s*[\divxlc]*$")  # The dots before a page number.
_BULLET = re.compile(r"[•◦▪‣●○■–*-] |\(?(\d{1,3}|[a-z])[.)] ")


def _rows(page: Any, raw: Any) -> list[Row]:
    """Returns the lines of a page in PDFium's order."""
    text_page = page.get_textpage()
    chars = [chr(raw.FPDFText_GetUnicode(text_page, i)) for i in range(text_page.count_chars())]

    def font_size(index: int) -> float:
        matrix = raw.FS_MATRIX()  # Many programs set the size 1, and scale the text.
        raw.FPDFText_GetMatrix(text_page, index, matrix)
        return float(raw.FPDFText_GetFontSize(text_page, index) * math.hypot(matrix.c, matrix.d))

    def ends_row(end: int, char: str) -> bool:
        """Whether a row ends before index ``end``, with a line or at the space between two columns."""
        if char != " " or not 1 < end < len(chars):
            return char in ("\n", "\r", _MARK)
        right, left = text_page.get_charbox(end - 2, loose=True)[2], text_page.get_charbox(end, loose=True)[0]
        return bool(left - right > 1.2 * font_size(end))

    rows: list[Row] = []
    start = 0
    for end in [i for i, char in enumerate(chars, 1) if ends_row(i, char)] + [len(chars)]:
        visible = [i for i in range(start, end) if (chars[i] > " " and not chars[i].isspace()) or chars[i] == _MARK]
        start = end
        if visible:
            first, last = visible[0], visible[-1]
            left, bottom, _, _ = text_page.get_charbox(first, loose=True)
            right = text_page.get_charbox(last, loose=True)[2]
            size = font_size(visible[len(visible) // 2])
            text = "".join(chars[first : last + 1])
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")  # On Windows, PDFium uses UTF-16.
            if not _CONTENTS.search(text):
                rows.append(Row(text.translate(_LIGATURES), left, right, bottom, size))
    text_page.close()
    joined: list[Row] = []
    for row in _in_columns(rows):
        joined[-1:] = joined[-1].joined(row) if joined else [row]
    return joined


MIN_COLUMN_LINES, MIN_COLUMN_TEXT = 4, 20  # Lines that two columns share, and the mean length of a line.


def _in_columns(rows: list[Row]) -> list[Row]:
    """Returns rows column by column where a page draws two columns of text row by row. The cells of a table are too
    short to be columns."""
    pairs = [
        (i, left, right)
        for i, (left, right) in enumerate(pairwise(rows))
        if right.left > left.right + 0.8 * right.size and abs(right.bottom - left.bottom) < 0.6 * right.size
    ]
    gutter = statistics.median([right.left for _, _, right in pairs] or [0])
    pairs = [pair for pair in pairs if abs(pair[2].left - gutter) < pair[2].size]
    length = min(sum(len(left.text) for _, left, _ in pairs), sum(len(right.text) for _, _, right in pairs))
    if len(pairs) < MIN_COLUMN_LINES or length < MIN_COLUMN_TEXT * len(pairs):
        return rows
    start, end = pairs[0][0], pairs[-1][0] + 2
    return rows[:start] + sorted(rows[start:end], key=lambda row: row.left > gutter - row.size) + rows[end:]


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


def _is_cjk(char: str) -> bool:
    """Whether a character belongs to a script that puts no spaces between words."""
    return unicodedata.east_asian_width(char) in ("W", "F") and not "\uac00" <= char <= "\ud7a3"  # Korean has spaces.


def _gap_between(above: Row, row: Row, margin: float, pitch: float | None) -> int:
    """Returns the gap between two lines. ``margin`` is the right end of the longest line of the column of ``above``,
    ``pitch`` the usual distance of its lines, or None if ``row`` begins the next column."""
    word = row.text[0] if _is_cjk(row.text[0]) else row.text.split(maxsplit=1)[0]
    has_room = margin - above.right > (row.right - row.left) * (len(word) + 2) / max(1, len(row.text))
    if abs(above.size - row.size) > 0.15 * row.size or (pitch is None and has_room):
        return BLANK
    if pitch is not None:
        ends_sentence = above.text.rstrip("\"'”’»)」』）")[-1:] in tuple(".!?:…。！？：")
        is_indented = row.left > above.left + 0.8 * row.size and (has_room or ends_sentence)
        if is_indented or above.bottom - row.bottom > 1.25 * pitch:
            return BLANK
    is_table = "\t" in above.text and "\t" in row.text
    return LINE if has_room or is_table or _BULLET.match(row.text) else SPACE


def _join(pages: Iterable[list[Row]]) -> str:
    """Returns the text of lines. Joins the lines of a paragraph and mends words that were hyphenated."""
    columns: list[list[Row]] = []
    for rows in pages:
        for i, row in enumerate(rows):
            if not i or row.bottom > rows[i - 1].bottom + row.size:
                columns.append([])
            columns[-1].append(row)
    all_text = "\n".join(row.text for column in columns for row in column)
    has_soft = re.search(rf"[{_SOFT}]$", all_text, re.MULTILINE) is not None
    whole = re.sub(rf"[\w-]+[-{_MARK}]\n\w+", " ", all_text.casefold())  # Without broken words.
    words = {*re.findall(r"\w+(?:-\w+)*", whole), *re.findall(r"\w+", whole)}
    text, above, margin = Text(), None, 0.0
    for column in columns:
        distances = [high.bottom - low.bottom for high, low in pairwise(column)]
        pitch = statistics.median_low([distance for distance in distances if distance > 0] or [9e9])
        for i, row in enumerate(column):
            if above is not None:
                size = _gap_between(above, row, margin, pitch if i else None)
                mended = None
                if size == SPACE or above.text.endswith(_MARK):
                    mended = _mend(text.pieces[-1], row.text, words, has_soft)
                text.pieces[-1] = text.pieces[-1] if mended is None else mended
                text.gap(size if mended is None else 0)
            text.write(row.text)
            above, margin = row, max(row.right for row in column) if not i else margin
    return str(text).translate(_CONTROLS)


def _mend(line: str, row: str, words: set[str], has_soft: bool) -> str | None:
    """Returns the line before ``row``, without a hyphen that does not belong to the word: in a text with soft hyphens,
    all others do. Returns None if the line does not end inside a word."""
    before, hyphen = line[:-1], line[-1]
    if hyphen in _SOFT:
        return before
    if (hyphen in "/—" and not before[-1:].isspace()) or (_is_cjk(hyphen) and _is_cjk(row[0])):
        return line
    if hyphen not in ("-", _MARK) or not before[-1:].isalpha() or not row[0].islower():
        return line.replace(_MARK, "-") if hyphen == _MARK else None
    start, rest = re.findall(r"\w*$", before)[0].casefold(), re.findall(r"^\w*", row)[0].casefold()
    is_compound = start + rest not in words and (f"{start}-{rest}" in words or {start, rest} <= words)
    return before + "-" if has_soft or is_compound else before


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
    return _join(_without_edges(pages))


_CUE_TIME = re.compile(r"(\d+:)?\d+:\d+[.,]\d+ --> .*")
_CUE_TAG = re.compile(r"</?[a-zA-Z][^<>]*>|<[\d:.]+>|\{\\[^{}]*\}")


def read_subtitles(file: io.BytesIO, encoding: str, errors: str) -> str:
    """Returns the lines of .srt or .vtt subtitles, without numbers, times, styles and notes."""
    lines = []
    for block in re.split(r"\n\s*\n", decode(file.getvalue(), encoding, errors, is_html=False)):
        cue = block.strip().split("\n")
        start = next((number for number, line in enumerate(cue, 1) if _CUE_TIME.match(line.strip())), None)
        if start is not None:
            lines += [_CUE_TAG.sub("", line).strip() for line in cue[start:]]
    return "\n".join(filter(None, lines))


_MESSAGE = re.compile(
    r"\u200e?\[?\d{1,4}[./-]\d{1,2}[./-]\d{2,4},? \d{1,2}[:.]\d\d([:.]\d\d)?(\s?[aApP]\.?\s?[mM]\.?)?(\]| -) "
    r"(?P<text>.*)"
)  # fmt: skip
_MEDIA = re.compile(
    r"<[^<>]* (omitted|weggelassen|omis|omitido|omesso|ausgeschlossen)>|<attached: [^<>]*>"
    "|\u200e?(image|video|audio|sticker|GIF|document|Contact card) omitted|[\u200e\u200f]"
)


def read_chat_export(file: io.BytesIO, encoding: str, errors: str) -> str:
    """Returns the messages of a chat that WhatsApp exported, as "Name: text", without times, media and notices."""
    messages: list[str] = []
    for line in decode(file.getvalue(), encoding, errors, is_html=False).split("\n"):
        if (match := _MESSAGE.match(line)) is not None:
            messages.append(match["text"])
        elif messages:
            messages[-1] += "\n" + line
        else:
            raise Unreadable("is not an export of WhatsApp", _RENAME)
    texts = (_MEDIA.sub("", message).strip() for message in messages)
    return "\n".join(text for text in texts if ": " in text)


def read_notebook(file: io.BytesIO, encoding: str, errors: str) -> str:
    """Returns the cells of a Jupyter notebook, without their output."""
    notebook = json.loads(file.getvalue())
    cells = notebook.get("cells") or [cell for sheet in notebook.get("worksheets", ()) for cell in sheet["cells"]]
    sources = (cell.get("source") or cell.get("input") or "" for cell in cells)
    return "\n\n".join(filter(str.strip, ("".join(source) for source in sources)))


def read_mail(file: io.BytesIO, encoding: str, errors: str) -> str:
    """Returns the subject and the text of a mail, without other headers and attachments."""
    import email
    import email.policy

    mail = email.message_from_bytes(file.getvalue(), policy=email.policy.default)
    body = mail.get_body(("plain", "html"))
    text = ""
    if body is not None:
        data: Any = body.get_payload(decode=True)
        label = body.get_content_charset() or encoding
        text = decode(data, encoding, errors, label, is_html=body.get_content_subtype() == "html")
        text = page_text(text) if body.get_content_subtype() == "html" else text
    return f"{mail['subject'] or ''}\n\n{text}".strip().replace("\r\n", "\n")


_READERS = {
    "html": read_html, "xhtml": read_xhtml, "epub": read_epub, "docx": read_docx, "pdf": read_pdf, "mail": read_mail,
    "subtitles": read_subtitles, "chat": read_chat_export, "notebook": read_notebook,
}  # fmt: skip


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
