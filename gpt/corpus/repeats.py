"""Repeated text: copies of documents, and held-out passages that are also in the training text.

Every window of about `WINDOW_BYTES` bytes is hashed. The hash decides whether the window is sampled, so equal windows
are sampled together, and shares of the sample estimate shares of the text (Broder 1997, "On the resemblance and
containment of documents"). Only tokens are read, so the result does not depend on threads, shards or interruptions.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gpt.corpus.batches import Int64s
from gpt.corpus.shards import SIDES, TokenStream
from gpt.corpus.token_folder import TokenFolder
from gpt.system.words import counted

WINDOW_BYTES = 50
MAX_IDS = 2**25  # Maximum ids searched per side: the first ones.
SAMPLED_IDS = 2**18  # Every window is sampled in shorter texts. Each doubling halves the rate, down to 1/64.
BLOCK = 2**16  # Ids hashed together. Their arrays fit into the CPU's cache.
NOTED_COPIES, NOTED_HELD_OUT = 0.1, 0.05  # Shares of the text above which `notes` has a line.

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
    """The hashes of a stream's sampled windows, and of all its documents."""

    hashes: Hashes
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
    document_hashes += lengths.astype(np.uint64) * np.uint64(_MIX)
    return Sample(np.concatenate(hashes)[is_inside], document_hashes, lengths)


def find_repeats(train: TokenStream, held_out: TokenStream, opening: int, window: int) -> tuple[int, float, float]:
    """Returns how many documents copy an earlier one, their share of the text, and the share of the held-out windows of
    ``window`` ids that are also in the training text. Searches the first `MAX_IDS` ids of each side."""
    size = min(MAX_IDS, max(len(train), len(held_out), 1))
    rate_bits = min(6, max(0, (size - 1).bit_length() - SAMPLED_IDS.bit_length() + 1))
    samples = [take_sample(stream, opening, window, rate_bits) for stream in (train, held_out)]
    lengths = np.concatenate([sample.lengths for sample in samples])
    _, firsts = np.unique(np.concatenate([sample.document_hashes for sample in samples]), return_index=True)
    copied = (lengths.sum() - lengths[firsts].sum()) / max(1, lengths.sum())
    is_trained = np.isin(samples[1].hashes, samples[0].hashes)
    return len(lengths) - len(firsts), float(copied), float(is_trained.sum() / max(1, len(is_trained)))


def notes(folder: TokenFolder) -> list[str]:
    """Returns a line for each share of a token folder that is above its threshold."""
    train, held_out = (folder.stream(side) for side in SIDES)
    opening = len(folder.tokenizer.opening)
    ids = folder.tokens - opening * folder.documents
    window = min(WINDOW_BYTES, max(8, round(WINDOW_BYTES * ids / max(1, folder.bytes))))
    copies, copied, leaked = find_repeats(train, held_out, opening, window)
    lines = []
    if copied > NOTED_COPIES:
        verb = "document copies an earlier one", "documents copy earlier ones"
        lines.append(f"{counted(copies, *verb)} ({copied:.0%} of the text)")
    if leaked > NOTED_HELD_OUT:
        share = f"{leaked:.0%} of the held-out text"
        lines.append(f"{share} is also in the training text, which lowers the held-out loss")
    return lines
