"""A decoding step for all cache rows: a function of tensors that compiles to one graph."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gpt.config.device import Compute
from gpt.decoding.logits import Filters, score_tokens
from gpt.decoding.native import is_packed
from gpt.decoding.weights import Int4Linear
from gpt.model.cache import EveryRow, KVCache
from gpt.model.decoder import GPT
from gpt.system.errors import first_line, is_out_of_memory

# On a GPU, steps run as CUDA graphs. Coordinate descent tunes tile sizes, without which single-row products are slow.
# The memory threshold fuses kernels that share only the positions. Without split reductions, one kernel computes both
# the log-probabilities and the choice.
OPTIONS: dict[str, Any] = {
    "triton.cudagraphs": True, "coordinate_descent_tuning": True, "score_fusion_memory_threshold": 8,
    "split_reductions": False,
}  # fmt: skip
Step = Callable[..., list[Tensor]]  # `next_tokens` without its ``model`` parameter.


def next_tokens(
    model: GPT, cache: KVCache, ids: Tensor, step_inputs: Tensor, vocab_size: int, filters: Filters | None, top: int
) -> list[Tensor]:
    """Appends ids (rows, 1) to the rows of a cache. With ``filters``, chooses the next ids, writes them to ``ids`` and
    returns their `score_tokens` with the ``top`` most likely ids. Without filters, returns logits (rows, V).

    ``step_inputs`` (2, rows), on the device, has the position and the random key of each row. A CUDA graph requires the
    same shapes and addresses in every step.
    """
    positions, keys = step_inputs
    x, rope = model.embed_at(ids, positions[:, None])
    x = model.stack(x, rope, EveryRow(cache, positions))
    logits = model.unembed(x)[:, 0, :vocab_size].float()
    if filters is None:
        return [logits]
    chosen_ids = filters.choose(logits, keys[:, None])[:, None]
    ids.copy_(chosen_ids)
    return score_tokens(chosen_ids, logits, top)


def compile_step(model: GPT, compute: Compute, note: Callable[[str], None]) -> Step | None:
    """Compiles `next_tokens` of a model, with CUDA graphs on a GPU. If compiling fails, calls ``note`` and runs steps
    uncompiled. For int4 weights and on a CPU, where steps run in C, calls ``note`` and returns None."""
    if is_packed(model) or any(isinstance(module, Int4Linear) for module in model.modules()):
        note("int4 weights, and steps on a CPU, are not compiled by torch: their kernels already are")
        return None
    eager_step = functools.partial(next_tokens, model)
    compiled_step = torch.compile(
        next_tokens, dynamic=False, options=OPTIONS if compute.device.type == "cuda" else None
    )
    failed = False

    def step(*args: Any) -> list[Tensor]:
        nonlocal failed
        if not failed:
            try:
                return compiled_step(model, *args)
            except Exception as error:  # The compiler can fail, or a C++ compiler can be missing.
                if is_out_of_memory(error):
                    raise
                failed = True
                note(f"torch.compile failed, so steps run without it: {first_line(error):.200}")
        return eager_step(*args)

    return step
