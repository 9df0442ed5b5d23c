"""A model's provenance, for its card: the text and settings that it was trained with, and the models it was made from.

It is read from ``run.json`` and written into the ``gpt.json`` of an exported folder, so that later exports know it too.
Only the last part of a path or address is kept: no folder, user or host of a machine.
"""

import contextlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gpt.errors import UserError
from gpt.files import read_json, read_regular
from gpt.runs import folder, hf, hub
from gpt.runs.record import RunRecord, Table
from gpt.settings import LARGEST, Count, checked
from gpt.text import catalogue

KEY = "provenance"  # in gpt.json
CARD = "README.md"
_LARGEST_CARD = 2**20  # bytes
_MOST_TEXTS = 20  # that are listed one by one
_LONGEST_LINE = 40  # models that were made of each other
_ON_HUB = re.compile(r"(?:hf://datasets|https://huggingface\.co/datasets)/([\w.-]+/[\w.-]+?)(?:[@/]|$)", re.ASCII)
HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?", re.ASCII)
_PART = re.compile(r":(best|latest|step-\d+)$")
_FRONT = re.compile(r"---\n(.*?)\n---", re.DOTALL)
_ENTRY = re.compile(r"""^(\w+):[ \t]*(["']?)([\w./+-]+)\2[ \t]*(?:#.*)?$""", re.ASCII | re.MULTILINE)
_SETTINGS = ("preset", "optimizer", "lr", "schedule", "warmup", "decay", "weight_decay", "clip", "batch_tokens", "seed")
_ADAPTERS = ("lora_rank", "lora_alpha", "lora_targets")


@dataclass(frozen=True)
class Text:
    """One or several files of text. ``sha256`` is that of a single file, in UTF-8."""

    name: str
    files: Count = 1
    bytes: Count | None = None
    sha256: str | None = None
    dataset: str | None = None  # its name on the hub


@dataclass(frozen=True)
class Ancestor:
    """A model that another one was made from."""

    name: str  # the last part of its path; OWNER/NAME of one on the hub
    on_hub: bool = False
    license: str | None = None  # in its own card


@dataclass(frozen=True)
class Provenance:
    """The known facts of a model's making."""

    texts: list[Text] | None = None  # None: not known
    tokens: Count | None = None  # of the text, to train on
    settings: Table = field(default_factory=dict)
    val_loss: float | None = None  # nats per token over the whole held-out text
    bits_per_byte: float | None = None
    ancestors: list[Ancestor] = field(default_factory=list)  # the nearest first
    bits: Count = 32  # the fewest that its weights were ever rounded to


def read_provenance(path: Path, words: str) -> Provenance:
    """The provenance of the checkpoint at ``path``, which the user named by ``words``. Raises `UserError` if a file
    that records it is damaged."""
    found = _provenance(path)
    if found.texts is None and not _is_exported(path):  # somebody else's model
        found = replace(found, ancestors=_line(words, path))
    return replace(found, bits=min(found.bits, hf.load_bits(folder.home(path)) or 32))


def _provenance(path: Path, line: int = 0) -> Provenance:
    """Reads the provenance in a checkpoint's own files; ``line`` counts the models that were made from it."""
    if _is_exported(path):
        return checked(Provenance, read_json(path / folder.META)[KEY], str(path / folder.META))
    run = path.absolute().parent
    if folder.is_run(run):
        try:
            return _of_run(RunRecord.read(run), path.absolute(), line)
        except UserError as error:
            hint = "copy the checkpoint out of its run; its card will then state that its training is unknown"
            raise UserError(error.message, hint) from None
    if folder.is_adapter(path):
        return Provenance(ancestors=_line(folder.base_of(path), folder.base_folder(path), line))
    base = _front_matter(path).get("base_model", "")
    on_hub = HUB_NAME.fullmatch(base) is not None
    return Provenance(ancestors=[Ancestor(base if on_hub else last_part(base), on_hub)] if base else [])


def _is_exported(path: Path) -> bool:
    return (path / folder.META).is_file() and isinstance(read_json(path / folder.META).get(KEY), dict)


