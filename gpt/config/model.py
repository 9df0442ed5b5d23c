"""The shape of a model, and the presets. Imports no torch."""

from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Literal

from gpt.config.settings import bounded, check_options
from gpt.system.errors import UserError, did_you_mean

Arch = Literal["gpt2", "modern"]
Positions = Literal["learned", "rotary"]
Norm = Literal["layernorm", "rmsnorm"]
Mlp = Literal["gelu", "swiglu"]
Biases = Literal["all", "qkv", "none"]
Layout = Literal["gpt2", "llama", "mistral", "qwen2", "qwen3", "gpt"]

MAX_VOCAB_SIZE = 2**24  # Maximum vocabulary size.
# The default width of a gated MLP is a multiple of 256 in models of this width or wider, because that is faster on
# GPUs. In narrower models, the default MLP width is a multiple of 64.
WIDE_MODEL = 512


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1's scaling of RoPE frequencies for a longer context. Frequencies with fewer than ``low`` turns in the
    ``original`` context are divided by ``factor``. Frequencies with more than ``high`` turns are unchanged. Frequencies
    in between are interpolated."""

    factor: float = bounded(1, 10_000)
    low: float = bounded(1, 10_000)
    high: float = bounded(1, 10_000)
    original: int = bounded(1, 2**24)  # context length in positions

    def __post_init__(self) -> None:
        check_options(self)
        if self.low >= self.high:
            raise UserError(f"rope_scaling: low is {self.low:g} and high is {self.high:g}; high must be greater")


@dataclass(frozen=True)
class GPTConfig:
    """A decoder's shape and properties, by default GPT-2's. Raises `UserError` for an impossible shape.

    Bounds are far above GPT-3's width of 12,288 and 96 layers: a file with larger numbers is damaged or malicious.
    """

    vocab_size: int = bounded(1, MAX_VOCAB_SIZE)  # V, vocabulary size, including end-of-text
    block_size: int = bounded(1, 2**24)  # T, context length in tokens
    n_layer: int = bounded(1, 2**14)  # number of blocks
    n_head: int = bounded(1, 2**14)  # attention heads per block
    n_embd: int = bounded(1, 2**20)  # C, width of the residual stream
    # Dropout rate of embeddings, attention weights and residual branches in training.
    dropout: float = bounded(0, 0.99, 0.0)
    positions: Positions = "learned"  # learned table, or rotation of queries and keys (RoPE)
    layer_norm_epsilon: float = bounded(1e-12, 1, 1e-5)  # ε in every norm
    norm: Norm = "layernorm"  # LayerNorm, or RMSNorm (Zhang and Sennrich 2019)
    mlp: Mlp = "gelu"  # GELU, or SwiGLU with a gate (Shazeer 2020)
    n_inner: int | None = bounded(1, 2**22, None)  # hidden width of the MLP, by default 4 C, or about 8/3 C with a gate
    biases: Biases = "all"  # linear maps with biases: all, only queries, keys and values, or none
    n_kv_head: int | None = bounded(1, 2**14, None)  # key/value heads (grouped-query attention), by default n_head
    head_dim: int | None = bounded(1, 2**16, None)  # width of a head, by default n_embd / n_head
    qk_norm: bool = False  # RMSNorm of queries and keys before attention
    rope_base: float = bounded(1, 10**12, 10_000.0)  # base of the RoPE frequencies
    rope_scaling: RopeScaling | None = None
    window: int | None = bounded(1, 2**24, None)  # sliding window in tokens, or None for full attention in all layers
    window_layers: tuple[int, ...] | None = None  # layers with the window, by default 1, 3, 5 … as in GPT-3
    tied: bool = True  # whether the LM head shares the embedding's weights

    def __post_init__(self) -> None:
        layers: Any = self.window_layers
        # JSON has no tuples.
        object.__setattr__(self, "window_layers", tuple(layers) if isinstance(layers, list) else layers)
        check_options(self)
        if self.head_dim is None and self.n_embd % self.n_head:
            raise UserError(
                f"n_embd {self.n_embd} is not divisible by n_head {self.n_head}",
                f"heads share the width evenly; with {self.n_head} heads use n_embd "
                f"{max(1, round(self.n_embd / self.n_head)) * self.n_head}",
            )
        if self.n_head % self.kv_heads:
            message = f"n_head {self.n_head} is not divisible by n_kv_head {self.n_kv_head}"
            raise UserError(message, "each key/value head is shared by the same number of query heads")
        self._check_positions()
        self._check_window()
        self._leave_out_defaults()

    def _leave_out_defaults(self) -> None:
        """Sets fields with default values to None, so a ``config.json`` that spells them out gives an equal config."""
        has_windows = any(self.windows)
        defaults = {
            "n_kv_head": self.n_head,
            "head_dim": self.n_embd / self.n_head,
            "n_inner": self._default_mlp_width(),
            "window": None if has_windows else self.window,
            "window_layers": tuple(range(1, self.n_layer, 2)) if has_windows else self.window_layers,
        }
        for name, value in defaults.items():
            if getattr(self, name) == value:
                object.__setattr__(self, name, None)

    def _check_positions(self) -> None:
        if self.positions == "rotary" and self.head_size % 2:
            message = f"rotary positions need an even width of a head, not {self.head_size}"
            raise UserError(message, "dimensions are paired")
        if self.norm == "rmsnorm" and self.positions != "rotary":
            message = f"{self.positions} positions do not work with --arch modern, which uses rotary positions"
            raise UserError(message, "leave out --positions, or use --arch gpt2")

    def _check_window(self) -> None:
        layers = self.window_layers
        valid = all(type(layer) is int and 0 <= layer < self.n_layer for layer in layers or ())
        if layers is not None and (self.window is None or not valid):
            raise UserError(f"window_layers is {layers!r:.80}; with a window, list layers below {self.n_layer}")

    @classmethod
    def of(cls, arch: Arch, *shape: Any, **properties: Any) -> "GPTConfig":
        """Returns a config with an architecture's properties, overridden by ``properties``."""
        return cls(*shape, **ARCHITECTURES[arch] | properties)

    @property
    def head_size(self) -> int:
        """D, the width of a head."""
        return self.head_dim or self.n_embd // self.n_head

    @property
    def kv_heads(self) -> int:
        """Key/value heads per block."""
        return self.n_kv_head or self.n_head

    @property
    def mlp_width(self) -> int:
        """Hidden width of the MLP."""
        return self.n_inner or self._default_mlp_width()

    def _default_mlp_width(self) -> int:
        """Returns 4 C, or about 8/3 C with a gate, for a similar number of parameters."""
        if self.mlp == "gelu":
            return 4 * self.n_embd
        unit = 256 if self.n_embd >= WIDE_MODEL else 64
        return max(1, round(8 * self.n_embd / 3 / unit)) * unit

    @cached_property
    def windows(self) -> tuple[int | None, ...]:
        """The sliding window of each layer, or None for full attention."""
        windowed_layers = range(1, self.n_layer, 2) if self.window_layers is None else self.window_layers
        return tuple(self.window if layer in windowed_layers else None for layer in range(self.n_layer))

    @property
    def layout(self) -> Layout:
        """The Transformers family that computes the same model, or ``gpt`` if none does. Decides a checkpoint's tensor
        names and ``config.json``."""
        any_window, all_windows = any(self.windows), all(self.windows)
        if (self.norm, self.mlp, self.biases, self.qk_norm) == ("layernorm", "gelu", "all", False):
            standard_heads = self.kv_heads == self.n_head and self.n_head * self.head_size == self.n_embd
            return "gpt2" if standard_heads and self.positions != "rotary" and not any_window else "gpt"
        if (self.norm, self.mlp) != ("rmsnorm", "swiglu"):
            return "gpt"
        match self.qk_norm, self.biases:
            case True, "none":
                return "qwen3"
            case False, "qkv":
                return "qwen2"
            case False, "none" if all_windows or not any_window:
                # Transformers requires a llama's width to be divisible by its heads.
                return "mistral" if any_window or self.n_embd % self.n_head else "llama"
        return "gpt"


