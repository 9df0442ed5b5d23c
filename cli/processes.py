"""A command in several processes: started from here, or one of them, started by us or by torchrun."""

import atexit
import contextlib
import os
import shlex
import signal
import sys
import time
from collections.abc import Sequence

from gpt.errors import Interrupted, PeerLost, UserError, WorkError
from gpt.parallel import environment

from . import render

ALONE_SECONDS = 3.0  # that a process waits for the first one to say the same, and to end it


def start(words: Sequence[str], nproc: int, began: float) -> int:
    """Runs ``gpt`` with ``words`` in so many processes, for a command that ``began`` then. Gives the exit status;
    raises what they could not say."""
    from gpt.parallel.launch import launch

    ended = launch([sys.executable, "-m", "gpt_cli", *words], nproc, began)
    resume = f"go on with: gpt train --resume {shlex.quote(str(ended.run))}" if ended.run and ended.run.is_dir() else ""
    if ended.signum is not None:
        name = signal.Signals(ended.signum).name
        why = ", maybe by the system, for want of memory" if name == "SIGKILL" else ""
        raise WorkError(f"process {ended.rank} of {nproc} was ended by {name}{why}", resume or "nothing was begun yet")
    if ended.status == 1 and ended.rank and resume:
        render.note(resume)
    return ended.status


def end_abruptly(status: Sequence[int]) -> None:
    """Has this process, if it is one of several, end before Python takes itself apart, with what ``status`` has by
    then: a thread of torch's that lets go of a tensor while Python does so aborts the process (seen in one of six ends
    on a busy machine). What else is registered with `atexit` comes first, since it is registered later."""
    with contextlib.suppress(UserError):
        if environment.is_one_of_many():
            atexit.register(_end, status)


def _end(status: Sequence[int]) -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status[0] if status else 1)


def silenced(error: BaseException) -> int | None:
    """The exit status of a process that leaves the word to another one; None where it has to say what happened.

    What ends all of them alike is for the first to say: that one ends, and what started the others ends them before
    they come to say it too.
    """
    if isinstance(error, PeerLost) and (environment.rank() or environment.is_ours()):
        return error.exit_code
    if environment.rank() == 0:
        return None
    if isinstance(error, Interrupted):
        return error.exit_code
    torch = sys.modules.get("torch")
    if torch is None or not torch.distributed.is_initialized():
        time.sleep(ALONE_SECONDS)
    return None
