"""A GGUF file as a checkpoint: its shape and weights by our names, read tensor by tensor with the package gguf."""

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
from gpt.gguf_header import HINT, Header, TensorInfo, header, mapped
from gpt.model.params import Shape, named_parameters
from gpt.model.positions import rotary_rates
from gpt.model.quantize import GROUP, Quantized
from gpt.runs import hf

ARCHES = {"gpt2": "gpt2", "llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}  # by layout
ROPE_FREQS = "rope_freqs.weight"  # divisors of the RoPE frequencies, (head_size / 2)
_OTHER_MODEL = "use the model's Transformers folder instead"
_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_SHAPE = {  # keys of config.json
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
# Keys of models that compute something else, and the values that change nothing.
_WITHOUT: dict[str, tuple[Any, ...]] = {
    "expert_count": (0,), "use_parallel_residual": (False,), "logit_scale": (0, 1), "residual_scale": (0, 1),
    "embedding_scale": (0, 1), "attention.scale": (0,), "attn_logit_softcapping": (0,),
    "final_logit_softcapping": (0,), "attention.causal": (True,),
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
    rows: slice | Tensor  # of the parameter; indices if the file orders them differently


def file_tensors(config: GPTConfig) -> dict[str, list[FileTensor]]:
    """The tensors of a file by the parameter that they belong to, in the model's order."""
    gguf = import_gguf()
    arch = ARCHES[config.layout]
    names = gguf.get_tensor_name_map({name: each for each, name in gguf.MODEL_ARCH_NAMES.items()}[arch], config.n_layer)
    table, found = named_parameters(config), dict[str, list[FileTensor]]()
    for theirs, stored in hf.stored_tensors(config).items():
        p = table[stored.ours]
        rows: slice | Tensor = stored.rows or slice(None)
        if arch == "llama" and theirs.endswith((".q_proj.weight", ".k_proj.weight")):
            # llama.cpp rotates the pairs (2 i, 2 i + 1) of a head, and this decoder (i, i + D/2).
            rows = torch.arange(p.shape[0])[rows].view(-1, 2, config.head_size // 2).transpose(1, 2).flatten()
        shape = p.shape if stored.rows is None else stored.shape
        found.setdefault(stored.ours, []).append(FileTensor(names.get_name(theirs, (".weight", ".bias")), shape, rows))
    return found


def load_config(path: Path) -> GPTConfig:
    """The shape of the model in a file. Raises `UserError` for an architecture that this decoder does not compute."""
    file = header(path)
    arch = file.metadata.get("general.architecture")
    if arch not in ARCHES.values():
        raise UserError(
            f"{path} has a model of type {arch!r:.80}", f"supported: {', '.join(sorted({*ARCHES.values()}))}"
        )
    prefix = f"{arch}."
    values = {key.removeprefix(prefix): value for key, value in file.metadata.items() if key.startswith(prefix)}
    for key, allowed in _WITHOUT.items():
        if values.get(key, allowed[0]) not in allowed:
            raise UserError(f"{path}: {key} is {values[key]!r:.80}, which this decoder does not support", _OTHER_MODEL)
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2 or values.get("block_count", 0) > len(file.tensors):
        raise UserError(f"{path} is damaged: its tensors are not those of a model", HINT)
    windowed = arch == "llama" and "attention.sliding_window" in values
    config: dict[str, Any] = {
        "model_type": "mistral" if windowed else arch,
        "vocab_size": embedding.shape[0],
        "tie_word_embeddings": "output.weight" not in file.tensors,
    }
    for key, name in (_GPT2_SHAPE if arch == "gpt2" else _SHAPE).items():
        if key in values:
            config[name] = _number(values[key])
    if arch in ("qwen2", "qwen3"):
        config["use_sliding_window"] = False
    found = hf.from_hf_config(config, str(path))
    if values.get("rope.dimension_count", found.head_size) != found.head_size and arch != "gpt2":
        raise UserError(f"{path} rotates only part of each head, which this decoder does not support", _OTHER_MODEL)
    return replace(found, rope_scaling=_rope_scaling(file, values, found))


def _number(value: Any) -> Any:
    """A number as ``config.json`` would have it: a float32 in its shortest form, and one value for a list of equals."""
    if isinstance(value, np.ndarray) and value.size and (value == value[0]).all():
        value = value[0].item()
    return float(str(np.float32(value))) if isinstance(value, float) else value


def _rope_scaling(file: Header, values: Mapping[str, Any], config: GPTConfig) -> RopeScaling | None:
    """The scaling of RoPE: linear as two keys have it, or Llama 3.1's, of which the file has the divisors."""
    kind, factor = values.get("rope.scaling.type", "none"), _number(values.get("rope.scaling.factor", 1.0))
    if kind not in ("none", "linear", "llama3") or (kind == "none" and values.get("rope.scale_linear", 1) != 1):
        raise UserError(f"{file.path}: its RoPE scaling {kind!r:.40} is not supported", _OTHER_MODEL)
    if kind == "linear" and factor != 1:
        return RopeScaling(factor, 1.0, 2.0, 1)  # every frequency counts as low: all are divided by the factor
    if ROPE_FREQS not in file.tensors:
        return None
    info = file.tensors[ROPE_FREQS]
    divisors = whole_tensor(info, (config.head_size // 2,)).double()
    plain, most = rotary_rates(config), divisors.max().item()
    for original in (values.get("rope.scaling.original_context_length"), 8192, config.block_size):
        if type(original) is int and 1 < most <= 1e4 and 1 <= original <= 2**24:
            scaling = RopeScaling(_number(most), 1.0, 4.0, original)
            if torch.allclose(plain / rotary_rates(replace(config, rope_scaling=scaling)), divisors, rtol=1e-5):
                return scaling
    if torch.equal(divisors, torch.ones_like(divisors)):
        return None
    raise UserError(f"{file.path}: its {ROPE_FREQS} is not Llama 3.1's scaling, the only one supported", _OTHER_MODEL)


def open_weights(path: Path, config: GPTConfig) -> dict[str, Callable[[], Tensor | Quantized]]:
    """The parameters of a file by our names, each read when it is asked for: a view of the file if it is stored as it
    is needed, int4 levels and scales for Q4_0 matrices, float32 otherwise. Raises `UserError` for tensors that are
    missing, unknown, of another shape, or of a type that cannot be read."""
    file, table = header(path), file_tensors(config)
    expected = {part.name: part.shape for together in table.values() for part in together}
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
    return {name: partial(_parameter, file, together, kinds[name]) for name, together in table.items()}


def _row_bytes(info: TensorInfo, name: str) -> int:
    """Bytes of a row. Raises `UserError` for a type that cannot be read, and for a tensor that ends after its file."""
    gguf = import_gguf()
    try:
        block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(info.type)]
    except (ValueError, KeyError):
        raise UserError(
            f"{info.file}: {name:.80} has the unknown type {info.type}", "update the package gguf"
        ) from None
    kind = _kind(info)
    if kind not in _PLAIN and gguf.GGMLQuantizationType(info.type) not in gguf.quants._type_traits:
        raise UserError(f"{info.file}: {name:.80} has the type {kind}, which cannot be read", _OTHER_MODEL)
    width, rest = divmod(info.shape[-1], block)
    end = info.offset + math.prod(info.shape[:-1]) * width * size
    if rest or end > info.file.stat().st_size:
        raise UserError(f"{info.file} is damaged: {name:.80} does not fit into it", HINT)
    row: int = width * size
    return row


def _kind(info: TensorInfo) -> str:
    name: str = import_gguf().GGMLQuantizationType(info.type).name
    return name


def _blocks(info: TensorInfo) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return mapped(info, math.prod(info.shape[:-1]), _row_bytes(info, "a tensor"))


def whole_tensor(info: TensorInfo, shape: Shape) -> Tensor:
    """A tensor as it is stored if it is not quantized, or in float32."""
    kind, blocks = _kind(info), _blocks(info)
    if kind in _PLAIN:
        return torch.from_numpy(blocks).view(_PLAIN[kind]).view(shape)
    gguf = import_gguf()
    values = gguf.quants.dequantize(np.asarray(blocks), gguf.GGMLQuantizationType(info.type))
    return torch.from_numpy(values).view(shape)


def _int4(info: TensorInfo) -> Quantized:
    """A Q4_0 matrix without rounding it again: each block of a row is a float16 scale and 16 bytes of levels."""
    blocks = torch.from_numpy(_blocks(info)).view(info.shape[0], -1, 2 + GROUP // 2)
    scales = blocks[:, :, :2].contiguous().view(torch.float16).squeeze(-1)
    return Quantized(blocks[:, :, 2:].flatten(1), scales)


def _parameter(file: Header, together: list[FileTensor], kind: str) -> Tensor | Quantized:
    infos = [file.tensors[part.name] for part in together]
    if kind == "linear" and all(_kind(info) == "Q4_0" for info in infos):
        read = [_int4(info) for info in infos]
        return Quantized(
            _joined([each.levels for each in read], together), _joined([each.scales for each in read], together)
        )
    return _joined([whole_tensor(info, part.shape) for info, part in zip(infos, together, strict=True)], together)


def _joined(values: list[Tensor], together: list[FileTensor]) -> Tensor:
    """Rows of a parameter in its own order."""
    if len(together) == 1 and isinstance(together[0].rows, slice):
        return values[0]
    rows = sum(map(len, values))
    dtype = functools.reduce(torch.promote_types, (value.dtype for value in values))
    joined = torch.empty((rows, *values[0].shape[1:]), dtype=dtype)
    for value, part in zip(values, together, strict=True):
        joined[part.rows] = value.to(dtype)
    return joined
