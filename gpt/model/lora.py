"""LoRA, low-rank adapters (Hu et al. 2021): a linear map uses W + s · B A, where W is frozen and B A has rank R.

A fused map stacks M matrices: query, key and value, or gate and up. If the checkpoint's layout stores them separately
(`GPTConfig.layout`), every matrix has an adapter, as in PEFT. In memory, ``a``, (M R, in), stacks a map's A matrices,
and ``b``, (total rows, R), stacks its B matrices.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpt.config.model import GPTConfig
from gpt.config.train import LORA_GROUPS, LORA_ROLES
from gpt.model.decoder import GPT
from gpt.model.params import Parameter, Shape, named_parameters, parameters
from gpt.model.quantize import QuantizedLinear, Restorable
from gpt.system.errors import UserError

# Role of each row of the GPT-3 table (`Parameter.matrices`).
_ROLES = {
    "Query": "query", "Key": "key", "Value-Up": "value", "Value-Down": "output",
    "Gate-Projection": "gate", "Up-Projection": "up", "Down-Projection": "down",
}  # fmt: skip


STORED_FUSED = ("gpt2", "gpt")  # Layouts that store query, key and value as one tensor.


@dataclass(frozen=True)
class AdaptedMatrix:
    """Rows of a linear map that share one adapter. Roles share an adapter if they are stored as one tensor."""

    roles: tuple[str, ...]
    start: int
    rows: int


class LowRank(nn.Linear):
    """A frozen linear map with an adapter for each of its ``matrices``. A quantized map is restored for every use."""

    weight: Any  # a tensor or `Restorable`
    bias: Any

    def __init__(
        self, linear: nn.Linear | QuantizedLinear, rank: int, scale: float, matrices: Sequence[AdaptedMatrix],
        device: torch.device | None = None,
    ) -> None:  # fmt: skip
        nn.Module.__init__(self)  # nn.Linear.__init__ would allocate new weights.
        self.weight, self.bias, self.scale = linear.weight, linear.bias, scale
        self.out_features, self.in_features = linear.weight.shape
        self.rows = tuple((matrix.start, matrix.rows) for matrix in matrices)
        self.a = nn.Parameter(torch.empty(len(matrices) * rank, self.in_features, device=device))
        # B starts at 0, so the adapter changes nothing at first.
        self.b = nn.Parameter(torch.zeros(sum(n for _, n in self.rows), rank, device=device))
        if matrices:
            nn.init.kaiming_uniform_(self.a, a=math.sqrt(5))

    def forward(self, x: Tensor) -> Tensor:
        """Applies the adapted map: (…, in) → (…, out)."""
        out: Tensor = _AdaptedLinear.apply(x, self.weight, self.bias, self.a, self.b, self.scale, self.rows)  # type: ignore[no-untyped-call]
        return out


class _AdaptedLinear(torch.autograd.Function):
    """x Wᵀ + s · (x Aᵀ) Bᵀ with gradients for x, A and B. Matrix products accumulate into existing tensors; autograd
    would allocate output-sized tensors for the adapter's output and its scaling."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | Restorable,
        bias: Tensor | None,
        a: Tensor,
        b: Tensor,
        scale: float,
        rows: tuple[tuple[int, int], ...],
    ) -> Tensor:
        device_type = x.device.type
        dtype = weight.dtype if isinstance(weight, Tensor) else x.dtype
        dtype = torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else dtype
        flat = x.reshape(-1, x.size(-1)).to(dtype)
        a, spread_b = a.to(dtype), _spread_b(scale * b, rows, weight.shape[0]).to(dtype)
        low_rank = flat @ a.t()  # (n, M R)
        out = F.linear(flat, _restore(weight, dtype), None if bias is None else bias.to(dtype))
        out.addmm_(low_rank, spread_b.t())
        ctx.save_for_backward(flat, low_rank, a, spread_b)
        ctx.weight, ctx.scale, ctx.rows, ctx.shape, ctx.dtype = weight, scale, rows, x.shape, x.dtype
        return out.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        flat, low_rank, a, spread_b = ctx.saved_tensors
        grad = grads[0].reshape(-1, len(spread_b)).to(flat.dtype)
        grad_low_rank = grad @ spread_b  # (n, M R)
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = (grad @ _restore(ctx.weight, grad.dtype)).addmm_(grad_low_rank, a).view(ctx.shape).to(ctx.dtype)
        if not ctx.rows:
            return grad_x, *[None] * 6
        grad_b = ctx.scale * _collect_b((grad.t() @ low_rank).float(), ctx.rows)
        return grad_x, None, None, (grad_low_rank.t() @ flat).float(), grad_b, None, None


def _restore(weight: Tensor | Restorable, dtype: torch.dtype) -> Tensor:
    return weight.to(dtype) if isinstance(weight, Tensor) else weight.dequantize(dtype)


def _spread_b(b: Tensor, rows: tuple[tuple[int, int], ...], out_features: int) -> Tensor:
    """Places the stacked B matrices, (total rows, R), in a block matrix (out, M R) of zeros."""
    if len(rows) == 1 and len(b) == out_features:
        return b
    rank, offset = b.size(1), 0
    block_matrix = b.new_zeros(out_features, len(rows) * rank)
    for index, (start, n) in enumerate(rows):
        block_matrix[start : start + n, index * rank : (index + 1) * rank] = b[offset : offset + n]
        offset += n
    return block_matrix


