"""Decoding on a CPU with decoder.c: matrices in its layout, and its steps.

`gpt.model.decoder` defines the model. Without a C compiler, it also decodes.
"""

import contextlib
import ctypes
import mmap
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from gpt.config.model import GPTConfig
from gpt.decoding import library
from gpt.decoding.library import Note
from gpt.model.cache import KVCache
from gpt.model.decoder import GPT
from gpt.model.params import GROUP, WINDOW_SLACK
from gpt.model.quantize import (
    BF16,
    F16,
    F32,
    Q4_0,
    Q4_1,
    Q4_K,
    Q5_1,
    Q5_K,
    Q8_0,
    Blocks,
    Ends,
    Quantized,
    QuantizedLinear,
    Rows,
    bits_of_rows,
    head_bits,
    multiply,
    quantize_model,
    range_error,
    to_tensor,
)
from gpt.system.errors import first_line

# Bytes of a group of 32 inputs, in the order of the kinds in products.h.
BYTES = {"float32": 128, "bfloat16": 64, "int8": 32, "int4": 16}
TYPES = {torch.float32: F32, torch.float16: F16, torch.bfloat16: BF16}
TILE = 16  # Outputs that a matrix interleaves, and cache columns that keys interleave.
ARENA = 2**26  # Bytes of memory that matrices share.
ROWS = 128  # Maximum rows of a pass, to limit activation memory.
FEW_ROWS = 8  # For steps of up to this many rows, the number of threads is chosen by their speed.
TRIAL = 64  # Steps between trials of another number of threads.

_finding, _calling = threading.Lock(), threading.Lock()  # The library has one set of threads.
_found: list[ctypes.CDLL | None] = []


def find(note: Note) -> ctypes.CDLL | None:
    """Returns the C decoder. If it cannot be compiled, or if it does not compute what `gpt.model.decoder` computes,
    calls ``note`` (at most once in a process) and returns None."""
    with _finding:
        if not _found:
            try:
                threads = torch.get_num_threads()
                torch.set_num_threads(1)  # Threads would wait for each other in the small products of `check`.
                lib = library.load(note)
                check(lib)
                _found.append(lib)
            except Exception as error:  # The compiler or the disk can fail.
                note(f"decoding with torch, which is slower: {first_line(error):.200}")
                _found.append(None)
            finally:
                torch.set_num_threads(threads)
        return _found[0]


@torch.inference_mode()
def check(lib: ctypes.CDLL) -> None:
    """Raises OSError if the library computes other logits than `gpt.model.decoder`."""
    shape = (61, 96, 2, 4, 36)
    modern = GPTConfig.of("modern", *shape, n_kv_head=2, head_dim=20, window=8, biases="qkv")
    for config, bits in ((GPTConfig(*shape), None), (modern, None), (modern, 8), (modern, 4)):
        models = [_make_test_model(config, bits) for _ in range(2)]
        ids = torch.arange(90) ** 2 % config.vocab_size
        expected = models[0](ids[None])[0]
        pack(models[1], lib)
        cache = KVCache(config, 3, torch.device("cpu"), torch.float32, tile=TILE)
        decoder = Decoder(models[1], cache, threads=2)
        decoder.forward([(0, 0, 40)], ids[:40])
        decoder.forward([(0, 40, 49), (2, 0, 50)], ids[torch.cat([torch.arange(40, 89), torch.arange(50)])])
        x = decoder.forward([(0, 89, 1), (2, 50, 1)], ids[[89, 50]])
        error = (decoder.unembed(x) - expected[[89, 50]]).abs().max()
        # A rounding error can change the level of an input.
        if not error <= (1e-4 if bits is None else 0.1) * expected.abs().max():
            raise OSError("the compiled decoder computes wrong numbers; another compiler may help (CC=clang)")


def _make_test_model(config: GPTConfig, bits: int | None) -> GPT:
    """Returns a model whose weights are not random, which would change torch's random state."""
    with torch.device("meta"):
        model = GPT(config).eval()
    state = {
        name: torch.sin(torch.arange(value.numel()) * 0.7 + number).view(value.shape)
        for number, (name, value) in enumerate(model.state_dict().items())
    }
    model.load_state_dict(state, assign=True)
    model.build_position_tables()
    return model if bits is None else quantize_model(model, bits)


