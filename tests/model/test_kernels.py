"""Fast kernels compared with reference implementations."""

import math
from typing import Any

import pytest
import torch

from gpt.config.model import ARCHITECTURES, GPTConfig
from gpt.model import decoder, kernels
from gpt.model.decoder import GPT
from gpt.model.loss import tied_cross_entropy
from gpt.training.gpu_step import compile_halves, uncompile_halves


def test_rms_norm_matches_torch() -> None:
    torch.manual_seed(0)
    norm = decoder.RMSNorm(16, eps=1e-3)
    torch.nn.init.normal_(norm.weight)
    x = torch.randn(2, 3, 5, 16, requires_grad=True)
    expected = torch.nn.functional.rms_norm(x, (16,), norm.weight, 1e-3)
    assert torch.allclose(norm(x), expected, atol=1e-6)
    weight = torch.randn_like(x)
    for a, b in zip(
        torch.autograd.grad((norm(x) * weight).sum(), (x, norm.weight)),
        torch.autograd.grad((expected * weight).sum(), (x, norm.weight)),
        strict=True,
    ):
        assert torch.allclose(a, b, atol=1e-5)


def test_rms_norm_of_bfloat16_rounds_once() -> None:
    torch.manual_seed(0)
    norm = decoder.RMSNorm(64, eps=1e-6)
    x = torch.randn(5, 64).bfloat16().requires_grad_()
    out = norm(x)
    x_float32 = x.detach().float().requires_grad_()
    expected = torch.nn.functional.rms_norm(x_float32, (64,), norm.weight, 1e-6)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, expected.bfloat16())
    out.sum().backward()
    expected.sum().backward()
    assert torch.allclose(x.grad.float(), x_float32.grad, atol=1e-2)


@pytest.mark.parametrize("window", [None, 1, 4, 30])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("separates", [False, True])
def test_plain_attention_with_shared_heads_matches_fused_attention(
    heads: tuple[int, int], window: int | None, separates: bool
) -> None:
    torch.manual_seed(0)
    H, K = heads
    q = torch.randn(9, H, 11, 8, requires_grad=True)
    k, v = (torch.randn(9, K, 11, 8, requires_grad=True) for _ in "kv")
    documents = torch.randint(2, (9, 11)).cumsum(1) if separates else None
    unfused = kernels.attend(q, k, v, None, 0.0, window, documents)
    with torch.no_grad():
        fused = kernels.attend(q, k, v, None, 0.0, window, documents)
    assert torch.allclose(unfused, fused, atol=1e-5)
    weight = torch.randn_like(unfused)
    mask = torch.ones(11, 11).tril().triu(1 - (window or 11)).bool()
    if documents is not None:
        mask = mask & (documents[:, None, :, None] == documents[:, None, None, :])
    repeated = [t.repeat_interleave(H // K, dim=1) for t in (k, v)]
    expected = ((q @ repeated[0].mT / 8**0.5).masked_fill(~mask, -math.inf)).softmax(-1) @ repeated[1]
    for a, b in zip(
        torch.autograd.grad((unfused * weight).sum(), (q, k, v)),
        torch.autograd.grad((expected * weight).sum(), (q, k, v)),
        strict=True,
    ):
        assert torch.allclose(a, b, atol=1e-4)


@pytest.mark.parametrize("window", [None, 1, 100, 129, 500])
@pytest.mark.parametrize("kv_heads", [1, 2, 6])
def test_bfloat16_attention_matches_float32(kv_heads: int, window: int | None) -> None:
    """Attention scores are computed in chunks of positions."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, 300, 8).bfloat16() for heads in (6, kv_heads, kv_heads))
    with torch.no_grad():
        actual = kernels.attend(q, k, v, None, 0.0, window)
        expected = kernels.attend(q.float(), k.float(), v.float(), None, 0.0, window)
    assert actual.dtype == torch.bfloat16
    assert torch.allclose(actual.float(), expected, atol=0.03)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.99])
def test_dropout_has_the_requested_rate_and_keeps_the_mean(p: float) -> None:
    torch.manual_seed(1)
    x = torch.ones(999, 1001, dtype=torch.float64).requires_grad_()
    y = kernels.drop(x.mT, p).mT
    y.sum().backward()
    assert (y == 0).double().mean().item() == pytest.approx(p, abs=0.002)
    assert y.mean().item() == pytest.approx(1, abs=0.03)
    assert len(y.unique()) == 2 and torch.equal(x.grad, y)
    pairs = (y[:, 1:] != 0).double() * (y[:, :-1] != 0)  # Neighbors are dropped independently.
    assert pairs.mean().item() == pytest.approx((1 - p) ** 2, abs=0.002)
    assert torch.equal(kernels.drop(x, 0.0), x)


@pytest.mark.filterwarnings("default")  # Compiler warnings are not errors here.
@pytest.mark.parametrize("arch", ["gpt2", "qwen2"])
def test_compiled_gradients_match_eager_gradients(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bias gradients are summed in two steps, as on a GPU."""
    monkeypatch.setattr(kernels, "SUMMED_ON", ("cpu",))
    monkeypatch.setattr(kernels, "MAX_MATMUL_POSITIONS", 0)
    torch.manual_seed(0)
    layout: Any = ARCHITECTURES["modern"] | {"qk_norm": False, "biases": "qkv"} if arch == "qwen2" else {}
    model = GPT(GPTConfig(11, 8, 3, 2, 16, **layout))
    for p in model.parameters():
        p.data += 0.1 * torch.randn_like(p)
    idx = torch.randint(11, (3, 8))

    def gradients() -> list[torch.Tensor]:
        total = tied_cross_entropy(model.trunk(idx), model.unembedding, idx)
        return [total.detach(), *torch.autograd.grad(total, list(model.parameters()))]

    eager = gradients()
    torch._dynamo.reset()
    compile_halves(model, torch.device("cpu"), backend="aot_eager", fullgraph=True)
    for actual, expected in zip(gradients(), eager, strict=True):
        assert torch.allclose(actual, expected, atol=1e-5)
    uncompile_halves(model)
    assert not any("last_norm" in vars(module) or "add_mlp" in vars(module) for module in model.modules())


def test_residual_stream_is_narrowed_only_under_gpu_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(2, 3, 4)
    with torch.autocast("cpu", torch.bfloat16):
        assert kernels.narrow_stream(x) is x
        monkeypatch.setattr(kernels, "NARROW_ON", ("cpu",))
        assert torch.equal(kernels.narrow_stream(x), x.bfloat16())
    with torch.autocast("cpu", torch.float16):
        assert kernels.narrow_stream(x) is x
    assert kernels.narrow_stream(x) is x
