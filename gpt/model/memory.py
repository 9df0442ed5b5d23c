"""Estimates a training step's memory in bytes, without importing torch.

In tests, the estimate is at most 15 % above and 2 % below the actual memory. benchmarks/memory.md derives the terms.
Korthikanti et al. 2022 (arXiv 2205.05198, §4.1) count a Megatron block the same way.
"""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from gpt.config.model import GPTConfig, Mlp
from gpt.model.params import Kind, Shape, counts, named_parameters, parameters

WIDTHS = {"float32": 4, "bfloat16": 2, "float16": 2}
MAX_MATMUL_POSITIONS = 512  # Maximum positions of matmul attention in CPU training.
# Logits are padded to a multiple of `ALIGNED` columns. With an odd number, like GPT-2's 50,257, a GPU can't use its
# fast kernels.
ALIGNED, ALIGNED_ON = 64, ("cuda",)
# Maximum number of logits in memory. On a GPU, kernels index more than 2³¹ elements in int64, where torch has had
# errors (pytorch#111484). If the unembedding is frozen, chunks can be smaller, because they accumulate no gradient. On
# a CPU, the logits should fit in the caches. Forward and backward on two cores in bfloat16, with 4,096 positions, 4,096
# ids and width 256, took 53 ms with chunks of 2²² logits, 81 ms with 2²⁴, and 149 ms with all logits and autograd.
LOGITS, FROZEN_LOGITS, LOGITS_ON_CPU = 2**30, 2**27, 2**22
# Minimum positions per chunk: with fewer, it takes too long to read the unembedding, and to add to its gradient.
MIN_POSITIONS_PER_CHUNK, MIN_FROZEN_POSITIONS = 512, 128
FLOAT = 4
# Resident bytes of a CPU run besides a step's: 250 MB for Python and torch, 170 MB for held-out logits and 100 MB of
# freed memory that glibc keeps, and 2.4 KB of tokenizer per token of the vocabulary.
PROCESS, PROCESS_PER_TOKEN = 520_000_000, 2_400
# Elements per hidden unit that the MLP saves for its gradient. GELU saves its input and output; SwiGLU saves the gate
# before and after SiLU, the up-projection and the product.
SAVED_BY_MLP: dict[Mlp, int] = {"gelu": 2, "swiglu": 4}
MUON_UPDATES = 1.75  # Float32 copies of all matrices that Muon needs: updates, and gradients of the largest group.
MUON_GATHERED = 5.5  # Copies of the matrices that a rank updates, if it gathers them from other ranks.


@dataclass(frozen=True)
class Setup:
    """A training step's dtype, optimizer, micro-batch and parallelism."""

    micro_batch: int = 1  # rows per rank
    accumulates: bool = False  # whether a step has several micro-batches
    dtype: str = "bfloat16"  # dtype of matrix products, a key of `WIDTHS`
    optimizer: Literal["muon", "adamw"] = "muon"
    recompute: bool = False  # activation checkpointing: blocks save only their input and recompute the rest
    loss_chunk: int = 0  # positions per chunk of logits; if 0, `positions_at_once` decides
    data: int = 1  # data-parallel ranks
    shard: bool = False  # whether data-parallel ranks shard parameters, gradients and optimizer state
    device: Literal["cuda", "cpu"] = "cuda"
    is_taught: bool = False  # whether the model learns from teachers
    adapters: tuple[Shape, ...] = ()  # shapes of LoRA's A and B of each map, in turn; if empty, all weights are trained
    sides: int = 1  # sequences per row: 2 for preferences
    base_bits: float = 0.0  # bits of a weight in the blocks of a quantized base model

    @property
    def width(self) -> int:
        """Bytes per element of matrix products."""
        return WIDTHS[self.dtype]

    @property
    def weight_width(self) -> int:
        """Bytes per element of the weights. A frozen model is in bfloat16 if the run computes in it."""
        return 2 if self.adapters and self.dtype == "bfloat16" else FLOAT

    @property
    def stream(self) -> int:
        """Bytes per element of the residual stream."""
        return 2 if self.device == "cuda" and self.dtype == "bfloat16" else self.weight_width

    @property
    def norm(self) -> int:
        """Bytes per element of a norm's input. On a GPU, this is a float32 copy of the residual stream."""
        return FLOAT if self.device == "cuda" else self.stream

    @property
    def shard_ranks(self) -> int:
        """Number of ranks that shard parameters, gradients and optimizer state."""
        return self.data if self.shard else 1

    @property
    def autocast(self) -> bool:
        """Whether matrix products use copies in a narrower dtype."""
        return self.dtype != "float32"


