"""Tensor parallelism with torch's `parallelize_module`: each rank computes a share of the heads and MLP units of every
block (Shoeybi et al. 2019, arXiv 1909.08053, §3).

`gpt.model.params` defines the axis along which each parameter is split. Query, key and value are one fused matrix, so
`rows` selects a rank's heads from all three. Contiguous rows would separate queries from keys. Checkpoints keep the
original order. Embeddings, LayerNorms and the residual stream are replicated. Ranks that share a sequence use the same
dropout masks, because their residual streams must agree. So corresponding heads of these ranks also have the same mask.
"""

import itertools

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from gpt.model.decoder import GPT
from gpt.model.params import Parameter, parameters


def parallelize(model: GPT, mesh: DeviceMesh) -> None:
    """Splits the blocks of a model on the meta device over a one-dimensional mesh. Attention and the MLP each end in
    an all-reduce."""
    plan: dict[str, ParallelStyle] = {
        p.name.removesuffix(".weight"): RowwiseParallel() if p.split else ColwiseParallel()
        for p in parameters(model.config)
        if p.is_matrix
    }
    for block in model.h:
        parallelize_module(block, mesh, plan, src_data_rank=None)
    model.kv_heads //= mesh.size()


def rows(p: Parameter, tensor: int, rank: int) -> list[slice]:
    """Returns the rows of a parameter on ``rank`` of ``tensor`` ranks, in the rank's order."""
    if p.split != 0:
        return [slice(0, p.shape[0])]
    starts = itertools.accumulate(p.fused, initial=0)
    return [
        slice(start + rank * n // tensor, start + (rank + 1) * n // tensor)
        for start, n in zip(starts, p.fused or p.shape[:1], strict=False)
    ]


def columns(p: Parameter, tensor: int, rank: int) -> slice:
    """Returns the columns of a matrix on ``rank`` of ``tensor`` ranks."""
    n = p.shape[1]
    return slice(rank * n // tensor, (rank + 1) * n // tensor) if p.split == 1 else slice(0, n)
