"""Options of ``gpt train``, with their types, defaults, bounds and help texts. Imports no torch.

The command line builds its options from these dataclasses. ``--config`` and ``--print-config`` read and write them as
TOML (`gpt.config.settings`).
"""

from dataclasses import dataclass, fields, replace
from functools import partial
from typing import ClassVar, Literal

from gpt.config.model import ARCHITECTURES, Arch, GPTConfig, Positions, find_preset
from gpt.config.settings import PANELS, option
from gpt.config.text import TextConfig
from gpt.system.errors import UserError, did_you_mean

Device = Literal["auto", "cpu", "cuda", "mps"]
DEVICE = r"(cpu|mps|cuda)(:\d{1,3})?"  # Regular expression for a device's name.
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Compile = Literal["auto", "on", "off"]
Optimizer = Literal["muon", "adamw"]
BaseDtype = Literal["full", "int8", "int4"]

DEFAULT_WEIGHT_DECAY = 0.1  # GPT-3's weight decay
MAX_THREADS = 4096
# ``--lora-targets`` accepts these roles of linear maps, and these groups of roles.
LORA_ROLES = ("query", "key", "value", "output", "gate", "up", "down")
LORA_GROUPS = {"all": LORA_ROLES, "attention": LORA_ROLES[:4], "mlp": LORA_ROLES[4:]}

_run, _model, _tune, _data, _read, _length, _optim, _log = (partial(option, panel=name) for name in PANELS[:8])
_machine = partial(option, panel="Machine")


