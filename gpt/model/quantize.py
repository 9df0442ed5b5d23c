"""Quantization of matrices to int8 or int4, with a scale per group of 32 elements of a row.

Levels and scales are as in GGUF's Q8_0 and Q4_0, or with minimums as in Q4_1. On a CPU, products also round their
inputs (`multiply`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeVar

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from gpt.model.decoder import GPT
from gpt.model.params import GROUP as GROUP
from gpt.system.errors import NotANumber, UserError

Module = TypeVar("Module", bound=nn.Module)
# GGUF types whose blocks decoder.c reads, by ggml's numbers.
F32, F16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K, BF16 = 0, 1, 2, 3, 6, 7, 8, 12, 13, 14, 30
EXACT = {Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K}  # Their levels are used as they are.
BITS = {"int8": 8, "int4": 4}  # By value of --dtype.
LEVELS = 127  # largest int8 level
MIDDLE = 8  # Int4 level that represents 0.
# Number of scales tried per group. Q4_0's reference uses only one scale, the largest element / −8. With 8 scales, a
# trained model of 3.7 M parameters has 11 % less squared error and 11 % less divergence from its original predictions.
# 128 scales are no better.
_SCALES_PER_GROUP = 8
_CHUNK_SIZE = 2**18  # Elements rounded at a time; they fit in the processor's cache.


@dataclass(frozen=True)
class Quantized:
    """A matrix (out, in) in int8 or int4, with a scale per group. The last group of int8 can be shorter. Int4 levels
    are 0 to 15, and the level 8 represents 0 unless there are minimums."""

    levels: Tensor  # int8 (out, in), or uint8 (out, in / 2) with elements j and j + 16 of a group in byte j
    scales: Tensor  # float16 (out, groups)
    minimums: Tensor | None = None  # float16 (out, groups), added to levels times scales

    @property
    def bits(self) -> int:
        """Bits per element: 8 or 4."""
        return 8 if self.levels.dtype == torch.int8 else 4

    @property
    def nbytes(self) -> int:
        """Bytes of levels and scales."""
        return self.levels.nbytes + self.scales.nbytes + (0 if self.minimums is None else self.minimums.nbytes)

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        rows, columns = self.levels.shape
        return rows, columns * 8 // self.bits

    def map(self, change: Callable[[Tensor], Tensor]) -> "Quantized":
        """Returns the matrix with its parts changed, for example moved to a device."""
        minimums = None if self.minimums is None else change(self.minimums)
        return Quantized(change(self.levels), change(self.scales), minimums)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Returns the matrix."""
        return self._dequantize().to(dtype)

    def _dequantize(self) -> Tensor:
        levels = self.levels if self.bits == 8 else self.unpack_levels().float()
        if self.minimums is None:
            return scale_groups(levels if self.bits == 8 else levels.sub_(MIDDLE), self.scales)
        products = _groups(scale_groups(levels, self.scales))
        return (products + self.minimums.float()[..., None]).flatten(-2)[..., : levels.size(-1)]

    def unpack_levels(self) -> Tensor:
        """Returns the int4 levels, 0 to 15, as uint8 (out, in)."""
        pairs = self.levels.view(len(self.levels), -1, GROUP // 2)
        return torch.cat([pairs & 15, pairs >> 4], dim=-1).flatten(1)

    def rows(self, ids: Tensor) -> Tensor:
        """Looks up rows by id, (…) → (…, in), in float32."""
        return self.map(lambda part: F.embedding(ids.flatten(), part)).dequantize().view(*ids.shape, -1)


class Rows(NamedTuple):
    """Rows of a matrix in a GGUF type."""

    type: int  # A number in ggml's list of types.
    bytes: Tensor  # (rows, bytes), uint8
    outputs: Tensor  # int64, the place of each row in the matrix


class Restorable(Protocol):
    """A quantized matrix."""

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Returns the matrix."""


class Blocks(Restorable, Protocol):
    """A quantized matrix in a GGUF file. `gpt.decoding` uses its levels and scales, and everything else restores it."""

    def parts(self) -> list[Rows]:
        """Returns the file's rows."""

    def rows(self, ids: Tensor) -> Tensor:
        """Looks up rows by id, (…) → (…, in), in float32."""


def to_tensor(value: Tensor | Quantized | Blocks) -> Tensor:
    """Returns a parameter as a tensor, dequantized to float32 if necessary."""
    return value if isinstance(value, Tensor) else value.dequantize()


def multiply(x: Tensor, weight: Quantized | Blocks, bias: Tensor | None) -> Tensor:
    """x Wᵀ + b, (…, in) → (…, out): the definition of a product with a quantized matrix. On a CPU, the inputs are
    rounded to int8 as well, with a float32 scale per group, so that sums within a group are exact integers."""
    matrix = weight.dequantize()
    if x.device.type != "cpu":
        return F.linear(x, matrix.to(x.dtype), bias)
    scales = _groups(x.float()).abs().amax(-1) / LEVELS
    levels = (_groups(x.float()) * torch.where(scales * LEVELS > 1e-30, 1 / scales, 0)[..., None]).round_()
    rounded = scale_groups(levels.flatten(-2)[..., : x.size(-1)], scales)
    return F.linear(rounded, matrix, None if bias is None else bias.float()).to(x.dtype)


def _groups(x: Tensor) -> Tensor:
    """(…, in) → (…, groups, 32), padded with zeros."""
    return F.pad(x, (0, -x.size(-1) % GROUP)).view(*x.shape[:-1], -1, GROUP)


def scale_groups(levels: Tensor, scales: Tensor) -> Tensor:
    """Multiplies levels (…, in) by the scales of their groups, (…, groups)."""
    return (_groups(levels) * scales.float()[..., None]).flatten(-2)[..., : levels.size(-1)]


def to_int8(weight: Tensor) -> Quantized:
    """Quantizes a matrix to int8, scaling the largest element of each group to ±127. Raises `NotANumber` for NaN or
    infinity, and `UserError` for elements too large for a float16 scale."""
    return _quantize_in_chunks(weight, _rows_to_int8)


def to_int4(weight: Tensor) -> Quantized:
    """Quantizes a matrix to int4. Its row length must be a multiple of 32. For each group, tries scales that put the
    largest element near ±8, fits them by least squares and picks the most accurate scale. Raises `NotANumber` for NaN
    or infinity, and `UserError` for elements too large for a float16 scale."""
    return _quantize_in_chunks(weight, _rows_to_int4)


def bits_of_rows(width: int, bits: int) -> int:
    """Returns ``bits``, or 8 if the row length ``width`` is not a multiple of 32."""
    return bits if width % GROUP == 0 else 8


def _quantize_in_chunks(weight: Tensor, quantize: Callable[[Tensor], Quantized]) -> Quantized:
    parts = [quantize(rows.float()) for rows in torch.split(weight.detach(), max(1, _CHUNK_SIZE // weight.size(1)))]
    return Quantized(torch.cat([part.levels for part in parts]), torch.cat([part.scales for part in parts]))


def _rows_to_int8(rows: Tensor) -> Quantized:
    groups = _groups(rows)
    scales = (groups.abs().amax(-1) / LEVELS).half()
    if not scales.isfinite().all():
        raise range_error(rows, "int8")
    levels = (groups / torch.where(scales == 0, torch.inf, scales.float())[..., None]).round_()
    levels = levels.clamp_(-LEVELS, LEVELS).to(torch.int8)  # A rounded scale can be too small for the largest element.
    return Quantized(levels.flatten(-2)[:, : rows.size(1)].contiguous(), scales)


def _rows_to_int4(rows: Tensor) -> Quantized:
    groups = rows.view(len(rows), -1, GROUP)
    largest = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))
    best_scale, best_error = torch.zeros_like(largest), torch.full_like(largest, torch.inf)
    for index in range(_SCALES_PER_GROUP):
        levels = _round_to_levels(groups, largest / -(MIDDLE - 1.5 + 3 * index / _SCALES_PER_GROUP))
        fitted_scale = (levels * groups).sum(-1, keepdim=True) / levels.square().sum(-1, keepdim=True).clamp_(min=1)
        scale = fitted_scale.half().float()
        error = (_round_to_levels(groups, scale) * scale - groups).square_().sum(-1, keepdim=True)
        is_better = error < best_error
        best_scale, best_error = torch.where(is_better, scale, best_scale), torch.where(is_better, error, best_error)
    if not best_error.isfinite().all():  # Every scale of some group has an infinite or NaN error.
        raise range_error(rows, "int4")
    low, high = (_round_to_levels(groups, best_scale) + MIDDLE).to(torch.uint8).chunk(2, dim=-1)
    return Quantized((low | high << 4).flatten(1), best_scale.squeeze(-1).half())


def range_error(weight: Tensor | Quantized | Blocks, dtype: str) -> UserError:
    """Returns the error for a scale that is NaN or too large for float16."""
    if not isinstance(weight, Tensor):
        return NotANumber("the scales of quantized weights are NaN or infinite")
    if not weight.isfinite().all():
        return NotANumber("weights cannot be quantized: some are NaN or infinite")
    return UserError(f"weights are too large for {dtype}, which has float16 scales", "use --dtype bfloat16 or float32")


def _round_to_levels(groups: Tensor, scale: Tensor) -> Tensor:
    return (groups / torch.where(scale == 0, 1, scale)).round_().clamp_(-MIDDLE, MIDDLE - 1)


class QuantizedLinear(nn.Module):
    """A linear map with a quantized weight, in memory or in a file. `gpt.decoding` has faster layouts."""

    def __init__(self, weight: Quantized | Blocks, bias: Tensor | None) -> None:
        super().__init__()
        self.weight = weight
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """(…, in) → (…, out)."""
        return multiply(x, self.weight, self.bias)


class StoredEmbedding(nn.Module):
    """A quantized embedding, or one in a file. It reads only the rows it looks up."""

    def __init__(self, weight: Tensor | Quantized | Blocks, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight, self.dtype = weight, dtype

    def forward(self, ids: Tensor) -> Tensor:
        """(…) → (…, C)."""
        rows = F.embedding(ids, self.weight) if isinstance(self.weight, Tensor) else self.weight.rows(ids)
        return rows.to(self.dtype)


class Ends(nn.Module):
    """The embedding and the LM head of a model, without its blocks."""

    def __init__(self, wte: nn.Module, lm_head: nn.Module | None) -> None:
        super().__init__()
        self.wte, self.lm_head = wte, lm_head  # None if the LM head is the embedding.


def quantize_model(module: Module, bits: int, dtype: torch.dtype = torch.float32) -> Module:
    """Quantizes a model, its `Ends` or a block in place, and returns it. The blocks' matrices get ``bits`` bits, and
    the token embedding and the LM head get 8. The model dequantizes embedding rows to ``dtype``."""
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear):
                quantize = to_int4 if bits_of_rows(child.in_features, head_bits(name, bits)) == 4 else to_int8
                setattr(parent, name, QuantizedLinear(quantize(child.weight), child.bias))
    if isinstance(module, GPT | Ends) and isinstance(module.wte, nn.Embedding):
        matrix = to_int8(module.wte.weight)
        module.lm_head = module.lm_head or QuantizedLinear(matrix, None)
        module.set_submodule("wte", StoredEmbedding(matrix, dtype))
    return module


def head_bits(name: str, bits: int) -> int:
    """Returns the bits of a linear map: 8 for the LM head, which needs more than a block's matrices."""
    return 8 if name == "lm_head" else bits
