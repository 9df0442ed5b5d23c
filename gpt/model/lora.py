"""Low-rank adapters (Hu et al. 2021): W is frozen, and the linear map computes W + α/R · B A, where B A has rank R."""

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpt.config import GPTConfig
from gpt.model.decoder import GPT
from gpt.model.params import Shape, named_parameters


class LowRank(nn.Linear):
    """A linear map with its own weights, frozen, and an adapter beside it."""

    def __init__(self, linear: nn.Linear, rank: int, scale: float) -> None:
        nn.Module.__init__(self)  # nn.Linear's own would make new weights
        self.in_features, self.out_features, self.scale = linear.in_features, linear.out_features, scale
        self.weight, self.bias = linear.weight, linear.bias
        self.a = nn.Parameter(linear.weight.new_empty(rank, linear.in_features))
        self.b = nn.Parameter(linear.weight.new_zeros(linear.out_features, rank))  # so at first nothing changes
        nn.init.kaiming_uniform_(self.a, a=math.sqrt(5))

    def forward(self, x: Tensor) -> Tensor:
        """(…, in) → (…, out)."""
        return F.linear(x, self.weight, self.bias) + self.scale * F.linear(F.linear(x, self.a), self.b)


def adapt(model: GPT, rank: int, alpha: float) -> list[nn.Parameter]:
    """Freezes a model, gives the linear maps of its blocks adapters, and returns these, which alone are trained. Uses
    torch's global generator."""
    model.requires_grad_(False)
    added = []
    for name in _adapted(model.config):
        parent, _, child = name.rpartition(".")
        adapter = LowRank(model.get_submodule(name), rank, alpha / rank)  # type: ignore[arg-type]
        setattr(model.get_submodule(parent), child, adapter)
        added += [adapter.a, adapter.b]
    return added


def adapters(model: GPT) -> dict[str, Tensor]:
    """The tensors of a model's adapters: ``h.0.attn.c_attn.a`` (R, in), ``h.0.attn.c_attn.b`` (out, R) …"""
    return {name: p.detach() for name, p in model.named_parameters() if name.rpartition(".")[2] in ("a", "b")}


def adapter_shapes(config: GPTConfig, rank: int) -> dict[str, Shape]:
    """The shapes of `adapters` by name."""
    shapes: dict[str, Shape] = {}
    for name, (outs, ins) in _adapted(config).items():
        shapes |= {f"{name}.a": (rank, ins), f"{name}.b": (outs, rank)}
    return shapes


@torch.no_grad()
def merge(model: GPT, tensors: Mapping[str, Tensor], scale: float) -> None:
    """Adds adapters, as `adapters` gives them, to the weights of a model that has none."""
    for name in _adapted(model.config):
        weight = model.get_submodule(name).weight
        assert isinstance(weight, Tensor)
        a, b = (tensors[f"{name}.{part}"].to(weight.device) for part in "ab")
        weight += scale * (b @ a)


def _adapted(config: GPTConfig) -> dict[str, Shape]:
    """The linear maps that have adapters by the names of their modules, each with its shape (out, in)."""
    return {name.removesuffix(".weight"): p.shape for name, p in named_parameters(config).items() if p.is_matrix}
