"""The processes that train a run together, and their collectives.

`World` is a single process: every collective is the identity. `Ranks` is one of several, configured by torchrun's
environment variables. Rank 0, the main rank, decides, reports and writes. If rank 0 fails, the connection breaks, and
the other ranks exit (`PeerLost`). NCCL does not detect broken connections, so the launcher kills the other ranks on its
machine after 30 seconds. If a machine loses power or network, collectives time out.

Messages are JSON on the host, sent over gloo, because torch's object collectives would unpickle them.
"""

import contextlib
import functools
import hashlib
import json
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from gpt.config.device import Compute
from gpt.parallel import environment
from gpt.system.errors import PeerLost, ProgramFailure, UserError, WorkError, first_line
from gpt.system.interrupt import Stopped
from gpt.system.peaks import cores

T = TypeVar("T")
RENDEZVOUS_TIMEOUT = timedelta(minutes=10)
START_TIMEOUT = timedelta(days=1)  # timeout of messages before the first step: rank 0 may still be tokenizing
COLLECTIVE_TIMEOUT = timedelta(hours=1)  # timeout of other collectives: rank 0 may be writing to a slow disk
POLL_SECONDS = 0.0005  # polling interval for a GPU event


class World:
    """A single process."""

    rank, size = 0, 1
    local_rank, local_size = 0, 1  # this process's rank on its machine, and the number of processes there
    owns_group = False  # whether `mesh` created a process group for this single process
    gradients: dist.ProcessGroup | None = None  # group for gradient all-reduce; None for torch's default group

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which decides, reports and writes."""
        return self.rank == 0

    def mesh(self, kind: str) -> DeviceMesh:
        """Returns the mesh of all ranks for a device type."""
        if not dist.is_initialized():
            self.owns_group = True
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
        if self.gradients is None:
            self.gradients = dist.new_group(backend="nccl" if kind == "cuda" else "gloo")
        return DeviceMesh.from_group(self.gradients, kind)

    def all_reduce_max(self, value: int) -> int:
        """Returns the maximum over all ranks."""
        return value

    def poll(self, signum: int | None, share: float) -> tuple[int, float]:
        """Returns a signal that any rank has received, or 0, and rank 0's ``share``."""
        return signum or 0, share

    def all_reduce_sum(self, *values: float) -> tuple[float, ...]:
        """Returns sums over all ranks, in double precision."""
        return values

    def broadcast_object(self, make: Callable[[], T]) -> T:
        """Calls ``make`` on rank 0 and returns the JSON-serializable result on all ranks. Raises `Stopped` on all ranks
        if rank 0 does."""
        return make()

    def raise_on_all(self, make: Callable[[], T]) -> T:
        """Returns this rank's ``make()``. After a `UserError` on any rank, rank 0 raises that error, and other ranks
        raise `PeerLost` when rank 0 exits."""
        return make()

    def assert_same(self, values: Mapping[str, Any]) -> None:
        """Raises `UserError` on rank 0 for a value that differs between ranks."""

    def place(self, compute: Compute) -> Compute:
        """Returns ``compute`` with this rank's device. Raises `UserError` if none is available."""
        return compute

    def connect(self, compute: Compute) -> None:
        """Lets all ranks exchange tensors on their devices."""

    def seed(self, seed: int, step: int) -> None:
        """Seeds torch by ``seed``, ``step`` and rank, so dropout masks differ between ranks and need no saved random
        state. A single process keeps its random state."""

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sums a tensor over all ranks, in place, on the device."""
        return tensor

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Concatenates all ranks' tensors of the same shape."""
        return tensor

    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        """Overwrites tensors with rank 0's, in place, on the device."""

    def synchronize(self, event: torch.cuda.Event) -> None:
        """Waits for an event on the device."""
        event.synchronize()

    def shorten_timeout(self) -> None:
        """Sets the timeout of messages and checkpoints to `COLLECTIVE_TIMEOUT`. Called before the first step."""

    def watch_peers(self) -> contextlib.AbstractContextManager[object]:
        """Returns a context that raises `PeerLost` if another rank is lost."""
        return contextlib.nullcontext()

    def wait_for_main(self) -> None:
        """Waits for rank 0 to exit, then raises `PeerLost`. Returns immediately on rank 0."""

    def leave(self) -> None:
        """Destroys the process group that `mesh` created, if any."""
        if self.owns_group:
            dist.destroy_process_group()


