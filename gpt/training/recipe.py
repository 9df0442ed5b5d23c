"""Resolves settings to a recipe: every ``None`` and ``auto`` is decided from the text's size and the device."""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any, Literal

import torch

from gpt.config import USUAL_DECAY, GPTConfig, Optimizer, Preset, TrainConfig, find_preset
from gpt.device import Compute
from gpt.errors import UserError
from gpt.model.memory import Setup, divisors, training
from gpt.model.params import breakdown, nearest_preset
from gpt.model.plan import at_once, in_chunks, largest
from gpt.parallel.world import World
from gpt.peaks import host_memory
from gpt.programs import compiles_unasked
from gpt.settings import Amount, Count, Positive, Within, checked
from gpt.text.batches import MOST_SIZES, Ramp
from gpt.training import finetune

Notes = Callable[[str], None]
Schedule = Literal["linear", "cosine", "constant"]
FLOOR = 0.1  # of the peak rate, where the cosine ends (GPT-3, appendix B)
DECAY = 0.5  # of the steps
# Weight decay grows with the passes over a text, to 1 after 12 or after 80 times its tokens a parameter, whichever is
# more. Where it is 1, and passes are 300 times the tokens a parameter, there is dropout too (benchmarks/defaults.md).
DECAYS_MOST, OFTEN, TOO_OFTEN, DROPOUT = 12, 80, 300, 0.1
MUON_FACTOR = 2  # of AdamW's rate, measured on nano (benchmarks/defaults.md)
RAMP_FROM = (32_768, 1 / 16)  # tokens of GPT-3's first batch; or a share of the whole one, where that is less
# FLOPs of a run from which compiling pays on a GPU, about two minutes at a third of an H100's peak; or its minutes. And
# FLOPs of a step: below them the host's calls take longer than the GPU's work (`nano`'s step took 13.4 ms on an H200,
# compiled 16.0).
COMPILE_FROM, COMPILE_MINUTES, COMPILE_STEP = 3e16, 5, 1e12
# FLOPs of a step up to which a GPU repeats it as a CUDA graph. On an H200 a step of `nano` took 1.6 ms instead of 9.0,
# one of `micro` with 8,192 tokens 3.3 instead of 9.9, and GPT-2's with 16,384 tokens (1.2e13) 53.7 instead of 54.1.
GRAPH_STEP = 1e13
# On a CPU, by dtype: seconds of a run for each layer from which it pays, and FLOPs a second for each number of the
# width, on two cores. Making the program takes some four seconds a layer, and saves a quarter of a step in bfloat16, a
# tenth to a fifth in float32.
COMPILE_SECONDS = {"bfloat16": 14, "float32": 35}
CPU_RATE = {"bfloat16": 1e9, "float32": 4.5e8}
COMPILED_LAYERS = 6  # up to which it was measured on a CPU
MOST_STEPS = 2**53
ID_BYTES, ROW_BYTES = 16, 256  # of an id of a batch, and of a row beside its ids, on the host
BATCH_SHARE = 0.5  # of the host's memory that they may take
CPU_FLOPS = 1e13  # of a run of default length on a CPU, as 6 a parameter and token

AS_ASKED = (
    "schedule", "clip", "patience", "keep", "seed", "merge_lora", "shard", "tensor", "recompute"
)  # fmt: skip


