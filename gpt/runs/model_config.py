"""The shape of a checkpoint's model, from ``config.json`` or the header of a GGUF file, without its weights."""

from dataclasses import replace
from pathlib import Path

from gpt.config import GPTConfig
from gpt.files import read_json
from gpt.gguf_header import is_gguf
from gpt.runs import folder, hf, quantized


def load_config(path: Path) -> GPTConfig:
    """Returns a checkpoint's shape without opening weights. Raises `UserError` for another model type."""
    path = folder.home(path)
    if is_gguf(path):
        from gpt.runs import gguf_model  # It imports torch, which `gpt params` otherwise does without.

        return gguf_model.load_config(path)
    config = hf.from_hf_config(read_json(path / "config.json"), str(path / "config.json"))
    # GPT-2's config.json cannot describe a sinusoidal position table.
    if config.layout == "gpt2" and (path / folder.META).exists():
        config = replace(config, positions=read_json(path / folder.META).get("positions", ""))
    return config


def load_bits(path: Path) -> int | None:
    """Returns the bits of a checkpoint's quantized matrices, or None."""
    return None if is_gguf(path) else quantized.read_bits(read_json(path / "config.json"))
