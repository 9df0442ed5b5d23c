"""Fine-tuning: the base model, adapters, and the defaults that differ from pretraining."""

import math
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from gpt.chat import chat
from gpt.config.model import ARCHITECTURES, GPTConfig, Preset
from gpt.config.train import BaseDtype, Optimizer, TrainConfig
from gpt.decoding import native
from gpt.model import lora
from gpt.model.decoder import GPT, Block
from gpt.model.params import breakdown
from gpt.model.quantize import BITS, Quantized, QuantizedLinear, quantize_model
from gpt.runs import checkpoint, folder, gguf_model, hub
from gpt.runs.adapter import Adapter
from gpt.runs.record import StartRecord
from gpt.system.errors import UserError, warn
from gpt.tokenizers.tokenizer import Tokenizer

# Factors that multiply the preset's learning rate for training from scratch. Muon's was tuned on nano, AdamW's is
# customary (benchmarks/defaults.md).
LR_FACTOR: dict[Optimizer, float] = {"muon": 0.5, "adamw": 0.2}
LORA_LR_FACTOR = 2.0
SCORED_LR_FACTOR = 0.05  # multiplies both for preferences and rewards, whose losses have much steeper gradients
BETA = 0.1  # default of ``--beta``, as in TRL
GROUP, ANSWER_TOKENS = 16, 256  # defaults of ``--group`` and, in long contexts, of ``--answer-tokens``
# From this size, AdamW is the default, because a Muon step costs as much as thousands of tokens.
MIN_ADAMW_PARAMETERS = 100_000_000
MIN_EPOCHS = 3.0  # default epochs for text; pairs get at least as many
MAX_PAIR_EPOCHS = 20.0
MAX_PAIR_TOKENS = 2_000_000
MAX_PAIR_FLOPS = 3e13  # compute budget for pairs on a CPU, at 6 FLOPs per parameter and token
CONTEXT = 1024  # default maximum training context for RoPE models
STEPS, PAIR_STEPS = 100, 400  # minimum steps of default runs on text and on pairs; batches shrink to reach them


@dataclass(frozen=True)
class InitCheckpoint:
    """The base model of fine-tuning. ``sha256`` maps the names of its weight files to checksums."""

    name: str  # the value of ``--init``
    path: Path
    model: GPTConfig
    tokenizer: Tokenizer
    sha256: dict[str, str]
    added: range = range(0)  # ids of special tokens that fine-tuning adds

    def with_chat_template(self) -> "InitCheckpoint":
        """Returns the base model with its chat template, or with ChatML and its special tokens."""
        tokenizer = chat.with_template(self.tokenizer)
        if tokenizer.vocab_size == self.tokenizer.vocab_size:
            return replace(self, tokenizer=tokenizer)
        model = replace(self.model, vocab_size=max(self.model.vocab_size, tokenizer.vocab_size))
        added = range(self.tokenizer.usable, tokenizer.vocab_size)
        return replace(self, tokenizer=tokenizer.for_model(model.vocab_size), added=added, model=model)

    def load(
        self,
        shape: GPTConfig,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        base_dtype: BaseDtype | None = "full",
    ) -> GPT:
        """Loads the weights. ``shape`` can have a different dropout and a shorter context than `model`. By default, all
        weights are in ``dtype``; with another ``base_dtype``, the blocks' matrices are quantized, or with None stay
        as they are in the file."""
        own_shape = replace(shape, vocab_size=checkpoint.open_weights(self.path)[0].vocab_size)
        finish = None if base_dtype == "full" else partial(_keep_quantized, base_dtype, device)
        keep_blocks = base_dtype is None and device.type == "cpu"
        model = checkpoint.load_model(self.path, device, own_shape, dtype, finish=finish, keep_blocks=keep_blocks)
        model = model.to(dtype).train()
        model.config = shape
        for name, table in (("wte.weight", model.wte), ("lm_head.weight", model.lm_head)):
            if table is not None and self.added:
                weight: Tensor = table.weight.detach()  # type: ignore[operator]
                table.weight = nn.Parameter(self.add_token_rows(name, weight))
        return model

    def add_token_rows(self, name: str, parameter: Tensor) -> Tensor:
        """Adds a row for each new token to an embedding matrix: the mean of the existing tokens' rows (Hewitt 2021).
        Returns any other parameter unchanged."""
        if name not in ("wte.weight", "lm_head.weight") or not self.added:
            return parameter
        new_rows = parameter.new_empty((self.model.vocab_size - len(parameter), parameter.size(1)))
        rows = torch.cat([parameter, new_rows])
        rows[self.added.start : self.added.stop] = parameter[: self.added.start].float().mean(0).to(rows.dtype)
        return rows

    @property
    def quantized_bytes(self) -> int:
        """The size of a quantized GGUF file. 0 for another model."""
        is_quantized = bool(gguf_model.quantized_types(self.path))
        return sum(file.stat().st_size for file in folder.weight_files(self.path)) if is_quantized else 0

    def record(self) -> StartRecord:
        """Returns the model's entry in ``run.json``."""
        return StartRecord(self.name, str(self.path.absolute()), self.sha256)

    def adapter(self, rank: int, alpha: float) -> Adapter:
        """Returns the description of an adapter of this base model."""
        base = str(self.path.absolute())
        if hub.is_remote(self.name):  # If the cache is emptied, the commit can be downloaded again.
            base = f"{self.name.partition('@')[0]}@{self.path.name}"
        return Adapter(base, rank, alpha, self.sha256)


