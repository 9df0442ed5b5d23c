"""Compiled steps of several processes, as far as one process can show them."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from gpt.config import GPTConfig
from gpt.model.decoder import GPT
from gpt.training.compiling import compile_halves
from gpt.training.step import Objective


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch._dynamo.reset()
    yield
    dist.destroy_process_group()
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore")  # of the compiler, which a `Stepper` ignores too
@pytest.mark.usefixtures("alone")
def test_replicas_compile_the_halves_of_blocks_whole() -> None:
    """Torch splits what is compiled under `DistributedDataParallel` where its buckets of gradients end."""
    graphs: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph.code)
        return graph.forward

    model = GPT(GPTConfig(64, 8, 3, 2, 256))
    ids = torch.randint(64, (2, 8))
    expected = Objective(model, 0)(ids, ids)
    wrapped = DistributedDataParallel(Objective(model, 0), bucket_cap_mb=1)  # type: ignore[arg-type]
    compile_halves(model, torch.device("cpu"), backend=backend)
    wrapped(ids, ids).backward()
    assert wrapped(ids, ids).item() == pytest.approx(expected.item())
    assert len(graphs) == 3  # attention's half, the MLP's, the last norm: the blocks share them
