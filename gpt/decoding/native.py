"""Blocks as compiled programs: the next position of one text on a CPU.

A step of one text reads all weights once, and calls some thirty operators a block beside, each of which costs
microseconds. Inductor makes one program of a block, with the weights among its inputs, so that all blocks of a model
share it, and all models of the same shape: whatever their number of layers, the room of the cache and the length of the
text. Weights of int8 and int4 are restored number by number as they are read, and positions are not rounded.

Programs are kept between commands (`gpt.programs`).
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

_LONGEST = 2**20  # positions of a cache
# Rows of a rounded matrix that lie side by side: one for each float32 of a register.
_LANES = 16 if torch.backends.cpu.get_cpu_capability() == "AVX512" else 8
# Products and sums are fused, which takes a seventh off the time of int4, and no part of one is stored.
_OPTIONS = {
    "cpp.enable_floating_point_contract_flag": "fast",
    **dict.fromkeys(("realize_opcount_threshold", "realize_reads_threshold", "realize_acc_reads_threshold"), 1000),
}
_ORDER = ("ln_1", "attn.c_attn", "attn.q_norm", "attn.k_norm", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj")


class _Program(nn.Module):
    """A block for one position, as it is compiled. Its inputs are the residual stream (C), the column of the cache that
    takes the position, (1), what is added to the scores of the columns up to it, (S), cosines and sines (D), keys and
    values (K, columns, D), which it changes, and the tensors of the block's modules in `_ORDER`."""

    def __init__(self, config: GPTConfig, kinds: Sequence[str]) -> None:
        super().__init__()
        self.config, self.kinds = config, kinds

    def forward(
        self, x: Tensor, column: Tensor, hidden: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor,
        tensors: list[Tensor],
    ) -> Tensor:  # fmt: skip
        """(C) → (C)."""
        config, left, kinds = self.config, iter(tensors), iter(self.kinds)
        H, K, D = config.n_head, config.kv_heads, config.head_size

        def norm(x: Tensor) -> Tensor:
            if config.norm == "rmsnorm":
                return _once(F.rms_norm(x, x.shape[-1:], next(left), config.layer_norm_epsilon))
            return _once(F.layer_norm(x, x.shape[-1:], next(left), next(left), config.layer_norm_epsilon))

        def linear(x: Tensor, bias: bool) -> Tensor:
            y = _product(next(kinds), x, left)
            return y + next(left) if bias else y

        heads = linear(norm(x), config.biases != "none").view(-1, D)
        q, k, v = heads[:H], heads[H : H + K], heads[H + K :]
        if config.qk_norm:
            q, k = (F.rms_norm(each, (D,), next(left), config.layer_norm_epsilon) for each in (q, k))
        if config.positions == "rotary":
            q, k = rotate(q, (cos, sin)), rotate(k, (cos, sin))
        keys.index_copy_(1, column, k[:, None])
        values.index_copy_(1, column, v[:, None])
        S = hidden.size(0)
        scores = (_once(q).view(K, H // K, 1, D) * keys[:, None, :S]).sum(-1) / math.sqrt(D) + hidden
        y = (_once(scores.softmax(-1))[..., None] * values[:, None, :S]).sum(2)
        x = x + linear(y.view(-1), config.biases == "all")
        inside = activate(linear(norm(x), config.biases == "all"), config.mlp == "swiglu")
        return x + linear(_once(inside), config.biases == "all")


def _once(x: Tensor) -> Tensor:
    """The same numbers, computed before what uses them and not again for each use: a stride is of numbers in memory."""
    return x.reshape(-1).as_strided((x.numel(),), (1,)).view(x.shape)


def _product(kind: str, x: Tensor, tensors: Iterator[Tensor]) -> Tensor:
    """A matrix times a vector (in) → (out)."""
    weight = next(tensors)
    if kind == "float":
        # Four rows at a time, so that a sum need not wait for the one before it.
        rows = weight.view(-1, math.gcd(4, len(weight)), len(x))
        return torch.stack([(row * x).sum(-1) for row in rows.unbind(1)], 1).flatten()
    scales, bits = next(tensors), int(kind.removeprefix("int"))
    words, count = weight.view(torch.int32), 32 // bits
    x = F.pad(x, (0, words.size(1) * count - len(x))).view(-1, count)
    levels = [(words << bits * (count - 1 - at) if at < count - 1 else words) >> 32 - bits for at in range(count)]
    sums = levels[0].float() * x[:, 0, None]  # (tiles, words of a row, lanes)
    for at in range(1, count):
        sums = sums + levels[at].float() * x[:, at, None]
    if bits == 8:
        return sums.sum(1).flatten()[: len(scales)] * scales
    return (sums.view(len(sums), -1, GROUP // count, _LANES) * scales[:, :, None]).sum((1, 2)).flatten()


def _parts(linear: nn.Module) -> tuple[str, list[Tensor]]:
    """The kind of a matrix, and its tensors as `_product` takes them."""
    plain: Any = getattr(linear, "plain", linear.weight)  # `weights.prepare` keeps what it packs
    if not isinstance(plain, Quantized):
        return "float", [plain.detach()]
    del linear.plain
    if plain.bits == 8:
        return "int8", [_words(plain.levels, 8), plain.scales]
    return "int4", [_words(plain.unpacked() - MIDDLE, 4), _tiles(plain.scales.float())]


def _words(levels: Tensor, bits: int) -> Tensor:
    """Levels (out, in) in two's complement as words of 32 bits, each of neighbors in a row: (tiles, words of a row,
    `_LANES`). Their dtype is float32, the only one that Inductor loads into a register at once."""
    count = 32 // bits
    levels = F.pad(levels, (0, -levels.size(1) % count, 0, -len(levels) % _LANES))
    words = torch.zeros(len(levels), levels.size(1) // count, dtype=torch.int32)
    for at in range(count):
        words |= (levels[:, at::count].int() & 2**bits - 1) << bits * at
    return _tiles(words).view(torch.float32)


def _tiles(rows: Tensor) -> Tensor:
    """Rows side by side: (out, n) → (out / `_LANES`, n, `_LANES`)."""
    return rows.view(-1, _LANES, rows.size(1)).transpose(1, 2).contiguous()


class NativeBlock(nn.Module):
    """A block that computes one position of one text by a compiled program, and all else as `Block` does."""

    def __init__(self, block: Block, programs: "Programs") -> None:
        super().__init__()
        self.block, self.programs, self.tensors, kinds = block, programs, list[Tensor](), list[str]()
        modules = dict(block.named_modules())
        for name in (name for name in _ORDER if name in modules):
            module: Any = modules[name]
            if "c_" in name:
                kind, tensors = _parts(module)
                kinds.append(kind)
            else:
                tensors = [module.weight.detach()]
            bias = getattr(module, "bias", None)
            self.tensors += tensors if bias is None else [*tensors, bias.detach()]
        self.kinds = tuple(kinds)

    def forward(self, x: Tensor, layer: int, rope: Rope | None = None, places: Placement | None = None) -> Tensor:
        """(B, T, C) → (B, T, C)."""
        single = places.single(layer) if places is not None and x.numel() == x.size(-1) else None
        if single is not None and (run := self.programs.get(self)) is not None:
            keys, values, place = single
            cos, sin = (x, x) if rope is None else (rope[0].view(-1), rope[1].view(-1))
            out: Tensor = run([x.view(-1), *self.programs.at(*place), cos, sin, keys, values, *self.tensors])[0]
            return out.view_as(x)
        return self.block(x, layer, rope, places)  # type: ignore[no-any-return]


def fits(compute: Compute) -> bool:
    """Whether a device and dtype compute by compiled blocks: a CPU, and positions in float32."""
    return compute.device.type == "cpu" and compute.dtype == torch.float32


def is_used(model: GPT) -> bool:
    """Whether a model computes single positions by compiled blocks."""
    return isinstance(model.h[0], NativeBlock)


def use(model: GPT, note: programs.Note) -> None:
    """Lets a model that was prepared with ``keep`` compute single positions by compiled blocks. Where they cannot be
    made, ``note`` is called once and blocks are computed without."""
    programs = Programs(model.config, note)
    for at, block in enumerate(model.h):
        model.h[at] = NativeBlock(cast(Block, block), programs)


class Programs:
    """The programs of a model's blocks, by the kinds of their matrices: made when they are first needed, or found among
    those that were kept."""

    def __init__(self, config: GPTConfig, note: programs.Note) -> None:
        self.config, self.note = config, note
        self._made: dict[tuple[str, ...], programs.Program | None] = {}
        self._place: tuple[int, int, int] | None = None
        self._at: tuple[Tensor, Tensor] = (torch.empty(0), torch.empty(0))

    def at(self, column: int, first: int, stop: int) -> tuple[Tensor, Tensor]:
        """The column that takes a position, and what is added to the scores of the columns before ``stop``: −∞ before
        ``first``."""
        if self._place != (column, first, stop):
            hidden = torch.zeros(stop)
            hidden[:first] = -math.inf
            self._place, self._at = (column, first, stop), (torch.tensor([column]), hidden)
        return self._at

    def get(self, block: NativeBlock) -> programs.Program | None:
        """The program of a block."""
        if block.kinds not in self._made:
            try:
                self._made[block.kinds] = self._load(block)
            except Exception as error:  # the compiler's own, that of a C++ compiler which is not there, or the disk's
                self.note(f"blocks are not compiled: {first_line(error):.200}")
                self._made[block.kinds] = None
        return self._made[block.kinds]

    def _load(self, block: NativeBlock) -> programs.Program:
        export = partial(_exported, _Program(self.config, block.kinds), block.tensors)
        return programs.find(_key(self.config, block.kinds), export, self.note, "a block", _OPTIONS)


@torch.no_grad()
def _exported(program: _Program, tensors: Sequence[Tensor]) -> programs.Graph:
    """A program as a graph, for a cache of any size."""
    C, K, D = program.config.n_embd, program.config.kv_heads, program.config.head_size
    seen, columns = 1000, 1024  # for which loops are shared among threads; the program is for any
    cache = [torch.zeros(K, columns, D) for _ in range(2)]
    example = [torch.zeros(C), torch.tensor([seen - 1]), torch.zeros(seen), torch.zeros(D), torch.zeros(D), *cache]
    some, all_columns = (torch.export.Dim(name, min=1, max=_LONGEST) for name in ("seen", "columns"))
    shapes = (None, None, {0: some}, None, None, {1: all_columns}, {1: all_columns}, [None] * len(tensors))
    inputs = (*example, list(tensors))
    exported = torch.export.export(program, inputs, dynamic_shapes=shapes, strict=False)
    return exported.module(check_guards=False), inputs


def _key(config: GPTConfig, kinds: Sequence[str]) -> object:
    """Returns what the programs of blocks differ by: this code, and the shape."""
    shape = replace(config, n_layer=1, vocab_size=1, block_size=1, dropout=0.0, window=None, window_layers=None)
    code = [Path(each.__code__.co_filename).read_bytes() for each in (_key, rotate, activate)]
    return code, shape, tuple(kinds)
