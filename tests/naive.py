"""The decoder by its definition: one head and one position after the other, for any `GPTConfig` with rotary positions
or a table of them. Slow, and an oracle."""

import cmath
import math

import torch
from torch import Tensor
from torch.nn import functional as F

from gpt.config import GPTConfig
from gpt.model.decoder import GPT


def logits(model: GPT, ids: list[int]) -> Tensor:
    """(T, V)."""
    c = model.config
    D, H, K = c.head_size, c.n_head, c.kv_heads
    x = model.wte.weight[ids]
    if c.positions != "rotary":
        x = x + model.position_table()[: len(ids)]
    for block, window in zip(model.h, c.windows, strict=True):
        a = block.attn
        qkv = linear(a.c_attn, norm(c, block.ln_1, x))
        heads = []
        for head in range(H):
            shared = H + head // (H // K)  # which of the heads of keys
            q, k, v = (qkv[:, at * D : (at + 1) * D] for at in (head, shared, shared + K))
            if c.qk_norm:
                q, k = rms(q, a.q_norm.weight, c.layer_norm_epsilon), rms(k, a.k_norm.weight, c.layer_norm_epsilon)
            if c.positions == "rotary":
                q, k = turned(c, q), turned(c, k)
            rows = []
            for at in range(len(ids)):
                first = 0 if window is None else max(0, at + 1 - window)
                scores = torch.stack([q[at] @ k[other] / math.sqrt(D) for other in range(first, at + 1)])
                rows.append(scores.softmax(0) @ v[first : at + 1])
            heads.append(torch.stack(rows))
        x = x + linear(a.c_proj, torch.cat(heads, -1))
        inside = linear(block.mlp.c_fc, norm(c, block.ln_2, x))
        if c.mlp == "swiglu":
            gate, up = inside[:, : c.mlp_width], inside[:, c.mlp_width :]
            inside = gate / (1 + torch.exp(-gate)) * up
        else:
            inside = F.gelu(inside, approximate="tanh")
        x = x + linear(block.mlp.c_proj, inside)
    return norm(c, model.ln_f, x) @ (model.wte.weight if c.tied else model.lm_head.weight).T


def linear(module: torch.nn.Module, x: Tensor) -> Tensor:
    out = x @ module.weight.T
    return out if module.bias is None else out + module.bias


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def norm(c: GPTConfig, module: torch.nn.Module, x: Tensor) -> Tensor:
    if c.norm == "rmsnorm":
        return rms(x, module.weight, c.layer_norm_epsilon)
    return F.layer_norm(x, x.shape[-1:], module.weight, module.bias, c.layer_norm_epsilon)


def turned(c: GPTConfig, x: Tensor) -> Tensor:
    """The pair (i, i + D/2) at position p is a complex number, multiplied by e^(i p f)."""
    D, rows = c.head_size, []
    for p, row in enumerate(x):
        pairs = torch.complex(row[: D // 2], row[D // 2 :])
        factors = [cmath.exp(1j * p * frequency(c, i)) for i in range(D // 2)]
        pairs = pairs * torch.tensor(factors, dtype=pairs.dtype)
        rows.append(torch.cat([pairs.real, pairs.imag]))
    return torch.stack(rows)


def frequency(c: GPTConfig, i: int) -> float:
    rate = c.rope_base ** (-2 * i / c.head_size)
    scaling = c.rope_scaling
    if scaling is None:
        return rate
    length = 2 * math.pi / rate  # positions of one turn
    if length > scaling.original / scaling.low:
        return rate / scaling.factor
    if length < scaling.original / scaling.high:
        return rate
    share = (scaling.original / length - scaling.low) / (scaling.high - scaling.low)
    return (1 - share) * rate / scaling.factor + share * rate
