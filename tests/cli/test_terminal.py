"""What a terminal is shown of words that nobody can vouch for, and what files and pipes get of them."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from conftest import Gpt

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="terminals are Unix's here")

EVIL = "\x1b]0;owned\x07\x1b[2J\r\x08\x9b31m\x7f\u202e\u2066"
TAME = "␛]0;owned␇␛[2J␍␈\\u009b31m␡\\u202e\\u2066"


def on_terminal(*args: str | Path, cwd: Path, stdin: bytes = b"", **env: str) -> tuple[int, str]:
    """Runs a command whose stdout and stderr are a terminal; its exit status and what that was sent."""
    ours, theirs = os.openpty()
    heard = bytearray()

    def listen() -> None:
        try:
            while data := os.read(ours, 2**16):
                heard.extend(data)
        except OSError:  # Linux's way of ending it
            pass

    code = "from gpt_cli.main import run; run()"
    settings = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "200", **env}
    process = subprocess.Popen(
        [sys.executable, "-c", code, *map(os.fsencode, args)],
        cwd=cwd, stdin=subprocess.PIPE, stdout=theirs, stderr=theirs, env=settings,
    )  # fmt: skip
    os.close(theirs)
    thread = threading.Thread(target=listen)
    thread.start()
    process.communicate(stdin, timeout=120)
    thread.join()
    os.close(ours)
    return process.returncode, heard.decode().replace("\r\n", "\n")  # what the terminal itself makes of line feeds


def is_tame(said: str) -> bool:
    """Whether a terminal shows all of it."""
    return all(char.isprintable() or char in "\n\t" for char in said)


@pytest.mark.slow
def test_errors_show_control_characters(workdir: Path) -> None:
    Path("c.toml").write_text(f"{json.dumps(EVIL)} = 3\n", encoding="utf-8")
    code, said = on_terminal("train", "--config", "c.toml", cwd=workdir)
    assert (code, said.count("\x1b[1;31m")) == (2, 1)  # rich's own red
    assert f'c.toml: unknown key "{TAME}"' in said
    name = EVIL.replace("/", "")
    code, said = on_terminal("sample", "x", "-m", name, cwd=workdir)
    assert code == 2
    assert f"there is no run or checkpoint {TAME}" in said
    code, said = on_terminal("train", name, "--debug", cwd=workdir)
    assert "Traceback" in said
    assert "\x1b[2J" not in said


def test_files_and_pipes_have_what_there_is(gpt: Gpt, workdir: Path) -> None:
    Path("c.toml").write_text('"\\u001b[31m\\u202e" = 3\n', encoding="utf-8")
    assert 'unknown key "\x1b[31m\u202e"' in gpt("train", "--config", "c.toml").err


@pytest.mark.slow
def test_texts_show_control_characters_and_stream(gpt: Gpt, run_folder: Path, workdir: Path) -> None:
    args = ["sample", EVIL, "-m", run_folder, "-n", "60", "-t", "9e15", "--seed", "1"]
    code, said = on_terminal(*args, cwd=workdir)
    assert code == 0
    text = said[said.index(TAME) :].partition("\n\x1b[2m")[0]  # a note comes after it
    assert is_tame(text)
    piped = gpt(*args).out
    assert piped.startswith(EVIL)
    assert any(ord(char) < 32 and char not in "\n\t" for char in piped.removeprefix(EVIL))
    code, told = on_terminal("sample", "-i", "-m", run_folder, "-n", "0", cwd=workdir, stdin=EVIL.encode() + b"\n")
    assert TAME in told


@pytest.mark.slow
def test_json_on_a_terminal_has_escapes_of_the_same_meaning(gpt: Gpt, run_folder: Path, workdir: Path) -> None:
    args = ["sample", EVIL, "-m", run_folder, "-n", "5", "--seed", "1", "--json"]
    _, said = on_terminal(*args, cwd=workdir)
    line = next(line for line in said.split("\n") if line.startswith("{"))
    assert is_tame(line)
    assert json.loads(line) == json.loads(gpt(*args).out)
    assert "\u202e" in gpt(*args).out


def test_bytes_of_ids_on_a_terminal(gpt: Gpt, workdir: Path) -> None:
    args = ["tokenizer", "decode", "27 91 50 74 255 10", "--tokenizer", "bytes"]
    assert on_terminal(*args, cwd=workdir) == (0, "␛[2J\\xff\n")
    assert gpt(*args).out.startswith("\x1b[2J")


@pytest.mark.slow
def test_names_are_no_markup(gpt: Gpt, run_folder: Path, workdir: Path) -> None:
    for name in ("[red]x", "[/x]", ":smile:"):
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).symlink_to(run_folder)
        done = gpt("bench", "-m", name, "-n", "2", "--rounds", "1")
        assert done.code == 0, done.err
        assert name in done.out
