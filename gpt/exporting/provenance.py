"""A model's provenance for the card: training texts, losses and ancestor models.

gpt reads the provenance from ``run.json`` and writes it into exported ``gpt.json`` files for later exports. Only the
last part of a path or address is stored, so the card reveals no folder, user or host.
"""

import contextlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gpt.config.settings import MAX_FLOAT32, Count, checked
from gpt.documents import catalogue
from gpt.runs import folder, gguf_model, hub
from gpt.runs.record import RunRecord
from gpt.system.errors import UserError
from gpt.system.files import read_json, read_regular
from gpt.system.gguf_header import header, is_gguf

KEY = "provenance"  # Key in gpt.json.
CARD = "README.md"
_MAX_CARD_BYTES = 2**20
_LICENSE = re.compile(r"[\w.+ -]{1,80}", re.ASCII)
_GGUF_LICENSE = {"license": "license", "license_name": "license.name"}
_MAX_TEXTS = 20
_MAX_ANCESTORS = 40
_HUB_DATASET = re.compile(r"(?:hf://datasets|https://huggingface\.co/datasets)/([\w.-]+/[\w.-]+?)(?:[@/]|$)", re.ASCII)
HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?", re.ASCII)
_CHECKPOINT_SUFFIX = re.compile(r":(best|latest|step-\d+)$")
_FRONT_MATTER = re.compile(r"---\n(.*?)\n---", re.DOTALL)
_YAML_ENTRY = re.compile(r"""^(\w+):[ \t]*(["']?)([\w./+-]+)\2[ \t]*(?:#.*)?$""", re.ASCII | re.MULTILINE)


@dataclass(frozen=True)
class Text:
    """One or several text files. ``sha256`` is the checksum of the UTF-8 text if there is only one file."""

    name: str
    files: Count = 1
    bytes: Count | None = None
    sha256: str | None = None
    dataset: str | None = None  # Name on the Hub.


@dataclass(frozen=True)
class Ancestor:
    """A model that another model was made from."""

    name: str  # OWNER/NAME on the Hub, or the last part of the path.
    on_hub: bool = False
    license: str | None = None  # License in the model's card.


@dataclass(frozen=True)
class Provenance:
    """The known facts about a model's origin."""

    texts: list[Text] | None = None  # None if unknown.
    tokens: Count | None = None  # Training tokens.
    val_loss: float | None = None  # Nats per token over the whole held-out text.
    bits_per_byte: float | None = None
    ancestors: list[Ancestor] = field(default_factory=list)  # Nearest first.
    bits: Count = 32  # The fewest bits per weight that the weights were ever rounded to.


def read_provenance(path: Path, words: str) -> Provenance:
    """Reads the provenance of the checkpoint at ``path``. ``words`` is how the user named the checkpoint. Raises
    `UserError` for damaged files."""
    provenance = _read_files(path)
    if provenance.texts is None and not _is_exported(path):  # The model's training is unknown.
        provenance = replace(provenance, ancestors=_find_ancestors(words, path))
    type_bits = [int(re.findall(r"\d", name)[0]) for name in gguf_model.quantized_types(path)]  # 4 for Q4_K.
    return replace(provenance, bits=min([provenance.bits, *type_bits]))


def _read_files(path: Path, depth: int = 0) -> Provenance:
    """Reads the provenance from a checkpoint's own files. ``depth`` is 0 for the exported model, 1 for its parent,
    and so on."""
    if _is_exported(path):
        return checked(Provenance, read_json(path / folder.META)[KEY], str(path / folder.META))
    run = path.absolute().parent
    if folder.is_run(run):
        try:
            return _from_run(RunRecord.read(run), path.absolute(), depth)
        except UserError as error:
            hint = "copy the checkpoint out of its run; its card will then state that its training is unknown"
            raise UserError(error.message, hint) from None
    if folder.is_adapter(path):
        return Provenance(ancestors=_find_ancestors(folder.base_of(path), folder.base_folder(path), depth))
    base = _front_matter(path).get("base_model", "")
    on_hub = HUB_NAME.fullmatch(base) is not None
    return Provenance(ancestors=[Ancestor(base if on_hub else last_part(base), on_hub)] if base else [])


def _is_exported(path: Path) -> bool:
    return (path / folder.META).is_file() and isinstance(read_json(path / folder.META).get(KEY), dict)


