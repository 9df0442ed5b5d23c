"""Fast computations for the decoder, on CPUs, on GPUs and under a compiler.

Docstrings name the torch function or formula that each kernel matches up to rounding (tests/model/test_kernels.py).
"""

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gpt.model.memory import MAX_MATMUL_POSITIONS as MAX_MATMUL_POSITIONS

NARROW_ON = ("cuda",)  # Devices that narrow the residual stream to bfloat16 under autocast.
SUMMED_ON = ("cuda",)  # Devices where compiled code sums bias gradients in two steps.
MATMUL_ROWS = 8  # Sequences per call of matmul attention in CPU training.
MATMUL_QUERIES = 128  # Queries per call, and minimum queries, of bfloat16 matmul attention on a CPU.


@dataclass(frozen=True)
class TracedInputs:
    """Values that a traced step takes as inputs, instead of random numbers and masks."""

    dropout_masks: Iterator[Tensor]  # masks in call order
    causal_bias: Tensor  # result of `bias` without a window
    window_bias: Tensor  # result of `bias` with the model's window


_traced: TracedInputs | None = None  # Set while a step is being traced.


@contextlib.contextmanager
def tracing(inputs: TracedInputs) -> Iterator[None]:
    """Makes kernels use ``inputs``, and makes `is_compiling` return True."""
    global _traced
    _traced = inputs
    try:
        yield
    finally:
        _traced = None


def is_compiling() -> bool:
    """Whether torch or `tracing` is tracing this code for a compiler."""
    return _traced is not None or torch.compiler.is_compiling()


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`F.linear`: x Wᵀ + b, (…, in) → (…, out)."""
    if bias is None or not (x.device.type in SUMMED_ON and is_compiling() and bias.requires_grad):
        return F.linear(x, weight, bias)
    y: Tensor = _BiasGradient.apply(F.linear(x, weight, bias.detach()), bias)  # type: ignore[no-untyped-call]
    return y


class _BiasGradient(torch.autograd.Function):
    """Sums the gradient of a bias, (out,), over positions first, then over sequences. y, (…, T, out), already includes
    the bias. Inductor fuses the first sum into the kernel that writes y's gradient; a single sum would read that
    gradient in another kernel."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, b: Tensor) -> Tensor:
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        (grad,) = grads
        wide_dtype = torch.promote_types(grad.dtype, torch.float32)
        return grad, grad.sum(-2, dtype=wide_dtype).sum_to_size(grad.size(-1))


def drop(x: Tensor, p: float) -> Tensor:
    """`F.dropout`: zeroes elements with probability p, to a resolution of 2⁻¹⁶, and divides the rest by 1 − p."""
    if _traced is not None:
        return x * (next(_traced.dropout_masks).view(x.shape).to(x.dtype) * dropout_scale(p)) if p else x
    if p == 0 or x.device.type != "cpu" or torch.compiler.is_compiling():
        return F.dropout(x, p)
    mask = dropout_mask(x.numel(), p, x.dtype)
    return x * mask.mul_(dropout_scale(p)).view(x.shape)


def dropout_scale(p: float) -> float:
    """Returns 1 / (1 − p), with p rounded to a multiple of 2⁻¹⁶."""
    return 2**16 / (2**16 - round(p * 2**16))


