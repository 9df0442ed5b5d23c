"""The sharing of a run's work by its processes: one alone (`Single`), copies of the model (`Replicated`), shards of it
(`Sharded`).

The training step, evaluation and checkpoints are written once, against `Parallel`; what differs is here.
"""

import contextlib
import dataclasses
import math
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW

from gpt.device import Compute
from gpt.errors import UserError
from gpt.evaluate import Window
from gpt.interrupt import Stopped, StopSignal
from gpt.model import lora
from gpt.model.decoder import GPT
from gpt.model.params import breakdown
from gpt.parallel.world import LIMIT, World
from gpt.runs import checkpoint
from gpt.runs.tensors import Array, Deferred
from gpt.training.finetune import InitCheckpoint
from gpt.training.optim import BETAS, RMS, Muon, Optimizers, make_optimizer, matrices, orthogonalize_each
from gpt.training.recipe import Recipe

if TYPE_CHECKING:
    from gpt.parallel.shard import ShardedModel

T = TypeVar("T")
WEIGHT, MOMENT = "weight:", "optimizer:"  # before the names of a state's tensors
WHOLE_GRADIENTS = 0.25  # of the memory, that gradients may take if they accumulate unsharded


class Parallel:
    """A model, its optimizers, and how this process shares the work on them with the others of its ``world``.

    ``model`` computes; ``own`` has the parameters that this process steps and saves, as plain tensors. The methods are
    those of a process by itself.
    """

    retries = True  # whether a step that ran out of memory can be computed again in smaller micro-batches
    trial = False  # whether a micro-batch of a new size is tried first, since the others cannot begin a step again

    def __init__(self, model: GPT, optimizer: Optimizers, compute: Compute, world: World | None = None) -> None:
        self.model = self.own = model
        self.optimizer, self.compute, self.world = optimizer, compute, world or World()

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The whole shapes of the parameters that are trained, by name."""
        return {name: tuple(p.shape) for name, p in self.own.named_parameters() if p.requires_grad}

    def scaler(self) -> torch.amp.GradScaler:
        """The loss scaler; it is disabled but for float16."""
        return torch.amp.GradScaler(self.compute.device.type, enabled=self.compute.dtype == torch.float16)

    def wrap(self, objective: nn.Module) -> nn.Module:
        """The module whose backward pass reduces gradients to their mean over data ranks, but under `no_sync`."""
        return objective

    def no_sync(self) -> contextlib.AbstractContextManager[object]:
        """A context in which backward passes accumulate gradients without reducing them."""
        return contextlib.nullcontext()

    def summed(self, loss: Tensor) -> Tensor:
        """The loss to go backward from, so that gradients which are averaged over data ranks become their sum."""
        return loss

    def clip_grad_norm(self, scaler: torch.amp.GradScaler, max_norm: float) -> Tensor:
        """Unscales the gradients, clips them by the norm of all of them together, and returns that norm."""
        for optimizer in self.optimizer.optimizers:
            scaler.unscale_(optimizer)
        return clip_grad_norm_(self.model.parameters(), max_norm)

    def windows(self, items: Iterable[Window]) -> Iterable[Window]:
        """The windows that this process evaluates."""
        return items

    def until_stopped(self, stop: StopSignal, items: Iterable[T]) -> Iterator[T]:
        """The items, until a signal comes to this process. Raises `Stopped` then."""
        return stop.watching(items)

    def once(self, work: Callable[[], T]) -> T:
        """``work()`` on all processes, which JSON can hold: done on rank 0 and broadcast, or done by all together."""
        return self.world.broadcast_object(work)

    def load(self, path: Path, recipe: Recipe, compute: Compute) -> GPT:
        """The model of a checkpoint, to evaluate."""
        return checkpoint.load(path, compute.device).model

    def state(self) -> dict[str, Tensor]:
        """The trained weights and the optimizers' moments that this process keeps a copy of, by prefixed name."""
        weights = {WEIGHT + name: p.detach() for name, p in self.own.named_parameters() if p.requires_grad}
        return weights | {MOMENT + name: tensor for name, tensor in self.optimizer.state(self.own).items()}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Sets weights, as far as they are given, and moments."""
        weights = dict(self.own.named_parameters())
        with torch.no_grad():
            for name, tensor in _named(state, WEIGHT).items():
                weights[name].copy_(tensor)
        self.optimizer.restore(self.own, _named(state, MOMENT))

    def part(self, name: str, whole: Tensor) -> Tensor:
        """This process's part of a whole tensor of the state."""
        return whole

    def full_tensor(self, name: str, part: Tensor) -> Array | Deferred:
        """A tensor of the state as rank 0 writes it, of which it has ``part``."""
        return part.numpy()

    def finish_save(self) -> None:
        """Ends `serve` on the other ranks; called on rank 0 when a checkpoint is written or given up."""

    def serve(self, state: Mapping[str, Tensor]) -> None:
        """Sends rank 0 what it asks for while it writes a checkpoint; called on other ranks."""


