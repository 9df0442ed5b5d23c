"""Every setting in one place: its name, type, default, bounds and line of help.

``GPTConfig`` is a model's shape; ``TrainConfig`` and others are a user's options (``SampleConfig`` lives in
`gpt.sample_config`). The command line makes its options from these dataclasses, ``--config`` and ``--print-config``
read and write them as TOML (`gpt.settings`). Nothing here imports torch.
"""

import codecs
from dataclasses import dataclass, fields, replace
from typing import ClassVar, Literal, get_args

from gpt.errors import UserError, did_you_mean
from gpt.settings import check_options, option

Arch = Literal["gpt2", "modern"]
Positions = Literal["learned", "sinusoidal", "rotary"]
Activation = Literal["gelu", "relu2"]
Device = Literal["auto", "cpu", "cuda", "mps"]
DEVICE = r"(cpu|mps|cuda)(:\d{1,3})?"  # a regular expression: one that was picked
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Compile = Literal["auto", "on", "off"]
Optimizer = Literal["muon", "adamw"]

MOST_THREADS = 4096
# Far above GPT-3's 12,288 × 96: a number from a file beyond these is damage or malice, not a model.
LIMITS = {"vocab_size": 2**24, "block_size": 2**24, "n_layer": 2**14, "n_head": 2**14, "n_embd": 2**20}


@dataclass(frozen=True)
class Architecture:
    """Properties of an architecture's blocks, beside their shape."""

    biases: bool  # of the linear maps
    qk_norm: bool  # whether queries and keys are normalized before they meet
    activation: Activation  # inside the MLP
    positions: Positions  # of a new model, if nothing is said


# What the name of an architecture means; nothing else asks for the name.
ARCHITECTURES: dict[Arch, Architecture] = {
    "gpt2": Architecture(biases=True, qk_norm=False, activation="gelu", positions="learned"),
    "modern": Architecture(biases=False, qk_norm=True, activation="relu2", positions="rotary"),
}


@dataclass(frozen=True)
class GPTConfig:
    """The shape of a decoder, and what its blocks compute. Raises `UserError` for a shape that cannot be built."""

    vocab_size: int  # V: ids the model knows, end-of-text included
    block_size: int  # T: the longest context, in tokens
    n_layer: int  # blocks in the stack
    n_head: int  # attention heads a block; each is n_embd / n_head wide
    n_embd: int  # C: width of the residual stream; the MLP is 4 times as wide
    dropout: float = 0.0  # on embeddings, attention patterns and residual branches, in training only
    positions: Positions = "learned"  # a trained table, the fixed sine/cosine table, or rotation of queries and keys
    layer_norm_epsilon: float = 1e-5  # added to the variance in every LayerNorm
    arch: Arch = "gpt2"  # or "modern": normalized queries and keys, ReLU² in the MLP, no biases

    def __post_init__(self) -> None:
        for name, limit in LIMITS.items():
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= limit:
                raise UserError(f"{name} is {value!r}; it must be a whole number from 1 to {limit:,}")
        if self.n_embd % self.n_head:
            raise UserError(
                f"n_embd {self.n_embd} is not divisible by n_head {self.n_head}",
                f"heads share the width evenly; with {self.n_head} heads take n_embd "
                f"{max(1, round(self.n_embd / self.n_head)) * self.n_head}",
            )
        for name, low, high in (("dropout", 0.0, 0.99), ("layer_norm_epsilon", 1e-12, 1.0)):
            value = getattr(self, name)
            if type(value) not in (int, float) or not low <= value <= high:
                raise UserError(f"{name} is {value!r}; it must lie between {low:g} and {high:g}")
        for name, known in (("positions", get_args(Positions)), ("arch", get_args(Arch))):
            if getattr(self, name) not in known:
                raise UserError(
                    f'unknown {name} "{getattr(self, name)}"', did_you_mean(str(getattr(self, name)), known)
                )
        paired = {"sinusoidal": ("n_embd", self.n_embd), "rotary": ("width of a head", self.head_size)}
        what, width = paired.get(self.positions, ("", 0))
        if width % 2:
            raise UserError(f"{self.positions} positions need an even {what}, not {width}", "they come in pairs")

    @property
    def head_size(self) -> int:
        """D: the width of a head."""
        return self.n_embd // self.n_head

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values in a block: one for each of the queries'."""
        return self.n_head

    @property
    def mlp_width(self) -> int:
        """Width of the MLP's inside."""
        return 4 * self.n_embd

    @property
    def activation(self) -> Activation:
        """The MLP's nonlinearity."""
        return ARCHITECTURES[self.arch].activation

    @property
    def biases(self) -> bool:
        """Whether the linear maps of the blocks have biases. LayerNorms always do."""
        return ARCHITECTURES[self.arch].biases

    @property
    def qk_norm(self) -> bool:
        """Whether queries and keys are normalized before they meet."""
        return ARCHITECTURES[self.arch].qk_norm


