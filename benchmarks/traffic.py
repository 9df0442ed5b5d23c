"""Counts the memory traffic and kernel launches of compiled code without building or running it.

The counts come from Inductor's schedule: for each kernel, the accessed part of every buffer counts once. If a fused
kernel scatters into a buffer or only gathers from it, Inductor counts the whole buffer, but this module counts the
accessed elements. Decoding scatters to one column of each layer's KV cache and gathers rows of the embedding.
"""

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch._inductor import config, ir
from torch._inductor.dependencies import MemoryDep
from torch._inductor.graph import GraphLowering
from torch._inductor.scheduler import BaseSchedulerNode, NopKernelSchedulerNode
from torch._inductor.virtualized import V
from torch.utils._pytree import tree_leaves

MAX_COUNTED_ELEMENTS = 10**9  # Inductor does not count further elements of a buffer


@dataclass(frozen=True)
class Traffic:
    """Memory traffic and launches of one call of a compiled graph."""

    bytes: int  # bytes read and written
    launches: int  # launches of generated and library kernels
    kernels: tuple[tuple[str, int], ...]  # names and bytes, largest first
    code: str  # generated code


class _Counted(Exception):
    """Raised instead of calling compiled code."""


def count(work: Callable[[], object], **settings: Any) -> list[Traffic]:
    """Runs ``work`` up to its first call of a compiled graph; returns the traffic of all graphs compiled so far.

    Backward graphs are compiled with their forward graphs. ``settings`` are Inductor's.
    """
    torch._dynamo.reset()
    try:
        with count_graphs(**settings) as traffic, contextlib.suppress(_Counted):
            work()
    finally:
        torch._dynamo.reset()
    return traffic


@contextlib.contextmanager
def count_graphs(**settings: Any) -> Iterator[list[Traffic]]:
    """A context in which Inductor's graphs are counted instead of built. Calling a graph raises `_Counted`."""
    traffic: list[Traffic] = []

    def module(graph: GraphLowering) -> Any:
        code, _ = graph.codegen()
        traffic.append(_traffic(graph.scheduler.nodes, str(getattr(code, "value", code))))
        return SimpleNamespace(call=_raise_counted, __file__="", key="")

    with (
        mock.patch.object(GraphLowering, "_compile_to_module", module),
        mock.patch.object(torch._functorch.config, "force_non_lazy_backward_lowering", True),
        config.patch(force_disable_caches=True, compile_threads=1, **settings),
    ):
        yield traffic


def _raise_counted(_: object) -> None:
    raise _Counted


def _traffic(nodes: list[BaseSchedulerNode], code: str) -> Traffic:
    launched = [node for node in nodes if not _launches_nothing(node)]
    kernels = sorted(((_name(node), _bytes(node)) for node in launched), key=lambda kernel: -kernel[1])
    return Traffic(sum(size for _, size in kernels), len(launched), tuple(kernels), code)


def _launches_nothing(node: BaseSchedulerNode) -> bool:
    return isinstance(node, NopKernelSchedulerNode) or isinstance(node.node, ir.MultiOutput)


def _name(node: BaseSchedulerNode) -> str:
    return getattr(node.node, "python_kernel_name", None) or node.get_name()


def _elements(buffer: ir.IRNode) -> int:
    return math.prod(map(int, buffer.maybe_get_size() or ()))


def _bytes(node: BaseSchedulerNode) -> int:
    """Returns the bytes that a kernel reads and writes."""
    accesses = node.get_read_write_buffer_accesses(include_reads=True, include_writes=True)
    for name in accesses:
        if (elements := _elements(V.graph.get_buffer(name))) > MAX_COUNTED_ELEMENTS:
            accesses[name] = elements * V.graph.get_dtype(name).itemsize
    reads = [read for part in node.get_nodes() for read in part.read_writes.reads if isinstance(read, MemoryDep)]
    fully_read = {read.name for read in reads if not read.is_indirect()}
    for part in node.get_nodes():
        if part.is_template():  # Inductor would count one element per buffer.
            for read in part.read_writes.reads:
                buffer = V.graph.get_buffer(read.name)
                accesses[read.name] = _elements(buffer) * buffer.get_dtype().itemsize
        if isinstance(part.node, ir.ExternKernel) and not part.is_template():
            input_bytes = Counter[str]()
            for node_input in tree_leaves(part.node.inputs):
                if isinstance(node_input, ir.IRNode) and node_input.maybe_get_size() is not None:
                    input_bytes[node_input.get_name()] += _elements(node_input) * node_input.get_dtype().itemsize
            accesses |= {name: min(size, input_bytes[name]) for name, size in accesses.items() if name in input_bytes}
        if isinstance(part.node, ir.ComputedBuffer) and isinstance(part.node.data, ir.Scatter):
            own_accesses = part.get_read_write_buffer_accesses(include_reads=True, include_writes=True)
            scattered = {part.node.get_name(), *part.node.get_mutation_names()}
            accesses |= {name: size for name, size in own_accesses.items() if name in scattered}
    for read in reads:
        if read.is_indirect() and read.name not in fully_read:
            size = math.prod(map(int, read.size)) * V.graph.get_dtype(read.name).itemsize
            accesses[read.name] = min(accesses.get(read.name, 0), size)
    return sum(accesses.values())
