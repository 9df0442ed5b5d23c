"""Document formats, archives, compression, encodings and damage."""

import contextlib
import csv
import gzip
import io
import json
import re
import sys
import tarfile
import tracemalloc
import zipfile
from collections.abc import Callable, Iterator
from functools import partial, reduce

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reading import assert_rejected, documents, read, source

from gpt.config.text import ReadConfig
from gpt.documents import documents as reading
from gpt.documents import formats
from gpt.documents.documents import Reader
from gpt.documents.unpack import Source
from gpt.system.distribution import install_extra
from gpt.system.errors import UserError, WorkError

if sys.version_info >= (3, 14):
    from compression import zstd as lib_zstd
else:
    from backports import zstd as lib_zstd

HARD = [
    "", " ", "\n", "plain", "WE'LL SEE, I'm sure; THEY'VE", "1234567890123 12 3", "a\r\nb\r\n\r\n c", "tabs\t\tand  spaces   end ",
    "Zürich naïve 日本語 🐕‍🦺 עברית", "<|endoftext|>", "x <|endoftext|> y", " " * 300 + "z", "\n" * 50 + "a", "\u00a0\u2003\u3000b",
    "\x01\x1c\x1f\x85", "½ ² ٣ Ⅷ", "e\u0301\u0301", "\ufffd", "_under_score__", "''''s 'S 's", '"quoted", "twice""', "a\ufeffb",
]  # fmt: skip
DOCUMENTS = [text + "\n" for text in HARD if text] + ["long é\n" * 30_000]


