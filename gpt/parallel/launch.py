"""Starts a command in several processes on this machine, with torch's elastic launcher. If one fails, all end."""

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

from gpt.parallel.environment import CTRL_C, LAUNCHER, RUN, START_TIME, STATUS, read_message
from gpt.system.errors import PeerLost, UserError
from gpt.system.interrupt import StopSignal
from gpt.system.peaks import host_memory

PROCESS_BYTES = 2**28  # memory of an idle process with Python and torch
CONNECT_SECONDS = 10
MAX_SAVE_SECONDS = 24 * 3600  # time to save a run after a signal; a second Ctrl-C ends the run at once

# Exit codes of a process that may have ended because another failed. Later codes in this list are surer signs of this.
CONSEQUENCE_CODES = (128 + signal.SIGTERM, -signal.SIGTERM, PeerLost.exit_code)


@dataclass(frozen=True)
class LaunchResult:
    """How the processes ended. ``rank`` failed first. ``signum`` is the signal that killed it, if any. ``run`` is the
    run that can be resumed, if any."""

    status: int
    rank: int = 0
    signum: int | None = None
    run: Path | None = None


def _check_memory(nproc: int) -> None:
    needed, memory = nproc * PROCESS_BYTES, host_memory()
    if needed > memory:
        raise UserError(
            f"{nproc:,} processes take {needed / 1e9:,.0f} GB just to start, and this machine has "
            f"{memory / 1e9:,.0f} GB",
            "lower --nproc: one process per GPU, or per few CPU cores",
        )


def launch(command: Sequence[str], nproc: int, start_time: float | None = None) -> LaunchResult:
    """Runs ``command`` in ``nproc`` processes, waits for them and forwards signals. The processes get torchrun's
    environment variables and connect at ``MASTER_PORT``, by default a free port. ``start_time`` is when the command
    started, in `time.perf_counter` seconds.

    Raises `UserError` for a port in use, too little memory, or a missing loopback device.
    """
    _check_memory(nproc)
    config: dict[str, Any] = {
        "min_nodes": 1,
        "max_nodes": 1,
        "nproc_per_node": nproc,
        "max_restarts": 0,
        "run_id": "gpt",
        "rdzv_backend": "c10d",
        "rdzv_endpoint": f"127.0.0.1:{_port()}",
        "local_addr": "127.0.0.1",
        "signals_to_handle": "",
    }

    def close(signum: int) -> None:
        raise SignalException("", signal.Signals(signum))  # Torch's launcher forwards the signal.

    def end_at_once(signum: int) -> None:
        Path(folder, CTRL_C).touch()
        close(signum)  # While it waits for the processes, it forwards any signal as SIGTERM.

    stop = StopSignal(on_first=close, on_second=end_at_once)
    with tempfile.TemporaryDirectory(prefix="gpt-") as folder, _environment(folder, start_time), stop:
        try:
            elastic_launch(LaunchConfig(**config, logs_specs=DefaultLogsSpecs(log_dir=folder)), command[0])(
                *command[1:]
            )
        except SignalException as signal_error:
            status = int(read_message(folder, STATUS) or 128)
            return LaunchResult(status if status < 128 else 128 + signal_error.sigval)
        except ChildFailedError as child_error:
            codes = {rank: failure.exitcode for rank, failure in child_error.failures.items()}
            if rank_0_status := read_message(folder, STATUS):
                codes[0] = int(rank_0_status)  # The launcher may have killed rank 0 after it reported its status.
            return _find_first_failure(codes, read_message(folder, RUN))
        return LaunchResult(0)


def _find_first_failure(codes: Mapping[int, int], run: str | None) -> LaunchResult:
    """Finds the process that failed first, from exit codes in order of exit. Negative codes are signals."""
    rank = min(codes, key=lambda rank: codes[rank] in CONSEQUENCE_CODES and CONSEQUENCE_CODES.index(codes[rank]) + 1)
    code = codes[rank]
    status = 1 if code < 0 or code == PeerLost.exit_code else code
    return LaunchResult(status, rank, -code if code < 0 else None, None if run is None else Path(run))


def _port() -> int:
    """Returns ``MASTER_PORT``, or 0 for any free port. Tests a connection, because without a loopback device the
    processes would hang for minutes."""
    port = os.environ.get("MASTER_PORT", "0")
    if not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise UserError(f'MASTER_PORT is "{port}"; it must be a number below 65,536')
    try:
        with socket.create_server(("127.0.0.1", int(port))) as server:
            socket.create_connection(server.getsockname(), timeout=CONNECT_SECONDS).close()
    except OSError as error:
        if int(port) and error.errno in (errno.EADDRINUSE, errno.EACCES):
            why = "in use" if error.errno == errno.EADDRINUSE else "reserved by the system"
            raise UserError(f"port {port} is {why}", "unset MASTER_PORT to use a free one") from None
        raise UserError(
            f"processes cannot connect to each other at 127.0.0.1: {error.strerror or error}",
            "bring up the loopback device (ip link set lo up), or leave --nproc out",
        ) from None
    return int(port)


@contextlib.contextmanager
def _environment(folder: str, start_time: float | None) -> Iterator[None]:
    """Sets the processes' environment and silences the launcher. Afterwards, restores the environment and logging."""
    log_level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    # In torch 2.11, only an environment variable can set the shutdown timeout. The default is 30 s.
    defaults = {"TORCH_CPP_LOG_LEVEL": "ERROR", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(MAX_SAVE_SECONDS)}
    variables = {LAUNCHER: folder} | {name: value for name, value in defaults.items() if name not in os.environ}
    os.environ |= variables | ({START_TIME: repr(start_time)} if start_time is not None else {})
    try:
        yield
    finally:
        for name in (*variables, START_TIME):
            os.environ.pop(name, None)
        logging.disable(log_level)
