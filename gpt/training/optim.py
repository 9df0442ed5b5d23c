"""The optimizers: Muon for the matrices of the blocks with AdamW for the rest, or AdamW for all."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer

from gpt.config import USUAL_DECAY
from gpt.device import has_bfloat16_cores
from gpt.model.decoder import GPT
from gpt.model.params import named_parameters
from gpt.parallel.world import World

BETAS = (0.9, 0.95)  # GPT-3's, for AdamW
MOMENTUM = 0.95
# Newton–Schulz: x ← a x + b (x xᵀ) x + c (x xᵀ)² x drives all singular values towards 1; these coefficients do it
# fastest from anywhere in (0, 1], to within [0.7, 1.2] (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon).
# They take five iterations from ‖x‖ = 1, three from a nearer bound on them (benchmarks/defaults.md).
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
ITERATIONS = 3
# Of an update, before the rate: about AdamW's, so that one rate serves both (Liu et al. 2025, arXiv 2502.16982).
RMS = 0.2
EMBEDDING_DECAY = 2  # times that of the matrices, where that is more than usual (benchmarks/defaults.md)
NORM_RATE = 0.25  # of the rate, for the vectors of a model with RMSNorm beside Muon (benchmarks/defaults.md)


# Inductor's: torch 2.11 fails where it would fuse this update's loops in another order ("AssertionError").
AS_ORDERED: dict[str, Any] = {"loop_ordering_after_fusion": False}


class Muon(Optimizer):
    """Momentum whose matrices are orthogonalized before each update (Jordan et al. 2024).

    As `torch.optim.Muon` with ``adjust_lr_fn="match_rms_adamw"``, which takes the matrices one by one; here all of one
    shape go through the iteration at once: 16 of 128 by 128 in 4 ms instead of 16 on two cores, 24 of 384 in 105
    instead of 148. A group's ``fused`` are the rows of each of the matrices that lie below each other in one parameter:
    query, key and value. If ``found_inf`` is 1, a step changes nothing, as with torch's fused optimizers. The ranks of
    a ``world``, which have the same gradients, orthogonalize an equal share each, and gather the others'.
    """

    found_inf: Tensor | None = None  # 0 or 1, on the parameters' device

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        lr: float,
        weight_decay: float,
        dtype: torch.dtype,
        world: World | None = None,
    ) -> None:
        super().__init__(groups, {"lr": lr, "weight_decay": weight_decay, "momentum": MOMENTUM, "fused": ()})
        self.dtype, self.world = dtype, world or World()  # the dtype of the iteration
        self.compiled: Callable[..., None] | None = None  # `update`, compiled

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Updates every parameter that has a gradient."""
        taken = []
        for group in self.param_groups:
            if params := [p for p in group["params"] if p.grad is not None]:
                taken.append((group, params, [self._momentum(p) for p in params], [p.grad for p in params]))
        (self.compiled or self.update)(taken, self.found_inf)

    def compile(self) -> None:
        """Compiles `update`, and tries it without a change. A rate is a tensor then: each number would be compiled
        anew."""
        self.compiled = torch.compile(self.update, options=AS_ORDERED)
        for group in self.param_groups:
            group["lr"] = torch.zeros_like(torch.as_tensor(group["lr"]))
        self.found_inf = torch.ones((), device=self.param_groups[0]["params"][0].device)
        self.step()

    def uncompile(self) -> None:
        """Goes back to eager execution."""
        self.compiled = None

    def update(self, taken: list[tuple[dict[str, Any], Any, Any, Any]], found_inf: Tensor | None) -> None:
        """Updates parameters of each group, of which momenta and gradients are given."""
        updates: list[tuple[Tensor, Tensor, dict[str, Any]]] = []
        applied = 1.0 if found_inf is None else 1 - found_inf
        for group, params, momenta, grads in taken:
            if found_inf is not None:  # the momentum in the gradient's place leaves the momentum as it is
                grads = [torch.where(found_inf > 0, m, g) for m, g in zip(momenta, grads, strict=True)]
            torch._foreach_lerp_(momenta, grads, 1 - group["momentum"])
            directions = torch._foreach_lerp(grads, momenta, group["momentum"])  # Nesterov's
            torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"] * applied)
            updates += [(p, direction, group) for p, direction in zip(params, directions, strict=True)]
        self.apply(updates, applied)

    def apply(self, updates: Sequence[tuple[Tensor, Tensor, dict[str, Any]]], applied: float | Tensor) -> None:
        """Orthogonalizes each parameter's update and subtracts it, times ``applied``, which is 0 or 1."""
        stacks: dict[tuple[int, int], list[tuple[Tensor, Tensor, float | Tensor]]] = defaultdict(list)
        for p, update, group in updates:
            for matrix, part in zip(matrices(p, group["fused"]), matrices(update, group["fused"]), strict=True):
                wide = matrix if matrix.size(0) <= matrix.size(1) else matrix.T
                rate = group["lr"] * RMS * math.sqrt(max(matrix.shape))
                stacks[wide.shape[0], wide.shape[1]].append((wide, part if wide is matrix else part.T, rate))
        for stack in stacks.values():
            directions = self._orthogonalized([part.to(self.dtype) for _, part, _ in stack])
            for (matrix, _, rate), direction in zip(stack, directions * applied, strict=True):
                if isinstance(rate, Tensor):
                    matrix.addcmul_(direction, rate, value=-1)
                else:
                    matrix.sub_(direction, alpha=rate)

    def _orthogonalized(self, updates: list[Tensor]) -> Tensor:
        """Returns the orthogonalized updates, (n, rows, columns), of which each rank computes an equal share."""
        share = -(-len(updates) // self.world.size)
        first = share * self.world.rank
        mine = [updates[min(n, len(updates) - 1)] for n in range(first, first + share)]
        return self.world.all_gather(orthogonalize(torch.stack(mine)))[: len(updates)]

    def _momentum(self, p: Tensor) -> Tensor:
        if "momentum" not in self.state[p]:
            self.state[p]["momentum"] = torch.zeros_like(p)
        momentum: Tensor = self.state[p]["momentum"]
        return momentum


def orthogonalize(x: Tensor) -> Tensor:
    """Returns about the nearest semi-orthogonal matrices of (n, rows, columns), which have no more rows than
    columns."""
    a, b, c = NEWTON_SCHULZ
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    gram = x @ x.mT
    bound = gram.norm(dim=(1, 2), keepdim=True) + 1e-7  # √Σσ⁴, which is nearer to the largest σ² than Σσ² = 1
    x, gram = x.mul_(bound.rsqrt()), gram.div_(bound)
    for at in range(ITERATIONS):
        gram = x @ x.mT if at else gram
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


def matrices(x: Tensor, fused: tuple[int, ...]) -> Sequence[Tensor]:
    """The matrices that lie below each other in a parameter, of ``fused`` rows each."""
    return torch.split(x, list(fused)) if fused else [x]


def orthogonalize_each(updates: Sequence[Tensor]) -> list[Tensor]:
    """`orthogonalize` of matrices of any shapes, all of one shape at once."""
    found, alike = list(updates), defaultdict(list)
    for at, each in enumerate(updates):
        alike[each.shape].append(at)
    for shape, places in alike.items():
        stack = torch.stack([updates[at] for at in places])
        done = orthogonalize(stack) if shape[0] <= shape[1] else orthogonalize(stack.mT).mT
        for at, direction in zip(places, done, strict=True):
            found[at] = direction
    return found


# The state that each keeps of a parameter.
STATE: dict[type[Optimizer], tuple[str, ...]] = {AdamW: ("step", "exp_avg", "exp_avg_sq"), Muon: ("momentum",)}


def state_keys(optimizer: Optimizer) -> tuple[str, ...]:
    """The keys of an optimizer's state of a parameter."""
    return next(keys for kind, keys in STATE.items() if isinstance(optimizer, kind))


class Optimizers:
    """The optimizers of a run, which share one learning rate."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self.optimizers = list(optimizers)
        self._of = {p: each for each in self.optimizers for group in each.param_groups for p in group["params"]}

    def set_lr(self, lr: float) -> None:
        """Sets the learning rate of every group, of which one may have a ``rate`` that is less than the others'."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                rate = lr * group.get("rate", 1.0)
                group["lr"] = group["lr"].fill_(rate) if isinstance(group["lr"], Tensor) else rate

    def step(self, skip: Tensor) -> None:
        """Steps every optimizer; a no-op where ``skip`` is true, which is decided on the device."""
        if skip.device.type == "mps" and skip.item():  # its fused AdamW takes no notice of ``found_inf``
            return
        for optimizer in self.optimizers:
            optimizer.found_inf = skip.float()  # type: ignore[attr-defined]  # as GradScaler sets it for fused ones
            optimizer.step()

    def keep_rates_on(self, device: torch.device) -> None:
        """Keeps the learning rates on a GPU, where a CUDA graph reads them."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group.update(lr=torch.zeros((), device=device), capturable=True)

    def compile(self) -> None:
        """Compiles what is many kernels, Muon's update, of a process by itself on a GPU."""
        for each in self.optimizers:
            if type(each) is Muon and each.world.size == 1 and each.param_groups[0]["params"][0].is_cuda:
                each.compile()

    def uncompile(self) -> None:
        """Goes back to eager execution."""
        for each in self.optimizers:
            if isinstance(each, Muon):
                each.uncompile()

    def zero_grad(self) -> None:
        """Frees all gradients."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)

    def state(self, model: GPT) -> dict[str, Tensor]:
        """The optimizers' state by parameter and key, as ``h.0.ln_1.weight.exp_avg``."""
        return {
            f"{name}.{key}": self._of[p].state[p][key]
            for name, p in model.named_parameters()
            if p.requires_grad
            for key in state_keys(self._of[p])
            if key in self._of[p].state[p]
        }

    def shapes(self, model: GPT, whole: Mapping[str, tuple[int, ...]] | None = None) -> dict[str, tuple[int, ...]]:
        """The shapes of `state` after a step, for parameters of their own shapes or those of ``whole``."""
        return {
            f"{name}.{key}": () if key == "step" else tuple(p.shape) if whole is None else whole[name]
            for name, p in model.named_parameters()
            if p.requires_grad
            for key in state_keys(self._of[p])
        }

    def restore(self, model: GPT, state: Mapping[str, Tensor]) -> None:
        """Sets `state`; what ``state`` does not have is dropped."""
        for name, p in model.named_parameters():
            if p.requires_grad:
                optimizer = self._of[p]
                keys = [key for key in state_keys(optimizer) if f"{name}.{key}" in state]
                optimizer.state[p] = {key: state[f"{name}.{key}"].to(p.device, copy=True) for key in keys}


def make_optimizer(
    model: GPT,
    kind: Literal["muon", "adamw"],
    weight_decay: float,
    dtype: torch.dtype = torch.float32,
    world: World | None = None,
    muon: Callable[..., Muon] = Muon,
) -> Optimizers:
    """AdamW (Loshchilov & Hutter 2019) with GPT-3's betas, fused in one kernel; under ``muon`` for all but the matrices
    of the blocks. Biases and norms are not decayed, and embeddings under ``muon`` only by a decay above the usual one,
    but then twice. ``dtype`` is that of Muon's iteration, which the ranks of a ``world`` share.
    """
    table = named_parameters(model.config)
    vectors: list[Tensor] = []
    embeddings: list[Tensor] = []
    fused: dict[tuple[int, ...], list[Tensor]] = defaultdict(list)
    for name, p in model.named_parameters():
        if table[name].is_matrix:
            fused[table[name].fused].append(p)
        else:
            (embeddings if table[name].is_decayed else vectors).append(p)
    if kind == "adamw":
        return Optimizers([_adamw([*embeddings, *(p for some in fused.values() for p in some)], vectors, weight_decay)])
    groups = [{"params": params, "fused": rows} for rows, params in fused.items()]
    rate = NORM_RATE if model.config.norm == "rmsnorm" else 1.0
    adamw = _adamw(embeddings, vectors, EMBEDDING_DECAY * weight_decay if weight_decay > USUAL_DECAY else 0.0, rate)
    if dtype == torch.float16:  # gradients lie below its least numbers
        dtype = torch.bfloat16 if has_bfloat16_cores(model.wte.weight.device) else torch.float32
    return Optimizers([muon(groups, 0.0, weight_decay, dtype, world), adamw])


def _adamw(decayed: Sequence[Tensor], vectors: Sequence[Tensor], weight_decay: float, rate: float = 1.0) -> AdamW:
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0, "rate": rate}]
    return AdamW([group for group in groups if group["params"]], lr=0.0, betas=BETAS, eps=1e-8, fused=True)
