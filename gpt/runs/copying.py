"""Finds spans of samples, in tokens, that stand word for word in the text that a model was trained on."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from gpt.text.shards import TokenStream

Int64s = npt.NDArray[np.int64]
Hashes = npt.NDArray[np.uint64]

N = 8  # tokens of a span from which on it is looked for; shorter ones are how people speak
AT_ONCE = 2**18  # ids of the training text
MOST = 10**8  # ids of the training text that are read at most: seconds, whatever its size
_BASE = np.uint64(0x9E3779B97F4A7C15)  # odd: of a product modulo 2⁶⁴ nothing is lost
_END, _OUTSIDE = -1, -2  # what no id equals, after each text and behind the training text


@dataclass(frozen=True)
class Copied:
    """The spans of a text that are in the training text."""

    longest: int  # tokens of the longest such span; 0 below `N`
    start: int  # where it begins in the text, in tokens
    spans: int  # how many spans of `N` tokens the text has
    share: float | None  # of these spans, how many are in the training text; None where there are no spans


def find_copies(
    texts: Sequence[Sequence[int]], training: TokenStream, each: Callable[[int, int], None] = lambda done, total: None
) -> list[Copied]:
    """Looks for spans of texts (their ids) in the first `MOST` ids of a training text. ``each`` is called with the ids
    searched and their total."""
    parts = [np.append(np.asarray(text, np.int64), _END) for text in texts]
    joined = np.concatenate([*parts, np.full(N, _END)])
    wanted = _hashes(joined)  # a span that reaches over an end equals nothing
    order = np.argsort(wanted, kind="stable")
    longest, seen = np.zeros(len(joined), np.int64), np.zeros(len(joined), np.bool_)
    reach = max((len(part) for part in parts), default=1) + N  # how far a span that begins in a piece may go
    total = min(len(training), MOST)
    for start in range(0, total, AT_ONCE):
        piece = training.take(start, min(AT_ONCE + reach, total - start))
        piece = np.append(piece, np.full(reach, _OUTSIDE))
        _mark(piece, joined, wanted[order], order, longest, seen)
        each(min(start + AT_ONCE, total), total)
    training.release()
    ends = np.cumsum([0, *map(len, parts)])
    return [_summary(longest[a : b - 1], seen[a : b - 1]) for a, b in pairwise(ends)]


def _hashes(ids: Int64s) -> Hashes:
    """A hash of every `N` ids in a row: a polynomial in them, modulo 2⁶⁴."""
    found = np.zeros(len(ids) - N + 1, np.uint64)
    for at in range(N):
        found = found * _BASE + ids[at : len(ids) - N + 1 + at].astype(np.uint64)
    return found


def _mark(
    piece: Int64s, joined: Int64s, wanted: Hashes, order: Int64s, longest: Int64s, seen: npt.NDArray[np.bool_]
) -> None:
    """Marks each place of ``joined`` at which a span that is in the piece begins, and how far that span reaches."""
    there = _hashes(piece)
    first, last = np.searchsorted(wanted, there, "left"), np.searchsorted(wanted, there, "right")
    found = np.flatnonzero(last > first)
    counts = (last - first)[found]
    at = np.repeat(found, counts)
    nth = np.arange(len(at)) - np.repeat(np.cumsum(counts) - counts, counts)
    place = order[np.repeat(first[found], counts) + nth]
    length = np.zeros(len(at), np.int64)
    alive = np.arange(len(at))
    while len(alive):  # hashes may be equal by chance: ids decide, from the first one on
        alive = alive[piece[at[alive] + length[alive]] == joined[place[alive] + length[alive]]]
        length[alive] += 1
    enough = length >= N
    np.maximum.at(longest, place[enough], length[enough])
    seen[place[enough]] = True


def _summary(longest: Int64s, seen: npt.NDArray[np.bool_]) -> Copied:
    spans = len(longest) - N + 1
    if spans < 1:
        return Copied(0, 0, 0, None)
    start = int(longest.argmax())
    return Copied(int(longest[start]), start, spans, float(seen[:spans].mean()))
