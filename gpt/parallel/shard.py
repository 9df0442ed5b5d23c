"""Sharded parameters: which part of each a rank has, and a model of which each rank holds its part alone.

Ranks form a grid, ``data`` × ``tensor`` (`Grid`). The ranks of a row share each sequence (`gpt.parallel.tensor`), rows
take different sequences. With ``sharded``, the rows divide all parameters as well, and with them gradients and
optimizer state: torch's `fully_shard` (FSDP2; Zhao et al. 2023, arXiv 2304.11277) gathers a block's parameters before
it is computed and frees them after it.

The optimizer steps a second model, `ShardedModel.own`, which is also what a checkpoint saves: it has the same names,
and each parameter is this rank's shard, a plain tensor. So optimizers, their kernels and snapshots know nothing of
sharding.
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
from gpt.parallel import tensor as parallel


@dataclass(frozen=True)
class Grid:
    """The layout of ranks: rank r is in row r // ``tensor``, column r % ``tensor``."""

    data: int  # rows, which take different sequences
    tensor: int = 1  # ranks of a row, which share each sequence
    sharded: bool = False  # whether rows divide the parameters

    @property
    def size(self) -> int:
        """Ranks in all."""
        return self.data * self.tensor

    @property
    def holders(self) -> list[int]:
        """Ranks that together hold everything once, but for what all ranks of a row hold."""
        return list(range(self.size if self.sharded else self.tensor))

    def copies(self, p: Parameter) -> int:
        """Ranks that hold the same part of a parameter."""
        return (1 if self.sharded else self.data) * (self.tensor if p.split is None else 1)

    def part(self, p: Parameter, rank: int) -> "Part":
        """A rank's part of a parameter. `fully_shard` cuts along the rows into as many equal runs as there are data
        ranks; the last may be short, or empty."""
        row, column = divmod(rank, self.tensor)
        runs = parallel.rows(p, self.tensor, column)
        if self.sharded:
            n = sum(run.stop - run.start for run in runs)
            each = -(-n // self.data)
            runs = list(_cut(runs, row * each, (row + 1) * each))
        wide = None if len(p.shape) == 1 else parallel.columns(p, self.tensor, column)
        return Part(tuple(runs), wide)


@dataclass(frozen=True)
class Part:
    """Some rows of a whole tensor, in the order in which a rank holds them, and some of its columns."""

    rows: tuple[slice, ...]
    columns: slice | None  # None for vectors

    @property
    def shape(self) -> Shape:
        """The part's shape."""
        n = sum(run.stop - run.start for run in self.rows)
        return (n,) if self.columns is None else (n, self.columns.stop - self.columns.start)

    @property
    def numel(self) -> int:
        """Numbers in the part."""
        return torch.Size(self.shape).numel()

    def of(self, whole: Any) -> Any:
        """Views of a whole tensor, or numpy array, that stacked are the part."""
        return [whole[run] if self.columns is None else whole[run, self.columns] for run in self.rows]

    def take(self, whole: Tensor) -> Tensor:
        """Copies the part out of a whole tensor."""
        return torch.cat(self.of(whole)) if self.rows else whole.new_empty(self.shape)

    def put(self, part: Any, whole: Any) -> None:
        """Writes the part to its place in a whole tensor or array."""
        at = 0
        for view in self.of(whole):
            view[...] = part[at : at + len(view)]
            at += len(view)


def _cut(runs: list[slice], start: int, stop: int) -> Iterator[slice]:
    """Slices of the rows ``start`` to ``stop``, counted over the runs."""
    at = 0
    for run in runs:
        first, last = max(run.start, run.start + start - at), min(run.stop, run.start + stop - at)
        if first < last:
            yield slice(first, last)
        at += run.stop - run.start


def drawn(config: GPTConfig) -> Iterator[tuple[str, Tensor]]:
    """The parameters of a new model, one at a time, whole and on the host: the same numbers from torch's generator as
    in ``GPT(config)``, which draws all twice, once as torch does and then as GPT-2 does."""
    model = _on_meta(config)
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.Embedding)):
            _alone(module).reset_parameters()
    for name, module in model.named_modules():
        if isinstance(module, (nn.Linear, nn.Embedding, nn.LayerNorm, RMSNorm)):
            alone = _alone(module)
            if isinstance(alone, (nn.LayerNorm, RMSNorm)):
                alone.reset_parameters()
            initialize(alone, name, config)
            yield from ((f"{name}.{each}", p.detach()) for each, p in alone.named_parameters())


def _on_meta(config: GPTConfig) -> GPT:
    with torch.device("meta"):
        return GPT(config)


def _alone(module: nn.Module) -> Any:
    """Copies a module from the meta device to memory, uninitialized."""
    alone = type(module).__new__(type(module))
    alone.__dict__ = {**module.__dict__, "_parameters": dict(module._parameters)}
    return alone.to_empty(device="cpu")


