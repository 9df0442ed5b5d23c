"""The environment variables of a distributed process. This module does not import torch.

torchrun and our launcher set ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``, ``LOCAL_WORLD_SIZE``, ``MASTER_ADDR`` and
``MASTER_PORT``. Our launcher adds the start time of the command and a folder for messages from rank 0.
"""

import contextlib
import os
import signal
from pathlib import Path

from gpt.system.errors import UserError

LAUNCHER, START_TIME = "GPT_LAUNCHER", "GPT_BEGAN"
RUN, STATUS, CTRL_C = "run", "status", "ctrl-c"


def read_integer(name: str, default: int | None = None) -> int:
    """Reads a non-negative integer variable. Raises `UserError` if it is missing or invalid."""
    value = os.environ.get(name, None if default is None else str(default))
    if value is None or not value.isascii() or not value.isdigit():
        problem = "not set" if value is None else f'"{value}"; it must be a whole number'
        raise UserError(
            f"WORLD_SIZE is {os.environ.get('WORLD_SIZE')}, and {name} is {problem}",
            "start all processes with torchrun, which sets both, or unset WORLD_SIZE",
        )
    return int(value)


def is_distributed() -> bool:
    """Whether this process is one of several. Raises `UserError` if the environment is inconsistent."""
    return read_integer("WORLD_SIZE", 1) > 1


def rank() -> int:
    """Returns this process's rank: 0 for a single process, or if the environment is inconsistent."""
    with contextlib.suppress(UserError):
        return read_integer("RANK", 0) if is_distributed() else 0
    return 0


def is_ours() -> bool:
    """Whether our own launcher started this process."""
    return LAUNCHER in os.environ


def read_start_time() -> float | None:
    """Returns when our launcher's command started, in `time.perf_counter` seconds, which all processes share."""
    return float(os.environ[START_TIME]) if is_ours() and START_TIME in os.environ else None


def write_message(name: str, value: object) -> None:
    """Writes a message for our launcher, if it started this process and this is rank 0."""
    if is_ours() and rank() == 0:
        with contextlib.suppress(OSError):
            Path(os.environ[LAUNCHER], name).write_text(str(value), encoding="utf-8")


def read_message(folder: str, name: str) -> str | None:
    """Returns rank 0's message, or None."""
    with contextlib.suppress(OSError):
        return Path(folder, name).read_text(encoding="utf-8")
    return None


def is_ctrl_c(signum: int) -> bool:
    """Whether a signal is a person's Ctrl-C. Our launcher forwards a second one as SIGTERM, after a message."""
    return signum == signal.SIGINT or (is_ours() and read_message(os.environ[LAUNCHER], CTRL_C) is not None)
