"""Compiled transformer blocks for decoding one sequence on a CPU.

Eager mode calls some thirty operators per block, and each takes microseconds. Inductor compiles a block into one
program. Weights are inputs, so the program works for all blocks, and for any number of layers, cache size and sequence
length. The program dequantizes int8 and int4 weights while reading them. Activations are not quantized.

`gpt.programs` caches programs between commands.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from gpt import programs
from gpt.config import GPTConfig
from gpt.device import Compute
from gpt.errors import first_line
from gpt.model.cache import Placement
from gpt.model.decoder import GPT, Block, activate
from gpt.model.positions import Rope, rotate
from gpt.model.quantize import GROUP, MIDDLE, Quantized

_MAX_COLUMNS = 2**20  # Maximum length of a KV cache.
# Number of interleaved rows of a quantized matrix: one per float32 in a vector register.
_LANES = 16 if torch.backends.cpu.get_cpu_capability() == "AVX512" else 8
# Fused multiply-add makes int4 a seventh faster. The thresholds keep Inductor from storing intermediate results.
_OPTIONS = {
    "cpp.enable_floating_point_contract_flag": "fast",
    **dict.fromkeys(("realize_opcount_threshold", "realize_reads_threshold", "realize_acc_reads_threshold"), 1000),
}
_MODULE_ORDER = ("ln_1", "attn.c_attn", "attn.q_norm", "attn.k_norm", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj")


class _Program(nn.Module):
    """The compiled part of a block, for one position.

    Its inputs are the residual stream (C), the position's cache column (1), an additive attention mask (S), RoPE
    cosines and sines (D), keys and values (K, columns, D), and the tensors of modules in `_MODULE_ORDER`. It updates
    the keys and values in place.
    """

    def __init__(self, config: GPTConfig, kinds: Sequence[str]) -> None:
        super().__init__()
        self.config, self.kinds = config, kinds

    def forward(
        self, x: Tensor, column: Tensor, mask: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor,
        tensors: list[Tensor],
    ) -> Tensor:  # fmt: skip
        """(C) → (C)."""
        config, parameters, kinds = self.config, iter(tensors), iter(self.kinds)
        H, K, D = config.n_head, config.kv_heads, config.head_size

        def norm(x: Tensor) -> Tensor:
            if config.norm == "rmsnorm":
                return _materialize(F.rms_norm(x, x.shape[-1:], next(parameters), config.layer_norm_epsilon))
            return _materialize(
                F.layer_norm(x, x.shape[-1:], next(parameters), next(parameters), config.layer_norm_epsilon)
            )

        def linear(x: Tensor, bias: bool) -> Tensor:
            y = _multiply(next(kinds), x, parameters)
            return y + next(parameters) if bias else y

        heads = linear(norm(x), config.biases != "none").view(-1, D)
        q, k, v = heads[:H], heads[H : H + K], heads[H + K :]
        if config.qk_norm:
            q, k = (F.rms_norm(tensor, (D,), next(parameters), config.layer_norm_epsilon) for tensor in (q, k))
        if config.positions == "rotary":
            q, k = rotate(q, (cos, sin)), rotate(k, (cos, sin))
        keys.index_copy_(1, column, k[:, None])
        values.index_copy_(1, column, v[:, None])
        S = mask.size(0)
        scores = (_materialize(q).view(K, H // K, 1, D) * keys[:, None, :S]).sum(-1) / math.sqrt(D) + mask
        y = (_materialize(scores.softmax(-1))[..., None] * values[:, None, :S]).sum(2)
        x = x + linear(y.view(-1), config.biases == "all")
        inner = activate(linear(norm(x), config.biases == "all"), config.mlp == "swiglu")
        return x + linear(_materialize(inner), config.biases == "all")


def _materialize(x: Tensor) -> Tensor:
    """Makes Inductor store ``x`` instead of recomputing it at each use: a strided view must be in memory."""
    return x.reshape(-1).as_strided((x.numel(),), (1,)).view(x.shape)


def _multiply(kind: str, x: Tensor, tensors: Iterator[Tensor]) -> Tensor:
    """Multiplies a matrix by a vector: (in) → (out)."""
    weight = next(tensors)
    if kind == "float":
        # Computing four rows at a time keeps additions from waiting for each other.
        rows = weight.view(-1, math.gcd(4, len(weight)), len(x))
        return torch.stack([(row * x).sum(-1) for row in rows.unbind(1)], 1).flatten()
    scales, bits = next(tensors), int(kind.removeprefix("int"))
    words, count = weight.view(torch.int32), 32 // bits
    x = F.pad(x, (0, words.size(1) * count - len(x))).view(-1, count)
    levels = [
        (words << bits * (count - 1 - index) if index < count - 1 else words) >> 32 - bits for index in range(count)
    ]
    sums = levels[0].float() * x[:, 0, None]  # Shape: (tiles, words of a row, lanes).
    for index in range(1, count):
        sums = sums + levels[index].float() * x[:, index, None]
    if bits == 8:
        return sums.sum(1).flatten()[: len(scales)] * scales
    return (sums.view(len(sums), -1, GROUP // count, _LANES) * scales[:, :, None]).sum((1, 2)).flatten()


def _kind_and_tensors(linear: nn.Module) -> tuple[str, list[Tensor]]:
    """Returns the kind of a matrix, and its tensors in the layout that `_multiply` reads."""
    weight: Any = getattr(linear, "original", linear.weight)  # `weights.prepare` sets ``original``.
    if not isinstance(weight, Quantized):
        return "float", [weight.detach()]
    del linear.original
    if weight.bits == 8:
        return "int8", [_pack_words(weight.levels, 8), weight.scales]
    return "int4", [_pack_words(weight.unpack_levels() - MIDDLE, 4), _to_tiles(weight.scales.float())]


def _pack_words(levels: Tensor, bits: int) -> Tensor:
    """Packs adjacent levels of each row, in two's complement, into 32-bit words: (out, in) → (tiles, words of a row,
    `_LANES`). The words are float32, the only dtype that Inductor loads into full vector registers."""
    count = 32 // bits
    levels = F.pad(levels, (0, -levels.size(1) % count, 0, -len(levels) % _LANES))
    words = torch.zeros(len(levels), levels.size(1) // count, dtype=torch.int32)
    for index in range(count):
        words |= (levels[:, index::count].int() & 2**bits - 1) << bits * index
    return _to_tiles(words).view(torch.float32)


def _to_tiles(rows: Tensor) -> Tensor:
    """Interleaves rows: (out, n) → (out / `_LANES`, n, `_LANES`)."""
    return rows.view(-1, _LANES, rows.size(1)).transpose(1, 2).contiguous()


class NativeBlock(nn.Module):
    """A block that runs a compiled program for a single position, and `Block` otherwise."""

    def __init__(self, block: Block, block_programs: "Programs") -> None:
        super().__init__()
        self.block, self.programs, self.tensors, kinds = block, block_programs, list[Tensor](), list[str]()
        modules = dict(block.named_modules())
        for name in (name for name in _MODULE_ORDER if name in modules):
            module: Any = modules[name]
            if "c_" in name:
                kind, tensors = _kind_and_tensors(module)
                kinds.append(kind)
            else:
                tensors = [module.weight.detach()]
            bias = getattr(module, "bias", None)
            self.tensors += tensors if bias is None else [*tensors, bias.detach()]
        self.kinds = tuple(kinds)

    def forward(self, x: Tensor, layer: int, rope: Rope | None = None, places: Placement | None = None) -> Tensor:
        """(B, T, C) → (B, T, C)."""
        cached = places.select_row(layer) if places is not None and x.numel() == x.size(-1) else None
        if cached is not None and (program := self.programs.get(self)) is not None:
            keys, values, columns = cached
            cos, sin = (x, x) if rope is None else (rope[0].view(-1), rope[1].view(-1))
            out: Tensor = program(
                [x.view(-1), *self.programs.position_inputs(*columns), cos, sin, keys, values, *self.tensors]
            )[0]
            return out.view_as(x)
        return self.block(x, layer, rope, places)  # type: ignore[no-any-return]


def fits(compute: Compute) -> bool:
    """Whether compiled blocks support the device and dtype: a CPU with float32 activations."""
    return compute.device.type == "cpu" and compute.dtype == torch.float32


def is_used(model: GPT) -> bool:
    """Whether a model uses compiled blocks."""
    return isinstance(model.h[0], NativeBlock)


def enable(model: GPT, note: programs.Note) -> None:
    """Makes a model prepared with ``keep`` use compiled blocks. If compiling fails later, calls ``note``."""
    block_programs = Programs(model.config, note)
    for layer, block in enumerate(model.h):
        model.h[layer] = NativeBlock(cast(Block, block), block_programs)


class Programs:
    """The programs of a model's blocks, by matrix kinds. Loads or compiles a program on first use."""

    def __init__(self, config: GPTConfig, note: programs.Note) -> None:
        self.config, self.note = config, note
        self._cache: dict[tuple[str, ...], programs.Program | None] = {}
        self._position: tuple[int, int, int] | None = None
        self._inputs: tuple[Tensor, Tensor] = (torch.empty(0), torch.empty(0))

    def position_inputs(self, column: int, first: int, stop: int) -> tuple[Tensor, Tensor]:
        """Returns a tensor with the position's ``column``, and an additive mask (stop) that is −∞ before column
        ``first``."""
        if self._position != (column, first, stop):
            mask = torch.zeros(stop)
            mask[:first] = -math.inf
            self._position, self._inputs = (column, first, stop), (torch.tensor([column]), mask)
        return self._inputs

    def get(self, block: NativeBlock) -> programs.Program | None:
        """Returns a block's program, or None if compiling failed."""
        if block.kinds not in self._cache:
            try:
                self._cache[block.kinds] = self._load(block)
            except Exception as error:  # Inductor, the C++ compiler or the disk can fail.
                self.note(f"blocks are not compiled: {first_line(error):.200}")
                self._cache[block.kinds] = None
        return self._cache[block.kinds]

    def _load(self, block: NativeBlock) -> programs.Program:
        export = partial(_export, _Program(self.config, block.kinds), block.tensors)
        return programs.find(_key(self.config, block.kinds), export, self.note, "a block", _OPTIONS)


