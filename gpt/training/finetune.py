"""Fine-tuning: the checkpoint that training starts from, adapters, and the defaults that differ."""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path

import torch
import torch.nn as nn
from torch import Tensor

from gpt.config import ARCHITECTURES, GPTConfig, Optimizer, Preset, TrainConfig
from gpt.errors import UserError
from gpt.model import lora
from gpt.model.decoder import GPT
from gpt.model.params import breakdown
from gpt.runs import checkpoint, folder, hub
from gpt.runs.adapter import Adapter
from gpt.runs.record import StartRecord
from gpt.text import chat
from gpt.text.tokenizer import Tokenizer

# Searched on nano; AdamW's rate is the customary one (benchmarks/defaults.md).
RATE: dict[Optimizer, float] = {"muon": 0.5, "adamw": 0.2}  # of the rate at which the preset is trained anew
LORA_RATE = 2.0  # the same for adapters
ADAMW_FROM = 100_000_000  # parameters; Muon's own step then costs as much as thousands of tokens
EPOCHS = 3.0  # passes over running text, and over pairs at least
PAIR_EPOCHS = 20.0  # passes over pairs at most, within the two limits below
PAIR_TOKENS = 2_000_000
PAIR_FLOPS = 3e13  # on a CPU, as 6 a parameter and token
CONTEXT = 1024  # tokens in training, where a model of rotary positions has a longer context
STEPS, PAIR_STEPS = 100, 400  # batches shrink until the default length has so many steps


@dataclass(frozen=True)
class InitCheckpoint:
    """The checkpoint that fine-tuning starts from. ``sha256`` are the checksums of its weight files, by name."""

    asked: str  # as the user named it
    path: Path
    model: GPTConfig
    tokenizer: Tokenizer
    sha256: dict[str, str]
    added: range = range(0)  # the ids of tokens that it does not have, and that fine-tuning adds

    def for_chat(self) -> "InitCheckpoint":
        """The same with a chat template: ChatML's where it has none, whose special tokens are added if need be."""
        tokenizer = chat.with_template(self.tokenizer)
        if tokenizer.vocab_size == self.tokenizer.vocab_size:
            return replace(self, tokenizer=tokenizer)
        model = replace(self.model, vocab_size=max(self.model.vocab_size, tokenizer.vocab_size))
        added = range(self.tokenizer.usable, tokenizer.vocab_size)
        return replace(self, tokenizer=tokenizer.for_model(model.vocab_size), added=added, model=model)

    def load(self, shape: GPTConfig, device: torch.device, dtype: torch.dtype = torch.float32) -> GPT:
        """Loads its weights as ``shape``, which is `model` but for another dropout or a shorter context."""
        own = checkpoint.peek(self.path)[0].vocab_size
        model = checkpoint.load(self.path, device, replace(shape, vocab_size=own), dtype=dtype).model.to(dtype).train()
        model.config = shape
        for name, table in (("wte.weight", model.wte), ("lm_head.weight", model.lm_head)):
            if table is not None:
                weight: Tensor = table.weight.detach()  # type: ignore[operator]
                table.weight = nn.Parameter(self.grown(name, weight))
        return model

    def grown(self, name: str, parameter: Tensor) -> Tensor:
        """A parameter of it, with a row for each added token where it has rows of tokens: the mean of all tokens that
        it knows (Hewitt 2021)."""
        if name not in ("wte.weight", "lm_head.weight") or not self.added:
            return parameter
        missing = parameter.new_empty((self.model.vocab_size - len(parameter), parameter.size(1)))
        rows = torch.cat([parameter, missing])
        rows[self.added.start : self.added.stop] = parameter[: self.added.start].float().mean(0).to(rows.dtype)
        return rows

    def record(self) -> StartRecord:
        """Its entry in ``run.json``."""
        return StartRecord(self.asked, str(self.path.absolute()), self.sha256)

    def adapter(self, rank: int, alpha: float) -> Adapter:
        """The description of adapters to it."""
        base = str(self.path.absolute())
        if hub.is_remote(self.asked):  # the cache may be emptied: a commit can be fetched again
            base = f"{self.asked.partition('@')[0]}@{self.path.name}"
        return Adapter(base, rank, alpha, self.sha256)


