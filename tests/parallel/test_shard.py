"""Parameters divided over processes: the parts, and steps that come to what one process comes to."""

import contextlib
import math
import socket
import time
from collections.abc import Callable, Iterator
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
from torch.nn.attention import SDPBackend, sdpa_kernel

from gpt.config import GPTConfig, find_preset
from gpt.errors import UserError
from gpt.files import side_by_side
from gpt.model import memory
from gpt.model.decoder import GPT
from gpt.model.loss import tied_cross_entropy
from gpt.model.params import named_parameters
from gpt.parallel import tensor
from gpt.parallel.gather import CheckpointGatherer
from gpt.parallel.shard import Grid, ShardedModel, drawn
from gpt.runs import checkpoint
from gpt.runs.tensors import Deferred
from gpt.text.tokenizer import bytes_tokenizer
from gpt.training.optim import make_optimizer
from gpt.training.parallel import ShardedMuon

CPU = torch.device("cpu")
TINY = GPTConfig(vocab_size=257, block_size=16, n_layer=2, n_head=4, n_embd=32)
MODERN = GPTConfig.of("modern", 257, 16, 2, 4, 32, n_kv_head=2, window=6, tied=False)


def run_in(n: int, work: Callable[..., None], *args: Any) -> None:
    """Runs ``work(rank, *args)`` in so many processes over gloo."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(_meet, (n, port, work, args), nprocs=n)


def _meet(rank: int, n: int, port: int, work: Callable[..., None], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=n)
    work(rank, *args)
    dist.barrier()
    dist.destroy_process_group()


def mesh_of(grid: Grid) -> DeviceMesh:
    return init_device_mesh("cpu", (grid.data, grid.tensor), mesh_dim_names=("data", "tensor"))


def divided(config: GPTConfig, grid: Grid, seed: int = 1) -> ShardedModel:
    sharded = ShardedModel(config, grid, mesh_of(grid), torch.float32)
    sharded.allocate(CPU)
    torch.manual_seed(seed)
    for name, whole in drawn(config):
        sharded.fill(name, whole)
    return sharded


@pytest.mark.parametrize("grid", [Grid(1), Grid(3, 1, True), Grid(2, 4, True), Grid(3, 2), Grid(1, 2, True)])
@pytest.mark.parametrize("config", [TINY, MODERN])
def test_parts_hold_every_number_as_often_as_there_are_copies(grid: Grid, config: GPTConfig) -> None:
    for name, p in named_parameters(config).items():
        count, whole = torch.zeros(p.shape), torch.randn(p.shape)
        again = torch.empty(p.shape)
        for rank in range(grid.size):
            part = grid.part(p, rank)
            taken = part.take(whole)
            assert taken.shape == part.shape
            part.put(taken, again)
            part.put(part.take(count) + 1, count)
        assert (count == grid.copies(p)).all(), name
        assert torch.equal(again, whole)


@pytest.mark.parametrize("grid", [Grid(2), Grid(1, 2), Grid(2, 2), Grid(2, 2, True), Grid(3, 1, True)])
def test_every_number_is_sent_once(grid: Grid) -> None:
    """To where a checkpoint is put together."""
    gatherer = CheckpointGatherer.__new__(CheckpointGatherer)
    gatherer.grid, gatherer.tensors = grid, named_parameters(TINY)
    for name, p in gatherer.tensors.items():
        senders = gatherer._senders(name)
        assert sum(grid.part(p, rank).numel for rank in senders) == p.numel
        assert all(grid.part(p, rank).numel for rank in senders)


def test_one_tensor_is_asked_for_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though two files are written side by side: what others send has no name."""
    told: list[str] = []
    places = named_parameters(TINY)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    gatherer = CheckpointGatherer(Grid(2, 1, True), places, None)  # type: ignore[arg-type]

    def say(which: int) -> int:
        told.append(gatherer.names[which])
        time.sleep(0.05)
        return which

    def come(rank: int, shape: tuple[int, ...]) -> Any:
        told.append("sent")
        return np.zeros(shape, np.float32)

    monkeypatch.setattr(gatherer, "_broadcast", say)
    monkeypatch.setattr(gatherer, "_receive", come)
    names = ["wte.weight", "h.0.attn.c_attn.weight", "h.1.mlp.c_fc.weight", "ln_f.weight"]
    mine = {name: np.zeros(gatherer.grid.part(places[name], 0).shape, np.float32) for name in names}
    side_by_side(lambda name: gatherer.full_tensor(name, mine[name]), names)
    assert sorted(told[::2]) == sorted(names)
    assert told[1::2] == ["sent"] * 4


