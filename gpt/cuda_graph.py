"""A function of tensors as a CUDA graph: one launch replaces hundreds."""

from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from gpt.errors import first_line

EAGER_CALLS = 2  # eager calls before the capture; they allocate memory and load kernels
Result = TypeVar("Result")  # a tensor, or a tuple of tensors


class GraphedFunction(Generic[Result]):
    """Calls ``function`` with tensors on a GPU. After `EAGER_CALLS` calls with the same shapes, captures it as a CUDA
    graph and replays that. Inputs are copied to a fixed address. The addresses of all other tensors that it reads or
    writes must not change.

    If the function cannot be captured, calls ``on_failure`` with the error and runs it eagerly. Keeps ``buffers``
    alive, because a model can replace its RoPE table with a longer one. Graphs with the same ``pool`` share memory.
    """

    def __init__(
        self,
        function: Callable[..., Result],
        buffers: Callable[[], Iterable[Tensor]],
        on_failure: Callable[[str], None],
        pool: Any = None,
    ) -> None:
        self.function, self.buffers, self.on_failure, self.pool = function, buffers, on_failure, pool
        self.drop()

    def drop(self) -> None:
        """Frees the graph, for instance after weights and moments were replaced."""
        self.shape, self.count = torch.Size(), 0  # of the last inputs, and the number of calls in a row that had it
        self.captured: tuple[Any, ...] | None = None

    def __call__(self, *inputs: Tensor) -> Result:
        """Calls the function. The next call overwrites the result."""
        if inputs[0].shape != self.shape:
            self.drop()
            self.shape = inputs[0].shape
        self.count += 1
        if self.count > EAGER_CALLS and self.captured is None:
            try:
                self.captured = self.capture(*(tensor.clone() for tensor in inputs))  # Replays overwrite the clones.
            except RuntimeError as error:
                self.on_failure(first_line(error))
        if self.captured is None:
            return self.function(*inputs)
        graph, static_inputs, result, _ = self.captured
        for tensor, values in zip(static_inputs, inputs, strict=True):
            tensor.copy_(values)
        graph.replay()
        return result  # type: ignore[no-any-return]

    def capture(self, *inputs: Tensor) -> tuple[Any, ...]:
        """Captures the function without running it. Raises `RuntimeError` if an operation cannot be captured."""
        graph, device = torch.cuda.CUDAGraph(), inputs[0].device
        side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        # "thread_local" lets the checkpoint thread use the device. The outer context restores the stream after an
        # error, which torch.cuda.graph does not.
        capture = torch.cuda.graph(graph, pool=self.pool, stream=side, capture_error_mode="thread_local")
        with torch.cuda.stream(torch.cuda.current_stream(device)), capture:
            result = self.function(*inputs)
        return graph, inputs, result, tuple(self.buffers())
