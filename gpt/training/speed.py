"""How fast a run goes, also as a share of what its device can do."""

from dataclasses import dataclass
from typing import Any, Self

import torch

from gpt.device import Compute
from gpt.model.decoder import GPT
from gpt.model.params import flops_per_token
from gpt.peaks import peak_flops
from gpt.training.recipe import Recipe


@dataclass(frozen=True)
class Speed:
    """What a token costs, and what the device could compute in a second."""

    flops_per_token: int
    peak: float | None  # FLOP/s, of all devices; None where it is not known

    @classmethod
    def of(cls, model: GPT, recipe: Recipe, compute: Compute, processes: int = 1) -> Self:
        """For a run on so many devices. Where rows are pairs of different lengths, their mean length is the context."""
        adapters = sum(p.numel() for p in model.parameters() if p.requires_grad) if recipe.lora_rank else 0
        flops = flops_per_token(recipe.model, recipe.batch_tokens // recipe.rows, adapters)
        name = torch.cuda.get_device_name(compute.device) if compute.device.type == "cuda" else compute.device.type
        peak = peak_flops(name, compute.dtype_name)
        return cls(flops, None if peak is None else processes * peak)

    def rates(self, tokens: int, seconds: float) -> dict[str, Any]:
        """``tokens_per_second``, and ``mfu``, model FLOPs utilization: the share of the device's peak that they need,
        None where the peak is not known."""
        rate = tokens / max(seconds, 1e-9)
        mfu = None if self.peak is None else rate * self.flops_per_token / self.peak
        return {"tokens_per_second": rate, "mfu": mfu}
