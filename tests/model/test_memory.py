"""Memory estimates compared with real tensors and processes."""

import json
import os
import subprocess
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import ROOT, facts, make_text, more, slow
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from gpt.config.device import Compute
from gpt.config.model import ARCHITECTURES, PRESETS, GPTConfig
from gpt.config.train import TrainConfig
from gpt.model import decoder, kernels, lora, memory
from gpt.model.cache import KVCache
from gpt.model.decoder import GPT
from gpt.model.loss import tied_cross_entropy
from gpt.model.memory import Setup, count_step_memory
from gpt.parallel.shard import ShardedModel
from gpt.training.optim import Optimizers, make_optimizer
from gpt.training.recipe import plan
from gpt.training.step import Stepper
from gpt.training.strategy import Single

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@pytest.fixture
def gpu_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    """Imitates a GPU: fused attention, float32 norms, bfloat16 residual stream, padded logits."""
    forward, layer_norm = decoder.RMSNorm.forward, torch.nn.LayerNorm.forward
    monkeypatch.setattr(kernels, "NARROW_ON", ("cpu", "cuda"))
    monkeypatch.setattr(torch.nn.LayerNorm, "forward", lambda self, x: layer_norm(self, x.float()))
    monkeypatch.setattr(kernels, "MAX_MATMUL_POSITIONS", 0)
    monkeypatch.setattr(decoder.RMSNorm, "forward", lambda self, x: forward(self, x.float()).contiguous().to(x.dtype))
    monkeypatch.setattr(memory, "ALIGNED_ON", ("cpu", "cuda"))
    monkeypatch.setattr(memory, "LOGITS_ON_CPU", memory.LOGITS)


def preset_shape(preset: str = "gpt2", **changes: Any) -> GPTConfig:
    return replace(PRESETS[preset].model, **changes)


GPT2, MODERN = ARCHITECTURES["gpt2"], ARCHITECTURES["modern"]
LLAMA = MODERN | {"qk_norm": False}
KINDS: dict[str, dict[str, Any]] = {
    "gpt2": GPT2,
    "gpt2, rotary": GPT2 | {"positions": "rotary"},
    "gpt2, windows": GPT2 | {"window": 10},
    "modern": MODERN,
    "shared heads": MODERN | {"n_kv_head": 2},
    "windows": MODERN | {"n_kv_head": 2, "window": 10},
    "llama": LLAMA | {"n_kv_head": 2, "tied": False},
    "qwen2": LLAMA | {"biases": "qkv", "n_inner": 200},
}


# Tensors saved by autograd


def saved_bytes(config: GPTConfig, rows: int, dtype: str) -> int:
    """Returns the bytes saved by autograd in the trunk, without parameters and tables."""
    model = GPT(config)
    parameter_addresses = {p.untyped_storage().data_ptr() for p in (*model.parameters(), *model.buffers())}
    storages: dict[int, Any] = {}

    def pack(t: torch.Tensor) -> torch.Tensor:
        storages[t.untyped_storage().data_ptr()] = t.untyped_storage()
        return t

    autocast = torch.autocast("cpu", DTYPES[dtype], enabled=dtype != "float32")
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), autocast:
        out = model.trunk(torch.zeros(rows, config.block_size, dtype=torch.long))
    assert out.requires_grad
    return sum(storage.nbytes() for address, storage in storages.items() if address not in parameter_addresses)


@pytest.mark.parametrize("dtype", ["float32", slow("bfloat16")])
@pytest.mark.parametrize(("block_size", "dropout"), [(64, 0.0), (64, 0.1), (576, 0.0), (576, 0.1)])
@pytest.mark.parametrize("kind", KINDS)
def test_estimate_matches_saved_bytes_on_a_cpu(kind: str, block_size: int, dropout: float, dtype: str) -> None:
    """Above 512 positions, attention with dropout saves float32 scores."""
    config = preset_shape("nano", dropout=dropout, block_size=block_size, n_layer=2, **KINDS[kind])
    check_saved_bytes(config, Setup(micro_batch=2, dtype=dtype, device="cpu"))


@pytest.mark.usefixtures("gpu_arithmetic")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_estimate_matches_saved_bytes_on_a_gpu(kind: str, dtype: str) -> None:
    check_saved_bytes(preset_shape("nano", n_layer=2, **KINDS[kind]), Setup(micro_batch=16, dtype=dtype))


def check_saved_bytes(config: GPTConfig, setup: Setup) -> None:
    estimate = memory.count_saved_bytes(config, setup) + memory.weight_copies(config, setup)[1]
    assert_estimates(estimate, saved_bytes(config, setup.micro_batch, setup.dtype))


def assert_estimates(estimate: int, used_bytes: int) -> None:
    assert 0.98 * used_bytes <= estimate <= 1.15 * used_bytes


# Tensors alive during a step


