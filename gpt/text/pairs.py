"""Pairs of a prompt and its completion, from JSON lines, packed or not."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

from gpt.config import ReadConfig, TextConfig
from gpt.errors import UserError
from gpt.text import formats, sources
from gpt.text.corpus import HASHED_SPLIT_FROM, hash_fraction
from gpt.text.documents import RECORDS, Chunk, Reader, utf8_size
from gpt.text.unpack import PackedFile, Source


@dataclass(frozen=True)
class Pair:
    """A prompt and the completion that should follow it. ``where``: file and line."""

    prompt: str
    completion: str
    where: str


class PairReader(Reader):
    """Reads every file as JSON lines, whatever its suffix."""

    records = dict.fromkeys(RECORDS, formats.pairs)

    def pairs(self, source: Source) -> Iterator[Pair]:
        """Yields the pairs of a source, in order. Raises `UserError` naming a line without one, unless ``skip_bad``."""
        held: list[str] = []
        for chunk in self.documents(source):
            if chunk.begins and held:
                yield Pair(*json.loads("".join(held)))
                held.clear()
            held.append(chunk.text)
        if held:
            yield Pair(*json.loads("".join(held)))

    def _plain(self, file: PackedFile) -> Iterator[Chunk | None]:
        yield from self._records(file, ".jsonl")

    _whole = _plain  # type: ignore[assignment]


@dataclass(frozen=True)
class PairCorpus:
    """All pairs, split into training and held-out ones, with a record of each source."""

    name: str
    train: list[Pair]
    held_out: list[Pair]
    sources: list[dict[str, Any]]
    skipped: int


def read_pairs(texts: Sequence[str], config: TextConfig) -> PairCorpus:
    """Reads all pairs of ``texts`` into memory and splits them. Raises `UserError` where there are none."""
    if not texts:
        raise UserError("--pairs needs a TEXT", 'a file of {"prompt": …, "completion": …}, one a line')
    reader = PairReader(ReadConfig(**{f.name: getattr(config, f.name) for f in fields(ReadConfig)}))
    skipped = reader.skipped if config.skip_bad else None
    pairs, read = _read(reader, sources.find(texts, skipped))
    own: list[Pair] = []
    if config.val_text is not None:
        own, more = _read(reader, sources.find([config.val_text], skipped))
        read += more
    if not pairs:
        raise UserError(f"{texts[0]} is empty: 0 pairs", 'give {"prompt": …, "completion": …}, one a line')
    train, held_out = (pairs, own) if config.val_text is not None else split(pairs, config.val_fraction, config.seed)
    return PairCorpus(sources.run_name(texts), train, held_out, read, reader.skipped.count)


def _read(reader: PairReader, found: Sequence[Source]) -> tuple[list[Pair], list[dict[str, Any]]]:
    """Returns the pairs of sources, and of each source its size, number of pairs, bytes and sha256."""
    pairs: list[Pair] = []
    records: list[dict[str, Any]] = []
    for source in found:
        digest, first, size = hashlib.sha256(), len(pairs), 0
        for pair in reader.pairs(source):
            pairs.append(pair)
            size += utf8_size(pair.prompt) + utf8_size(pair.completion)
            digest.update(_identity(pair).encode())
        count = len(pairs) - first
        about = {"name": source.name, "size": source.size, "documents": count, "bytes": size}
        records.append({**about, "sha256": digest.hexdigest()})
    return pairs, records


def split(pairs: Sequence[Pair], fraction: float, seed: int) -> tuple[list[Pair], list[Pair]]:
    """Returns the pairs to train on and those held out: the last ``fraction``; from `HASHED_SPLIT_FROM` pairs on by a
    hash of seed and pair, so that adding pairs moves none. Never nothing, unless ``fraction`` is 0.

    Raises `UserError` where there are too few for two sides.
    """
    if fraction == 0:
        return list(pairs), []
    if len(pairs) < HASHED_SPLIT_FROM:
        kept = len(pairs) - max(1, round(len(pairs) * fraction))
        train, held_out = list(pairs[:kept]), list(pairs[kept:])
    else:
        shares = [hash_fraction(_identity(pair), seed) for pair in pairs]
        bound = max(fraction, min(shares) * 1.0000001)
        train = [pair for pair, at in zip(pairs, shares, strict=True) if at >= bound]
        held_out = [pair for pair, at in zip(pairs, shares, strict=True) if at < bound]
    if not train:
        raise UserError(
            f"there are too few pairs to hold {fraction:g} of them out: {len(pairs):,}",
            "give more, or --val-fraction 0 to hold nothing out",
        )
    return train, held_out


def _identity(pair: Pair) -> str:
    return json.dumps([pair.prompt, pair.completion])
