"""Packed, low-precision, int8 and int4 weights for decoding, where a step reads all weights for only a few positions.

A prepared model only computes logits. It can be neither trained nor saved.
"""

import math
import warnings
from typing import TypeVar

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from gpt.device import Compute, has_native_bfloat16
from gpt.model.decoder import GPT, Attention, Block, Linear
from gpt.model.params import count_matmul_parameters
from gpt.model.quantize import GROUP, LEVELS, MIDDLE, Quantized, QuantizedLinear

_MIN_INPUT_SCALE = torch.tensor(1e-30, device="cpu")
Module = TypeVar("Module", bound=nn.Module)
# Maximum number of positions at which a CPU's int4 kernel beats dequantized weights. On two cores, GPT-2 124M took 67
# ms with the kernel and 114 ms with dequantized weights at 80 positions, and 101 ms and 86 ms at 144. A model with
# SmolLM2-135M's shape took 70 ms and 83 ms at 80, and 131 ms and 121 ms at 144.
_MAX_INT4_POSITIONS = 112
_CHUNK_SIZE = 2**20  # Matrix elements to pack or dequantize at a time, so that they fit in the CPU's cache.


class PackedLinear(nn.Module):
    """A linear layer on a CPU with weights in oneDNN's packed layout.

    The layout is optimized for `ROWS` positions. oneDNN's layout for one position is slower: with it, all float32
    matrices of GPT-2 124M took 12.0 ms instead of 7.7 ms for one position, and 21 ms instead of 11 ms for eight. In
    bfloat16, the times were equal.
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


class GPULinear(nn.Module):
    """A linear layer on a GPU with weights of any dtype and an optional scale per output.

    When compiled for one position, it computes the product as a sum. The compiler fuses the sum with the bias,
    activation and residual addition, and reads int8 weights directly. With ``materialize``, the kernel's input is
    computed once, not once per output.
    """

    scale: Tensor | None
    ALIGNED, TILE = 8, 64  # Tensor cores need multiples of 8 outputs. Other numbers are padded to multiples of 64.

    def __init__(
        self, weight: Tensor, bias: Tensor | None, scale: Tensor | None = None, materialize: bool = True
    ) -> None:
        super().__init__()
        self.outputs, self.materialize = len(weight), materialize
        if self.outputs % self.ALIGNED:
            weight = F.pad(weight, (0, 0, 0, -self.outputs % self.TILE))
        # A parameter has a fixed address. A CUDA graph would copy any other tensor in each step.
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = bias
        self.register_buffer("scale", scale)
        self.elements = self.outputs * weight.size(1)
        self.nbytes = self.elements * weight.itemsize

    def forward(self, x: Tensor) -> Tensor:
        """(…, in) → (…, out), in the input's dtype."""
        if torch.compiler.is_compiling() and x.numel() == x.size(-1):
            row = x.float().flatten()
            if self.materialize:
                row = row.as_strided(row.shape, (1,))  # A strided view must be in memory.
            out = (row * self.weight[: self.outputs]).sum(-1).view(*x.shape[:-1], -1)
        elif self.scale is None and self.outputs == len(self.weight):
            return F.linear(x, self.weight, self.bias)
        else:
            out = F.linear(x, self.weight.to(x.dtype))[..., : self.outputs]
        out = out if self.scale is None else out * self.scale
        return (out if self.bias is None else out + self.bias).to(x.dtype)


