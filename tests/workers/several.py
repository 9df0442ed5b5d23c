"""Helpers for multi-process tests."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from conftest import curve, make_text
from models import FAMILIES, SHAPES, loud, save
from parts import FAMILY_SHAPES
from ranks import SAMPLE, TEXTS

import gpt as library
from gpt.config.model import GPTConfig
from gpt.parallel.launch import LaunchResult, launch

RANKS, PARTS = (Path(__file__).with_name(name) for name in ("ranks.py", "parts.py"))


def write_texts() -> None:
    Path("book.txt").write_bytes(make_text().encode())
    pairs = [{"prompt": f"{n} =>", "completion": " " + "la" * (n % 7) + f" {n * n}"} for n in range(60)]
    Path("pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    preferences = [
        {**pair, "chosen": pair.pop("completion"), "rejected": " no" * (n % 5)}
        for n, pair in enumerate(map(dict, pairs))
    ]
    Path("preferences.jsonl").write_text("\n".join(map(json.dumps, preferences)))
    chats = [
        [{"role": "user", "content": pair["prompt"]}, {"role": "assistant", "content": pair["completion"]}]
        for pair in pairs
    ]
    Path("chats.jsonl").write_text("\n".join(json.dumps({"messages": messages}) for messages in chats))


def write_bases() -> None:
    """Saves base models of all families, one of them also as a GGUF file and one with bfloat16 weights."""
    for family in ("qwen2", "qwen3", "mistral"):
        save(Path(family), loud(SHAPES[family], spread=0.1))
    for family, shape in FAMILY_SHAPES.items():
        config = GPTConfig(257, 16, 2, 4, **FAMILIES[family] | shape)
        assert config.layout == family
        save(Path(f"{family}-base"), loud(config, spread=0.05))
    library.export("qwen2", "qwen2.gguf", dtype="f32")
    library.export("mistral", "mistral-bfloat16", dtype="bfloat16")


def train_all(place: Path, runs: Mapping[str, Mapping[str, Any]], script: Path) -> Path:
    """Trains each run in one process, in ``place``/one, then runs the script's scenario ``two``. Returns ``place``."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        patch.setattr("gpt.training.evaluation.SAMPLE", SAMPLE)
        write_texts()
        if script == PARTS:
            write_bases()
        for name, settings in runs.items():
            library.train(TEXTS.get(name, "book.txt"), out=f"one/{name}", **settings)
        assert launch([sys.executable, str(script), "two"], 2) == LaunchResult(0)
    return place


def event_values(run: Path, key: str, *kinds: str) -> list[Any]:
    """Returns the values of ``key`` in a run's events of ``kinds``."""
    return [line[key] for line in curve(run) if line["event"] in kinds]


def losses(run: Path) -> list[float]:
    return event_values(run, "loss", "step")


def assert_trained_alike(single: Path, several: Path, norm_tolerance: float, **loss_tolerance: float) -> None:
    """Compares losses and gradient norms. ``norm_tolerance`` is the relative tolerance of norms. ``loss_tolerance`` is
    passed to `pytest.approx` for losses."""
    assert losses(several) == pytest.approx(losses(single), **loss_tolerance)
    held_out = [event_values(run, "val_loss", "eval", "end") for run in (single, several)]
    assert held_out[1] == pytest.approx(held_out[0], **loss_tolerance)
    assert event_values(several, "grad_norm", "step") == pytest.approx(
        event_values(single, "grad_norm", "step"), rel=norm_tolerance
    )
