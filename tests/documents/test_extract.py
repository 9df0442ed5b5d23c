"""Text of documents, and files that attack their reader."""

import io
import re
import struct
import sys
import time
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import reading
from reading import assert_rejected, source

from gpt.config.text import ReadConfig
from gpt.documents import document_readers as program
from gpt.documents import documents, extract
from gpt.documents.documents import Reader, Skipped, is_plain
from gpt.documents.sources import find
from gpt.system.distribution import install_extra
from gpt.system.errors import UserError, WorkError

WORD = (
    'xmlns:w="http://schemas.openxmlformats.org/wordprocessingml/2006/main" xmlns:m="urn:math" xmlns:r="urn:relations"'
)
CONTAINER = '<container><rootfiles><rootfile full-path="OEBPS/book.opf"/></rootfiles></container>'


@pytest.fixture(autouse=True, scope="module")
def shared_process() -> Iterator[None]:
    """All readers of this file extract text in one process, as those of a command do."""
    extractor = extract.Extractor()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(documents, "Extractor", lambda: extractor)
        yield


@pytest.fixture
def own_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "Extractor", extract.Extractor)


def read(name: str, data: bytes, **config: Any) -> str:
    """Returns the text of a file, which is at most one document."""
    texts = reading.read(name, data, **config)
    assert len(texts) <= 1
    return "".join(texts)


def archive(members: dict[str, str | bytes]) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as file:
        for name, data in members.items():
            file.writestr(name, data)
    return out.getvalue()


def docx(body: str, **parts: str) -> bytes:
    relation = "http://schemas.openxmlformats.org/officeDocument/2006/relationships/officeDocument"
    members: dict[str, str | bytes] = {
        "_rels/.rels": f'<Relationships><Relationship Type="{relation}" Target="/word/document.xml"/></Relationships>',
        "word/document.xml": f"<w:document {WORD}><w:body>{body}</w:body></w:document>",
    }
    return archive(
        members | {f"word/{name}.xml": f"<w:{name} {WORD}>{part}</w:{name}>" for name, part in parts.items()}
    )


def paragraph(text: str, style: str = "") -> str:
    properties = f'<w:pPr><w:pStyle w:val="{style}"/></w:pPr>' if style else ""
    return f'<w:p>{properties}<w:r><w:t xml:space="preserve">{text}</w:t></w:r></w:p>'


def epub(pages: dict[str, str], spine: Iterable[str], extra: dict[str, str | bytes] | None = None) -> bytes:
    """``pages`` are XHTML bodies by path; the page "nav.xhtml" is the navigation."""
    items = "".join(
        f'<item id="i{i}" href="{path.replace(" ", "%20")}" media-type="application/xhtml+xml"'
        f"{' properties=' + chr(34) + 'nav' + chr(34) if path == 'nav.xhtml' else ''}/>"
        for i, path in enumerate(pages)
    )
    order = "".join(f'<itemref idref="i{[*pages].index(path)}"/>' for path in spine)
    package = f"<package><manifest>{items}</manifest><spine>{order}</spine></package>"
    xhtml = (
        '<?xml version="1.0" encoding="utf-8"?><html xmlns="http://www.w3.org/1999/xhtml"><head><title/></head><body>'
    )
    return archive(
        {"mimetype": "application/epub+zip", "META-INF/container.xml": CONTAINER, "OEBPS/book.opf": package}
        | {f"OEBPS/{path}": f"{xhtml}{body}</body></html>" for path, body in pages.items()}
        | (extra or {})
    )


