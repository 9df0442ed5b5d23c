"""Cross-entropy in nats, and in bits per byte."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

IGNORED = -100  # a target that does not count
# A multiple that suits matrix units: an odd number of columns, as GPT-2's 50,257, keeps a GPU off its fast kernels.
ALIGNED, ALIGNED_ON = 64, ("cuda",)
# Logits that exist at once where the unembedding is frozen: on a CPU what its caches hold.
FROZEN_LOGITS, FROZEN_LOGITS_ON_CPU = 2**27, 2**23


def tied_cross_entropy(x: Tensor, weight: Tensor, targets: Tensor, chunk: int = 0) -> Tensor:
    """The sum of -log p(target), in nats, of the residual stream x (B, T, C) seen through the unembedding (V, C), over
    all targets (B, T) that count.

    On a GPU the vocabulary is filled up with zeros to a multiple of 64; their columns are cut off again before the
    softmax. With ``chunk``, the logits of so many positions exist at once, and are computed again for the gradient. An
    unembedding that is frozen needs neither: few logits exist at once, and are computed once (`_Frozen`).
    """
    vocab_size = weight.size(0)
    if x.device.type in ALIGNED_ON and vocab_size % ALIGNED:
        weight = F.pad(weight, (0, 0, 0, -vocab_size % ALIGNED))
    x, targets = x.flatten(0, 1), targets.flatten()
    if x.requires_grad and not weight.requires_grad:
        loss: Tensor = _Frozen.apply(x, weight, targets, vocab_size)  # type: ignore[no-untyped-call]
        return loss
    if not chunk or chunk >= len(targets):
        return _summed(x, weight, targets, vocab_size)
    parts = [
        checkpoint(_summed, some, weight, aim, vocab_size, use_reentrant=False)
        for some, aim in zip(torch.split(x, chunk), torch.split(targets, chunk), strict=True)
    ]
    return torch.stack(parts).sum()


class _Frozen(torch.autograd.Function):
    """The summed cross-entropy through an unembedding without a gradient: that of x, (softmax − one-hot) W, is computed
    with the loss, some positions at a time, and only scaled in the backward pass (as in Hsu et al. 2024,
    arXiv 2410.10989)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, vocab_size: int) -> Tensor:
        kind = x.device.type
        narrow = x.to(torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype)
        weight, grad = weight.to(narrow.dtype), torch.empty_like(narrow)
        chunk = max(1, (FROZEN_LOGITS_ON_CPU if kind == "cpu" else FROZEN_LOGITS) // len(weight))
        scores = narrow.new_empty(min(chunk, len(x)), len(weight))
        exact = torch.empty_like(scores[:, :vocab_size], dtype=torch.promote_types(narrow.dtype, torch.float32))
        total = exact.new_zeros(())
        for some, aims, into in zip(*(torch.split(each, chunk) for each in (narrow, targets, grad)), strict=True):
            counts, aim, n = (aims != IGNORED)[:, None], aims.clamp(min=0)[:, None], len(some)
            logits, log_p = scores[:n], exact[:n]
            torch.mm(some, weight.t(), out=logits)
            torch.log_softmax(log_p.copy_(logits[:, :vocab_size]), -1, out=log_p)
            hit = log_p.gather(1, aim)
            total -= hit.masked_fill(~counts, 0).sum()
            log_p.exp_().scatter_(1, aim, hit.expm1_())  # p, and p - 1 at the target
            logits[:, :vocab_size].copy_(log_p.mul_(counts))  # columns that fill up the vocabulary are 0
            torch.mm(logits, weight, out=into)
        ctx.save_for_backward(grad)
        ctx.dtype = x.dtype
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (grad,) = ctx.saved_tensors
        return (grad * grads[0].to(grad.dtype)).to(ctx.dtype), None, None, None


def _summed(x: Tensor, weight: Tensor, targets: Tensor, vocab_size: int) -> Tensor:
    logits = F.linear(x, weight)[:, :vocab_size].float()
    return F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")


def token_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """-log p(target) of each position, (B, T), in nats; 0 where the target is `IGNORED`."""
    losses = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORED, reduction="none")
    return losses.view_as(targets)


def bits_per_byte(nats: float, n_bytes: int) -> float:
    """Total nats over a text of ``n_bytes``, in bits per byte: comparable between tokenizers."""
    return nats / math.log(2) / n_bytes if n_bytes else math.nan
