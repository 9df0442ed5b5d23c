"""A model as a checkpoint folder for publishing, in the dtype that is asked for."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpt.config import GPTConfig
from gpt.device import DTYPES
from gpt.errors import UserError
from gpt.exporting.provenance import CARD
from gpt.exporting.source import SourceModel
from gpt.files import to_json, whole_folder, write_file
from gpt.model.params import Parameter, named_parameters
from gpt.model.quantize import Quantized, whole
from gpt.runs import checkpoint, quantized, tensors
from gpt.runs import folder as run_folder
from gpt.text.tokenizer_files import TOKENIZER_CONFIG

_CODES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
# What transformers has written into tokenizer_config.json of the machine where it was saved.
_OF_A_MACHINE = ("name_or_path", "tokenizer_file", "vocab_file", "merges_file", "special_tokens_map_file", "cache_dir")


def write(out: Path, source: SourceModel, dtype: str, meta: dict[str, Any], card: str) -> int:
    """Writes a folder, whole or not at all, and returns the number of its tensors. The card has no checksum: it is
    there to be edited. Raises OSError, and `UserError` for numbers that the dtype cannot hold."""
    found = _files(source, dtype, meta)
    with whole_folder(out) as beside:
        # One after the other, and not side by side: after a signal, no thread may still be writing.
        sums = {name: checkpoint.write_one(beside / name, data) for name, data in sorted(found.items())}
        run_folder.write_checksums(beside, sums)
        write_file(beside / CARD, card.encode())
    return sum(len(data) for data in found.values() if not isinstance(data, bytes))


def _files(source: SourceModel, dtype: str, meta: dict[str, Any]) -> checkpoint.Files:
    """The files of the checkpoint by name; weights are read, and converted to ``dtype``, as they are written."""
    of, table = checkpoint.TokenizerFiles(source.tokenizer, source.config), named_parameters(source.config)
    if dtype in quantized.BITS:
        store = quantized.to_stored(source.config, quantized.BITS[dtype], source.weights)
        files = checkpoint.contents(source.config, {}, of, meta, lambda *_: checkpoint.in_files(store), dtype)
    else:
        weights = {name: _converted(name, table[name], get, dtype) for name, get in source.weights.items()}
        files = checkpoint.contents(source.config, weights, of, meta, dtype=dtype)
    said = json.loads(of.files.get(TOKENIZER_CONFIG, b"{}"))
    kept = {key: value for key, value in said.items() if key not in _OF_A_MACHINE}
    return files if kept == said else {**files, TOKENIZER_CONFIG: to_json(kept)}


def _converted(name: str, parameter: Parameter, get: Callable[[], Tensor | Quantized], dtype: str) -> tensors.Deferred:
    def numbers() -> np.ndarray[Any, Any]:
        narrow = whole(get()).to(DTYPES[dtype])
        if not narrow.isfinite().all():
            raise UserError(f"{name} has values that {dtype} cannot represent", "use another --dtype")
        return (narrow.view(torch.uint16) if dtype == "bfloat16" else narrow).numpy()

    return tensors.Deferred(parameter.shape, numbers, _CODES[dtype])


def restored(config: GPTConfig, name: str, value: Tensor | Quantized, dtype: str) -> Tensor | Quantized:
    """A parameter as a folder in ``dtype`` holds it."""
    if dtype in quantized.BITS:
        return quantized.rounded(named_parameters(config)[name], value, quantized.BITS[dtype])
    return whole(value).to(DTYPES[dtype]).float()
