"""Sharded parameters: the layout of ranks and shards, and a model with only this rank's shards.

Ranks form a grid, ``data`` × ``tensor`` (`Grid`). The ranks of a row share each sequence (`gpt.parallel.tensor`); rows
train on different sequences. With ``sharded``, parameters, gradients and optimizer state are sharded over the rows:
torch's `fully_shard` (FSDP2; Zhao et al. 2023, arXiv 2304.11277) gathers a block's parameters only while computing it.

Optimizers and checkpoints use a second model, `ShardedModel.own`. Its parameters are this rank's shards as plain
tensors, with the same names, so optimizers, kernels and snapshots need no code for sharding.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from gpt.config import GPTConfig
from gpt.model.decoder import GPT, RMSNorm, initialize
from gpt.model.params import Parameter, Shape, named_parameters
from gpt.parallel import tensor as tensor_parallel


@dataclass(frozen=True)
class Grid:
    """The layout of ranks: rank r is in row r // ``tensor``, column r % ``tensor``."""

    data: int  # number of rows
    tensor: int = 1  # ranks per row
    sharded: bool = False  # whether parameters are sharded over the rows

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.data * self.tensor

    @property
    def holders(self) -> list[int]:
        """Ranks that together have every parameter. Parameters that are not split are on all ranks of a row."""
        return list(range(self.size if self.sharded else self.tensor))

    def copies(self, p: Parameter) -> int:
        """Returns the number of ranks with the same part of a parameter."""
        return (1 if self.sharded else self.data) * (self.tensor if p.split is None else 1)

    def part(self, p: Parameter, rank: int) -> "Part":
        """Returns a rank's part of a parameter. `fully_shard` gives data ranks equal numbers of rows, except that the
        last ranks can get fewer or none."""
        row, column = divmod(rank, self.tensor)
        slices = tensor_parallel.rows(p, self.tensor, column)
        if self.sharded:
            n = sum(s.stop - s.start for s in slices)
            rows_per_rank = -(-n // self.data)
            slices = list(_cut_rows(slices, row * rows_per_rank, (row + 1) * rows_per_rank))
        columns = None if len(p.shape) == 1 else tensor_parallel.columns(p, self.tensor, column)
        return Part(tuple(slices), columns)


@dataclass(frozen=True)
class Part:
    """A rank's part of a full tensor: the rows, in the rank's order, and the columns."""

    rows: tuple[slice, ...]
    columns: slice | None  # None for vectors

    @property
    def shape(self) -> Shape:
        """The shape of the part."""
        n = sum(s.stop - s.start for s in self.rows)
        return (n,) if self.columns is None else (n, self.columns.stop - self.columns.start)

    @property
    def numel(self) -> int:
        """The number of elements in the part."""
        return torch.Size(self.shape).numel()

    def views(self, whole: Any) -> Any:
        """Returns views of a full tensor or array that make up the part when concatenated."""
        return [whole[s] if self.columns is None else whole[s, self.columns] for s in self.rows]

    def take(self, whole: Tensor) -> Tensor:
        """Returns a copy of the part of a full tensor."""
        return torch.cat(self.views(whole)) if self.rows else whole.new_empty(self.shape)

    def put(self, part: Any, whole: Any) -> None:
        """Copies ``part`` into a full tensor or array."""
        offset = 0
        for view in self.views(whole):
            view[...] = part[offset : offset + len(view)]
            offset += len(view)


def _cut_rows(slices: list[slice], start: int, stop: int) -> Iterator[slice]:
    """Yields slices for the rows ``start`` to ``stop`` of the concatenated ``slices``."""
    offset = 0
    for s in slices:
        first, last = max(s.start, s.start + start - offset), min(s.stop, s.start + stop - offset)
        if first < last:
            yield slice(first, last)
        offset += s.stop - s.start


def initialize_parameters(config: GPTConfig) -> Iterator[tuple[str, Tensor]]:
    """Yields the full parameters of a new model, one at a time, on the host. Their values equal those of
    ``GPT(config)``, which initializes all parameters twice: with torch's defaults, then as in GPT-2."""
    model = _on_meta(config)
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.Embedding)):
            _materialize(module).reset_parameters()
    for name, module in model.named_modules():
        if isinstance(module, (nn.Linear, nn.Embedding, nn.LayerNorm, RMSNorm)):
            copy = _materialize(module)
            if isinstance(copy, (nn.LayerNorm, RMSNorm)):
                copy.reset_parameters()
            initialize(copy, name, config)
            yield from ((f"{name}.{parameter}", p.detach()) for parameter, p in copy.named_parameters())


def _on_meta(config: GPTConfig) -> GPT:
    with torch.device("meta"):
        return GPT(config)


def _materialize(module: nn.Module) -> Any:
    """Returns an uninitialized CPU copy of a module on the meta device."""
    copy = type(module).__new__(type(module))
    copy.__dict__ = {**module.__dict__, "_parameters": dict(module._parameters)}
    return copy.to_empty(device="cpu")


