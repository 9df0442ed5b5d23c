"""Plans a run: settings, text, device and measured speed decide every ``None`` and ``auto``."""

import math
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import torch

from gpt.config import events
from gpt.config.device import Compute
from gpt.config.model import GPTConfig, Preset, find_preset
from gpt.config.settings import Amount, Count, Positive, Within
from gpt.config.train import DEFAULT_WEIGHT_DECAY, BaseDtype, Optimizer, TrainConfig
from gpt.model import lora
from gpt.model.memory import FLOAT, Setup, count_step_memory, divisors
from gpt.model.params import breakdown, nearest_preset
from gpt.model.plan import with_largest_micro_batch, with_loss_chunks, with_micro_batch
from gpt.system.errors import UserError
from gpt.system.peaks import host_memory
from gpt.system.programs import compiles_by_default
from gpt.training import finetune
from gpt.training.time_budget import INTERVALS, Costs, TimeBudget

Schedule = Literal["linear", "cosine", "constant"]
DECAY_SHARE = 0.5  # default share of the steps in which the linear schedule decays
# Weight decay grows with the passes over a text. With r tokens per parameter, it reaches 1 at max(12, 80 r) passes.
# From 300 r passes, dropout is added if weight decay has reached 1 (benchmarks/defaults.md).
MAX_DECAY_PASSES, MAX_DECAY_RATIO, DROPOUT_RATIO, DROPOUT = 12, 80, 300, 0.1
TAUGHT_DECAY = 0.3  # weight decay with teachers
MUON_FACTOR = 2  # Muon's learning rate relative to AdamW's, measured on nano (benchmarks/defaults.md).
# On a GPU, ``auto`` compiles a run from this many FLOPs (two minutes at a third of an H100's peak), if its steps have
# this many. The host limits smaller steps: on an H200, a step of `nano` takes 13.4 ms eager and 16.0 compiled.
COMPILE_RUN_FLOPS, COMPILE_STEP_FLOPS = 3e16, 1e12
# Steps below these FLOPs run as CUDA graphs. On an H200, milliseconds per step fell from 9.0 to 1.6 for `nano`, from
# 9.9 to 3.3 for `micro` with 8,192 tokens, and from 54.1 to 53.7 for GPT-2 with 16,384 tokens (1.2e13 FLOPs).
MAX_GRAPH_FLOPS = 1e13
# On a CPU, ``auto`` compiles if the steps of a run would take at least this many seconds per program. Compiling takes
# about 20 seconds and saves a quarter of the step time in bfloat16, and a tenth to a fifth in float32.
COMPILE_SECONDS = {"bfloat16": 70, "float32": 140}
CPU_FLOPS_PER_WIDTH = {"bfloat16": 1e9, "float32": 4.5e8}  # FLOP/s on two cores, divided by the model's width
MAX_COMPILED_LAYERS = 6  # On a CPU, ``auto`` does not compile deeper models, which were not measured.
# A run trains teachers if it makes at least this many passes over its text, and this many times the training tokens per
# parameter. It trains one teacher per `TEACHER_PASSES` passes (benchmarks/defaults.md).
MIN_TAUGHT_PASSES, MIN_TAUGHT_RATIO = 19.0, 110.0
TEACHER_PASSES, MAX_TEACHERS = 9.0, 8
MIN_TEACHER_STEPS = 100
TEACHER_EVALUATIONS = 5  # of each
MAX_STEPS = 2**53
# Maximum bytes of the teachers' probabilities for a text and for a step, and maximum vocabulary. A byte per probability
# is too coarse for the tail of a large vocabulary.
MAX_LESSON_BYTES, MAX_STEP_BYTES, MAX_READ_VOCABULARY = 2**30, 2**26, 8192
ID_BYTES, ROW_BYTES = 16, 256  # host memory per token id of a batch, and extra bytes per row
BATCH_MEMORY_SHARE = 0.5  # maximum share of host memory for a batch
DEFAULT_CPU_FLOPS = 1e13  # FLOPs of a default run on a CPU, at 6 per parameter and token
EVALUATIONS = 20  # default number of evaluations
# Examples are few and read often, so a run on them soon overfits. By default, it stops after this share of its steps
# without improvement, and at least this many evaluations.
PATIENCE_SHARE, MIN_PATIENCE = 0.25, 5
GUESSED_STEPS = 1000  # steps of a timed run whose speed is not measured yet

COPIED_SETTINGS = ("schedule", "clip", "keep", "seed", "base_dtype", "shard", "recompute", "reward")


