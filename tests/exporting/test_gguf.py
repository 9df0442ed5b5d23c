"""GGUF files, read with the package gguf and compared with the model; unsupported models and values out of range."""

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from conftest import Gpt, one_line_of_what_and_what_next
from models import loud, source_of
from torch import Tensor

from gpt import api
from gpt.config.export import FileType
from gpt.config.model import ARCHITECTURES, GPTConfig, RopeScaling
from gpt.exporting import gguf
from gpt.exporting.source import SourceModel, open_source
from gpt.model.decoder import GPT
from gpt.system.errors import UserError
from gpt.tokenizers.tokenizer import bytes_tokenizer

gguf_package = pytest.importorskip("gguf")

LLAMA = ARCHITECTURES["modern"] | {"qk_norm": False}
SCALING = RopeScaling(8.0, 1.0, 4.0, 16)
# Each tuple is a layout, a llama.cpp architecture and properties. Rows of 64 or 96 elements divide into groups of 32;
# rows of 40 do not.
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt2": ("gpt2", "gpt2", ARCHITECTURES["gpt2"]),
    "gpt2, untied": ("gpt2", "gpt2", ARCHITECTURES["gpt2"] | {"tied": False}),
    "llama": ("llama", "llama", LLAMA | {"n_kv_head": 2, "head_dim": 24, "n_inner": 96, "rope_scaling": SCALING}),
    "mistral": ("mistral", "llama", LLAMA | {"window": 48, "window_layers": (0, 1), "n_kv_head": 1, "tied": False}),
    "qwen2": ("qwen2", "qwen2", LLAMA | {"biases": "qkv", "n_kv_head": 2, "n_inner": 40}),
    "qwen3": ("qwen3", "qwen3", ARCHITECTURES["modern"] | {"head_dim": 8, "rope_base": 1e6}),
}  # fmt: skip
# Our tensor names by GGUF name. Parts of a fused tensor have an index.
NAMES = {
    "token_embd": "wte", "position_embd": "wpe", "output_norm": "ln_f", "output": "lm_head",
    "attn_norm": "ln_1", "attn_qkv": "attn.c_attn", "attn_q": ("attn.c_attn", 0), "attn_k": ("attn.c_attn", 1),
    "attn_v": ("attn.c_attn", 2), "attn_q_norm": "attn.q_norm", "attn_k_norm": "attn.k_norm",
    "attn_output": "attn.c_proj", "ffn_norm": "ln_2", "ffn_gate": ("mlp.c_fc", 0), "ffn_up": ("mlp.c_fc", 1),
    "ffn_down": "mlp.c_proj",
}  # fmt: skip


def model_of(family: str, **properties: Any) -> GPT:
    """Returns a model with 320 ids. The tokenizer has only 257."""
    return loud(GPTConfig(320, 48, 2, 4, 64, **{**FAMILIES[family][2], **properties}), spread=0.1)


