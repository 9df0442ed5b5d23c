"""A token folder while it is being made, slice by slice, so that a resume skips finished slices.

The first line of ``progress.jsonl`` says what the folder is made from; each further line is a finished slice.
"""

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from gpt import files
from gpt.errors import UserError
from gpt.files import LINES_LIMIT, disk_errors, open_regular, read_regular, whole_folder, write_file
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
from gpt.text.tokenizer_files import find_tokenizer, read_own

SLICE_IDS = 2**24  # ids that end a slice: 32 or 64 MiB
_FOR_BAD_TEXT = ("errors", "skip_bad")  # settings of reading that matter for damaged text only
_OTHER_FOLDER = "tokenize into another folder, with --out"


@dataclass
class Item:
    """Texts to be encoded at once, each with whether it begins a document and its side; and all that a slice which ends
    here has to record."""

    group: int
    number: int  # in the group, from 1
    texts: list[str] = field(default_factory=list)
    begins: list[bool] = field(default_factory=list)
    sides: list[Side] = field(default_factory=list)
    bytes: dict[Side, int] = field(default_factory=lambda: dict.fromkeys(SIDES, 0))
    last: bool = False  # of the group
    sources: list[SourceRecord] = field(default_factory=list)  # that end in the item
    counts: dict[str, int] = field(default_factory=dict)  # of the group so far


@dataclass
class EncodedItem:
    """An item's ids by side, with `Tokenizer.opening` before each document, and the offsets of the documents."""

    ids: dict[Side, Ids] = field(default_factory=dict)
    offsets: dict[Side, list[int]] = field(default_factory=lambda: {side: [] for side in SIDES})


@dataclass(frozen=True)
class Slice:
    """A finished slice: a line of ``progress.jsonl`` after the first."""

    group: Count
    slice: Count
    items: Count  # of the group, up to the end of this slice
    last: bool  # of the group
    shards: list[ShardRecord]
    sources: list[SourceRecord]  # that end in the slice
    counts: dict[str, Count]  # of the group so far


@dataclass
class FinishedSlices:
    """The finished slices of each group, in order."""

    groups: dict[int, list[Slice]] = field(default_factory=dict)

    def all(self) -> list[Slice]:
        """Returns the slices of all groups, by group."""
        return [each for group in sorted(self.groups) for each in self.groups[group]]

    def count(self, group: int) -> int:
        """Returns the number of finished slices of a group."""
        return len(self.groups.get(group, ()))

    def items(self, group: int) -> int:
        """Returns the number of items of a group that lie in finished slices."""
        return self.groups[group][-1].items if group in self.groups else 0

    def is_whole(self, group: int) -> bool:
        """Whether the last slice of a group is finished."""
        return group in self.groups and self.groups[group][-1].last

    def add(self, finished: Slice) -> None:
        """Adds the next slice of a group."""
        self.groups.setdefault(finished.group, []).append(finished)


class ShardWriter:
    """Gathers encoded items into slices and writes their shards, then a line of progress."""

    def __init__(self, folder: Path, vocab_size: int, done: FinishedSlices) -> None:
        self.folder, self.vocab_size, self.done = folder, vocab_size, done
        self._items: list[tuple[Item, EncodedItem]] = []

    def add(self, item: Item, encoded: EncodedItem) -> None:
        """Takes the next item; writes the slice that it ends. Raises `WorkError` where the disk is full."""
        item.texts.clear()  # a slice has 64 MB of text and more
        self._items.append((item, encoded))
        if item.last or sum(len(ids) for _, each in self._items for ids in each.ids.values()) >= SLICE_IDS:
            with disk_errors(self.folder):
                self._write(item)
            self._items = []

    def _write(self, last: Item) -> None:
        sides = [side for side in SIDES if any(side in encoded.ids for _, encoded in self._items)]
        number = self.done.count(last.group)
        made = [self._write_shard(side, last.group, number) for side in sides]
        sources = [source for item, _ in self._items for source in item.sources]
        finished = Slice(last.group, number, last.number, last.last, made, sources, last.counts)
        with (self.folder / PROGRESS).open("ab") as file:
            file.write(_line(asdict(finished)))
            file.flush()
            os.fsync(file.fileno())
        self.done.add(finished)

    def _write_shard(self, side: Side, group: int, number: int) -> ShardRecord:
        name, length = shard_name(side, group, number), 0
        ids: list[Ids] = []
        offsets: list[int] = []
        for _, encoded in self._items:
            if side in encoded.ids:
                offsets += (length + offset for offset in encoded.offsets[side])
                ids.append(encoded.ids[side])
                length += len(ids[-1])
        sha256 = write_shard(self.folder / name, ids, np.array(offsets, np.uint64), self.vocab_size)
        size = sum(item.bytes[side] for item, _ in self._items)
        return ShardRecord(name, side, group, number, len(offsets), length, size, sha256)


