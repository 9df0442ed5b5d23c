"""A slow reference decoder that loops over heads and positions."""

import cmath
import math

import torch
from torch import Tensor
from torch.nn import functional as F

from gpt.config.model import GPTConfig
from gpt.model.decoder import GPT


def logits(model: GPT, ids: list[int]) -> Tensor:
    """Returns the logits (T, V)."""
    c = model.config
    D, H, K = c.head_size, c.n_head, c.kv_heads
    x = model.wte.weight[ids]
    if c.positions != "rotary":
        x = x + model.position_table()[: len(ids)]
    for block, window in zip(model.h, c.windows, strict=True):
        attn = block.attn
        qkv = linear(attn.c_attn, norm(c, block.ln_1, x))
        heads = []
        for head in range(H):
            key_head = H + head // (H // K)  # index of the key head in qkv
            q, k, v = (qkv[:, position * D : (position + 1) * D] for position in (head, key_head, key_head + K))
            if c.qk_norm:
                q, k = (
                    rms(q, attn.q_norm.weight, c.layer_norm_epsilon),
                    rms(k, attn.k_norm.weight, c.layer_norm_epsilon),
                )
            if c.positions == "rotary":
                q, k = apply_rope(c, q), apply_rope(c, k)
            rows = []
            for position in range(len(ids)):
                first = 0 if window is None else max(0, position + 1 - window)
                scores = torch.stack([q[position] @ k[other] / math.sqrt(D) for other in range(first, position + 1)])
                rows.append(scores.softmax(0) @ v[first : position + 1])
            heads.append(torch.stack(rows))
        x = x + linear(attn.c_proj, torch.cat(heads, -1))
        hidden = linear(block.mlp.c_fc, norm(c, block.ln_2, x))
        if c.mlp == "swiglu":
            gate, up = hidden[:, : c.mlp_width], hidden[:, c.mlp_width :]
            hidden = gate / (1 + torch.exp(-gate)) * up
        else:
            hidden = F.gelu(hidden, approximate="tanh")
        x = x + linear(block.mlp.c_proj, hidden)
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


def apply_rope(c: GPTConfig, x: Tensor) -> Tensor:
    """Applies RoPE: at position p, rotates each pair of elements (i, i + D/2) by p · frequency(c, i)."""
    D, rows = c.head_size, []
    for p, row in enumerate(x):
        pairs = torch.complex(row[: D // 2], row[D // 2 :])
        factors = [cmath.exp(1j * p * frequency(c, i)) for i in range(D // 2)]
        pairs = pairs * torch.tensor(factors, dtype=pairs.dtype)
        rows.append(torch.cat([pairs.real, pairs.imag]))
    return torch.stack(rows)


def frequency(c: GPTConfig, i: int) -> float:
    base_frequency = c.rope_base ** (-2 * i / c.head_size)
    scaling = c.rope_scaling
    if scaling is None:
        return base_frequency
    wavelength = 2 * math.pi / base_frequency  # in tokens
    if wavelength > scaling.original / scaling.low:
        return base_frequency / scaling.factor
    if wavelength < scaling.original / scaling.high:
        return base_frequency
    high_share = (scaling.original / wavelength - scaling.low) / (scaling.high - scaling.low)
    return (1 - high_share) * base_frequency / scaling.factor + high_share * base_frequency
