"""Estimates the minimum time of GPT-2's and GPT-3's training steps on an H100 without running them.

    pip install triton
    python -m benchmarks.h100            writes the section
    python -m benchmarks.h100 --tiny     a smoke test with a tiny model, in seconds

Inductor generates code for an H100 from fake tensors, and `benchmarks.traffic` counts its bytes and launches. AdamW is
not compiled: each of its operators reads its inputs and writes its outputs once. The minimum time is the
largest of three: bytes / bandwidth, FLOPs / peak, and launches × the time between launches. Bandwidth and peak are
from the datasheet. A real GPU takes longer: kernels run below peak, and caches, the host and other ranks cost time.
"""

import argparse
import contextlib
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.device_interface import CudaInterface
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils._triton import has_triton

from benchmarks.results import Table, measured, write_section
from benchmarks.traffic import Traffic, count
from gpt.config import ARCHITECTURES, GPTConfig, find_preset
from gpt.model.decoder import GPT, Block
from gpt.model.loss import tied_cross_entropy
from gpt.model.memory import Setup
from gpt.model.plan import with_largest_micro_batch
from gpt.model.positions import rotary_table
from gpt.peaks import find_kind
from gpt.training.gpu_step import RECOMPUTE_OPTIONS
from gpt.training.optim import ITERATIONS, make_optimizer

TITLE = "On an H100, estimated from generated code"
BANDWIDTH = 3.35e12  # bytes per second, from the datasheet of the H100 SXM
LAUNCH = 2e-6  # minimum seconds between kernels launched by the host
KIND = "h100-80gb"
CUDA = torch.device("cuda")
BFLOAT16 = torch.bfloat16
T = 1024
TRAINED = ("gpt2", "gpt2, modern", "gpt2-medium", "gpt3-1.3b")
BATCH = 524_288  # tokens per step
TINY = GPTConfig(50_257, T, 2, 2, 64)

H100 = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3", total_memory=80 * 2**30, major=9, minor=0, multi_processor_count=132,
    regs_per_multiprocessor=65_536, max_threads_per_multi_processor=2048, warp_size=32, max_threads_per_block=1024,
    shared_memory_per_block=49_152, shared_memory_per_block_optin=232_448, L2_cache_size=50 * 2**20, gcnArchName="",
)  # fmt: skip


@dataclass(frozen=True)
class Work:
    """Bytes moved, kernels launched and FLOPs."""

    bytes: int
    launches: int
    flops: float = 0.0

    def __add__(self, other: "Work") -> "Work":
        return Work(self.bytes + other.bytes, self.launches + other.launches, self.flops + other.flops)

    def __mul__(self, times: int) -> "Work":
        return Work(self.bytes * times, self.launches * times, self.flops * times)

    def seconds(self, launch: float) -> float:
        """Returns the minimum time on an H100, with ``launch`` seconds between kernels."""
        peak = find_kind(KIND).peak("bfloat16")
        assert peak is not None
        return max(self.bytes / BANDWIDTH, self.flops / peak, self.launches * launch)


# A simulated H100


class _Driver:
    """A fake Triton driver that describes an H100."""

    utils = SimpleNamespace(
        get_device_properties=lambda index: {
            "max_shared_mem": H100.shared_memory_per_block_optin, "multiprocessor_count": H100.multi_processor_count,
            "warpSize": H100.warp_size, "max_num_regs": H100.regs_per_multiprocessor,
        }
    )  # fmt: skip

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, H100.warp_size)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", 0)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, index: int | None = None) -> int:
        return 0

    @staticmethod
    def is_active() -> bool:
        return True


