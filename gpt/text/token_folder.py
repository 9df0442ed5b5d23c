"""Finished token folders: reading, verifying, and merging parts.

    manifest.json                              tokenizer, split, counts, sha256 of each shard
    sources.jsonl                              the sources, one per line
    train-GGGGG-SSSSS.ids, val-GGGGG-SSSSS.ids shards (`gpt.text.shards`) of group GGGGG, slice SSSSS
    tokenizer.tiktoken …                       the tokenizer's files

Groups and slices depend only on the sources, so merging parts from several machines gives the same folder as one
machine.
"""

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from gpt.errors import UserError
from gpt.files import (
    LINES_LIMIT,
    atomic_file,
    atomic_folder,
    disk_errors,
    file_sha256,
    open_regular,
    read_json,
    read_lines,
    to_json,
    write_file,
)
from gpt.settings import Count, checked
from gpt.text.shards import SIDES, Shard, Side, TokenStream
from gpt.text.tokenizer import Tokenizer
from gpt.text.tokenizer_files import read_described_tokenizer, tokenizer_files
from gpt.words import counted

FORMAT = 1
MANIFEST = "manifest.json"
SOURCES = "sources.jsonl"
PROGRESS = "progress.jsonl"  # Marks an unfinished folder.


@dataclass(frozen=True)
class ShardRecord:
    """The manifest's entry for a shard. ``bytes`` is the size of the text."""

    file: str
    side: Side
    group: Count
    slice: Count
    documents: Count
    tokens: Count
    bytes: Count
    sha256: str


@dataclass(frozen=True)
class SourceRecord:
    """A source. ``size`` is the stored size, and ``time`` the modification time. ``bytes`` and ``sha256`` refer to the
    UTF-8 text."""

    group: Count
    name: str
    size: Count
    time: int
    documents: Count
    bytes: Count
    sha256: str


def shard_name(side: Side, group: int, slice: int) -> str:
    """Returns a shard's file name, such as ``train-00012-00003.ids``."""
    return f"{side}-{group:05d}-{slice:05d}.ids"


def is_token_folder(path: str | Path) -> bool:
    """Whether ``path`` is a token folder, finished or not."""
    return (Path(path) / MANIFEST).is_file() or (Path(path) / PROGRESS).is_file()


