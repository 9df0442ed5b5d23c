"""Exporting a model as a GGUF file for llama.cpp, Ollama and LM Studio.

The package gguf provides tensor and key names. Matrices are (out, in), as in `gpt`.
"""

import io
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpt.config.model import GPTConfig
from gpt.exporting import gguf_tokenizer
from gpt.exporting.source import SourceModel
from gpt.model.params import Parameter, named_parameters
from gpt.model.positions import rotary_rates
from gpt.model.quantize import GROUP, Blocks, to_int4, to_tensor
from gpt.runs.checkpoint import Parameters
from gpt.runs.gguf_model import FileTensor, file_tensors, import_gguf
from gpt.runs.model_config import ARCHES, ROPE_FREQS
from gpt.runs.sampling_defaults import NAMES
from gpt.system.errors import UserError
from gpt.system.files import write_pieces

MAX_LAYERS = 512  # Limit of llama.cpp.
_FILE_TYPES = {"f32": "ALL_F32", "f16": "MOSTLY_F16", "q8_0": "MOSTLY_Q8_0", "q4_0": "MOSTLY_Q4_0"}
_Q8_0_BYTES = 34  # Bytes per block: a scale and 32 levels.
_OTHER_TYPE = "use another --dtype"
Array = np.ndarray[Any, Any]


def check(source: SourceModel) -> None:
    """Raises `UserError` for a model that llama.cpp cannot reproduce. Works without the package gguf."""
    reason = _unsupported_reason(source.config)
    if reason is not None:
        raise UserError(f"llama.cpp does not support this model: {reason}", gguf_tokenizer.HINT)
    gguf_tokenizer.check(source.tokenizer)


def _unsupported_reason(config: GPTConfig) -> str | None:
    """Returns why llama.cpp cannot reproduce a model of this shape, or None."""
    has_arch, has_window = config.layout in ARCHES, any(config.windows)
    if has_window and (not has_arch or min(filter(None, config.windows)) < config.block_size):
        return f"it ignores the sliding window of {config.window:,} tokens that this model has"
    if not has_arch:
        parts = f"{config.norm}, {config.mlp}, {config.positions} positions, biases: {config.biases}"
        return f"it has no architecture with {parts}, {config.n_head} heads and {config.kv_heads} key/value heads"
    if config.layout in ("qwen2", "qwen3") and config.rope_scaling is not None:
        return f"it has no rope_scaling for {config.layout}"
    if config.layout == "qwen2" and config.n_head * config.head_size != config.n_embd:
        return f"its qwen2 heads are n_embd / n_head wide, but this model's are {config.head_size}"
    if config.n_layer > MAX_LAYERS:
        return f"it supports up to {MAX_LAYERS} layers, and this model has {config.n_layer:,}"
    if 1 in (config.head_size, config.block_size):
        return "it crashes on a head width of 1 and on a context of 1"
    return None


