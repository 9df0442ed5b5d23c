"""How processes share training: a single process (`Single`), replicas (`Replicated`), or shards (`Sharded`)."""

import contextlib
import dataclasses
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

from gpt import device
from gpt.device import Compute
from gpt.errors import UserError
from gpt.evaluate import Window
from gpt.interrupt import Stopped, StopSignal
from gpt.model import lora
from gpt.model.decoder import GPT
from gpt.model.params import breakdown
from gpt.parallel.world import COLLECTIVE_TIMEOUT, World
from gpt.runs import adapter, checkpoint
from gpt.runs.tensors import Array, Deferred
from gpt.training.finetune import InitCheckpoint
from gpt.training.optim import BETAS, Muon, Optimizers, make_optimizer, scaled_directions, unfuse
from gpt.training.recipe import Recipe

if TYPE_CHECKING:
    from gpt.parallel.shard import ShardedModel

T = TypeVar("T")
WEIGHT, MOMENT = "weight:", "optimizer:"  # prefixes of tensor names in a state
WHOLE_GRADIENTS = 0.25  # maximum share of device memory that unsharded gradients may take


class Strategy:
    """A model, its optimizers, and this process's share of the work. The base methods are for a single process.

    ``model`` computes forward passes. ``own`` has the parameters that this process updates and saves, as plain tensors.
    """

    def __init__(self, model: GPT, optimizer: Optimizers, compute: Compute, world: World | None = None) -> None:
        self.model = self.own = model
        self.optimizer, self.compute, self.world = optimizer, compute, world or World()

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The full shapes of the trained parameters, by name."""
        return {name: tuple(p.shape) for name, p in self.own.named_parameters() if p.requires_grad}

    def scaler(self) -> torch.amp.GradScaler:
        """The loss scaler. Only float16 enables it."""
        return torch.amp.GradScaler(self.compute.device.type, enabled=self.compute.dtype == torch.float16)

    def wrap(self, objective: nn.Module) -> nn.Module:
        """Returns a module whose backward pass averages gradients over data ranks, except inside `no_sync`."""
        return objective

    def no_sync(self) -> contextlib.AbstractContextManager[object]:
        """A context in which backward passes accumulate gradients without an all-reduce."""
        return contextlib.nullcontext()

    def trial(self) -> contextlib.AbstractContextManager[object]:
        """A context for a backward pass whose gradients are not used. In it, replicas don't wait for each other, so one
        of them can fail."""
        return contextlib.nullcontext()

    def zero_grad(self) -> None:
        """Frees all gradients, including those of a failed backward pass."""
        self.model.zero_grad()
        self.optimizer.zero_grad()

    def backward_loss(self, loss: Tensor) -> Tensor:
        """Scales the loss so that its gradients, averaged over data ranks, are the sum of all ranks' gradients."""
        return loss

    def clip_grad_norm(self, scaler: torch.amp.GradScaler, max_norm: float) -> Tensor:
        """Unscales the gradients, clips them by their global norm, and returns the norm."""
        for optimizer in self.optimizer.optimizers:
            scaler.unscale_(optimizer)
        return clip_grad_norm_(self.model.parameters(), max_norm)

    def windows(self, items: Iterable[Window]) -> Iterable[Window]:
        """Returns the windows that this process evaluates."""
        return items

    def until_stopped(self, stop: StopSignal, items: Iterable[T]) -> Iterator[T]:
        """Yields the items until the deadline. Raises `Stopped` after a signal to this process."""
        return stop.until_signal(items)

    def compute_on_all(self, work: Callable[[], T]) -> T:
        """Returns the result of ``work``, a JSON value, on every rank. Either rank 0 broadcasts the result or all ranks
        compute it."""
        return self.world.broadcast_object(work)

    @property
    def evaluation_compute(self) -> Compute:
        """The device and dtype of the last evaluation: the default of `gpt eval`, so that `gpt eval` reproduces the
        loss."""
        if self.compute.dtype == torch.float32:
            return self.compute
        return device.pick(str(self.compute.device), "auto")

    def load(self, path: Path, recipe: Recipe) -> None:
        """Loads a checkpoint's weights into the model for the last evaluation. Merges adapters into the base model, as
        `gpt eval` does."""
        if recipe.lora_rank:
            self._load_merged(path, recipe)
        else:
            weights: dict[str, Tensor] = {}
            checkpoint.load_parts(path, recipe.model, weights.__setitem__)
            self.restore({WEIGHT + name: self.part(WEIGHT + name, tensor) for name, tensor in weights.items()})

    @torch.no_grad()
    def _load_merged(self, path: Path, recipe: Recipe) -> None:
        """Reads the base model again, one parameter at a time, because its dtype in training can be too narrow."""
        self.model.build_position_tables(self.compute.device)
        adapters, roles = adapter.tensors(path, recipe.model, recipe.lora_rank)
        for name, p in self.model.named_parameters():
            if name in adapters:
                p.zero_()

        def put(name: str, value: Tensor) -> None:
            p = self.model.get_parameter(name)
            p.data = value.to(p.device, self.evaluation_compute.dtype, copy=True)

        checkpoint.load_parts(adapter.read(path).find_base(path), recipe.model, put)
        lora.merge(self.model, adapters, recipe.lora_alpha / recipe.lora_rank, roles)

    def state(self) -> dict[str, Tensor]:
        """The trained weights and moments that this process copies into snapshots, by prefixed name."""
        weights = {WEIGHT + name: p.detach() for name, p in self.own.named_parameters() if p.requires_grad}
        return weights | {MOMENT + name: tensor for name, tensor in self.optimizer.state(self.own).items()}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Sets the weights that ``state`` has, and replaces all moments."""
        weights = dict(self.own.named_parameters())
        with torch.no_grad():
            for name, tensor in _with_prefix(state, WEIGHT).items():
                weights[name].copy_(tensor)
        self.optimizer.restore(self.own, _with_prefix(state, MOMENT))

    def part(self, name: str, full: Tensor) -> Tensor:
        """Returns this process's part of a full tensor of the state."""
        return full

    def full_tensor(self, name: str, part: Tensor) -> Array | Deferred:
        """Returns the full tensor that rank 0 writes. ``part`` is rank 0's part."""
        return part.numpy()

    def finish_save(self) -> None:
        """Ends `serve` on the other ranks, after rank 0 has written or abandoned a checkpoint."""

    def serve(self, state: Mapping[str, Tensor]) -> None:
        """Sends shards to rank 0 while it writes a checkpoint."""