@dataclass(frozen=True)
class Facts:
    """Everything besides the settings that a recipe depends on."""

    bytes: int  # size of the text in UTF-8
    tokens: int  # training tokens
    vocab_size: int
    held_out: bool  # whether some of the text is held out
    device: str  # cuda, mps or cpu
    dtype: str
    memory: int  # bytes of this process's share of the device's memory
    host_memory: int
    has_compiler: bool = False
    processes: int = 1
    local_processes: int = 1  # on this machine
    separator: int = 0  # id that starts a document
    documents: int = 0  # documents of the text
    rows: int = 0  # rows of examples, preferences, or answers to all prompts; 0 for text
    sides: int = 1  # sequences per row: 2 for preferences
    base: GPTConfig | None = None  # shape of the base model in fine-tuning
    base_bytes: int = 0  # size of a base model that is quantized
    costs: Costs | None = None  # of uncompiled steps, once measured for ``--minutes``
    compiled_costs: Costs | None = None

    @classmethod
    def on(cls, compute: Compute, **others: Any) -> "Facts":
        """Returns the facts of a device and its machine, with ``others``."""
        others |= {"memory": compute.memory(), "host_memory": host_memory(), "has_compiler": compiles_by_default()}
        return cls(device=compute.device.type, dtype=compute.dtype_name, **others)


@dataclass(frozen=True)
class OwnTeachers:
    """The models that a run trains first, as its teachers, and how their settings differ from the run's."""

    count: Positive
    steps: Positive  # of each
    weight_decay: Amount
    dropout: Annotated[float, Within(0, 0.99)]
    eval_every: Positive


@dataclass(frozen=True)
class Recipe:
    """The resolved settings of a training run."""

    preset: str
    model: GPTConfig
    steps: Positive  # of the whole run, with its own teachers
    batch_tokens: Positive  # tokens per step
    rows: Positive  # sequences per step
    micro_batch: Positive  # sequences per forward pass in a process
    lr: Amount
    warmup: Count
    decay: Count  # final steps in which the linear schedule decays
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
    lora_rank: Annotated[int, Within(0, 2**20)] = 0  # 0 disables adapters and trains all weights
    lora_alpha: Amount = 0.0
    lora_targets: str = "all"
    base_dtype: BaseDtype | None = None  # dtype of the frozen matrices in blocks; None for the file's
    loss_chunk: Count = 0  # positions per chunk of logits; 0 for `gpt.model.memory.positions_at_once`
    compile: bool = False
    shard: Literal["none", "full"] = "none"  # whether ranks shard weights, gradients and moments
    context: Count = 0  # original context of a RoPE base model; 0 for other runs
    recompute: bool = False  # whether the backward pass recomputes activations
    # The settings that follow the clock, from "steps eval_every save_every sample_every". Their values are estimates.
    by_clock: str = ""
    own_teachers: OwnTeachers | None = None  # whom the model learns from
    separator: Count | None = None  # id that starts a document, unless documents see each other
    beta: Amount = 0.0  # of preferences; 0 for other data
    reward: str | None = None  # the command that rewards answers to prompts; None for other data
    group: Positive = 1  # answers per prompt
    answer_tokens: Count = 0  # maximum tokens of an answer; 0 for other data
    budget: TimeBudget | None = None  # None without ``--minutes``, and in drafts

    @property
    def n_teachers(self) -> int:
        """The number of teachers that the run trains itself."""
        return self.own_teachers.count if self.own_teachers else 0

    def cycle(self, number: int) -> "Recipe":
        """The recipe of a cycle, whose steps are its own: of a teacher, counted from 0, or after the last of them, of
        the model that learns from them. All have different seeds."""
        own = self.own_teachers
        if own is None:
            return self
        if number >= own.count:
            return replace(self, steps=max(1, self.steps - own.count * own.steps))
        return replace(
            self, seed=self.seed + number + 1, steps=own.steps, warmup=default_warmup(own.steps),
            decay=round(DECAY_SHARE * own.steps), weight_decay=own.weight_decay, eval_every=own.eval_every,
            save_every=min(self.save_every, own.eval_every), sample_every=0,
            model=replace(self.model, dropout=own.dropout), own_teachers=None,
        )  # fmt: skip

    @property
    def saved_model(self) -> GPTConfig:
        """The model's shape in checkpoints. With RoPE, fine-tuning keeps the original context."""
        return replace(self.model, block_size=max(self.context, self.model.block_size))

    @property
    def sides(self) -> int:
        """Sequences per row: two for preferences."""
        return 2 if self.beta else 1

    @property
    def scores(self) -> tuple[str, ...]:
        """What a step reports besides the loss, of preferences or answers."""
        return events.OF_PREFERENCES if self.beta else events.OF_ANSWERS if self.reward else ()

    @property
    def is_sharded(self) -> bool:
        """Whether each process has only a shard of the weights."""
        return self.shard == "full"

    def compiles_whole_step(self, device: str, processes: int) -> bool:
        """Whether the forward and backward pass compile into one program. This needs a single process on a CPU that
        trains all weights without recomputation or chunked logits."""
        single = processes == 1 and not self.is_sharded
        return device == "cpu" and single and not (self.lora_rank or self.recompute or self.loss_chunk)

    def uses_cuda_graph(self, compute: Compute, processes: int) -> bool:
        """Whether steps run as CUDA graphs: in a single process, if launching kernels takes longer than running them.
        Excludes float16, whose loss scale is on the host, recomputation, which reads random states, preferences, which
        compute logits only for targets, and answers, which are sampled with other graphs."""
        flops = 6 * breakdown(self.model).trainable * self.batch_tokens
        single = processes == 1 and not self.is_sharded and not self.recompute and not self.scores
        return compute.device.type == "cuda" and single and compute.dtype != torch.float16 and flops < MAX_GRAPH_FLOPS

    @property
    def is_timed(self) -> bool:
        """Whether the run ends by the clock."""
        return "steps" in self.by_clock.split()