class LiveBytes(TorchDispatchMode):
    """Tracks the bytes of live tensors and their peak in each phase. Sharding resizes storages to free them."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: weakref.WeakSet[Any] = weakref.WeakSet()
        self.has_new_storage = False
        self.phase, self.peaks = "", Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        pytree.tree_map_only_(torch.Tensor, self.track, out)
        if self.has_new_storage:
            self.peaks[self.phase] = max(sum(each.nbytes() for each in self.storages), self.peaks[self.phase])
            self.has_new_storage = False
        return out

    def track(self, tensor: torch.Tensor) -> None:
        if tensor.device.type != "meta" and not isinstance(tensor, DTensor):
            storage = tensor.untyped_storage()
            self.has_new_storage |= storage not in self.storages
            self.storages.add(storage)


def peak_bytes(config: GPTConfig, setup: Setup, rows: int) -> Counter[str]:
    """Returns the second step's peak bytes by phase. Fake tensors allow GPU sizes."""
    compute = Compute(torch.device("cpu"), DTYPES[setup.dtype])
    train_config = TrainConfig(batch_tokens=rows * config.block_size, micro_batch=str(setup.micro_batch), steps=1)
    recipe = plan(replace(train_config, block_size=config.block_size), facts(tokens=10**6, dtype=setup.dtype))
    recipe = replace(recipe, model=config, loss_chunk=setup.loss_chunk)
    live = LiveBytes()
    with FakeTensorMode(allow_non_fake_inputs=True), live:
        torch.set_default_dtype(compute.dtype if setup.adapters else torch.float32)
        model = GPT(config)
        torch.set_default_dtype(torch.float32)
        if setup.recompute:
            for block in model.h:
                block.forward = _recomputed(block.forward)
        if setup.adapters:
            optimizer = Optimizers([torch.optim.AdamW(lora.adapt(model, RANK, 1.0), fused=True)], {})
        else:
            optimizer = make_optimizer(model, setup.optimizer, 0.1, compute.dtype)
        stepper = Stepper(Single(model, optimizer, compute), recipe)

        def step(skip: torch.Tensor, step: Callable[[torch.Tensor], None] = optimizer.step) -> None:
            live.phase = live.phase.replace("gradients", "update")
            step(skip)

        optimizer.step = step  # type: ignore[method-assign]
        x = torch.zeros(rows, config.block_size, dtype=torch.long)
        for live.phase in ("first", "gradients"):
            stepper.update(x, x)
    return live.peaks


