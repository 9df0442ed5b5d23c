"""The option -m of every command, and hints for commands and options of other programs."""

import json
import shutil
from pathlib import Path

import pytest
from conftest import Gpt, make_text
from conftest import one_line_of_what_and_what_next as assert_error


@pytest.fixture
def run(run_folder: Path, workdir: Path) -> str:
    """The newest run, and a text file."""
    shutil.copytree(run_folder, "runs/book")
    Path("t.txt").write_bytes(make_text(60).encode())
    return "runs/book"


# The model


def test_model_defaults_to_the_newest_run(gpt: Gpt, run: str) -> None:
    for words in (["eval", "t.txt", "--json"], ["tokenizer", "encode", "the cat"], ["tokenizer", "decode", "40", "50"]):
        newest, named = gpt(*words), gpt(*words, "-m", run)
        assert (newest.code, newest.out) == (0, named.out), newest.err
    assert gpt("export", "-o", "newest.gguf", "--quiet").code == 0
    assert gpt("export", "-m", run, "-o", "named.gguf", "--quiet").code == 0


def test_words_of_eval_are_texts(gpt: Gpt, run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("nano").write_text("the cat sat on the mat")  # The file is named like a preset.
    assert json.loads(gpt("eval", "nano", "t.txt", "--json").out)["bytes"] > Path("t.txt").stat().st_size
    for model in (run, f"{run}:latest", "hf:me/tiny", "gpt2"):
        assert_error(gpt("eval", model, "t.txt"), model)
    monkeypatch.setenv("GPT_EVAL_MODEL", run)
    assert gpt("eval", "t.txt").code == 0


def test_export_takes_no_text(gpt: Gpt, run: str) -> None:
    result = gpt("export", run, "-o", "a.gguf")
    assert_error(result, f"unexpected extra argument(s) ({run})")
    assert "-m names the model" in result.err


# gpt chat


def test_chat_command_matches_interactive_sample(gpt: Gpt, run: str) -> None:
    options = ["-m", run, "-n", "6", "--seed", "3", "--temperature", "0.5"]
    chat, sample = (gpt(*words, *options, stdin=b"the cat\n/retry\n") for words in (["chat"], ["sample", "-i"]))
    assert (chat.code, chat.out, chat.err) == (0, sample.out, sample.err)
    assert chat.out.count("the cat") == 2
    assert gpt("chat", "-n", "6", "--seed", "3", "--temperature", "0.5", stdin=b"the cat\n/retry\n").out == chat.out
    result = gpt("chat", run)
    assert_error(result, f"unexpected extra argument(s) ({run})")
    assert "-m names the model" in result.err
    assert_error(gpt("chat", "--seed", "-1"), "Invalid value for '--seed'")
    assert_error(gpt("chat", "-m", "nowhere"), "there is no run or checkpoint nowhere")


def test_other_unknown_names_get_the_usual_error(gpt: Gpt) -> None:
    assert_error(gpt("sample", "--learning-rate", "1"), "No such option: --learning-rate")
    assert_error(gpt("train", "--stesp", "1"), "--steps")
    assert_error(gpt("trian"), "train")


@pytest.mark.usefixtures("run")
def test_incomplete_model_names_get_hints(gpt: Gpt) -> None:
    for name, hint in {
        "book": 'did you mean "' + str(Path("runs", "book")) + '"?',
        "owner/model": '"hf:owner/model"',
        "runs/bok": f'did you mean "{Path("runs", "book")}"?',
    }.items():
        result = gpt("eval", "t.txt", "-m", name)
        assert_error(result, f"there is no run or checkpoint {Path(name)}")
        assert hint in result.err
