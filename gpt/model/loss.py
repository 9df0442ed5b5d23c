"""Cross-entropy loss, in nats and in bits per byte."""

import itertools
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gpt.model import kernels
from gpt.model.memory import columns_of_logits, positions_at_once

IGNORED = -100  # Target that the loss ignores.
TEACHER_WEIGHT = 0.8  # Weight of the teachers in the loss; the rest is the text (benchmarks/defaults.md).
FLOAT16_SCALE = 2**-4  # Keeps sums of float16 logit gradients over all positions from overflowing.


def tied_cross_entropy(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    chunk: int = 0,
    codes: Tensor | None = None,
    factors: Tensor | None = None,
) -> Tensor:
    """Returns the sum of -log p(target), in nats, over targets (B, T) that are not `IGNORED`. The logits are x Wᵀ for
    the residual stream x, (B, T, C), and the unembedding W, (V, C).

    Computes logits for ``chunk`` positions at a time; 0 chooses automatically. On a GPU, pads the vocabulary to a
    multiple of 64 with columns that the softmax leaves out.

    ``codes``, (B, T, V), are teachers' probabilities (`encode_probabilities`). They change only the gradient, to that
    of (1 − a) · cross-entropy + a · cross-entropy with these probabilities, where a is `TEACHER_WEIGHT` (Hinton et al.
    2015, arXiv 1503.02531). ``factors``, (B, T), multiply the gradient of each target, and don't change the loss.
    """
    device_type = x.device.type
    columns = columns_of_logits(len(weight), device_type)
    chunk = positions_at_once(targets.numel(), len(weight), chunk, device_type, not weight.requires_grad)
    loss: Tensor = _CrossEntropy.apply(
        x.flatten(0, 1),
        weight,
        targets.flatten(),
        columns,
        chunk,
        None if codes is None else codes.flatten(0, 1),
        None if factors is None else factors.flatten(),
    )  # type: ignore[no-untyped-call]
    return loss


class _CrossEntropy(torch.autograd.Function):
    """Summed cross-entropy that computes gradients in the forward pass: (softmax − one-hot) W for x, and (softmax −
    one-hot)ᵀ x for the unembedding W. The backward pass only scales these gradients (Hsu et al. 2024, arXiv
    2410.10989). Logits are computed once, in chunks, and overwritten by their gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        targets: Tensor,
        columns: int,
        chunk: int,
        codes: Tensor | None,
        factors: Tensor | None,
    ) -> Tensor:
        device_type, vocab_size = x.device.type, len(weight)
        dtype = torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else x.dtype
        wide_dtype = torch.promote_types(dtype, torch.float32)
        narrow_x, table = x.to(dtype), weight.to(dtype)
        if columns > vocab_size:
            table = F.pad(table, (0, 0, 0, columns - vocab_size))
        ctx.dtypes, ctx.grad_scale = (x.dtype, weight.dtype), FLOAT16_SCALE if dtype == torch.float16 else 1.0
        if not kernels.is_compiling():
            logits_buffer = narrow_x.new_empty(chunk, columns)
            scratch = narrow_x.new_empty(chunk, vocab_size, dtype=wide_dtype)
        total, grad_chunks, grad_table = x.new_zeros((), dtype=wide_dtype), [], None
        scales: Any = itertools.repeat(ctx.grad_scale)
        if factors is not None:
            scales = torch.split(factors[:, None] * ctx.grad_scale, chunk)
        lessons: Any = itertools.repeat(None) if codes is None else torch.split(codes, chunk)
        chunks = zip(torch.split(narrow_x, chunk), torch.split(targets, chunk), scales, lessons, strict=False)
        for x_chunk, target_chunk, scale, lesson in chunks:
            is_counted, target_chunk = (target_chunk != IGNORED)[:, None], target_chunk.clamp(min=0)[:, None]
            pull = None if lesson is None else _pull_of_teachers(lesson, target_chunk)
            if kernels.is_compiling():
                logits, target_log_p = _compute_gradient(
                    x_chunk @ table.t(), target_chunk, is_counted * scale, vocab_size, pull
                )
            else:
                logits = torch.mm(x_chunk, table.t(), out=logits_buffer[: len(x_chunk)])
                target_log_p = _overwrite_with_gradient(
                    logits, scratch[: len(x_chunk)], target_chunk, is_counted * scale, pull
                )
            total = total - target_log_p.masked_fill(~is_counted, 0).sum()
            grad_chunks.append(logits @ table)
            if ctx.needs_input_grad[1] and grad_table is None:
                grad_table = logits.t() @ x_chunk
            elif grad_table is not None:
                grad_table = grad_table.to(wide_dtype).add_(logits.t() @ x_chunk)
        ctx.save_for_backward(torch.cat(grad_chunks), None if grad_table is None else grad_table[:vocab_size])
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        scale, (grad_x, grad_table) = grads[0] / ctx.grad_scale, ctx.saved_tensors
        x_dtype, weight_dtype = ctx.dtypes
        grad_weight = None if grad_table is None else grad_table.to(weight_dtype) * scale
        return grad_x.to(x_dtype) * scale, grad_weight, *[None] * 5


def _pull_of_teachers(codes: Tensor, targets: Tensor) -> Tensor:
    """Returns a · (one-hot − q), (n, V), which teachers with the probabilities q add to the gradient of the logits."""
    pull = decode_probabilities(codes) * -TEACHER_WEIGHT
    return torch.where(torch.arange(pull.size(1), device=pull.device) == targets, pull + TEACHER_WEIGHT, pull)


def encode_probabilities(q: Tensor) -> Tensor:
    """Encodes probabilities in a byte each: their square roots, in steps of 1/255."""
    return (q.sqrt() * 255).round().to(torch.uint8)


def decode_probabilities(codes: Tensor) -> Tensor:
    """Decodes `encode_probabilities`, (n, V), so that each row sums to 1."""
    q = codes.float().square()
    return q / q.sum(-1, keepdim=True).clamp(min=1)


def _overwrite_with_gradient(
    logits: Tensor, scratch: Tensor, targets: Tensor, factors: Tensor, pull: Tensor | None
) -> Tensor:
    """Overwrites logits (n, columns) with their gradient times ``factors`` and returns log p(target), (n, 1). Leaves
    padding columns at 0. ``scratch`` and the teachers' ``pull`` are (n, V)."""
    log_p = torch.log_softmax(scratch.copy_(logits[:, : scratch.size(1)]), -1, out=scratch)
    target_log_p = log_p.gather(1, targets)
    log_p.exp_().scatter_(1, targets, target_log_p.expm1())  # p, or p − 1 for the target
    if pull is not None:
        log_p.add_(pull)
    logits[:, : scratch.size(1)].copy_(log_p.mul_(factors))
    return target_log_p


