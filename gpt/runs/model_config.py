"""The shape of a checkpoint's model, from ``config.json`` or the header of a GGUF file, without its weights."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from gpt.config.model import GPTConfig, RopeScaling
from gpt.runs import folder, hf
from gpt.system.errors import UserError
from gpt.system.files import read_json
from gpt.system.gguf_header import HINT, Header, header, is_gguf, read_value

# The llama.cpp architecture of each layout.
ARCHES = {"gpt2": "gpt2", "llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
ROPE_FREQS = "rope_freqs.weight"  # Divisors of RoPE frequencies, (head_size / 2).
OTHER_MODEL = f"run the file with llama.cpp (llama-cli -m FILE); {hf.SUPPORTED}"
_SHAPE = {  # Metadata keys, and the properties or keys of config.json with the same values.
    "block_count": "n_layer",
    "context_length": "block_size",
    "embedding_length": "n_embd",
    "feed_forward_length": "n_inner",
    "attention.head_count": "n_head",
    "attention.head_count_kv": "n_kv_head",
    "attention.key_length": "head_dim",
    "attention.layer_norm_epsilon": "layer_norm_epsilon",
    "attention.layer_norm_rms_epsilon": "layer_norm_epsilon",
    "rope.freq_base": "rope_theta",
    "attention.sliding_window": "sliding_window",
}
# Keys of other computations, with the values that change nothing.
_WITHOUT: dict[str, tuple[Any, ...]] = {
    "expert_count": (0,), "use_parallel_residual": (False,), "logit_scale": (0, 1), "residual_scale": (0, 1),
    "embedding_scale": (0, 1), "attention.scale": (0,), "attn_logit_softcapping": (0,),
    "final_logit_softcapping": (0,), "attention.causal": (True,), "rope.scaling.attn_factor": (1,),
}  # fmt: skip


def load_config(path: Path) -> GPTConfig:
    """Returns a checkpoint's shape without opening weights. Raises `UserError` for a model that this decoder cannot
    reproduce."""
    path = folder.home(path)
    if is_gguf(path):
        return _from_gguf(path)
    return hf.from_hf_config(read_json(path / "config.json"), str(path / "config.json"))


def _from_gguf(path: Path) -> GPTConfig:
    file = header(path)
    arch = read_value(file.metadata, "general.architecture", "", path)
    if arch not in ARCHES.values():
        raise UserError(f"{path} has a model of type {arch!r:.80}", OTHER_MODEL)
    values = _read_numbers(file, f"{arch}.")
    for key, allowed in _WITHOUT.items():
        if values.get(key, allowed[0]) not in allowed:
            raise UserError(f"{path}: {key} is {values[key]!r:.80}, which this decoder does not support", OTHER_MODEL)
    embedding, layers = file.tensors.get("token_embd.weight"), values.get("block_count")
    if embedding is None or len(embedding.shape) != 2 or type(layers) is not int or layers > len(file.tensors):
        raise UserError(f"{path} is damaged: it does not have a model's tensors", HINT)
    has_window = arch == "llama" and "attention.sliding_window" in values
    names = hf.FAMILIES[arch].names
    config = hf.from_hf_config(
        {
            "model_type": "mistral" if has_window else arch,
            "vocab_size": embedding.shape[0],
            "tie_word_embeddings": "output.weight" not in file.tensors,
            **{names.get(name, name): values[key] for key, name in _SHAPE.items() if key in values},
        },
        str(path),
    )
    if arch != "gpt2" and values.get("rope.dimension_count", config.head_size) != config.head_size:
        raise UserError(f"{path} rotates only part of each head, which this decoder does not support", OTHER_MODEL)
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
            if key in _SHAPE or key in _WITHOUT or key.startswith("rope."):
                raise UserError(
                    f"{file.path}: {key} differs by layer, which this decoder does not support", OTHER_MODEL
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
        raise UserError(f"{file.path}: its RoPE scaling {kind!r:.40} by {factor!r:.40} is not supported", OTHER_MODEL)
    if is_linear:
        return RopeScaling(factor, 1.0, 2.0, 1)  # All frequencies are below the limits, so all are divided.
    if ROPE_FREQS not in file.tensors:
        return None
    from gpt.model.positions import rotary_rates  # It imports torch, which `gpt params` otherwise does without.

    info, size = file.tensors[ROPE_FREQS], config.head_size // 2
    divisors = np.fromfile(info.file, "<f4", size, offset=info.offset).astype(np.float64)
    if info.type or info.shape != (size,) or len(divisors) != size:
        raise UserError(f"{file.path}: {ROPE_FREQS} has the shape {info.shape}; {size} float32 were expected", HINT)
    factor, rates = float(str(np.float32(divisors.max()))), rotary_rates(config)
    for original in (values.get("rope.scaling.original_context_length"), 8192, config.block_size):
        if type(original) is int and 1 < factor <= 1e4 and 1 <= original <= 2**24:
            scaling = RopeScaling(factor, 1.0, 4.0, original)
            if np.allclose(rates / rotary_rates(replace(config, rope_scaling=scaling)), divisors, rtol=1e-5):
                return scaling
    if (divisors == 1).all():
        return None
    raise UserError(f"{file.path}: its {ROPE_FREQS} is not Llama 3.1's scaling, the only one supported", OTHER_MODEL)
