"""A token folder while it is made: slice by slice, a line of ``progress.jsonl`` for each that is whole."""

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
from gpt.text.encoders import EncodedItem
from gpt.text.shards import SIDES, Ids, Offsets, Shard, Side, write_shard
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
from gpt.text.tokenizer import Tokenizer
from gpt.text.tokenizer import describe as describe_tokenizer
from gpt.text.tokenizer_files import find_tokenizer, read_own

SLICE_IDS = 2**24  # ids that end a slice: 32 or 64 MiB


@dataclass
class ItemEnd:
    """Where an item ends: all that must be known to go on after it."""

    group: int
    items: int  # of the group, this one included
    last: bool = False  # of the group
    bytes: dict[Side, int] = field(default_factory=lambda: {"train": 0, "val": 0})  # of the item's text
    sources: list[SourceRecord] = field(default_factory=list)  # that end in the item
    counts: dict[str, int] = field(default_factory=dict)  # of the group so far


@dataclass(frozen=True)
class Slice:
    """A line of ``progress.jsonl`` after the first: a finished slice."""

    group: Count
    slice: Count
    items: Count
    last: bool
    shards: list[ShardRecord]
    sources: list[SourceRecord]
    read: dict[str, Count]
    encoded: dict[str, Count]


@dataclass
class Done:
    """The lines of ``progress.jsonl`` after the first: a finished slice each, those of a group in order."""

    groups: dict[int, list[dict[str, Any]]] = field(default_factory=dict)

    def lines(self) -> list[dict[str, Any]]:
        """All of them, by group."""
        return [line for group in sorted(self.groups) for line in self.groups[group]]

    def slices(self, group: int) -> int:
        """How many slices of a group are finished."""
        return len(self.groups.get(group, ()))

    def items(self, group: int) -> int:
        """How many items of a group are in finished slices."""
        return int(self.groups[group][-1]["items"]) if group in self.groups else 0

    def whole(self, group: int) -> bool:
        """Whether all of a group is."""
        return group in self.groups and bool(self.groups[group][-1]["last"])

    def add(self, line: dict[str, Any]) -> None:
        """Counts one more slice."""
        self.groups.setdefault(line["group"], []).append(line)


class ShardWriter:
    """Gathers what was encoded into slices and writes them, a line of progress each."""

    def __init__(self, folder: Path, vocab_size: int, done: Done) -> None:
        self.folder, self.vocab_size, self.done = folder, vocab_size, done
        self._begin()

    def _begin(self) -> None:
        self._ids: dict[Side, list[Ids]] = {side: [] for side in SIDES}
        self._offsets: dict[Side, list[Offsets]] = {side: [] for side in SIDES}
        self._lengths = dict.fromkeys(SIDES, 0)
        self._bytes = dict.fromkeys(SIDES, 0)
        self._sources: list[SourceRecord] = []
        self._seen = {"end_of_text_in_text": 0, "cut_pieces": 0}

    def add(self, mark: ItemEnd, encoded: EncodedItem) -> None:
        """Takes the next item; writes the slice that it ends."""
        for side, ids in encoded.ids.items():
            self._offsets[side].append(encoded.offsets[side] + np.uint64(self._lengths[side]))
            self._ids[side].append(ids)
            self._lengths[side] += len(ids)
            self._bytes[side] += mark.bytes[side]
        self._sources += mark.sources
        self._seen["end_of_text_in_text"] += encoded.end_of_text_in_text
        self._seen["cut_pieces"] += encoded.cut_pieces
        if mark.last or sum(self._lengths.values()) >= SLICE_IDS:
            with disk_errors(self.folder):
                self._write(mark)
            self._begin()

    def _write(self, mark: ItemEnd) -> None:
        number = self.done.slices(mark.group)
        made = []
        for side in SIDES:
            if self._lengths[side]:
                path = self.folder / shard_name(side, mark.group, number)
                offsets = np.concatenate(self._offsets[side])
                sha256 = write_shard(path, self._ids[side], offsets, self.vocab_size)
                made.append(
                    ShardRecord(
                        path.name,
                        side,
                        mark.group,
                        number,
                        len(offsets),
                        self._lengths[side],
                        self._bytes[side],
                        sha256,
                    )
                )
        line = {
            "group": mark.group,
            "slice": number,
            "items": mark.items,
            "last": mark.last,
            "shards": [asdict(shard) for shard in made],
            "sources": [asdict(source) for source in self._sources],
            "read": mark.counts,
            "encoded": self._seen,
        }
        with (self.folder / PROGRESS).open("ab") as file:
            file.write((json.dumps(line) + "\n").encode())
            file.flush()
            os.fsync(file.fileno())
        self.done.add(line)