def _collect_b(block_matrix: Tensor, rows: tuple[tuple[int, int], ...]) -> Tensor:
    """Inverts `_spread_b`."""
    rank = block_matrix.size(1) // len(rows)
    return torch.cat(
        [block_matrix[start : start + n, index * rank : (index + 1) * rank] for index, (start, n) in enumerate(rows)]
    )


def adapt(model: GPT, rank: int, alpha: float, targets: str = "all") -> list[nn.Parameter]:
    """Freezes a model, adds adapters to its blocks' linear maps and returns the adapter parameters. Draws their initial
    values from torch's global generator."""
    model.requires_grad_(False)
    adapter_parameters, device = [], next(model.parameters()).device
    selected = select_adapted(model.config, find_roles(targets, model.config))
    quantized = [name for name, each in model.named_modules() if isinstance(each, QuantizedLinear)]
    for name in [*selected, *(name for name in quantized if name not in selected)]:
        matrices = selected.get(name, ())
        adapter = LowRank(model.get_submodule(name), rank, alpha / rank, matrices, device)  # type: ignore[arg-type]
        model.set_submodule(name, adapter)
        if matrices:
            adapter_parameters += [adapter.a, adapter.b]
        else:
            adapter.requires_grad_(False)
    return adapter_parameters


def adapters(model: GPT) -> dict[str, Tensor]:
    """Returns a model's adapters: ``h.0.attn.c_attn.a`` (M R, in), ``h.0.attn.c_attn.b`` (total rows, R) …"""
    return {name: p.detach() for name, p in model.named_parameters() if name.rpartition(".")[2] in ("a", "b")}


def adapter_shapes(config: GPTConfig, rank: int, roles: Sequence[str]) -> dict[str, Shape]:
    """Returns the shapes of the tensors in `adapters`."""
    table, shapes = named_parameters(config), dict[str, Shape]()
    for name, matrices in select_adapted(config, roles).items():
        in_features = table[f"{name}.weight"].shape[1]
        shapes |= {
            f"{name}.a": (len(matrices) * rank, in_features),
            f"{name}.b": (sum(matrix.rows for matrix in matrices), rank),
        }
    return shapes


@torch.no_grad()
def merge(model: GPT, tensors: Mapping[str, Tensor], scale: float, roles: Sequence[str]) -> None:
    """Merges ``tensors``, as returned by `adapters`, into the weights of a model without adapters."""
    for name, matrices in select_adapted(model.config, roles).items():
        weight = model.get_submodule(name).weight
        assert isinstance(weight, Tensor)
        a, b = (tensors[f"{name}.{factor}"].to(weight.device) for factor in "ab")
        rows = tuple((matrix.start, matrix.rows) for matrix in matrices)
        weight += scale * (_spread_b(b, rows, len(weight)) @ a)


def select_adapted(config: GPTConfig, roles: Sequence[str]) -> dict[str, tuple[AdaptedMatrix, ...]]:
    """Returns the matrices to adapt for ``roles``, by module name."""
    linears = {}
    for name, p in named_parameters(config).items():
        matrices = tuple(m for m in _adapted_matrices(p, config) if m.roles[0] in roles) if p.is_matrix else ()
        if matrices:
            linears[name.removesuffix(".weight")] = matrices
    return linears


def find_roles(targets: str, config: GPTConfig) -> tuple[str, ...]:
    """Returns the roles that ``--lora-targets`` selects. Raises `UserError` if the model lacks a role, or if
    ``targets`` has only some of the roles that share a tensor."""
    names = targets.split(",")
    available = [matrix.roles for p in parameters(config) if p.is_matrix for matrix in _adapted_matrices(p, config)]
    selected_roles = {role for name in names for role in LORA_GROUPS.get(name, (name,))}
    missing = [name for name in names if name not in LORA_GROUPS and name not in sum(available, ())]
    if missing:
        raise UserError(f"lora-targets: this model has no {missing[0]}", f"it has {', '.join(sum(available, ()))}")
    for roles in available:
        if 0 < len(selected_roles & set(roles)) < len(roles):
            raise UserError(
                f"lora-targets: {', '.join(roles)} are a single tensor in {config.layout} and share an adapter",
                "name all of them, or none",
            )
    return tuple(role for role in LORA_ROLES if role in selected_roles and role in sum(available, ()))


def _adapted_matrices(p: Parameter, config: GPTConfig) -> list[AdaptedMatrix]:
    """Returns a linear map's matrices if the layout stores them separately, else the whole map."""
    roles = tuple(_ROLES[name] for name in p.matrices)
    if not p.fused or config.layout in STORED_FUSED:
        return [AdaptedMatrix(roles, 0, p.shape[0])]
    starts = itertools.accumulate(p.fused, initial=0)
    return [AdaptedMatrix((role,), start, rows) for role, start, rows in zip(roles, starts, p.fused, strict=False)]
