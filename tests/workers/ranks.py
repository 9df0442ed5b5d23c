"""The script that the processes of `test_parallel.py` run: each runs the scenario that is named.

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
from gpt import events
from gpt.model.decoder import GPT
from gpt.parallel import world
from gpt.sample_config import SampleConfig
from gpt.training import evaluation
from gpt.training import step as stepping
from gpt.training.checkpointing import Checkpointer
from gpt.training.parallel import MOMENT, WEIGHT

SMALL: dict[str, Any] = {
    "n_layer": 2, "n_head": 2, "n_embd": 32, "block_size": 16, "batch_tokens": 128, "dtype": "float32",
    "sample_every": 0, "vocab_size": 400, "dropout": 0.0,
}  # fmt: skip
LONG = {**SMALL, "steps": 6, "save_every": 4, "eval_every": 4, "keep": 9}
SHORT = {**SMALL, "steps": 12, "save_every": 4, "eval_every": 4, "keep": 9}
WHOLE = {**SHORT, "steps": 30, "save_every": 3, "dropout": 0.1}  # long enough to be ended


def in_words(settings: dict[str, Any]) -> list[str]:
    return [word for key, value in settings.items() for word in ("--" + key.replace("_", "-"), str(value))]


WORDS = in_words(SHORT)
RUNS: dict[str, dict[str, Any]] = {
    "adamw": {**LONG, "optimizer": "adamw", "micro_batch": 2},
    "muon": {**LONG, "optimizer": "muon", "n_layer": 3},
    "modern": {**LONG, "arch": "modern", "micro_batch": 1},
    "pairs": {**LONG, "pairs": True, "vocab_size": 270, "optimizer": "adamw", "block_size": 32, "batch_tokens": 264},
}
SAMPLE = SampleConfig(max_tokens=18)  # more than the context; each token of a tensor-parallel model takes 20 ms
TEXTS = {"pairs": "pairs.jsonl"}
RANK = int(os.environ.get("RANK", "0"))


def cut(run: str, copy: str, step: int) -> None:
    """Copies a run to what it was if it had been killed soon after a step."""
    shutil.copytree(run, copy)
    for path in Path(copy).glob("step-*"):
        if int(path.name[5:]) > step:
            shutil.rmtree(path)
    record = json.loads(Path(copy, "run.json").read_text())
    for key in ("ended", "result"):
        del record[key]
    Path(copy, "run.json").write_text(json.dumps(record))


def two() -> None:
    summed: dict[str, list[bool]] = {}
    for name, settings in RUNS.items():
        with summing() as summed[name]:
            gpt.train(TEXTS.get(name, "book.txt"), out=f"two/{name}", **settings)
    gpt.train("book.txt", out="two/dropout", **{**SHORT, "dropout": 0.1})
    gpt.train("book.txt", out="two/whole", **WHOLE)
    if RANK == 0:
        cut("two/dropout", "two/resumed", 4)
        cut("one/adamw", "two/from-one", 4)
    gpt.resume("two/resumed")
    heard: list[Any] = []
    gpt.resume("two/from-one", heard.append)
    with poisoned(), rollbacks() as rolled_back:
        gpt.train("book.txt", out="two/poisoned", listen=heard.append, **SHORT)
    with little_memory():
        gpt.train("book.txt", out="two/little", listen=heard.append, **{**SHORT, "steps": 4})
    notes = [event.text for event in heard if isinstance(event, events.Note)]
    told = {"notes": notes, "summed": summed, "rolled_back": rolled_back}
    Path(f"heard-{RANK}.json").write_text(json.dumps(told))


@contextlib.contextmanager
def summing() -> Iterator[list[bool]]:
    """Records for each backward pass of a micro-batch whether gradients were all-reduced."""
    whole, summed = stepping.Stepper._backward, []

    def backward(self: stepping.Stepper, *args: Any) -> torch.Tensor:
        summed.append(bool(self.wrapped.require_backward_grad_sync))
        return whole(self, *args)

    with mock.patch.object(stepping.Stepper, "_backward", backward):
        yield summed


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Makes the loss NaN three times, on rank 1 alone."""
    whole, calls = stepping.tied_cross_entropy, []

    def loss(*args: Any) -> torch.Tensor:
        calls.append(1)
        return whole(*args) * (math.nan if RANK == 1 and 6 < len(calls) <= 9 else 1)

    with mock.patch.object(stepping, "tied_cross_entropy", loss):
        yield


