"""Weight layouts for decoding, where a step reads all weights for a few positions: packed, narrow, or int8.

A model that has been prepared computes logits and nothing else: it is neither trained nor saved.
"""

import warnings
from typing import TypeVar

import torch
import torch.nn as nn
from torch import Tensor

from gpt.device import Compute
from gpt.model.decoder import GPT
from gpt.model.params import counts, multiplied
from gpt.model.quantize import LEVELS, Quantized, QuantizedLinear

Module = TypeVar("Module", bound=nn.Module)


class PackedLinear(nn.Module):
    """A linear map on a CPU whose weight lies in the order in which oneDNN reads it: at one position a third faster
    than rows one after the other, at eight twice as fast."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), 1)
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        """(…, in) → (…, out)."""
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
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
        else:
            self.scale = weight.scales.bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        """(…, in) → (…, out), of the input's dtype."""
        rows = x.reshape(-1, x.size(-1))
        if self.integer:
            rows = rows.float()
            step = rows.abs().amax(-1, keepdim=True).clamp_(min=1e-30).div_(self.levels)  # a position's scale
            out = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32(
                rows / step, 1.0, self.levels + 1, self.weight
            )
            out = out.mul_(step) if self.bias is None else torch.addcmul(self.bias, out, step)
        else:
            out = torch.ops.aten._weight_int8pack_mm(rows.bfloat16(), self.weight, self.scale).to(x.dtype)
            out = out if self.bias is None else out + self.bias
        whole: Tensor = out.to(x.dtype).view(*x.shape[:-1], -1)
        return whole


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
    return model


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