@dataclass(frozen=True)
class Recipe:
    """The settings of a training run, all decided."""

    preset: str
    model: GPTConfig
    steps: Positive
    batch_tokens: Positive  # tokens a step
    rows: Positive  # sequences a step
    micro_batch: Positive  # sequences at once in a process, which accumulates the gradients of its share of the rows
    lr: Amount
    warmup: Count
    decay: Count  # steps at the end over which the linear schedule decays
    optimizer: Optimizer
    schedule: Schedule
    weight_decay: Amount
    clip: Amount
    eval_every: Positive
    patience: Count
    save_every: Positive
    keep: Positive
    sample_every: Count
    seed: Count
    lora_rank: Annotated[int, Within(0, 2**20)] = 0  # 0: no adapters, all weights are trained
    lora_alpha: Amount = 0.0
    lora_targets: str = "all"
    merge_lora: bool = False
    ramp: Ramp | None = None
    loss_chunk: Count = 0  # positions whose logits exist at once; 0: as many as memory is counted for
    compile: bool = False
    shard: Literal["none", "full"] = "none"  # whether weights, gradients and moments are sharded over processes
    tensor: Annotated[int, Within(1, 1024)] = 1  # tensor-parallel processes, which share each sequence
    context: Count = 0  # of the saved model, if it is longer than in training; 0: the same
    recompute: bool = False  # whether activations of blocks are recomputed in the backward pass
    planned: Count = 0  # the steps before the last ``decay`` ones were fitted into the minutes; 0: they were not

    @property
    def saved_model(self) -> GPTConfig:
        """The shape that checkpoints say. Rotary positions have no table that a shorter context would cut, so the model
        keeps the one that it had before fine-tuning."""
        return replace(self.model, block_size=max(self.context, self.model.block_size))

    @property
    def is_sharded(self) -> bool:
        """Whether each process holds a part of the weights, so that they compute each forward pass together."""
        return self.shard == "full" or self.tensor > 1

    def is_one_program(self, compute: Compute, processes: int) -> bool:
        """Whether compiling makes one program of forward and backward pass: on a CPU, where one process trains all
        weights and computes nothing twice."""
        alone = processes == 1 and not self.is_sharded
        return compute.device.type == "cpu" and alone and not (self.lora_rank or self.recompute or self.loss_chunk)

    def is_graph(self, compute: Compute, processes: int) -> bool:
        """Whether a step is a CUDA graph: of a process by itself on a GPU, if launching its kernels takes longer than
        they do. The scale of a float16 loss is kept on the host, and recomputing a block asks for random states."""
        flops = 6 * breakdown(self.model).trainable * self.batch_tokens
        alone = processes == 1 and not self.is_sharded and not self.recompute
        return compute.device.type == "cuda" and alone and compute.dtype != torch.float16 and flops < GRAPH_STEP

    def tokens(self, steps: int) -> int:
        """Tokens of the first ``steps`` steps."""
        return self.ramp.before(steps) * self.model.block_size if self.ramp else steps * self.batch_tokens

    def lr_at(self, step: float) -> float:
        """The learning rate of step 1 … ``steps``: linear from 0 to ``lr`` over ``warmup`` steps, then ``lr`` and, over
        the last ``decay`` steps, linear towards 0 (Hägele et al. 2024, arXiv 2405.18392); a cosine down to a tenth, the
        rest of which is stretched over steps that were fitted into the minutes; or ``lr``.
        """
        if step < self.warmup:
            return self.lr * step / self.warmup
        if self.schedule == "constant":
            return self.lr
        if self.schedule == "linear":
            return self.lr * min(1.0, (self.steps + 1 - step) / max(1, self.decay))
        steps, left = self.planned or self.steps, self.steps - step
        if self.planned and left < self.decay:
            step = steps - left * (steps - (self.steps - self.decay)) / self.decay
        progress = (step - self.warmup) / max(1, steps - self.warmup)
        return self.lr * (FLOOR + (1 - FLOOR) * (1 + math.cos(math.pi * progress)) / 2)


def preset_name(config: TrainConfig, n_bytes: int, device: str) -> str:
    """The preset that was asked for, or the one for a text of ``n_bytes``. On a CPU it is a small one, which in the
    minutes of the default length learns more of any text than a larger one that sees fewer tokens
    (benchmarks/defaults.md)."""
    if config.preset != "auto":
        return config.preset
    if device == "cpu":
        return "nano"
    for name, least in (("gpt2", 2_000_000_000), ("small", 100_000_000), ("mini", 2_000_000)):
        if n_bytes >= least:
            return name
    return "micro"