@contextlib.contextmanager
def h100() -> Iterator[None]:
    """A context in which CUDA tensors are fake and Inductor generates code for an H100."""
    import triton

    from tests.fake_cuda import shim  # CPU builds lack autograd's device guard for CUDA.

    cuda = {
        "is_available": lambda: True, "device_count": lambda: 1, "is_initialized": lambda: True,
        "_lazy_init": lambda: None, "current_device": lambda: 0, "set_device": lambda index: None,
        "get_device_properties": lambda index=None: H100, "get_device_name": lambda index=None: H100.name,
        "get_device_capability": lambda index=None: (9, 0), "is_bf16_supported": lambda *_, **__: True,
        "synchronize": lambda index=None: None, "empty_cache": lambda: None, "_exchange_device": lambda index: 0,
        "_maybe_exchange_device": lambda index: 0, "set_rng_state": lambda *_: None,
        "get_rng_state": lambda index=None: torch.zeros(16, dtype=torch.uint8),
    }  # fmt: skip
    with contextlib.ExitStack() as stack:
        patch = lambda *args, **kwargs: stack.enter_context(mock.patch.object(*args, **kwargs))
        stack.enter_context(shim.put_on(Path(stack.enter_context(tempfile.TemporaryDirectory()))))
        for name, fake in cuda.items():
            patch(torch.cuda, name, fake)
        patch(torch.cuda, "_get_device_properties", lambda index: H100, create=True)
        patch(torch.version, "cuda", "13.0")
        for interface in (CudaInterface, CudaInterface.Worker):
            patch(interface, "get_device_properties", staticmethod(lambda index=None: H100))
        patch(CudaInterface, "get_compute_capability", staticmethod(lambda index=None: 90))
        patch(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)
        patch(torch._C, "_cuda_cudaCachingAllocator_is_enabled", lambda: True, create=True)
        patch(FakeTensorMode, "avoid_device_init", property(lambda mode: True))
        patch(F, "scaled_dot_product_attention", _fake_attention)
        patch(triton.runtime.driver, "_active", _Driver())
        has_triton.cache_clear()  # Drops a cached False.
        stack.callback(has_triton.cache_clear)
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        yield


