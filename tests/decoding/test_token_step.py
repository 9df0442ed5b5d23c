"""Products of a GPU, tested on a CPU. tests/fake_cuda/test_decoding.py tests its steps."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import push

from gpt.config.device import Compute
from gpt.config.model import GPTConfig
from gpt.decoding.context import Context
from gpt.decoding.weights import GPULinear, prepare, weight_bytes
from gpt.model.decoder import GPT
from gpt.model.params import count_matmul_parameters
from gpt.model.quantize import QuantizedLinear, quantize_model

GPU = Compute(torch.device("cuda"), torch.float32)


def model_of(arch: Any, rounded: bool = False) -> GPT:
    torch.manual_seed(0)
    positions: Any = "rotary" if arch == "modern" else "learned"
    model = GPT(GPTConfig.of(arch, 50, 64, 2, 2, 32, positions=positions)).eval()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.3)
    return quantize_model(model, 8) if rounded else model


def logits_of(model: GPT, prompt: list[int], following: list[int]) -> list[torch.Tensor]:
    """Returns the logits after each id of ``following``."""
    context = Context(model, Compute(torch.device("cpu"), torch.float32), 1, 64)
    push(context, prompt)
    return [context.logits(push(context, [id])) for id in following]


@pytest.mark.parametrize("arch", ["gpt2", "modern"])
@pytest.mark.parametrize("rounded", [False, True])
def test_gpu_layout_matches_plain_weights(arch: str, rounded: bool) -> None:
    expected = logits_of(model_of(arch, rounded), [1, 2, 3], [4, 5, 49])
    prepared = prepare(model_of(arch, rounded), GPU)
    layout = QuantizedLinear if rounded else GPULinear
    assert sum(isinstance(module, layout) for module in prepared.modules()) == 9
    matrices = [module.weight for module in prepared.modules() if isinstance(module, QuantizedLinear)]
    unrounded = count_matmul_parameters(prepared.config) - sum(math.prod(matrix.shape) for matrix in matrices)
    assert weight_bytes(prepared, GPU) == 4 * unrounded + sum(matrix.nbytes for matrix in matrices)
    for actual, expected_logits in zip(logits_of(prepared, [1, 2, 3], [4, 5, 49]), expected, strict=True):
        assert actual.shape[-1] == 50
        assert torch.allclose(actual, expected_logits, rtol=1e-4, atol=1e-4)


def test_gpu_linear_matches_linear() -> None:
    weight, bias, x = torch.randn(50, 32), torch.randn(50), torch.randn(1, 1, 32)
    linear = GPULinear(weight, bias)
    assert len(linear.weight) == 64
    assert torch.allclose(linear(x), F.linear(x, weight, bias), atol=1e-5)
