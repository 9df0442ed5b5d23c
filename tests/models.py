"""Tiny models for tests."""

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from conftest import facts

from gpt.config.device import Compute
from gpt.config.model import ARCHITECTURES, Arch, GPTConfig
from gpt.config.sample import SampleConfig
from gpt.config.train import TrainConfig
from gpt.decoding.context import Context
from gpt.decoding.engine import Engine, Request
from gpt.decoding.logits import Token
from gpt.exporting.source import SourceModel
from gpt.model.decoder import GPT
from gpt.model.params import named_parameters
from gpt.runs import checkpoint
from gpt.system import programs
from gpt.tokenizers.tokenizer import Tokenizer, bytes_tokenizer
from gpt.training.optim import make_optimizer
from gpt.training.recipe import plan
from gpt.training.step import Stepper
from gpt.training.strategy import Single

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CPU = Compute(torch.device("cpu"), torch.float32)
EOT = 49
# Properties of each family, written out because they are the oracle for `gpt.runs.hf`.
_LLAMA_LIKE = ARCHITECTURES["modern"] | {"qk_norm": False}
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": ARCHITECTURES["gpt2"],
    "llama": _LLAMA_LIKE,
    "mistral": _LLAMA_LIKE,
    "qwen2": _LLAMA_LIKE | {"biases": "qkv"},
    "qwen3": ARCHITECTURES["modern"],
}


def _small(**properties: Any) -> GPTConfig:
    return GPTConfig.of("modern", 257, 32, 2, 4, 32, **{"n_kv_head": 2, "n_inner": 48, **properties})


# A shape of each family, with what sets it apart
SHAPES = {
    "gpt2": GPTConfig(257, 32, 2, 4, 32),
    "llama": _small(qk_norm=False),
    "mistral": _small(qk_norm=False, window=8, window_layers=(0, 1), tied=False),
    "qwen2": _small(qk_norm=False, biases="qkv"),
    "qwen3": _small(head_dim=16),
}
PROMPTS = [[1, 2, 3], [4], list(range(12)), [9, 9, 9, 9], list(range(30)), [5, 6], [7]]


def tiny_model(block_size: int = 16, positions: str = "learned", arch: Arch = "gpt2", **properties: Any) -> GPT:
    return loud(GPTConfig.of(arch, 50, block_size, 2, 2, 16, positions=positions, **properties))


def loud(config: GPTConfig, seed: int = 0, spread: float = 0.3) -> GPT:
    """Returns a model with random weights everywhere: initial zeros and ones would hide mix-ups."""
    torch.manual_seed(seed)
    model = GPT(config).eval()
    for parameter in model.parameters():
        parameter.data += spread * torch.randn_like(parameter)
    return model


def save(path: Path, model: GPT, tokenizer: Tokenizer | None = None) -> Path:
    """Saves a model as a checkpoint, by default with the bytes tokenizer."""
    checkpoint.save(path, model, checkpoint.TokenizerFiles(tokenizer or bytes_tokenizer(), model.config), {"step": 1})
    return path


def tiny_stepper(compute: Compute, optimizer: Any = "muon", **settings: Any) -> Stepper:
    config = TrainConfig(
        preset="nano", n_layer=2, n_head=2, n_embd=32, block_size=16, batch_tokens=64, micro_batch="2", steps=3,
        compile="off", dropout=0.0, optimizer=optimizer, **settings,
    )  # fmt: skip
    recipe = plan(config, facts(vocab_size=101, device=compute.device.type, dtype=compute.dtype_name))
    torch.manual_seed(0)
    model = GPT(recipe.model).to(compute.device)
    optimizers = make_optimizer(model, recipe.optimizer, 0.1, compute.dtype)
    return Stepper(Single(model, optimizers, compute), recipe)


def push(context: Context, *new: list[int]) -> torch.Tensor:
    """Appends ids to the first slots and computes them; returns the residual stream (n, C) at each slot's last id."""
    slots = context.slots[: len(new)]
    for slot, ids in zip(slots, new, strict=True):
        slot.token_ids += ids
        if context.count_free_positions(slot) == 0:
            context.slide(slot)
    chunks = [(slot, len(slot.token_ids) - slot.computed) for slot in slots]
    ids = torch.tensor([id for slot in slots for id in slot.token_ids[slot.computed :]])
    x = context.forward(chunks, ids)
    return x[torch.tensor([count for _, count in chunks]).cumsum(0) - 1]


