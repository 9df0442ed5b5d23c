"""Every parameter of a decoder, and what its shape costs, by arithmetic alone: torch is not imported.

`parameters` is the one table of names and shapes, derived from a `GPTConfig`. Counts, memory, checkpoints, adapters,
tensor parallelism, the optimizers' groups and the GPT-3 table read it; a test compares it with the model that
`gpt.model.decoder` builds.
"""

import functools
import itertools
import math
from dataclasses import dataclass
from typing import Literal, get_args

from gpt.config import PRESETS, GPTConfig

Shape = tuple[int, ...]
Kind = Literal["embedding", "positions", "linear", "bias", "norm", "unembedding"]
SLACK = 64  # positions that a step of a windowed layer may append, and that may be taken back


@dataclass(frozen=True)
class Parameter:
    """A tensor of the decoder. One in the blocks stands for as many as there are blocks."""

    name: str  # in the model's state_dict; without its prefix, ``h.0.`` …, where it is in the blocks
    shape: Shape  # a linear map's weight is (out, in), as in torch
    kind: Kind
    in_blocks: bool = True
    split: int | None = None  # the axis that tensor-parallel ranks divide; None: each rank has all of it
    unit: int = 1  # rows or columns along ``split`` that stay together: a head's
    fused: tuple[int, ...] = ()  # rows of each of the matrices that lie below each other: query, key, value; gate, up
    matrices: tuple[str, ...] = ()  # its rows of the GPT-3 table; of fused ones each its own
    summed: bool = False  # whether a tensor-parallel rank has the gradient of its own heads' use alone
    trained: bool = True  # False for a fixed table of positions, which only checkpoints hold

    @property
    def numel(self) -> int:
        """Numbers in one of them."""
        return math.prod(self.shape)

    @property
    def is_matrix(self) -> bool:
        """Whether it is the weight of a linear map in a block: what Muon orthogonalizes, and what adapters change."""
        return self.kind == "linear"

    @property
    def is_decayed(self) -> bool:
        """Whether AdamW decays it: no bias and no LayerNorm."""
        return len(self.shape) > 1


@functools.lru_cache(maxsize=64)
def parameters(config: GPTConfig) -> tuple[Parameter, ...]:
    """The parameters of a decoder of this shape, in the model's order, those of the blocks once.

    A tied unembedding is the embedding and has none. The rows of the GPT-3 table: Value-Up and Value-Down are the
    head's factors of the value map, in the usual names W_V and W_O.
    """
    C, head, V = config.n_embd, config.head_size, config.vocab_size
    heads, hidden = config.n_head * head, config.mlp_width
    cached = config.kv_heads * head
    qkv, shares = (heads, cached, cached), ("Query", "Key", "Value-Up")
    gated, inside = config.mlp == "swiglu", ("Gate-Projection", "Up-Projection")
    ups = (hidden, hidden) if gated else ()
    some, every = config.biases != "none", config.biases == "all"
    found = [Parameter("wte.weight", (V, C), "embedding", in_blocks=False, matrices=("Embedding",))]
    if config.positions != "rotary":
        trained = config.positions == "learned"
        found.append(Parameter("wpe.weight", (config.block_size, C), "positions", in_blocks=False, trained=trained))
    found += [
        *_norm("ln_1", C, config),
        *_linear("attn.c_attn", sum(qkv), C, some, 0, head, qkv, shares),
        *([*_norm("attn.q_norm", head), *_norm("attn.k_norm", head)] if config.qk_norm else []),
        *_linear("attn.c_proj", C, heads, every, 1, head, matrices=("Value-Down",)),
        *_norm("ln_2", C, config),
        *_linear("mlp.c_fc", sum(ups) or hidden, C, every, 0, 1, ups, inside if gated else inside[1:]),
        *_linear("mlp.c_proj", C, hidden, every, 1, matrices=("Down-Projection",)),
        *_norm("ln_f", C, config, in_blocks=False),
    ]
    if not config.tied:
        found.append(Parameter("lm_head.weight", (V, C), "unembedding", in_blocks=False, matrices=("Unembedding",)))
    return tuple(found)


def _linear(
    name: str,
    outs: int,
    ins: int,
    bias: bool,
    split: int,
    unit: int = 1,
    fused: tuple[int, ...] = (),
    matrices: tuple[str, ...] = (),
) -> list[Parameter]:
    """The parameters of a linear map. A bias is divided as the rows are; where the columns are, it is not."""
    weight = Parameter(f"{name}.weight", (outs, ins), "linear", True, split, unit, fused, matrices)
    added = Parameter(f"{name}.bias", (outs,), "bias", True, None if split else 0, unit, fused)
    return [weight, added] if bias else [weight]


def _norm(name: str, width: int, config: GPTConfig | None = None, in_blocks: bool = True) -> list[Parameter]:
    """The weights of a norm, and the β of a LayerNorm; without a config it is an RMSNorm of queries or keys."""
    parts = ("weight", "bias") if config is not None and config.norm == "layernorm" else ("weight",)
    return [Parameter(f"{name}.{part}", (width,), "norm", in_blocks, summed=config is None) for part in parts]


def named_parameters(config: GPTConfig) -> dict[str, Parameter]:
    """Every parameter of every block by its whole name, in the model's order."""
    found: dict[str, Parameter] = {}
    for in_blocks, some in itertools.groupby(parameters(config), key=lambda p: p.in_blocks):
        together = list(some)
        for prefix in [f"h.{layer}." for layer in range(config.n_layer)] if in_blocks else [""]:
            found |= {prefix + p.name: p for p in together}
    return found


