"""Cross-entropy in nats, and in bits per byte."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gpt.model import kernels
from gpt.model.memory import columns_of_logits, positions_at_once

IGNORED = -100  # a target that does not count
SHRUNK = 2**-4  # of gradients of logits in float16, whose sum over all positions must stay below its largest number


def tied_cross_entropy(x: Tensor, weight: Tensor, targets: Tensor, chunk: int = 0) -> Tensor:
    """The sum of -log p(target), in nats, of the residual stream x (B, T, C) seen through the unembedding (V, C), over
    all targets (B, T) that count.

    The logits of ``chunk`` positions, or of fewer, exist at once. On a GPU the vocabulary is filled up with zeros to a
    multiple of 64, which have no part in the softmax.
    """
    kind = x.device.type
    columns = columns_of_logits(len(weight), kind)
    chunk = positions_at_once(targets.numel(), len(weight), chunk, kind, not weight.requires_grad)
    loss: Tensor = _CrossEntropy.apply(x.flatten(0, 1), weight, targets.flatten(), columns, chunk)  # type: ignore[no-untyped-call]
    return loss


class _CrossEntropy(torch.autograd.Function):
    """The summed cross-entropy with the gradients of x, (softmax − one-hot) W, and of the unembedding W, (softmax −
    one-hot)ᵀ x, which the backward pass only scales (as in Hsu et al. 2024, arXiv 2410.10989). So logits are computed
    once, some positions at a time, and their gradient takes their place in memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, columns: int, chunk: int) -> Tensor:
        kind, vocab_size = x.device.type, len(weight)
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        wide = torch.promote_types(dtype, torch.float32)
        narrow, table = x.to(dtype), weight.to(dtype)
        if columns > vocab_size:
            table = F.pad(table, (0, 0, 0, columns - vocab_size))
        ctx.dtypes, ctx.shrunk = (x.dtype, weight.dtype), SHRUNK if dtype == torch.float16 else 1.0
        if not kernels.is_compiling():
            scores = narrow.new_empty(chunk, columns)
            exact = narrow.new_empty(chunk, vocab_size, dtype=wide)
        total, grads, grad_table = x.new_zeros((), dtype=wide), [], None
        for some, aims in zip(torch.split(narrow, chunk), torch.split(targets, chunk), strict=True):
            counts, aims = (aims != IGNORED)[:, None], aims.clamp(min=0)[:, None]
            if kernels.is_compiling():
                logits, hit = _as_one_kernel(some @ table.t(), aims, counts * ctx.shrunk, vocab_size)
            else:
                logits = torch.mm(some, table.t(), out=scores[: len(some)])
                hit = _in_place(logits, exact[: len(some)], aims, counts * ctx.shrunk)
            total = total - hit.masked_fill(~counts, 0).sum()
            grads.append(logits @ table)
            if ctx.needs_input_grad[1] and grad_table is None:
                grad_table = logits.t() @ some
            elif grad_table is not None:
                grad_table = grad_table.to(wide).add_(logits.t() @ some)
        ctx.save_for_backward(torch.cat(grads), None if grad_table is None else grad_table[:vocab_size])
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None, None, None]:
        scale, (for_x, for_weight) = grads[0] / ctx.shrunk, ctx.saved_tensors
        x_dtype, weight_dtype = ctx.dtypes
        of_weight = None if for_weight is None else for_weight.to(weight_dtype) * scale
        return for_x.to(x_dtype) * scale, of_weight, None, None, None


def _in_place(logits: Tensor, exact: Tensor, targets: Tensor, factors: Tensor) -> Tensor:
    """Replaces logits (n, columns) by their gradient times ``factors``, and returns log p(target), (n, 1). ``exact``
    (n, V) is worked in; columns past V, which are 0, stay so."""
    log_p = torch.log_softmax(exact.copy_(logits[:, : exact.size(1)]), -1, out=exact)
    hit = log_p.gather(1, targets)
    log_p.exp_().scatter_(1, targets, hit.expm1())  # p, and p - 1 at the target
    logits[:, : exact.size(1)].copy_(log_p.mul_(factors))
    return hit


def _as_one_kernel(logits: Tensor, targets: Tensor, factors: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Returns what `_in_place` computes, in operations that a compiler fuses."""
    column = torch.arange(logits.size(1), device=logits.device)
    exact = logits.to(torch.promote_types(logits.dtype, torch.float32))
    log_p = exact.masked_fill(column >= vocab_size, -math.inf).log_softmax(-1)
    hit = log_p.gather(1, targets)
    grad = torch.where(column == targets, hit.expm1(), log_p.exp())
    return (grad * factors).to(logits.dtype), hit


def token_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """-log p(target) of each position, (N), of logits (N, V), in nats; 0 where the target is `IGNORED`."""
    return F.cross_entropy(logits.float(), targets, ignore_index=IGNORED, reduction="none")


def bits_per_byte(nats: float, n_bytes: int) -> float:
    """Total nats over a text of ``n_bytes``, in bits per byte: comparable between tokenizers."""
    return nats / math.log(2) / n_bytes if n_bytes else math.nan
