"""Memory of a training step, in bytes, by arithmetic alone: torch is not imported.

An estimate that leans upwards: in its tests it is at most 15 % above what a step holds and at most 2 % below.
benchmarks/memory.md derives the terms. Korthikanti et al. 2022 (arXiv 2205.05198, §4.1) count a Megatron block the same
way.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from gpt.config import GPTConfig, Mlp
from gpt.model.params import Kind, counts, parameters

WIDTHS = {"float32": 4, "bfloat16": 2, "float16": 2}
PLAIN_UP_TO = 512  # the decoder's own, checked by a test: importing it would import torch
# A multiple that suits matrix units: an odd number of columns, as GPT-2's 50,257, keeps a GPU off its fast kernels.
ALIGNED, ALIGNED_ON = 64, ("cuda",)
# Logits at once, at most: on a CPU what its caches hold; on a GPU fewer than the 2³¹ past which kernels count in int64
# and torch has erred (pytorch#111484), and fewer still where the unembedding has no gradient to sum up.
# Forward and backward on two cores in bfloat16, 4,096 positions, 4,096 ids, 256 wide: 53 ms with 2²², 81 with 2²⁴, and
# 149 with all logits and autograd.
LOGITS, FROZEN_LOGITS, LOGITS_ON_CPU = 2**30, 2**27, 2**22
LEAST_AT_ONCE = 512  # positions: with fewer, reading the unembedding takes too long
FLOAT = 4
# Numbers of the MLP's inside that it keeps for its gradient: before and after GELU; or the gate before and after SiLU,
# what it is multiplied by, and the product.
INSIDE: dict[Mlp, int] = {"gelu": 2, "swiglu": 4}
MUON_UPDATES = 1.75  # float32 copies of the matrices: updates, and the gradients of the largest group
MUON_GATHERED = 5.5  # of the matrices that a rank works on, where they came from others


@dataclass(frozen=True)
class Setup:
    """A way to compute a training step: dtype, optimizer, micro-batch, and how ranks share the work."""

    micro_batch: int = 1  # sequences at once on a rank
    accumulates: bool = False  # whether a step takes several micro-batches, so that gradients stay between them
    dtype: str = "bfloat16"  # of matrix products, one of `WIDTHS`; weights are float32
    optimizer: Literal["muon", "adamw"] = "muon"
    recompute: bool = False  # whether blocks keep their input alone and are computed again for the gradient
    loss_chunk: int = 0  # positions whose logits exist at once; 0: `positions_at_once`
    data: int = 1  # ranks that share out a batch
    shard: bool = False  # whether those also share out parameters, gradients and optimizer state
    tensor: int = 1  # ranks that share out every matrix
    device: Literal["cuda", "cpu"] = "cuda"

    @property
    def width(self) -> int:
        """Bytes of a number in a matrix product."""
        return WIDTHS[self.dtype]

    @property
    def stream(self) -> int:
        """Bytes of a number in the residual stream, whose norms are computed from a copy in float32."""
        return 2 if self.device == "cuda" and self.dtype == "bfloat16" else FLOAT

    @property
    def ways(self) -> int:
        """Ranks that share out parameters, gradients and optimizer state."""
        return self.data if self.shard else 1

    @property
    def autocast(self) -> bool:
        """Whether products are computed from copies in a narrower dtype."""
        return self.dtype != "float32"


@dataclass(frozen=True)
class Training:
    """Bytes on a rank. Not all of them are there at once: ``moments`` says how much is at each of three moments."""

    parameters: int  # float32
    gradients: int  # float32
    optimizer: int  # its state, float32
    activations: int  # what the trunk keeps for the backward pass
    logits: int  # and what else the loss and its gradients take
    copies: int  # of weights: in the narrower dtype, or gathered from the other ranks
    snapshot: int  # of parameters and optimizer, for checkpoints: in the host's memory, on a CPU thus beside the others
    moments: Mapping[str, int]

    @property
    def peak(self) -> int:
        """The most at any moment."""
        return max(self.moments.values())


def training(config: GPTConfig, setup: Setup) -> Training:
    """Counts the bytes that a rank holds in a training step, from the second one on, when there is optimizer state."""
    own = counts(config, setup.tensor)
    positions = setup.micro_batch * config.block_size
    parameters = gradients = FLOAT * -(-sum(own.values()) // setup.ways)
    state = -(-optimizer_state(own, setup.optimizer) // setup.ways)
    snapshot = parameters + state
    activations, loss, (whole, blocks) = trunk(config, setup), logits(config, setup), weight_copies(config, setup)
    kept = parameters + state + whole + snapshot * (setup.device == "cpu")
    copies = blocks * (not setup.shard)  # of all blocks' weights, which autocast makes once a micro-batch
    # Gradients of the micro-batches before; torch's DDP holds on to them in its buckets.
    waiting = gradients * (setup.accumulates or (setup.data > 1 and not setup.shard and setup.tensor == 1))
    # A block that goes backward: its MLP's gradients, and what it keeps, computed again, or its gathered weights.
    layer = positions * setup.width * config.mlp_width // setup.tensor * (2 if config.mlp == "swiglu" else 1)
    layer += blocks * setup.shard
    again = positions * block(config, setup) * setup.recompute
    # The embedding's gradient, float32: tied, it comes from the logits first, and from the ids last.
    table = FLOAT * own["embedding"]
    tables = 2 * config.tied + setup.accumulates + setup.shard
    moments = {
        "loss": kept + copies + waiting + activations + max(loss, table + layer + again),
        "backward": kept + gradients + max(layer + positions * block(config, setup), tables * table),
        "update": kept - whole + gradients + _update(config, setup),
    }
    return Training(parameters, gradients, state, activations, loss, whole + blocks, snapshot, moments)


def optimizer_state(own: Mapping[Kind, int], optimizer: str) -> int:
    """Bytes that AdamW keeps, two moments a parameter, or Muon, one of the blocks' matrices and AdamW's of the rest."""
    momentum = own["linear"] if optimizer == "muon" else 0
    return FLOAT * (momentum + 2 * (sum(own.values()) - momentum))


def trunk(config: GPTConfig, setup: Setup) -> int:
    """Bytes that autograd keeps of a micro-batch: dropout's mask of the embeddings, the last norm's input, and what the
    blocks keep, or, if they are recomputed, only their inputs."""
    C, T = config.n_embd, config.block_size
    each = setup.stream * C if setup.recompute else block(config, setup)
    kept = setup.micro_batch * T * (config.n_layer * each + FLOAT * C + _mask(config, setup, FLOAT) * C)
    if setup.recompute:
        return kept
    # For all sequences together: cosines and sines in the narrower dtype, and the masks of fused windows.
    turned = config.n_layer * (2 + 2 * config.qk_norm) * config.head_size * (config.positions == "rotary")
    masked = T * sum(window is not None and window < T for window in config.windows)
    return kept + setup.width * T * (turned * setup.autocast + masked * (_kernel(config, setup) == "fused"))


def block(config: GPTConfig, setup: Setup) -> int:
    """Bytes a position that a block leaves for its gradient: the float32 input of each norm, the input of each linear
    map, the inside of the MLP, dropout's masks, and attention's tensors."""
    C, s = config.n_embd, setup.width
    inside = s * (config.n_head * config.head_size + INSIDE[config.mlp] * config.mlp_width)
    every = 2 * (FLOAT + s + _mask(config, setup, s)) * C
    return every + (inside + _attention(config, setup)) // setup.tensor


def _mask(config: GPTConfig, setup: Setup, width: int) -> int:
    """Bytes that dropout keeps of an element: a truth value on a GPU, and on a CPU what it was multiplied by."""
    return 0 if config.dropout == 0 else width if setup.device == "cpu" else 1


def _attention(config: GPTConfig, setup: Setup) -> int:
    """Bytes a position of queries, keys, values and scores."""
    H, K, T, s = config.n_head, config.kv_heads, config.block_size, setup.width
    q, k = H * config.head_size, K * config.head_size  # widths of queries; of keys, and of values
    qkv = s * (q + 2 * k)
    narrowed = config.qk_norm and setup.autocast and setup.device == "cuda"  # normalized in float32
    match _kernel(config, setup):
        case "plain":  # copies, beside what c_attn gave if a view of it is kept, and the pattern, thrice under dropout
            return qkv * (1 + (config.qk_norm or K == 1)) + s * H * T * (3 if config.dropout else 1)
        case "unfused":  # torch's, in float32, with keys and values for every query
            return qkv * config.qk_norm + 3 * FLOAT * (H * T + q)
        case _:  # rotated or normalized queries and keys, and a number for each row of scores
            changed = config.qk_norm or config.positions == "rotary"
            return qkv + s * (q + k) * changed + FLOAT * (q + k) * narrowed + FLOAT * H


def _kernel(config: GPTConfig, setup: Setup) -> Literal["plain", "unfused", "fused"]:
    """How attention is computed: fused, or on a CPU our own way, or under dropout torch's that is not fused."""
    if setup.device == "cuda":
        return "fused"
    return "plain" if config.block_size <= PLAIN_UP_TO else "unfused" if config.dropout else "fused"