class ShardedModel:
    """A model of which this rank holds a part. It starts on the meta device: see `allocate` and `fill`."""

    def __init__(
        self,
        config: GPTConfig,
        grid: Grid,
        mesh: DeviceMesh,
        dtype: torch.dtype,
        group: ProcessGroup | None = None,
        accumulates_whole: bool = True,
    ) -> None:
        """``mesh``: the grid, its dimensions named data and tensor; ``group``: all of it. Products are computed in
        ``dtype``, in which blocks are gathered too; what the optimizer steps, and sums of gradients, are float32.
        ``accumulates_whole``: whether there is memory for gradients that are not sharded."""
        self.grid, self.mesh, self.rank, self.group = grid, mesh, mesh.get_rank(), group
        self.table = {name: p for name, p in named_parameters(config).items() if p.trained}
        self.accumulates_whole = accumulates_whole
        self.model = _on_meta(config)
        if grid.tensor > 1:
            parallel.parallelize(self.model, mesh["tensor"])
        if grid.sharded:
            _fully_shard(self.model, mesh["data"], dtype)
        self.own = _on_meta(config)

    def allocate(self, device: torch.device) -> None:
        """Allocates this rank's part. Parameters are uninitialized until `fill`."""
        self.model.to_empty(device=device)
        for model in (self.model, self.own):
            model.lay_tables(device)
        for name, p in self.model.named_parameters():
            parent, _, last = name.rpartition(".")
            local = nn.Parameter(_local(p.detach()))
            assert tuple(local.shape) == self.part(name).shape, f"{name} is not cut as it should be"
            self.own.get_submodule(parent).register_parameter(last, local)

    def part(self, name: str) -> Part:
        """This rank's part of a parameter."""
        return self.grid.part(self.table[name], self.rank)

    @torch.no_grad()
    def fill(self, name: str, whole: Tensor) -> None:
        """Copies this rank's part out of a whole parameter."""
        self.own.get_parameter(name).copy_(self.part(name).take(whole))

    @property
    def holders(self) -> ProcessGroup | None:
        """This rank's group of ranks that together hold everything; None: torch's default group."""
        return self.group if self.grid.sharded else self.mesh["tensor"].get_group()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """A context in which gradients accumulate whole on each rank, if there is memory, instead of being reduced and
        scattered: less is sent, and more is kept."""
        if not (self.accumulates_whole and isinstance(self.model, FSDPModule)):
            yield
            return
        self.model.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self.model.set_requires_gradient_sync(True)

    def collect(self) -> None:
        """Moves the gradients of `model` to `own`, as the mean over all data ranks."""
        pairs = zip(self.model.parameters(), self.own.named_parameters(), strict=True)
        for p, (name, own) in pairs:
            grad, p.grad = p.grad, None
            if isinstance(grad, DTensor) and isinstance(p, DTensor) and grad.placements != p.placements:
                grad = grad.redistribute(placements=p.placements)
            own.grad = None if grad is None else _local(grad)
            if own.grad is not None and self.grid.tensor > 1 and self.table[name].summed:
                dist.all_reduce(own.grad, group=self.mesh["tensor"].get_group())
        if not self.grid.sharded and self.grid.data > 1:
            group = self.mesh["data"].get_group()
            for own in self.own.parameters():
                if own.grad is not None:
                    dist.all_reduce(own.grad.div_(self.grid.data), group=group)

    @torch.no_grad()
    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """Clips the gradients of `own` by the norm of all ranks' together, which it returns as it was before."""
        grads = {name: p.grad for name, p in self.own.named_parameters() if p.grad is not None}
        norms = torch._foreach_norm(list(grads.values()), dtype=torch.float32)
        copies = torch.tensor([self.grid.copies(self.table[name]) for name in grads], device=norms[0].device)
        square = (torch.stack(norms).square() / copies).sum()
        dist.all_reduce(square, group=self.group)
        norm = square.sqrt()
        torch._foreach_mul_(
            list(grads.values()), (max_norm / (norm + 1e-6)).clamp(max=1.0)
        )  # as torch's clip_grad_norm_
        return norm


def _fully_shard(model: GPT, mesh: DeviceMesh, dtype: torch.dtype) -> None:
    """Shards block by block. Embeddings and the last LayerNorm belong to the root, which stays whole from its forward
    pass until the backward pass has ended: the loss needs the embedding again, outside of `GPT.trunk`. They are
    gathered in float32, as the residual stream is. GPUs gather a block in ``dtype``, its norms too: in a group of their
    own these would be gathered in the midst of what is compiled, which would come apart there. A CPU, whose LayerNorm
    takes no narrow weights, gathers float32."""
    narrows = mesh.device_type == "cuda" and dtype != torch.float32
    narrow = MixedPrecisionPolicy(
        param_dtype=dtype if narrows else None, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    for block in model.h:
        fully_shard(block, mesh=mesh, mp_policy=narrow)
    fully_shard(model, mesh=mesh)
    register_fsdp_forward_method(model, "trunk")
    model.trunk = _outside_inference(model.trunk)  # type: ignore[method-assign]


def _outside_inference(trunk: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wraps `GPT.trunk` to gather parameters without inference mode, whose tensors cannot be trained later."""

    @functools.wraps(trunk)
    def outside(*args: Any, **kwargs: Any) -> Tensor:
        if not torch.is_inference_mode_enabled():
            return trunk(*args, **kwargs)
        with torch.inference_mode(False), torch.no_grad():
            return trunk(*args, **kwargs)

    return outside


def _local(x: Tensor) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else x
