"""The processes that train one run together, and what they tell each other.

`World` is a process by itself, where nothing is exchanged and nothing costs anything; `Ranks` is one of several, as
torchrun's environment says. The first of them (rank 0) decides, tells and writes. Where it fails it says so and ends;
the others wait for its word, and end without one when the connection breaks (`PeerLost`).

Words between processes go over gloo, whatever computes: they are on the host, and a wait for one has no time limit, so
that a long evaluation or a slow disk ends no run. They are JSON: torch's own way to send objects unpickles what comes.
"""

import contextlib
import functools
import hashlib
import json
import os
import signal
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import timedelta
from itertools import islice
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from gpt.device import Compute
from gpt.errors import PeerLost, UserError, WorkError
from gpt.interrupt import Stopped, StopSignal
from gpt.parallel import environment

T = TypeVar("T")
MEETING = timedelta(minutes=10)  # until all processes have found each other
PATIENCE = timedelta(days=30)  # until one of them has come to where the others wait


class World:
    """A process that trains by itself."""

    rank, size = 0, 1
    local_rank, local_size = 0, 1  # on this machine
    tensor = 1  # processes that share each sequence, and so each forward pass; their ranks follow on each other
    in_step = False  # whether all processes compute each forward pass together, since all have parts of the weights
    alone = False  # whether it made a group of this process alone
    gradients: dist.ProcessGroup | None = None  # over which gradients are summed; None: torch's default group

    @property
    def first(self) -> bool:
        """Whether this process is the one that decides, tells and writes."""
        return self.rank == 0

    @property
    def rows(self) -> int:
        """How many take different sequences."""
        return self.size // self.tensor

    @property
    def row(self) -> int:
        """Which of these this process is."""
        return self.rank // self.tensor

    def divide(self, tensor: int, sharded: bool) -> None:
        """Has so many processes share each sequence, and all of them the weights if ``sharded``. Raises `UserError`
        where they cannot be divided so."""
        if self.size % tensor:
            n = "one process" if self.size == 1 else f"{self.size} processes"
            raise UserError(
                f"{n} cannot be divided into groups of {tensor} (--tensor {tensor})",
                f"--nproc {-(-self.size // tensor) * tensor}, or --tensor 1",
            )
        self.tensor, self.in_step = tensor, sharded or tensor > 1

    def mesh(self, kind: str) -> DeviceMesh:
        """All processes as a grid, data × tensor, for a kind of device."""
        if not dist.is_initialized():
            self.alone = True
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
        over: dict[int | str, Any] = dict.fromkeys(("data", "tensor"), "nccl" if kind == "cuda" else "gloo")
        return init_device_mesh(
            kind, (self.rows, self.tensor), mesh_dim_names=("data", "tensor"), backend_override=over
        )

    def watching(self, stop: StopSignal, items: Iterable[T]) -> Iterator[T]:
        """The items, until a signal comes, which raises `Stopped`: in all processes at once where they are in step."""
        return stop.watching(items)

    def most(self, value: int) -> int:
        """The largest of all processes' values."""
        return value

    def sum(self, *values: float) -> tuple[float, ...]:
        """Sums over all rows, in double precision."""
        return values

    def decided(self, do: Callable[[], T]) -> T:
        """What ``do`` gives in the first process, which alone runs it: something that JSON has a word for. Raises
        `Stopped` in all where it does there."""
        return do()

    def together(self, do: Callable[[], T]) -> T:
        """What ``do`` gives here. Where it raises `UserError` in some process, the first one raises that, once."""
        return do()

    def agree(self, said: Mapping[str, Any]) -> None:
        """Raises `UserError`, once, for something that another process says otherwise than the first."""

    def share(self, items: Iterable[T]) -> Iterable[T]:
        """Those that are this process's to do."""
        return items

    def place(self, compute: Compute) -> Compute:
        """``compute`` with the device that is this process's. Raises `UserError` where there is none for it."""
        return compute

    def seed(self, seed: int, step: int) -> None:
        """Makes what this process draws in a step a function of seed, step and row, so that each row drops out other
        activations, and none has a random state to save. A process by itself goes on with its generator."""

    def wrap(self, module: nn.Module) -> nn.Module:
        """``module``, whose gradients become the mean of all processes' where they are not `accumulating`."""
        return module

    def accumulating(self, module: nn.Module) -> contextlib.AbstractContextManager[object]:
        """A context in which gradients of what `wrap` gave stay this process's own."""
        return contextlib.nullcontext()

    def add(self, tensor: Tensor) -> Tensor:
        """The sum over all rows, in place, on the device."""
        return tensor

    def gathered(self, tensor: Tensor) -> Tensor:
        """The processes' tensors, all of one shape, below each other."""
        return tensor

    def watching_peers(self) -> contextlib.AbstractContextManager[object]:
        """A context in which the loss of another process is a `PeerLost`."""
        return contextlib.nullcontext()

    def follow(self) -> None:
        """Where this process isn't the first: waits until that has ended. Raises `PeerLost` then."""

    def leave(self) -> None:
        """Lets go of the group that `mesh` made for one process, if it did."""
        if self.alone:
            dist.destroy_process_group()