def test_queries_keys_and_values_of_a_head_stay_together() -> None:
    """With 4 heads of 8: the second of two processes has heads 2 and 3 of each of the three."""
    part = Grid(1, 2).part(named_parameters(TINY)["h.0.attn.c_attn.weight"], 1)
    assert [(run.start, run.stop) for run in part.rows] == [(16, 32), (48, 64), (80, 96)]


@pytest.mark.parametrize("config", [TINY, MODERN])
def test_initial_weights_are_those_of_one_process(config: GPTConfig) -> None:
    torch.manual_seed(3)
    plain, after = GPT(config), torch.rand(1)
    torch.manual_seed(3)
    parameters = dict(drawn(config))
    assert torch.equal(after, torch.rand(1))
    assert list(parameters) == [name for name, p in named_parameters(config).items() if p.trained]
    assert all(torch.equal(p, parameters[name]) for name, p in plain.named_parameters())


def test_tensor_must_divide_the_heads() -> None:
    with pytest.raises(UserError, match="4 heads cannot be shared evenly by 3 processes") as told:
        tensor.check(TINY, 3)
    assert told.value.hint == "take one of 1, 2, 4"


@pytest.mark.parametrize("config", [TINY, MODERN])
def test_recomputing_changes_no_number(config: GPTConfig) -> None:
    torch.manual_seed(0)
    model = GPT(config)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.2
    idx = torch.randint(257, (3, 16))
    found = []
    for model.recompute in (False, True):
        torch.manual_seed(1)
        kept: list[int] = []

        def keep(x: torch.Tensor, kept: list[int] = kept) -> torch.Tensor:
            kept.append(x.numel())
            return x

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            loss = tied_cross_entropy(model.trunk(idx), model.unembedding, idx)
        found.append((loss, torch.autograd.grad(loss, list(model.parameters())), sum(kept)))
    (loss, grads, kept_all), (again, anew, kept_some) = found
    assert torch.equal(loss, again)
    assert all(torch.equal(a, b) for a, b in zip(grads, anew, strict=True))
    assert kept_some < kept_all / 2


