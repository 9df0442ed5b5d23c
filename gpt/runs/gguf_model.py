"""GGUF files as checkpoints: shape and weights by gpt's names, dequantized one tensor at a time by the package gguf."""

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpt.config import GPTConfig, RopeScaling
from gpt.distribution import install_extra
from gpt.errors import UserError, WorkError
from gpt.gguf_header import HINT, Header, TensorInfo, header, mapped, read_value
from gpt.model.params import Shape, named_parameters
from gpt.model.positions import rotary_rates
from gpt.model.quantize import GROUP, Quantized
from gpt.runs import hf

# The llama.cpp architecture of each layout.
ARCHES = {"gpt2": "gpt2", "llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
ROPE_FREQS = "rope_freqs.weight"  # Divisors of RoPE frequencies, (head_size / 2).
_OTHER_FILE = "use the model's Transformers folder instead"
_OTHER_MODEL = f"run the file with llama.cpp (llama-cli -m FILE); {hf.SUPPORTED}"
_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_SHAPE = {  # Metadata keys and their names in config.json.
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
    "attention.sliding_window": "sliding_window",
}
_GPT2_SHAPE = {
    "block_count": "n_layer",
    "context_length": "n_positions",
    "embedding_length": "n_embd",
    "feed_forward_length": "n_inner",
    "attention.head_count": "n_head",
    "attention.layer_norm_epsilon": "layer_norm_epsilon",
}
# Keys of other computations, with the values that change nothing.
_WITHOUT: dict[str, tuple[Any, ...]] = {
    "expert_count": (0,), "use_parallel_residual": (False,), "logit_scale": (0, 1), "residual_scale": (0, 1),
    "embedding_scale": (0, 1), "attention.scale": (0,), "attn_logit_softcapping": (0,),
    "final_logit_softcapping": (0,), "attention.causal": (True,), "rope.scaling.attn_factor": (1,),
}  # fmt: skip


def import_gguf() -> ModuleType:
    """Imports the package gguf. Raises `WorkError` if it is missing."""
    try:
        import gguf
    except ImportError:
        raise WorkError("a .gguf file needs the package gguf", install_extra("gguf")) from None
    return gguf


@dataclass(frozen=True)
class FileTensor:
    """A tensor of a GGUF file: rows of a parameter."""

    name: str
    shape: Shape
    rows: slice | Tensor  # Slice of the parameter's rows, or indices of reordered rows.


def file_tensors(config: GPTConfig) -> dict[str, list[FileTensor]]:
    """Returns a file's tensors by parameter, in the model's order."""
    gguf = import_gguf()
    arch = ARCHES[config.layout]
    names = gguf.get_tensor_name_map({name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}[arch], config.n_layer)
    table, tensors = named_parameters(config), dict[str, list[FileTensor]]()
    for hf_name, stored in hf.stored_tensors(config).items():
        p = table[stored.ours]
        rows: slice | Tensor = stored.rows or slice(None)
        if arch == "llama" and hf_name.endswith((".q_proj.weight", ".k_proj.weight")):
            # llama.cpp's RoPE rotates the pairs (2 i, 2 i + 1) of a head; `gpt` rotates (i, i + D/2).
            rows = torch.arange(p.shape[0])[rows].view(-1, 2, config.head_size // 2).transpose(1, 2).flatten()
        shape = p.shape if stored.rows is None else stored.shape
        tensor = FileTensor(names.get_name(hf_name, (".weight", ".bias")), shape, rows)
        tensors.setdefault(stored.ours, []).append(tensor)
    return tensors


def load_config(path: Path) -> GPTConfig:
    """Returns the shape of a file's model. Raises `UserError` for a model that this decoder cannot reproduce."""
    file = header(path)
    arch = read_value(file.metadata, "general.architecture", "", path)
    if arch not in ARCHES.values():
        raise UserError(f"{path} has a model of type {arch!r:.80}", _OTHER_MODEL)
    values = _read_numbers(file, f"{arch}.")
    for key, allowed in _WITHOUT.items():
        if values.get(key, allowed[0]) not in allowed:
            raise UserError(f"{path}: {key} is {values[key]!r:.80}, which this decoder does not support", _OTHER_MODEL)
    embedding, layers = file.tensors.get("token_embd.weight"), values.get("block_count")
    if embedding is None or len(embedding.shape) != 2 or type(layers) is not int or layers > len(file.tensors):
        raise UserError(f"{path} is damaged: it does not have a model's tensors", HINT)
    has_window = arch == "llama" and "attention.sliding_window" in values
    names = _GPT2_SHAPE if arch == "gpt2" else _SHAPE
    config = hf.from_hf_config(
        {
            "model_type": "mistral" if has_window else arch,
            "vocab_size": embedding.shape[0],
            "tie_word_embeddings": "output.weight" not in file.tensors,
            **{name: values[key] for key, name in names.items() if key in values},
        },
        str(path),
    )
    if arch != "gpt2" and values.get("rope.dimension_count", config.head_size) != config.head_size:
        raise UserError(f"{path} rotates only part of each head, which this decoder does not support", _OTHER_MODEL)
    return replace(config, rope_scaling=_read_rope_scaling(file, values, config))


def _read_numbers(file: Header, prefix: str) -> dict[str, Any]:
    """Returns an architecture's metadata with float32 values in their shortest form, and one value for equal layers.
    Raises `UserError` if layers differ in a value that must be the same."""
    numbers: dict[str, Any] = {}
    for name, value in file.metadata.items():
        key = name.removeprefix(prefix)
        if key == name:
            continue
        if isinstance(value, np.ndarray) and value.size and (value == value[0]).all():
            value = value[0].item()
        if isinstance(value, np.ndarray | list):
            if key in _SHAPE or key in _GPT2_SHAPE or key in _WITHOUT or key.startswith("rope."):
                raise UserError(
                    f"{file.path}: {key} differs by layer, which this decoder does not support", _OTHER_MODEL
                )
            continue
        numbers[key] = float(str(np.float32(value))) if isinstance(value, float) and abs(value) < 1e38 else value
    return numbers


def _read_rope_scaling(file: Header, values: Mapping[str, Any], config: GPTConfig) -> RopeScaling | None:
    """Returns the RoPE scaling: linear, from a factor, or Llama 3.1's, from a tensor of divisors. Like llama.cpp
    (src/llama-model.cpp), a factor without a type is linear, a factor of 0 is 1, and there is an older key."""
    kind = values.get("rope.scaling.type", "linear")
    factor = values.get("rope.scaling.factor", values.get("rope.scale_linear", 0))
    is_linear = kind == "linear" and factor not in (0, 1) and config.positions == "rotary"
    is_invalid = type(factor) not in (int, float) or not 1 <= factor <= 1e4 or ROPE_FREQS in file.tensors
    if kind not in ("none", "linear", "llama3") or (is_linear and is_invalid):
        raise UserError(f"{file.path}: its RoPE scaling {kind!r:.40} by {factor!r:.40} is not supported", _OTHER_MODEL)
    if is_linear:
        return RopeScaling(factor, 1.0, 2.0, 1)  # All frequencies are below the limits, so all are divided.
    if ROPE_FREQS not in file.tensors:
        return None
    info, shape = file.tensors[ROPE_FREQS], (config.head_size // 2,)
    if info.shape != shape:
        raise UserError(f"{file.path}: {ROPE_FREQS} has the shape {info.shape}; {shape} was expected", HINT)
    divisors, rates = _read_tensor(info, shape).double(), rotary_rates(config)
    factor = float(str(np.float32(divisors.max())))
    for original in (values.get("rope.scaling.original_context_length"), 8192, config.block_size):
        if type(original) is int and 1 < factor <= 1e4 and 1 <= original <= 2**24:
            scaling = RopeScaling(factor, 1.0, 4.0, original)
            if torch.allclose(rates / rotary_rates(replace(config, rope_scaling=scaling)), divisors, rtol=1e-5):
                return scaling
    if torch.equal(divisors, torch.ones_like(divisors)):
        return None
    raise UserError(f"{file.path}: its {ROPE_FREQS} is not Llama 3.1's scaling, the only one supported", _OTHER_MODEL)


def open_weights(path: Path, config: GPTConfig) -> dict[str, Callable[[], Tensor | Quantized]]:
    """Returns loaders of a file's parameters by gpt's names. Unquantized parameters keep their dtype, and are views of
    the file if they are stored in one piece; Q4_0 matrices become int4; all others become float32. Raises `UserError`
    for tensors that are missing or unknown, or have another shape or an unsupported type."""
    file, table = header(path), file_tensors(config)
    expected = {tensor.name: tensor.shape for group in table.values() for tensor in group}
    for name, info in file.tensors.items():
        if name != ROPE_FREQS and name not in expected:
            raise UserError(f"{path} has a tensor {name:.80} that no {config.layout} model of gpt has", _OTHER_MODEL)
        if name in expected and info.shape != expected[name]:
            raise UserError(f"{path}: {name} has the shape {info.shape}; {expected[name]} was expected", HINT)
        _row_bytes(info, name)
    missing = [name for name in expected if name not in file.tensors]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise UserError(f"{path}: the tensor {missing[0]}{more} is missing", HINT)
    kinds = {name: p.kind for name, p in named_parameters(config).items()}
    return {name: partial(_read_parameter, file, group, kinds[name]) for name, group in table.items()}


def _row_bytes(info: TensorInfo, name: str) -> int:
    """Returns the bytes per row. Raises `UserError` for an unsupported type, and for a tensor that exceeds its file."""
    gguf = import_gguf()
    try:
        kind = gguf.GGMLQuantizationType(info.type)
        block, size = gguf.GGML_QUANT_SIZES[kind]
        if kind.name not in _DTYPES:
            gguf.quants.dequantize(np.zeros((1, size), np.uint8), kind)
    except (ValueError, KeyError):
        what = f"{info.file}: {name:.80} has the unknown type {info.type}"
        raise UserError(what, "update the package gguf") from None
    except NotImplementedError:
        what = f"{info.file}: {name:.80} has the type {kind.name}, which cannot be read"
        raise UserError(what, _OTHER_FILE) from None
    width, rest = divmod(info.shape[-1], block)
    end = info.offset + math.prod(info.shape[:-1]) * width * size
    if rest or end > info.file.stat().st_size:
        raise UserError(f"{info.file} is damaged: {name:.80} does not fit into it", HINT)
    row: int = width * size
    return row


def _type_name(info: TensorInfo) -> str:
    name: str = import_gguf().GGMLQuantizationType(info.type).name
    return name


def _map_rows(info: TensorInfo) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return mapped(info, math.prod(info.shape[:-1]), _row_bytes(info, "a tensor"))


def _read_tensor(info: TensorInfo, shape: Shape) -> Tensor:
    """Returns a tensor as it is stored, or dequantized to float32."""
    kind, rows = _type_name(info), _map_rows(info)
    if kind in _DTYPES:
        return torch.from_numpy(rows).view(_DTYPES[kind]).view(shape)
    gguf = import_gguf()
    values = gguf.quants.dequantize(np.asarray(rows), gguf.GGMLQuantizationType(info.type))
    return torch.from_numpy(values).view(shape)


def _read_int4(info: TensorInfo) -> Quantized:
    """Returns a Q4_0 matrix without rounding it again. Each block is a float16 scale and 16 bytes of levels."""
    blocks = torch.from_numpy(_map_rows(info)).view(info.shape[0], -1, 2 + GROUP // 2)
    scales = blocks[:, :, :2].contiguous().view(torch.float16).squeeze(-1)
    return Quantized(blocks[:, :, 2:].flatten(1), scales)


def _read_parameter(file: Header, group: list[FileTensor], kind: str) -> Tensor | Quantized:
    infos = [file.tensors[tensor.name] for tensor in group]
    if kind == "linear" and all(_type_name(info) == "Q4_0" for info in infos):
        matrices = [_read_int4(info) for info in infos]
        levels = _concatenate([matrix.levels for matrix in matrices], group)
        return Quantized(levels, _concatenate([matrix.scales for matrix in matrices], group))
    return _concatenate([_read_tensor(info, tensor.shape) for info, tensor in zip(infos, group, strict=True)], group)


def _concatenate(values: list[Tensor], group: list[FileTensor]) -> Tensor:
    """Joins the rows of a parameter, in the parameter's order."""
    if len(group) == 1 and isinstance(group[0].rows, slice):
        return values[0]
    dtype = functools.reduce(torch.promote_types, (value.dtype for value in values))
    parameter = torch.empty((sum(map(len, values)), *values[0].shape[1:]), dtype=dtype)
    for value, tensor in zip(values, group, strict=True):
        parameter[tensor.rows] = value.to(dtype)
    return parameter