def pdf(*pages: str, resources: str = "", trailer: str = "", objects: Iterable[bytes] = ()) -> bytes:
    """``pages`` are content streams. Objects: 1 the catalog, 2 the pages, 3 a font, 4 and up ``objects``."""
    bodies = [b"<< /Type /Catalog /Pages 2 0 R >>", b"", b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>"]
    bodies += objects
    kids = []
    for content in pages:
        bodies.append(b"<< /Length %d >>\nstream\n%s\nendstream" % (len(content), content.encode("latin-1")))
        font = f"/Resources << /Font << /F 3 0 R >> {resources} >>"
        bodies.append(
            f"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] {font} /Contents {len(bodies)} 0 R >>".encode()
        )
        kids.append(f"{len(bodies)} 0 R")
    bodies[1] = f"<< /Type /Pages /Kids [{' '.join(kids)}] /Count {len(kids)} >>".encode()
    out, offsets = bytearray(b"%PDF-1.4\n"), []
    for number, body in enumerate(bodies, 1):
        offsets.append(len(out))
        out += b"%d 0 obj\n%s\nendobj\n" % (number, body)
    table = b"".join(b"%010d 00000 n \n" % offset for offset in offsets)
    count = len(bodies) + 1
    start = len(out)
    out += b"xref\n0 %d\n0000000000 65535 f \n%s" % (count, table)
    out += f"trailer\n<< /Size {count} /Root 1 0 R {trailer} >>\nstartxref\n{start}\n%%EOF\n".encode()
    return bytes(out)


def lines(*rows: str, size: float = 12, left: float = 72, top: float = 700, pitch: float = 14) -> str:
    """The content stream of lines of text."""
    escaped = (row.replace("\\", "\\\\").replace("(", "\\(").replace(")", "\\)") for row in rows)
    return "".join(
        f"BT /F {size} Tf {left} {top - pitch * i} Td ({row}) Tj ET\n" for i, row in enumerate(escaped) if row
    )


HTML = """<!DOCTYPE html><html><head><title>Site</title><style>p {}</style><script>let x = "<p>no</p>";</script></head>
<body><header role="banner">Logo</header><nav><ul><li>Home<li>About</ul></nav>
<h1>Of <em>cats</em>\n  &amp; dogs</h1><p>One&nbsp;two<br>three <b>fo</b>ur.<p>Next hy&shy;phen<div>in a div</div>
<p hidden>no</p><p style="color: red; display : none">no</p><ul><li>a</li><li>b<ul><li>c</ul></ul>
<table><tr><th>k</th><th>v</th></tr><tr><td>1</td><td>2</td></tr></table><pre>
def f():\r\n    return 1</pre><p>end<ruby>漢<rt>kan</rt></ruby></p><button>no</button><svg><text>no</text></svg>
<footer>© nobody</footer><script>no</script></body></html>"""
HTML_TEXT = (
    "Of cats & dogs\n\nOne\xa0two\nthree four.\n\nNext hyphen\n\nin a div\n\na\nb\n\nc\n\nk\tv\n1\t2\n\n"
    "def f():\n    return 1\n\nend漢"
)


def test_html_is_the_text_that_a_reader_sees() -> None:
    assert read("x.html", HTML.encode()) == HTML_TEXT
    assert read("X.HTM", b"<p>around</p><main><p>inside</p></main><p>around</p>") == "inside"
    assert (
        read("x.xhtml", b'<html><head><script src="x"/><title/></head><body><p>a<a id="b"/></p></body></html>') == "a"
    )
    assert read("x.html", b"<nav><ul><li>no</ul></div><p>no</nav><p>yes") == "yes"


QUOTED = "“Zürich”"


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ('<meta charset="iso-8859-1">“Zürich”'.encode("cp1252"), QUOTED),
        ('<META http-equiv=content-type content="text/html; charset=koi8-r">“Zürich”'.encode("koi8-r", "ignore"), "Zrich"),
        (QUOTED.encode("utf-16"), QUOTED),
        ('\ufeff<meta charset="latin-1">“Zürich”'.encode(), QUOTED),
        ('<?xml version="1.0" encoding="windows-1252"?>“Zürich”'.encode("cp1252"), QUOTED),
        ("<meta charset=hex>“Zürich”".encode(), QUOTED),
    ],
    ids=range(6),
)  # fmt: skip
def test_encodings_of_html(data: bytes, expected: str) -> None:
    assert read("x.html", data) == expected


def test_invalid_bytes_of_html_are_replaced_and_counted() -> None:
    with pytest.raises(UserError, match="x.html is not utf-8: byte 0xe9 at offset 6"):
        read("x.html", b"<p>caf\xe9")
    reader = Reader(ReadConfig(errors="replace"))
    assert [chunk.text for chunk in reader.documents(source("x.html", b"<p>caf\xe9 \xef\xbf\xbd"))] == [
        "caf\ufffd \ufffd"
    ]
    assert reader.replaced == 1


