"""Is a model good? Its text's bits per byte under compressors and two guesses, and a sentence that compares them."""

import contextlib
import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

import numpy as np

from gpt.config.settings import Amount, Count
from gpt.corpus.batches import Int64s
from gpt.corpus.shards import TokenStream
from gpt.system.words import counted
from gpt.tokenizers.tokenizer import Tokenizer

MAX_TRAIN_BYTES, MAX_TEXT_BYTES = 2**21, 2**18  # Maximum bytes for xz: the last training bytes, the first of the text.
# Shares of the held-out loss, per doubling of the steps. A run improves if the held-out loss falls by more than the
# first. If the training loss falls faster by more than the second, the fall is due to the decay of the learning rate,
# and the run memorizes its text. benchmarks/decisions.md has the measurements.
MIN_FALL, MAX_GAP_GROWTH = 0.01, 0.12

MIN_COMPARED_BYTES = 1000  # On a shorter text, compressors measure little but how often it repeats the training text.

Trend = Literal["improving", "saturated", "overfitted"]
ADVICE = {
    "overfitted": "overfitted, and the best checkpoint is used: more text helps, more steps don't",
    "improving": "still improving: more minutes help",
    "saturated": "saturated: more text helps, more steps don't",
}
Curve = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Yardsticks:
    """Bits per byte of a text without a model. xz compresses the first ``text_bytes`` of it after the last
    ``train_bytes`` of the training text. A guess gives each token its frequency in the training text (``unigram``), or
    all tokens the same probability (``uniform``)."""

    xz: Amount
    unigram: Amount | None  # None without a training text
    uniform: Amount
    train_bytes: Count
    text_bytes: Count
    is_cut: bool  # whether one of the texts is longer than that

    def __str__(self) -> str:
        given = "given the training text" if self.train_bytes else "without the training text"
        if self.is_cut:
            given = f"for {self.text_bytes:,} bytes after {self.train_bytes:,} of the training text"
        unigram = "" if self.unigram is None else f"unigram {self.unigram:.4f}, "
        return f"{self.xz:.4f} bits per byte {given}; guesses: {unigram}uniform {self.uniform:.4f}"


def measure(
    tokenizer: Tokenizer, text: TokenStream, train: TokenStream | None, tokens_per_byte: float
) -> Yardsticks | None:
    """Measures a text. ``tokens_per_byte`` converts a guess's loss per token to bits per byte, as it does a model's.
    Returns None if the text is empty, and on errors, because yardsticks must not fail a command."""
    with contextlib.suppress(Exception):
        text_ids, head, is_cut = _read(tokenizer, text, MAX_TEXT_BYTES, tokens_per_byte, from_end=False)
        train_ids, tail = text_ids[:0], b""
        if train is not None:
            train_ids, tail, is_train_cut = _read(tokenizer, train, MAX_TRAIN_BYTES, tokens_per_byte, from_end=True)
            is_cut |= is_train_cut
        if not head:
            return None
        counts = np.bincount(train_ids, minlength=tokenizer.vocab_size) + 1  # Also for tokens that do not occur.
        unigram = math.log(counts.sum()) - float(np.log(counts[text_ids]).mean())
        bits_per_nat = tokens_per_byte / math.log(2)
        guesses = unigram * bits_per_nat if tail else None, math.log(tokenizer.vocab_size) * bits_per_nat
        return Yardsticks(_compress(tail, head), *guesses, len(tail), len(head), is_cut)
    return None


def _read(
    tokenizer: Tokenizer, stream: TokenStream, max_bytes: int, tokens_per_byte: float, from_end: bool
) -> tuple[Int64s, bytes, bool]:
    """Returns about ``max_bytes`` of text from one end of a stream, as ids and as bytes, and whether that is not all
    of it."""
    count = min(len(stream), math.ceil(max_bytes * tokens_per_byte))
    ids = stream.take(len(stream) - count if from_end else 0, count)
    ids = ids[~np.isin(ids, tokenizer.opening)]
    data = tokenizer.decode_bytes(ids.tolist())
    is_cut = count < len(stream) or len(data) > max_bytes
    return ids, data[-max_bytes:] if from_end else data[:max_bytes], is_cut


