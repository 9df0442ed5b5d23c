"""Logits → logits: filters as pure functions, each on (…, V). What they exclude becomes -inf; one id always stays."""

import torch
from torch import Tensor

from gpt.config import SampleConfig

EXCLUDED = float("-inf")


def warm(logits: Tensor, temperature: float) -> Tensor:
    """Logits over a temperature above 0, the likeliest moved to 0 first: a tiny temperature must not overflow."""
    return (logits - logits.amax(dim=-1, keepdim=True)) / temperature


def keep_top_k(logits: Tensor, k: int) -> Tensor:
    """The ``k`` likeliest ids, and those that tie with the last of them; 0: all."""
    if k <= 0 or k >= logits.size(-1):
        return logits
    least = logits.topk(k, dim=-1).values[..., -1:]
    return logits.masked_fill(logits < least, EXCLUDED)


def keep_top_p(logits: Tensor, p: float) -> Tensor:
    """The fewest ids whose probabilities sum to ``p`` or more (Holtzman et al. 2020); 0 or 1: all."""
    if p <= 0 or p >= 1:
        return logits
    ordered, order = logits.sort(dim=-1, descending=True)
    probabilities = ordered.softmax(-1)
    before = probabilities.cumsum(-1) - probabilities  # the probability of all likelier ids
    excluded = before >= p
    excluded[..., 0] = False
    return logits.masked_fill(excluded.scatter(-1, order, excluded), EXCLUDED)


def exclude(logits: Tensor, ids: list[int]) -> Tensor:
    """Without ``ids``, unless nothing else is left."""
    if not ids or logits.size(-1) <= len(ids):
        return logits
    index = torch.tensor(ids, device=logits.device)
    return logits.index_fill(-1, index, EXCLUDED)


def choose(logits: Tensor, config: SampleConfig, generator: torch.Generator) -> int:
    """An id for logits (V): the likeliest, or drawn after temperature, top-k and top-p, in this order.

    Draws happen on the CPU in float32, so that a seed means the same wherever the model is.
    """
    if config.greedy or config.temperature == 0:
        return int(logits.argmax())
    warmed = warm(logits.float().cpu(), config.temperature)
    probabilities = keep_top_p(keep_top_k(warmed, config.top_k), config.top_p).softmax(-1)
    return int(torch.multinomial(probabilities, 1, generator=generator))