# Properties of each ``--arch``.
ARCHITECTURES: dict[Arch, dict[str, Any]] = {
    "gpt2": {
        "positions": "learned", "norm": "layernorm", "layer_norm_epsilon": 1e-5, "mlp": "gelu", "biases": "all",
        "qk_norm": False,
    },
    "modern": {  # Qwen3's properties
        "positions": "rotary", "norm": "rmsnorm", "layer_norm_epsilon": 1e-6, "mlp": "swiglu", "biases": "none",
        "qk_norm": True,
    },
}  # fmt: skip


@dataclass(frozen=True)
class Preset:
    """A named shape with a batch size and learning rate that suit it."""

    model: GPTConfig
    batch_tokens: int  # tokens per step
    lr: float  # peak learning rate of AdamW
    note: str = ""


def _preset(
    arch: Arch, L: int, H: int, C: int, T: int, V: int, batch_tokens: int, lr: float, note: str = "", **properties: Any
) -> Preset:
    return Preset(GPTConfig.of(arch, V, T, L, H, C, **properties), batch_tokens, lr, note)


_gpt2, _modern = partial(_preset, "gpt2"), partial(_preset, "modern")
_llama = partial(_modern, qk_norm=False)
GPT2_VOCAB = 50_257
_XL = "Table 2.1 of the GPT-3 paper gives 24 heads of 128 in a width of 2,048; 16 heads give the paper's total"
_13B = "Table 2.1 of the GPT-3 paper gives a width of 5,140 for 40 heads of 128; 5,120 gives the paper's total"