def test_epub_is_read_in_the_order_of_its_spine() -> None:
    pages = {
        "nav.xhtml": "<nav><ol><li>One</li></ol></nav><p>Contents</p>",
        "text/b.xhtml": "<p>second <![CDATA[a < b]]></p><aside><p>note</p></aside>",
        "text/a 1.xhtml": "<h1>One</h1><p>first</p>",
        "unused.xhtml": "no",
    }
    fonts = '<encryption><EncryptionMethod Algorithm="http://www.idpf.org/2008/embedding"/></encryption>'
    data = epub(pages, ["nav.xhtml", "text/a 1.xhtml", "text/b.xhtml"], {"META-INF/encryption.xml": fonts})
    assert read("x.epub", data) == "Contents\n\nOne\n\nfirst\n\nsecond a < b\n\nnote"


def test_docx_has_lists_tables_and_notes_but_no_deleted_text() -> None:
    cell = "<w:tc>{}</w:tc>".format
    row = "<w:tr>{}</w:tr>".format
    body = (
        paragraph("Title", "Heading1") + "<w:p><w:pPr><w:tabs><w:tab w:val='left' w:pos='1'/></w:tabs></w:pPr>"
        "<w:r><w:t>One</w:t></w:r><w:del><w:r><w:delText>gone</w:delText><w:t>gone</w:t></w:r></w:del>"
        "<w:ins><w:r><w:t xml:space='preserve"
        "'> two</w:t></w:r></w:ins><w:moveFrom><w:r><w:t>gone</w:t></w:r></w:moveFrom>"
        "<w:r><w:tab/><w:t>x</w:t><w:br/><w:t>y</w:t><w:noBreakHyphen/><w:t>z</w:t><w:instrText>PAGE</w:instrText></w:r></w:p>"
        + "<w:p><w:pPr><w:numPr/></w:pPr><w:r><w:t>a</w:t></w:r></w:p>"
        + "<w:p><w:pPr><w:numPr/></w:pPr><w:r><w:t>b</w:t></w:r></w:p>"
        + "<w:tbl>"
        + row(cell(paragraph("1") + paragraph("1")) + cell(paragraph("2")))
        + row(cell(paragraph("3")) + cell(paragraph("4")))
        + "</w:tbl>"
        + paragraph("end")
    )
    note = f"<w:footnote>{paragraph('a note')}</w:footnote>"
    data = docx(body, footnotes=note, comments=paragraph("a comment"), header1=paragraph("a header"))
    assert read("x.docx", data) == "Title\n\nOne two\tx\ny-z\n\na\nb\n\n1 1\t2\n3\t4\n\nend\n\na note"


def run(text: str, properties: str = "") -> str:
    return f'<w:r><w:rPr>{properties}</w:rPr><w:t xml:space="preserve">{text}</w:t></w:r>'


def cells(*texts: str) -> str:
    row = "".join(f"<w:tc>{paragraph(text) if text else '<w:p/>'}</w:tc>" for text in texts)
    return f"<w:tr>{row}</w:tr>"


BOX = f"<w:txbxContent>{paragraph('a box')}</w:txbxContent>"


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (paragraph("Before.") + f"<w:tbl>{cells('', '2023', '2024')}{cells('North', 'n1', '')}{cells('', '', 'n4')}</w:tbl>", "Before.\n\n\t2023\t2024\nNorth\tn1\n\t\tn4"),
        (f"<w:p>{run('これは')}<w:r><w:ruby><w:rt>{run('とうきょう')}</w:rt><w:rubyBase>{run('東京')}</w:rubyBase></w:ruby></w:r>{run('です')}</w:p>", "これは東京です"),
        ("<w:sdt><w:sdtPr><w:docPartObj><w:docPartGallery w:val='Table of Contents'/></w:docPartObj></w:sdtPr><w:sdtContent>" + paragraph("Zwei 2") + "</w:sdtContent></w:sdt>" + paragraph("text"), "text"),
        (f"<w:p>{run('a')}<w:r><w:sym w:font='Symbol' w:char='F061'/><w:ptab/>{run('b')}</w:r></w:p>", "a\ufffd\tb"),
        (f"<w:p>{run('a sentence ')}<w:r><w:drawing>{BOX}</w:drawing></w:r>{run('goes on')}</w:p>", "a sentence\n\na box\n\ngoes on"),
        ("<w:p><m:oMath><m:r><m:t>c</m:t></m:r><m:sup><m:r><m:t>2</m:t></m:r></m:sup></m:oMath></w:p>", "c^2"),
    ],
    ids=["empty cells", "ruby", "contents", "symbols", "text box", "formula"],
)  # fmt: skip
def test_docx_is_the_text_that_word_shows(body: str, expected: str) -> None:
    assert read("x.docx", docx(body)) == expected


