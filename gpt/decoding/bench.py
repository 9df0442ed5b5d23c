"""Measures prefill and decoding throughput, latency of the first token, and memory bandwidth."""

import contextlib
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from gpt.config.bench import BenchConfig
from gpt.config.device import Compute
from gpt.config.sample import SampleConfig
from gpt.decoding.context import Context
from gpt.decoding.engine import Engine, Request
from gpt.decoding.weights import weight_bytes
from gpt.model.decoder import GPT
from gpt.model.params import count_attended

_PROBE_BYTES = 2**29  # Buffer for measuring memory bandwidth, far larger than any cache.
_WARMUP_STEPS = 3


@dataclass(frozen=True)
class DecodingSpeed:
    """The speed of prefill and decoding. Tokens per second are summed over all sequences."""

    prefill_tokens_per_second: float
    decode_tokens_per_second: float
    first_token_seconds: float  # Time to first token, excluding tokenization.
    memory_bytes: int  # Peak memory of the device, or of the process on a CPU.
    read_bytes: int  # Weights and KV cache that a step halfway through decoding reads.
    bandwidth_bytes_per_second: float
    bandwidth_share: float  # Share of the memory bandwidth that decoding uses.


def measure(
    model: GPT, compute: Compute, config: BenchConfig, note: Callable[[str], None] = lambda text: None
) -> DecodingSpeed:
    """Times greedy decoding after random prompts. ``config`` must be `fitted` to the context."""
    prompt_tokens, new_tokens = config.prompt_tokens or 0, config.new_tokens or 0
    context = Context(model, compute, config.batch, prompt_tokens + new_tokens, note=note)
    prompts = torch.randint(model.config.vocab_size, (config.batch, prompt_tokens)).tolist()
    engine = Engine(context, ends=(), chunk=config.batch * prompt_tokens)  # Prefills all prompts in one pass.
    # The first round is a warm-up.
    rounds = [_time_round(engine, prompts, new_tokens) for _ in range(config.rounds + 1)][1:]
    first_seconds, step_seconds = (statistics.median(times) for times in zip(*rounds, strict=True))
    shape, positions = model.config, prompt_tokens + new_tokens // 2
    elements = 2 * shape.kv_heads * shape.head_size * count_attended(shape, positions)  # Keys and values of a sequence.
    traffic = weight_bytes(model, compute) + config.batch * elements * context.cache.keys[0].itemsize
    bandwidth = measure_bandwidth(compute)
    return DecodingSpeed(
        prefill_tokens_per_second=config.batch * prompt_tokens / first_seconds,
        decode_tokens_per_second=config.batch / step_seconds,
        first_token_seconds=first_seconds,
        memory_bytes=_peak_memory(compute),
        read_bytes=traffic,
        bandwidth_bytes_per_second=bandwidth,
        bandwidth_share=traffic / step_seconds / bandwidth,
    )


def _time_round(engine: Engine, prompts: list[list[int]], new_tokens: int) -> tuple[float, float]:
    """Returns the time to first token and the mean time per later step, in seconds."""
    for slot in engine.context.slots:  # A prefix cache hit would skip the prefill.
        slot.forget()
    config = SampleConfig(greedy=True, max_tokens=new_tokens, ignore_eot=True)
    for ids in prompts:
        engine.add(Request(ids, config))
    start_time = time.perf_counter()
    while not any(update.tokens for update in engine.step()):  # A GPU's first tokens are read in the second step.
        pass
    first_seconds = time.perf_counter() - start_time
    times: list[float] = []
    while engine.busy:
        times.append(_time_call(engine.step))
    return first_seconds, statistics.mean(times[_WARMUP_STEPS:] or times or [first_seconds])


def measure_bandwidth(compute: Compute) -> float:
    """Measures memory bandwidth in bytes per second: the best of five sums over half a gibibyte."""
    buffer = torch.ones(_PROBE_BYTES // 4, device=compute.device)
    return buffer.nbytes / min(_time_call(lambda: float(buffer.sum())) for _ in range(5))


def _time_call(work: Callable[[], object]) -> float:
    start_time = time.perf_counter()
    work()
    return time.perf_counter() - start_time


def _peak_memory(compute: Compute) -> int:
    if compute.device.type == "cuda":
        return torch.cuda.max_memory_allocated(compute.device)
    with contextlib.suppress(ImportError):  # Windows has no `resource`.
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
    return 0