class Ranks(World):
    """One of several processes."""

    rendezvous_count = 0  # number of runs that this program has joined

    def __init__(self) -> None:
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        self.rank, self.size, self.local_rank, self.local_size = map(environment.read_integer, names)
        self.launcher_pid = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None
        Ranks.rendezvous_count += 1
        store = dist.PrefixStore(f"gpt {Ranks.rendezvous_count}", _store())  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.size, timeout=RENDEZVOUS_TIMEOUT)
        self.message_group = dist.new_group(backend="gloo", timeout=START_TIMEOUT)
        self.gradients = self.message_group

    def place(self, compute: Compute) -> Compute:
        device = self._device(compute.device.type)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        return Compute(device, compute.dtype, self.local_size if device.type == "cpu" else 1)

    def connect(self, compute: Compute) -> None:
        if compute.device.type == "cuda":
            self.gradients = dist.new_group(backend="nccl", timeout=COLLECTIVE_TIMEOUT)

    def _device(self, kind: str) -> torch.device:
        if kind == "cpu":
            return torch.device("cpu")
        if kind != "cuda":
            raise UserError(f"several processes cannot share {kind}", "leave out --nproc, or use --device cpu")
        if torch.cuda.device_count() < self.local_size:
            raise UserError(
                f"{self.local_size} processes need a GPU each; this machine has {torch.cuda.device_count()}",
                f"use --nproc {torch.cuda.device_count()}, or --device cpu",
            )
        if not dist.is_nccl_available():
            raise UserError("this build of torch has no NCCL, needed to train on several GPUs", "use --device cpu")
        return torch.device("cuda", self.local_rank)

    def all_reduce_max(self, value: int) -> int:
        maximum = torch.tensor(value)
        dist.all_reduce(maximum, dist.ReduceOp.MAX, group=self.message_group)
        return int(maximum)

    def poll(self, signum: int | None, share: float) -> tuple[int, float]:
        if self.launcher_pid not in (None, os.getppid()):  # A killed launcher forwards no signals.
            signum = signum or signal.SIGTERM
        maximum = torch.tensor([signum or 0, share if self.is_main else 0.0], dtype=torch.float64)
        dist.all_reduce(maximum, dist.ReduceOp.MAX, group=self.message_group)
        return int(maximum[0]), float(maximum[1])

    def all_reduce_sum(self, *values: float) -> tuple[float, ...]:
        sums = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(sums, group=self.message_group)
        return tuple(sums.tolist())

    def broadcast_object(self, make: Callable[[], T]) -> T:
        message: Any = None
        if self.is_main:
            try:
                message = [make()]
            except Stopped:
                message = []
        message = self._broadcast(message)
        if not message:
            raise Stopped
        value: T = message[0]
        return value

    def raise_on_all(self, make: Callable[[], T]) -> T:
        value = error = None
        try:
            value = make()
        except UserError as user_error:
            error = user_error
        kinds = {kind.__name__: kind for kind in (ProgramFailure, WorkError, UserError)}
        message = None
        if error is not None:
            message = [next(name for name, kind in kinds.items() if isinstance(error, kind)), error.message, error.hint]
        for rank, failure in enumerate(self._gather_all(message)):
            if failure is not None:
                self.wait_for_main()
                name, text, hint = failure
                if rank and (error is None or text != error.message):
                    text = f"process {rank}: {text}"
                raise kinds[name](text, hint)
        return value  # type: ignore[return-value]

    def assert_same(self, values: Mapping[str, Any]) -> None:
        all_values = self._gather_all(dict(values))
        for rank, rank_values in enumerate(all_values):
            for key in sorted({*rank_values, *all_values[0]}):
                main_value, value = all_values[0].get(key), rank_values.get(key)
                if main_value != value:
                    self.wait_for_main()
                    raise UserError(
                        f"processes do not agree: {key} is {main_value!r} in process 0 and {value!r} in process {rank}",
                        "start all of them with the same versions, arguments and environment variables",
                    )

    def _broadcast(self, value: Any, source: int = 0) -> Any:
        message = _to_bytes(value if self.rank == source else None)
        length = torch.tensor(len(message))
        dist.broadcast(length, source, group=self.message_group)
        message = message if self.rank == source else torch.empty(int(length), dtype=torch.uint8)
        dist.broadcast(message, source, group=self.message_group)
        return json.loads(message.numpy().tobytes())

    def _gather_all(self, value: Any) -> list[Any]:
        return [self._broadcast(value, source) for source in range(self.size)]

    def seed(self, seed: int, step: int) -> None:
        digest = hashlib.sha256(repr((seed, step, self.rank)).encode()).digest()
        torch.manual_seed(int.from_bytes(digest[:8], "little") >> 1)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        dist.all_reduce(tensor, group=self.gradients)
        return tensor

    def all_gather(self, tensor: Tensor) -> Tensor:
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(parts, tensor.contiguous(), group=self.gradients)
        return torch.cat(parts)

    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            dist.broadcast(tensor, 0, group=self.gradients)

    def synchronize(self, event: torch.cuda.Event) -> None:
        """Waits in Python, so that a second signal can interrupt the wait."""
        while not event.query():  # type: ignore[no-untyped-call]
            time.sleep(POLL_SECONDS)

    def shorten_timeout(self) -> None:
        for group in (self.message_group, None):  # Checkpoints are gathered in torch's default group.
            dist.distributed_c10d._set_pg_timeout(COLLECTIVE_TIMEOUT, group)

    @contextlib.contextmanager
    def watch_peers(self) -> Iterator[None]:
        try:
            yield
        except (dist.DistError, RuntimeError) as error:
            if isinstance(error, dist.DistError) or "gloo" in str(error).lower():
                raise PeerLost from None
            raise

    def wait_for_main(self) -> None:
        if not self.is_main:
            self._broadcast(None)

    def leave(self) -> None:
        """Waits for all ranks at the end of a successful run, then destroys the process groups."""
        dist.barrier(group=self.message_group)
        dist.destroy_process_group()


