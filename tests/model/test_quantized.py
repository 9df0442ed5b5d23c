"""Quantization, and models that are quantized when they are loaded."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from models import loud, save
from torch import Tensor

import gpt as library
from gpt.config.model import ARCHITECTURES, GPTConfig
from gpt.decoding import native
from gpt.model.quantize import GROUP, Quantized, to_int4, to_int8
from gpt.system.errors import UserError

MODERN = ARCHITECTURES["modern"]
SHAPES: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "modern": MODERN | {"n_kv_head": 1},
    "untied": MODERN | {"qk_norm": False, "biases": "qkv", "tied": False},
    "own": {"positions": "rotary"},
    "narrow": {"n_embd": 24},  # Rows of 24 do not divide into groups of 32.
}


def save_shape(path: Path, **properties: Any) -> Path:
    shape = {"vocab_size": 257, "block_size": 48, "n_layer": 2, "n_head": 2, "n_embd": 64}
    return save(path, loud(GPTConfig(**shape | properties), spread=0.1))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("models")

    def get(shape: str) -> Path:
        path = root / shape
        return path if path.exists() else save_shape(path, **SHAPES[shape])

    return get


def logits(path: Path, **options: Any) -> Tensor:
    ids = torch.randint(257, (3, 40), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        output: Tensor = library.load(path, device="cpu", **options).model(ids)
        return output.float()


# Quantization


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int8_matches_gguf_q8_0(dtype: torch.dtype) -> None:
    """The format is GGUF's Q8_0. Levels are those of the rounded scale, so the error is no larger."""
    gguf = pytest.importorskip("gguf")
    q8_0 = gguf.GGMLQuantizationType.Q8_0
    weight = (torch.randn(300, 64 * GROUP) * torch.logspace(-3, 3, 300)[:, None]).to(dtype)
    weight[3] = 0
    quantized, exact = to_int8(weight), weight.float()
    assert (quantized.bits, quantized.shape) == (8, (300, 2048))
    groups = exact.view(300, -1, GROUP)
    assert torch.equal(quantized.scales, (groups.abs().amax(-1) / 127).half())
    blocks = np.concatenate(
        [quantized.scales.numpy()[..., None].view(np.int8), quantized.levels.view(300, -1, GROUP).numpy()], axis=-1
    )
    restored = quantized.dequantize()
    assert np.array_equal(gguf.quants.dequantize(blocks.reshape(300, -1).view(np.uint8), q8_0), restored.numpy())
    reference = torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(exact.numpy(), q8_0), q8_0))
    assert (restored - exact).square().sum() <= (reference - exact).square().sum()
    assert torch.equal(to_int8(weight[:, :40]).dequantize()[:, :32], restored[:, :32])  # The last group is shorter.


def test_int4_matches_gguf_q4_0() -> None:
    """The format is GGUF's Q4_0, and the error is smaller than that of GGUF's quantizer."""
    gguf = pytest.importorskip("gguf")
    q4_0 = gguf.GGMLQuantizationType.Q4_0
    weight = (
        torch.randn(130, 4 * GROUP, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 3, 130)[:, None]
    )
    weight[7] = 0
    weight[8, :GROUP] = 0
    quantized = to_int4(weight)
    assert (quantized.bits, quantized.shape) == (4, (130, 128))
    blocks = np.concatenate(
        [quantized.scales.numpy()[..., None].view(np.uint8), quantized.levels.view(130, 4, GROUP // 2).numpy()], axis=-1
    )
    restored = quantized.dequantize()
    assert np.array_equal(gguf.quants.dequantize(blocks.reshape(130, -1), q4_0), restored.numpy())
    reference = torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(weight.numpy(), q4_0), q4_0))
    our_error, reference_error = ((values - weight).view(-1, GROUP).square().sum(1) for values in (restored, reference))
    assert our_error.sum() < 0.91 * reference_error.sum()
    assert (restored[7] == 0).all()
    ids = torch.tensor([[8, 0], [129, 7]])
    assert torch.equal(quantized.rows(ids), restored[ids])


@pytest.mark.parametrize("quantize", [to_int8, to_int4])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_nan_and_infinity_are_not_quantized(quantize: Callable[[Tensor], Quantized], bad: float) -> None:
    weight = torch.ones(9000, 64)
    weight[8000, 40] = bad
    with pytest.raises(UserError, match="NaN or infinite"):
        quantize(weight)


@pytest.mark.parametrize(("quantize", "large", "too_large"), [(to_int4, 4e5, 1e6), (to_int8, 8e6, 1e7)])
def test_scales_at_the_limits_of_float16(
    quantize: Callable[[Tensor], Quantized], large: float, too_large: float
) -> None:
    assert (quantize(torch.full((2, 32), 1e-12)).dequantize() == 0).all()
    weight = torch.full((2, 32), large)
    torch.testing.assert_close(quantize(weight).dequantize(), weight, rtol=1e-3, atol=0)
    with pytest.raises(UserError, match="too large for int"):
        quantize(torch.full((2, 32), too_large))


# Models


@pytest.mark.parametrize("dtype", ["int8", "int4"])
@pytest.mark.parametrize("shape", SHAPES)
def test_dtype_option_quantizes_in_c_and_in_torch(folders: Callable[[str], Path], shape: str, dtype: str) -> None:
    """A sum of float32 numbers can choose another of the scales tried for int4, which changes few groups."""
    path = folders(shape)
    in_c, in_torch, exact = logits(path, dtype=dtype, for_decoding=True), logits(path, dtype=dtype), logits(path)
    tolerance = 0 if dtype == "int8" else 1e-3
    if shape == "untied":
        tolerance = 5e-2  # In C, an embedding that is not the LM head is not rounded.
    assert (in_c - in_torch).abs().max() <= tolerance * exact.abs().max()
    assert 1e-4 < (in_c - exact).abs().max() / exact.abs().max() < (0.1 if dtype == "int8" else 1)


def test_c_and_torch_choose_the_same_int4_scales() -> None:
    lib = native.find(lambda text: None)
    assert lib is not None
    weight = torch.randn(130, 256) * torch.logspace(-3, 3, 130)[:, None]
    weight[7] = 0
    expected, packed = to_int4(weight), native.PackedLinear(lib, weight, None, 4).restore()
    assert isinstance(packed, Quantized)
    assert (packed.scales != expected.scales).float().mean() < 1e-2
    errors = [(matrix.dequantize() - weight).square().mean().item() for matrix in (packed, expected)]
    assert errors[0] == pytest.approx(errors[1], rel=1e-4)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(("number", "match"), [(torch.nan, "NaN"), (-torch.inf, "NaN"), (1e9, "too large for int")])
def test_c_refuses_numbers_without_a_scale(bits: int, number: float, match: str) -> None:
    lib = native.find(lambda text: None)
    assert lib is not None
    weight = torch.ones(300, 64)
    weight[280, 40] = number
    with pytest.raises(UserError, match=match):
        native.PackedLinear(lib, weight, None, bits)
