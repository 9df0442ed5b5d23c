"""Keys and values of the positions seen so far, so that a step computes its own position alone."""

import torch
from torch import Tensor

from gpt.config import GPTConfig


class KVCache:
    """Room for ``block_size`` positions of every layer, allocated once; ``length`` of them are filled."""

    def __init__(self, config: GPTConfig, rows: int, device: torch.device, dtype: torch.dtype) -> None:
        shape = (config.n_layer, rows, config.n_head, config.block_size, config.n_embd // config.n_head)
        self.keys = torch.zeros(shape, device=device, dtype=dtype)
        self.values = torch.zeros(shape, device=device, dtype=dtype)
        self.length = 0

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Stores a layer's new keys and values, (B, H, T, C/H), and returns all of them so far."""
        end = self.length + k.size(2)
        self.keys[layer, :, :, self.length : end] = k
        self.values[layer, :, :, self.length : end] = v
        return self.keys[layer, :, :, :end], self.values[layer, :, :, :end]

    def mask(self, T: int) -> Tensor | None:
        """Which of all positions each of the T new ones may see, (T, length + T); None where the causal mask of a
        square, or none at all, says the same."""
        if T == 1 or self.length == 0:
            return None
        seen = torch.arange(self.length + T, device=self.keys.device)
        return seen <= seen[self.length :, None]

    def advance(self, T: int) -> None:
        """Counts T positions as filled, once every layer has stored them."""
        self.length += T

    def clear(self) -> None:
        """Forgets everything; the room stays allocated."""
        self.length = 0
