"""The GPT decoder.

It has pre-norm blocks with causal self-attention and tied embeddings, as in GPT-2 (Radford et al. 2019) and GPT-3
(Brown et al. 2020). `GPTConfig` selects the components of Llama, Mistral, Qwen2 and Qwen3: RMSNorm (Zhang and Sennrich
2019), RoPE (Su et al. 2021), grouped-query attention (Ainslie et al. 2023), query and key normalization (Henry et al.
2020), SwiGLU (Shazeer 2020) and sliding windows (Child et al. 2019). Parameters have GPT-2's names
(`gpt.model.params`). Shapes: B sequences, T positions, C = n_embd, V = vocab_size, H query heads of size D, K key/value
heads.
"""

import math
from functools import cached_property, partial

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from gpt.config.model import GPTConfig
from gpt.model import kernels
from gpt.model.cache import Placement, Places, Positions
from gpt.model.positions import Rope, rotary_table, rotate

INIT_STD = 0.02  # Standard deviation of GPT-2's initial matrices.
QK_SCALE = 1.2  # Initial scale of attention scores with `qk_norm`.
ROPE_TABLE = 8192  # Maximum initial length of the RoPE table.


class Linear(nn.Linear):
    """A linear map that is not initialized on the meta device, where torch would spend seconds importing its
    compiler."""

    def reset_parameters(self) -> None:
        """Skips the meta device."""
        if not self.weight.is_meta:
            super().reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        """x Wᵀ + b: (…, in) → (…, out)."""
        return kernels.linear(x, self.weight, self.bias)


class Embedding(nn.Embedding):
    """An embedding table that is not initialized on the meta device, like `Linear`."""

    def reset_parameters(self) -> None:
        """Skips the meta device."""
        if not self.weight.is_meta:
            super().reset_parameters()


class Dropout(nn.Dropout):
    """Dropout with a fast mask on CPUs."""

    def forward(self, x: Tensor) -> Tensor:
        """Zeroes random elements during training."""
        return kernels.drop(x, self.p) if self.training else x


class RMSNorm(nn.RMSNorm):
    """x / √(mean(x²) + ε) · γ (Zhang and Sennrich 2019), computed in float32 or wider."""

    eps: float
    weight: nn.Parameter

    @cached_property
    def eps_tensor(self) -> Tensor:
        """ε as a CPU tensor, in float32 or wider."""
        return torch.tensor(self.eps, dtype=torch.promote_types(self.weight.dtype, torch.float32), device="cpu")

    def forward(self, x: Tensor) -> Tensor:
        """(…, C) → (…, C), in the dtype of ``x``."""
        if kernels.is_eager_on_cpu(x):
            return kernels.rms_norm(x, self.weight, self.eps_tensor)
        wide = torch.promote_types(x.dtype, torch.float32)
        return F.rms_norm(x.to(wide), self.normalized_shape, self.weight.to(wide), self.eps).to(x.dtype)


def make_norm(config: GPTConfig) -> nn.LayerNorm | RMSNorm:
    """Makes a norm for the residual stream."""
    norm_class = RMSNorm if config.norm == "rmsnorm" else nn.LayerNorm
    return norm_class(config.n_embd, eps=config.layer_norm_epsilon)


