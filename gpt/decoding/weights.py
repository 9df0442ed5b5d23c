"""Weight layouts for decoding, where a step reads all weights for a few positions: packed, narrow, int8, or int4.

A model that has been prepared computes logits and nothing else: it is neither trained nor saved.
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
from gpt.model.params import multiplied
from gpt.model.quantize import GROUP, LEVELS, MIDDLE, Quantized, QuantizedLinear

_SMALLEST = torch.tensor(1e-30, device="cpu")  # scale of activations
Module = TypeVar("Module", bound=nn.Module)
# Positions up to which a CPU's int4 kernel is faster than restored weights. Measured on two cores with GPT-2 124M and
# SmolLM2-135M's shape: at 80 positions 67 ms against 114 and 70 against 83, at 144 101 against 86 and 131 against 121.
_FEW = 112
_AT_ONCE = 2**20  # numbers of a matrix that are packed or restored at a time: they stay in the processor's cache


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


class GPULinear(nn.Module):
    """A linear map on a GPU, by a weight in a dtype of its own, which may have a scale for each output.

    In the compiled step of one text the product is a sum, written so that the compiler makes one kernel of it with the
    bias, the activation and the residual stream after it, which reads int8 as int8. With ``once`` the input is computed
    before that kernel, with the norm or the activation that it comes from, and not again for each output.
    """

    scale: Tensor | None
    ALIGNED, TILE = 8, 64  # outputs of which tensor cores want a multiple, and the multiple that they are filled up to

    def __init__(self, weight: Tensor, bias: Tensor | None, scale: Tensor | None = None, once: bool = True) -> None:
        super().__init__()
        self.outputs, self.once = len(weight), once
        if self.outputs % self.ALIGNED:
            weight = F.pad(weight, (0, 0, 0, -self.outputs % self.TILE))
        # Parameters, whose addresses never change: a CUDA graph copies other tensors each time.
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = bias
        self.register_buffer("scale", scale)
        self.numbers = self.outputs * weight.size(1)
        self.nbytes = self.numbers * weight.itemsize

    def forward(self, x: Tensor) -> Tensor:
        """(…, in) → (…, out), of the input's dtype."""
        if torch.compiler.is_compiling() and x.numel() == x.size(-1):
            row = x.float().flatten()
            if self.once:
                row = row.as_strided(row.shape, (1,))  # a stride is of numbers that lie in memory
            out = (row * self.weight[: self.outputs]).sum(-1).view(*x.shape[:-1], -1)
        elif self.scale is None and self.outputs == len(self.weight):
            return F.linear(x, self.weight, self.bias)
        else:
            out = F.linear(x, self.weight.to(x.dtype))[..., : self.outputs]
        out = out if self.scale is None else out * self.scale
        return (out if self.bias is None else out + self.bias).to(x.dtype)


class Int8Linear(nn.Module):
    """A linear map whose weight is rounded to int8, with a scale for each output, on a CPU or MPS.

    On x86 CPUs the input is rounded too, to int8 with a scale for each position, so that products are of whole numbers
    (FBGEMM's kernel); elsewhere it stays in bfloat16.
    """

    def __init__(self, weight: Quantized, bias: Tensor | None) -> None:
        super().__init__()
        self.numbers = self.nbytes = weight.levels.numel()
        self.weight: Tensor | torch.ScriptObject = weight.levels
        self.bias = bias
        self.integer = weight.levels.device.type == "cpu" and has_byte_products()
        if self.integer:
            self.levels = LEVELS if has_whole_products() else LEVELS // 2
            self.level = torch.tensor(1 / self.levels, device="cpu")  # a Python number takes another three calls
            self.weight = _pack(weight)
            self.product = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32.default
        else:
            self.scale = weight.scales.bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        """(…, in) → (…, out), of the input's dtype."""
        if self.integer:
            wide = x.float()
            scale = torch.addcmul(_SMALLEST, wide.abs().amax(-1, keepdim=True), self.level)
            out = self.product(wide / scale, 1.0, self.levels + 1, self.weight).mul_(scale)
        else:
            rows = x.reshape(-1, x.size(-1)).bfloat16()
            out = torch.ops.aten._weight_int8pack_mm(rows, self.weight, self.scale).view(*x.shape[:-1], -1)
        if self.bias is not None:
            out += self.bias
        whole: Tensor = out.to(x.dtype)
        return whole


