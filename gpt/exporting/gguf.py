"""A model as a GGUF file, which llama.cpp, ollama and LM Studio run.

Names of tensors and keys are those of the package ``gguf``, an extra. Matrices lie there as here, (out, in).
"""

import errno
import hashlib
import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpt.config import GPTConfig
from gpt.errors import UserError, WorkError
from gpt.exporting import gguf_tokenizer
from gpt.exporting.source import SourceModel, whole
from gpt.files import file_sha256, whole_file
from gpt.model.decoder import rotary_rates
from gpt.model.params import Kind, named_parameters
from gpt.model.quantize import GROUP, Quantized, to_int4
from gpt.runs import hf

ARCHES = {"gpt2": "gpt2", "llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}  # by layout
_FILE_TYPES = {"f32": "ALL_F32", "f16": "MOSTLY_F16", "q8_0": "MOSTLY_Q8_0", "q4_0": "MOSTLY_Q4_0"}
_ROPE_FREQS = "rope_freqs.weight"
_FOLDER = "export a folder instead: -o without .gguf"
Array = np.ndarray[Any, Any]


def check(source: SourceModel, kind: str) -> None:
    """Raises `UserError` for a model that llama.cpp does not compute as this decoder does, with the reason; `WorkError`
    where the package gguf is missing."""
    _package()
    config = source.config
    if config.layout not in ARCHES:
        raise UserError("llama.cpp has no architecture that computes this model", _FOLDER)
    bound = min((each for each in config.windows if each is not None), default=config.block_size)
    if bound < config.block_size:
        raise UserError(f"llama.cpp ignores the window of {bound:,} positions that layers of this model have", _FOLDER)
    if config.rope_scaling is not None and ARCHES[config.layout] != "llama":
        raise UserError(f"llama.cpp ignores the rope_scaling of a {config.layout} model", _FOLDER)
    gguf_tokenizer.check(source.tokenizer)


def _package() -> ModuleType:
    try:
        import gguf
    except ImportError:
        raise WorkError("a .gguf file needs the package gguf", "pip install 'gpt[gguf]'") from None
    return gguf


@dataclass(frozen=True)
class _Part:
    """A tensor of the file: some rows of a parameter of ours."""

    name: str
    shape: tuple[int, ...]
    kind: str  # f32, f16, q8_0 or q4_0
    rows: Tensor | None  # of the parameter, in the file's order; None: all, as they are


def _parts(config: GPTConfig, kind: str) -> dict[str, list[_Part]]:
    """The tensors of the file by the parameter that they are made of, in the model's order."""
    gguf = _package()
    arch = next(each for each, name in gguf.MODEL_ARCH_NAMES.items() if name == ARCHES[config.layout])
    names, table = gguf.get_tensor_name_map(arch, config.n_layer), named_parameters(config)
    found: dict[str, list[_Part]] = {}
    for theirs, stored in hf.stored_tensors(config).items():
        name = names.get_name(theirs, (".weight", ".bias"))
        p = table[stored.ours]
        rows = None if stored.rows is None else torch.arange(stored.rows.start, stored.rows.stop)
        if gguf.MODEL_ARCH_NAMES[arch] == "llama" and theirs.endswith(("q_proj.weight", "k_proj.weight")):
            assert rows is not None
            # Its rotary positions turn the pairs (2 i, 2 i + 1) of a head, ours (i, i + D/2).
            rows = rows.view(-1, 2, config.head_size // 2).transpose(1, 2).flatten()
        shape = p.shape if rows is None else (len(rows), *p.shape[1:])
        found.setdefault(stored.ours, []).append(_Part(name, shape, _kind(p.kind, p.shape, kind), rows))
    return found


def _kind(parameter: Kind, shape: tuple[int, ...], kind: str) -> str:
    """The type of a parameter in a file whose matrices are of type ``kind``."""
    if parameter in ("bias", "norm", "positions"):
        return "f32"
    if kind in ("q8_0", "q4_0") and shape[1] % GROUP:
        return "f16"
    return "q8_0" if kind == "q4_0" and parameter != "linear" else kind


def write(path: Path, source: SourceModel, kind: str, name: str, license: str | None = None) -> int:
    """Writes a GGUF file, whole or not at all, with matrices of type ``kind``, and returns the number of its tensors.
    The file is a function of the model and these words. Raises OSError, and `UserError` as `check` does."""
    gguf = _package()
    config, parts = source.config, _parts(source.config, kind)
    writer = gguf.GGUFWriter(None, ARCHES[config.layout])
    _describe(writer, config, kind, name)
    if license is not None:
        writer.add_license(license)
    gguf_tokenizer.add(writer, source.tokenizer, config.vocab_size)
    for part in (each for together in parts.values() for each in together):
        stored = gguf.GGMLQuantizationType[part.kind.upper()]
        nbytes = int(np.prod(part.shape)) // gguf.GGML_QUANT_SIZES[stored][0] * gguf.GGML_QUANT_SIZES[stored][1]
        writer.add_tensor_info(part.name, part.shape, np.dtype(np.float32), nbytes, stored)
    factors = _rope_factors(config)
    if factors is not None:
        writer.add_tensor_info(_ROPE_FREQS, factors.shape, factors.dtype, factors.nbytes)
    with _checked(path) as put:
        put(_header(writer))
        for ours, together in parts.items():
            for data in _numbers(ours, source.weights[ours](), together):
                put(_padded(writer, data.tobytes()))
        if factors is not None:
            put(_padded(writer, factors.tobytes()))
    return sum(map(len, parts.values())) + (factors is not None)


def _describe(writer: Any, config: GPTConfig, kind: str, name: str) -> None:
    """Writes what the file says of the model beside its tokenizer."""
    gguf = _package()
    writer.add_type(gguf.GGUFType.MODEL)
    writer.add_name(name)
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
        return
    writer.add_layer_norm_rms_eps(config.layer_norm_epsilon)
    writer.add_key_length(config.head_size)
    writer.add_value_length(config.head_size)
    writer.add_rope_dimension_count(config.head_size)
    writer.add_rope_freq_base(config.rope_base)


def _rope_factors(config: GPTConfig) -> Array | None:
    """What the frequencies of rotary positions are divided by, float32 (D / 2); None where they are not."""
    if config.rope_scaling is None:
        return None
    factors: Array = (rotary_rates(replace(config, rope_scaling=None)) / rotary_rates(config)).float().numpy()
    return factors


def _header(writer: Any) -> bytes:
    """The file up to its first tensor."""
    file = io.BytesIO()
    writer.fout, writer.state = [file], type(writer.state).EMPTY
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    return _padded(writer, file.getvalue())


def _padded(writer: Any, data: bytes) -> bytes:
    return data + bytes(-len(data) % writer.data_alignment)


@contextmanager
def _checked(path: Path) -> Iterator[Callable[[bytes], None]]:
    """Yields what writes to a new file, which takes its name once the disk has given back what was written."""
    digest = hashlib.sha256()
    with whole_file(path) as file:

        def put(data: bytes) -> None:
            file.write(data)
            digest.update(data)

        yield put
        file.flush()
        os.fsync(file.fileno())
        if file_sha256(Path(file.name), from_disk=True) != digest.hexdigest():
            raise OSError(errno.EIO, "what was written is not what can be read", str(path))
        if path.exists():
            raise FileExistsError(errno.EEXIST, "it is there by now, and nothing is overwritten", str(path))


def _numbers(ours: str, value: Tensor | Quantized, parts: list[_Part]) -> Iterator[Array]:
    """Of each tensor that is made of a parameter, the bytes, or its numbers in their type."""
    for part in parts:
        yield _stored(ours, _taken(value, part.rows), part.kind)


def _taken(value: Tensor | Quantized, rows: Tensor | None) -> Tensor | Quantized:
    if rows is None:
        return value
    if isinstance(value, Quantized):
        return Quantized(value.levels[rows], value.scales[rows])
    return value[rows]


def _stored(ours: str, value: Tensor | Quantized, kind: str) -> Array:
    """Numbers of a parameter as the file holds them: float32, float16, or blocks of 32 as bytes. Raises `UserError` for
    numbers that the type cannot hold."""
    gguf = _package()
    if kind == "q4_0":
        return _q4_0(ours, value)
    numbers = whole(value)
    stored: Array
    if kind == "q8_0":
        with np.errstate(over="ignore", invalid="ignore"):
            stored = gguf.quants.quantize(numbers.numpy(), gguf.GGMLQuantizationType.Q8_0)
        finite = np.isfinite(stored.reshape(-1, 34)[:, :2].copy().view(np.float16)).all()
    else:
        stored = (numbers.half() if kind == "f16" else numbers).numpy()
        finite = np.isfinite(stored).all()
    if not finite:
        raise UserError(f"{ours} has numbers that {kind} cannot hold", "take another --type")
    return stored


def _q4_0(ours: str, value: Tensor | Quantized) -> Array:
    """Blocks of 18 bytes, the scale before the levels, which lie as `Quantized` has them."""
    if not isinstance(value, Quantized) or value.bits != 4:
        try:
            value = to_int4(whole(value))
        except UserError as error:
            raise UserError(f"{ours}: {error.message}", "take another --type") from None
    rows = len(value.levels)
    levels = value.levels.numpy().reshape(rows, -1, GROUP // 2)
    scales = value.scales.numpy().view(np.uint8).reshape(rows, -1, 2)
    return np.concatenate([scales, levels], axis=2).reshape(rows, -1)


def restored(config: GPTConfig, name: str, value: Tensor | Quantized, kind: str) -> Tensor:
    """A parameter of ours, by its name, as a file with matrices of type ``kind`` holds it, in float32."""
    gguf = _package()
    p = named_parameters(config)[name]
    as_kind = _kind(p.kind, p.shape, kind)
    stored = _stored(name, value, as_kind)
    return torch.from_numpy(gguf.quants.dequantize(stored, gguf.GGMLQuantizationType[as_kind.upper()]).copy())