@dataclass(frozen=True)
class Preset:
    """A named shape, with the batch and learning rate that it is usually trained with."""

    model: GPTConfig
    batch_tokens: int  # tokens a step
    lr: float  # peak learning rate of AdamW
    note: str = ""


def _preset(
    n_layer: int,
    n_head: int,
    n_embd: int,
    block_size: int,
    vocab_size: int,
    batch_tokens: int,
    lr: float,
    note: str = "",
) -> Preset:
    return Preset(GPTConfig(vocab_size, block_size, n_layer, n_head, n_embd), batch_tokens, lr, note)


GPT2_VOCAB = 50_257
_XL = "Table 2.1 of the GPT-3 paper gives 24 heads of 128 in a width of 2,048; 16 heads give the paper's total"
_13B = "Table 2.1 of the GPT-3 paper gives a width of 5,140 for 40 heads of 128; 5,120 gives the paper's total"

# GPT-2: Radford et al. 2019, table 2. GPT-3: Brown et al. 2020, table 2.1 (shape, batch in tokens, learning rate). The
# paper of GPT-2 gives no batch and no rate for its sizes; they have those of the GPT-3 model nearest in size.
PRESETS: dict[str, Preset] = {
    "nano": _preset(4, 4, 128, 64, 1024, 1024, 4e-3, "for any text, in minutes on a laptop"),
    "micro": _preset(4, 4, 256, 128, 2048, 2048, 2e-3, "for a book, given more time on a laptop"),
    "mini": _preset(6, 6, 384, 256, 4096, 8192, 1e-3, "for tens of megabytes, or a small GPU"),
    "small": _preset(8, 8, 512, 512, 8192, 65_536, 1e-3, "for hundreds of megabytes, on a GPU"),
    "gpt2": _preset(12, 12, 768, 1024, GPT2_VOCAB, 524_288, 6e-4),
    "gpt2-medium": _preset(24, 16, 1024, 1024, GPT2_VOCAB, 524_288, 3e-4),
    "gpt2-large": _preset(36, 20, 1280, 1024, GPT2_VOCAB, 524_288, 2.5e-4),
    "gpt2-xl": _preset(48, 25, 1600, 1024, GPT2_VOCAB, 1_048_576, 2e-4),
    "gpt3-125m": _preset(12, 12, 768, 2048, GPT2_VOCAB, 524_288, 6e-4),
    "gpt3-350m": _preset(24, 16, 1024, 2048, GPT2_VOCAB, 524_288, 3e-4),
    "gpt3-760m": _preset(24, 16, 1536, 2048, GPT2_VOCAB, 524_288, 2.5e-4),
    "gpt3-1.3b": _preset(24, 16, 2048, 2048, GPT2_VOCAB, 1_048_576, 2e-4, _XL),
    "gpt3-2.7b": _preset(32, 32, 2560, 2048, GPT2_VOCAB, 1_048_576, 1.6e-4),
    "gpt3-6.7b": _preset(32, 32, 4096, 2048, GPT2_VOCAB, 2_097_152, 1.2e-4),
    "gpt3-13b": _preset(40, 40, 5120, 2048, GPT2_VOCAB, 2_097_152, 1e-4, _13B),
    "gpt3-175b": _preset(96, 96, 12288, 2048, GPT2_VOCAB, 3_145_728, 6e-5),
}


