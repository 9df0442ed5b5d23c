"""Sharded parameters and their training steps."""

import math
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from models import rank_parameters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from gpt.config.model import GPTConfig, find_preset
from gpt.model.decoder import GPT
from gpt.model.loss import tied_cross_entropy
from gpt.model.params import named_parameters
from gpt.parallel.gather import CheckpointGatherer, Exchange, ShardExchange, shard_rows
from gpt.parallel.shard import ShardedModel, initialize_parameters
from gpt.parallel.world import World
from gpt.runs import checkpoint
from gpt.system.errors import UserError
from gpt.system.files import map_in_threads
from gpt.tokenizers.tokenizer import bytes_tokenizer
from gpt.training.optim import make_optimizer

CPU = torch.device("cpu")
TINY = GPTConfig(vocab_size=257, block_size=16, n_layer=2, n_head=4, n_embd=32)
MODERN = GPTConfig.of("modern", 257, 16, 2, 4, 32, n_kv_head=2, window=6, tied=False)


@pytest.mark.parametrize("ranks", [1, 3, 8])
@pytest.mark.parametrize("config", [TINY, MODERN])
def test_shards_are_those_of_fsdp(ranks: int, config: GPTConfig) -> None:
    """FSDP cuts a parameter with `torch.chunk`. The rows of its fused matrices add up to the shard's."""
    for p in named_parameters(config).values():
        whole = torch.randn(p.shape)
        shards = [whole[shard_rows(len(whole), ranks, rank)] for rank in range(ranks)]
        chunks = whole.chunk(ranks)
        assert all(map(torch.equal, shards, chunks))
        assert not any(map(len, shards[len(chunks) :]))
        exchange = Exchange()
        exchange.shards = ranks
        counts = exchange.count_rows(p.fused or p.shape[:1])
        assert [sum(rows) for rows in counts] == list(p.fused or p.shape[:1])
        assert [sum(rows) for rows in zip(*counts, strict=True)] == list(map(len, shards))


def test_tensors_are_gathered_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two files are written in parallel, but ranks send shards without names, so only one tensor can be in transit."""
    calls: list[str] = []
    expected = {name: np.random.rand(*p.shape).astype(np.float32) for name, p in named_parameters(TINY).items()}
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 3)
    gatherer = CheckpointGatherer({name: array.shape for name, array in expected.items()})

    def broadcast(index: int) -> int:
        calls.append(gatherer.names[index])
        time.sleep(0.05)
        return index

    def receive(part: torch.Tensor, rank: int) -> None:
        name = next(name for name in reversed(calls) if name != "sent")
        part.copy_(torch.from_numpy(expected[name][gatherer.rows(name, rank)]))
        calls.append("sent")

    monkeypatch.setattr(gatherer, "_broadcast", broadcast)
    monkeypatch.setattr(dist, "recv", receive)
    names = ["wte.weight", "h.0.attn.c_attn.weight", "h.1.mlp.c_fc.weight", "ln_f.weight"]
    gathered = map_in_threads(lambda name: gatherer.full_tensor(name, expected[name][gatherer.rows(name, 0)]), names)
    assert all(np.array_equal(gathered[name], expected[name]) for name in names)
    assert sorted(calls[::3]) == sorted(names)
    assert calls[1::3] == calls[2::3] == ["sent"] * 4


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
    sharded = ShardedModel(MODERN, init_device_mesh("cpu", (2,)), CPU, torch.float32)
    for name, whole in initialize_parameters(MODERN):
        sharded.fill(name, whole)
    world = World()
    world.rank, world.size = rank, 2
    optimizer = make_optimizer(sharded.model, "muon", 0.1, torch.float32, ShardExchange(world), sharded.parameters)
    optimizer.set_lr(0.1)
    scaler = ShardedGradScaler("cpu", process_group=dist.group.WORLD)
    scaler.scale(torch.ones(()))
    scale, weights = scaler.get_scale(), [p.detach().clone() for p in sharded.parameters.values()]
    for p in sharded.parameters.values():
        p.grad = torch.full_like(p, math.inf if rank == 1 else 1.0)
    for part in optimizer.optimizers:
        scaler.unscale_(part)
    scaler.update()
    assert scaler.get_scale() == scale / 2
    optimizer.step(skip=torch.tensor(True))
    assert all(map(torch.equal, weights, sharded.parameters.values()))
    for p in sharded.parameters.values():
        p.grad = torch.ones_like(p)
    optimizer.step(skip=torch.tensor(False))
    assert not any(map(torch.equal, weights, sharded.parameters.values()))
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
    """Simulates rank 0 with fake tensors and a fake process group."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.testing._internal.distributed.fake_pg import FakeStore

    config = replace(find_preset("gpt3-175b").model, n_layer=2)
    dist.init_process_group("fake", rank=0, world_size=1024, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (1024,))
        with FakeTensorMode(allow_non_fake_inputs=True):
            sharded = ShardedModel(config, mesh, CPU, torch.bfloat16)
            idx = torch.zeros(1, 32, dtype=torch.long)
            tied_cross_entropy(sharded.model.trunk(idx), sharded.model.unembedding, idx).backward()
            sharded.collect()
            optimizer = make_optimizer(sharded.model, "adamw", 0.1, parameters=sharded.parameters)
            optimizer.step(skip=torch.tensor(False))
            shard_parameters = list(sharded.parameters.values())
            counts = [
                sum(p.numel() for p in shard_parameters),
                sum(p.grad.numel() for p in shard_parameters if p.grad is not None),
            ]
            moments = [m for name, m in optimizer.state().items() if not name.endswith(".step")]
            counts.append(sum(m.numel() for m in moments) // 2)
            assert {t.dtype for t in (*shard_parameters, *moments)} == {torch.float32}
    finally:
        dist.destroy_process_group()
    assert counts == [rank_parameters(config, 1024)] * 3  # `test_plan` checks this count.