def find_init(config: TrainConfig) -> InitCheckpoint | None:
    """The checkpoint that ``--init`` names; None without it. Raises `UserError` if there is none, and for an option
    that asks for another shape or vocabulary than it has."""
    if config.init is None:
        return None
    path = folder.find_checkpoint(config.init)
    init = open_init(config, config.init, path, folder.weight_checksums(path))
    _check_shape(config, init.model)
    if config.lora_rank and init.added:
        raise UserError(
            f"{config.init} has no chat template, and lacks the special tokens for one, which adapters cannot learn",
            "leave out --lora-rank, or use a model with a chat template",
        )
    return init


def open_init(config: TrainConfig, asked: str, path: Path, sha256: dict[str, str]) -> InitCheckpoint:
    """The checkpoint at ``path``, to be trained as ``config`` says."""
    init = InitCheckpoint(asked, path, *checkpoint.peek(path), sha256)
    return init.for_chat() if config.chat else init


def _check_shape(config: TrainConfig, model: GPTConfig) -> None:
    """Raises `UserError` for options that contradict the checkpoint's shape."""
    hint = "leave it out: with --init, shape and vocabulary come from the checkpoint"
    if config.preset != "auto":
        raise UserError(f"--preset {config.preset} contradicts --init {config.init}", hint)
    if config.tokenizer != "auto":
        raise UserError(f"--tokenizer {config.tokenizer} contradicts --init {config.init}, which has its own", hint)
    asked_arch = ARCHITECTURES[config.arch] if config.arch else {}
    if any(getattr(model, name) != value for name, value in asked_arch.items() if name in ("norm", "qk_norm")):
        raise UserError(f"--arch {config.arch} contradicts --init {config.init}, which has another", hint)
    for name in (each.name for each in fields(GPTConfig) if each.name not in ("block_size", "dropout")):
        asked, has = getattr(config, name, None), getattr(model, name)
        if asked is not None and asked != has:
            raise UserError(f"--{name.replace('_', '-')} {asked} contradicts --init {config.init}: it has {has}", hint)
    if config.block_size is not None and config.block_size > model.block_size:
        raise UserError(
            f"block-size {config.block_size:,} exceeds the context of {config.init}, {model.block_size:,}",
            "a context can be shortened, not extended",
        )
    lora.find_roles(config.lora_targets or "all", model)


def training_shape(config: TrainConfig, model: GPTConfig, note: Callable[[str], None]) -> GPTConfig:
    """The shape in which a checkpoint is trained: with the context that was asked for, or at most `CONTEXT` of a long
    one, which ``note`` is told."""
    length = config.block_size or (min(CONTEXT, model.block_size) if model.positions == "rotary" else model.block_size)
    if config.block_size is None and length < model.block_size:
        note(f"training on sequences of {length:,} tokens; the model's context is {model.block_size:,} (--block-size)")
    return replace(model, block_size=length)


def usual_epochs(n_tokens: int, pairs: bool, model: GPTConfig, device: str) -> float:
    """The epochs of fine-tuning ``model``. Running text is read a few times, since more makes the held-out loss rise;
    pairs are to be answered exactly, so few of them are read often."""
    if not pairs:
        return EPOCHS
    limit = PAIR_FLOPS / (6 * breakdown(model).trainable) if device == "cpu" else math.inf
    return max(EPOCHS, min(PAIR_EPOCHS, min(PAIR_TOKENS, limit) / n_tokens))


def tuned(preset: Preset, tokens: float, steps: int) -> Preset:
    """The preset with batches small enough to read ``tokens`` in ``steps``."""
    return replace(preset, batch_tokens=max(1, min(preset.batch_tokens, round(tokens / steps))))
