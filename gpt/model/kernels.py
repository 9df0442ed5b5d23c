"""Fast ways of computing what the decoder defines, on a CPU, on a GPU and under the compiler.

Each has a plain definition, named in its docstring and tested against it (tests/model/test_kernels.py): that gives the
same numbers up to rounding, more slowly.
"""

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

WHOLE = 1024  # columns up to which a GPU's attention for one query does not divide them
NARROW_ON = ("cuda",)  # where the residual stream is bfloat16 under autocast
SUMMED_ON = ("cuda",)  # where compiled code sums the gradients of biases in two steps
PLAIN_UP_TO, PLAIN_ROWS = 512, 8  # positions up to which a CPU attends plainly, and sequences at once
PLAIN_QUERIES = 128  # positions from which it does in bfloat16 without gradients, and whose scores it computes at once


@dataclass(frozen=True)
class TracedInputs:
    """What a traced step uses in place of its own random numbers, masks and batches of `PLAIN_ROWS` sequences."""

    kept: Iterator[Tensor]  # dropout's masks, in the order of use
    whole: Tensor  # `bias` without a window
    part: Tensor  # `bias` with the model's window
    rows: int  # sequences per attention call


_traced: TracedInputs | None = None  # while a step is traced


@contextlib.contextmanager
def tracing(inputs: TracedInputs) -> Iterator[None]:
    """While this is entered, the functions of this module use ``inputs``, and `is_compiling` is true."""
    global _traced
    _traced = inputs
    try:
        yield
    finally:
        _traced = None


def is_compiling() -> bool:
    """Whether torch or `tracing` traces this code for a compiler."""
    return _traced is not None or torch.compiler.is_compiling()


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`F.linear`: x Wᵀ + b, (…, in) → (…, out)."""
    if bias is None or not (x.device.type in SUMMED_ON and is_compiling() and bias.requires_grad):
        return F.linear(x, weight, bias)
    y: Tensor = _BiasGradient.apply(F.linear(x, weight, bias.detach()), bias)  # type: ignore[no-untyped-call]
    return y


class _BiasGradient(torch.autograd.Function):
    """y (…, T, out), of which the bias b (out,) is a term already, with the gradient of b: the sum over positions, and
    then over sequences. Inductor computes the first sum in the kernel that writes the gradient of y. That of both at
    once is a kernel of its own, which reads it again."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, b: Tensor) -> Tensor:
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        (grad,) = grads
        wide = torch.promote_types(grad.dtype, torch.float32)
        return grad, grad.sum(-2, dtype=wide).sum_to_size(grad.size(-1))


def drop(x: Tensor, p: float) -> Tensor:
    """Zeroes each number with probability p, to 2⁻¹⁶, and divides the others by 1 − p."""
    if _traced is not None:
        return x * (next(_traced.kept).view(x.shape).to(x.dtype) * dropout_scale(p)) if p else x
    if p == 0 or x.device.type != "cpu" or torch.compiler.is_compiling():
        return F.dropout(x, p)
    kept = dropout_mask(x.numel(), p, x.dtype)
    return x * kept.mul_(dropout_scale(p)).view(x.shape)


def dropout_scale(p: float) -> float:
    """The factor of the numbers that dropout keeps, 1 / (1 − p), where p is a whole number of 2⁻¹⁶."""
    return 2**16 / (2**16 - round(p * 2**16))


