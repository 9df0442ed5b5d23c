"""Training where each process has a part of every parameter (`gpt.parallel.shard`): made, stepped by Muon, and put
together for checkpoints."""

import math
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gpt.device import Compute
from gpt.parallel.desk import Desk
from gpt.parallel.exchange import Exchange
from gpt.parallel.shard import Grid, Sharded, drawn
from gpt.parallel.world import PATIENCE, World
from gpt.runs import checkpoint
from gpt.runs.tensors import Array, Deferred
from gpt.training.optim import RMS, Muon, Optimizers, matrices, orthogonalize_each
from gpt.training.recipe import Recipe
from gpt.training.saving import NoSaver
from gpt.training.state import MEMORY, WEIGHT

WHOLE_GRADIENTS = 0.25  # of the memory, that gradients may take where they are not divided while they are accumulated


def divided(recipe: Recipe, compute: Compute, world: World, path: Path | None) -> Sharded:
    """A model of which each process of ``world`` has a part: that of the checkpoint at ``path``, or a new one, the same
    that a process by itself would draw."""
    grid = Grid(world.rows, recipe.tensor, recipe.shard == "full")
    mesh = world.mesh(compute.device.type)
    sharded = Sharded(recipe.model, grid, mesh, compute.dtype, world.gradients)
    sharded.allocate(compute.device)
    sharded.room = 4 * sharded.parameters // recipe.tensor < WHOLE_GRADIENTS * compute.memory()
    sharded.model.recompute = recipe.recompute
    if path is None:
        for name, whole in drawn(recipe.model):
            sharded.fill(name, whole)
    else:
        checkpoint.load_parts(path, recipe.model, sharded.fill)
    return sharded


class MuonOfParts(Muon):
    """Muon where each process has parts of the matrices: each orthogonalizes an equal share of them, whole."""

    def __init__(self, sharded: Sharded, *how: Any) -> None:
        """``how``: all that `Muon` takes, of parameters of ``sharded.own``."""
        super().__init__(*how)
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

            def directions(wholes: list[Tensor], fused: tuple[int, ...] = group["fused"]) -> list[Tensor]:
                found = orthogonalize_each([matrix for whole in wholes for matrix in matrices(whole, fused)])
                each = len(found) // len(wholes)
                return [torch.cat(found[at : at + each]) for at in range(0, len(found), each)]

            rows, columns = exchange.shape
            rate = group["lr"] * RMS * math.sqrt(max(columns, *(group["fused"] or (rows,))))
            arrived = exchange([update.to(self.dtype) for _, update, _ in some], directions)
            for (p, _, _), direction in zip(some, arrived, strict=True):
                p.sub_(direction * applied, alpha=rate)


class Collector:
    """Puts the tensors of a snapshot together, for checkpoints: see `gpt.parallel.desk`."""

    def __init__(self, sharded: Sharded, optimizers: Optimizers, world: World) -> None:
        self.world = world
        places = {WEIGHT + name: p for name, p in sharded.table.items()}
        for name, shape in optimizers.shapes(sharded.own).items():
            if shape:
                places[MEMORY + name] = sharded.table[name.rpartition(".")[0]]
        self.desk = Desk(sharded.grid, places, dist.new_group(backend="gloo", timeout=PATIENCE))

    def whole(self, name: str, part: Tensor) -> Array | Deferred:
        """What of a snapshot's tensor is written: where it is a part, the whole one, once all have given theirs."""
        if name not in self.desk.whole:
            return part.numpy()
        return Deferred(self.desk.whole[name].shape, partial(self._asked, name, part.numpy()))

    def _asked(self, name: str, part: Array) -> Array:
        with self.world.watching_peers():
            return self.desk.ask(name, part)

    def close(self) -> None:
        """That the first process has written all that there was to write."""
        with self.world.watching_peers():
            self.desk.close()


class Answerer(NoSaver):
    """That of a process which writes nothing and has parts of what another one writes: it gives them in a thread."""

    def __init__(self, collector: Collector, run: Path, tensors: Callable[[], Mapping[str, Tensor]]) -> None:
        super().__init__(run, 1, lambda step: None, lambda text: None)
        self.collector, self.tensors = collector, tensors
        self.lost: Exception | None = None

    def begin(self, step: int, size: int, files: object, ended: object = None) -> None:
        """Begins to answer what the first process asks for."""
        self.wait()
        self.step = step
        self._thread = threading.Thread(target=self._answer, args=(self.tensors(),), daemon=True)
        self._thread.start()

    def last(self, step: int, size: int, files: object, stopped: object) -> None:
        """Answers until the first process has written all, or has given up."""
        self.begin(step, size, files)
        self.wait()

    def wait(self) -> None:
        """Until nothing is asked for. Raises what went wrong."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self.lost is not None:
            raise self.lost

    def poll(self) -> None:
        """Nothing is to be said."""

    def _answer(self, tensors: Mapping[str, Tensor]) -> None:
        try:
            with self.collector.world.watching_peers():
                self.collector.desk.answer(tensors)
        except Exception as error:
            self.lost = error
