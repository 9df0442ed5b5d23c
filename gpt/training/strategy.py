"""How processes share training: a single process (`Single`), replicas (`Replicated`), or shards (`Sharded`)."""

import contextlib
import dataclasses
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_, clip_grads_with_norm_, get_total_norm
from torch.optim import AdamW

from gpt.config import device
from gpt.config.device import Compute
from gpt.insight.evaluate import Window
from gpt.model import lora
from gpt.model.decoder import GPT
from gpt.model.params import named_parameters
from gpt.parallel.gather import CheckpointGatherer, Exchange, ShardExchange
from gpt.parallel.world import World
from gpt.runs import adapter, checkpoint, folder
from gpt.runs.tensors import Array, Deferred
from gpt.system.errors import UserError
from gpt.system.interrupt import Stopped, StopSignal
from gpt.training.finetune import InitCheckpoint
from gpt.training.optim import BETAS, Optimizers, make_optimizer
from gpt.training.recipe import Recipe

if TYPE_CHECKING:
    from gpt.parallel.shard import ShardedModel

T = TypeVar("T")
WEIGHT, MOMENT = "weight:", "optimizer:"  # prefixes of tensor names in a state


class Strategy:
    """A model, its optimizers, and this process's share of the work. The base methods are for a single process.

    ``model`` computes forward passes. ``optimizer.parameters`` are what this process updates and saves: plain tensors.
    """

    def __init__(self, model: GPT, optimizer: Optimizers, compute: Compute, world: World | None = None) -> None:
        self.model, self.optimizer, self.compute, self.world = model, optimizer, compute, world or World()

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The full shapes of the trained parameters, by name."""
        return {name: tuple(p.shape) for name, p in self.optimizer.parameters.items()}

    def scaler(self) -> torch.amp.GradScaler:
        """The loss scaler. Only float16 enables it."""
        return torch.amp.GradScaler(self.compute.device.type, enabled=self.compute.dtype == torch.float16)

    def wrap(self, objective: nn.Module) -> nn.Module:
        """Returns a module whose backward pass averages gradients over ranks, except inside `no_sync`."""
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
        """Scales the loss so that its gradients, averaged over ranks, are the sum of all ranks' gradients."""
        return loss * self.world.size if self.world.size > 1 else loss

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

    def default_compute(self) -> Compute:
        """The device and dtype that `gpt eval` uses by default."""
        return device.pick(str(self.compute.device)) if self.compute.dtype != torch.float32 else self.compute

    def load(self, path: Path, recipe: Recipe) -> Compute:
        """Loads a checkpoint's weights into the model for the last evaluation. Returns its device and dtype.

        They are the defaults of `gpt eval`, so that it reproduces the loss, and adapters are merged into the base
        model. Adapters over a quantized base and preferences, whose reference has the training dtype, are evaluated as
        they are trained.
        """
        maps = [module for module in self.model.modules() if isinstance(module, lora.LowRank)]
        as_trained = recipe.beta > 0 or any(not isinstance(each.weight, Tensor) for each in maps)
        compute = self.compute if as_trained else self.default_compute()
        if recipe.lora_rank and as_trained:
            _load_adapters(path, recipe, self.optimizer.parameters)
        elif recipe.lora_rank:
            self._load_merged(path, recipe, compute.dtype)
        else:
            weights: dict[str, Tensor] = {}
            checkpoint.load_parts(path, recipe.model, weights.__setitem__)
            self.restore({WEIGHT + name: self.part(WEIGHT + name, tensor) for name, tensor in weights.items()})
        return compute

    @torch.no_grad()
    def _load_merged(self, path: Path, recipe: Recipe, dtype: torch.dtype) -> None:
        """Reads the base model again, one parameter at a time, because its dtype in training can be too narrow."""
        self.model.build_position_tables(self.compute.device)
        adapters, roles = adapter.tensors(path, recipe.model, recipe.lora_rank)
        for name, p in self.model.named_parameters():
            if name in adapters:
                p.zero_()

        def put(name: str, value: Tensor) -> None:
            p = self.model.get_parameter(name)
            p.data = value.to(p.device, dtype, copy=True)

        checkpoint.load_parts(adapter.read(path).find_base(path), recipe.model, put)
        lora.merge(self.model, adapters, recipe.lora_alpha / recipe.lora_rank, roles)

    def state(self) -> dict[str, Tensor]:
        """The trained weights and moments that this process copies into snapshots, by prefixed name."""
        weights = {WEIGHT + name: p.detach() for name, p in self.optimizer.parameters.items()}
        return weights | {MOMENT + name: tensor for name, tensor in self.optimizer.state().items()}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Sets the weights that ``state`` has, and replaces all moments."""
        with torch.no_grad():
            for name, tensor in with_prefix(state, WEIGHT).items():
                self.optimizer.parameters[name].copy_(tensor)
        self.optimizer.restore(with_prefix(state, MOMENT))

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

    def windows(self, items: Iterable[Window]) -> Iterable[Window]:
        """Returns every ``size``-th window."""
        return islice(items, self.world.rank, None, self.world.size)

    def state(self) -> dict[str, Tensor]:
        """The state on rank 0. Empty on the other ranks, because replicas are equal."""
        return super().state() if self.world.is_main else {}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Restores rank 0's ``state`` on all ranks."""
        moments = self.world.broadcast_object(lambda: sorted(with_prefix(state, MOMENT)))
        if not self.world.is_main:
            shapes = self.optimizer.shapes(self.shapes)
            state = {MOMENT + name: torch.zeros(shapes[name]) for name in moments}
        super().restore(state)
        local_state = self.optimizer.state()
        weights = (p.detach() for p in self.optimizer.parameters.values())
        self.world.broadcast([*weights, *(local_state[name] for name in moments)])