def _tensors(config: GPTConfig, kind: str) -> dict[str, list[tuple[FileTensor, str]]]:
    """Returns the file's tensors and their types by source parameter, in the model's order."""
    table = named_parameters(config)
    tensors = {
        name: [(tensor, _parameter_kind(table[name], kind)) for tensor in group]
        for name, group in file_tensors(config).items()
    }
    if config.rope_scaling is not None:
        tensors[ROPE_FREQS] = [(FileTensor(ROPE_FREQS, (config.head_size // 2,), slice(None)), "f32")]
    return tensors


def _parameter_kind(p: Parameter, kind: str) -> str:
    """Returns a parameter's type in a file with matrices of type ``kind``."""
    if p.kind in ("bias", "norm", "positions"):
        return "f32"
    if kind in ("q8_0", "q4_0") and p.shape[1] % GROUP:
        return "f16"
    return "q8_0" if kind == "q4_0" and p.kind != "linear" else kind


def write(path: Path, source: SourceModel, kind: str, name: str, license: str | None = None) -> int:
    """Writes a GGUF file atomically, with matrices of type ``kind``. Returns the number of tensors.

    The bytes depend only on the model, ``kind``, ``name`` and ``license``. Raises OSError, for example if
    ``path`` exists, and `UserError` for values that the type cannot represent.
    """
    tensors = _tensors(source.config, kind)
    header = _build_header(source, kind, name, license, [tensor for group in tensors.values() for tensor in group])
    unscaled = replace(source.config, rope_scaling=None)
    factors = lambda: rotary_rates(unscaled) / rotary_rates(source.config)  # Divisors of RoPE frequencies, (D / 2).
    weights: Parameters = {**source.weights, ROPE_FREQS: factors}

    def pieces() -> Iterator[bytes | memoryview]:
        yield header
        for parameter, group in tensors.items():
            value = to_tensor(weights[parameter]())
            for tensor, own_kind in group:
                data = _encode(parameter, value[tensor.rows], own_kind)
                yield np.ascontiguousarray(data).reshape(-1).view(np.uint8).data
                yield bytes(-data.nbytes % import_gguf().GGUF_DEFAULT_ALIGNMENT)

    write_pieces(path, pieces(), new=True)
    return sum(map(len, tensors.values()))


def _build_header(
    source: SourceModel, kind: str, name: str, license: str | None, tensors: list[tuple[FileTensor, str]]
) -> bytes:
    """Returns the part of the file before the first tensor: model and tokenizer metadata, and tensor offsets."""
    gguf, config = import_gguf(), source.config
    writer = gguf.GGUFWriter(None, ARCHES[config.layout])
    writer.add_type(gguf.GGUFType.MODEL)
    if not re.search("phi-?3", name, re.IGNORECASE):  # With such a name, llama.cpp requires Phi-3's special tokens.
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
    keys = {name: key for key, name in NAMES.items()}
    for name, value in source.sampling.settings.items():
        if name != "no_repeat_ngram":
            getattr(writer, f"add_sampling_{keys.get(name, name)}")(value)
        if name == "repetition_penalty":
            writer.add_sampling_penalty_last_n(config.block_size)  # llama.cpp's default is 64 tokens.
    gguf_tokenizer.add(writer, source.tokenizer, config.vocab_size)
    for tensor, own_kind in tensors:
        tensor_type = gguf.GGMLQuantizationType[own_kind.upper()]
        nbytes = math.prod(gguf.quants.quant_shape_to_byte_shape(tensor.shape, tensor_type))
        writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), nbytes, tensor_type)
    file = io.BytesIO()
    writer.fout, writer.state = [file], type(writer.state).EMPTY  # Keeps the writer from opening a file.
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    return file.getvalue() + bytes(-file.tell() % writer.data_alignment)


def _encode(name: str, value: Tensor, kind: str) -> Array:
    """Encodes a parameter as float32, float16, or rows of quantized blocks. Raises `UserError` for values that the type
    cannot represent."""
    gguf, values = import_gguf(), value.float()
    encoded: Array
    if kind == "q4_0":
        return _encode_q4_0(name, values)
    if kind == "q8_0":
        with np.errstate(over="ignore", invalid="ignore"):
            encoded = gguf.quants.quantize(values.numpy(), gguf.GGMLQuantizationType.Q8_0)
        floats = encoded.reshape(-1, _Q8_0_BYTES)[:, :2].copy().view(np.float16)
    else:
        floats = encoded = (values.half() if kind == "f16" else values).numpy()
    if not np.isfinite(floats).all():
        raise UserError(f"{name} has values that {kind} cannot represent", _OTHER_TYPE)
    return encoded


def _encode_q4_0(name: str, values: Tensor) -> Array:
    """Encodes rows as blocks of 18 bytes: a scale, then the levels as in `Quantized`."""
    try:
        matrix = to_int4(values)
    except UserError as error:
        raise UserError(f"{name}: {error.message}", _OTHER_TYPE) from None
    rows, groups = matrix.scales.shape
    scales = matrix.scales.view(torch.uint8).view(rows, groups, 2)
    return torch.cat([scales, matrix.levels.view(rows, groups, GROUP // 2)], dim=2).flatten(1).numpy()


def restore_parameter(config: GPTConfig, name: str, value: Tensor | Blocks, kind: str) -> Tensor:
    """Returns a parameter in float32, after a round trip through a file with matrices of type ``kind``."""
    gguf = import_gguf()
    own_kind = _parameter_kind(named_parameters(config)[name], kind)
    encoded = _encode(name, to_tensor(value), own_kind)
    return torch.from_numpy(gguf.quants.dequantize(encoded, gguf.GGMLQuantizationType[own_kind.upper()]))
