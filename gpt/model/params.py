"""All parameters of a decoder, their counts and their FLOPs, without importing torch.

`parameters` is the only table of names and shapes: memory, checkpoints, adapters, optimizer groups and the GPT-3
table use it. A test compares it with `gpt.model.decoder`.
"""

import functools
import itertools
import math
from dataclasses import dataclass
from typing import Literal, get_args

from gpt.config.model import PRESETS, GPTConfig

Shape = tuple[int, ...]
Kind = Literal["embedding", "positions", "linear", "bias", "norm", "unembedding"]
GROUP = 32  # Elements of an int4 matrix that share a scale.
WINDOW_SLACK = 64  # Cache columns beyond a layer's window, for appending and rewinding.


@dataclass(frozen=True)
class Parameter:
    """A tensor of the decoder, or of every block."""

    name: str  # state_dict key; in blocks, without the prefix ``h.0.``, ``h.1.`` …
    shape: Shape  # (out, in) for a linear map, as in torch
    kind: Kind
    in_blocks: bool = True
    fused: tuple[int, ...] = ()  # number of rows of each stacked matrix: query, key, value; or gate, up
    matrices: tuple[str, ...] = ()  # rows of the GPT-3 table, one per fused matrix

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def is_matrix(self) -> bool:
        """Whether this is a linear weight of a block. Muon and LoRA apply only to these."""
        return self.kind == "linear"

    @property
    def is_decayed(self) -> bool:
        """Whether AdamW decays the parameter: true except for biases and norms."""
        return len(self.shape) > 1


@functools.lru_cache(maxsize=64)
def parameters(config: GPTConfig) -> tuple[Parameter, ...]:
    """Returns a decoder's parameters in model order. A tensor that every block has is listed once.

    The GPT-3 table calls W_V Value-Up and W_O Value-Down.
    """
    C, head_size, V = config.n_embd, config.head_size, config.vocab_size
    query_width, hidden = config.n_head * head_size, config.mlp_width
    kv_width = config.kv_heads * head_size
    qkv, qkv_matrices = (query_width, kv_width, kv_width), ("Query", "Key", "Value-Up")
    gated, mlp_matrices = config.mlp == "swiglu", ("Gate-Projection", "Up-Projection")
    gate_up = (hidden, hidden) if gated else ()
    qkv_bias, bias = config.biases != "none", config.biases == "all"
    table = [Parameter("wte.weight", (V, C), "embedding", in_blocks=False, matrices=("Embedding",))]
    if config.positions != "rotary":
        table.append(Parameter("wpe.weight", (config.block_size, C), "positions", in_blocks=False))
    table += [
        *_norm("ln_1", C, config),
        *_linear("attn.c_attn", sum(qkv), C, qkv_bias, qkv, qkv_matrices),
        *([*_norm("attn.q_norm", head_size), *_norm("attn.k_norm", head_size)] if config.qk_norm else []),
        *_linear("attn.c_proj", C, query_width, bias, matrices=("Value-Down",)),
        *_norm("ln_2", C, config),
        *_linear("mlp.c_fc", sum(gate_up) or hidden, C, bias, gate_up, mlp_matrices if gated else mlp_matrices[1:]),
        *_linear("mlp.c_proj", C, hidden, bias, matrices=("Down-Projection",)),
        *_norm("ln_f", C, config, in_blocks=False),
    ]
    if not config.tied:
        table.append(Parameter("lm_head.weight", (V, C), "unembedding", in_blocks=False, matrices=("Unembedding",)))
    return tuple(table)


def _linear(
    name: str,
    out_features: int,
    in_features: int,
    bias: bool,
    fused: tuple[int, ...] = (),
    matrices: tuple[str, ...] = (),
) -> list[Parameter]:
    """Returns a linear map's weight and bias."""
    weight = Parameter(f"{name}.weight", (out_features, in_features), "linear", True, fused, matrices)
    bias_parameter = Parameter(f"{name}.bias", (out_features,), "bias", True, fused)
    return [weight, bias_parameter] if bias else [weight]


def _norm(name: str, width: int, config: GPTConfig | None = None, in_blocks: bool = True) -> list[Parameter]:
    """Returns a norm's weight and, for a LayerNorm, its β. Without ``config``, the norm is an RMSNorm of queries or
    keys."""
    parts = ("weight", "bias") if config is not None and config.norm == "layernorm" else ("weight",)
    return [Parameter(f"{name}.{part}", (width,), "norm", in_blocks) for part in parts]


def named_parameters(config: GPTConfig) -> dict[str, Parameter]:
    """Returns every parameter by full name, in model order."""
    table: dict[str, Parameter] = {}
    for in_blocks, group in itertools.groupby(parameters(config), key=lambda p: p.in_blocks):
        members = list(group)
        for prefix in [f"h.{layer}." for layer in range(config.n_layer)] if in_blocks else [""]:
            table |= {prefix + p.name: p for p in members}
    return table


def counts(config: GPTConfig) -> dict[Kind, int]:
    """Counts parameters by kind."""
    totals: dict[Kind, int] = dict.fromkeys(get_args(Kind), 0)
    for p in parameters(config):
        totals[p.kind] += (config.n_layer if p.in_blocks else 1) * p.numel
    return totals


