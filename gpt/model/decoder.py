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
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from gpt.config import GPTConfig, RopeScaling
from gpt.model.cache import Cache, KVCache, Where

INIT_STD = 0.02  # GPT-2's, for every matrix
QK_SCALE = 1.2  # what sharpens scores of normalized queries and keys at first; their weights are trained
ROPE_TABLE = 8192  # positions that the table of rotations has at first; it grows
WHOLE = 1024  # columns up to which a GPU's attention for one query does not divide them
NARROW_ON = ("cuda",)  # where the residual stream is bfloat16 under autocast
SUMMED_ON = ("cuda",)  # where compiled code sums the gradients of biases in two steps
PLAIN_UP_TO, PLAIN_ROWS = 512, 8  # positions up to which a CPU attends plainly, and sequences at once
PLAIN_QUERIES = 128  # positions from which it does in bfloat16 without gradients, and whose scores it computes at once

Rope = tuple[Tensor, Tensor]  # cosines and sines of the angles of rotation, (1, T, D) or (B, 1, T, D)


class Linear(nn.Linear):
    """A linear map that leaves out torch's initialization on the meta device, where a model awaits weights from a file:
    torch would import its compiler for it, which takes seconds."""

    def reset_parameters(self) -> None:
        """Initializes as torch does, unless the weight is on the meta device."""
        if not self.weight.is_meta:
            super().reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        """x Wᵀ + b: (…, in) → (…, out)."""
        b = self.bias
        if b is None or not (x.device.type in SUMMED_ON and torch.compiler.is_compiling() and b.requires_grad):
            return super().forward(x)
        y: Tensor = _BiasGradient.apply(F.linear(x, self.weight, b.detach()), b)  # type: ignore[no-untyped-call]
        return y


