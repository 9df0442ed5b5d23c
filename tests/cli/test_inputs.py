"""Command input: size limits, endless devices and slow pipes."""

import io
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import Gpt, spawn
from conftest import one_line_of_what_and_what_next as assert_error
from gpt_cli import inputs

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="devices and named pipes are Unix's")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("sample --prompt-file", "/dev/zero has more than 67,108,864 bytes"),
        ("sample --prompts", "/dev/zero is a device, not a text"),
        ("train --config", "/dev/zero has more than 1,048,576 bytes"),
        ("inspect attention --prompt-file", "/dev/zero has more than 67,108,864 bytes"),
        ("tokenizer encode --tokenizer bytes --file", "/dev/zero has more than 67,108,864 bytes"),
        ("train", "/dev/zero is a device, not a text"),
        ("tokenize -o tokens", "/dev/zero is a device, not a text"),
        ("train --val-text", "/dev/zero is a device, not a text"),
    ],
)
def test_endless_devices_are_an_error(gpt: Gpt, workdir: Path, words: str, message: str) -> None:
    assert_error(gpt(*words.split(), "/dev/zero"), message)
    assert os.listdir() == []


def test_decode_limits_stdin_and_accepts_only_ascii_digits(gpt: Gpt, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "MAX_TEXT_BYTES", 5)
    assert_error(gpt("tokenizer", "decode", "-", "--tokenizer", "bytes", stdin=b"72 105"), "stdin has mo")
    assert gpt("tokenizer", "decode", "-", "--tokenizer", "bytes", stdin=b"72 33").out == "H!"
    assert 'error: "٣" is not a token id' in gpt("tokenizer", "decode", "٣", "--tokenizer", "bytes").err


def test_closed_stdin_is_an_error(gpt: Gpt, run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(io, "TextIOWrapper", lambda buffer: None)  # The fixture makes sys.stdin with this class.
    assert_error(gpt("sample", "--prompt-file", "-"), "there is no standard input to read")
    assert_error(gpt("sample", "-i", "-m", run_folder, "--greedy"), "there is no standard input to read")


@pytest.mark.slow
def test_reading_from_a_terminal_prints_how_to_end_the_input(workdir: Path) -> None:
    controller, terminal = os.openpty()
    with spawn("sample", "--prompts", "-", stdin=terminal) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == "reading prompts from stdin; end with Ctrl-D\n"
        os.write(controller, b"\x04")
        _, err = process.communicate(timeout=60)
    assert (process.returncode, err.splitlines()[0]) == (2, "error: stdin contains no prompt")
    with spawn("tokenize", "-", "-o", "tokens", stdin=terminal) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == "reading the text from stdin; end with Ctrl-D\n"
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    assert process.returncode == 130
    assert os.listdir() == []


@pytest.mark.slow
def test_interactive_session_survives_invalid_utf8(run_folder: Path, workdir: Path) -> None:
    env = {**os.environ, "PYTHONUTF8": "1"}
    with spawn("sample", "-i", "-m", run_folder, "-n", "0", stdin=subprocess.PIPE, env=env) as process:
        assert process.stdin is not None
        process.stdin.buffer.write(b"the\n\xff\xfe\n/set temperature \xff\ncat\n")
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (0, "the\ncat\n")
    assert err.count("error: the line is not UTF-8") == 2
