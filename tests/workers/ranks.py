"""What the processes of `test_parallel.py` do: `main` runs a scenario by name, in each of them.

python tests/workers/ranks.py SCENARIO
"""

import contextlib
import json
import math
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import gpt
from gpt import events
from gpt.model.decoder import GPT
from gpt.training import step as stepping

SMALL: dict[str, Any] = {
    "n_layer": 2, "n_head": 2, "n_embd": 32, "block_size": 32, "batch_tokens": 256, "dtype": "float32",
    "sample_every": 0, "vocab_size": 400, "dropout": 0.0,
}  # fmt: skip
LONG = {**SMALL, "steps": 50, "save_every": 25, "eval_every": 25, "keep": 9}
SHORT = {**SMALL, "steps": 12, "save_every": 4, "eval_every": 4, "keep": 9}
WORDS = [word for key, value in SHORT.items() for word in ("--" + key.replace("_", "-"), str(value))]
RUNS: dict[str, dict[str, Any]] = {
    "adamw": {**LONG, "optimizer": "adamw", "micro_batch": 2},
    "muon": {**LONG, "optimizer": "muon", "n_layer": 3},
    "modern": {**LONG, "arch": "modern", "micro_batch": 1},
    "pairs": {**LONG, "pairs": True, "vocab_size": 270, "optimizer": "adamw", "batch_tokens": 264},
}
TEXTS = {"pairs": "pairs.jsonl"}
RANK = int(os.environ.get("RANK", "0"))


def cut(run: str, copy: str, step: int) -> None:
    """A copy of a run as one has it that was killed soon after a step."""
    shutil.copytree(run, copy)
    for path in Path(copy).glob("step-*"):
        if int(path.name[5:]) > step:
            shutil.rmtree(path)
    record = json.loads(Path(copy, "run.json").read_text())
    for key in ("ended", "result"):
        del record[key]
    Path(copy, "run.json").write_text(json.dumps(record))


def two() -> None:
    """All that comes to a good end."""
    summed: dict[str, list[bool]] = {}
    for name, settings in RUNS.items():
        with summing() as summed[name]:
            gpt.train(TEXTS.get(name, "book.txt"), out=f"two/{name}", **settings)
    gpt.train("book.txt", out="two/dropout", **{**SHORT, "dropout": 0.1})
    if RANK == 0:
        cut("two/dropout", "two/resumed", 4)
        cut("one/adamw", "two/from-one", 25)
    gpt.resume("two/resumed")
    heard: list[Any] = []
    gpt.resume("two/from-one", heard.append)
    with poisoned():
        gpt.train("book.txt", out="two/poisoned", listen=heard.append, **SHORT)
    with little_memory():
        gpt.train("book.txt", out="two/little", listen=heard.append, **SHORT)
    notes = [event.text for event in heard if isinstance(event, events.Note)]
    Path(f"heard-{RANK}.json").write_text(json.dumps({"notes": notes, "summed": summed}))


@contextlib.contextmanager
def summing() -> Iterator[list[bool]]:
    """Whether gradients were summed over processes, for each time that a micro-batch went backward."""
    whole, summed = stepping.Stepper._backward, []

    def backward(self: stepping.Stepper, *args: Any) -> torch.Tensor:
        summed.append(bool(self.wrapped.require_backward_grad_sync))
        return whole(self, *args)

    with mock.patch.object(stepping.Stepper, "_backward", backward):
        yield summed


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """In one process, the loss is no number three times."""
    whole, calls = stepping.tied_cross_entropy, []

    def loss(*args: Any) -> torch.Tensor:
        calls.append(1)
        return whole(*args) * (math.nan if RANK == 1 and 6 < len(calls) <= 9 else 1)

    with mock.patch.object(stepping, "tied_cross_entropy", loss):
        yield


@contextlib.contextmanager
def little_memory() -> Iterator[None]:
    """In one process, memory does for one sequence."""
    whole = GPT.trunk

    def trunk(self: GPT, idx: torch.Tensor, cache: object = None) -> torch.Tensor:
        if RANK == 1 and self.training and idx.size(0) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return whole(self, idx, cache)  # type: ignore[arg-type]

    with mock.patch.object(GPT, "trunk", trunk):
        yield


def broken() -> None:
    """An error in one process."""
    whole, calls = stepping.Stepper.step, []

    def step(*args: Any) -> Any:
        calls.append(1)
        if RANK == 1 and len(calls) == 6:
            raise RuntimeError("boom")
        return whole(*args)

    with mock.patch.object(stepping.Stepper, "step", step):
        command("--quiet", "-o", "broken")


def otherwise() -> None:
    """Other words for one process than for the other."""
    command("--quiet", "-o", "otherwise", "--seed", str(7 + RANK))


def command(*words: str) -> None:
    """``gpt train`` with words of its own, to its end as the command's: that of one among several is abrupt."""
    from gpt_cli.main import run

    sys.argv = ["gpt", "train", "book.txt", *WORDS, *words]
    run()


if __name__ == "__main__":
    scenarios: dict[str, Callable[[], None]] = {"two": two, "broken": broken, "otherwise": otherwise}
    scenarios[sys.argv[1]]()
