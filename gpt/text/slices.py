"""A token folder while it is made: slice by slice, a line of ``progress.jsonl`` for each that is whole."""

import contextlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gpt.config import from_dict
from gpt.errors import UserError
from gpt.files import disk_errors, read_json, whole_folder, write_file
from gpt.text import shards
from gpt.text.corpus import Corpus
from gpt.text.items import Mark
from gpt.text.tokenizer import Tokenizer
from gpt.text.tokenizer import describe as describe_tokenizer
from gpt.text.tokenizer_files import read_own, tokenizer_files
from gpt.text.tokens import (
    COUNTS,
    MANIFEST,
    PROGRESS,
    SIDES,
    ShardRecord,
    Side,
    SourceRecord,
    shard_name,
    write_manifest,
)  # fmt: skip

if TYPE_CHECKING:
    from gpt.text.tokenize import Encoded

SLICE_IDS = 2**24  # ids that end a slice: 32 or 64 MiB


@dataclass
class Done:
    """The lines of ``progress.jsonl`` after the first: a finished slice each."""

    lines: list[dict[str, Any]] = field(default_factory=list)

    def items(self, group: int) -> int:
        """How many items of a group are in finished slices."""
        return max((line["items"] for line in self.lines if line["group"] == group), default=0)

    def whole(self, group: int) -> bool:
        """Whether all of a group is."""
        return any(line["last"] for line in self.lines if line["group"] == group)


class Writer:
    """Gathers what was encoded into slices and writes them, a line of progress each."""

    def __init__(self, folder: Path, vocab_size: int, done: Done) -> None:
        self.folder, self.vocab_size, self.done = folder, vocab_size, done
        self._begin()

    def _begin(self) -> None:
        self._ids: dict[Side, list[shards.Ids]] = {side: [] for side in SIDES}
        self._offsets: dict[Side, list[shards.Offsets]] = {side: [] for side in SIDES}
        self._lengths = dict.fromkeys(SIDES, 0)
        self._bytes = dict.fromkeys(SIDES, 0)
        self._sources: list[SourceRecord] = []
        self._seen = {"end_of_text_in_text": 0, "cut_pieces": 0}

    def add(self, mark: Mark, encoded: "Encoded") -> None:
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

    def _write(self, mark: Mark) -> None:
        number = sum(line["group"] == mark.group for line in self.done.lines)
        made = []
        for side in SIDES:
            if self._lengths[side]:
                path = self.folder / shard_name(side, mark.group, number)
                offsets = np.concatenate(self._offsets[side])
                sha256 = shards.write(path, self._ids[side], offsets, self.vocab_size)
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
        self.done.lines.append(line)


def describe(corpus: Corpus, tokenizer: Tokenizer, share: tuple[int, int] | None) -> dict[str, Any]:
    """What decides the folder's bytes, for its manifest."""
    return {
        **_describe_corpus(corpus, share),
        "tokenizer": describe_tokenizer(tokenizer),
    }


def _describe_corpus(corpus: Corpus, share: tuple[int, int] | None) -> dict[str, Any]:
    return {
        "texts": list(corpus.texts),
        "asked": dict(corpus.asked),
        "split": corpus.split.describe(),
        "reading": asdict(corpus.reading),
        "corpus": corpus.identity(),
        "part": list(share) if share else None,
    }