class _BiasGradient(torch.autograd.Function):
    """y (…, T, out), of which the bias b (out,) is a term already, with the gradient of b: the sum over positions, and
    then over sequences. Inductor computes the first sum in the kernel that writes the gradient of y. That of both at
    once is a kernel of its own, which reads it again."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, b: Tensor) -> Tensor:
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        (grad,) = grads
        wide = torch.promote_types(grad.dtype, torch.float32)
        return grad, grad.sum(-2, dtype=wide).sum_to_size(grad.size(-1))


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
        return drop(x, self.p) if self.training else x


def drop(x: Tensor, p: float) -> Tensor:
    """Zeroes each number with probability p, to 2⁻¹⁶, and divides the others by 1 − p."""
    if p == 0 or x.device.type != "cpu" or torch.compiler.is_compiling():
        return F.dropout(x, p)
    kept = dropout_mask(x.numel(), p, x.dtype)
    return x * kept.mul_(dropout_scale(p)).view(x.shape)


def dropout_scale(p: float) -> float:
    """The factor of the numbers that dropout keeps, 1 / (1 − p), where p is a whole number of 2⁻¹⁶."""
    return 2**16 / (2**16 - round(p * 2**16))


def dropout_mask(n: int, p: float, dtype: torch.dtype) -> Tensor:
    """Draws which of n numbers dropout keeps, (n): 1 with probability 1 − p, to 2⁻¹⁶, else 0.

    A CPU draws one random number after the other, and torch a whole one for each of n: for 131,072 in 600 µs. Here four
    share one: 87 µs.
    """
    drawn = torch.empty(-(-n // 4), dtype=torch.int64).random_(-(2**63), None).view(torch.int16)[:n]
    return torch.ge(drawn, round(p * 2**16) - 2**15, out=torch.empty(n, dtype=dtype))


class RMSNorm(nn.RMSNorm):
    """x / √(mean(x²) + ε) · γ (Zhang and Sennrich 2019), computed in float32 or wider."""

    eps: float
    weight: nn.Parameter

    @cached_property
    def floor(self) -> Tensor:
        """ε as a tensor on the CPU."""
        return torch.tensor(self.eps, dtype=torch.float64, device="cpu")

    def forward(self, x: Tensor) -> Tensor:
        """(…, C) → (…, C), of the dtype of x."""
        if x.device.type == "cpu" and not torch.compiler.is_compiling():
            if not torch.is_grad_enabled():
                return (x * _rms_scale(x, self.floor)).mul_(self.weight).to(x.dtype)
            out: Tensor = _RMSNormOnCPU.apply(x, self.weight, self.floor)  # type: ignore[no-untyped-call]
            return out
        wide = torch.promote_types(x.dtype, torch.float32)
        return F.rms_norm(x.to(wide), self.normalized_shape, self.weight.to(wide), self.eps).to(x.dtype)


def _rms_scale(x: Tensor, floor: Tensor) -> Tensor:
    """1 / √(mean(x²) + ε) of each position, (…, C) → (…, 1), in float32 or wider."""
    wide = torch.promote_types(x.dtype, torch.float32)
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=wide)
    return torch.addcmul(floor, length, length, value=1 / x.size(-1)).rsqrt_()


class _RMSNormOnCPU(torch.autograd.Function):
    """RMSNorm, which torch computes on a CPU by seven kernels going forward and more going back: with its gradient at
    (16, 64, 128) in 387 µs, where LayerNorm takes 102, at (16, 128, 256) in 1,786, where that takes 281. Its gradient
    is LayerNorm's with a mean of 0, but for the term of the mean."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, floor: Tensor) -> Tensor:
        scale = _rms_scale(x, floor)
        ctx.save_for_backward(x, weight, scale)
        out: Tensor = (x * scale).mul_(weight).to(x.dtype)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, weight, scale = ctx.saved_tensors
        grad, w = grads[0].to(scale.dtype), weight.to(scale.dtype)
        dx, dw, _ = torch.ops.aten.native_layer_norm_backward(
            grad,
            x.to(scale.dtype),
            w.shape,
            torch.zeros_like(scale),
            scale,
            w,
            None,
            [True, ctx.needs_input_grad[1], False],
        )
        dx += (scale * (grad @ w)[..., None]).div_(x.size(-1))  # the mean of the gradient, taken off above
        return dx.to(x.dtype), None if dw is None else dw.to(weight.dtype), None


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

    def forward(self, x: Tensor, layer: int, rope: Rope | None = None, cache: Cache | None = None) -> Tensor:
        """Each position's sum of the values that it sees: (B, T, C) → (B, T, C). ``rope``: the rotations of rotary
        positions, as `GPT.embed_at` gives them."""
        B, T, _ = x.shape
        q, k, v = self.qkv(x, rope)
        dropout = self.dropout if self.training else 0.0
        if cache is None:
            y = attend(q, k, v, None, dropout, self.window)
        else:
            k, v = cache.append(layer, k, v)  # (B, K, seen, D)
            mask = cache.mask(layer)
            if self.prompts is not None and mask is None and T >= PLAIN_QUERIES:
                y = attend(q.to(self.prompts), k.to(self.prompts), v.to(self.prompts), None).to(x.dtype)
            else:
                y = attend(q, k, v, mask, dropout)
        y = y.transpose(1, 2).reshape(B, T, -1)  # (B, T, H · D): heads side by side again
        out: Tensor = self.c_proj(y)
        return self.resid_dropout(out) if self.training else out

    def qkv(self, x: Tensor, rope: Rope | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries (B, H, T, D), keys and values (B, K, T, D), normalized and rotated. Where ranks share the heads
        (`gpt.parallel.tensor`), H and K are this rank's."""
        B, T, _ = x.shape
        qkv = self.c_attn(x)  # (B, T, (H + 2 K) · D)
        width = qkv.size(2) // (self.groups + 2)
        parts = torch.split(qkv, [self.groups * width, width, width], dim=2)
        # Normalized and rotated as they lie: seen transposed, compiled code for a GPU would copy them thrice.
        q, k, v = (each.view(B, T, -1, self.head_size) for each in parts)
        turns = None if rope is None else (rope[0].transpose(-3, -2), rope[1].transpose(-3, -2))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
            if turns is not None:
                q, k = rotate(q, turns), rotate(k, turns)
        elif turns is not None:  # both at once, by half as many calls
            turned = rotate(qkv[..., :-width].view(B, T, -1, self.head_size), turns)
            q, k = torch.split(turned, [q.size(2), k.size(2)], dim=2)
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    def pattern(self, x: Tensor, rope: Rope | None = None) -> Tensor:
        """softmax(q kᵀ / √d) with keys that are not seen masked, (B, H, T, T), in float32: what `attend` multiplies
        values by and does not return."""
        q, k, _ = self.qkv(x, rope)
        k = k.repeat_interleave(self.groups, dim=1)
        scores = q.float() @ k.float().transpose(2, 3) / math.sqrt(self.head_size)
        return scores.masked_fill(~visible(q.size(2), self.window, q.device), float("-inf")).softmax(-1)


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
        x = self.c_fc(x)
        if self.gated:
            gate, inside = x.chunk(2, dim=-1)
            x = F.silu(gate) * inside
        else:
            x = F.gelu(x, approximate="tanh")
        out: Tensor = self.c_proj(x)
        return self.dropout(out) if self.training else out


class Block(nn.Module):
    """Attention, then MLP, each on a normalized copy and added to the residual stream."""

    def __init__(self, config: GPTConfig, window: int | None = None) -> None:
        super().__init__()
        self.ln_1 = make_norm(config)
        self.attn = Attention(config, window)
        self.ln_2 = make_norm(config)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, layer: int, rope: Rope | None = None, cache: Cache | None = None) -> Tensor:
        """(B, T, C) → (B, T, C)."""
        return self.add_mlp(self.add_attention(x, layer, rope, cache))

    def add_attention(self, x: Tensor, layer: int, rope: Rope | None = None, cache: Cache | None = None) -> Tensor:
        """The block's first half: (B, T, C) → (B, T, C)."""
        x = x + self.attn(self.ln_1(x), layer, rope, cache)
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

    def trunk(self, idx: Tensor, cache: KVCache | None = None, counts: Sequence[int] | None = None) -> Tensor:
        """Ids (B, T) → the normalized residual stream (B, T, C). With a cache, each row of ``idx`` follows what the
        cache's row has seen; ``counts`` says how many ids of a row are its own, before padding. Raises ValueError past
        the context, which rotary positions with a cache may leave."""
        x, rope = self.embed(idx, cache, counts)
        x = self.stack(x, rope, cache)
        if cache is not None:
            cache.advance(idx.size(1))
        return x

    def embed(
        self, idx: Tensor, cache: KVCache | None = None, counts: Sequence[int] | None = None
    ) -> tuple[Tensor, Rope | None]:
        """Ids (B, T) → the residual stream before the first block, (B, T, C), and the rotations of its positions."""
        T = idx.size(1)
        where = slice(0, T) if cache is None else cache.place(T, counts)
        reach = T if cache is None else cache.reach
        if reach > self.config.block_size and (cache is None or self.rope is None):
            raise ValueError(f"{reach} positions; the context is {self.config.block_size}")
        self.reach(reach)
        return self.embed_at(idx, where)

    def embed_at(self, idx: Tensor, where: Where) -> tuple[Tensor, Rope | None]:
        """Ids (B, T) at positions, a slice or (B, T) → the residual stream before the first block, (B, T, C), and the
        rotations of these positions, where positions are rotations."""
        x = self.wte(idx)
        table = self.position_table()
        if table is not None:
            x = x + table[where]
        x = narrowed(self.drop(x) if self.training else x)
        if self.rope is None:
            return x, None
        cos, sin = self.rope[:, where].unsqueeze(-3)
        return x, (cos, sin)

    def stack(self, x: Tensor, rope: Rope | None = None, cache: Cache | None = None) -> Tensor:
        """The blocks and the last norm: (B, T, C) → (B, T, C)."""
        again = self.recompute and torch.is_grad_enabled()
        for layer, block in enumerate(self.h):
            x = checkpoint(block, x, layer, rope, use_reentrant=False) if again else block(x, layer, rope, cache)
        return self.last_norm(x)

    def last_norm(self, x: Tensor) -> Tensor:
        """The residual stream after the blocks, normalized for the unembedding: (B, T, C) → (B, T, C)."""
        return narrowed(self.ln_f(x))

    def compile(self, **how: Any) -> None:
        """Compiles the halves of the blocks, of which all share one form, and the last norm.

        In one graph of both halves, Inductor would not keep the sum between them, but compute it again from two tensors
        in three kernels of the gradient. A graph of the whole stack takes the longer to compile the deeper it is.
        """
        for module, name in self._compiled():
            setattr(module, name, torch.compile(getattr(module, name), **how))

    def uncompile(self) -> None:
        """Goes back to eager execution."""
        for module, name in self._compiled():
            vars(module).pop(name, None)

    def _compiled(self) -> list[tuple[nn.Module, str]]:
        """The methods that `compile` compiles."""
        return [(self, "last_norm"), *((block, half) for block in self.h for half in ("add_attention", "add_mlp"))]

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

    def forward(self, idx: Tensor, cache: KVCache | None = None) -> Tensor:
        """Ids (B, T) → logits (B, T, V). Raises ValueError past the context."""
        return self.unembed(self.trunk(idx, cache))


