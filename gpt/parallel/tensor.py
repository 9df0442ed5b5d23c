"""Tensor parallelism: each rank computes some heads of every block, and a part of its MLP's inside (Shoeybi et al.
2019, arXiv 1909.08053, §3), by torch's `parallelize_module`.

`gpt.model.params` says which axis of which parameter is divided. The fused query, key and value are one matrix, and a
plain cut of it would give one rank the queries and another the keys. So its rows stand in another order (`rows`), each
rank's heads of all three together; checkpoints know nothing of it. Embeddings, LayerNorms and the residual stream are
whole on every rank. Dropout draws alike on all ranks that share a sequence: they must agree on the residual stream, and
heads at the same place of two ranks are dropped alike.
"""

import itertools

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from gpt.model.decoder import GPT
from gpt.model.params import Parameter, parameters


def parallelize(model: GPT, mesh: DeviceMesh) -> None:
    """Divides the blocks of a model on the meta device over a mesh of one dimension. One all-reduce follows attention,
    and one the MLP."""
    plan: dict[str, ParallelStyle] = {
        p.name.removesuffix(".weight"): RowwiseParallel() if p.split else ColwiseParallel()
        for p in parameters(model.config)
        if p.is_matrix
    }
    for block in model.h:
        parallelize_module(block, mesh, plan, src_data_rank=None)
    model.kv_heads //= mesh.size()


def rows(p: Parameter, tensor: int, rank: int) -> list[slice]:
    """The rows of a parameter that the rank ``rank`` of ``tensor`` holds, in its order."""
    if p.split != 0:
        return [slice(0, p.shape[0])]
    starts = itertools.accumulate(p.fused, initial=0)
    return [
        slice(start + rank * n // tensor, start + (rank + 1) * n // tensor)
        for start, n in zip(starts, p.fused or p.shape[:1], strict=False)
    ]


def columns(p: Parameter, tensor: int, rank: int) -> slice:
    """The columns of a matrix that it holds."""
    n = p.shape[1]
    return slice(rank * n // tensor, (rank + 1) * n // tensor) if p.split == 1 else slice(0, n)