def begin(out: Path, about: Mapping[str, Any], corpus: Corpus, tokenizer: Tokenizer) -> None:
    """Makes the folder, with the tokenizer and the first line of progress: what it is made from."""
    sources = [[source.name, source.size, source.time] for source in corpus.sources]
    with disk_errors(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        with whole_folder(out) as beside:
            for name, data in tokenizer_files(tokenizer).items():
                write_file(beside / name, data)
            write_file(beside / PROGRESS, (json.dumps({"about": about, "sources": sources}) + "\n").encode())


def begun_tokenizer(out: Path, corpus: Corpus) -> Tokenizer:
    """The tokenizer of a folder that was begun, so that it need not be learnt again.

    Raises `UserError` where another one is asked for now.
    """
    begun = _first_line(out)["about"]
    _check_asked(out, begun, corpus)
    return read_own(out, begun.get("tokenizer"), str(out / PROGRESS))


def check_finished(out: Path, corpus: Corpus, share: tuple[int, int] | None) -> None:
    """Raises `UserError` where a finished folder was made from something else."""
    manifest, now = read_json(out / MANIFEST), _describe_corpus(corpus, share)
    _check_asked(out, manifest, corpus)
    for key in ("corpus", "split", "part"):
        if manifest.get(key) != now[key]:
            raise UserError(f"{out} is finished, and was made with another {key}", "give another place with --out")


def _check_asked(out: Path, was: dict[str, Any], corpus: Corpus) -> None:
    for key, value in corpus.asked.items():
        if was["asked"].get(key) != value:
            raise UserError(
                f"{out} was begun with {key} {was['asked'].get(key)}, now {value}", "give the same, or another --out"
            )


def _first_line(out: Path) -> dict[str, Any]:
    try:
        with (out / PROGRESS).open("rb") as file:
            begun: dict[str, Any] = json.loads(file.readline())
        if begun.keys() >= {"about", "sources"} and begun["about"].keys() >= {"asked", "reading"}:
            return begun
    except (OSError, ValueError, AttributeError):
        pass
    raise UserError(f"{out} is no token folder that was begun here", "give another place with --out")


def read_progress(out: Path, about: Mapping[str, Any], corpus: Corpus) -> Done:
    """The finished slices of a folder that was begun with the same text and settings; leftovers go.

    Raises `UserError` naming what differs: a setting, or a source that has changed.
    """
    begun = _first_line(out)
    _check_same(out, begun["about"], about, begun["sources"], corpus)
    first, *lines = (out / PROGRESS).read_bytes().split(b"\n")
    done = Done()
    for line in lines:
        with contextlib.suppress(ValueError):  # the last line may be torn
            record = json.loads(line)
            if all(_is_there(out, shard) for shard in record["shards"]):
                done.lines.append(record)
    for path in out.glob(".tmp-*"):
        path.unlink(missing_ok=True)
    if lines and lines[-1]:  # torn: what follows must begin on a line of its own
        with disk_errors(out):
            write_file(out / PROGRESS, b"\n".join([first, *(json.dumps(x).encode() for x in done.lines), b""]))
    return done


def _is_there(out: Path, shard: dict[str, Any]) -> bool:
    record = from_dict(ShardRecord, shard, PROGRESS)
    with contextlib.suppress(UserError):
        return len(shards.Shard(out / shard_name(record.side, record.group, record.slice))) == record.tokens
    return False


def _check_same(
    out: Path, was: dict[str, Any], about: Mapping[str, Any], sources: list[list[Any]], corpus: Corpus
) -> None:
    now = [[source.name, source.size, source.time] for source in corpus.sources]
    hint = "tokenize into another folder, with --out"
    before = {name: rest for name, *rest in sources}
    for name, *rest in now:
        if name not in before:
            raise UserError(f"{name} was not there when {out} was begun", hint)
        if before.pop(name) != rest:
            raise UserError(f"{name} has changed since {out} was begun", hint)
    if before:
        raise UserError(f"{next(iter(before))} is gone since {out} was begun", hint)
    for key in ("tokenizer", "split", "part"):
        if was.get(key) != about[key]:
            raise UserError(
                f"{out} was begun with another {key}: {_short(was.get(key))}, now {_short(about[key])}", hint
            )
    for key, value in about["reading"].items():  # what only matters for bad text may change: there was none so far
        if key not in ("errors", "skip_bad") and was["reading"].get(key) != value:
            raise UserError(f"{out} was begun with {key} {was['reading'].get(key)!r}, now {value!r}", hint)


def _short(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {value[key]}" for key in ("name", "by", "fraction", "seed") if key in value)
    return str(value)


def finish(out: Path, about: Mapping[str, Any], done: Done) -> None:
    """The manifest, with which the folder is whole."""
    made = [from_dict(ShardRecord, shard, PROGRESS) for line in done.lines for shard in line["shards"]]
    sources = [from_dict(SourceRecord, source, PROGRESS) for line in done.lines for source in line["sources"]]
    counts = dict.fromkeys(COUNTS, 0)
    for line in done.lines:
        for key, value in [*line["encoded"].items(), *(line["read"].items() if line["last"] else [])]:
            counts[key] += value
    with disk_errors(out):
        write_manifest(out, about, made, sources, counts)
