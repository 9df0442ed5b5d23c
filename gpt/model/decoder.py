"""The whole decoder, bottom-up: attention, MLP, block, stack.

The architecture is GPT-2's (Radford et al. 2019), which is GPT-3's (Brown et al. 2020): a stack of pre-LayerNorm
blocks in which each position attends to itself and those before it, with the unembedding tied to the embedding.
What blocks compute follows from properties of `GPTConfig`; under ``--arch modern``, which reaches a lower loss in the
same time (docs/defaults.md), queries and keys are normalized (Henry et al. 2020), positions are rotations of them (Su
et al. 2021), the MLP has ReLU² (So et al. 2021), and linear maps have no biases. Parameters have GPT-2's own names
(`gpt.model.params` lists them). Shapes: B sequences, T positions, C = n_embd, V = vocab_size, H heads of D = C / H.
"""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from gpt.config import GPTConfig
from gpt.model.cache import KVCache, Where

INIT_STD = 0.02  # GPT-2's, for every matrix
QK_SCALE = 1.2  # what sharpens scores of normalized queries and keys
PLAIN_UP_TO, PLAIN_ROWS = 512, 8  # positions up to which a CPU attends plainly, and sequences at once


class Linear(nn.Linear):
    """A linear map that leaves out torch's initialization on the meta device, where a model awaits weights from a file:
    torch would import its compiler for it, which takes seconds."""

    def reset_parameters(self) -> None:
        """Initializes as torch does, unless the weight is on the meta device."""
        if not self.weight.is_meta:
            super().reset_parameters()


class Embedding(nn.Embedding):
    """A table of rows that leaves out torch's initialization on the meta device, as `Linear` does."""

    def reset_parameters(self) -> None:
        """Initializes as torch does, unless the weight is on the meta device."""
        if not self.weight.is_meta:
            super().reset_parameters()


class Attention(nn.Module):
    """Causal multi-head self-attention: softmax(q kᵀ / √d) v in each head (Vaswani et al. 2017, §3.2)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.head_size, self.qk_norm, self.dropout = config.head_size, config.qk_norm, config.dropout
        # Query, key and value of all heads at once; and the value-down map, W_O.
        self.c_attn = Linear(config.n_embd, 3 * config.n_embd, bias=config.biases)
        self.c_proj = Linear(config.n_embd, config.n_embd, bias=config.biases)
        self.resid_dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, layer: int, rope: Tensor | None = None, cache: KVCache | None = None) -> Tensor:
        """Each position's sum of the values that it sees: (B, T, C) → (B, T, C). ``rope``: the rotations of rotary
        positions, as `GPT.rope_at` gives them."""
        B, T, _ = x.shape
        q, k, v, scale = self.qkv(x, rope)
        mask = None
        if cache is not None:
            k, v = cache.append(layer, k, v)  # (B, H, seen + T, D)
            mask = cache.mask()
        y = attend(q, k, v, mask, self.dropout if self.training else 0.0, scale)
        y = y.transpose(1, 2).reshape(B, T, -1)  # (B, T, C): heads side by side again
        out: Tensor = self.resid_dropout(self.c_proj(y))
        return out

    def qkv(self, x: Tensor, rope: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor, float | None]:
        """Queries, keys and values of all heads, (B, H, T, D) each, normalized and rotated, and what scores are
        multiplied by; None is 1/√D. Where ranks share the heads (`gpt.parallel.tensor`), H are this rank's."""
        B, T, _ = x.shape
        q, k, v = self.c_attn(x).view(B, T, 3, -1, self.head_size).permute(2, 0, 3, 1, 4)  # (B, H, T, D)
        scale = None
        if self.qk_norm:
            q, k = F.rms_norm(q, q.shape[-1:]), F.rms_norm(k, k.shape[-1:])
            scale = QK_SCALE / math.sqrt(q.size(-1))
        if rope is not None:
            q, k = rotate(q, rope), rotate(k, rope)
        return q, k, v, scale

    def pattern(self, x: Tensor, rope: Tensor | None = None) -> Tensor:
        """softmax(q kᵀ · scale) with later keys masked, (B, H, T, T), in float32: what `attend` multiplies values by
        and does not return."""
        q, k, _, scale = self.qkv(x, rope)
        scores = q.float() @ k.float().transpose(2, 3) * (scale or q.size(-1) ** -0.5)
        later = torch.ones_like(scores[0, 0], dtype=torch.bool).triu_(1)
        return scores.masked_fill(later, float("-inf")).softmax(-1)


