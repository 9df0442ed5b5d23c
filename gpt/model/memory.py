"""Memory of a training step, in bytes, and the micro-batch that fits, by arithmetic alone: torch is not imported.

It follows what `gpt.model.decoder` and `gpt.training.step` do, tensor by tensor, as they are written (compiled blocks
keep less). Korthikanti et al. 2022 (arXiv 2205.05198, §4.1) count the same way for Megatron: a block keeps 34 bytes for
each position and number of the width, and the scores of attention. Here it is 36 on a GPU in bfloat16: norms
keep their input in float32 (+4, of two LayerNorms), masks of dropout count where there is dropout (−2), and fused
attention keeps one number of each row of scores. docs/memory.md derives every term; tests/test_memory.py compares them
with what autograd saves, and with the live bytes of whole steps.
"""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from gpt.config import GPTConfig, Mlp, Norm
from gpt.model.params import Kind, counts, parameters

WIDTHS = {"float32": 4, "bfloat16": 2, "float16": 2}
# The decoder's own, checked by a test: it may not be imported here, since it imports torch.
PLAIN_UP_TO = 512  # positions up to which a CPU attends plainly
ROPE_TABLE = 8192  # positions of its first table of rotations
# A multiple that suits matrix units: an odd number of columns, as GPT-2's 50,257, keeps a GPU off its fast kernels.
ALIGNED, ALIGNED_ON = 64, ("cuda",)
# Logits at once, at most: on a CPU what its caches hold; on a GPU fewer than the 2³¹ past which kernels count in int64
# and torch has erred (pytorch#111484), and fewer still where the unembedding has no gradient to sum up.
# Forward and backward on two cores in bfloat16, 4,096 positions, 4,096 ids, 256 wide: 53 ms with 2²², 81 with 2²⁴, and
# 149 with all logits and autograd.
LOGITS, FROZEN_LOGITS, LOGITS_ON_CPU = 2**30, 2**27, 2**22
LEAST_AT_ONCE = 512  # positions: with fewer, reading the unembedding takes too long
STATS: dict[Norm, int] = {"layernorm": 8, "rmsnorm": 4}  # of a position: mean and deviation, or the latter, float32
IDS = 8  # an id
FLOAT = 4
# Numbers of the MLP's inside that it keeps for its gradient: before and after GELU; or the gate before and after SiLU,
# what it is multiplied by, and the product.
INSIDE: dict[Mlp, int] = {"gelu": 2, "swiglu": 4}
MUON_GATHERED = 5.5  # of the matrices that a rank works on, where they came from others
USABLE = 0.9  # of a GPU's memory; the rest is for CUDA's context, the buffers of cuBLAS and NCCL, and fragmentation
SHARED = 0.25  # of a CPU's memory beside what stays there between steps: other programs want theirs
LEAST_CHUNK = 128  # positions whose logits are computed at once at least


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
    activations, (whole, blocks) = trunk(config, setup), weight_copies(config, setup)
    loss = logits(config, setup)
    table = FLOAT * own["embedding"]  # tied, its gradient comes from the logits first, and from the ids last
    one = positions * block(config, setup)
    ready = positions * FLOAT * config.n_embd * (setup.stream == FLOAT)  # its input, as the first norm keeps it
    again = (one - ready) * setup.recompute
    layer = positions * _gradient(config, setup)  # while the gradient of a block is computed
    if setup.shard or setup.recompute:
        layer += blocks if setup.shard else -(-blocks // config.n_layer)
    stay = not (setup.shard or setup.recompute)  # copies of all blocks' weights, until their gradients are there
    # Of the micro-batches before; torch's DDP holds on to them in its buckets.
    waiting = gradients * (setup.accumulates or (setup.data > 1 and not setup.shard and setup.tensor == 1))
    snapshot = parameters + state
    kept = parameters + state + _constants(config) + snapshot * (setup.device == "cpu")
    forward = kept + whole + waiting + activations + blocks * stay
    ahead = 0 if stay or setup.shard else blocks + loss  # in the forward pass
    if config.tied:
        behind = table * setup.accumulates + max(one + layer, (2 + setup.shard) * table)
    else:
        behind = max(one + layer, (setup.accumulates + setup.shard) * table)
    moments = {
        "loss": forward + max(loss, table + again + layer, ahead),
        "backward": kept + whole + gradients + behind,
        "update": kept + gradients + _update(config, setup),
    }
    return Training(parameters, gradients, state, activations, loss, whole + blocks, snapshot, moments)


def optimizer_state(own: Mapping[Kind, int], optimizer: str) -> int:
    """Bytes that AdamW keeps, two moments a parameter, or Muon, one of the blocks' matrices and AdamW's of the rest."""
    momentum = own["linear"] if optimizer == "muon" else 0
    return FLOAT * (momentum + 2 * (sum(own.values()) - momentum))


def trunk(config: GPTConfig, setup: Setup) -> int:
    """Bytes that autograd keeps of a micro-batch, from the ids to the last norm: what the blocks keep, or, where they
    are computed again, their inputs alone."""
    C = config.n_embd
    dropped = _mask(config, setup, FLOAT) * C  # the embedding's
    each = setup.stream * C if setup.recompute else block(config, setup)
    last = FLOAT * C + STATS[config.norm]
    kept = setup.micro_batch * config.block_size * (config.n_layer * each + dropped + last + 2 * IDS)
    return kept + (0 if setup.recompute else _tables(config, setup))


def block(config: GPTConfig, setup: Setup) -> int:
    """Bytes a position that a block leaves for its gradient.

    Two norms keep their input, float32, with its statistics. Each linear map keeps its input in the dtype of products,
    the MLP's activation its own. Dropout keeps a mask of each branch."""
    C, s, t = config.n_embd, setup.width, setup.tensor
    norms = 2 * (FLOAT * C + STATS[config.norm])
    inputs = s * (C + config.n_head * config.head_size // t + C)  # of c_attn, c_proj, c_fc
    mlp = INSIDE[config.mlp] * s * (config.mlp_width // t)
    masks = 2 * _mask(config, setup, s) * C
    return norms + inputs + mlp + masks + _heads(config, setup) // t


def _mask(config: GPTConfig, setup: Setup, width: int) -> int:
    """Bytes that dropout keeps of a number: a truth value on a GPU, and on a CPU what it was multiplied by."""
    return 0 if config.dropout == 0 else width if setup.device == "cpu" else 1


def _heads(config: GPTConfig, setup: Setup) -> int:
    """Bytes a position that all heads keep of queries, keys, values and scores."""
    H, K, T, s = config.n_head, config.kv_heads, config.block_size, setup.width
    q, k = H * config.head_size, K * config.head_size  # widths of queries; of keys, and of values
    viewed = True  # whether values are a view of what c_attn gave, which thus stays whole
    match _kernel(config, setup):
        case "plain":  # the pattern, and under dropout what it is multiplied by and what comes of that
            scores = s * H * T * (3 if config.dropout else 1)
            copies, viewed = s * (q + 2 * k), K == 1
        case "unfused":  # torch's, in float32, with keys and values for every query
            scores, copies, viewed = 3 * FLOAT * H * T, 3 * FLOAT * q, False
        case _:
            scores = FLOAT * H  # the logarithm of the sum of each row
            copies = s * (q + k) * (config.qk_norm or config.positions == "rotary")  # queries and keys of their own
    if config.qk_norm and setup.device == "cpu":  # what was normalized, as c_attn gave it, and its statistics
        viewed, copies = True, copies + FLOAT * (H + K)
    elif config.qk_norm:  # in float32
        copies += FLOAT * (H + K + (q + k) * setup.autocast)
    return scores + copies + s * (q + 2 * k) * viewed


def _kernel(config: GPTConfig, setup: Setup) -> Literal["plain", "unfused", "fused"]:
    """How attention is computed: fused, or on a CPU our own way, or under dropout torch's that is not fused."""
    if setup.device == "cuda":
        return "fused"
    return "plain" if config.block_size <= PLAIN_UP_TO else "unfused" if config.dropout else "fused"


def _tables(config: GPTConfig, setup: Setup) -> int:
    """Bytes that blocks keep for all sequences alike: cosines and sines, in the dtype of products, once more for keys
    that are normalized apart; of windowed layers, where attention is fused, the masks that are added to scores."""
    T, s = config.block_size, setup.width
    rotations = (2 + 2 * config.qk_norm) * s * T * config.head_size * (config.positions == "rotary" and setup.autocast)
    windowed = sum(window is not None and window < T for window in config.windows)
    return config.n_layer * rotations + windowed * s * T * T * (_kernel(config, setup) == "fused")


def weight_copies(config: GPTConfig, setup: Setup) -> tuple[int, int]:
    """Bytes of weights beside the parameters: those that are there all the time, and those of blocks.

    Autocast makes copies of all blocks' in the narrower dtype once a micro-batch. Where ranks share out the parameters,
    what is in no block is gathered once, in float32; and while the gradient of a block is computed there are its
    parameters, those of the next one, and its gradients, in the dtype of products, and of the block before the
    gradients that are on their way, in float32."""
    own, s = counts(config, setup.tensor), setup.width
    blocks = own["linear"] + own["bias"]
    if not setup.shard:
        return 0, s * blocks if setup.autocast else 0
    one = blocks // config.n_layer
    return FLOAT * (own["embedding"] + own["positions"] + own["unembedding"]), one * (3 * s + FLOAT)


def logits(config: GPTConfig, setup: Setup) -> int:
    """Bytes of the loss: the trunk's output and its gradient, the unembedding and its gradient, and logits with their
    softmax in float32 while both are computed; or the gradients while they are scaled, in float32."""
    V, C, s = config.vocab_size, config.n_embd, setup.width
    n, positions = logits_at_once(config, setup), setup.micro_batch * config.block_size
    several, columns = n < positions, columns_of_logits(V, setup.device)
    table = s * columns * C if setup.autocast or columns != V else 0
    x = positions * C * (FLOAT + s * setup.autocast + 2 * s)
    summed = (2 * FLOAT if several else s) * V * C  # of pieces, where there are several
    computed = x + table + n * (s * columns + FLOAT * V) + summed
    kept = FLOAT if several else s
    scaled = positions * C * (s + FLOAT) + V * C * (kept + FLOAT * (1 + (kept != FLOAT)))
    return max(computed, scaled)


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


def _gradient(config: GPTConfig, setup: Setup) -> int:
    """Bytes a position that the backward pass of a block adds at most to what was kept, which it frees meanwhile:
    the gradient of what the MLP's second map kept, with the residual stream's in the dtype of products; or those of
    both factors of a gated inside, when the former has taken the place of what was kept."""
    inside = setup.width * (config.mlp_width // setup.tensor)
    gate = 2 * inside * (config.mlp == "swiglu")
    return max(inside + setup.width * config.n_embd * setup.autocast, gate)


def _update(config: GPTConfig, setup: Setup) -> int:
    """Bytes that an optimizer's step works in. AdamW's is one kernel. Muon holds all updates, the gradients of its
    largest group once more, and of a stack of matrices of one shape what the iteration holds, a matrix before and after
    and its square twice, beside both results of the stack before; where ranks have parts, these are whole matrices, as
    they arrived, put together, and stacked."""
    if setup.optimizer == "adamw":
        return 0
    s, holders = setup.width, setup.ways * setup.tensor
    matrices = [p for p in parameters(config) if p.is_matrix]
    numbers = counts(config, setup.tensor)["linear"]
    groups = Counter[tuple[int, ...]]()
    for p in matrices:
        groups[p.fused] += p.numel * config.n_layer // setup.tensor
    updates = FLOAT * (numbers + max(groups.values())) / setup.ways
    if holders > 1:
        one = max(p.numel for p in matrices)
        return round(updates + s * MUON_GATHERED * -(-config.n_layer // holders) * one)
    stacks = Counter[tuple[int, int]]()  # numbers by shape, of either orientation
    for p in matrices:
        for outs in p.fused or p.shape[:1]:
            stacks[min(outs, p.shape[1]), max(outs, p.shape[1])] += outs * p.shape[1] * config.n_layer
    most, before = 0.0, 0
    for (rows, columns), n in stacks.items():
        # Each rank takes a share of the stack, in the narrower dtype, and gathers the others'.
        shared = max((2 + 2 * rows / columns) / setup.data, (1 + 1 / setup.data) * (setup.data > 1))
        most, before = max(most, n * (setup.autocast + shared) + 2 * before), n
    return round(updates + s * most)


def _constants(config: GPTConfig) -> int:
    """Bytes of fixed tables of positions; that of rotations is twice as long where it had to grow."""
    T = config.block_size
    rotations = 2 * config.head_size * (T if T <= ROPE_TABLE else 2 * T)
    return FLOAT * {"sinusoidal": config.n_embd * T, "rotary": rotations}.get(config.positions, 0)


def room(config: GPTConfig, setup: Setup, memory: int) -> int:
    """Bytes that a step may take of a device's ``memory``."""
    if setup.device == "cuda":
        return int(USABLE * memory)
    step = training(config, setup)
    stays = step.parameters + step.gradients + step.optimizer + step.snapshot
    return stays + int(SHARED * max(0, memory - stays))


def fits(config: GPTConfig, setup: Setup, memory: int) -> bool:
    """Whether a step takes no more than its `room`."""
    return training(config, setup).peak <= room(config, setup, memory)


def largest(config: GPTConfig, setup: Setup, rows: int, memory: int) -> Setup:
    """``setup`` with the largest micro-batch that fits of those that divide a process's ``rows``; where none does, with
    one sequence, and its logits `in_chunks`."""
    for micro_batch in reversed(divisors(rows)):
        setup = at_once(setup, micro_batch, rows)
        if fits(config, setup, memory):
            return setup
    return in_chunks(config, setup, memory)


def at_once(setup: Setup, micro_batch: int, rows: int) -> Setup:
    """``setup`` with that micro-batch of a process's ``rows``, which it divides."""
    return replace(setup, micro_batch=micro_batch, accumulates=rows > micro_batch)


def in_chunks(config: GPTConfig, setup: Setup, memory: int) -> Setup:
    """``setup`` with the logits of as many positions at once as fit, where those of all do not."""
    chunk, peak = logits_at_once(config, setup), training(config, setup).peak
    while chunk > LEAST_CHUNK and not fits(config, setup, memory):
        chunk = max(LEAST_CHUNK, chunk // 2)
        smaller = replace(setup, loss_chunk=chunk)
        if training(config, smaller).peak >= peak:
            break  # it isn't the logits that need so much
        setup, peak = smaller, training(config, smaller).peak
    return setup


def divisors(n: int) -> list[int]:
    """The whole numbers that divide n, in order."""
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)})
