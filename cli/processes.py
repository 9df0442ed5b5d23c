"""A command in several processes: started from here, or one of them, started by us or by torchrun."""

import shlex
import signal
import sys
import time
from collections.abc import Sequence

from gpt.errors import Interrupted, PeerLost, WorkError
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
