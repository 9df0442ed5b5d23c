"""Loss and gradients of a micro-batch as one compiled program for a CPU.

Forward and backward pass are traced together, so that autograd has no part in a step: Inductor fuses what lies between
the matrix products, and torch calls these one after the other.
"""

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from gpt import programs
from gpt.device import Compute
from gpt.model import decoder, loss
from gpt.model.decoder import GPT

GELU = (0.7978845608028654, 0.044715)  # √(2/π), and the weight of the cube, in GELU's tanh form


class GradientProgram:
    """The program of an objective's gradients for inputs of one shape, (rows, T)."""

    def __init__(self, objective: nn.Module, model: GPT, compute: Compute, rows: int, note: programs.Note) -> None:
        self.shape = (rows, model.config.block_size)
        self.params = list(objective.parameters())
        self.inputs = [*(p.detach() for p in self.params), *objective.buffers()]
        self.embedding = next(at for at, p in enumerate(self.params) if p is model.wte.weight)
        code = [Path(module.__file__ or "").read_bytes() for module in (decoder, loss)] + [Path(__file__).read_bytes()]
        key = (code, model.config, self.shape, compute.dtype_name)
        trace = functools.partial(_traced, objective, model, compute, self.shape)
        self.run = programs.find(key, trace, note, "the step")

    def __call__(self, x: Tensor, y: Tensor, counted: Tensor) -> Tensor:
        """Adds the gradients of the loss of inputs x and targets y, (rows, T), divided by ``counted``. Returns that
        loss."""
        x, y = x.contiguous(), y.contiguous()  # a batch's are parts of one array
        total, looked_up, *grads = self.run([*self.inputs, x, y, counted])
        table = grads[self.embedding]
        table += torch.ops.aten.embedding_dense_backward(looked_up, x, len(table), -1, False)
        if self.params[0].grad is None:
            for p, grad in zip(self.params, grads, strict=True):
                p.grad = grad
        else:
            torch._foreach_add_([p.grad for p in self.params if p.grad is not None], grads)
        return total


def _traced(objective: nn.Module, model: GPT, compute: Compute, shape: tuple[int, int]) -> ExportedProgram:
    """The forward and backward pass as one graph of torch's operators: parameters, buffers, inputs, targets and the
    number of targets → the mean loss, the gradient of the rows that were looked up, and those of the parameters without
    it. A program would add these rows up by threads in any order, and give other sums each time."""
    from torch.fx.experimental.proxy_tensor import make_fx

    names, buffers = ([name for name, _ in each()] for each in (objective.named_parameters, objective.named_buffers))

    def gradients(params: list[Tensor], tables: list[Tensor], x: Tensor, y: Tensor, counted: Tensor) -> list[Tensor]:
        rows: list[Tensor] = []

        def look_up(module: nn.Module, args: object, out: Tensor) -> Tensor:
            rows.append(out.detach().requires_grad_())
            return rows[0]

        with compute.autocast(), model.wte.register_forward_hook(look_up):
            given = dict(zip([*names, *buffers], [*params, *tables], strict=True))
            mean: Tensor = torch.func.functional_call(objective, given, (x, y)) / counted
        return [mean.detach(), *torch.autograd.grad(mean, [*rows, *params], materialize_grads=True)]

    params, tables = [p.detach().clone() for p in objective.parameters()], list(objective.buffers())
    x, y = (torch.zeros(shape, dtype=torch.long) for _ in range(2))  # two tensors, since one would be one input
    inputs = (tables, x, y, torch.ones((), dtype=torch.long))
    with mock.patch.object(torch.compiler, "_is_compiling_flag", True):
        trained = [p.clone().requires_grad_() for p in params]
        graph: Any = make_fx(gradients, _DECOMPOSED, tracing_mode="fake")(trained, *inputs)
    with torch.no_grad():
        return torch.export.export(graph, (params, *inputs), strict=False)


def _gelu(x: Tensor, *, approximate: str = "none") -> Tensor:
    """x σ(2u), which is GELU's tanh form: a sigmoid takes half of a tanh's time."""
    assert approximate == "tanh"
    wide = x.float()
    return (wide * _gate(wide)).to(x.dtype)


def _gelu_backward(grad: Tensor, x: Tensor, *, approximate: str = "none") -> Tensor:
    assert approximate == "tanh"
    wide, (scale, cube) = x.float(), GELU
    gate = _gate(wide)
    slope = gate + wide * gate * (1 - gate) * (2 * scale * (1 + 3 * cube * wide * wide))
    return (grad.float() * slope).to(x.dtype)


def _gate(x: Tensor) -> Tensor:
    scale, cube = GELU
    return torch.sigmoid(2 * scale * x * (1 + cube * x * x))


_DECOMPOSED: Mapping[Any, Callable[..., Any]] = {
    torch.ops.aten.gelu.default: _gelu,
    torch.ops.aten.gelu_backward.default: _gelu_backward,
}
