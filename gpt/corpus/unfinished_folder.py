"""Unfinished token folders. They are written shard by shard, so a resume can skip finished shards.

The first line of ``progress.jsonl`` records the folder's provenance; each later line is a finished `Group`.
"""

import contextlib
import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from gpt.config.settings import Count, checked
from gpt.corpus.corpus import Corpus
from gpt.corpus.shards import SIDES, Ids, Shard, Side, write_shard
from gpt.corpus.token_folder import COUNTS, ShardRecord, SourceRecord, TokenFolder, write_manifest
from gpt.documents.sources import MANIFEST, PROGRESS
from gpt.system import files
from gpt.system.errors import UserError
from gpt.system.files import LINES_LIMIT, atomic_folder, disk_errors, open_regular, read_regular, write_file
from gpt.tokenizers.finding import find_tokenizer, read_described_tokenizer
from gpt.tokenizers.tokenizer import Tokenizer, describe

SHARD_IDS = 2**24  # Target size of a shard in ids: 32 or 64 MiB.
_BAD_TEXT_SETTINGS = ("errors", "skip_bad")
_HINT = "tokenize into another folder, with --out"


@dataclass
class Batch:
    """Texts to encode together. ``begins`` is True for texts that start a document. Encoding replaces the texts by ids
    and document offsets. Each document starts with `Tokenizer.opening`."""

    texts: list[str] = field(default_factory=list)
    begins: list[bool] = field(default_factory=list)
    sides: list[Side] = field(default_factory=list)
    bytes: Counter[Side] = field(default_factory=Counter)
    sources: list[SourceRecord] = field(default_factory=list)  # Sources that end in this batch.
    counts: Counter[str] = field(default_factory=Counter)  # What was skipped, replaced … in these sources.
    source: int = 0  # The first source that does not end in this batch or before it.
    texts_read: int = 0  # Texts of this source, up to the end of this batch.
    ids: dict[Side, Ids] = field(default_factory=dict)
    offsets: dict[Side, list[int]] = field(default_factory=lambda: {side: [] for side in SIDES})


@dataclass(frozen=True)
class Group:
    """A finished group of documents: a line of ``progress.jsonl``. It has a shard for each side with text."""

    shards: list[ShardRecord]
    sources: list[SourceRecord]  # Sources that end in this group.
    counts: dict[str, Count]
    source: Count  # Where the next group starts, as in `Batch`.
    texts_read: Count


class ShardWriter:
    """Collects encoded batches into groups, and writes their shards and a progress line."""

    def __init__(self, folder: Path, vocab_size: int, groups: list[Group]) -> None:
        self.folder, self.vocab_size, self.groups = folder, vocab_size, groups
        self._batches: list[Batch] = []

    def add(self, batch: Batch) -> None:
        """Adds the next batch. Finishes the group when it is complete. Raises `WorkError` if the disk is full."""
        self._batches.append(batch)
        if sum(len(ids) for each in self._batches for ids in each.ids.values()) >= SHARD_IDS:
            self.finish_group()

    def finish_group(self) -> None:
        """Writes the batches added since the last group, if any. Raises `WorkError` if the disk is full."""
        if not self._batches:
            return
        with disk_errors(self.folder):
            sides = [side for side in SIDES if any(side in batch.ids for batch in self._batches)]
            shards = [self._write_shard(side) for side in sides]
            sources = [source for batch in self._batches for source in batch.sources]
            counts = sum((batch.counts for batch in self._batches), Counter[str]())
            last = self._batches[-1]
            group = Group(shards, sources, dict(counts), last.source, last.texts_read)
            with (self.folder / PROGRESS).open("ab") as file:
                file.write(_json_line(asdict(group)))
                file.flush()
                os.fsync(file.fileno())
        self.groups.append(group)
        self._batches = []

    def _write_shard(self, side: Side) -> ShardRecord:
        name, token_count = _shard_name(side, len(self.groups)), 0
        ids: list[Ids] = []
        offsets: list[int] = []
        for batch in self._batches:
            if side in batch.ids:
                offsets += (token_count + offset for offset in batch.offsets[side])
                ids.append(batch.ids[side])
                token_count += len(ids[-1])
        sha256 = write_shard(self.folder / name, ids, np.array(offsets, np.uint64), self.vocab_size)
        size = sum(batch.bytes[side] for batch in self._batches)
        return ShardRecord(name, side, len(offsets), token_count, size, sha256)


def _shard_name(side: Side, group: int) -> str:
    return f"{side}-{group:05d}.ids"


def _json_line(values: Mapping[str, Any]) -> bytes:
    return json.dumps(values).encode() + b"\n"


@contextlib.contextmanager
def locked(out: Path) -> Iterator[None]:
    """Locks the folder for this process. Raises `UserError` if another process has locked it."""
    with files.locked(out, "wait for it, or choose another --out"):
        yield
        with contextlib.suppress(OSError):  # Another process might have removed or locked the file.
            (out / files.LOCK).unlink()


def provenance(corpus: Corpus, tokenizer: Tokenizer) -> dict[str, Any]:
    """Returns the manifest entries that determine the folder's contents."""
    return {
        "texts": list(corpus.texts),
        "asked": dict(corpus.tokenizer_settings),
        "split": corpus.split.describe(),
        "reading": asdict(corpus.reading),
        "corpus": corpus.identity(),
        "tokenizer": describe(tokenizer),
    }


