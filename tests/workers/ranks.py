"""Worker script of `test_parallel.py`.

python tests/workers/ranks.py SCENARIO
"""

import contextlib
import json
import math
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import gpt
from gpt.config import events
from gpt.config.sample import SampleConfig
from gpt.model.decoder import Block
from gpt.parallel import world
from gpt.training import evaluation, memory_probe
from gpt.training import step as stepping
from gpt.training.checkpointing import Checkpointer
from gpt.training.strategy import MOMENT, WEIGHT
from gpt.training.time_budget import Clock, Costs, TimeBudget

SMALL: dict[str, Any] = {
    "n_layer": 2, "n_head": 2, "n_embd": 32, "block_size": 16, "batch_tokens": 128, "dtype": "float32",
    "sample_every": 0, "vocab_size": 400, "dropout": 0.0,
}  # fmt: skip
SIX_STEPS = {**SMALL, "steps": 6, "save_every": 4, "eval_every": 4, "keep": 9}
TWELVE_STEPS = {**SMALL, "steps": 12, "save_every": 4, "eval_every": 4, "keep": 9}


def to_options(settings: dict[str, Any]) -> list[str]:
    return [word for key, value in settings.items() for word in ("--" + key.replace("_", "-"), str(value))]


OPTIONS = to_options(TWELVE_STEPS)
RUNS: dict[str, dict[str, Any]] = {
    "adamw": {**SIX_STEPS, "optimizer": "adamw", "micro_batch": 2},
    "muon": {**SIX_STEPS, "optimizer": "muon", "n_layer": 3},
    "modern": {**SIX_STEPS, "arch": "modern", "micro_batch": 1},
    "pairs": {
        **SIX_STEPS,
        "pairs": True,
        "vocab_size": 270,
        "optimizer": "adamw",
        "block_size": 32,
        "batch_tokens": 264,
    },
    "preferences": {**SIX_STEPS, "vocab_size": None, "init": "one/adamw", "preferences": True, "lr": 1e-3},
    "phases": {**SIX_STEPS, "steps": 12, "teachers": 2},  # Six steps are the teachers'.
}
# The sample is just long enough to exceed the context.
SAMPLE = SampleConfig(max_tokens=18)
TEXTS = {"pairs": "pairs.jsonl", "preferences": "preferences.jsonl", "qwen3": "chats.jsonl"}
RANK = int(os.environ.get("RANK", "0"))


def make_killed_after(run: Path, step: int) -> None:
    """Turns a finished run into one killed soon after ``step``."""
    for path in run.glob("step-*"):
        if int(path.name[5:]) > step:
            shutil.rmtree(path)
    record = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({k: v for k, v in record.items() if k not in ("ended", "result")}))


def copy_killed_run(run: str, target: str, step: int) -> None:
    shutil.copytree(run, target)
    make_killed_after(Path(target), step)


def two() -> None:
    syncs: dict[str, list[bool]] = {}
    for name, settings in RUNS.items():
        with record_gradient_syncs() as syncs[name]:
            gpt.train(TEXTS.get(name, "book.txt"), out=f"two/{name}", **settings)
    gpt.train("book.txt", out="two/dropout", **{**TWELVE_STEPS, "dropout": 0.1})
    if RANK == 0:
        copy_killed_run("two/dropout", "two/resumed", 4)
        copy_killed_run("one/adamw", "two/from-one", 4)
    gpt.resume("two/resumed")
    run_events: list[Any] = []
    gpt.resume("two/from-one", run_events.append)
    with nan_loss_on_rank_1(), record_rollbacks() as rolled_back:
        gpt.train("book.txt", out="two/poisoned", listen=run_events.append, **TWELVE_STEPS)
    little = {**TWELVE_STEPS, "steps": 4, "dropout": 0.1}
    for sharding in ("none", "full"):
        with limit_memory(ranks=[1] if sharding == "none" else [0, 1]):
            gpt.train("book.txt", out=f"two/little-{sharding}", listen=run_events.append, shard=sharding, **little)
        gpt.train("book.txt", out=f"two/small-{sharding}", shard=sharding, micro_batch=1, **little)
        with compiler_on_rank_0_only():
            gpt.train("book.txt", out="two/eager", listen=run_events.append, shard=sharding, compile="on", **little)
    notes = [event.text for event in run_events if isinstance(event, events.Note)]
    report = {"notes": notes, "summed": syncs, "rolled_back": rolled_back}
    Path(f"heard-{RANK}.json").write_text(json.dumps(report))


@contextlib.contextmanager
def steady_clock(steps: int, ahead: float = 0.0, cycles: int = 1) -> Iterator[None]:
    """Makes each of the ``cycles`` of a timed run take ``steps`` steps. Its clock does not depend on the speed of this machine, and is
    ``ahead`` of that share of the time."""

    def share(clock: Clock) -> float:
        vars(clock)["reads"] = vars(clock).get("reads", -1) + 1
        return min(1.0, vars(clock)["reads"] / steps + ahead)

    def tokens(budget: TimeBudget, costs: Costs, step_tokens: int) -> float:
        return float(cycles * steps * step_tokens)

    with mock.patch.object(Clock, "share", share), mock.patch.object(TimeBudget, "tokens", tokens):
        yield


