"""Ways to train a model on so many devices: the micro-batch that fits into their memory, and how long it takes. No
torch."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from gpt.config import GPTConfig
from gpt.errors import UserError
from gpt.model.memory import Setup, Training, divisors, logits_at_once, training
from gpt.model.params import breakdown, flops_per_token
from gpt.peaks import Kind, find_kind
from gpt.plan_config import PlanConfig

NODE = 8  # devices of a machine, to which tensor parallelism is bound: it sends much, and often
DAY = 86_400
TOKENS = 20  # a parameter (Hoffmann et al. 2022, arXiv 2203.15556)
USABLE = 0.9  # of a GPU's memory; the rest is for CUDA's context, the buffers of cuBLAS and NCCL, and fragmentation
SHARED = 0.25  # of a CPU's memory beside what stays there between steps: other programs want theirs
LEAST_CHUNK = 128  # positions whose logits are computed at once at least


@dataclass(frozen=True)
class TrainingPlan:
    """A way to train, with its memory and days."""

    devices: int
    setup: Setup
    memory: Training  # bytes on a rank
    room: int  # bytes that it may take of a device
    days: float | None  # None where the device's peak is not known

    @property
    def fits(self) -> bool:
        """Whether a rank has the memory."""
        return self.memory.peak <= self.room

    @property
    def options(self) -> str:
        """The options of ``gpt train`` that ask for this plan."""
        setup, words = self.setup, []
        if setup.shard:
            words.append("--shard full")
        if setup.tensor > 1:
            words.append(f"--tensor {setup.tensor}")
        words.append(f"--micro-batch {setup.micro_batch}")
        return " ".join([*words, "--recompute"] if setup.recompute else words)


def plans(config: GPTConfig, asked: PlanConfig, batch_tokens: int) -> list[TrainingPlan]:
    """The first way that fits for 1, 2, 4 … devices, up to all that there are; where none does, the one that needs
    least. Devices that cannot share the sequences of a step evenly are left out. Raises `UserError` where all are."""
    if asked.tensor is not None and config.kv_heads % asked.tensor:
        of_keys = "" if config.kv_heads == config.n_head else " key/value"
        raise UserError(
            f"the model's {config.kv_heads}{of_keys} heads cannot be split evenly over {asked.tensor} ranks",
            "use one of " + ", ".join(map(str, divisors(config.kv_heads))),
        )
    rows = step_rows(config, asked.batch_tokens or batch_tokens, asked.batch_tokens is not None)
    counts = sorted({2**n for n in range(asked.devices.bit_length()) if 2**n <= asked.devices} | {asked.devices})
    found = [plan for n in counts if (plan := _first(config, asked, rows, n)) is not None]
    if not found or found[-1].devices != asked.devices:
        _explain(config, asked, rows)
    return found


def step_rows(config: GPTConfig, batch_tokens: int, was_asked: bool) -> int:
    """Sequences a step. Raises `UserError` for a batch that was asked for and is no whole number of them."""
    T = config.block_size
    if was_asked and batch_tokens % T:
        above = -(-batch_tokens // T) * T
        raise UserError(f"batch-tokens {batch_tokens:,} is not a multiple of the context, {T:,}", f"use {above:,}")
    return max(1, round(batch_tokens / T))


def _first(config: GPTConfig, asked: PlanConfig, rows: int, devices: int) -> TrainingPlan | None:
    """The first setup that fits, or else the one that needs least; None where none divides the work."""
    least: TrainingPlan | None = None
    kind = find_kind(asked.kind)
    days = training_days(config, asked, devices, kind)
    for setup in setups(config, asked, rows, devices):
        plan = TrainingPlan(devices, setup, training(config, setup), room(config, setup, kind.memory), days)
        if plan.fits:
            return plan
        if least is None or plan.memory.peak < least.memory.peak:
            least = plan
    return least


def setups(config: GPTConfig, asked: PlanConfig, rows: int, devices: int) -> Iterator[Setup]:
    """Ways to compute a step, the cheapest first: less is sent without sharding than with it, and less with it than
    where ranks share each sequence; computing again costs a third more."""
    memory = find_kind(asked.kind).memory
    for shard, tensor in _divisions(config, asked, devices):
        data = devices // tensor
        if rows % data:
            continue
        own = rows // data
        for recompute in {"on": (True,), "off": (False,), "auto": (False, True)}[asked.recompute]:
            setup = Setup(
                dtype=asked.dtype,
                optimizer=asked.optimizer,
                recompute=recompute,
                data=data,
                shard=shard,
                tensor=tensor,
                device="cpu" if asked.kind == "cpu" else "cuda",
            )
            if asked.micro_batch is None:
                yield largest(config, setup, own, memory)
            elif own % asked.micro_batch == 0:
                yield in_chunks(config, at_once(setup, asked.micro_batch, own), memory)


def _divisions(config: GPTConfig, asked: PlanConfig, devices: int) -> Iterator[tuple[bool, int]]:
    """Whether parameters are shared out, and how many ranks share a sequence."""
    for tensor in [asked.tensor] if asked.tensor else [n for n in divisors(NODE) if config.kv_heads % n == 0]:
        if devices % tensor:
            continue
        alone = devices == tensor
        if asked.shard != "full":
            yield False, tensor
        if asked.shard == "full" or (asked.shard == "auto" and not alone):
            yield True, tensor


def room(config: GPTConfig, setup: Setup, memory: int) -> int:
    """Bytes that a step may take of a device's ``memory``."""
    if setup.device == "cuda":
        return int(USABLE * memory)
    step = training(config, setup)
    stays = step.parameters + step.gradients + step.optimizer + step.snapshot
    return stays + int(SHARED * max(0, memory - stays))


