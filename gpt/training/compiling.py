"""A training step faster than operator by operator: compiled halves of blocks, and a CUDA graph of the whole.

On a CPU, where one process trains all weights, it is one program (`gpt.training.native`).
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from gpt.model.decoder import GPT

# Inductor's, for a GPU: reads and operations up to which a value is computed again in each kernel that uses it. At its
# own 4 and 30 the gradients of rotated queries and keys are written and read in float32.
COMPUTED_AGAIN = {"realize_reads_threshold": 6, "realize_opcount_threshold": 60}


def compile_halves(model: GPT, device: torch.device, **how: Any) -> None:
    """Compiles the halves of the blocks, of which all share one form, and the last norm.

    In one graph of both halves, Inductor would not keep the sum between them, but compute it again from two tensors in
    three kernels of the gradient. A graph of the whole stack takes the longer to compile the deeper it is.
    """
    torch._dynamo.config.optimize_ddp = False  # it would split halves where a bucket of gradients ends
    options = COMPUTED_AGAIN if device.type == "cuda" else None
    for module, name in _halves(model):
        setattr(module, name, torch.compile(getattr(module, name), **{"options": options} | how))


def uncompile_halves(model: GPT) -> None:
    """Goes back to eager execution."""
    for module, name in _halves(model):
        vars(module).pop(name, None)


def _halves(model: GPT) -> list[tuple[nn.Module, str]]:
    """The methods that `compile_halves` compiles."""
    return [(model, "last_norm"), *((block, half) for block in model.h for half in ("add_attention", "add_mlp"))]


class StepGraph:
    """A step as a CUDA graph: the host launches once what takes hundreds of launches else, in 1 ms in place of 9. Its
    numbers lie where they lay when it was made: the batch is copied there, the weights must not move."""

    def __init__(
        self, step: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], x: Tensor, y: Tensor, reads: Iterable[Tensor]
    ) -> None:
        """Makes the graph of a ``step`` of inputs x and targets y, and does not take it. What it ``reads`` beside
        weights is kept: a model's table of rotations gives way to a longer one. Raises `RuntimeError` if some operation
        can't be part of a graph."""
        self.x, self.y, self.reads, self.graph = x, y, tuple(reads), torch.cuda.CUDAGraph()
        side = torch.cuda.Stream(x.device)  # type: ignore[no-untyped-call]
        # A checkpoint's thread uses the device too. The outer context: torch's stays on its stream after an error.
        capture = torch.cuda.graph(self.graph, stream=side, capture_error_mode="thread_local")
        with torch.cuda.stream(torch.cuda.current_stream(x.device)), capture:
            self.outcome = step(x, y)

    def __call__(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Takes a step. What it returns is overwritten by the next one."""
        self.x.copy_(x)
        self.y.copy_(y)
        self.graph.replay()
        return self.outcome