class Single(Parallel):
    """One process, which has the whole model."""


class Replicated(Parallel):
    """One of several processes that have the whole model each and take different sequences, by torch's
    `DistributedDataParallel`."""

    trial = True

    def wrap(self, objective: nn.Module) -> nn.Module:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # broadcast_buffers is to have another name
            self.wrapped = DistributedDataParallel(
                objective, process_group=self.world.gradients, broadcast_buffers=False, gradient_as_bucket_view=True
            )
        return self.wrapped

    def no_sync(self) -> contextlib.AbstractContextManager[object]:
        return self.wrapped.no_sync()

    def summed(self, loss: Tensor) -> Tensor:
        return loss * self.world.data_size

    def windows(self, items: Iterable[Window]) -> Iterable[Window]:
        """Every ``size``-th window."""
        return islice(items, self.world.rank, None, self.world.size)

    def state(self) -> dict[str, Tensor]:
        """All of it on rank 0; the other ranks, which have the same, keep no copy."""
        return super().state() if self.world.is_main else {}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Sets everything from rank 0's ``state``."""
        moments = self.world.broadcast_object(lambda: sorted(_named(state, MOMENT)))
        if not self.world.is_main:
            shapes = self.optimizer.shapes(self.own)
            state = {MOMENT + name: torch.zeros(shapes[name]) for name in moments}
        super().restore(state)
        here = self.optimizer.state(self.own)
        trained = (p.detach() for p in self.own.parameters() if p.requires_grad)
        self.world.broadcast([*trained, *(here[name] for name in moments)])


class Sharded(Parallel):
    """One of several processes that hold a part of every parameter each (`gpt.parallel.shard`): they compute each
    forward pass together."""

    retries = False

    def __init__(self, sharded: "ShardedModel", optimizer: Optimizers, compute: Compute, world: World) -> None:
        from gpt.parallel.gather import CheckpointGatherer

        super().__init__(sharded.model, optimizer, compute, world)
        self.sharded, self.own = sharded, sharded.own
        tensors = {WEIGHT + name: p for name, p in sharded.table.items()}
        for name, shape in optimizer.shapes(sharded.own).items():
            if shape:
                tensors[MOMENT + name] = sharded.table[name.rpartition(".")[0]]
        self.gatherer = CheckpointGatherer(sharded.grid, tensors, dist.new_group(backend="gloo", timeout=LIMIT))

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: p.shape for name, p in self.sharded.table.items()}

    def scaler(self) -> torch.amp.GradScaler:
        """See `Parallel.scaler`; it skips a step on all ranks if it does on one."""
        from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

        enabled = self.compute.dtype == torch.float16
        return ShardedGradScaler(self.compute.device.type, enabled=enabled, process_group=self.world.gradients)

    def no_sync(self) -> contextlib.AbstractContextManager[object]:
        return self.sharded.no_sync()

    def summed(self, loss: Tensor) -> Tensor:
        return loss * self.world.data_size

    def clip_grad_norm(self, scaler: torch.amp.GradScaler, max_norm: float) -> Tensor:
        self.sharded.collect()
        for optimizer in self.optimizer.optimizers:
            scaler.unscale_(optimizer)
        return self.sharded.clip_grad_norm(max_norm)

    def windows(self, items: Iterable[Window]) -> Iterator[Window]:
        """A window of each data rank at a time. All compute as many: at the end maybe one of which nothing counts."""
        rank, size = self.world.data_rank, self.world.data_size
        windows = iter(items)
        while at_once := list(islice(windows, size)):
            mine = at_once[min(rank, len(at_once) - 1)]
            yield mine if rank < len(at_once) else dataclasses.replace(mine, skipped=len(mine.y))

    def until_stopped(self, stop: StopSignal, items: Iterable[T]) -> Iterator[T]:
        """The items, until a signal comes to any process: one that stopped alone would leave the others waiting."""
        for item in items:
            if self.world.all_reduce_max(stop.signum or 0):
                raise Stopped
            yield item

    def once(self, work: Callable[[], T]) -> T:
        return work()

    def load(self, path: Path, recipe: Recipe, compute: Compute) -> GPT:
        return shard(recipe, compute, self.world, path).model

    def part(self, name: str, whole: Tensor) -> Tensor:
        if name not in self.gatherer.tensors:
            return whole
        return self.sharded.grid.part(self.gatherer.tensors[name], self.sharded.rank).take(whole)

    def full_tensor(self, name: str, part: Tensor) -> Array | Deferred:
        """The whole tensor, deferred until the file is written: then the other ranks send their shards."""
        if name not in self.gatherer.tensors:
            return part.numpy()
        return Deferred(self.gatherer.tensors[name].shape, partial(self.gatherer.full_tensor, name, part.numpy()))

    def finish_save(self) -> None:
        self.gatherer.finish()

    def serve(self, state: Mapping[str, Tensor]) -> None:
        """Sends shards until rank 0 has written the checkpoint, or given it up."""
        self.gatherer.send(state)


