"""The whole decoder, bottom-up: attention, MLP, block, stack.

The architecture is GPT-2's (Radford et al. 2019), which is GPT-3's (Brown et al. 2020): a stack of pre-norm blocks in
which each position attends to itself and those before it, with the unembedding tied to the embedding. What blocks
compute follows from properties of `GPTConfig`, among which are those of Llama, Mistral, Qwen2 and Qwen3: RMSNorm (Zhang
and Sennrich 2019), rotary positions (Su et al. 2021), heads that share keys and values (Ainslie et al. 2023),
normalized queries and keys (Henry et al. 2020), SwiGLU (Shazeer 2020), layers that see a window (Child et al. 2019).
Parameters have GPT-2's own names (`gpt.model.params` lists them). Shapes: B sequences, T positions, C = n_embd, V =
vocab_size, H heads of D, K heads of keys and values.
"""

import math
from functools import cached_property

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from gpt.config import GPTConfig
from gpt.model import kernels
from gpt.model.cache import Placement, Places, Where
from gpt.model.positions import Rope, rotary_table, rotate, sine_table

INIT_STD = 0.02  # GPT-2's, for every matrix
QK_SCALE = 1.2  # what sharpens scores of normalized queries and keys at first; their weights are trained
ROPE_TABLE = 8192  # positions that the table of rotations has at first; it grows


class Linear(nn.Linear):
    """A linear map that leaves out torch's initialization on the meta device, where a model awaits weights from a file:
    torch would import its compiler for it, which takes seconds."""

    def reset_parameters(self) -> None:
        """Initializes as torch does, unless the weight is on the meta device."""
        if not self.weight.is_meta:
            super().reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        """x Wᵀ + b: (…, in) → (…, out)."""
        return kernels.linear(x, self.weight, self.bias)


class Embedding(nn.Embedding):
    """A table of rows that leaves out torch's initialization on the meta device, as `Linear` does."""

    def reset_parameters(self) -> None:
        """Initializes as torch does, unless the weight is on the meta device."""
        if not self.weight.is_meta:
            super().reset_parameters()


class Dropout(nn.Dropout):
    """Dropout whose random numbers are cheap on a CPU."""

    def forward(self, x: Tensor) -> Tensor:
        """(…) → (…)."""
        return kernels.drop(x, self.p) if self.training else x


class RMSNorm(nn.RMSNorm):
    """x / √(mean(x²) + ε) · γ (Zhang and Sennrich 2019), computed in float32 or wider."""

    eps: float
    weight: nn.Parameter

    @cached_property
    def floor(self) -> Tensor:
        """ε as a tensor on the CPU, of the dtype in which the norm is computed."""
        return torch.tensor(self.eps, dtype=torch.promote_types(self.weight.dtype, torch.float32), device="cpu")

    def forward(self, x: Tensor) -> Tensor:
        """(…, C) → (…, C), of the dtype of x."""
        if kernels.is_eager_on_cpu(x):
            return kernels.rms_norm(x, self.weight, self.floor)
        wide = torch.promote_types(x.dtype, torch.float32)
        return F.rms_norm(x.to(wide), self.normalized_shape, self.weight.to(wide), self.eps).to(x.dtype)


def make_norm(config: GPTConfig) -> nn.LayerNorm | RMSNorm:
    """Makes a norm of the residual stream."""
    kind = RMSNorm if config.norm == "rmsnorm" else nn.LayerNorm
    return kind(config.n_embd, eps=config.layer_norm_epsilon)


