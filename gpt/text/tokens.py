"""A folder of token shards with its manifest: made by `gpt.text.tokenize`, trained on, checked, joined from parts.

    manifest.json        what it is: tokenizer, split, counts, each shard's sum
    sources.jsonl        what was read: a line a source
    train-GGGGG-SSSSS.ids  val-GGGGG-SSSSS.ids      shards (`gpt.text.shards`), by group of sources and slice of it
    tokenizer.tiktoken … the tokenizer's files

Groups and slices depend on the sources alone, so that parts made on many machines join into what one would have made.
"""

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from gpt.config import from_dict
from gpt.errors import UserError
from gpt.files import file_sum, read_json, to_json, whole_file, whole_folder, write_file
from gpt.text.shards import Shard
from gpt.text.stream import Stream
from gpt.text.tokenizer import Tokenizer
from gpt.text.tokenizer_files import read_own

FORMAT = 1
MANIFEST = "manifest.json"
SOURCES = "sources.jsonl"
PROGRESS = "progress.jsonl"  # of a folder that is not finished
Side = Literal["train", "val"]
SIDES: tuple[Side, ...] = ("train", "val")


@dataclass(frozen=True)
class ShardRecord:
    """What the manifest says of a shard. ``bytes`` are those of the text."""

    file: str
    side: Side
    group: int
    slice: int
    documents: int
    tokens: int
    bytes: int
    sha256: str


@dataclass(frozen=True)
class SourceRecord:
    """What was read: its size as stored and the time of its last change, and the text that came out of it."""

    group: int
    name: str
    size: int
    time: int
    documents: int
    bytes: int
    sha256: str  # of the text in UTF-8


def shard_name(side: Side, group: int, slice: int) -> str:
    """``train-00012-00003.ids``."""
    return f"{side}-{group:05d}-{slice:05d}.ids"


def is_token_folder(path: str | Path) -> bool:
    """Whether ``path`` is a folder of tokens, finished or not."""
    return (Path(path) / MANIFEST).is_file() or (Path(path) / PROGRESS).is_file()