@contextlib.contextmanager
def record_gradient_syncs() -> Iterator[list[bool]]:
    """Records for each micro-batch whether gradients were all-reduced."""
    original, syncs = stepping.Stepper.backward, []

    def backward(self: stepping.Stepper, *args: Any) -> torch.Tensor:
        syncs.append(bool(self.wrapped.require_backward_grad_sync))
        return original(self, *args)

    with mock.patch.object(stepping.Stepper, "backward", backward):
        yield syncs


@contextlib.contextmanager
def nan_loss_on_rank_1() -> Iterator[None]:
    original, calls = stepping.tied_cross_entropy, []

    def loss(*args: Any) -> torch.Tensor:
        calls.append(1)
        return original(*args) * (math.nan if RANK == 1 and 6 < len(calls) <= 9 else 1)

    with mock.patch.object(stepping, "tied_cross_entropy", loss):
        yield


@contextlib.contextmanager
def record_rollbacks() -> Iterator[list[Any]]:
    """Records sums of this rank's weights and moments, and its snapshot's size, after each rollback."""
    original, reports = Checkpointer.roll_back, []

    def roll_back(self: Checkpointer, **changes: Any) -> None:
        original(self, **changes)
        snapshot_size = sum(name.startswith((WEIGHT, MOMENT)) for name in self.snapshot.tensors)
        strategy = self.strategy
        moments = strategy.optimizer.state()
        sums = {
            name: float(tensor.double().abs().sum())
            for name, tensor in [*strategy.optimizer.parameters.items(), *moments.items()]
        }
        reports.append({"has": sums, "kept": snapshot_size, "step": self.state.step})

    with mock.patch.object(Checkpointer, "roll_back", roll_back):
        yield reports


@contextlib.contextmanager
def limit_memory(ranks: list[int]) -> Iterator[None]:
    """Lets ``ranks`` run out of memory in the forward pass of a micro-batch of 4, and in the backward pass of 2."""
    original = Block.add_mlp

    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    def add_mlp(self: Block, x: torch.Tensor) -> torch.Tensor:
        if RANK in ranks and self.training and x.size(0) == 4:
            fail()
        elif RANK in ranks and self.training and x.size(0) == 2:
            x.register_hook(fail)
        return original(self, x)

    with mock.patch.object(Block, "add_mlp", add_mlp), mock.patch.object(memory_probe, "PROBED_DEVICES", ("cpu",)):
        yield


def raise_on_rank_1() -> None:
    original, calls = stepping.Stepper.step, []

    def step(*args: Any) -> Any:
        calls.append(1)
        if RANK == 1 and len(calls) == 6:
            raise RuntimeError("boom")
        return original(*args)

    with mock.patch.object(stepping.Stepper, "step", step):
        run_command("--quiet", "-o", "broken")


def kill_rank_1() -> None:
    """Kills rank 1 while rank 0 hangs, as in an NCCL collective."""
    original, calls = stepping.Stepper.step, []

    def step(*args: Any) -> Any:
        calls.append(1)
        if len(calls) == 6:
            if RANK == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(300)
        return original(*args)

    with mock.patch.object(stepping.Stepper, "step", step):
        run_command("--quiet", "-o", "killed")


def time_out_on_rank_1() -> None:
    """Stalls rank 1 past a collective's timeout, like a machine without power."""
    original, calls = stepping.Stepper.step, []

    def step(*args: Any) -> Any:
        calls.append(1)
        if RANK == 1 and len(calls) == 6:
            time.sleep(300)
        return original(*args)

    with (
        mock.patch.object(stepping.Stepper, "step", step),
        mock.patch.object(world, "COLLECTIVE_TIMEOUT", timedelta(seconds=10)),
    ):
        run_command("--quiet", "-o", "silent")


@contextlib.contextmanager
def compiler_on_rank_0_only() -> Iterator[None]:
    def fail(*_: Any) -> None:
        raise RuntimeError("no C++ compiler")

    with mock.patch.object(torch, "compile", lambda function, **_: fail if RANK == 1 else function):
        yield


def stop_rank_1() -> None:
    """Sends rank 1 a signal in the sixth step, after a checkpoint."""
    original, calls = stepping.Stepper.step, []

    def step(*args: Any) -> Any:
        calls.append(1)
        if RANK == 1 and len(calls) == 6:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(*args)

    with mock.patch.object(stepping.Stepper, "step", step):
        run_command("--quiet", "-o", "runs/x", "--nproc", "2", "--dropout", "0.1", "--shard", "full")


def disagree_on_seed() -> None:
    run_command("--quiet", "-o", "otherwise", "--seed", str(7 + RANK))


def run_command(*words: str) -> None:
    """Runs ``gpt train`` as a command. A process of a group exits without interpreter shutdown."""
    from gpt_cli.main import run

    sys.argv = ["gpt", "train", "book.txt", *OPTIONS, *words]
    run()


if __name__ == "__main__":
    scenarios: dict[str, Callable[[], None]] = {
        "two": two, "broken": raise_on_rank_1, "otherwise": disagree_on_seed, "killed": kill_rank_1,
        "silent": time_out_on_rank_1, "stopped": stop_rank_1,
    }  # fmt: skip
    evaluation.SAMPLE = SAMPLE
    scenarios[sys.argv[1]]()
