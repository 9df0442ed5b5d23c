"""Cross-entropy in nats, and what it is in other units."""

import math

import torch.nn.functional as F
from torch import Tensor

IGNORED = -100  # a target that does not count


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean of -log p(target) over all positions at once, in nats. Logits (B, T, V), targets (B, T)."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORED)


def token_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """-log p(target) of each position, (B, T), in nats; 0 where the target is `IGNORED`."""
    losses = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORED, reduction="none")
    return losses.view_as(targets)


def bits_per_byte(nats: float, n_bytes: int) -> float:
    """Total nats over a text of ``n_bytes``, in bits a byte: comparable between tokenizers."""
    return nats / math.log(2) / n_bytes if n_bytes else math.nan