@dataclass(frozen=True)
class Row:
    """A row of the GPT-3 table: a matrix, its dimensions in the paper's notation, and its parameter count."""

    matrix: str
    dimensions: str
    parameters: int


@dataclass(frozen=True)
class Breakdown:
    """Parameter counts by group. ``trainable = total_weights - tied + positions + biases + layer_norms``."""

    rows: list[Row]
    total_weights: int  # sum of the rows, including a tied unembedding
    tied: int  # parameters that tying saves
    positions: int  # parameters of the position table
    biases: int  # parameters of biases in linear layers
    layer_norms: int  # γ and β of LayerNorms, or γ of RMSNorms

    @property
    def trainable(self) -> int:
        """Number of parameters that the optimizer trains."""
        return self.total_weights - self.tied + self.positions + self.biases + self.layer_norms


def breakdown(config: GPTConfig) -> Breakdown:
    """Counts a decoder's parameters in the rows of the GPT-3 table."""
    C, V, by_kind = config.n_embd, config.vocab_size, counts(config)
    embedding, unembedding = (
        Row(name, f"{a:,} × {b:,}", V * C) for name, a, b in (("Embedding", C, V), ("Unembedding", V, C))
    )
    rows = [row for p in parameters(config) if p.is_matrix for row in _table_rows(p, config)]
    rows = [embedding, *rows, unembedding]
    return Breakdown(
        rows=rows,
        total_weights=sum(row.parameters for row in rows),
        tied=by_kind["embedding"] if config.tied else 0,
        positions=by_kind["positions"],
        biases=by_kind["bias"],
        layer_norms=by_kind["norm"],
    )


def _table_rows(p: Parameter, config: GPTConfig) -> list[Row]:
    """Returns the table's rows for a linear map, in alphabetical order, as in the paper. An axis of heads is printed as
    head size × heads."""
    heads_axis = {"attn.c_attn.weight": 0, "attn.c_proj.weight": 1}.get(p.name)
    rows = []
    for matrix, out_features in sorted(zip(p.matrices, p.fused or p.shape[:1], strict=True)):
        sides, factors = [out_features, p.shape[1]], f"{config.n_layer:,}"
        if heads_axis is not None:
            factors = f"{sides[heads_axis] // config.head_size:,} × {factors}"
            sides[heads_axis] = config.head_size
        rows.append(
            Row(matrix, f"({sides[0]:,} × {sides[1]:,}) × {factors}", out_features * p.shape[1] * config.n_layer)
        )
    return rows


def flops_per_token(config: GPTConfig, context: int, adapters: int = 0) -> int:
    """Training FLOPs per token in sequences of length ``context``: 6 N + 12·L·C·T.

    As in PaLM (Chowdhery et al. 2022, appendix B) and nanoGPT, each of the N parameters in matrix products is
    multiplied and added once in the forward pass and twice in the backward pass. Attention adds 12·L·C·T, as if every
    position attended to all T positions, or to its whole window. N excludes the position table and an untied embedding,
    which are only looked up. Recomputation and masking don't change the result. With ``adapters`` trained parameters,
    frozen parameters cost only 4 N, because they need no gradients.
    """
    n = count_matmul_parameters(config)
    return (4 * n + 6 * adapters if adapters else 6 * n) + 12 * _score_products(config, context)


def flops_sampled(config: GPTConfig, context: int) -> int:
    """FLOPs to generate a token after ``context`` cached positions: 2 N + 4·L·C·T, like the forward pass in
    `flops_per_token`."""
    return 2 * count_matmul_parameters(config) + 4 * _score_products(config, context)


def count_matmul_parameters(config: GPTConfig) -> int:
    """Number of parameters in matrix products: all except the position table and an untied embedding."""
    by_kind = counts(config)
    return sum(by_kind.values()) - by_kind["positions"] - (0 if config.tied else by_kind["embedding"])


def _score_products(config: GPTConfig, context: int) -> int:
    """Multiplications for the last position's scores, summed over heads and layers. Without windows, this is L·C·T if
    the heads' widths add up to C."""
    return config.n_head * config.head_size * count_attended(config, context)


def count_attended(config: GPTConfig, context: int) -> int:
    """Number of positions that the last of ``context`` positions attends to, summed over layers."""
    return sum(min(context, window or context) for window in config.windows)


def cache_columns(window: int | None, positions: int) -> int:
    """KV cache columns of a layer: all ``positions``, or its window plus `WINDOW_SLACK`."""
    return positions if window is None else min(positions, window + WINDOW_SLACK)


def cache_bytes(config: GPTConfig, positions: int, width: int) -> int:
    """KV cache bytes of a sequence, with ``width`` bytes per element."""
    columns = sum(cache_columns(window, positions) for window in config.windows)
    return 2 * width * config.kv_heads * config.head_size * columns


def nearest_preset(config: GPTConfig) -> str:
    """Returns the name of the preset nearest in size. Callers use its batch size and learning rate."""
    size = breakdown(config).trainable
    return min(PRESETS, key=lambda name: abs(math.log(breakdown(PRESETS[name].model).trainable / size)))
