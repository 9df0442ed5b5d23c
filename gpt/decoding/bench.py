"""Measures how fast a model reads a prompt and generates after it, beside the machine's memory bandwidth."""

import contextlib
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from gpt.bench_config import BenchConfig
from gpt.decoding.context import Context
from gpt.decoding.engine import Engine, Request
from gpt.decoding.token_step import Step
from gpt.decoding.weights import weight_bytes
from gpt.device import Compute
from gpt.model.decoder import GPT
from gpt.model.params import seen
from gpt.sample_config import SampleConfig

_PROBE_BYTES = 2**29  # that are read to measure the memory's speed: far more than a cache holds
_WARM = 3  # steps before those that are timed


@dataclass(frozen=True)
class DecodingSpeed:
    """The speed of sampling from a model. Rates are tokens per second of all texts together."""

    prefill_tokens_per_second: float
    decode_tokens_per_second: float
    first_token_seconds: float  # from the prompt's ids to the first token
    memory_bytes: int  # peak: of the device, or of the process on a CPU
    read_bytes: int  # what a step reads at least: weights, and keys and values at half the new tokens
    bandwidth_bytes_per_second: float  # of the memory, measured
    bandwidth_share: float  # the share of it that the steps' reads come to


def measure(model: GPT, compute: Compute, config: BenchConfig, step: Step | None = None) -> DecodingSpeed:
    """Times the engine on greedy texts after prompts of random ids. Raises `UserError` where they do not fit into the
    context."""
    config = config.fitted(model.config.block_size)
    prompt, new = config.prompt_tokens or 0, config.new_tokens or 0
    context = Context(model, compute, config.batch, prompt + new, step)
    ids = torch.randint(model.config.vocab_size, (config.batch, prompt)).tolist()
    rounds = [_round(context, ids, new) for _ in range(config.rounds + 1)][1:]  # the first is warm-up
    first, each = (statistics.median(times) for times in zip(*rounds, strict=True))
    read = weight_bytes(model, compute) + config.batch * _cached_bytes(model, prompt + new // 2, compute)
    bandwidth = bandwidth_of(compute)
    return DecodingSpeed(
        prefill_tokens_per_second=config.batch * prompt / first,
        decode_tokens_per_second=config.batch / each,
        first_token_seconds=first,
        memory_bytes=_memory(compute),
        read_bytes=read,
        bandwidth_bytes_per_second=bandwidth,
        bandwidth_share=read / each / bandwidth,
    )


def _round(context: Context, prompts: list[list[int]], count: int) -> tuple[float, float]:
    """Seconds to the first tokens, and for each step after."""
    for slot in context.slots:  # whose prompts would be taken from it
        slot.forget()
    engine = Engine(context, ends=(), chunk=sum(map(len, prompts)))  # all prompts in one pass
    config = SampleConfig(greedy=True, max_tokens=count, ignore_eot=True)
    for ids in prompts:
        engine.add(Request(ids, config))
    began = time.perf_counter()
    while not any(update.tokens for update in engine.step()):  # a GPU's first tokens are read in its second step
        pass
    first = time.perf_counter() - began
    times: list[float] = []
    while engine.busy:
        times.append(_seconds(engine.step))
    return first, statistics.mean(times[_WARM:] or times or [first])


def _cached_bytes(model: GPT, positions: int, compute: Compute) -> int:
    """The bytes of keys and values that a step reads of a text."""
    config = model.config
    return 2 * config.kv_heads * config.head_size * seen(config, positions) * compute.dtype.itemsize


def bandwidth_of(compute: Compute) -> float:
    """Bytes per second that the device reads from its memory: the best of five sums over half a gibibyte."""
    big = torch.ones(_PROBE_BYTES // 4, device=compute.device)
    return big.nbytes / min(_seconds(lambda: float(big.sum())) for _ in range(5))


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _memory(compute: Compute) -> int:
    if compute.device.type == "cuda":
        return torch.cuda.max_memory_allocated(compute.device)
    with contextlib.suppress(ImportError):  # Windows
        import resource

        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most if sys.platform == "darwin" else most * 1024
    return 0
