"""The optimizers: AdamW, or Muon for the matrices of the blocks and AdamW for the rest."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer

from gpt.config.device import has_bfloat16_cores
from gpt.config.train import DEFAULT_WEIGHT_DECAY
from gpt.model.decoder import GPT
from gpt.model.params import named_parameters
from gpt.parallel.gather import Exchange

BETAS = (0.9, 0.95)  # AdamW's betas in GPT-3
MOMENTUM = 0.95
# Newton–Schulz: x ← a x + b (x xᵀ) x + c (x xᵀ)² x drives singular values towards 1. These coefficients move them from
# (0, 1] into [0.7, 1.2] fastest (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon). Five iterations are
# needed if ‖x‖ = 1, but only three with the tighter bound of `orthogonalize` (benchmarks/defaults.md).
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
ITERATIONS = 3
# The RMS of Muon's updates. AdamW's updates have about the same RMS, so both optimizers can share a learning rate (Liu
# et al. 2025, arXiv 2502.16982).
UPDATE_RMS = 0.2
# With Muon, embeddings decay twice as fast as matrices if the weight decay exceeds the default
# (benchmarks/defaults.md).
EMBEDDING_DECAY = 2
# With Muon, the vectors of an RMSNorm model train at a quarter of the learning rate (benchmarks/defaults.md).
NORM_LR_FACTOR = 0.25


# Reordering the loops of Muon's update raises AssertionError in Inductor (torch 2.11).
INDUCTOR_OPTIONS: dict[str, Any] = {"loop_ordering_after_fusion": False}


class Muon(Optimizer):
    """SGD with momentum and orthogonalized updates (Jordan et al. 2024).

    Scales updates as `torch.optim.Muon` does with ``adjust_lr_fn="match_rms_adamw"``. Orthogonalizes matrices of the
    same shape together, with fewer Newton–Schulz iterations (benchmarks/defaults.md). A group's ``rows`` lists the
    number of rows of each matrix of a parameter, because some are fused (query, key and value). If ``found_inf`` is 1,
    a step changes nothing, as with torch's fused optimizers. With several ranks, ``exchange`` divides the matrices
    among them.
    """

    found_inf: Tensor | None = None  # a tensor on the parameters' device

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        lr: float,
        weight_decay: float,
        dtype: torch.dtype,
        exchange: Exchange | None = None,
    ) -> None:
        super().__init__(groups, {"lr": lr, "weight_decay": weight_decay, "momentum": MOMENTUM})
        self.dtype, self.exchange = dtype, exchange or Exchange()  # The Newton–Schulz iteration computes in ``dtype``.
        self.compiled: Callable[..., None] | None = None

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Updates every parameter that has a gradient."""
        groups = []
        for group in self.param_groups:
            if params := [p for p in group["params"] if p.grad is not None]:
                groups.append((group, params, [self._momentum(p) for p in params], [p.grad for p in params]))
        (self.compiled or self.update)(groups, self.found_inf)

    def compile(self) -> None:
        """Compiles `update` and runs it once without effect. Learning rates become tensors, because every new float
        would cause a recompilation."""
        self.compiled = torch.compile(self.update, options=INDUCTOR_OPTIONS)
        for group in self.param_groups:
            group["lr"] = torch.zeros_like(torch.as_tensor(group["lr"]))
        self.found_inf = torch.ones((), device=self.param_groups[0]["params"][0].device)
        self.step()

    def update(self, groups: list[tuple[dict[str, Any], Any, Any, Any]], found_inf: Tensor | None) -> None:
        """Updates the parameters of each (group, parameters, momenta, gradients)."""
        stacks: dict[tuple[int, int], list[tuple[Tensor, Tensor, list[int], float | Tensor]]] = defaultdict(list)
        scale = 1.0 if found_inf is None else 1 - found_inf
        for group, params, momenta, grads in groups:
            # If ``found_inf`` is 1, average the momentum with itself, which leaves it unchanged.
            if found_inf is not None:
                grads = [torch.where(found_inf > 0, m, g) for m, g in zip(momenta, grads, strict=True)]
            torch._foreach_lerp_(momenta, grads, 1 - group["momentum"])
            updates = torch._foreach_lerp(grads, momenta, group["momentum"])  # Nesterov momentum
            torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"] * scale)
            counts = self.exchange.count_rows(group["rows"])
            own = [rows[self.exchange.shard] for rows in counts]
            for p, update in zip(params, updates, strict=True):
                for matrix, part, rows in zip(torch.split(p, own), torch.split(update, own), counts, strict=True):
                    shape = (sum(rows), p.size(1))
                    step_size = group["lr"] * update_scale(shape)
                    stacks[min(shape), max(shape)].append((matrix, part, rows, step_size))
        for stack in stacks.values():
            parts = [part.to(self.dtype) for _, part, _, _ in stack]
            directions = self.exchange(parts, [rows for _, _, rows, _ in stack], partial(find_directions, scale=scale))
            for (matrix, _, _, step_size), direction in zip(stack, directions, strict=True):
                if isinstance(step_size, Tensor):
                    matrix.addcmul_(direction, step_size, value=-1)
                else:
                    matrix.sub_(direction, alpha=step_size)

    def _momentum(self, p: Tensor) -> Tensor:
        if "momentum" not in self.state[p]:
            self.state[p]["momentum"] = torch.zeros_like(p)
        momentum: Tensor = self.state[p]["momentum"]
        return momentum


