"""``gpt tokenize`` and ``gpt data show`` of what it made: what is printed and what is refused."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import Done, Gpt, make_text

from gpt.config import TextConfig
from gpt.text.corpus import open_corpus
from gpt.text.token_folder import TokenFolder
from gpt.text.tokenize import tokenize as tokenize_corpus
from gpt.text.tokenizer import bytes_tokenizer


@pytest.fixture
def texts(workdir: Path) -> Path:
    """A folder of two texts."""
    folder = workdir / "my texts"
    folder.mkdir()
    (folder / "a.txt").write_bytes(make_text(500).encode())
    (folder / "b.txt").write_bytes(make_text(100, seed=1).encode())
    return folder


def tokenize(gpt: Gpt, *args: str | Path) -> Done:
    done = gpt("tokenize", "--tokenizer", "bytes", *args)
    assert done.code == 0, done.err
    return done


def test_what_to_do_next(gpt: Gpt, texts: Path) -> None:
    done = tokenize(gpt, "my texts", "-o", "my tokens")
    assert done.out.startswith("saved  my tokens  (")
    assert done.out.endswith("train on it  gpt train 'my tokens'\n")
    shown = gpt("data", "show", "my tokens").out
    assert shown.startswith("folder  my tokens\n")
    assert shown.endswith("gpt train 'my tokens'\n")
    assert tokenize(gpt, "my texts", "-o", "p1", "--part", "1/2").out.endswith("gpt data merge PART... -o DIR\n")
    part = tokenize(gpt, "my texts", "-o", "p2", "--part", "2/2")  # which is empty
    assert part.out.endswith("gpt data merge PART... -o DIR\n")
    joined = gpt("data", "merge", "p1", "p2", "-o", "joined").out
    assert joined.endswith("gpt train joined\n")


def test_nothing_to_train_on_is_said(gpt: Gpt, texts: Path) -> None:
    Path("small.jsonl").write_text('{"text": ""}\n{"text": "x"}\n')
    tokenize(gpt, "small.jsonl", "-o", "tokens", "--val-fraction", "0")
    manifest = Path("tokens/manifest.json")
    values = json.loads(manifest.read_text())
    values["train"], values["val"] = values["val"], values["train"]
    values["shards"] = [s | {"side": "val", "file": s["file"].replace("train", "val")} for s in values["shards"]]
    manifest.write_text(json.dumps(values))
    shown = gpt("data", "show", "tokens").out
    assert "gpt train" not in shown
    assert "nothing to train on" in shown


def test_data_show_of_what_is_none(gpt: Gpt, texts: Path) -> None:
    done = gpt("data", "show", "my texts")
    assert (done.code, "my texts is not a token folder" in done.err) == (2, True)
    done = gpt("data", "show", "nothere")
    assert (done.code, "there is no corpus or folder" in done.err) == (2, True)


def test_held_out_text_is_not_trained_on(gpt: Gpt, texts: Path) -> None:
    done = tokenize(gpt, "my texts", "-o", "tokens", "--val-text", "my texts/b.txt")
    assert "1 file of --val-text is also in TEXT: held out, not trained on" in done.err
    folder = TokenFolder("tokens")
    assert folder.bytes_of("train") == (texts / "a.txt").stat().st_size
    assert folder.bytes_of("val") == (texts / "b.txt").stat().st_size
    done = gpt("tokenize", "my texts", "-o", "none", "--val-text", texts)
    assert (done.code, "nothing is left to train on" in done.err) == (2, True)
    tokenize(gpt, "my texts", "my texts/a.txt", "-o", "once")
    assert TokenFolder("once").bytes == sum(path.stat().st_size for path in texts.iterdir())


def test_folders_that_are_left_out_are_said(gpt: Gpt, texts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path(texts, "locked").mkdir()
    scandir = os.scandir

    def refuse(path: str) -> object:
        if str(path).endswith("locked"):  # some are descriptors
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    done = tokenize(gpt, "my texts", "-o", "tokens", "--skip-bad")
    assert "skipped 1 unreadable: cannot read the folder my texts/locked" in done.err


def test_tokens_are_not_tokenized_again(gpt: Gpt, texts: Path) -> None:
    tokenize(gpt, ".", "-o", "one")
    tokenize(gpt, ".", "-o", "two")
    assert TokenFolder("one").manifest["corpus"] == TokenFolder("two").manifest["corpus"]
    done = gpt("tokenize", "one", "-o", "three")
    assert (done.code, "one is already tokenized" in done.err) == (2, True)


def test_the_end_of_text_that_is_counted_is_the_tokenizers(workdir: Path) -> None:
    Path("a.txt").write_text("a </s> b </s> <|endoftext|>")
    corpus = open_corpus(["a.txt"], TextConfig(val_fraction=0))
    folder = tokenize_corpus(corpus, replace(bytes_tokenizer(), eot_token="</s>"), Path("out"))
    assert folder.manifest["end_of_text_in_text"] == 2
