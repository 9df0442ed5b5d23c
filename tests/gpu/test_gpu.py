"""GPU tests. Tests marked ``on_cuda`` also run on the fake CUDA device. Models use byte tokenizers, which need no
training."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import make_text, slow
from models import loud

import gpt
from gpt.config import events
from gpt.config.device import Compute, pick
from gpt.config.model import GPTConfig
from gpt.decoding.context import Context
from gpt.decoding.weights import prepare
from gpt.model.decoder import GPT
from gpt.model.memory import Setup, count_step_memory
from gpt.model.quantize import quantize_model
from gpt.system.peaks import peak_flops
from gpt.training.optim import make_optimizer
from gpt.training.recipe import Facts, plan
from gpt.training.step import Stepper
from gpt.training.strategy import Single

on_cuda = pytest.mark.usefixtures("cuda")

DEVICE = "cuda"
SMALL: dict[str, Any] = {
    "n_layer": 2, "n_head": 2, "n_embd": 64, "block_size": 64, "batch_tokens": 2048, "tokenizer": "bytes",
    "sample_every": 0, "device": DEVICE, "lr": 3e-3,
}  # fmt: skip
FEW_TOKENS = {"n_layer": 1, "n_embd": 32, "batch_tokens": 256, "lr": 1e-2}  # float16 is slow on a CPU.
SMALL_VOCABULARY = 257  # 256 bytes and end-of-text


@pytest.fixture
def text(workdir: Path) -> Path:
    path = workdir / "book.txt"
    path.write_bytes(make_text(8000).encode())
    return path


def train(text: Path, **settings: Any) -> tuple[Any, list[float], list[str]]:
    run_events: list[Any] = []
    result = gpt.train(text, listen=run_events.append, **{**SMALL, **settings})
    losses = [event.loss for event in run_events if isinstance(event, events.StepEvent)]
    return result, losses, [event.text for event in run_events if isinstance(event, events.Note)]


@on_cuda
@pytest.mark.slow
def test_half_precision_losses_follow_float32(text: Path) -> None:
    """With float16, the first steps can be skipped to adjust the loss scale."""
    _, float32_losses, _ = train(text, steps=20, dtype="float32", **FEW_TOKENS)
    for dtype in ("bfloat16", "float16"):
        _, half_losses, _ = train(text, steps=20, dtype=dtype, **FEW_TOKENS)
        assert half_losses[0] == pytest.approx(float32_losses[0], abs=0.02), dtype
        assert half_losses[-1] == pytest.approx(float32_losses[-1], abs=0.15), dtype
        assert half_losses[-1] < half_losses[0] - 1, dtype


@pytest.mark.gpu
@pytest.mark.usefixtures("real_cuda")
@pytest.mark.parametrize("arch", ["gpt2", "modern"])
def test_compiled_training_matches_uncompiled_training(text: Path, arch: str) -> None:
    runs = {mode: train(text, steps=20, arch=arch, dtype="bfloat16", compile=mode) for mode in ("off", "on")}
    assert json.loads((runs["on"][0].run / "run.json").read_text())["resolved"]["compile"]
    assert runs["on"][1] == pytest.approx(runs["off"][1], abs=0.05)
    assert runs["on"][0].val_loss == pytest.approx(runs["off"][0].val_loss, abs=0.05)


class StepRunner:
    """Trains a small model on fixed batches. `run` returns losses and gradient norms."""

    def __init__(self, use_cuda_graph: bool, **settings: Any) -> None:
        compute = pick(DEVICE, settings.pop("dtype", "float32"))
        config = gpt.TrainConfig(
            **{"preset": "nano", "dropout": 0.0, "compile": "off", "batch_tokens": 1024, "steps": 9} | settings
        )
        recipe = plan(config, Facts.on(compute, bytes=10**9, tokens=10**8, vocab_size=1024, held_out=False))
        torch.manual_seed(0)
        model = GPT(recipe.model).to(compute.device)
        self.optimizer = make_optimizer(model, recipe.optimizer, 0.1, compute.dtype)
        self.stepper = Stepper(Single(model, self.optimizer, compute), recipe)
        assert self.stepper.graph is not None
        if not use_cuda_graph:
            self.stepper.graph = None
        self.batches = np.random.default_rng(0).integers(1024, size=(9, recipe.rows, recipe.model.block_size))
        if recipe.compile:
            assert self.stepper.compile() is None
        torch.manual_seed(0)

    def run(self, batch_numbers: range, rows: int | None = None) -> list[float]:
        batches = [(self.batches[n][:rows], 1e-3 * (n + 1)) for n in batch_numbers]
        return [value for x, lr in batches for value in self.stepper.step(x, x, lr).read()]


@pytest.mark.gpu
@pytest.mark.usefixtures("real_cuda")
@pytest.mark.filterwarnings("default")  # torch hides its warnings while it recompiles for the larger batch.
@pytest.mark.parametrize(
    "settings",
    [
        {}, {"dropout": 0.1}, {"arch": "modern"}, {"optimizer": "adamw"}, {"micro_batch": "2"},
        {"dtype": "bfloat16", "preset": "micro", "batch_tokens": 4096},
        {"dtype": "bfloat16", "compile": "on", "dropout": 0.1},
    ],
    ids=str,
)  # fmt: skip
def test_cuda_graph_steps_match_uncaptured_steps(settings: dict[str, Any]) -> None:
    """Covers a growing batch, a RoPE table grown by sampling, and restored moments."""
    uncaptured, captured = StepRunner(False, **settings), StepRunner(True, **settings)
    for runner in (uncaptured, captured):
        torch.manual_seed(1)  # dropout seed
        runner.results = runner.run(range(5), 4) + runner.run(range(5, 9))  # type: ignore[attr-defined]
    assert captured.stepper.graph is not None
    assert captured.stepper.graph.captured is not None
    tolerance = 1e-5 if settings.get("dtype") is None else 2e-3
    assert captured.results == pytest.approx(uncaptured.results, rel=tolerance)  # type: ignore[attr-defined]
    for runner in (uncaptured, captured):
        state = {name: moment.clone() for name, moment in runner.optimizer.state(runner.stepper.model).items()}
        torch.manual_seed(2)
        runner.stepper.model.grow_rope_table(200)
        # Overwrites the old table's freed memory.
        nan_tensors = [torch.full((2, 64, 32), torch.nan, device=DEVICE) for _ in range(100)]
        runner.results = runner.run(range(4))  # type: ignore[attr-defined]
        del nan_tensors
        runner.optimizer.restore(runner.stepper.model, state)
        runner.stepper.drop_graph()
        runner.results += runner.run(range(4))  # type: ignore[attr-defined]
    assert captured.results == pytest.approx(uncaptured.results, rel=tolerance)  # type: ignore[attr-defined]


@pytest.mark.parametrize("dtype", ["float32", slow("int8")])
@pytest.mark.parametrize("config", [
    GPTConfig.of("modern", 50, 16, 2, 4, 32, n_kv_head=2, window=4, window_layers=(1,)),
    slow(GPTConfig.of("gpt2", 50, 16, 2, 2, 32)),
])  # fmt: skip
def test_graphs_of_all_sizes_match_packed_steps(
    cuda: Any, config: GPTConfig, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows in and out of order, rings that wrap around, and RoPE tables that grow."""
    monkeypatch.setattr("gpt.system.cuda_graph.EAGER_CALLS", 0)
    monkeypatch.setattr("gpt.decoding.token_step.MIN_COLUMNS", 4)
    with torch.inference_mode():
        compute = Compute(torch.device(DEVICE), torch.float32)
        contexts = []
        for graphed in (True, False):
            torch.manual_seed(0)
            model = loud(config).to(DEVICE)
            prepare(model if dtype == "float32" else quantize_model(model, 8), compute)
            contexts.append(Context(model, compute, 5, note=pytest.fail))
            if not graphed:
                contexts[-1]._token_step = None
        for step in range(40 if config.positions == "rotary" else 16):
            rows = [[0], [0, 1, 2, 3], [1, 3, 4], [*range(5)], [4]][step % 5]
            results = []
            for context in contexts:
                slots = [context.slots[row] for row in rows]
                ids = torch.tensor([(row + step) % 50 for row in rows]).to(DEVICE)
                results.append(context.logits(context.forward([(slot, 1) for slot in slots], ids)).cpu())
            torch.testing.assert_close(*results, atol=1e-4, rtol=1e-4)
    assert cuda is None or cuda.launches["graph"] == step + 1


