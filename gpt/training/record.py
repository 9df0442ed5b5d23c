"""What ``run.json`` says of a run."""

import dataclasses
import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

import torch

from gpt.config import TrainConfig
from gpt.device import Compute
from gpt.training.pairs import PairData
from gpt.training.prepare import Data
from gpt.training.recipe import Recipe


def run_record(
    texts: Sequence[str], config: TrainConfig, recipe: Recipe, compute: Compute, data: Data | PairData
) -> dict[str, Any]:
    """What ``run.json`` holds: enough to know what was done, with what, on what."""
    return {
        "format": 1,
        "started": datetime.now(UTC).isoformat(timespec="microseconds"),
        "texts": list(texts),
        "settings": dataclasses.asdict(config),
        "resolved": dataclasses.asdict(recipe),
        "compute": {
            "device": str(compute.device),
            "dtype": compute.dtype_name,
            "threads": torch.get_num_threads(),
        },
        "versions": {
            **{name: version(name) for name in ("torch", "tiktoken", "safetensors", "numpy")},
            "python": platform.python_version(),
            "platform": platform.platform(),
        },
        "tokenizer": {"name": data.tokenizer.name, "fingerprint": data.tokenizer.fingerprint},
        "tokens": {"train": len(data.train), "held_out": len(data.held_out)},
        "sources": data.sources(),
    }