def counts(config: GPTConfig, ranks: int = 1) -> dict[Kind, int]:
    """Trained parameters by kind, on one of ``ranks`` that share each sequence (`gpt.parallel.tensor`)."""
    found: dict[Kind, int] = dict.fromkeys(get_args(Kind), 0)
    for p in parameters(config):
        copies = config.n_layer if p.in_blocks else 1
        found[p.kind] += p.trained * copies * p.numel // (1 if p.split is None else ranks)
    return found


@dataclass(frozen=True)
class Row:
    """A line of the GPT-3 table: a kind of matrix, its dimensions as the paper writes them, and its parameters."""

    matrix: str
    dimensions: str
    parameters: int


@dataclass(frozen=True)
class Breakdown:
    """The parameters of a shape by group. ``trainable = total_weights - tied + positions + biases + layer_norms``."""

    rows: list[Row]
    total_weights: int  # the sum of the rows, the unembedding counted even where it is the embedding
    tied: int  # what tying the unembedding to the embedding saves; 0 where it is not tied
    positions: int  # the trained table of positions; 0 for a fixed one
    biases: int  # of the linear layers
    layer_norms: int  # of every norm: γ and β of LayerNorms, γ of RMSNorms

    @property
    def trainable(self) -> int:
        """The parameters that an optimizer sees."""
        return self.total_weights - self.tied + self.positions + self.biases + self.layer_norms


def breakdown(config: GPTConfig) -> Breakdown:
    """The parameters of a decoder of this shape, in the rows of the GPT-3 table."""
    C, V, by_kind = config.n_embd, config.vocab_size, counts(config)
    embedding, unembedding = (
        Row(name, f"{a:,} × {b:,}", V * C) for name, a, b in (("Embedding", C, V), ("Unembedding", V, C))
    )
    rows = [row for p in parameters(config) if p.is_matrix for row in _rows(p, config.n_layer)]
    rows = [embedding, *rows, unembedding]
    return Breakdown(
        rows=rows,
        total_weights=sum(row.parameters for row in rows),
        tied=by_kind["embedding"] if config.tied else 0,
        positions=by_kind["positions"],
        biases=by_kind["bias"],
        layer_norms=by_kind["norm"],
    )


def _rows(p: Parameter, n_layer: int) -> list[Row]:
    """The rows of a block's matrix, of fused ones in the paper's order, which is that of the alphabet; an axis that
    heads divide is a head's, times the heads."""
    rows = []
    for matrix, outs in sorted(zip(p.matrices, p.fused or p.shape[:1], strict=True)):
        sides, times = [outs, p.shape[1]], f"{n_layer:,}"
        if p.unit > 1 and p.split is not None:
            times = f"{sides[p.split] // p.unit:,} × {times}"
            sides[p.split] = p.unit
        rows.append(Row(matrix, f"({sides[0]:,} × {sides[1]:,}) × {times}", outs * p.shape[1] * n_layer))
    return rows


def flops_per_token(config: GPTConfig, context: int, adapters: int = 0) -> int:
    """Floating-point operations that training needs for a token in sequences of ``context``: 6 N + 12·L·C·T.

    As in PaLM (Chowdhery et al. 2022, appendix B) and nanoGPT: each of the N parameters of a matrix product is
    multiplied and added once going forward and twice going back; scores and weighted sums of attention add 12·L·C·T,
    as if every position saw all T, of a windowed layer those in the window. N counts all parameters but the table of
    positions, which is only added; the embedding counts once, as the unembedding. What is computed anew, or masked out,
    does not change this number. With ``adapters``, as many parameters are trained and the rest is not: it needs no
    gradients of its own, 4 N.
    """
    n = multiplied(config)
    return (4 * n + 6 * adapters if adapters else 6 * n) + 12 * _scores(config, context)


def flops_sampled(config: GPTConfig, context: int) -> int:
    """Floating-point operations that computing one more position needs after ``context`` of them in the cache:
    2 N + 4·L·C·T, the forward pass's part of `flops_per_token`."""
    return 2 * multiplied(config) + 4 * _scores(config, context)


def multiplied(config: GPTConfig) -> int:
    """Parameters that a position is multiplied by: all but the table of positions, and an untied embedding."""
    own = counts(config)
    return sum(own.values()) - own["positions"] - (0 if config.tied else own["embedding"])


def _scores(config: GPTConfig, context: int) -> int:
    """Products of a query's and a key's number at the end of ``context``, in all heads and layers: L·C·T where every
    layer is dense and heads share the width."""
    return config.n_head * config.head_size * seen(config, context)


def seen(config: GPTConfig, context: int) -> int:
    """Positions that the last one of ``context`` sees, summed over the layers."""
    return sum(min(context, window or context) for window in config.windows)


def cache_columns(window: int | None, positions: int) -> int:
    """Columns that a layer's cache needs for so many positions: all of them, or those of its window and `SLACK`."""
    return positions if window is None else min(positions, window + SLACK)


def cache_bytes(config: GPTConfig, positions: int, width: int) -> int:
    """Bytes of the keys and values of a text of so many positions, of ``width`` bytes a number (`gpt.model.cache`)."""
    columns = sum(cache_columns(window, positions) for window in config.windows)
    return 2 * width * config.kv_heads * config.head_size * columns


def nearest_preset(config: GPTConfig) -> str:
    """The preset of GPT-2 and GPT-3 nearest in size, whose batch and rate are a model's usual ones."""
    size = breakdown(config).trainable
    sizes = [name for name, preset in PRESETS.items() if preset.model.layout == "gpt2"]
    return min(sizes, key=lambda name: abs(math.log(breakdown(PRESETS[name].model).trainable / size)))
