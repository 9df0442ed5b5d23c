"""GGUF files as checkpoints: weights by gpt's names, dequantized one tensor at a time by the package gguf."""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpt.config.model import GPTConfig
from gpt.model.params import Shape, named_parameters
from gpt.model.quantize import GROUP, Quantized
from gpt.runs import hf, tensors
from gpt.runs.model_config import ARCHES, OTHER_MODEL, ROPE_FREQS
from gpt.system.distribution import install_extra
from gpt.system.errors import UserError, WorkError
from gpt.system.gguf_header import HINT, Header, TensorInfo, header, mapped

_OTHER_FILE = "use the model's Transformers folder instead"
_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


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
    table, groups = named_parameters(config), dict[str, list[FileTensor]]()
    for hf_name, stored in hf.stored_tensors(config).items():
        p = table[stored.ours]
        rows: slice | Tensor = stored.rows or slice(None)
        if arch == "llama" and hf_name.endswith((".q_proj.weight", ".k_proj.weight")):
            # llama.cpp's RoPE rotates the pairs (2 i, 2 i + 1) of a head; `gpt` rotates (i, i + D/2).
            rows = torch.arange(p.shape[0])[rows].view(-1, 2, config.head_size // 2).transpose(1, 2).flatten()
        shape = p.shape if stored.rows is None else stored.shape
        tensor = FileTensor(names.get_name(hf_name, (".weight", ".bias")), shape, rows)
        groups.setdefault(stored.ours, []).append(tensor)
    return groups


def open_weights(path: Path, config: GPTConfig) -> dict[str, Callable[[], Tensor | Quantized]]:
    """Returns loaders of a file's parameters by gpt's names. Unquantized parameters keep their dtype, and are views of
    the file if they are stored in one piece; Q4_0 matrices become int4; all others become float32. Raises `UserError`
    for tensors that are missing or unknown, or have another shape or an unsupported type."""
    file, table = header(path), file_tensors(config)
    expected = {tensor.name: tensor.shape for group in table.values() for tensor in group}
    for name, info in file.tensors.items():
        if name != ROPE_FREQS and name not in expected:
            raise UserError(f"{path} has a tensor {name:.80} that no {config.layout} model of gpt has", OTHER_MODEL)
        if name in expected and info.shape != expected[name]:
            raise UserError(f"{path}: {name} has the shape {info.shape}; {expected[name]} was expected", HINT)
        _row_bytes(info, name)
    tensors.check_all(path, expected, file.tensors)
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