def _fake_attention(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0, is_causal: bool = False,
    scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """Calls the kernel that CUDA would choose: memory-efficient attention with a mask, FlashAttention-2 without."""
    if torch.is_autocast_enabled("cuda"):
        q, k, v = (tensor.to(torch.get_autocast_dtype("cuda")) for tensor in (q, k, v))
    if attn_mask is None:
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        return flash(q, k, v, dropout_p, is_causal, False, scale=scale)[0]
    bias = torch.zeros_like(attn_mask, dtype=q.dtype).masked_fill(~attn_mask, -torch.inf)
    bias = bias.expand(q.size(0), q.size(1), q.size(2), k.size(2))
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention
    return efficient(q, k, v, bias, False, dropout_p, is_causal, scale=scale)[0]


class _OperatorCounter(TorchDispatchMode):
    """Sums the launches and bytes of operators. Views are free."""

    def __init__(self) -> None:
        super().__init__()
        self.work = Work(0, 0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        arguments = [*zip(func._schema.arguments, args, strict=False)]
        infos = [argument.alias_info for argument in func._schema.arguments]
        if any(info is not None and not info.is_write for info in infos):
            return out  # This operator returns a view.
        inputs = _tensors((args, kwargs))
        mutated = _tensors([value for argument, value in arguments if argument.alias_info is not None])
        created = [tensor for tensor in _tensors(out) if not any(tensor is other for other in mutated)]
        self.work += Work(sum(tensor.nbytes for tensor in (*inputs, *mutated, *created)), 1)
        return out


def count_compiled(work: Callable[[], object], **settings: Any) -> list[Traffic]:
    """Returns the traffic of the graphs that ``work`` calls.

    Disables constant folding and matrix padding, which Inductor would run on the GPU.
    """
    return count(work, joint_graph_constant_folding=False, shape_padding=False, **settings)


def _tensors(values: Any) -> list[Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, Tensor)]


def count_uncompiled(work: Callable[[], object]) -> Work:
    """Returns the bytes and launches of ``work`` without compilation."""
    with _OperatorCounter() as mode:
        work()
    return mode.work


# Training


def training_work(config: GPTConfig) -> list[tuple[str, Work]]:
    """Returns the work of each part of a training step of ``BATCH`` tokens."""
    setup = with_largest_micro_batch(config, Setup(), BATCH // config.block_size, find_kind(KIND).memory)
    micro_batches = BATCH // config.block_size // setup.micro_batch
    positions = setup.micro_batch * config.block_size
    C = config.n_embd
    matrices, scores = 12 * C * C, 2 * C * config.block_size  # Causal attention needs half of the scores.
    block = _block(config, setup.micro_batch) + Work(0, 0, 3 * 2 * positions * (matrices + scores))
    loss = _loss(config, setup) + Work(0, 0, 3 * 2 * positions * config.vocab_size * C)
    return [
        ("blocks", block * config.n_layer * micro_batches),
        ("last norm, unembedding and loss", loss * micro_batches),
        ("optimizer", _optimizer(config)),
    ]


def _count_forward_and_backward(work: Callable[..., object], *args: object) -> Work:
    """Returns the bytes and launches of the forward and backward graphs of ``work(*args)`` under autocast."""
    with torch.autocast("cuda", dtype=BFLOAT16):
        graphs = count_compiled(lambda: torch.compile(work, fullgraph=True)(*args), **RECOMPUTE_OPTIONS)
    assert len(graphs) == 2, "a graph forward and one backward"
    return Work(sum(graph.bytes for graph in graphs), sum(graph.launches for graph in graphs))


def _block(config: GPTConfig, rows: int) -> Work:
    with CUDA:
        block, x = Block(config), _stream(config, rows)
        is_rotary = config.positions == "rotary"
        rope = rotary_table(config.block_size, config).to(CUDA).unsqueeze(-3) if is_rotary else None
    return _count_forward_and_backward(block.add_attention, x, 3, rope) + _count_forward_and_backward(block.add_mlp, x)


def _loss(config: GPTConfig, setup: Setup) -> Work:
    with CUDA:
        model, x = GPT(replace(config, n_layer=1)), _stream(config, setup.micro_batch)
        y = torch.zeros(setup.micro_batch, config.block_size, dtype=torch.long)
    norm = _count_forward_and_backward(model.last_norm, x)
    return norm + _count_forward_and_backward(tied_cross_entropy, x, model.unembedding, y, setup.loss_chunk)


def _stream(config: GPTConfig, rows: int) -> Tensor:
    return torch.zeros(rows, config.block_size, config.n_embd, dtype=BFLOAT16, requires_grad=True)


def _optimizer(config: GPTConfig) -> Work:
    """Returns the work of one step of Muon and AdamW."""
    with CUDA:
        model = GPT(config)
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        optimizer = make_optimizer(model, "muon", 0.1, BFLOAT16)
    _, adamw = optimizer.optimizers
    adamw.step()  # This step creates the moments.
    [update] = count_compiled(optimizer.compile)
    # On an m × n matrix with m ≤ n, an iteration computes three products, of 2·m²n, 2·m³ and 2·m²n FLOPs.
    C = config.n_embd
    flops = sum(ITERATIONS * (4 * C * C * width + 2 * C**3) * matrices for width, matrices in ((C, 4), (4 * C, 2)))
    total = Work(update.bytes, update.launches) + count_uncompiled(adamw.step)
    return replace(total, flops=float(flops * config.n_layer))


# The section


def content(tiny: bool) -> tuple[list[str], list[Table]]:
    """Returns the notes and tables of the section."""
    training_shapes = [("tiny", TINY)] if tiny else [(name, _find_shape(name)) for name in TRAINED]
    peak = find_kind(KIND).peak("bfloat16") or 0.0
    notes = [
        "**An estimate: nothing was run on a GPU.**",
        "Bytes and launches are those of the code that Inductor generates for an H100 (`benchmarks/traffic.py`), with "
        "fake tensors.",
        "The minimum time of each part is the largest of what bandwidth, products and launches allow; a real GPU takes "
        "longer.",
        f"Assumed: {BANDWIDTH / 1e12:.2f} TB/s, {peak / 1e12:,.0f} TFLOP/s, {1e6 * LAUNCH:.0f} µs per launch.",
    ]
    rows = []
    for name, config in training_shapes:
        parts = training_work(config)
        total = sum(work.seconds(LAUNCH) for _, work in parts)
        total_work = sum((work for _, work in parts), Work(0, 0))
        lines = [(part, work, work.seconds(LAUNCH), "") for part, work in parts]
        for part, work, seconds, speed in [*lines, ("all", total_work, total, f"{BATCH / total:,.0f}")]:
            rows.append([name, part, f"{work.bytes / 1e9:,.1f}", f"{work.launches:,}", f"{1e3 * seconds:,.2f}", speed])
    train = Table(
        ["model", "part of a step", "GB", "launches", "minimum ms", "maximum tokens/s"],
        rows,
        f"Training, {BATCH:,} tokens per step, {T:,} tokens of context, bfloat16, Muon, all compiled but AdamW:",
    )
    return notes, [train]


def _find_shape(name: str) -> GPTConfig:
    preset, _, modern = name.partition(", ")
    shape = replace(find_preset(preset).model, block_size=T, dropout=0.0)
    return replace(shape, **ARCHITECTURES["modern"]) if modern else shape


def main() -> None:
    """Estimates and writes the section."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="use a tiny model and print the section")
    options = parser.parse_args()
    with h100():
        notes, tables = content(options.tiny)
    section = measured(TITLE, "python -m benchmarks.h100", notes, tables)
    if options.tiny:
        print(section)
    else:
        write_section("h100", section)


if __name__ == "__main__":
    main()