def example_context(config: TrainConfig, n_bytes: int, device: str, start: GPTConfig | None) -> int:
    """The context of a run on examples of ``n_bytes``, which does not shrink to the text. ``start`` is the shape of the
    model that is fine-tuned."""
    if start is not None:
        return finetune.training_shape(config, start, lambda text: None).block_size
    return config.block_size or find_preset(preset_name(config, n_bytes, device)).model.block_size


def resolve(
    config: TrainConfig,
    compute: Compute,
    n_bytes: int,
    n_tokens: int,
    vocab_size: int,
    held_out: bool,
    note: Notes,
    start: GPTConfig | None = None,
    pairs: int = 0,
    processes: int = 1,
    most_tokens: float = math.inf,
) -> Recipe:
    """The recipe for ``n_tokens`` of training text of ``n_bytes``. ``start`` is the shape of the model that is
    fine-tuned; ``pairs`` is the number of pairs, if these are the rows of a batch; ``processes`` data ranks share each
    batch. Fine-tuning reads ``most_tokens`` in the time that it has.

    Tells ``note`` what it had to change. Raises `UserError` for settings that contradict each other or the text.
    """
    context = start.block_size if start is not None and start.positions == "rotary" else 0
    start = start and finetune.training_shape(config, start, note)
    name = preset_name(config, n_bytes, compute.device.type) if start is None else nearest_preset(start)
    preset = find_preset(name) if start is None else replace(find_preset(name), model=start)
    model = _model(config, preset, 2**63 if pairs else n_tokens, vocab_size, note)
    optimizer = auto_optimizer(config, model)
    check_heads(model, config.tensor)
    if start is not None:
        usual = finetune.usual_epochs(n_tokens, pairs > 0, model, compute.device.type)
        tokens = min(usual * n_tokens, most_tokens)
        preset = finetune.tuned(preset, tokens, finetune.PAIR_STEPS if pairs else finetune.STEPS)
    else:
        usual = auto_epochs(n_tokens, model, compute.device.type)
        preset = finetune.tuned(preset, usual * n_tokens, finetune.STEPS) if pairs else preset
    batch = _batch(config, preset, model, compute, n_tokens / pairs if pairs else None, processes)
    steps = _steps(config, n_tokens, batch, usual)
    passes = 0.0 if start is not None else batch.read(steps) / n_tokens
    dropout, weight_decay = auto_regularization(passes, n_tokens / breakdown(model).trainable)
    model = model if config.dropout is not None else replace(model, dropout=dropout)
    warmup = _warmup(config, steps, batch)
    for line in _without_effect(config, model, steps, warmup, held_out):
        note(line)
    if model.layout == "gpt":
        note("no Transformers class supports this architecture, so only gpt can load the checkpoints")
    eval_every = config.eval_every or math.ceil(steps / 20)
    as_asked: dict[str, Any] = {each: getattr(config, each) for each in AS_ASKED}
    recipe = Recipe(
        preset=name,
        model=model,
        steps=steps,
        batch_tokens=batch.tokens,
        rows=batch.rows,
        micro_batch=batch.setup.micro_batch,
        lr=_rate(config, preset, optimizer),
        warmup=warmup,
        decay=round(DECAY * steps) if config.decay is None else config.decay,
        optimizer=optimizer,
        weight_decay=weight_decay if config.weight_decay is None else config.weight_decay,
        eval_every=eval_every,
        save_every=config.save_every or eval_every,
        sample_every=math.ceil(steps / 4) if config.sample_every is None else config.sample_every,
        lora_rank=config.lora_rank or 0,
        lora_alpha=2.0 * (config.lora_rank or 0) if config.lora_alpha is None else config.lora_alpha,
        lora_targets=config.lora_targets or "all",
        ramp=batch.ramp,
        loss_chunk=batch.setup.loss_chunk,
        context=context,
        **as_asked,
    )
    return replace(recipe, compile=_compiles(config, recipe, compute, processes))


def broadcast(world: World, make: Callable[[], Recipe]) -> Recipe:
    """Rank 0's recipe, on all ranks."""
    return checked(Recipe, world.broadcast_object(lambda: asdict(make())), "the recipe of process 0")


