"""The record of a run as it begins, and from its first step on."""

import dataclasses
import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version

import torch

from gpt.config import TrainConfig
from gpt.device import Compute
from gpt.runs.record import FORMAT, Machine, RunRecord, TokenCounts, TokenizerRecord
from gpt.training.pairs import PairData
from gpt.training.prepare import Data
from gpt.training.recipe import Recipe
from gpt.training.start import Start


def first_record(texts: Sequence[str], config: TrainConfig, size: str) -> RunRecord:
    """The record before the text is tokenized: enough to begin again. ``size``: the preset, where that was chosen from
    the minutes."""
    return RunRecord(FORMAT, now(), list(texts), dataclasses.asdict(config), size)


def run_record(
    begun: RunRecord, recipe: Recipe, compute: Compute, data: Data | PairData, start: Start | None, processes: int
) -> RunRecord:
    """The record from the first step on: enough to know what was done, with what, on what."""
    return dataclasses.replace(
        begun,
        resolved=dataclasses.asdict(recipe),
        compute=Machine(str(compute.device), compute.dtype_name, torch.get_num_threads(), processes),
        versions=versions(),
        tokenizer=TokenizerRecord(data.tokenizer.name, data.tokenizer.fingerprint),
        tokens=TokenCounts(len(data.train), len(data.held_out)),
        sources=data.sources(),
        init=start.record() if start else None,
    )


def versions() -> dict[str, str]:
    """Of what computes."""
    return {
        **{name: version(name) for name in ("torch", "tiktoken", "safetensors", "numpy")},
        "python": platform.python_version(),
        "platform": platform.platform(),
    }


def now() -> str:
    """The time, so that text sorts as time does."""
    return datetime.now(UTC).isoformat(timespec="microseconds")
