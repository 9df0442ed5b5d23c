"""Repeated text: copies of documents, repeated passages, and held-out passages that are also in the training text.

Every window of about `WINDOW_BYTES` bytes is hashed. The hash decides whether the window is sampled, so equal windows
are sampled together, and shares of the sample estimate shares of the text (Broder 1997, "On the resemblance and
containment of documents"). Only tokens are read, so the result does not depend on threads, shards or interruptions.
"""

import hashlib
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from gpt.corpus.batches import Int64s
from gpt.corpus.shards import SIDES, Side, TokenStream
from gpt.corpus.token_folder import TokenFolder, read_sources

WINDOW_BYTES = 50
MAX_IDS = 2**25  # Maximum ids searched per side: the first ones.
SAMPLED_IDS = 2**18  # Every window is sampled in shorter texts. Each doubling halves the rate, down to 1/64.
BLOCK = 2**16  # Ids hashed together. Their arrays fit into the CPU's cache.
COPY_WINDOWS = 8  # Minimum number of sampled windows of a near copy.
COPY_SHARE = 0.9  # Minimum share of a near copy's windows that are in earlier documents.
NOTED_COPIES, NOTED_PASSAGES, NOTED_HELD_OUT = 0.1, 0.2, 0.05  # Shares above which `notes` has a line.
MAX_PASSAGE = 2**12  # Maximum ids of a passage before and after a sampled window.
MAX_LISTED = 20  # Maximum passages in a list, and places of a passage.
EXCERPT = 64  # Ids of an excerpt.

Hashes = npt.NDArray[np.uint64]
_BASE, _MIX = 0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93  # Odd numbers are invertible modulo 2⁶⁴.


def _powers(base: int) -> Hashes:
    factors = np.full(BLOCK + WINDOW_BYTES, base, np.uint64)
    factors[0] = 1
    return np.cumprod(factors)


_POWERS, _INVERSES = _powers(_BASE), _powers(pow(_BASE, -1, 2**64))
_MIXED = _INVERSES * np.uint64(_MIX)


@dataclass(frozen=True)
class Sample:
    """The sampled windows of a stream: hashes, positions, and the numbers of their documents. All documents are
    hashed."""

    hashes: Hashes
    positions: Int64s
    documents: Int64s
    document_hashes: Hashes
    lengths: Int64s  # Ids by document, without the opening.


def take_sample(stream: TokenStream, opening: int, window: int, rate_bits: int) -> Sample:
    """Samples the windows of ``window`` ids inside documents at a rate of 2^-``rate_bits``. The first ``opening`` ids
    of a document are not text."""
    total = min(len(stream), MAX_IDS)
    offsets = stream.offsets[: np.searchsorted(stream.offsets, total)]
    offsets = np.append(offsets, total)
    document_hashes = np.zeros(len(offsets) - 1, np.uint64)
    hashes, positions = [np.zeros(0, np.uint64)], [np.zeros(0, np.int64)]
    for start in range(0, total, BLOCK):
        count = min(BLOCK, total - start)
        ids = stream.take(start, min(BLOCK + window - 1, total - start)).view(np.uint64)
        sums = np.zeros(len(ids) + 1, np.uint64)  # sums[j] - sums[i] is the hash of ids[i:j], times the base to the i.
        np.cumsum(ids * _POWERS[: len(ids)], out=sums[1:])
        first, last = np.searchsorted(offsets, start, "right") - 1, np.searchsorted(offsets, start + count)
        edges = np.clip(offsets[first : last + 1] - start, 0, count)
        parts = (sums[edges[1:]] - sums[edges[:-1]]) * _INVERSES[edges[:-1]]
        parts[:1] *= np.uint64(pow(_BASE, max(0, start - int(offsets[first])), 2**64))
        document_hashes[first:last] += parts
        window_hashes = (sums[window:] - sums[:-window]) * _MIXED[: max(0, len(sums) - window)]
        sampled = np.flatnonzero(window_hashes <= np.uint64(2 ** (64 - rate_bits) - 1))
        if len(sampled) > 64 + (8 * count >> rate_bits):  # In uniform text, keep one of each, which bounds memory.
            sampled = np.sort(sampled[np.unique(window_hashes[sampled], return_index=True)[1]])
        hashes.append(window_hashes[sampled])
        positions.append(sampled + start)
    starts = np.concatenate(positions)
    documents = np.searchsorted(offsets, starts, "right") - 1
    is_inside = (starts >= offsets[documents] + opening) & (starts + window <= offsets[documents + 1])
    lengths = np.maximum(np.diff(offsets) - opening, 0)
    sample = (np.concatenate(hashes)[is_inside], starts[is_inside], documents[is_inside])
    return Sample(*sample, document_hashes + lengths.astype(np.uint64) * np.uint64(_MIX), lengths)


