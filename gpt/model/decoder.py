"""The whole decoder, bottom-up: attention, MLP, block, stack.

The architecture is GPT-2's (Radford et al. 2019), which is GPT-3's (Brown et al. 2020): a stack of pre-LayerNorm
blocks in which each position attends to itself and those before it, with the unembedding tied to the embedding.
Parameters have GPT-2's own names. Shapes: B sequences, T positions, C = n_embd, V = vocab_size, heads of C / n_head.
"""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from gpt.config import GPTConfig
from gpt.model.cache import KVCache

INIT_STD = 0.02  # GPT-2's, for every matrix


class Attention(nn.Module):
    """Causal multi-head self-attention: softmax(q kᵀ / √d) v in each head (Vaswani et al. 2017, §3.2)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.n_head = config.n_head
        self.dropout = config.dropout
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd)  # query, key and value of all heads at once
        self.c_proj = nn.Linear(config.n_embd, config.n_embd)  # the value-down map, W_O
        self.resid_dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, layer: int, cache: KVCache | None = None) -> Tensor:
        """What each position gathers from those it sees: (B, T, C) → (B, T, C)."""
        B, T, C = x.shape
        q, k, v = self.c_attn(x).view(B, T, 3, self.n_head, C // self.n_head).permute(2, 0, 3, 1, 4)  # (B, H, T, C/H)
        mask = None
        if cache is not None:
            k, v = cache.append(layer, k, v)  # (B, H, seen + T, C/H)
            mask = cache.mask(T)
        y = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=T > 1 and mask is None,
        )  # fmt: skip
        y = y.transpose(1, 2).reshape(B, T, C)  # heads side by side again
        out: Tensor = self.resid_dropout(self.c_proj(y))
        return out


class MLP(nn.Module):
    """Up to four times the width, GELU (tanh form, as GPT-2 has it), and down again."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd)
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Each position by itself: (B, T, C) → (B, T, C)."""
        out: Tensor = self.dropout(self.c_proj(F.gelu(self.c_fc(x), approximate="tanh")))
        return out


class Block(nn.Module):
    """Attention, then MLP, each on a normalized copy and added to the residual stream."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)
        self.attn = Attention(config)
        self.ln_2 = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, layer: int, cache: KVCache | None = None) -> Tensor:
        """(B, T, C) → (B, T, C)."""
        x = x + self.attn(self.ln_1(x), layer, cache)
        x = x + self.mlp(self.ln_2(x))
        return x


class GPT(nn.Module):
    """The decoder: ids → logits over the next id at every position."""

    wpe: nn.Embedding  # where positions are learned
    sine: Tensor  # where they are not

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)  # embedding, and unembedding transposed
        if config.positions == "learned":
            self.wpe = nn.Embedding(config.block_size, config.n_embd)
        else:
            # The paper scales embeddings up by √C, so that they and the table are both of order one. GPT-2's embeddings
            # are of order 0.02 and stay so; the table is scaled down to them instead.
            table = INIT_STD * sine_table(config.block_size, config.n_embd)
            self.register_buffer("sine", table, persistent=False)
        self.drop = nn.Dropout(config.dropout)
        self.h = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.ln_f = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)
        self.initialize()

    @torch.no_grad()
    def initialize(self) -> None:
        """GPT-2's initialization: matrices normal with deviation 0.02, those that write to the residual stream scaled
        by 1/√(2·n_layer) for the 2·n_layer of them; biases 0, LayerNorms 1 and 0. Uses torch's global generator."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                module.weight.normal_(0.0, INIT_STD)
                module.bias.zero_()
            elif isinstance(module, nn.Embedding):
                module.weight.normal_(0.0, INIT_STD)
        for name, parameter in self.named_parameters():
            if name.endswith("c_proj.weight"):
                parameter.mul_(1 / math.sqrt(2 * self.config.n_layer))

    def position_table(self) -> Tensor:
        """What is added to the embedding at each position, (block_size, C)."""
        if self.config.positions == "learned":
            return self.wpe.weight
        return self.sine

    def trunk(self, idx: Tensor, cache: KVCache | None = None) -> Tensor:
        """Ids (B, T) → the normalized residual stream (B, T, C). With a cache, ``idx`` follows what it has seen."""
        start = cache.length if cache is not None else 0
        T = idx.size(1)
        if start + T > self.config.block_size:
            raise ValueError(f"{start + T} positions; the context is {self.config.block_size}")
        x = self.drop(self.wte(idx) + self.position_table()[start : start + T])
        for layer, block in enumerate(self.h):
            x = block(x, layer, cache)
        if cache is not None:
            cache.advance(T)
        out: Tensor = self.ln_f(x)
        return out

    def unembed(self, x: Tensor) -> Tensor:
        """The residual stream (…, C) → logits (…, V), through the embedding transposed."""
        return F.linear(x, self.wte.weight)

    def forward(self, idx: Tensor, cache: KVCache | None = None) -> Tensor:
        """Ids (B, T) → logits (B, T, V). Raises ValueError past the context."""
        return self.unembed(self.trunk(idx, cache))


def sine_table(block_size: int, n_embd: int) -> Tensor:
    """The fixed positions of "Attention Is All You Need", §3.5, (block_size, n_embd).

    Column 2i is sin(p / 10000^(2i/C)), column 2i + 1 the cosine, at position p.
    """
    position = torch.arange(block_size, dtype=torch.float64)[:, None]
    rate = 10_000 ** (-torch.arange(0, n_embd, 2, dtype=torch.float64) / n_embd)
    table = torch.stack([torch.sin(position * rate), torch.cos(position * rate)], dim=-1)
    return table.flatten(1).float()