@torch.no_grad()
def _export(program: _Program, tensors: Sequence[Tensor]) -> programs.Graph:
    """Exports a program as a graph for a cache of any size."""
    C, K, D = program.config.n_embd, program.config.kv_heads, program.config.head_size
    positions, columns = 1000, 1024  # Example sizes at which Inductor parallelizes loops.
    cache = [torch.zeros(K, columns, D) for _ in range(2)]
    example = [
        torch.zeros(C),
        torch.tensor([positions - 1]),
        torch.zeros(positions),
        torch.zeros(D),
        torch.zeros(D),
        *cache,
    ]
    seen_dim, columns_dim = (torch.export.Dim(name, min=1, max=_MAX_COLUMNS) for name in ("seen", "columns"))
    shapes = (None, None, {0: seen_dim}, None, None, {1: columns_dim}, {1: columns_dim}, [None] * len(tensors))
    inputs = (*example, list(tensors))
    graph = torch.export.export(program, inputs, dynamic_shapes=shapes, strict=False)
    return graph.module(check_guards=False), inputs


def _key(config: GPTConfig, kinds: Sequence[str]) -> object:
    """Returns the cache key of a block's program: its code, shape and matrix kinds."""
    shape = replace(config, n_layer=1, vocab_size=1, block_size=1, dropout=0.0, window=None, window_layers=None)
    code = [Path(function.__code__.co_filename).read_bytes() for function in (_key, rotate, activate)]
    return code, shape, tuple(kinds)
