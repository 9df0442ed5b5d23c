"""RoPE."""

import math

import torch
from torch import Tensor

from gpt.config.model import GPTConfig, RopeScaling

Rope = tuple[Tensor, Tensor]  # cosines and sines of the rotation angles, (T, 1, D) or (B, T, 1, D)


def rotary_rates(config: GPTConfig) -> Tensor:
    """Returns how fast each pair of a head's D dimensions rotates, in radians per position: float64, (D / 2)."""
    rates = config.rope_base ** (-torch.arange(0, config.head_size, 2, dtype=torch.float64) / config.head_size)
    return rates if config.rope_scaling is None else _stretch_rates(rates, config.rope_scaling)


def rotary_table(positions: int, config: GPTConfig) -> Tensor:
    """Returns cosines and sines of the rotation angles, (2, positions, D). Pair (i, i + D/2) has the angle p / base^(2i
    / D) at position p (Su et al. 2021, §3.2.2). The first half of the sines is negated for `rotate`."""
    angle = torch.arange(positions, dtype=torch.float64)[:, None] * rotary_rates(config)
    cos, sin = torch.cos(angle).float(), torch.sin(angle).float()
    return torch.stack([torch.cat([cos, cos], dim=1), torch.cat([-sin, sin], dim=1)])


def _stretch_rates(rates: Tensor, scaling: RopeScaling) -> Tensor:
    """Slows rotation down for a longer context, as in Llama 3.1."""
    turns = scaling.original * rates / (2 * math.pi)
    unscaled_share = ((turns - scaling.low) / (scaling.high - scaling.low)).clamp(0, 1)
    return rates * (unscaled_share + (1 - unscaled_share) / scaling.factor)


def rotate(x: Tensor, rope: Rope) -> Tensor:
    """Rotates the pairs (i, i + D/2) of ``x``, (B, T, H, D)."""
    cos, sin = rope
    return (x * cos.to(x.dtype)).addcmul_(x.roll(x.size(-1) // 2, -1), sin.to(x.dtype))