class ShardedMuon(Muon):
    """Muon over shards: each rank orthogonalizes an equal share of the matrices, whole."""

    def __init__(self, sharded: "ShardedModel", *args: Any) -> None:
        """``args`` are `Muon`'s, for parameters of ``sharded.own``."""
        from gpt.parallel.gather import MatrixExchange

        super().__init__(*args)
        mine = {p for group in self.param_groups for p in group["params"]}
        self.names = {p: name for name, p in sharded.own.named_parameters() if p in mine}
        alike: dict[str, list[str]] = defaultdict(list)
        for name in self.names.values():
            alike[name.split(".", 2)[2]].append(name)  # below "h.0."
        self.exchanges = {tuple(names): MatrixExchange(sharded, names[0], len(names)) for names in alike.values()}

    def apply(self, updates: Sequence[tuple[Tensor, Tensor, dict[str, Any]]], applied: float | Tensor) -> None:
        """See `Muon.apply`."""
        by_name = {self.names[p]: (p, update, group) for p, update, group in updates}  # type: ignore[index]
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


def parallelize(
    recipe: Recipe, compute: Compute, world: World, init: InitCheckpoint | None = None, path: Path | None = None
) -> Parallel:
    """The model of a run, shared as its recipe says: new, of ``init``, or of the checkpoint at ``path`` that the run
    resumes from. Moments are new. Raises `UserError` for adapters that do not fit the model."""
    if recipe.is_sharded:
        sharded = shard(recipe, compute, world, path, init)
        sharded.model.recompute = recipe.recompute
        muon = partial(ShardedMuon, sharded)
        optimizer = make_optimizer(sharded.own, recipe.optimizer, recipe.weight_decay, compute.dtype, world, muon)
        return Sharded(sharded, optimizer, compute, world)
    if path is not None and not recipe.lora_rank:
        model = checkpoint.load(path, compute.device, recipe.model).model.train()
    else:
        # Below adapters bfloat16 stays that, at half the memory; float16 would overflow in what is not a product.
        narrow = recipe.lora_rank and compute.dtype == torch.bfloat16
        dtype = torch.bfloat16 if narrow else torch.float32
        model = init.load(recipe.model, compute.device, dtype) if init else GPT(recipe.model).to(compute.device)
    model.recompute = recipe.recompute
    if recipe.lora_rank:
        if recipe.lora_rank > model.config.n_embd:
            raise UserError(
                f"lora-rank {recipe.lora_rank} is more than the model's width, {model.config.n_embd}",
                "common ranks are 4 to 64",
            )
        added = lora.adapt(model, recipe.lora_rank, recipe.lora_alpha, recipe.lora_targets)
        optimizer = Optimizers([AdamW(added, lr=0.0, betas=BETAS, weight_decay=recipe.weight_decay, fused=True)])
    else:
        optimizer = make_optimizer(model, recipe.optimizer, recipe.weight_decay, compute.dtype, world)
    return (Replicated if world.size > 1 else Single)(model, optimizer, compute, world)


def shard(
    recipe: Recipe, compute: Compute, world: World, path: Path | None, init: InitCheckpoint | None = None
) -> "ShardedModel":
    """A model of which each rank of ``world`` holds a part: of the checkpoint at ``path``, of ``init``, or a new one,
    with the numbers that a process by itself would draw."""
    from gpt.parallel.shard import Grid, ShardedModel, drawn  # FSDP takes seconds to import

    grid = Grid(world.data_size, recipe.tensor, recipe.shard == "full")
    mesh = world.mesh(compute.device.type)
    gradients = 4 * breakdown(recipe.model).trainable // recipe.tensor
    fits = gradients < WHOLE_GRADIENTS * compute.memory()
    sharded = ShardedModel(recipe.model, grid, mesh, compute.dtype, world.gradients, fits)
    sharded.allocate(compute.device)
    if path is not None:
        checkpoint.load_parts(path, recipe.model, sharded.fill)
    elif init is not None:
        checkpoint.load_parts(init.path, recipe.model, lambda name, p: sharded.fill(name, init.grown(name, p)))
    else:
        for name, whole in drawn(recipe.model):
            sharded.fill(name, whole)
    return sharded


def _named(state: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}
