"""A micro-batch's forward and backward pass as one compiled program for a CPU.

Both passes are traced together, so a step doesn't use autograd. Inductor fuses the operations between matrix products,
which stay calls to torch.
"""

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gpt.config.device import Compute
from gpt.config.model import GPTConfig
from gpt.model import decoder, kernels, loss, memory, positions
from gpt.model.decoder import GPT
from gpt.system import programs

GELU_COEFFICIENTS = (0.7978845608028654, 0.044715)  # √(2/π) and the coefficient of x³ in GELU's tanh form


class GradientProgram:
    """A compiled program for the loss and gradients of an objective, on inputs of one shape, (rows, T)."""

    def __init__(
        self,
        objective: nn.Module,
        model: GPT,
        compute: Compute,
        rows: int,
        note: programs.Note,
        teachers: Sequence[Tensor] = (),
    ) -> None:
        self.shape = (rows, model.config.block_size)
        self.params = list(objective.parameters())
        self.inputs = [*(p.detach() for p in self.params), *objective.buffers()]
        self.masks = _masks(model.config, compute.dtype)
        self.dropout, self.dropout_sizes = model.config.dropout, _dropout_sizes(model.config, rows)
        self.embedding_index = next(index for index, p in enumerate(self.params) if p is model.wte.weight)
        traced_modules = {each.__name__ for each in (decoder, kernels, loss, memory, positions)}
        traced_modules |= {GPTConfig.__module__, type(objective).__module__, __name__}
        code = [Path(sys.modules[name].__file__ or "").read_bytes() for name in sorted(traced_modules)]
        shapes = [tuple(tensor.shape) for tensor in self.inputs]
        key: tuple[object, ...] = (code, model.config, self.shape, compute.dtype_name, shapes, objective.separator)
        if teachers:
            key = (*key, [(tuple(t.shape), t.dtype) for t in teachers])
        trace = functools.partial(_trace_graph, objective, model, compute, self.shape, teachers)
        self.run = programs.find(key, trace, note, "the step")

    def __call__(self, x: Tensor, y: Tensor, n_targets: Tensor, teachers: Sequence[Tensor] = ()) -> Tensor:
        """Returns the summed loss on inputs x and targets y, (rows, T), divided by ``n_targets``. Adds the gradients of
        the result to those of the parameters. ``teachers`` have the shapes that the program was made for. If it raises
        `RuntimeError`, gradients and the random state have not changed."""
        state = torch.get_rng_state()
        x, y = x.contiguous(), y.contiguous()  # x and y are views of one array.
        dropout_mask = kernels.dropout_mask(sum(self.dropout_sizes), self.dropout, self.masks[0].dtype)
        inputs = [*self.inputs, x, y, n_targets, *self.masks, *teachers, *torch.split(dropout_mask, self.dropout_sizes)]
        try:
            loss, lookup_grad, *grads = self.run(inputs)
        except RuntimeError:
            torch.set_rng_state(state)
            raise
        table = grads[self.embedding_index]
        table += torch.ops.aten.embedding_dense_backward(lookup_grad, x, len(table), -1, False)
        if self.params[0].grad is None:
            for p, grad in zip(self.params, grads, strict=True):
                p.grad = grad
        else:
            torch._foreach_add_([p.grad for p in self.params if p.grad is not None], grads)
        return loss


