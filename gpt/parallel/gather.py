"""Gathers sharded tensors. For checkpoints, rank 0 gathers them; for Muon, each rank gathers an equal share."""

import threading
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from gpt.model.params import Parameter, Shape
from gpt.parallel.shard import Grid, ShardedModel

Array = npt.NDArray[np.float32]
Transform = Callable[[list[Tensor]], list[Tensor]]  # full matrices → full matrices of the same shape
_FINISHED = -1  # sent in place of a tensor index


class CheckpointGatherer:
    """Gathers sharded float32 tensors on rank 0, one at a time, for a checkpoint.

    Rank 0 requests each tensor when writing it. The other ranks send shards until rank 0 finishes, so no rank hangs if
    the disk is full. Rank 0 needs memory for one full tensor per open file. The other ranks need memory only for their
    shards. At 1 GB/s through rank 0, a checkpoint of 1.5 billion parameters (18 GB with AdamW's moments) takes about 20
    seconds, and one of 175 billion takes 35 minutes. Training continues meanwhile, because these tensors are on the
    host and nothing else uses the gloo ``group``.

    ``tensors`` maps a tensor's name to the parameter with the same sharding. The mapping is the same on all ranks.
    """

    def __init__(self, grid: Grid, tensors: Mapping[str, Parameter], group: ProcessGroup) -> None:
        self.grid, self.tensors, self.group = grid, tensors, group
        self.names = sorted(tensors)
        self.rank = dist.get_rank()
        self._lock = threading.Lock()  # Two files are written concurrently.

    def full_tensor(self, name: str, shard: Array) -> Array:
        """Returns the full tensor on rank 0. ``shard`` is rank 0's shard."""
        parameter = self.tensors[name]
        whole = np.empty(parameter.shape, np.float32)
        with self._lock:
            self._broadcast(self.names.index(name))
            for rank in self._senders(name):
                part = self.grid.part(parameter, rank)
                part.put(shard if rank == self.rank else self._receive(rank, part.shape), whole)
        return whole

    def finish(self) -> None:
        """Ends `send` on the other ranks. Called on rank 0."""
        self._broadcast(_FINISHED)

    def send(self, shards: Mapping[str, Tensor]) -> None:
        """Sends the shards that rank 0 requests until it finishes. Called on all other ranks."""
        while (index := self._broadcast()) != _FINISHED:
            name = self.names[index]
            if self.rank in self._senders(name):
                dist.send(shards[name].contiguous(), 0, self.group)

    def _senders(self, name: str) -> list[int]:
        """Returns the ranks that send a tensor. Their shards make up the full tensor without overlap."""
        parameter = self.tensors[name]
        holders = [r for r in self.grid.holders if parameter.split is not None or r % self.grid.tensor == 0]
        return [rank for rank in holders if self.grid.part(parameter, rank).numel]

    def _receive(self, rank: int, shape: Shape) -> Array:
        part = np.empty(shape, np.float32)
        dist.recv(torch.from_numpy(part), rank, self.group)
        return part

    def _broadcast(self, index: int = 0) -> int:
        message = torch.tensor(index)
        dist.broadcast(message, 0, self.group)
        return int(message)


class MatrixExchange:
    """Gathers each sharded matrix on one rank, transforms it and scatters the result, because Muon needs full matrices.

    The ``n`` matrices have the shape and sharding of the parameter ``name`` and are spread evenly over ranks. A step
    sends each shard twice and computes each matrix once.
    """

    def __init__(self, sharded: ShardedModel, name: str, n: int) -> None:
        self.group, ranks = sharded.holders, sharded.grid.holders
        parameter = sharded.table[name]
        self.shape = parameter.shape
        self.parts = [sharded.grid.part(parameter, rank) for rank in ranks]  # each rank's part of every matrix
        self.assigned = [range(rank, n, len(ranks)) for rank in range(len(ranks))]  # each rank's matrices
        self.rank = dist.get_rank(self.group)

    def __call__(self, shards: Sequence[Tensor], transform: Transform) -> list[Tensor]:
        """Applies ``transform`` to the full matrices. Takes and returns this rank's shards."""
        sizes, n_assigned = [part.numel for part in self.parts], len(self.assigned[self.rank])
        outgoing = [[shards[i] for i in indices] for indices in self.assigned]
        received_shards = self._all_to_all(shards[0], outgoing, [n_assigned * size for size in sizes])
        matrices = [shards[0].new_empty(self.shape) for _ in range(n_assigned)]
        for part, shard_batch in zip(self.parts, received_shards, strict=True):
            for matrix, shard in zip(matrices, shard_batch.view(n_assigned, *part.shape), strict=True):
                part.put(shard, matrix)
        results = transform(matrices) if matrices else []
        replies = [[part.take(matrix) for matrix in results] for part in self.parts]
        lengths = [len(indices) * sizes[self.rank] for indices in self.assigned]
        result_shards: list[Tensor] = list(shards)
        for indices, shard_batch in zip(self.assigned, self._all_to_all(shards[0], replies, lengths), strict=True):
            for i, shard in zip(indices, shard_batch.view(len(indices), *self.parts[self.rank].shape), strict=True):
                result_shards[i] = shard
        return result_shards

    def _all_to_all(self, reference: Tensor, send: list[list[Tensor]], sizes: list[int]) -> list[Tensor]:
        """Sends each rank its tensors. Returns the received elements by rank, in the dtype of ``reference``."""
        outgoing = torch.cat([reference.new_empty(0), *(tensor.flatten() for group in send for tensor in group)])
        incoming = reference.new_empty(sum(sizes))
        lengths = [sum(tensor.numel() for tensor in group) for group in send]
        dist.all_to_all_single(incoming, outgoing, sizes, lengths, group=self.group)
        return list(torch.split(incoming, sizes))
