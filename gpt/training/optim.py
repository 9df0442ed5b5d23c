"""The optimizer: AdamW (Loshchilov & Hutter 2019), with decay on matrices alone."""

from torch import nn
from torch.optim import AdamW


def make_optimizer(model: nn.Module, weight_decay: float) -> AdamW:
    """AdamW with GPT-3's betas (0.9, 0.95), fused in one kernel. Biases and LayerNorms are not decayed."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return AdamW(groups, lr=0.0, betas=(0.9, 0.95), eps=1e-8, fused=True)


def set_lr(optimizer: AdamW, lr: float) -> None:
    """The rate of every group."""
    for group in optimizer.param_groups:
        group["lr"] = lr
