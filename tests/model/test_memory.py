"""What memory and days a model takes, against what autograd keeps, what steps hold, and what a process grows by."""

import json
import os
import subprocess
import sys
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT, make_text, more, slow
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from gpt.config import ARCHITECTURES, PRESETS, GPTConfig, TrainConfig
from gpt.device import Compute
from gpt.model import decoder, kernels, memory
from gpt.model.cache import KVCache
from gpt.model.decoder import GPT
from gpt.model.memory import Setup, training
from gpt.training.optim import make_optimizer
from gpt.training.parallel import Single
from gpt.training.recipe import resolve
from gpt.training.step import Stepper

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Computes as a GPU does, as far as a CPU can: fused attention, norms of float32, a narrow residual stream, columns
    of logits filled up."""
    forward, layer_norm = decoder.RMSNorm.forward, torch.nn.LayerNorm.forward
    monkeypatch.setattr(kernels, "NARROW_ON", ("cpu", "cuda"))
    monkeypatch.setattr(torch.nn.LayerNorm, "forward", lambda self, x: layer_norm(self, x.float()))
    monkeypatch.setattr(kernels, "PLAIN_UP_TO", 0)
    monkeypatch.setattr(decoder.RMSNorm, "forward", lambda self, x: forward(self, x.float()).contiguous().to(x.dtype))
    monkeypatch.setattr(memory, "ALIGNED_ON", ("cpu", "cuda"))
    monkeypatch.setattr(memory, "LOGITS_ON_CPU", memory.LOGITS)


def shape(preset: str = "gpt2", **changed: Any) -> GPTConfig:
    return replace(PRESETS[preset].model, **changed)


MODERN = ARCHITECTURES["modern"]
LLAMA = MODERN | {"qk_norm": False}
KINDS: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "gpt2, rotary": {"positions": "rotary"},
    "gpt2, windows": {"window": 10},
    "modern": MODERN,
    "shared heads": MODERN | {"n_kv_head": 2},
    "windows": MODERN | {"n_kv_head": 2, "window": 10},
    "llama": LLAMA | {"n_kv_head": 2, "tied": False},
    "qwen2": LLAMA | {"biases": "qkv", "n_inner": 200},
}


def test_the_limit_of_plain_attention_is_the_decoders() -> None:
    assert memory.PLAIN_UP_TO == kernels.PLAIN_UP_TO


# What autograd keeps


def saved(config: GPTConfig, rows: int, dtype: str) -> int:
    """Bytes of all memory that autograd keeps of the trunk, parameters and tables apart."""
    model = GPT(config)
    own = {p.untyped_storage().data_ptr() for p in (*model.parameters(), *model.buffers())}
    kept: dict[int, Any] = {}

    def pack(t: torch.Tensor) -> torch.Tensor:
        kept[t.untyped_storage().data_ptr()] = t.untyped_storage()
        return t

    autocast = torch.autocast("cpu", DTYPES[dtype], enabled=dtype != "float32")
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), autocast:
        out = model.trunk(torch.zeros(rows, config.block_size, dtype=torch.long))
    assert out.requires_grad
    return sum(each.nbytes() for at, each in kept.items() if at not in own)


@pytest.mark.parametrize("dtype", ["float32", slow("bfloat16")])
@pytest.mark.parametrize(("block_size", "dropout"), [(64, 0.0), (64, 0.1), (576, 0.0), (576, 0.1)])
@pytest.mark.parametrize("kind", KINDS)
def test_a_cpu_keeps_what_is_counted(kind: str, block_size: int, dropout: float, dtype: str) -> None:
    """Plain attention, and that of contexts above 512 positions, where dropout keeps scores in float32."""
    config = shape("nano", dropout=dropout, block_size=block_size, n_layer=2, **KINDS[kind])
    keeps(config, Setup(micro_batch=2, dtype=dtype, device="cpu"))


@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_gpu_keeps_what_is_counted(kind: str, dtype: str) -> None:
    keeps(shape("nano", n_layer=2, **KINDS[kind]), Setup(micro_batch=16, dtype=dtype))


def keeps(config: GPTConfig, setup: Setup) -> None:
    counted = memory.trunk(config, setup) + memory.weight_copies(config, setup)[1]
    assert_estimates(counted, saved(config, setup.micro_batch, setup.dtype))


def assert_estimates(counted: int, used: int) -> None:
    assert 0.98 * used <= counted <= 1.15 * used


# What a step holds


class Live(TorchDispatchMode):
    """Counts the bytes of all tensors that are alive, and the most of them in each phase."""

    def __init__(self) -> None:
        super().__init__()
        self.known: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self.now, self.phase, self.peaks = 0, "", Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        pytree.tree_map_only_(torch.Tensor, self.hold, out)
        self.peaks[self.phase] = max(self.now, self.peaks[self.phase])
        return out

    def hold(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage not in self.known:
            self.known[storage] = storage.nbytes()
            self.now += storage.nbytes()
            weakref.finalize(storage, self.let_go, storage.nbytes())

    def let_go(self, n: int) -> None:
        self.now -= n


def held(config: GPTConfig, setup: Setup, rows: int) -> Counter[str]:
    """The most bytes that the second step of a run holds, while gradients are computed and in the update. Tensors are
    without memory, so sizes may be a GPU's."""
    compute = Compute(torch.device("cpu"), DTYPES[setup.dtype])
    asked = TrainConfig(batch_tokens=rows * config.block_size, micro_batch=str(setup.micro_batch), steps=1)
    recipe = resolve(replace(asked, block_size=config.block_size), compute, 10**6, 10**6, 300, False, lambda note: None)
    recipe = replace(recipe, model=config, loss_chunk=setup.loss_chunk)
    live = Live()
    with FakeTensorMode(allow_non_fake_inputs=True), live:
        model = GPT(config)
        if setup.recompute:
            for block in model.h:
                block.forward = _again(block.forward)
        optimizer = make_optimizer(model, setup.optimizer, 0.1, compute.dtype)
        stepper = Stepper(Single(model, optimizer, compute), recipe, lambda micro_batch: None)
        x = torch.zeros(rows, config.block_size, dtype=torch.long)
        for live.phase in ("first", "gradients"):
            sound = stepper.gradients(x, x)
            norm = stepper.parallel.clip_grad_norm(stepper.scaler, stepper.clip)
            live.phase = live.phase.replace("gradients", "update")
            optimizer.step(skip=~(sound.isfinite() & norm.isfinite()))
            optimizer.zero_grad()
            del sound, norm
    return live.peaks


