"""The micro-batch that fits into memory. A CPU stands in for a GPU."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import FAST, Gpt, assert_same, one_line_of_what_and_what_next, train

import gpt as library
from gpt.config import events
from gpt.model.decoder import GPT
from gpt.runs import folder
from gpt.system.errors import WorkError
from gpt.training import memory_probe

Limit = Callable[..., None]


@pytest.fixture
def limit(monkeypatch: pytest.MonkeyPatch) -> Limit:
    """Makes forward passes of more than ``tokens`` fail with ``error``."""
    trunk = GPT.trunk

    def set_limit(tokens: int, error: Exception | None = None, in_evaluation: bool = False) -> None:
        def limited(self: GPT, idx: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
            if self.training != in_evaluation and idx.numel() > tokens:
                torch.rand(3)
                raise error or torch.OutOfMemoryError("CUDA out of memory")
            return trunk(self, idx, *rest, **options)

        monkeypatch.setattr(GPT, "trunk", limited)

    monkeypatch.setattr(memory_probe, "PROBED_DEVICES", ("cpu",))
    return set_limit


@pytest.mark.parametrize("kind", ["text", "pairs", "lora", "taught"])
def test_probe_leaves_no_trace(text: Path, limit: Limit, kind: str) -> None:
    """Dropout, moments and weights are those of a run with the smaller micro-batch from the start."""
    settings: dict[str, Any] = {"steps": 6, "dropout": 0.1, "save_every": 3, "eval_every": 3}
    source, longest = text, 32
    if kind == "pairs":
        lines = [json.dumps({"prompt": "b" * (n % 9), "completion": f"{n}"}) for n in range(40)]
        (source := Path("pairs.jsonl")).write_text("\n".join(lines))
        settings |= {"pairs": True, "tokenizer": "bytes", "vocab_size": None, "batch_tokens": 54}
        longest = 11
    elif kind == "taught":
        settings["teachers"] = 1
    elif kind == "lora":
        train(text, steps=2, out="other")
        settings |= {"init": "other", "lora_rank": 2, **dict.fromkeys(("n_layer", "n_head", "n_embd", "vocab_size"))}
    small, _ = train(source, micro_batch="2", out="small", **settings)
    limit(2 * longest)
    little, run_events = train(source, micro_batch="8", out="little", **settings)
    assert_same(little.run, small.run)
    assert json.loads((little.run / "run.json").read_text())["resolved"]["micro_batch"] == 2
    notes = [event.text for event in run_events if isinstance(event, events.Note)]
    assert "out of memory: from now on, 2 of 8 sequences at once" in notes


@pytest.mark.parametrize("in_evaluation", [False, True])
def test_sequence_that_does_not_fit_ends_the_run_before_it_starts(
    gpt: Gpt, text: Path, limit: Limit, in_evaluation: bool
) -> None:
    limit(31, in_evaluation=in_evaluation)
    done = gpt("train", text, "-o", "run", "--preset", "nano", "--block-size", "32", "--n-layer", "1", "--steps", "2")
    one_line_of_what_and_what_next(done, "cannot train on one sequence of 32 tokens at a time")
    assert not Path("run").exists()


def test_other_failures_of_the_probe_are_not_hidden(text: Path, limit: Limit) -> None:
    limit(0, ZeroDivisionError("boom"))
    with pytest.raises(ZeroDivisionError, match="boom"):
        train(text, steps=2, micro_batch="8")


def test_later_out_of_memory_ends_the_run_with_a_whole_checkpoint(
    gpt: Gpt, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The resume looks for the micro-batch again."""
    settings = {**FAST, "steps": 8, "save_every": 2, "eval_every": 9, "micro_batch": "8", "keep": 9}
    expected = train(text, out="whole", **settings)[0].run
    trunk = GPT.trunk

    def limited(self: GPT, idx: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
        if folder.checkpoints(Path("run")):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return trunk(self, idx, *rest, **options)

    with monkeypatch.context() as patch:
        patch.setattr(GPT, "trunk", limited)
        with pytest.raises(WorkError, match=r"^out of memory at step \d$") as failure:
            train(text, out="run", **settings)
    assert failure.value.hint == "resume with: gpt train --resume run --micro-batch 4"
    library.resume("run")
    assert_same(Path("run"), expected)