def dropout_mask(n: int, p: float, dtype: torch.dtype) -> Tensor:
    """Draws which of n numbers dropout keeps, (n): 1 with probability 1 − p, to 2⁻¹⁶, else 0.

    A CPU draws one random number after the other, and torch a whole one for each of n: for 131,072 in 600 µs. Here four
    share one: 87 µs.
    """
    drawn = torch.empty(-(-n // 4), dtype=torch.int64).random_(-(2**63), None).view(torch.int16)[:n]
    return torch.ge(drawn, round(p * 2**16) - 2**15, out=torch.empty(n, dtype=dtype))


def is_eager_on_cpu(x: Tensor) -> bool:
    """Whether a CPU computes with x at once, and no compiler."""
    return x.device.type == "cpu" and not is_compiling()


def rms_norm(x: Tensor, weight: Tensor, floor: Tensor) -> Tensor:
    """`F.rms_norm` on a CPU, in float32 or wider: (…, C) → (…, C), of the dtype of x. ``floor``: ε."""
    if not torch.is_grad_enabled():
        return (x * _rms_scale(x, floor)).mul_(weight).to(x.dtype)
    out: Tensor = _RMSNormOnCPU.apply(x, weight, floor)  # type: ignore[no-untyped-call]
    return out


def _rms_scale(x: Tensor, floor: Tensor) -> Tensor:
    """1 / √(mean(x²) + ε) of each position, (…, C) → (…, 1), in float32 or wider."""
    wide = torch.promote_types(x.dtype, torch.float32)
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=wide)
    return torch.addcmul(floor, length, length, value=1 / x.size(-1)).rsqrt_()


class _RMSNormOnCPU(torch.autograd.Function):
    """RMSNorm, which torch computes on a CPU by seven kernels going forward and more going back: with its gradient at
    (16, 64, 128) in 387 µs, where LayerNorm takes 102, at (16, 128, 256) in 1,786, where that takes 281. Its gradient
    is LayerNorm's with a mean of 0, but for the term of the mean."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, floor: Tensor) -> Tensor:
        scale = _rms_scale(x, floor)
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
        dx += (scale * (grad @ w)[..., None]).div_(x.size(-1))  # the mean of the gradient, taken off above
        return dx.to(x.dtype), None if dw is None else dw.to(weight.dtype), None


def narrowed(x: Tensor) -> Tensor:
    """The residual stream (B, T, C) in bfloat16 where a GPU's autocast computes products in it: half the memory traffic
    of norms and sums, at no measured loss (docs/decisions.md)."""
    kind = x.device.type
    narrow = kind in NARROW_ON and torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) == torch.bfloat16
    return x.bfloat16() if narrow else x


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Any, dropout: float = 0.0, window: int | None = None) -> Tensor:
    """softmax(q kᵀ / √D) v of queries (B, H, T, D), keys and values (B, K, S, D), causal unless a mask says who sees
    whom, and then with a ``window`` if there is one.

    Training on a CPU, torch's fused attention loses to plain matrix products as long as the scores of a few sequences
    stay in cache: forward and backward at (16, 4, 64, 32) in bfloat16 took 7.9 ms against 2.0 on two cores, at
    (64, 6, 256, 64) 257 against 141; at 512 positions they were about equal. In bfloat16 it loses forward too, if
    products leave out what no query sees: at (1, 12, 512, 64) 5.1 ms against 1.9.
    """
    T, S = q.size(2), k.size(2)
    if mask is not None and not isinstance(mask, Tensor):
        return attend_blocks(q, k, v, mask)
    plain, trains = q.device.type == "cpu" and mask is None and T > 1, torch.is_grad_enabled()
    if plain and trains and S <= PLAIN_UP_TO:
        step = PLAIN_ROWS if _traced is None else _traced.rows
        rows = [slice(at, at + step) for at in range(0, q.size(0), step)]
        return torch.cat([_attend_plainly(q[some], k[some], v[some], dropout, window) for some in rows])
    if plain and not trains and T >= PLAIN_QUERIES and q.dtype == torch.bfloat16:
        ends = [min(at + PLAIN_QUERIES, T) for at in range(0, T, PLAIN_QUERIES)]
        parts = zip(torch.split(q, PLAIN_QUERIES, dim=2), ends, strict=True)
        return torch.cat([_attend_plainly(x, k[:, :, :end], v[:, :, :end], dropout, window) for x, end in parts], dim=2)
    if mask is None and window is not None and window < T:
        mask = visible(T, window, q.device)
    groups = q.size(1) // k.size(1)
    causal = T > 1 and mask is None
    if groups > 1 and not causal and (T == 1 or q.device.type != "cpu"):
        # Fused kernels with a mask know no shared heads; so each of the keys' has as many more queries.
        if mask is not None and T > 1:
            mask = mask.repeat(*[1] * (mask.dim() - 2), groups, 1)
        y = F.scaled_dot_product_attention(q.reshape(len(q), k.size(1), -1, q.size(3)), k, v, mask, dropout)
        return y.view_as(q)
    return F.scaled_dot_product_attention(q, k, v, mask, dropout, causal, enable_gqa=groups > 1)


def attend_blocks(q: Tensor, k: Tensor, v: Tensor, blocks: Any) -> Tensor:
    """`attend` for one query, (B, H, 1, D), by `flex_attention`, which reads the blocks of columns that are filled.
    Within `WHOLE` columns, its kernel does not divide them among processors: putting parts together takes two more."""
    from torch.nn.attention.flex_attention import flex_attention

    options: Any = {"SPLIT_KV": 1} if k.size(2) <= WHOLE else {}
    return flex_attention(q, k, v, block_mask=blocks, enable_gqa=q.size(1) > k.size(1), kernel_options=options)


def _attend_plainly(q: Tensor, k: Tensor, v: Tensor, dropout: float, window: int | None) -> Tensor:
    B, H, T, D = q.shape
    K, S = k.size(1), k.size(2)
    # Heads that share keys and values are one head of as many more positions.
    scores = (q * (1 / math.sqrt(D))).reshape(B, K, -1, D) @ k.transpose(2, 3)
    scores = scores.view(B, H, T, S).add_(bias(q, S, window))
    pattern = drop(scores.softmax(-1), dropout)
    return (pattern.view(B, K, -1, S) @ v).view(B, H, T, D)


def bias(q: Tensor, S: int, window: int | None) -> Tensor:
    """The mask that is added to scores of queries q (B, H, T, D): (T, S), −∞ where a position does not see another."""
    if _traced is not None:
        return (_traced.whole if window is None else _traced.part).to(q.dtype)
    T = q.size(2)
    hidden = torch.zeros((T, S), dtype=q.dtype, device=q.device)
    return hidden.masked_fill_(~visible(T, window, q.device, S - T), -math.inf)


def visible(T: int, window: int | None, device: torch.device, before: int = 0) -> Tensor:
    """True where a position sees another, (T, before + T): itself and those before it, with a window the last so
    many."""
    sees = torch.ones((T, before + T), dtype=torch.bool, device=device).tril_(before)
    return sees if window is None or window >= before + T else sees.triu_(before + 1 - window)