def _from_run(record: RunRecord, path: Path, depth: int) -> Provenance:
    result = record.result or {}
    is_best = result.get("checkpoint") == path.name
    return Provenance(
        None if record.sources is None else group_texts(record.sources, record.texts or []),
        record.tokens.train if record.tokens else None,
        _to_float(result.get("val_loss")) if is_best else None,
        _to_float(result.get("bits_per_byte")) if is_best else None,
        _find_ancestors(record.init.model, Path(record.init.path), depth) if record.init else [],
    )


def _to_float(value: Any) -> float | None:
    return float(value) if type(value) in (int, float) and abs(value) <= MAX_FLOAT32 else None


def _find_ancestors(words: str, path: Path, depth: int = 0) -> list[Ancestor]:
    """Returns the model at ``path`` and its ancestors. ``words`` is how the user named the model."""
    on_hub = hub.is_remote(words)
    name = _name_from_path(words) or _name_from_path(str(path.absolute()))
    if on_hub:
        name = words.removeprefix(hub.PREFIX).partition("@")[0]
    ancestors: list[Ancestor] = []
    with contextlib.suppress(UserError, OSError):  # The files can be missing or damaged.
        ancestors = _read_files(path, depth + 1).ancestors if depth < _MAX_ANCESTORS and path.is_dir() else []
    card = _front_matter(path)
    # If the license is "other", license_name names it.
    license = card.get("license_name") or card.get("license") or "/"
    return [Ancestor(name or "an unnamed model", on_hub, None if "/" in license else license), *ancestors]


def _name_from_path(words: str) -> str:
    """Returns the name of a run, checkpoint or folder: the last part of the path that is not a step."""
    parts = [part for part in re.split(r"[/\\]", _CHECKPOINT_SUFFIX.sub("", words)) if part.strip(".")]
    return next((part for part in reversed(parts) if not folder.is_step_name(part)), "")


def _front_matter(path: Path) -> dict[str, str]:
    """Returns the simple values in a model card's YAML, or the license in a GGUF file. Returns no values for an
    unreadable card or file."""
    try:
        if is_gguf(path):
            metadata = header(path).metadata
            values = {key: str(metadata.get(f"general.{name}", "")) for key, name in _GGUF_LICENSE.items()}
            return {key: value for key, value in values.items() if _LICENSE.fullmatch(value)}
        text = read_regular(path / CARD, _MAX_CARD_BYTES).decode("utf-8-sig", "replace").replace("\r\n", "\n")
    except UserError:
        return {}
    match = _FRONT_MATTER.match(text)
    return {key: value for key, _, value in _YAML_ENTRY.findall(match[1]) if value != "unknown"} if match else {}


def group_texts(sources: Sequence[Mapping[str, Any]], texts: Sequence[str] = ()) -> list[Text]:
    """Groups a run's ``sources`` into texts: one per corpus in ``texts``, one per other file up to `_MAX_TEXTS`, and
    one for the rest."""
    corpora = [catalogue.corpus(name) for name in texts if name in catalogue.names()]
    homepages = {f"{corpus.name}/{file.name}": corpus.homepage for corpus in corpora for file in corpus.all_files}
    groups: dict[str, list[Mapping[str, Any]]] = {corpus.name: [] for corpus in corpora}
    for source in sources:
        name = str(source.get("name"))
        group = name.partition("/")[0]
        group = group if group in groups else name
        is_listed = group in groups or len(groups) < _MAX_TEXTS
        groups.setdefault(group if is_listed else "more files", []).append(source)
    return [_combine_files(last_part(name), files, homepages) for name, files in groups.items() if files]


def _combine_files(name: str, sources: Sequence[Mapping[str, Any]], published: Mapping[str, str]) -> Text:
    """Combines files into one text. ``published`` maps file names to homepages."""
    sizes = [source.get("bytes") for source in sources]
    known_sizes = [size for size in sizes if type(size) is int and size >= 0]
    checksums = [str(source.get("sha256")) for source in sources]
    is_single = len(checksums) == 1 and re.fullmatch("[0-9a-f]{64}", checksums[0])
    names = [str(source.get("name")) for source in sources]
    datasets = {match and match[1] for match in (_HUB_DATASET.match(published.get(n, n)) for n in names)}
    return Text(
        name,
        len(sources),
        sum(known_sizes) if len(known_sizes) == len(sizes) else None,
        checksums[0] if is_single else None,
        datasets.pop() if len(datasets) == 1 else None,
    )


def last_part(name: str) -> str:
    """Returns the last part of a path or address, without user, host and query."""
    path = name
    if "://" in name:
        path = re.split("[?#]", name.partition("://")[2])[0].partition("/")[2]
    parts = [part for part in re.split(r"[/\\]", path) if part.strip(".")]
    return parts[-1] if parts else "an unnamed text"
