"""Counts of host waits, kernel launches, graphs, breaks and recompiles match counts.toml exactly."""

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
from models import engine_of, tiny_stepper
from torch._dynamo.utils import counters

import gpt
from gpt import SampleConfig
from gpt.config.device import Compute
from gpt.decoding import weights
from gpt.decoding.context import Context
from gpt.decoding.engine import Request
from gpt.insight.evaluate import Window, total_loss
from gpt.model.decoder import GPT
from gpt.training.recipe import Recipe
from gpt.training.state import Snapshot, TrainState

Disguise = Callable[..., Any]
COUNTS = tomllib.loads((ROOT / "tests" / "counts.toml").read_text(encoding="utf-8"))
CUDA = torch.device("cuda")


IDS = np.zeros((4, 16), np.int64)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", slow("float16")])
@pytest.mark.parametrize("optimizer", ["muon", slow("adamw")])
def test_number_of_host_waits_in_training(disguise: Disguise, dtype: str, optimizer: str) -> None:
    waits = {}
    with disguise() as device:
        stepper = tiny_stepper(Compute(CUDA, getattr(torch, dtype)), optimizer)
        stepper.step(IDS, IDS, 0.0).read()
        device.waits.clear()
        outcome = stepper.step(IDS, IDS, 0.0)
        waits["waits_of_a_step"] = len(device.waits)
        outcome.read()
        waits["waits_of_a_step_that_is_read_late"] = len(device.waits)
        device.waits.clear()
        snapshot = Snapshot()
        snapshot.take(stepper.strategy, stepper.scaler, TrainState())
        save = "waits_of_a_save_of_a_scaled_loss" if stepper.scaler.is_enabled() else "waits_of_a_save"
        waits[save] = len(device.waits)
        device.waits.clear()
        windows = [Window(0, 16 * n, IDS[0], IDS[0], 0) for n in range(4)]
        total_loss(stepper.model, windows, stepper.compute)
        waits["waits_of_an_evaluation"] = len(device.waits)
    assert waits == {name: COUNTS["training"][name] for name in waits}


REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {"greedy": True},
    "drawn": {},
    "filtered": {"top_k": 9, "top_p": 0.9, "min_p": 0.01},
    "penalties": {"repetition_penalty": 1.2},
    "logprobs": {"logprobs": 5},
    "beams": {"beam": 4},
}


def count_step(disguise: Disguise, rows: int, settings: dict[str, Any]) -> dict[str, int]:
    """Counts the host waits and kernel launches of one decoding step."""
    config = SampleConfig(max_tokens=6, ignore_eot=True, **settings)
    width = rows * max(1, config.beam)
    with disguise() as device, mock.patch("gpt.system.cuda_graph.EAGER_CALLS", 0):
        torch.manual_seed(0)
        model = GPT(gpt.GPTConfig(vocab_size=101, block_size=64, n_layer=1, n_head=2, n_embd=32)).to(CUDA).eval()
        compute = Compute(CUDA, torch.bfloat16)
        weights.prepare(model, compute)
        context = Context(model, compute, width, 64)
        snapshots: list[tuple[Counter[str], Counter[str]]] = []
        original = context.forward

        def record_and_call(*args: Any) -> Any:
            snapshots.append((Counter(device.wait_counts()), Counter(device.launches)))
            return original(*args)

        with mock.patch.object(context, "forward", record_and_call):
            requests = [Request([1 + n, 2]) for n in range(rows)]
            for _ in engine_of(context, requests, config, eot=100).run():
                pass
    (waits, launches), (waits_after, launches_after) = snapshots[3:5]
    waits = waits_after - waits
    counts = {"up": waits["host to device"], "down": waits.total() - waits["host to device"]}
    return counts if config.beam else counts | {"launches": (launches_after - launches).total()}


def test_number_of_host_waits_and_launches_per_token(disguise: Disguise) -> None:
    counts = {name: count_step(disguise, 1, settings) for name, settings in REQUESTS.items()}
    assert counts == COUNTS["token"]


@pytest.mark.slow
def test_number_of_host_waits_and_launches_for_eight_sequences(disguise: Disguise) -> None:
    counts = {name: count_step(disguise, 8, REQUESTS[name]) for name in ("greedy", "drawn", "penalties")}
    assert counts == COUNTS["token_of_eight_texts"]


# Compiling

GRAPHS = COUNTS["compiling"]


@contextmanager
def count_graphs() -> Iterator[dict[str, Any]]:
    """Makes ``torch.compile`` stop after tracing. The yielded counts are filled on exit."""
    counts: dict[str, Any] = {}
    torch_compile = torch.compile

    def trace_only(target: Any, **options: Any) -> Any:
        return torch_compile(target, backend="eager", **{name: options[name] for name in options if name != "mode"})

    torch._dynamo.reset()
    counters.clear()
    with mock.patch.object(torch, "compile", trace_only):
        yield counts
    counts["graphs"] = counters["stats"]["unique_graphs"]
    counts["breaks"] = sum(counters["graph_break"].values())
    counts["recompiles"] = max(0, counts["graphs"] - counts.pop("forms", 1))
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # Compiler warnings are not errors here.
def test_number_of_graphs_in_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps, evaluations and growing batches share four graphs: a block's two halves, the last norm, the loss."""
    with count_graphs() as counts:
        stepper = tiny_stepper(Compute(torch.device("cpu"), torch.float32))
        monkeypatch.setattr(Recipe, "compiles_whole_step", lambda *_: False)  # GPU behavior
        stepper.compile()
        for _ in range(3):
            stepper.step(IDS, IDS, 0.01).read()
        for length in (5, 16):
            windows = [Window(0, 0, IDS[0][:length], IDS[0][:length], 0)]
            stepper.run_eagerly(functools.partial(total_loss, stepper.model, windows, stepper.compute))
        stepper.step(IDS, IDS, 0.01).read()
        counts["forms"] = 4
    assert counts == {"graphs": GRAPHS["graphs_in_training"]} | {
        name: GRAPHS[name] for name in ("breaks", "recompiles")
    }
