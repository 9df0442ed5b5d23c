"""Loss over a whole text, in fixed windows and without randomness."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gpt.device import Compute
from gpt.errors import UserError
from gpt.model import loss as losses
from gpt.model.decoder import GPT
from gpt.text.tokenizer import Tokenizer

Ids = npt.NDArray[np.int64]
TOKENS_AT_ONCE = 8192  # positions in a batch of windows …
LOGITS_AT_ONCE = 2**26  # … and at most so many logits


@dataclass(frozen=True)
class Window:
    """``block_size`` ids or fewer, each predicting the next; the first ``skipped`` targets were counted before."""

    document: int
    start: int
    x: Ids
    y: Ids
    skipped: int


@dataclass(frozen=True)
class Evaluation:
    """A text's loss in every usual unit. ``tokens`` counts what was predicted: all but each document's first."""

    loss: float  # nats a token
    tokens: int
    bytes: int
    words: int
    stride: int
    block_size: int

    @property
    def perplexity(self) -> float:
        """e to the loss a token."""
        return _exp(self.loss)

    @property
    def bits_per_byte(self) -> float:
        """Total loss in bits over the bytes of the text: comparable between tokenizers."""
        return losses.bits_per_byte(self.loss * self.tokens, self.bytes)

    @property
    def word_perplexity(self) -> float:
        """e to the total loss over the words (as white space cuts them): comparable between tokenizers too."""
        return _exp(self.loss * self.tokens / self.words) if self.words else math.nan


def _exp(x: float) -> float:
    return math.exp(x) if x < 700 else math.inf


def windows(documents: Iterable[Ids], block_size: int, stride: int | None = None) -> Iterator[Window]:
    """Windows that begin every ``stride`` ids of each document (default: one after the other); every id but a
    document's first is counted exactly once."""
    stride = block_size if stride is None else stride
    if not 1 <= stride <= block_size:
        raise UserError(f"stride is {stride}; it must be from 1 to the context, {block_size}")
    for number, ids in enumerate(documents):
        for start in range(0, max(1, len(ids) - 1 - (block_size - stride)), stride):
            x, y = ids[start : start + block_size], ids[start + 1 : start + 1 + block_size]
            if len(y):
                yield Window(number, start, x[: len(y)], y, block_size - stride if start else 0)


@torch.inference_mode()
def window_losses(model: GPT, some: Sequence[Window], compute: Compute) -> list[npt.NDArray[np.float64]]:
    """The loss of each counted target of each window, in nats. Windows are padded to the longest."""
    length = max(len(window.x) for window in some)
    x = np.zeros((len(some), length), np.int64)
    y = np.full((len(some), length), losses.IGNORED, np.int64)
    for row, window in enumerate(some):
        x[row, : len(window.x)] = window.x
        y[row, : len(window.y)] = window.y
    targets = torch.from_numpy(y).to(compute.device)
    with compute.autocast():
        logits: Tensor = model(torch.from_numpy(x).to(compute.device))
    of_all = losses.token_losses(logits, targets).cpu().double().numpy()
    return [of_all[row, window.skipped : len(window.y)] for row, window in enumerate(some)]


def each_window(
    model: GPT, some: Iterable[Window], compute: Compute
) -> Iterator[tuple[Window, npt.NDArray[np.float64]]]:
    """Every window with the losses of its counted targets, in order, computed in batches without dropout."""
    training = model.training
    model.eval()
    try:
        positions = min(TOKENS_AT_ONCE, LOGITS_AT_ONCE // model.config.vocab_size)
        for batch in _batches(some, max(1, positions // model.config.block_size)):
            yield from zip(batch, window_losses(model, batch, compute), strict=True)
    finally:
        model.train(training)


def _batches(all_windows: Iterable[Window], size: int) -> Iterator[list[Window]]:
    some: list[Window] = []
    for window in all_windows:
        some.append(window)
        if len(some) == size:
            yield some
            some = []
    if some:
        yield some


def mean_loss(model: GPT, some: Iterable[Window], compute: Compute) -> float:
    """Nats a token over the windows."""
    total, count = 0.0, 0
    for _, of_window in each_window(model, some, compute):
        total += float(of_window.sum())
        count += len(of_window)
    return total / count if count else math.nan


# Called with each window, its losses, and how many tokens there are to score in all.
OnWindow = Callable[[Window, npt.NDArray[np.float64], int], None]


def evaluate(
    model: GPT,
    tokenizer: Tokenizer,
    texts: Sequence[str],
    compute: Compute,
    stride: int | None = None,
    on_window: OnWindow | None = None,
) -> Evaluation:
    """The loss over the texts, each a document by itself. ``on_window`` sees each window's losses as they come.

    Raises `UserError` where no token can be predicted.
    """
    documents = [tokenizer.encode(text).astype(np.int64) for text in texts]
    count = sum(max(0, len(ids) - 1) for ids in documents)
    if not count:
        raise UserError("the text has one token at most: nothing in it can be predicted", "give a longer text")
    total = 0.0
    for window, of_window in each_window(model, windows(documents, model.config.block_size, stride), compute):
        total += float(of_window.sum())
        if on_window is not None:
            on_window(window, of_window, count)
    return Evaluation(
        loss=total / count,
        tokens=count,
        bytes=sum(len(text.encode()) for text in texts),
        words=sum(len(text.split()) for text in texts),
        stride=stride or model.config.block_size,
        block_size=model.config.block_size,
    )
