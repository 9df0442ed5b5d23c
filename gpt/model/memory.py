"""What training and sampling keep in memory, in bytes, by arithmetic alone: torch is not imported.

It follows what `gpt.model.decoder` and `gpt.training.step` do, tensor by tensor, as they are written (compiled blocks
keep less). Korthikanti et al. 2022 (arXiv 2205.05198, §4.1) count the same way for Megatron: a block keeps 34 bytes for
each position and number of the width, and the scores of attention. Here it is 36 on a GPU in bfloat16: the residual
stream is float32 (+4, the inputs of two LayerNorms), masks of dropout count where there is dropout (−2), and fused
attention keeps one number of each row of scores. docs/memory.md derives every term; tests/test_memory.py compares them
with what autograd saves, and with the live bytes of whole steps.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from gpt.config import GPTConfig
from gpt.model.params import breakdown

WIDTHS = {"float32": 4, "bfloat16": 2, "float16": 2}
# The decoder's and the loss's own, checked by a test: neither may be imported here, since they import torch.
PLAIN_UP_TO = 512  # positions up to which a CPU attends plainly
ALIGNED = 64  # columns to a multiple of which a GPU's logits are filled up
STATS = 8  # mean and deviation of a LayerNorm's position, float32
IDS = 8  # an id
FLOAT = 4
LOGITS = 12  # a logit in the backward pass: the log-softmax, the gradient of it and that of the logit, all float32
MUON_PARTS = 0.75  # of the blocks' matrices that are not queries, keys and values: the larger group
MUON_STACK = 2 / 3  # of them that go through the iteration at once at most: both of the MLP's
MUON_COPIES = 3.5  # of that stack which the iteration holds
MUON_GATHERED = 5.5  # of the matrices that a rank works on, where they came from others


@dataclass(frozen=True)
class Setup:
    """How a step is computed: what one rank of how many holds, and how many sequences at once."""

    micro_batch: int = 1  # sequences at once on a rank
    accumulates: bool = False  # whether a step takes several micro-batches, so that gradients stay between them
    dtype: str = "bfloat16"  # of matrix products, one of `WIDTHS`; weights are float32
    optimizer: Literal["muon", "adamw"] = "muon"
    recompute: bool = False  # whether blocks keep their input alone and are computed again for the gradient
    loss_chunk: int = 0  # positions whose logits exist at once; 0: all
    data: int = 1  # ranks that share out a batch
    shard: bool = False  # whether those also share out parameters, gradients and optimizer state
    tensor: int = 1  # ranks that share out every matrix
    device: Literal["cuda", "cpu"] = "cuda"

    @property
    def width(self) -> int:
        """Bytes of a number in a matrix product."""
        return WIDTHS[self.dtype]

    @property
    def ways(self) -> int:
        """Ranks that share out parameters, gradients and optimizer state."""
        return self.data if self.shard else 1

    @property
    def autocast(self) -> bool:
        """Whether products are computed from copies in a narrower dtype."""
        return self.dtype != "float32"


@dataclass(frozen=True)
class Sizes:
    """Parameters on a tensor rank, by what they are part of."""

    matrices: int  # of the blocks
    biases: int  # of the blocks' linear maps
    norms: int  # of all LayerNorms
    tables: int  # embedding and learned positions
    embedding: int  # the former alone

    @property
    def all(self) -> int:
        """All of them."""
        return self.matrices + self.biases + self.norms + self.tables


def sizes(config: GPTConfig, tensor: int = 1) -> Sizes:
    """What a rank of ``tensor`` ways holds: heads and the MLP's inside are shared out, the rest is whole everywhere."""
    parts, C, L = breakdown(config), config.n_embd, config.n_layer
    whole = 2 * C * L if parts.biases else 0  # of the two maps that write to the residual stream
    return Sizes(
        matrices=12 * C * C * L // tensor,
        biases=(parts.biases - whole) // tensor + whole,
        norms=parts.layer_norms,
        tables=config.vocab_size * C + parts.positions,
        embedding=config.vocab_size * C,
    )


@dataclass(frozen=True)
class Training:
    """Bytes on a rank. Not all of them are there at once: ``moments`` says how much is at each of three moments."""

    parameters: int  # float32
    gradients: int  # float32
    optimizer: int  # its state, float32
    activations: int  # what the trunk keeps for the backward pass
    logits: int  # and what of them is needed for their gradient
    copies: int  # of weights: in the narrower dtype, or gathered from the other ranks
    snapshot: int  # of parameters and optimizer, for checkpoints: in the host's memory, on a CPU thus beside the others
    moments: Mapping[str, int]

    @property
    def peak(self) -> int:
        """The most at any moment."""
        return max(self.moments.values())


