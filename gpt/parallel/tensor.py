"""Tensor parallel: each process computes some heads of every block, and some columns of its MLP (Shoeybi et al. 2019,
arXiv 1909.08053, §3), by torch's `parallelize_module`.

The fused query, key and value are one matrix of 3·C rows, and a plain cut of it would give one process the queries and
another the keys. So the rows of a matrix that is divided stand in another order (`rows`), each process's heads of all
three together; checkpoints know nothing of it. Embeddings, LayerNorms and the residual stream are whole everywhere.
Dropout draws alike in all processes that share a sequence: they must agree on the residual stream, and heads that lie
in the same place of two processes are dropped alike.
"""

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from gpt.config import GPTConfig
from gpt.errors import UserError
from gpt.model.decoder import GPT

FUSED = 3  # query, key, value: what lies below each other in one matrix
HEADS = ("attn.c_attn.weight", "attn.c_attn.bias")  # divided by rows, in each of the three
ROWS = ("mlp.c_fc.weight", "mlp.c_fc.bias")
COLUMNS = ("attn.c_proj.weight", "mlp.c_proj.weight")


def check(config: GPTConfig, tensor: int) -> None:
    """Raises `UserError` unless so many processes can share each block. (A head is C / n_head wide, so what divides the
    heads divides the MLP's 4·C too.)"""
    if config.n_head % tensor:
        fits = [str(n) for n in range(1, config.n_head + 1) if config.n_head % n == 0]
        raise UserError(
            f"the model's {config.n_head} heads cannot be shared evenly by {tensor} processes (--tensor {tensor})",
            f"take one of {', '.join(fits)}",
        )


def parallelize(model: GPT, mesh: DeviceMesh) -> None:
    """Divides the blocks of a model on the meta device over a mesh of one dimension. One sum over the processes follows
    attention, and one the MLP."""
    plan: dict[str, ParallelStyle] = {
        "attn.c_attn": ColwiseParallel(),
        "attn.c_proj": RowwiseParallel(),
        "mlp.c_fc": ColwiseParallel(),
        "mlp.c_proj": RowwiseParallel(),
    }
    for block in model.h:
        parallelize_module(block, mesh, plan, src_data_rank=None)
    model.heads //= mesh.size()


def rows(name: str, n: int, tensor: int, rank: int) -> list[slice]:
    """Which of a parameter's ``n`` rows the process ``rank`` of ``tensor`` has, in the order in which it has them."""
    if name.endswith(HEADS):
        each, part = n // FUSED, n // FUSED // tensor
        return [slice(which * each + rank * part, which * each + (rank + 1) * part) for which in range(FUSED)]
    if name.endswith(ROWS):
        return [slice(rank * n // tensor, (rank + 1) * n // tensor)]
    return [slice(0, n)]


def columns(name: str, n: int, tensor: int, rank: int) -> slice:
    """Which of a matrix's ``n`` columns it has."""
    return slice(rank * n // tensor, (rank + 1) * n // tensor) if name.endswith(COLUMNS) else slice(0, n)


def is_divided(name: str) -> bool:
    """Whether processes that share sequences have different parts of a parameter."""
    return name.endswith((*HEADS, *ROWS, *COLUMNS))
