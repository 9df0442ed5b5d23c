"""A token for every row of a cache, as one function of tensors that a compiler makes one graph of."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gpt.decoding import native
from gpt.decoding.logits import Filters, score_tokens
from gpt.decoding.weights import Int4Linear, Int8Linear, PackedLinear
from gpt.device import Compute
from gpt.errors import first_line, is_out_of_memory
from gpt.model.cache import EveryRow, KVCache
from gpt.model.decoder import GPT

# The compiler's options on a GPU: steps are CUDA graphs; tiles are tried out, without which products of one row are
# slow; kernels that share no more than positions are fused; log-probabilities and the choice are one kernel.
OPTIONS: dict[str, Any] = {
    "triton.cudagraphs": True, "coordinate_descent_tuning": True, "score_fusion_memory_threshold": 8,
    "split_reductions": False,
}  # fmt: skip
Step = Callable[..., list[Tensor]]  # `next_tokens` of a model


def next_tokens(
    model: GPT, cache: KVCache, ids: Tensor, numbers: Tensor, vocab_size: int, filters: Filters | None, top: int
) -> list[Tensor]:
    """Appends ids (rows, 1) to each row of a cache. Chooses the next ids by ``filters``, puts them in the place of
    ``ids``, and returns their `score_tokens` with the ``top`` likeliest; without filters, returns logits (rows, V).

    ``numbers``, (2, rows) on the device: the position of each id, and each row's key for its random numbers. Shapes and
    the addresses of cache, ids and numbers are the same in every step, as a CUDA graph wants.
    """
    positions, keys = numbers
    x, rope = model.embed_at(ids, positions[:, None])
    x = model.stack(x, rope, EveryRow(cache, positions))
    logits = model.unembed(x)[:, 0, :vocab_size].float()
    if filters is None:
        return [logits]
    chosen = filters.choose(logits, keys[:, None])[:, None]
    ids.copy_(chosen)
    return score_tokens(chosen, logits, top)


def compiled(model: GPT, compute: Compute, note: Callable[[str], None]) -> Step | None:
    """Compiles `next_tokens` of a model, as CUDA graphs on a GPU. Returns None for weights that are packed, of int4, or
    rounded on a CPU, whose kernels the compiler cannot see into, and where blocks are compiled (`native`). Where
    compiling fails, ``note`` is called and steps run uncompiled."""
    if native.is_used(model):
        return None
    if any(isinstance(module, PackedLinear | Int8Linear | Int4Linear) for module in model.modules()):
        note("int4 weights and weights packed or quantized for the CPU are not compiled: their kernels already are")
        return None
    plain = functools.partial(next_tokens, model)
    fast = torch.compile(next_tokens, dynamic=False, options=OPTIONS if compute.device.type == "cuda" else None)
    failed = False

    def step(*args: Any) -> list[Tensor]:
        nonlocal failed
        if not failed:
            try:
                return fast(model, *args)
            except Exception as error:  # the compiler's own, its backend's, or that of a C++ compiler that is not there
                if is_out_of_memory(error):
                    raise
                failed = True
                note(f"torch.compile failed, so steps run without it: {first_line(error):.200}")
        return plain(*args)

    return step