@pytest.mark.gpu
@pytest.mark.usefixtures("real_cuda")
def test_uncapturable_step_runs_without_a_cuda_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = StepRunner(False).run(range(6))
    runner = StepRunner(True)
    clip = runner.stepper.strategy.clip_grad_norm

    def clip_and_wait(*args: Any) -> torch.Tensor:
        norm = clip(*args)
        return norm + 0 * float(norm)

    monkeypatch.setattr(runner.stepper.strategy, "clip_grad_norm", clip_and_wait)
    assert runner.run(range(6)) == pytest.approx(expected, rel=1e-5)
    assert runner.stepper.graph is None


@pytest.mark.gpu
@pytest.mark.usefixtures("real_cuda")
def test_out_of_memory_halves_the_micro_batch(text: Path) -> None:
    """The memory limit is the mean of what micro-batches of 512 and of 64 sequences need."""
    large = {"n_embd": 256, "n_layer": 4, "n_head": 4, "batch_tokens": 32_768, "steps": 4, "dtype": "float32"}

    def measure_reserved(micro_batch: str) -> tuple[int, list[float]]:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        _, losses, _ = train(text, micro_batch=micro_batch, **large)
        return torch.cuda.max_memory_reserved(), losses

    max_bytes, expected = measure_reserved("512")
    min_bytes, _ = measure_reserved("64")
    assert max_bytes > 1.5 * min_bytes
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction((max_bytes + min_bytes) / 2 / total)
    try:
        result, losses, notes = train(text, micro_batch="512", **large)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert any(note.startswith("out of memory: from now on, ") for note in notes)
    assert losses == pytest.approx(expected, rel=1e-3)
    assert json.loads((result.run / "run.json").read_text())["resolved"]["micro_batch"] < 512