class _Arena:
    """Memory in huge pages, which make decoding 1.3 to 1.6 times as fast. Most matrices are smaller than a page."""

    def __init__(self) -> None:
        self._free = torch.empty(0, dtype=torch.uint8)

    def allocate(self, needed: int, dtype: torch.dtype) -> Tensor:
        """Returns ``needed`` bytes of zeros. Their address is a multiple of 64."""
        size = -(-needed // 64) * 64
        if size > len(self._free):
            memory = mmap.mmap(-1, max(size, ARENA), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            with contextlib.suppress(AttributeError, OSError):  # Only Linux has huge pages, if its kernel does.
                memory.madvise(mmap.MADV_HUGEPAGE)
            self._free = torch.frombuffer(memory, dtype=torch.uint8)
        part, self._free = self._free[:size], self._free[size:]
        return part[:needed].view(dtype)


_arena = _Arena()


class PackedLinear(nn.Module):
    """A linear map in the layout of products.h: (tiles, words, 16), with 1 float32, 2 bfloat16, 4 int8 or 8 int4
    elements in a word.

    Quantized blocks keep their levels and scales if they have 4 or 5 bits or are Q8_0. With ``bits``, a matrix is
    quantized. A float32 matrix whose elements are all bfloat16 numbers is stored in bfloat16, which has the same
    results. In torch, for inspecting a model, products use the restored matrix.
    """

    def __init__(
        self, lib: ctypes.CDLL, weight: Tensor | Quantized | Blocks, bias: Tensor | None, bits: int | None = None
    ) -> None:
        super().__init__()
        self.lib, (self.outputs, self.inputs) = lib, weight.shape
        self.scales: Tensor | None = None  # (tiles, groups, 16)
        self.minimums: Tensor | None = None
        self.bias = None if bias is None else _padded(bias, TILE)
        parts = _rows(weight) if isinstance(weight, Tensor | Quantized) else weight.parts()
        types = {part.type for part in parts}
        if bits is None and isinstance(weight, Tensor):
            self.kind = "bfloat16" if types == {BF16} else "float32"
        else:
            bits = bits or (4 if types == {Q4_0} or types <= {Q4_1, Q4_K} else 8)
            self.kind = f"int{bits_of_rows(self.inputs, bits)}"
        has_minimums = types <= {Q4_1, Q4_K} if self.kind == "int4" else bool(types & {Q4_1, Q5_1, Q4_K, Q5_K})
        tiles, groups = -(-self.outputs // TILE), -(-self.inputs // GROUP)
        self.weights = _arena.allocate(tiles * TILE * groups * BYTES[self.kind], torch.int32).view(tiles, -1, TILE)
        if self.kind in ("int8", "int4"):
            self.scales = _arena.allocate(tiles * groups * TILE * 2, torch.float16).view(tiles, groups, TILE)
            self.minimums = (
                _arena.allocate(self.scales.nbytes, torch.float16).view_as(self.scales) if has_minimums else None
            )
        self.elements = self.outputs * self.inputs
        self.nbytes = sum(part.nbytes for part in (self.weights, self.scales, self.minimums) if part is not None)
        for type_, rows, outputs in parts:
            arguments = (type_, rows.data_ptr(), len(rows), rows.size(1), outputs.data_ptr(), torch.get_num_threads())
            with _calling:
                is_infinite = lib.pack(self.describe(), *arguments)
            if is_infinite:
                raise range_error(weight, self.kind)

    def describe(self) -> Any:
        """Returns the C structure."""
        return library.Linear(
            self.weights.data_ptr(), _address(self.scales), _address(self.minimums), _address(self.bias), self.outputs,
            self.inputs, [*BYTES].index(self.kind),
        )  # fmt: skip

    def restore(self, rows: slice | Tensor = slice(None)) -> Tensor | Quantized:
        """Returns the matrix, or some of its rows, as it was packed."""
        index = torch.arange(self.outputs)[rows]
        words = self.weights[index // TILE, :, index % TILE]
        if self.scales is None:
            return words.view(torch.bfloat16 if self.kind == "bfloat16" else torch.float32)[:, : self.inputs]
        scales = self.scales[index // TILE, :, index % TILE]
        minimums = None if self.minimums is None else self.minimums[index // TILE, :, index % TILE]
        levels = words.view(torch.uint8) if self.kind == "int4" else words.view(torch.int8)[:, : self.inputs]
        return Quantized(levels, scales, minimums)

    def forward(self, x: Tensor) -> Tensor:
        """(…, in) → (…, out)."""
        weight, bias = self.restore(), None if self.bias is None else self.bias[: self.outputs].to(x.dtype)
        return multiply(x, weight, bias) if isinstance(weight, Quantized) else F.linear(x, weight.to(x.dtype), bias)


class PackedEmbedding(nn.Module):
    """The rows of a packed matrix, which is the LM head if the embedding is tied to it."""

    def __init__(self, matrix: PackedLinear) -> None:
        super().__init__()
        self.matrix = matrix

    @property
    def weight(self) -> Tensor:
        """The restored embedding, (V, C)."""
        return to_tensor(self.matrix.restore()).float()

    def forward(self, ids: Tensor) -> Tensor:
        """(…) → (…, C), in float32."""
        return to_tensor(self.matrix.restore(ids.flatten())).float().view(*ids.shape, -1)


class StoredMatrix:
    """A frozen matrix that stays quantized. Every use restores it, with decoder.c."""

    def __init__(self, lib: ctypes.CDLL, weight: Quantized | Blocks) -> None:
        self.lib, self.shape = lib, weight.shape
        self._parts = _rows(weight) if isinstance(weight, Quantized) else weight.parts()

    def parts(self) -> list[Rows]:
        """Returns the rows as they are stored."""
        return self._parts

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Returns the matrix in float32 or bfloat16."""
        matrix, threads = torch.empty(self.shape, dtype=dtype), torch.get_num_threads()
        for type_, rows, outputs in self._parts:
            source = type_, rows.data_ptr(), len(rows), rows.size(1), outputs.data_ptr()
            with _calling:
                self.lib.restore(*source, self.shape[1], dtype == torch.bfloat16, matrix.data_ptr(), threads)
        return matrix


def pack(module: nn.Module, lib: ctypes.CDLL, dtype: torch.dtype = torch.float32, bits: int | None = None) -> None:
    """Packs all matrices of a module in place. An embedding that is tied to an LM head shares its memory.
    Unquantized matrices are rounded to ``dtype``, or to ``bits`` bits. Everything else becomes float32, as activations
    are."""

    def pack_matrix(name: str, weight: Any, bias: Tensor | None = None) -> PackedLinear:
        if isinstance(weight, Tensor) and bits is None and dtype != torch.float32:
            weight = weight.to(dtype)
        return PackedLinear(lib, weight, bias, None if bits is None else head_bits(name, bits))

    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear | QuantizedLinear):
                setattr(parent, name, pack_matrix(name, child.weight, child.bias))
    if isinstance(module, GPT | Ends) and module.lm_head is None:
        module.lm_head = pack_matrix("lm_head", module.wte.weight)
        module.set_submodule("wte", PackedEmbedding(module.lm_head))
    module.float()


def _rows(weight: Tensor | Quantized) -> list[Rows]:
    """Returns a matrix as rows of a GGUF type."""
    if isinstance(weight, Quantized):
        levels = F.pad(weight.levels, (0, -weight.levels.size(1) % GROUP if weight.bits == 8 else 0))
        parts = [part for part in (weight.scales, weight.minimums) if part is not None]
        blocks = [part[..., None].contiguous().view(torch.uint8) for part in parts]
        blocks += [levels.view(torch.uint8).view(len(levels), parts[0].size(1), -1)]
        data, type_ = torch.cat(blocks, dim=2).flatten(1), Q8_0 if weight.bits == 8 else Q4_0
    else:
        elements = weight.detach().contiguous()
        if elements.dtype == torch.float32 and _is_bfloat16(elements):
            elements = elements.bfloat16()
        data, type_ = elements.view(torch.uint8), TYPES[elements.dtype]
    return [Rows(type_, data, torch.arange(len(data)))]


def _is_bfloat16(elements: Tensor) -> bool:
    """Whether all elements are bfloat16 numbers. Looks at the first row before it reads the others."""
    return not any((rows.view(torch.int16)[:, ::2] != 0).any() for rows in (elements[:1], elements))


def _padded(vector: Tensor, multiple: int = GROUP) -> Tensor:
    """Returns a float32 copy that ends with zeros."""
    return F.pad(vector.detach().float(), (0, -len(vector) % multiple)).contiguous()


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def is_packed(model: GPT) -> bool:
    """Whether a model's matrices are packed, so that `Decoder` can run it."""
    return isinstance(model.lm_head, PackedLinear)


class Decoder:
    """The steps of a packed model with a KV cache whose keys are tiled."""

    def __init__(self, model: GPT, cache: KVCache, threads: int = 0) -> None:
        head, self._embedding = model.lm_head, model.get_submodule("wte")
        assert isinstance(head, PackedLinear)
        wte = self._embedding.matrix.describe() if isinstance(self._embedding, PackedEmbedding) else library.Linear()
        config = model.config
        self.model, self.cache, self._lib, self._kept = model, cache, head.lib, list[object]()
        self.threads, self._steps = threads or torch.get_num_threads(), 0
        # Seconds of a call, by its function and numbers of rows and threads.
        self._seconds: dict[tuple[str, int, int], float] = {}
        self._blocks = (library.Block * config.n_layer)(*map(self._describe_block, range(config.n_layer)))
        is_ring = any(columns < cache.max_positions for columns in cache.columns.values())
        table = model.position_table()
        self._c = library.Model(
            n_layer=config.n_layer, n_embd=config.n_embd, n_head=config.n_head, n_kv_head=config.kv_heads,
            head_size=config.head_size, n_inner=config.mlp_width, is_gated=config.mlp == "swiglu",
            # A pass must not overwrite positions that it attends to.
            max_rows=WINDOW_SLACK if is_ring else ROWS,
            epsilon=config.layer_norm_epsilon, wte=wte, lm_head=head.describe(),
            position_table=None if table is None else self._keep(table.detach().float().contiguous()),
            h=ctypes.addressof(self._blocks), ln_f=self._describe_norm(model.ln_f),
        )  # fmt: skip
        memory = np.zeros(self._lib.memory_size(self._c) + 64, np.uint8)
        self._kept.append(memory)
        self._c.memory = -(-memory.ctypes.data // 64) * 64

    def _keep(self, tensor: Tensor) -> int:
        """Keeps a tensor as long as the decoder, and returns its address."""
        self._kept.append(tensor)
        return tensor.data_ptr()

    def _describe_norm(self, norm: Any) -> Any:
        bias = getattr(norm, "bias", None)
        return library.Norm(self._keep(_padded(norm.weight)), None if bias is None else self._keep(_padded(bias)))

    def _describe_block(self, layer: int) -> Any:
        block: Any = self.model.h[layer]
        window, keys = self.cache.windows[layer], self.cache.keys[layer]
        norms = {name: getattr(block.attn, name) for name in ("q_norm", "k_norm")}
        return library.Block(
            ln_1=self._describe_norm(block.ln_1), ln_2=self._describe_norm(block.ln_2),
            **{name: self._describe_norm(norm) for name, norm in norms.items() if norm is not None},
            c_attn=block.attn.c_attn.describe(), c_proj=block.attn.c_proj.describe(), c_fc=block.mlp.c_fc.describe(),
            mlp_c_proj=block.mlp.c_proj.describe(), keys=keys.data_ptr(),
            values=self.cache.values[layer].data_ptr(), columns=self.cache.columns[window], window=window,
        )  # fmt: skip

    def forward(self, work: Sequence[tuple[int, int, int]], ids: Tensor) -> Tensor:
        """Appends ids (N) to slots, and returns the residual stream (N, C). ``work`` has, for each slot, its row, its
        length and its number of new ids. Raises ValueError for ids or positions out of range."""
        counts = [count for _, _, count in work]
        rows = np.repeat(np.array([row for row, _, _ in work], np.int32), counts)
        positions = np.concatenate([np.arange(length, length + count, dtype=np.int32) for _, length, count in work])
        id_array = ids.numpy().astype(np.int32)
        config, end = self.model.config, int(positions.max()) + 1
        if len(id_array) != len(rows) or id_array.min() < 0 or id_array.max() >= config.vocab_size:
            raise ValueError(f"ids must be from 0 to {config.vocab_size - 1:,}")
        max_positions, can_slide = self.cache.max_positions, config.positions == "rotary"
        if any(length + count > max_positions and not (count == 1 and can_slide) for _, length, count in work):
            raise ValueError(f"{end} tokens do not fit in a cache of {max_positions}")
        self.model.grow_rope_table(end)
        if (rope := self.model.rope) is not None:
            self._c.rope, self._c.rope_positions = rope.data_ptr(), rope.size(1)
        if isinstance(self._embedding, PackedEmbedding):
            x = torch.empty(len(rows), config.n_embd)
        else:
            x = self._embedding(ids).float().contiguous()
        inputs = [array.ctypes.data for array in (id_array, rows, positions)]
        self._call(self._lib.forward, len(rows), *inputs, x.data_ptr())
        return x

    def unembed(self, x: Tensor) -> Tensor:
        """Returns logits (n, V) of the residual stream (n, C)."""
        x = x.float().contiguous()
        logits = torch.empty(len(x), -(-self.model.config.vocab_size // TILE) * TILE)
        self._call(self._lib.unembed, len(x), x.data_ptr(), logits.data_ptr())
        return logits[:, : self.model.config.vocab_size]

    def _call(self, function: Any, count: int, *arguments: int) -> None:
        name = function.__name__
        threads = self._choose_threads(name, count)
        with _calling:
            start = time.perf_counter()
            function(self._c, count, *arguments, threads)
            seconds = time.perf_counter() - start
        if count <= FEW_ROWS:
            key = (name, count, threads)
            self._seconds[key] = self._seconds.get(key, seconds) * 0.75 + seconds * 0.25

    def _choose_threads(self, name: str, count: int) -> int:
        """Returns 1 or all threads for a step of ``count`` rows, whichever was faster lately. Next to busy programs,
        one thread is faster, because threads would wait for each other. Results don't depend on the number."""
        if count > FEW_ROWS or self.threads == 1:
            return self.threads
        self._steps += 1
        fast, slow = sorted((1, self.threads), key=lambda threads: self._seconds.get((name, count, threads), 0.0))
        return slow if self._steps % TRIAL == 0 else fast
