"""The model that fine-tuning starts from: found, compared with what was asked for, and made ready to train."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from gpt.config import GPTConfig, Preset, TrainConfig
from gpt.errors import UserError
from gpt.model.decoder import GPT
from gpt.parallel.world import World
from gpt.runs import checkpoint, folder
from gpt.runs.record import StartRecord
from gpt.text.tokenizer import Tokenizer

RATE = 0.1  # of the rate that a model of this size is trained with from nothing; adapters take all of it
EPOCHS = 3.0  # the default length
LEAST_STEPS = 100  # batches shrink until the default length has so many


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
    for name in ("positions", "n_layer", "n_head", "n_embd", "vocab_size"):
        asked, has = getattr(config, name), getattr(model, name)
        if asked is not None and asked != has:
            raise UserError(f"--{name.replace('_', '-')} {asked} contradicts --init {config.init}: it has {has}", hint)
    if config.block_size is not None and config.block_size > model.block_size:
        raise UserError(
            f"block-size {config.block_size:,} is more than the {model.block_size:,} of {config.init}",
            "a context can be cut, not lengthened",
        )


def tuned(preset: Preset, epochs: float, n_tokens: int) -> Preset:
    """A preset for a text of ``n_tokens`` that is read ``epochs`` times: batches small enough for some steps."""
    return replace(preset, batch_tokens=max(1, min(preset.batch_tokens, round(epochs * n_tokens / LEAST_STEPS))))