def begin(out: Path, about: Mapping[str, Any], corpus: Corpus, tokenizer: Mapping[str, bytes]) -> None:
    """Creates the folder with the tokenizer's files, and a progress line with provenance and sources."""
    sources = [[source.name, source.size, source.time] for source in corpus.sources]
    with disk_errors(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        with atomic_folder(out) as temp_folder:
            for name, data in tokenizer.items():
                write_file(temp_folder / name, data)
            write_file(temp_folder / PROGRESS, _json_line({"about": about, "sources": sources}))


def check_resumable(out: Path, corpus: Corpus) -> Tokenizer:
    """Returns the tokenizer of an unfinished or finished folder. Raises `UserError` naming the difference if the folder
    was created from other text or with other settings."""
    is_finished = (out / MANIFEST).exists()
    if is_finished:
        folder = TokenFolder(out)
        old, sources = folder.manifest, [[source.name, source.size, source.time] for source in folder.sources()]
    else:
        old, sources = (_read_header(out)[key] for key in ("about", "sources"))
    temporary_name = next((source.name for source in corpus.sources if source.temporary), None)
    if temporary_name is not None:
        raise UserError(
            f"{out} already exists, and {temporary_name} cannot be compared with the text it was made from",
            "put the text in a file, or choose another --out",
        )
    tokenizer = read_described_tokenizer(out, old.get("tokenizer"), str(out / (MANIFEST if is_finished else PROGRESS)))
    new = provenance(corpus, tokenizer)
    if corpus.tokenizer_settings["tokenizer"] != "auto":
        new["tokenizer"] = describe(find_tokenizer(corpus.tokenizer_settings["tokenizer"]))
    changed = {tuple(source) for source in sources} ^ {(each.name, each.size, each.time) for each in corpus.sources}
    if changed:
        raise UserError(f"{min(changed)[0]} was added, removed or changed since {out} was started", _HINT)
    _check_settings(out, old, new)
    return tokenizer


def _read_header(out: Path) -> dict[str, Any]:
    try:
        with open_regular(out / PROGRESS, LINES_LIMIT) as file:
            header: dict[str, Any] = json.loads(file.readline())
        about = header["about"]
        if all(isinstance(about[key], dict) for key in ("asked", "reading")) and all(
            isinstance(name, str) and isinstance(size, int) and isinstance(time, int)
            for name, size, time in header["sources"]
        ):
            return header
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        pass
    raise UserError(f"{out} is not a token folder that gpt tokenize started", "choose another path with --out")


def read_progress(out: Path, about: Mapping[str, Any]) -> list[Group]:
    """Returns the finished groups of a folder started with the same text and settings, up to the first one without
    intact shards. Drops the others and deletes leftover files. If the settings for bad text changed, also drops the
    groups with text of a source that is not finished, because its text can change."""
    header = _read_header(out)
    lines = read_regular(out / PROGRESS, LINES_LIMIT).split(b"\n")[1:]
    groups: list[Group] = []
    source_count = 0
    for number, line in enumerate(lines):
        group = _read_group(line)
        if group is None or not _has_shards(out, number, group):
            break
        source_count += len(group.sources)
        if group.source != source_count or source_count > len(header["sources"]):
            break
        groups.append(group)
    if any(header["about"]["reading"].get(key) != about["reading"][key] for key in _BAD_TEXT_SETTINGS):
        unfinished = groups[-1].source if groups else 0
        while groups and groups[-1].source == unfinished and groups[-1].texts_read:
            groups.pop()
    shard_files = {shard.file for group in groups for shard in group.shards}
    for path in [*out.glob(f"{files.TEMPORARY}*"), *out.glob("*.ids")]:
        if path.name not in shard_files:
            path.unlink(missing_ok=True)
    header["about"] = about
    with disk_errors(out):
        write_file(out / PROGRESS, b"".join(map(_json_line, [header, *map(asdict, groups)])))
    return groups


def _read_group(line: bytes) -> Group | None:
    with contextlib.suppress(ValueError, RecursionError, UserError):
        group = checked(Group, json.loads(line), PROGRESS)
        if group.counts.keys() <= set(COUNTS):
            return group
    return None


def _has_shards(out: Path, number: int, group: Group) -> bool:
    """Whether the shards of a group exist with the recorded lengths."""
    with contextlib.suppress(UserError):
        return all(
            record.file == _shard_name(record.side, number) and len(Shard(out / record.file)) == record.tokens
            for record in group.shards
        )
    return False


def _check_settings(out: Path, old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    was_strict = old["reading"].get("errors") == "strict" and not old["reading"].get("skip_bad")
    old_values = _by_name(old)
    for name, value in _by_name(new).items():
        # Strict reading stops at the first bad byte. Up to there, all error settings produce the same ids.
        if old_values.get(name) != value and not (was_strict and name in ("--errors", "--skip-bad")):
            message = f"{out} was started with another {name}: {old_values.get(name)}, now {value}"
            raise UserError(message, _HINT)


def _by_name(about: Mapping[str, Any]) -> dict[str, Any]:
    tokenizer = about.get("tokenizer") or {}
    options = {f"--{key.replace('_', '-')}": value for key, value in (about["asked"] | about["reading"]).items()}
    ids = f"{tokenizer.get('name')} {str(tokenizer.get('fingerprint'))[:16]}"
    return {"tokenizer": ids, "split": about.get("split"), "corpus": about.get("corpus")} | options


def finish(out: Path, about: Mapping[str, Any], groups: list[Group]) -> None:
    """Finishes the folder by writing the manifest."""
    counts = dict.fromkeys(COUNTS, 0)
    for group in groups:
        for key, value in group.counts.items():
            counts[key] += value
    shards = [shard for group in groups for shard in group.shards]
    sources = [source for group in groups for source in group.sources]
    if sum(shard.bytes for shard in shards) != sum(source.bytes for source in sources):
        raise UserError(f"{out / PROGRESS} is damaged: it lists other text than it has shards of", f"delete {out}")
    with disk_errors(out):
        write_manifest(out, about, shards, sources, counts)
