"""Every parameter of a decoder, and what its shape costs, by arithmetic alone: torch is not imported.

`parameters` is the one table of names and shapes, derived from a `GPTConfig`. Counts, memory, checkpoints, adapters,
tensor parallelism, the optimizers' groups and the GPT-3 table read it; a test compares it with the model that
`gpt.model.decoder` builds.
"""

import functools
import itertools
import math
from dataclasses import dataclass
from typing import Literal

from gpt.config import PRESETS, GPTConfig

Shape = tuple[int, ...]
Kind = Literal["embedding", "positions", "linear", "bias", "norm"]


@dataclass(frozen=True)
class Parameter:
    """A tensor of the decoder. One in the blocks stands for as many as there are blocks."""

    name: str  # in the model's state_dict; without its prefix, ``h.0.`` …, where it is in the blocks
    shape: Shape  # a linear map's weight is (out, in), as in torch
    kind: Kind
    in_blocks: bool = True
    split: int | None = None  # the axis that tensor-parallel ranks divide; None: each rank has all of it
    unit: int = 1  # rows or columns along ``split`` that stay together: a head's
    fused: tuple[int, ...] = ()  # rows of each of the matrices that lie below each other: query, key, value
    matrices: tuple[str, ...] = ()  # its rows of the GPT-3 table; of fused ones each its own
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

    @property
    def stored(self) -> Shape:
        """Its shape in a checkpoint: GPT-2's layout has linear weights transposed, (in, out)."""
        return self.shape[::-1] if self.is_matrix else self.shape


@functools.lru_cache(maxsize=64)
def parameters(config: GPTConfig) -> tuple[Parameter, ...]:
    """The parameters of a decoder of this shape, in the model's order, those of the blocks once.

    The unembedding is the embedding and has none. The rows of the GPT-3 table: Value-Up and Value-Down are the head's
    factors of the value map, in the usual names W_V and W_O.
    """
    C, head = config.n_embd, config.head_size
    heads, hidden = config.n_head * head, config.mlp_width
    cached = config.kv_heads * head
    fused, qkv = (heads, cached, cached), ("Query", "Key", "Value-Up")
    found = [Parameter("wte.weight", (config.vocab_size, C), "embedding", in_blocks=False, matrices=("Embedding",))]
    if config.positions != "rotary":
        trained = config.positions == "learned"
        found.append(Parameter("wpe.weight", (config.block_size, C), "positions", in_blocks=False, trained=trained))
    found += [
        *_norm("ln_1", C),
        *_linear("attn.c_attn", sum(fused), C, config.biases, 0, head, fused, qkv),
        *_linear("attn.c_proj", C, heads, config.biases, 1, head, matrices=("Value-Down",)),
        *_norm("ln_2", C),
        *_linear("mlp.c_fc", hidden, C, config.biases, 0, matrices=("Up-Projection",)),
        *_linear("mlp.c_proj", C, hidden, config.biases, 1, matrices=("Down-Projection",)),
        *_norm("ln_f", C, in_blocks=False),
    ]
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


def _norm(name: str, width: int, in_blocks: bool = True) -> list[Parameter]:
    return [Parameter(f"{name}.{part}", (width,), "norm", in_blocks) for part in ("weight", "bias")]


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
    found: dict[Kind, int] = {"embedding": 0, "positions": 0, "linear": 0, "bias": 0, "norm": 0}
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
    total_weights: int  # the sum of the rows, the unembedding counted although it is the embedding
    tied: int  # what tying the unembedding to the embedding saves
    positions: int  # the trained table of positions; 0 for a fixed one
    biases: int  # of the linear layers
    layer_norms: int  # γ and β of every LayerNorm

    @property
    def trainable(self) -> int:
        """The parameters that an optimizer sees."""
        return self.total_weights - self.tied + self.positions + self.biases + self.layer_norms


def breakdown(config: GPTConfig) -> Breakdown:
    """The parameters of a decoder of this shape, in the rows of the GPT-3 table."""
    C, V, by_kind = config.n_embd, config.vocab_size, counts(config)
    embedding = Row("Embedding", f"{C:,} × {V:,}", by_kind["embedding"])
    rows = [row for p in parameters(config) if p.is_matrix for row in _rows(p, config.n_layer)]
    rows = [embedding, *rows, Row("Unembedding", f"{V:,} × {C:,}", by_kind["embedding"])]
    return Breakdown(
        rows=rows,
        total_weights=sum(row.parameters for row in rows),
        tied=by_kind["embedding"],
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
    as if every position saw all T. N counts all parameters but the table of positions, which is only added; the
    embedding counts once, as the unembedding. What is computed anew, or masked out, does not change this number.
    With ``adapters``, as many parameters are trained and the rest is not: it needs no gradients of its own, 4 N.
    """
    parts = breakdown(config)
    n = parts.trainable - parts.positions
    attention = 12 * config.n_layer * config.n_embd * context
    return (4 * n + 6 * adapters if adapters else 6 * n) + attention


def flops_sampled(config: GPTConfig, context: int) -> int:
    """Floating-point operations that computing one more position needs after ``context`` of them in the cache:
    2 N + 4·L·C·T, the forward pass's part of `flops_per_token`."""
    parts = breakdown(config)
    return 2 * (parts.trainable - parts.positions) + 4 * config.n_layer * config.n_embd * context


def cache_bytes(config: GPTConfig, positions: int, width: int) -> int:
    """Bytes of the keys and values of so many positions, of ``width`` bytes a number (`gpt.model.cache`)."""
    return 2 * width * config.n_layer * config.kv_heads * config.head_size * positions


def nearest_preset(config: GPTConfig) -> str:
    """The preset nearest in size, whose batch and rate are a model's usual ones."""
    size = breakdown(config).trainable
    return min(PRESETS, key=lambda name: abs(math.log(breakdown(PRESETS[name].model).trainable / size)))
