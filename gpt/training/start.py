"""The model that fine-tuning starts from: found, compared with what was asked for, and made ready to train."""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from gpt.config import GPTConfig, Optimizer, Preset, TrainConfig
from gpt.errors import UserError
from gpt.model.decoder import GPT
from gpt.model.params import breakdown
from gpt.parallel.world import World
from gpt.runs import checkpoint, folder
from gpt.runs.record import StartRecord
from gpt.text.tokenizer import Tokenizer

# Searched on nano; AdamW's rate is the customary one (docs/defaults.md).
RATE: dict[Optimizer, float] = {"muon": 0.5, "adamw": 0.2}  # of a model's rate from nothing
LORA_RATE = 2.0  # the same for adapters
ADAMW_FROM = 100_000_000  # parameters; Muon's own step then costs as much as thousands of tokens
EPOCHS = 3.0  # passes over running text, and over pairs at least
PAIR_EPOCHS = 20.0  # passes over pairs at most, within the two limits below
PAIR_TOKENS = 2_000_000
PAIR_FLOPS = 3e13  # on a CPU, as 6 a parameter and token
STEPS, PAIR_STEPS = 100, 400  # batches shrink until the default length has so many steps


@dataclass(frozen=True)
class Start:
    """A model to go on from. ``sums``: sha256 of its files of weights, by name."""

    asked: str  # the user's words
    path: Path
    model: GPTConfig
    tokenizer: Tokenizer
    sums: dict[str, str]

    def load(self, shape: GPTConfig, device: torch.device) -> GPT:
        """Its weights in ``shape``: its own, but for another dropout or a shorter context."""
        return checkpoint.load(self.path, device, shape).model.train()

    def record(self) -> StartRecord:
        """The part of ``run.json`` that names it."""
        return StartRecord(self.asked, str(self.path.absolute()), self.sums)


def find_start(config: TrainConfig) -> Start | None:
    """The model that ``--init`` names, if it does. Raises `UserError` where there is none, or for an option that asks
    for another shape or vocabulary than it has."""
    if config.init is None:
        return None
    path = folder.find_checkpoint(config.init)
    model, tokenizer = checkpoint.look(path)
    refuse_others(config, model)
    return Start(config.init, path, model, tokenizer, folder.weight_sums(path))


def shared_start(world: World, find: Callable[[], Start | None]) -> Start | None:
    """In all processes the model to start from that the first one finds. Others look at the same folder."""
    found: Start | None = None

    def said() -> dict[str, Any] | None:
        nonlocal found
        found = find()
        return None if found is None else {"asked": found.asked, "path": str(found.path), "sums": found.sums}

    def opened(asked: str, path: str, sums: dict[str, str]) -> Start:
        return found or Start(asked, Path(path), *checkpoint.look(Path(path)), sums)

    place = world.decided(said)
    return None if place is None else world.together(lambda: opened(**place))


def refuse_others(config: TrainConfig, model: GPTConfig) -> None:
    """Raises `UserError` for options that contradict the model to start from. ``--arch gpt2`` is the default, and so no
    contradiction."""
    hint = "leave it out: --init takes shape and vocabulary from the checkpoint"
    if config.preset != "auto":
        raise UserError(f"--preset {config.preset} contradicts --init {config.init}", hint)
    if config.tokenizer != "auto":
        raise UserError(f"--tokenizer {config.tokenizer} contradicts --init {config.init}, which has its own", hint)
    if config.arch == "modern" != model.arch:
        raise UserError(f"--arch modern contradicts --init {config.init}: it is {model.arch}", hint)
    for name in (each.name for each in fields(GPTConfig) if each.name not in ("arch", "block_size", "dropout")):
        asked, has = getattr(config, name, None), getattr(model, name)
        if asked is not None and asked != has:
            raise UserError(f"--{name.replace('_', '-')} {asked} contradicts --init {config.init}: it has {has}", hint)
    if config.block_size is not None and config.block_size > model.block_size:
        raise UserError(
            f"block-size {config.block_size:,} is more than the {model.block_size:,} of {config.init}",
            "a context can be cut, not lengthened",
        )


def usual_epochs(n_tokens: int, pairs: bool, model: GPTConfig, device: str) -> float:
    """How often to read what ``model`` is fine-tuned on. Running text is read a few times, since more makes the
    held-out loss rise; pairs are to be given back, and few of them are read often."""
    if not pairs:
        return EPOCHS
    limit = PAIR_FLOPS / (6 * breakdown(model).trainable) if device == "cpu" else math.inf
    return max(EPOCHS, min(PAIR_EPOCHS, min(PAIR_TOKENS, limit) / n_tokens))


def tuned(preset: Preset, tokens: float, steps: int) -> Preset:
    """A preset whose batches are small enough to read ``tokens`` in so many steps."""
    return replace(preset, batch_tokens=max(1, min(preset.batch_tokens, round(tokens / steps))))
