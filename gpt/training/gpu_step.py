"""Faster training steps: compiled halves of blocks.

A single process on a CPU compiles the whole step instead (`gpt.training.cpu_step`).
"""

from typing import Any

import torch
from torch import nn

from gpt.model.decoder import GPT

# Inductor options for a GPU. Kernels recompute a value, instead of loading it, if that takes at most this many reads
# and operations. With the defaults, 4 and 30, the gradients of rotated queries and keys go through memory in float32.
RECOMPUTE_OPTIONS = {"realize_reads_threshold": 6, "realize_opcount_threshold": 60}


def compile_halves(model: GPT, device: torch.device, **compile_options: Any) -> None:
    """Compiles the last norm and the attention and MLP halves. All blocks share their code.

    If a whole block were one graph, three backward kernels would not load the sum between its halves, but recompute it
    from two tensors. If all blocks were one graph, deeper models would compile more slowly.
    """
    torch._dynamo.config.optimize_ddp = False  # This option would split the graphs at DDP's gradient buckets.
    options = RECOMPUTE_OPTIONS if device.type == "cuda" else None
    for module, name in _halves(model):
        setattr(module, name, torch.compile(getattr(module, name), **{"options": options} | compile_options))


def uncompile_halves(model: GPT) -> None:
    """Returns to eager execution."""
    for module, name in _halves(model):
        vars(module).pop(name, None)


def _halves(model: GPT) -> list[tuple[nn.Module, str]]:
    return [(model, "last_norm"), *((block, half) for block in model.h for half in ("add_attention", "add_mlp"))]
