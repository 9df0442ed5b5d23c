"""Measures the loss over whole texts, deterministically, in fixed windows."""

import codecs
import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gpt.config.device import Compute, Download, upload
from gpt.corpus.shards import TokenDocument, TokenDocuments
from gpt.insight.yardsticks import Trend, Yardsticks, describe
from gpt.model import loss as losses
from gpt.model.decoder import GPT
from gpt.system.errors import NotANumber, UserError
from gpt.tokenizers.tokenizer import Tokenizer

Ids = npt.NDArray[np.int64]
WINDOW = 1024  # Maximum default window. In longer windows, attention takes most of the time.
MAX_BATCH_TOKENS = 8192  # Maximum positions in a batch of windows.
MAX_LOGITS = 2**24  # Maximum logits in memory, which float32 copies make 170 MB.
DECODE_CHUNK = 2**20  # Ids decoded per call.


@dataclass(frozen=True)
class Window:
    """Up to ``block_size`` ids ``x`` and their next ids ``y``. Earlier windows have already counted the first
    ``skipped`` targets."""

    document: int
    start: int
    x: Ids
    y: Ids
    skipped: int


@dataclass(frozen=True)
class Evaluation:
    """A text's loss in several units. ``tokens`` counts predicted tokens: all except each document's first."""

    loss: float  # nats per token
    tokens: int
    bytes: int
    words: int
    stride: int
    block_size: int
    yardsticks: Yardsticks | None = None
    trend: Trend | None = None  # of the run, if the text is its held-out text

    @property
    def verdict(self) -> str:
        """A sentence that compares the model with xz and says whether more training helps, as far as both are known."""
        return describe(self.bits_per_byte, self.yardsticks, self.trend)

    @property
    def perplexity(self) -> float:
        """e raised to the loss per token."""
        return _exp(self.loss)

    @property
    def bits_per_byte(self) -> float:
        """Total loss in bits per byte of text, comparable across tokenizers."""
        return losses.bits_per_byte(self.loss * self.tokens, self.bytes)

    @property
    def word_perplexity(self) -> float:
        """e raised to the loss per whitespace-separated word, comparable across tokenizers."""
        return _exp(self.loss * self.tokens / self.words) if self.words else math.nan


def _exp(x: float) -> float:
    return math.exp(x) if x < 700 else math.inf


class Encoded(list[Ids]):
    """Documents in memory."""

    @property
    def lengths(self) -> Ids:
        """Ids per document."""
        return np.array([len(ids) for ids in self], np.int64)


Documents = Encoded | TokenDocuments


def windows(documents: Iterable[Ids | TokenDocument], block_size: int, stride: int | None = None) -> Iterator[Window]:
    """Yields windows that start every ``stride`` ids of each document, by default without overlap. Every id except a
    document's first counts exactly once. Raises `UserError` for a stride beyond ``block_size``."""
    stride = block_size if stride is None else stride
    if not 1 <= stride <= block_size:
        raise UserError(f"stride is {stride}; it must be from 1 to the window, {block_size} tokens")
    for document, ids in enumerate(documents):
        for start in range(0, max(1, len(ids) - 1 - (block_size - stride)), stride):
            part = ids[start : start + block_size + 1]
            if len(part) > 1:
                yield Window(document, start, part[:-1], part[1:], block_size - stride if start else 0)