def engine_of(
    context: Context, requests: Iterable[Request], config: SampleConfig, seed: int = 0, eot: int = EOT
) -> Engine:
    engine = Engine(context, {eot})
    for request in requests:
        engine.add(replace(request, config=config, seed=seed))
    return engine


def batched(model: GPT, requests: list[Request], config: SampleConfig, rows: int, seed: int = 0) -> list[list[Token]]:
    """Returns the tokens of each request, generated in batches of ``rows`` requests."""
    tokens: list[list[Token]] = [[] for _ in requests]
    for event in engine_of(Context(model, CPU, rows), requests, config, seed).run():
        tokens[event.number] += event.tokens
    return tokens


def trace_without_compiling(key: object, trace: Any, note: Any, description: str) -> programs.Program:
    """Replaces `programs.find` by the traced graph, uncompiled."""
    graph, _ = trace()
    return lambda tensors: list(graph(*tensors))


def letters(*words: bytes) -> Any:
    """Returns a stand-in for a tokenizer, with the attributes that constraints use. Its last id is end-of-text."""
    eot = len(words)
    decode_bytes = lambda ids: b"".join([*words, b"<end>"][id] for id in ids)
    return SimpleNamespace(
        usable=eot + 1, decode_bytes=decode_bytes, all_specials={"<end>": eot}, opening=[eot], ends={eot}, eot=eot
    )


def source_of(model: GPT, tokenizer: Tokenizer | None = None) -> SourceModel:
    """Returns a model as `gpt export` opens it, by default with the bytes tokenizer."""
    weights = model.state_dict()
    return SourceModel(
        Path("nowhere"),
        model.config,
        tokenizer or bytes_tokenizer(),
        {name: partial(weights.__getitem__, name) for name in weights},
    )


_ROPE = "llama.rope.scaling."
# Metadata of a llama GGUF file, and the factor by which llama.cpp divides the RoPE frequencies.
ROPE_METADATA: list[tuple[dict[str, Any], float]] = [
    ({f"{_ROPE}type": "linear", f"{_ROPE}factor": 4.0}, 4),
    ({f"{_ROPE}factor": 4.0}, 4),
    ({"llama.rope.scale_linear": 4.0}, 4),
    ({f"{_ROPE}factor": 2.0, "llama.rope.scale_linear": 4.0}, 2),
    ({f"{_ROPE}type": "none", f"{_ROPE}factor": 4.0}, 1),
    ({f"{_ROPE}factor": 0.0, "llama.rope.scale_linear": 4.0}, 1),
    ({f"{_ROPE}factor": 1.0}, 1),
]


def keep_tensor(name: str, value: torch.Tensor, type_: Any) -> tuple[Any, Any]:
    return value.numpy(), type_


def rewritten(
    path: Path, metadata: dict[str, Any], change: Callable[[str, torch.Tensor, Any], tuple[Any, Any]] = keep_tensor
) -> Path:
    """Copies a GGUF file with the package gguf. ``metadata`` replaces keys, or with None deletes them. ``change``
    returns each tensor with its type."""
    import gguf

    reader, target = gguf.GGUFReader(path), path.with_name("rewritten.gguf")
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if not name.startswith(("GGUF.", "general.architecture")) and name not in metadata:
            kind, inner = field.types[0], field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(name, field.contents(), kind, inner)
    kinds = {str: "STRING", bool: "BOOL", int: "UINT32", float: "FLOAT32", list: "ARRAY"}
    for name, value in metadata.items():
        if value is not None and name != "general.architecture":
            writer.add_key_value(name, value, gguf.GGUFValueType[kinds[type(value)]])
    for tensor in reader.tensors:
        exact = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())
        data, type_ = change(tensor.name, exact, tensor.tensor_type)
        if data is not None:
            writer.add_tensor(tensor.name, data, raw_dtype=type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def ours_with(theirs: "PreTrainedModel", config: GPTConfig) -> GPT:
    model = GPT(config).eval()
    stored = checkpoint.from_stored(config, theirs.state_dict().__getitem__)
    model.load_state_dict({name: get() for name, get in stored.items()})
    return model


def rank_parameters(config: GPTConfig, ranks: int) -> int:
    """Returns the number of trained parameters on rank 0 of sharded ranks, which has the most.

    Every parameter has a gradient. AdamW keeps two moments per parameter; Muon keeps one, only for the blocks'
    matrices.
    """
    table = named_parameters(config).values()
    return sum(-(-p.shape[0] // ranks) * math.prod(p.shape[1:]) for p in table)
