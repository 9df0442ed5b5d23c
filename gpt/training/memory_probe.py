"""Finds a micro-batch that fits into a GPU's memory, before the first step.

No step is repeated after an out-of-memory error (OOM), so this tries all of what the run will need. On a CPU, too much
memory ends the process without an exception, and the estimate of `gpt.model.plan` decides.
"""

import contextlib
import gc
from collections.abc import Iterator

import numpy as np
import torch

from gpt.config.device import random_states, set_random_states
from gpt.insight.evaluate import MAX_BATCH_TOKENS, Window, total_loss
from gpt.model.memory import divisors
from gpt.system.errors import PeerLost, UserError, is_out_of_memory
from gpt.training.step import Stepper
from gpt.training.strategy import Strategy

PROBED_DEVICES = ("cuda", "mps")


def fit_micro_batch(stepper: Stepper, length: int) -> int:
    """Halves the micro-batch on all ranks until a step and an evaluation fit into memory. ``length`` is that of the
    longest sequence. Sets and returns the micro-batch. Weights and random states stay as they are.

    Raises `UserError` if a single sequence does not fit, and any error other than an OOM.
    """
    strategy, rows = stepper.strategy, stepper.recipe.rows // stepper.world.size
    if strategy.compute.device.type not in PROBED_DEVICES:
        return stepper.micro_batch
    gc.collect()  # Frees the models of earlier teachers and measurements, which reference cycles keep alive.
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
    least = torch.cuda.memory_reserved(device) - world.all_reduce_max(-free)
    torch.cuda.set_per_process_memory_fraction(min(fraction, least / total), device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(fraction, device)


def _fits(stepper: Stepper, length: int, rows: int) -> bool:
    """Whether all ranks have the memory for a step of ``rows`` sequences and for an evaluation."""
    device, training, failure = stepper.compute.device, stepper.model.training, None
    states = random_states(device)
    try:
        _try_step(stepper, length, rows)
    except Exception as error:
        failure = error.with_traceback(None)  # The traceback keeps activations alive.
    stepper.strategy.zero_grad()
    stepper.model.train(training)
    set_random_states(device, states)
    if device.type != "cpu":
        torch.get_device_module(device).empty_cache()
    outcome = stepper.world.all_reduce_max(0 if failure is None else 1 if is_out_of_memory(failure) else 2)
    if outcome == 2:
        raise PeerLost if failure is None or is_out_of_memory(failure) else failure
    return outcome == 0


def _try_step(stepper: Stepper, length: int, rows: int) -> None:
    """Computes and frees gradients of the largest micro-batch, then runs the largest batch of an evaluation."""
    strategy, device, block_size = stepper.strategy, stepper.compute.device, stepper.model.config.block_size
    # The optimizer allocates its moments in the first step.
    shapes = strategy.optimizer.shapes({name: tuple(p.shape) for name, p in strategy.optimizer.parameters.items()})
    reserved = [torch.empty(shape, device=device) for shape in shapes.values()]
    if stepper.graph is not None:
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
    batch = stepper.placeholder_batch(length)
    stepper.model.train()
    if stepper.micro_batch < rows:
        with strategy.no_sync():
            stepper.backward(*batch)
    with strategy.trial():
        stepper.backward(*batch)
    strategy.zero_grad()
    del batch
    if stepper.graph is not None:  # A CUDA graph keeps the memory of its step during evaluations.
        peak = torch.cuda.max_memory_allocated(device) - before
        reserved.append(torch.empty(peak, dtype=torch.uint8, device=device))
    ids = np.zeros(block_size, np.int64)
    total_loss(stepper.model, [Window(0, 0, ids, ids, 0)] * max(1, MAX_BATCH_TOKENS // block_size), stepper.compute)
