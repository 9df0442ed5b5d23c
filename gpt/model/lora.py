"""Low-rank adapters (Hu et al. 2021): W is frozen, and the linear map computes W + s · B A, where B A has rank R.

A map may be several matrices below each other: query, key and value; gate and up. Where the layout of the family stores
them apart (`GPTConfig.layout`), each of these M has an adapter of its own, as in PEFT. In memory those of a map share
two tensors: ``a`` has their A below each other, (M R, in), and ``b`` their B, (rows of all, R).
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpt.config import LORA_GROUPS, LORA_ROLES, GPTConfig
from gpt.errors import UserError
from gpt.model.decoder import GPT
from gpt.model.params import Parameter, Shape, named_parameters, parameters

# The roles by their rows of the GPT-3 table (`Parameter.matrices`).
_ROLES = {
    "Query": "query", "Key": "key", "Value-Up": "value", "Value-Down": "output",
    "Gate-Projection": "gate", "Up-Projection": "up", "Down-Projection": "down",
}  # fmt: skip


STORED_FUSED = ("gpt2", "gpt")  # layouts that store query, key and value as one tensor


@dataclass(frozen=True)
class AdaptedMatrix:
    """Rows of a linear map that have an adapter of their own: those of one role, or of all roles of a map that is
    stored as one tensor."""

    roles: tuple[str, ...]
    start: int
    rows: int


class LowRank(nn.Linear):
    """A linear map with its own weights, frozen, and an adapter for each of its ``matrices``."""

    def __init__(self, linear: nn.Linear, rank: int, scale: float, matrices: Sequence[AdaptedMatrix]) -> None:
        nn.Module.__init__(self)  # nn.Linear's own would make new weights
        self.in_features, self.out_features, self.scale = linear.in_features, linear.out_features, scale
        self.weight, self.bias = linear.weight, linear.bias
        self.rows = tuple((each.start, each.rows) for each in matrices)
        device = linear.weight.device
        self.a = nn.Parameter(torch.empty(len(matrices) * rank, linear.in_features, device=device))
        self.b = nn.Parameter(
            torch.zeros(sum(n for _, n in self.rows), rank, device=device)
        )  # nothing changes at first
        nn.init.kaiming_uniform_(self.a, a=math.sqrt(5))

    def forward(self, x: Tensor) -> Tensor:
        """(…, in) → (…, out)."""
        out: Tensor = _Adapted.apply(x, self.weight, self.bias, self.a, self.b, self.scale, self.rows)  # type: ignore[no-untyped-call]
        return out


class _Adapted(torch.autograd.Function):
    """x Wᵀ + s · (x Aᵀ) Bᵀ, with gradients for x, A and B. Autograd by itself would make tensors of the size of the
    output for the adapter's share and its scaling, forward and backward; here products add to what is there."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        a: Tensor,
        b: Tensor,
        scale: float,
        rows: tuple[tuple[int, int], ...],
    ) -> Tensor:
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
        flat = x.reshape(-1, x.size(-1)).to(dtype)
        a, wide = a.to(dtype), _spread(scale * b, rows, weight.size(0)).to(dtype)
        low = flat @ a.t()  # (n, M R)
        out = F.linear(flat, weight.to(dtype), None if bias is None else bias.to(dtype))
        out.addmm_(low, wide.t())
        ctx.save_for_backward(flat, low, weight, a, wide)
        ctx.scale, ctx.rows, ctx.shape, ctx.dtype = scale, rows, x.shape, x.dtype
        return out.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        flat, low, weight, a, wide = ctx.saved_tensors
        grad = grads[0].reshape(-1, weight.size(0)).to(flat.dtype)
        back = grad @ wide  # (n, M R)
        x = None
        if ctx.needs_input_grad[0]:
            x = (grad @ weight.to(grad.dtype)).addmm_(back, a).view(ctx.shape).to(ctx.dtype)
        b = ctx.scale * _gathered((grad.t() @ low).float(), ctx.rows)
        return x, None, None, (back.t() @ flat).float(), b, None, None


def _spread(b: Tensor, rows: tuple[tuple[int, int], ...], outs: int) -> Tensor:
    """The B of several matrices, (rows of all, R), as one (out, M R), which is 0 but for the rows and columns of
    each."""
    if len(rows) == 1 and len(b) == outs:
        return b
    rank, at = b.size(1), 0
    wide = b.new_zeros(outs, len(rows) * rank)
    for number, (start, n) in enumerate(rows):
        wide[start : start + n, number * rank : (number + 1) * rank] = b[at : at + n]
        at += n
    return wide


