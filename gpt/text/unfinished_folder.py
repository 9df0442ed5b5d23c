"""Unfinished token folders. They are written slice by slice, so a resume can skip finished slices.

The first line of ``progress.jsonl`` records the folder's provenance; each later line is a finished slice.
"""

import contextlib
import json
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from gpt import files
from gpt.errors import UserError
from gpt.files import LINES_LIMIT, atomic_folder, disk_errors, open_regular, read_regular, write_file
from gpt.settings import Count, checked
from gpt.text.corpus import Corpus
from gpt.text.shards import SIDES, Ids, Shard, Side, write_shard
from gpt.text.token_folder import (
    COUNTS,
    MANIFEST,
    PROGRESS,
    ShardRecord,
    SourceRecord,
    TokenFolder,
    shard_name,
    write_manifest,
)
from gpt.text.tokenizer import Tokenizer, describe
from gpt.text.tokenizer_files import find_tokenizer, read_described_tokenizer

SLICE_IDS = 2**24  # Target size of a slice in ids: 32 or 64 MiB.
_BAD_TEXT_SETTINGS = ("errors", "skip_bad")
_HINT = "tokenize into another folder, with --out"


@dataclass
class Item:
    """Texts to encode together, and data to record if a slice ends with this item. ``begins`` is True for texts that
    start a document."""

    group: int
    number: int  # Position in the group, starting at 1.
    texts: list[str] = field(default_factory=list)
    begins: list[bool] = field(default_factory=list)
    sides: list[Side] = field(default_factory=list)
    bytes: dict[Side, int] = field(default_factory=lambda: dict.fromkeys(SIDES, 0))
    last: bool = False  # Whether this is the last item of the group.
    sources: list[SourceRecord] = field(default_factory=list)  # Sources that end in this item.
    counts: dict[str, int] = field(default_factory=dict)  # Counts of the group so far.


@dataclass
class EncodedItem:
    """An item's ids and document offsets, for the training and the held-out side. Each document starts with
    `Tokenizer.opening`."""

    ids: dict[Side, Ids] = field(default_factory=dict)
    offsets: dict[Side, list[int]] = field(default_factory=lambda: {side: [] for side in SIDES})


@dataclass(frozen=True)
class Slice:
    """A finished slice: a line of ``progress.jsonl``."""

    group: Count
    slice: Count
    items: Count  # Number of the group's items up to the end of this slice.
    last: bool
    shards: list[ShardRecord]
    sources: list[SourceRecord]
    counts: dict[str, Count]


FinishedSlices = defaultdict[int, list[Slice]]  # By group, in order.


def all_slices(progress: FinishedSlices) -> list[Slice]:
    """Returns all finished slices, sorted by group."""
    return [finished_slice for group in sorted(progress) for finished_slice in progress[group]]


def is_whole(slices: Sequence[Slice]) -> bool:
    """Whether these are all slices of their group."""
    return bool(slices) and slices[-1].last


class ShardWriter:
    """Collects encoded items into slices, and writes their shards and a progress line."""

    def __init__(self, folder: Path, vocab_size: int, progress: FinishedSlices) -> None:
        self.folder, self.vocab_size, self.progress = folder, vocab_size, progress
        self._items: list[tuple[Item, EncodedItem]] = []

    def add(self, item: Item, encoded: EncodedItem) -> None:
        """Adds the next item. Writes the slice when it is complete. Raises `WorkError` if the disk is full."""
        item.texts.clear()  # Frees memory, because a slice has 64 MB of text or more.
        self._items.append((item, encoded))
        if (
            item.last
            or sum(len(ids) for _, encoded_item in self._items for ids in encoded_item.ids.values()) >= SLICE_IDS
        ):
            with disk_errors(self.folder):
                self._write(item)
            self._items = []

    def _write(self, last_item: Item) -> None:
        sides = [side for side in SIDES if any(side in encoded.ids for _, encoded in self._items)]
        index = len(self.progress[last_item.group])
        shards = [self._write_shard(side, last_item.group, index) for side in sides]
        sources = [source for item, _ in self._items for source in item.sources]
        new_slice = Slice(last_item.group, index, last_item.number, last_item.last, shards, sources, last_item.counts)
        with (self.folder / PROGRESS).open("ab") as file:
            file.write(_json_line(asdict(new_slice)))
            file.flush()
            os.fsync(file.fileno())
        self.progress[new_slice.group].append(new_slice)

    def _write_shard(self, side: Side, group: int, index: int) -> ShardRecord:
        name, token_count = shard_name(side, group, index), 0
        ids: list[Ids] = []
        offsets: list[int] = []
        for _, encoded in self._items:
            if side in encoded.ids:
                offsets += (token_count + offset for offset in encoded.offsets[side])
                ids.append(encoded.ids[side])
                token_count += len(ids[-1])
        sha256 = write_shard(self.folder / name, ids, np.array(offsets, np.uint64), self.vocab_size)
        size = sum(item.bytes[side] for item, _ in self._items)
        return ShardRecord(name, side, group, index, len(offsets), token_count, size, sha256)


def _json_line(values: Mapping[str, Any]) -> bytes:
    return json.dumps(values).encode() + b"\n"


@contextlib.contextmanager
def locked(out: Path) -> Iterator[None]:
    """Locks the folder for this process. Raises `UserError` if another process has locked it."""
    with files.locked(out, "wait for it, or choose another --out"):
        yield
        with contextlib.suppress(OSError):  # Another process might have removed or locked the file.
            (out / files.LOCK).unlink()


