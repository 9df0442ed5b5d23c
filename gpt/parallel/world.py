"""The processes that train one run together, and what they tell each other.

`World` is a process by itself, where nothing is exchanged and nothing costs anything; `Ranks` is one of several, as
torchrun's environment says. The first of them (rank 0) decides, tells and writes. Where it fails it says so and ends;
the others wait for its word, and end without one when the connection breaks (`PeerLost`).

Words between processes go over gloo, whatever computes: they are on the host, and a wait for one has no time limit, so
that a long evaluation or a slow disk ends no run.
"""

import contextlib
import functools
import hashlib
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
from torch.nn.parallel import DistributedDataParallel

from gpt.device import Compute
from gpt.errors import PeerLost, UserError
from gpt.interrupt import Stopped
from gpt.parallel import environment

T = TypeVar("T")
MEETING = timedelta(minutes=10)  # until all processes have found each other
PATIENCE = timedelta(days=30)  # until one of them has come to where the others wait


class World:
    """A process that trains by itself."""

    rank, size = 0, 1
    local_rank, local_size = 0, 1  # on this machine

    @property
    def first(self) -> bool:
        """Whether this process is the one that decides, tells and writes."""
        return self.rank == 0

    def most(self, value: int) -> int:
        """The largest of all processes' values."""
        return value

    def sum(self, *values: float) -> tuple[float, ...]:
        """Sums over all processes, in double precision."""
        return values

    def decided(self, do: Callable[[], T]) -> T:
        """What ``do`` gives in the first process, which alone runs it. Raises `Stopped` in all where it does there."""
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
        """Makes what this process draws in a step a function of seed, step and rank, so that each drops out other
        activations, and none has a random state to save. A process by itself goes on with its generator."""

    def wrap(self, module: nn.Module) -> nn.Module:
        """``module``, whose gradients become the mean of all processes' where they are not `accumulating`."""
        return module

    def accumulating(self, module: nn.Module) -> contextlib.AbstractContextManager[object]:
        """A context in which gradients of what `wrap` gave stay this process's own."""
        return contextlib.nullcontext()

    def add(self, tensor: Tensor) -> Tensor:
        """The sum over all processes, in place, on the device."""
        return tensor

    def gathered(self, tensor: Tensor) -> Tensor:
        """The processes' tensors, all of one shape, below each other."""
        return tensor

    def watching_peers(self) -> contextlib.AbstractContextManager[object]:
        """A context in which the loss of another process is a `PeerLost`."""
        return contextlib.nullcontext()

    def follow(self) -> None:
        """Where this process isn't the first: waits until that has ended. Raises `PeerLost` then."""


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
        return tuple(sums.tolist())

    def decided(self, do: Callable[[], T]) -> T:
        said: list[Any] = [None, False]
        if self.first:
            try:
                said[0] = do()
            except Stopped:
                said[1] = True
        with self.watching_peers():
            dist.broadcast_object_list(said, src=0, group=self.words)
        if said[1]:
            raise Stopped
        value: T = said[0]
        return value

    def together(self, do: Callable[[], T]) -> T:
        value = error = None
        try:
            value = do()
        except UserError as raised:
            error = raised
        for rank, raised_there in enumerate(self._all(error)):
            if raised_there is not None:
                self.follow()
                if rank and raised_there.message != getattr(error, "message", None):
                    raised_there.message = f"process {rank}: {raised_there.message}"
                raise raised_there
        return value  # type: ignore[return-value]

    def agree(self, said: Mapping[str, Any]) -> None:
        all_said = self._all(dict(said))
        for rank, other in enumerate(all_said):
            for key in sorted({*other, *all_said[0]}):
                ours, theirs = all_said[0].get(key), other.get(key)
                if ours != theirs:
                    self.follow()
                    raise UserError(
                        f"processes do not agree: {key} is {ours!r} in process 0 and {theirs!r} in process {rank}",
                        "start all of them with the same versions, words and variables",
                    )

    def _all(self, value: T) -> list[T]:
        values: list[Any] = [None] * self.size
        with self.watching_peers():
            dist.all_gather_object(values, value, group=self.words)
        return values

    def share(self, items: Iterable[T]) -> Iterable[T]:
        return islice(items, self.rank, None, self.size)

    def seed(self, seed: int, step: int) -> None:
        digest = hashlib.sha256(repr((seed, step, self.rank)).encode()).digest()
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
        return tensor

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
        yield World()
        return
    if nproc > 1 and not environment.is_ours():
        raise UserError("--nproc and torchrun both start processes", "leave --nproc out under torchrun")
    world = _meet()
    if world.local_size > 1 and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, torch.get_num_threads() // world.local_size))
    yield world
    world.leave()


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