class MLP(nn.Module):
    """Up to the width of the inside, GELU (tanh form, as GPT-2 has it) or ReLU², and down again."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.activation = config.activation
        self.c_fc = Linear(config.n_embd, config.mlp_width, bias=config.biases)
        self.c_proj = Linear(config.mlp_width, config.n_embd, bias=config.biases)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Each position by itself: (B, T, C) → (B, T, C)."""
        x = self.c_fc(x)
        x = relu2(x) if self.activation == "relu2" else F.gelu(x, approximate="tanh")
        out: Tensor = self.dropout(self.c_proj(x))
        return out


def relu2(x: Tensor) -> Tensor:
    """ReLU² (So et al. 2021, arXiv 2109.08668), of any shape. A product, since autocast on a GPU computes powers in
    float32."""
    x = F.relu(x)
    return x * x


class Block(nn.Module):
    """Attention, then MLP, each on a normalized copy and added to the residual stream."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)
        self.attn = Attention(config)
        self.ln_2 = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, layer: int, rope: Tensor | None = None, cache: KVCache | None = None) -> Tensor:
        """(B, T, C) → (B, T, C)."""
        x = x + self.attn(self.ln_1(x), layer, rope, cache)
        x = x + self.mlp(self.ln_2(x))
        return x


class GPT(nn.Module):
    """The decoder: ids → logits over the next id at every position."""

    wpe: nn.Embedding  # where positions are learned
    sine: Tensor  # where they are a fixed table
    rope: Tensor | None  # where they are rotations: cosines and sines, (2, positions, D/2)

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.wte = Embedding(config.vocab_size, config.n_embd)  # embedding, and unembedding transposed
        if config.positions == "learned":
            self.wpe = Embedding(config.block_size, config.n_embd)
        self.lay_tables()
        self.drop = nn.Dropout(config.dropout)
        self.h = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.ln_f = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)
        self.head: nn.Module | None = None  # the unembedding where it is laid out apart from the embedding
        self.kv_heads = config.kv_heads  # that this rank computes: see `gpt.parallel.tensor`
        self.recompute = False  # whether blocks' activations are computed again for the gradient, and not kept
        self.initialize()

    def lay_tables(self, device: torch.device | None = None) -> None:
        """Computes the tables of positions that are not learned."""
        config, rope = self.config, None
        if config.positions == "sinusoidal":
            # The paper scales embeddings up by √C, so that they and the table are both of order one. GPT-2's embeddings
            # are of order 0.02 and stay so; the table is scaled down to them instead.
            table = INIT_STD * sine_table(config.block_size, config.n_embd)
            self.register_buffer("sine", table.to(device), persistent=False)
        if config.positions == "rotary":
            rope = rotary_table(config.block_size, config.head_size).to(device)
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

    def trunk(self, idx: Tensor, cache: KVCache | None = None) -> Tensor:
        """Ids (B, T) → the normalized residual stream (B, T, C). With a cache, each row of ``idx`` follows what
        the cache's row has seen. Raises ValueError past the context, which rotary positions with a cache may leave."""
        x, rope = self.embed(idx, cache)
        x = self.stack(x, rope, cache)
        if cache is not None:
            cache.advance(idx.size(1))
        return x

    def embed(self, idx: Tensor, cache: KVCache | None = None) -> tuple[Tensor, Tensor | None]:
        """Ids (B, T) → the residual stream before the first block, (B, T, C), and the rotations of its positions."""
        T = idx.size(1)
        where = slice(0, T) if cache is None else cache.place(T)
        reach = T if cache is None else cache.reach
        if reach > self.config.block_size and (cache is None or self.rope is None):
            raise ValueError(f"{reach} positions; the context is {self.config.block_size}")
        x = self.wte(idx)
        table = self.position_table()
        if table is not None:
            x = x + table[where]
        return self.drop(x), self.rope_at(where, reach)

    def stack(self, x: Tensor, rope: Tensor | None = None, cache: KVCache | None = None) -> Tensor:
        """The blocks and the last LayerNorm: (B, T, C) → (B, T, C)."""
        again = self.recompute and torch.is_grad_enabled()
        for layer, block in enumerate(self.h):
            x = checkpoint(block, x, layer, rope, use_reentrant=False) if again else block(x, layer, rope, cache)
        out: Tensor = self.ln_f(x)
        return out

    def rope_at(self, where: Where, reach: int) -> Tensor | None:
        """The rotations of positions, (2, 1, T, D/2) or (2, B, 1, T, D/2); None where positions are not rotations. The
        table grows with ``reach``, since rotary positions may run on past the context."""
        if self.rope is None:
            return None
        if reach > self.rope.size(1):
            with torch.inference_mode(False):  # it outlives this call, and may be trained with
                self.rope = rotary_table(2 * reach, 2 * self.rope.size(2)).to(self.rope)  # its device and dtype
        return self.rope[:, where].unsqueeze(-3)

    def unembed(self, x: Tensor) -> Tensor:
        """The residual stream (…, C) → logits (…, V), through the embedding transposed."""
        return F.linear(x, self.wte.weight) if self.head is None else self.head(x)

    def forward(self, idx: Tensor, cache: KVCache | None = None) -> Tensor:
        """Ids (B, T) → logits (B, T, V). Raises ValueError past the context."""
        return self.unembed(self.trunk(idx, cache))