def _recomputed(forward: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: checkpoint(forward, *args, use_reentrant=False)


def with_adapters(config: GPTConfig, setup: Setup) -> tuple[GPTConfig, Setup, int]:
    adapters = lora.adapter_shapes(config, RANK, lora.find_roles("all", config))
    return config, replace(setup, adapters=tuple(adapters.values()), optimizer="adamw"), 2 * setup.micro_batch


RANK = 8
CASES = {
    "one micro-batch": (preset_shape(n_layer=2), Setup(4, False, optimizer="adamw"), 4),
    "muon": (preset_shape(n_layer=2), Setup(4, True), 8),
    "chunks": (preset_shape(n_layer=2), Setup(4, True, loss_chunk=512), 8),
    "parameters alone": (preset_shape(n_layer=2, block_size=64), Setup(1, True, optimizer="adamw"), 2),
    "a small vocabulary": (preset_shape("mini", n_layer=3, vocab_size=300), Setup(16, True), 32),
    "modern, again": (preset_shape("small", n_layer=3, vocab_size=300), Setup(16, True, recompute=True), 32),
    "windows": (preset_shape("small", n_layer=2, vocab_size=300, window=64), Setup(4, True), 8),
    "llama": (preset_shape("smollm2-135m", n_layer=2, block_size=256, tied=False), Setup(2, True), 4),
    "adapters": with_adapters(preset_shape("smollm2-135m", n_layer=4, block_size=256), Setup(4, True)),
    "adapters of gpt2": with_adapters(preset_shape(n_layer=4, block_size=256), Setup(4, True)),
    "adapters, float32": with_adapters(
        preset_shape("qwen3-0.6b", n_layer=2, block_size=256), Setup(2, True, "float32")
    ),
    "adapters, again": with_adapters(
        preset_shape("qwen3-0.6b", n_layer=2, block_size=256), Setup(2, True, recompute=True)
    ),
}
FAST_CASES = ("modern, again", "adapters")


@pytest.mark.usefixtures("gpu_arithmetic")
@pytest.mark.parametrize("name", [name if name in FAST_CASES else slow(name) for name in CASES])
def test_estimate_matches_memory_held_by_a_step_on_a_gpu(name: str) -> None:
    config, setup, rows = CASES[name]
    assert_peaks(count_step_memory(config, setup), peak_bytes(config, setup, rows))


@pytest.mark.parametrize(
    ("kind", "dropout", "dtype", "adapts"),
    [
        ("gpt2", 0.1, "float32", False), slow("gpt2", 0.0, "bfloat16", False), slow("modern", 0.0, "float32", False),
        slow("shared heads", 0.0, "bfloat16", False), slow("llama", 0.0, "bfloat16", False),
        ("modern", 0.0, "bfloat16", True), slow("gpt2", 0.0, "float32", True),
    ],
)  # fmt: skip
def test_estimate_matches_memory_held_by_a_step_on_a_cpu(kind: str, dropout: float, dtype: Any, adapts: bool) -> None:
    config, setup = (
        preset_shape("mini", dropout=dropout, n_layer=3, **KINDS[kind]),
        Setup(16, True, dtype, device="cpu"),
    )
    setup = with_adapters(config, setup)[1] if adapts else setup
    estimate = count_step_memory(config, setup)
    assert_peaks(estimate, peak_bytes(config, setup, 32), estimate.snapshot)


@pytest.fixture
def four_ranks() -> Iterator[DeviceMesh]:
    """The first of four ranks. Its collectives move nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield init_device_mesh("cpu", (4,))
    dist.destroy_process_group()


def test_estimate_matches_memory_held_by_a_sharded_step(four_ranks: DeviceMesh) -> None:
    config, live = preset_shape("nano", n_layer=8), LiveBytes()
    setup = Setup(2, True, "float32", "adamw", data=4, shard=True, device="cpu")
    with live:
        sharded = ShardedModel(config, four_ranks, torch.device("cpu"), torch.float32)
        optimizer = make_optimizer(sharded.model, "adamw", 0.1, torch.float32, parameters=sharded.parameters)
        x = torch.zeros(2, config.block_size, dtype=torch.long)
        for live.phase in ("first", "gradients"):
            for _ in range(2):
                tied_cross_entropy(sharded.model.trunk(x), sharded.model.unembedding, x).backward()  # type: ignore[no-untyped-call]
            sharded.collect()
            live.phase = live.phase.replace("gradients", "update")
            optimizer.step(skip=torch.tensor(False))
            optimizer.zero_grad()
    estimate = count_step_memory(config, setup)
    assert_peaks(estimate, live.peaks, estimate.snapshot)


def assert_peaks(estimate: memory.StepMemory, peaks: Counter[str], on_host: int = 0) -> None:
    gradients = max(estimate.moments["loss"], estimate.moments["backward"]) - on_host
    assert_estimates(gradients, peaks["gradients"])
    assert_estimates(estimate.moments["update"] - on_host, peaks["update"])


GROWTH_SCRIPT = """
import json, re, sys, gpt
from pathlib import Path
from gpt.training import step
def resident(what):
    return 1024 * int(re.search(rf"{what}:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
asked = dict(device="cpu", arch="gpt2", dropout=0.0, vocab_size=400, sample_every=0, steps=2, eval_every=2)
step.keep_freed_memory = lambda: None
gpt.train(sys.argv[1], n_layer=2, n_head=2, n_embd=32, block_size=128, batch_tokens=256, **asked)
before = resident("VmRSS")
gpt.train(sys.argv[1], **asked, **json.loads(sys.argv[2]))
print(resident("VmHWM") - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="resident memory is read from /proc")
@pytest.mark.parametrize("dtype", ["float32", more("bfloat16")])
def test_process_growth_matches_the_estimate(tmp_path: Path, dtype: Any) -> None:
    """The run includes evaluation and checkpoints."""
    text = tmp_path / "text.txt"
    text.write_text(make_text(60_000), encoding="utf-8")
    shape = {"n_layer": 2, "n_head": 2, "n_embd": 64, "block_size": 128, "batch_tokens": 32768}
    settings = json.dumps(shape | {"dtype": dtype, "micro_batch": "256"})
    # The allocator returns freed memory immediately.
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", GROWTH_SCRIPT, str(text), settings],
        cwd=tmp_path, env=environment, check=True, capture_output=True, timeout=600, text=True,
    )  # fmt: skip
    del shape["batch_tokens"]
    estimate = count_step_memory(GPTConfig(vocab_size=400, **shape), Setup(256, False, dtype, device="cpu"))
    assert estimate.peak - estimate.process == pytest.approx(int(done.stdout), rel=0.1)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
def test_kv_cache_memory_is_allocated_on_use() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    config, before = GPTConfig(64, 2**16, 4, 4, 64), resident()
    cache = KVCache(config, 4, torch.device("cpu"), torch.float32)
    assert cache.nbytes == 2**29
    assert resident() - before < 2**25
    assert not cache.keys[0][0, 0, :100].any()
    cache.keys[0][1, 0, :1000] = 1
    assert 2**15 < resident() - before < 2**25
