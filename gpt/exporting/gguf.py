"""A model as a GGUF file, which llama.cpp, ollama and LM Studio run.

Names of tensors and keys are those of the package gguf, an extra. Matrices lie there as here, (out, in).
"""

import io
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpt.config import GPTConfig
from gpt.distribution import install_extra
from gpt.errors import UserError, WorkError
from gpt.exporting import gguf_tokenizer
from gpt.exporting.source import SourceModel
from gpt.files import write_pieces
from gpt.model.params import Parameter, Shape, named_parameters
from gpt.model.positions import rotary_rates
from gpt.model.quantize import GROUP, Quantized, to_int4, whole
from gpt.runs import hf
from gpt.runs.checkpoint import Parameters

ARCHES = {"gpt2": "gpt2", "llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}  # by layout
MOST_LAYERS = 512  # of llama.cpp
_FILE_TYPES = {"f32": "ALL_F32", "f16": "MOSTLY_F16", "q8_0": "MOSTLY_Q8_0", "q4_0": "MOSTLY_Q4_0"}
_Q8_0_BYTES = 34  # of a block: a scale and 32 levels
_ROPE_FREQS = "rope_freqs.weight"  # what llama.cpp divides the frequencies of rotary positions by
_HINT = "export a folder instead: -o without .gguf"
_OTHER_TYPE = "use another --dtype"
Array = np.ndarray[Any, Any]


def check(source: SourceModel) -> None:
    """Raises `UserError` for a model that llama.cpp does not compute as this decoder does, with the reason. Needs no
    package."""
    reason = _unlike(source.config)
    if reason is not None:
        raise UserError(f"llama.cpp does not support this model: {reason}", _HINT)
    gguf_tokenizer.check(source.tokenizer)


def _unlike(config: GPTConfig) -> str | None:
    """The reason for which llama.cpp does not compute a model of this shape; None where it does."""
    known, windowed = config.layout in ARCHES, any(config.windows)
    if windowed and (not known or min(filter(None, config.windows)) < config.block_size):
        return f"it ignores the sliding window of {config.window:,} tokens that this model has"
    if not known:
        several = f"{config.norm}, {config.mlp}, {config.positions} positions, biases: {config.biases}"
        return f"it has no architecture with {several}, {config.n_head} heads and {config.kv_heads} key/value heads"
    if config.layout in ("qwen2", "qwen3") and config.rope_scaling is not None:
        return f"it has no rope_scaling for {config.layout}"
    if config.layout == "qwen2" and config.n_head * config.head_size != config.n_embd:
        return f"its qwen2 heads are n_embd / n_head wide, but this model's are {config.head_size}"
    if config.n_layer > MOST_LAYERS:
        return f"it supports up to {MOST_LAYERS} layers, and this model has {config.n_layer:,}"
    if 1 in (config.head_size, config.block_size):
        return "it crashes on a head width of 1 and on a context of 1"
    return None


def package() -> ModuleType:
    """The package gguf. Raises `WorkError` where it is missing."""
    try:
        import gguf
    except ImportError:
        raise WorkError("a .gguf file needs the package gguf", install_extra("gguf")) from None
    return gguf


@dataclass(frozen=True)
class _Part:
    """A tensor of the file: rows of a parameter of ours."""

    name: str
    shape: Shape
    kind: str  # f32, f16, q8_0 or q4_0
    rows: slice | Tensor  # of the parameter; numbers of rows where they lie in another order


def _parts(config: GPTConfig, kind: str) -> dict[str, list[_Part]]:
    """The tensors of the file by the parameter that they are made of, in the model's order."""
    gguf = package()
    arch = ARCHES[config.layout]
    names = gguf.get_tensor_name_map({name: each for each, name in gguf.MODEL_ARCH_NAMES.items()}[arch], config.n_layer)
    table, found = named_parameters(config), dict[str, list[_Part]]()
    for theirs, stored in hf.stored_tensors(config).items():
        p = table[stored.ours]
        rows: slice | Tensor = stored.rows or slice(None)
        if arch == "llama" and theirs.endswith((".q_proj.weight", ".k_proj.weight")):
            # Its rotary positions turn the pairs (2 i, 2 i + 1) of a head, and ours (i, i + D/2).
            rows = torch.arange(p.shape[0])[rows].view(-1, 2, config.head_size // 2).transpose(1, 2).flatten()
        shape = p.shape if stored.rows is None else stored.shape
        part = _Part(names.get_name(theirs, (".weight", ".bias")), shape, _kind(p, kind), rows)
        found.setdefault(stored.ours, []).append(part)
    if config.rope_scaling is not None:
        found[_ROPE_FREQS] = [_Part(_ROPE_FREQS, (config.head_size // 2,), "f32", slice(None))]
    return found


def _kind(p: Parameter, kind: str) -> str:
    """The type of a parameter in a file whose matrices are of type ``kind``."""
    if p.kind in ("bias", "norm", "positions"):
        return "f32"
    if kind in ("q8_0", "q4_0") and p.shape[1] % GROUP:
        return "f16"
    return "q8_0" if kind == "q4_0" and p.kind != "linear" else kind


def write(path: Path, source: SourceModel, kind: str, name: str, license: str | None = None) -> int:
    """Writes a GGUF file, whole or not at all, with matrices of type ``kind``, and returns the number of its tensors.
    The bytes follow from the model, ``kind``, ``name`` and ``license`` alone. Raises OSError, also where ``path`` is
    there by then, and `UserError` for numbers that the type cannot hold."""
    parts = _parts(source.config, kind)
    header = _header(source, kind, name, license, [part for together in parts.values() for part in together])
    plain = replace(source.config, rope_scaling=None)
    factors = lambda: rotary_rates(plain) / rotary_rates(source.config)  # divisors of the frequencies, (D / 2)
    weights: Parameters = {**source.weights, _ROPE_FREQS: factors}

    def pieces() -> Iterator[bytes | memoryview]:
        yield header
        for ours, together in parts.items():
            value = weights[ours]()
            for part in together:
                data = _stored(ours, _rows(value, part.rows), part.kind)
                yield np.ascontiguousarray(data).reshape(-1).view(np.uint8).data
                yield bytes(-data.nbytes % package().GGUF_DEFAULT_ALIGNMENT)

    write_pieces(path, pieces(), new=True)
    return sum(map(len, parts.values()))


def _header(source: SourceModel, kind: str, name: str, license: str | None, parts: list[_Part]) -> bytes:
    """The file up to its first tensor: what it says of the model, the tokenizer, and where which tensor lies."""
    gguf, config = package(), source.config
    writer = gguf.GGUFWriter(None, ARCHES[config.layout])
    writer.add_type(gguf.GGUFType.MODEL)
    if not re.search("phi-?3", name, re.IGNORECASE):  # llama.cpp would look for the special tokens of Phi-3, and fail
        writer.add_name(name)
    if license is not None:
        writer.add_license(license)
    writer.add_file_type(gguf.LlamaFileType[_FILE_TYPES[kind]])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.block_size)
    writer.add_embedding_length(config.n_embd)
    writer.add_block_count(config.n_layer)
    writer.add_feed_forward_length(config.mlp_width)
    writer.add_head_count(config.n_head)
    writer.add_head_count_kv(config.kv_heads)
    if config.norm == "layernorm":
        writer.add_layer_norm_eps(config.layer_norm_epsilon)
    else:
        writer.add_layer_norm_rms_eps(config.layer_norm_epsilon)
        writer.add_key_length(config.head_size)
        writer.add_value_length(config.head_size)
        writer.add_rope_dimension_count(config.head_size)
        writer.add_rope_freq_base(config.rope_base)
    gguf_tokenizer.add(writer, source.tokenizer, config.vocab_size)
    for part in parts:
        stored = gguf.GGMLQuantizationType[part.kind.upper()]
        nbytes = math.prod(gguf.quants.quant_shape_to_byte_shape(part.shape, stored))
        writer.add_tensor_info(part.name, part.shape, np.dtype(np.float32), nbytes, stored)
    file = io.BytesIO()
    writer.fout, writer.state = [file], type(writer.state).EMPTY  # it would open a file by its name
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    return file.getvalue() + bytes(-file.tell() % writer.data_alignment)


def _rows(value: Tensor | Quantized, rows: slice | Tensor) -> Tensor | Quantized:
    return Quantized(value.levels[rows], value.scales[rows]) if isinstance(value, Quantized) else value[rows]


def _stored(ours: str, value: Tensor | Quantized, kind: str) -> Array:
    """Numbers of a parameter as the file holds them: float32, float16, or of each row the bytes of its blocks. Raises
    `UserError` for numbers that the type cannot hold."""
    if kind == "q4_0":
        return _q4_0(ours, value)
    gguf, numbers = package(), whole(value).float()
    stored: Array
    if kind == "q8_0":
        with np.errstate(over="ignore", invalid="ignore"):
            stored = gguf.quants.quantize(numbers.numpy(), gguf.GGMLQuantizationType.Q8_0)
        held = stored.reshape(-1, _Q8_0_BYTES)[:, :2].copy().view(np.float16)  # the scales
    else:
        held = stored = (numbers.half() if kind == "f16" else numbers).numpy()
    if not np.isfinite(held).all():
        raise UserError(f"{ours} has values that {kind} cannot represent", _OTHER_TYPE)
    return stored


def _q4_0(ours: str, value: Tensor | Quantized) -> Array:
    """Rows of blocks of 18 bytes: a scale, then the levels as `Quantized` has them. A matrix that is stored in int4 is
    not rounded anew."""
    if not isinstance(value, Quantized) or value.bits != 4:
        try:
            value = to_int4(whole(value).float())
        except UserError as error:
            raise UserError(f"{ours}: {error.message}", _OTHER_TYPE) from None
    rows, groups = value.scales.shape
    scales = value.scales.view(torch.uint8).view(rows, groups, 2)
    return torch.cat([scales, value.levels.view(rows, groups, GROUP // 2)], dim=2).flatten(1).numpy()


def restored(config: GPTConfig, name: str, value: Tensor | Quantized, kind: str) -> Tensor:
    """A parameter of ours, by its name, as a file with matrices of type ``kind`` holds it, in float32."""
    gguf = package()
    as_kind = _kind(named_parameters(config)[name], kind)
    found = gguf.quants.dequantize(_stored(name, value, as_kind), gguf.GGMLQuantizationType[as_kind.upper()])
    return torch.from_numpy(found)