def dropout_mask(n: int, p: float, dtype: torch.dtype) -> Tensor:
    """Draws a dropout mask, (n): 1 with probability 1 − p, to a resolution of 2⁻¹⁶, else 0.

    Four elements share a random number: 131,072 elements take 87 µs on a CPU. Torch draws one per element, in 600 µs.
    """
    random_bits = torch.empty(-(-n // 4), dtype=torch.int64).random_(-(2**63), None).view(torch.int16)[:n]
    return torch.ge(random_bits, round(p * 2**16) - 2**15, out=torch.empty(n, dtype=dtype))


def is_eager_on_cpu(x: Tensor) -> bool:
    """Whether ``x`` is on a CPU and no compiler is tracing."""
    return x.device.type == "cpu" and not is_compiling()


def rms_norm(x: Tensor, weight: Tensor, eps: Tensor) -> Tensor:
    """`F.rms_norm` on a CPU, in float32 or wider: (…, C) → (…, C), in the dtype of ``x``."""
    if not torch.is_grad_enabled():
        return (x * _rms_scale(x, eps)).mul_(weight).to(x.dtype)
    out: Tensor = _RMSNormOnCPU.apply(x, weight, eps)  # type: ignore[no-untyped-call]
    return out


def _rms_scale(x: Tensor, eps: Tensor) -> Tensor:
    """1 / √(mean(x²) + ε) of each position, (…, C) → (…, 1), in float32 or wider."""
    wide_dtype = torch.promote_types(x.dtype, torch.float32)
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=wide_dtype)
    return torch.addcmul(eps, norm, norm, value=1 / x.size(-1)).rsqrt_()


class _RMSNormOnCPU(torch.autograd.Function):
    """RMSNorm with fewer kernels than in torch, which runs seven kernels forward and more backward. With gradients,
    torch's RMSNorm takes 387 µs at (16, 64, 128) and 1,786 µs at (16, 128, 256). Its LayerNorm takes 102 µs and 281 µs.
    RMSNorm's gradient is that of LayerNorm for a mean of 0, plus one term."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: Tensor) -> Tensor:
        scale = _rms_scale(x, eps)
        ctx.save_for_backward(x, weight, scale)
        out: Tensor = (x * scale).mul_(weight).to(x.dtype)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, weight, scale = ctx.saved_tensors
        grad, w = grads[0].to(scale.dtype), weight.to(scale.dtype)
        dx, dw, _ = torch.ops.aten.native_layer_norm_backward(
            grad,
            x.to(scale.dtype),
            w.shape,
            torch.zeros_like(scale),
            scale,
            w,
            None,
            [True, ctx.needs_input_grad[1], False],
        )
        # LayerNorm subtracts the gradient's mean: add it back.
        dx += (scale * (grad @ w)[..., None]).div_(x.size(-1))
        return dx.to(x.dtype), None if dw is None else dw.to(weight.dtype), None


def narrow_stream(x: Tensor) -> Tensor:
    """Casts the residual stream (B, T, C) to bfloat16 if GPU autocast uses bfloat16. This halves the memory traffic of
    norms and sums without a measurable effect on the loss (docs/decisions.md)."""
    device_type = x.device.type
    use_bfloat16 = (
        device_type in NARROW_ON
        and torch.is_autocast_enabled(device_type)
        and torch.get_autocast_dtype(device_type) == torch.bfloat16
    )
    return x.bfloat16() if use_bfloat16 else x


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Any,
    dropout: float = 0.0,
    window: int | None = None,
    documents: Tensor | None = None,
) -> Tensor:
    """Computes softmax(q kᵀ / √D) v for queries (B, H, T, D), keys and values (B, K, S, D). Without a mask, attention
    is causal, within ``window`` if given, and within positions of the same number in ``documents``, (B, T), if given.

    In CPU training, matrix products beat torch's flash attention if the scores of a few sequences fit in the
    processor's cache. Forward and backward in bfloat16 on two cores took 2.0 ms instead of 7.9 at (16, 4, 64, 32), and
    141 instead of 257 at (64, 6, 256, 64). At 512 positions, both took the same time. Without gradients, bfloat16
    matrix products win by skipping hidden keys: 1.9 ms instead of 5.1 at (1, 12, 512, 64).
    """
    T, S = q.size(2), k.size(2)
    is_causal_on_cpu, grad_enabled = q.device.type == "cpu" and mask is None and T > 1, torch.is_grad_enabled()
    hidden = None if documents is None else documents[:, None, :, None] != documents[:, None, None, :]  # (B, 1, T, T)
    if is_causal_on_cpu and grad_enabled and S <= MAX_MATMUL_POSITIONS:
        # Inductor's bfloat16 programs gave NaN for two or more calls (torch 2.13.0, AMX).
        rows_per_call = MATMUL_ROWS if _traced is None else q.size(0)
        batches = [slice(at, at + rows_per_call) for at in range(0, q.size(0), rows_per_call)]
        parts = [(q[at], k[at], v[at], dropout, window, None if hidden is None else hidden[at]) for at in batches]
        return torch.cat([_attend_by_matmul(*part) for part in parts])
    is_chunked = is_causal_on_cpu and hidden is None and not grad_enabled
    if is_chunked and T >= MATMUL_QUERIES and q.dtype == torch.bfloat16:
        key_ends = [min(at + MATMUL_QUERIES, T) for at in range(0, T, MATMUL_QUERIES)]
        chunks = zip(torch.split(q, MATMUL_QUERIES, dim=2), key_ends, strict=True)
        return torch.cat(
            [_attend_by_matmul(x, k[:, :, :end], v[:, :, :end], dropout, window) for x, end in chunks], dim=2
        )
    if mask is None and (hidden is not None or (window is not None and window < T)):
        mask = make_causal_mask(T, window, q.device)
        mask = mask if hidden is None else mask & ~hidden
    groups = q.size(1) // k.size(1)
    causal = T > 1 and mask is None
    if groups > 1 and not causal and (T == 1 or q.device.type != "cpu"):
        # Fused kernels with a mask don't support grouped-query attention, so merge each group into one head with more
        # queries.
        if mask is not None and T > 1:
            mask = mask.repeat(*[1] * (mask.dim() - 2), groups, 1)
        y = F.scaled_dot_product_attention(q.reshape(len(q), k.size(1), -1, q.size(3)), k, v, mask, dropout)
        return y.view_as(q)
    return F.scaled_dot_product_attention(q, k, v, mask, dropout, causal, enable_gqa=groups > 1)


def _attend_by_matmul(
    q: Tensor, k: Tensor, v: Tensor, dropout: float, window: int | None, hidden: Tensor | None = None
) -> Tensor:
    B, H, T, D = q.shape
    K, S = k.size(1), k.size(2)
    # Merge each group of query heads into one head with more queries.
    scores = (q * (1 / math.sqrt(D))).reshape(B, K, -1, D) @ k.transpose(2, 3)
    scores = scores.view(B, H, T, S).add_(bias(q, S, window, hidden))
    pattern = drop(scores.softmax(-1), dropout)
    return (pattern.view(B, K, -1, S) @ v).view(B, H, T, D)


def bias(q: Tensor, S: int, window: int | None, hidden: Tensor | None = None) -> Tensor:
    """Returns an additive causal mask, (T, S), in the dtype of q, (B, H, T, D). The mask is −∞ for keys that the window
    or ``hidden``, (B, 1, T, S), hides."""
    if _traced is not None:
        mask = (_traced.causal_bias if window is None else _traced.window_bias).to(q.dtype)
    else:
        T = q.size(2)
        mask = torch.zeros((T, S), dtype=q.dtype, device=q.device)
        mask.masked_fill_(~make_causal_mask(T, window, q.device, S - T), -math.inf)
    return mask if hidden is None else mask.masked_fill(hidden, -math.inf)


def make_causal_mask(T: int, window: int | None, device: torch.device, before: int = 0) -> Tensor:
    """Returns the causal mask, (T, before + T), of T positions that follow ``before`` others. A position attends to up
    to ``window`` positions, including itself."""
    causal = torch.ones((T, before + T), dtype=torch.bool, device=device).tril_(before)
    return causal if window is None or window >= before + T else causal.triu_(before + 1 - window)
