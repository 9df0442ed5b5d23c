"""Speculative decoding (Leviathan et al. 2023) without a draft model: prompt lookup decoding (Saxena 2023).

Guesses the ids that followed the previous occurrence of the last n-gram.
"""

from collections.abc import Sequence

MAX_NGRAM = 3  # Maximum length of an n-gram. Longer matches take precedence.


class Lookup:
    """An index of the last occurrence of each n-gram in a growing sequence."""

    def __init__(self) -> None:
        self._ends: dict[tuple[int, ...], int] = {}  # Index after the last occurrence of each n-gram.
        self._indexed = 0  # Number of indexed ids: all except the last.

    def guess(self, ids: Sequence[int], count: int) -> list[int]:
        """Returns ``count`` guesses of the next ids, or none. ``ids`` must extend the previous call's ids."""
        for end in range(self._indexed + 1, len(ids)):
            for length in range(1, min(MAX_NGRAM, end) + 1):
                self._ends[tuple(ids[end - length : end])] = end
        self._indexed = max(self._indexed, len(ids) - 1)
        for length in range(min(MAX_NGRAM, len(ids)), 0, -1):
            start = self._ends.get(tuple(ids[-length:]))
            if start is not None:
                guesses = [*ids[start : start + count]]
                while len(guesses) < count:  # Past the end of ``ids``, the guesses repeat.
                    guesses.append(guesses[len(guesses) - (len(ids) - start)])
                return guesses
        return []
