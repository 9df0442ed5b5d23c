"""Positions that are not learned: rotations of queries and keys, and the sine table."""

import math

import torch
from torch import Tensor

from gpt.config import GPTConfig, RopeScaling

Rope = tuple[Tensor, Tensor]  # cosines and sines of the angles of rotation, (T, 1, D) or (B, T, 1, D)


def rotary_rates(config: GPTConfig) -> Tensor:
    """The angle between neighboring positions of each pair of a head's D numbers, float64 (D / 2)."""
    rates = config.rope_base ** (-torch.arange(0, config.head_size, 2, dtype=torch.float64) / config.head_size)
    return rates if config.rope_scaling is None else _stretched(rates, config.rope_scaling)


def rotary_table(positions: int, config: GPTConfig) -> Tensor:
    """Cosines and sines, (2, positions, D), of the angles by which each pair (i, i + D/2) of a head's D numbers is
    rotated at each position: p / base^(2i / D) (Su et al. 2021, §3.2.2). The first half of the sines is negative: each
    number is multiplied by its cosine, and its partner by its sine (`rotate`)."""
    angle = torch.arange(positions, dtype=torch.float64)[:, None] * rotary_rates(config)
    cos, sin = torch.cos(angle).float(), torch.sin(angle).float()
    return torch.stack([torch.cat([cos, cos], dim=1), torch.cat([-sin, sin], dim=1)])


def _stretched(rates: Tensor, scaling: RopeScaling) -> Tensor:
    """The rates of rotation, in radians a position, for a context that is stretched as Llama 3.1's."""
    turns = scaling.original * rates / (2 * math.pi)
    kept = ((turns - scaling.low) / (scaling.high - scaling.low)).clamp(0, 1)
    return rates * (kept + (1 - kept) / scaling.factor)


def rotate(x: Tensor, rope: Rope) -> Tensor:
    """Rotates the pairs (i, i + D/2) of (B, T, H, D) by the angles of ``rope``."""
    cos, sin = rope
    return (x * cos.to(x.dtype)).addcmul_(x.roll(x.size(-1) // 2, -1), sin.to(x.dtype))


def sine_table(block_size: int, n_embd: int) -> Tensor:
    """The fixed positions of "Attention Is All You Need", §3.5, (block_size, n_embd).

    Column 2i is sin(p / 10000^(2i/C)), column 2i + 1 the cosine, at position p.
    """
    position = torch.arange(block_size, dtype=torch.float64)[:, None]
    rate = 10_000 ** (-torch.arange(0, n_embd, 2, dtype=torch.float64) / n_embd)
    table = torch.stack([torch.sin(position * rate), torch.cos(position * rate)], dim=-1)
    return table.flatten(1).float()
