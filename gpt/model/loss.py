"""Cross-entropy in nats, and in bits per byte."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

IGNORED = -100  # a target that does not count
# A multiple that suits matrix units: an odd number of columns, as GPT-2's 50,257, keeps a GPU off its fast kernels.
ALIGNED, ALIGNED_ON = 64, ("cuda",)


def tied_cross_entropy(x: Tensor, weight: Tensor, targets: Tensor, chunk: int = 0) -> Tensor:
    """The sum of -log p(target), in nats, of the residual stream x (B, T, C) seen through the unembedding (V, C), over
    all targets (B, T) that count.

    On a GPU the vocabulary is filled up with zeros to a multiple of 64; their columns are cut off again before the
    softmax. With ``chunk``, the logits of so many positions exist at once, and are computed again for the gradient.
    """
    vocab_size = weight.size(0)
    if x.device.type in ALIGNED_ON and vocab_size % ALIGNED:
        weight = F.pad(weight, (0, 0, 0, -vocab_size % ALIGNED))
    x, targets = x.flatten(0, 1), targets.flatten()
    if not chunk or chunk >= len(targets):
        return _summed(x, weight, targets, vocab_size)
    parts = [
        checkpoint(_summed, some, weight, aim, vocab_size, use_reentrant=False)
        for some, aim in zip(torch.split(x, chunk), torch.split(targets, chunk), strict=True)
    ]
    return torch.stack(parts).sum()


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
