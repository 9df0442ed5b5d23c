"""Counts that only go down, in counts.toml: waits of the host and launches on a GPU, graphs, breaks and recompiles."""

import functools
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from conftest import ROOT, slow
from models import engine_of
from torch._dynamo.utils import counters

import gpt
from gpt import SampleConfig
from gpt.decoding import token_step, weights
from gpt.decoding.context import Context
from gpt.decoding.engine import Request
from gpt.device import Compute
from gpt.evaluate import Window, total_loss
from gpt.model.decoder import GPT
from gpt.training.optim import make_optimizer
from gpt.training.parallel import Single
from gpt.training.recipe import resolve
from gpt.training.state import Snapshot, TrainState
from gpt.training.step import Stepper

Disguise = Callable[..., Any]
COUNTS = tomllib.loads((ROOT / "tests" / "counts.toml").read_text(encoding="utf-8"))
CUDA = torch.device("cuda")


def stepper(compute: Compute, optimizer: Any = "muon", **settings: Any) -> Stepper:
    asked = gpt.TrainConfig(
        preset="nano", n_layer=2, n_head=2, n_embd=32, block_size=16, batch_tokens=64, micro_batch="2", steps=3,
        compile="off", dropout=0.0, optimizer=optimizer, **settings,
    )  # fmt: skip
    recipe = resolve(asked, compute, 10**6, 10**5, 101, False, lambda note: None)
    model = GPT(recipe.model).to(compute.device)
    optimizers = make_optimizer(model, recipe.optimizer, 0.1, compute.dtype)
    return Stepper(Single(model, optimizers, compute), recipe, lambda micro_batch: None)


IDS = np.zeros((4, 16), np.int64)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", slow("float16")])
@pytest.mark.parametrize("optimizer", ["muon", slow("adamw")])
def test_waits_of_training(disguise: Disguise, dtype: str, optimizer: str) -> None:
    found = {}
    with disguise() as device:
        steps = stepper(Compute(CUDA, getattr(torch, dtype)), optimizer)
        steps.step(IDS, IDS, 0.0).read()
        device.waits.clear()
        outcome = steps.step(IDS, IDS, 0.0)
        found["waits_of_a_step"] = len(device.waits)
        outcome.read()
        found["waits_of_a_step_that_is_read_late"] = len(device.waits)
        device.waits.clear()
        snapshot = Snapshot()
        snapshot.take(steps.parallel, steps.scaler, TrainState())
        save = "waits_of_a_save_of_a_scaled_loss" if steps.scaled else "waits_of_a_save"
        found[save] = len(device.waits)
        device.waits.clear()
        windows = [Window(0, 16 * n, IDS[0], IDS[0], 0) for n in range(4)]
        total_loss(steps.model, windows, steps.compute)
        found["waits_of_an_evaluation"] = len(device.waits)
    assert found == {name: COUNTS["training"][name] for name in found}


REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {"greedy": True},
    "compiled": {"greedy": True, "compile": "on"},
    "drawn": {},
    "filtered": {"top_k": 9, "top_p": 0.9, "min_p": 0.01},
    "penalties": {"repetition_penalty": 1.2},
    "logprobs": {"logprobs": 5},
    "beams": {"beam": 4},
}