def _of_run(record: RunRecord, path: Path, line: int) -> Provenance:
    resolved, result = record.resolved or {}, record.result or {}
    own = {key: resolved.get(key) for key in (*_SETTINGS, *(_ADAPTERS if resolved.get("lora_rank") else ()))}
    own |= {"dtype": record.compute.dtype} if record.compute else {}
    own |= {kind: True for kind in ("pairs", "chat") if record.settings and record.settings.get(kind)}
    if record.init is not None:
        own.pop("preset")  # only the one of the nearest size, whose defaults were taken
    is_best = result.get("checkpoint") == path.name
    return Provenance(
        None if record.sources is None else texts_of(record.sources, record.texts or []),
        record.tokens.train if record.tokens else None,
        {key: each for key, each in own.items() if not isinstance(each, dict | None)},
        _number(result.get("val_loss")) if is_best else None,
        _number(result.get("bits_per_byte")) if is_best else None,
        _line(record.init.model, Path(record.init.path), line) if record.init else [],
    )


def _number(value: Any) -> float | None:
    return float(value) if type(value) in (int, float) and abs(value) <= LARGEST else None


def _line(words: str, path: Path, line: int = 0) -> list[Ancestor]:
    """The model at ``path``, which the user named by ``words``, and the models that it was made from in turn."""
    on_hub = hub.is_remote(words)
    name = _own_name(words) or _own_name(str(path.absolute()))
    if on_hub:
        name = words.removeprefix(hub.PREFIX).partition("@")[0]
    before: list[Ancestor] = []
    with contextlib.suppress(UserError, OSError):  # it may be gone, or have changed
        before = _provenance(path, line + 1).ancestors if line < _LONGEST_LINE and path.is_dir() else []
    card = _front_matter(path)
    license = card.get("license_name") or card.get("license") or "/"  # a license called "other" has a name beside it
    return [Ancestor(name or "an unnamed model", on_hub, None if "/" in license else license), *before]


def _own_name(words: str) -> str:
    """The name of a run, a checkpoint or a folder: the last meaningful part of its path."""
    parts = [part for part in re.split(r"[/\\]", _PART.sub("", words)) if part.strip(".")]
    return next((part for part in reversed(parts) if not folder.is_step_name(part)), "")


def _front_matter(path: Path) -> dict[str, str]:
    """The plain words in the YAML of a model's card; none if the card cannot be read."""
    try:
        text = read_regular(path / CARD, _LARGEST_CARD).decode("utf-8-sig", "replace").replace("\r\n", "\n")
    except UserError:
        return {}
    found = _FRONT.match(text)
    return {key: value for key, _, value in _ENTRY.findall(found[1]) if value != "unknown"} if found else {}


def texts_of(sources: Sequence[Mapping[str, Any]], asked: Sequence[str] = ()) -> list[Text]:
    """The texts of a run's ``sources``: a corpus among the ``asked`` is one, other files are listed up to a limit, and
    the rest is one."""
    corpora = [catalogue.corpus(name) for name in asked if name in catalogue.names()]
    published = {f"{corpus.name}/{file.name}": corpus.homepage for corpus in corpora for file in corpus.all_files}
    groups: dict[str, list[Mapping[str, Any]]] = {corpus.name: [] for corpus in corpora}
    for source in sources:
        name = str(source.get("name"))
        group = name.partition("/")[0]
        group = group if group in groups else name
        known = group in groups or len(groups) < _MOST_TEXTS
        groups.setdefault(group if known else "more files", []).append(source)
    return [joined(last_part(name), some, published) for name, some in groups.items() if some]


def joined(name: str, sources: Sequence[Mapping[str, Any]], published: Mapping[str, str] | None = None) -> Text:
    """One or several files as one text. ``published``: addresses of files by name, if those are not their names."""
    sizes = [source.get("bytes") for source in sources]
    whole = [size for size in sizes if type(size) is int and size >= 0]
    sums = [str(source.get("sha256")) for source in sources]
    single = len(sums) == 1 and re.fullmatch("[0-9a-f]{64}", sums[0])
    names = [str(source.get("name")) for source in sources]
    datasets = {found and found[1] for found in (_ON_HUB.match((published or {}).get(each, each)) for each in names)}
    return Text(
        name,
        len(sources),
        sum(whole) if len(whole) == len(sizes) else None,
        sums[0] if single else None,
        datasets.pop() if len(datasets) == 1 else None,
    )


def last_part(name: str) -> str:
    """The last part of a path or an address, without user, host and query."""
    path = name
    if "://" in name:
        path = re.split("[?#]", name.partition("://")[2])[0].partition("/")[2]
    parts = [part for part in re.split(r"[/\\]", path) if part.strip(".")]
    return parts[-1] if parts else "an unnamed text"