def _keep_quantized(base_dtype: BaseDtype | None, device: torch.device, module: nn.Module) -> None:
    """Quantizes the matrices of blocks to ``base_dtype``, if it is not None, and lets products restore them."""
    for block in (each for each in module.modules() if isinstance(each, Block)):
        if base_dtype is not None:
            quantize_model(block, BITS[base_dtype])
        linears: list[Any] = [each for each in block.modules() if isinstance(each, QuantizedLinear)]
        library = native.find(warn) if linears and device.type == "cpu" else None
        for each in linears:
            if library is not None:
                each.weight = native.StoredMatrix(library, each.weight)
            elif isinstance(each.weight, Quantized):
                each.weight = each.weight.map(lambda part: part.to(device))


def find_init(config: TrainConfig) -> InitCheckpoint | None:
    """Returns the base model that ``--init`` names, or None without ``--init``. Raises `UserError` if there is no such
    checkpoint, or if an option contradicts its shape or vocabulary."""
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


def open_init(config: TrainConfig, name: str, path: Path, sha256: dict[str, str]) -> InitCheckpoint:
    """Returns the base model at ``path``, with a chat template for ``--chat``."""
    init = InitCheckpoint(name, path, *checkpoint.peek(path), sha256)
    return init.with_chat_template() if config.chat else init


def _check_shape(config: TrainConfig, model: GPTConfig) -> None:
    hint = "leave it out: with --init, shape and vocabulary come from the checkpoint"
    if config.preset != "auto":
        raise UserError(f"--preset {config.preset} contradicts --init {config.init}", hint)
    if config.tokenizer != "auto":
        raise UserError(f"--tokenizer {config.tokenizer} contradicts --init {config.init}, which has its own", hint)
    requested_arch = ARCHITECTURES[config.arch] if config.arch else {}
    if any(getattr(model, name) != value for name, value in requested_arch.items() if name in ("norm", "qk_norm")):
        raise UserError(f"--arch {config.arch} contradicts --init {config.init}, which has another", hint)
    for name in (field.name for field in fields(GPTConfig) if field.name not in ("block_size", "dropout")):
        requested, actual = getattr(config, name, None), getattr(model, name)
        if requested is not None and requested != actual:
            message = f"--{name.replace('_', '-')} {requested} contradicts --init {config.init}: it has {actual}"
            raise UserError(message, hint)
    if config.block_size is not None and config.block_size > model.block_size:
        message = f"block-size {config.block_size:,} exceeds the context of {config.init}, {model.block_size:,}"
        raise UserError(message, "a context can be shortened, not extended")
    lora.find_roles(config.lora_targets or "all", model)


def training_shape(config: TrainConfig, model: GPTConfig) -> GPTConfig:
    """Returns ``model`` with the context that ``config`` sets for training. By default this is the model's own context,
    but with RoPE at most `CONTEXT`."""
    length = config.block_size or (min(CONTEXT, model.block_size) if model.positions == "rotary" else model.block_size)
    return replace(model, block_size=length)


def choose_epochs(n_tokens: int, pairs: bool, model: GPTConfig, device: str) -> float:
    """Returns the default epochs of fine-tuning. More epochs of text would raise the held-out loss. Small sets of pairs
    get more epochs, so that the model memorizes them."""
    if not pairs:
        return MIN_EPOCHS
    limit = MAX_PAIR_FLOPS / (6 * breakdown(model).trainable) if device == "cpu" else math.inf
    return max(MIN_EPOCHS, min(MAX_PAIR_EPOCHS, min(MAX_PAIR_TOKENS, limit) / n_tokens))


def shrink_batch(preset: Preset, tokens: float, steps: int) -> Preset:
    """Shrinks the preset's batches so that a run on this many ``tokens`` takes at least ``steps`` steps."""
    return replace(preset, batch_tokens=max(1, min(preset.batch_tokens, round(tokens / steps))))