@contextlib.contextmanager
def limit_memory(mebibytes: int) -> Iterator[None]:
    """Asserts that traced memory stays below ``mebibytes``."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < mebibytes * 2**20
    finally:
        tracemalloc.stop()


def normalize(text: str) -> str:
    """Replaces line breaks as Python does in text files."""
    return re.sub("\r\n?", "\n", text)


def make_zip(*members: tuple[str, bytes], method: int = zipfile.ZIP_DEFLATED) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", method) as archive:
        for name, data in members:
            archive.writestr(zipfile.ZipInfo(name), data, method)
    return out.getvalue()


def make_tar(*members: tuple[str, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        folder = tarfile.TarInfo("folder")
        folder.type = tarfile.DIRTYPE
        archive.addfile(folder)
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return out.getvalue()


def compress_zstd(data: bytes) -> bytes:
    return lib_zstd.compress(data)


def make_jsonl(texts: list[str]) -> bytes:
    return "".join(json.dumps({"n": n, "text": text}) + "\r\n\n"[n % 2 :] for n, text in enumerate(texts)).encode()


def make_table(texts: list[str], delimiter: str) -> bytes:
    out = io.StringIO(newline="")
    csv.writer(out, delimiter=delimiter).writerows([["n", "text"], *enumerate(texts)])
    return b"\xef\xbb\xbf" + out.getvalue().encode()


def make_parquet(texts: list[str | None], type_name: str = "string") -> bytes:
    import pyarrow as pa
    from pyarrow import parquet as pq

    types = {"string_view": pa.string_view(), "dictionary": pa.dictionary(pa.int32(), pa.string())}
    column = pa.array(texts, types.get(type_name) or getattr(pa, type_name)())
    out = io.BytesIO()
    pq.write_table(pa.table({"n": list(range(len(texts))), "text": column}), out)
    return out.getvalue()


FORMATS: dict[str, Callable[[list[str]], bytes]] = {
    "x.txt": lambda texts: "---\r\n".join(texts).encode(),
    "x.jsonlines": make_jsonl,
    "X.NDJSON": make_jsonl,
    "x.csv": partial(make_table, delimiter=","),
    "x.json": lambda texts: json.dumps([{"n": n, "text": text} for n, text in enumerate(texts)], indent=1).encode(),
    "x.parquet": make_parquet,
    "x.zip": lambda texts: make_zip(*((f"{n:03}.txt", text.encode()) for n, text in enumerate(texts))),
    "x.tar": lambda texts: make_tar(*((f"./{n:03}", text.encode()) for n, text in enumerate(texts))),
    "nested.zip": lambda texts: make_zip(("a/b.jsonl.gz", gzip.compress(make_jsonl(texts[:9]))), ("c.parquet", make_parquet(texts[9:]))),
    "nested.tar": lambda texts: make_tar(("a.zip", make_zip(("b.csv", make_table(texts[:9], ",")))), ("c.tgz", gzip.compress(make_tar(*((f"{n}", t.encode()) for n, t in enumerate(texts[9:])))))),
}  # fmt: skip


PACKERS = [("", bytes), (".gz", gzip.compress), (".zst", compress_zstd)]


@pytest.mark.parametrize("skip_bad", [False, True])
@pytest.mark.parametrize(("ending", "pack"), PACKERS)
@pytest.mark.parametrize("name", FORMATS)
def test_every_format_and_compression_is_read(
    name: str, ending: str, pack: Callable[[bytes], bytes], skip_bad: bool
) -> None:
    data = pack(FORMATS[name](DOCUMENTS))
    if name == "x.txt" and ending:
        data += pack(b"---\nanother member, or frame")
    reader, byte_counts = Reader(ReadConfig(split_on="---", skip_bad=skip_bad)), [0]
    texts = list(documents(reader, source(name + ending, data), byte_counts.append))
    expected = list(map(normalize, DOCUMENTS)) if name in ("x.txt", "x.zip", "x.tar") else DOCUMENTS
    assert texts == expected + ["another member, or frame"] * (len(texts) > len(DOCUMENTS))
    assert len(texts) == len(DOCUMENTS) + (name == "x.txt" and ending != "")
    assert byte_counts == sorted(byte_counts) and byte_counts[-1] == len(data)
    assert (reader.skipped.count, reader.replaced) == (0, 0)


def test_every_parquet_string_type_is_read() -> None:
    for kind in ("large_string", "string_view", "dictionary"):
        assert read("x.parquet", make_parquet(["one", None, "", "zwölf"] * 50, kind)) == ["one", "zwölf"] * 50
    assert read("x.parquet", make_parquet([None, None], "null")) == []


def test_field_names_can_contain_dots() -> None:
    lines = b'\xef\xbb\xbf{"a.b": "one", "a": {"b": 2}}\n\n  \n{"a.b": ""}\n{"a.b": null}'
    assert read("x.jsonl", lines, field="a.b") == ["one"]
    assert read("x.csv", b'n,"a.b"\n\n1,"x ""y""\r\nz"\n2,\n3,t', field="a.b") == ['x "y"\r\nz', "t"]


def test_empty_files_have_no_documents() -> None:
    empty = {"x.zip": make_zip(), "x.tar": make_tar(), "x.txt.gz": gzip.compress(b""), "x.parquet": make_parquet([])}
    for name, data in {**empty, **dict.fromkeys(("x", "x.jsonl", "x.csv"), b""), "y.csv": b"text\n"}.items():
        assert read(name, data) == [], name


@given(
    st.binary(max_size=40).filter(lambda data: b"\0" not in data and data[:2] not in (b"\xff\xfe", b"\xfe\xff")),
    st.integers(1, 8),
)
@settings(max_examples=150)
def test_block_size_does_not_change_decoding(data: bytes, block: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(formats, "BLOCK", block)
        patch.setattr(formats.TextEncoding, "hint_for", lambda *_: "")  # Guessing an encoding takes time.
        reader = Reader(ReadConfig(errors="replace"))
        assert "".join(documents(reader, source("x", data))) == normalize(
            data.decode(errors="replace").removeprefix("\ufeff")
        )
        assert reader.replaced == data.decode(errors="replace").count("\ufffd") - data.count(b"\xef\xbf\xbd")
        check_strict(data, "utf-8", "UTF-8")


def check_strict(data: bytes, codec: str, name: str, **config: str) -> None:
    """Checks the decoded text, or the error for the first invalid byte."""
    try:
        expected = data.decode(codec)
    except UnicodeDecodeError as error:
        start = error.start + 3 * (codec == "utf-8-sig")  # Python counts from the end of the byte-order mark.
        line = data[:start].decode(codec).count("\n") + 1
        with pytest.raises(UserError, match=f"is not {name}: byte 0x{data[start]:02x} at offset {start}, line {line}$"):
            read("x", data, **config)
    else:
        assert "".join(read("x", data, **config)) == normalize(expected.removeprefix("\ufeff"))


@given(st.text(st.sampled_from("aé日\n🐕\ufeff"), max_size=30), st.binary(max_size=3), st.integers(1, 5),
       st.sampled_from(["utf-8-sig", "utf-16", "utf-16-be", "utf-32-le", "latin-1", "cp1252", "ascii", "shift_jis", "gb18030", "euc_jp"]))  # fmt: skip
@settings(max_examples=150)
def test_other_encodings_decode_like_python(text: str, tail: bytes, block: int, encoding: str) -> None:
    data = text.encode(encoding, "replace").replace(b"?", b"\n") + tail
    expected = data.decode(encoding, "replace")
    if "\0" in expected:
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(formats, "BLOCK", block)
        patch.setattr(formats.TextEncoding, "hint_for", lambda *_: "")
        assert "".join(read("x", data, encoding=encoding, errors="replace")) == normalize(
            expected.removeprefix("\ufeff")
        )
        check_strict(data, encoding, encoding, encoding=encoding)


LINES = st.lists(
    st.sampled_from(["", "-", "--", "---", "---\r", " ---", "----", "\r", "x", "---\rx", "é" * 9]), max_size=12
)


@given(LINES, st.sampled_from(["---", "", "-", "x"]), st.integers(1, 7), st.sampled_from([1, 10, 1000]), st.booleans())
@settings(max_examples=100)
def test_split_on_matches_whole_lines(lines: list[str], separator: str, block: int, head: int, skip_bad: bool) -> None:
    expected = [""]
    parts = normalize("\n".join(lines)).split("\n")
    for line in [part + "\n" for part in parts[:-1]] + parts[-1:]:
        if line and line.removesuffix("\n") == separator:
            expected.append("")
        else:
            expected[-1] += line
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(formats, "BLOCK", block)
        patch.setattr(reading, "MIN_FIRST_CHUNK", head)
        patch.setattr(reading, "CHUNK_LENGTH", 2 * head)
        texts = read("x", "\n".join(lines).encode(), split_on=separator, skip_bad=skip_bad)
        assert texts == [document for document in expected if document]


BAD: dict[str, tuple[str, bytes, str]] = {
    "latin-1": ("x.txt", b"caf\xe9 au lait", "x.txt is not UTF-8: byte 0xe9 at offset 3, line 1"),
    "cut in a character": ("x.txt", "né".encode()[:-1], "x.txt is not UTF-8: byte 0xc3 at offset 1, line 1"),
    "binary": ("x.txt", b"PK\x03\x04\xff\x00", "x.txt is not text: it has a zero byte in line 1"),
    "no gzip": ("x.gz", b"hello", "x.gz is damaged: Not a gzipped file"),
    "gzip cut": ("x.gz", gzip.compress(b"hello")[:-9], "x.gz is damaged: .*ended before"),
    "gzip changed": ("x.gz", gzip.compress(b"hello")[:-8] + b"12345678", "x.gz is damaged: CRC check failed"),
    "zstd cut": ("x.zst", compress_zstd(b"hello" * 100)[:-3], "x.zst is damaged: Compressed file ended before"),
    "xz": ("x.tar.xz", b"", "x.tar.xz: gpt does not read .xz files"),
    "no json": ("x.jsonl", b'{"text": "a"}\nhello', "x.jsonl, line 2: not JSON: Expecting value"),
    "no object": ("x.jsonl", b"[1]\n", "x.jsonl, line 1: not a JSON object"),
    "no field": ("x.jsonl", b'{"body": 1, "id": 2}\n', 'x.jsonl, line 1: it has no "text"; its keys: body, id'),
    "no string": ("x.jsonl", b'{"text": 5}\n', 'x.jsonl, line 1: "text" is not a string'),
    "too deep": ("x.jsonl", b"[" * 200_000, "x.jsonl, line 1: JSON that is nested too deep"),
    "long number": ("x.jsonl", b"1" * 5000, "x.jsonl, line 1: not JSON: Exceeds the limit"),
    "surrogate": ("x.jsonl", b'{"text": "\\ud800"}', "x.jsonl, line 1: an unpaired surrogate"),
    "jsonl latin-1": ("x.jsonl", b'{"text": ""}\n{"text": "\xe9"}', "x.jsonl, line 2: not UTF-8: byte 0xe9"),
    "long row after a quoted line break": ("x.csv.gz", gzip.compress(b'n,text\r\n1,"a\r\nb"\r\n\r\n2,c,d\r\n'), "x.csv.gz, line 5: 3 fields"),
    "long tsv row": ("x.tsv", b"n\ttext\n1\ta\n2\ta\tb\n", "x.tsv, line 3: 3 fields, but the header has 2"),
    "two columns": ("x.csv", b"text,text\na,b\n", 'x.csv, line 1: it has 2 columns called "text"'),
    "semicolons": ("x.csv", b"n;text\n1;a\n", 'x.csv, line 1: it has no "text"; its columns: n;text'),
    "json of two lists": ("x.json", b'{"a": [{"text": "a"}], "b": [{"text": "b"}]}', 'x.json, record 1: it has no "text"; its keys: a, b'),
    "json line cut": ("x.json", b'{"text": "a"}\n{"text": "b\n{"text": "c"}', "x.json, line 2: not JSON: Unterminated string"),
    "json array cut": ("x.json", b'[{"text": "a"},\n{"text": "b"', "x.json, line 2: not JSON: Expecting ',' delimiter"),
    "json and more": ("x.json", b'[{"text": "a"}]\n[', "x.json, line 2: not JSON: Extra data"),
    "long number in json": ("x.json", b'[{"text": "a", "n": ' + b"1" * 5000 + b"}]", "x.json, line 1: not JSON: Exceeds the limit"),
    "json too deep": ("x.json", b"[" * 200_000, "x.json, line 1: not JSON: it is nested too deep"),
    "no object in json": ("x.json", b'["a"]', "x.json, record 1: not a JSON object"),
    "csv latin-1": ("x.csv", b"n,text\n\xe9,a\n1,\xe9\n", "x.csv, line 3: not UTF-8: byte 0xe9"),
    "csv quote": ("x.csv", b'n,text\n1,a\n2,"b\n3,c\n', "x.csv, line 4: unexpected end of data"),
    "no parquet": ("x.parquet", b"hello", "x.parquet is damaged: "),
    "no parquet column": ("x.parquet.gz", gzip.compress(make_parquet(["a"]).replace(b"text", b"body")), 'x.parquet.gz: it has no "text"; its columns: n, body'),
    "parquet numbers": ("x.parquet", make_parquet([1], "int64"), 'x.parquet: "text" contains int64, not strings'),
    "no zip": ("x.zip", b"hello", "x.zip is damaged: File is not a zip file"),
    "zip member changed": ("x.zip", make_zip(("a", b"hello"), method=0).replace(b"hello", b"HELLO"), "x.zip/a is damaged: Bad CRC-32"),
    "zip method": ("x.zip", make_zip(("a", b"hello"), method=zipfile.ZIP_BZIP2), "x.zip/a is encrypted, or packed with a method other"),
    "zip encrypted": ("x.zip", make_zip(("a", b"hello")).replace(b"PK\1\2\x14\x03\x14\0\0", b"PK\1\2\x14\x03\x14\0\1"), "x.zip/a is encrypted"),
    "zip member": ("x.zip", make_zip(("a.txt", b"\xff")), "x.zip/a.txt is not UTF-8: byte 0xff"),
    "no tar": ("x.tar", b"hello", "x.tar is damaged: "),
    "tar header": ("x.tar", make_tar(("a", b"a"), ("b", b"b")).replace(b"b\0\0", b"B\0\0"), "x.tar is damaged: bad checksum"),
    "tar cut": ("x.tar", make_tar(("a", b"a" * 9999))[:4096], "x.tar is damaged: unexpected end of data"),
    "tgz cut": ("x.tgz", gzip.compress(make_tar(("a", b"a")))[:-4], "x.tgz is damaged: "),
    "tar long name": ("x.tar", make_tar(("a" * 2_000_000, b"a")), "x.tar is damaged: a header of "),
    "nested": ("x.zip", reduce(lambda data, _: make_zip(("x.zip", data)), range(12), make_zip(("a.txt", b"a"))), "packed more than 8 levels deep"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_error_line_and_can_be_skipped(case: str) -> None:
    assert_rejected(*BAD[case])


@pytest.mark.parametrize(
    ("name", "data", "expected", "skipped"),
    [
        ("x.txt", b"one\n---\ntwo\n---\nthr\xffee\n---\nfour", ["one\n", "two\n"], 1),
        ("x.txt", b"one\n---\n" + b"two\n" * 2**20 + b"---\nthr\xff", ["one\n", "two\n" * 2**20], 1),
        ("x.jsonl", b'{"text": "a"}\n5\n{"text": "\xff"}\n{"text": "b"}', ["a", "b"], 2),
        ("x.csv", b"n,text\n1,Hello, world\n2,good\n3,a,\n4,b", ["good", "b"], 2),
        ("x.json", b'{"text": "a"}\n{"text": "b\n{"text": "c"}\n5\n{"text": "d"}', ["a", "c", "d"], 2),
        ("x.json", b'[{"text": "a"}, {"n": 1}, 5, {"text": "b"}]', ["a", "b"], 2),
        ("x.zip", make_zip(("a", b"a"), ("b", b"\xff"), ("../c", b"c"), (".d", b"\xff"), ("__MACOSX/e", b"\xff"), ("/f", b"f")), ["a", "c", "f"], 1),
        ("x.tar", make_tar(("a", b"a" * 2**18), ("b", b"a" * 2**18 + b"\xff"), ("c", b"c")), ["a" * 2**18, "c"], 1),
        ("x.tar", make_tar(("a", b"a"), ("b", b"b" * 9999))[:4096], ["a"], 1),
        ("x.jsonl.gz", gzip.compress(make_jsonl(["one"] * 20_000))[:-8], ["one"] * 20_000, 1),
        ("x.txt.zst", compress_zstd(b"one\n---\ntwo") + compress_zstd(b"\n---\nthree")[:-1], ["one\n", "two\n"], 1),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,  # Gzip bytes contain the time.
)  # fmt: skip
def test_documents_before_the_damage_are_kept(name: str, data: bytes, expected: list[str], skipped: int) -> None:
    reader = Reader(ReadConfig(skip_bad=True, split_on="---"))
    assert list(documents(reader, source(name, data))) == expected
    assert reader.skipped.count == skipped


def test_tsv_ignores_quotes() -> None:
    """TSV fields end only at tabs, as in ``cut -f2``."""
    texts = ['"Open the door, she said.', "He did.", 'He nodded."', ' "a" ""b"" ', "\\t \\", "b\x0b\x85c"]
    rows = "".join(f"{n}\t{text}\r\n\r\n" for n, text in enumerate(texts))
    assert read("x.tsv", f"\ufeffn\ttext\r\n{rows}".encode()) == texts
    assert read("x.tsv", f"n\ttext\n{rows}".encode("utf-16"), encoding="utf-16") == texts
    assert read("x.tsv.gz", gzip.compress("text\tn\né\t1".encode("latin-1")), encoding="latin-1") == ["é"]


MARK = "\ufeff".encode()
RECORD_FILES = {"x.txt": "é", "x.jsonl": '{"text": "é"}\n', "x.json": '[{"text": "é"}]', "x.csv": "text,n\né,1\n",
                "x.tsv": "n\ttext\n1\té\n"}  # fmt: skip


@pytest.mark.parametrize("name", ["x.txt", "x.jsonl", "x.json", "x.csv", "x.tsv"])
@pytest.mark.parametrize("skip_bad", [False, True])
def test_byte_order_marks_are_removed(name: str, skip_bad: bool) -> None:
    text = RECORD_FILES[name]
    assert read(name, MARK + text.encode(), skip_bad=skip_bad) == ["é"]
    if name not in ("x.txt", "x.json", "x.csv", "x.tsv"):  # Two joined files
        texts = read(name, 2 * (MARK + text.encode() + b"\n"), skip_bad=skip_bad)
        assert "".join(texts).replace("\n", "") == "éé"
    for encoding in ("utf-16", "utf-32", "utf-16-le", "utf-32-be"):
        marked_text = text if encoding in ("utf-16", "utf-32") else f"\ufeff{text}"
        assert read(name, marked_text.encode(encoding), encoding=encoding, skip_bad=skip_bad) == ["é"]
    assert read("x.zip", make_zip(("a.txt", MARK + b"one"), ("b.txt", MARK)), skip_bad=skip_bad) == ["one"]


@pytest.mark.parametrize("name", RECORD_FILES)
def test_utf16_and_utf32_are_detected(name: str) -> None:
    for encoding in ("utf-16", "utf-32"):
        data = RECORD_FILES[name].encode(encoding)
        with pytest.raises(UserError, match=f"{name} is {encoding.upper()}, not UTF-8") as error:
            read(name, data)
        assert error.value.hint == f"add --encoding {encoding}"
        assert read(name, data, skip_bad=True) == []


@pytest.mark.parametrize(
    "text",
    [
        '[{"text": "one"}, {"text": "zwölf\\n"}]',
        '\r\n{"text": "one"}\r\n\r\n{"n": 1.5e3, "text": "zwölf\\n"}\r\n',
        '{"text":"one"}\n{"text":"zwölf\\n"}',
        '{"version": "1", "ids": [1], "data": [{"text": "one"}, {"text": "zwölf\\n"}]}',
        ' [ ]\n',
        "",
    ],
)  # fmt: skip
def test_json_files_have_records_in_several_forms(text: str) -> None:
    expected = ["one", "zwölf\n"] if "one" in text else []
    assert read("x.json", text.encode()) == expected
    assert read("x.json", text.encode(), skip_bad=True) == expected


def test_a_long_json_file_is_an_error_with_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "MAX_JSON", 1000)
    data = json.dumps([{"text": "a" * 2000}]).encode()
    with pytest.raises(UserError, match="x.json has more than 1,000 characters of JSON") as error:
        read("x.json", data)
    assert "convert it to .jsonl" in error.value.hint


@pytest.mark.parametrize("block", [1, 2, 7, 100])
def test_line_breaks_become_line_feeds(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "BLOCK", block)
    data = b"one\r\n\r\ntwo\rthree\r\n---\r\nfour\r"
    for config in ({}, {"skip_bad": True}):
        assert read("x.txt", data, split_on="---", **config) == ["one\n\ntwo\nthree\n", "four\n"]
    assert read("x.jsonl", b'{"text": "a\\r\\nb"}\r\n') == ["a\r\nb"]  # Only a file's own line breaks are replaced.


PLAUSIBLE = {
    "cp1251": "Привет, мир! Это заметка о погоде.", "shift_jis": "これはテストです。",
    "gb18030": "今天天气很好，我们去公园。", "euc_kr": "안녕하세요. 오늘은 날씨가 좋습니다.", "cp1252": "Le café est très bon.",
}  # fmt: skip


@pytest.mark.parametrize("encoding", PLAUSIBLE)
def test_hint_names_a_plausible_encoding_and_shows_the_line(encoding: str) -> None:
    text = PLAUSIBLE[encoding]
    for name, data in {
        "x.txt": f"first line\n{text}\n", "x.jsonl": f'{{"text": "{text}"}}\n', "x.csv": f'n,text\n1,"{text}"\n',
    }.items():  # fmt: skip
        with pytest.raises(UserError, match="not UTF-8") as error:
            read(name, data.encode(encoding))
        assert f"--encoding {encoding} reads it as" in error.value.hint
        assert text[:20] in error.value.hint
        assert text in read(name, data.encode(encoding), encoding=encoding)[0]
    with pytest.raises(UserError) as error:
        read("x.txt", b"\xe9 \x80 \xf1 \x98")
    assert "set its --encoding" in error.value.hint
    with pytest.raises(UserError) as error:
        read("x.txt", "Á été".encode(), encoding="cp1252")
    assert "--encoding utf_8 reads it as “Á été”" in error.value.hint
    with pytest.raises(UserError) as error:
        read("x.txt", b"text", encoding="utf-16")
    assert error.value.hint.startswith("set its --encoding")


def test_hint_names_the_option_that_reads_the_records() -> None:
    for keys, option in ({"messages": 1, "tools": 2}, "--chat"), ({"conversations": 1, "id": 2}, "--chat"), (
        {"prompt": 1, "completion": 2, "id": 3}, "--pairs"), ({"body": 1}, "--field"):  # fmt: skip
        table = ",".join(keys) + "\n" + ",".join("x" * len(keys)) + "\n"
        for name, data in {"x.jsonl": json.dumps(keys), "x.json": json.dumps([keys]), "x.csv": table}.items():
            with pytest.raises(UserError, match='it has no "text"; its') as error:
                read(name, data.encode())
            assert error.value.hint.startswith(option), (name, error.value.hint)


def test_surrogates_and_bad_bytes_are_replaced_and_counted() -> None:
    reader = Reader(ReadConfig(errors="replace"))
    data = b'{"text": "\\ud800 \\ud83d\\udc15 \xff \\udc00"}\n'
    assert list(documents(reader, source("x.jsonl", data))) == ["\ufffd 🐕 \ufffd \ufffd"]
    assert list(documents(reader, source("x.csv", b"text\nZ\xffrich\n"))) == ["Z\ufffdrich"]
    assert reader.replaced == 4
    with pytest.raises(UserError, match="zero byte"):  # Zero bytes are never replaced.
        read("x", b"a\xff\0", errors="replace")


def test_nesting_near_the_limit_of_recursion_is_read_or_one_error_line() -> None:
    for depth in range(600, 1000):  # Some of it can be parsed but not written again.
        with contextlib.suppress(UserError):
            lists = "[" * depth + "]" * depth
            read("x.jsonl", f'{{"text": "\\ud800", "n": {lists}}}'.encode(), errors="replace")


def test_overlong_record_is_one_error_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "MAX_RECORD", 1000)
    long_lines = make_jsonl(["a", "b" * 3000, "c"])
    with pytest.raises(UserError, match="x.jsonl, line 3: longer than 1,000 bytes"):
        read("x.jsonl", long_lines)
    assert read("x.jsonl", long_lines, skip_bad=True) == ["a", "c"]
    with pytest.raises(UserError, match="x.csv, line [0-9]+: longer than 1,000 bytes"):
        read("x.csv", make_table(["a", "b\n" * 3000, "c"], ","))
    row = "text\n" + '"' + ",".join(['b\n"', '"'] * 300) + '"\n'  # One row of many short lines and fields
    with pytest.raises(UserError, match="x.csv, line [0-9]+: longer than 1,000 bytes"):
        read("x.csv", row.encode())


def make_gzip_bomb(byte: bytes, mebibytes: int) -> bytes:
    import zlib

    packer = zlib.compressobj(1, wbits=31)
    return b"".join(packer.compress(byte * 2**20) for _ in range(mebibytes)) + packer.flush()


@pytest.mark.parametrize(("ending", "pack"), PACKERS[1:])
def test_compression_bombs_are_streamed(ending: str, pack: Callable[[bytes], bytes]) -> None:
    size = 100
    compressed = make_gzip_bomb(b"a", size) if ending == ".gz" else pack(b"a" * 2**20) * size
    name, data = "x.zip", make_zip((f"x.txt{ending}", compressed))
    with limit_memory(40):
        lengths = [len(chunk.text) for chunk in Reader(ReadConfig()).documents(source(name, data))]
    assert max(lengths) < 8 * 2**20
    assert sum(lengths) == size * 2**20


def test_compression_bombs_of_zeros_or_one_line_are_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="not text: it has a zero byte in line 1"):
        read("x.gz", make_gzip_bomb(b"\0", 10))
    monkeypatch.setattr(formats, "MAX_RECORD", 2**22)
    with limit_memory(20), pytest.raises(UserError, match="line 1: longer than 4,194,304 bytes"):
        read("x.jsonl.gz", make_gzip_bomb(b" ", 30))


def test_invalid_settings_are_errors() -> None:
    for config in ({"split_on": "a\nb"}, {"encoding": "hex"}, {"encoding": "utf-7"}):
        with pytest.raises(UserError):
            Reader(ReadConfig(**config))
    for data, message in {
        "hi".encode("utf-16-le"): "is not utf-16: UTF-16 stream does not start with BOM",
        "a\nb\0".encode("utf-16"): "zero byte in line 2",
    }.items():
        with pytest.raises(UserError, match=message):
            read("x", data, encoding="utf-16")


@pytest.mark.parametrize(
    ("name", "module", "extra"), [("x.zst", lib_zstd.__name__, "zstd"), ("x.parquet", "pyarrow", "parquet")]
)
def test_missing_package_is_named(name: str, module: str, extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(WorkError, match="needs the package") as error:
        read(name, b"", skip_bad=True)  # A missing package is an error even with skip_bad.
    assert error.value.hint == install_extra(extra)


def test_operating_system_errors_name_the_file() -> None:
    def refuse() -> io.BytesIO:
        raise PermissionError(13, "Permission denied")

    class Torn(io.BytesIO):
        def read1(self, size: int | None = -1) -> bytes:
            raise OSError(5, "Input/output error")

    for opens, reason in ((refuse, "Permission denied"), (Torn, "Input/output error")):
        with pytest.raises(UserError, match=f"cannot read x.txt: {reason}"):
            list(Reader(ReadConfig()).documents(Source("x.txt", 1, 0, opens)))
        reader, notes = Reader(ReadConfig(skip_bad=True)), list[str]()
        reader.skipped.note = notes.append
        assert list(reader.documents(Source("x.txt", 1, 0, opens))) == []
        assert notes == [f"skipped: cannot read x.txt: {reason}"]
