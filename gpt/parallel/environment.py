"""The environment of this process: started by itself, by our own launcher, or by torchrun. Nothing here imports torch.

A launcher sets ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``, ``LOCAL_WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT``, as
torchrun does; ours also says when the command began, and names a folder for messages from rank 0 to the launcher.
"""

import contextlib
import os
from pathlib import Path

from gpt.errors import UserError

LAUNCHER, BEGAN = "GPT_LAUNCHER", "GPT_BEGAN"
RUN, STATUS = "run", "status"


def number(name: str, otherwise: int | None = None) -> int:
    """A whole number in the environment. Raises `UserError` if it is missing or no whole number."""
    value = os.environ.get(name, None if otherwise is None else str(otherwise))
    if value is None or not value.isascii() or not value.isdigit():
        said = "not set" if value is None else f'"{value}"; it must be a whole number'
        raise UserError(
            f"WORLD_SIZE is {os.environ.get('WORLD_SIZE')}, and {name} is {said}",
            "start all processes with torchrun, which sets both, or unset WORLD_SIZE",
        )
    return int(value)


def is_one_of_many() -> bool:
    """Whether this process was started as one of several. Raises `UserError` if the environment is contradictory."""
    return number("WORLD_SIZE", 1) > 1


def rank() -> int:
    """This process's rank; 0 for a process by itself, or if the environment is contradictory."""
    with contextlib.suppress(UserError):
        return number("RANK", 0) if is_one_of_many() else 0
    return 0


def is_ours() -> bool:
    """Whether our own launcher started this process."""
    return LAUNCHER in os.environ


def began() -> float | None:
    """The time at which our launcher's command began, on the clock of `time.perf_counter`, which processes share."""
    return float(os.environ[BEGAN]) if is_ours() and BEGAN in os.environ else None


def tell(name: str, value: object) -> None:
    """Leaves a message for our launcher, if it started this process and this is rank 0."""
    if is_ours() and rank() == 0:
        with contextlib.suppress(OSError):
            Path(os.environ[LAUNCHER], name).write_text(str(value), encoding="utf-8")


def told(folder: str, name: str) -> str | None:
    """Rank 0's message; None if it left none."""
    with contextlib.suppress(OSError):
        return Path(folder, name).read_text(encoding="utf-8")
    return None
