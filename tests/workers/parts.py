"""Worker script of `test_sharded_training.py`.

python tests/workers/parts.py SCENARIO
"""

import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

from ranks import RANK, SAMPLE, SIX_STEPS, TEXTS, TWELVE_STEPS, copy_killed_run, steady_clock

import gpt
from gpt.config import events
from gpt.runs import checkpoint
from gpt.training import evaluation, measuring

# Runs of one process. `SHARDED_RUNS` repeats them with two processes.
TUNED: dict[str, Any] = {
    "init": "", "steps": 6, "batch_tokens": 512, "lr": 0.02, "optimizer": "muon", "dtype": "float32", "dropout": 0.0,
    "eval_every": 4, "save_every": 4, "keep": 9, "sample_every": 6,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "adamw": {**SIX_STEPS, "optimizer": "adamw", "micro_batch": 4},
    # One layer has one matrix of each kind. For each kind, one of the two processes orthogonalizes none.
    "muon": {
        **SIX_STEPS,
        "arch": "modern",
        "n_layer": 1,
        "n_head": 4,
        "n_kv_head": 2,
        "micro_batch": 2,
        "sample_every": 6,
    },
    "pairs": {**SIX_STEPS, "pairs": True, "vocab_size": 270, "block_size": 32, "batch_tokens": 264},
    "narrow": {**SIX_STEPS, "dtype": "bfloat16"},
    # Base models of `several.write_bases`.
    "phases": {
        **TUNED,
        "init": None,
        "vocab_size": 300,
        "n_layer": 1,
        "n_embd": 32,
        "n_head": 2,
        "block_size": 16,
        "teachers": 1,
        "steps": 8,
    },
    "qwen2": {**TUNED, "init": "qwen2.gguf", "batch_tokens": 1024, "micro_batch": 2},
    "qwen3": {**TUNED, "init": "qwen3", "chat": True},
    "preferences": {**TUNED, "init": "qwen3", "preferences": True, "lr": 1e-3},
    "mistral": {**TUNED, "init": "mistral-bfloat16", "block_size": 16},
}
SHARDED = {"shard": "full"}
SHARDED_RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "adamw-sharded": ("adamw", SHARDED),
    "muon-sharded": ("muon", {**SHARDED, "recompute": True}),
    "pairs-sharded": ("pairs", SHARDED),
    "narrow-sharded": ("narrow", {**SHARDED, "recompute": True}),
    "phases-sharded": ("phases", SHARDED),
    "qwen2-sharded": ("qwen2", {**SHARDED, "micro_batch": 1}),
    "qwen3-sharded": ("qwen3", SHARDED),
    "preferences-sharded": ("preferences", SHARDED),
    "mistral-sharded": ("mistral", SHARDED),
}
# Runs from base models of `several.write_bases` with little context and odd widths.
FAMILY_SHAPES: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 24, "tied": True},
    "mistral": {
        "n_embd": 24, "head_dim": 4, "n_kv_head": 2, "n_inner": 40, "window": 5, "window_layers": (0, 1), "tied": False,
    },
    "qwen3": {"n_embd": 24, "head_dim": 16, "n_kv_head": 2, "window": 5, "window_layers": (0,), "tied": False},
}  # fmt: skip
FAMILY_RUNS: dict[str, dict[str, Any]] = {
    f"{name}-muon": {
        "init": f"{name}-base", "optimizer": "muon", "steps": 6, "lr": 0.0005, "warmup": 0, "batch_tokens": 128,
        "dtype": "float32", "sample_every": 0, "dropout": 0.0, "eval_every": 6, "save_every": 3,
        "keep": 9,
    }
    for name in FAMILY_SHAPES
}  # fmt: skip


def two() -> None:
    """Trains, and resumes with other numbers of processes or shards."""
    for name, (model, sharding) in SHARDED_RUNS.items():
        gpt.train(TEXTS.get(model, "book.txt"), out=name, **{**MODELS[model], **sharding})
    for name, settings in FAMILY_RUNS.items():
        gpt.train("book.txt", out=f"{name}-sharded", **settings, **SHARDED)
        if RANK == 0:
            copy_killed_run(f"one/{name}", f"{name}-resumed", 3)
        gpt.resume(f"{name}-resumed", **SHARDED)
    gpt.train("book.txt", out="dropout", **{**TWELVE_STEPS, "dropout": 0.1}, **SHARDED)
    with mock.patch.object(checkpoint, "MAX_SHARD_BYTES", 60_000):
        gpt.train("book.txt", out="files", **{**TWELVE_STEPS, "steps": 4}, **SHARDED)
    with steady_clock(6, ahead=RANK / 10):
        gpt.train("book.txt", out="timed", **{**MODELS["adamw"], **SHARDED, "steps": None, "minutes": 1.0})
    if RANK == 0:
        copy_killed_run("dropout", "resumed", 4)
        copy_killed_run("one/muon", "from-one", 4)
    run_events: list[Any] = []
    gpt.resume("resumed")
    gpt.resume("from-one", run_events.append, **SHARDED)
    notes = [event.text for event in run_events if isinstance(event, events.Note)]
    Path(f"heard-{RANK}.json").write_text(json.dumps(notes))


if __name__ == "__main__":
    evaluation.SAMPLE, measuring.PROBE_SECONDS = SAMPLE, 0.1
    {"two": two}[sys.argv[1]]()
