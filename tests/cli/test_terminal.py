"""Control characters are escaped on terminals, and unchanged in pipes."""

import contextlib
import io
import json
import os
import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import gpt_cli.main
import pytest
from conftest import Gpt

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="terminals are Unix's here")

CONTROL = "\x1b]0;owned\x07\x1b[2J\r\x08\x9b31m\x7f\u202e\u2066"
ESCAPED = "␛]0;owned␇␛[2J␍␈\\u009b31m␡\\u202e\\u2066"


Run = Callable[..., tuple[int, str]]


@pytest.fixture
def run_on_terminal(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a command line in this process, on a pseudo-terminal. Returns the exit status and the terminal's output."""
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "200")

    def run(*args: str | Path, stdin: bytes = b"") -> tuple[int, str]:
        controller, terminal = os.openpty()
        output = bytearray()

        def read_output() -> None:
            with contextlib.suppress(OSError):  # Linux reports the end of output as an error.
                while data := os.read(controller, 2**16):
                    output.extend(data)

        thread = threading.Thread(target=read_output)
        thread.start()
        with capfd.disabled(), monkeypatch.context() as patch, open(terminal, "w", encoding="utf-8") as screen:
            patch.setattr(sys, "stdout", screen)
            patch.setattr(sys, "stderr", screen)
            patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin), newline="\n"))
            code = gpt_cli.main.main([str(arg) for arg in args])
        thread.join()
        os.close(controller)
        return code, output.decode().replace("\r\n", "\n")  # The terminal adds carriage returns.

    return run


def is_printable(text: str) -> bool:
    return all(char.isprintable() or char in "\n\t" for char in text)


def test_errors_show_control_characters(run_on_terminal: Run, workdir: Path) -> None:
    Path("c.toml").write_text(f"{json.dumps(CONTROL)} = 3\n", encoding="utf-8")
    code, output = run_on_terminal("train", "--config", "c.toml")
    assert (code, output.count("\x1b[1;31m")) == (2, 1)  # rich prints the error in red.
    assert f'c.toml: unknown key "{ESCAPED}"' in output
    name = CONTROL.replace("/", "")
    code, output = run_on_terminal("sample", "x", "-m", name)
    assert code == 2
    assert f"there is no run or checkpoint {ESCAPED}" in output
    code, output = run_on_terminal("train", name, "--debug")
    assert "Traceback" in output
    assert "\x1b[2J" not in output


@pytest.mark.parametrize("width", [60, 80, 100, 140])
def test_lines_break_between_words(run_on_terminal: Run, monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    lines = re.sub(r"\x1b\[[\d;]*m", "", run_on_terminal("sample", "-N", str(2**63))[1]).splitlines()
    message = f"error: Invalid value for '--num' / '-N': Input should be less than or equal to {2**63 - 1}"
    assert " ".join(" ".join(lines).split()).startswith(message)
    assert all(len(line) <= width for line in lines)


def test_samples_show_control_characters(gpt: Gpt, run_on_terminal: Run, run_folder: Path) -> None:
    args = ["sample", CONTROL, "-m", run_folder, "-n", "60", "-t", "100", "--seed", "1"]
    code, output = run_on_terminal(*args)
    assert code == 0
    text = output[output.index(ESCAPED) :].partition("\n\x1b[2m")[0]  # A note follows the text.
    assert is_printable(text)
    piped = gpt(*args).out
    assert piped.startswith(CONTROL)
    assert any(ord(char) < 32 and char not in "\n\t" for char in piped.removeprefix(CONTROL))
    code, session = run_on_terminal("sample", "-i", "-m", run_folder, "-n", "0", stdin=CONTROL.encode() + b"\n")
    assert ESCAPED in session


def test_json_on_a_terminal_is_escaped_but_equal(gpt: Gpt, run_on_terminal: Run, run_folder: Path) -> None:
    args = ["sample", CONTROL, "-m", run_folder, "-n", "5", "--seed", "1", "--json"]
    _, output = run_on_terminal(*args)
    line = next(line for line in output.split("\n") if line.startswith("{"))
    assert is_printable(line)
    assert json.loads(line) == json.loads(gpt(*args).out)
    assert "\u202e" in gpt(*args).out


@pytest.mark.slow
def test_names_are_not_markup(gpt: Gpt, run_folder: Path, workdir: Path) -> None:
    for name in ("[red]x", "[/x]", ":smile:"):
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).symlink_to(run_folder)
        result = gpt("params", name)
        assert result.code == 0, result.err
        assert name in result.out
