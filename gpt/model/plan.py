"""Plans the setup, memory and duration of training on N devices, without importing torch."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from gpt.config.model import GPTConfig
from gpt.config.plan import PlanConfig
from gpt.model.memory import Setup, StepMemory, count_step_memory, divisors, logits_at_once
from gpt.model.params import breakdown, flops_per_token
from gpt.system.errors import UserError
from gpt.system.peaks import Kind, find_kind

DAY = 86_400
TOKENS = 20  # tokens per parameter (Hoffmann et al. 2022, arXiv 2203.15556)
USABLE = 0.9  # Usable share of GPU memory; CUDA, cuBLAS, NCCL and fragmentation need the rest.
CPU_SHARE = 0.25  # Share of free CPU memory that a step can use; other programs need the rest.
MIN_LOSS_CHUNK = 128  # Minimum positions per chunk of logits.


@dataclass(frozen=True)
class TrainingPlan:
    """A training setup with its memory and duration."""

    devices: int
    setup: Setup
    memory: StepMemory  # bytes per rank
    memory_limit: int  # bytes of a device that a step can use
    days: float | None  # None if the device's peak is unknown

    @property
    def fits(self) -> bool:
        """Whether a rank has enough memory."""
        return self.memory.peak <= self.memory_limit

    @property
    def options(self) -> str:
        """The ``gpt train`` options for this plan."""
        setup, words = self.setup, []
        if setup.shard:
            words.append("--shard full")
        words.append(f"--micro-batch {setup.micro_batch}")
        return " ".join([*words, "--recompute"] if setup.recompute else words)


def plans(config: GPTConfig, request: PlanConfig, batch_tokens: int) -> list[TrainingPlan]:
    """Returns a plan for 1, 2, 4 … and all devices. A plan has the first setup that fits, else the setup that needs the
    least memory. Skips numbers of devices that cannot share a step's sequences evenly. Raises `UserError` if all
    devices together cannot."""
    rows = step_rows(config, request.batch_tokens or batch_tokens, request.batch_tokens is not None)
    device_counts = sorted(
        {2**n for n in range(request.devices.bit_length()) if 2**n <= request.devices} | {request.devices}
    )
    if rows % (n := request.devices):
        multiple = -(-rows // n) * n * config.block_size
        raise UserError(
            f"the {rows:,} sequences of a step cannot be split evenly over {n:,} devices",
            f"use --batch-tokens {multiple}, or --devices {max(d for d in divisors(rows) if d <= n)}",
        )
    return [_choose_plan(config, request, rows, n) for n in device_counts if rows % n == 0]


def step_rows(config: GPTConfig, batch_tokens: int, is_requested: bool) -> int:
    """Returns the sequences per step. Raises `UserError` if a requested batch is not a multiple of the context."""
    T = config.block_size
    if is_requested and batch_tokens % T:
        multiple = -(-batch_tokens // T) * T
        raise UserError(f"batch-tokens {batch_tokens:,} is not a multiple of the context, {T:,}", f"use {multiple:,}")
    return max(1, round(batch_tokens / T))


def _choose_plan(config: GPTConfig, request: PlanConfig, rows: int, devices: int) -> TrainingPlan:
    """Returns the first plan that fits, else the plan that needs the least memory."""
    kind = find_kind(request.kind)
    days = training_days(config, request, devices, kind)
    candidates = [
        TrainingPlan(devices, setup, count_step_memory(config, setup), usable_bytes(config, setup, kind.memory), days)
        for setup in setups(config, request, rows, devices)
    ]
    smallest = min(candidates, key=lambda plan: plan.memory.peak)
    return next((plan for plan in candidates if plan.fits), smallest)


def setups(config: GPTConfig, request: PlanConfig, rows: int, devices: int) -> Iterator[Setup]:
    """Yields setups, fastest first. Sharding adds communication, and recomputation adds a third to the computation."""
    memory = find_kind(request.kind).memory
    for shard in (False, True) if devices > 1 else (False,):
        for recompute in (False, True):
            setup = Setup(
                dtype=request.dtype,
                optimizer=request.optimizer,
                recompute=recompute,
                data=devices,
                shard=shard,
                device="cpu" if request.kind == "cpu" else "cuda",
            )
            yield with_largest_micro_batch(config, setup, rows // devices, memory)


def usable_bytes(config: GPTConfig, setup: Setup, memory: int) -> int:
    """Returns the part of a device's ``memory`` that a step can use."""
    if setup.device == "cuda":
        return int(USABLE * memory)
    step = count_step_memory(config, setup)
    permanent = step.minimum + step.snapshot + step.process
    return permanent + int(CPU_SHARE * max(0, memory - permanent))


def fits(config: GPTConfig, setup: Setup, memory: int) -> bool:
    """Whether a step fits in a device's `usable_bytes`."""
    return count_step_memory(config, setup).peak <= usable_bytes(config, setup, memory)


def with_largest_micro_batch(config: GPTConfig, setup: Setup, rows: int, memory: int) -> Setup:
    """Returns ``setup`` with the largest micro-batch that fits and divides a rank's ``rows``. If none fits, uses one
    sequence per micro-batch and `with_loss_chunks`."""
    for micro_batch in reversed(divisors(rows)):
        setup = with_micro_batch(setup, micro_batch, rows)
        if fits(config, setup, memory):
            return setup
    return with_loss_chunks(config, setup, memory)


def with_micro_batch(setup: Setup, micro_batch: int, rows: int) -> Setup:
    """Returns ``setup`` with ``micro_batch``, which divides a rank's ``rows``."""
    return replace(setup, micro_batch=micro_batch, accumulates=rows > micro_batch)


def with_loss_chunks(config: GPTConfig, setup: Setup, memory: int) -> Setup:
    """Halves the chunks of logits until the step fits, or until its memory no longer shrinks."""
    chunk, peak = logits_at_once(config, setup), count_step_memory(config, setup).peak
    while chunk > MIN_LOSS_CHUNK and not fits(config, setup, memory):
        chunk = max(MIN_LOSS_CHUNK, chunk // 2)
        smaller = replace(setup, loss_chunk=chunk)
        if count_step_memory(config, smaller).peak >= peak:
            break  # Something other than logits needs the most memory.
        setup, peak = smaller, count_step_memory(config, smaller).peak
    return setup


def trained_tokens(config: GPTConfig, request: PlanConfig) -> int:
    """Number of tokens to train on, by default 20 per parameter."""
    return TOKENS * breakdown(config).trainable if request.tokens is None else round(request.tokens)


def training_days(config: GPTConfig, request: PlanConfig, devices: int, kind: Kind) -> float | None:
    """Days to compute the FLOPs of all tokens at the requested MFU; None if the peak is unknown."""
    peak = kind.peak(request.dtype)
    if peak is None:
        return None
    flops = flops_per_token(config, config.block_size) * trained_tokens(config, request)
    return flops / (devices * peak * request.mfu) / DAY
