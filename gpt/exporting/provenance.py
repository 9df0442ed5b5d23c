"""A model's provenance for the card: training texts, losses and the base model.

gpt reads the provenance from ``run.json`` and writes it into exported ``gpt.json`` files for later exports. Only the
last part of a path or address is stored, so the card reveals no folder, user or host.
"""

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gpt.config.settings import MAX_FLOAT32, Count, checked
from gpt.documents.sources import DEFAULT_CORPUS
from gpt.runs import folder, gguf_model, hub
from gpt.runs.record import RunRecord
from gpt.system.errors import UserError
from gpt.system.files import read_json

KEY = "provenance"  # Key in gpt.json.
CARD = "README.md"
HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?", re.ASCII)
_CHECKPOINT_SUFFIX = re.compile(r":(best|latest|step-\d+)$")


@dataclass(frozen=True)
class Base:
    """The model that another model was made from."""

    name: str  # OWNER/NAME on the Hub, or the last part of the path.
    on_hub: bool = False


@dataclass(frozen=True)
class Provenance:
    """The known facts about a model's origin."""

    texts: list[str] | None = None  # Names of the training texts; None if unknown.
    bytes: Count | None = None  # Of all texts.
    tokens: Count | None = None  # Training tokens.
    val_loss: float | None = None  # Nats per token over the whole held-out text.
    bits_per_byte: float | None = None
    base: Base | None = None
    bits: Count = 32  # The fewest bits per weight that the weights were ever rounded to.


def read_provenance(path: Path, words: str) -> Provenance:
    """Reads the provenance of the checkpoint at ``path``. ``words`` is how the user named the checkpoint, which is the
    base of a copy if its training is unknown. Raises `UserError` for damaged files."""
    run = path.absolute().parent
    if (path / folder.META).is_file() and isinstance(exported := read_json(path / folder.META).get(KEY), dict):
        provenance = checked(Provenance, exported, str(path / folder.META))
    elif folder.is_run(run):
        try:
            provenance = _from_run(RunRecord.read(run), path.name)
        except UserError as error:
            hint = "copy the checkpoint out of its run; its card will then state that its training is unknown"
            raise UserError(error.message, hint) from None
    else:
        provenance = Provenance(base=_name_base(words, path))
    type_bits = [int(re.findall(r"\d", name)[0]) for name in gguf_model.quantized_types(path)]  # 4 for Q4_K.
    return replace(provenance, bits=min([provenance.bits, *type_bits]))


def _from_run(record: RunRecord, checkpoint: str) -> Provenance:
    result = record.result or {}
    is_best = result.get("checkpoint") == checkpoint
    sizes = [source.get("bytes") for source in record.sources or []]
    known_sizes = [size for size in sizes if type(size) is int and size >= 0]
    return Provenance(
        None if record.sources is None else [*map(last_part, record.texts or [DEFAULT_CORPUS])],
        sum(known_sizes) if sizes and len(known_sizes) == len(sizes) else None,
        record.tokens.train if record.tokens else None,
        _to_float(result.get("val_loss")) if is_best else None,
        _to_float(result.get("bits_per_byte")) if is_best else None,
        _name_base(record.init.model, Path(record.init.path)) if record.init else None,
    )


def _to_float(value: Any) -> float | None:
    return float(value) if type(value) in (int, float) and abs(value) <= MAX_FLOAT32 else None


def _name_base(words: str, path: Path) -> Base:
    """Returns the model at ``path``, which the user named ``words``."""
    if hub.is_remote(words):
        return Base(words.removeprefix(hub.PREFIX).partition("@")[0], on_hub=True)
    return Base(_name_from_path(words) or _name_from_path(str(path.absolute())) or "an unnamed model")


def _name_from_path(words: str) -> str:
    """Returns the name of a run, checkpoint or folder: the last part of the path that is not a step."""
    parts = [part for part in re.split(r"[/\\]", _CHECKPOINT_SUFFIX.sub("", words)) if part.strip(".")]
    return next((part for part in reversed(parts) if not folder.is_step_name(part)), "")


def last_part(name: str) -> str:
    """Returns the last part of a path or address, without user, host and query."""
    path = name
    if "://" in name:
        path = re.split("[?#]", name.partition("://")[2])[0].partition("/")[2]
    parts = [part for part in re.split(r"[/\\]", path) if part.strip(".")]
    return parts[-1] if parts else "an unnamed text"
