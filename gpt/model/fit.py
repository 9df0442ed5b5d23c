"""How many sequences at once fit into a device's memory: what ``gpt train --micro-batch auto`` takes, and what ``gpt
params --devices`` says that it would. By arithmetic alone: torch is not imported."""

import math
from dataclasses import replace

from gpt.config import GPTConfig
from gpt.model.memory import ALIGNED, Setup, training

USABLE = 0.9  # of a GPU's memory; the rest is for CUDA's context, the buffers of cuBLAS and NCCL, and fragmentation
SHARED = 0.25  # of a CPU's memory beside what stays there between steps: other programs want theirs
LEAST_CHUNK = 128  # positions whose logits are computed at once at least
MOST_LOGITS = 2**31 - 1  # at once: past it kernels count in int64, and torch has erred (pytorch#111484)


def room(config: GPTConfig, setup: Setup, memory: int) -> int:
    """Bytes that a step may take of a device's ``memory``."""
    if setup.device == "cuda":
        return int(USABLE * memory)
    step = training(config, setup)
    stays = step.parameters + step.gradients + step.optimizer + step.snapshot
    return stays + int(SHARED * max(0, memory - stays))


def fits(config: GPTConfig, setup: Setup, memory: int) -> bool:
    """Whether a step takes no more than its `room`, and its logits can be counted in int32."""
    return countable(config, setup) and training(config, setup).peak <= room(config, setup, memory)


def countable(config: GPTConfig, setup: Setup) -> bool:
    """Whether the logits that exist at once, of the padded vocabulary, are at most `MOST_LOGITS`."""
    at_once = setup.loss_chunk or setup.micro_batch * config.block_size
    return at_once * -(-config.vocab_size // ALIGNED) * ALIGNED <= MOST_LOGITS


def largest(config: GPTConfig, setup: Setup, rows: int, memory: int) -> Setup:
    """``setup`` with the largest micro-batch that fits of those that divide a process's ``rows``; where none does, with
    one sequence, and its logits `in_chunks`."""
    for micro_batch in reversed(divisors(rows)):
        setup = at_once(setup, micro_batch, rows)
        if fits(config, setup, memory):
            return setup
    return in_chunks(config, setup, memory)


def at_once(setup: Setup, micro_batch: int, rows: int) -> Setup:
    """``setup`` with that micro-batch of a process's ``rows``, which it divides."""
    return replace(setup, micro_batch=micro_batch, accumulates=rows > micro_batch)


def in_chunks(config: GPTConfig, setup: Setup, memory: int) -> Setup:
    """``setup`` with the logits of as many positions at once as fit, where those of all do not."""
    chunk, peak = setup.micro_batch * config.block_size, training(config, setup).peak
    while chunk > LEAST_CHUNK and not fits(config, setup, memory):
        chunk = max(LEAST_CHUNK, chunk // 2)
        smaller = replace(setup, loss_chunk=chunk)
        if countable(config, setup) and training(config, smaller).peak >= peak:
            break  # it isn't the logits that need so much
        setup, peak = smaller, training(config, smaller).peak
    return setup


def divisors(n: int) -> list[int]:
    """The whole numbers that divide n, in order."""
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)})