class TokenFolder:
    """A finished folder. Raises `UserError` where it is none, is damaged, or was made by another version."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not (self.path / MANIFEST).exists() and (self.path / PROGRESS).exists():
            raise UserError(f"{path} is not finished", f"go on with it: gpt tokenize … -o {path} --resume")
        self.manifest = read_json(self.path / MANIFEST)
        if self.manifest.get("format") != FORMAT:
            raise UserError(
                f"{path} has format {self.manifest.get('format')!r}; this program reads format {FORMAT}",
                "make it again from the text",
            )
        try:
            self.shards = [from_dict(ShardRecord, record, MANIFEST) for record in self.manifest["shards"]]
            self.documents, self.bytes = int(self.manifest["documents"]), int(self.manifest["bytes"])
            self.tokens = int(self.manifest["tokens"])
        except (KeyError, TypeError, ValueError, UserError):
            raise UserError(f"{self.path / MANIFEST} is damaged", "make it again from the text") from None
        if any(Path(record.file).name != record.file for record in self.shards):
            raise UserError(f"{self.path / MANIFEST} names a file outside its folder")

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of its ids, whose fingerprint is compared."""
        return read_own(self.path, self.manifest.get("tokenizer"), str(self.path / MANIFEST))

    def stream(self, side: Side) -> Stream:
        """The ids of one side. Raises `UserError` where a shard is not what the manifest says."""
        vocab_size = self.tokenizer.vocab_size
        shards = []
        for record in self.shards:
            if record.side == side:
                shard = Shard(self.path / record.file)
                if (len(shard), shard.documents, shard.vocab_size) != (record.tokens, record.documents, vocab_size):
                    raise UserError(f"{shard.path} is not what {MANIFEST} says", "make the folder again from the text")
                shards.append(shard)
        return Stream(shards)

    def bytes_of(self, side: Side) -> int:
        """The text of one side, in bytes."""
        return sum(record.bytes for record in self.shards if record.side == side)

    def verify(self, each: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Reads everything and compares sums, ids and offsets. Raises `UserError` naming what is damaged."""
        total = sum(record.tokens for record in self.shards)
        if file_sum(self.path / SOURCES) != self.manifest.get("sources", {}).get("sha256"):
            raise UserError(f"{self.path / SOURCES} is damaged: its sha256 is not the one in {MANIFEST}")
        done = 0
        for record in self.shards:
            Shard(self.path / record.file).verify(record.sha256)
            done += record.tokens
            each(done, total)
        self.stream("train"), self.stream("val")

    def sources(self) -> Iterator[SourceRecord]:
        """What was read."""
        with (self.path / SOURCES).open(encoding="utf-8") as lines:
            for line in lines:
                yield from_dict(SourceRecord, json.loads(line), SOURCES)


def write_manifest(
    folder: Path,
    about: Mapping[str, Any],
    shards: Sequence[ShardRecord],
    sources: Sequence[SourceRecord],
    counts: Mapping[str, int],
) -> None:
    """``sources.jsonl``, then ``manifest.json``: with it the folder is finished. ``counts`` are further totals."""
    with whole_file(folder / SOURCES) as file:
        for source in sources:
            file.write((json.dumps(asdict(source), ensure_ascii=False) + "\n").encode("utf-8", "surrogateescape"))
    ordered = sorted(shards, key=lambda record: (record.side, record.group, record.slice))
    sums: dict[str, Any] = {
        side: {
            key: sum(getattr(record, key) for record in ordered if record.side == side)
            for key in ("documents", "bytes", "tokens")
        }
        for side in SIDES
    }
    manifest = {
        "format": FORMAT,
        **about,
        "documents": sum(source.documents for source in sources),
        "bytes": sum(source.bytes for source in sources),
        "tokens": sum(record.tokens for record in ordered),
        **sums,
        **counts,
        "sources": {"file": SOURCES, "count": len(sources), "sha256": file_sum(folder / SOURCES)},
        "shards": [asdict(record) for record in ordered],
    }
    write_file(folder / MANIFEST, to_json(manifest))
    with contextlib.suppress(FileNotFoundError):
        (folder / PROGRESS).unlink()


COUNTS = ("replaced", "skipped", "cut_pieces", "end_of_text_in_text")


def merge(parts: Sequence[str | Path], out: str | Path) -> TokenFolder:
    """Joins the parts of a corpus into the folder that one machine would have made. Nothing is tokenized again.

    Raises `UserError` where a part is missing, there twice, or made from other sources or with other settings.
    """
    target = Path(out)
    if target.exists():
        raise UserError(f"{out} is there already", "give another place with --out; nothing is overwritten")
    folders = [TokenFolder(part) for part in parts]
    _check_parts(folders)
    folders.sort(key=lambda folder: int(folder.manifest["part"][0]))
    about = _about(folders[0]) | {"part": None}
    target.parent.mkdir(parents=True, exist_ok=True)
    with whole_folder(target) as beside:
        for file in folders[0].path.iterdir():
            if file.suffix != ".ids" and file.name not in (MANIFEST, SOURCES):
                shutil.copyfile(file, beside / file.name)
        for folder in folders:
            for record in folder.shards:
                _link(folder.path / record.file, beside / record.file)
        sources = sorted((s for folder in folders for s in folder.sources()), key=lambda source: source.group)
        counts = {key: sum(int(folder.manifest.get(key, 0)) for folder in folders) for key in COUNTS}
        write_manifest(beside, about, [record for folder in folders for record in folder.shards], sources, counts)
    return TokenFolder(target)


def _about(folder: TokenFolder) -> dict[str, Any]:
    keys = ("texts", "asked", "split", "reading", "corpus", "part", "tokenizer")
    return {key: folder.manifest.get(key) for key in keys}


def _check_parts(folders: Sequence[TokenFolder]) -> None:
    first = folders[0]
    numbers = []
    for folder in folders:
        part = folder.manifest.get("part")
        if not isinstance(part, list) or len(part) != 2:
            raise UserError(
                f"{folder.path} is no part: it was made without --part", "give the folders made with --part"
            )
        numbers.append(int(part[0]))
        about, expected = _about(folder), _about(first)
        for key in ("corpus", "split", "reading", "tokenizer"):
            if about[key] != expected[key] or part[1] != expected["part"][1]:
                raise UserError(f"{folder.path} and {first.path} are not parts of one corpus: their {key} differs")
    count = int(_about(first)["part"][1])
    missing = sorted(set(range(1, count + 1)) - set(numbers))
    if missing:
        raise UserError(f"part {missing[0]}/{count} is missing", f"make it: gpt tokenize … --part {missing[0]}/{count}")
    if len(numbers) != count:
        raise UserError(f"{len(numbers)} folders are given for {count} parts: one is there twice")


def _link(source: Path, target: Path) -> None:
    """The same bytes at another place: one more name for them where the system can, a copy elsewhere."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