def training(config: GPTConfig, setup: Setup) -> Training:
    """What a rank holds of a training step, from the second one on, when the optimizer's state is there."""
    own = sizes(config, setup.tensor)
    positions = setup.micro_batch * config.block_size
    parameters = gradients = FLOAT * -(-own.all // setup.ways)
    state = -(-optimizer_state(own, setup.optimizer) // setup.ways)
    activations, (whole, blocks) = trunk(config, setup), weight_copies(config, setup)
    loss = logits(config, setup)
    table = FLOAT * own.embedding  # its gradient comes from the logits first, and from the ids last
    one = positions * block(config, setup)
    layer = positions * _gradient(config, setup)  # while the gradient of a block is computed
    if setup.shard or setup.recompute:
        layer += blocks if setup.shard else -(-blocks // config.n_layer)
    stay = not (setup.shard or setup.recompute)  # copies of all blocks' weights, until their gradients are there
    # Of the micro-batches before; torch's DDP holds on to them in its buckets.
    waiting = gradients * (setup.accumulates or (setup.data > 1 and not setup.shard and setup.tensor == 1))
    snapshot = parameters + state
    kept = parameters + state + _constants(config) + snapshot * (setup.device == "cpu")
    forward = kept + whole + waiting + activations + blocks * stay
    ahead = 0 if stay or setup.shard else blocks + loss * 2 // 3  # in the forward pass; two of three logits
    behind = table * setup.accumulates + max(one + layer, (2 + setup.shard) * table)
    moments = {
        "loss": forward + max(loss, table + one * setup.recompute + layer, ahead),
        "backward": kept + whole + gradients + behind,
        "update": kept + gradients + _update(config, setup),
    }
    return Training(parameters, gradients, state, activations, loss, whole + blocks, snapshot, moments)


def optimizer_state(own: Sizes, kind: str) -> int:
    """Bytes that AdamW keeps, two moments a parameter, or Muon, one of the blocks' matrices and AdamW's of the rest."""
    momentum = own.matrices if kind == "muon" else 0
    return FLOAT * (momentum + 2 * (own.all - momentum))


def trunk(config: GPTConfig, setup: Setup) -> int:
    """Bytes that autograd keeps of a micro-batch, from the ids to the last LayerNorm: what the blocks keep, or, where
    they are computed again, their inputs alone."""
    C = config.n_embd
    dropped = _mask(config, setup, FLOAT) * C  # the embedding's
    each = FLOAT * C if setup.recompute else block(config, setup)
    last = FLOAT * C + STATS
    return setup.micro_batch * config.block_size * (config.n_layer * each + dropped + last + 2 * IDS)


def block(config: GPTConfig, setup: Setup) -> int:
    """Bytes a position that a block leaves for its gradient.

    Two LayerNorms keep their input, float32, with its mean and deviation. Each linear map keeps its input in the dtype
    of products, the MLP's activation its own. Dropout keeps a mask of each branch."""
    C, s, t = config.n_embd, setup.width, setup.tensor
    norms = 2 * (FLOAT * C + STATS)
    inputs = s * (C + C // t + C)  # of c_attn, c_proj, c_fc
    hidden = 4 * C // t
    mlp = 2 * s * hidden  # before and after its activation
    masks = 2 * _mask(config, setup, s) * C
    return norms + inputs + mlp + masks + _heads(config, setup) // t


def _mask(config: GPTConfig, setup: Setup, width: int) -> int:
    """Bytes that dropout keeps of a number: a truth value on a GPU, and on a CPU what it was multiplied by."""
    return 0 if config.dropout == 0 else width if setup.device == "cpu" else 1


def _heads(config: GPTConfig, setup: Setup) -> int:
    """Bytes a position that all heads keep of queries, keys, values and scores."""
    C, H, T, s = config.n_embd, config.n_head, config.block_size, setup.width
    modern, turned = config.arch == "modern", config.positions == "rotary"
    copied = setup.device == "cpu" and (T <= PLAIN_UP_TO or config.dropout > 0)  # no fused attention
    kept = 3 * s * C  # queries, keys, values
    if copied and T > PLAIN_UP_TO:  # torch's attention that is not fused: in float32
        # Copies of queries and keys, and values, in float32 a view of all three.
        kept, scores = FLOAT * C * (3 if setup.autocast else 5), 3 * FLOAT * H * T
    elif copied:  # the pattern, and under dropout what it is multiplied by and what comes of that
        scores = s * H * T * (3 if config.dropout else 1)
    else:
        scores = FLOAT * H  # the logarithm of the sum of each row
        if modern or turned:  # queries and keys of their own, beside what they were made from; out in another order
            kept += (2 + 1) * s * C
    if modern:  # what was normalized: in float32, or as it lies in queries, keys and values side by side
        kept += 2 * FLOAT * C if setup.autocast else 3 * s * C * copied
        kept += 2 * FLOAT * H
    return kept + scores


def weight_copies(config: GPTConfig, setup: Setup) -> tuple[int, int]:
    """Bytes of weights beside the parameters: those that are there all the time, and those of blocks.

    Autocast makes copies of all blocks' in the narrower dtype once a micro-batch. Where ranks share out the parameters,
    what is in no block is gathered once, in float32; and while the gradient of a block is computed there are its
    parameters, those of the next one, and its gradients, in the dtype of products, and of the block before the
    gradients that are on their way, in float32."""
    own, s = sizes(config, setup.tensor), setup.width
    blocks = own.matrices + own.biases
    if not setup.shard:
        return 0, s * blocks if setup.autocast else 0
    one = blocks // config.n_layer
    return FLOAT * own.tables, one * (3 * s + FLOAT)


def logits(config: GPTConfig, setup: Setup) -> int:
    """Bytes of the loss when its gradient is computed: the logits of a micro-batch, or of ``loss_chunk`` positions with
    the whole gradient of the unembedding that is being summed up."""
    V, C, s = config.vocab_size, config.n_embd, setup.width
    cuda, positions = setup.device == "cuda", setup.micro_batch * config.block_size
    padded = -(-V // ALIGNED) * ALIGNED if cuda else V
    chunked = 0 < setup.loss_chunk < positions
    n = setup.loss_chunk if chunked else positions
    filled = FLOAT * padded * C if cuda and padded != V else 0  # the unembedding with rows of zeros
    narrow = s * padded * C if setup.autocast else 0
    x = positions * s * C
    if chunked:  # what is computed again begins from float32; gradients come piece by piece
        x = positions * 2 * FLOAT * C
        filled += FLOAT * padded * C
    elif setup.autocast:
        filled = 0
    gradient = FLOAT * padded * C + narrow
    return x + filled + narrow + max(LOGITS * n * V, s * n * padded + gradient)


def _gradient(config: GPTConfig, setup: Setup) -> int:
    """Bytes a position that the backward pass of a block adds at most to what was kept, of which it lets go meanwhile:
    the gradient of the MLP's inside before its activation, where that after it takes the place of what the second map
    kept; of a square, with the three products that give its derivative; and the residual stream's, in the dtype of
    products."""
    hidden, s = 4 * config.n_embd // setup.tensor, setup.width
    inside = s * hidden
    if config.arch == "modern":
        inside = 3 * s * hidden
    return inside + (s * config.n_embd if setup.autocast else 0)


def _update(config: GPTConfig, setup: Setup) -> int:
    """Bytes that an optimizer's step works in. AdamW's is one kernel. Muon holds all updates, the gradients of a group
    once more, and the iteration's copies of the matrices that go through it at once; where ranks have parts, these are
    whole matrices, as they arrived, put together, and stacked."""
    if setup.optimizer == "adamw":
        return 0
    own, s = sizes(config, setup.tensor), setup.width
    updates = (FLOAT + FLOAT * MUON_PARTS) * own.matrices / setup.ways
    holders = setup.ways * setup.tensor
    if holders == 1:  # each rank takes a share of the stack, in the narrower dtype, and gathers the others'
        copies = setup.autocast + max(MUON_COPIES / setup.data, (1 + 1 / setup.data) * (setup.data > 1))
        return round(updates + s * MUON_STACK * copies * own.matrices)
    whole = -(-config.n_layer // holders) * 4 * config.n_embd**2
    return round(updates + s * MUON_GATHERED * whole)


def _constants(config: GPTConfig) -> int:
    """Bytes of tables that are no parameters."""
    tables = {"sinusoidal": config.n_embd, "rotary": config.n_embd // config.n_head}
    return FLOAT * config.block_size * tables.get(config.positions, 0)


def cache(config: GPTConfig, rows: int = 1, dtype: str = "bfloat16") -> int:
    """Bytes of keys and values of ``rows`` texts, with room for a whole context each."""
    return 2 * WIDTHS[dtype] * config.n_layer * config.n_embd * config.block_size * rows
