"""From words to documents."""

import hashlib
from pathlib import Path

import pytest

from gpt.errors import UserError
from gpt.text import readers

HARD = [
    "", " ", "\n", "plain", "WE'LL SEE, I'm sure; THEY'VE", "1234567890123 12 3", "a\r\nb\r\n\r\n c", "tabs\t\tand  spaces   end ",
    "Zürich naïve 日本語 🐕‍🦺 עברית", "<|endoftext|>", "x <|endoftext|> y", " " * 300 + "z", "\n" * 50 + "a", "\u00a0\u2003\u3000b",
    "\x00\x01\x1c\x1f", "½ ² ٣ Ⅷ", "e\u0301\u0301", "\ufffd", "_under_score__", "''''s 'S 's",
]  # fmt: skip


def test_files_folders_stdin_in_order(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    for name, text in {"b/2.txt": "two", "b/1.txt": "one", ".hidden": "no", "a.txt": "first", "b/.git": "no"}.items():
        (tmp_path / name).write_text(text)
    corpus = readers.read([str(tmp_path), str(tmp_path / "a.txt")])
    assert [document.text for document in corpus.documents] == ["first", "one", "two", "first"]
    assert corpus.bytes == 16
    assert len(readers.read([str(tmp_path / "a.txt")] * 2).documents) == 1  # or held-out text could be trained on
    assert corpus.sources[0].sha256 == hashlib.sha256(b"first").hexdigest()
    assert corpus.name == tmp_path.name


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is empty: 0 characters"),
        (b"caf\xe9 au lait", "is not UTF-8: byte 0xe9 at offset 3, line 1"),
        (b"one\ntwo\nthr\xff", "is not UTF-8: byte 0xff at offset 11, line 3"),
        (b"PK\x03\x04\x00\x00", "is no text: it has a zero byte at offset 4"),
        ("hi".encode("utf-16"), "is UTF-16, not UTF-8"),
    ],
)
def test_what_is_no_text(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "file.txt"
    path.write_bytes(data)
    with pytest.raises(UserError, match=message):
        readers.read([str(path)])


def test_missing(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"there is no file nowhere\.txt"):
        readers.read(["nowhere.txt"])
    with pytest.raises(UserError, match='no corpus called "pydoc"') as error:
        readers.read(["pydoc"])
    assert "pydocs" in error.value.hint
    with pytest.raises(UserError, match="has no files"):
        readers.read([str(tmp_path)])


def test_text_is_read_exactly(tmp_path: Path) -> None:
    text = "".join(HARD).replace("\x00", "") + "\r\n\ufeff"
    (tmp_path / "t").write_bytes(text.encode())
    assert readers.read([str(tmp_path / "t")]).documents[0].text == text