def weight_copies(config: GPTConfig, setup: Setup) -> tuple[int, int]:
    """Bytes of weights beside the parameters: those that are there all the time, and those of blocks.

    Autocast makes copies of all blocks' in the narrower dtype once a micro-batch. Where ranks share out the parameters,
    what is in no block is gathered once, in float32; and while the gradient of a block is computed there are its
    parameters, those of the next one, and its gradients, in the dtype of products, and of the block before the
    gradients that are on their way, in float32."""
    own, s = counts(config, setup.tensor), setup.width
    blocks = own["linear"] + own["bias"]
    if not setup.shard:
        return 0, s * blocks * setup.autocast
    gathered = FLOAT * (own["embedding"] + own["positions"] + own["unembedding"])
    return gathered, blocks // config.n_layer * (3 * s + FLOAT)


def logits(config: GPTConfig, setup: Setup) -> int:
    """Bytes of the loss: the trunk's output and its gradient; logits and their softmax in float32; the unembedding in
    the dtype of products, and its gradient, of pieces in float32, twice."""
    V, C, s = config.vocab_size, config.n_embd, setup.width
    n, positions = logits_at_once(config, setup), setup.micro_batch * config.block_size
    columns = columns_of_logits(V, setup.device)
    copy, gradient = s * (setup.autocast or columns != V), 2 * FLOAT if n < positions else s
    x = positions * C * (FLOAT + s * setup.autocast + 2 * s)
    return x + n * (s + FLOAT) * columns + (copy + gradient) * V * C