class Single(Strategy):
    """A single process with the full model."""


class Replicated(Strategy):
    """One of several processes, each with a full replica in torch's `DistributedDataParallel`."""

    def wrap(self, objective: nn.Module) -> nn.Module:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # torch will rename broadcast_buffers.
            self.wrapped = DistributedDataParallel(
                objective, process_group=self.world.gradients, broadcast_buffers=False, gradient_as_bucket_view=True
            )
        return self.wrapped

    def no_sync(self) -> contextlib.AbstractContextManager[object]:
        return self.wrapped.no_sync()

    def trial(self) -> contextlib.AbstractContextManager[object]:
        return self.no_sync()

    def backward_loss(self, loss: Tensor) -> Tensor:
        return loss * self.world.data_size

    def windows(self, items: Iterable[Window]) -> Iterable[Window]:
        """Returns every ``size``-th window."""
        return islice(items, self.world.rank, None, self.world.size)

    def state(self) -> dict[str, Tensor]:
        """The state on rank 0. Empty on the other ranks, because replicas are equal."""
        return super().state() if self.world.is_main else {}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Restores rank 0's ``state`` on all ranks."""
        moments = self.world.broadcast_object(lambda: sorted(_with_prefix(state, MOMENT)))
        if not self.world.is_main:
            shapes = self.optimizer.shapes(self.own)
            state = {MOMENT + name: torch.zeros(shapes[name]) for name in moments}
        super().restore(state)
        local_state = self.optimizer.state(self.own)
        weights = (p.detach() for p in self.own.parameters() if p.requires_grad)
        self.world.broadcast([*weights, *(local_state[name] for name in moments)])