class Int8Linear(nn.Module):
    """A linear layer on a CPU or MPS with int8 weights and a scale per output.

    On x86 CPUs, inputs are also quantized, with a scale per position, for FBGEMM's integer kernel: to 8 bits with VNNI,
    otherwise to 14 bits in two products. Elsewhere, inputs are bfloat16.
    """

    def __init__(self, weight: Quantized, bias: Tensor | None) -> None:
        super().__init__()
        self.elements = self.nbytes = weight.levels.numel()
        self.weight: Tensor | torch.ScriptObject = weight.levels
        self.bias = bias
        self.quantizes_input = weight.levels.device.type == "cpu" and has_int8_kernels()
        if self.quantizes_input:
            self.has_exact_sums = has_exact_int8_sums()
            self.levels = LEVELS if self.has_exact_sums else LEVELS // 2
            self.level_size = torch.tensor(
                1 / self.levels, device="cpu"
            )  # A Python number would cost three more calls.
            self.weight = _pack_int8(weight)
            self.product = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32.default
        else:
            self.scale = weight.scales.bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        """(…, in) → (…, out), in the input's dtype."""
        if self.quantizes_input:
            float_input = x.float()
            scale = torch.addcmul(_MIN_INPUT_SCALE, float_input.abs().amax(-1, keepdim=True), self.level_size)
            inputs = float_input / scale
            if self.has_exact_sums:
                out = self.product(inputs, 1.0, self.levels + 1, self.weight).mul_(scale)
            else:  # Seven bits are too few: SmolLM2-135M loses 0.12 nats. So multiply the rounding error as well.
                high = inputs.round()
                low = (inputs - high).mul_(2 * self.levels)
                high, low = self.product(torch.stack([high, low]), 1.0, self.levels + 1, self.weight)
                out = high.add_(low, alpha=0.5 / self.levels).mul_(scale)
        else:
            rows = x.reshape(-1, x.size(-1)).bfloat16()
            out = torch.ops.aten._weight_int8pack_mm(rows, self.weight, self.scale).view(*x.shape[:-1], -1)
        if self.bias is not None:
            out += self.bias
        result: Tensor = out.to(x.dtype)
        return result


