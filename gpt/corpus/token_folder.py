"""Finished token folders: reading and verifying them, one or several as one.

manifest.json                      tokenizer, split, counts, sha256 of each shard
sources.jsonl                      the sources, one per line
train-00000.ids, val-00000.ids …   shards (`gpt.corpus.shards`)
tokenizer.tiktoken …               the tokenizer's files
"""

import contextlib
import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from gpt.config.settings import Count, checked
from gpt.corpus.shards import SIDES, Shard, Side, TokenStream
from gpt.documents.sources import MANIFEST, PROGRESS, is_token_folder
from gpt.system.errors import UserError
from gpt.system.files import (
    LINES_LIMIT,
    atomic_file,
    file_sha256,
    open_regular,
    read_json,
    read_lines,
    reading,
    to_json,
    write_file,
)
from gpt.system.words import counted
from gpt.tokenizers.finding import read_described_tokenizer
from gpt.tokenizers.tokenizer import Tokenizer

FORMAT = 1
SOURCES = "sources.jsonl"


@dataclass(frozen=True)
class ShardRecord:
    """The manifest's entry for a shard. ``bytes`` is the size of the text."""

    file: str
    side: Side
    documents: Count
    tokens: Count
    bytes: Count
    sha256: str


@dataclass(frozen=True)
class SourceRecord:
    """A source. ``size`` is the stored size, and ``time`` the modification time. ``bytes`` and ``sha256`` refer to the
    UTF-8 text."""

    name: str
    size: Count
    time: int
    documents: Count
    bytes: Count
    sha256: str


def find_token_folders(texts: Sequence[str]) -> list[Path]:
    """Returns ``texts`` if they are `gpt tokenize` folders. Raises `UserError` if only some are."""
    folders = []
    for text in dict.fromkeys(texts):
        with reading(Path(text)):
            folders += [text] if is_token_folder(text) else []
    other = next((text for text in texts if text not in folders), None)
    if folders and other is not None:
        command = shlex.join(["gpt", "tokenize", other, "-o", "DIR", "--tokenizer", folders[0]])
        raise UserError(f"{folders[0]} is tokenized, {other} is not", f"tokenize it, and give both folders: {command}")
    return list(map(Path, folders))


class TokenFolder:
    """One or more finished token folders with the same tokenizer, read as one, in this order. Raises `UserError` if
    one is unfinished, damaged or of another version, or has another tokenizer."""

    def __init__(self, path: str | Path, *more_paths: str | Path) -> None:
        self.path = Path(path)
        self.manifest, self.shards = _read_manifest(self.path)
        self.folders = [self, *map(TokenFolder, more_paths)]
        for folder in self.folders:
            if folder.manifest["tokenizer"]["fingerprint"] != self.manifest["tokenizer"]["fingerprint"]:
                raise UserError(
                    f"{folder.path} was made with another tokenizer than {path}",
                    f"tokenize its text again, with --tokenizer {path}",
                )
        self.documents, self.bytes, self.tokens = map(self._count, ("documents", "bytes", "tokens"))

    def _count(self, key: str) -> int:
        return sum(folder.manifest[key] for folder in self.folders)

    @property
    def paths(self) -> list[Path]:
        """The paths of all folders."""
        return [folder.path for folder in self.folders]

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The folder's tokenizer. Raises `UserError` if its fingerprint differs from the manifest."""
        return read_described_tokenizer(self.path, self.manifest["tokenizer"], str(self.path / MANIFEST))

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
        for folder in self.folders:
            for record in (record for record in folder.shards if record.side == side):
                shard = Shard(folder.path / record.file)
                if (len(shard), shard.documents, shard.vocab_size) != (record.tokens, record.documents, vocab_size):
                    raise UserError(f"{shard.path} does not match {MANIFEST}", "create the folder again from the text")
                shard.vocab_size = self.tokenizer.usable
                shards.append(shard)
        return TokenStream(shards)

    def notes(self) -> list[str]:
        """Returns notes on what was skipped, replaced or split, and on special tokens in the text."""
        replaced, skipped, cuts, specials = map(self._count, COUNTS)
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
        return sum(folder.manifest[side]["bytes"] for folder in self.folders)

    def verify(self) -> None:
        """Verifies checksums, ids, offsets and totals of all files. Raises `UserError` naming a damaged file."""
        for folder in self.folders:
            folder._verify_sources()
            for record in folder.shards:
                Shard(folder.path / record.file).verify(record.sha256)
        for side in SIDES:
            self.stream(side)

    def _verify_sources(self) -> None:
        try:
            is_intact = file_sha256(self.path / SOURCES) == self.manifest["sources"].get("sha256")
        except OSError as error:
            raise UserError(f"cannot read {self.path / SOURCES}: {error.strerror or error}") from None
        if not is_intact:
            raise UserError(f"{self.path / SOURCES} is damaged: its sha256 does not match {MANIFEST}")
        sources = list(read_sources(self.path))
        totals = [len(sources), sum(s.documents for s in sources), sum(s.bytes for s in sources)]
        if totals != [self.manifest["sources"]["count"], self.manifest["documents"], self.manifest["bytes"]]:
            raise UserError(f"{self.path / MANIFEST} is damaged: its totals do not match {SOURCES}")

    def sources(self) -> Iterator[SourceRecord]:
        """Yields the records of the sources."""
        for path in self.paths:
            yield from read_sources(path)


