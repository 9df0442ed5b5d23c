"""The processes that train one run together, and their collectives.

`World` is one process, for which every collective is the identity; `Ranks` is one of several, as torchrun's environment
says. Rank 0, the main rank, decides, reports and writes. If it fails, it says why and ends; the others wait for its
next message, and end when the connection breaks (`PeerLost`). NCCL does not notice that: the launcher kills a rank of
its machine 30 seconds after another one has ended. A machine that has lost its power or network breaks no connection:
there a collective ends by its time limit.

Messages go over gloo, whatever the device: they are on the host. They are JSON: torch's own object collectives unpickle
what they receive.
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

from gpt.device import Compute
from gpt.errors import PeerLost, UserError, WorkError, first_line
from gpt.interrupt import Stopped
from gpt.parallel import environment
from gpt.peaks import cores

T = TypeVar("T")
RENDEZVOUS = timedelta(minutes=10)  # until all processes have found each other
LONGEST_START = timedelta(days=1)  # of a message before the first step: rank 0 may have a text to tokenize
LIMIT = timedelta(hours=1)  # of any other collective, which may wait while rank 0 writes a checkpoint to a slow disk
POLL_SECONDS = 0.0005  # between two looks at whether a GPU has come to an event


class World:
    """One process that trains by itself."""

    rank, size = 0, 1
    local_rank, local_size = 0, 1  # on this machine
    tensor = 1  # ranks that share each sequence, and so each forward pass; they are consecutive
    owns_group = False  # whether `mesh` made a process group of this process alone
    _mesh: DeviceMesh | None = None
    gradients: dist.ProcessGroup | None = None  # over which gradients are reduced; None: torch's default group

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which decides, reports and writes."""
        return self.rank == 0

    @property
    def data_size(self) -> int:
        """Groups of ranks that take different sequences."""
        return self.size // self.tensor

    @property
    def data_rank(self) -> int:
        """This rank's group of those."""
        return self.rank // self.tensor

    def divide(self, tensor: int) -> None:
        """Lets each ``tensor`` consecutive ranks share their sequences. Raises `UserError` if they do not divide the
        world."""
        if self.size % tensor:
            n = "one process" if self.size == 1 else f"{self.size} processes"
            raise UserError(
                f"{n} cannot be divided into groups of {tensor} (--tensor {tensor})",
                f"use --nproc {-(-self.size // tensor) * tensor}, or --tensor 1",
            )
        self.tensor = tensor

    def mesh(self, kind: str) -> DeviceMesh:
        """All ranks as a mesh, data × tensor, for a kind of device. Its groups are made once."""
        if self._mesh is not None:
            return self._mesh
        if not dist.is_initialized():
            self.owns_group = True
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
        backend = "nccl" if kind == "cuda" else "gloo"
        ranks = torch.arange(self.size).view(self.data_size, self.tensor)

        def mine(groups: Tensor) -> dist.ProcessGroup:
            made = {tuple(some): dist.new_group(some, LIMIT, backend) for some in groups.tolist()}
            own: dist.ProcessGroup = next(group for some, group in made.items() if self.rank in some)
            return own

        # Not init_device_mesh, whose groups have torch's limits, of 10 and 30 minutes.
        names = ("data", "tensor")
        self._mesh = DeviceMesh.from_group([mine(ranks.T), mine(ranks)], kind, ranks, mesh_dim_names=names)
        return self._mesh

    def all_reduce_max(self, value: int) -> int:
        """The largest of all ranks' values."""
        return value

    def all_reduce_sum(self, *values: float) -> tuple[float, ...]:
        """Sums over all data ranks, in double precision."""
        return values

    def broadcast_object(self, make: Callable[[], T]) -> T:
        """Rank 0's ``make()``, which JSON can hold, on all ranks; the others do not call it. Raises `Stopped` on all
        ranks if it does on rank 0."""
        return make()

    def raise_on_all(self, make: Callable[[], T]) -> T:
        """This rank's ``make()``. If it raises `UserError` on any rank, rank 0 raises that, and the others `PeerLost`
        when rank 0 has ended."""
        return make()

    def assert_same(self, values: Mapping[str, Any]) -> None:
        """Raises `UserError`, reported once, for a value that differs between ranks."""

    def place(self, compute: Compute) -> Compute:
        """``compute`` with this rank's own device. Raises `UserError` if there is none for it."""
        return compute

    def seed(self, seed: int, step: int) -> None:
        """Seeds this rank's draws in a step by seed, step and data rank: each data rank drops out other activations,
        and none has a random state to save. A process by itself keeps its generator."""

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum over all data ranks, in place, on the device."""
        return tensor

    def all_gather(self, tensor: Tensor) -> Tensor:
        """All ranks' tensors of one shape, concatenated."""
        return tensor

    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        """Overwrites the tensors with rank 0's, in place, on the device."""

    def synchronize(self, event: torch.cuda.Event) -> None:
        """Waits until the device has come to an event."""
        event.synchronize()

    def started(self) -> None:
        """Called before the first step: from here on no rank has reason to be away for longer than `LIMIT`."""

    def watching_peers(self) -> contextlib.AbstractContextManager[object]:
        """A context in which the loss of another rank raises `PeerLost`."""
        return contextlib.nullcontext()

    def wait_for_main(self) -> None:
        """Waits on other ranks until rank 0 has ended, and raises `PeerLost` then; returns at once on rank 0."""

    def leave(self) -> None:
        """Destroys the process group that `mesh` made for one process, if it did."""
        if self.owns_group:
            dist.destroy_process_group()