def narrowed(x: Tensor) -> Tensor:
    """The residual stream (B, T, C) in bfloat16 where a GPU's autocast computes products in it: half the memory traffic
    of norms and sums, at no measured loss (docs/decisions.md)."""
    kind = x.device.type
    narrow = kind in NARROW_ON and torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) == torch.bfloat16
    return x.bfloat16() if narrow else x


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


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Any, dropout: float = 0.0, window: int | None = None) -> Tensor:
    """softmax(q kᵀ / √D) v of queries (B, H, T, D), keys and values (B, K, S, D), causal unless a mask says who sees
    whom, and then with a ``window`` if there is one.

    Training on a CPU, torch's fused attention loses to plain matrix products as long as the scores of a few sequences
    stay in cache: forward and backward at (16, 4, 64, 32) in bfloat16 took 7.9 ms against 2.0 on two cores, at
    (64, 6, 256, 64) 257 against 141; at 512 positions they were about equal. In bfloat16 it loses forward too, if
    products leave out what no query sees: at (1, 12, 512, 64) 5.1 ms against 1.9.
    """
    T, S = q.size(2), k.size(2)
    if mask is not None and not isinstance(mask, Tensor):
        return attend_blocks(q, k, v, mask)
    plain, trains = q.device.type == "cpu" and mask is None and T > 1, torch.is_grad_enabled()
    if plain and trains and S <= PLAIN_UP_TO:
        rows = [slice(at, at + PLAIN_ROWS) for at in range(0, q.size(0), PLAIN_ROWS)]
        return torch.cat([_attend_plainly(q[some], k[some], v[some], dropout, window) for some in rows])
    if plain and not trains and T >= PLAIN_QUERIES and q.dtype == torch.bfloat16:
        ends = [min(at + PLAIN_QUERIES, T) for at in range(0, T, PLAIN_QUERIES)]
        parts = zip(torch.split(q, PLAIN_QUERIES, dim=2), ends, strict=True)
        return torch.cat([_attend_plainly(x, k[:, :, :end], v[:, :, :end], dropout, window) for x, end in parts], dim=2)
    if mask is None and window is not None and window < T:
        mask = visible(T, window, q.device)
    groups = q.size(1) // k.size(1)
    causal = T > 1 and mask is None
    if groups > 1 and not causal and (T == 1 or q.device.type != "cpu"):
        # Fused kernels with a mask know no shared heads; so each of the keys' has as many more queries.
        if mask is not None and T > 1:
            mask = mask.repeat(*[1] * (mask.dim() - 2), groups, 1)
        y = F.scaled_dot_product_attention(q.reshape(len(q), k.size(1), -1, q.size(3)), k, v, mask, dropout)
        return y.view_as(q)
    return F.scaled_dot_product_attention(q, k, v, mask, dropout, causal, enable_gqa=groups > 1)


