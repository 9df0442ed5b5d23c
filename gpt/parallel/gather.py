"""Gathers sharded tensors. For checkpoints, rank 0 gathers them; for Muon, each rank gathers an equal share."""

import itertools
import math
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from gpt.model.params import Shape
from gpt.parallel.world import World

Array = npt.NDArray[np.float32]
Transform = Callable[[Sequence[Tensor]], Sequence[Tensor]]  # full matrices → full matrices of the same shapes
_FINISHED = -1  # sent in place of a tensor index


def shard_rows(rows: int, ranks: int, rank: int) -> slice:
    """Returns a rank's share of a parameter's rows. `fully_shard` gives ranks equal numbers of rows, except that the
    last ranks can get fewer or none."""
    share = -(-rows // ranks)
    return slice(min(rows, rank * share), min(rows, (rank + 1) * share))


class CheckpointGatherer:
    """Gathers sharded float32 tensors on rank 0, one at a time, for a checkpoint.

    Rank 0 requests each tensor when writing it. The other ranks send shards until rank 0 finishes, so no rank hangs if
    the disk is full. Rank 0 needs memory for one full tensor per open file. The other ranks need memory only for their
    shards. At 1 GB/s through rank 0, a checkpoint of 1.5 billion parameters (18 GB with AdamW's moments) takes about 20
    seconds, and one of 175 billion takes 35 minutes. Training continues meanwhile, because these tensors are on the
    host and nothing else uses torch's default group.

    ``shapes`` has the full shape of each tensor. It is the same on all ranks.
    """

    def __init__(self, shapes: Mapping[str, Shape]) -> None:
        self.shapes = shapes
        self.names = sorted(shapes)
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self._lock = threading.Lock()  # Two files are written concurrently.

    def rows(self, name: str, rank: int) -> slice:
        """Returns a rank's rows of a tensor."""
        return shard_rows(self.shapes[name][0], self.ranks, rank)

    def full_tensor(self, name: str, shard: Array) -> Array:
        """Returns the full tensor on rank 0. ``shard`` is rank 0's shard."""
        whole = np.empty(self.shapes[name], np.float32)
        whole[self.rows(name, 0)] = shard
        with self._lock:
            self._broadcast(self.names.index(name))
            for rank in range(1, self.ranks):
                if len(part := whole[self.rows(name, rank)]):
                    dist.recv(torch.from_numpy(part), rank)
        return whole

    def finish(self) -> None:
        """Ends `send` on the other ranks. Called on rank 0."""
        self._broadcast(_FINISHED)

    def send(self, shards: Mapping[str, Tensor]) -> None:
        """Sends the shards that rank 0 requests until it finishes. Called on all other ranks."""
        while (index := self._broadcast()) != _FINISHED:
            if len(shard := shards[self.names[index]]):
                dist.send(shard.contiguous(), 0)

    def _broadcast(self, index: int = 0) -> int:
        message = torch.tensor(index)
        dist.broadcast(message, 0)
        return int(message)


class Exchange:
    """How ranks share Muon's matrices. Replicas each transform an equal number, and an all-gather collects the results.
    A single process transforms all."""

    shards, shard = 1, 0  # number of row ranges that each parameter is cut into, and the index of this rank's

    def __init__(self, world: World | None = None) -> None:
        self.world = world or World()
        self.is_local = self.world.size == 1  # whether it can be compiled, because it calls no other rank

    def count_rows(self, rows: Iterable[int]) -> list[list[int]]:
        """Returns the rows that each shard has of each matrix of a fused parameter, whose matrices have ``rows``."""
        stops = list(itertools.accumulate(rows, initial=0))
        parts = [shard_rows(stops[-1], self.shards, shard) for shard in range(self.shards)]
        return [
            [max(0, min(stop, part.stop) - max(start, part.start)) for part in parts]
            for start, stop in itertools.pairwise(stops)
        ]

    def __call__(self, parts: Sequence[Tensor], counts: Sequence[Sequence[int]], transform: Transform) -> list[Tensor]:
        """Transforms matrices that have the same shape, possibly transposed.

        Takes and returns this rank's rows of each. ``counts`` has the rows of all ranks.
        """
        if self.is_local:
            return list(transform(parts))
        share = -(-len(parts) // self.world.size)
        indices = range(share * self.world.rank, share * (self.world.rank + 1))
        own = transform([parts[min(index, len(parts) - 1)] for index in indices])
        results = self.world.all_gather(torch.stack([matrix.flatten() for matrix in own]))
        return [result.view_as(part) for result, part in zip(results, parts, strict=False)]


class ShardExchange(Exchange):
    """Gathers each sharded matrix on one rank, transforms it there and scatters the result, because Muon needs full
    matrices. A step sends each shard twice and transforms each matrix once."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.is_local, self.shards, self.shard = False, world.size, world.rank

    def __call__(self, parts: Sequence[Tensor], counts: Sequence[Sequence[int]], transform: Transform) -> list[Tensor]:
        """Transforms each matrix on one rank."""
        assigned = [range(rank, len(parts), self.shards) for rank in range(self.shards)]  # each rank's matrices
        own = assigned[self.shard]
        shapes = [[(counts[i][rank], parts[i].size(1)) for i in own] for rank in range(self.shards)]
        sent = [[parts[i] for i in indices] for indices in assigned]
        matrices = [torch.cat(rows) for rows in zip(*self._all_to_all(parts[0], sent, shapes), strict=True)]
        results = transform(matrices) if matrices else []
        pieces = [torch.split(result, list(counts[i])) for i, result in zip(own, results, strict=True)]
        replies = [[rows[rank] for rows in pieces] for rank in range(self.shards)]
        scattered = self._all_to_all(parts[0], replies, [[parts[i].shape for i in indices] for indices in assigned])
        return [scattered[i % self.shards][i // self.shards] for i in range(len(parts))]

    def _all_to_all(
        self, reference: Tensor, send: Sequence[Sequence[Tensor]], shapes: Sequence[Sequence[Shape]]
    ) -> list[list[Tensor]]:
        """Sends each rank its tensors. Returns the tensors from each rank, which have ``shapes``."""
        outgoing = torch.cat([reference.new_empty(0), *(tensor.flatten() for group in send for tensor in group)])
        sizes = [[math.prod(shape) for shape in group] for group in shapes]
        incoming, sent = reference.new_empty(sum(map(sum, sizes))), [sum(t.numel() for t in group) for group in send]
        dist.all_to_all_single(incoming, outgoing, list(map(sum, sizes)), sent, group=self.world.gradients)
        received = iter(torch.split(incoming, [size for group in sizes for size in group]))
        return [[next(received).view(shape) for shape in group] for group in shapes]
