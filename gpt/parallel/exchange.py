"""Whole matrices from parts and back, each at one process: what Muon needs, whose step looks at all of a matrix.

Matrices of one shape are dealt out evenly. Every process sends its parts of each to the one that works on it, which
sends back what came out; so a step sends what a process has of the matrices twice, and each matrix is worked on once.
"""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from gpt.parallel.shard import Sharded

Work = Callable[[list[Tensor]], list[Tensor]]  # whole matrices of one shape → as many of that shape


class Exchange:
    """For ``n`` matrices like the parameter ``name``, which have its shape and are cut as it is."""

    def __init__(self, sharded: Sharded, name: str, n: int) -> None:
        self.group, ranks = sharded.holders, sharded.grid.holders
        self.shape = sharded.table[name].shape
        self.parts = [sharded.grid.part(sharded.table[name], rank) for rank in ranks]  # that each process has of each
        self.dealt = [range(rank, n, len(ranks)) for rank in range(len(ranks))]  # the matrices that each works on
        self.me = dist.get_rank(self.group)

    def __call__(self, mine: Sequence[Tensor], work: Work) -> list[Tensor]:
        """This process's parts of the matrices → its parts of what ``work`` makes of them."""
        sizes, here = [part.numel for part in self.parts], len(self.dealt[self.me])
        going = [[mine[i] for i in some] for some in self.dealt]
        sent = self._all_to_all(mine[0], going, [here * size for size in sizes])
        wholes = [mine[0].new_empty(self.shape) for _ in range(here)]
        for part, arrived in zip(self.parts, sent, strict=True):
            for whole, piece in zip(wholes, arrived.view(here, *part.shape), strict=True):
                part.put(piece, whole)
        done = work(wholes) if wholes else []
        back = [[part.take(whole) for whole in done] for part in self.parts]
        lengths = [len(some) * sizes[self.me] for some in self.dealt]
        out: list[Tensor] = list(mine)
        for some, arrived in zip(self.dealt, self._all_to_all(mine[0], back, lengths), strict=True):
            for i, piece in zip(some, arrived.view(len(some), *self.parts[self.me].shape), strict=True):
                out[i] = piece
        return out

    def _all_to_all(self, like: Tensor, send: list[list[Tensor]], sizes: list[int]) -> list[Tensor]:
        """Sends each process its tensors, and gives the numbers that came from each; in the dtype of ``like``."""
        going = torch.cat([like.new_empty(0), *(each.flatten() for some in send for each in some)])
        arrived = like.new_empty(sum(sizes))
        lengths = [sum(each.numel() for each in some) for some in send]
        dist.all_to_all_single(arrived, going, sizes, lengths, group=self.group)
        return list(torch.split(arrived, sizes))
