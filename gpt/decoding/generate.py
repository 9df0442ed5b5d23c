"""Ids → more ids: prefill the cache with the prompt, then a step a token. Knows nothing of text."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gpt.config import SampleConfig
from gpt.decoding import logits as filters
from gpt.device import Compute
from gpt.model.cache import KVCache
from gpt.model.decoder import GPT


@dataclass(frozen=True)
class Token:
    """A generated id and its log-probability (nats) under the model itself: no filter, temperature 1."""

    id: int
    logprob: float


class Context:
    """The ids that the next one is predicted from, and the cache of their keys and values.

    Positions are absolute, so a full context cannot move by one: it drops all but its last half and is computed
    anew, once every block_size / 2 tokens.
    """

    def __init__(self, model: GPT, compute: Compute, *, cached: bool = True) -> None:
        self.model = model
        self.compute = compute
        self.cache = KVCache(model.config, 1, compute.device, compute.dtype) if cached else None
        self.ids: list[int] = []
        self.slid = False  # whether anything has been dropped

    @torch.inference_mode()
    def extend(self, ids: Sequence[int]) -> Tensor:
        """Takes in at least one more id and returns the logits (V) of what follows."""
        size = self.model.config.block_size
        new = list(ids)
        if len(self.ids) + len(new) > size:
            kept = size if not self.ids else max(1, size // 2)  # a long prompt keeps all that fits
            self.ids, new = [], (self.ids + new)[-kept:]
            self.slid = True
            if self.cache is not None:
                self.cache.clear()
        self.ids += new
        todo = self.ids if self.cache is None else new
        with self.compute.autocast():
            x = self.model.trunk(torch.tensor([todo], device=self.compute.device), self.cache)
            return self.model.unembed(x[0, -1]).float()


def seed_of(seed: int, index: int) -> int:
    """The generator's seed for sample ``index`` of a request: the same however many samples there are."""
    digest = hashlib.sha256(f"{seed}/{index}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def generate(
    context: Context, prompt: Sequence[int], config: SampleConfig, eot: int, seed: int = 0, index: int = 0
) -> Iterator[Token]:
    """Yields ids after ``prompt`` until ``max_tokens`` or end-of-text, which is yielded last. An empty prompt starts
    from end-of-text, as a document does."""
    generator = torch.Generator().manual_seed(seed_of(seed, index))
    if config.max_tokens == 0:
        return
    logits = context.extend(prompt or [eot])
    for count in range(1, config.max_tokens + 1):
        allowed = filters.exclude(logits, [eot]) if count <= config.min_tokens else logits
        chosen = filters.choose(allowed, config, generator)
        yield Token(chosen, float(logits.log_softmax(-1)[chosen]))
        if chosen == eot and not config.ignore_eot:
            return
        if count < config.max_tokens:
            logits = context.extend([chosen])