def provenance(corpus: Corpus, tokenizer: Tokenizer, share: tuple[int, int] | None) -> dict[str, Any]:
    """Returns the manifest entries that determine the folder's contents."""
    return {
        "texts": list(corpus.texts),
        "asked": dict(corpus.tokenizer_settings),
        "split": corpus.split.describe(),
        "reading": {**asdict(corpus.reading), "line_breaks": "lf"},  # Older versions kept carriage returns.
        "corpus": corpus.identity(),
        "part": list(share) if share else None,
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


def check_resumable(out: Path, corpus: Corpus, share: tuple[int, int] | None) -> Tokenizer:
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
    if is_finished:
        old["reading"].setdefault("line_breaks", "lf")
    tokenizer = read_described_tokenizer(out, old.get("tokenizer"), str(out / (MANIFEST if is_finished else PROGRESS)))
    new = provenance(corpus, tokenizer, share)
    if corpus.tokenizer_settings["tokenizer"] != "auto":
        new["tokenizer"] = describe(find_tokenizer(corpus.tokenizer_settings["tokenizer"]))
    _check_sources(out, sources, corpus, share if is_finished else None)
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


def read_progress(out: Path, about: Mapping[str, Any]) -> FinishedSlices:
    """Returns the finished slices of a folder started with the same text and settings, and deletes leftover files.
    Drops a slice with missing shards, and all later slices of the group. If the settings for bad text changed, drops
    all unfinished groups, because their items can change."""
    header = _read_header(out)
    progress: FinishedSlices = defaultdict(list)
    has_dropped = False
    for line in read_regular(out / PROGRESS, LINES_LIMIT).split(b"\n")[1:]:
        next_slice = _read_slice(line)
        if next_slice is None:
            has_dropped |= line != b""  # An interruption can truncate the last line.
        elif (
            next_slice.slice != len(slices := progress[next_slice.group])
            or is_whole(slices)
            or not _has_shards(out, next_slice)
        ):
            # Later slices of the group are dropped too, because their numbers are no longer consecutive.
            has_dropped = True
        else:
            slices.append(next_slice)
    if any(header["about"]["reading"].get(key) != about["reading"][key] for key in _BAD_TEXT_SETTINGS):
        progress = defaultdict(list, {group: slices for group, slices in progress.items() if is_whole(slices)})
        has_dropped = True
    shard_files = {shard.file for finished_slice in all_slices(progress) for shard in finished_slice.shards}
    for path in [*out.glob(".tmp-*"), *out.glob("*.ids")]:
        if path.name not in shard_files:
            path.unlink(missing_ok=True)
    if has_dropped:
        new_header = {"about": about, "sources": header["sources"]}
        with disk_errors(out):
            write_file(out / PROGRESS, b"".join(map(_json_line, [new_header, *map(asdict, all_slices(progress))])))
    return progress


def _read_slice(line: bytes) -> Slice | None:
    with contextlib.suppress(ValueError, RecursionError, UserError):
        result = checked(Slice, json.loads(line), PROGRESS)
        if result.counts.keys() == set(COUNTS):
            return result
    return None


def _has_shards(out: Path, finished_slice: Slice) -> bool:
    """Whether the shards of a slice exist with the recorded lengths."""
    for record in finished_slice.shards:
        name = shard_name(record.side, finished_slice.group, finished_slice.slice)
        try:
            if record.file != name or len(Shard(out / name)) != record.tokens:
                return False
        except UserError:
            return False
    return True


def _check_sources(out: Path, old: list[list[Any]], corpus: Corpus, share: tuple[int, int] | None) -> None:
    """Raises `UserError` if the name, size or modification time of a source changed. With ``share``, compares only that
    part's sources."""
    i, n = share or (1, 1)
    old_sources = {name: rest for name, *rest in old}
    for number in (number for group in corpus.groups[i - 1 :: n] for number in group):
        source = corpus.sources[number]
        if source.name not in old_sources:
            raise UserError(f"{source.name} did not exist when {out} was started", _HINT)
        if old_sources.pop(source.name) != [source.size, source.time]:
            raise UserError(f"{source.name} has changed since {out} was started", _HINT)
    if old_sources:
        raise UserError(f"{next(iter(old_sources))} has disappeared since {out} was started", _HINT)


def _check_settings(out: Path, old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    for key in ("tokenizer", "split", "part", "corpus"):
        if old.get(key) != new[key]:
            message = (
                f"{out} was started with another {key}: {_format_value(old.get(key))}, now {_format_value(new[key])}"
            )
            raise UserError(message, _HINT)
    was_strict = old["reading"].get("errors") == "strict" and not old["reading"].get("skip_bad")
    for table in ("asked", "reading"):
        for key, value in new[table].items():
            # Strict reading stops at the first bad byte. Up to there, all error settings produce the same ids.
            if old[table].get(key) != value and not (was_strict and key in _BAD_TEXT_SETTINGS):
                raise UserError(f"{out} was started with {key} {old[table].get(key)!r}, now {value!r}", _HINT)


def _format_value(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {value[key]}" for key in ("name", "by", "fraction", "seed") if key in value)
    return str(value)


def finish(out: Path, about: Mapping[str, Any], progress: FinishedSlices) -> None:
    """Finishes the folder by writing the manifest."""
    counts = dict.fromkeys(COUNTS, 0)
    for finished_slice in all_slices(progress):
        for key, value in finished_slice.counts.items() if finished_slice.last else ():
            counts[key] += value
    shards = [shard for finished_slice in all_slices(progress) for shard in finished_slice.shards]
    sources = [source for finished_slice in all_slices(progress) for source in finished_slice.sources]
    with disk_errors(out):
        write_manifest(out, about, shards, sources, counts)
