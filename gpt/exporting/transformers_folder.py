"""Exporting a model as a checkpoint folder for publishing."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpt.config.device import DTYPES
from gpt.config.model import GPTConfig
from gpt.exporting.provenance import CARD
from gpt.exporting.source import SourceModel
from gpt.model.params import Parameter, named_parameters
from gpt.model.quantize import Blocks, to_tensor
from gpt.runs import checkpoint, tensors
from gpt.runs import folder as run_folder
from gpt.system.errors import UserError
from gpt.system.files import atomic_folder, to_json, write_file
from gpt.tokenizers.saving import TOKENIZER_CONFIG

# Keys of tokenizer_config.json whose values are paths or names on the machine that saved the file.
_MACHINE_KEYS = ("name_or_path", "tokenizer_file", "vocab_file", "merges_file", "special_tokens_map_file", "cache_dir")


def write(out: Path, source: SourceModel, dtype: str, meta: dict[str, Any], card: str) -> int:
    """Writes a folder atomically and returns its number of tensors. The card has no checksum, so users can edit it.

    Raises OSError, and `UserError` for values that ``dtype`` cannot represent.
    """
    files = _checkpoint_files(source, dtype, meta)
    with atomic_folder(out) as temporary:
        # Files are written one by one, because threads could still write after a signal.
        checksums = {name: checkpoint.write_one(temporary / name, data) for name, data in sorted(files.items())}
        run_folder.write_checksums(temporary, checksums)
        write_file(temporary / CARD, card.encode())
    return sum(len(data) for data in files.values() if not isinstance(data, bytes))


def _checkpoint_files(source: SourceModel, dtype: str, meta: dict[str, Any]) -> checkpoint.Files:
    """Returns the checkpoint's files by name. Weights are read and converted to ``dtype`` while writing."""
    extras = checkpoint.TokenizerFiles(source.tokenizer, source.config, source.sampling)
    table = named_parameters(source.config)
    weights = {name: _convert(name, table[name], get, dtype) for name, get in source.weights.items()}
    files = checkpoint.contents(source.config, weights, extras, meta, dtype=dtype)
    tokenizer_config = json.loads(extras.files.get(TOKENIZER_CONFIG, b"{}"))
    portable_config = {key: value for key, value in tokenizer_config.items() if key not in _MACHINE_KEYS}
    return files if portable_config == tokenizer_config else {**files, TOKENIZER_CONFIG: to_json(portable_config)}


def _convert(name: str, parameter: Parameter, get: Callable[[], Tensor | Blocks], dtype: str) -> tensors.Deferred:
    return tensors.Deferred(parameter.shape, lambda: round_values(name, get(), dtype), tensors.CODES[dtype])


def round_values(name: str, value: Tensor | Blocks, dtype: str) -> np.ndarray[Any, Any]:
    """Rounds a parameter to ``dtype``; bfloat16 is returned as uint16. Raises `UserError` for values out of range."""
    rounded = to_tensor(value).to(DTYPES[dtype])
    if not rounded.isfinite().all():
        raise UserError(f"{name} has values that {dtype} cannot represent", "use another --dtype")
    return (rounded.view(torch.uint16) if dtype == "bfloat16" else rounded).numpy()


def restore_parameter(config: GPTConfig, name: str, value: Tensor | Blocks, dtype: str) -> Tensor:
    """Returns a parameter after a round trip through a folder in ``dtype``."""
    return to_tensor(value).to(DTYPES[dtype]).float()
