"""Logits → tokens: filters as pure functions, each on (…, V) unless it says otherwise, and how an id is drawn.

What a filter excludes becomes -inf; one id always stays.
"""

import hashlib
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gpt.device import upload
from gpt.errors import NotANumber
from gpt.sample_config import SampleConfig

EXCLUDED = float("-inf")


@dataclass(frozen=True)
class Token:
    """An id and its log-probability (nats) under the model itself: no filter, temperature 1; None for the first of a
    prompt. ``top``: the likeliest ids in its place with theirs, if asked for."""

    id: int
    logprob: float | None
    top: tuple[tuple[int, float], ...] = ()


def scores(ids: Tensor, logits: Tensor, top: int = 0) -> list[Tensor]:
    """Returns what `tokens` needs of ids (n, k) that follow logits (n, V): the ids and their log-probabilities, and the
    log-probabilities and ids of the ``top`` likeliest."""
    logprobs = logits.log_softmax(-1)  # a single NaN among the logits makes all of a row NaN
    best = logprobs.topk(min(top, logits.size(-1)), dim=-1) if top else ()
    return [ids, logprobs.gather(-1, ids), *best]


def tokens(scores: Sequence[Any], tops: Sequence[int]) -> list[list[Token]]:
    """Returns the k tokens of each of n rows from `scores`, as lists, each with the ``tops`` likeliest of its row."""
    if len(scores) == 2:
        return [[Token(*each) for each in zip(*row, strict=True)] for row in zip(*scores, strict=True)]
    return [
        [
            Token(id, value, tuple(zip(best[:top], values[:top], strict=True)))
            for id, value in zip(ids, own, strict=True)
        ]
        for ids, own, values, best, top in zip(*scores, tops, strict=True)
    ]


def no_logits() -> NotANumber:
    """The error of a model whose logits are NaN or infinite."""
    return NotANumber("the model produced NaN or infinite logits, so no token can be chosen")


def warm(logits: Tensor, temperature: float) -> Tensor:
    """Divides logits by a temperature above 0, after moving the largest to 0: a tiny temperature must neither overflow
    nor become 0."""
    temperature = max(temperature, torch.finfo(logits.dtype).tiny)
    return (logits - logits.amax(dim=-1, keepdim=True)) / temperature


def keep_top_k(logits: Tensor, k: int) -> Tensor:
    """Keeps the ``k`` likeliest ids, and those that tie with the last of them; 0: all."""
    if k <= 0 or k >= logits.size(-1):
        return logits
    least = logits.topk(k, dim=-1).values[..., -1:]
    return logits.masked_fill(logits < least, EXCLUDED)


def keep_top_p(logits: Tensor, p: float) -> Tensor:
    """Keeps the fewest ids whose probabilities sum to ``p`` or more (Holtzman et al. 2020), of those that tie with the
    last of them the first; 0 or 1: all."""
    if p <= 0 or p >= 1:
        return logits
    ordered = _descending(logits)
    count = 1 + (ordered.softmax(-1).cumsum(-1) < p).sum(-1, keepdim=True)
    last = ordered.gather(-1, count.clamp(max=logits.size(-1)) - 1)
    above, tied = logits > last, logits == last
    room = count - above.sum(-1, keepdim=True)
    return logits.masked_fill(~(above | tied & (tied.cumsum(-1) <= room)), EXCLUDED)


def _descending(logits: Tensor) -> Tensor:
    """Sorts logits, the highest first. numpy sorts values without their indices and in vectors: 50,257 of them in a
    quarter of torch's time, which on a CPU is an eighth of a step of GPT-2 124M."""
    if logits.device.type != "cpu" or logits.dtype != torch.float32 or torch.compiler.is_compiling():
        return logits.sort(dim=-1, descending=True).values
    return torch.from_numpy(np.sort(logits.numpy(), axis=-1)).flip(-1)


def keep_min_p(logits: Tensor, p: float) -> Tensor:
    """Keeps ids at least ``p`` times as likely as the likeliest (Nguyen et al. 2024); 0: all."""
    if p <= 0:
        return logits
    probabilities = logits.softmax(-1)
    return logits.masked_fill(probabilities < p * probabilities.amax(-1, keepdim=True), EXCLUDED)


def penalize(logits: Tensor, ids: Iterable[int], penalty: float) -> Tensor:
    """Divides the logits (V) of ``ids`` by ``penalty`` where above 0, and multiplies them by it elsewhere (Keskar et
    al. 2019); 0 or 1: no change."""
    if penalty in (0, 1):
        return logits
    index = upload(np.array(sorted(set(ids)), np.int64), logits.device)
    of_these = logits[index]
    return logits.index_copy(0, index, torch.where(of_these < 0, of_these * penalty, of_these / penalty))


def count_against(logits: Tensor, ids: Sequence[int], presence: float, frequency: float) -> Tensor:
    """Takes ``presence`` from the logits (V) of ids that stand among ``ids``, and ``frequency`` for each time that one
    does, as OpenAI's API defines its penalties."""
    if not ids or not (presence or frequency):
        return logits
    some, counts = np.unique(ids, return_counts=True)
    against = (presence + frequency * torch.from_numpy(counts)).to(logits.dtype)
    return logits.index_add(0, upload(some, logits.device), upload(against, logits.device), alpha=-1)


def repeats(ids: Sequence[int], n: int) -> list[int]:
    """Returns the ids that would end a run of ``n`` which ``ids`` already has; none where ``n`` is 0."""
    if n <= 0 or len(ids) < n:
        return []
    tail = list(ids[len(ids) - n + 1 :])
    return sorted({ids[at + n - 1] for at in range(len(ids) - n + 1) if list(ids[at : at + n - 1]) == tail})


