"""Weights for decoding: their dtypes, and compiled steps."""

import json
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from conftest import Gpt
from models import CPU, batched, engine_of, tiny_model

import gpt as library
from gpt.config.device import Compute
from gpt.config.sample import SampleConfig
from gpt.decoding.context import Context
from gpt.decoding.engine import Request
from gpt.decoding.native import PackedLinear
from gpt.decoding.token_step import compile_step, next_tokens
from gpt.decoding.weights import prepare
from gpt.model.decoder import GPT
from gpt.model.quantize import quantize_model

BF16 = Compute(torch.device("cpu"), torch.bfloat16)


def logits(model: GPT) -> torch.Tensor:
    idx = torch.randint(50, (3, 12), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        return model(idx).float()


def test_int8_loss_is_close_to_float32(gpt: Gpt, run_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_bytes("the cat sat on the mat in Zürich\n".encode() * 20)
    exact, rounded = (
        json.loads(gpt("eval", tmp_path / "t.txt", "-m", run_folder, "--json", "--dtype", dtype).out)["loss"]
        for dtype in ("float32", "int8")
    )
    assert exact != rounded
    assert abs(exact - rounded) < 0.01 * exact
    done = gpt("sample", "the cat", "-m", run_folder, "--dtype", "int8", "-n", "10", "--greedy")
    assert done.code == 0
    assert "int8" in done.err


def test_weights_are_loaded_in_their_final_dtype(run_folder: Path) -> None:
    config = SampleConfig()
    head = library.load(run_folder, dtype="bfloat16", sampling=config).model.lm_head
    assert isinstance(head, PackedLinear)
    assert head.kind == "bfloat16"
    assert library.load(run_folder, dtype="bfloat16").model.wte.weight.dtype == torch.float32
    unprepared = library.load(run_folder)
    assert unprepared.model.lm_head is None
    loaded = library.load(run_folder, sampling=config)
    assert torch.allclose(logits(loaded.model), logits(unprepared.model), atol=1e-4)


def test_float32_weights_are_cast_in_each_product() -> None:
    model, ids = tiny_model(40), [[1, 2, 3, 4, 5]]
    context = Context(model, BF16)
    with torch.inference_mode():
        actual = context.logits(context.forward([(context.slots[0], 5)], torch.tensor(ids[0])))
        with BF16.autocast():
            expected = model(torch.tensor(ids)).float()
        assert torch.allclose(actual, expected, atol=1e-2)
        assert (actual - model(torch.tensor(ids))).abs().max() > 1e-2


@pytest.mark.parametrize("positions", ["learned", "rotary"])
def test_idle_row_with_a_full_context_does_not_affect_other_rows(positions: str) -> None:
    model, config = tiny_model(40, positions), SampleConfig(max_tokens=20, ignore_eot=True)
    requests = [Request([1]), Request(list(range(38)))]
    engine = engine_of(Context(model, CPU, 2, step=partial(next_tokens, model)), requests, config)
    generated: list[list[int]] = [[], []]
    for event in engine.run():
        generated[event.number] += [token.id for token in event.tokens]
        if len(generated[1]) == 3:  # The context is full after two of the three tokens.
            engine.cancel(1)
    assert generated[0] == [token.id for token in batched(model, requests[:1], config, 1)[0]]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None or sys.platform == "win32", reason="torch.compile needs a C++ compiler")
@pytest.mark.filterwarnings("ignore")
def test_compiled_steps_match_and_compile_once() -> None:
    model = tiny_model(64)
    notes: list[str] = []
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    step = compile_step(model, CPU, notes.append)
    config = SampleConfig(max_tokens=20, ignore_eot=True)
    for prompt in ([1], list(range(9)), list(range(30))):
        requests = [Request(prompt), Request([3, 4])]
        generated: list[list[int]] = [[], []]
        for event in engine_of(Context(model, CPU, 2, 64, step), requests, config).run():
            generated[event.number] += [token.id for token in event.tokens]
        expected = batched(model, requests, config, 2)
        assert generated == [[token.id for token in tokens] for tokens in expected]
    assert notes == []
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize(
    ("error", "reason"), [("no compiler here\nand more", "no compiler here"), ("", "RuntimeError")]
)
def test_failed_compilation_falls_back_to_uncompiled_steps(
    error: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail_to_compile(*_: object, **__: object) -> Callable[..., torch.Tensor]:
        def step(*_: object) -> torch.Tensor:
            raise RuntimeError(error)

        return step

    monkeypatch.setattr(torch, "compile", fail_to_compile)
    model, notes = tiny_model(40), []
    step = compile_step(model, CPU, notes.append)
    config = SampleConfig(max_tokens=9, ignore_eot=True)
    events = list(engine_of(Context(model, CPU, step=step), [Request([1, 2])], config).run())
    assert sum(len(event.tokens) for event in events) == 9
    assert notes == [f"torch.compile failed, so steps run without it: {reason}"]
    notes.clear()
    assert compile_step(prepare(quantize_model(tiny_model(40), 8), CPU), CPU, notes.append) is None
    assert len(notes) == 1


def test_out_of_memory_is_not_a_compile_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def raise_out_of_memory(*_: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch, "compile", lambda *_, **__: raise_out_of_memory)
    notes: list[str] = []
    model = tiny_model(40)
    with pytest.raises(torch.OutOfMemoryError):
        context = Context(model, CPU, step=compile_step(model, CPU, notes.append))
        list(engine_of(context, [Request([1, 2])], SampleConfig(max_tokens=9, ignore_eot=True)).run())
    assert notes == []