def read_tensors(path: Path, config: GPTConfig) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Returns a file's tensors in float32, by our names, and the types of its tensors, by GGUF name."""
    parts: dict[str, dict[int, Tensor]] = {}
    file = gguf_package.GGUFReader(path)
    for tensor in file.tensors:
        stem, kind = tensor.name.rsplit(".", 1)
        prefix, _, suffix = stem.rpartition(".")
        ours = NAMES.get(suffix if prefix else stem, stem)
        name, part = ours if isinstance(ours, tuple) else (ours, 0)
        if config.norm == "layernorm" and suffix == "ffn_up":
            part = 0
        value = torch.from_numpy(gguf_package.dequantize(tensor.data, tensor.tensor_type).copy())
        if file.fields["general.architecture"].contents() == "llama" and suffix in ("attn_q", "attn_k"):
            heads = value.view(-1, config.head_size // 2, 2, config.n_embd)
            value = torch.cat([heads[:, :, 0], heads[:, :, 1]], dim=1).flatten(0, 1)
        parts.setdefault(f"{prefix.replace('blk', 'h')}.{name}.{kind}".lstrip("."), {})[part] = value
    tensors = {
        name: torch.cat([parts_of_tensor[part] for part in sorted(parts_of_tensor)])
        for name, parts_of_tensor in parts.items()
    }
    return tensors, {tensor.name: tensor.tensor_type.name for tensor in file.tensors}


def metadata(path: Path) -> dict[str, Any]:
    fields = gguf_package.GGUFReader(path).fields.items()
    return {name: field.contents() for name, field in fields if not name.startswith(("tokenizer", "GGUF."))}


@pytest.mark.parametrize("kind", get_args(FileType))
@pytest.mark.parametrize("family", FAMILIES)
def test_file_contains_the_model(tmp_path: Path, family: str, kind: str) -> None:
    model = model_of(family)
    layout, arch, _ = FAMILIES[family]
    config, source, path = model.config, source_of(model), tmp_path / "model.gguf"
    assert config.layout == layout
    gguf.check(source)
    count = gguf.write(path, source, kind, "A name")

    fields = metadata(path)
    tensors, types = read_tensors(path, config)
    assert fields["general.architecture"] == arch
    assert count == len(types)
    scaling = tensors.pop("rope_freqs.weight", None)
    assert (scaling is not None) == (config.rope_scaling is not None)
    assert tensors.keys() == source.weights.keys()
    for name, get in source.weights.items():
        ours, theirs = get(), tensors[name]
        assert torch.equal(gguf.restore_parameter(config, name, ours, kind), theirs), name
        if kind == "f32" or ours.dim() == 1:
            assert torch.equal(ours, theirs), name
        elif kind == "f16" or name == "wpe.weight" or ours.size(1) % 32:
            assert torch.equal(ours if name == "wpe.weight" else ours.half().float(), theirs), name
        else:
            # The tolerance is relative to a group's largest element. With 8 bits, the error is at most half a step of
            # 1/127, plus the rounding of the float16 scale. With 4 bits, it is at most about a step of 1/8, since one
            # end is clipped.
            tolerance = 1 / 6 if kind == "q4_0" and name.startswith("h.") else 1 / 254 + 2**-11
            ours, theirs = (each.view(len(each), -1, 32) for each in (ours, theirs))
            assert ((ours - theirs).abs() <= tolerance * ours.abs().amax(-1, keepdim=True)).all(), name
    for name, kind_in_file in types.items():
        assert (kind_in_file == "F32") == (kind == "f32" or "norm" in name or not name.endswith("weight") or name in (
            "position_embd.weight", "rope_freqs.weight"
        )), name  # fmt: skip
    assert types["token_embd.weight"] == {"f32": "F32", "f16": "F16"}.get(kind, "Q8_0")
    assert types["blk.1.attn_output.weight"] == kind.upper()
    assert types["blk.1.ffn_down.weight"] == ("F16" if config.n_inner == 40 and kind[0] == "q" else kind.upper())


def test_metadata_describes_the_model(tmp_path: Path) -> None:
    gguf.write(
        tmp_path / "it", source_of(model_of("llama", rope_base=5e5, layer_norm_epsilon=1e-3)), "q4_0", "It", "mit"
    )
    fields = metadata(tmp_path / "it")
    assert fields.pop("llama.attention.layer_norm_rms_epsilon") == pytest.approx(1e-3)
    shape = {
        "vocab_size": 320, "context_length": 48, "embedding_length": 64, "block_count": 2, "feed_forward_length": 96,
        "attention.head_count": 4, "attention.head_count_kv": 2, "attention.key_length": 24,
        "attention.value_length": 24, "rope.dimension_count": 24, "rope.freq_base": 5e5,
    }  # fmt: skip
    general = {
        "architecture": "llama", "type": "model", "name": "It", "license": "mit", "file_type": 2,
        "quantization_version": 2,
    }  # fmt: skip
    expected = {f"general.{key}": value for key, value in general.items()}
    assert fields == expected | {f"llama.{key}": value for key, value in shape.items()}
    gguf.write(tmp_path / "gpt2", source_of(model_of("gpt2")), "f16", "It")
    fields = metadata(tmp_path / "gpt2")
    assert (fields["general.file_type"], fields["gpt2.attention.layer_norm_epsilon"]) == (1, pytest.approx(1e-5))
    assert not any("rope" in key or "rms" in key or "length" in key for key in fields if "attention" in key)


def test_bfloat16_weights_can_be_exported(tmp_path: Path) -> None:
    """Transformers folders can have bfloat16 weights, which fit into f32."""
    source = source_of(model_of("llama"))
    bfloat16_weights = {name: get().bfloat16() for name, get in source.weights.items()}
    source = replace(source, weights={name: partial(bfloat16_weights.__getitem__, name) for name in bfloat16_weights})
    for kind in get_args(FileType):
        gguf.write(tmp_path / kind, source, kind, "it")
        tensors, _ = read_tensors(tmp_path / kind, source.config)
        for name, value in bfloat16_weights.items():
            assert torch.equal(gguf.restore_parameter(source.config, name, value, kind), tensors[name]), name
            assert kind != "f32" or torch.equal(value.float(), tensors[name]), name


def test_equal_models_give_equal_files(tmp_path: Path) -> None:
    for name in ("one", "two"):
        gguf.write(tmp_path / name, source_of(model_of("llama")), "q8_0", "Name")
    data = (tmp_path / "one").read_bytes()
    assert data == (tmp_path / "two").read_bytes()
    assert str(tmp_path).encode() not in data


@pytest.mark.parametrize(
    ("family", "properties", "reason"),
    [
        ("gpt2", {"window": 8}, "ignores the sliding window"),
        ("gpt2", {"positions": "rotary"}, "no architecture with layernorm, gelu, rotary"),
        ("mistral", {"window": 47, "window_layers": (0, 1)}, "ignores the sliding window"),
        ("qwen3", {"window": 8, "window_layers": (0,)}, "ignores the sliding window of 8 tokens"),
        ("qwen2", {"rope_scaling": SCALING}, "no rope_scaling for qwen2"),
        ("gpt2", {"n_kv_head": 2}, "4 heads and 2"),
        ("qwen2", {"head_dim": 8}, "n_embd / n_head wide"),
        ("llama", {"n_layer": 513}, "512 layers"),
        ("gpt2", {"n_embd": 4}, "width of 1"),
        ("llama", {"block_size": 1}, "context of 1"),
    ],
)
def test_unsupported_models_are_refused(family: str, properties: dict[str, Any], reason: str) -> None:
    shape = {"vocab_size": 257, "block_size": 48, "n_layer": 2, "n_head": 4, "n_embd": 64}
    config = GPTConfig(**{**shape, **FAMILIES[family][2], **properties})
    with pytest.raises(UserError, match=reason) as error:
        gguf.check(SourceModel(Path(), config, bytes_tokenizer(), {}))
    assert "folder" in error.value.hint


def test_missing_gguf_package_is_an_error(run_folder: Path, monkeypatch: pytest.MonkeyPatch, gpt: Gpt) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    one_line_of_what_and_what_next(gpt("export", "-m", run_folder, "-o", "new/m.gguf"), "needs the package gguf", 1)
    assert not Path("new").exists()


def model_with_value(name: str, value: float) -> SourceModel:
    model = model_of("gpt2")
    model.state_dict()[name].view(-1)[3] = value
    return source_of(model)


@pytest.mark.parametrize(
    ("kind", "value"),
    [("f32", np.inf), ("f32", np.nan), ("f16", 1e5), ("q8_0", 1e7), ("q4_0", 1e6), ("q4_0", np.nan)],
)
def test_values_out_of_range_are_an_error(tmp_path: Path, kind: str, value: float) -> None:
    name = "h.0.attn.c_attn.weight"
    with pytest.raises(UserError, match=f"^{name}") as error:
        gguf.write(tmp_path / "it", model_with_value(name, value), kind, "it")
    assert "--dtype" in error.value.hint
    with pytest.raises(UserError, match=f"^{name}"):
        gguf.restore_parameter(model_of("gpt2").config, name, model_with_value(name, value).weights[name](), kind)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_exporting_a_quantized_file_keeps_its_weights(run_folder: Path, tmp_path: Path, dtype: str) -> None:
    first = api.export(run_folder, tmp_path / "first.gguf", dtype=dtype).out
    again = api.export(first, tmp_path / "a" / "b" / "it.gguf", dtype=dtype)
    assert again.out.stat().st_size == again.bytes
    config = open_source(first).config
    (expected, types), (tensors, types_again) = read_tensors(first, config), read_tensors(again.out, config)
    assert types == types_again
    assert {"int8": "Q8_0", "int4": "Q4_0"}[dtype] in types.values()
    for name, value in expected.items():
        assert torch.equal(tensors[name], value), name
