"""Going on: N steps are k and N − k, bit for bit, whatever is in between."""

import json
import math
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import TINY, Done, make_text
from safetensors.torch import load_file
from test_cli import one_line_of_what_and_what_next

import gpt as library
from gpt import events
from gpt.errors import Interrupted, UserError, WorkError
from gpt.runs import folder
from gpt.training import loop
from gpt.training import step as stepping

Gpt = Callable[..., Done]
STEPS = 12
FAST: dict[str, Any] = {**TINY, "dtype": "float32", "vocab_size": 400, "steps": STEPS, "dropout": 0.1}

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGINT to send")


@pytest.fixture
def text(workdir: Path) -> Path:
    path = workdir / "book.txt"
    path.write_bytes(make_text().encode())
    return path


def interrupted_at(k: int, do: Callable[..., Any], kind: type[events.Event] = events.StepEvent) -> list[Any]:
    """Lets ``do`` train until an event of step k, and sends SIGINT then."""
    heard: list[Any] = []

    def strike(event: Any) -> None:
        heard.append(event)
        if isinstance(event, kind) and event.step == k:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(Interrupted, match=f"interrupted at step {k} of"):
        do(listen=strike)
    return heard


def state_of(run: Path) -> dict[str, torch.Tensor]:
    """All that the newest checkpoint of a run remembers: weights, moments, random states."""
    path = run / folder.checkpoints(run)[-1].name
    weights = next(path / name for name in ("model.safetensors", "adapter.safetensors") if (path / name).exists())
    return load_file(weights) | load_file(path / "training.safetensors")


def assert_same(one: Path, other: Path) -> None:
    a, b = state_of(one), state_of(other)
    assert set(a) == set(b)
    for name in a:
        assert torch.equal(a[name], b[name]), name
    says = [json.loads((run / folder.checkpoints(run)[-1].name / "training.json").read_text()) for run in (one, other)]
    for said in says:
        for key in ("step_seconds", "seconds", "metrics_bytes", "first_step"):
            del said["state"][key]
    assert says[0] == says[1]


def curve(run: Path) -> list[Any]:
    """What a run tells of its course, without times."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    kept = [line for line in lines if line["event"] in ("step", "eval", "sample", "rollback", "end")]
    return [{k: v for k, v in line.items() if k not in ("seconds", "tokens_per_second")} for line in kept]


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_any_k(text: Path, optimizer: str) -> None:
    settings: dict[str, Any] = {**FAST, "optimizer": optimizer, "eval_every": 4, "sample_every": 5, "save_every": 3}
    whole = library.train(text, out="whole", **settings)
    for k in (1, 2, 4, 5, 7, STEPS - 1, STEPS):
        run = Path(f"at-{k}")
        interrupted_at(k, lambda listen, run=run: library.train(text, out=run, listen=listen, **settings))
        assert folder.checkpoints(run)[-1].step == k
        result = library.resume(run)
        assert_same(run, whole.run)
        assert curve(run) == curve(whole.run)
        assert (result.val_loss, result.sample, result.steps) == (whole.val_loss, whole.sample, STEPS)
        assert result.checkpoint.name == whole.checkpoint.name


def test_interrupted_again_and_again(text: Path) -> None:
    whole = library.train(text, out="whole", **FAST)
    interrupted_at(2, lambda listen: library.train(text, out="parts", listen=listen, **FAST))
    for k in (3, 7, 8):
        heard = interrupted_at(k, lambda listen: library.resume("parts", listen))
        assert any(isinstance(event, events.ResumeEvent) for event in heard)
    library.resume("parts")
    assert_same(Path("parts"), whole.run)
    assert curve(Path("parts")) == curve(whole.run)


@pytest.mark.parametrize("kind", [events.EvalEvent, events.SampleEvent, events.SaveEvent])
def test_interrupted_between_steps(text: Path, kind: type[events.Event]) -> None:
    settings: dict[str, Any] = {**FAST, "eval_every": 4, "sample_every": 4, "save_every": 4}
    whole = library.train(text, out="whole", **settings)
    heard: list[Any] = []

    def strike(event: Any) -> None:
        heard.append(event)
        if isinstance(event, kind) and event.step >= 4:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(Interrupted):
        library.train(text, out="parts", listen=strike, **settings)
    library.resume("parts")
    assert_same(Path("parts"), whole.run)
    assert curve(Path("parts")) == curve(whole.run)