def _trace_graph(
    objective: nn.Module, model: GPT, compute: Compute, shape: tuple[int, int], teachers: Sequence[Tensor] = ()
) -> programs.Graph:
    """Traces the forward and backward pass into one graph of torch operators.

    Inputs: parameters, buffers, ids, targets, the number of targets, `_masks`, the tensors of ``teachers``, dropout
    masks. Outputs: mean loss, gradient of the embedding lookup's output, gradients of all parameters. The gradient of
    the embedding matrix lacks the lookup's part, which `GradientProgram` adds: compiled code would add rows from
    several threads in random order, and each run would round differently.
    """
    from torch.fx.experimental.proxy_tensor import make_fx

    names, buffers = ([name for name, _ in get()] for get in (objective.named_parameters, objective.named_buffers))
    config, rows = model.config, shape[0]

    def gradients(*tensors: Tensor) -> list[Tensor]:
        embeddings: list[Tensor] = []
        params, items = tensors[: len(names)], iter(tensors[len(names) :])
        tables, (x, y, n_targets, causal, windowed) = [next(items) for _ in buffers], [next(items) for _ in range(5)]
        lesson = [next(items) for _ in teachers]

        def look_up(module: nn.Module, args: object, out: Tensor) -> Tensor:
            embeddings.append(out.detach().requires_grad_())
            return embeddings[0]

        tensors_by_name = dict(zip([*names, *buffers], [*params, *tables], strict=True))
        traced_inputs = kernels.TracedInputs(items, causal, windowed)
        with kernels.tracing(traced_inputs), compute.autocast(), model.wte.register_forward_hook(look_up):
            mean_loss: Tensor = torch.func.functional_call(objective, tensors_by_name, (x, y, *lesson)) / n_targets
        return [mean_loss.detach(), *torch.autograd.grad(mean_loss, [*embeddings, *params], materialize_grads=True)]

    params = [p.detach().clone().requires_grad_() for p in objective.parameters()]
    x, y = (torch.zeros(shape, dtype=torch.long) for _ in range(2))  # One shared tensor would be traced as one input.
    dropout = [torch.ones(n, dtype=compute.dtype) for n in _dropout_sizes(config, rows)]
    inputs = (
        *params, *objective.buffers(), x, y, torch.ones((), dtype=torch.long), *_masks(config, compute.dtype),
        *teachers, *dropout,
    )  # fmt: skip
    graph = make_fx(gradients, _DECOMPOSED, tracing_mode="fake")(*inputs)
    return graph, tuple(tensor.detach() for tensor in inputs)


def _masks(config: GPTConfig, dtype: torch.dtype) -> list[Tensor]:
    """The (T, T) attention masks of layers without a window and of layers with the model's sliding window."""
    q = torch.empty(1, 1, config.block_size, 0, dtype=dtype)
    return [kernels.bias(q, config.block_size, window) for window in (None, config.window)]


def _dropout_sizes(config: GPTConfig, rows: int) -> list[int]:
    """Sizes of the dropout masks: embedding, then each block's attention weights, attention output and MLP output."""
    if not config.dropout:
        return []
    T = config.block_size
    hidden, attention = rows * T * config.n_embd, rows * config.n_head * T * T
    return [hidden] + config.n_layer * [*([attention] if T <= kernels.MAX_MATMUL_POSITIONS else []), hidden, hidden]


def _gelu(x: Tensor, *, approximate: str = "none") -> Tensor:
    """GELU's tanh form as x σ(2u), because a sigmoid takes half the time of a tanh."""
    assert approximate == "tanh"
    x32 = x.float()
    return (x32 * _gate(x32)).to(x.dtype)


def _gelu_backward(grad: Tensor, x: Tensor, *, approximate: str = "none") -> Tensor:
    assert approximate == "tanh"
    x32, (scale, cube) = x.float(), GELU_COEFFICIENTS
    gate = _gate(x32)
    slope = gate + x32 * gate * (1 - gate) * (2 * scale * (1 + 3 * cube * x32 * x32))
    return (grad.float() * slope).to(x.dtype)


def _gate(x: Tensor) -> Tensor:
    scale, cube = GELU_COEFFICIENTS
    return torch.sigmoid(2 * scale * x * (1 + cube * x * x))


_DECOMPOSED: Mapping[Any, Callable[..., Any]] = {
    torch.ops.aten.gelu.default: _gelu,
    torch.ops.aten.gelu_backward.default: _gelu_backward,
}