def _read_manifest(path: Path) -> tuple[dict[str, Any], list[ShardRecord]]:
    if not (path / MANIFEST).exists() and (path / PROGRESS).exists():
        raise UserError(f"{path} is not finished", f"resume it: gpt tokenize … -o {path} --resume")
    manifest = read_json(path / MANIFEST)
    if manifest.get("format") != FORMAT:
        raise UserError(
            f"{path} has format {manifest.get('format')!r}; this program reads format {FORMAT}",
            "make it again from the text",
        )
    try:
        shards = [checked(ShardRecord, record, MANIFEST) for record in manifest["shards"]]
        _check_manifest(manifest, shards)
    except (KeyError, TypeError, ValueError, AttributeError, UserError):
        raise UserError(f"{path / MANIFEST} is damaged", "create the folder again from the text") from None
    return manifest, shards


def _check_manifest(manifest: Mapping[str, Any], shards: Sequence[ShardRecord]) -> None:
    """Raises ValueError, or the error of a missing key, if the manifest does not agree with itself."""
    counts = [manifest["sources"]["count"], *(manifest[key] for key in ("documents", "bytes", *COUNTS))]
    agrees = [
        manifest["split"]["by"] in ("hash", "end", "text", "nothing"),
        isinstance(manifest["asked"], dict),
        isinstance(manifest["reading"], dict),
        isinstance(manifest["tokenizer"]["fingerprint"], str),
        all(isinstance(text, str) for text in manifest["texts"]),
        all(type(count) is int and count >= 0 for count in counts),
        len({record.file for record in shards}) == len(shards),
        all(re.fullmatch(rf"{record.side}-[0-9-]+\.ids", record.file) for record in shards),
        manifest["tokens"] == sum(record.tokens for record in shards),
        all(manifest[side] == _totals(shards, side) for side in SIDES),
    ]
    if not all(agrees):
        raise ValueError


def read_sources(path: Path) -> Iterator[SourceRecord]:
    """Yields the records of the sources of one folder."""
    try:
        with open_regular(path / SOURCES, LINES_LIMIT) as file:
            for line in read_lines(file):
                values = json.loads(line.decode("utf-8", "surrogateescape"))
                yield checked(SourceRecord, values, str(path / SOURCES))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"cannot read {path / SOURCES}: {error}", "create the folder again") from None


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
    sorted_records = sorted(shards, key=lambda record: record.side)
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
    return {key: sum(getattr(record, key) for record in records) for key in ("documents", "bytes", "tokens")}


COUNTS = ("replaced", "skipped", "cut_pieces", "end_of_text_in_text")
