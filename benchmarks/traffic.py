"""Bytes that compiled code moves and kernels that it launches, from Inductor's schedule: nothing is built or run.

A kernel's bytes are Inductor's own count: each buffer that it reads or writes, once, as far as it is used. One thing is
corrected. Where numbers are scattered into a buffer by a kernel that does something else too, Inductor counts the whole
buffer; here it is the numbers. A step of decoding does this in every layer, to one column of the cache.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch._inductor import config, ir
from torch._inductor.graph import GraphLowering
from torch._inductor.scheduler import BaseSchedulerNode, NopKernelSchedulerNode


@dataclass(frozen=True)
class Traffic:
    """What one compiled graph does in a call."""

    bytes: int  # read from memory and written to it
    launches: int  # kernels, generated and libraries'
    kernels: tuple[tuple[str, int], ...]  # each one's name and bytes, most first
    code: str  # the program that calls them


class _Counted(Exception):
    """Raised in the place of a call of compiled code."""


def count(work: Callable[[], object], **settings: Any) -> list[Traffic]:
    """Compiles what ``work`` calls, as far as it gets: up to the first call of a compiled graph, whose backward pass is
    compiled with it. ``settings``: of Inductor."""
    torch._dynamo.reset()
    try:
        with counting(**settings) as found, contextlib.suppress(_Counted):
            work()
    finally:
        torch._dynamo.reset()
    return found


@contextlib.contextmanager
def counting(**settings: Any) -> Iterator[list[Traffic]]:
    """While it lasts, Inductor's graphs are counted instead of built, and a call of one raises."""
    found: list[Traffic] = []

    def module(graph: GraphLowering) -> Any:
        code, _ = graph.codegen()
        found.append(_traffic(graph.scheduler.nodes, str(getattr(code, "value", code))))
        return SimpleNamespace(call=_raise, __file__="", key="")

    with (
        mock.patch.object(GraphLowering, "_compile_to_module", module),
        mock.patch.object(torch._functorch.config, "force_non_lazy_backward_lowering", True),
        config.patch(force_disable_caches=True, compile_threads=1, **settings),
    ):
        yield found


def _raise(_: object) -> None:
    raise _Counted


def _traffic(nodes: list[BaseSchedulerNode], code: str) -> Traffic:
    launched = [node for node in nodes if not _launches_nothing(node)]
    kernels = sorted(((_name(node), _bytes(node)) for node in launched), key=lambda kernel: -kernel[1])
    return Traffic(sum(size for _, size in kernels), len(launched), tuple(kernels), code)


def _launches_nothing(node: BaseSchedulerNode) -> bool:
    return isinstance(node, NopKernelSchedulerNode) or isinstance(node.node, ir.MultiOutput)


def _name(node: BaseSchedulerNode) -> str:
    return getattr(node.node, "python_kernel_name", None) or node.get_name()


def _bytes(node: BaseSchedulerNode) -> int:
    """What a kernel reads and writes."""
    accesses = node.get_read_write_buffer_accesses(include_reads=True, include_writes=True)
    for part in node.get_nodes():
        if isinstance(part.node, ir.ComputedBuffer) and isinstance(part.node.data, ir.Scatter):
            alone = part.get_read_write_buffer_accesses(include_reads=True, include_writes=True)
            scattered = {part.node.get_name(), *part.node.get_mutation_names()}
            accesses |= {name: size for name, size in alone.items() if name in scattered}
    return sum(accesses.values())