class Attention(nn.Module):
    """Causal multi-head self-attention: softmax(q kᵀ / √d) v in each head (Vaswani et al. 2017, §3.2)."""

    def __init__(self, config: GPTConfig, window: int | None = None) -> None:
        super().__init__()
        self.head_size, self.window, self.dropout = config.head_size, window, config.dropout
        self.groups = config.n_head // config.kv_heads  # query heads per key/value head
        query_width, kv_width = config.n_head * config.head_size, config.kv_heads * config.head_size
        # c_attn computes queries, keys and values of all heads; c_proj is the output matrix W_O.
        self.c_attn = Linear(config.n_embd, query_width + 2 * kv_width, bias=config.biases != "none")
        self.q_norm: nn.Module | None = None
        self.k_norm: nn.Module | None = None
        if config.qk_norm:
            self.q_norm, self.k_norm = (RMSNorm(config.head_size, eps=config.layer_norm_epsilon) for _ in "qk")
        self.c_proj = Linear(query_width, config.n_embd, bias=config.biases == "all")
        self.resid_dropout = Dropout(config.dropout)

    def forward(self, x: Tensor, layer: int, rope: Rope | None = None, places: Places | None = None) -> Tensor:
        """(B, T, C) → (B, T, C), with ``rope`` from `GPT.embed_at`."""
        B, T, _ = x.shape
        q, k, v = self.qkv(x, rope)
        if places is None or isinstance(places, Tensor):
            y = kernels.attend(q, k, v, None, self.dropout if self.training else 0.0, self.window, places)
        else:
            y = places.attend(layer, q, k, v)
        y = y.transpose(1, 2).reshape(B, T, -1)  # (B, T, H · D), heads concatenated
        out: Tensor = self.c_proj(y)
        return self.resid_dropout(out) if self.training else out

    def qkv(self, x: Tensor, rope: Rope | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Returns queries (B, H, T, D) and keys (B, K, T, D), normalized and rotated, and values (B, K, T, D)."""
        # Transpose last, because compiled GPU code would copy the transposed views three times.
        heads = self.c_attn(x).view(*x.shape[:2], -1, self.head_size)  # (B, T, H + 2 K, D)
        K = heads.size(2) // (self.groups + 2)
        qk, v = heads.split_with_sizes([(self.groups + 1) * K, K], dim=2)
        if self.q_norm is None and rope is not None:  # Rotate queries and keys in one call.
            qk = rotate(qk, rope)
        q, k = qk.split_with_sizes([self.groups * K, K], dim=2)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
            if rope is not None:
                q, k = rotate(q, rope), rotate(k, rope)
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    def pattern(self, x: Tensor, rope: Rope | None = None) -> Tensor:
        """Returns the attention weights softmax(q kᵀ / √d), (B, H, T, T), in float32."""
        q, k, _ = self.qkv(x, rope)
        k = k.repeat_interleave(self.groups, dim=1)
        scores = q.float() @ k.float().transpose(2, 3) / math.sqrt(self.head_size)
        return scores.masked_fill(~kernels.make_causal_mask(q.size(2), self.window, q.device), float("-inf")).softmax(
            -1
        )


def activate(x: Tensor, gated: bool) -> Tensor:
    """Applies GELU, (…, width) → (…, width). If ``gated``, applies SwiGLU, (…, 2 · width) → (…, width), where the gate
    is the first half of ``x``."""
    if gated:
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate) * up
    return F.gelu(x, approximate="tanh")


class MLP(nn.Module):
    """MLP with GELU (tanh approximation, as in GPT-2) or SwiGLU."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.gated = config.mlp == "swiglu"
        biases = config.biases == "all"
        # With SwiGLU, c_fc computes the gate and the up-projection.
        self.c_fc = Linear(config.n_embd, config.mlp_width * (1 + self.gated), bias=biases)
        self.c_proj = Linear(config.mlp_width, config.n_embd, bias=biases)
        self.dropout = Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Processes each position independently: (B, T, C) → (B, T, C)."""
        out: Tensor = self.c_proj(activate(self.c_fc(x), self.gated))
        return self.dropout(out) if self.training else out


class Block(nn.Module):
    """Attention, then an MLP. Each reads the normalized residual stream and adds its output to the stream."""

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
        """Adds attention to the residual stream (B, T, C)."""
        x = x + self.attn(self.ln_1(x), layer, rope, places)
        return x

    def add_mlp(self, x: Tensor) -> Tensor:
        """Adds the MLP's output to the residual stream (B, T, C)."""
        x = x + self.mlp(self.ln_2(x))
        return x


class GPT(nn.Module):
    """The decoder: token ids → logits of the next token at every position."""

    wpe: nn.Embedding  # learned position table
    rope: Tensor | None  # RoPE cosines and sines, (2, positions, D)

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.wte = Embedding(config.vocab_size, config.n_embd)  # also the unembedding if tied
        if config.positions == "learned":
            self.wpe = Embedding(config.block_size, config.n_embd)
        self.build_position_tables()
        self.drop = Dropout(config.dropout)
        self.h = nn.ModuleList(Block(config, window) for window in config.windows)
        self.ln_f = make_norm(config)
        # LM head of an untied model, or a decoding copy of the embedding (`gpt.decoding.weights`).
        self.lm_head: nn.Module | None = None if config.tied else Linear(config.n_embd, config.vocab_size, bias=False)
        self.recompute = False  # whether the backward pass recomputes activations
        self.initialize()

    def build_position_tables(self, device: torch.device | None = None) -> None:
        """Computes the RoPE table."""
        config, rope = self.config, None
        if config.positions == "rotary":
            with torch.device("cpu"):  # `arange` takes a second on the meta device.
                rope = rotary_table(min(config.block_size, ROPE_TABLE), config).to(device)
        self.register_buffer("rope", rope, persistent=False)

    def initialize(self) -> None:
        """Initializes all modules, in order, with torch's global random generator."""
        if not self.wte.weight.is_meta:
            for name, module in self.named_modules():
                initialize(module, name, self.config)

    def position_table(self) -> Tensor | None:
        """Returns the table added to embeddings, (block_size, C), or None with RoPE."""
        return self.wpe.weight if self.config.positions == "learned" else None

    def trunk(self, idx: Tensor, places: Placement | None = None, separator: int | None = None) -> Tensor:
        """Returns the normalized residual stream (B, T, C) for ids (B, T), which follow the cached positions of
        ``places``. Without a cache, attention ends at ids that equal ``separator``, which start documents. Raises
        ValueError if the ids exceed the context, except with RoPE and a cache."""
        x, rope = self.embed(idx, places)
        return self.stack(x, rope, places if separator is None else (idx == separator).cumsum(1))

    def embed(self, idx: Tensor, places: Placement | None = None) -> tuple[Tensor, Rope | None]:
        """Returns the first block's input (B, T, C) for ids (B, T), and the RoPE rotations."""
        positions, end = (slice(0, idx.size(1)), idx.size(1)) if places is None else (places.positions, places.end)
        if end > self.config.block_size and (places is None or self.rope is None):
            raise ValueError(f"{end} tokens do not fit in the context of {self.config.block_size}")
        self.grow_rope_table(end)
        return self.embed_at(idx, positions)

    def embed_at(self, idx: Tensor, positions: Positions) -> tuple[Tensor, Rope | None]:
        """Embeds ids (B, T) like `embed`. ``positions`` is a slice or has shape (B, T). Without RoPE, the rotations are
        None."""
        x = self.wte(idx)
        table = self.position_table()
        if table is not None:
            x = x + table[positions]
        x = kernels.narrow_stream(self.drop(x) if self.training else x)
        if self.rope is None:
            return x, None
        cos, sin = self.rope[:, positions].unsqueeze(-2)
        return x, (cos, sin)

    def stack(self, x: Tensor, rope: Rope | None = None, places: Places | None = None) -> Tensor:
        """Applies the blocks and the final norm to (B, T, C)."""
        recompute = self.recompute and torch.is_grad_enabled()
        for layer, block in enumerate(self.h):
            run = partial(checkpoint, block, use_reentrant=False) if recompute else block
            x = run(x, layer, rope, places)
        return self.last_norm(x)

    def last_norm(self, x: Tensor) -> Tensor:
        """Normalizes the last block's output, (B, T, C)."""
        return kernels.narrow_stream(self.ln_f(x))

    def grow_rope_table(self, positions: int) -> None:
        """Grows the RoPE table if it has fewer than ``positions`` positions, which can exceed the context."""
        if self.rope is not None and positions > self.rope.size(1):
            with torch.inference_mode(False):  # Training cannot use inference tensors.
                self.rope = rotary_table(2 * positions, self.config).to(self.rope)

    @property
    def unembedding(self) -> Tensor:
        """The unembedding weight in training, (V, C)."""
        weight = self.wte.weight if self.lm_head is None else self.lm_head.weight
        assert isinstance(weight, Tensor)
        return weight

    def unembed(self, x: Tensor) -> Tensor:
        """Maps the residual stream (…, C) to logits (…, V)."""
        return F.linear(x, self.wte.weight) if self.lm_head is None else self.lm_head(x)

    def forward(self, idx: Tensor, places: Placement | None = None) -> Tensor:
        """Returns logits (B, T, V) for ids (B, T). Raises ValueError like `trunk`."""
        return self.unembed(self.trunk(idx, places))


@torch.no_grad()
def initialize(module: nn.Module, name: str, config: GPTConfig) -> None:
    """Initializes one module. As in GPT-2, matrices are drawn from a normal distribution, and biases are 0. Matrices
    that write to the residual stream are scaled by 1/√(2·n_layer). The weights of query and key norms are √1.2. Other
    norms keep torch's weights of 1 and biases of 0."""
    if isinstance(module, (nn.Linear, nn.Embedding)):
        module.weight.normal_(0.0, INIT_STD)
        if name.endswith("c_proj"):
            module.weight.mul_(1 / math.sqrt(2 * config.n_layer))
    if isinstance(module, nn.Linear) and module.bias is not None:
        module.bias.zero_()
    if isinstance(module, RMSNorm) and name.endswith(("q_norm", "k_norm")):
        module.weight.fill_(math.sqrt(QK_SCALE))
