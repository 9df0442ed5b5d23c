"""Packed, low-precision, int8 and int4 weights for decoding, where a step reads all weights for only a few positions.

A prepared model only computes logits. It can be neither trained nor saved.
"""

import ctypes
import math
from typing import Any, TypeVar

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from gpt.config.device import Compute
from gpt.config.model import GPTConfig
from gpt.decoding import native
from gpt.decoding.library import Note
from gpt.decoding.native import PackedLinear
from gpt.model.decoder import GPT
from gpt.model.params import breakdown, count_matmul_parameters
from gpt.model.quantize import GROUP, Ends, Quantized, QuantizedLinear, StoredEmbedding, quantize_model

Module = TypeVar("Module", bound=nn.Module)


class GPULinear(nn.Module):
    """A linear layer on a GPU."""

    ALIGNED, TILE = 8, 64  # Tensor cores need multiples of 8 outputs. Other numbers are padded to multiples of 64.

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.outputs = len(weight)
        if self.outputs % self.ALIGNED:
            weight = F.pad(weight, (0, 0, 0, -self.outputs % self.TILE))
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        """(…, in) → (…, out), in the input's dtype."""
        if self.outputs == len(self.weight):
            return F.linear(x, self.weight, self.bias)
        out = F.linear(x, self.weight)[..., : self.outputs]
        return out if self.bias is None else out + self.bias


class Int4Linear(nn.Module):
    """A linear layer on a GPU with int4 weights.

    In torch's tinygemm kernel, a weight is (level − 8) · scale + zero. Scales and products are bfloat16, and sums are
    float32. The number of outputs must be a multiple of 16.
    """

    def __init__(self, weight: Quantized, bias: Tensor | None) -> None:
        super().__init__()
        self.bias = bias
        scales = weight.scales.bfloat16().t()
        self.scales = torch.stack([scales, torch.zeros_like(scales)], dim=-1)  # Scale and zero, (in / 32, out, 2).
        levels = weight.unpack_levels()
        tiles = next(tiles for tiles in (8, 4, 2) if levels.size(1) % (16 * tiles) == 0)
        self.weight = torch.ops.aten._convert_weight_to_int4pack(levels[:, ::2] << 4 | levels[:, 1::2], tiles)
        self.elements, self.nbytes = math.prod(weight.shape), self.weight.nbytes + self.scales.nbytes

    def forward(self, x: Tensor) -> Tensor:
        """(…, in) → (…, out), in the input's dtype."""
        rows = x.reshape(-1, x.size(-1)).bfloat16()
        out = torch.ops.aten._weight_int4pack_mm(rows, self.weight, GROUP, self.scales).to(x.dtype)
        result: Tensor = (out if self.bias is None else self.bias + out).view(*x.shape[:-1], -1)
        return result

    @staticmethod
    def runs_on(device: torch.device) -> bool:
        """Whether the device has a fast kernel: a CUDA GPU of the Ampere generation or later."""
        return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 8


def prepare(model: Module, compute: Compute, note: Note = lambda text: None, bits: int | None = None) -> Module:
    """Prepares a module for fast steps, in place, and returns it.

    Quantizes matrices to ``bits`` bits. Converts other weights to the dtype of ``compute``, and linear layers to the
    device's fastest layout. On a CPU, this is the layout of `native`. Without a C compiler, ``note`` is called, and the
    layout doesn't change.
    """
    if (lib := find_library(compute, note)) is not None:
        native.pack(model, lib, compute.dtype, bits)
        return model
    if bits is not None:
        quantize_model(model, bits, compute.dtype)
    if compute.dtype != torch.float32:
        model.to(compute.dtype)
    if compute.device.type != "cuda":
        return model
    with torch.no_grad():
        for parent in list(model.modules()):
            for name, child in list(parent.named_children()):
                setattr(parent, name, _lay_out_for_gpu(child, compute))
        if isinstance(model, GPT | Ends) and model.lm_head is None:
            embedding: Any = model.wte
            model.lm_head = head = GPULinear(embedding.weight.detach(), None)
            embedding.weight = nn.Parameter(head.weight[: head.outputs], requires_grad=False)  # Shares memory.
    return model


def find_library(compute: Compute, note: Note) -> ctypes.CDLL | None:
    """Returns the C decoder, or None if torch computes the steps."""
    return native.find(note) if compute.device.type == "cpu" else None


def _lay_out_for_gpu(module: nn.Module, compute: Compute) -> nn.Module:
    match module:
        case QuantizedLinear(weight=Quantized(bits=4) as weight):
            if weight.shape[0] % 16 == 0 and Int4Linear.runs_on(weight.levels.device):
                return Int4Linear(weight, module.bias)
            return GPULinear(weight.dequantize().to(compute.dtype), module.bias)
        case nn.Linear():
            return GPULinear(module.weight.detach(), module.bias)
    return module


def dtype_name(model: GPT, compute: Compute) -> str:
    """Returns the dtype in which steps read most matrices of a prepared model, like ``int4`` or ``int8``."""
    names = [name for module in model.h.modules() if (name := _quantized_name(module))]
    return max(sorted({*names}), key=names.count, default=compute.dtype_name)


def _quantized_name(module: nn.Module) -> str | None:
    match module:
        case PackedLinear():
            return module.kind if module.scales is not None else None
        case QuantizedLinear(weight=Quantized(bits=bits)):
            return f"int{bits}"
        case Int4Linear():
            return "int4"
    return None


def weight_bytes(model: GPT, compute: Compute) -> int:
    """Returns the bytes of weights that a step reads: all matrices except an embedding that is separate from the LM
    head."""
    unquantized, total = count_matmul_parameters(model.config), 0
    for module in {*model.h.modules(), model.lm_head}:
        match module:
            case Int4Linear() | PackedLinear():
                unquantized, total = unquantized - module.elements, total + module.nbytes
            case QuantizedLinear(weight=Quantized() as weight):
                unquantized, total = unquantized - math.prod(weight.shape), total + weight.nbytes
    return unquantized * compute.dtype.itemsize + total


def expected_bytes(config: GPTConfig, compute: Compute, bits: int | None) -> int:
    """Returns the bytes of all weights of a model that will be prepared."""
    parameters, embedding = breakdown(config).trainable, config.vocab_size * config.n_embd
    # A CUDA GPU without a fast int4 kernel dequantizes the weights.
    if bits is None or (bits == 4 and compute.device.type == "cuda" and not Int4Linear.runs_on(compute.device)):
        return parameters * compute.dtype.itemsize
    scale = 2 / GROUP
    return int((parameters - embedding) * (bits / 8 + scale) + embedding * (1 + scale))


def resident_bytes(model: GPT, compute: Compute) -> int:
    """Returns the bytes of all weights in memory, including an embedding that is separate from the LM head."""
    is_in_memory = not (model.config.tied or isinstance(model.get_submodule("wte"), StoredEmbedding))
    separate = is_in_memory * model.config.vocab_size * model.config.n_embd * compute.dtype.itemsize
    return weight_bytes(model, compute) + separate
