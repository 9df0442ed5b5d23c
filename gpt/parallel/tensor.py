"""Tensor parallel: each process computes some heads of every block, and some columns of its MLP (Shoeybi et al. 2019,
arXiv 1909.08053, §3), by torch's `parallelize_module`.

The fused query, key and value are one matrix of 3·C rows, and a plain cut of it would give one process the queries and
another the keys. So the rows of a matrix that is divided stand in another order (`rows`), each process's heads of all
three together; checkpoints know nothing of it. Embeddings, LayerNorms and the residual stream are whole everywhere.
Dropout draws alike in all processes that share a sequence: they must agree on the residual stream, and heads that lie
in the same place of two processes are dropped alike.
"""

import itertools

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from gpt.config import GPTConfig
from gpt.errors import UserError
from gpt.model.decoder import GPT
from gpt.model.params import Parameter, parameters


def check(config: GPTConfig, tensor: int) -> None:
    """Raises `UserError` unless so many processes can share each block. (A head is C / n_head wide, so what divides the
    heads divides the MLP's 4·C too.)"""
    heads = config.kv_heads
    if heads % tensor:
        fits = [str(n) for n in range(1, heads + 1) if heads % n == 0]
        raise UserError(
            f"the model's {heads} heads cannot be shared evenly by {tensor} processes (--tensor {tensor})",
            f"take one of {', '.join(fits)}",
        )


def parallelize(model: GPT, mesh: DeviceMesh) -> None:
    """Divides the blocks of a model on the meta device over a mesh of one dimension. One sum over the processes follows
    attention, and one the MLP."""
    plan: dict[str, ParallelStyle] = {
        p.name.removesuffix(".weight"): RowwiseParallel() if p.split else ColwiseParallel()
        for p in parameters(model.config)
        if p.is_matrix
    }
    for block in model.h:
        parallelize_module(block, mesh, plan, src_data_rank=None)
    model.kv_heads //= mesh.size()


def rows(p: Parameter, tensor: int, rank: int) -> list[slice]:
    """Which of a parameter's rows the process ``rank`` of ``tensor`` has, in the order in which it has them."""
    if p.split != 0:
        return [slice(0, p.shape[0])]
    starts = itertools.accumulate(p.fused, initial=0)
    return [
        slice(start + rank * n // tensor, start + (rank + 1) * n // tensor)
        for start, n in zip(starts, p.fused or p.shape[:1], strict=False)
    ]


def columns(p: Parameter, tensor: int, rank: int) -> slice:
    """Which of a matrix's columns it has."""
    n = p.shape[1]
    return slice(rank * n // tensor, (rank + 1) * n // tensor) if p.split == 1 else slice(0, n)
