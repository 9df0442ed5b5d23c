"""A model whose parameters, gradients and optimizer state are sharded over all ranks.

torch's `fully_shard` (FSDP2; Zhao et al. 2023, arXiv 2304.11277) cuts each parameter into equal ranges of rows. It
gathers a block's parameters only while computing it. Each rank trains on different sequences.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

from gpt.config.model import GPTConfig
from gpt.model.decoder import GPT, RMSNorm, initialize
from gpt.parallel.gather import shard_rows


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
    """A model with only this rank's shards, uninitialized until `fill`.

    ``parameters`` has the shards by name, as plain tensors in the memory of ``model``'s parameters, so optimizers,
    kernels and snapshots need no code for sharding.
    """

    def __init__(self, config: GPTConfig, mesh: DeviceMesh, device: torch.device, dtype: torch.dtype) -> None:
        """Matrix products and gathered blocks have ``dtype``; parameters and gradient sums are float32."""
        self.mesh = mesh
        self.model = _on_meta(config)
        _fully_shard(self.model, mesh, dtype)
        self.model.to_empty(device=device)
        self.model.build_position_tables(device)
        # After an evaluation, `model.parameters()` would return the gathered parameters of the root.
        self._sharded: dict[str, Any] = dict(self.model.named_parameters())
        self.parameters = {name: nn.Parameter(p.detach().to_local()) for name, p in self._sharded.items()}

    @torch.no_grad()
    def fill(self, name: str, whole: Tensor) -> None:
        """Copies this rank's part of a full parameter into the model."""
        rows = shard_rows(len(whole), self.mesh.size(), self.mesh.get_local_rank())
        self.parameters[name].copy_(whole[rows])

    def abandon_backward(self) -> None:
        """Frees gathered weights, and gradients that were not reduced. The next forward pass starts from a clean state,
        even after an error."""
        if not isinstance(self.model, FSDPModule) or self.model._get_fsdp_state()._is_root is None:
            return  # No forward pass has run.
        getattr(self.model, "reset_iter_state", self.model.reshard)()  # Older versions of torch lack it.
        for module in self.model.modules():
            if isinstance(module, FSDPModule) and (group := module._get_fsdp_state()._fsdp_param_group) is not None:
                for param in group.fsdp_params:
                    if hasattr(param, "_unsharded_param"):
                        param.unsharded_param.grad = None

    def collect(self) -> None:
        """Moves the gradients of `model`, averaged over ranks, to `parameters`."""
        for name, p in self._sharded.items():
            self.parameters[name].grad, p.grad = p.grad.to_local(), None


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
