"""Guesses the next ids from the text so far: those that followed when its last ids occurred before.

Prompt look-up decoding (Saxena 2023), a speculative decoding (Leviathan et al. 2023) without a second model.
"""

from collections.abc import Sequence

LONGEST = 3  # ids that are looked up together; fewer where those are not found


class Lookup:
    """The last place of each run of up to `LONGEST` ids in a growing text."""

    def __init__(self) -> None:
        self._ends: dict[tuple[int, ...], int] = {}  # run → the place after it
        self._seen = 0  # ids whose runs are known, all but the last of the text

    def guess(self, ids: Sequence[int], count: int) -> list[int]:
        """Returns ``count`` ids that may follow ``ids``; none where the last id is new. ``ids`` must begin with those
        of the call before."""
        for end in range(self._seen + 1, len(ids)):
            for length in range(1, min(LONGEST, end) + 1):
                self._ends[tuple(ids[end - length : end])] = end
        self._seen = max(self._seen, len(ids) - 1)
        for length in range(min(LONGEST, len(ids)), 0, -1):
            at = self._ends.get(tuple(ids[-length:]))
            if at is not None:
                found = [*ids[at : at + count]]
                while len(found) < count:  # the text repeats what is between there and its end
                    found.append(found[len(found) - (len(ids) - at)])
                return found
        return []
