"""Faster training steps: compiled halves of blocks, and a CUDA graph of the whole step.

A single process on a CPU compiles the whole step instead (`gpt.training.cpu_step`).
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gpt.errors import first_line
from gpt.model.decoder import GPT

Step = Callable[..., tuple[Tensor, Tensor]]  # (x, y, *lesson) → loss and gradient norm

EAGER_STEPS = 2  # eager steps with a batch shape before its graph is captured; they allocate memory and load kernels
# Inductor options for a GPU. Kernels recompute a value, instead of loading it, if that takes at most this many reads
# and operations. With the defaults, 4 and 30, the gradients of rotated queries and keys go through memory in float32.
RECOMPUTE_OPTIONS = {"realize_reads_threshold": 6, "realize_opcount_threshold": 60}


def compile_halves(model: GPT, device: torch.device, **compile_options: Any) -> None:
    """Compiles the last norm and the attention and MLP halves. All blocks share their code.

    If a whole block were one graph, three backward kernels would not load the sum between its halves, but recompute it
    from two tensors. If all blocks were one graph, deeper models would compile more slowly.
    """
    torch._dynamo.config.optimize_ddp = False  # This option would split the graphs at DDP's gradient buckets.
    options = RECOMPUTE_OPTIONS if device.type == "cuda" else None
    for module, name in _halves(model):
        setattr(module, name, torch.compile(getattr(module, name), **{"options": options} | compile_options))


def uncompile_halves(model: GPT) -> None:
    """Returns to eager execution."""
    for module, name in _halves(model):
        vars(module).pop(name, None)


def _halves(model: GPT) -> list[tuple[nn.Module, str]]:
    return [(model, "last_norm"), *((block, half) for block in model.h for half in ("add_attention", "add_mlp"))]


class GraphedStep:
    """Takes a step by replaying its CUDA graph. The first `EAGER_STEPS` batches of a shape run eagerly. If capturing
    fails, calls ``on_failure`` with the error and runs eagerly."""

    def __init__(self, step: Step, reads: Callable[[], Iterable[Tensor]], on_failure: Callable[[str], None]) -> None:
        self.step, self.reads, self.on_failure = step, reads, on_failure
        self.drop()

    def drop(self) -> None:
        """Frees the graph. Call this when weights and moments were replaced, because their addresses changed."""
        self.shape, self.count = torch.Size(), 0  # of the last batch, and the number of batches in a row that had it
        self.graph: StepGraph | None = None

    def __call__(self, *batch: Tensor) -> tuple[Tensor, Tensor]:
        """Takes a step. A later step overwrites the returned tensors."""
        if batch[0].shape != self.shape:
            self.drop()
            self.shape = batch[0].shape
        self.count += 1
        if self.count > EAGER_STEPS and self.graph is None:
            try:
                self.graph = StepGraph(self.step, batch, self.reads())
            except RuntimeError as error:
                self.on_failure(first_line(error))
        return self.step(*batch) if self.graph is None else self.graph(*batch)


class StepGraph:
    """A training step as a CUDA graph. One launch replaces hundreds: 1 ms of host time instead of 9. Batches are copied
    to a fixed address. The addresses of weights must not change."""

    def __init__(self, step: Step, batch: Sequence[Tensor], reads: Iterable[Tensor]) -> None:
        """Captures ``step(*batch)`` without running it. Keeps the tensors in ``reads`` alive, because a model can
        replace its RoPE table with a longer one. Raises `RuntimeError` if an operation cannot be captured."""
        self.batch, self.reads, self.graph = batch, tuple(reads), torch.cuda.CUDAGraph()
        device = batch[0].device
        side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        # "thread_local" lets the checkpoint thread use the device. The outer context restores the stream after an
        # error, which torch.cuda.graph does not.
        capture = torch.cuda.graph(self.graph, stream=side, capture_error_mode="thread_local")
        with torch.cuda.stream(torch.cuda.current_stream(device)), capture:
            self.outcome = step(*batch)

    def __call__(self, *batch: Tensor) -> tuple[Tensor, Tensor]:
        """Runs a step. The next step overwrites the returned tensors."""
        for tensor, values in zip(self.batch, batch, strict=True):
            tensor.copy_(values)
        self.graph.replay()
        return self.outcome