class Attention(nn.Module):
    """Causal multi-head self-attention: softmax(q kᵀ / √d) v in each head (Vaswani et al. 2017, §3.2)."""

    def __init__(self, config: GPTConfig, window: int | None = None) -> None:
        super().__init__()
        self.head_size, self.window, self.dropout = config.head_size, window, config.dropout
        self.groups = config.n_head // config.kv_heads  # heads of queries that share one of keys and values
        self.prompts: torch.dtype | None = None  # the dtype in which many positions attend, where it is another
        heads, cached = config.n_head * config.head_size, config.kv_heads * config.head_size
        # Query, key and value of all heads at once; and the value-down map, W_O.
        self.c_attn = Linear(config.n_embd, heads + 2 * cached, bias=config.biases != "none")
        self.q_norm: nn.Module | None = None
        self.k_norm: nn.Module | None = None
        if config.qk_norm:
            self.q_norm, self.k_norm = (RMSNorm(config.head_size, eps=config.layer_norm_epsilon) for _ in "qk")
        self.c_proj = Linear(heads, config.n_embd, bias=config.biases == "all")
        self.resid_dropout = Dropout(config.dropout)

    def forward(self, x: Tensor, layer: int, rope: Rope | None = None, places: Places | None = None) -> Tensor:
        """Each position's sum of the values that it sees: (B, T, C) → (B, T, C). ``rope``: the rotations of rotary
        positions, as `GPT.embed_at` gives them."""
        B, T, _ = x.shape
        q, k, v = self.qkv(x, rope)
        if places is None:
            y = kernels.attend(q, k, v, None, self.dropout if self.training else 0.0, self.window)
        else:
            y = places.attend(layer, q, k, v, self.prompts)
        y = y.transpose(1, 2).reshape(B, T, -1)  # (B, T, H · D): heads side by side again
        out: Tensor = self.c_proj(y)
        return self.resid_dropout(out) if self.training else out

    def qkv(self, x: Tensor, rope: Rope | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries (B, H, T, D), keys and values (B, K, T, D), normalized and rotated. Where ranks share the heads
        (`gpt.parallel.tensor`), H and K are this rank's."""
        # Normalized and rotated as they lie: seen transposed, compiled code for a GPU would copy them thrice.
        heads = self.c_attn(x).view(*x.shape[:2], -1, self.head_size)  # (B, T, H + 2 K, D)
        K = heads.size(2) // (self.groups + 2)
        both, v = heads.split_with_sizes([(self.groups + 1) * K, K], dim=2)
        if self.q_norm is None and rope is not None:  # queries and keys at once, by half as many calls
            both = rotate(both, rope)
        q, k = both.split_with_sizes([self.groups * K, K], dim=2)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
            if rope is not None:
                q, k = rotate(q, rope), rotate(k, rope)
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    def pattern(self, x: Tensor, rope: Rope | None = None) -> Tensor:
        """softmax(q kᵀ / √d) with keys that are not seen masked, (B, H, T, T), in float32: what `kernels.attend`
        multiplies values by and does not return."""
        q, k, _ = self.qkv(x, rope)
        k = k.repeat_interleave(self.groups, dim=1)
        scores = q.float() @ k.float().transpose(2, 3) / math.sqrt(self.head_size)
        return scores.masked_fill(~kernels.visible(q.size(2), self.window, q.device), float("-inf")).softmax(-1)


def activate(x: Tensor, gated: bool) -> Tensor:
    """GELU, (…, width) → (…, width); or SwiGLU, whose gate comes first, (…, 2 · width) → (…, width)."""
    if gated:
        gate, inside = x.chunk(2, dim=-1)
        return F.silu(gate) * inside
    return F.gelu(x, approximate="tanh")


class MLP(nn.Module):
    """Up to the width of the inside, GELU (tanh form, as GPT-2 has it) or SwiGLU, and down again."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.gated = config.mlp == "swiglu"
        biases = config.biases == "all"
        # With a gate the maps of the gate and of the inside at once.
        self.c_fc = Linear(config.n_embd, config.mlp_width * (1 + self.gated), bias=biases)
        self.c_proj = Linear(config.mlp_width, config.n_embd, bias=biases)
        self.dropout = Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Each position by itself: (B, T, C) → (B, T, C)."""
        out: Tensor = self.c_proj(activate(self.c_fc(x), self.gated))
        return self.dropout(out) if self.training else out


class Block(nn.Module):
    """Attention, then MLP, each on a normalized copy and added to the residual stream."""

    def __init__(self, config: GPTConfig, window: int | None = None) -> None:
        super().__init__()
        self.ln_1 = make_norm(config)
        self.attn = Attention(config, window)
        self.ln_2 = make_norm(config)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, layer: int, rope: Rope | None = None, places: Places | None = None) -> Tensor:
        """(B, T, C) → (B, T, C)."""
        return self.add_mlp(self.add_attention(x, layer, rope, places))

    def add_attention(self, x: Tensor, layer: int, rope: Rope | None = None, places: Places | None = None) -> Tensor:
        """The block's first half: (B, T, C) → (B, T, C)."""
        x = x + self.attn(self.ln_1(x), layer, rope, places)
        return x

    def add_mlp(self, x: Tensor) -> Tensor:
        """The block's second half: (B, T, C) → (B, T, C)."""
        x = x + self.mlp(self.ln_2(x))
        return x