def exclude(logits: Tensor, ids: Iterable[int]) -> Tensor:
    """Excludes ``ids``, unless nothing else would be left."""
    if not (without := sorted(set(ids))):
        return logits
    left = logits.index_fill(-1, upload(without, logits.device), EXCLUDED)
    return torch.where(left.amax(-1, keepdim=True) > EXCLUDED, left, logits)


class Filters:
    """The filters of a request, in the order that `SampleConfig` states. ``bias``: ids and what is added to their
    logits. Requests whose ``key`` is the same have the same filters."""

    def __init__(self, config: SampleConfig, ends: Collection[int], bias: Sequence[tuple[int, float]] = ()) -> None:
        self.config = config
        self.ends = ends
        self.bias = list(bias)
        self.key = (config.choice, *self.bias)
        self.draws, self.looks_back = config.draws, config.looks_back

    def shape(self, logits: Tensor, past: Sequence[Sequence[int]], counts: Sequence[int]) -> Tensor:
        """Applies bias, penalties and least tokens, which beam search has too, to logits (N, V). ``past``: each row's
        ids, the prompt's included; ``counts``: how many of them were generated."""
        config = self.config
        if self.bias:
            ids, values = zip(*self.bias, strict=True)
            logits = logits.index_add(
                -1, upload(ids, logits.device), upload(values, logits.device).expand(len(logits), -1)
            )
        least = any(count < config.min_tokens for count in counts)
        if not (self.looks_back or least):
            return logits
        return torch.stack([self._row(*row) for row in zip(logits, past, counts, strict=True)])

    def _row(self, logits: Tensor, past: Sequence[int], count: int) -> Tensor:
        logits = penalize(logits, past, self.config.repetition_penalty)
        config, generated = self.config, past[len(past) - count :]
        logits = count_against(logits, generated, config.presence_penalty, config.frequency_penalty)
        without = repeats(past, self.config.no_repeat_ngram)
        return exclude(logits, [*without, *self.ends] if count < self.config.min_tokens else without)

    def keep(self, logits: Tensor) -> Tensor:
        """Applies temperature, top-k, top-p and min-p to shaped logits (N, V)."""
        warmed = warm(logits.float(), self.config.temperature)
        return keep_min_p(keep_top_p(keep_top_k(warmed, self.config.top_k), self.config.top_p), self.config.min_p)

    def shapes(self, count: int) -> bool:
        """Whether `shape` changes logits after so many tokens."""
        return bool(self.bias) or self.looks_back or count < self.config.min_tokens

    def choose(self, logits: Tensor, keys: Tensor) -> Tensor:
        """Chooses ids (N) from shaped logits (N, V): the likeliest, or one drawn from those that are kept, with the
        random numbers of each row's key, (N, 1)."""
        if not self.draws:
            return logits.argmax(-1)
        kept = self.keep(logits)
        noisy: Tensor = kept + gumbel(keys, kept.size(-1))
        return noisy.argmax(-1)


# SplitMix64's 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9 and 0x94D049BB133111EB, as int64; and 1 / GOLDEN modulo 2⁶⁴.
_GOLDEN, _FIRST, _SECOND = (word - 2**64 for word in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
_INVERSE = pow(_GOLDEN, -1, 2**64) - 2**64


def gumbel(keys: Tensor, V: int) -> Tensor:
    """Returns Gumbel noise (N, V), a function of each row's key, (N, 1), and the id alone.

    The argmax of logits and such noise is a draw from their softmax (Gumbel 1954). Since it depends on nothing else, a
    text is the same whatever is drawn beside it, on any device, and however many of its tokens are looked at at once.
    """
    # Divided as a float, not rounded to equal steps, so that small numbers keep their precision; and never to 1, whose
    # noise is infinite.
    uniform = _shift(bits(keys, V), 1).float() * ((1 - 2.0**-24) * 2.0**-63)
    return -torch.log(-torch.log1p(-uniform))


def bits(keys: Tensor, V: int) -> Tensor:
    """Returns SplitMix64's first V words for each key, (N, 1), as its state (Steele et al. 2014), (N, V), as int64."""
    # key + GOLDEN · n, in which int64 wraps, as SplitMix64 wants. A compiler would take GOLDEN · n alone for an index,
    # which it computes as a number without bounds.
    x = (keys * _INVERSE + torch.arange(1, V + 1, device=keys.device)) * _GOLDEN
    x = (x ^ _shift(x, 30)) * _FIRST
    x = (x ^ _shift(x, 27)) * _SECOND
    return x ^ _shift(x, 31)


def as_int64(keys: Sequence[int]) -> npt.NDArray[np.int64]:
    """Returns keys of 64 bits as numbers with a sign, (N, 1)."""
    return np.array(keys, np.uint64).view(np.int64)[:, None]


def _shift(x: Tensor, by: int) -> Tensor:
    """Shifts int64 right as if it had no sign."""
    return x.bitwise_right_shift(by).bitwise_and(2 ** (64 - by) - 1)


def key_of(seed: int, index: int, prompt: Sequence[int]) -> int:
    """Returns the key of sample ``index`` of a prompt, which does not depend on other samples. It depends on the
    prompt's ids, so that prompts side by side have different random numbers."""
    digest = hashlib.sha256(f"{seed}/{index}/{','.join(map(str, prompt))}".encode()).digest()
    return int.from_bytes(digest[:8], "little")


def step_key(key: int, step: int) -> int:
    """Returns a sample's key for its token number ``step``."""
    digest = hashlib.sha256(key.to_bytes(8, "little") + step.to_bytes(8, "little")).digest()
    return int.from_bytes(digest[:8], "little")