class Ranks(World):
    """One of several processes."""

    met = 0  # how often this process has met others: a program may train one run after another

    def __init__(self) -> None:
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        self.rank, self.size, self.local_rank, self.local_size = map(environment.number, names)
        self.agent = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None  # torchrun's, or our launcher's
        Ranks.met += 1
        store = dist.PrefixStore(f"gpt {Ranks.met}", _store())  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.size, timeout=MEETING)
        self.words = dist.new_group(backend="gloo", timeout=PATIENCE)
        self.gradients = self.words  # where gradients are summed

    def place(self, compute: Compute) -> Compute:
        device = self.together(lambda: self._device(compute.device.type))
        found = Compute(device, compute.dtype, self.local_size if device.type == "cpu" else 1)
        if found.device.type == "cuda":
            torch.cuda.set_device(found.device)
            self.gradients = dist.new_group(backend="nccl", timeout=PATIENCE)
        return found

    def _device(self, kind: str) -> torch.device:
        if kind == "cpu":
            return torch.device("cpu")
        if kind != "cuda":
            raise UserError(f"several processes cannot share {kind}", "leave --nproc out, or --device cpu")
        if torch.cuda.device_count() < self.local_size:
            raise UserError(
                f"{self.local_size} processes need as many GPUs; this machine has {torch.cuda.device_count()}",
                f"--nproc {torch.cuda.device_count()}, or --device cpu",
            )
        if not dist.is_nccl_available():
            raise UserError("this build of torch has no NCCL, over which GPUs exchange gradients", "--device cpu")
        return torch.device("cuda", self.local_rank)

    def most(self, value: int) -> int:
        if self.agent not in (None, os.getppid()):  # it was killed, and passes on no signal any more
            value = value or signal.SIGTERM
        both = torch.tensor(value)
        with self.watching_peers():
            dist.all_reduce(both, dist.ReduceOp.MAX, group=self.words)
        return int(both)

    def sum(self, *values: float) -> tuple[float, ...]:
        sums = torch.tensor(values, dtype=torch.float64)
        with self.watching_peers():
            dist.all_reduce(sums, group=self.words)
        return tuple((sums / self.tensor).tolist())

    def decided(self, do: Callable[[], T]) -> T:
        said: Any = None
        if self.first:
            try:
                said = [do()]
            except Stopped:
                said = []
        said = self._from_first(said)
        if not said:
            raise Stopped
        value: T = said[0]
        return value

    def together(self, do: Callable[[], T]) -> T:
        value = error = None
        try:
            value = do()
        except UserError as raised:
            error = raised
        told = None if error is None else [isinstance(error, WorkError), error.message, error.hint]
        for rank, raised_there in enumerate(self._from_all(told)):
            if raised_there is not None:
                self.follow()
                failed, message, hint = raised_there
                if rank and (error is None or message != error.message):
                    message = f"process {rank}: {message}"
                raise (WorkError if failed else UserError)(message, hint)
        return value  # type: ignore[return-value]

    def agree(self, said: Mapping[str, Any]) -> None:
        all_said = self._from_all(dict(said))
        for rank, other in enumerate(all_said):
            for key in sorted({*other, *all_said[0]}):
                ours, theirs = all_said[0].get(key), other.get(key)
                if ours != theirs:
                    self.follow()
                    raise UserError(
                        f"processes do not agree: {key} is {ours!r} in process 0 and {theirs!r} in process {rank}",
                        "start all of them with the same versions, words and variables",
                    )

    def _from_first(self, value: Any) -> Any:
        """What the first process says."""
        said = _to_bytes(value) if self.first else torch.empty(0, dtype=torch.uint8)
        length = torch.tensor(len(said))
        with self.watching_peers():
            dist.broadcast(length, 0, group=self.words)
            said = said if self.first else torch.empty(int(length), dtype=torch.uint8)
            dist.broadcast(said, 0, group=self.words)
        return _from_bytes(said)

    def _from_all(self, value: Any) -> list[Any]:
        """What each process says, by rank."""
        mine = _to_bytes(value)
        lengths = list(torch.empty(self.size, 1, dtype=torch.long))
        with self.watching_peers():
            dist.all_gather(lengths, torch.tensor([len(mine)]), group=self.words)
            most = max(map(int, lengths))
            every = list(torch.empty(self.size, most, dtype=torch.uint8))
            dist.all_gather(every, nn.functional.pad(mine, (0, most - len(mine))), group=self.words)
        return [_from_bytes(said[: int(length)]) for said, length in zip(every, lengths, strict=True)]

    def share(self, items: Iterable[T]) -> Iterable[T]:
        return islice(items, self.rank, None, self.size)

    def seed(self, seed: int, step: int) -> None:
        digest = hashlib.sha256(repr((seed, step, self.row)).encode()).digest()
        torch.manual_seed(int.from_bytes(digest[:8], "little") >> 1)

    def wrap(self, module: nn.Module) -> nn.Module:
        with self.watching_peers(), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # broadcast_buffers is to have another name
            return DistributedDataParallel(
                module, process_group=self.gradients, broadcast_buffers=False, gradient_as_bucket_view=True
            )

    def accumulating(self, module: nn.Module) -> contextlib.AbstractContextManager[object]:
        assert isinstance(module, DistributedDataParallel)
        return module.no_sync()

    def add(self, tensor: Tensor) -> Tensor:
        with self.watching_peers():
            dist.all_reduce(tensor, group=self.gradients)
        return tensor if self.tensor == 1 else tensor.copy_(tensor / self.tensor)

    def gathered(self, tensor: Tensor) -> Tensor:
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        with self.watching_peers():
            dist.all_gather(parts, tensor.contiguous(), group=self.gradients)
        return torch.cat(parts)

    @contextlib.contextmanager
    def watching_peers(self) -> Iterator[None]:
        try:
            yield
        except (dist.DistError, RuntimeError) as error:
            if isinstance(error, dist.DistError) or "gloo" in str(error).lower():
                raise PeerLost from None
            raise

    def follow(self) -> None:
        if not self.first:
            self.decided(_unreachable)

    def leave(self) -> None:
        """Lets go of the others at the end of a run that went well, when all have come to it."""
        with self.watching_peers():
            dist.barrier(group=self.words)
        dist.destroy_process_group()