def attend_blocks(q: Tensor, k: Tensor, v: Tensor, blocks: Any) -> Tensor:
    """`attend` for one query, (B, H, 1, D), by `flex_attention`, which reads the blocks of columns that are filled.
    Within `WHOLE` columns, its kernel does not divide them among processors: putting parts together takes two more."""
    from torch.nn.attention.flex_attention import flex_attention

    options: Any = {"SPLIT_KV": 1} if k.size(2) <= WHOLE else {}
    return flex_attention(q, k, v, block_mask=blocks, enable_gqa=q.size(1) > k.size(1), kernel_options=options)


def _attend_plainly(q: Tensor, k: Tensor, v: Tensor, dropout: float, window: int | None) -> Tensor:
    B, H, T, D = q.shape
    K, S = k.size(1), k.size(2)
    # Heads that share keys and values are one head of as many more positions.
    scores = (q * (1 / math.sqrt(D))).reshape(B, K, -1, D) @ k.transpose(2, 3)
    scores = scores.view(B, H, T, S).add_(bias(q, S, window))
    pattern = drop(scores.softmax(-1), dropout)
    return (pattern.view(B, K, -1, S) @ v).view(B, H, T, D)


def bias(q: Tensor, S: int, window: int | None) -> Tensor:
    """The mask that is added to scores of queries q (B, H, T, D): (T, S), −∞ where a position does not see another."""
    T = q.size(2)
    hidden = torch.zeros((T, S), dtype=q.dtype, device=q.device)
    return hidden.masked_fill_(~visible(T, window, q.device, S - T), -math.inf)