def update_scale(shape: tuple[int, int]) -> float:
    """Returns the factor that gives a matrix's orthogonalized update the RMS `UPDATE_RMS`."""
    return UPDATE_RMS * math.sqrt(max(shape))


def find_directions(updates: Sequence[Tensor], scale: float | Tensor) -> list[Tensor]:
    """Returns the orthogonalized updates, times ``scale``. They have the same shape, possibly transposed."""
    tall = [update.size(0) > update.size(1) for update in updates]
    stack = torch.stack([update.T if is_tall else update for update, is_tall in zip(updates, tall, strict=True)])
    directions = orthogonalize(stack) * scale
    return [direction.T if is_tall else direction for direction, is_tall in zip(directions, tall, strict=True)]


def orthogonalize(x: Tensor) -> Tensor:
    """Approximates the semi-orthogonal matrices nearest to x, (n, rows, columns), with rows ≤ columns."""
    a, b, c = NEWTON_SCHULZ
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    gram = x @ x.mT
    bound = gram.norm(dim=(1, 2), keepdim=True) + 1e-7  # √Σσ⁴ is a tighter bound on the largest σ² than Σσ² = 1.
    x, gram = x.mul_(bound.rsqrt()), gram.div_(bound)
    for iteration in range(ITERATIONS):
        gram = x @ x.mT if iteration else gram
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


# The per-parameter state of each optimizer.
STATE_KEYS: dict[type[Optimizer], tuple[str, ...]] = {AdamW: ("step", "exp_avg", "exp_avg_sq"), Muon: ("momentum",)}


def state_keys(optimizer: Optimizer) -> tuple[str, ...]:
    """The keys of an optimizer's per-parameter state."""
    return next(keys for kind, keys in STATE_KEYS.items() if isinstance(optimizer, kind))