def _gathered(wide: Tensor, rows: tuple[tuple[int, int], ...]) -> Tensor:
    """The opposite of `_spread`."""
    rank = wide.size(1) // len(rows)
    return torch.cat(
        [wide[start : start + n, number * rank : (number + 1) * rank] for number, (start, n) in enumerate(rows)]
    )


def adapt(model: GPT, rank: int, alpha: float, targets: str = "all") -> list[nn.Parameter]:
    """Freezes a model, gives the linear maps of its blocks adapters, and returns these, which alone are trained. Uses
    torch's global generator."""
    model.requires_grad_(False)
    added = []
    for name, matrices in adapted(model.config, find_roles(targets, model.config)).items():
        parent, _, child = name.rpartition(".")
        adapter = LowRank(model.get_submodule(name), rank, alpha / rank, matrices)  # type: ignore[arg-type]
        setattr(model.get_submodule(parent), child, adapter)
        added += [adapter.a, adapter.b]
    return added


def adapters(model: GPT) -> dict[str, Tensor]:
    """The tensors of a model's adapters: ``h.0.attn.c_attn.a`` (M R, in), ``h.0.attn.c_attn.b`` (rows, R) …"""
    return {name: p.detach() for name, p in model.named_parameters() if name.rpartition(".")[2] in ("a", "b")}


def adapter_shapes(config: GPTConfig, rank: int, roles: Sequence[str]) -> dict[str, Shape]:
    """The shapes of `adapters` by name."""
    table, shapes = named_parameters(config), dict[str, Shape]()
    for name, matrices in adapted(config, roles).items():
        ins = table[f"{name}.weight"].shape[1]
        shapes |= {f"{name}.a": (len(matrices) * rank, ins), f"{name}.b": (sum(each.rows for each in matrices), rank)}
    return shapes


@torch.no_grad()
def merge(model: GPT, tensors: Mapping[str, Tensor], scale: float, roles: Sequence[str]) -> None:
    """Adds adapters, as `adapters` gives them, to the weights of a model that has none."""
    for name, matrices in adapted(model.config, roles).items():
        weight = model.get_submodule(name).weight
        assert isinstance(weight, Tensor)
        a, b = (tensors[f"{name}.{kind}"].to(weight.device) for kind in "ab")
        rows = tuple((each.start, each.rows) for each in matrices)
        weight += scale * (_spread(b, rows, len(weight)) @ a)


def adapted(config: GPTConfig, roles: Sequence[str]) -> dict[str, tuple[AdaptedMatrix, ...]]:
    """The linear maps that have adapters for these roles, by the names of their modules, each with its matrices."""
    found = {}
    for name, p in named_parameters(config).items():
        matrices = tuple(each for each in _matrices(p, config) if each.roles[0] in roles) if p.is_matrix else ()
        if matrices:
            found[name.removesuffix(".weight")] = matrices
    return found


def find_roles(targets: str, config: GPTConfig) -> tuple[str, ...]:
    """The roles that ``--lora-targets`` names, of a model of this shape. Raises `UserError` for one that it does not
    have, and for one that is stored in one tensor with others that are not named."""
    asked = targets.split(",")
    has = [each.roles for p in parameters(config) if p.is_matrix for each in _matrices(p, config)]
    named = {role for word in asked for role in LORA_GROUPS.get(word, (word,))}
    missing = [word for word in asked if word not in LORA_GROUPS and word not in sum(has, ())]
    if missing:
        raise UserError(f"lora-targets: this model has no {missing[0]}", f"it has {', '.join(sum(has, ()))}")
    for roles in has:
        if 0 < len(named & set(roles)) < len(roles):
            raise UserError(
                f"lora-targets: {', '.join(roles)} are a single tensor in {config.layout} and share an adapter",
                "name all of them, or none",
            )
    return tuple(role for role in LORA_ROLES if role in named and role in sum(has, ()))


def _matrices(p: Parameter, config: GPTConfig) -> list[AdaptedMatrix]:
    """The matrices of a linear map that have an adapter each: those fused in it where they are stored apart, else the
    whole of it."""
    roles = tuple(_ROLES[name] for name in p.matrices)
    if not p.fused or config.layout in STORED_FUSED:
        return [AdaptedMatrix(roles, 0, p.shape[0])]
    starts = itertools.accumulate(p.fused, initial=0)
    return [AdaptedMatrix((role,), start, rows) for role, start, rows in zip(roles, starts, p.fused, strict=False)]