class Int4Linear(nn.Module):
    """A linear layer with int4 weights. Each output has a scale per 32 inputs.

    In torch's tinygemm kernels, a weight is (level − 8) · scale + zero. Scales and products are bfloat16, and sums are
    float32. For many positions, a CPU multiplies by dequantized weights instead.
    """

    def __init__(self, weight: Quantized, bias: Tensor | None) -> None:
        super().__init__()
        self.bias = bias
        scales = weight.scales.bfloat16().t()
        self.scales = torch.stack([scales, torch.zeros_like(scales)], dim=-1)  # Scale and zero, (in / 32, out, 2).
        self.block = 64 if torch.backends.cpu.get_cpu_capability() == "AVX512" else 32  # Outputs per packed block.
        self.restores = weight.levels.device.type == "cpu" and weight.shape[0] % self.block == 0
        if weight.levels.device.type == "cpu":
            self.weight = torch.empty_like(weight.levels)
            self.product = torch.ops.aten._weight_int4pack_mm_for_cpu
            self._pack(weight)
        else:
            levels = weight.unpack_levels()
            tiles = next(tiles for tiles in (8, 4, 2) if levels.size(1) % (16 * tiles) == 0)
            self.weight = torch.ops.aten._convert_weight_to_int4pack(levels[:, ::2] << 4 | levels[:, 1::2], tiles)
            self.product = torch.ops.aten._weight_int4pack_mm
        self.elements, self.nbytes = math.prod(weight.shape), self.weight.nbytes + self.scales.nbytes

    def _pack(self, weight: Quantized) -> None:
        """Packs a few blocks of outputs at a time, since torch needs four bytes per level. The layout is internal to
        torch. If `_unpack_levels` can't read it, `forward` never dequantizes."""
        chunk = self.block * max(1, _CHUNK_SIZE // (self.block * weight.shape[1]))
        for start in range(0, weight.shape[0], chunk):
            levels = Quantized(
                weight.levels[start : start + chunk], weight.scales[start : start + chunk]
            ).unpack_levels()
            self.weight[start : start + chunk] = torch.ops.aten._convert_weight_to_int4pack_for_cpu(levels.int(), 1)
            if self.restores:
                blocks = slice(start // self.block, (start + chunk) // self.block)
                self.restores = torch.equal(self._unpack_levels(blocks).flatten(1).t(), levels)

    def forward(self, x: Tensor) -> Tensor:
        """(…, in) → (…, out), in the input's dtype."""
        rows = x.reshape(-1, x.size(-1))
        if self.restores and len(rows) > _MAX_INT4_POSITIONS:
            out = self._multiply_dequantized(rows)
        else:
            out = self.product(rows.bfloat16(), self.weight, GROUP, self.scales)
        out = out.to(x.dtype) if self.bias is None else self.bias + out
        result: Tensor = out.view(*x.shape[:-1], -1)
        return result

    def _multiply_dequantized(self, rows: Tensor) -> Tensor:
        """Multiplies by dequantized weights, a few outputs at a time, in the CPU's fastest dtype."""
        dtype = torch.bfloat16 if has_native_bfloat16() else torch.float32
        rows, scales = rows.to(dtype), self.scales[:, None, :, 0].to(dtype).contiguous()
        out = torch.empty(len(rows), scales.size(2), dtype=dtype)
        width = self.block * max(1, _CHUNK_SIZE // (self.block * rows.size(1)))
        for start in range(0, scales.size(2), width):
            levels = (
                self._unpack_levels(slice(start // self.block, (start + width) // self.block)).to(dtype).sub_(MIDDLE)
            )
            chunk = levels.view(len(scales), GROUP, -1).mul_(scales[..., start : start + width])
            torch.mm(rows, chunk.flatten(0, 1), out=out[:, start : start + width])
        return out

    def _unpack_levels(self, blocks: slice) -> Tensor:
        """Returns the levels of packed blocks as uint8 (in, blocks, 2, block / 2). The low bits of the packed bytes are
        the first half of a block's outputs, and the high bits are the second half."""
        pairs = self.weight.view(-1, 2 * len(self.weight[0]), self.block // 2)[blocks].transpose(0, 1)
        return torch.stack([pairs & 15, pairs >> 4], dim=2)

    @staticmethod
    def runs_on(device: torch.device) -> bool:
        """Whether the device has a fast kernel: a CPU with AVX2, or a CUDA GPU of the Ampere generation or later."""
        if device.type == "cpu":
            return torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
        return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 8

    @staticmethod
    def fits(weight: Quantized) -> bool:
        """Whether the device has a fast kernel and the number of outputs is a multiple of 16."""
        return weight.shape[0] % 16 == 0 and Int4Linear.runs_on(weight.levels.device)


def has_int8_kernels() -> bool:
    """Whether this build of torch multiplies int8 on the CPU (FBGEMM, on x86)."""
    return "fbgemm" in torch.backends.quantized.supported_engines


def has_exact_int8_sums() -> bool:
    """Whether sums of int8 products are exact on this CPU (AVX-512 VNNI or AVX-VNNI). Other CPUs add pairs of products
    in 16 bits, which overflow unless the number of levels is halved."""
    capabilities: dict[str, object] = getattr(torch.cpu, "get_capabilities", dict)()
    return bool(capabilities.get("avx512_vnni") or capabilities.get("avx_vnni"))


def _pack_int8(weight: Quantized) -> torch.ScriptObject:
    torch.backends.quantized.engine = "fbgemm"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch warns that these kernels will move.
        zero = torch.zeros(len(weight.scales), dtype=torch.long)
        tensor = torch._make_per_channel_quantized_tensor(weight.levels, weight.scales, zero, 0)
        return torch.ops.quantized.linear_prepack(tensor, None)  # type: ignore[no-any-return]


def prepare(model: Module, compute: Compute, *, packed: bool = True, keep: bool = False) -> Module:
    """Prepares a module for fast steps, in place, and returns it.

    Converts weights to the dtype of ``compute`` and linear layers to the device's fastest layout. Dequantizes int4
    weights if there is no fast kernel. Without ``packed``, leaves the layout of unquantized weights to a compiler. With
    ``keep``, keeps the original weights for `gpt.decoding.native`.
    """
    if compute.dtype != torch.float32:
        model.to(compute.dtype)
    packed = packed and PackedLinear.fits(compute.device, compute.dtype)
    with torch.no_grad():
        for parent in list(model.modules()):
            for name, child in list(parent.named_children()):
                replacement = _lay_out_quantized(child, compute) if isinstance(child, QuantizedLinear) else child
                original = getattr(replacement if isinstance(replacement, nn.Linear) else child, "weight", None)
                if isinstance(replacement, nn.Linear) and packed:
                    replacement = PackedLinear(replacement.weight.detach(), replacement.bias)
                else:
                    replacement = _lay_out_for_gpu(
                        replacement, compute, materialize=not (isinstance(parent, Attention) and name == "c_proj")
                    )
                if replacement is not child:
                    setattr(parent, name, replacement)
                    if keep:
                        replacement.original = original  # type: ignore[assignment]
        if isinstance(model, GPT) and model.lm_head is None:
            _lay_out_tied(model, compute, packed)
    if compute.device.type == "cpu":
        for module in model.modules():
            if isinstance(module, Block):
                _bypass_module_calls(module)
    return model


def _lay_out_tied(model: GPT, compute: Compute, packed: bool) -> None:
    """Adds an LM head in the device's layout to a model with tied embeddings."""
    weight = model.wte.weight.detach()
    if packed:
        model.lm_head = PackedLinear(weight, None)
    elif compute.device.type == "cuda":
        model.lm_head = head = GPULinear(weight, None)
        model.wte.weight = nn.Parameter(head.weight[: head.outputs], requires_grad=False)  # Shares the head's memory.


def _lay_out_for_gpu(module: nn.Module, compute: Compute, materialize: bool) -> nn.Module:
    if isinstance(module, nn.Linear) and compute.device.type == "cuda":
        module = GPULinear(module.weight.detach(), module.bias)
    if isinstance(module, GPULinear):
        module.materialize = materialize
    return module


def _bypass_module_calls(block: Block) -> None:
    """Stores submodules' `forward` and parameters as plain attributes. `nn.Module`'s call and lookup take about 1 µs
    each, and a block has eleven modules. Also, with `Int4Linear` on a CPU with bfloat16 instructions, long prefills use
    bfloat16 attention."""
    for module in block.modules():
        children = dict(module.named_children())
        if isinstance(module, Attention) and isinstance(children["c_attn"], Int4Linear) and has_native_bfloat16():
            module.prefill_dtype = torch.bfloat16
        forwards = {name: child.forward for name, child in children.items()}
        vars(module).update(forwards, **dict(module.named_parameters(recurse=False)))


def _lay_out_quantized(linear: QuantizedLinear, compute: Compute) -> nn.Module:
    """Lays out a quantized matrix for its kernel, or dequantizes it to the dtype of ``compute``."""
    weight = linear.weight
    if weight.bits == 8 and compute.device.type == "cuda":
        return GPULinear(weight.levels, linear.bias, weight.scales)
    if weight.bits == 8:
        return Int8Linear(weight, linear.bias)
    if Int4Linear.fits(weight):
        return Int4Linear(weight, linear.bias)
    rows, columns = weight.shape
    dequantized = Linear(columns, rows, bias=False, device="meta")
    dequantized.weight = nn.Parameter(weight.dequantize().to(compute.dtype), requires_grad=False)
    dequantized.register_parameter("bias", linear.bias)
    return dequantized


def dtype_name(model: GPT, compute: Compute) -> str:
    """Returns the dtype in which kernels read most matrices of a prepared model, like ``int4`` or ``int8``."""
    kinds = {type(module) for module in model.h.modules()}
    scaled = any(isinstance(module, GPULinear) and module.scale is not None for module in model.h.modules())
    return "int4" if Int4Linear in kinds else "int8" if Int8Linear in kinds or scaled else compute.dtype_name


def weight_bytes(model: GPT, compute: Compute) -> int:
    """Returns the bytes of weights that a step reads: all matrices except an embedding that is separate from the LM
    head."""
    layouts = [module for module in model.modules() if isinstance(module, GPULinear | Int8Linear | Int4Linear)]
    unquantized = count_matmul_parameters(model.config) - sum(module.elements for module in layouts)
    return unquantized * compute.dtype.itemsize + sum(module.nbytes for module in layouts)


def resident_bytes(model: GPT, compute: Compute) -> int:
    """Returns the bytes of all weights, including an embedding that is separate from the LM head."""
    is_separate = model.lm_head is not None and not (model.config.tied and compute.device.type == "cuda")
    return (
        weight_bytes(model, compute)
        + is_separate * model.config.vocab_size * model.config.n_embd * compute.dtype.itemsize
    )