class Sharded(Strategy):
    """One of several processes, each with a shard of every parameter. Forward passes are collective."""

    def __init__(self, sharded: "ShardedModel", optimizer: Optimizers, compute: Compute, world: World) -> None:
        super().__init__(sharded.model, optimizer, compute, world)
        self.sharded = sharded
        full = {WEIGHT + name: shape for name, shape in self.shapes.items()}
        full |= {MOMENT + name: shape for name, shape in optimizer.shapes(self.shapes).items() if shape}
        self.gatherer = CheckpointGatherer(full)

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: p.shape for name, p in named_parameters(self.model.config).items()}

    def scaler(self) -> torch.amp.GradScaler:
        """The loss scaler. An overflow on one rank skips the step on all ranks."""
        from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

        enabled = self.compute.dtype == torch.float16
        return ShardedGradScaler(self.compute.device.type, enabled=enabled, process_group=self.world.gradients)

    def default_compute(self) -> Compute:
        """As for one process, but on a GPU, blocks are gathered in the dtype of the training steps."""
        return self.compute if self.compute.device.type == "cuda" else super().default_compute()

    def zero_grad(self) -> None:
        self.sharded.abandon_backward()
        super().zero_grad()

    def restore(self, state: Mapping[str, Tensor]) -> None:
        super().restore(state)
        self.sharded.abandon_backward()  # After an evaluation, the gathered embeddings are still the old ones.

    def clip_grad_norm(self, scaler: torch.amp.GradScaler, max_norm: float) -> Tensor:
        self.sharded.collect()
        for optimizer in self.optimizer.optimizers:
            scaler.unscale_(optimizer)
        parameters = list(self.optimizer.parameters.values())
        own_norm = get_total_norm([p.grad for p in parameters if p.grad is not None])
        norm = self.world.all_reduce(own_norm.square()).sqrt()
        clip_grads_with_norm_(parameters, max_norm, norm)
        return norm

    def windows(self, items: Iterable[Window]) -> Iterator[Window]:
        """Yields every ``size``-th window. All ranks yield the same number of windows; a rank's last window can be
        padding."""
        windows = iter(items)
        while group := list(islice(windows, self.world.size)):
            window = group[min(self.world.rank, len(group) - 1)]
            yield window if self.world.rank < len(group) else dataclasses.replace(window, skipped=len(window.y))

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
        return full[self.gatherer.rows(name, self.world.rank)].clone() if name in self.gatherer.shapes else full

    def full_tensor(self, name: str, part: Tensor) -> Array | Deferred:
        """Returns a tensor that is gathered from all ranks when the file is written."""
        if name not in self.gatherer.shapes:
            return part.numpy()
        return Deferred(self.gatherer.shapes[name], partial(self.gatherer.full_tensor, name, part.numpy()))

    def finish_save(self) -> None:
        self.gatherer.finish()

    def serve(self, state: Mapping[str, Tensor]) -> None:
        """Sends shards until rank 0 calls `finish_save`."""
        self.gatherer.send(state)


