"""Weight layouts for decoding, where a step reads all weights for a few positions: packed, narrow, or int8.

A model that has been prepared computes logits and nothing else: it is neither trained nor saved.
"""

import warnings
from collections.abc import Callable
from typing import TypeVar

import numpy as np
import torch
import torch.nn as nn
from torch import Tensor

from gpt.device import Compute
from gpt.errors import is_out_of_memory
from gpt.model.cache import KVCache
from gpt.model.decoder import GPT, Block, Rope
from gpt.model.params import counts, multiplied
from gpt.model.quantize import LEVELS, Quantized, QuantizedLinear

_SMALLEST = np.float32(1e-30)  # scale of activations
Step = Callable[[Tensor, Rope | None, KVCache], Tensor]  # what `GPT.stack` computes
Module = TypeVar("Module", bound=nn.Module)


class PackedLinear(nn.Module):
    """A linear map on a CPU whose weight lies in the order in which oneDNN reads it.

    The order is that for `ROWS` positions, whatever their number. Asked for one position, oneDNN takes an order whose
    kernel is slower for any number: all matrices of GPT-2 124M in float32 took 12.0 ms at one position against 7.7,
    21 ms at eight against 11, and in bfloat16 the same time.
    """

    ROWS = 16

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), self.ROWS)
        self.bias = bias
        self.product = torch.ops.mkldnn._linear_pointwise.default

    def forward(self, x: Tensor) -> Tensor:
        """(…, in) → (…, out)."""
        out: Tensor = self.product(x, self.weight, self.bias, "none", [], "")
        return out

    @staticmethod
    def fits(device: torch.device, dtype: torch.dtype) -> bool:
        """Whether oneDNN has this layout for the device and dtype."""
        if device.type != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
            return False
        return dtype == torch.float32 or (
            dtype == torch.bfloat16 and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
        )


class Int8Linear(nn.Module):
    """A linear map whose weight is rounded to int8, with a scale for each output.

    On x86 CPUs the input is rounded too, to int8 with a scale for each position, so that products are of whole numbers
    (FBGEMM's kernel); elsewhere it stays in bfloat16.
    """

    def __init__(self, weight: Quantized, bias: Tensor | None) -> None:
        super().__init__()
        self.weight: Tensor | torch.ScriptObject = weight.levels
        self.bias = bias
        self.integer = weight.levels.device.type == "cpu" and has_byte_products()
        if self.integer:
            self.levels = LEVELS if has_whole_products() else LEVELS // 2
            self.weight = _pack(weight)
            self.product = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32.default
        else:
            self.scale = weight.scales.bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        """(…, in) → (…, out), of the input's dtype."""
        if self.integer:
            out = self._of_whole_numbers(x if x.dtype == torch.float32 else x.float())
        else:
            rows = x.reshape(-1, x.size(-1)).bfloat16()
            out = torch.ops.aten._weight_int8pack_mm(rows, self.weight, self.scale).view(*x.shape[:-1], -1)
        if self.bias is not None:
            out += self.bias
        return out.to(x.dtype)

    def _of_whole_numbers(self, x: Tensor) -> Tensor:
        scale: Tensor | float
        inverse: Tensor | float
        if x.numel() == x.size(-1):  # one position: the same numbers by fewer calls
            largest = np.float32(torch.linalg.vector_norm(x, torch.inf).item())
            one = np.maximum(largest / np.float32(self.levels), _SMALLEST)
            scale, inverse = float(one), float(np.float32(1) / one)
        else:
            scales = torch.linalg.vector_norm(x, torch.inf, dim=-1, keepdim=True)
            scale = scales.div_(self.levels).clamp_(min=float(_SMALLEST))
            inverse = scale.reciprocal()
        out: Tensor = self.product(x * inverse, 1.0, self.levels + 1, self.weight)
        return out.mul_(scale)


def has_byte_products() -> bool:
    """Whether this build of torch multiplies bytes on the CPU (FBGEMM, on x86)."""
    return "fbgemm" in torch.backends.quantized.supported_engines


