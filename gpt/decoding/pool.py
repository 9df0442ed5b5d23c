"""Contexts kept for the next requests, so that memory and CUDA graphs are made once."""

import contextlib
from collections.abc import Callable, Iterator

from gpt.decoding.context import Context
from gpt.decoding.weights import Step, compiled
from gpt.device import Compute
from gpt.model.decoder import GPT
from gpt.model.params import cache_bytes

CACHE_SHARE = 0.25  # of the device's memory that keys and values may take
KEPT = 4  # contexts of which nobody makes use


class ContextPool:
    """The contexts of one model. Idle ones are kept and found again by rows and room: the `KEPT` used last, and no more
    than fit into `CACHE_SHARE` of the device's memory beside a new one.

    A CUDA graph reads and writes at fixed addresses, so a context's graphs are good as long as it lives. All contexts
    share one compiled step, which compiles each shape once. torch bounds the number of shapes (``recompile_limit``) and
    of graphs (``cudagraph_unexpected_rerecord_limit``); past it steps are computed as written.
    """

    def __init__(self, model: GPT, compute: Compute, note: Callable[[str], None] = lambda text: None) -> None:
        self.model, self.compute, self.note = model, compute, note
        self.idle: list[Context] = []  # the one used last stands last
        self._step: tuple[Step | None] | None = None  # the compiled step, if it has been asked for

    @contextlib.contextmanager
    def lease(self, rows: int, room: int, compile: bool = False) -> Iterator[Context]:
        """An empty context of ``rows`` rows with ``room`` positions each, which goes back at the end, but not after an
        error: there may be NaN in it. Raises `UserError` where the device cannot hold it."""
        step = self._compiled() if compile else None
        context = self._take(rows, room, step) or Context(self.model, self.compute, rows, room, step)
        whole = True
        try:
            yield context
        except Exception:
            whole = False
            raise
        finally:
            if whole:
                self._put(context)

    def _take(self, rows: int, room: int, step: Step | None) -> Context | None:
        """The idle context of this shape; where there is none, frees the memory that it will take."""
        for at, context in enumerate(self.idle):
            if (context.rows, context.cache.room, context.compiled) == (rows, room, step):
                return self.idle.pop(at)
        self._shrink(beside=cache_bytes(self.model.config, rows * room, self.compute.dtype.itemsize))
        return None

    def _put(self, context: Context) -> None:
        for row in range(context.rows):
            context.forget(row)
        self.idle.append(context)
        self._shrink()

    def _shrink(self, beside: int = 0) -> None:
        """Frees the idle contexts unused for longest, until the others are few enough and fit beside so many bytes."""
        most = CACHE_SHARE * self.compute.memory() - beside
        while self.idle and (len(self.idle) > KEPT or sum(each.cache.nbytes for each in self.idle) > most):
            self.idle.pop(0)

    def _compiled(self) -> Step | None:
        if self._step is None:
            self._step = (compiled(self.model, self.compute, self.note),)
        return self._step[0]
