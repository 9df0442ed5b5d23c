"""Compiled sharded and replicated steps, in one process."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from gpt.config.model import Arch, GPTConfig
from gpt.model.decoder import GPT
from gpt.parallel.shard import ShardedModel, initialize_parameters
from gpt.parallel.world import World
from gpt.training.gpu_step import compile_halves
from gpt.training.step import Objective


@pytest.fixture
def process_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch._dynamo.reset()
    yield
    dist.destroy_process_group()
    torch._dynamo.reset()


class GraphRecorder(list[str]):
    """A backend that records graphs without compiling."""

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        self.append(graph.code)
        return graph.forward


@pytest.mark.filterwarnings("ignore")  # A `Stepper` ignores compiler warnings too.
@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("arch", ["gpt2", "modern"])
def test_sharded_blocks_compile_without_graph_breaks(arch: Arch) -> None:
    """Blocks are gathered before they run, so compiled code contains no hooks."""
    graphs, config, dtype = GraphRecorder(), GPTConfig.of(arch, 64, 8, 3, 2, 32), torch.bfloat16
    sharded = ShardedModel(config, World().mesh("cpu"), torch.device("cpu"), dtype)
    for name, tensor in initialize_parameters(config):
        sharded.fill(name, tensor)
    ids = torch.randint(64, (2, 8))
    objective = Objective(sharded.model, 0)
    torch._dynamo.utils.counters.clear()
    with torch.autocast("cpu", dtype=dtype):
        expected = objective(ids, ids).item()
        compile_halves(sharded.model, torch.device("cpu"), backend=graphs)
        objective(ids, ids).backward()
        assert objective(ids, ids).item() == pytest.approx(expected)
    assert not torch._dynamo.utils.counters["graph_break"]
    assert len(graphs) == 3


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("process_group")
def test_replicated_block_halves_compile_as_whole_graphs() -> None:
    """By default, torch splits compiled code between the gradient buckets of `DistributedDataParallel`."""
    graphs = GraphRecorder()
    model = GPT(GPTConfig(64, 8, 3, 2, 256))
    ids = torch.randint(64, (2, 8))
    expected = Objective(model, 0)(ids, ids)
    ddp_objective = DistributedDataParallel(Objective(model, 0), bucket_cap_mb=1)  # type: ignore[arg-type]
    compile_halves(model, torch.device("cpu"), backend=graphs)
    ddp_objective(ids, ids).backward()
    assert ddp_objective(ids, ids).item() == pytest.approx(expected.item())
    assert len(graphs) == 3  # the attention half, the MLP half, the last norm