class Optimizers:
    """The optimizers of a run, with a shared learning rate. ``parameters`` are the tensors they train, by name."""

    def __init__(self, optimizers: Sequence[Optimizer], parameters: Mapping[str, Tensor]) -> None:
        self.optimizers, self.parameters = list(optimizers), parameters
        self._by_parameter = {p: opt for opt in self.optimizers for group in opt.param_groups for p in group["params"]}

    def set_lr(self, lr: float) -> None:
        """Sets every group's learning rate, scaled by the group's ``rate``."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group_lr = lr * group.get("rate", 1.0)
                group["lr"] = group["lr"].fill_(group_lr) if isinstance(group["lr"], Tensor) else group_lr

    def step(self, skip: Tensor) -> None:
        """Steps every optimizer. The device itself skips the step if ``skip`` is true."""
        if skip.device.type == "mps" and skip.item():  # Fused AdamW ignores ``found_inf`` on MPS.
            return
        for optimizer in self.optimizers:
            optimizer.found_inf = skip.float()  # type: ignore[attr-defined]  # GradScaler also sets this attribute.
            optimizer.step()

    def keep_lr_on(self, device: torch.device) -> None:
        """Keeps the learning rates on a GPU for CUDA graphs."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group.update(lr=torch.zeros((), device=device), capturable=True)

    def compile(self) -> None:
        """Compiles Muon, which has many kernels, in a single process on a GPU."""
        muon = self.optimizers[0]
        if isinstance(muon, Muon) and muon.exchange.is_local and muon.param_groups[0]["params"][0].is_cuda:
            muon.compile()

    def uncompile(self) -> None:
        """Returns to eager execution."""
        for optimizer in self.optimizers:
            if isinstance(optimizer, Muon):
                optimizer.compiled = None

    def zero_grad(self) -> None:
        """Frees all gradients."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)

    def state(self) -> dict[str, Tensor]:
        """The optimizers' state, with names such as ``h.0.ln_1.weight.exp_avg``."""
        return {
            f"{name}.{key}": self._by_parameter[p].state[p][key]
            for name, p in self.parameters.items()
            for key in state_keys(self._by_parameter[p])
            if key in self._by_parameter[p].state[p]
        }

    def shapes(self, full: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        """The shapes of `state` after a step. ``full`` has the shapes of the parameters, which can be sharded."""
        return {
            f"{name}.{key}": () if key == "step" else full[name]
            for name, p in self.parameters.items()
            for key in state_keys(self._by_parameter[p])
        }

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Replaces the optimizers' state with ``state``."""
        for name, p in self.parameters.items():
            optimizer = self._by_parameter[p]
            keys = [key for key in state_keys(optimizer) if f"{name}.{key}" in state]
            optimizer.state[p] = {key: state[f"{name}.{key}"].to(p.device, copy=True) for key in keys}


def make_optimizer(
    model: GPT,
    kind: Literal["muon", "adamw"],
    weight_decay: float,
    dtype: torch.dtype = torch.float32,
    exchange: Exchange | None = None,
    parameters: Mapping[str, Tensor] | None = None,
) -> Optimizers:
    """Returns fused AdamW (Loshchilov & Hutter 2019), or Muon for the matrices of the blocks and AdamW for the rest.

    Biases and norms have no weight decay. With Muon, embeddings decay twice as fast as matrices if ``weight_decay``
    exceeds `DEFAULT_WEIGHT_DECAY`, else not at all. Muon orthogonalizes in ``dtype``. ``exchange`` divides its work
    among ranks. ``parameters`` are the shards of a sharded ``model``.
    """
    table = named_parameters(model.config)
    parameters = dict(model.named_parameters()) if parameters is None else parameters
    vectors: list[Tensor] = []
    embeddings: list[Tensor] = []
    matrices: dict[tuple[int, ...], list[Tensor]] = defaultdict(list)
    for name, p in parameters.items():
        if table[name].is_matrix:
            matrices[table[name].fused or table[name].shape[:1]].append(p)
        else:
            (embeddings if table[name].is_decayed else vectors).append(p)
    if kind == "adamw":
        decayed = [*embeddings, *(p for group in matrices.values() for p in group)]
        return Optimizers([_adamw(decayed, vectors, weight_decay)], parameters)
    groups = [{"params": params, "rows": rows} for rows, params in matrices.items()]
    lr_factor = NORM_LR_FACTOR if model.config.norm == "rmsnorm" else 1.0
    adamw = _adamw(
        embeddings, vectors, EMBEDDING_DECAY * weight_decay if weight_decay > DEFAULT_WEIGHT_DECAY else 0.0, lr_factor
    )
    if dtype == torch.float16:  # Gradients underflow in float16.
        dtype = torch.bfloat16 if has_bfloat16_cores(model.wte.weight.device) else torch.float32
    return Optimizers([Muon(groups, 0.0, weight_decay, dtype, exchange), adamw], parameters)


def _adamw(decayed: Sequence[Tensor], vectors: Sequence[Tensor], weight_decay: float, lr_factor: float = 1.0) -> AdamW:
    groups = [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": vectors, "weight_decay": 0.0, "rate": lr_factor},
    ]
    return AdamW([group for group in groups if group["params"]], lr=0.0, betas=BETAS, eps=1e-8, fused=True)