@on_cuda
@pytest.mark.slow
@pytest.mark.parametrize("arch", ["gpt2", "modern"])
def test_kv_cache_matches_one_forward_pass(text: Path, arch: str) -> None:
    result, _, _ = train(text, steps=8, arch=arch, dtype="float32", n_embd=32, batch_tokens=512)
    model = gpt.load(result.run, device=DEVICE, dtype="float32")
    prompt = "the cat "
    writing = model.write(prompt, gpt.SampleConfig(max_tokens=16, ignore_eot=True), seed=1)
    assert "".join(writing) == writing.sample.text
    prompt_ids, new_ids = model.tokenizer.encode(prompt).tolist(), writing.sample.tokens
    with torch.inference_mode():
        logits = model.model(torch.tensor([prompt_ids + new_ids], device=model.compute.device))[0, :, :SMALL_VOCABULARY]
    logprobs = logits.log_softmax(-1)[len(prompt_ids) - 1 : -1].cpu()
    expected = logprobs.gather(1, torch.tensor(new_ids)[:, None]).sum()
    assert writing.sample.logprob == pytest.approx(float(expected), rel=1e-4)
    assert len(set(new_ids)) > 5


@on_cuda
@pytest.mark.slow
def test_mfu_is_reported_for_known_devices(text: Path) -> None:
    result, _, _ = train(text, steps=2, dtype="bfloat16", **FEW_TOKENS)
    is_known = peak_flops(torch.cuda.get_device_name(), "bfloat16") is not None
    assert (result.mfu is not None) == is_known
    if is_known:
        assert 0 < result.mfu < 1


@pytest.mark.gpu
@pytest.mark.usefixtures("real_cuda")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("arch", "dropout"), [("gpt2", 0.0), ("gpt2", 0.1), ("modern", 0.0)])
@pytest.mark.parametrize("batch", [4096, 8192])
def test_memory_estimate_matches_the_allocator(arch: Any, dropout: float, dtype: Any, batch: int) -> None:
    compute = pick(DEVICE, dtype)
    config = gpt.TrainConfig(
        preset="gpt2", n_layer=3, arch=arch, dropout=dropout, batch_tokens=batch, micro_batch="4", steps=1,
        compile="off",
    )  # fmt: skip
    facts = Facts.on(compute, bytes=10**9, tokens=10**8, vocab_size=50_257, held_out=False)
    recipe = replace(plan(config, facts), loss_chunk=0)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    model = GPT(recipe.model).to(compute.device)
    optimizer = make_optimizer(model, recipe.optimizer, 0.1, compute.dtype)
    stepper = Stepper(Single(model, optimizer, compute), recipe)
    x = np.zeros((recipe.rows, recipe.model.block_size), np.int64)
    stepper.step(x, x, 0.0).read()
    torch.cuda.reset_peak_memory_stats()
    stepper.step(x, x, 0.0).read()
    estimate = count_step_memory(recipe.model, Setup(4, recipe.rows > 4, dtype)).peak
    assert torch.cuda.max_memory_allocated() - before == pytest.approx(estimate, rel=0.1)