KATEX = (
    '<p>So <span class="katex"><span class="katex-mathml"><math><semantics><mi>E</mi><annotation encoding="application/x-tex">'
    'E^2</annotation></semantics></math></span><span class="katex-html" aria-hidden="true"><b>E</b>2</span></span> is'
)
CONTENT = "<math><mi>E</mi><annotation-xml><ci>E</ci></annotation-xml></math>"


@pytest.mark.parametrize(
    ("html", "expected"),
    [
        ("<p hidden>draft<h2>Title</h2><p>Visible.", "Title\n\nVisible."),
        ("<div><p hidden>SECRET<div>VISIBLE</div>end</div>", "VISIBLE\nend"),
        ('<p style="DISPLAY: NONE">no<p>yes', "yes"),
        ("<table><tr> <td>South<td><td>s2<tr><td>N<td>a<br>b</table>end", "South\t\ts2\nN\ta\nb\n\nend"),
        ("<table><tr><td>a<p>b<td>c<td><table><tr><td>d<td>e</table></table>", "a\n\nb\n\nc\n\nd\te"),
        (KATEX, "So E^2 is"),
        (CONTENT, "E"),
        ("yes<!-- unclosed <p>text", "yes"),
        ('<h1>Title<a class="headerlink" href="#title">¶</a></h1><p>See <a href="#other">§ 2</a>.', "Title\n\nSee § 2."),
    ],
    ids=range(9),
)  # fmt: skip
def test_html_is_read_as_browsers_do(html: str, expected: str) -> None:
    assert read("x.html", html.encode()) == expected


@pytest.mark.parametrize(
    ("label", "codec", "text"),
    [
        ("tis-620", "cp874", "“ไทย”"), ("windows-31j", "cp932", "①"), ("x-sjis", "cp932", "日本"), ("x-gbk", "gbk", "中国"),
        ("x-cp1251", "cp1251", "Привет"), ("iso-8859-8-i", "iso8859-8", "שלום"), ("mac", "mac-roman", "é"),
        ("euc-kr", "cp949", "똠"), ("big5", "big5hkscs", "嘅"),
    ],
)  # fmt: skip
def test_labels_of_encodings(label: str, codec: str, text: str) -> None:
    page = b"<meta charset=%s><p>" % label.encode()
    assert read("x.html", page + text.encode(codec)) == text


def test_encoding_option_applies_where_the_declared_encoding_fails() -> None:
    page = "<meta charset=utf-8><p>Привет".encode("cp1251")
    assert_rejected("x.html", page, "x.html is not utf-8")
    assert read("x.html", page, encoding="cp1251") == "Привет"


MAIL = b"From a@b Mon Jan  1 00:00:00 2024\nSubject: =?utf-8?q?Gr=C3=BC=C3=9Fe?=\nContent-Type: text/html; charset=latin-1\nContent-Transfer-Encoding: quoted-printable\n\n<p>caf=E9\n"
CHAT = "\u200e[01.02.24, 12:34:56] Anna: Hi\n[01.02.24, 12:35:00] Ben: one\ntwo\n1/2/24, 1:36 PM - Anna: <Media omitted>\n1/2/24, 13:36 - Ben left\n"
SUBTITLES = "WEBVTT\n\nNOTE no\n\n1\n00:01.000 --> 00:02.000 align:left\n<i>One</i>\ntwo\n\n00:03.000 --> 00:04.000\n{\\an8}three\n"


@pytest.mark.parametrize(
    ("name", "data", "expected"),
    [
        ("x.ipynb", b'{"cells": [{"source": ["# A\\n", "b"]}, {"source": "1 + 1", "outputs": [{"data": {"image/png": "AAAA"}}]}]}', ["# A\nb\n\n1 + 1"]),
        ("x.mbox", MAIL + b"\n" + MAIL.replace(b"text/html", b"text/plain").replace(b"<p>", b">From "), ["Grüße\n\ncafé", "Grüße\n\nFrom café"]),
        ("x.srt", SUBTITLES.encode(), ["One\ntwo\nthree"]),
        ("WhatsApp Chat with Anna.txt", CHAT.encode(), ["Anna: Hi\nBen: one\ntwo"]),
    ],
)  # fmt: skip
def test_other_formats_become_their_text(name: str, data: bytes, expected: list[str]) -> None:
    assert reading.read(name, data) == expected