def has_whole_products() -> bool:
    """Whether sums of products of bytes are exact on this CPU (AVX-512 or AVX VNNI). Without it pairs of them are
    summed in 16 bits, which half as many levels cannot overflow."""
    capabilities: dict[str, object] = getattr(torch.cpu, "get_capabilities", dict)()
    return bool(capabilities.get("avx512_vnni") or capabilities.get("avx_vnni"))


def _pack(weight: Quantized) -> torch.ScriptObject:
    torch.backends.quantized.engine = "fbgemm"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch means to move these kernels elsewhere
        zero = torch.zeros(len(weight.scales), dtype=torch.long)
        rounded = torch._make_per_channel_quantized_tensor(weight.levels, weight.scales, zero, 0)
        return torch.ops.quantized.linear_prepack(rounded, None)  # type: ignore[no-any-return]


def prepare(model: Module, compute: Compute, *, packed: bool = True) -> Module:
    """Changes a model, or a part of one, in place for fast steps, and returns it: weights in the dtype of ``compute``,
    each linear map in the layout that the device reads fastest. Without ``packed`` those that are not rounded to int8
    stay as they are, for a compiler to lay out."""
    if compute.dtype != torch.float32:
        model.to(compute.dtype)
    packed = packed and PackedLinear.fits(compute.device, compute.dtype)
    with torch.no_grad():
        for parent in list(model.modules()):
            for name, child in list(parent.named_children()):
                if isinstance(child, QuantizedLinear) and child.weight.bits == 8:
                    setattr(parent, name, Int8Linear(child.weight, child.bias))
                elif isinstance(child, nn.Linear) and packed:
                    setattr(parent, name, PackedLinear(child.weight.detach(), child.bias))
        if isinstance(model, GPT) and model.lm_head is None and packed:
            model.lm_head = PackedLinear(model.wte.weight.detach(), None)
    if compute.device.type == "cpu":
        for module in model.modules():
            if isinstance(module, Block):
                _shorten(module)
    return model


def _shorten(block: Block) -> None:
    """Lets the modules of a block find each other's `forward` and their parameters as attributes of their own. By
    `nn.Module`'s call and lookup each takes 1 to 2 µs, all of GPT-2 124M 0.4 ms a step."""
    for module in block.modules():
        found = {name: child.forward for name, child in module.named_children()}
        vars(module).update(found, **dict(module.named_parameters(recurse=False)))


def is_int8(model: GPT) -> bool:
    """Whether a prepared model's matrices are rounded to int8."""
    return any(isinstance(module, Int8Linear) for module in model.modules())


def weight_bytes(model: GPT, compute: Compute) -> int:
    """The bytes of weights that a step reads: each matrix once, the unembedding among them, and not an embedding that
    is another one."""
    own = counts(model.config)
    vectors = own["bias"] + own["norm"]
    size = 1 if is_int8(model) else compute.dtype.itemsize
    return (multiplied(model.config) - vectors) * size + vectors * compute.dtype.itemsize


def compiled(model: GPT, compute: Compute, note: Callable[[str], None]) -> Step | None:
    """Compiles the model's stack for steps of one position, as CUDA graphs on a GPU. Returns None for packed and int8
    weights, whose kernels the compiler cannot see into. Where compiling fails, ``note`` is called and steps run
    uncompiled."""
    if any(isinstance(module, PackedLinear | Int8Linear) for module in model.modules()):
        note("weights in int8, and those packed for the CPU, are not compiled: their kernels are")
        return None
    mode = "reduce-overhead" if compute.device.type == "cuda" else "default"
    fast = torch.compile(model.stack, dynamic=False, mode=mode)
    failed = False

    def step(x: Tensor, rope: Rope | None, cache: KVCache) -> Tensor:
        nonlocal failed
        if not failed:
            try:
                return fast(x, rope, cache)
            except Exception as error:  # the compiler's own, its backend's, or that of a C++ compiler that is not there
                if is_out_of_memory(error):
                    raise
                failed = True
                note(f"torch.compile failed, so steps are computed without it: {str(error).splitlines()[0]:.200}")
        return model.stack(x, rope, cache)

    return step
