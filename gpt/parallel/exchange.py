"""Whole matrices from parts and back, each at one process: what Muon needs, whose step looks at all of a matrix.

Matrices of one shape are dealt out evenly. Every process sends its parts of each to the one that works on it, which
sends back what came out; so a step sends what a process has of the matrices twice, and each matrix is worked on once.
"""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from gpt.parallel.shard import Part, Sharded

Work = Callable[[list[Tensor]], list[Tensor]]  # whole matrices of one shape → as many of that shape


class Exchange:
    """For the parameters ``names``, of one whole shape."""

    def __init__(self, sharded: Sharded, names: Sequence[str]) -> None:
        self.group, ranks = sharded.holders, sharded.grid.holders
        self.shape = sharded.shapes[names[0]]
        self.me = dist.get_rank(self.group)
        parts = [[sharded.grid.part(name, self.shape, rank) for rank in ranks] for name in names]
        self.owned: list[list[Part]] = parts[self.me :: len(ranks)]  # of each matrix that is worked on here, all parts
        self.dealt = [list(range(rank, len(names), len(ranks))) for rank in range(len(ranks))]
        self.shapes = [each[self.me].shape for each in parts]

    def __call__(self, mine: Sequence[Tensor], work: Work) -> list[Tensor]:
        """This process's parts of the matrices → its parts of what ``work`` makes of them."""
        send = [torch.cat([mine[i].flatten() for i in some]) if some else mine[0].new_empty(0) for some in self.dealt]
        wholes = [mine[0].new_empty(self.shape) for _ in self.owned]
        sizes = [sum(parts[rank].numel for parts in self.owned) for rank in range(len(self.dealt))]
        for rank, arrived in enumerate(self._all_to_all(send, sizes)):
            pieces = arrived.split([parts[rank].numel for parts in self.owned])
            for whole, parts, piece in zip(wholes, self.owned, pieces, strict=True):
                parts[rank].put(piece.view(parts[rank].shape), whole)
        done = work(wholes) if wholes else []
        back = [
            torch.cat([parts[rank].take(whole).flatten() for whole, parts in zip(done, self.owned, strict=True)])
            if done
            else mine[0].new_empty(0)
            for rank in range(len(self.dealt))
        ]
        out: list[Tensor] = list(mine)
        for some, arrived in zip(self.dealt, self._all_to_all(back, [len(each) for each in send]), strict=True):
            for i, piece in zip(some, arrived.split([mine[i].numel() for i in some]), strict=True):
                out[i] = piece.view(self.shapes[i])
        return out

    def _all_to_all(self, send: list[Tensor], sizes: list[int]) -> list[Tensor]:
        """Sends each process its tensor, and gives what came from each."""
        arrived = send[0].new_empty(sum(sizes))
        dist.all_to_all_single(arrived, torch.cat(send), sizes, [len(each) for each in send], group=self.group)
        return list(arrived.split(sizes))