def test_pdf_columns_that_are_drawn_row_by_row_do_not_interleave() -> None:
    pytest.importorskip("pypdfium2")
    left = [
        "The first column of this page goes",
        "on and on until the end of its own",
        "text, and never to the right of it",
        "but always down the page to here.",
    ]
    right = [
        "The second column has its own lines",
        "that follow each other down the page",
        "until nothing is left to be read on",
        "it, as any reader would do this.",
    ]
    page = "".join(
        lines(a, top=700 - 14 * i) + lines(b, left=330, top=700 - 14 * i)
        for i, (a, b) in enumerate(zip(left, right, strict=True))
    )
    assert read("x.pdf", pdf(page)).split() == " ".join(left + right).split()
    table = "".join(lines(f"row {i}", top=700 - 14 * i) + lines(f"{i}", left=330, top=700 - 14 * i) for i in range(5))
    assert read("x.pdf", pdf(table)) == "\n".join(f"row {i}\t{i}" for i in range(5))


def test_hyphens_of_compounds_at_the_end_of_a_pdf_line_stay() -> None:
    pytest.importorskip("pypdfium2")
    rows = ["Investors have long looked at the price-", "determining factors of the market, and the determi-", "nation of any price is determining the rest of it all."]  # fmt: skip
    assert (
        read("x.pdf", pdf(lines(*rows)))
        == "Investors have long looked at the price-determining factors of the market, and the determination of any price is determining the rest of it all."
    )


@pytest.mark.parametrize("scaled", [False, True])  # Many programs set the font size 1, and scale the text.
def test_paragraphs_of_pdfs_are_joined_and_hyphens_mended(scaled: bool) -> None:
    pytest.importorskip("pypdfium2")
    place = re.compile(r"(\d+) Tf (\S+ \S+) Td")
    full = "This line of the paragraph reaches the right margin of it"
    page = lines("A Heading", size=18, top=740) + lines(
        full + " hyphen-", "ated and well-known, with of\\002ces, and it ends here.", full, f"{full} and well-", "known too.",
        "", "- a list", "- of two items",
    )  # fmt: skip
    page += lines("A contents line . . . . . . . 12", top=100)
    text = read("x.pdf", pdf(place.sub(r"1 Tf \1 0 0 \1 \2 Tm", page) if scaled else page))
    assert text.startswith(f"A Heading\n\n{full} hyphenated and well-known, with of")
    assert text.endswith(f"{full} and well-known too.\n\n- a list\n- of two items")
    power = lines("ten", top=500) + lines("9", size=7, left=89, top=505) + lines("is large", left=97, top=500)
    assert read("x.pdf", pdf(power)) == "ten9 is large"


def test_running_headers_and_page_numbers_of_pdfs_are_dropped() -> None:
    pytest.importorskip("pypdfium2")
    body = "the text of the page goes on in a long line up to the margin"
    pages = [
        lines(f"{page} THE BOOK" if page % 2 else f"CHAPTER {page}", top=760)
        + lines(*[f"{word} {body}" for word in (f"Alongside {'abcde'[page]}", "continuing", f"afterwards {77 * page}")])
        + lines(numeral, top=40, left=300)
        for page, numeral in enumerate(["i", "ii", "iii", "iv", "v"])
    ]
    text = read("x.pdf", pdf(*pages))
    assert text == " ".join(
        f"Alongside {'abcde'[page]} {body} continuing {body} afterwards {77 * page} {body}" for page in range(5)
    )


IMAGE = b"<< /Type /XObject /Subtype /Image /Width 1 /Height 1 /ColorSpace /DeviceGray /BitsPerComponent 8 /Length 1 >>\nstream\n\0\nendstream"
SCAN = pdf("q 600 0 0 700 0 0 cm /I Do Q", resources="/XObject << /I 4 0 R >>", objects=[IMAGE])
ENCRYPT = (
    "/Encrypt << /Filter /Standard /V 1 /R 2 /P -4 /O <" + "41" * 32 + "> /U <" + "42" * 32 + "> >> /ID [<00> <00>]"
)
BOMB = '<!DOCTYPE a [<!ENTITY a "ha"><!ENTITY b "&a;&a;&a;&a;&a;&a;&a;&a;">]>'
EXTERNAL = '<!DOCTYPE a [<!ENTITY a SYSTEM "file:///etc/passwd">]>'
DRM = '<encryption><EncryptionMethod Algorithm="http://www.w3.org/2001/04/xmlenc#aes128-cbc"/></encryption>'
OLE = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(2000)