def fits(config: GPTConfig, setup: Setup, memory: int) -> bool:
    """Whether a step takes no more than its `room`."""
    return training(config, setup).peak <= room(config, setup, memory)


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
    chunk, peak = logits_at_once(config, setup), training(config, setup).peak
    while chunk > LEAST_CHUNK and not fits(config, setup, memory):
        chunk = max(LEAST_CHUNK, chunk // 2)
        smaller = replace(setup, loss_chunk=chunk)
        if training(config, smaller).peak >= peak:
            break  # it isn't the logits that need so much
        setup, peak = smaller, training(config, smaller).peak
    return setup


def trained_tokens(config: GPTConfig, asked: PlanConfig) -> int:
    """The tokens to train on: as many as were asked for, or 20 a parameter."""
    return TOKENS * breakdown(config).trainable if asked.tokens is None else round(asked.tokens)


def training_days(config: GPTConfig, asked: PlanConfig, devices: int, kind: Kind) -> float | None:
    """Days for all tokens: their operations over what the devices compute at the stated MFU."""
    peak = kind.peak(asked.dtype)
    if peak is None:
        return None
    flops = flops_per_token(config, config.block_size) * trained_tokens(config, asked)
    return flops / (devices * peak * asked.mfu) / DAY


def _explain(config: GPTConfig, asked: PlanConfig, rows: int) -> None:
    """Raises `UserError` for what all devices together cannot divide."""
    tensor, n = asked.tensor, asked.devices
    ways = [tensor] if tensor else [t for t in divisors(NODE) if config.kv_heads % t == 0 and n % t == 0]
    data = n // max(ways)
    if rows % data:
        above = -(-rows // data) * data * config.block_size
        raise UserError(
            f"the {rows:,} sequences of a step cannot be split evenly over {n:,} devices, {max(ways)} per sequence",
            f"use --batch-tokens {above}, or --devices {max(d * max(ways) for d in divisors(rows) if d <= data)}",
        )
    raise UserError(
        f"a micro-batch of {asked.micro_batch} does not divide the {rows // data:,} sequences of a rank",
        "use one of " + ", ".join(map(str, divisors(rows // data))),
    )