class Int4Linear(nn.Module):
    """A linear map whose weight is rounded to int4, with a scale for each 32 numbers of an output.

    The kernels are torch's, from tinygemm. They compute (level − 8) · scale + zero with scales in bfloat16, products of
    bfloat16 and sums in float32. A CPU multiplies many positions at once by restored weights instead.
    """

    def __init__(self, weight: Quantized, bias: Tensor | None) -> None:
        super().__init__()
        self.bias = bias
        scales = weight.scales.bfloat16().t()
        self.scales = torch.stack([scales, torch.zeros_like(scales)], dim=-1)  # (in / 32, out, 2): scale and zero
        self.block = 64 if torch.backends.cpu.get_cpu_capability() == "AVX512" else 32  # outputs, in a CPU's layout
        self.restores = weight.levels.device.type == "cpu" and weight.shape[0] % self.block == 0
        if weight.levels.device.type == "cpu":
            self.weight = torch.empty_like(weight.levels)
            self.product = torch.ops.aten._weight_int4pack_mm_for_cpu
            self._pack(weight)
        else:
            levels = weight.unpacked()
            tiles = next(tiles for tiles in (8, 4, 2) if levels.size(1) % (16 * tiles) == 0)
            self.weight = torch.ops.aten._convert_weight_to_int4pack(levels[:, ::2] << 4 | levels[:, 1::2], tiles)
            self.product = torch.ops.aten._weight_int4pack_mm
        self.numbers, self.nbytes = math.prod(weight.shape), self.weight.nbytes + self.scales.nbytes

    def _pack(self, weight: Quantized) -> None:
        """Packs some blocks of outputs at a time, since torch packs levels of four bytes. The layout is torch's own
        affair: where it is not the one that `_levels` reads, nothing is restored."""
        some = self.block * max(1, _AT_ONCE // (self.block * weight.shape[1]))
        for at in range(0, weight.shape[0], some):
            levels = Quantized(weight.levels[at : at + some], weight.scales[at : at + some]).unpacked()
            self.weight[at : at + some] = torch.ops.aten._convert_weight_to_int4pack_for_cpu(levels.int(), 1)
            if self.restores:
                blocks = slice(at // self.block, (at + some) // self.block)
                self.restores = torch.equal(self._levels(blocks).flatten(1).t(), levels)

    def forward(self, x: Tensor) -> Tensor:
        """(…, in) → (…, out), of the input's dtype."""
        rows = x.reshape(-1, x.size(-1))
        if self.restores and len(rows) > _FEW:
            out = self._many(rows)
        else:
            out = self.product(rows.bfloat16(), self.weight, GROUP, self.scales)
        out = out.to(x.dtype) if self.bias is None else self.bias + out
        whole: Tensor = out.view(*x.shape[:-1], -1)
        return whole

    def _many(self, rows: Tensor) -> Tensor:
        """Products with restored weights, some outputs at a time, in the dtype that the CPU multiplies fastest."""
        dtype = torch.bfloat16 if has_native_bfloat16() else torch.float32
        rows, scales = rows.to(dtype), self.scales[:, None, :, 0].to(dtype).contiguous()
        out = torch.empty(len(rows), scales.size(2), dtype=dtype)
        width = self.block * max(1, _AT_ONCE // (self.block * rows.size(1)))
        for at in range(0, scales.size(2), width):
            levels = self._levels(slice(at // self.block, (at + width) // self.block)).to(dtype).sub_(MIDDLE)
            some = levels.view(len(scales), GROUP, -1).mul_(scales[..., at : at + width])
            torch.mm(rows, some.flatten(0, 1), out=out[:, at : at + width])
        return out

    def _levels(self, blocks: slice) -> Tensor:
        """The levels of some blocks of outputs, uint8 (in, blocks, 2, block / 2). A byte has those of an output of a
        block's first half, in its low bits, and of its second."""
        pairs = self.weight.view(-1, 2 * len(self.weight[0]), self.block // 2)[blocks].transpose(0, 1)
        return torch.stack([pairs & 15, pairs >> 4], dim=2)

    @staticmethod
    def runs_on(device: torch.device) -> bool:
        """Whether the device has a fast kernel: CPUs with AVX2, and CUDA from Ampere on."""
        if device.type == "cpu":
            return torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
        return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 8

    @staticmethod
    def fits(weight: Quantized) -> bool:
        """Whether the kernel takes a matrix: one with a multiple of 16 outputs."""
        return weight.shape[0] % 16 == 0 and Int4Linear.runs_on(weight.levels.device)


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


def prepare(model: Module, compute: Compute, *, packed: bool = True, keep: bool = False) -> Module:
    """Changes a model, or a part of one, in place for fast steps, and returns it: weights in the dtype of ``compute``,
    each linear map in the layout that the device reads fastest. Without ``packed`` those that are not rounded stay as
    they are, for a compiler to lay out. ``keep``: what is packed is kept as it was too, for `gpt.decoding.native`.
    Where the device has no fast kernel for int4, such weights are restored."""
    if compute.dtype != torch.float32:
        model.to(compute.dtype)
    packed = packed and PackedLinear.fits(compute.device, compute.dtype)
    with torch.no_grad():
        for parent in list(model.modules()):
            for name, child in list(parent.named_children()):
                laid = _laid_out(child, compute) if isinstance(child, QuantizedLinear) else child
                plain = getattr(laid if isinstance(laid, nn.Linear) else child, "weight", None)
                if isinstance(laid, nn.Linear) and packed:
                    laid = PackedLinear(laid.weight.detach(), laid.bias)
                else:
                    laid = _on_gpu(laid, compute, once=not (isinstance(parent, Attention) and name == "c_proj"))
                if laid is not child:
                    setattr(parent, name, laid)
                    if keep:
                        laid.plain = plain  # type: ignore[assignment]
        if isinstance(model, GPT) and model.lm_head is None:
            _lay_out_tied(model, compute, packed)
    if compute.device.type == "cpu":
        for module in model.modules():
            if isinstance(module, Block):
                _shorten(module)
    return model


def _lay_out_tied(model: GPT, compute: Compute, packed: bool) -> None:
    """Lays out the embedding of a model as its unembedding, where the device wants that."""
    weight = model.wte.weight.detach()
    if packed:
        model.lm_head = PackedLinear(weight, None)
    elif compute.device.type == "cuda":
        model.lm_head = head = GPULinear(weight, None)
        model.wte.weight = nn.Parameter(head.weight[: head.outputs], requires_grad=False)  # a view


def _on_gpu(module: nn.Module, compute: Compute, once: bool) -> nn.Module:
    """Lays out a linear map for a GPU; ``once`` as in `GPULinear`. Other modules stay as they are."""
    if isinstance(module, nn.Linear) and compute.device.type == "cuda":
        module = GPULinear(module.weight.detach(), module.bias)
    if isinstance(module, GPULinear):
        module.once = once
    return module


def _shorten(block: Block) -> None:
    """Lets the modules of a block find each other's `forward` and their parameters as attributes of their own. By
    `nn.Module`'s call and lookup each takes some 1 µs, and a block has eleven modules. Many positions attend in the
    dtype in which `Int4Linear` multiplies them."""
    for module in block.modules():
        children = dict(module.named_children())
        if isinstance(module, Attention) and isinstance(children["c_attn"], Int4Linear) and has_native_bfloat16():
            module.prompts = torch.bfloat16
        found = {name: child.forward for name, child in children.items()}
        vars(module).update(found, **dict(module.named_parameters(recurse=False)))


def _laid_out(linear: QuantizedLinear, compute: Compute) -> nn.Module:
    """Lays out a rounded matrix for its kernel, or restores it in the dtype of ``compute``."""
    weight = linear.weight
    if weight.bits == 8 and compute.device.type == "cuda":
        return GPULinear(weight.levels, linear.bias, weight.scales)
    if weight.bits == 8:
        return Int8Linear(weight, linear.bias)
    if Int4Linear.fits(weight):
        return Int4Linear(weight, linear.bias)
    rows, columns = weight.shape
    restored = Linear(columns, rows, bias=False, device="meta")
    restored.weight = nn.Parameter(weight.dequantize().to(compute.dtype), requires_grad=False)
    restored.register_parameter("bias", linear.bias)
    return restored


def dtype_name(model: GPT, compute: Compute) -> str:
    """The dtype of most of a prepared model's matrices: ``int4`` or ``int8`` where a kernel computes with them."""
    kinds = {type(module) for module in model.h.modules()}
    scaled = any(isinstance(module, GPULinear) and module.scale is not None for module in model.h.modules())
    return "int4" if Int4Linear in kinds else "int8" if Int8Linear in kinds or scaled else compute.dtype_name


def weight_bytes(model: GPT, compute: Compute) -> int:
    """The bytes of weights that a step reads: each matrix once, the unembedding among them, and not an embedding that
    is another one."""
    laid = [module for module in model.modules() if isinstance(module, GPULinear | Int8Linear | Int4Linear)]
    wide = multiplied(model.config) - sum(module.numbers for module in laid)
    return wide * compute.dtype.itemsize + sum(module.nbytes for module in laid)


def resident_bytes(model: GPT, compute: Compute) -> int:
    """The bytes that weights take: those that a step reads, and an embedding that lies apart from the unembedding."""
    apart = model.lm_head is not None and not (model.config.tied and compute.device.type == "cuda")
    return weight_bytes(model, compute) + apart * model.config.vocab_size * model.config.n_embd * compute.dtype.itemsize