class Sharded(Strategy):
    """One of several processes, each with a shard of every parameter. Forward passes are collective."""

    def __init__(self, sharded: "ShardedModel", optimizer: Optimizers, compute: Compute, world: World) -> None:
        from gpt.parallel.gather import CheckpointGatherer

        super().__init__(sharded.model, optimizer, compute, world)
        self.sharded, self.own = sharded, sharded.own
        tensors = {WEIGHT + name: p for name, p in sharded.table.items()}
        for name, shape in optimizer.shapes(sharded.own).items():
            if shape:
                tensors[MOMENT + name] = sharded.table[name.rpartition(".")[0]]
        self.gatherer = CheckpointGatherer(
            sharded.grid, tensors, dist.new_group(backend="gloo", timeout=COLLECTIVE_TIMEOUT)
        )

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: p.shape for name, p in self.sharded.table.items()}

    def scaler(self) -> torch.amp.GradScaler:
        """The loss scaler. An overflow on one rank skips the step on all ranks."""
        from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

        enabled = self.compute.dtype == torch.float16
        return ShardedGradScaler(self.compute.device.type, enabled=enabled, process_group=self.world.gradients)

    @property
    def evaluation_compute(self) -> Compute:
        """As for one process, but on a GPU, blocks are gathered in the dtype of the training steps."""
        return self.compute if self.compute.device.type == "cuda" else super().evaluation_compute

    def no_sync(self) -> contextlib.AbstractContextManager[object]:
        return self.sharded.no_sync()

    def zero_grad(self) -> None:
        self.sharded.abandon_backward()
        super().zero_grad()

    def restore(self, state: Mapping[str, Tensor]) -> None:
        super().restore(state)
        self.sharded.abandon_backward()  # After an evaluation, the gathered embeddings are still the old ones.

    def backward_loss(self, loss: Tensor) -> Tensor:
        return loss * self.world.data_size

    def clip_grad_norm(self, scaler: torch.amp.GradScaler, max_norm: float) -> Tensor:
        self.sharded.collect()
        for optimizer in self.optimizer.optimizers:
            scaler.unscale_(optimizer)
        return self.sharded.clip_grad_norm(max_norm)

    def windows(self, items: Iterable[Window]) -> Iterator[Window]:
        """Yields every ``data_size``-th window. All ranks yield the same number of windows; a rank's last window can be
        padding."""
        rank, size = self.world.data_rank, self.world.data_size
        windows = iter(items)
        while group := list(islice(windows, size)):
            window = group[min(rank, len(group) - 1)]
            yield window if rank < len(group) else dataclasses.replace(window, skipped=len(window.y))

    def until_stopped(self, stop: StopSignal, items: Iterable[T]) -> Iterator[T]:
        """Yields the items until rank 0's deadline. After a signal to any rank, all raise `Stopped`. So no rank waits
        for another."""
        for item in items:
            signum, is_late = self.world.poll(stop.signum, float(stop.is_late))
            if signum:
                raise Stopped
            yield item
            if is_late:
                return

    def compute_on_all(self, work: Callable[[], T]) -> T:
        return work()

    def part(self, name: str, full: Tensor) -> Tensor:
        if name not in self.gatherer.tensors:
            return full
        return self.sharded.grid.part(self.gatherer.tensors[name], self.sharded.rank).take(full)

    def full_tensor(self, name: str, part: Tensor) -> Array | Deferred:
        """Returns a tensor that is gathered from all ranks when the file is written."""
        if name not in self.gatherer.tensors:
            return part.numpy()
        return Deferred(self.gatherer.tensors[name].shape, partial(self.gatherer.full_tensor, name, part.numpy()))

    def finish_save(self) -> None:
        self.gatherer.finish()

    def serve(self, state: Mapping[str, Tensor]) -> None:
        """Sends shards until rank 0 calls `finish_save`."""
        self.gatherer.send(state)


