"""A model as a checkpoint folder for publishing, in the dtype that is asked for."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpt.config import GPTConfig
from gpt.device import DTYPES
from gpt.errors import UserError
from gpt.export.source import SourceModel, whole
from gpt.model.params import Parameter, named_parameters
from gpt.model.quantize import Quantized
from gpt.runs import checkpoint, quantized
from gpt.runs.tensors import Deferred

_CODES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


def files(source: SourceModel, dtype: str, meta: dict[str, Any]) -> checkpoint.Files:
    """The files of the checkpoint by name, its weights in ``dtype``: they are read and converted as they are written.
    Raises `UserError` then for numbers that the dtype cannot hold."""
    of = checkpoint.TokenizerFiles(source.tokenizer, source.config)
    if dtype in quantized.BITS:
        store = quantized.to_stored(source.config, quantized.BITS[dtype], source.weights)
        return checkpoint.contents(source.config, {}, of, meta, lambda *_: checkpoint.in_files(store), dtype)
    table = named_parameters(source.config)
    weights = {name: _converted(name, table[name], get, dtype) for name, get in source.weights.items()}
    return checkpoint.contents(source.config, weights, of, meta, dtype=dtype)


def _converted(name: str, parameter: Parameter, get: Callable[[], Tensor | Quantized], dtype: str) -> Deferred:
    def numbers() -> np.ndarray[Any, Any]:
        narrow = whole(get()).to(DTYPES[dtype])
        if not narrow.isfinite().all():
            raise UserError(f"{name} has numbers that {dtype} cannot hold", "take another --dtype")
        return (narrow.view(torch.uint16) if dtype == "bfloat16" else narrow).numpy()

    return Deferred(parameter.shape, numbers, _CODES[dtype])


def restored(config: GPTConfig, name: str, value: Tensor | Quantized, dtype: str) -> Tensor | Quantized:
    """A parameter as a folder in ``dtype`` holds it."""
    if dtype in quantized.BITS:
        return quantized.rounded(named_parameters(config)[name], value, quantized.BITS[dtype])
    return whole(value).to(DTYPES[dtype]).float()
