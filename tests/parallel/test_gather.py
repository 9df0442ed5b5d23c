"""Gathering tensors on rank 0: one at a time, whichever thread asks."""

import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from gpt.model.params import Parameter
from gpt.parallel import gather
from gpt.parallel.gather import CheckpointGatherer
from gpt.parallel.shard import Grid

PATIENCE = 0.3  # seconds in which a second question, which must not come, would
NAMES = {name: Parameter(name, shape, "norm") for name, shape in {"weight": (6, 4), "moment": (9, 2)}.items()}


class Others:
    """Stands in for torch.distributed on rank 0: the other ranks answer each request in turn, as `CheckpointGatherer.send`
    does, but the first only after a second request, or after a while without one."""

    def __init__(self, grid: Grid, whole: dict[str, Tensor]) -> None:
        self.grid, self.whole = grid, whole
        self.sent: dict[int, deque[Tensor]] = {rank: deque() for rank in range(1, grid.size)}
        self.said: list[str] = []
        self.first, self.second = threading.Event(), threading.Event()

    def get_rank(self) -> int:
        return 0

    def broadcast(self, which: Tensor, source: int, group: Any) -> None:
        name = sorted(self.whole)[int(which)]
        for rank, parts in self.sent.items():
            parts.append(self.grid.part(NAMES[name], rank).take(self.whole[name]))
        self.said.append(f"who has {name}?")
        (self.second if self.first.is_set() else self.first).set()

    def recv(self, buffer: Tensor, rank: int, group: Any) -> None:
        if len(self.said) == 1:
            self.second.wait(PATIENCE)
        part = self.sent[rank].popleft()
        self.said.append(f"{rank} gives {tuple(part.shape)}")
        if part.shape == buffer.shape:
            buffer.copy_(part)


def test_two_files_ask_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights and moments are written side by side; what the others send says not to whom."""
    grid = Grid(3, 1, True)
    whole = {name: torch.randn(p.shape) for name, p in NAMES.items()}
    others = Others(grid, whole)
    monkeypatch.setattr(gather, "dist", others)
    here = CheckpointGatherer(grid, NAMES, None)  # type: ignore[arg-type]

    def asked(name: str) -> Tensor:
        mine = grid.part(NAMES[name], 0).take(whole[name])
        return torch.from_numpy(here.full_tensor(name, mine.numpy()))

    with ThreadPoolExecutor(2) as threads:
        weight = threads.submit(asked, "weight")
        assert others.first.wait(10)
        moment = threads.submit(asked, "moment")
        assert torch.equal(weight.result(10), whole["weight"])
        assert torch.equal(moment.result(10), whole["moment"])
    assert others.said == [
        "who has weight?", "1 gives (2, 4)", "2 gives (2, 4)", "who has moment?", "1 gives (3, 2)", "2 gives (3, 2)"
    ]  # fmt: skip
