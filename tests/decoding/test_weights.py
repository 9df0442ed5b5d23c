"""Weight layouts for decoding: packed, int8, int4, compiled."""

import copy
import json
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from conftest import Gpt
from models import CPU, PROMPTS, batched, engine_of, tiny_model
from torch import nn

import gpt as library
from gpt.config import GPTConfig
from gpt.decoding import native, weights
from gpt.decoding.context import Context
from gpt.decoding.engine import Request
from gpt.decoding.token_step import compile_step, next_tokens
from gpt.decoding.weights import Int4Linear, Int8Linear, PackedLinear, dtype_name, prepare
from gpt.device import Compute, has_native_bfloat16
from gpt.model.decoder import GPT
from gpt.model.quantize import Quantized, quantize_model, to_int4, to_int8
from gpt.sample_config import SampleConfig

BF16 = Compute(torch.device("cpu"), torch.bfloat16)


def logits(model: GPT) -> torch.Tensor:
    idx = torch.randint(50, (3, 12), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        return model(idx).float()


@pytest.mark.parametrize(("arch", "positions"), [("gpt2", "learned"), ("modern", "rotary")])
def test_packed_weights_match_unpacked_weights(arch: str, positions: str) -> None:
    unpacked = tiny_model(40, positions, arch)
    packed = prepare(copy.deepcopy(unpacked), CPU)
    assert not any(isinstance(module, nn.Linear) for module in packed.modules())
    assert sum(isinstance(module, PackedLinear) for module in packed.modules()) == 4 * 2 + 1
    assert torch.allclose(logits(packed), logits(unpacked), atol=1e-5)
    config = SampleConfig(max_tokens=30, ignore_eot=True)
    requests = [Request(prompt) for prompt in PROMPTS]
    for rows in (1, 3):
        expected, actual = (batched(model, requests, config, rows) for model in (unpacked, packed))
        assert [[token.id for token in tokens] for tokens in expected] == [
            [token.id for token in tokens] for tokens in actual
        ]


def round_to_int8(weight: torch.Tensor) -> torch.Tensor:
    """Rounds to int8 per channel, in floating point."""
    scale = weight.abs().amax(1, keepdim=True).clamp(min=1e-30) / 127
    return (weight / scale).round() * scale


@pytest.mark.parametrize("missing_instruction", [None, "has_int8_kernels", "has_exact_int8_sums"])
@pytest.mark.parametrize("bias", [True, False])
def test_int8_products_match_rounded_weights(
    missing_instruction: str | None, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Input rows differ widely in scale. Some cases simulate a CPU that lacks an instruction."""
    if missing_instruction:
        monkeypatch.setattr(weights, missing_instruction, lambda: False)
    torch.manual_seed(0)
    layer = nn.Linear(64, 33, bias=bias)
    layer.weight.data[7] = 0.0  # Padding rows are zero.
    x = torch.randn(2, 5, 64) * torch.tensor([1e-4, 1.0, 1e4, 3.0, 0.0])[:, None]
    quantized = Int8Linear(to_int8(layer.weight), layer.bias)
    assert quantized.quantizes_input == weights.has_int8_kernels()
    assert not quantized.quantizes_input or missing_instruction != "has_exact_int8_sums" or quantized.levels == 63
    with torch.no_grad():
        y = quantized(x)
        if quantized.quantizes_input:
            step = x.abs().amax(-1, keepdim=True).clamp(min=1e-30) / quantized.levels
            step /= 1 if quantized.has_exact_sums else 2 * quantized.levels  # The rounding error is multiplied as well.
            x = (x / step).round() * step
        expected = nn.functional.linear(x, round_to_int8(layer.weight), layer.bias)
    scale = expected.abs().amax(-1, keepdim=True)
    assert ((y - expected).abs() <= (1e-5 if quantized.quantizes_input else 2e-2) * scale + 1e-6).all()


@pytest.mark.skipif(not Int4Linear.runs_on(CPU.device), reason="the int4 kernel needs AVX2")
@pytest.mark.parametrize("bias", [True, False])
def test_int4_products_match_rounded_weights(bias: bool) -> None:
    """Unit vectors expose each weight. The kernel multiplies small inputs. Large inputs can use dequantized weights."""
    torch.manual_seed(0)
    for out_features, in_features in ((16, 64), (80, 96), (192, 256)):
        weight = to_int4(torch.randn(out_features, in_features) * torch.logspace(-3, 1, out_features)[:, None])
        exact, units = weight.dequantize(), torch.eye(in_features)
        layer = Int4Linear(weight, None)
        rounded = Quantized(weight.levels, weight.scales.bfloat16()).dequantize()
        assert torch.equal(torch.cat([layer(chunk) for chunk in units.split(16)]).t(), rounded.bfloat16().float())
        assert layer.restores == (out_features == 192)
        restored = rounded if layer.restores and not has_native_bfloat16() else rounded.bfloat16().float()
        assert torch.equal(
            torch.cat([layer(chunk) for chunk in units.repeat(2, 1).split(128)])[:in_features].t(), restored
        )
        layer = Int4Linear(weight, torch.randn(out_features) if bias else None)
        for rows in (1, 40, 100):
            x = torch.randn(2, rows, in_features)
            y, expected = layer(x), nn.functional.linear(x, exact, layer.bias)
            assert y.dtype == x.dtype
            size = x.norm(dim=-1, keepdim=True) * exact.norm(dim=1) + expected.abs()
            assert ((y - expected).abs() <= 2**-8 * size).all()


def test_int4_weights_are_dequantized_if_the_kernel_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Int4Linear, "runs_on", lambda device: False)
    exact = quantize_model(GPT(GPTConfig(11, 8, 2, 2, 32)).eval(), 4)
    idx = torch.tensor([[1, 2, 3]])
    with torch.inference_mode():
        expected = exact.trunk(idx)
        prepared = prepare(exact, CPU)
        assert dtype_name(prepared, CPU) == "float32"
        assert torch.allclose(prepared.trunk(idx), expected, atol=1e-5)


def test_int8_rows_are_independent() -> None:
    """A large input row does not make small rows less precise."""
    torch.manual_seed(0)
    layer = Int8Linear(to_int8(torch.randn(20, 32)), None)
    x = torch.randn(4, 32)
    single = torch.cat([layer(row[None]) for row in x])
    assert torch.equal(layer(torch.cat([x, 1e6 * torch.randn(1, 32)]))[:4], single)


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
    assert library.load(run_folder, dtype="bfloat16", sampling=config).model.wte.weight.dtype == torch.bfloat16
    assert library.load(run_folder, dtype="bfloat16").model.wte.weight.dtype == torch.float32
    unprepared = library.load(run_folder)
    assert unprepared.model.lm_head is None
    loaded = library.load(run_folder, sampling=config)
    assert torch.allclose(logits(loaded.model), logits(unprepared.model), atol=1e-4)
    to_compile = library.load(run_folder, sampling=SampleConfig(compile="on"))
    assert native.is_used(to_compile.model)


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