def find_preset(name: str) -> Preset:
    """The preset called ``name``; `UserError` with the nearest name where there is none."""
    if name not in PRESETS:
        raise UserError(f'there is no preset "{name}"', did_you_mean(name, PRESETS))
    return PRESETS[name]


# The panels in which options are listed, in this order.
_RUN, _MODEL, _TUNE, _DATA, _READ, _LENGTH, _OPTIM, _LOG, _MACHINE = (
    "Run", "Model", "Fine-tuning", "Text and tokens", "How TEXT is read", "Length and batch", "Optimizer",
    "Along the way", "Machine",
)  # fmt: skip
PANELS = (
    _RUN, _MODEL, _TUNE, _DATA, _READ, _LENGTH, _OPTIM, _LOG, "Text", "Choice of the next token", "Beam search",
    "What it costs", "Devices", "How a step is computed", _MACHINE, "Output",
)  # fmt: skip


@dataclass(frozen=True)
class ReadConfig:
    """Options for reading files as documents."""

    field: str = option(
        "text", "The column or key that holds the text in .jsonl, .csv, .tsv and .parquet.", panel=_READ
    )
    split_on: str | None = option(
        None, "A line that separates the documents of a plain text; without it a file is one document.",
        panel=_READ, shown="none",
    )  # fmt: skip
    encoding: str = option("utf-8", "Of plain text, JSON lines and CSV.", panel=_READ)
    errors: Literal["strict", "replace"] = option(
        "strict", "Bytes that are not of that encoding: strict stops, replace writes U+FFFD and counts.", panel=_READ
    )
    skip_bad: bool = option(
        False, "Leave out files, lines and rows that cannot be read, and count them, instead of stopping.", panel=_READ
    )

    def __post_init__(self) -> None:
        check_options(self)
        try:
            codecs.lookup(self.encoding)
        except (LookupError, ValueError):  # ValueError: a name that is no text, or has a zero byte
            raise UserError(f'there is no encoding "{self.encoding}"', "utf-8, latin-1, cp1252, utf-16 …") from None


@dataclass(frozen=True)
class LearnConfig(ReadConfig):
    """Options for learning a vocabulary from text."""

    vocab_size: int | None = option(
        None, "Ids of the learnt vocabulary, special tokens included.",
        panel=_DATA, shown="by the text's size", low=257, high=2**24,
    )  # fmt: skip
    sample_bytes: int = option(
        1_000_000_000, "The vocabulary is learnt from so much text at most, spread over the whole of it.",
        panel=_DATA, low=1, high=2**31 - 1,
    )  # fmt: skip


@dataclass(frozen=True)
class TextConfig(LearnConfig):
    """Options for turning text into ids to train on and ids held out, shared by ``gpt tokenize`` and ``gpt train``."""

    tokenizer: str = option(
        "auto", "auto: a byte-level BPE learnt from the text; bytes: no merging; gpt2: the 50,257 tokens of GPT-2; "
        "another of tiktoken's, such as cl100k_base; or the path of a tokenizer, a run or a folder of transformers.",
        panel=_DATA,
    )  # fmt: skip
    val_fraction: float = option(
        0.1, "Share held out, never trained on: the end; from 200 documents on, by hash.", panel=_DATA, low=0
    )
    val_text: str | None = option(
        None, "A text to hold out instead; then all of TEXT is trained on.", panel=_DATA, shown="none"
    )
    jobs: int | None = option(
        None, "Processes that tokenize; the ids are the same for any number.",
        panel=_MACHINE, shown="one a core", low=1, high=1024,
    )  # fmt: skip
    seed: int = option(
        1337, "Same seed, same machine: the same split, and the same weights bit for bit on the CPU.", panel=_RUN, low=0
    )

    def __post_init__(self) -> None:
        if self.val_text is not None:  # a path, from Python
            object.__setattr__(self, "val_text", str(self.val_text))
        super().__post_init__()
        if self.val_fraction >= 1:
            raise UserError(f"val-fraction is {self.val_fraction}; it must lie in [0, 1)")
        if self.tokenizer != "auto" and self.vocab_size is not None:
            raise UserError(f"--vocab-size goes with --tokenizer auto; {self.tokenizer} has a size of its own")