def _compute_gradient(
    logits: Tensor, targets: Tensor, factors: Tensor, vocab_size: int, pull: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Computes the same gradient and log p(target) as `_overwrite_with_gradient`, with operations that a compiler can
    fuse."""
    column = torch.arange(logits.size(1), device=logits.device)
    wide_logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    log_p = wide_logits.masked_fill(column >= vocab_size, -math.inf).log_softmax(-1)
    target_log_p = log_p.gather(1, targets)
    grad = torch.where(column == targets, target_log_p.expm1(), log_p.exp())
    if pull is not None:
        grad = grad + F.pad(pull, (0, logits.size(1) - vocab_size))
    return (grad * factors).to(logits.dtype), target_log_p


def token_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Returns -log p(target) in nats, (N), for logits (N, V), and 0 for `IGNORED` targets."""
    return F.cross_entropy(logits.float(), targets, ignore_index=IGNORED, reduction="none")


@torch.no_grad()
def chunked_losses(x: Tensor, weight: Tensor, targets: Tensor, chunk: int = 0) -> Tensor:
    """Returns `token_losses`, (N), of the residual stream x, (N, C), and the unembedding W, (V, C). Computes logits for
    ``chunk`` positions at a time, as `tied_cross_entropy` does."""
    chunk = positions_at_once(len(targets), len(weight), chunk, x.device.type, frozen=True)
    parts = zip(torch.split(x, chunk), torch.split(targets, chunk), strict=True)
    return torch.cat([token_losses(part @ weight.t(), ids) for part, ids in parts])


def score_preferences(rewards: Tensor) -> Tensor:
    """Returns sums over pairs, given the rewards of their answers, (N, 2): the loss -log σ(margin) in nats, the pairs
    whose chosen answer has the higher reward, margins, and both rewards (Rafailov et al. 2023, arXiv 2305.18290)."""
    chosen, rejected = rewards.unbind(-1)
    margins = chosen - rejected
    return torch.stack([-F.logsigmoid(margins), (margins > 0).to(margins.dtype), margins, chosen, rejected]).sum(-1)


def bits_per_byte(nats: float, n_bytes: int) -> float:
    """Converts the total nats of ``n_bytes`` bytes to bits per byte, which are comparable across tokenizers."""
    return nats / math.log(2) / n_bytes if n_bytes else math.nan