def batches(steps: int, rows: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(5)
    for _ in range(steps):
        x = torch.randint(97, (rows, 16), generator=generator)
        yield x, (7 * x + 3) % 97


def learn(model: GPT, optimizer: Any, x: torch.Tensor, y: torch.Tensor, unless: bool) -> tuple[float, float]:
    """A step of one process."""
    loss = tied_cross_entropy(model.trunk(x), model.unembedding, y) / y.numel()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step(skip=torch.tensor(unless))
    optimizer.zero_grad()
    return loss.item(), norm.item()


def learn_together(sharded: ShardedModel, optimizer: Any, x: torch.Tensor, y: torch.Tensor, unless: bool) -> Any:
    """A step of several, accumulated over two micro-batches of each."""
    grid, total = sharded.grid, torch.zeros(())
    mine = (each.chunk(grid.data)[sharded.rank // grid.tensor] for each in (x, y))
    for micro, (some, aims) in enumerate(zip(*(each.chunk(2) for each in mine), strict=True)):
        with sharded.no_sync() if micro == 0 else contextlib.nullcontext():
            loss = tied_cross_entropy(sharded.model.trunk(some), sharded.model.unembedding, aims) / y.numel()
            (loss * grid.data).backward()
        total += loss.detach()
    dist.all_reduce(total)
    sharded.collect()
    norm = sharded.clip_grad_norm(0.5)
    optimizer.step(skip=torch.tensor(unless))
    optimizer.zero_grad()
    return total.item() / grid.tensor, norm.item()


@sdpa_kernel(SDPBackend.MATH)
def agree_with_one(rank: int, steps: int, cases: list[tuple[Grid, GPTConfig, str]], out: Path) -> None:
    """Steps of a whole model in each process, and of one divided: equal losses, norms and weights.

    With plain attention, by which the queries and keys of one position have a gradient of exactly 0. The fused kernel of
    some CPUs leaves rounding there, which Muon would scale up.
    """
    for number, (grid, config, kind) in enumerate(cases):
        torch.manual_seed(1)
        plain = GPT(config)
        sharded = divided(config, grid)
        sharded.model.recompute = number % 2 == 1
        one = make_optimizer(plain, kind, 0.1)
        parts = make_optimizer(sharded.own, kind, 0.1, muon=partial(ShardedMuon, sharded))
        first = math.inf
        for step, (x, y) in enumerate(batches(steps, 8)):
            x, y = x[:, : config.block_size], y[:, : config.block_size]
            for each in (one, parts):
                each.set_lr(1e-2)
            alone = learn(plain, one, x, y, step == 7)
            together = learn_together(sharded, parts, x, y, step == 7)
            assert together == pytest.approx(alone, abs=1e-4), f"{grid} {kind}, step {step}"
            first = alone[0] if step == 0 else first
        assert alone[0] < first - 0.1 or config.block_size == 1, "it learnt"
        check_whole(sharded, parts, plain, one, out / str(number))
        check_scaler(sharded, parts)


def check_scaler(sharded: ShardedModel, optimizer: Any) -> None:
    """A gradient that overflows in one process, as float16's may, lowers the scale in all."""
    scaler = sharded.scaler("cpu", True)
    scaler.scale(torch.ones(()))
    before = scaler.get_scale()
    for p in sharded.own.parameters():
        p.grad = torch.full_like(p, math.inf if sharded.rank == 1 else 1.0)
    for part in optimizer.optimizers:
        scaler.unscale_(part)
    scaler.update()
    assert scaler.get_scale() == before / 2


def check_whole(sharded: ShardedModel, parts: Any, plain: GPT, one: Any, out: Path) -> None:
    """Weights and moments put together at one process are the plain ones; the weights become a checkpoint."""
    group = dist.new_group(backend="gloo")
    mine = {name: p.detach() for name, p in sharded.own.named_parameters()}
    places = dict(sharded.table)
    for name, moment in parts.state(sharded.own).items():
        parameter = name.rpartition(".")[0]
        if not name.endswith(".step"):
            mine[name], places[name] = moment, sharded.table[parameter]
    gatherer = CheckpointGatherer(sharded.grid, places, group)
    if sharded.rank:
        gatherer.send(mine)
        return
    expected = dict(plain.named_parameters()) | one.state(plain)
    for name in reversed(mine):
        whole = torch.from_numpy(gatherer.full_tensor(name, mine[name].numpy()))
        torch.testing.assert_close(whole, expected[name].detach(), atol=2e-4, rtol=1e-4, msg=name)
    weights = {
        name: Deferred(p.shape, partial(gatherer.full_tensor, name, mine[name].numpy()))
        for name, p in sharded.table.items()
    }
    files = checkpoint.TokenizerFiles(bytes_tokenizer(), plain.config)
    checkpoint.write(out, checkpoint.contents(plain.config, weights, files, {}))
    gatherer.finish()
    torch.save(plain.state_dict(), out.with_suffix(".pt"))


def read_by_others(folder: Path) -> None:
    """A checkpoint's logits here and in transformers are those of the plain model that learnt beside it."""
    ours = checkpoint.load(folder, CPU).model
    idx = torch.arange(ours.config.block_size)[None] * 5
    plain = GPT(ours.config).eval()
    plain.load_state_dict(torch.load(folder.with_suffix(".pt")))
    expected = plain(idx)
    torch.testing.assert_close(ours(idx), expected, atol=2e-3, rtol=1e-3)
    if ours.config.layout == "gpt2":
        from transformers import AutoModelForCausalLM

        theirs = AutoModelForCausalLM.from_pretrained(folder).eval()(idx).logits
        torch.testing.assert_close(theirs, ours(idx), atol=1e-5, rtol=1e-4)


@pytest.mark.slow
def test_two_processes_come_to_what_one_does(tmp_path: Path) -> None:
    sharded, together = Grid(2, 1, True), Grid(1, 2)
    cases = [(sharded, TINY, "adamw"), (sharded, MODERN, "muon"), (together, TINY, "muon"), (together, MODERN, "adamw")]
    # Of whose table the second process has nothing, nor a matrix to work on.
    one_position = replace(TINY, block_size=1, n_layer=1)
    assert sharded.part(named_parameters(one_position)["wpe.weight"], 1).numel == 0
    cases.append((sharded, one_position, "muon"))
    run_in(2, agree_with_one, 20, cases, tmp_path)
    for number in range(len(cases)):
        read_by_others(tmp_path / str(number))


@pytest.mark.slow
def test_four_processes_come_to_what_one_does(tmp_path: Path) -> None:
    run_in(4, agree_with_one, 15, [(Grid(2, 2, True), TINY, "muon"), (Grid(2, 2), MODERN, "muon")], tmp_path)
    read_by_others(tmp_path / "0")


def test_weights_above_a_limit_are_several_files_with_an_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, files = GPT(TINY), checkpoint.TokenizerFiles(bytes_tokenizer(), TINY)
    checkpoint.save(tmp_path / "whole", model, files, {})
    monkeypatch.setattr(checkpoint, "MOST_BYTES", 40_000)
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

    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "cut").eval()(idx).logits
    torch.testing.assert_close(theirs, expected, atol=1e-5, rtol=1e-4)
    (tmp_path / "cut" / names[1]).unlink()
    with pytest.raises(UserError, match=f"{names[1]} is missing"):
        checkpoint.load(tmp_path / "cut", CPU)


@pytest.mark.slow
def test_175_billion_parameters_on_1024_processes() -> None:
    """As rank 0 of 128 × 8, with a process group and tensors that only pretend: what it has of parameters, gradients
    and moments is what arithmetic says."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.testing._internal.distributed.fake_pg import FakeStore

    config = find_preset("gpt3-175b").model
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
            own = list(sharded.own.parameters())
            held = [sum(p.numel() for p in own), sum(p.grad.numel() for p in own if p.grad is not None)]
            moments = [m for name, m in optimizer.state(sharded.own).items() if not name.endswith(".step")]
            held.append(sum(m.numel() for m in moments) // 2)
            assert {t.dtype for t in (*own, *moments)} == {torch.float32}
    finally:
        dist.destroy_process_group()
    C, V, T, layers = config.n_embd, config.vocab_size, config.block_size, config.n_layer
    divided = 12 * C * C + 3 * C + 4 * C  # of a block, by rows and columns: matrices, and biases of c_attn and c_fc
    whole = C + C + 4 * C  # biases of what writes to the residual stream, LayerNorms
    expected = layers * (divided // 8 + whole) // 128 + (T * C + 2 * C) // 128 + math.ceil(V / 128) * C
    assert held == [expected] * 3
    assert rank_parameters(config, 128, 8) == expected
    setup = memory.Setup(data=128, tensor=8, shard=True, optimizer="adamw")
    said = memory.training(config, setup)  # which counts all ranks alike, and rank 0 has a row of the embedding more
    assert [said.parameters, said.gradients, said.optimizer] == pytest.approx(
        [4 * expected, 4 * expected, 8 * expected], rel=1e-4
    )
    assert 16 * expected < 3e9  # bytes: parameters, gradients, two moments