@dataclass(frozen=True)
class Repeats:
    """Repeated documents and windows. Documents are numbered from 0: training documents, then held-out documents."""

    originals: Int64s  # By document: the first document that it copies, or itself.
    copied_share: float  # Share of all tokens that are in copies.
    repeated: Int64s  # (windows, 2): positions of training windows outside copies, and of the first equal windows.
    repeated_share: float  # Share of the training windows.
    held_out: Int64s  # (windows, 2): positions of held-out windows, and of the first equal training windows.
    held_out_share: float  # Share of the held-out windows.

    @property
    def copies(self) -> Int64s:
        """The documents that copy an earlier one."""
        return np.flatnonzero(self.originals != np.arange(len(self.originals)))

    def notes(self, command: str) -> list[str]:
        """Returns a line for each share above its threshold. ``command`` lists the repeats."""
        lines = []
        if self.copied_share > NOTED_COPIES:
            copies = f"{len(self.copies):,} of {len(self.originals):,} documents ({self.copied_share:.0%} of the text)"
            lines.append(f"{copies} repeat{'s' * (len(self.copies) == 1)} earlier documents")
        if self.repeated_share > NOTED_PASSAGES:
            lines.append(f"{self.repeated_share:.0%} of the training text repeats earlier passages")
        if self.held_out_share > NOTED_HELD_OUT:
            lines.append(
                f"{self.held_out_share:.0%} of the held-out text is also in the training text, which lowers the "
                "held-out loss"
            )
        return [f"{line}: see {command}" for line in lines]


def find_repeats(train: TokenStream, held_out: TokenStream, opening: int, window: int) -> Repeats:
    """Searches the first `MAX_IDS` ids of each side for windows of ``window`` ids. A document is a copy if it has the
    ids of an earlier document, or if nearly all of its sampled windows are in earlier documents."""
    size = min(MAX_IDS, max(len(train), len(held_out), 1))
    rate_bits = min(6, max(0, (size - 1).bit_length() - SAMPLED_IDS.bit_length() + 1))
    samples = [take_sample(stream, opening, window, rate_bits) for stream in (train, held_out)]
    lengths = np.concatenate([sample.lengths for sample in samples])
    documents = np.concatenate([samples[0].documents, samples[1].documents + len(samples[0].lengths)])
    positions = np.concatenate([sample.positions for sample in samples])
    firsts = _first_equal(np.concatenate([sample.hashes for sample in samples]))
    originals = _first_equal(np.concatenate([sample.document_hashes for sample in samples]))
    numbers = np.arange(len(originals))
    is_seen = documents[firsts] < documents
    window_counts, seen_counts = (np.bincount(part, minlength=len(numbers)) for part in (documents, documents[is_seen]))
    is_near = (window_counts >= COPY_WINDOWS) & (seen_counts >= COPY_SHARE * window_counts) & (originals == numbers)
    seen_documents, indexes = np.unique(documents[is_seen], return_index=True)
    first_seen = numbers.copy()
    first_seen[seen_documents] = documents[firsts[is_seen][indexes]]
    originals = np.where(is_near, first_seen, originals)
    is_copy = originals != numbers
    train_windows = len(samples[0].hashes)
    pairs = np.stack([positions, positions[firsts]], axis=1)
    is_repeated = (firsts != np.arange(len(firsts)))[:train_windows] & ~is_copy[documents[:train_windows]]
    is_trained = firsts[train_windows:] < train_windows
    copied_share = float(lengths[is_copy].sum() / max(1, lengths.sum()))
    repeated_share, held_out_share = (float(mask.sum() / max(1, len(mask))) for mask in (is_repeated, is_trained))
    return Repeats(
        originals, copied_share, pairs[:train_windows][is_repeated], repeated_share,
        pairs[train_windows:][is_trained], held_out_share,
    )  # fmt: skip


def _first_equal(hashes: Hashes) -> Int64s:
    """Returns the index of the first equal hash, for each hash."""
    _, firsts, inverse = np.unique(hashes, return_index=True, return_inverse=True)
    result: Int64s = firsts[inverse]
    return result


def repeats_in(folder: TokenFolder) -> Repeats:
    """Searches a token folder."""
    train, held_out = folder.stream("train"), folder.stream("val")
    opening = len(folder.tokenizer.opening)
    ids = folder.tokens - opening * folder.documents
    window = min(WINDOW_BYTES, max(8, round(WINDOW_BYTES * ids / max(1, folder.bytes))))
    return find_repeats(train, held_out, opening, window)


def notes(folder: TokenFolder) -> list[str]:
    """Returns a line for each share of a token folder that is above its threshold."""
    return repeats_in(folder).notes(f"gpt data check {shlex.join(map(str, folder.paths))}")


