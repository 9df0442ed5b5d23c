"""The model to export."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpt.config.model import GPTConfig
from gpt.exporting.provenance import Provenance, read_provenance
from gpt.runs import checkpoint, folder
from gpt.runs.checkpoint import Parameters
from gpt.runs.sampling_defaults import NO_DEFAULTS, SamplingDefaults, read_defaults
from gpt.system.files import read_json
from gpt.tokenizers.tokenizer import Tokenizer

_META_KEYS = ("step", "tokens_seen", "val_loss")  # Keys of gpt.json.


@dataclass(frozen=True)
class SourceModel:
    """A checkpoint to export."""

    path: Path
    config: GPTConfig
    tokenizer: Tokenizer
    weights: Parameters  # Functions that read weights, by `gpt` name and in the model's order.
    provenance: Provenance = field(default_factory=Provenance)
    saved: Mapping[str, Any] = field(default_factory=dict)  # Values of `_META_KEYS` in gpt.json.
    sampling: SamplingDefaults = NO_DEFAULTS


def open_source(path: Path, words: str = "", note: Callable[[str], None] = lambda text: None) -> SourceModel:
    """Opens the checkpoint at ``path``. ``words`` is how the user named the checkpoint. Calls ``note`` for sampling
    defaults that are dropped. Raises the errors of `checkpoint.load`."""
    config, weights = checkpoint.open_weights(path)
    meta = read_json(path / folder.META) if (path / folder.META).is_file() else {}
    saved = {key: meta[key] for key in _META_KEYS if type(meta.get(key)) in (int, float)}
    tokenizer = checkpoint.load_tokenizer(path, config)
    provenance, sampling = read_provenance(path, words), read_defaults(path, note)
    return SourceModel(path, config, tokenizer, weights, provenance, saved, sampling)
