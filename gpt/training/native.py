"""Loss and gradients of a micro-batch as one compiled program for a CPU.

Forward and backward pass are traced together, so that autograd has no part in a step: Inductor fuses what lies between
the matrix products, and torch calls these one after the other.
"""

import functools
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gpt import programs
from gpt.config import GPTConfig
from gpt.device import Compute
from gpt.model import decoder, kernels, loss, memory, positions
from gpt.model.decoder import GPT

GELU = (0.7978845608028654, 0.044715)  # √(2/π), and the weight of the cube, in GELU's tanh form
SCORES = 2**20  # at once, which stay in cache


class GradientProgram:
    """The program of an objective's gradients for inputs of one shape, (rows, T)."""

    def __init__(self, objective: nn.Module, model: GPT, compute: Compute, rows: int, note: programs.Note) -> None:
        self.shape = (rows, model.config.block_size)
        self.params = list(objective.parameters())
        self.inputs = [*(p.detach() for p in self.params), *objective.buffers()]
        self.masks = _masks(model.config, compute.dtype)
        self.dropout, self.sizes = model.config.dropout, _sizes(model.config, rows)
        self.embedding = next(at for at, p in enumerate(self.params) if p is model.wte.weight)
        traced = {
            decoder.__name__,
            kernels.__name__,
            loss.__name__,
            memory.__name__,
            positions.__name__,
            type(objective).__module__,
            __name__,
        }
        code = [Path(sys.modules[name].__file__ or "").read_bytes() for name in sorted(traced)]
        key = (code, model.config, self.shape, compute.dtype_name)
        trace = functools.partial(_traced, objective, model, compute, self.shape)
        self.run = programs.find(key, trace, note, "the step")

    def __call__(self, x: Tensor, y: Tensor, counted: Tensor) -> Tensor:
        """Adds the gradients of the loss of inputs x and targets y, (rows, T), divided by ``counted``. Returns that
        loss."""
        x, y = x.contiguous(), y.contiguous()  # a batch's are parts of one array
        kept = kernels.dropout_mask(sum(self.sizes), self.dropout, self.masks[0].dtype)
        inputs = [*self.inputs, x, y, counted, *self.masks, *torch.split(kept, self.sizes)]
        total, looked_up, *grads = self.run(inputs)
        table = grads[self.embedding]
        table += torch.ops.aten.embedding_dense_backward(looked_up, x, len(table), -1, False)
        if self.params[0].grad is None:
            for p, grad in zip(self.params, grads, strict=True):
                p.grad = grad
        else:
            torch._foreach_add_([p.grad for p in self.params if p.grad is not None], grads)
        return total


def _traced(objective: nn.Module, model: GPT, compute: Compute, shape: tuple[int, int]) -> programs.Graph:
    """Traces the forward and backward pass to one graph of torch's operators.

    Its inputs: parameters, buffers, ids, targets, the number of targets, `_masks`, and what dropout keeps. Its outputs:
    the mean loss, the gradient of the rows that were looked up in the embedding, and those of all parameters, where the
    embedding's lacks these rows: a program's threads would add them up in any order, to another sum each time.
    """
    from torch.fx.experimental.proxy_tensor import make_fx

    names, buffers = ([name for name, _ in each()] for each in (objective.named_parameters, objective.named_buffers))
    config, rows = model.config, shape[0]

    def gradients(*tensors: Tensor) -> list[Tensor]:
        looked_up: list[Tensor] = []
        params, others = tensors[: len(names)], iter(tensors[len(names) :])
        tables, (x, y, counted, whole, part) = [next(others) for _ in buffers], [next(others) for _ in range(5)]

        def look_up(module: nn.Module, args: object, out: Tensor) -> Tensor:
            looked_up.append(out.detach().requires_grad_())
            return looked_up[0]

        given = dict(zip([*names, *buffers], [*params, *tables], strict=True))
        traced = kernels.TracedInputs(others, whole, part, _at_once(config))
        with kernels.tracing(traced), compute.autocast(), model.wte.register_forward_hook(look_up):
            mean: Tensor = torch.func.functional_call(objective, given, (x, y)) / counted
        return [mean.detach(), *torch.autograd.grad(mean, [*looked_up, *params], materialize_grads=True)]

    params = [p.detach().clone().requires_grad_() for p in objective.parameters()]
    x, y = (torch.zeros(shape, dtype=torch.long) for _ in range(2))  # two tensors, since one would be one input
    kept = [torch.ones(n, dtype=compute.dtype) for n in _sizes(config, rows)]
    inputs = (
        *params, *objective.buffers(), x, y, torch.ones((), dtype=torch.long), *_masks(config, compute.dtype), *kept,
    )  # fmt: skip
    graph = make_fx(gradients, _DECOMPOSED, tracing_mode="fake")(*inputs)
    return graph, tuple(each.detach() for each in inputs)


def _masks(config: GPTConfig, dtype: torch.dtype) -> list[Tensor]:
    """The masks of scores without a window and with the model's, (T, T)."""
    q = torch.empty(1, 1, config.block_size, 0, dtype=dtype)
    return [kernels.bias(q, config.block_size, window) for window in (None, config.window)]


def _sizes(config: GPTConfig, rows: int) -> list[int]:
    """The numbers that dropout keeps or zeroes: of the embedding, and in each block of the attention pattern and of
    what attention and MLP come to."""
    if not config.dropout:
        return []
    T, some = config.block_size, _at_once(config)
    sums = rows * T * config.n_embd
    patterns = [min(some, rows - at) * config.n_head * T * T for at in range(0, rows, some)]
    return [sums] + config.n_layer * [*(patterns if T <= kernels.PLAIN_UP_TO else []), sums, sums]


def _at_once(config: GPTConfig) -> int:
    """Sequences whose attention is computed at once: more than uncompiled where they are short, which makes the graph
    smaller, and so the time to compile it."""
    return max(kernels.PLAIN_ROWS, SCORES // (config.n_head * config.block_size**2))


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
