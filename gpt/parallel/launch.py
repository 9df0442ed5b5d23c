"""Starts several processes of one command on this machine, by torch's elastic launcher. When one fails, all end."""

import contextlib
import errno
import logging
import os
import signal
import socket
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from gpt.errors import PeerLost, UserError
from gpt.interrupt import heeded
from gpt.parallel.environment import BEGAN, LAUNCHER, RUN, STATUS, told
from gpt.peaks import host_memory

PROCESS_BYTES = 2**28  # of memory that Python and torch take in each process, before any work
CONNECT_SECONDS = 10
LONGEST_SAVE = 24 * 3600  # seconds that a run which was told to stop may take to save; a second signal ends it at once

# Exit codes of a process that ended because another one did, the least likely first.
CONSEQUENCES = (128 + signal.SIGTERM, -signal.SIGTERM, PeerLost.exit_code)


@dataclass(frozen=True)
class Ended:
    """The end of all processes: ``rank`` is the one that ended the others, ``signum`` the signal that killed it, if one
    did, and ``run`` the run to resume, if one was begun."""

    status: int
    rank: int = 0
    signum: int | None = None
    run: Path | None = None


def _check_room(nproc: int) -> None:
    needed, memory = nproc * PROCESS_BYTES, host_memory()
    if needed > memory:
        raise UserError(
            f"{nproc:,} processes take {needed / 1e9:,.0f} GB just to start, and this machine has "
            f"{memory / 1e9:,.0f} GB",
            "lower --nproc: one process per GPU, or per few CPU cores",
        )


def launch(command: Sequence[str], nproc: int, began: float | None = None) -> Ended:
    """Runs ``command`` in ``nproc`` processes until all have ended, and passes signals on. Each process finds its rank
    in its environment, as under torchrun. They meet at ``MASTER_PORT``, or at a free port if that is not set. ``began``
    is when the work did, on the clock of `time.perf_counter`.

    Raises `UserError` if that port is taken, if this machine has too little memory for so many processes, or if it has
    no loopback device.
    """
    _check_room(nproc)
    config: dict[str, Any] = {
        "min_nodes": 1,
        "max_nodes": 1,
        "nproc_per_node": nproc,
        "max_restarts": 0,
        "run_id": "gpt",
        "rdzv_backend": "c10d",
        "rdzv_endpoint": f"127.0.0.1:{_port()}",
        "local_addr": "127.0.0.1",
        "signals_to_handle": ",".join(signal.Signals(signum).name for signum in heeded()),
    }
    with tempfile.TemporaryDirectory(prefix="gpt-") as place, _environment(place, began):
        try:
            elastic_launch(LaunchConfig(**config, logs_specs=DefaultLogsSpecs(log_dir=place)), command[0])(*command[1:])
        except SignalException as heard:
            status = int(told(place, STATUS) or 128)  # a second signal is passed on as SIGTERM, whichever it was
            return Ended(status if status < 128 else 128 + heard.sigval)
        except ChildFailedError as failed:
            codes = {rank: failure.exitcode for rank, failure in failed.failures.items()}
            if said := told(place, STATUS):
                codes[0] = int(said)  # the launcher's own signal may have ended it after that
            return _ended(codes, told(place, RUN))
        return Ended(0)


def _ended(codes: Mapping[int, int], run: str | None) -> Ended:
    """Finds the process that ended the others, by their exit codes in the order in which they ended; a negative one is
    the signal that killed it."""
    rank = min(codes, key=lambda rank: codes[rank] in CONSEQUENCES and CONSEQUENCES.index(codes[rank]) + 1)
    code = codes[rank]
    status = 1 if code < 0 or code == PeerLost.exit_code else code
    return Ended(status, rank, -code if code < 0 else None, None if run is None else Path(run))


def _port() -> int:
    """The port at which the processes meet: the environment's, or 0, any that is free. Connects to it, as they will:
    without a loopback device they would wait for minutes."""
    asked = os.environ.get("MASTER_PORT", "0")
    if not asked.isascii() or not asked.isdigit() or int(asked) > 65535:
        raise UserError(f'MASTER_PORT is "{asked}"; it must be a number below 65,536')
    try:
        with socket.create_server(("127.0.0.1", int(asked))) as server:
            socket.create_connection(server.getsockname(), timeout=CONNECT_SECONDS).close()
    except OSError as error:
        if int(asked) and error.errno in (errno.EADDRINUSE, errno.EACCES):
            why = "in use" if error.errno == errno.EADDRINUSE else "reserved by the system"
            raise UserError(f"port {asked} is {why}", "unset MASTER_PORT to use a free one") from None
        raise UserError(
            f"processes cannot connect to each other at 127.0.0.1: {error.strerror or error}",
            "bring up the loopback device (ip link set lo up), or leave --nproc out",
        ) from None
    return int(asked)


@contextlib.contextmanager
def _environment(place: str, began: float | None) -> Iterator[None]:
    """Sets the processes' environment, silences the launcher, and restores its signal handlers afterwards."""
    handlers = {signum: signal.getsignal(signum) for signum in heeded()}
    quiet = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    # Torch 2.11 takes no timeout, and waits for 30 s.
    usual = {"TORCH_CPP_LOG_LEVEL": "ERROR", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(LONGEST_SAVE)}
    added = {LAUNCHER: place} | {name: value for name, value in usual.items() if name not in os.environ}
    os.environ |= added | ({BEGAN: repr(began)} if began is not None else {})
    try:
        yield
    finally:
        for name in (*added, BEGAN):
            os.environ.pop(name, None)
        logging.disable(quiet)
        for signum, handler in handlers.items():
            signal.signal(signum, handler)
