"""GGUF files as checkpoints: weights by gpt's names, read one parameter at a time."""

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
from gpt.model.params import Parameter, Shape, named_parameters
from gpt.model.quantize import EXACT, F32, Q4_0, Q4_1, Q4_K, Q6_K, Rows
from gpt.runs import hf, tensors
from gpt.runs.model_config import ARCHES, OTHER_MODEL, ROPE_FREQS
from gpt.system.distribution import install_extra
from gpt.system.errors import UserError, WorkError
from gpt.system.gguf_header import HINT, Header, TensorInfo, header, is_gguf, mapped

_OTHER_FILE = "use the model's Transformers folder instead"
CHUNK = 2**20  # elements restored at a time, for which the package gguf needs several times their memory
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


@dataclass(frozen=True)
class FileBlocks:
    """A quantized matrix in a file."""

    shape: tuple[int, int]
    infos: list[TensorInfo]
    group: list[FileTensor]  # The tensors' places in the matrix.

    def parts(self) -> list[Rows]:
        """Returns the file's rows, mapped, or in float32 if decoder.c does not know their type."""
        places, parts = torch.arange(self.shape[0]), []
        for info, tensor in zip(self.infos, self.group, strict=True):
            is_known = info.type in {*EXACT, Q6_K}
            rows = torch.from_numpy(_map_rows(info)) if is_known else _read_tensor(info).view(torch.uint8)
            parts.append(Rows(info.type if is_known else F32, rows, places[tensor.rows]))
        return parts

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Returns the matrix."""
        places, matrix = torch.arange(self.shape[0]), torch.empty(self.shape, dtype=dtype)
        for info, tensor in zip(self.infos, self.group, strict=True):
            rows, outputs = _map_rows(info), places[tensor.rows]
            step = max(1, CHUNK // self.shape[1])
            for start in range(0, len(rows), step):
                matrix[outputs[start : start + step]] = _dequantize(rows[start : start + step], info).to(dtype)
        return matrix

    def rows(self, ids: Tensor) -> Tensor:
        """Looks up rows of a matrix that is one tensor, (…) → (…, in), in float32."""
        return _dequantize(self._mapped[ids.flatten().numpy()], self.infos[0]).view(*ids.shape, -1)

    @functools.cached_property
    def _mapped(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        return _map_rows(self.infos[0])


def quantized_types(path: Path) -> dict[str, bool]:
    """Returns the names of the quantized types in a GGUF file, and whether `gpt.decoding` uses their levels as they
    are."""
    types = sorted({info.type for info in header(path).tensors.values()}) if is_gguf(path) else []
    names = {type_: import_gguf().GGMLQuantizationType(type_).name for type_ in types}
    return {name: type_ in EXACT for type_, name in names.items() if name not in _DTYPES}


def packed_bytes(path: Path) -> int:
    """Returns the bytes of a file's quantized weights when `gpt.decoding` uses them as they are."""
    sizes = dict.fromkeys((Q4_0, Q4_1, Q4_K), 5 / 8)  # Bytes per weight of 4 bits with a scale and a minimum.
    return int(sum(math.prod(info.shape) * sizes.get(info.type, 17 / 16) for info in header(path).tensors.values()))


def open_weights(path: Path, config: GPTConfig) -> dict[str, Callable[[], Tensor | FileBlocks]]:
    """Returns loaders of a file's parameters by gpt's names. Unquantized parameters keep their dtype, and are views of
    the file if they are stored in one piece. Raises `UserError` for tensors that are missing or unknown, or have
    another shape or an unsupported type."""
    file, table = header(path), file_tensors(config)
    expected = {tensor.name: tensor.shape for group in table.values() for tensor in group}
    for name, info in file.tensors.items():
        if name != ROPE_FREQS and name not in expected:
            raise UserError(f"{path} has a tensor {name:.80} that no {config.layout} model of gpt has", OTHER_MODEL)
        if name in expected and info.shape != expected[name]:
            raise UserError(f"{path}: {name} has the shape {info.shape}; {expected[name]} was expected", HINT)
        _row_bytes(info, name)
    tensors.check_all(path, expected, file.tensors)
    parameters = named_parameters(config)
    return {name: partial(_read_parameter, file, group, parameters[name]) for name, group in table.items()}


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


def _read_tensor(info: TensorInfo) -> Tensor:
    """Returns a tensor as it is stored, or dequantized to float32."""
    rows, dtype = _map_rows(info), _DTYPES.get(_type_name(info))
    return _dequantize(rows, info) if dtype is None else torch.from_numpy(rows).view(dtype)


def _dequantize(rows: np.ndarray[Any, np.dtype[np.uint8]], info: TensorInfo) -> Tensor:
    gguf = import_gguf()
    return torch.from_numpy(gguf.quants.dequantize(np.asarray(rows), gguf.GGMLQuantizationType(info.type)))


def _read_parameter(file: Header, group: list[FileTensor], parameter: Parameter) -> Tensor | FileBlocks:
    infos = [file.tensors[tensor.name] for tensor in group]
    is_quantized = all(_type_name(info) not in _DTYPES for info in infos)
    if is_quantized and parameter.kind in ("linear", "embedding", "unembedding"):
        rows, columns = parameter.shape
        return FileBlocks((rows, columns), infos, group)
    values = [_read_tensor(info).view(tensor.shape) for info, tensor in zip(infos, group, strict=True)]
    return _concatenate(values, group)


def _concatenate(values: list[Tensor], group: list[FileTensor]) -> Tensor:
    """Joins the rows of a parameter, in the parameter's order."""
    if len(group) == 1 and isinstance(group[0].rows, slice):
        return values[0]
    dtype = functools.reduce(torch.promote_types, (value.dtype for value in values))
    parameter = torch.empty((sum(map(len, values)), *values[0].shape[1:]), dtype=dtype)
    for value, tensor in zip(values, group, strict=True):
        parameter[tensor.rows] = value.to(dtype)
    return parameter
