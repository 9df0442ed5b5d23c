"""Starts and ends the processes of distributed training."""

import atexit
import contextlib
import os
import shlex
import signal
import sys
import time
from collections.abc import Sequence

from gpt.parallel import environment
from gpt.system.errors import Interrupted, PeerLost, UserError, WorkError

from .show import render

RANK_0_GRACE_SECONDS = 3.0  # How long other ranks wait for rank 0 to report an error.


def start(words: Sequence[str], nproc: int, start_time: float) -> int:
    """Runs ``gpt`` with ``words`` in ``nproc`` processes and returns the exit status.

    ``start_time`` is when the command started. Raises `WorkError` if a signal killed a process.
    """
    from gpt.parallel.launch import launch

    outcome = launch([sys.executable, "-P", "-m", "gpt_cli", *words], nproc, start_time)
    resume_hint = ""
    if outcome.run and outcome.run.is_dir():
        resume_hint = f"resume with: gpt train --resume {shlex.quote(str(outcome.run))}"
    if outcome.signum is not None:
        name = signal.Signals(outcome.signum).name
        cause = ", possibly by the system because memory ran out" if name == "SIGKILL" else ""
        message = f"process {outcome.rank} of {nproc} was killed by {name}{cause}"
        raise WorkError(message, resume_hint or "training had not started yet")
    if outcome.status == 1 and outcome.rank and resume_hint:
        render.note(resume_hint)
    return outcome.status


def exit_before_shutdown(status: Sequence[int]) -> None:
    """Makes a rank of distributed training exit with ``status[0]`` before the interpreter shuts down.

    A torch thread that frees a tensor during shutdown aborts the process (one in six exits on a busy machine). Other
    `atexit` functions still run first, because they are registered later.
    """

    def exit_now() -> None:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(status[0] if status else 1)

    with contextlib.suppress(UserError):
        if environment.is_distributed():
            atexit.register(exit_now)


def silent_status(error: BaseException) -> int | None:
    """Returns the exit status if another process reports ``error``, or None if this process must report it.

    If all ranks fail with the same error, rank 0 reports it and exits. The other ranks wait, so that the launcher can
    end them before they report it again.
    """
    if isinstance(error, PeerLost) and (environment.rank() or environment.is_ours()):
        return error.exit_code
    if environment.rank() == 0:
        return None
    if isinstance(error, Interrupted):
        return error.exit_code
    torch = sys.modules.get("torch")
    if torch is None or not torch.distributed.is_initialized():
        time.sleep(RANK_0_GRACE_SECONDS)
    return None
