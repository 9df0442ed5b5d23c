"""What a GPU can show, and where ``on_cuda``, the CPU in disguise. Texts are bytes, so that no vocabulary need be learnt."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import make_text

import gpt
from gpt import events
from gpt.device import pick
from gpt.model.decoder import GPT
from gpt.model.memory import Setup, training
from gpt.peaks import peak_flops
from gpt.training.optim import make_optimizer
from gpt.training.parallel import Single
from gpt.training.recipe import resolve
from gpt.training.step import Stepper

on_cuda = pytest.mark.usefixtures("cuda")  # the machine's own, and the CPU in disguise

DEVICE = "cuda"
SMALL: dict[str, Any] = {
    "n_layer": 2, "n_head": 2, "n_embd": 64, "block_size": 64, "batch_tokens": 2048, "tokenizer": "bytes",
    "sample_every": 0, "device": DEVICE, "lr": 3e-3,
}  # fmt: skip
FEW_TOKENS = {"n_layer": 1, "n_embd": 32, "batch_tokens": 256, "lr": 1e-2}  # a CPU computes slowly in float16
SMALL_VOCABULARY = 257  # bytes, and end-of-text


@pytest.fixture
def text(workdir: Path) -> Path:
    path = workdir / "book.txt"
    path.write_bytes(make_text(8000).encode())
    return path


def train(text: Path, **settings: Any) -> tuple[Any, list[float], list[str]]:
    heard: list[Any] = []
    result = gpt.train(text, listen=heard.append, **{**SMALL, **settings})
    losses = [event.loss for event in heard if isinstance(event, events.StepEvent)]
    return result, losses, [event.text for event in heard if isinstance(event, events.Note)]


@on_cuda
@pytest.mark.slow
def test_half_precision_follows_float32(text: Path) -> None:
    """Under float16 the first steps may be left out, until the scale of the loss is found."""
    _, whole, _ = train(text, steps=20, dtype="float32", **FEW_TOKENS)
    for dtype in ("bfloat16", "float16"):
        _, half, _ = train(text, steps=20, dtype=dtype, **FEW_TOKENS)
        assert half[0] == pytest.approx(whole[0], abs=0.02), dtype
        assert half[-1] == pytest.approx(whole[-1], abs=0.15), dtype
        assert half[-1] < half[0] - 1, dtype


@pytest.mark.gpu
@pytest.mark.usefixtures("real_cuda")
@pytest.mark.parametrize("arch", ["gpt2", "modern"])
def test_compiled_and_not_learn_the_same(text: Path, arch: str) -> None:
    runs = {mode: train(text, steps=20, arch=arch, dtype="bfloat16", compile=mode) for mode in ("off", "on")}
    assert json.loads((runs["on"][0].run / "run.json").read_text())["resolved"]["compile"]
    assert runs["on"][1] == pytest.approx(runs["off"][1], abs=0.05)
    assert runs["on"][0].val_loss == pytest.approx(runs["off"][0].val_loss, abs=0.05)


class OneStep:
    """Steps of a small model and the same batches; the losses and gradients' norms that they give."""

    def __init__(self, repeats: bool, **settings: Any) -> None:
        compute = pick(DEVICE, settings.pop("dtype", "float32"))
        asked = gpt.TrainConfig(
            **{"preset": "nano", "dropout": 0.0, "compile": "off", "batch_tokens": 1024, "steps": 9} | settings
        )
        recipe = resolve(asked, compute, 10**9, 10**8, 1024, False, lambda note: None)
        torch.manual_seed(0)
        model = GPT(recipe.model).to(compute.device)
        self.optimizer = make_optimizer(model, recipe.optimizer, 0.1, compute.dtype)
        self.stepper = Stepper(Single(model, self.optimizer, compute), recipe, lambda micro_batch: None)
        assert self.stepper.repeats
        self.stepper.repeats = repeats
        self.batches = np.random.default_rng(0).integers(1024, size=(9, recipe.rows, recipe.model.block_size))
        if recipe.compile:
            assert self.stepper.compile() is None
        torch.manual_seed(0)

    def take(self, numbers: range, rows: int | None = None) -> list[float]:
        done = [(self.batches[n][:rows], 1e-3 * (n + 1)) for n in numbers]
        return [number for x, lr in done for number in self.stepper.step(x, x, lr).read()]


@pytest.mark.gpu
@pytest.mark.usefixtures("real_cuda")
@pytest.mark.parametrize(
    "settings",
    [
        {}, {"dropout": 0.1}, {"arch": "modern"}, {"optimizer": "adamw"}, {"micro_batch": "2"},
        {"dtype": "bfloat16", "preset": "micro", "batch_tokens": 4096},
        {"dtype": "bfloat16", "compile": "on", "dropout": 0.1},
    ],
    ids=str,
)  # fmt: skip
def test_steps_as_a_graph_are_steps(settings: dict[str, Any]) -> None:
    """Also when the batch grows, after a sample past the context, and after weights and moments were restored."""
    one_by_one, repeated = OneStep(False, **settings), OneStep(True, **settings)
    for each in (one_by_one, repeated):
        torch.manual_seed(1)  # the draws of dropout
        each.found = each.take(range(5), 4) + each.take(range(5, 9))  # type: ignore[attr-defined]
    assert repeated.stepper.graph is not None
    exact = 1e-5 if settings.get("dtype") is None else 2e-3
    assert repeated.found == pytest.approx(one_by_one.found, rel=exact)  # type: ignore[attr-defined]
    for each in (one_by_one, repeated):
        state = {name: moment.clone() for name, moment in each.optimizer.state(each.stepper.model).items()}
        torch.manual_seed(2)
        each.stepper.model.reach(200)
        rubbish = [torch.full((2, 64, 32), torch.nan, device=DEVICE) for _ in range(100)]  # where the table lay
        each.found = each.take(range(4))  # type: ignore[attr-defined]
        del rubbish
        each.optimizer.restore(each.stepper.model, state)
        each.stepper.forget_graph()
        each.found += each.take(range(4))  # type: ignore[attr-defined]
    assert repeated.found == pytest.approx(one_by_one.found, rel=exact)  # type: ignore[attr-defined]