class Ranks(World):
    """One of several processes."""

    joined = 0  # how often this process has joined others: a program may train one run after another

    def __init__(self) -> None:
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        self.rank, self.size, self.local_rank, self.local_size = map(environment.number, names)
        self.agent = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None  # torchrun's, or our launcher's
        Ranks.joined += 1
        store = dist.PrefixStore(f"gpt {Ranks.joined}", _store())  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.size, timeout=RENDEZVOUS)
        self.messages = dist.new_group(backend="gloo", timeout=LONGEST_START)
        self.gradients = self.messages

    def place(self, compute: Compute) -> Compute:
        device = self.raise_on_all(lambda: self._device(compute.device.type))
        found = Compute(device, compute.dtype, self.local_size if device.type == "cpu" else 1)
        if found.device.type == "cuda":
            torch.cuda.set_device(found.device)
            self.gradients = dist.new_group(backend="nccl", timeout=LIMIT)
        return found

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
        if self.agent not in (None, os.getppid()):  # it was killed, and passes on no signal any more
            value = value or signal.SIGTERM
        largest = torch.tensor(value)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.messages)
        return int(largest)

    def all_reduce_sum(self, *values: float) -> tuple[float, ...]:
        sums = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(sums, group=self.messages)
        return tuple((sums / self.tensor).tolist())

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
        except UserError as raised:
            error = raised
        message = None if error is None else [isinstance(error, WorkError), error.message, error.hint]
        for rank, raised_there in enumerate(self._gather_all(message)):
            if raised_there is not None:
                self.wait_for_main()
                failed, said, hint = raised_there
                if rank and (error is None or said != error.message):
                    said = f"process {rank}: {said}"
                raise (WorkError if failed else UserError)(said, hint)
        return value  # type: ignore[return-value]

    def assert_same(self, values: Mapping[str, Any]) -> None:
        all_values = self._gather_all(dict(values))
        for rank, other in enumerate(all_values):
            for key in sorted({*other, *all_values[0]}):
                ours, theirs = all_values[0].get(key), other.get(key)
                if ours != theirs:
                    self.wait_for_main()
                    raise UserError(
                        f"processes do not agree: {key} is {ours!r} in process 0 and {theirs!r} in process {rank}",
                        "start all of them with the same versions, arguments and environment variables",
                    )

    def _broadcast(self, value: Any, source: int = 0) -> Any:
        """The value of the rank ``source``, on all ranks."""
        message = _to_bytes(value if self.rank == source else None)
        length = torch.tensor(len(message))
        dist.broadcast(length, source, group=self.messages)
        message = message if self.rank == source else torch.empty(int(length), dtype=torch.uint8)
        dist.broadcast(message, source, group=self.messages)
        return json.loads(message.numpy().tobytes())

    def _gather_all(self, value: Any) -> list[Any]:
        """Each rank's value, by rank."""
        return [self._broadcast(value, source) for source in range(self.size)]

    def seed(self, seed: int, step: int) -> None:
        digest = hashlib.sha256(repr((seed, step, self.data_rank)).encode()).digest()
        torch.manual_seed(int.from_bytes(digest[:8], "little") >> 1)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        dist.all_reduce(tensor, group=self.gradients)
        return tensor if self.tensor == 1 else tensor.copy_(tensor / self.tensor)

    def all_gather(self, tensor: Tensor) -> Tensor:
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(parts, tensor.contiguous(), group=self.gradients)
        return torch.cat(parts)

    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            dist.broadcast(tensor, 0, group=self.gradients)

    def synchronize(self, event: torch.cuda.Event) -> None:
        """Waits in Python, not in C, so that a second signal ends it."""
        while not event.query():  # type: ignore[no-untyped-call]
            time.sleep(POLL_SECONDS)

    def started(self) -> None:
        dist.distributed_c10d._set_pg_timeout(LIMIT, self.messages)

    @contextlib.contextmanager
    def watching_peers(self) -> Iterator[None]:
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
        """Destroys the process groups at the end of a run that went well, when all ranks have come to it."""
        dist.barrier(group=self.messages)
        dist.destroy_process_group()


def _to_bytes(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


@contextlib.contextmanager
def joined(nproc: int) -> Iterator[World]:
    """The world of this process. Raises `UserError` if ``nproc`` processes were asked for in another way than by our
    own launcher, or if the processes do not find each other."""
    if not environment.is_one_of_many():
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
    with ranks.watching_peers():
        yield ranks
        ranks.leave()


@functools.cache
def _store() -> Any:
    """The store at ``MASTER_ADDR`` and ``MASTER_PORT``, through which processes find each other."""
    return next(dist.rendezvous("env://", timeout=RENDEZVOUS))[0]  # type: ignore[attr-defined]


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