@torch.no_grad()
def initialize(module: nn.Module, name: str, config: GPTConfig) -> None:
    """GPT-2's initialization of a module's own parameters: matrices normal with deviation 0.02, those that write to the
    residual stream scaled by 1/√(2·n_layer) for the 2·n_layer of them; biases 0. LayerNorms are made with 1 and 0."""
    if isinstance(module, (nn.Linear, nn.Embedding)):
        module.weight.normal_(0.0, INIT_STD)
        if name.endswith("c_proj"):
            module.weight.mul_(1 / math.sqrt(2 * config.n_layer))
    if isinstance(module, nn.Linear) and module.bias is not None:
        module.bias.zero_()


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float, scale: float | None) -> Tensor:
    """softmax(q kᵀ · scale) v over (B, H, T, D), causal unless a mask says who sees whom; scale None is 1/√D.

    Training on a CPU, torch's fused attention loses to plain matrix products as long as the scores of a few sequences
    stay in cache: forward and backward at (16, 4, 64, 32) in bfloat16 took 7.9 ms against 2.0 on two cores, at
    (64, 6, 256, 64) 257 against 141; at 512 positions they were about equal.
    """
    T, S = q.size(2), k.size(2)
    if q.device.type == "cpu" and mask is None and T > 1 and torch.is_grad_enabled() and S <= PLAIN_UP_TO:
        rows = [slice(at, at + PLAIN_ROWS) for at in range(0, q.size(0), PLAIN_ROWS)]
        return torch.cat([_attend_plainly(q[some], k[some], v[some], dropout, scale) for some in rows])
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=T > 1 and mask is None, scale=scale
    )


def _attend_plainly(q: Tensor, k: Tensor, v: Tensor, dropout: float, scale: float | None) -> Tensor:
    T = q.size(2)
    later = torch.full((T, T), -math.inf, dtype=q.dtype, device=q.device).triu_(1)
    scores = (q * (scale or 1 / math.sqrt(q.size(-1)))) @ k.transpose(2, 3) + later  # (B, H, T, T)
    return F.dropout(scores.softmax(-1), dropout) @ v


def rotary_table(block_size: int, width: int) -> Tensor:
    """Cosines and sines of the angles by which each pair of a head's ``width`` numbers is rotated at each position, (2,
    block_size, width / 2): p / 10000^(2i / width) (Su et al. 2021, §3.2.2)."""
    position = torch.arange(block_size, dtype=torch.float64)[:, None]
    angle = position * 10_000 ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    return torch.stack([torch.cos(angle), torch.sin(angle)]).float()


def rotate(x: Tensor, rope: Tensor) -> Tensor:
    """Rotates the pairs (i, i + D/2) of (B, H, T, D) by the angles of ``rope``, (2, 1, T, D/2) or (2, B, 1, T, D/2)."""
    cos, sin = rope.to(x.dtype)
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


def sine_table(block_size: int, n_embd: int) -> Tensor:
    """The fixed positions of "Attention Is All You Need", §3.5, (block_size, n_embd).

    Column 2i is sin(p / 10000^(2i/C)), column 2i + 1 the cosine, at position p.
    """
    position = torch.arange(block_size, dtype=torch.float64)[:, None]
    rate = 10_000 ** (-torch.arange(0, n_embd, 2, dtype=torch.float64) / n_embd)
    table = torch.stack([torch.sin(position * rate), torch.cos(position * rate)], dim=-1)
    return table.flatten(1).float()