def lying(data: bytes, name: bytes, size: int) -> bytes:
    """A ZIP file that declares another size of a member, in both headers."""
    changed = bytearray(data)
    for signature, offset, length in ((b"PK\3\4", 22, 30), (b"PK\1\2", 24, 46)):
        start = 0
        while (start := data.find(signature, start)) >= 0:
            if data[start + length : start + length + len(name)] == name:
                changed[start + offset : start + offset + 4] = struct.pack("<I", size)
            start += 4
    return bytes(changed)


BAD: dict[str, tuple[str, bytes, str]] = {
    "empty html": ("x.html", b"", "x.html has no text"),
    "empty pdf": ("x.pdf", b"", "x.pdf is not a PDF"),
    "empty docx": ("x.docx", b"", "x.docx is not a DOCX, or is cut off"),
    "scan": ("x.pdf", SCAN, "x.pdf has no text, only images"),
    "scan with a cover": ("x.pdf", pdf(lines("cover"), *3 * ["q 9 0 0 9 0 0 cm /I Do Q"], resources="/XObject << /I 4 0 R >>", objects=[IMAGE]), "x.pdf has no text on 3 of 4 pages, only images"),
    "no text": ("x.pdf", pdf(""), "x.pdf has no text$"),
    "encrypted pdf": ("x.pdf", pdf(lines("a"), trailer=ENCRYPT), "x.pdf is encrypted"),
    "pdf cut": ("x.pdf", pdf(lines("a"))[:-200], "x.pdf is damaged: its end is missing"),
    "pdf of rubbish": ("x.pdf", b"%PDF-1.4\n%%EOF", "x.pdf is damaged: "),
    "html called pdf": ("x.pdf", HTML.encode(), "x.pdf is not a PDF"),
    "pdf called html": ("x.html", SCAN, "x.html is not text: it has a zero byte"),
    "html called epub": ("x.epub", HTML.encode(), "x.epub is not an EPUB, or is cut off"),
    "zip called epub": ("x.epub", archive({"a": "b"}), "x.epub is damaged: it has no META-INF/container.xml"),
    "docx in a docx": ("x.docx", docx("<w:altChunk r:id='r9'/>"), "x.docx has another document in it"),
    "Word 97": ("x.doc", OLE, "x.doc: gpt does not read .doc files"),
    "chat of something else": ("_chat.txt", b"text", "_chat.txt is not an export of WhatsApp"),
    "OpenDocument": ("x.odt", b"text", "x.odt: gpt does not read .odt files"),
    "encrypted docx": ("x.docx", OLE, "x.docx is encrypted, or a .doc"),
    "docx cut": ("x.docx", docx(paragraph("a" * 999))[:-9], "x.docx is not a DOCX, or is cut off"),
    "docx of no xml": ("x.docx", docx("<w:p>"), "x.docx is damaged: mismatched tag"),
    "entity bomb": ("x.docx", archive({"_rels/.rels": "<a/>", "word/document.xml": BOMB + "<a>&b;</a>"}), "x.docx declares XML entities"),
    "external entity": ("x.docx", archive({"_rels/.rels": EXTERNAL + "<a>&a;</a>"}), "x.docx declares XML entities"),
    "drm": ("x.epub", epub({"a": "b"}, ["a"], {"META-INF/encryption.xml": DRM}), "x.epub is protected by DRM"),
    "missing page": ("x.epub", epub({"a": "b"}, ["a"]).replace(b"OEBPS/a", b"OEBPS/c"), "x.epub is damaged: it has no OEBPS/a"),
    "small lie": ("x.docx", lying(docx(paragraph("a" * 9999)), b"word/document.xml", 500), "x.docx is damaged: "),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_documents_end_in_a_line_and_can_be_skipped(case: str) -> None:
    name, data, message = BAD[case]
    if name.endswith(".pdf"):
        pytest.importorskip("pypdfium2")
    reader, texts = assert_rejected(name, data, message)
    assert texts == []
    assert [chunk.text for chunk in reader.documents(source("x.html", b"and the next"))] == ["and the next"]


def bomb(name: str, size: int) -> bytes:
    """A DOCX or EPUB with a member of ``size`` MiB of spaces, which compress a thousandfold."""
    packed = docx("") if name.endswith("docx") else epub({"a": ""}, ["a"])
    member = "word/document.xml" if name.endswith("docx") else "OEBPS/a"
    with zipfile.ZipFile(io.BytesIO(packed)) as file:
        members: dict[str, str | bytes] = {info.filename: file.read(info) for info in file.infolist()}
    return archive(members | {member: b" " * (size << 20)})


@pytest.mark.usefixtures("own_process")
@pytest.mark.parametrize("name", ["x.docx", "x.epub"])
def test_zip_bombs_are_not_unpacked(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(extract._SETTINGS, "unpacked", 2**20)
    with pytest.raises(UserError, match="unpacks to more than 1 MiB") as error:
        read(name, bomb(name, 3))
    assert error.value.hint


@pytest.mark.usefixtures("own_process")
def test_a_text_that_is_too_long_or_a_file_that_is_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(extract._SETTINGS, "longest", 1000)
    with pytest.raises(UserError, match="x.html has more than 1,000 characters"):
        read("x.html", b"<p>a" * 400)
    monkeypatch.setattr(extract, "MAX_BYTES", 2**20)
    with open(tmp_path / "x.pdf", "wb") as file:
        file.truncate(10 * 2**30)
    with pytest.raises(UserError, match="x.pdf has more than 1 MiB"):
        list(Reader(ReadConfig()).documents(*find([str(tmp_path / "x.pdf")])))


@pytest.mark.slow
@pytest.mark.usefixtures("own_process")
def test_a_document_that_takes_too_long_ends_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(extract._SETTINGS, "seconds", 1)
    data = b"<b>" * 300_000 + b"</i>" * 300_000
    start = time.monotonic()
    with pytest.raises(UserError, match="x.html takes more than 62 s or 1,024 MiB of memory") as error:
        read("x.html", data)
    assert time.monotonic() - start < 30
    assert error.value.hint
    assert read("x.html", b"and the next") == "and the next"


@pytest.mark.usefixtures("own_process")
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits memory")
def test_a_document_that_needs_too_much_memory_ends_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(extract._SETTINGS, "memory", 100 << 20)
    with pytest.raises(UserError, match="x.html (takes more than|needs too much memory)"):
        read("x.html", b"a" * 2**25)


@pytest.mark.usefixtures("own_process")
def test_a_process_that_died_is_started_again() -> None:
    reader = Reader(ReadConfig())
    assert [chunk.text for chunk in reader.documents(source("x.html", b"one"))] == ["one"]
    process = reader._extractor._process
    assert process is not None
    process.kill()
    process.wait()
    assert [chunk.text for chunk in reader.documents(source("x.html", b"two"))] == ["two"]
    process = reader._extractor._process
    assert process is not None
    del reader
    assert process.wait(60)


@pytest.mark.usefixtures("own_process")
def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    reply = ({"missing": "pypdfium2"}, b"")
    monkeypatch.setattr(extract, "_receive", lambda process: reply)
    with pytest.raises(WorkError, match="x.pdf needs the package pypdfium2") as error:
        read("x.pdf", b"", skip_bad=True)
    assert error.value.hint == install_extra("documents")
    monkeypatch.setitem(sys.modules, "pypdfium2", None)
    request = {"kind": "pdf", "encoding": "utf-8", "errors": "strict"}
    assert program.answer(request, io.BytesIO(b"%PDF-")) == reply


def test_documents_in_folders_and_archives(workdir: Path) -> None:
    Path("notes").mkdir()
    Path("notes/a.html").write_bytes(b"<p>one</p>")
    Path("notes/b.zip").write_bytes(archive({"c.docx": docx(paragraph("two")), "d.htm": "three", "e.txt": "<p>"}))
    reader = Reader(ReadConfig(split_on="one"))
    found = [chunk.text for source in find(["notes"]) for chunk in reader.documents(source)]
    assert found == ["one", "two", "three", "<p>"]
    Path("notes/f.doc").touch()
    Path("notes/g.odt").write_text("text")
    notes: list[str] = []
    assert len(find(["notes"], Skipped(note=notes.append))) == 2
    assert notes == ["skipped files that gpt does not read: 2: notes/f.doc, notes/g.odt"]
    assert not is_plain(*find(["notes/f.doc"]))  # Its size says nothing of its text.