class GPT(nn.Module):
    """The decoder: ids → logits over the next id at every position."""

    wpe: nn.Embedding  # where positions are learned
    sine: Tensor  # where they are a fixed table
    rope: Tensor | None  # where they are rotations: cosines and sines, (2, positions, D)

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.wte = Embedding(config.vocab_size, config.n_embd)  # embedding, and unembedding transposed
        if config.positions == "learned":
            self.wpe = Embedding(config.block_size, config.n_embd)
        self.lay_tables()
        self.drop = Dropout(config.dropout)
        self.h = nn.ModuleList(Block(config, window) for window in config.windows)
        self.ln_f = make_norm(config)
        # The unembedding where it is a matrix of its own, or is laid out apart from the embedding (`decoding.weights`).
        self.lm_head: nn.Module | None = None if config.tied else Linear(config.n_embd, config.vocab_size, bias=False)
        self.kv_heads = config.kv_heads  # that this rank computes: see `gpt.parallel.tensor`
        self.recompute = False  # whether blocks' activations are computed again for the gradient, and not kept
        self.initialize()

    def lay_tables(self, device: torch.device | None = None) -> None:
        """Computes the tables of positions that are not learned."""
        config, rope = self.config, None
        with torch.device("cpu"):  # also where parameters are on the meta device: there, `arange` takes a second
            if config.positions == "sinusoidal":
                # The paper scales embeddings up by √C, so that they and the table are both of order one. GPT-2's
                # embeddings are of order 0.02 and stay so; the table is scaled down to them instead.
                table = INIT_STD * sine_table(config.block_size, config.n_embd)
                self.register_buffer("sine", table.to(device), persistent=False)
            if config.positions == "rotary":
                rope = rotary_table(min(config.block_size, ROPE_TABLE), config).to(device)
        self.register_buffer("rope", rope, persistent=False)

    def initialize(self) -> None:
        """GPT-2's initialization, of each module in order. Uses torch's global generator."""
        if not self.wte.weight.is_meta:
            for name, module in self.named_modules():
                initialize(module, name, self.config)

    def position_table(self) -> Tensor | None:
        """The table that is added to the embedding, (block_size, C); None where positions are rotations."""
        match self.config.positions:
            case "learned":
                return self.wpe.weight
            case "sinusoidal":
                return self.sine
            case _:
                return None

    def trunk(self, idx: Tensor, places: Placement | None = None) -> Tensor:
        """Ids (B, T) → the normalized residual stream (B, T, C). With ``places`` in a cache, they follow what the
        cache's rows have seen. Raises ValueError past the context, which rotary positions in a cache may leave."""
        x, rope = self.embed(idx, places)
        return self.stack(x, rope, places)

    def embed(self, idx: Tensor, places: Placement | None = None) -> tuple[Tensor, Rope | None]:
        """Ids (B, T) → the residual stream before the first block, (B, T, C), and the rotations of its positions."""
        where, reach = (slice(0, idx.size(1)), idx.size(1)) if places is None else (places.where, places.reach)
        if reach > self.config.block_size and (places is None or self.rope is None):
            raise ValueError(f"{reach} tokens do not fit in the context of {self.config.block_size}")
        self.reach(reach)
        return self.embed_at(idx, where)

    def embed_at(self, idx: Tensor, where: Where) -> tuple[Tensor, Rope | None]:
        """Ids (B, T) at positions, a slice or (B, T) → the residual stream before the first block, (B, T, C), and the
        rotations of these positions, where positions are rotations."""
        x = self.wte(idx)
        table = self.position_table()
        if table is not None:
            x = x + table[where]
        x = kernels.narrowed(self.drop(x) if self.training else x)
        if self.rope is None:
            return x, None
        cos, sin = self.rope[:, where].unsqueeze(-2)
        return x, (cos, sin)

    def stack(self, x: Tensor, rope: Rope | None = None, places: Places | None = None) -> Tensor:
        """The blocks and the last norm: (B, T, C) → (B, T, C)."""
        again = self.recompute and torch.is_grad_enabled()
        for layer, block in enumerate(self.h):
            x = checkpoint(block, x, layer, rope, use_reentrant=False) if again else block(x, layer, rope, places)
        return self.last_norm(x)

    def last_norm(self, x: Tensor) -> Tensor:
        """The residual stream after the blocks, normalized for the unembedding: (B, T, C) → (B, T, C)."""
        return kernels.narrowed(self.ln_f(x))

    def reach(self, positions: int) -> None:
        """Grows the table of rotations to so many positions: rotary positions may run on past the context."""
        if self.rope is not None and positions > self.rope.size(1):
            with torch.inference_mode(False):  # it outlives this call, and may be trained with
                self.rope = rotary_table(2 * positions, self.config).to(self.rope)  # its device and dtype

    @property
    def unembedding(self) -> Tensor:
        """The weight of the unembedding, (V, C), in training: the embedding, or a matrix of its own."""
        weight = self.wte.weight if self.lm_head is None else self.lm_head.weight
        assert isinstance(weight, Tensor)
        return weight

    def unembed(self, x: Tensor) -> Tensor:
        """The residual stream (…, C) → logits (…, V)."""
        return F.linear(x, self.wte.weight) if self.lm_head is None else self.lm_head(x)

    def forward(self, idx: Tensor, places: Placement | None = None) -> Tensor:
        """Ids (B, T) → logits (B, T, V). Raises ValueError past the context."""
        return self.unembed(self.trunk(idx, places))


@torch.no_grad()
def initialize(module: nn.Module, name: str, config: GPTConfig) -> None:
    """GPT-2's initialization of a module's own parameters: matrices normal with deviation 0.02, those that write to the
    residual stream scaled by 1/√(2·n_layer) for the 2·n_layer of them; biases 0. Norms are made with 1 and 0, those of
    queries and keys then have √1.2 each."""
    if isinstance(module, (nn.Linear, nn.Embedding)):
        module.weight.normal_(0.0, INIT_STD)
        if name.endswith("c_proj"):
            module.weight.mul_(1 / math.sqrt(2 * config.n_layer))
    if isinstance(module, nn.Linear) and module.bias is not None:
        module.bias.zero_()
    if isinstance(module, RMSNorm) and name.endswith(("q_norm", "k_norm")):
        module.weight.fill_(math.sqrt(QK_SCALE))
