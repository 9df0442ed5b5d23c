"""Where one process puts together whole tensors, one at a time, of which all have parts: what it takes to save.

Rank 0 asks for a tensor when the file that is written has come to it; the others answer until they hear that no
question comes any more. So nobody holds more than its parts and a whole tensor of each file that is being written, in
whatever order files are, and a disk that is full leaves nobody waiting. All goes through rank 0's memory and disk: at
1 GB/s a checkpoint of 1.5 billion parameters (18 GB with AdamW's moments) takes some 20 seconds, one of 175 billion
35 minutes, while training goes on. Tensors are in the host's memory, and the group is one of its own over gloo, so that
another thread may use it.
"""

import threading
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from gpt.model.params import Parameter, Shape
from gpt.parallel.shard import Grid

Array = npt.NDArray[np.float32]
_CLOSED = -1  # instead of the number of a tensor


class Desk:
    """For float32 tensors with names. ``whole``: of each the parameter as which it is cut; in all processes the
    same."""

    def __init__(self, grid: Grid, whole: Mapping[str, Parameter], group: ProcessGroup) -> None:
        self.grid, self.whole, self.group = grid, whole, group
        self.names = sorted(whole)
        self.rank = dist.get_rank()
        self._asking = threading.Lock()  # two files are written side by side

    def ask(self, name: str, mine: Array) -> Array:
        """At rank 0, which has ``mine`` of it: the whole tensor."""
        whole = np.empty(self.whole[name].shape, np.float32)
        with self._asking:
            self._say(self.names.index(name))
            for rank in self._senders(name):
                part = self.grid.part(self.whole[name], rank)
                part.put(mine if rank == self.rank else self._from(rank, part.shape), whole)
        return whole

    def close(self) -> None:
        """At rank 0: that nothing more is asked for now."""
        self._say(_CLOSED)

    def answer(self, tensors: Mapping[str, Tensor]) -> None:
        """At all other ranks: gives of their parts what is asked for, until rank 0 closes."""
        while (which := self._say()) != _CLOSED:
            name = self.names[which]
            if self.rank in self._senders(name):
                dist.send(tensors[name].contiguous(), 0, self.group)

    def _senders(self, name: str) -> list[int]:
        """Ranks that together have all of a tensor once."""
        like = self.whole[name]
        once = [r for r in self.grid.holders if like.split is not None or r % self.grid.tensor == 0]
        return [rank for rank in once if self.grid.part(like, rank).numel]

    def _from(self, rank: int, shape: Shape) -> Array:
        part = np.empty(shape, np.float32)
        dist.recv(torch.from_numpy(part), rank, self.group)
        return part

    def _say(self, which: int = 0) -> int:
        """What rank 0 says."""
        said = torch.tensor(which)
        dist.broadcast(said, 0, self.group)
        return int(said)
