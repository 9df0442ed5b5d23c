"""The script that the processes of `test_divided.py` run, on sharded models: each runs the scenario that is named.

python tests/workers/parts.py SCENARIO
"""

import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

from ranks import LONG, RANK, SAMPLE, SHORT, TEXTS, WHOLE, cut

import gpt
from gpt import events
from gpt.runs import checkpoint
from gpt.training import evaluation

# Runs of one process, and how two or four share them.
MODELS: dict[str, dict[str, Any]] = {
    "adamw": {**LONG, "optimizer": "adamw", "micro_batch": 4},
    # Of each shape of matrix there is one, so that one process has none to work on.
    "muon": {**LONG, "arch": "modern", "n_layer": 1, "n_head": 4, "n_kv_head": 2, "micro_batch": 2, "sample_every": 6},
    "pairs": {**LONG, "pairs": True, "vocab_size": 270, "block_size": 32, "batch_tokens": 264},
    "narrow": {**LONG, "dtype": "bfloat16"},
}
SHARDED, TOGETHER = {"shard": "full"}, {"tensor": 2}
TWO: dict[str, tuple[str, dict[str, Any]]] = {
    "adamw-sharded": ("adamw", SHARDED),
    "muon-sharded": ("muon", {**SHARDED, "recompute": True}),
    "pairs-sharded": ("pairs", SHARDED),
    "narrow-sharded": ("narrow", {**SHARDED, "recompute": True}),
    "adamw-together": ("adamw", {**TOGETHER, "recompute": True}),
    "muon-together": ("muon", TOGETHER),
}
BOTH = {**SHORT, "steps": 3, "shard": "full", "tensor": 2, "arch": "modern"}


def two() -> None:
    """Runs of two processes, and runs that are resumed with another number of processes or other shards."""
    for name, (model, how) in TWO.items():
        gpt.train(TEXTS.get(model, "book.txt"), out=name, **MODELS[model], **how)
    gpt.train("book.txt", out="dropout", **{**SHORT, "dropout": 0.1}, **SHARDED)
    gpt.train("book.txt", out="whole", **WHOLE, **SHARDED)
    with mock.patch.object(checkpoint, "MOST_BYTES", 60_000):
        gpt.train("book.txt", out="files", **{**SHORT, "steps": 4}, **SHARDED)
    if RANK == 0:
        cut("dropout", "resumed", 4)
        cut("one/muon", "from-one", 4)
        cut("adamw-sharded", "to-together", 4)
    heard: list[Any] = []
    gpt.resume("resumed")
    gpt.resume("from-one", heard.append, **SHARDED)
    gpt.resume("to-together", heard.append, shard="none", tensor=2)
    notes = [event.text for event in heard if isinstance(event, events.Note)]
    Path(f"heard-{RANK}.json").write_text(json.dumps(notes))


def four() -> None:
    """Tensor parallel within pairs of a sharded run of four."""
    gpt.train("book.txt", out="four", **BOTH)


if __name__ == "__main__":
    evaluation.SAMPLE = SAMPLE
    {"two": two, "four": four}[sys.argv[1]]()
