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
                if isinstance(child, nn.Linear):
                    setattr(parent, name, GPULinear(child.weight.detach(), child.bias))
        if isinstance(model, GPT | Ends) and model.lm_head is None:
            embedding: Any = model.wte
            model.lm_head = head = GPULinear(embedding.weight.detach(), None)
            embedding.weight = nn.Parameter(head.weight[: head.outputs], requires_grad=False)  # Shares memory.
    return model


def find_library(compute: Compute, note: Note) -> ctypes.CDLL | None:
    """Returns the C decoder, or None if torch computes the steps."""
    return native.find(note) if compute.device.type == "cpu" else None


def weight_bytes(model: GPT, compute: Compute) -> int:
    """Returns the bytes of weights that a step reads: all matrices except an embedding that is separate from the LM
    head."""
    unquantized, total = count_matmul_parameters(model.config), 0
    for module in {*model.h.modules(), model.lm_head}:
        match module:
            case PackedLinear():
                unquantized, total = unquantized - module.elements, total + module.nbytes
            case QuantizedLinear(weight=Quantized() as weight):
                unquantized, total = unquantized - math.prod(weight.shape), total + weight.nbytes
    return unquantized * compute.dtype.itemsize + total


def expected_bytes(config: GPTConfig, compute: Compute, bits: int | None) -> int:
    """Returns the bytes of all weights of a model that will be prepared."""
    parameters, embedding = breakdown(config).trainable, config.vocab_size * config.n_embd
    if bits is None:
        return parameters * compute.dtype.itemsize
    scale = 2 / GROUP
    return int((parameters - embedding) * (bits / 8 + scale) + embedding * (1 + scale))


def resident_bytes(model: GPT, compute: Compute) -> int:
    """Returns the bytes of all weights in memory, including an embedding that is separate from the LM head."""
    is_in_memory = not (model.config.tied or isinstance(model.get_submodule("wte"), StoredEmbedding))
    separate = is_in_memory * model.config.vocab_size * model.config.n_embd * compute.dtype.itemsize
    return weight_bytes(model, compute) + separate