def make_strategy(
    recipe: Recipe, compute: Compute, world: World, init: InitCheckpoint | None = None, path: Path | None = None
) -> Strategy:
    """Creates a run's model (untrained, from ``init``, or from the checkpoint at ``path``) with new optimizer state.

    Raises `UserError` for a LoRA rank above the model's width.
    """
    if recipe.is_sharded:
        sharded = shard(recipe, compute, world, path, init)
        sharded.model.recompute = recipe.recompute
        settings = recipe.optimizer, recipe.weight_decay, compute.dtype
        optimizer = make_optimizer(sharded.model, *settings, ShardExchange(world), sharded.parameters)
        return Sharded(sharded, optimizer, compute, world)
    if path is not None and not recipe.lora_rank:
        model = checkpoint.load_model(path, compute.device, recipe.model).train()
    else:
        # With adapters, the base model can be in bfloat16, which takes half the memory. In float16, it would overflow
        # outside the matrix products.
        is_bfloat16 = recipe.lora_rank and compute.dtype == torch.bfloat16
        dtype = torch.bfloat16 if is_bfloat16 else torch.float32
        base_dtype = recipe.base_dtype if recipe.lora_rank else "full"
        model = (
            init.load(recipe.model, compute.device, dtype, base_dtype) if init else GPT(recipe.model).to(compute.device)
        )
    model.recompute = recipe.recompute
    if recipe.lora_rank:
        if recipe.lora_rank > model.config.n_embd:
            message = f"lora-rank {recipe.lora_rank} is more than the model's width, {model.config.n_embd}"
            raise UserError(message, "common ranks are 4 to 64")
        adapters = lora.adapt(model, recipe.lora_rank, recipe.lora_alpha, recipe.lora_targets)
        parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        if path is not None:
            _load_adapters(path, recipe, parameters)
        adamw = AdamW(adapters, lr=0.0, betas=BETAS, weight_decay=recipe.weight_decay, fused=True)
        optimizer = Optimizers([adamw], parameters)
    else:
        optimizer = make_optimizer(model, recipe.optimizer, recipe.weight_decay, compute.dtype, Exchange(world))
    return (Replicated if world.size > 1 else Single)(model, optimizer, compute, world)


@torch.no_grad()
def _load_adapters(path: Path, recipe: Recipe, parameters: Mapping[str, Tensor]) -> None:
    """Loads a checkpoint's adapters. Raises `UserError` if they have other shapes than the ``parameters``."""
    adapters, _ = adapter.tensors(path, recipe.model, recipe.lora_rank)
    if {name: each.shape for name, each in adapters.items()} != {name: p.shape for name, p in parameters.items()}:
        raise UserError(f"{path} is damaged: its adapters do not match its training state", folder.HINT)
    for name, p in parameters.items():
        p.copy_(adapters[name])


def shard(
    recipe: Recipe, compute: Compute, world: World, path: Path | None, init: InitCheckpoint | None = None
) -> "ShardedModel":
    """Creates a model sharded over ``world``: from the checkpoint at ``path``, from ``init``, or untrained.

    Untrained weights are the same as in a single process.
    """
    from gpt.parallel.shard import ShardedModel, initialize_parameters  # FSDP takes seconds to import.

    mesh = world.mesh(compute.device.type)
    sharded = ShardedModel(recipe.model, mesh, compute.device, compute.dtype)
    if path is not None:
        checkpoint.load_parts(path, recipe.model, sharded.fill)
    elif init is not None:
        checkpoint.load_parts(init.path, recipe.model, lambda name, p: sharded.fill(name, init.add_token_rows(name, p)))
    else:
        for name, tensor in initialize_parameters(recipe.model):
            sharded.fill(name, tensor)
    return sharded


def with_prefix(state: Mapping[str, T], prefix: str) -> dict[str, T]:
    """Returns the entries whose names have a prefix, without it."""
    return {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}
