"""Finds spans of samples, in tokens, that occur verbatim in the training text."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from gpt.corpus.shards import TokenStream

Int64s = npt.NDArray[np.int64]
Hashes = npt.NDArray[np.uint64]

N = 8  # minimum span in tokens; shorter spans are common phrases
IDS_PER_PASS = 2**18  # ids of the training text per pass
MAX_IDS = 10**8  # maximum ids of the training text, so that a search takes only seconds
MAX_PAIRS = 2**20  # pairs of a start in the training text and one in a text, compared at a time
_BASE = np.uint64(0x9E3779B97F4A7C15)  # Multiplying by an odd number modulo 2⁶⁴ is invertible.
_END, _OUTSIDE = -1, -2  # separators after each text and after each training piece; no id equals them


@dataclass(frozen=True)
class Copied:
    """The spans of a text that occur in the training text."""

    longest: int  # tokens of the longest span; 0 below `N`
    start: int  # start of that span in the text, in tokens
    spans: int  # number of `N`-token spans in the text
    share: float | None  # share of ``spans`` in the training text; None without spans
    maximal: tuple[tuple[int, int], ...] = ()  # start and length of each span that is not inside another one


def find_copies(
    texts: Sequence[Sequence[int]],
    training: TokenStream,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Copied]:
    """Searches the first `MAX_IDS` ids of a training text for spans of ``texts``, given as ids. ``on_progress`` is
    called with the ids searched so far and their total."""
    parts = [np.append(np.asarray(text, np.int64), _END) for text in texts]
    ids = np.concatenate([*parts, np.full(N, _END)])
    text_hashes = _hashes(ids)  # A span across a separator matches nothing.
    order = np.argsort(text_hashes, kind="stable")
    longest = np.zeros(len(ids), np.int64)
    overlap = max((len(part) for part in parts), default=1) + N  # ids after a piece, for spans that start in it
    total = min(len(training), MAX_IDS)
    for start in range(0, total, IDS_PER_PASS):
        piece = training.take(start, min(IDS_PER_PASS + overlap, total - start))
        piece = np.append(piece, np.full(overlap, _OUTSIDE))
        _mark_copies(piece, ids, text_hashes[order], order, longest)
        on_progress(min(start + IDS_PER_PASS, total), total)
    training.release()
    places = np.arange(len(ids))
    longest = np.maximum.accumulate(longest + places) - places  # A span contains those that start inside it.
    longest[longest < N] = 0
    ends = np.cumsum([0, *map(len, parts)])
    return [_summarize(longest[a : b - 1]) for a, b in pairwise(ends)]


def _hashes(ids: Int64s) -> Hashes:
    """Returns the polynomial hash of every `N` consecutive ids, modulo 2⁶⁴."""
    hashes = np.zeros(len(ids) - N + 1, np.uint64)
    for offset in range(N):
        hashes = hashes * _BASE + ids[offset : len(ids) - N + 1 + offset].astype(np.uint64)
    return hashes


def _mark_copies(piece: Int64s, ids: Int64s, text_hashes: Hashes, order: Int64s, longest: Int64s) -> None:
    """Finds spans of ``piece`` in ``ids``. For each start in ``ids``, sets ``longest`` to the length of the longest
    span that cannot begin earlier: in a repetitive text, there are too many others."""
    hashes = _hashes(piece)
    first, last = np.searchsorted(text_hashes, hashes, "left"), np.searchsorted(text_hashes, hashes, "right")
    matches = np.flatnonzero(last > first)
    pairs = np.cumsum((last - first)[matches])
    for part in np.split(matches, np.flatnonzero(np.diff(pairs // MAX_PAIRS)) + 1):
        counts = (last - first)[part]
        starts = np.repeat(part, counts)
        offsets = np.arange(len(starts)) - np.repeat(np.cumsum(counts) - counts, counts)
        positions = order[np.repeat(first[part], counts) + offsets]
        is_first = (starts == 0) | (positions == 0) | (piece[starts - 1] != ids[positions - 1])
        starts, positions = starts[is_first], positions[is_first]
        lengths = np.zeros(len(starts), np.int64)
        active = np.arange(len(starts))
        while len(active):  # Hashes can collide, so compare ids.
            active = active[piece[starts[active] + lengths[active]] == ids[positions[active] + lengths[active]]]
            lengths[active] += 1
        np.maximum.at(longest, positions, lengths)


def _summarize(longest: Int64s) -> Copied:
    spans = len(longest) - N + 1
    if spans < 1:
        return Copied(0, 0, 0, None)
    start = int(longest.argmax())
    starts = np.flatnonzero((longest >= N) & (longest >= np.append(0, longest[:-1])))
    maximal = tuple(zip(starts.tolist(), longest[starts].tolist(), strict=True))
    return Copied(int(longest[start]), start, spans, float((longest[:spans] >= N).mean()), maximal)


def compute_share(ids: Int64s, training: npt.NDArray[np.signedinteger[Any]]) -> float | None:
    """Returns `Copied.share` of one text. Memory and time don't depend on how often its spans occur."""
    if len(ids) < N:
        return None
    hashes, firsts, inverse = np.unique(_hashes(ids), return_index=True, return_inverse=True)
    is_copied = np.zeros(len(hashes), np.bool_)
    for start in range(0, len(training) - N + 1, IDS_PER_PASS):
        piece = training[start : start + IDS_PER_PASS + N - 1]
        piece_hashes = _hashes(piece)
        places = np.minimum(np.searchsorted(hashes, piece_hashes), len(hashes) - 1)
        matches = np.flatnonzero(hashes[places] == piece_hashes)
        spans, starts = piece[matches[:, None] + np.arange(N)], firsts[places[matches], None]
        is_equal = (spans == ids[starts + np.arange(N)]).all(axis=1)  # Hashes can collide.
        is_copied[places[matches[is_equal]]] = True
    return float(is_copied[inverse].mean())
