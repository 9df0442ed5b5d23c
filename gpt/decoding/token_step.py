"""A GPU's decoding steps as CUDA graphs: one new token for each of some rows of the KV cache."""

import functools
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from gpt.cuda_graph import GraphedFunction
from gpt.device import upload
from gpt.model.cache import KVCache, OneEach
from gpt.model.decoder import GPT

MIN_COLUMNS = 256  # Columns of the smallest graph. The others have twice as many, four times …


class TokenStep:
    """Appends one id to each of some rows. A graph has a fixed number of rows and attends to a fixed number of columns,
    so both are rounded up to powers of two, and each combination is captured when it occurs.

    If a graph cannot be captured or does not fit in memory, calls ``note`` once, and `works` becomes False.
    """

    def __init__(self, model: GPT, cache: KVCache, note: Callable[[str], None]) -> None:
        self.model, self.cache, self.note, self.works = model, cache, note, True
        self._graphs: dict[tuple[int, ...], GraphedFunction[Tensor]] = {}
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, rows: Sequence[int], ids: Tensor, positions: Sequence[int]) -> Tensor:
        """Appends ids (n), on the device, at one position of each row. Returns the residual stream (n, C), which the
        next call overwrites."""
        count, end = len(rows), max(positions) + 1
        size = min(_round_up(count), self.cache.rows)
        self.model.grow_rope_table(end)
        columns = min(_round_up(max(end, MIN_COLUMNS)), max(self.cache.columns.values()))
        is_gathered = [*rows] != [*range(size)]
        # The last row fills up the others. It writes the same keys and values several times.
        places = upload(np.pad([rows, positions], ((0, 0), (0, size - count)), "edge"), ids.device)
        ids = torch.cat([ids, ids[-1:].expand(size - count)]) if size > count else ids
        key = (size, columns, is_gathered, 0 if self.model.rope is None else self.model.rope.size(1))
        if key not in self._graphs:
            function = functools.partial(self._compute, columns, is_gathered)
            self._graphs[key] = GraphedFunction(function, self.model.buffers, self._give_up, self._pool)
        return self._graphs[key](ids, places)[:count]

    def _compute(self, columns: int, is_gathered: bool, ids: Tensor, places: Tensor) -> Tensor:
        rows, positions = places
        x, rope = self.model.embed_at(ids[:, None], positions[:, None])
        return self.model.stack(x, rope, OneEach(self.cache, rows, positions, columns, is_gathered))[:, 0]

    def _give_up(self, why: str) -> None:
        self.works = False
        self._graphs.clear()
        self.note(f"decoding steps run without CUDA graphs, which is slower: {why:.200}")


def _round_up(number: int) -> int:
    """Returns the next power of two."""
    return 1 << (number - 1).bit_length()