# Shapes of GPT-2 are from Radford et al. 2019, table 2. Shapes, batch sizes and learning rates of GPT-3 are from Brown
# et al. 2020, table 2.1; GPT-2 uses the batch and learning rate of the nearest GPT-3 model.
PRESETS: dict[str, Preset] = {
    "pico": _modern(2, 4, 128, 64, 1024, 1024, 4e-3, "for any text, in a minute on a laptop"),
    "nano": _modern(4, 4, 128, 128, 1024, 1024, 4e-3, "for any text, in minutes on a laptop"),
    "tiny": _modern(4, 6, 192, 128, 2048, 2048, 3.5e-3, "for any text, given some minutes more"),
    "micro": _modern(4, 4, 256, 128, 4096, 2048, 2e-3, "for a book, given more time on a laptop"),
    "mini": _modern(6, 6, 384, 256, 4096, 8192, 1e-3, "for tens of megabytes, or a small GPU"),
    "small": _modern(8, 8, 512, 512, 8192, 65_536, 1e-3, "for hundreds of megabytes, on a GPU"),
    "gpt2": _gpt2(12, 12, 768, 1024, GPT2_VOCAB, 524_288, 6e-4),
    "gpt2-medium": _gpt2(24, 16, 1024, 1024, GPT2_VOCAB, 524_288, 3e-4),
    "gpt2-large": _gpt2(36, 20, 1280, 1024, GPT2_VOCAB, 524_288, 2.5e-4),
    "gpt2-xl": _gpt2(48, 25, 1600, 1024, GPT2_VOCAB, 1_048_576, 2e-4),
    "gpt3-125m": _gpt2(12, 12, 768, 2048, GPT2_VOCAB, 524_288, 6e-4),
    "gpt3-350m": _gpt2(24, 16, 1024, 2048, GPT2_VOCAB, 524_288, 3e-4),
    "gpt3-760m": _gpt2(24, 16, 1536, 2048, GPT2_VOCAB, 524_288, 2.5e-4),
    "gpt3-1.3b": _gpt2(24, 16, 2048, 2048, GPT2_VOCAB, 1_048_576, 2e-4, _XL),
    "gpt3-2.7b": _gpt2(32, 32, 2560, 2048, GPT2_VOCAB, 1_048_576, 1.6e-4),
    "gpt3-6.7b": _gpt2(32, 32, 4096, 2048, GPT2_VOCAB, 2_097_152, 1.2e-4),
    "gpt3-13b": _gpt2(40, 40, 5120, 2048, GPT2_VOCAB, 2_097_152, 1e-4, _13B),
    "gpt3-175b": _gpt2(96, 96, 12288, 2048, GPT2_VOCAB, 3_145_728, 6e-5),
    # Shapes from the Hub's config.json, with batch and learning rate of the nearest GPT-3 model.
    "smollm2-135m": _llama(
        30, 9, 576, 8192, 49_152, 524_288, 6e-4, n_kv_head=3, n_inner=1536, rope_base=100_000.0,
        layer_norm_epsilon=1e-5,
    ),
    "qwen2.5-0.5b": _llama(
        24, 14, 896, 32_768, 151_936, 524_288, 2.5e-4, n_kv_head=2, n_inner=4864, rope_base=1e6, biases="qkv",
    ),
    "qwen3-0.6b": _modern(
        28, 16, 1024, 40_960, 151_936, 524_288, 2.5e-4, n_kv_head=8, head_dim=128, n_inner=3072, rope_base=1e6,
    ),
    "llama-3.2-1b": _llama(
        16, 32, 2048, 131_072, 128_256, 1_048_576, 2e-4, n_kv_head=8, n_inner=8192, rope_base=500_000.0,
        layer_norm_epsilon=1e-5, rope_scaling=RopeScaling(32.0, 1.0, 4.0, 8192),
    ),
    "mistral-7b": _llama(
        32, 32, 4096, 32_768, 32_000, 2_097_152, 1.2e-4, n_kv_head=8, n_inner=14_336, layer_norm_epsilon=1e-5,
        window=4096, window_layers=tuple(range(32)), tied=False,
    ),
}  # fmt: skip


def find_preset(name: str) -> Preset:
    """Returns the preset ``name``. Raises `UserError` for an unknown name, with a suggestion."""
    if name not in PRESETS:
        raise UserError(f'there is no preset "{name}"', did_you_mean(name, PRESETS))
    return PRESETS[name]