@dataclass(frozen=True)
class TokenizeConfig(TextConfig):
    """Options of ``gpt tokenize``."""

    out: str | None = option(
        None, "The folder to make; there must be none yet.", panel=_RUN, flags=("-o",), shown="none"
    )
    resume: bool = option(False, "Resume a folder that was not finished.", panel=_RUN)
    part: str | None = option(
        None, "I/N: the I-th of N shares of the sources, to be joined by `gpt data merge`.", panel=_RUN, shown="all"
    )

    def __post_init__(self) -> None:
        if self.out is not None:
            object.__setattr__(self, "out", str(self.out))
        super().__post_init__()
        self.share  # noqa: B018

    @property
    def share(self) -> tuple[int, int] | None:
        """The part, counted from 1, and the number of parts."""
        if self.part is None:
            return None
        words = self.part.split("/")
        if len(words) == 2 and all(word.isascii() and word.isdigit() for word in words):
            i, n = map(int, words)
            if 1 <= i <= n <= 100_000:
                return i, n
        raise UserError(f'part is "{self.part}"; it must be I/N, from 1/N to N/N', "the second of four: --part 2/4")


@dataclass(frozen=True)
class TrainConfig(TextConfig):
    """Options of ``gpt train``. ``None`` means: chosen from the text's size, the preset or the device."""

    EXCLUSIVE: ClassVar[tuple[tuple[str, str, str], ...]] = (
        ("steps", "epochs", "say how long to train"),
        ("steps", "minutes", "say how long to train"),
        ("epochs", "minutes", "say how long to train"),
        ("warmup", "warmup_tokens", "say how long to warm up"),
        ("minutes", "batch_ramp", "say how long to train: a growing batch makes steps longer"),
    )

    out: str | None = option(
        None, "The run folder. A taken name gets -2, -3 …: nothing is overwritten.",
        panel=_RUN, flags=("-o",), shown="runs/<name of the text>",
    )  # fmt: skip
    preset: str = option(
        "auto", "A size of `gpt params --list`; auto: by the text's size and the device.", panel=_MODEL
    )
    arch: Arch = option(
        "gpt2", "gpt2: exactly GPT-2's and GPT-3's; modern: what reaches a lower loss in the same time.", panel=_MODEL
    )
    positions: Positions | None = option(
        None, "A trained table, the sine/cosine table of the Transformer paper, or rotation of queries and keys.",
        panel=_MODEL, shown="learned; with --arch modern rotary",
    )  # fmt: skip
    n_layer: int | None = option(None, "Blocks.", panel=_MODEL, shown="by preset", low=1)
    n_head: int | None = option(None, "Attention heads a block.", panel=_MODEL, shown="by preset", low=1)
    n_embd: int | None = option(None, "Width; divisible by --n-head.", panel=_MODEL, shown="by preset", low=1)
    block_size: int | None = option(None, "Context in tokens.", panel=_MODEL, shown="by preset", low=1)
    dropout: float | None = option(
        None,
        "Share of activations dropped in training.",
        panel=_MODEL,
        shown="by how often the text is read; with --init 0",
        low=0,
    )
    init: str | None = option(
        None, "Start from the weights and tokenizer of a model: a run, RUN:latest, a checkpoint, a GPT-2 folder of "
        "transformers, or hf:NAME from the hub. Shape and vocabulary are its own.",
        panel=_TUNE, shown="none",
    )  # fmt: skip
    pairs: bool = option(
        False, 'TEXT is JSON lines of {"prompt": …, "completion": …}; the loss counts completions alone.', panel=_TUNE
    )
    lora_rank: int | None = option(
        None, "With --init: train low-rank adapters of so many dimensions, and leave the weights as they are.",
        panel=_TUNE, shown="off", low=1, high=2**20,
    )  # fmt: skip
    lora_alpha: float | None = option(
        None, "With --lora-rank: adapters are scaled by alpha / rank.", panel=_TUNE, shown="twice the rank", low=0
    )
    merge_lora: bool = option(
        False, "With --lora-rank: at the end also save the whole model, merged, in RUN/merged.", panel=_TUNE
    )
    steps: int | None = option(None, "Optimizer steps.", panel=_LENGTH, shown="by the text's size", low=1)
    epochs: float | None = option(
        None, "Length as passes over the text, instead of --steps.", panel=_LENGTH, shown="by the text's size", low=0
    )
    minutes: float | None = option(
        None, "Length as minutes of the whole command, from its start to the last checkpoint, instead of --steps.",
        panel=_LENGTH, shown="none", low=0, high=10**7,
    )  # fmt: skip
    batch_tokens: int | None = option(
        None, "Tokens a step: a multiple of the context.", panel=_LENGTH, shown="by preset", low=1
    )
    micro_batch: str = option(
        "auto", "Sequences computed at once; the rest of the batch is accumulated.", panel=_LENGTH
    )
    batch_ramp: int | None = option(
        None, "The batch grows to --batch-tokens over so many tokens, from 32,768 or, where that is less, a sixteenth "
        "of it (GPT-3's recipe: 4 to 12 billion).", panel=_LENGTH, shown="off", low=1,
    )  # fmt: skip
    lr: float | None = option(
        None, "Peak learning rate.", panel=_OPTIM,
        shown="by preset; with --init half of it (AdamW: a fifth), with --lora-rank twice", low=0,
    )  # fmt: skip
    warmup: int | None = option(
        None, "Steps of linear warm-up.", panel=_OPTIM, shown="a twentieth of the steps, at most 2,000", low=0
    )
    warmup_tokens: int | None = option(
        None, "Warm-up as tokens, instead of --warmup (GPT-3's recipe: 375,000,000).", panel=_OPTIM, shown="none", low=0
    )
    optimizer: Optimizer | None = option(
        None, "muon: for the matrices of the blocks, with AdamW for the rest; adamw: for all.", panel=_OPTIM,
        shown="muon; adamw for adapters, and with --init from 100 million parameters on",
    )  # fmt: skip
    schedule: Literal["linear", "cosine", "constant"] = option(
        "linear", "After warm-up: constant and then a line down to 0, a cosine down to a tenth, or constant.",
        panel=_OPTIM,
    )  # fmt: skip
    decay: int | None = option(
        None, "Steps of the linear schedule's way down.", panel=_OPTIM, shown="half of the steps", low=0
    )
    weight_decay: float = option(0.1, "Decay of the matrices; biases and LayerNorms have none.", panel=_OPTIM, low=0)
    clip: float = option(1.0, "Gradient norm above which gradients are scaled down; 0: off.", panel=_OPTIM, low=0)
    eval_every: int | None = option(
        None, "Steps between evaluations on held-out text.", panel=_LOG, shown="a twentieth of the steps", low=1
    )
    patience: int = option(
        0, "Stop after so many evaluations in a row without a better loss; 0: never.", panel=_LOG, low=0
    )
    save_every: int | None = option(
        None, "Steps between checkpoints; a better held-out loss is always saved.",
        panel=_LOG, shown="as --eval-every", low=1,
    )  # fmt: skip
    keep: int = option(
        2,
        "Newest checkpoints to keep, with what --resume needs; the best one's weights always stay.",
        panel=_LOG,
        low=1,
    )
    sample_every: int | None = option(
        None, "Steps between sampled lines; 0: none.", panel=_LOG, shown="a quarter of the steps", low=0
    )
    log: str = option("none", "Beside metrics.jsonl: tensorboard, wandb, or both with a comma between.", panel=_LOG)
    device: Device = option("auto", "Where to compute; auto: CUDA, else MPS, else the CPU.", panel=_MACHINE)
    nproc: int = option(
        1, "Processes on this machine, which share each batch; a GPU each. On more machines: torchrun.",
        panel=_MACHINE, low=1, high=1024,
    )  # fmt: skip
    threads: int | None = option(
        None, "Threads that compute on a CPU, in each process; beats OMP_NUM_THREADS. Another number: equal up "
        "to rounding.",
        panel=_MACHINE, shown="one a core", low=1, high=MOST_THREADS,
    )  # fmt: skip
    shard: Literal["none", "full"] = option(
        "none", "full: the processes divide weights, gradients and the optimizer's memory; none: each has all.",
        panel=_MACHINE,
    )  # fmt: skip
    tensor: int = option(
        1, "Processes that compute each sequence together, some heads each; divides --nproc and the heads.",
        panel=_MACHINE, low=1, high=1024,
    )  # fmt: skip
    recompute: bool = option(
        False, "Compute the activations of each block anew for the gradient instead of keeping them.", panel=_MACHINE
    )
    dtype: Dtype = option(
        "auto", "Of the matrix products; weights stay float32. auto: bfloat16 where the device is made for it.",
        panel=_MACHINE,
    )  # fmt: skip
    compile: Compile = option(
        "auto", "torch.compile for blocks and loss; auto: on a GPU, where the run is long enough to gain by it.",
        panel=_MACHINE,
    )  # fmt: skip

    def __post_init__(self) -> None:
        object.__setattr__(self, "micro_batch", str(self.micro_batch))  # a number in TOML and from Python
        for name in ("out", "init"):
            if getattr(self, name) is not None:  # a path, from Python
                object.__setattr__(self, name, str(getattr(self, name)))
        super().__post_init__()
        if self.preset != "auto":
            find_preset(self.preset)
        for one, other, what in self.EXCLUSIVE:
            if getattr(self, one) is not None and getattr(self, other) is not None:
                names = f"--{one} and --{other}".replace("_", "-")
                raise UserError(f"{names} both {what}", "give one of them")
        if self.pairs and self.batch_ramp is not None:
            raise UserError("--batch-ramp is for running text, not for --pairs", "leave one of them out")
        if self.lora_rank is not None and self.init is None:
            raise UserError("--lora-rank needs --init", "adapters are made for a model: --init CHECKPOINT")
        if self.lora_rank is not None and (self.shard == "full" or self.tensor > 1):
            raise UserError(
                f"{'--shard full' if self.shard == 'full' else '--tensor'} is not for --lora-rank",
                "adapters are few: leave it out, and each process has all weights",
            )
        if self.lora_rank is None and (self.lora_alpha is not None or self.merge_lora):
            name = "--merge-lora" if self.merge_lora else "--lora-alpha"
            raise UserError(f"{name} needs --lora-rank", "8 is usual: --lora-rank 8")

    def new_model(self, preset: GPTConfig, vocab_size: int, block_size: int) -> GPTConfig:
        """The shape of a new model: the preset's, but for what was asked for."""
        asked = {each.name: getattr(self, each.name, None) for each in fields(GPTConfig)}
        usual = {"positions": ARCHITECTURES[self.arch].positions, "dropout": 0.0}
        given = usual | {name: value for name, value in asked.items() if value is not None}
        return replace(preset, **given | {"vocab_size": vocab_size, "block_size": block_size})
