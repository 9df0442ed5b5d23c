"""A model's provenance, for its card: the text and settings that it was trained with, and the models it was made from.

It is read from ``run.json`` and written into the ``gpt.json`` of an exported folder, so that later exports know it too.
Of paths and addresses it has the last part alone: no folder, user or host of a machine.
"""

import contextlib
import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gpt.errors import UserError
from gpt.files import read_json, read_regular
from gpt.runs import adapter, folder, hf, hub
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
    """A text that was read: a file, a corpus, or several. ``sha256`` is of its UTF-8; of several files, of their lines
    ``SHA256  NAME``."""

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
    val_loss: float | None = None  # nats a token over the whole held-out text
    bits_per_byte: float | None = None
    ancestors: list[Ancestor] = field(default_factory=list)  # the nearest first
    bits: Count = 32  # the fewest that its weights were ever rounded to


def read_provenance(path: Path, words: str) -> Provenance:
    """The provenance of the checkpoint at ``path``, which the user named by ``words``. Raises `UserError` where a file
    that tells it is damaged."""
    found = _provenance(path)
    if found.texts is None:  # then it is a model of others
        ancestors = found.ancestors if _is_exported(path) else _line(words, path)
        found = replace(found, ancestors=ancestors)
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
            hint = "copy the checkpoint out of its run: then its card says that its training is not known"
            raise UserError(error.message, hint) from None
    if adapter.is_adapter(path):
        return Provenance(ancestors=_line(folder.base_of(path), folder.base_folder(path), line))
    base = _front_matter(path).get("base_model", "")
    on_hub = HUB_NAME.fullmatch(base) is not None
    return Provenance(ancestors=[Ancestor(base if on_hub else last_part(base), on_hub)] if base else [])


def _is_exported(path: Path) -> bool:
    return (path / folder.META).is_file() and isinstance(read_json(path / folder.META).get(KEY), dict)


def _of_run(record: RunRecord, path: Path, line: int) -> Provenance:
    resolved, result = record.resolved or {}, record.result or {}
    own = {key: resolved.get(key) for key in (*_SETTINGS, *(_ADAPTERS if resolved.get("lora_rank") else ()))}
    model = resolved.get("model")
    if isinstance(model, dict):
        own["context"] = model.get("block_size")
    if record.compute is not None:
        own["dtype"] = record.compute.dtype
    own |= {kind: True for kind in ("pairs", "chat") if record.settings and record.settings.get(kind)}
    if record.init is not None:
        own.pop("preset")  # only the one of the nearest size, whose defaults were taken
    settings: Table = {key: each for key, each in own.items() if not isinstance(each, dict | None)}
    is_best = result.get("checkpoint") == path.name
    return Provenance(
        None if record.sources is None else texts_of(record.sources, record.texts or []),
        record.tokens.train if record.tokens else None,
        settings,
        _number(result.get("val_loss")) if is_best else None,
        _number(result.get("bits_per_byte")) if is_best else None,
        _line(record.init.model, Path(record.init.path), line) if record.init else [],
    )


def _number(value: Any) -> float | None:
    return float(value) if type(value) in (int, float) and abs(value) <= LARGEST else None


def _line(words: str, path: Path, line: int = 0) -> list[Ancestor]:
    """The model at ``path``, which the user named by ``words``, and the models that it was made from in turn."""
    on_hub = hub.is_remote(words)
    name = (
        words.removeprefix(hub.PREFIX).partition("@")[0]
        if on_hub
        else _own_name(words) or _own_name(str(path.absolute()))
    )
    before: list[Ancestor] = []
    with contextlib.suppress(UserError, OSError):  # it may be gone, or have changed
        before = _provenance(path, line + 1).ancestors if line < _LONGEST_LINE and path.is_dir() else []
    said = _front_matter(path)
    license = said.get("license_name") or said.get("license") or "/"  # a name stands beside the license "other"
    return [Ancestor(name or "a model without a name", on_hub, None if "/" in license else license), *before]


def _own_name(words: str) -> str:
    """The name of a run, a checkpoint or a folder: the last part of its path that says something."""
    parts = [part for part in re.split(r"[/\\]", _PART.sub("", words)) if part.strip(".")]
    said = [part for part in parts if not folder.is_step_name(part)]
    return said[-1] if said else ""


def _front_matter(path: Path) -> dict[str, str]:
    """The words among the values of the YAML at the top of a model's card; of a card that cannot be read none."""
    try:
        text = read_regular(path / CARD, _LARGEST_CARD).decode("utf-8-sig", "replace").replace("\r\n", "\n")
    except UserError:
        return {}
    found = _FRONT.match(text)
    return {key: value for key, _, value in _ENTRY.findall(found[1]) if value != "unknown"} if found else {}


def texts_of(sources: Sequence[Mapping[str, Any]], asked: Sequence[str] = ()) -> list[Text]:
    """The texts of a run's ``sources``: each corpus among the ``asked`` as one, of many others the first ones."""
    corpora = {name: list[Mapping[str, Any]]() for name in asked if name in catalogue.names()}
    files: list[Text] = []
    rest: list[Mapping[str, Any]] = []
    for source in sources:
        name = str(source.get("name"))
        of = name.partition("/")[0]
        if of in corpora and of != name:
            corpora[of].append(source)
        elif len(files) < _MOST_TEXTS:
            files.append(joined(last_part(name), [source], _dataset(name)))
        else:
            rest.append(source)
    whole = [joined(name, some, _corpus_dataset(name, some)) for name, some in corpora.items() if some]
    return [*whole, *files, *([joined(f"{len(rest):,} more files", rest)] if rest else [])]


def joined(name: str, sources: Sequence[Mapping[str, Any]], dataset: str | None = None) -> Text:
    """Several files as one text."""
    sums = [str(source.get("sha256")) for source in sources]
    sizes = [source.get("bytes") for source in sources]
    whole = [size for size in sizes if type(size) is int and size >= 0]
    named = zip(sums, (last_part(str(source.get("name"))) for source in sources), strict=True)
    one = hashlib.sha256("".join(f"{sum}  {of}\n" for sum, of in named).encode("utf-8", "surrogateescape")).hexdigest()
    known = all(re.fullmatch("[0-9a-f]{64}", sum) for sum in sums)
    return Text(
        name,
        len(sources),
        sum(whole) if len(whole) == len(sizes) else None,
        None if not known else sums[0] if len(sums) == 1 else one,
        dataset,
    )


def last_part(name: str) -> str:
    """The last part of a path or an address, without user, host and query."""
    path = name
    if "://" in name:
        path = re.split("[?#]", name.partition("://")[2])[0].partition("/")[2]
    parts = [part for part in re.split(r"[/\\]", path) if part.strip(".")]
    return parts[-1] if parts else "a text without a name"


def _dataset(address: str) -> str | None:
    found = _ON_HUB.match(address)
    return found[1] if found else None


def _corpus_dataset(name: str, sources: Sequence[Mapping[str, Any]]) -> str | None:
    """The data set of the hub that a corpus is; None where these are files of a folder of its name."""
    entry = catalogue.corpus(name)
    published = {f"{name}/{file.name}" for file in entry.all_files}
    return _dataset(entry.homepage) if published.issuperset(str(source.get("name")) for source in sources) else None
