"""Faster training steps: compiled halves of blocks, and a CUDA graph of the whole step.

A single process on a CPU compiles the whole step instead (`gpt.training.cpu_step`).
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gpt.model.decoder import GPT
from gpt.system.errors import first_line

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
    """A training step as a CUDA graph. One launch replaces hundreds: 1 ms of host time instead of 9. Batches are copied
    to a fixed address. The addresses of weights must not change.

    The first `EAGER_STEPS` batches of a shape run eagerly. If the step cannot be captured, calls ``on_failure`` with
    the error and runs it eagerly. Keeps ``buffers`` alive, because a model can replace its RoPE table with a longer
    one.
    """

    def __init__(self, step: Step, buffers: Callable[[], Iterable[Tensor]], on_failure: Callable[[str], None]) -> None:
        self.step, self.buffers, self.on_failure = step, buffers, on_failure
        self.drop()

    def drop(self) -> None:
        """Frees the graph, for instance after weights and moments were replaced."""
        self.shape, self.count = torch.Size(), 0  # of the last batch, and the number of batches in a row that had it
        self.captured: tuple[Any, ...] | None = None

    def __call__(self, *batch: Tensor) -> tuple[Tensor, Tensor]:
        """Takes a step. The next step overwrites the returned tensors."""
        if batch[0].shape != self.shape:
            self.drop()
            self.shape = batch[0].shape
        self.count += 1
        if self.count > EAGER_STEPS and self.captured is None:
            try:
                self.captured = self.capture(batch)
            except RuntimeError as error:
                self.on_failure(first_line(error))
        if self.captured is None:
            return self.step(*batch)
        graph, inputs, outcome, _ = self.captured
        for tensor, values in zip(inputs, batch, strict=True):
            tensor.copy_(values)
        graph.replay()
        return outcome  # type: ignore[no-any-return]

    def capture(self, batch: Sequence[Tensor]) -> tuple[Any, ...]:
        """Captures the step without running it. Raises `RuntimeError` if an operation cannot be captured."""
        graph, device = torch.cuda.CUDAGraph(), batch[0].device
        side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        # "thread_local" lets the checkpoint thread use the device. The outer context restores the stream after an
        # error, which torch.cuda.graph does not.
        capture = torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local")
        with torch.cuda.stream(torch.cuda.current_stream(device)), capture:
            outcome = self.step(*batch)
        return graph, batch, outcome, tuple(self.buffers())