@dataclass(frozen=True)
class StepMemory:
    """Bytes on a rank. ``moments`` has the totals at three moments of a step."""

    parameters: int  # weights, including the base model of adapters
    gradients: int  # float32
    optimizer: int  # optimizer state, float32
    activations: int  # tensors saved for the backward pass of the trunk
    logits: int  # logits and all other tensors of the loss and its gradients
    copies: int  # narrower copies of weights, or weights gathered from other ranks
    snapshot: int  # parameters and optimizer state for a checkpoint, in host memory
    moments: Mapping[str, int]
    process: int = 0  # everything else in the process, on a CPU

    @property
    def minimum(self) -> int:
        """Bytes that a run needs on the device, even with the smallest micro-batch."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def peak(self) -> int:
        """Maximum of ``moments``, in addition to ``process``."""
        return self.process + max(self.moments.values())


def count_step_memory(config: GPTConfig, setup: Setup) -> StepMemory:
    """Counts a rank's bytes in any training step after the first, which creates the optimizer state."""
    rank_counts = counts(config)
    positions = setup.sides * setup.micro_batch * config.block_size
    trained = FLOAT * (sum(map(math.prod, setup.adapters)) or sum(rank_counts.values()))
    gradients = -(-trained // setup.shard_ranks)
    parameters = gradients + setup.weight_width * sum(rank_counts.values()) * bool(setup.adapters)
    if setup.base_bits:  # A product restores its matrix.
        parameters -= round((setup.weight_width - setup.base_bits / 8) * rank_counts["linear"])
        parameters += setup.width * max(math.prod(p.shape) for p in named_parameters(config).values() if p.is_matrix)
    state = 2 * gradients if setup.adapters else -(-optimizer_state(rank_counts, setup.optimizer) // setup.shard_ranks)
    snapshot = gradients + state
    activations, loss, (fixed, blocks) = (
        count_saved_bytes(config, setup),
        loss_bytes(config, setup),
        weight_copies(config, setup),
    )
    permanent = parameters + state + fixed + snapshot * (setup.device == "cpu")
    copies = blocks * (not setup.shard)  # Autocast copies all block weights once per micro-batch.
    # Gradients of earlier micro-batches, or the gradient buckets of torch's DDP.
    accumulated = gradients * (setup.accumulates or (setup.data > 1 and not setup.shard))
    # A block's backward pass needs MLP gradients, gathered weights, and recomputed activations.
    block_backward = positions * setup.width * config.mlp_width * (2 if config.mlp == "swiglu" else 1)
    block_backward += blocks * setup.shard
    recomputed = positions * block(config, setup) * setup.recompute
    # Float32 gradient of the embedding. A tied embedding gets gradients from the logits first and from the ids last.
    table = 0 if setup.adapters else FLOAT * rank_counts["embedding"]
    tables = 2 * config.tied + setup.accumulates + setup.shard
    moments = {
        "loss": permanent + copies + accumulated + activations + max(loss, table + block_backward + recomputed),
        "backward": permanent + gradients + max(block_backward + positions * block(config, setup), tables * table),
        "update": permanent - fixed + gradients + _update_bytes(config, setup),
    }
    process = (PROCESS + PROCESS_PER_TOKEN * config.vocab_size) * (setup.device == "cpu")
    sizes = parameters, gradients, state, activations, loss, fixed + blocks, snapshot
    return StepMemory(*sizes, moments, process)


def optimizer_state(rank_counts: Mapping[Kind, int], optimizer: str) -> int:
    """Bytes of optimizer state: two moments per parameter for AdamW. Muon needs only one for the blocks' matrices."""
    momentum = rank_counts["linear"] if optimizer == "muon" else 0
    return FLOAT * (momentum + 2 * (sum(rank_counts.values()) - momentum))


def count_saved_bytes(config: GPTConfig, setup: Setup) -> int:
    """Bytes that autograd saves for a micro-batch: the embeddings' dropout mask, the last norm's input, and the blocks'
    activations (with recomputation, only their inputs)."""
    C, T = config.n_embd, config.block_size
    per_block = setup.stream * C if setup.recompute else block(config, setup)
    outside = (setup.norm + _dropout_bytes(config, setup, FLOAT)) * C
    saved = setup.sides * setup.micro_batch * T * (config.n_layer * per_block + outside)
    if setup.recompute:
        return saved
    # All sequences share the narrower copies of RoPE cosines and sines, and the masks of fused sliding-window
    # attention.
    rope_elements = config.n_layer * (2 + 2 * config.qk_norm) * config.head_size * (config.positions == "rotary")
    mask_elements = T * sum(window is not None and window < T for window in config.windows)
    return saved + setup.width * T * (
        rope_elements * setup.autocast + mask_elements * (_attention_kernel(config, setup) == "fused")
    )


def block(config: GPTConfig, setup: Setup) -> int:
    """Bytes per position that a block saves for its gradient: norm inputs, linear inputs, the MLP's hidden layer,
    dropout masks, attention tensors, and A x of each adapter."""
    C, s = config.n_embd, setup.width
    inner = s * (config.n_head * config.head_size + SAVED_BY_MLP[config.mlp] * config.mlp_width)
    inner += s * sum(rows for rows, _ in setup.adapters[::2]) // config.n_layer
    return inner + 2 * (setup.norm + s + _dropout_bytes(config, setup, s)) * C + _attention_bytes(config, setup)


def _dropout_bytes(config: GPTConfig, setup: Setup, width: int) -> int:
    """Bytes per element of a dropout mask: 1 on a GPU, ``width`` on a CPU, and 0 without dropout."""
    return 0 if config.dropout == 0 else width if setup.device == "cpu" else 1


def _attention_bytes(config: GPTConfig, setup: Setup) -> int:
    """Bytes per position of queries, keys, values and scores."""
    H, K, T, s = config.n_head, config.kv_heads, config.block_size, setup.width
    q, k = H * config.head_size, K * config.head_size  # widths of queries and of keys
    qkv = s * (q + 2 * k)
    normalizes_in_float32 = config.qk_norm and setup.autocast and setup.device == "cuda"
    match _attention_kernel(config, setup):
        case "plain":  # Copies, c_attn's output if a view is saved, and the pattern (with dropout three times).
            return qkv * (1 + (config.qk_norm or K == 1)) + s * H * T * (3 if config.dropout else 1)
        case "unfused":  # Torch uses float32, and repeats keys and values for every query head.
            return qkv * config.qk_norm + 3 * FLOAT * (H * T + q)
        case _:  # Rotated or normalized queries and keys, and a float per row of scores.
            transforms_qk = config.qk_norm or config.positions == "rotary"
            return qkv + s * (q + k) * transforms_qk + FLOAT * (q + k) * normalizes_in_float32 + FLOAT * H


def _attention_kernel(config: GPTConfig, setup: Setup) -> Literal["plain", "unfused", "fused"]:
    """Returns the attention kernel: our matrix products (``plain``) for short contexts on a CPU, else torch's kernel.
    That kernel is unfused for dropout on a CPU, else fused."""
    if setup.device == "cuda":
        return "fused"
    return "plain" if config.block_size <= MAX_MATMUL_POSITIONS else "unfused" if config.dropout else "fused"


def weight_copies(config: GPTConfig, setup: Setup) -> tuple[int, int]:
    """Returns the bytes of permanent weight copies, and of copies for the blocks.

    Autocast copies all block weights to the narrower dtype once per micro-batch; of a frozen model, only adapters are
    copied, B into a matrix with zeros (`gpt.model.lora`). Sharding permanently gathers the
    weights outside the blocks, in float32. With sharding, a block's backward pass needs its own weights, the next
    block's weights and its own gradients, all in the dtype of products. It also needs the previous block's gradients in
    float32, while they are sent.
    """
    rank_counts, s = counts(config), setup.width
    blocks = rank_counts["linear"] + rank_counts["bias"]
    if setup.adapters:
        pairs = zip(setup.adapters[::2], setup.adapters[1::2], strict=True)
        return 0, s * sum(rows * (width * setup.autocast + out) for (rows, width), (out, _) in pairs)
    if not setup.shard:
        return 0, s * blocks * setup.autocast
    gathered = FLOAT * (rank_counts["embedding"] + rank_counts["positions"] + rank_counts["unembedding"])
    return gathered, blocks // config.n_layer * (3 * s + FLOAT)


def loss_bytes(config: GPTConfig, setup: Setup) -> int:
    """Bytes of the loss: the trunk's output and its gradient, logits, float32 softmax, the probabilities of teachers,
    the unembedding in the dtype of products, and its gradient (two float32 tensors if there are several chunks; none
    if it is frozen)."""
    V, C, s = config.vocab_size, config.n_embd, setup.width
    n, positions = logits_at_once(config, setup), setup.sides * setup.micro_batch * config.block_size
    columns = columns_of_logits(V, setup.device)
    narrows = s * (setup.weight_width != s)
    copy = narrows if columns == V else s
    gradient = 0 if setup.adapters else 2 * FLOAT if n < positions else s
    x = positions * C * (setup.weight_width + narrows + 2 * s)
    teachers = n * 3 * FLOAT * V * setup.is_taught
    return x + n * (s + FLOAT) * columns + (copy + gradient) * V * C + teachers


def logits_at_once(config: GPTConfig, setup: Setup) -> int:
    """Positions per chunk of logits."""
    positions = setup.sides * setup.micro_batch * config.block_size
    return positions_at_once(positions, config.vocab_size, setup.loss_chunk, setup.device, bool(setup.adapters))


def positions_at_once(positions: int, vocab_size: int, chunk: int, device: str, frozen: bool = False) -> int:
    """Positions per chunk of logits. Chunks have nearly equal sizes, up to ``chunk`` if nonzero."""
    max_logits = LOGITS_ON_CPU if device != "cuda" else FROZEN_LOGITS if frozen else LOGITS
    least = MIN_FROZEN_POSITIONS if frozen else MIN_POSITIONS_PER_CHUNK
    max_chunk = min(chunk or positions, max(least, max_logits // columns_of_logits(vocab_size, device)))
    return -(-positions // -(-positions // max_chunk))


def columns_of_logits(vocab_size: int, device: str) -> int:
    """Vocabulary size, padded on a GPU."""
    return vocab_size + (-vocab_size % ALIGNED if device in ALIGNED_ON else 0)


def _update_bytes(config: GPTConfig, setup: Setup) -> int:
    """Working memory of an optimizer step. AdamW needs none. Muon needs float32 updates, copies of most gradients,
    intermediate results for matrices of one shape, and sharded matrices gathered from other ranks."""
    if setup.optimizer == "adamw":
        return 0
    shards, n = setup.shard_ranks, counts(config)["linear"]
    if shards == 1:  # Copies of the weights in the dtype of matrix products.
        workspace = n * (1.5 + 0.5 * setup.autocast + 1 / setup.data)
    else:
        shapes = [(n, p.shape[1]) for p in parameters(config) if p.is_matrix for n in p.fused or p.shape[:1]]
        stacks = Counter(tuple(sorted(shape)) for shape in shapes)  # Ranks exchange one stack at a time.
        workspace = MUON_GATHERED * max(-(-config.n_layer * k // shards) * math.prod(s) for s, k in stacks.items())
    return round(MUON_UPDATES * FLOAT * n / setup.shard_ranks + setup.width * workspace)


def divisors(n: int) -> list[int]:
    """Returns the divisors of n in ascending order."""
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)})