def logits_at_once(config: GPTConfig, setup: Setup) -> int:
    """Positions whose logits exist at once."""
    positions = setup.micro_batch * config.block_size
    return positions_at_once(positions, config.vocab_size, setup.loss_chunk, setup.device)


def positions_at_once(positions: int, vocab_size: int, chunk: int, device: str, frozen: bool = False) -> int:
    """Positions whose logits exist at once, of equal parts as far as possible: ``chunk``, where it is not 0, or
    fewer."""
    most = LOGITS_ON_CPU if device == "cpu" else FROZEN_LOGITS if frozen else LOGITS
    fit = min(chunk or positions, max(LEAST_AT_ONCE, most // columns_of_logits(vocab_size, device)))
    return -(-positions // -(-positions // fit))


def columns_of_logits(vocab_size: int, device: str) -> int:
    """The vocabulary, on a GPU filled up."""
    return vocab_size + (-vocab_size % ALIGNED if device in ALIGNED_ON else 0)


def _update(config: GPTConfig, setup: Setup) -> int:
    """Bytes that an optimizer's step works in. AdamW's is one kernel. Muon holds all updates in float32, most gradients
    once more, and what its iteration makes of the matrices of one shape; sharded matrices are gathered whole."""
    if setup.optimizer == "adamw":
        return 0
    holders, n = setup.ways * setup.tensor, counts(config, setup.tensor)["linear"]
    if holders == 1:  # copies in the dtype of products, of which each rank works on its share
        worked_on = n * (1.5 + 0.5 * setup.autocast + 1 / setup.data)
    else:
        largest = max(p.numel for p in parameters(config) if p.is_matrix)
        worked_on = MUON_GATHERED * -(-config.n_layer // holders) * largest
    return round(MUON_UPDATES * FLOAT * n / setup.ways + setup.width * worked_on)


def divisors(n: int) -> list[int]:
    """The whole numbers that divide n, in order."""
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)})