class Listing:
    """The repeats of a token folder as JSON objects. A place has the side, the number of the document on this side,
    counted from 1, and its file, if it can be determined."""

    def __init__(self, folder: TokenFolder) -> None:
        self.folder, self.repeats = folder, repeats_in(folder)
        self._streams = {side: folder.stream(side) for side in SIDES}
        self._trained = int(np.searchsorted(self._streams["train"].offsets[:-1], MAX_IDS))
        self._sources = [list(read_sources(path)) for path in folder.paths]
        self._places: dict[int, dict[str, Any]] = {}
        self._names: dict[str, list[str]] = {}  # One-document files by sha256.
        for source in chain.from_iterable(self._sources):
            if source.documents == 1:
                self._names.setdefault(source.sha256, []).append(source.name)

    def summary(self) -> dict[str, Any]:
        """Returns the numbers of documents and copies, and the shares."""
        repeats = self.repeats
        counts = {"documents": len(repeats.originals), "copies": len(repeats.copies)}
        keys = ("copied_share", "repeated_share", "held_out_share")
        return counts | {key: round(getattr(repeats, key), 4) for key in keys}

    def copies(self) -> Iterator[dict[str, Any]]:
        """Yields the place of every copy, the place of its original, and the start of its text."""
        for number in self.repeats.copies.tolist():
            original = self._place(int(self.repeats.originals[number]))
            yield {
                "copy": self._place(number),
                "original": original,
                "text": self._text(*self._locate(number), EXCERPT),
            }

    def passages(self, side: Side) -> list[dict[str, Any]]:
        """Returns repeated passages of the training text, or held-out passages that are also in the training text. The
        passages with the most repeated text come first."""
        pairs = self.repeats.repeated if side == "train" else self.repeats.held_out
        stream, train, end = self._streams[side], self._streams["train"], 0
        found: dict[int, list[tuple[int, int]]] = {}  # Start of the first passage → starts and lengths of its repeats.
        for start, first in pairs.tolist():
            if start >= end:
                before, after = _extend(stream, start, train, first, len(self.folder.tokenizer.opening))
                end = start + after
                found.setdefault(first - before, []).append((start - before, before + after))
        ranked = sorted(found.items(), key=lambda item: -sum(length for _, length in item[1]))[:MAX_LISTED]
        return [self._passage(side, first, repeats) for first, repeats in ranked]

    def _passage(self, side: Side, first: int, repeats: list[tuple[int, int]]) -> dict[str, Any]:
        places = [self._place_at(side, start) for start, _ in repeats[:MAX_LISTED]]
        longest = max(length for _, length in repeats)
        size = len(self._decode("train", first, longest))
        text = self._text("train", first, min(longest, EXCERPT))
        return {"repeats": len(repeats), "bytes": size, "first": self._place_at("train", first), "places": places,
                "text": text}  # fmt: skip

    def _locate(self, number: int) -> tuple[Side, int]:
        """Returns the side and the first text id of a document."""
        side: Side = "train" if number < self._trained else "val"
        start = self._streams[side].offsets[number - (0 if side == "train" else self._trained)]
        return side, int(start) + len(self.folder.tokenizer.opening)

    def _place_at(self, side: Side, position: int) -> dict[str, Any]:
        number = int(np.searchsorted(self._streams[side].offsets, position, "right")) - 1
        return self._place(number + (0 if side == "train" else self._trained))

    def _place(self, number: int) -> dict[str, Any]:
        if number not in self._places:
            side = self._locate(number)[0]
            index = number - (0 if side == "train" else self._trained)
            self._places[number] = {"side": side, "document": index + 1, "file": self._file(side, index)}
        return self._places[number]

    def _file(self, side: Side, number: int) -> str | None:
        folders, index = zip(self.folder.folders, self._sources, strict=True), number
        folder, sources = next(folders)
        while index >= (count := folder.manifest[side]["documents"]):
            index -= count
            folder, sources = next(folders)
        if folder.manifest["split"]["by"] != "hash":  # The documents are in order, with one more if it was cut.
            ends = np.cumsum([source.documents for source in sources])
            if side == "val":
                index += int(ends[-1]) - count
            return sources[int(np.searchsorted(ends, index, "right"))].name
        if len(sources) == 1:
            return sources[0].name
        start, end = self._streams[side].offsets[number : number + 2].tolist()
        names = self._names.get(hashlib.sha256(self._decode(side, start + 1, end - start - 1)).hexdigest(), [])
        return names.pop(0) if len(names) > 1 else next(iter(names), None)

    def _decode(self, side: Side, start: int, length: int) -> bytes:
        return self.folder.tokenizer.document_bytes(self._streams[side].take(start, length).tolist())

    def _text(self, side: Side, start: int, length: int) -> str:
        end = self._streams[side].offsets[np.searchsorted(self._streams[side].offsets, start, "right")]
        return self._decode(side, start, min(length, int(end) - start)).decode("utf-8", "replace")


def _extend(a: TokenStream, start: int, b: TokenStream, first: int, opening: int) -> tuple[int, int]:
    """Returns how many equal ids there are before and after two equal positions, within their documents."""
    sizes = []
    for stream, position in ((a, start), (b, first)):
        index = int(np.searchsorted(stream.offsets, position, "right"))
        sizes.append((position - int(stream.offsets[index - 1]) - opening, int(stream.offsets[index]) - position))
    before, after = (min(MAX_PASSAGE, *counts) for counts in zip(*sizes, strict=True))
    differ = a.take(start - before, before + after) != b.take(first - before, before + after)
    earlier, later = np.flatnonzero(differ[:before]), np.flatnonzero(differ[before:])
    return before - int(earlier[-1]) - 1 if len(earlier) else before, int(later[0]) if len(later) else after
