"""Sharded parameters and their training steps."""

import math
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from models import rank_parameters
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from gpt.config import GPTConfig, find_preset
from gpt.errors import UserError
from gpt.files import map_in_threads
from gpt.model.decoder import GPT
from gpt.model.loss import tied_cross_entropy
from gpt.model.params import named_parameters
from gpt.parallel.gather import CheckpointGatherer
from gpt.parallel.shard import Grid, ShardedModel, initialize_parameters
from gpt.runs import checkpoint
from gpt.text.tokenizer import bytes_tokenizer
from gpt.training.optim import make_optimizer
from gpt.training.recipe import check_heads
from gpt.training.strategy import ShardedMuon

CPU = torch.device("cpu")
TINY = GPTConfig(vocab_size=257, block_size=16, n_layer=2, n_head=4, n_embd=32)
MODERN = GPTConfig.of("modern", 257, 16, 2, 4, 32, n_kv_head=2, window=6, tied=False)


def mesh_of(grid: Grid) -> DeviceMesh:
    return init_device_mesh("cpu", (grid.data, grid.tensor), mesh_dim_names=("data", "tensor"))


@pytest.mark.parametrize("grid", [Grid(1), Grid(3, 1, True), Grid(2, 4, True), Grid(3, 2), Grid(1, 2, True)])
@pytest.mark.parametrize("config", [TINY, MODERN])
def test_shards_contain_every_element_once_per_copy(grid: Grid, config: GPTConfig) -> None:
    for name, p in named_parameters(config).items():
        count, tensor = torch.zeros(p.shape), torch.randn(p.shape)
        restored = torch.empty(p.shape)
        for rank in range(grid.size):
            part = grid.part(p, rank)
            shard = part.take(tensor)
            assert shard.shape == part.shape
            part.put(shard, restored)
            part.put(part.take(count) + 1, count)
        assert (count == grid.copies(p)).all(), name
        assert torch.equal(restored, tensor)


@pytest.mark.parametrize("grid", [Grid(2), Grid(1, 2), Grid(2, 2), Grid(2, 2, True), Grid(3, 1, True)])
@pytest.mark.parametrize("config", [TINY, MODERN])
def test_every_element_is_gathered_once(grid: Grid, config: GPTConfig) -> None:
    gatherer = CheckpointGatherer.__new__(CheckpointGatherer)
    gatherer.grid, gatherer.tensors = grid, named_parameters(config)
    for name, p in gatherer.tensors.items():
        senders = gatherer._senders(name)
        assert sum(grid.part(p, rank).numel for rank in senders) == p.numel
        assert all(grid.part(p, rank).numel for rank in senders)


def test_tensors_are_gathered_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two files are written in parallel, but ranks send shards without names, so only one tensor can be in transit."""
    calls: list[str] = []
    parameters = named_parameters(TINY)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    gatherer = CheckpointGatherer(Grid(2, 1, True), parameters, None)  # type: ignore[arg-type]

    def broadcast(index: int) -> int:
        calls.append(gatherer.names[index])
        time.sleep(0.05)
        return index

    def receive(rank: int, shape: tuple[int, ...]) -> Any:
        calls.append("sent")
        return np.zeros(shape, np.float32)

    monkeypatch.setattr(gatherer, "_broadcast", broadcast)
    monkeypatch.setattr(gatherer, "_receive", receive)
    names = ["wte.weight", "h.0.attn.c_attn.weight", "h.1.mlp.c_fc.weight", "ln_f.weight"]
    shards = {name: np.zeros(gatherer.grid.part(parameters[name], 0).shape, np.float32) for name in names}
    map_in_threads(lambda name: gatherer.full_tensor(name, shards[name]), names)
    assert sorted(calls[::2]) == sorted(names)
    assert calls[1::2] == ["sent"] * 4


def test_tensor_shards_keep_heads_together() -> None:
    """The second of two ranks has heads 2 and 3 of 4, for queries, keys and values."""
    part = Grid(1, 2).part(named_parameters(TINY)["h.0.attn.c_attn.weight"], 1)
    assert [(run.start, run.stop) for run in part.rows] == [(16, 32), (48, 64), (80, 96)]


def test_tensor_parallel_size_must_divide_the_heads() -> None:
    with pytest.raises(UserError, match="4 heads cannot be split evenly over 3 processes") as error:
        check_heads(TINY, 3)
    assert error.value.hint == "use one of 1, 2, 4"


@pytest.mark.parametrize("config", [TINY, MODERN])
def test_recomputation_is_bit_exact_and_saves_memory(config: GPTConfig) -> None:
    torch.manual_seed(0)
    model = GPT(config)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.2
    idx = torch.randint(257, (3, 16))
    results = []
    for model.recompute in (False, True):
        torch.manual_seed(1)
        saved_sizes: list[int] = []

        def record_size(x: torch.Tensor, saved_sizes: list[int] = saved_sizes) -> torch.Tensor:
            saved_sizes.append(x.numel())
            return x

        with torch.autograd.graph.saved_tensors_hooks(record_size, lambda x: x):
            loss = tied_cross_entropy(model.trunk(idx), model.unembedding, idx)
        results.append((loss, torch.autograd.grad(loss, list(model.parameters())), sum(saved_sizes)))
    (loss, grads, saved_elements), (recomputed_loss, recomputed_grads, recomputed_elements) = results
    assert torch.equal(loss, recomputed_loss)
    assert all(torch.equal(a, b) for a, b in zip(grads, recomputed_grads, strict=True))
    assert recomputed_elements < saved_elements / 2


def overflow_on_rank_1(rank: int, rendezvous: Path) -> None:
    dist.init_process_group("gloo", init_method=rendezvous.as_uri(), rank=rank, world_size=2)
    grid = Grid(2, 1, True)
    sharded = ShardedModel(MODERN, grid, mesh_of(grid), torch.float32)
    sharded.allocate(CPU)
    for name, whole in initialize_parameters(MODERN):
        sharded.fill(name, whole)
    optimizer = make_optimizer(sharded.own, "muon", 0.1, muon=partial(ShardedMuon, sharded))
    optimizer.set_lr(0.1)
    scaler = ShardedGradScaler("cpu", process_group=sharded.group)
    scaler.scale(torch.ones(()))
    scale, weights = scaler.get_scale(), [p.detach().clone() for p in sharded.own.parameters()]
    for p in sharded.own.parameters():
        p.grad = torch.full_like(p, math.inf if rank == 1 else 1.0)
    for part in optimizer.optimizers:
        scaler.unscale_(part)
    scaler.update()
    assert scaler.get_scale() == scale / 2
    optimizer.step(skip=torch.tensor(True))
    assert all(map(torch.equal, weights, sharded.own.parameters()))
    for p in sharded.own.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step(skip=torch.tensor(False))
    assert not any(map(torch.equal, weights, sharded.own.parameters()))
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.slow
def test_overflow_on_one_rank_skips_the_step_on_all(tmp_path: Path) -> None:
    """The overflow lowers float16's loss scale."""
    mp.spawn(overflow_on_rank_1, (tmp_path / "meeting",), nprocs=2)