@contextlib.contextmanager
def locked(out: Path) -> Iterator[None]:
    """Holds the folder for this process alone. Raises `UserError` where another one has it."""
    with files.locked(out, "wait for it, or give another --out"):
        yield
        with contextlib.suppress(OSError):  # it is nobody's, or already another's
            (out / files.LOCK).unlink()


def describe(corpus: Corpus, tokenizer: Tokenizer, share: tuple[int, int] | None) -> dict[str, Any]:
    """What decides the folder's bytes, for its manifest."""
    return {
        "texts": list(corpus.texts),
        "asked": dict(corpus.asked),
        "split": corpus.split.describe(),
        "reading": asdict(corpus.reading),
        "corpus": corpus.identity(),
        "part": list(share) if share else None,
        "tokenizer": describe_tokenizer(tokenizer),
    }


def begin(out: Path, about: Mapping[str, Any], corpus: Corpus, tokenizer: Mapping[str, bytes]) -> None:
    """Makes the folder, with the files of the tokenizer and the first line of progress: what it is made from."""
    sources = [[source.name, source.size, source.time] for source in corpus.sources]
    with disk_errors(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        with whole_folder(out) as beside:
            for name, data in tokenizer.items():
                write_file(beside / name, data)
            write_file(beside / PROGRESS, (json.dumps({"about": about, "sources": sources}) + "\n").encode())


def check_begun(out: Path, corpus: Corpus, share: tuple[int, int] | None) -> Tokenizer:
    """The tokenizer of a folder that was begun or finished, so that it need not be learnt again.

    Raises `UserError` where the folder was made from other text or with other settings, naming what differs.
    """
    finished = (out / MANIFEST).exists()
    was = TokenFolder(out).manifest if finished else _first_line(out)["about"]
    passing = next((source.name for source in corpus.sources if source.passing), None)
    if passing is not None:
        raise UserError(
            f"{out} is there, and {passing} cannot be compared with what it was made from",
            "put the text into a file, or give another --out",
        )
    for key, value in corpus.asked.items():
        if was["asked"].get(key) != value:
            raise UserError(
                f"{out} was begun with {key} {was['asked'].get(key)}, now {value}", "give the same, or another --out"
            )
    tokenizer = read_own(out, was.get("tokenizer"), str(out / (MANIFEST if finished else PROGRESS)))
    now = describe(corpus, tokenizer, share)
    if corpus.asked["tokenizer"] != "auto":
        now["tokenizer"] = describe_tokenizer(find_tokenizer(corpus.asked["tokenizer"]))
    begun = [[s.name, s.size, s.time] for s in TokenFolder(out).sources()] if finished else _first_line(out)["sources"]
    _check_sources(out, begun, corpus, share if finished else None)
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
    raise UserError(f"{out} is no token folder that was begun here", "give another place with --out")


def read_progress(out: Path, about: Mapping[str, Any]) -> Done:
    """The finished slices of a folder that was begun with the same text and settings; leftovers go.

    Of a group, what follows a slice that is not whole is made again; where the settings for bad text changed, so is all
    of a group that is not finished, since other items may come out of it.
    """
    begun = _first_line(out)
    done = Done()
    dropped = False
    for line in read_regular(out / PROGRESS, LINES_LIMIT).split(b"\n")[1:]:
        record = _slice_line(line)
        if record is None:
            dropped |= line != b""  # the last one may be torn
            continue
        group = record["group"]
        if record["slice"] != done.slices(group) or done.whole(group) or not _are_there(out, record):
            dropped = True  # and so are those after it, whose numbers do not follow
        else:
            done.add(record)
    if any(begun["about"]["reading"].get(key) != about["reading"][key] for key in _FOR_BAD_TEXT):
        done.groups = {group: lines for group, lines in done.groups.items() if done.whole(group)}
        dropped = True
    recorded = {shard["file"] for line in done.lines() for shard in line["shards"]}
    for path in [*out.glob(".tmp-*"), *out.glob("*.ids")]:
        if path.name not in recorded:
            path.unlink(missing_ok=True)
    if dropped:
        first = {"about": about, "sources": begun["sources"]}
        with disk_errors(out):
            write_file(out / PROGRESS, b"".join(json.dumps(x).encode() + b"\n" for x in [first, *done.lines()]))
    return done


def _slice_line(line: bytes) -> dict[str, Any] | None:
    """A line of progress; None where it is none."""
    with contextlib.suppress(ValueError, RecursionError, UserError):
        record: dict[str, Any] = json.loads(line)
        found = checked(Slice, record, PROGRESS)
        if {*found.read, *found.encoded} <= set(COUNTS):
            return record
    return None


def _are_there(out: Path, line: dict[str, Any]) -> bool:
    """Whether the shards of a slice are on the disk, as long as they should be."""
    for shard in line["shards"]:
        record = checked(ShardRecord, shard, PROGRESS)
        name = shard_name(record.side, line["group"], line["slice"])
        try:
            if record.file != name or len(Shard(out / name)) != record.tokens:
                return False
        except UserError:
            return False
    return True


_FOR_BAD_TEXT = ("errors", "skip_bad")  # settings of reading that matter where a text is not what it should be


def _check_sources(out: Path, was: list[list[Any]], corpus: Corpus, share: tuple[int, int] | None) -> None:
    """Compares names, sizes and times of change, of a share where only that was recorded."""
    i, n = share or (1, 1)
    hint = "tokenize into another folder, with --out"
    before = {name: rest for name, *rest in was}
    for number in (number for group in corpus.groups[i - 1 :: n] for number in group):
        source = corpus.sources[number]
        if source.name not in before:
            raise UserError(f"{source.name} was not there when {out} was begun", hint)
        if before.pop(source.name) != [source.size, source.time]:
            raise UserError(f"{source.name} has changed since {out} was begun", hint)
    if before:
        raise UserError(f"{next(iter(before))} is gone since {out} was begun", hint)


def _check_settings(out: Path, was: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    hint = "tokenize into another folder, with --out"
    for key in ("tokenizer", "split", "part", "corpus"):
        if was.get(key) != now[key]:
            raise UserError(f"{out} was begun with another {key}: {_short(was.get(key))}, now {_short(now[key])}", hint)
    strict = was["reading"].get("errors") == "strict" and not was["reading"].get("skip_bad")
    for key, value in now["reading"].items():  # up to a wrong byte, strictness has changed nothing
        if was["reading"].get(key) != value and not (strict and key in _FOR_BAD_TEXT):
            raise UserError(f"{out} was begun with {key} {was['reading'].get(key)!r}, now {value!r}", hint)


def _short(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {value[key]}" for key in ("name", "by", "fraction", "seed") if key in value)
    return str(value)


def finish(out: Path, about: Mapping[str, Any], done: Done) -> None:
    """The manifest, with which the folder is whole."""
    lines = done.lines()
    made = [checked(ShardRecord, shard, PROGRESS) for line in lines for shard in line["shards"]]
    sources = [checked(SourceRecord, source, PROGRESS) for line in lines for source in line["sources"]]
    counts = dict.fromkeys(COUNTS, 0)
    for line in lines:
        for key, value in [*line["encoded"].items(), *(line["read"].items() if line["last"] else [])]:
            counts[key] += value
    with disk_errors(out):
        write_manifest(out, about, made, sources, counts)
