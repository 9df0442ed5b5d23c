"""``gpt tokenize``."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import Done, Gpt, make_text

from gpt.config.text import TextConfig
from gpt.corpus.corpus import open_corpus
from gpt.corpus.token_folder import TokenFolder
from gpt.corpus.tokenize import tokenize as tokenize_corpus
from gpt.tokenizers.tokenizer import bytes_tokenizer


@pytest.fixture
def texts(workdir: Path) -> Path:
    folder = workdir / "my texts"
    folder.mkdir()
    (folder / "a.txt").write_bytes(make_text(500).encode())
    (folder / "b.txt").write_bytes(make_text(100, seed=1).encode())
    return folder


def run_tokenize(gpt: Gpt, *args: str | Path) -> Done:
    result = gpt("tokenize", "--tokenizer", "bytes", *args)
    assert result.code == 0, result.err
    return result


def test_next_command_is_printed(gpt: Gpt, texts: Path) -> None:
    result = run_tokenize(gpt, "my texts", "-o", "my tokens")
    assert result.out.startswith("saved  my tokens  (")
    assert result.out.endswith("train on it  gpt train 'my tokens'\n")


def test_held_out_text_is_excluded_from_training(gpt: Gpt, texts: Path) -> None:
    result = run_tokenize(gpt, "my texts", "-o", "tokens", "--val-text", "my texts/b.txt")
    assert "1 file of --val-text is also in TEXT: held out, not trained on" in result.err
    folder = TokenFolder("tokens")
    assert folder.count_text_bytes("train") == (texts / "a.txt").stat().st_size
    assert folder.count_text_bytes("val") == (texts / "b.txt").stat().st_size
    result = gpt("tokenize", "my texts", "-o", "none", "--val-text", texts)
    assert (result.code, "nothing is left to train on" in result.err) == (2, True)
    run_tokenize(gpt, "my texts", "my texts/a.txt", "-o", "once")
    assert TokenFolder("once").bytes == sum(path.stat().st_size for path in texts.iterdir())


def test_skipped_folders_are_printed(gpt: Gpt, texts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path(texts, "locked").mkdir()
    scandir = os.scandir

    def refuse(path: str) -> object:
        if str(path).endswith("locked"):  # Some calls pass file descriptors.
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    result = run_tokenize(gpt, "my texts", "-o", "tokens", "--skip-bad")
    assert "skipped: cannot read the folder my texts/locked" in result.err


def test_token_folders_are_not_tokenized_again(gpt: Gpt, texts: Path) -> None:
    run_tokenize(gpt, ".", "-o", "one")
    run_tokenize(gpt, ".", "-o", "two")
    assert TokenFolder("one").manifest["corpus"] == TokenFolder("two").manifest["corpus"]
    result = gpt("tokenize", "one", "-o", "three")
    assert (result.code, "one is already tokenized" in result.err) == (2, True)


def test_end_of_text_tokens_in_the_text_are_counted(workdir: Path) -> None:
    Path("a.txt").write_text("a </s> b </s> <|endoftext|>")
    corpus = open_corpus(["a.txt"], TextConfig(val_fraction=0))
    folder = tokenize_corpus(corpus, replace(bytes_tokenizer(), eot_token="</s>"), Path("out"))
    assert folder.manifest["end_of_text_in_text"] == 2