def _to_bytes(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


@contextlib.contextmanager
def join_world(nproc: int) -> Iterator[World]:
    """Returns a context with the world of this process. Raises `UserError` if ``nproc`` processes were not started by
    our launcher, or cannot connect."""
    if not environment.is_distributed():
        if nproc > 1:
            raise UserError(
                f"{nproc} processes were requested, but this is a single one",
                "use gpt train --nproc; or start your own program with torchrun, without nproc",
            )
        world = World()
        try:
            yield world
        finally:
            world.leave()
        return
    if nproc > 1 and not environment.is_ours():
        raise UserError("--nproc and torchrun both start processes", "leave --nproc out under torchrun")
    ranks = _join()
    if ranks.local_size > 1 and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, min(torch.get_num_threads(), cores()) // ranks.local_size))
    with ranks.watch_peers():
        yield ranks
        ranks.leave()


@functools.cache
def _store() -> Any:
    return next(dist.rendezvous("env://", timeout=RENDEZVOUS_TIMEOUT))[0]  # type: ignore[attr-defined]


def _join() -> Ranks:
    if not dist.is_available():
        raise UserError("this build of torch cannot train with several processes", "leave out --nproc")
    try:
        return Ranks()
    except (dist.DistError, RuntimeError, ValueError) as error:
        where = f"{os.environ.get('MASTER_ADDR', '')}:{os.environ.get('MASTER_PORT', '')}"
        raise UserError(
            f"the processes could not connect at {where}: {first_line(error):.200}",
            "is the port in use? choose another with torchrun --rdzv-endpoint HOST:PORT",
        ) from None
