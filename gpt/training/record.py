"""What ``run.json`` says of a run."""

import dataclasses
import platform
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

import torch

from gpt.config import TrainConfig
from gpt.device import Compute
from gpt.training.pairs import PairData
from gpt.training.prepare import Data
from gpt.training.recipe import Recipe
from gpt.training.start import Start

FORMAT = 1


def first_record(texts: Sequence[str], config: TrainConfig, size: str) -> dict[str, Any]:
    """What ``run.json`` holds before the text is tokenized: enough to begin again. ``size``: the preset, where that was
    chosen from the minutes."""
    return {
        "format": FORMAT,
        "started": now(),
        "texts": list(texts),
        "settings": dataclasses.asdict(config),
        "size": size,
    }


def run_record(
    begun: Mapping[str, Any],
    recipe: Recipe,
    compute: Compute,
    data: Data | PairData,
    start: Start | None,
    processes: int,
) -> dict[str, Any]:
    """What ``run.json`` holds from the first step on: enough to know what was done, with what, on what."""
    return {
        **begun,
        "resolved": dataclasses.asdict(recipe),
        "compute": {
            "device": str(compute.device),
            "dtype": compute.dtype_name,
            "threads": torch.get_num_threads(),
            "processes": processes,
        },
        "versions": versions(),
        "tokenizer": {"name": data.tokenizer.name, "fingerprint": data.tokenizer.fingerprint},
        "tokens": {"train": len(data.train), "held_out": len(data.held_out)},
        "sources": data.sources(),
        "init": start.record() if start else None,
    }


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