def token(disguise: Disguise, rows: int, settings: dict[str, Any]) -> dict[str, int]:
    """Waits and launches of one step of decoding and of all that chooses its tokens."""
    config = SampleConfig(max_tokens=6, ignore_eot=True, **settings)
    width = rows * max(1, config.beam)
    with disguise() as device:
        torch.manual_seed(0)
        model = GPT(gpt.GPTConfig(vocab_size=101, block_size=64, n_layer=1, n_head=2, n_embd=32)).to(CUDA).eval()
        compute = Compute(CUDA, torch.bfloat16)
        weights.prepare(model, compute)
        step = functools.partial(token_step.next_tokens, model) if config.compile == "on" else None  # as if compiled
        context = Context(model, compute, width, 64, step)
        marks: list[tuple[Counter[str], Counter[str]]] = []
        name = "next_tokens" if step else "forward"
        taken = getattr(context, name)

        def marked(*args: Any) -> Any:
            marks.append((Counter(device.kinds()), Counter(device.launches)))
            return taken(*args)

        with mock.patch.object(context, name, marked):
            requests = [Request([1 + n, 2]) for n in range(rows)]
            for _ in engine_of(context, requests, config, eot=100).run():
                pass
    (waits, launches), (waits_after, launches_after) = marks[3:5]
    waits = waits_after - waits
    found = {"up": waits["host to device"], "down": waits.total() - waits["host to device"]}
    return found if config.beam else found | {"launches": (launches_after - launches).total()}


def test_waits_and_launches_of_a_token(disguise: Disguise) -> None:
    found = {name: token(disguise, 1, settings) for name, settings in REQUESTS.items()}
    assert found == COUNTS["token"]


@pytest.mark.slow
def test_waits_and_launches_of_a_token_of_eight_texts(disguise: Disguise) -> None:
    found = {name: token(disguise, 8, REQUESTS[name]) for name in ("greedy", "compiled", "drawn", "penalties")}
    assert found == COUNTS["token_of_eight_texts"]


# Compiling

GRAPHS = COUNTS["compiling"]


@contextmanager
def dynamo() -> Iterator[dict[str, Any]]:
    """While it lasts torch.compile stops where dynamo has looked into the code; at the end there are the counts."""
    found: dict[str, Any] = {}
    compile = torch.compile

    def looked_into(target: Any, **how: Any) -> Any:
        return compile(target, backend="eager", **{name: how[name] for name in how if name != "mode"})

    torch._dynamo.reset()
    counters.clear()
    with mock.patch.object(torch, "compile", looked_into):
        yield found
    found["graphs"] = counters["stats"]["unique_graphs"]
    found["breaks"] = sum(counters["graph_break"].values())
    found["recompiles"] = max(0, found["graphs"] - found.pop("forms", 1))
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # the compiler warns of its own doings
def test_graphs_of_training() -> None:
    """One for each half of all blocks, one for the last norm and one for the loss, through steps, evaluations and batches
    that grow."""
    with dynamo() as found:
        steps = stepper(Compute(torch.device("cpu"), torch.float32))
        steps.one_program = False  # as on a GPU
        steps.compile()
        for _ in range(3):
            steps.step(IDS, IDS, 0.01).read()
        with steps.eager():
            for length in (5, 16):
                total_loss(steps.model, [Window(0, 0, IDS[0][:length], IDS[0][:length], 0)], steps.compute)
        steps.step(IDS, IDS, 0.01).read()
        found["forms"] = 4
    assert found == {"graphs": GRAPHS["graphs_in_training"]} | {name: GRAPHS[name] for name in ("breaks", "recompiles")}


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("arch", ["gpt2", "modern"])
def test_graphs_of_decoding(arch: Any) -> None:
    """One for a model, through prompts of any length, texts past the context, and new requests."""
    with dynamo() as found:
        positions: Any = "rotary" if arch == "modern" else "learned"
        compute = Compute(torch.device("cpu"), torch.bfloat16)
        model = GPT(gpt.GPTConfig.of(arch, 101, 16, 2, 2, 32, positions=positions)).eval()
        weights.prepare(model, compute, packed=False)
        for prompts in ([[1]], [[1, 2, 3], [4]], [[5] * 20]):
            context = Context(model, compute, 2, 16, token_step.compiled(model, compute, pytest.fail))
            config = SampleConfig(max_tokens=40, ignore_eot=True)
            for _ in engine_of(context, map(Request, prompts), config, eot=100).run():
                pass
    assert found == {"graphs": GRAPHS["graphs_in_decoding"]} | {name: GRAPHS[name] for name in ("breaks", "recompiles")}
