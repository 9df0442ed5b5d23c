"""Compiled steps of several processes, as far as one process can show them."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from gpt.config import Arch, GPTConfig
from gpt.model.decoder import GPT
from gpt.parallel.shard import Grid, ShardedModel, drawn
from gpt.parallel.world import World
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


class Graphs(list[str]):
    """A compiler that keeps the code of the graphs that it is given, and does not compile."""

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        self.append(graph.code)
        return graph.forward


@pytest.mark.filterwarnings("ignore")  # of the compiler, which a `Stepper` ignores too
@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("arch", ["gpt2", "modern"])
def test_shards_compile_without_a_break(arch: Arch) -> None:
    """Whole blocks are gathered before they are computed: no hook lies within what is compiled."""
    graphs, config, narrow = Graphs(), GPTConfig.of(arch, 64, 8, 3, 2, 32), torch.bfloat16
    sharded = ShardedModel(config, Grid(1, 1, True), World().mesh("cpu"), narrow)
    sharded.allocate(torch.device("cpu"))
    for name, whole in drawn(config):
        sharded.fill(name, whole)
    ids = torch.randint(64, (2, 8))
    objective = Objective(sharded.model, 0)
    torch._dynamo.utils.counters.clear()
    with torch.autocast("cpu", dtype=narrow):
        expected = objective(ids, ids).item()
        compile_halves(sharded.model, torch.device("cpu"), backend=graphs)
        objective(ids, ids).backward()
        assert objective(ids, ids).item() == pytest.approx(expected)
    assert not torch._dynamo.utils.counters["graph_break"]
    assert len(graphs) == 3


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("alone")
def test_replicas_compile_the_halves_of_blocks_whole() -> None:
    """Torch splits what is compiled under `DistributedDataParallel` where its buckets of gradients end."""
    graphs = Graphs()
    model = GPT(GPTConfig(64, 8, 3, 2, 256))
    ids = torch.randint(64, (2, 8))
    expected = Objective(model, 0)(ids, ids)
    wrapped = DistributedDataParallel(Objective(model, 0), bucket_cap_mb=1)  # type: ignore[arg-type]
    compile_halves(model, torch.device("cpu"), backend=graphs)
    wrapped(ids, ids).backward()
    assert wrapped(ids, ids).item() == pytest.approx(expected.item())
    assert len(graphs) == 3  # attention's half, the MLP's, the last norm: the blocks share them