def _compress(tail: bytes, head: bytes) -> float:
    """Returns the bits per byte of ``head`` after ``tail``."""
    with ThreadPoolExecutor(2) as pool:
        before, both = pool.map(_count_xz, (tail, tail + head))
    return 8 * (both - before) / len(head)


def _count_xz(data: bytes) -> int:
    """Returns the size of ``data`` as compressed by ``xz -9e``, without headers."""
    import lzma  # Python can be built without it.

    # The dictionary is smaller than the preset's, to save memory, and larger than ``data``.
    lzma_filter = {"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "dict_size": 2**22}
    return len(lzma.compress(data, lzma.FORMAT_RAW, filters=[lzma_filter]))


def find_trend(training: Curve, held_out: Curve) -> Trend | None:
    """Returns the trend of a run's losses, given as (step, loss), over the last doubling of its steps. Returns None if
    it has fewer than three evaluations there, unless an earlier loss was clearly lower than the last."""
    last_step = max((step for step, _ in held_out), default=0)
    losses = [loss for step, loss in held_out if step and math.isfinite(loss)]
    if losses and is_overfitted(losses[-1], min(losses)):
        return "overfitted"
    last_training, last_held_out = (
        [(step, loss) for step, loss in curve if last_step <= 2 * step <= 2 * last_step]
        for curve in (training, held_out)
    )
    if len(last_held_out) < 3:
        return None
    fall, gap_growth = -_slope(last_held_out), _slope(last_held_out) - _slope(last_training)
    loss = abs(last_held_out[-1][1])
    return "improving" if fall > MIN_FALL * loss and gap_growth < MAX_GAP_GROWTH * loss else "saturated"


def is_overfitted(last_loss: float, best_loss: float) -> bool:
    """Whether the held-out loss has risen clearly since its minimum."""
    return last_loss > best_loss + MIN_FALL * abs(best_loss)  # Minus a reward is negative.


def _slope(curve: Curve) -> float:
    """Returns the least-squares slope per doubling of the steps, over finite losses."""
    points = np.array([(math.log2(step), loss) for step, loss in curve if math.isfinite(loss)])
    if len(points) < 2:
        return 0.0
    x, y = (points - points.mean(0)).T
    return float(x @ y / (x @ x))


def describe(bits_per_byte: float | None, yardsticks: Yardsticks | None, trend: Trend | None) -> str:
    """Returns a sentence such as "worse than xz by 7%, better than the unigram guess by 13%; still improving: more
    minutes help", as far as its parts are known. It names the yardsticks next to the model."""
    place = "" if bits_per_byte is None or yardsticks is None else _compare(bits_per_byte, yardsticks)
    return "; ".join(filter(None, [place, ADVICE[trend] if trend else ""]))


def _compare(bits: float, yardsticks: Yardsticks) -> str:
    if yardsticks.text_bytes < MIN_COMPARED_BYTES:
        return f"not compared with xz: the held-out text has only {counted(yardsticks.text_bytes, 'byte')}"
    names = {"xz": "xz", "the unigram guess": "unigram", "the uniform guess": "uniform"}
    ranking = sorted((value, name) for name, key in names.items() if (value := getattr(yardsticks, key)))
    if equal := next((name for value, name in ranking if abs(bits / value - 1) < 0.005), None):
        return f"as good as {equal}"
    better, worse = [each for each in ranking if each[0] < bits][-1:], [each for each in ranking if each[0] > bits][:1]
    parts = [f"worse than {name} by {bits / value - 1:.0%}" for value, name in better if bits <= 2 * value]
    parts += [f"far worse than {name}" for value, name in better if bits > 2 * value]
    return ", ".join([*parts, *(f"better than {name} by {1 - bits / value:.0%}" for value, name in worse)])