def test_large_weights_are_saved_as_indexed_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, files = GPT(TINY), checkpoint.TokenizerFiles(bytes_tokenizer(), TINY)
    checkpoint.save(tmp_path / "whole", model, files, {})
    monkeypatch.setattr(checkpoint, "MAX_SHARD_BYTES", 40_000)
    checkpoint.save(tmp_path / "cut", model, files, {})
    names = sorted(path.name for path in (tmp_path / "cut").glob("model*"))
    assert names[0] == f"model-00001-of-{len(names) - 1:05}.safetensors"
    assert names[-1] == "model.safetensors.index.json"
    assert len(names) > 3
    assert all(path.stat().st_size < 42_000 for path in (tmp_path / "cut").glob("*.safetensors"))
    idx = torch.arange(16)[None]
    expected = checkpoint.load(tmp_path / "whole", CPU).model(idx)
    assert torch.equal(checkpoint.load(tmp_path / "cut", CPU).model(idx), expected)
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(tmp_path / "cut").eval()(idx).logits
    torch.testing.assert_close(reference, expected, atol=1e-5, rtol=1e-4)
    (tmp_path / "cut" / names[1]).unlink()
    with pytest.raises(UserError, match=f"{names[1]} is missing"):
        checkpoint.load(tmp_path / "cut", CPU)


@pytest.mark.slow
def test_gpt3_175b_shard_size_on_1024_ranks() -> None:
    """Simulates rank 0 of 128 × 8 ranks with fake tensors and a fake process group."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.testing._internal.distributed.fake_pg import FakeStore

    config = replace(find_preset("gpt3-175b").model, n_layer=12)
    dist.init_process_group("fake", rank=0, world_size=1024, store=FakeStore())
    try:
        sharded = ShardedModel(config, Grid(128, 8, True), mesh_of(Grid(128, 8)), torch.bfloat16)
        with FakeTensorMode(allow_non_fake_inputs=True):
            sharded.allocate(CPU)
            idx = torch.zeros(1, 32, dtype=torch.long)
            tied_cross_entropy(sharded.model.trunk(idx), sharded.model.unembedding, idx).backward()
            sharded.collect()
            optimizer = make_optimizer(sharded.own, "adamw", 0.1)
            optimizer.step(skip=torch.tensor(False))
            shard_parameters = list(sharded.own.parameters())
            counts = [
                sum(p.numel() for p in shard_parameters),
                sum(p.grad.numel() for p in shard_parameters if p.grad is not None),
            ]
            moments = [m for name, m in optimizer.state(sharded.own).items() if not name.endswith(".step")]
            counts.append(sum(m.numel() for m in moments) // 2)
            assert {t.dtype for t in (*shard_parameters, *moments)} == {torch.float32}
    finally:
        dist.destroy_process_group()
    assert counts == [rank_parameters(config, 128, 8)] * 3  # `test_plan` checks this count.