def auto_optimizer(config: TrainConfig, model: GPTConfig) -> Optimizer:
    """The optimizer of ``model``: Muon, but AdamW for adapters and for a large model that is fine-tuned."""
    if config.lora_rank:
        return "adamw"
    large = config.init is not None and breakdown(model).trainable >= finetune.ADAMW_FROM
    return config.optimizer or ("adamw" if large else "muon")


def _without_effect(config: TrainConfig, model: GPTConfig, steps: int, warmup: int, held_out: bool) -> list[str]:
    """Notes about settings that have no effect, or less than intended."""
    lines = []
    if config.patience and not held_out:
        lines.append("--patience has no effect: nothing is held out")
    if warmup > steps and config.minutes is None:
        share = f"{steps / warmup:.2g}"
        lines.append(f"warmup is {warmup:,} steps, the run {steps:,}: the learning rate reaches {share} of its peak")
    if config.window is not None and config.window >= model.block_size:
        lines.append(f"a window of {config.window:,} has no effect in a context of {model.block_size:,} tokens")
    if config.decay is not None and config.schedule != "linear":
        lines.append(f"--decay has no effect with --schedule {config.schedule}")
    return lines


def _rate(config: TrainConfig, preset: Preset, optimizer: Optimizer) -> float:
    if config.lr is not None:
        return config.lr
    rate = preset.lr * (MUON_FACTOR if optimizer == "muon" else 1)
    if config.init is None:
        return rate
    return rate * (finetune.LORA_RATE if config.lora_rank else finetune.RATE[optimizer])


def check_heads(model: GPTConfig, tensor: int) -> None:
    """Raises `UserError` unless so many processes can share each sequence evenly. (What divides the heads of keys and
    values divides the others, and the MLP's inside.)"""
    heads = model.kv_heads
    if heads % tensor:
        raise UserError(
            f"the model's {heads} heads cannot be split evenly over {tensor} processes (--tensor {tensor})",
            "use one of " + ", ".join(map(str, divisors(heads))),
        )


def _model(config: TrainConfig, preset: Preset, n_tokens: int, vocab_size: int, note: Notes) -> GPTConfig:
    shape = preset.model
    block_size = config.block_size or shape.block_size
    if n_tokens < block_size:
        note(f"the text has {n_tokens:,} tokens to train on: context reduced from {block_size:,} to {n_tokens:,}")
        block_size = n_tokens
    if config.init is not None:
        return replace(shape, block_size=block_size, dropout=config.dropout or 0.0)
    return config.new_model(shape, vocab_size, block_size)


def _rows(config: TrainConfig, preset: Preset, row: float, pairs: bool) -> int:
    """Sequences a step, of ``row`` tokens on average. A batch of running text that was asked for must fit the context
    that was; it is rounded to one that shrank."""
    asked, context = config.batch_tokens, config.block_size or preset.model.block_size
    if not pairs and asked is not None and asked % context:
        below, above = asked // context * context, -(-asked // context) * context
        raise UserError(
            f"batch-tokens {asked:,} is not a multiple of the context, {context:,}",
            f"use {above:,}" + (f" or {below:,}" if below else ""),
        )
    return max(1, round((asked or preset.batch_tokens) / row))


@dataclass(frozen=True)
class _Batch:
    """The batch of a step, and how many steps read so many tokens."""

    rows: int
    row: float  # tokens, of pairs on average
    ramp: Ramp | None
    setup: Setup

    @property
    def tokens(self) -> int:
        return round(self.rows * self.row)

    def steps(self, tokens: float) -> int:
        return max(1, self.ramp.steps(math.ceil(tokens / self.row)) if self.ramp else round(tokens / self.tokens))

    def read(self, steps: int) -> float:
        return self.ramp.before(steps) * self.row if self.ramp else steps * self.tokens


