"""Measures prefill and decoding throughput and memory bandwidth.

    python -m benchmarks.decoding_speed PRESET [--new-tokens N] [--threads N]

Decodes greedily after random prompts, with random weights. Prints JSON.
"""

import argparse
import contextlib
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch

from gpt.config import device as devices
from gpt.config.device import Compute
from gpt.config.model import PRESETS
from gpt.config.sample import SampleConfig
from gpt.decoding import native
from gpt.decoding.context import Context
from gpt.decoding.engine import Engine, Request
from gpt.decoding.weights import prepare, weight_bytes
from gpt.model.decoder import GPT
from gpt.model.params import breakdown, count_attended

PROBE_BYTES = 2**29  # buffer for measuring memory bandwidth, far larger than any cache
WARMUP_STEPS = 3


@dataclass(frozen=True)
class DecodingSpeed:
    """The speed of prefill and decoding. Tokens per second are summed over all sequences."""

    prefill_tokens_per_second: float
    decode_tokens_per_second: float
    memory_bytes: int  # peak memory of the device, or of the process on a CPU
    bandwidth_share: float  # share of the memory bandwidth that decoding uses


def measure(
    model: GPT,
    compute: Compute,
    *,
    prompt_tokens: int,
    new_tokens: int,
    batch: int = 1,
    rounds: int = 1,
    note: Callable[[str], None] = lambda text: None,
) -> DecodingSpeed:
    """Times greedy decoding of ``batch`` texts. Reports medians over ``rounds``, after a warm-up."""
    context = Context(model, compute, batch, prompt_tokens + new_tokens, note=note)
    prompts = torch.randint(model.config.vocab_size, (batch, prompt_tokens)).tolist()
    engine = Engine(context, ends=(), chunk=batch * prompt_tokens)  # Prefills all prompts in one pass.
    seconds = [_time_round(engine, prompts, new_tokens) for _ in range(rounds + 1)][1:]
    first_seconds, step_seconds = (statistics.median(times) for times in zip(*seconds, strict=True))
    shape, positions = model.config, prompt_tokens + new_tokens // 2
    elements = 2 * shape.kv_heads * shape.head_size * count_attended(shape, positions)  # keys and values of a sequence
    traffic = weight_bytes(model, compute) + batch * elements * context.cache.keys[0].itemsize
    return DecodingSpeed(
        prefill_tokens_per_second=batch * prompt_tokens / first_seconds,
        decode_tokens_per_second=batch / step_seconds,
        memory_bytes=_peak_memory(compute),
        bandwidth_share=traffic / step_seconds / measure_bandwidth(compute),
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
    return first_seconds, statistics.mean(times[WARMUP_STEPS:] or times or [first_seconds])


def measure_bandwidth(compute: Compute) -> float:
    """Measures memory bandwidth in bytes per second: the best of five sums over half a gibibyte."""
    buffer = torch.ones(PROBE_BYTES // 4, device=compute.device)
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


def main() -> None:
    """Measures a preset and prints JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("preset", choices=list(PRESETS))
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--threads", type=int)
    args = parser.parse_args()
    compute, model = devices.pick(), GPT(PRESETS[args.preset].model).eval()
    devices.use_threads(compute, args.threads, breakdown(model.config).trainable)
    prepare(model, compute)
    compute = devices.lend_threads(compute) if native.is_packed(model) else compute
    print(json.dumps(asdict(measure(model, compute, prompt_tokens=32, new_tokens=args.new_tokens))))


if __name__ == "__main__":
    main()
