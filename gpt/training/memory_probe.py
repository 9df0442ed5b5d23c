"""Finds a micro-batch that fits into a GPU's memory, before the first step.

No step is repeated after an out-of-memory error (OOM), so this tries all of what the run will need. On a CPU, too much
memory ends the process without an exception, and the estimate of `gpt.model.plan` decides.
"""

import contextlib
from collections.abc import Iterator

import numpy as np
import torch

from gpt.device import random_states, set_random_states
from gpt.errors import PeerLost, UserError, is_out_of_memory
from gpt.evaluate import MAX_BATCH_TOKENS, Window, total_loss
from gpt.model.memory import divisors
from gpt.training.step import Stepper
from gpt.training.strategy import Strategy

PROBED_DEVICES = ("cuda", "mps")


def fit_micro_batch(stepper: Stepper, length: int) -> int:
    """Halves the micro-batch on all ranks until a step and an evaluation fit into memory. ``length`` is that of the
    longest sequence. Sets and returns the micro-batch. Weights and random states stay as they are.

    Raises `UserError` if a single sequence does not fit, and any error other than an OOM.
    """
    strategy, rows = stepper.strategy, stepper.recipe.rows // stepper.world.data_size
    if strategy.compute.device.type not in PROBED_DEVICES:
        return stepper.micro_batch
    with _equal_memory(strategy):
        while not _fits(stepper, length, rows):
            if stepper.micro_batch == 1:
                stepper.world.wait_for_main()
                raise UserError(
                    f"out of memory: the device ({strategy.compute.memory() / 1e9:,.1f} GB in all) cannot train on one "
                    f"sequence of {length:,} tokens at a time",
                    "end other programs that use the device, or try --recompute, a smaller --block-size or --preset",
                )
            stepper.micro_batch = max(d for d in divisors(rows) if 2 * d <= stepper.micro_batch)
    return stepper.micro_batch


@contextlib.contextmanager
def _equal_memory(strategy: Strategy) -> Iterator[None]:
    """Gives every rank as much memory as the rank with the least free memory has. Forward passes of sharded ranks are
    collective: if one of them failed, the others would wait for it. With equal memory, all fail at the same
    allocation."""
    device, world = strategy.compute.device, strategy.world
    if world.size == 1 or device.type != "cuda":
        yield
        return
    torch.cuda.empty_cache()
    fraction = torch.cuda.get_per_process_memory_fraction(device)
    free, total = torch.cuda.mem_get_info(device)
    free = -world.all_reduce_max(-free)
    torch.cuda.set_per_process_memory_fraction(
        min(fraction, (torch.cuda.memory_reserved(device) + free) / total), device
    )
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(fraction, device)


def _fits(stepper: Stepper, length: int, rows: int) -> bool:
    """Whether all ranks have the memory for a step of ``rows`` sequences and for an evaluation."""
    strategy, device = stepper.strategy, stepper.compute.device
    states, training, failure = random_states(device), stepper.model.training, None
    try:
        _try_step(stepper, length, rows)
    except Exception as error:
        failure = error.with_traceback(None)  # The traceback keeps activations alive.
    strategy.zero_grad()
    stepper.model.train(training)
    set_random_states(device, states)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif device.type == "mps":
        torch.mps.empty_cache()
    is_failure = failure is not None and not is_out_of_memory(failure)
    outcome = stepper.world.all_reduce_max(2 if is_failure else failure is not None)
    if outcome == 2:
        raise failure if failure is not None and is_failure else PeerLost
    return outcome == 0


def _try_step(stepper: Stepper, length: int, rows: int) -> None:
    """Computes and frees gradients of the largest micro-batch, then runs the largest batch of an evaluation."""
    strategy, compute, config = stepper.strategy, stepper.compute, stepper.model.config
    is_cuda = compute.device.type == "cuda"
    # The optimizer allocates its moments in the first step.
    reserved = [torch.empty(shape, device=compute.device) for shape in strategy.optimizer.shapes(strategy.own).values()]
    batch = stepper.placeholder_batch(length)
    if is_cuda:
        torch.cuda.reset_peak_memory_stats(compute.device)
        before = torch.cuda.memory_allocated(compute.device)
    stepper.model.train()
    if stepper.micro_batch < rows:
        with strategy.no_sync():
            stepper.backward(*batch)
    with strategy.trial():
        stepper.backward(*batch)
    strategy.zero_grad()
    del batch
    if stepper.graph is not None:  # The step's CUDA graph will keep its memory during evaluations.
        peak = torch.cuda.max_memory_allocated(compute.device) - before
        reserved.append(torch.empty(peak, dtype=torch.uint8, device=compute.device))
    ids = np.zeros(config.block_size, np.int64)
    window = Window(0, 0, ids, ids, 0)
    total_loss(stepper.model, [window] * max(1, MAX_BATCH_TOKENS // len(ids)), compute)