def _line(values: Mapping[str, Any]) -> bytes:
    return json.dumps(values).encode() + b"\n"


@contextlib.contextmanager
def locked(out: Path) -> Iterator[None]:
    """Holds the folder for this process alone. Raises `UserError` where another process has it."""
    with files.locked(out, "wait for it, or choose another --out"):
        yield
        with contextlib.suppress(OSError):  # nobody's, or another process's by now
            (out / files.LOCK).unlink()


def provenance(corpus: Corpus, tokenizer: Tokenizer, share: tuple[int, int] | None) -> dict[str, Any]:
    """Returns all that decides the folder's bytes, as its manifest has it."""
    return {
        "texts": list(corpus.texts),
        "asked": dict(corpus.asked),
        "split": corpus.split.describe(),
        "reading": asdict(corpus.reading),
        "corpus": corpus.identity(),
        "part": list(share) if share else None,
        "tokenizer": describe(tokenizer),
    }


def begin(out: Path, about: Mapping[str, Any], corpus: Corpus, tokenizer: Mapping[str, bytes]) -> None:
    """Makes the folder with the tokenizer's files and the first line of progress: its provenance ``about`` and its
    sources."""
    sources = [[source.name, source.size, source.time] for source in corpus.sources]
    with disk_errors(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        with whole_folder(out) as beside:
            for name, data in tokenizer.items():
                write_file(beside / name, data)
            write_file(beside / PROGRESS, _line({"about": about, "sources": sources}))


def check_begun(out: Path, corpus: Corpus, share: tuple[int, int] | None) -> Tokenizer:
    """Returns the tokenizer of a folder that is begun or finished, so that it need not be learnt again.

    Raises `UserError` where the folder is made from other text or with other settings, naming what differs.
    """
    finished = (out / MANIFEST).exists()
    if finished:
        folder = TokenFolder(out)
        was, sources = folder.manifest, [[source.name, source.size, source.time] for source in folder.sources()]
    else:
        was, sources = (_first_line(out)[key] for key in ("about", "sources"))
    temporary = next((source.name for source in corpus.sources if source.temporary), None)
    if temporary is not None:
        raise UserError(
            f"{out} already exists, and {temporary} cannot be compared with the text it was made from",
            "put the text in a file, or choose another --out",
        )
    tokenizer = read_own(out, was.get("tokenizer"), str(out / (MANIFEST if finished else PROGRESS)))
    now = provenance(corpus, tokenizer, share)
    if corpus.asked["tokenizer"] != "auto":
        now["tokenizer"] = describe(find_tokenizer(corpus.asked["tokenizer"]))
    _check_sources(out, sources, corpus, share if finished else None)
    _check_settings(out, was, now)
    return tokenizer


def _first_line(out: Path) -> dict[str, Any]:
    try:
        with open_regular(out / PROGRESS, LINES_LIMIT) as file:
            begun: dict[str, Any] = json.loads(file.readline())
        about = begun["about"]
        if all(isinstance(about[key], dict) for key in ("asked", "reading")) and all(
            isinstance(name, str) and isinstance(size, int) and isinstance(time, int)
            for name, size, time in begun["sources"]
        ):
            return begun
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        pass
    raise UserError(f"{out} is not a token folder that gpt tokenize started", "choose another path with --out")


def read_progress(out: Path, about: Mapping[str, Any]) -> FinishedSlices:
    """Returns the finished slices of a folder that was begun with the same text and settings; removes leftovers.

    The slices of a group after one whose shards are missing are dropped. Where the settings for bad text changed, so is
    every unfinished group, since its items may come out otherwise.
    """
    begun = _first_line(out)
    done = FinishedSlices()
    dropped = False
    for line in read_regular(out / PROGRESS, LINES_LIMIT).split(b"\n")[1:]:
        found = _read_slice(line)
        if found is None:
            dropped |= line != b""  # the last one may be torn
        elif found.slice != done.count(found.group) or done.is_whole(found.group) or not _are_there(out, found):
            dropped = True  # and so are those after it, whose numbers do not follow
        else:
            done.add(found)
    if any(begun["about"]["reading"].get(key) != about["reading"][key] for key in _FOR_BAD_TEXT):
        done.groups = {group: slices for group, slices in done.groups.items() if done.is_whole(group)}
        dropped = True
    recorded = {shard.file for each in done.all() for shard in each.shards}
    for path in [*out.glob(".tmp-*"), *out.glob("*.ids")]:
        if path.name not in recorded:
            path.unlink(missing_ok=True)
    if dropped:
        first = {"about": about, "sources": begun["sources"]}
        with disk_errors(out):
            write_file(out / PROGRESS, b"".join(map(_line, [first, *map(asdict, done.all())])))
    return done


def _read_slice(line: bytes) -> Slice | None:
    """Returns the slice in a line of progress; None where the line is torn or damaged."""
    with contextlib.suppress(ValueError, RecursionError, UserError):
        found = checked(Slice, json.loads(line), PROGRESS)
        if found.counts.keys() == set(COUNTS):
            return found
    return None


def _are_there(out: Path, found: Slice) -> bool:
    """Whether the shards of a slice are on the disk, as long as they should be."""
    for record in found.shards:
        name = shard_name(record.side, found.group, found.slice)
        try:
            if record.file != name or len(Shard(out / name)) != record.tokens:
                return False
        except UserError:
            return False
    return True


def _check_sources(out: Path, was: list[list[Any]], corpus: Corpus, share: tuple[int, int] | None) -> None:
    """Compares names, sizes and times of the last change; of ``share`` alone where only that was recorded."""
    i, n = share or (1, 1)
    before = {name: rest for name, *rest in was}
    for number in (number for group in corpus.groups[i - 1 :: n] for number in group):
        source = corpus.sources[number]
        if source.name not in before:
            raise UserError(f"{source.name} did not exist when {out} was started", _OTHER_FOLDER)
        if before.pop(source.name) != [source.size, source.time]:
            raise UserError(f"{source.name} has changed since {out} was started", _OTHER_FOLDER)
    if before:
        raise UserError(f"{next(iter(before))} has disappeared since {out} was started", _OTHER_FOLDER)


def _check_settings(out: Path, was: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    for key in ("tokenizer", "split", "part", "corpus"):
        if was.get(key) != now[key]:
            said = f"{out} was started with another {key}: {_short(was.get(key))}, now {_short(now[key])}"
            raise UserError(said, _OTHER_FOLDER)
    strict = was["reading"].get("errors") == "strict" and not was["reading"].get("skip_bad")
    for table in ("asked", "reading"):
        for key, value in now[table].items():
            # Up to the first bad byte, strict reading makes the same ids as any other.
            if was[table].get(key) != value and not (strict and key in _FOR_BAD_TEXT):
                raise UserError(f"{out} was started with {key} {was[table].get(key)!r}, now {value!r}", _OTHER_FOLDER)


def _short(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {value[key]}" for key in ("name", "by", "fraction", "seed") if key in value)
    return str(value)


def finish(out: Path, about: Mapping[str, Any], done: FinishedSlices) -> None:
    """Writes the manifest, with which the folder is finished."""
    counts = dict.fromkeys(COUNTS, 0)
    for each in done.all():
        for key, value in each.counts.items() if each.last else ():
            counts[key] += value
    shards = [shard for each in done.all() for shard in each.shards]
    sources = [source for each in done.all() for source in each.sources]
    with disk_errors(out):
        write_manifest(out, about, shards, sources, counts)
