"""Matrices rounded to whole numbers of 8 or 4 bits, with the scales that give them back."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from gpt.errors import NotANumber, UserError
from gpt.model.decoder import GPT

LEVELS = 127  # of int8, on either side of 0
GROUP = 32  # numbers of a row that share a scale in int4
MIDDLE = 8  # the level of int4 that is 0
# Scales tried for a group. Against the largest number over −8, as Q4_0's reference has it, a trained model of 3.7 M
# parameters has 11 % less squared error and 11 % less divergence from its own predictions; 128 scales give no more.
_TRIED = 8
_AT_ONCE = 2**18  # numbers that are rounded at a time: they stay in the processor's cache


@dataclass(frozen=True)
class Quantized:
    """A matrix (out, in) in int8 with a scale for each row, or in int4 with one for each 32 numbers of a row."""

    levels: Tensor  # int8 (out, in); or uint8 (out, in / 2), byte j of a group: number j + 16 · number (j + 16)
    scales: Tensor  # float32 (out), or float16 (out, in / 32)

    @property
    def bits(self) -> int:
        """Bits of a number: 8 or 4."""
        return 8 if self.levels.dtype == torch.int8 else 4

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        rows, columns = self.levels.shape
        return rows, columns * 8 // self.bits

    def to(self, device: torch.device) -> "Quantized":
        """The same on a device."""
        return Quantized(self.levels.to(device), self.scales.to(device))

    def dequantize(self) -> Tensor:
        """The matrix in float32: each level times its scale."""
        if self.bits == 8:
            return self.levels.float().mul_(self.scales[:, None])
        groups = self.unpacked().float().sub_(MIDDLE).view(len(self.levels), -1, GROUP)
        return groups.mul_(self.scales.float()[..., None]).flatten(1)

    def unpacked(self) -> Tensor:
        """The levels of int4, 0 to 15, uint8 (out, in)."""
        pairs = self.levels.view(len(self.levels), -1, GROUP // 2)
        return torch.cat([pairs & 15, pairs >> 4], dim=-1).flatten(1)

    def rows(self, ids: Tensor) -> Tensor:
        """Rows by their numbers, (…) → (…, in), in float32."""
        some = ids.flatten()
        return Quantized(F.embedding(some, self.levels), self.scales[some]).dequantize().view(*ids.shape, -1)


def whole(value: Tensor | Quantized) -> Tensor:
    """A parameter as a tensor: as it is, or restored in float32."""
    return value.dequantize() if isinstance(value, Quantized) else value


def to_int8(weight: Tensor) -> Quantized:
    """Rounds a matrix to int8; each row's largest number becomes 127 or −127. Raises `UserError` for numbers that are
    not finite."""
    return _in_parts(weight, _rows_to_int8)


def to_int4(weight: Tensor) -> Quantized:
    """Rounds a matrix, whose rows are groups of 32, to int4. Of a group's scales that put its largest number near −8 or
    8, each fitted by least squares, it takes the one with the least squared error. Raises `UserError` for numbers that
    are not finite, or too large for a scale in float16."""
    return _in_parts(weight, _rows_to_int4)


def round_matrix(weight: Tensor, bits: int) -> Quantized:
    """Rounds a matrix to ``bits``, or to 8 where its rows are no whole groups."""
    return (to_int4 if bits_of_rows(weight.size(1), bits) == 4 else to_int8)(weight)


def bits_of_rows(width: int, bits: int) -> int:
    """The bits in which rows of a matrix are stored beside others of ``bits``: 8 where they are no whole groups."""
    return bits if width % GROUP == 0 else 8


def _in_parts(weight: Tensor, rounded: Callable[[Tensor], Quantized]) -> Quantized:
    parts = [rounded(rows.float()) for rows in torch.split(weight.detach(), max(1, _AT_ONCE // weight.size(1)))]
    return Quantized(torch.cat([part.levels for part in parts]), torch.cat([part.scales for part in parts]))


def _rows_to_int8(rows: Tensor) -> Quantized:
    scales = rows.abs().amax(1) / LEVELS
    if not scales.isfinite().all():
        raise _not_finite()
    scales = torch.where(scales < torch.finfo(torch.float32).tiny, 1.0, scales)
    return Quantized((rows / scales[:, None]).round_().to(torch.int8), scales)


def _rows_to_int4(rows: Tensor) -> Quantized:
    groups = rows.view(len(rows), -1, GROUP)
    largest = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))
    best, least = torch.zeros_like(largest), torch.full_like(largest, torch.inf)
    for step in range(_TRIED):
        levels = _levels(groups, largest / -(MIDDLE - 1.5 + 3 * step / _TRIED))
        fitted = (levels * groups).sum(-1, keepdim=True) / levels.square().sum(-1, keepdim=True).clamp_(min=1)
        scale = fitted.half().float()
        error = (_levels(groups, scale) * scale - groups).square_().sum(-1, keepdim=True)
        better = error < least
        best, least = torch.where(better, scale, best), torch.where(better, error, least)
    if not least.isfinite().all():  # no scale of a group has a finite error
        if not rows.isfinite().all():
            raise _not_finite()
        raise UserError("weights are too large for int4, which has float16 scales", "use int8")
    low, high = (_levels(groups, best) + MIDDLE).to(torch.uint8).chunk(2, dim=-1)
    return Quantized((low | high << 4).flatten(1), best.squeeze(-1).half())


def _not_finite() -> NotANumber:
    return NotANumber("weights cannot be quantized: some are NaN or infinite")


def _levels(groups: Tensor, scale: Tensor) -> Tensor:
    return (groups / torch.where(scale == 0, 1, scale)).round_().clamp_(-MIDDLE, MIDDLE - 1)


class QuantizedLinear(nn.Module):
    """A linear map by a rounded matrix, which is restored for each product. `gpt.decoding.weights` lays it out for
    speed."""

    def __init__(self, weight: Quantized, bias: Tensor | None) -> None:
        super().__init__()
        self.weight = weight
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """(…, in) → (…, out)."""
        return F.linear(x, self.weight.dequantize().to(x.dtype), self.bias)


class QuantizedEmbedding(nn.Module):
    """An embedding of which only the rows that are looked up are restored, in ``dtype``."""

    def __init__(self, weight: Quantized, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight, self.dtype = weight, dtype

    def forward(self, ids: Tensor) -> Tensor:
        """(…) → (…, C)."""
        return self.weight.rows(ids).to(self.dtype)


def round_matrices(model: GPT, bits: int, dtype: torch.dtype = torch.float32) -> GPT:
    """Rounds a model's matrices to ``bits``, and embeddings to 8, in place, and returns it. Rows of its embedding are
    restored in ``dtype``."""
    embedding = to_int8(model.wte.weight)
    model.lm_head = QuantizedLinear(embedding if model.lm_head is None else to_int8(model.unembedding), None)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear):
                setattr(parent, name, QuantizedLinear(round_matrix(child.weight, bits), child.bias))
    model.set_submodule("wte", QuantizedEmbedding(embedding, dtype))
    return model
