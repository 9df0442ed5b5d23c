"""Programs that read untrusted files in a process of their own."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any


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


def end_program(process: "subprocess.Popen[bytes]") -> None:
    """Kills a program, and those that it started."""
    if process.poll() is None and hasattr(os, "killpg"):
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.communicate()