def preset_name(config: TrainConfig, n_bytes: int, device: str) -> str:
    """The user's preset, or the default for a text of ``n_bytes``. On a CPU the default is small, because larger models
    learn less in a run of default length (benchmarks/defaults.md)."""
    if config.preset != "auto":
        return config.preset
    if device == "cpu":
        return "nano"
    for name, min_bytes in (("gpt2", 2_000_000_000), ("small", 100_000_000), ("mini", 2_000_000)):
        if n_bytes >= min_bytes:
            return name
    return "micro"


def example_context(config: TrainConfig, n_bytes: int, device: str, start: GPTConfig | None) -> int:
    """The context for training on examples with ``n_bytes`` of text. ``start`` is the base model's shape in
    fine-tuning."""
    if start is not None:
        return finetune.training_shape(config, start).block_size
    return config.block_size or find_preset(preset_name(config, n_bytes, device)).model.block_size


def limit_answers(config: TrainConfig, block_size: int) -> tuple[int, int]:
    """The number of answers to a prompt, and the maximum tokens of each. 1 and 0 if a run samples no answers."""
    if not config.reward:
        return 1, 0
    return config.group or finetune.GROUP, config.answer_tokens or min(finetune.ANSWER_TOKENS, block_size // 2)


def plan(config: TrainConfig, facts: Facts) -> Recipe:
    """Plans a run. Raises `UserError` for settings that contradict each other or the text, or without enough time.

    A run with ``--minutes`` needs measured costs. Without them, returns a draft without a `budget`, whose costs are to
    be measured: first of uncompiled steps, then of compiled ones if the run compiles.
    """
    if config.teachers is None:
        config = replace(config, teachers=count_teachers(config, facts))
    if config.minutes is None:
        return _plan_steps(config, facts)
    # The default batch of fine-tuning depends on the tokens that there is time for, and can take minutes.
    has_default_batch = facts.base is not None and config.batch_tokens is None
    draft = _plan_steps(config, facts, max_tokens=1 if has_default_batch else math.inf)
    if facts.costs is None:
        return draft
    budget, tokens = divide_time(config, draft, facts.costs, config.minutes)
    draft = _plan_steps(config, facts, tokens)
    planned = replace(config, minutes=None, steps=max(1, round(tokens / draft.batch_tokens)))
    draft = _plan_steps(planned, facts, tokens)
    planned = replace(planned, compile="on" if draft.compile else "off")
    if draft.compile:  # A compiled program has a fixed dropout and micro-batch, and another speed.
        if facts.compiled_costs is None:
            return draft
        dropout = config.dropout if config.teachers else draft.model.dropout
        planned = replace(planned, dropout=dropout, micro_batch=str(draft.micro_batch))
        budget, tokens = divide_time(config, draft, facts.compiled_costs, config.minutes)
    steps = max(1, round(tokens / draft.batch_tokens))
    eval_every = config.eval_every or math.ceil(steps / budget.pauses)
    samples = config.sample_every if config.sample_every is not None or budget.samples else 0
    planned = replace(planned, steps=steps, eval_every=eval_every, sample_every=samples)
    recipe = _plan_steps(planned, facts, tokens)
    by_clock = ["steps", *(name for name in INTERVALS if getattr(config, name) is None)]
    if config.eval_every is not None and "save_every" in by_clock:
        by_clock.remove("save_every")
    return replace(recipe, warmup=min(recipe.warmup, steps), by_clock=" ".join(by_clock), budget=budget)


def count_teachers(config: TrainConfig, facts: Facts) -> int:
    """The number of teachers that a run should train first. They pay off only if the model would read the text so
    often that it learns little more from it (benchmarks/defaults.md)."""
    recipe = plan(replace(config, teachers=0), replace(facts, costs=None, compiled_costs=None))
    tokens: float = recipe.steps * recipe.batch_tokens
    if facts.base or facts.rows or not can_read(facts.tokens, recipe.batch_tokens, recipe.model):
        return 0
    if config.minutes is not None:
        tokens = divide_time(config, recipe, facts.costs, config.minutes)[1] if facts.costs else 0.0
    steps, passes = round(tokens / recipe.batch_tokens), tokens / facts.tokens
    if passes < MIN_TAUGHT_PASSES or passes < MIN_TAUGHT_RATIO * facts.tokens / breakdown(recipe.model).trainable:
        return 0
    count = min(MAX_TEACHERS, int(passes / TEACHER_PASSES))
    return count if steps >= 2 * count * MIN_TEACHER_STEPS else 0


def divide_time(config: TrainConfig, recipe: Recipe, costs: Costs, minutes: float) -> tuple[TimeBudget, float]:
    """Divides the minutes of a run. Returns the budget and the number of training tokens that fit. Raises `UserError`
    without enough time."""
    step_seconds = costs.token * recipe.batch_tokens
    evals = 60 * minutes / step_seconds / recipe.eval_every if config.eval_every else EVALUATIONS
    budget = TimeBudget.fitting(minutes, costs, evals)
    return budget, budget.tokens(costs, recipe.batch_tokens)


def _plan_steps(config: TrainConfig, facts: Facts, max_tokens: float = math.inf) -> Recipe:
    """Plans a run by its steps or epochs. ``max_tokens`` is the number of tokens that fine-tuning has time for."""
    base = facts.base and finetune.training_shape(config, facts.base)
    name = preset_name(config, facts.bytes, facts.device) if base is None else nearest_preset(base)
    preset = find_preset(name) if base is None else replace(find_preset(name), model=base)
    model = _model_shape(config, preset, 2**63 if facts.rows else facts.tokens, facts.vocab_size)
    optimizer = auto_optimizer(config, model)
    if base is not None:
        is_memorized = facts.rows > 0 and facts.sides == 1 and not config.reward
        default_epochs = finetune.choose_epochs(facts.tokens, is_memorized, model, facts.device)
        tokens = min(default_epochs * facts.tokens, max_tokens)
        preset = finetune.shrink_batch(preset, tokens, finetune.PAIR_STEPS if is_memorized else finetune.STEPS)
    else:
        default_epochs = auto_epochs(facts.tokens, model, facts.device)
        preset = finetune.shrink_batch(preset, default_epochs * facts.tokens, finetune.STEPS) if facts.rows else preset
    batch = _plan_batch(config, preset, model, facts)
    steps = _total_steps(config, facts.tokens, batch, default_epochs)
    own_teachers = _plan_teachers(config, facts, model, batch, steps) if config.teachers else None
    earlier_steps = own_teachers.count * own_teachers.steps if own_teachers else 0
    steps = max(1, steps - earlier_steps)
    passes = 0.0 if base is not None else steps * batch.tokens / facts.tokens
    dropout, weight_decay = auto_regularization(passes, facts.tokens / breakdown(model).trainable)
    if own_teachers:
        dropout, weight_decay = 0.0, TAUGHT_DECAY
    model = model if config.dropout is not None else replace(model, dropout=dropout)
    weight_decay = 0.0 if config.reward else weight_decay
    eval_every = config.eval_every or math.ceil(steps / 20)
    group, answer_tokens = limit_answers(config, model.block_size)
    copied_settings: dict[str, Any] = {option: getattr(config, option) for option in COPIED_SETTINGS}
    recipe = Recipe(
        preset=name,
        model=model,
        steps=earlier_steps + steps,
        batch_tokens=batch.tokens,
        rows=batch.rows,
        micro_batch=batch.setup.micro_batch,
        lr=_learning_rate(config, preset, optimizer),
        warmup=default_warmup(steps) if config.warmup is None else config.warmup,
        decay=round(DECAY_SHARE * steps) if config.decay is None else min(config.decay, steps),
        optimizer=optimizer,
        weight_decay=weight_decay if config.weight_decay is None else config.weight_decay,
        eval_every=eval_every,
        patience=_choose_patience(config, facts, steps / eval_every),
        save_every=config.save_every or eval_every,
        sample_every=math.ceil(steps / 4) if config.sample_every is None else config.sample_every,
        lora_rank=config.lora_rank or 0,
        lora_alpha=2.0 * (config.lora_rank or 0) if config.lora_alpha is None else config.lora_alpha,
        lora_targets=config.lora_targets or "all",
        loss_chunk=batch.setup.loss_chunk,
        context=facts.base.block_size if facts.base is not None and facts.base.positions == "rotary" else 0,
        own_teachers=own_teachers,
        separator=_choose_separator(facts, model),
        beta=(finetune.BETA if config.beta is None else config.beta) if config.preferences else 0.0,
        group=group,
        answer_tokens=answer_tokens,
        **copied_settings,
    )
    return replace(recipe, compile=_should_compile(config, recipe, facts))


def _plan_teachers(config: TrainConfig, facts: Facts, model: GPTConfig, batch: "_Batch", steps: int) -> OwnTeachers:
    """Plans a run's own teachers, which share half of its ``steps``. Raises `UserError` if they can't read the text."""
    if not can_read(facts.tokens, batch.tokens, model):
        V = model.vocab_size
        raise UserError(
            f"with {V:,} ids, teachers would need {facts.tokens * V / 1e9:,.1f} GB for the text and "
            f"{batch.tokens * V / 1e9:,.2f} GB for a step; the limits are {MAX_READ_VOCABULARY:,} ids, "
            f"{MAX_LESSON_BYTES / 1e9:,.1f} GB and {MAX_STEP_BYTES / 1e9:,.2f} GB",
            "leave out --teachers, or use less text or a smaller --vocab-size or --batch-tokens",
        )
    count = config.teachers or 1
    steps = max(1, steps // 2 // count)
    passes = steps * batch.tokens / facts.tokens
    dropout, weight_decay = auto_regularization(passes, facts.tokens / breakdown(model).trainable)
    weight_decay = weight_decay if config.weight_decay is None else config.weight_decay
    dropout = dropout if config.dropout is None else model.dropout
    eval_every = config.eval_every or math.ceil(steps / TEACHER_EVALUATIONS)
    return OwnTeachers(count, steps, weight_decay, dropout, eval_every)


def _choose_separator(facts: Facts, model: GPTConfig) -> int | None:
    """The id at which attention ends, in a new RoPE model of documents that are on average shorter than its context.
    This was only measured on a CPU (benchmarks/decisions.md)."""
    are_short = facts.tokens < model.block_size * facts.documents
    is_measured = model.positions == "rotary" and facts.base is None and facts.device == "cpu"
    return facts.separator if are_short and is_measured else None


def auto_optimizer(config: TrainConfig, model: GPTConfig) -> Optimizer:
    """The optimizer of ``model``: Muon by default, AdamW for adapters and for fine-tuning a large model."""
    if config.lora_rank:
        return "adamw"
    is_large = config.init is not None and breakdown(model).trainable >= finetune.MIN_ADAMW_PARAMETERS
    return config.optimizer or ("adamw" if is_large else "muon")


def notes(config: TrainConfig, facts: Facts, recipe: Recipe) -> list[str]:
    """Returns notes for the user about settings that the plan changed, or that have less effect than intended."""
    lines, model, steps = [], recipe.model, recipe.cycle(recipe.n_teachers).steps
    if config.teachers is None and recipe.n_teachers:
        lines.append(
            f"{recipe.n_teachers} teachers train first, in half of the {'time' if recipe.is_timed else 'steps'}: a "
            "single run would read the text too often to learn more from it (--teachers 0 turns this off)"
        )
    shape = facts.base and finetune.training_shape(config, facts.base)
    context = config.block_size or (shape or find_preset(recipe.preset).model).block_size
    if shape and facts.base and config.block_size is None and context < facts.base.block_size:
        lines.append(
            f"training on sequences of {context:,} tokens; the model's context is {facts.base.block_size:,} "
            "(--block-size)"
        )
    if model.block_size < context:
        lines.append(
            f"the text has {facts.tokens:,} tokens to train on: context reduced from {context:,} to {facts.tokens:,}"
        )
    if config.patience and not facts.held_out:
        lines.append("--patience has no effect: nothing is held out")
    if recipe.warmup > steps:
        lines.append(
            f"warmup is {recipe.warmup:,} steps, the run {steps:,}: the learning rate reaches "
            f"{steps / recipe.warmup:.2g} of its peak"
        )
    elif recipe.is_timed and recipe.warmup == steps:
        lines.append(f"warmup is longer than the run, about {steps:,} steps: the learning rate rises in all of them")
    if config.window is not None and config.window >= model.block_size:
        lines.append(f"a window of {config.window:,} has no effect in a context of {model.block_size:,} tokens")
    if config.decay is not None and config.schedule != "linear":
        lines.append(f"--decay has no effect with --schedule {config.schedule}")
    elif config.decay is not None and config.decay > steps:
        lines.append(f"decay is {config.decay:,} steps, the run {steps:,}: the learning rate decays in all of them")
    if model.layout == "gpt":
        lines.append("no Transformers class supports this architecture, so only gpt can load the checkpoints")
    return lines


def _choose_patience(config: TrainConfig, facts: Facts, evaluations: float) -> int:
    if config.patience is not None:
        return config.patience
    return max(MIN_PATIENCE, math.ceil(PATIENCE_SHARE * evaluations)) if facts.rows and facts.held_out else 0


def _learning_rate(config: TrainConfig, preset: Preset, optimizer: Optimizer) -> float:
    if config.lr is not None:
        return config.lr
    lr = preset.lr * (MUON_FACTOR if optimizer == "muon" else 1)
    if config.init is None:
        return lr
    lr *= finetune.SCORED_LR_FACTOR if config.preferences or config.reward else 1
    return lr * (finetune.LORA_LR_FACTOR if config.lora_rank else finetune.LR_FACTOR[optimizer])


def _model_shape(config: TrainConfig, preset: Preset, n_tokens: int, vocab_size: int) -> GPTConfig:
    shape = preset.model
    block_size = min(config.block_size or shape.block_size, n_tokens)
    if config.init is not None:
        return replace(shape, block_size=block_size, dropout=config.dropout or 0.0)
    return config.new_model(shape, vocab_size, block_size)


def _batch_rows(config: TrainConfig, preset: Preset, row_tokens: float, pairs: bool) -> int:
    """The number of rows per step. A row has ``row_tokens`` tokens on average. The user's batch counts a preference as
    one context, because the lengths of its two answers vary. Raises `UserError` if the
    user's batch of text is not a multiple of the requested context. Rounds the batch if a short text reduced the
    context."""
    batch_tokens, context = config.batch_tokens, config.block_size or preset.model.block_size
    if not pairs and batch_tokens is not None and batch_tokens % context:
        lower, upper = batch_tokens // context * context, -(-batch_tokens // context) * context
        message = f"batch-tokens {batch_tokens:,} is not a multiple of the context, {context:,}"
        raise UserError(message, f"use {upper:,}" + (f" or {lower:,}" if lower else ""))
    if config.preferences and batch_tokens is not None:
        row_tokens = context
    return max(1, round((batch_tokens or preset.batch_tokens) / row_tokens))


@dataclass(frozen=True)
class _Batch:
    rows: int
    row_size: float  # tokens per row, on average
    setup: Setup

    @property
    def tokens(self) -> int:
        return round(self.rows * self.row_size)

    def steps(self, tokens: float) -> int:
        return max(1, round(tokens / self.tokens))


def _plan_batch(config: TrainConfig, preset: Preset, model: GPTConfig, facts: Facts) -> _Batch:
    """Plans the batch.

    A batch that the processes cannot split evenly is rounded up. If the user set the batch of a text, raises
    `UserError` instead.
    """
    T, processes, has_examples = model.block_size, facts.processes, facts.rows > 0
    row_tokens = facts.tokens / facts.rows if has_examples else T
    rows = _batch_rows(config, preset, row_tokens, has_examples)
    if config.batch_tokens is None or has_examples:
        rows += -rows % (processes * limit_answers(config, T)[0])
    check_even_split(rows, processes, None if has_examples else T)
    _check_batch(rows // processes, rows * row_tokens, facts.host_memory)
    setup = _plan_micro_batch(config, model, facts, rows // processes)
    return _Batch(rows, row_tokens, setup)


def _check_batch(rows: int, tokens: float, memory: int) -> None:
    """Raises `UserError` if the ids of a step exceed host memory."""
    n_bytes = rows * ROW_BYTES + ID_BYTES * tokens
    if n_bytes > BATCH_MEMORY_SHARE * memory:
        raise UserError(
            f"the ids of a step of {tokens:,.0f} tokens take {n_bytes / 1e9:,.1f} GB, and this machine has "
            f"{memory / 1e9:,.1f} GB",
            "use a smaller --batch-tokens",
        )


def _plan_micro_batch(config: TrainConfig, model: GPTConfig, facts: Facts, rows: int) -> Setup:
    """Plans the micro-batch of a process with ``rows`` sequences per step. If dropout is not yet decided, counts its
    memory."""
    if config.dropout is None and config.init is None:
        model = replace(model, dropout=DROPOUT)
    setup = _memory_setup(config, model, auto_optimizer(config, model), facts)
    setup = replace(setup, recompute=config.recompute, is_taught=bool(config.teachers))
    if config.micro_batch == "auto":
        return with_largest_micro_batch(model, setup, rows, facts.memory)
    return with_loss_chunks(
        model, with_micro_batch(setup, parse_micro_batch(config.micro_batch, rows), rows), facts.memory
    )


def _memory_setup(settings: TrainConfig | Recipe, model: GPTConfig, optimizer: Optimizer, facts: Facts) -> Setup:
    adapters = {}
    if settings.lora_rank:
        roles = lora.find_roles(settings.lora_targets or "all", model)
        adapters = lora.adapter_shapes(model, settings.lora_rank, roles)
    return Setup(
        dtype=facts.dtype,
        optimizer=optimizer,
        data=facts.processes,
        shard=settings.shard == "full",
        sides=facts.sides,
        device="cuda" if facts.device == "cuda" else "cpu",
        adapters=tuple(adapters.values()),
        base_bits=_base_bits(settings, model, facts) if settings.lora_rank else 0.0,
    )


def _base_bits(settings: TrainConfig | Recipe, model: GPTConfig, facts: Facts) -> float:
    """The bits of a weight in the blocks of a quantized base model. 0 if they are not quantized."""
    if settings.base_dtype is None:
        return 8 * facts.base_bytes / breakdown(model).trainable
    return {"int8": 8.5, "int4": 4.5}.get(settings.base_dtype, 0.0)


def check_model(recipe: Recipe, facts: Facts) -> None:
    """Raises `UserError` if weights, gradients and moments exceed device memory, or copies for checkpoints exceed host
    memory. Otherwise, the system would kill the process."""
    model, memory, here = recipe.model, facts.memory, facts.local_processes
    setup, n_parameters = _memory_setup(recipe, model, recipe.optimizer, facts), breakdown(model).trainable
    codes = facts.tokens * model.vocab_size * bool(recipe.own_teachers)
    step = count_step_memory(model, setup)
    n_bytes = max(step.minimum, FLOAT * n_parameters * recipe.n_teachers)  # All teachers read the text together.
    n_bytes += step.snapshot + codes if setup.device == "cpu" else 0
    if n_bytes > memory:
        raise UserError(
            f"{n_parameters:,} parameters take {n_bytes / 1e9:,.1f} GB in training (weights, gradients, optimizer "
            f"state{', teachers' * bool(codes)}), but only {memory / 1e9:,.1f} GB are available",
            "use a smaller model (--preset, or --init); gpt params MODEL --devices 1 shows what each needs",
        )
    copies, host_bytes = step.snapshot * (here if recipe.is_sharded else 1) + codes * here, facts.host_memory
    if setup.device != "cpu" and copies > host_bytes:
        raise UserError(
            f"checkpoints{' and probabilities of teachers' * bool(codes)} take {copies / 1e9:,.1f} GB of host memory, "
            f"but only {host_bytes / 1e9:,.1f} GB are available",
            "use a smaller model, or more machines with --shard full",
        )


def can_read(tokens: int, step_tokens: int, model: GPTConfig) -> bool:
    """Whether the probabilities of teachers for a text of ``tokens`` ids keep to the limits."""
    V = model.vocab_size
    return tokens * V <= MAX_LESSON_BYTES and step_tokens * V <= MAX_STEP_BYTES and V <= MAX_READ_VOCABULARY


def parse_micro_batch(text: str, rows: int) -> int:
    """Parses a micro-batch. Raises `UserError` unless it is a divisor of a process's ``rows``."""
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise UserError(f'micro-batch is "{text}"; it must be auto or a whole number of at least 1')
    if rows % int(text):
        message = f"a micro-batch of {text} does not divide the {rows:,} sequences of a step"
        raise UserError(message, "use one of " + ", ".join(map(str, divisors(rows))))
    return int(text)


def check_even_split(rows: int, processes: int, row_tokens: int | None = None) -> None:
    """Raises `UserError` if the processes cannot split the sequences of a step evenly."""
    if rows % processes:
        hint = "use --nproc " + " or ".join(str(n) for n in divisors(rows)[:8])
        if row_tokens is not None:
            lower, upper = ((rows // processes + extra) * processes * row_tokens for extra in (0, 1))
            hint = f"use --batch-tokens {upper}" + (f" or {lower}" if lower else "") + f", or {hint[4:]}"
        raise UserError(f"the {rows:,} sequences of a step cannot be split evenly over {processes} processes", hint)


def default_warmup(steps: int) -> int:
    """The default warmup of a run with so many steps."""
    return min(2000, round(steps / 20))


def _total_steps(config: TrainConfig, n_tokens: int, batch: _Batch, default_epochs: float) -> int:
    if config.steps is not None:
        return config.steps
    if config.minutes is not None:
        return GUESSED_STEPS
    epochs = default_epochs if config.epochs is None else config.epochs
    if epochs <= 0:
        raise UserError(f"epochs is {epochs:g}; it must be more than 0")
    steps = batch.steps(epochs * n_tokens)
    if steps > MAX_STEPS:
        raise UserError(f"{epochs:g} epochs are {steps:,} steps; the limit is {MAX_STEPS:,}", "use fewer")
    return steps


def auto_epochs(n_tokens: int, model: GPTConfig, device: str) -> float:
    """The default epochs: at most 20. On a CPU, they are also limited to about two minutes on two cores; on other
    devices, to 20 tokens per parameter (Hoffmann et al. 2022)."""
    parameters = breakdown(model).trainable
    tokens = DEFAULT_CPU_FLOPS / (6 * parameters) if device == "cpu" else 20 * parameters
    return min(20.0, tokens / n_tokens)


def auto_regularization(passes: float, tokens_per_parameter: float) -> tuple[float, float]:
    """The default dropout and weight decay. Both grow with the passes over a text and shrink with its length, to limit
    overfitting (benchmarks/defaults.md)."""
    decay = min(1.0, passes / max(MAX_DECAY_PASSES, MAX_DECAY_RATIO * tokens_per_parameter))
    dropout = DROPOUT if decay == 1 and passes >= DROPOUT_RATIO * tokens_per_parameter else 0.0
    return dropout, max(DEFAULT_WEIGHT_DECAY, round(decay, 2))


def _should_compile(config: TrainConfig, recipe: Recipe, facts: Facts) -> bool:
    """Whether to compile. ``auto`` compiles long runs, and on a CPU only small models (benchmarks/defaults.md). It
    excludes examples, because their lengths vary. The steps of a run with ``--minutes`` decide once they are known."""
    if config.compile != "auto" or config.has_examples or config.minutes is not None:
        return config.compile == "on"
    if facts.device == "cuda":
        return count_flops(recipe) >= max(COMPILE_RUN_FLOPS, COMPILE_STEP_FLOPS * recipe.steps)
    if not (facts.has_compiler and recipe.compiles_whole_step(facts.device, facts.processes)):
        return False
    programs = 2 if recipe.own_teachers else 1  # The pupil's loss differs from the teachers'.
    return estimate_seconds(recipe, facts.device, facts.dtype) >= programs * COMPILE_SECONDS[facts.dtype]


def count_flops(recipe: Recipe) -> float:
    """The approximate FLOPs of a run."""
    return 6.0 * breakdown(recipe.model).trainable * recipe.steps * recipe.batch_tokens


def estimate_seconds(recipe: Recipe, device: str, dtype: str) -> float:
    """Estimates the seconds of the steps of a run on two CPU cores. Returns 0 for other devices and for models that are
    deeper than those that were measured."""
    if device != "cpu" or recipe.model.n_layer > MAX_COMPILED_LAYERS:
        return 0.0
    return count_flops(recipe) / (CPU_FLOPS_PER_WIDTH[dtype] * recipe.model.n_embd)