def _to_bytes(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _from_bytes(said: Tensor) -> Any:
    return json.loads(said.numpy().tobytes())


def _unreachable() -> NoReturn:
    raise AssertionError("the first process never gets here")


@contextlib.contextmanager
def joined(nproc: int) -> Iterator[World]:
    """The world of this process. Raises `UserError` where ``nproc`` processes were asked for in another way than by
    our own launcher, or the processes do not find each other."""
    if not environment.is_one_of_many():
        if nproc > 1:
            raise UserError(
                f"{nproc} processes were asked for, and this is one by itself",
                "start them with gpt train --nproc, or a program of yours with torchrun and without nproc",
            )
        world = World()
        try:
            yield world
        finally:
            world.leave()
        return
    if nproc > 1 and not environment.is_ours():
        raise UserError("--nproc and torchrun both start processes", "leave --nproc out under torchrun")
    ranks = _meet()
    if ranks.local_size > 1 and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, torch.get_num_threads() // ranks.local_size))
    yield ranks
    ranks.leave()


@functools.cache
def _store() -> Any:
    """Where processes find each other, at ``MASTER_ADDR`` and ``MASTER_PORT``."""
    return next(dist.rendezvous("env://", timeout=MEETING))[0]  # type: ignore[attr-defined]


def _meet() -> Ranks:
    if not dist.is_available():
        raise UserError("this build of torch cannot train in several processes", "leave --nproc out")
    try:
        return Ranks()
    except (dist.DistError, RuntimeError, ValueError) as error:
        where = f"{os.environ.get('MASTER_ADDR', '')}:{os.environ.get('MASTER_PORT', '')}"
        why = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(
            f"the processes could not meet at {where}: {why:.200}",
            "is the port in use? torchrun --rdzv-endpoint HOST:PORT names another",
        ) from None
