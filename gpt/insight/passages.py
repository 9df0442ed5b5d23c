"""Where a text comes from: the longest passages of the training text that it repeats, with their places."""

import codecs
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np

from gpt.corpus.token_folder import TokenFolder
from gpt.insight.copying import IDS_PER_PASS, MAX_IDS, Copied, Int64s, N, compute_share

MAX_PASSAGES = 5
CONTEXT = 60  # Maximum characters before and after a passage, and maximum ids to decode for them.
_END, _OUTSIDE = -1, -2  # What is around a text and around documents. No id equals them.


class TrainingText:
    """The first `MAX_IDS` ids of a training text, in memory."""

    def __init__(self, folder: TokenFolder) -> None:
        stream = folder.stream("train")
        self.tokenizer, self.trained = folder.tokenizer, len(stream)
        total, opening = min(len(stream), MAX_IDS), len(self.tokenizer.opening)
        self._ids = np.full(total + 1, _OUTSIDE, np.int32)
        for start in range(0, total, IDS_PER_PASS):
            stop = min(start + IDS_PER_PASS, total)
            self._ids[start:stop] = stream.take(start, stop - start)
        stream.release()
        openings = (stream.offsets[:-1, None] + np.arange(opening)).ravel()
        self._ids[openings[openings < total]] = _OUTSIDE  # They are not text.
        self._starts, self._stops = stream.offsets[:-1] + opening, np.minimum(stream.offsets[1:], total)
        ids = range(self.tokenizer.vocab_size)
        self._breaks = np.array([self.tokenizer.decode_bytes([id]).count(b"\n") for id in ids])
        self._share = lru_cache(8)(lambda ids: compute_share(np.array(ids, np.int64), self._ids))

    def trace(self, ids: Sequence[int], at: int, first: int) -> dict[str, Any]:
        """Returns the longest span around the id ``at`` of a text, the number of its places in the training text, and
        the first places of it and of shorter spans with at least `N` ids. Also returns the share of `N`-token spans
        from ``first`` on that are in the training text."""
        text, hits = np.array([_END, *ids, _END]), np.flatnonzero(self._ids == ids[at])
        before, after = (self._count_equal(hits, text, at + 1, step) for step in (-1, 1))
        lengths = before + 1 + after
        longest = int(lengths.max(initial=0))
        best = np.argsort(-lengths, kind="stable")[:MAX_PASSAGES]
        best = best[lengths[best] >= min(N, longest)]
        places = zip((hits - before)[best].tolist(), lengths[best].tolist(), strict=True)
        return {
            "start": at - int(before[best[0]]) if longest else at, "length": longest,
            "count": int((lengths == longest).sum()), "passages": [self._describe(*place) for place in places],
            "share": self._share(tuple(ids[first:])), "span": N,
            "compared": len(self._ids) - 1, "trained": self.trained,
        }  # fmt: skip

    def _count_equal(self, hits: Int64s, text: Int64s, at: int, step: int) -> Int64s:
        """Returns how many ids after ``at`` in a text, or before it, equal those after or before each hit."""
        counts, active, distance = np.zeros(len(hits), np.int64), np.arange(len(hits)), step
        while len(active):
            active = active[self._ids[hits[active] + distance] == text[at + distance]]
            counts[active] += 1
            distance += step
        return counts

    def _describe(self, start: int, length: int) -> dict[str, Any]:
        """Returns a passage with the text around it, the number of its document, and the number of its line there."""
        number, stop = int(np.searchsorted(self._starts, start, "right")), start + length
        low, high = int(self._starts[number - 1]), int(self._stops[number - 1])
        return {
            "length": length,
            "before": self._decode(max(low, start - CONTEXT), start)[-CONTEXT:].lstrip("\ufffd"),
            "text": self._decode(start, stop),
            "after": self._decode(stop, min(high, stop + CONTEXT))[:CONTEXT].rstrip("\ufffd"),
            "document": number,
            "line": 1 + int(self._breaks[self._ids[low:start]].sum()),
        }

    def _decode(self, start: int, stop: int) -> str:
        return self.tokenizer.decode(self._ids[start:stop].tolist())

    def split(self, ids: Sequence[int], copied: Copied) -> list[dict[str, Any]]:
        """Splits a text where its longest copied span changes. A piece has text, and the trace of its span if any."""
        spans = np.full(len(ids), -1)  # The longest span around each id.
        for index, (start, length) in sorted(enumerate(copied.maximal), key=lambda each: each[1][1]):
            spans[start : start + length] = index
        cuts = pairwise([*np.flatnonzero(np.diff(spans, prepend=-2)).tolist(), len(ids)])
        decode, to_bytes = codecs.getincrementaldecoder("utf-8")("replace").decode, self.tokenizer.decode_bytes
        return [  # A cut can be inside a character.
            {"text": decode(to_bytes(ids[a:b]), b == len(ids))}
            | (self.trace(ids, a, len(ids)) if spans[a] >= 0 else {})
            for a, b in cuts
        ]