def visible(T: int, window: int | None, device: torch.device, before: int = 0) -> Tensor:
    """True where a position sees another, (T, before + T): itself and those before it, with a window the last so
    many."""
    sees = torch.ones((T, before + T), dtype=torch.bool, device=device).tril_(before)
    return sees if window is None or window >= before + T else sees.triu_(before + 1 - window)


def rotary_rates(config: GPTConfig) -> Tensor:
    """The angle between neighboring positions of each pair of a head's D numbers, float64 (D / 2)."""
    rates = config.rope_base ** (-torch.arange(0, config.head_size, 2, dtype=torch.float64) / config.head_size)
    return rates if config.rope_scaling is None else _stretched(rates, config.rope_scaling)


def rotary_table(positions: int, config: GPTConfig) -> Tensor:
    """Cosines and sines, (2, positions, D), of the angles by which each pair (i, i + D/2) of a head's D numbers is
    rotated at each position: p / base^(2i / D) (Su et al. 2021, §3.2.2). The first half of the sines is negative: each
    number is multiplied by its cosine, and its partner by its sine (`rotate`)."""
    angle = torch.arange(positions, dtype=torch.float64)[:, None] * rotary_rates(config)
    cos, sin = torch.cos(angle), torch.sin(angle)
    return torch.stack([torch.cat([cos, cos], dim=1), torch.cat([-sin, sin], dim=1)]).float()


def _stretched(rates: Tensor, scaling: RopeScaling) -> Tensor:
    """The rates of rotation, in radians a position, for a context that is stretched as Llama 3.1's."""
    turns = scaling.original * rates / (2 * math.pi)
    kept = ((turns - scaling.low) / (scaling.high - scaling.low)).clamp(0, 1)
    return rates * (kept + (1 - kept) / scaling.factor)


def rotate(x: Tensor, rope: Rope) -> Tensor:
    """Rotates the pairs (i, i + D/2) of (B, H, T, D) by the angles of ``rope``; or of (B, T, H, D), with its dimensions
    transposed likewise."""
    cos, sin = rope
    return (x * cos.to(x.dtype)).addcmul_(x.roll(x.size(-1) // 2, -1), sin.to(x.dtype))


def sine_table(block_size: int, n_embd: int) -> Tensor:
    """The fixed positions of "Attention Is All You Need", §3.5, (block_size, n_embd).

    Column 2i is sin(p / 10000^(2i/C)), column 2i + 1 the cosine, at position p.
    """
    position = torch.arange(block_size, dtype=torch.float64)[:, None]
    rate = 10_000 ** (-torch.arange(0, n_embd, 2, dtype=torch.float64) / n_embd)
    table = torch.stack([torch.sin(position * rate), torch.cos(position * rate)], dim=-1)
    return table.flatten(1).float()