@contextlib.contextmanager
def rollbacks() -> Iterator[list[Any]]:
    """Yields, for each rollback, what this rank then has, as sums, and how many weights and moments it kept a copy of."""
    whole, found = Checkpointer.roll_back, []

    def roll_back(self: Checkpointer, **changes: Any) -> None:
        whole(self, **changes)
        kept = sum(name.startswith((WEIGHT, MOMENT)) for name in self.snapshot.tensors)
        parallel = self.parallel
        moments = parallel.optimizer.state(parallel.own)
        has = {
            name: float(each.double().abs().sum())
            for name, each in [*parallel.own.named_parameters(), *moments.items()]
        }
        found.append({"has": has, "kept": kept, "step": self.state.step})

    with mock.patch.object(Checkpointer, "roll_back", roll_back):
        yield found


@contextlib.contextmanager
def little_memory() -> Iterator[None]:
    """Gives rank 1 memory for one sequence at a time."""
    whole = GPT.trunk

    def trunk(self: GPT, idx: torch.Tensor, *rest: Any) -> torch.Tensor:
        if RANK == 1 and self.training and idx.size(0) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return whole(self, idx, *rest)

    with mock.patch.object(GPT, "trunk", trunk):
        yield


def broken() -> None:
    whole, calls = stepping.Stepper.step, []

    def step(*args: Any) -> Any:
        calls.append(1)
        if RANK == 1 and len(calls) == 6:
            raise RuntimeError("boom")
        return whole(*args)

    with mock.patch.object(stepping.Stepper, "step", step):
        command("--quiet", "-o", "broken")


def killed() -> None:
    """Kills rank 1 while rank 0 is in a collective of NCCL, which would not end by itself, whatever the signal."""
    whole, calls = stepping.Stepper.step, []

    def step(*args: Any) -> Any:
        calls.append(1)
        if len(calls) == 6:
            if RANK == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(300)
        return whole(*args)

    with mock.patch.object(stepping.Stepper, "step", step):
        command("--quiet", "-o", "killed")


def silent() -> None:
    """Rank 1 stays away from a collective for longer than its limit, as a machine without power would."""
    whole, calls = stepping.Stepper.step, []

    def step(*args: Any) -> Any:
        calls.append(1)
        if RANK == 1 and len(calls) == 6:
            time.sleep(6)
        return whole(*args)

    with mock.patch.object(stepping.Stepper, "step", step), mock.patch.object(world, "LIMIT", timedelta(seconds=2)):
        command("--quiet", "-o", "silent")


def uncompilable() -> None:
    """Trains with a compiler that only rank 0 has."""
    from torch._inductor import config

    heard: list[Any] = []
    if RANK == 1:
        config.cpp.cxx = ("/nowhere",)
    for name, settings in {"replicas": {}, "shards": {"shard": "full"}, "cut": {"tensor": 2}}.items():
        torch._dynamo.reset()
        gpt.train("book.txt", out=name, listen=heard.append, **{**SHORT, **settings, "compile": "on"})
    if RANK == 0:
        Path("heard.json").write_text(json.dumps([e.text for e in heard if isinstance(e, events.Note)]))


def otherwise() -> None:
    command("--quiet", "-o", "otherwise", "--seed", str(7 + RANK))


def command(*words: str) -> None:
    """Runs ``gpt train`` as a command, whose exit is abrupt in one of several processes."""
    from gpt_cli.main import run

    sys.argv = ["gpt", "train", "book.txt", *WORDS, *words]
    run()


if __name__ == "__main__":
    scenarios: dict[str, Callable[[], None]] = {
        "two": two, "broken": broken, "otherwise": otherwise, "killed": killed,
        "silent": silent, "uncompilable": uncompilable,
    }  # fmt: skip
    evaluation.SAMPLE = SAMPLE
    scenarios[sys.argv[1]]()