@dataclass(frozen=True)
class TrainConfig(TextConfig):
    """Options of ``gpt train``. An option that is None depends on the text's size, the preset or the device."""

    EXCLUSIVE: ClassVar[tuple[tuple[str, str, str], ...]] = (
        ("steps", "epochs", "set the length of training"),
        ("steps", "minutes", "set the length of training"),
        ("epochs", "minutes", "set the length of training"),
    )

    out: str | None = _run(
        None, "Run folder; if it exists, -2, -3 … is appended", flags=("-o",), metavar="DIR",
        shown="runs/<name of the text>", level="basic",
    )  # fmt: skip
    preset: str = _model(
        "auto", "Model size (see `gpt params --list`); auto suits the text and the device", metavar="NAME",
        level="basic",
    )  # fmt: skip
    arch: Arch | None = _model(
        None, "modern: Qwen3's layout, for a lower loss in equal time; gpt2: exactly GPT-2 and GPT-3",
        shown="the preset's: gpt2 for gpt2… and gpt3…, modern for the rest",
    )  # fmt: skip
    positions: Positions | None = _model(
        None, "Position encoding; --arch modern takes only rotary", shown="rotary; learned with --arch gpt2"
    )
    n_layer: int | None = _model(None, "Transformer blocks", shown="from the preset", low=1)
    n_head: int | None = _model(None, "Attention heads per block", shown="from the preset", low=1)
    n_kv_head: int | None = _model(
        None, "Key/value heads (grouped-query attention); must divide --n-head", shown="from the preset", low=1
    )
    window: int | None = _model(
        None, "Sliding window, in tokens, of layers 1, 3, 5 …, like GPT-3's banded attention", low=1
    )
    n_embd: int | None = _model(None, "Embedding width; a multiple of --n-head", shown="from the preset", low=1)
    block_size: int | None = _model(None, "Context length in tokens", shown="from the preset", low=1)
    dropout: float | None = _model(
        None, "Dropout rate", shown="set by the number of passes over the text; 0 with --init or teachers", low=0
    )
    init: str | None = _tune(
        None, "Fine-tune a run, checkpoint, Transformers or PEFT folder, .gguf or hf:NAME", metavar="MODEL",
        level="basic",
    )  # fmt: skip
    seed: int = _run(1337, "Random seed; on a CPU, the same seed gives bit-identical weights", low=0)
    pairs: bool = _tune(False, 'TEXT has {"prompt", "completion"} records; train only on completions')
    chat: bool = _tune(False, 'TEXT has {"messages": […]} records; train only on assistant turns')
    preferences: bool = _tune(
        False, 'TEXT has {"prompt", "chosen", "rejected"} records; learn the chosen answers (DPO)'
    )
    beta: float | None = _tune(
        None, "With --preferences: how closely to stay to the model before training", shown="0.1", low=0, high=1000
    )
    reward: str | None = _tune(
        None, 'TEXT has {"prompt"} records; learn the answers that COMMAND rewards',
        metavar="COMMAND",
    )  # fmt: skip
    group: int | None = _tune(
        None, "With --reward: answers per prompt, which are compared with each other", shown="16", low=2, high=1024
    )
    answer_tokens: int | None = _tune(
        None, "With --reward: maximum tokens of an answer", shown="half of the context, at most 256", low=1
    )
    lora_rank: int | None = _tune(
        None, "With --init: train LoRA adapters of rank N instead of all weights", shown="off", level="basic", low=1,
        high=2**20,
    )  # fmt: skip
    lora_alpha: float | None = _tune(
        None, "LoRA scaling: adapters are multiplied by alpha / rank", shown="twice the rank", low=0
    )
    lora_targets: str | None = _tune(
        None, "Layers to adapt: all, attention, mlp, or some of query,key,value,output,gate,up,down", metavar="NAMES",
        shown="all",
    )  # fmt: skip
    base_dtype: BaseDtype | None = _tune(
        None, "With --lora-rank: keep the frozen matrices in int8 or int4, or full: as wide as --dtype",
        shown="as in the file",
    )  # fmt: skip
    steps: int | None = _length(None, "Optimizer steps", shown="set by the size of the text", level="basic", low=1)
    epochs: float | None = _length(None, "Passes over the text, instead of --steps", level="basic", low=0)
    minutes: float | None = _length(
        None, "Total running time in minutes, instead of --steps", level="basic", low=0, high=10**7
    )
    teachers: int | None = _length(
        None, "First train N models in turn, each from the last, in half of the time, as teachers",
        shown="set by the number of passes over the text", low=0, high=100,
    )  # fmt: skip
    batch_tokens: int | None = _length(
        None, "Tokens per step; a multiple of the context length", shown="from the preset", low=1
    )
    micro_batch: str = _length("auto", "Sequences per forward pass; gradients accumulate to the batch", metavar="N")
    lr: float | None = _optim(
        None, "Peak learning rate",
        shown="from the preset; with --init half (AdamW: a fifth), with --lora-rank twice that; with --preferences "
        "or --reward a twentieth of these", low=0,
    )  # fmt: skip
    warmup: int | None = _optim(None, "Steps of linear warmup", shown="5% of the steps, at most 2,000", low=0)
    optimizer: Optimizer | None = _optim(
        None, "muon: for the matrices in blocks, with AdamW for the rest; adamw: for all",
        shown="muon; adamw with --lora-rank, and with --init from 100 million parameters",
    )  # fmt: skip
    schedule: Literal["linear", "cosine", "constant"] = _optim(
        "linear", "After warmup: constant, then linear decay to 0; cosine decay to 10%; or constant"
    )
    decay: int | None = _optim(None, "Steps of linear decay", shown="half of the steps", low=0)
    weight_decay: float | None = _optim(
        None, "Weight decay of matrices; doubled for embeddings with Muon if above 0.1",
        shown="set by the number of passes over the text; 0 with --reward, 0.1 with --init, else 0.3 with teachers",
        low=0,
    )  # fmt: skip
    clip: float = _optim(1.0, "Clip gradients to this norm; 0: off", low=0)
    eval_every: int | None = _log(None, "Steps between evaluations on held-out text", shown="5% of the steps", low=1)
    patience: int | None = _log(
        None, "Stop after N evaluations without improvement; 0: never",
        shown="with --pairs, --chat, --preferences or --reward, a quarter of the run; else 0", low=0,
    )  # fmt: skip
    save_every: int | None = _log(
        None, "Steps between checkpoints; the best one is always saved", shown="same as --eval-every", low=1
    )
    keep: int = _log(2, "Latest checkpoints to keep for --resume; the best weights are always kept", low=1)
    sample_every: int | None = _log(
        None, "Steps between printed samples; 0: none", shown="a quarter of the steps", low=0
    )
    log: Literal["none", "tensorboard"] = _log("none", "Also log to TensorBoard, in the run's folder")
    device: Device = _machine("auto", "Device; auto: CUDA, else MPS, else the CPU", level="basic")
    nproc: int = _machine(
        1, "Data-parallel processes on this machine, one per GPU; for several machines, torchrun", low=1, high=1024
    )
    threads: int | None = _machine(
        None, "CPU threads per process; overrides OMP_NUM_THREADS", shown="one per core", low=1, high=MAX_THREADS
    )
    shard: Literal["none", "full"] = _machine(
        "none", "full: shard weights, gradients and optimizer state across processes"
    )
    recompute: bool = _machine(False, "Recompute activations in the backward pass to save memory")
    dtype: Dtype = _machine("auto", "Dtype of matrix products (weights stay float32); auto: bfloat16 if it is fast")
    compile: Compile = _machine("auto", "Compile steps; auto: on GPUs, and on a CPU for small models in long runs")

    def __post_init__(self) -> None:
        object.__setattr__(self, "micro_batch", str(self.micro_batch))  # TOML and Python callers can pass a number.
        super().__post_init__()
        if self.preset != "auto":
            find_preset(self.preset)
        for first, second, purpose in self.EXCLUSIVE:
            if getattr(self, first) is not None and getattr(self, second) is not None:
                names = f"--{first} and --{second}".replace("_", "-")
                raise UserError(f"{names} both {purpose}", "give one of them")
        if self.arch == "modern" and self.positions not in (None, "rotary"):
            raise UserError(f"--positions {self.positions} contradicts --arch modern", "it uses rotary positions")
        self._check_examples()
        self._check_adapters()

    @property
    def has_examples(self) -> bool:
        """Whether TEXT contains pairs, conversations, preferences or prompts instead of running text."""
        return bool(self._example_options)

    @property
    def _example_options(self) -> list[str]:
        return [
            f"--{name}"
            for name in ("pairs", "chat", "preferences", "reward")
            if getattr(self, name) not in (None, False)
        ]

    def _check_examples(self) -> None:
        options = self._example_options
        others = {
            "init": self.init is not None and bool(self.teachers),
            "teachers": bool(self.teachers),
            "compile on": self.compile == "on" and (self.preferences or self.reward is not None),
            "shard full": self.shard == "full" and self.reward is not None,
        }
        options += [f"--{name}" for name, is_given in others.items() if is_given]
        if len(options) > 1:
            raise UserError(f"{options[-1]} cannot be combined with {options[0]}", "leave one of them out")
        if (self.preferences or self.reward is not None) and self.init is None:
            raise UserError(f"{options[0]} needs --init", "it trains the model that answers prompts: --init MODEL")
        for name, owner in (("beta", "preferences"), ("group", "reward"), ("answer_tokens", "reward")):
            if getattr(self, name) is not None and getattr(self, owner) in (None, False):
                raise UserError(f"--{name.replace('_', '-')} needs --{owner}", "leave it out")
        if self.beta == 0:
            raise UserError("beta is 0; it must be more than 0", "a common value is 0.1")

    def _check_adapters(self) -> None:
        if self.lora_rank is not None and self.init is None:
            raise UserError("--lora-rank needs --init", "an adapter needs a base model: --init CHECKPOINT")
        if self.lora_rank is not None and self.shard == "full":
            message = "--shard full cannot be combined with --lora-rank"
            raise UserError(message, "leave it out: adapters do not support sharded weights")
        for name in ("lora_alpha", "lora_targets", "base_dtype"):
            if self.lora_rank is None and getattr(self, name) not in (None, False):
                raise UserError(f"--{name.replace('_', '-')} needs --lora-rank", "a common value is 8: --lora-rank 8")
        known_targets = (*LORA_GROUPS, *LORA_ROLES)
        for target in ("all" if self.lora_targets is None else self.lora_targets).split(","):
            if target not in known_targets:
                raise UserError(f'lora-targets: there is no "{target}"', did_you_mean(target, known_targets))

    def new_model(self, preset: GPTConfig, vocab_size: int, block_size: int) -> GPTConfig:
        """Returns a new model's shape: the preset's, overridden by the given options."""
        options = {field.name: getattr(self, field.name, None) for field in fields(GPTConfig)}
        defaults = {"dropout": 0.0, **(ARCHITECTURES[self.arch] if self.arch else {})}
        overrides = defaults | {name: value for name, value in options.items() if value is not None}
        return replace(preset, **overrides | {"vocab_size": vocab_size, "block_size": block_size})