class TokenFolder:
    """A finished token folder. Raises `UserError` if it is unfinished, damaged or of another version."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not (self.path / MANIFEST).exists() and (self.path / PROGRESS).exists():
            raise UserError(f"{path} is not finished", f"resume it: gpt tokenize … -o {path} --resume")
        self.manifest = read_json(self.path / MANIFEST)
        if self.manifest.get("format") != FORMAT:
            raise UserError(
                f"{path} has format {self.manifest.get('format')!r}; this program reads format {FORMAT}",
                "make it again from the text",
            )
        try:
            self.shards = [checked(ShardRecord, record, MANIFEST) for record in self.manifest["shards"]]
            self._check_manifest()
        except (KeyError, TypeError, ValueError, UserError):
            raise UserError(f"{self.path / MANIFEST} is damaged", "create the folder again from the text") from None
        self.documents: int = self.manifest["documents"]
        self.bytes: int = self.manifest["bytes"]
        self.tokens: int = self.manifest["tokens"]

    def _check_manifest(self) -> None:
        manifest = self.manifest
        _require(manifest["split"]["by"] in ("hash", "end", "text", "nothing"))
        _require(isinstance(manifest["asked"], dict))
        _require(isinstance(manifest["reading"], dict))
        _require(all(isinstance(text, str) for text in manifest["texts"]))
        part = manifest["part"]
        _require(part is None or (len(part) == 2 and all(type(n) is int for n in part) and 1 <= part[0] <= part[1]))
        counts = [manifest["sources"]["count"], *(manifest[key] for key in ("documents", "bytes", *COUNTS))]
        _require(all(type(count) is int and count >= 0 for count in counts))
        keys = [(record.side, record.group, record.slice) for record in self.shards]
        _require(keys == sorted(set(keys)))
        for record in self.shards:
            _require(record.file == shard_name(record.side, record.group, record.slice))
        _require(manifest["tokens"] == sum(record.tokens for record in self.shards))
        _require(all(manifest[side] == _totals(self.shards, side) for side in SIDES))

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The folder's tokenizer. Raises `UserError` if its fingerprint differs from the manifest."""
        return read_described_tokenizer(self.path, self.manifest.get("tokenizer"), str(self.path / MANIFEST))

    def adopt_tokenizer(self, tokenizer: Tokenizer) -> bool:
        """Adopts a model's tokenizer, which can be limited to fewer ids than this folder's. Returns False if the
        tokenizers differ."""
        if self.tokenizer.fingerprint != tokenizer.fingerprint:
            return False
        self.tokenizer = tokenizer
        return True

    def stream(self, side: Side) -> TokenStream:
        """Opens the ids of one side. Raises `UserError` if a shard does not match the manifest."""
        vocab_size = self.tokenizer.vocab_size
        shards = []
        for record in self.shards:
            if record.side == side:
                shard = Shard(self.path / record.file)
                if (len(shard), shard.documents, shard.vocab_size) != (record.tokens, record.documents, vocab_size):
                    raise UserError(f"{shard.path} does not match {MANIFEST}", "create the folder again from the text")
                shard.vocab_size = self.tokenizer.usable
                shards.append(shard)
        return TokenStream(shards)

    def notes(self) -> list[str]:
        """Returns notes on what was skipped, replaced or split, and on special tokens in the text."""
        replaced, skipped, cuts, specials = (self.manifest[key] for key in COUNTS)
        word, verb = ("special tokens", "they are") if self.tokenizer.specials else (self.tokenizer.eot_token, "it is")
        lines = {
            f"the text contains {word} {counted(specials, 'time')}: {verb} treated as ordinary text": specials,
            f"split {counted(cuts, 'piece')} of over 500,000 characters without a break for linear time": cuts,
            counted(replaced, "invalid byte was", "invalid bytes were") + " replaced with U+FFFD": replaced,
            counted(skipped, "file, line or row", "files, lines or rows") + " could not be read: left out": skipped,
        }
        return [line for line, count in lines.items() if count]

    def count_text_bytes(self, side: Side) -> int:
        """Returns the text size of one side in bytes."""
        return sum(record.bytes for record in self.shards if record.side == side)

    def verify(self, on_progress: Callable[[int, int], None] = lambda tokens_done, total: None) -> None:
        """Verifies checksums, ids, offsets and totals of all files. Raises `UserError` naming a damaged file."""
        total = sum(record.tokens for record in self.shards)
        try:
            is_intact = file_sha256(self.path / SOURCES) == self.manifest["sources"].get("sha256")
        except OSError as error:
            raise UserError(f"cannot read {self.path / SOURCES}: {error.strerror or error}") from None
        if not is_intact:
            raise UserError(f"{self.path / SOURCES} is damaged: its sha256 does not match {MANIFEST}")
        sources = list(self.sources())
        totals = (len(sources), sum(s.documents for s in sources), sum(s.bytes for s in sources))
        if totals != (self.manifest["sources"]["count"], self.documents, self.bytes):
            raise UserError(f"{self.path / MANIFEST} is damaged: its totals do not match {SOURCES}")
        tokens_done = 0
        for record in self.shards:
            Shard(self.path / record.file).verify(record.sha256)
            tokens_done += record.tokens
            on_progress(tokens_done, total)
        self.check_shards()

    def check_shards(self) -> None:
        """Raises `UserError` if a shard's header does not match the manifest. Reads no ids."""
        for side in SIDES:
            self.stream(side)

    def sources(self) -> Iterator[SourceRecord]:
        """Yields the records of the sources."""
        try:
            with open_regular(self.path / SOURCES, LINES_LIMIT) as file:
                for line in read_lines(file):
                    values = json.loads(line.decode("utf-8", "surrogateescape"))
                    yield checked(SourceRecord, values, str(self.path / SOURCES))
        except (OSError, ValueError, RecursionError) as error:
            raise UserError(f"cannot read {self.path / SOURCES}: {error}", "create the folder again") from None


def write_manifest(
    folder: Path,
    about: Mapping[str, Any],
    shards: Sequence[ShardRecord],
    sources: Sequence[SourceRecord],
    counts: Mapping[str, int],
) -> None:
    """Finishes the folder: writes ``sources.jsonl``, then ``manifest.json``. ``counts`` are the totals of `COUNTS`."""
    with atomic_file(folder / SOURCES) as file:
        for source in sources:
            file.write((json.dumps(asdict(source), ensure_ascii=False) + "\n").encode("utf-8", "surrogateescape"))
    sorted_records = sorted(shards, key=lambda record: (record.side, record.group, record.slice))
    manifest = {
        "format": FORMAT,
        **about,
        "documents": sum(source.documents for source in sources),
        "bytes": sum(source.bytes for source in sources),
        "tokens": sum(record.tokens for record in sorted_records),
        "train": _totals(sorted_records, "train"),
        "val": _totals(sorted_records, "val"),
        **counts,
        "sources": {"file": SOURCES, "count": len(sources), "sha256": file_sha256(folder / SOURCES)},
        "shards": [asdict(record) for record in sorted_records],
    }
    write_file(folder / MANIFEST, to_json(manifest))
    with contextlib.suppress(FileNotFoundError):
        (folder / PROGRESS).unlink()


