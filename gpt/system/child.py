"""Programs in processes of their own: ours that read untrusted files, and the user's."""

import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpt.system.errors import ProgramFailure, UserError


def start_program(program: Path, settings: Mapping[str, Any], owner: object) -> "subprocess.Popen[bytes]":
    """Starts a Python program and sends it a line of ``settings``. It ends at the latest with ``owner``."""
    pipe = subprocess.PIPE
    # Without -P, files next to the program would shadow standard modules.
    process = subprocess.Popen(
        [sys.executable, "-P", str(program)], stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, start_new_session=True
    )
    weakref.finalize(owner, end_program, process)
    assert process.stdin is not None
    with contextlib.suppress(OSError):  # The process has ended.
        process.stdin.write(json.dumps(settings).encode() + b"\n")
        process.stdin.flush()
    return process


def split_command(command: str) -> list[str]:
    """Returns a command's words. Raises `UserError` if it is not a command, or if its program does not exist."""
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise UserError(
            f'"{command}" is not a command: {error}'.lower(), "give one such as 'python score.py'"
        ) from None
    if not words or shutil.which(words[0]) is None:
        message = f'there is no program "{words[0] if words else ""}"'
        raise UserError(message, "give a command such as 'python score.py'")
    return words


def run_command(command: str, data: bytes, seconds: float) -> list[str]:
    """Runs a command without a shell, with ``data`` as its input, and returns the lines of its output. Raises
    `ProgramFailure` if it fails, or takes more than ``seconds``. A Ctrl-C does not reach it."""
    pipe, words = subprocess.PIPE, split_command(command)
    try:
        process = subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True)
    except OSError as error:
        raise ProgramFailure(f"{command} cannot be started: {error.strerror or error}", "make it executable") from None
    try:
        output, errors = process.communicate(data, seconds)
    except subprocess.TimeoutExpired:
        raise ProgramFailure(
            f"{command} took more than {seconds:.0f} s", "make it faster, or end what it waits for"
        ) from None
    finally:
        end_program(process)
    if process.returncode:
        last = (errors.decode("utf-8", "replace").strip().splitlines() or ["it printed no error"])[-1]
        raise ProgramFailure(f"{command} failed with exit code {process.returncode}: {last:.200}", "correct it")
    return output.decode("utf-8", "replace").splitlines()


def end_program(process: "subprocess.Popen[bytes]") -> None:
    """Kills a program, and those that it started."""
    if process.poll() is None and hasattr(os, "killpg"):
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.communicate()