def _again(forward: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *given: checkpoint(forward, *given, use_reentrant=False)


@pytest.fixture(autouse=True)
def no_random_state(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Under tensors without memory there is no random state to copy."""
    if "held" in request.node.name:
        monkeypatch.setattr("gpt.training.step.random_states", lambda device: {})


CASES = {
    "one micro-batch": (shape(n_layer=2), Setup(4, False, optimizer="adamw"), 4),
    "muon": (shape(n_layer=2), Setup(4, True), 8),
    "chunks": (shape(n_layer=2), Setup(4, True, loss_chunk=512), 8),
    "parameters alone": (shape(n_layer=2, block_size=64), Setup(1, True, optimizer="adamw"), 2),
    "a small vocabulary": (shape("mini", n_layer=3, vocab_size=300), Setup(16, True), 32),
    "modern, again": (shape("modern-16m", n_layer=3, vocab_size=300), Setup(16, True, recompute=True), 32),
    "windows": (shape("modern-16m", n_layer=2, vocab_size=300, window=64), Setup(4, True), 8),
    "llama": (shape("smollm2-135m", n_layer=2, block_size=256, tied=False), Setup(2, True), 4),
}


@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize("name", ["modern, again", *(slow(name) for name in CASES if name != "modern, again")])
def test_held_by_a_step_on_a_gpu(name: str) -> None:
    config, setup, rows = CASES[name]
    compare(training(config, setup), held(config, setup, rows))


@pytest.mark.parametrize(
    ("kind", "dropout", "dtype"),
    [
        ("gpt2", 0.1, "float32"), slow("gpt2", 0.0, "bfloat16"), slow("modern", 0.0, "float32"),
        slow("shared heads", 0.0, "bfloat16"), slow("llama", 0.0, "bfloat16"),
    ],
)  # fmt: skip
def test_held_by_a_step_on_a_cpu(kind: str, dropout: float, dtype: Any) -> None:
    config = shape("mini", dropout=dropout, n_layer=3, **KINDS[kind])
    setup = Setup(16, True, dtype, device="cpu")
    compare(training(config, setup), held(config, setup, 32), training(config, setup).snapshot)


def compare(counted: memory.Training, found: Counter[str], elsewhere: int = 0) -> None:
    gradients = max(counted.moments["loss"], counted.moments["backward"]) - elsewhere
    assert_estimates(gradients, found["gradients"])
    assert_estimates(counted.moments["update"] - elsewhere, found["update"])


GROWS = """
import json, re, sys, gpt
from pathlib import Path
from gpt.training import step
def resident(what):
    return 1024 * int(re.search(rf"{what}:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
asked = dict(device="cpu", dropout=0.0, vocab_size=400, sample_every=0, steps=2, eval_every=2)
step.keep_freed_memory = lambda: None
gpt.train(sys.argv[1], n_layer=2, n_head=2, n_embd=32, block_size=128, batch_tokens=256, **asked)
before = resident("VmRSS")
gpt.train(sys.argv[1], **asked, **json.loads(sys.argv[2]))
print(resident("VmHWM") - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="resident memory is read from /proc")
@pytest.mark.parametrize("dtype", ["float32", more("bfloat16")])
def test_a_process_grows_by_what_is_counted(tmp_path: Path, dtype: Any) -> None:
    """A whole run, held-out text and checkpoints in it, by the system's own count."""
    text = tmp_path / "text.txt"
    text.write_text(make_text(60_000), encoding="utf-8")
    asked = {"n_layer": 2, "n_head": 2, "n_embd": 64, "block_size": 128, "batch_tokens": 32768}
    given = json.dumps(asked | {"dtype": dtype, "micro_batch": "256"})
    # What is freed goes back to the system at once, and is not kept for later.
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", GROWS, str(text), given],
        cwd=tmp_path, env=environment, check=True, capture_output=True, timeout=600, text=True,
    )  # fmt: skip
    del asked["batch_tokens"]
    counted = training(GPTConfig(vocab_size=400, **asked), Setup(256, False, dtype, device="cpu"))
    assert counted.peak == pytest.approx(int(done.stdout), rel=0.1)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
def test_a_long_context_takes_memory_as_it_is_used() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    config, before = GPTConfig(64, 2**16, 4, 4, 64), resident()
    cache = KVCache(config, 4, torch.device("cpu"), torch.float32)
    assert cache.nbytes == 2**29
    assert resident() - before < 2**25
    assert not cache.keys[0][0, 0, :100].any()
    cache.keys[0][1, 0, :1000] = 1
    assert 2**15 < resident() - before < 2**25