def _batch(
    config: TrainConfig, preset: Preset, model: GPTConfig, compute: Compute, pair: float | None, processes: int
) -> _Batch:
    """``pair``: tokens of a pair on average, where these are the rows. A batch that the processes cannot share evenly
    is rounded up; raises `UserError` where it was asked for to the token."""
    T, ramp = model.block_size, None
    row = T if pair is None else pair
    rows = _rows(config, preset, row, pair is not None)
    if config.batch_tokens is None or pair is not None:
        rows += -rows % processes
    check_share(rows, processes, T if pair is None else None)
    _check_batch(rows // processes, rows * row)
    setup = _setup(config, model, compute, rows // processes, processes)
    if config.batch_ramp is not None:
        first = max(1, min(RAMP_FROM[0] // T, round(rows * RAMP_FROM[1])))
        first += -first % processes
        ramp = Ramp(rows, first, math.ceil(config.batch_ramp / T), setup.micro_batch * processes, processes)
        if ramp.sizes > MOST_SIZES:
            raise UserError(f"a batch ramp to {rows:,} sequences has too many sizes: {ramp.sizes:,}", "leave it out")
    return _Batch(rows, row, ramp, setup)


def _check_batch(rows: int, tokens: float) -> None:
    """Raises `UserError` where this machine cannot hold a process's ``rows`` of a step of so many ``tokens``."""
    needed, memory = rows * ROW_BYTES + ID_BYTES * tokens, host_memory()
    if needed > BATCH_SHARE * memory:
        raise UserError(
            f"the ids of a step of {tokens:,.0f} tokens take {needed / 1e9:,.1f} GB, and this machine has "
            f"{memory / 1e9:,.1f} GB",
            "use a smaller --batch-tokens",
        )


def _setup(config: TrainConfig, model: GPTConfig, compute: Compute, rows: int, processes: int) -> Setup:
    """The micro-batch of a process with ``rows`` sequences of a step. Dropout that is not decided yet is counted."""
    if config.dropout is None and config.init is None:
        model = replace(model, dropout=DROPOUT)
    setup = replace(
        _memory_setup(config, auto_optimizer(config, model), compute, processes), recompute=config.recompute
    )
    if config.micro_batch == "auto":
        return largest(model, setup, rows, compute.memory())
    return in_chunks(model, at_once(setup, asked_micro_batch(config.micro_batch, rows), rows), compute.memory())


def _memory_setup(asked: TrainConfig | Recipe, optimizer: Optimizer, compute: Compute, processes: int) -> Setup:
    return Setup(
        dtype=compute.dtype_name,
        optimizer=optimizer,
        data=processes,
        shard=asked.shard == "full",
        tensor=asked.tensor,
        device="cuda" if compute.device.type == "cuda" else "cpu",
    )


def check_model(recipe: Recipe, compute: Compute, processes: int, here: int = 1) -> None:
    """Raises `UserError` if a device cannot hold weights, gradients and moments, whatever is computed at once, or if
    the host cannot hold the copies of weights and moments for checkpoints: a system that has promised too much memory
    kills. Of all ``processes`` of data, ``here`` are on this machine. Adapters, whose moments are small, are not
    checked."""
    model, memory = recipe.model, compute.memory()
    if recipe.lora_rank:
        return
    setup = _memory_setup(recipe, recipe.optimizer, compute, processes)
    step = training(model, setup)
    stays = step.parameters + step.gradients + step.optimizer + (step.snapshot if setup.device == "cpu" else 0)
    if stays > memory:
        raise UserError(
            f"{breakdown(model).trainable:,} parameters take {stays / 1e9:,.1f} GB in training (weights, gradients, "
            f"optimizer state), but only {memory / 1e9:,.1f} GB are available",
            "use a smaller --preset; gpt params PRESET --devices 1 shows what each needs",
        )
    copies, host = step.snapshot * (here if recipe.is_sharded else 1), host_memory()
    if setup.device != "cpu" and copies > host:
        raise UserError(
            f"checkpoints copy weights and optimizer state to host memory: {copies / 1e9:,.1f} GB, but only "
            f"{host / 1e9:,.1f} GB are available",
            "use a smaller --preset, or more machines with --shard full",
        )


def asked_micro_batch(asked: str, rows: int) -> int:
    """The micro-batch that was asked for. Raises `UserError` if it is no number or does not divide a process's
    ``rows``."""
    if not asked.isascii() or not asked.isdigit() or int(asked) < 1:
        raise UserError(f'micro-batch is "{asked}"; it must be auto or a whole number of at least 1')
    if rows % int(asked):
        raise UserError(
            f"a micro-batch of {asked} does not divide the {rows:,} sequences of a step",
            "use one of " + ", ".join(map(str, divisors(rows))),
        )
    return int(asked)


def check_share(rows: int, processes: int, length: int | None = None) -> None:
    """Raises `UserError` if processes cannot share the sequences of a step, of ``length`` tokens each, evenly."""
    if rows % processes:
        hint = "use --nproc " + " or ".join(str(n) for n in divisors(rows)[:8])
        if length is not None:
            below, above = ((rows // processes + more) * processes * length for more in (0, 1))
            hint = f"use --batch-tokens {above}" + (f" or {below}" if below else "") + f", or {hint[4:]}"
        raise UserError(f"the {rows:,} sequences of a step cannot be split evenly over {processes} processes", hint)


def _warmup(config: TrainConfig, steps: int, batch: _Batch) -> int:
    if config.warmup_tokens is not None:
        return batch.steps(config.warmup_tokens) if config.warmup_tokens else 0
    return min(2000, round(steps / 20)) if config.warmup is None else config.warmup


def _steps(config: TrainConfig, n_tokens: int, batch: _Batch, usual_epochs: float) -> int:
    if config.steps is not None:
        return config.steps
    if config.minutes is not None:
        return 1000  # a guess, until the rate is measured (gpt.training.budget)
    epochs = usual_epochs if config.epochs is None else config.epochs
    if epochs <= 0:
        raise UserError(f"epochs is {epochs:g}; it must be more than 0")
    steps = batch.steps(epochs * n_tokens)
    if steps > MOST_STEPS:
        raise UserError(f"{epochs:g} epochs are {steps:,} steps; the limit is {MOST_STEPS:,}", "use fewer")
    return steps


def auto_epochs(n_tokens: int, model: GPTConfig, device: str) -> float:
    """The epochs over a text of ``n_tokens``: at most 20 times, and at most what takes about two minutes on two CPU
    cores, or 20 tokens a parameter elsewhere (Hoffmann et al. 2022)."""
    parameters = breakdown(model).trainable
    tokens = CPU_FLOPS / (6 * parameters) if device == "cpu" else 20 * parameters
    return min(20.0, tokens / n_tokens)


def auto_regularization(passes: float, tokens_per_parameter: float) -> tuple[float, float]:
    """Dropout and weight decay for a text: more of both the more often it is read, and the shorter it is, so that it is
    not learnt by heart (benchmarks/defaults.md)."""
    decay = min(1.0, passes / max(DECAYS_MOST, OFTEN * tokens_per_parameter))
    dropout = DROPOUT if decay == 1 and passes >= TOO_OFTEN * tokens_per_parameter else 0.0
    return dropout, max(USUAL_DECAY, round(decay, 2))


def _compiles(config: TrainConfig, recipe: Recipe, compute: Compute, processes: int) -> bool:
    """Whether to compile. ``auto`` does so for long runs, on a CPU where one process trains all weights of a small
    model (benchmarks/defaults.md). Not for examples: batches vary in length."""
    if config.compile != "auto" or config.has_examples:
        return config.compile == "on"
    model, dtype = recipe.model, compute.dtype_name
    flops = 6 * breakdown(model).trainable * recipe.tokens(recipe.steps)
    if compute.device.type == "cuda":
        is_long = flops >= COMPILE_FROM if config.minutes is None else config.minutes >= COMPILE_MINUTES
        return is_long and flops >= COMPILE_STEP * recipe.steps
    if not recipe.is_one_program(compute, processes) or model.n_layer > COMPILED_LAYERS:
        return False
    seconds = flops / (CPU_RATE[dtype] * model.n_embd) if config.minutes is None else 60 * config.minutes
    return seconds >= COMPILE_SECONDS[dtype] * model.n_layer and compiles_unasked()