class ShardedMuon(Muon):
    """Muon for sharded parameters. Each rank orthogonalizes an equal share of the gathered matrices."""

    def __init__(self, sharded: "ShardedModel", *args: Any) -> None:
        """``args`` are `Muon`'s arguments, with parameters of ``sharded.own``."""
        from gpt.parallel.gather import MatrixExchange

        super().__init__(*args)
        params = {p for group in self.param_groups for p in group["params"]}
        self.names = {p: name for name, p in sharded.own.named_parameters() if p in params}
        by_kind: dict[str, list[str]] = defaultdict(list)
        for name in self.names.values():
            by_kind[name.split(".", 2)[2]].append(name)  # The key omits "h.0.".
        self.exchanges = {tuple(names): MatrixExchange(sharded, names[0], len(names)) for names in by_kind.values()}

    def apply(self, updates: Sequence[tuple[Tensor, Tensor, dict[str, Any]]], scale: float | Tensor) -> None:
        """Subtracts each parameter's orthogonalized update times ``scale``, 0 or 1."""
        by_name = {self.names[p]: (p, update, group) for p, update, group in updates}  # type: ignore[index]
        for names, exchange in self.exchanges.items():
            named_updates = [by_name[name] for name in names]
            group = named_updates[0][2]

            def directions(full_updates: list[Tensor], fused: tuple[int, ...] = group["fused"]) -> list[Tensor]:
                scaled = scaled_directions([matrix for full in full_updates for matrix in unfuse(full, fused)])
                count = len(scaled) // len(full_updates)
                return [torch.cat(scaled[i : i + count]) for i in range(0, len(scaled), count)]

            own_directions = exchange([update.to(self.dtype) for _, update, _ in named_updates], directions)
            for (p, _, _), direction in zip(named_updates, own_directions, strict=True):
                p.sub_(direction * scale, alpha=group["lr"])


def make_strategy(
    recipe: Recipe, compute: Compute, world: World, init: InitCheckpoint | None = None, path: Path | None = None
) -> Strategy:
    """Creates a run's model (untrained, from ``init``, or from the checkpoint at ``path``) with new optimizer state.

    Raises `UserError` for a LoRA rank above the model's width.
    """
    if recipe.is_sharded:
        sharded = shard(recipe, compute, world, path, init)
        sharded.model.recompute = recipe.recompute
        muon = partial(ShardedMuon, sharded)
        optimizer = make_optimizer(sharded.own, recipe.optimizer, recipe.weight_decay, compute.dtype, world, muon)
        return Sharded(sharded, optimizer, compute, world)
    if path is not None and not recipe.lora_rank:
        model = checkpoint.load(path, compute.device, recipe.model).model.train()
    else:
        # With adapters, the base model can be in bfloat16, which takes half the memory. In float16, it would overflow
        # outside the matrix products.
        is_bfloat16 = recipe.lora_rank and compute.dtype == torch.bfloat16
        dtype = torch.bfloat16 if is_bfloat16 else torch.float32
        model = init.load(recipe.model, compute.device, dtype) if init else GPT(recipe.model).to(compute.device)
    model.recompute = recipe.recompute
    if recipe.lora_rank:
        if recipe.lora_rank > model.config.n_embd:
            raise UserError(
                f"lora-rank {recipe.lora_rank} is more than the model's width, {model.config.n_embd}",
                "common ranks are 4 to 64",
            )
        adapters = lora.adapt(model, recipe.lora_rank, recipe.lora_alpha, recipe.lora_targets)
        optimizer = Optimizers([AdamW(adapters, lr=0.0, betas=BETAS, weight_decay=recipe.weight_decay, fused=True)])
    else:
        optimizer = make_optimizer(model, recipe.optimizer, recipe.weight_decay, compute.dtype, world)
    return (Replicated if world.size > 1 else Single)(model, optimizer, compute, world)


def shard(
    recipe: Recipe, compute: Compute, world: World, path: Path | None, init: InitCheckpoint | None = None
) -> "ShardedModel":
    """Creates a model sharded over ``world``: from the checkpoint at ``path``, from ``init``, or untrained.

    Untrained weights are the same as in a single process.
    """
    from gpt.parallel.shard import Grid, ShardedModel, initialize_parameters  # FSDP takes seconds to import.

    grid = Grid(world.data_size, recipe.tensor, recipe.shard == "full")
    mesh = world.mesh(compute.device.type)
    gradient_bytes = 4 * breakdown(recipe.model).trainable // recipe.tensor
    accumulates_whole = gradient_bytes < WHOLE_GRADIENTS * compute.memory()
    sharded = ShardedModel(recipe.model, grid, mesh, compute.dtype, world.gradients, accumulates_whole)
    sharded.allocate(compute.device)
    if path is not None:
        checkpoint.load_parts(path, recipe.model, sharded.fill)
    elif init is not None:
        checkpoint.load_parts(init.path, recipe.model, lambda name, p: sharded.fill(name, init.add_token_rows(name, p)))
    else:
        for name, tensor in initialize_parameters(recipe.model):
            sharded.fill(name, tensor)
    return sharded


def _with_prefix(state: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}
