"""The model that is exported: its shape, tokenizer, weights, which are read one by one, and provenance."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpt.config import GPTConfig
from gpt.exporting.provenance import Provenance, read_provenance
from gpt.files import read_json
from gpt.runs import checkpoint, folder
from gpt.runs.checkpoint import Parameters
from gpt.text.tokenizer import Tokenizer

_KEPT = ("step", "tokens_seen", "val_loss")  # of gpt.json


@dataclass(frozen=True)
class SourceModel:
    """A checkpoint to export."""

    path: Path  # its folder
    config: GPTConfig
    tokenizer: Tokenizer
    weights: Parameters  # by our names, in the model's order; each is read when it is asked for
    provenance: Provenance = field(default_factory=Provenance)
    saved: Mapping[str, Any] = field(default_factory=dict)  # the step and losses in its gpt.json


def open_source(path: Path, words: str = "") -> SourceModel:
    """Opens the checkpoint at ``path``, which the user named by ``words``. Raises `UserError` as `checkpoint.load`
    does."""
    config, weights = checkpoint.open_weights(path)
    meta = read_json(path / folder.META) if (path / folder.META).is_file() else {}
    saved = {key: meta[key] for key in _KEPT if type(meta.get(key)) in (int, float)}
    tokenizer = checkpoint.load_tokenizer(path, config)
    return SourceModel(path, config, tokenizer, weights, read_provenance(path, words), saved)
