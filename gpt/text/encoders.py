"""Texts → ids in processes. Imports little, since each process that starts does it anew."""

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import types
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TYPE_CHECKING, Self, TypeVar

import numpy as np

from gpt.errors import WorkError
from gpt.text.shards import Ids, Offsets, Side, id_type
from gpt.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from multiprocessing.queues import Queue


T = TypeVar("T")


@dataclass
class Item:
    """Texts to be encoded at once, each with whether it begins a document and which side it is for."""

    texts: list[str] = field(default_factory=list)
    begins: list[bool] = field(default_factory=list)
    sides: list[Side] = field(default_factory=list)


@dataclass
class EncodedItem:
    """An item's ids by side, with `Tokenizer.opening` before each document, and the offsets of the documents."""

    ids: dict[Side, Ids]
    offsets: dict[Side, Offsets]
    cut_pieces: int
    end_of_text_in_text: int


def encode(tokenizer: Tokenizer, item: Item) -> EncodedItem:
    """Encodes the texts of an item."""
    dtype = id_type(tokenizer.vocab_size)
    opening = np.array(tokenizer.opening, dtype)
    parts: dict[Side, list[Ids]] = {"train": [], "val": []}
    offsets: dict[Side, list[int]] = {"train": [], "val": []}
    lengths: dict[Side, int] = {"train": 0, "val": 0}
    cuts = 0
    for text, start, side in zip(item.texts, item.begins, item.sides, strict=True):
        if start:
            offsets[side].append(lengths[side])
            parts[side].append(opening)
        ids, cut = tokenizer.encode_counted(text)
        parts[side].append(ids.astype(dtype))
        lengths[side] += len(ids) + start * len(opening)
        cuts += cut
    return EncodedItem(
        {side: np.concatenate(of_side) for side, of_side in parts.items() if of_side},
        {side: np.array(of_side, np.uint64) for side, of_side in offsets.items()},
        cuts,
        sum(text.count(tokenizer.eot_token) for text in item.texts),
    )


_tokenizer: Tokenizer  # of a process in the pool


def _start_process(tokenizers: "Queue[Tokenizer | None]") -> None:
    """Prepares a process of the pool: it ignores Ctrl-C, waits for a tokenizer, and ends with its parent."""
    global _tokenizer
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    given = tokenizers.get()
    if given is not None:  # None: there is nothing to encode
        _tokenizer = given


def _end_with(parent: multiprocessing.process.BaseProcess) -> None:
    parent.join()
    os._exit(1)


def _encode_in_process(item: Item) -> EncodedItem:
    return encode(_tokenizer, item)


class Encoders:
    """A pool of ``jobs`` processes that encode items; with 1 job, this process. They start at once and wait for the
    tokenizer while other work continues."""

    AHEAD = 16  # items in memory beyond two for each process, to encode while this process writes

    def __init__(self, jobs: int, note: Callable[[str], None] = lambda text: None) -> None:
        self.jobs, self.note = jobs, note
        self.pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> Self:
        if self.jobs > 1:
            try:
                self._start()
            except (OSError, ImportError) as error:  # /dev/shm is full, read-only or missing; or no semaphores at all
                self.note(f"tokenizing in one process: the system has no semaphores for more ({error})")
                self.jobs = 1
        return self

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        with _spawning():
            self.tokenizers: Queue[Tokenizer | None] = context.Queue()
            self.tokenizers.cancel_join_thread()
            self.pool = ProcessPoolExecutor(self.jobs, context, _start_process, (self.tokenizers,))
            with contextlib.suppress(BrokenProcessPool):  # raised again by the first item
                for _ in range(self.jobs):
                    self.pool.submit(os.getpid)

    def __exit__(self, *_: object) -> None:
        if self.pool is not None:
            for _process in range(self.jobs):
                self.tokenizers.put(None)  # ends processes that still wait
            self.pool.shutdown(cancel_futures=True)

    def encode(self, tokenizer: Tokenizer, items: Iterator[tuple[Item, T]]) -> Iterator[tuple[T, EncodedItem]]:
        """Yields every item encoded, in order, with what came with it. May be called once; processes begin at once."""
        if self.pool is None:
            return ((end, encode(tokenizer, item)) for item, end in items)
        for _ in range(self.jobs):
            self.tokenizers.put(replace(tokenizer))  # without cached properties
        submitted = ((end, self._submit(item)) for item, end in items)
        return _results(deque(islice(submitted, 2 * self.jobs + self.AHEAD)), submitted)

    def _submit(self, item: Item) -> "Future[EncodedItem]":
        assert self.pool is not None
        with _broken_pool_errors(), _spawning():  # a process that was not started yet may be now
            return self.pool.submit(_encode_in_process, item)


def _results(
    waiting: "deque[tuple[T, Future[EncodedItem]]]", submitted: Iterator[tuple[T, "Future[EncodedItem]"]]
) -> Iterator[tuple[T, EncodedItem]]:
    """Yields results in order; submits one more item before each."""
    while waiting:
        waiting.extend(islice(submitted, 1))
        end, done = waiting.popleft()
        with _broken_pool_errors():
            encoded = done.result()
        yield end, encoded


@contextlib.contextmanager
def _broken_pool_errors() -> Iterator[None]:
    try:
        yield
    except BrokenProcessPool:
        raise WorkError(
            "a process that tokenizes ended unexpectedly (out of memory, or killed)", "take fewer --jobs"
        ) from None


@contextlib.contextmanager
def _spawning() -> Iterator[None]:
    """Keeps processes that are spawned here, multiprocessing's resource tracker included, from importing two things.

    Modules in the current folder: it may hold a downloaded corpus, in which a ``socket.py`` would be run. And the main
    module of the program: they need nothing of it, the command's takes a quarter of a second, and a script may do all
    its work there.

    They also inherit that SIGHUP is blocked, which a closing terminal sends to all processes: this one stops them.
    """
    main, safe = sys.modules["__main__"], os.environ.get("PYTHONSAFEPATH")
    sys.modules["__main__"] = types.ModuleType("__main__")
    os.environ["PYTHONSAFEPATH"] = "1"
    if sys.platform != "win32":
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    try:
        yield
    finally:
        if sys.platform != "win32":
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        sys.modules["__main__"] = main
        if safe is None:
            del os.environ["PYTHONSAFEPATH"]
        else:
            os.environ["PYTHONSAFEPATH"] = safe