def spread_windows(documents: Documents, block_size: int, count: int) -> list[Window]:
    """Returns up to ``count`` windows, spread evenly over all documents."""
    counts = -(-np.maximum(documents.lengths - 1, 0) // block_size)
    ends = np.cumsum(counts)
    total = int(ends[-1]) if len(ends) else 0
    selected_windows = []
    for index in dict.fromkeys(i * total // count for i in range(count)) if total > count else range(total):
        document = int(np.searchsorted(ends, index, "right"))
        start = (index - int(ends[document] - counts[document])) * block_size
        ids = documents[document][start : start + block_size + 1]
        selected_windows.append(Window(document, start, ids[:-1], ids[1:], 0))
    return selected_windows


def pad(batch: Sequence[Window]) -> tuple[Ids, Ids]:
    """Returns inputs and targets of windows, (n, T), padded to the length of the longest. Targets that do not count are
    `IGNORED`."""
    shape = len(batch), max(len(window.x) for window in batch)
    x, y = np.zeros(shape, np.int64), np.full(shape, losses.IGNORED, np.int64)
    for row, window in enumerate(batch):
        x[row, : len(window.x)] = window.x
        y[row, window.skipped : len(window.y)] = window.y[window.skipped :]
    return x, y


@torch.inference_mode()
def score_positions(
    model: GPT, batch: Sequence[Window], compute: Compute, score: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """Returns ``score(logits, targets)`` of each position of the padded windows, (n, T). Keeps at most `MAX_LOGITS`
    logits in memory."""
    x, y = pad(batch)
    targets, chunk = upload(y.ravel(), compute.device), max(1, MAX_LOGITS // model.config.vocab_size)
    with compute.autocast():
        # The trunk gathers sharded weights; model(x) does not.
        stream = model.trunk(upload(x, compute.device)).flatten(0, 1)
        parts = zip(torch.split(stream, chunk), torch.split(targets, chunk), strict=True)
        scores = [score(model.unembed(part), part_targets) for part, part_targets in parts]
    return torch.cat(scores).view(x.shape)


def score_windows(
    model: GPT, all_windows: Iterable[Window], compute: Compute
) -> Iterator[tuple[Window, npt.NDArray[np.float64]]]:
    """Yields each window, in order, with the losses of its counted targets in nats. Dropout is off. A GPU computes a
    batch while the caller reads the previous batch."""
    pending: tuple[list[Window], Download] | None = None
    with _eval_mode(model):
        for batch in _batches(all_windows):
            current = batch, Download(score_positions(model, batch, compute, losses.token_losses))
            if pending is not None:
                yield from _counted_losses(*pending)
            pending = current
        if pending is not None:
            yield from _counted_losses(*pending)


def _counted_losses(batch: list[Window], download: Download) -> Iterator[tuple[Window, npt.NDArray[np.float64]]]:
    for window, row_losses in zip(batch, download.read()[0], strict=True):
        target_slice = slice(window.skipped, len(window.y))
        yield window, np.array(row_losses[target_slice])[window.y[target_slice] != losses.IGNORED]


def count_exact(model: GPT, all_windows: Iterable[Window], compute: Compute) -> tuple[int, int]:
    """Returns the number of windows whose counted targets greedy decoding reproduces exactly, and the number of windows
    with counted targets."""
    exact, count = 0, 0
    with _eval_mode(model):
        for batch in _batches(all_windows):
            has_targets = torch.tensor([bool((window.y[window.skipped :] != losses.IGNORED).any()) for window in batch])
            has_miss = score_positions(model, batch, compute, _misses).any(-1).cpu()
            exact += int((has_targets & ~has_miss).sum())
            count += int(has_targets.sum())
    return exact, count


def _misses(logits: Tensor, targets: Tensor) -> Tensor:
    """Returns True for counted targets that are not the most likely token."""
    return (logits.argmax(-1) != targets) & (targets != losses.IGNORED)


@contextlib.contextmanager
def _eval_mode(model: GPT) -> Iterator[None]:
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


def _batches(all_windows: Iterable[Window]) -> Iterator[list[Window]]:
    """Yields batches of windows with up to `MAX_BATCH_TOKENS` tokens after padding."""
    batch: list[Window] = []
    longest = 0
    for window in all_windows:
        longest = max(longest, len(window.x))
        if batch and (len(batch) + 1) * longest > MAX_BATCH_TOKENS:
            yield batch
            batch, longest = [], len(window.x)
        batch.append(window)
    if batch:
        yield batch


def total_loss(model: GPT, all_windows: Iterable[Window], compute: Compute) -> tuple[float, int]:
    """Returns the total loss of all counted targets in nats, and their number."""
    total, count = 0.0, 0
    for _, window_losses in score_windows(model, all_windows, compute):
        total += float(window_losses.sum())
        count += len(window_losses)
    return total, count


# Called with a window, its losses, and the number of tokens to score in all windows.
OnWindow = Callable[[Window, npt.NDArray[np.float64], int], None]


def evaluate(
    model: GPT,
    tokenizer: Tokenizer,
    documents: Documents,
    compute: Compute,
    stride: int | None = None,
    on_window: OnWindow | None = None,
    block_size: int | None = None,
) -> Evaluation:
    """Measures the loss over separate documents, in windows of ``block_size`` tokens (default: the context, up to
    `WINDOW`). Calls ``on_window`` with each window's losses.

    Raises `UserError` if there is no token to predict, and `NotANumber` if the loss is NaN or infinite.
    """
    context = model.config.block_size
    if block_size is not None and not 1 <= block_size <= context:
        raise UserError(f"block-size is {block_size:,}; it must be from 1 to the model's context, {context:,}")
    block_size = block_size or min(WINDOW, context)
    count = int(np.maximum(documents.lengths - 1, 0).sum())
    if not count:
        raise UserError("the text has fewer than two tokens: there is nothing to predict", "give a longer text")
    total, non_finite = 0.0, 0
    for window, window_losses in score_windows(model, windows(documents, block_size, stride), compute):
        total += float(window_losses.sum())
        non_finite += int(np.count_nonzero(~np.isfinite(window_losses)))
        if on_window is not None:
            on_window(window, window_losses, count)
    if non_finite:
        raise NotANumber(f"the loss is {total / count}: it is not finite for {non_finite:,} of {count:,} tokens")
    n_bytes, n_words = count_text(tokenizer, documents)
    return Evaluation(total / count, count, n_bytes, n_words, stride or block_size, block_size)


def count_text(tokenizer: Tokenizer, documents: Iterable[Ids | TokenDocument]) -> tuple[int, int]:
    """Counts UTF-8 bytes and whitespace-separated words."""
    n_bytes = n_words = 0
    for ids in documents:
        decoder, in_word = codecs.getincrementaldecoder("utf-8")("replace"), False
        for start in range(0, len(ids), DECODE_CHUNK):
            part = ids[start : start + DECODE_CHUNK].tolist()
            data = tokenizer.decode_bytes(part) if start else tokenizer.document_bytes(part)
            n_bytes += len(data)
            text = decoder.decode(data, final=start + DECODE_CHUNK >= len(ids))
            n_words += len(text.split()) - (in_word and bool(text) and not text[0].isspace())
            in_word = not text[-1].isspace() if text else in_word
    return n_bytes, n_words