@pytest.mark.gpu
@pytest.mark.usefixtures("real_cuda")
def test_what_can_be_no_graph_is_a_step_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = OneStep(False).take(range(6))
    steps = OneStep(True)
    clip = steps.stepper.parallel.clip_grad_norm

    def waits(*args: Any) -> torch.Tensor:
        norm = clip(*args)
        return norm + 0 * float(norm)

    monkeypatch.setattr(steps.stepper.parallel, "clip_grad_norm", waits)
    assert steps.take(range(6)) == pytest.approx(expected, rel=1e-5)
    assert not steps.stepper.repeats


@pytest.mark.gpu
@pytest.mark.usefixtures("real_cuda")
def test_memory_that_runs_out_halves_what_is_computed_at_once(text: Path) -> None:
    """The device is made to have room for less than the whole batch and more than an eighth of it."""
    large = {"n_embd": 256, "n_layer": 4, "n_head": 4, "batch_tokens": 32_768, "steps": 4, "dtype": "float32"}

    def reserved(micro_batch: str) -> tuple[int, list[float]]:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        _, losses, _ = train(text, micro_batch=micro_batch, **large)
        return torch.cuda.max_memory_reserved(), losses

    most, expected = reserved("512")
    least, _ = reserved("64")
    assert most > 1.5 * least
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction((most + least) / 2 / total)
    try:
        result, losses, notes = train(text, micro_batch="512", **large)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert any(note.startswith("out of memory: from now on, 256 of 512 sequences") for note in notes)
    assert losses == pytest.approx(expected, rel=1e-3)
    assert json.loads((result.run / "run.json").read_text())["resolved"]["micro_batch"] < 512


@on_cuda
@pytest.mark.slow
@pytest.mark.parametrize("arch", ["gpt2", "modern"])
def test_from_the_cache_as_without(text: Path, arch: str) -> None:
    """What a sample says of its ids' log-probabilities, a step a token, is what the whole text at once gives them."""
    result, _, _ = train(text, steps=8, arch=arch, dtype="float32", n_embd=32, batch_tokens=512)
    model = gpt.load(result.run, device=DEVICE, dtype="float32")
    prompt = "the cat "
    writing = model.write(prompt, gpt.SampleConfig(max_tokens=16, ignore_eot=True), seed=1)
    assert "".join(writing) == writing.sample.text
    given, written = model.tokenizer.encode(prompt).tolist(), writing.sample.tokens
    with torch.inference_mode():
        logits = model.model(torch.tensor([given + written], device=model.compute.device))[0, :, :SMALL_VOCABULARY]
    told = logits.log_softmax(-1)[len(given) - 1 : -1].cpu()
    at_once = told.gather(1, torch.tensor(written)[:, None]).sum()
    assert writing.sample.logprob == pytest.approx(float(at_once), rel=1e-4)
    assert len(set(written)) > 5


@on_cuda
@pytest.mark.slow
def test_mfu_is_told_where_the_datasheet_is_known(text: Path) -> None:
    result, _, _ = train(text, steps=2, dtype="bfloat16", **FEW_TOKENS)
    known = peak_flops(torch.cuda.get_device_name(), "bfloat16") is not None
    assert (result.mfu is not None) == known
    if known:
        assert 0 < result.mfu < 1


@pytest.mark.gpu
@pytest.mark.usefixtures("real_cuda")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("arch", "dropout"), [("gpt2", 0.0), ("gpt2", 0.1), ("modern", 0.0)])
@pytest.mark.parametrize("batch", [4096, 8192])
def test_steps_hold_what_the_arithmetic_says(arch: Any, dropout: float, dtype: Any, batch: int) -> None:
    """The allocator's own peak, of the second step."""
    compute = pick(DEVICE, dtype)
    asked = gpt.TrainConfig(
        preset="gpt2", n_layer=3, arch=arch, dropout=dropout, batch_tokens=batch, micro_batch="4", steps=1,
        compile="off",
    )  # fmt: skip
    recipe = replace(resolve(asked, compute, 10**9, 10**8, 50_257, False, lambda note: None), loss_chunk=0)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    model = GPT(recipe.model).to(compute.device)
    optimizer = make_optimizer(model, recipe.optimizer, 0.1, compute.dtype)
    stepper = Stepper(Single(model, optimizer, compute), recipe, lambda micro_batch: None)
    x = np.zeros((recipe.rows, recipe.model.block_size), np.int64)
    stepper.step(x, x, 0.0).read()
    torch.cuda.reset_peak_memory_stats()
    stepper.step(x, x, 0.0).read()
    counted = training(recipe.model, Setup(4, recipe.rows > 4, dtype)).peak
    assert torch.cuda.max_memory_allocated() - before == pytest.approx(counted, rel=0.1)
