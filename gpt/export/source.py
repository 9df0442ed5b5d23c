"""The model that is exported: its shape, tokenizer, and weights, which are read one by one."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from gpt.config import GPTConfig
from gpt.model.quantize import Quantized
from gpt.runs import adapter, checkpoint
from gpt.runs.checkpoint import Parameters
from gpt.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class SourceModel:
    """A checkpoint to export."""

    path: Path  # its folder
    config: GPTConfig
    tokenizer: Tokenizer
    weights: Parameters  # by our names, in the model's order; each is read when it is asked for


def open_source(path: Path) -> SourceModel:
    """Opens the checkpoint at ``path`` after its checksums have been verified; adapters are merged into their base.
    Raises `UserError` as `checkpoint.load` does."""
    config, tokenizer = checkpoint.peek(path)
    if not adapter.is_adapter(path):
        return SourceModel(path, config, tokenizer, checkpoint.stored_parameters(path, config))
    model = checkpoint.load(path, torch.device("cpu")).model
    merged: Mapping[str, Tensor] = {**model.state_dict(), **checkpoint.fixed(model)}
    weights: Parameters = {name: partial(merged.__getitem__, name) for name in merged}
    return SourceModel(path, config, tokenizer, weights)


def whole(value: Tensor | Quantized) -> Tensor:
    """A parameter in float32."""
    return value.dequantize() if isinstance(value, Quantized) else value.float()