class ShardedModel:
    """A model with only this rank's shards. It is created on the meta device; `allocate` and `fill` load it."""

    def __init__(
        self,
        config: GPTConfig,
        grid: Grid,
        mesh: DeviceMesh,
        dtype: torch.dtype,
        group: ProcessGroup | None = None,
        accumulates_unsharded: bool = True,
    ) -> None:
        """``mesh`` is the grid, with dimensions named data and tensor. ``group`` contains all ranks. Matrix products
        and gathered blocks have ``dtype``; the optimizer's parameters and gradient sums are float32.
        ``accumulates_unsharded`` means that unsharded gradients fit into memory."""
        self.grid, self.mesh, self.rank, self.group = grid, mesh, mesh.get_rank(), group
        self.table = {name: p for name, p in named_parameters(config).items() if p.trained}
        self.accumulates_unsharded = accumulates_unsharded
        self.model = _on_meta(config)
        if grid.tensor > 1:
            tensor_parallel.parallelize(self.model, mesh["tensor"])
        if grid.sharded:
            _fully_shard(self.model, mesh["data"], dtype)
        self.own = _on_meta(config)

    def allocate(self, device: torch.device) -> None:
        """Allocates this rank's shards, uninitialized until `fill`."""
        self.model.to_empty(device=device)
        for model in (self.model, self.own):
            model.build_position_tables(device)
        for name, p in self.model.named_parameters():
            parent, _, parameter_name = name.rpartition(".")
            local = nn.Parameter(_local(p.detach()))
            assert tuple(local.shape) == self.part(name).shape, f"{name} is not cut as it should be"
            self.own.get_submodule(parent).register_parameter(parameter_name, local)

    def part(self, name: str) -> Part:
        """Returns this rank's part of a parameter."""
        return self.grid.part(self.table[name], self.rank)

    @torch.no_grad()
    def fill(self, name: str, whole: Tensor) -> None:
        """Copies this rank's part of a full parameter into the model."""
        self.own.get_parameter(name).copy_(self.part(name).take(whole))

    @property
    def holders(self) -> ProcessGroup | None:
        """This rank's group of ranks that together have all parameters. None means torch's default group."""
        return self.group if self.grid.sharded else self.mesh["tensor"].get_group()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Returns a context that accumulates unsharded gradients without reduce-scatter, if they fit into memory."""
        if not (self.accumulates_unsharded and isinstance(self.model, FSDPModule)):
            yield
            return
        self.model.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self.model.set_requires_gradient_sync(True)

    def abandon_backward(self) -> None:
        """Frees gathered weights, and gradients that were not reduced. The next forward pass starts from a clean state,
        even after an error."""
        if not isinstance(self.model, FSDPModule) or self.model._get_fsdp_state()._is_root is None:
            return  # No forward pass has run.
        getattr(self.model, "reset_iter_state", self.model.reshard)()  # Older versions of torch lack it.
        for module in self.model.modules():
            if isinstance(module, FSDPModule) and (group := module._get_fsdp_state()._fsdp_param_group) is not None:
                for param in group.fsdp_params:
                    param.unsharded_accumulated_grad = None
                    if hasattr(param, "_unsharded_param"):
                        param.unsharded_param.grad = None

    def collect(self) -> None:
        """Moves the gradients of `model` to `own`, averaged over data ranks."""
        pairs = zip(self.model.parameters(), self.own.named_parameters(), strict=True)
        for p, (name, shard) in pairs:
            grad, p.grad = p.grad, None
            if isinstance(grad, DTensor) and isinstance(p, DTensor) and grad.placements != p.placements:
                grad = grad.redistribute(placements=p.placements)
            shard.grad = None if grad is None else _local(grad)
            if shard.grad is not None and self.grid.tensor > 1 and self.table[name].has_partial_gradient:
                dist.all_reduce(shard.grad, group=self.mesh["tensor"].get_group())
        if not self.grid.sharded and self.grid.data > 1:
            group = self.mesh["data"].get_group()
            for shard in self.own.parameters():
                if shard.grad is not None:
                    dist.all_reduce(shard.grad.div_(self.grid.data), group=group)

    @torch.no_grad()
    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """Clips the gradients of `own` by the norm over all ranks. Returns the norm before clipping."""
        grads = {name: p.grad for name, p in self.own.named_parameters() if p.grad is not None}
        norms = torch._foreach_norm(list(grads.values()), dtype=torch.float32)
        copies = torch.tensor([self.grid.copies(self.table[name]) for name in grads], device=norms[0].device)
        square = (torch.stack(norms).square() / copies).sum()
        dist.all_reduce(square, group=self.group)
        norm = square.sqrt()
        torch._foreach_mul_(
            list(grads.values()), (max_norm / (norm + 1e-6)).clamp(max=1.0)
        )  # same formula as torch's clip_grad_norm_
        return norm


def _fully_shard(model: GPT, mesh: DeviceMesh, dtype: torch.dtype) -> None:
    """Shards each block separately, and the embeddings and the last norm together as the root. The root stays gathered
    until the backward pass ends, because the loss uses the embedding outside of `GPT.trunk`. Like the residual stream,
    the root is float32. GPUs gather whole blocks in ``dtype``, because a separate group for the norms would cause graph
    breaks. CPUs gather in float32, which their LayerNorm requires."""
    casts = mesh.device_type == "cuda" and dtype != torch.float32
    policy = MixedPrecisionPolicy(
        param_dtype=dtype if casts else None, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    for block in model.h:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh)
    register_fsdp_forward_method(model, "trunk")
    model.trunk = _outside_inference(model.trunk)  # type: ignore[method-assign]


def _outside_inference(trunk: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wraps `GPT.trunk` to gather parameters outside inference mode, because tensors created in inference mode cannot
    be trained."""

    @functools.wraps(trunk)
    def trunk_outside_inference(*args: Any, **kwargs: Any) -> Tensor:
        if not torch.is_inference_mode_enabled():
            return trunk(*args, **kwargs)
        with torch.inference_mode(False), torch.no_grad():
            return trunk(*args, **kwargs)

    return trunk_outside_inference


def _local(x: Tensor) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else x