def _totals(shards: Sequence[ShardRecord], side: Side) -> dict[str, int]:
    records = [record for record in shards if record.side == side]
    totals: dict[str, int] = {}
    for key in ("documents", "bytes", "tokens"):
        totals[key] = sum(getattr(record, key) for record in records)
    return totals


COUNTS = ("replaced", "skipped", "cut_pieces", "end_of_text_in_text")


def merge(parts: Sequence[str | Path], out: str | Path) -> TokenFolder:
    """Merges the parts of a corpus into one folder. Raises `UserError` if a part is missing or duplicated, or was
    created from other sources or with other settings."""
    target = Path(out)
    if target.exists():
        raise UserError(f"{out} already exists", "choose another path with --out; nothing is overwritten")
    folders = [TokenFolder(part) for part in parts]
    _check_parts(folders)
    folders.sort(key=lambda folder: int(folder.manifest["part"][0]))
    sources = sorted((s for folder in folders for s in folder.sources()), key=lambda source: source.group)
    shards = [record for folder in folders for record in folder.shards]
    _check_disjoint(sources, shards)
    for folder in folders:
        folder.check_shards()
    counts = {key: sum(folder.manifest[key] for folder in folders) for key in COUNTS}
    with disk_errors(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        with atomic_folder(target) as temp_folder:
            for name, data in tokenizer_files(folders[0].tokenizer).items():
                write_file(temp_folder / name, data)
            for folder in folders:
                for record in folder.shards:
                    _link(folder.path / record.file, temp_folder / record.file)
            write_manifest(temp_folder, _get_provenance(folders[0]) | {"part": None}, shards, sources, counts)
    return TokenFolder(target)


def _check_disjoint(sources: Sequence[SourceRecord], shards: Sequence[ShardRecord]) -> None:
    """Raises `UserError` if parts overlap. Parts of the same text never do."""
    hint = "create all parts from the same text"
    groups: dict[str, int] = {}
    for source in sources:
        if groups.setdefault(source.name, source.group) != source.group:
            raise UserError(f"{source.name} is in two of the parts", hint)
    if len({record.file for record in shards}) != len(shards):
        raise UserError("two of the parts have the same shards", hint)


def _get_provenance(folder: TokenFolder) -> dict[str, Any]:
    keys = ("texts", "asked", "split", "reading", "corpus", "part", "tokenizer")
    return {key: folder.manifest.get(key) for key in keys}


def _check_parts(folders: Sequence[TokenFolder]) -> None:
    first = folders[0]
    part_numbers = []
    for folder in folders:
        part = folder.manifest.get("part")
        if not isinstance(part, list) or len(part) != 2:
            raise UserError(
                f"{folder.path} is not a part: it was created without --part", "give the folders created with --part"
            )
        part_numbers.append(int(part[0]))
        provenance, first_provenance = _get_provenance(folder), _get_provenance(first)
        for key in ("corpus", "split", "reading", "tokenizer"):
            if provenance[key] != first_provenance[key] or part[1] != first_provenance["part"][1]:
                raise UserError(f"{folder.path} and {first.path} are not parts of one corpus: their {key} differs")
    count = int(_get_provenance(first)["part"][1])
    missing_parts = sorted(set(range(1, count + 1)) - set(part_numbers))
    if missing_parts:
        raise UserError(
            f"part {missing_parts[0]}/{count} is missing", f"run: gpt tokenize … --part {missing_parts[0]}/{count}"
        )
    if len(part_numbers) != count:
        raise UserError(f"{len(part_numbers)} folders were given for {count} parts: one was given twice")


def _link(source: Path, target: Path) -> None:
    """Creates a hard link, or a copy if links are not supported."""
    try:
        os.link(source, target)
    except FileExistsError:
        raise
    except OSError:
        shutil.copyfile(source, target)


def _require(condition: bool) -> None:
    """Raises ValueError unless ``condition``. ``python -O`` would remove an assert."""
    if not condition:
        raise ValueError
