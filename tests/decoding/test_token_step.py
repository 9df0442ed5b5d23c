"""The decoding step for a GPU, tested on a CPU: products, attention, and CUDA graph inputs."""

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import slow
from models import push

from gpt.config.device import Compute
from gpt.config.model import GPTConfig
from gpt.decoding.context import Context
from gpt.decoding.token_step import next_tokens
from gpt.decoding.weights import GPULinear, dtype_name, prepare, weight_bytes
from gpt.model.cache import BLOCK, make_block_mask, make_column_mask
from gpt.model.decoder import GPT
from gpt.model.kernels import attend, attend_blocks
from gpt.model.params import count_matmul_parameters
from gpt.model.quantize import QuantizedLinear, quantize_model, to_int8

GPU = Compute(torch.device("cuda"), torch.float32)


def model_of(arch: Any, rounded: bool = False) -> GPT:
    torch.manual_seed(0)
    positions: Any = "rotary" if arch == "modern" else "learned"
    model = GPT(GPTConfig.of(arch, 50, 64, 2, 2, 32, positions=positions)).eval()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.3)
    return quantize_model(model, 8) if rounded else model


def logits_of(model: GPT, prompt: list[int], following: list[int], backend: Any = None) -> list[torch.Tensor]:
    """Returns the logits after each id of ``following``. If there is a ``backend``, compiles `next_tokens`."""
    step = None if backend is None else functools.partial(torch.compile(next_tokens, backend=backend), model)
    context = Context(model, Compute(torch.device("cpu"), torch.float32), 1, 64, step)
    push(context, prompt)
    if step is None:
        return [context.logits(push(context, [id])) for id in following]
    results = []
    for id in following:
        context.last[:] = id
        results.append(context.next_tokens(context.slots)[0].clone())
    return results


@pytest.mark.parametrize(
    ("arch", "rounded"), [("gpt2", True), ("modern", False), slow("gpt2", False), slow("modern", True)]
)
def test_gpu_layout_matches_plain_weights(arch: str, rounded: bool) -> None:
    reference = model_of(arch, rounded)
    for module in [*reference.modules()]:
        if isinstance(module, QuantizedLinear):  # On a GPU, products don't round their inputs.
            weight = module.weight.dequantize()
            module.forward = functools.partial(F.linear, weight=weight, bias=module.bias)  # type: ignore[method-assign]
    expected = logits_of(reference, [1, 2, 3], [4, 5, 49])
    prepared = prepare(model_of(arch, rounded), GPU)
    assert sum(isinstance(module, GPULinear) for module in prepared.modules()) == 9
    assert dtype_name(prepared, GPU) == ("int8" if rounded else "float32")
    count = sum(module.elements for module in prepared.modules() if isinstance(module, GPULinear))
    assert weight_bytes(prepared, GPU) == 4 * count_matmul_parameters(prepared.config) - (3 * count if rounded else 0)
    torch._dynamo.reset()
    for results in (logits_of(prepared, [1, 2, 3], [4, 5, 49], "eager"), logits_of(prepared, [1, 2, 3], [4, 5, 49])):
        for actual, expected_logits in zip(results, expected, strict=True):
            assert actual.shape[-1] == 50
            assert torch.allclose(actual, expected_logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("materialize", [False, True])
def test_gpu_linear_matches_linear(materialize: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, bias, x = torch.randn(50, 32), torch.randn(50), torch.randn(1, 1, 32)
    quantized = to_int8(weight)
    for linear, expected in (
        (GPULinear(weight, bias, materialize=materialize), F.linear(x, weight, bias)),
        (GPULinear(quantized.levels, bias, quantized.scales, materialize), F.linear(x, quantized.dequantize(), bias)),
    ):
        assert len(linear.weight) == 64
        assert torch.allclose(linear(x), expected, atol=1e-5)
        with monkeypatch.context() as patched:
            patched.setattr(torch.compiler, "is_compiling", lambda: True)
            assert torch.allclose(linear(x), expected, atol=1e-5)
            assert linear(x.bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize(("window", "columns"), [(300, 300), (256, 256), (100, 164), (20, 400)])
@pytest.mark.parametrize("heads", [2, 6])
def test_attention_reads_only_filled_blocks(window: int, columns: int, heads: int) -> None:
    positions = torch.tensor([0, 5, 127, 128, 255, 290, 299] + ([164, 700] if columns > window else []))
    positions = positions[positions < columns] if columns == window else positions
    q, k, v = (torch.randn(len(positions), n, t, 16) for n, t in ((heads, 1), (2, columns), (2, columns)))
    visible_columns = make_column_mask(positions, window, columns)
    blocks = make_block_mask(torch.arange(5, dtype=torch.int32), positions, window, columns)
    read_columns = blocks.to_dense().repeat_interleave(BLOCK, -1)[..., :columns].bool()
    assert (read_columns | ~visible_columns).all()  # Every visible column is read.
    filled_columns = (positions + 1).clamp(max=columns)[:, None, None, None]
    assert torch.equal(read_columns.sum(-1, keepdim=True), (-(-filled_columns // BLOCK) * BLOCK).clamp(max=columns))
    expected = attend(q, k, v, visible_columns)
    torch._dynamo.reset()
    assert torch.allclose(torch.compile(attend_blocks, backend="eager")(q, k, v, blocks), expected, atol=1e-5)


@pytest.mark.parametrize("rounded", [False, True])
def test_cuda_graph_inputs_are_static(rounded: bool) -> None:
    """A CUDA graph would copy inputs with changing addresses in every step."""
    dynamic_shapes: list[tuple[int, ...]] = []

    def inspect_inputs(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        for node in graph.graph.find_nodes(op="placeholder"):
            static = node.meta.get("tensor_dict", {}).get("_dynamo_static_input_type")
            if static is None and isinstance(node.meta.get("example_value"), torch.Tensor):
                dynamic_shapes.append(tuple(node.meta["example_value"].shape))
        return graph

    torch._dynamo.reset()
    logits_of(prepare(model_of("modern", rounded), GPU), [1, 2, 3], [4], inspect_inputs)
    assert dynamic_shapes == []
