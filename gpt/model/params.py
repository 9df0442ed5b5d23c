"""What a shape costs, by arithmetic alone: nothing is allocated, torch is not imported."""

import math
from dataclasses import dataclass

from gpt.config import PRESETS, GPTConfig


@dataclass(frozen=True)
class Row:
    """A line of the table: a kind of matrix, its dimensions as the GPT-3 table writes them, and its parameters."""

    matrix: str
    dimensions: str
    parameters: int


@dataclass(frozen=True)
class Breakdown:
    """Where every parameter sits. ``trainable = total_weights - tied + positions + biases + layer_norms``."""

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
    """The parameters of a decoder of this shape, in the rows of the GPT-3 table.

    Value-Up and Value-Down are the head's factors of the value map, in the usual names W_V and W_O.
    """
    c, heads, layers, vocab = config.n_embd, config.n_head, config.n_layer, config.vocab_size
    width = c // heads  # of a head
    into = f"({width:,} × {c:,}) × {heads:,} × {layers:,}"
    back = f"({c:,} × {width:,}) × {heads:,} × {layers:,}"
    attention = width * c * heads * layers
    mlp = 4 * c * c * layers
    rows = [
        Row("Embedding", f"{c:,} × {vocab:,}", c * vocab),
        Row("Key", into, attention),
        Row("Query", into, attention),
        Row("Value-Up", into, attention),
        Row("Value-Down", back, attention),
        Row("Up-Projection", f"({4 * c:,} × {c:,}) × {layers:,}", mlp),
        Row("Down-Projection", f"({c:,} × {4 * c:,}) × {layers:,}", mlp),
        Row("Unembedding", f"{vocab:,} × {c:,}", vocab * c),
    ]
    return Breakdown(
        rows=rows,
        total_weights=sum(row.parameters for row in rows),
        tied=vocab * c,
        positions=config.block_size * c if config.positions == "learned" else 0,
        biases=layers * (3 * c + c + 4 * c + c) * (config.arch == "gpt2"),  # query, key, value; output; up; down
        layer_norms=(2 * layers + 1) * 2 * c,
    )


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


def nearest_preset(config: GPTConfig) -> str:
    """The preset nearest in size, whose batch and rate are a model's usual ones."""
    size = breakdown(config).trainable
    return min(PRESETS, key=lambda name: abs(math.log(breakdown(PRESETS[name].model).trainable / size)))
