"""``gpt tokenizer``. tests/cli/test_cli.py tests invalid arguments."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import Done, Gpt, deny_access, make_text

from gpt.tokenizers.finding import find_tokenizer


@pytest.fixture
def book(workdir: Path) -> Path:
    path = workdir / "book.txt"
    path.write_bytes(make_text(3000).encode())
    return path


def train_tokenizer(gpt: Gpt, book: Path, *args: str) -> Done:
    result = gpt("tokenizer", "train", book, "-o", "vocab", "--vocab-size", "400", *args)
    assert result.code == 0, result.err
    return result


def test_train_prints_folder_and_size(gpt: Gpt, book: Path) -> None:
    result = train_tokenizer(gpt, book)
    size = book.stat().st_size
    assert f"saved  vocab  (400 ids from {size:,} bytes in" in result.out
    assert "gpt tokenizer show vocab" in result.out
    assert sorted(path.name for path in Path("vocab").iterdir()) == [
        "gpt.json", "tokenizer.json", "tokenizer.tiktoken", "tokenizer_config.json",
    ]  # fmt: skip
    second = gpt("tokenizer", "train", book, "-o", "vocab")
    assert (second.code, "vocab already exists" in second.err) == (2, True)
    result = gpt("tokenizer", "train", book, "-o", "other", "--sample-bytes", "5000")
    sampled = re.search(r"([\d,]+) of ([\d,]+) bytes", result.out)
    assert sampled and 4000 < int(sampled[1].replace(",", "")) <= 5000 and sampled[2] == f"{size:,}"
    assert [path.name for path in Path().iterdir() if path.name.startswith(".tmp")] == []


def test_train_json_and_special_tokens(gpt: Gpt, book: Path) -> None:
    result = train_tokenizer(gpt, book, "--special", "<|user|>", "--special", "<|bot|>", "--json", "--quiet")
    values = json.loads(result.out)
    assert list(values) == [
        "out", "vocab_size", "end_of_text", "specials", "fingerprint", "sampled_bytes", "bytes", "seconds",
    ]  # fmt: skip
    assert (values["vocab_size"], values["end_of_text"]) == (400, 397)
    assert values["specials"] == {"<|user|>": 398, "<|bot|>": 399}
    assert values["sampled_bytes"] == values["bytes"] == book.stat().st_size
    assert find_tokenizer("vocab").fingerprint == values["fingerprint"]
    assert result.err == ""


def test_errors_come_before_training(gpt: Gpt, book: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for special in ("\udcff", "<|endoftext|>"):
        result = gpt("tokenizer", "train", "nowhere.txt", "-o", "v2", "--special", special)
        assert (result.code, "special token" in result.err) == (2, True), result.err
    monkeypatch.setattr("gpt.corpus.vocabulary.open_corpus", None)
    Path("link").symlink_to("nowhere")
    for command in (["tokenizer", "train"], ["tokenize"]):
        result = gpt(*command, book, "-o", "book.txt/x")
        assert (result.code, "cannot write book.txt/x: Not a directory" in result.err) == (1, True)

        result = gpt(*command, book, "-o", "link")
        assert (result.code, "link already exists" in result.err) == (2, True)


def test_permission_errors_name_the_path(gpt: Gpt, book: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train_tokenizer(gpt, book)
    mkdir = os.mkdir

    def no_mkdir(path: str, *args: int) -> None:
        if "locked" in str(path):
            raise PermissionError(13, "Permission denied", path)
        mkdir(path, *args)

    Path("locked").mkdir()
    Path("lk").mkdir()
    monkeypatch.setattr(os, "mkdir", no_mkdir)
    deny_access(monkeypatch, "lk")
    for command in (["tokenizer", "train"], ["tokenize"]):
        for out in ("locked/x", "lk/x"):
            result = gpt(*command, book, "-o", out)
            assert (result.code, f"cannot write {out}: Permission denied" in result.err) == (1, True), result.err
    for command in (["tokenizer", "show"], ["train"]):
        result = gpt(*command, "lk/v")
        assert (result.code, "cannot read lk/v" in result.err) == (2, True), result.err
        assert "permissions" in result.err

    real_open = os.open

    def no_open(path: str, *args: int) -> int:
        if str(path).endswith("gpt.json"):
            raise PermissionError(13, "Permission denied", path)
        return real_open(path, *args)

    monkeypatch.setattr(os, "open", no_open)
    result = gpt("tokenizer", "show", "vocab")
    assert (result.code, "cannot read vocab/gpt.json: Permission denied" in result.err) == (2, True), result.err


def test_show_prints_size_pattern_and_longest_tokens(gpt: Gpt, book: Path) -> None:
    train_tokenizer(gpt, book, "--special", "<|user|>")
    result = gpt("tokenizer", "show", "vocab", "--longest", "3")
    assert result.code == 0
    assert "<|user|>" in result.out
    values = json.loads(gpt("tokenizer", "show", "vocab", "--longest", "3", "--json").out)
    keys = ["name", "vocab_size", "end_of_text", "specials", "bos", "ends", "pattern", "fingerprint", "longest"]
    assert list(values) == keys
    sizes = [token["bytes"] for token in values["longest"]]
    assert sizes == sorted(sizes, reverse=True)
    assert len(sizes) == 3
    assert json.loads(gpt("tokenizer", "show", "bytes", "--longest", "0", "--json").out)["longest"] == []
    assert "backend      tiktoken" in gpt("tokenizer", "show", "vocab").out
    Path("normalizing").mkdir()
    values = json.loads(Path("vocab/tokenizer.json").read_text(encoding="utf-8")) | {"normalizer": {"type": "NFC"}}
    Path("normalizing/tokenizer.json").write_text(json.dumps(values), encoding="utf-8")
    assert "backend      the tokenizers library" in gpt("tokenizer", "show", "normalizing").out


def test_encode_and_decode_read_arguments_files_and_stdin(gpt: Gpt, workdir: Path) -> None:
    assert gpt("tokenizer", "encode", "hé", "--tokenizer", "bytes").out == "104 195 169\n"
    assert gpt("tokenizer", "decode", "104", "195 169", "--tokenizer", "bytes").out == "hé"
    assert gpt("tokenizer", "encode", "--file", "-", "--tokenizer", "bytes", stdin=b"hi\n").out == "104 105 10\n"
    assert gpt("tokenizer", "decode", "-", "--tokenizer", "bytes", stdin=b"104\n105 10\n").out == "hi\n"
    expected = {
        "model": "bytes", "tokens": [104, 195, 169, 10], "pieces": ["h", "<0xC3>", "<0xA9>", "\\n"], "bytes": 4,
    }  # fmt: skip
    for flags in (["--json"], ["--json", "--show"]):
        assert json.loads(gpt("tokenizer", "encode", "hé\n", "--tokenizer", "bytes", *flags).out) == expected


def test_special_tokens_are_encoded_only_on_request(gpt: Gpt, book: Path) -> None:
    train_tokenizer(gpt, book, "--special", "<|user|>")
    text = "<|user|> hi<|endoftext|>"
    ordinary = [int(id) for id in gpt("tokenizer", "encode", text, "--tokenizer", "vocab").out.split()]
    special = [int(id) for id in gpt("tokenizer", "encode", text, "--tokenizer", "vocab", "--special").out.split()]
    assert not {398, 399} & set(ordinary)
    assert (special[0], special[-1]) == (399, 398)
    for ids in (ordinary, special):
        assert gpt("tokenizer", "decode", *map(str, ids), "--tokenizer", "vocab").out == text


def test_decode_writes_raw_bytes(workdir: Path) -> None:
    code = "from gpt_cli.main import run; run()"
    ids = " ".join(map(str, range(256))).encode()
    command = [sys.executable, "-c", code, "tokenizer", "decode", "-", "--tokenizer", "bytes"]
    result = subprocess.run(command, input=ids, capture_output=True, check=True)
    assert result.stdout == bytes(range(256))
