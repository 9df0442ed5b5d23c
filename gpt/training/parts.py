"""Training where each process has a part of every parameter (`gpt.parallel.shard`)."""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from gpt.parallel.exchange import Exchange
from gpt.parallel.shard import Sharded
from gpt.parallel.world import World
from gpt.training.optim import RMS, Muon, orthogonalize


class MuonOfParts(Muon):
    """Muon where each process has parts of the matrices: each orthogonalizes an equal share of them, whole."""

    def __init__(
        self,
        sharded: Sharded,
        groups: Iterable[dict[str, Any]],
        lr: float,
        weight_decay: float,
        dtype: torch.dtype,
        world: World,
    ) -> None:
        super().__init__(groups, lr, weight_decay, dtype, world)
        mine = {p for group in self.param_groups for p in group["params"]}
        self.names = {p: name for name, p in sharded.own.named_parameters() if p in mine}
        alike: dict[str, list[str]] = defaultdict(list)
        for name in self.names.values():
            alike[name.split(".", 2)[2]].append(name)  # below "h.0."
        self.exchanges = {tuple(names): Exchange(sharded, names[0], len(names)) for names in alike.values()}

    def change(self, changes: Sequence[tuple[Tensor, Tensor, dict[str, Any]]], applied: float | Tensor) -> None:
        """See `Muon.change`."""
        by_name = {self.names[p]: (p, update, group) for p, update, group in changes}  # type: ignore[index]
        for names, exchange in self.exchanges.items():
            some = [by_name[name] for name in names]
            group = some[0][2]

            def directions(wholes: list[Tensor], parts: int = group["parts"]) -> list[Tensor]:
                stack = torch.stack([matrix for whole in wholes for matrix in whole.chunk(parts)])
                wide = stack.size(1) <= stack.size(2)
                found = orthogonalize(stack if wide else stack.mT)
                return list((found if wide else found.mT).reshape(len(wholes), *wholes[0].shape))

            rows, columns = exchange.shape
            rate = group["lr"] * RMS * math.sqrt(max(rows // group["parts"], columns))
            arrived = exchange([update.to(self.dtype) for _, update, _ in some], directions)
            for (p, _, _), direction in zip(some, arrived, strict=True):
                p.sub_(direction * applied, alpha=rate)
